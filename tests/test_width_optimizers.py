"""A newcomer's optimizers, added without editing megapar, beside AdamW and in its place.

The layer declaring a parameter names its optimizer. One needs whole matrices, and all tensor ranks for a norm.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.factory import Factory
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaModel, LlamaStage
from megapar_models.families.mixtral import MIXTRAL as MIXTRAL_FAMILY
from megapar_models.families.mixtral import MixtralStage
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP
from megapar_models.moe import MixtureOfExperts
from megapar_tools.plan import hardware
from megapar_tools.plan.memory import reports
from megapar_tools.plan.simulate import simulate
from megapar_tools.plan.step_time import OPTIMIZER, step_time
from megapar_tools.verify.logical import assemble, held_weights
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.tiers import FOLDER
from megapar.comm import collectives
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, OptimizerConfig
from megapar.declare.optimizer_state import StateTensor
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.base import Optimizer
from megapar.optimizer.muon import Muon
from megapar.optimizer.table import check
from megapar.optimizer.table import find as find_optimizer
from megapar.optimizer.visits import UpdateArgs, UpdateShard
from megapar.step.step import TrainState, train_step
from megapar.train.checkpoints import find, resume
from megapar.train.saver import Saver
from tests.support import program
from tests.support.close import assert_close
from tests.support.distributed import run_ranks
from tests.support.grid import LLAMA, MIXTRAL, Layout, check_on_ranks, make_state, micro_batches
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process


def updated_by(name: str, factory: Factory) -> Factory:
    return replace(factory, sharding=replace(factory.sharding, optimizer=f"{__name__}:{name}"))


class NormalizedMomentum(Optimizer):
    """Divides the momentum of each matrix by its norm over all tensor ranks: Muon without its Newton-Schulz steps."""

    STATE = (StateTensor("momentum"),)
    WHOLE = True

    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        momentum = shard.state["momentum"].mul_(0.9).add_(grad)
        (slot,) = shard.slots
        for _, start, stop in slot.spec.segments():  # gate and up are two matrices of one parameter
            squares = momentum[start:stop].double().square().sum()
            norm = collectives.all_reduce(squares, self.ctx.tp).sqrt().float()
            shard.main[start:stop] -= step.lr * momentum[start:stop] / (norm + 1e-12)


class MomentumMLP(DenseMLP):
    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(number, kind, model, updated_by("NormalizedMomentum", factory))


class MomentumStage(LlamaStage):
    """Llama with its MLPs updated by NormalizedMomentum, and all else by AdamW."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp=f"{__name__}:MomentumMLP")


class OtherAdamW(AdamW):
    """State of the same names."""


def other_adamw(*common: Any) -> Factory:
    return updated_by("OtherAdamW", Factory(*common))


MOMENTUM = replace(LLAMA_FAMILY, name="momentum", stage=MomentumStage)
OTHER = replace(LLAMA_FAMILY, name="other", factory=other_adamw)
MODELS = {name: replace(LLAMA, family=f"{__name__}:{name}") for name in ("MOMENTUM", "OTHER")}


# Two optimizers in one run


@in_each_layout
def test_two_optimizers_train_as_in_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODELS["MOMENTUM"], sizes)


