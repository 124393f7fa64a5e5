"""Mixtures of experts in training: recomputation, evaluation, skipped steps, and batches shared by replicas."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt
from megapar_models.families.mixtral import MixtralModel
from torch import Tensor

from megapar.base.grid import coordinates, expert_rank_groups
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config import validate as checks
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config, ParallelConfig, TrainConfig
from megapar.expert_parallel.balance import Router
from megapar.observe.metrics import tally_load
from megapar.step.evaluation import evaluate
from megapar.step.state import TrainState
from megapar.step.step import train_step
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.grid import DENSE_BETWEEN, SHARED, SIGMOID, Layout, make_state, micro_batches
from tests.support.runs import Bits, assert_bitwise, bits
from tests.support.sweeps import slow_but
from tools import plot


def test_replicas_that_share_experts_need_equal_numbers_of_micro_batches() -> None:
    """For every small grid in every order: refused if, and only if, ranks of two replicas are in one group of experts.

    Otherwise a replica with fewer micro-batches would not take part in an exchange.
    """
    mixture = MixtralModel(family="mixtral", moe=MoEConfig(num_experts=8))
    orders = ["-".join(axes) for axes in itertools.permutations(("tp", "cp", "dp", "pp"))]
    refused = 0
    for tp, cp, dp, order in itertools.product((1, 2, 3), (1, 2), (2, 3, 4), orders):
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": 2}
        ranks = tp * cp * dp
        for ep, etp in itertools.product(range(1, ranks + 1), range(1, ranks + 1)):
            if ranks % (ep * etp):
                continue
            expert_sizes = {"etp": etp, "ep": ep, "expert_grad": ranks // (ep * etp)}
            groups = [g for axis in ("ep", "etp") for g in expert_rank_groups(sizes, expert_sizes, [axis], order)]
            shared = any(len({coordinates(rank, sizes, order)["dp"] for rank in group}) > 1 for group in groups)
            parallel = ParallelConfig(tp=tp, cp=cp, dp=dp, pp=2, ep=ep, etp=etp, order=order)
            for batch in (dp, dp + 1):
                config = Config(mixture, parallel, TrainConfig(global_batch_size=batch))
                problems = list(checks._batch(config))
                assert bool(problems) == (shared and batch % dp > 0), (sizes, expert_sizes, order, batch)
                refused += len(problems)
    assert refused > 100


def test_a_ramp_that_replicas_cannot_share_is_refused_with_one_that_they_can() -> None:
    parallel = ParallelConfig(dp=4, ep=4, etp=1)
    config = Config(MixtralModel(family="mixtral", moe=MoEConfig(num_experts=8)), parallel)
    ramp = replace(config, train=TrainConfig(global_batch_size=12, batch_ramp=(2, 2, 30)))
    (problem,) = checks._batch(ramp)
    assert problem.endswith("a multiple of 4; use 4 4 30")
    assert not list(checks._batch(replace(ramp, train=replace(ramp.train, batch_ramp=(4, 4, 30)))))


def router_state(state: TrainState) -> list[Tensor]:
    routers = [m for stage in state.stages.values() for m in stage.modules() if isinstance(m, Router)]
    return [x.clone() for router in routers for x in (router.bias, router.last_counts, router.step_counts)]


def of_recompute(layout: Layout) -> list[Bits]:
    """Weights, optimizer state and routers' state after two steps in bf16: a different rounding shows there."""
    found = []
    for recompute, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 2)):
        config = replace(layout, recompute=recompute, every=every).config("bf16")
        state = make_state(config)
        for step in range(2):
            train_step(state, micro_batches(config, state.ctx, step))
        routers = {f"router {number}": x for number, x in enumerate(router_state(state))}
        found.append(bits(state) | routers)
    return found


@pytest.mark.parametrize(
    "layout",
    slow_but(
        [0],
        [
            Layout(SHARED, dp=2, ep=2, micro_batch_size=3),
            Layout(DENSE_BETWEEN, tp=2, cp=2, ep=4, etp=1, sequence_parallel=True, micro_batch_size=6),
        ],
    ),
    ids=["dp2-ep2", "tp2-cp2-ep4"],
)
def test_recomputation_changes_no_bit(layout: Layout) -> None:
    """Fault moe-counted-twice: the state of routers too."""
    for first, *others in run_ranks(layout.world, of_recompute, layout):
        for other in others:
            assert_bitwise(other, first, "recomputed")


def test_an_evaluation_and_a_skipped_step_leave_the_balance_as_it_is() -> None:
    """A step with an overflow in fp16 has moved no weight, and must move no bias."""
    config = Layout(SIGMOID, micro_batch_size=6).config("fp16")
    state = make_state(config)
    assert train_step(state, micro_batches(config, state.ctx, 0)).finite
    before = router_state(state)
    assert any(x.any() for x in before)
    evaluate(state, micro_batches(config, state.ctx, 1))
    assert all(map(torch.equal, router_state(state), before))
    state.loss_scale.scale = 2.0**60
    assert train_step(state, micro_batches(config, state.ctx, 1)).overflowed
    assert all(map(torch.equal, router_state(state), before))
    state.loss_scale.scale = 2.0**8
    assert train_step(state, micro_batches(config, state.ctx, 1)).finite
    assert not all(map(torch.equal, router_state(state), before))


# A mixture as a program