@pytest.mark.parametrize(
    "sizes",
    slow_but(
        [1, 2, 3, 4],
        [
            *({"dp": 2}, {"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 0}),
            *({"dp": 4, "zero_stage": 3, "shard_ranks": 2}, {"tp": 2, "dp": 2}),
        ],
    ),
    ids=["zero 1", "zero 2", "zero 0", "zero 3 with copies", "zero 1 with tp"],
)
def test_two_optimizers_train_as_one_process_at_each_stage_of_zero(sizes: dict[str, Any]) -> None:
    check_on_ranks(Layout(MODELS["MOMENTUM"], micro_batch_size=3, **sizes))


class Momentum(Optimizer):
    """Gradient descent with momentum, of elements."""

    STATE = (StateTensor("momentum"),)

    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        assert params is None
        assert step.clip is None
        shard.main.sub_(step.lr * shard.state["momentum"].mul_(0.9).add_(grad))


def test_an_optimizer_of_ones_own_is_clipped_and_rounded_for() -> None:
    """Fault own-optimizer-not-rounded: in bf16, where main weights are apart. `Momentum` itself does neither."""
    config = Layout(LLAMA, optimizer=f"{__name__}:Momentum").config("bf16")
    state = make_state(config)
    before = [param.detach().clone() for param in state.stages[0].parameters()]
    train_step(state, micro_batches(config, state.ctx, 0))
    (optimizer,) = state.optimizer.each
    for visit in optimizer.visits:
        assert torch.equal(visit.params, visit.shard.main.bfloat16())
    changed = [not torch.equal(now, then) for now, then in zip(state.stages[0].parameters(), before, strict=True)]
    assert sum(changed) > len(changed) / 2
    norm = torch.cat([visit.shard.state["momentum"] for visit in optimizer.visits]).norm()
    assert norm.item() == pytest.approx(config.optimizer.clip_grad, rel=1e-2), (
        "the first momentum is the clipped gradient"
    )


class Eager(Optimizer):
    @dataclass(frozen=True)
    class OPTIONS:
        eagerness: float

    def update(self, *_: Any) -> None:
        raise AssertionError


def test_options_that_the_section_lacks_are_told() -> None:
    with pytest.raises(ConfigError, match="its OPTIONS has eagerness, which the section optimizer lacks"):
        find_optimizer(f"{__name__}:Eager")


class MomentumExperts(MixtureOfExperts):
    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(number, kind, model, updated_by("Momentum", factory))


class WholeExperts(MixtureOfExperts):
    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(number, kind, model, updated_by("NormalizedMomentum", factory))


class MomentumMixtureStage(MixtralStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp=f"{__name__}:MomentumExperts")


class WholeMixtureStage(MixtralStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp=f"{__name__}:WholeExperts")


EXPERTS = replace(MIXTRAL_FAMILY, name="experts", stage=MomentumMixtureStage)
WHOLE_EXPERTS = replace(MIXTRAL_FAMILY, name="whole_experts", stage=WholeMixtureStage)


@pytest.mark.parametrize("family", slow_but([0], ["EXPERTS", "WHOLE_EXPERTS"]))
def test_experts_with_another_optimizer_train_as_in_one_process(family: str) -> None:
    """Each expert is on one rank of ep, and its state is sharded over the ranks that have it too."""
    check_on_ranks(Layout(replace(MIXTRAL, family=f"{__name__}:{family}"), dp=4, ep=2, micro_batch_size=3))


def one_step(state: TrainState) -> None:
    train_step(state, micro_batches(state.config, state.ctx, state.step))
    state.weights.wait()  # gathers may overlap with a forward pass that does not follow


def saved_and_resumed(config: Config, run_dir: Path) -> tuple[list[Any], list[Any]]:
    """Weights of the steps 1 and 2, and those of a step 2 from the state loaded after step 1."""
    state = make_state(config)
    one_step(state)
    with Saver(state, run_dir) as saver:
        saver.save(state)
    one_step(state)
    again = make_state(config)
    resume(again, run_dir, find(again.config, run_dir, again.ctx))
    one_step(again)
    for one, other in zip(state.optimizer.slices(), again.optimizer.slices(), strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors), one.spec.name
    return held_weights(state), held_weights(again)


def overlapping(layout: Layout) -> Config:
    config = layout.config()
    return replace(config, optimizer=replace(config.optimizer, overlap_param_gather=True))


def test_two_optimizers_are_saved_resumed_and_loaded_in_another_layout(tmp_path: Path) -> None:
    """Bitwise with ZeRO-1 on two ranks with overlapping gathers; then by one process, without ZeRO."""
    config = overlapping(Layout(MODELS["MOMENTUM"], dp=2))
    ranks = run_ranks(2, saved_and_resumed, config, tmp_path)
    states = read_manifest(tmp_path / FOLDER / "step_00000001").states
    assert {name: declared["optimizer"] for name, declared in states.items()} == {
        **{"exp_avg": "adamw", "exp_avg_sq": "adamw", "momentum": f"{__name__}:NormalizedMomentum"},
    }
    alone = make_state(Layout(MODELS["MOMENTUM"], zero_stage=0).config())
    resume(alone, tmp_path, find(alone.config, tmp_path, alone.ctx))
    one_step(alone)
    assert_close(assemble([held for held, _ in ranks]), assemble([held_weights(alone)]))


def test_another_optimizer_goes_on_from_no_checkpoint(tmp_path: Path) -> None:
    """Not even one with state of the same name: it may mean something else."""
    state = make_state(Layout(MODELS["MOMENTUM"]).config())
    with Saver(state, tmp_path) as saver:
        saver.save(state)
    for model, now in ((LLAMA, "adamw"), (MODELS["OTHER"], f"{__name__}:OtherAdamW")):
        other = make_state(Layout(model).config())
        # The same sizes: a run whose family alone was changed is refused before, for its family.
        changed = replace(other, config=replace(other.config, model=state.config.model))
        with pytest.raises(CheckpointError, match=rf"was updated by .*, and this run updates it by {now}") as refused:
            resume(changed, tmp_path, find(changed.config, tmp_path, changed.ctx))
        assert "\n" not in str(refused.value)
        assert "--checkpoint.init_from" in str(refused.value)


def test_an_option_that_no_optimizer_reads_is_refused(tmp_path: Path) -> None:
    momentum = f"{__name__}:NormalizedMomentum"
    options = OptimizerConfig(betas=(0.9, 0.99), lr=0.1)
    check(options, {"adamw", momentum})
    check(OptimizerConfig(lr=0.1), {momentum})
    with pytest.raises(ConfigError, match=rf"optimizer.betas=0.9 0.99: no optimizer .* reads it \({momentum}\)"):
        check(options, {momentum})
    flags = ("--model.family", MODELS["MOMENTUM"].family, "--train.trainable", "*.mlp.*", "--optimizer.eps", "1e-6")
    ended = program.run(*flags, cwd=tmp_path)
    assert (ended.code, ended.err.count("\n")) == (ConfigError.exit_code, 1), ended.err
    assert "optimizer.eps=1e-06: no optimizer of this run reads it" in ended.err
    config = Layout(LLAMA).config()
    with pytest.raises(ConfigError, match="and so does adamw: rename"):
        check(config.optimizer, {"adamw", f"{__name__}:OtherAdamW"})


def test_a_plan_refuses_an_option_that_no_optimizer_reads() -> None:
    config = Layout(LLAMA).config()
    mlps = replace(config, model=MODELS["MOMENTUM"], train=replace(config.train, trainable=("*.mlp.*",)))
    with pytest.raises(ConfigError, match="no optimizer of this run reads it"):
        reports(mlps, PARTS)


class OtherMuon(Muon):
    """Muon from outside of the tree, with other products of its own."""

    @classmethod
    def matrix_products(cls, rows: int, columns: int) -> list[tuple[int, int, int]]:
        return [(rows, columns, rows)]


class MuonMLP(DenseMLP):
    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(number, kind, model, updated_by("OtherMuon", factory))


class MuonStage(LlamaStage):
    """Llama with its MLPs updated by OtherMuon, and all else by the optimizer of the run."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp=f"{__name__}:MuonMLP")


@dataclass(frozen=True)
class MuonModel(LlamaModel):
    @property
    def optimizers_of_layers(self) -> tuple[str, ...]:
        return (f"{__name__}:OtherMuon",)


MUON_MLPS = replace(LLAMA_FAMILY, name="muon_mlps", stage=MuonStage, options=MuonModel)
SILENT = replace(LLAMA_FAMILY, name="silent", stage=MuonStage)
WITH_MUON_MLPS = MuonModel(**{**vars(LLAMA), "family": f"{__name__}:MUON_MLPS"})
ON_A_PLANE = [{"tp": 2, "dp": 2}, {"tp": 2, "dp": 2, "zero_stage": 3}, {"tp": 2}]


@pytest.mark.parametrize("sizes", slow_but([0], ON_A_PLANE), ids=str)
def test_an_optimizer_that_joins_matrices_needs_no_name_of_ours(sizes: dict[str, Any]) -> None:
    """Given as optimizer.name MODULE:NAME: its class declares that ranks join matrices."""
    check_on_ranks(Layout(LLAMA, optimizer=f"{__name__}:OtherMuon", micro_batch_size=3, **sizes))


@pytest.mark.parametrize("sizes", slow_but([0], ON_A_PLANE), ids=str)
def test_layers_may_name_an_optimizer_that_joins_matrices(sizes: dict[str, Any]) -> None:
    check_on_ranks(Layout(WITH_MUON_MLPS, micro_batch_size=3, **sizes))


def bytes_sent(config: Config) -> dict[str, dict[str, int]]:
    """The bytes that this rank sends in its second step, by operation, by axis."""
    state = make_state(config)
    one_step(state)
    for axis in state.ctx.axes:
        axis.traffic.sent.clear()
    train_step(state, micro_batches(config, state.ctx, 1))
    return {axis.name: axis.traffic.sent for axis in state.ctx.axes if axis.traffic.sent}


@pytest.mark.parametrize("given", slow_but([1], ["the run", "layers"]))
def test_a_simulated_rank_sends_what_an_optimizer_that_joins_matrices_sends(given: str) -> None:
    layout = Layout(WITH_MUON_MLPS, tp=2, dp=2, micro_batch_size=3)
    if given == "the run":
        layout = Layout(LLAMA, tp=2, dp=2, micro_batch_size=3, optimizer=f"{__name__}:OtherMuon")
    config = layout.config()
    for rank, sent in enumerate(run_ranks(4, bytes_sent, config)):
        traffic = simulate(config, build_stages, PARTS, rank, ranks_per_node=8).traffic
        assert "all_to_all" in sent["plane"]
        assert {name: axis.sent for name, axis in traffic.items()} == sent


def test_the_options_of_a_model_name_the_optimizers_of_its_layers_that_join_matrices() -> None:
    model = replace(LLAMA, family=f"{__name__}:SILENT")
    with pytest.raises(Exception, match=r"2 ranks of tp and 2 of grad.* name it in optimizers_of_layers"):
        check_on_ranks(Layout(model, tp=2, dp=2, micro_batch_size=3))


def test_a_plan_prices_an_optimizer_that_joins_matrices_by_its_own_products() -> None:
    """Its rows are multiplied once, where Muon has fifteen products of Newton-Schulz."""
    machine = hardware.load("h100-80g")
    layouts = {
        "muon": Layout(LLAMA, tp=2, dp=2, optimizer="muon"),
        "other": Layout(LLAMA, tp=2, dp=2, optimizer=f"{__name__}:OtherMuon"),
        "mlps": Layout(WITH_MUON_MLPS, tp=2, dp=2),
        "adamw": Layout(LLAMA, tp=2, dp=2),
    }
    times = {name: step_time(layout.config("bf16"), PARTS, machine) for name, layout in layouts.items()}
    seconds = {name: time.busy[OPTIMIZER] for name, time in times.items()}
    assert seconds["muon"] > seconds["other"] > seconds["mlps"] > seconds["adamw"]
    exposed = {name: time.exposed["plane"] for name, time in times.items() if "plane" in time.exposed}
    assert exposed["muon"] == exposed["other"] > exposed["mlps"] > 0
    assert {*exposed} == {"muon", "other", "mlps"}