MIXTURE = (
    *("--model.family", "mixtral", "--model.hidden_size", "32", "--model.num_hidden_layers", "2"),
    *("--model.vocab_size", "64", "--model.moe.num_experts", "5", "--model.moe.moe_intermediate_size", "24"),
    *("--parallel.dp", "2", "--parallel.ep", "2", "--launch.nproc", "2", "--launch.device", "cpu"),
    *("--train.seq_length", "16", "--train.global_batch_size", "4", "--train.steps", "4", "--checkpoint.every", "2"),
    *("--log.every", "2"),
)


def stored(checkpoint: Path) -> Bits:
    """Every tensor of a checkpoint."""
    manifest = read_manifest(checkpoint)
    with Reader(checkpoint, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


@pytest.mark.parametrize(
    ("balance", "state"),
    [
        (("global", "--model.moe.router_aux_loss_coef", "0.5"), "training.layers.0.mlp.router.last_counts"),
        (("bias", "--model.moe.router_bias_update_rate", "0.002"), "buffer.layers.0.mlp.router.bias"),
    ],
    ids=["global", "bias"],
)
def test_a_mixture_that_resumes_is_bitwise_the_one_that_did_not_stop(
    balance: tuple[str, ...], state: str, tmp_path: Path
) -> None:
    """The state of routers decides the next step: without it in the checkpoint, weights would differ."""
    flags = (*MIXTURE, "--model.moe.balance", *balance)
    whole = program.run(*flags, "--run_dir", "whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    middle, last = "checkpoints/step_00000002", "checkpoints/step_00000004"
    assert stored(tmp_path / "whole" / middle)[state].any()  # else a run that forgets it would pass
    resumed = ("--checkpoint.resume", str(tmp_path / "whole" / middle), "--run_dir", "resumed")
    again = program.run(*flags, *resumed, cwd=tmp_path)
    assert again.code == 0, again.err
    assert_bitwise(stored(tmp_path / "resumed" / last), stored(tmp_path / "whole" / last), "resumed")
    assert "experts over ep 2" in whole.out
    assert "fullest expert" in whole.out
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [len(line["expert_load"]) for line in lines] == [2, 2, 2, 2]
    # Logged are the first step, the last one and every second one. Each of 64 tokens chose 2 experts.
    assert ["expert_counts" in line for line in lines] == [True, True, False, True]
    assert [sum(row) for row in lines[-1]["expert_counts"].values()] == [128, 128]
    assert plot.draw_load(tmp_path / "whole", lines) == tmp_path / "whole/load.png"


def test_the_load_of_a_layer_is_that_of_its_fullest_expert() -> None:
    load = tally_load("expert", torch.tensor([[1, 2, 3, 6], [0, 0, 0, 0], [4, 4, 4, 4]]))
    assert load["expert_load"] == {"0": 2.0, "2": 1.0}  # layer 1 has no experts
    assert load["expert_load_max"] == 2.0
    assert load["expert_counts"] == {"0": [1, 2, 3, 6], "2": [4, 4, 4, 4]}
    assert plot.multiples_of_the_mean(load["expert_counts"]) == {"0": [1 / 3, 2 / 3, 1.0, 2.0], "2": [1.0] * 4}
    assert plot.draw_load(Path("no_folder"), [{"step": 1, "loss": 2.0}]) is None


def colors_and_names_of_the_load(layers: int, fullest: int) -> tuple[set[tuple[float, ...]], list[str]]:
    """The picture of 10 experts, one of them with `fullest` times the mean: the colors of its loads of 2, 2.2 and
    `fullest`, and the labels of all its axes and of its legends."""
    counts = [fullest * 100, 220, 200] + [0] * 7
    counts[-1] = 1000 - sum(counts)
    line = {"step": 1, **tally_load("expert", torch.tensor([counts] * layers))}
    figure = plot.load_figure("run", [line])
    assert figure is not None
    image = figure.axes[0].images[0]
    names = [axes.get_ylabel() for axes in figure.axes]
    names += [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    plt.close(figure)
    return {tuple(image.to_rgba(load)) for load in (2, 2.2, fullest)}, names


def test_the_picture_of_the_load_tells_full_experts_apart_and_names_every_layer() -> None:
    few, names = colors_and_names_of_the_load(layers=4, fullest=3)
    assert len(few) == 3, "loads above twice the mean have one color"
    assert {"layer 0", "layer 3", "even"} <= {*names}
    assert not any("over" in name for name in names), "tokens over the mean reads as a difference"
    many, names = colors_and_names_of_the_load(layers=26, fullest=5)
    assert len(many) == 3
    assert names.count("layer") == 2, "the rows of the left half, and a color bar for the lines of the right one"
    assert names[-1] == "even"


@pytest.mark.parametrize(("fullest", "arrow"), [(3, "neither"), (5, "max")])
def test_the_colors_of_the_load_mean_the_same_in_every_picture(fullest: int, arrow: str) -> None:
    """The scale ends at three times the mean; an arrow says that a load is beyond."""
    counts = [fullest] + [1] * (10 - fullest) + [0] * (fullest - 1)  # the mean is 1
    figure = plot.load_figure("run", [{"step": 1, **tally_load("expert", torch.tensor([counts]))}])
    assert figure is not None
    image = figure.axes[0].images[0]
    assert image.colorbar is not None
    assert (image.norm.vmin, image.norm.vmax, image.colorbar.extend) == (0, 3, arrow)
    plt.close(figure)
