"""Training as a whole: it repeats and resumes bitwise, copies never drift, bf16 errs as it must, and what is not finite
stops before it does harm."""

import io
import json
import math
import resource
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megapar_models.build import build_stages
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_gradients
from torch import Tensor

from megapar.base.errors import NumericError, StorageError
from megapar.base.grid import Grid
from megapar.base.precision import LossScale, Precision
from megapar.checkpoint.format import folder_name
from megapar.checkpoint.tiers import FOLDER
from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config, LogConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.observe.metrics import Reporter
from megapar.observe.sinks.base import RunInfo
from megapar.step.divisors import count_targets
from megapar.step.state import TrainState
from megapar.step.step import sum_of_losses, train_step
from megapar.train import checkpoints
from megapar.train.data import open_loaders
from megapar.train.saver import Saver
from megapar.train.trainer import TrainingRun, start, train
from tests.support import close
from tests.support.distributed import rank_device, run_ranks
from tests.support.grid import GPT, LENGTH, LLAMA, ONE_KV_HEAD, SAMPLES, Layout, make_state, micro_batches
from tests.support.runs import Bits, assert_bitwise, bits, metrics, stored
from tests.support.sweeps import slow_but

# The same run again


@dataclass(frozen=True)
class Case:
    layout: Layout
    precision: str = "fp32"


def trained_bits(cases: Sequence[Case]) -> list[tuple[list[float], Bits]]:
    """Losses and state of two steps of each case: overlap begins with the second."""
    shown = []
    for case in cases:
        state = make_state(case.layout.config(case.precision))
        losses = [train_step(state, micro_batches(state.config, state.ctx, step)).loss for step in range(2)]
        shown.append((losses, bits(state)))
    return shown


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
def test_repetition_overlap_and_recompute_change_no_bit(precision: str) -> None:
    """Two launches with dropout, of dp 2 x tp 2 and of dp 2 x pp 2, and in the first also every way to overlap and to
    recompute (faults recomputation-same-masks, overlap-changes-no-bit at the level of training)."""
    three = {"num_hidden_layers": 3}  # a stage of one layer and one of two
    dropout = Layout(replace(GPT, **three), dp=2, tp=2, sequence_parallel=True, micro_batch_size=3)
    llama = Layout(replace(LLAMA, **three), dp=2, pp=2, micro_batch_size=3)
    base = [Case(dropout, precision), Case(llama)]
    variants = [
        (0, Case(replace(dropout, overlap=False), precision)),
        (0, Case(replace(dropout, recompute="selective"), precision)),
        (0, Case(replace(dropout, recompute="full"), precision)),
        (0, Case(replace(dropout, recompute="full", every=2), precision)),
        (1, Case(replace(llama, recompute="full", overlap=False))),
    ]
    first = run_ranks(4, trained_bits, base + [case for _, case in variants])
    second = run_ranks(4, trained_bits, base)
    for rank, (shown, again) in enumerate(zip(first, second, strict=True)):
        pairs = [(i, base[i], result) for i, result in enumerate(again)]
        pairs += [(i, case, shown[len(base) + n]) for n, (i, case) in enumerate(variants)]
        for i, case, (losses, state) in pairs:
            assert losses == shown[i][0], f"rank {rank}: {case}"
            assert_bitwise(state, shown[i][1], f"rank {rank}: {case}")
        assert len(set(shown[0][0])) == 2, "the steps do something"


# Resuming


TWO_LAYERS = {"num_hidden_layers": 2}
RESUMED = [
    Case(Layout(replace(GPT, **TWO_LAYERS), dp=2, micro_batch_size=2)),
    Case(Layout(replace(LLAMA, **TWO_LAYERS), dp=2, micro_batch_size=3), "bf16"),
    Case(Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=6)),
    Case(Layout(ONE_KV_HEAD, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3)),
    Case(Layout(GPT, pp=2, vpp=2, schedule="interleaved", zero_stage=0, micro_batch_size=4), "bf16"),
]
SAVED = 2
LAST = 4


def run_config(case: Case, run_dir: Path) -> Config:
    return replace(
        case.layout.config(case.precision),
        train=replace(case.layout.config(case.precision).train, steps=LAST),
        checkpoint=CheckpointConfig(every=SAVED),
        log=LogConfig(tensorboard=False),
        run_dir=str(run_dir),
    )


def started(config: Config) -> TrainState:
    parallel = config.parallel
    where = rank_device(dist.get_rank())
    ctx = context.create(Grid(tp=parallel.tp, dp=parallel.dp, pp=parallel.pp, order=parallel.order), device=where)
    return start(config, ctx, build_stages(config, ctx))[0]


def train_as_the_program_does(state: TrainState) -> list[Tensor]:
    """To the last step, on the run's own data; the samples given to this rank, micro-batch by micro-batch."""
    data, _ = open_loaders(state.config, state.ctx)
    data.consumed_samples = state.consumed_samples
    given: list[Tensor] = []
    read = data.next_step

    def next_step() -> list[MicroBatch]:
        batches = read()
        given.extend(torch.cat([b.sample_ids_b[:, None], b.tokens_bs], 1) for b in batches)
        return batches

    data.next_step = next_step  # type: ignore[method-assign]
    train(TrainingRun(state, data, {}, Path(state.config.run_dir), flops_per_token=1))
    return given


def run_all(cases: Sequence[Case], folders: Sequence[Path]) -> list[tuple[list[Tensor], Bits, int]]:
    """Each case to its end, from its folder's checkpoint on."""
    shown = []
    for case, folder in zip(cases, folders, strict=True):
        state = started(run_config(case, folder))
        given = train_as_the_program_does(state)
        shown.append((given, bits(state), state.optimizer.step_count))
    return shown


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    """The folders of runs of LAST steps with a save after SAVED of them, and what each rank showed of each."""
    folders = [tmp_path_factory.mktemp("run") for _ in RESUMED]
    return folders, run_ranks(2, run_all, RESUMED, folders)


def copy_of_the_checkpoint(folder: Path, target: Path) -> Path:
    """`target`, a run folder left after the step SAVED."""
    name = folder_name(SAVED)
    shutil.copytree(folder / FOLDER / name, target / FOLDER / name)
    lines = (folder / "metrics.jsonl").read_text().splitlines()[: SAVED + 1]  # one more than was saved
    cut_short = lines[-1][:20]
    (target / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + cut_short)
    return target


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(finished: tuple[list[Path], list[Any]], tmp_path: Path) -> None:
    """Weights, main weights, moments, counts, losses, norms, learning rates, samples and the curve (faults
    resumption-is-bitwise, resumed-learning-rate)."""
    folders, whole = finished
    resumed = [copy_of_the_checkpoint(folder, tmp_path / str(i)) for i, folder in enumerate(folders)]
    for rank, (shown, expected) in enumerate(zip(run_ranks(2, run_all, RESUMED, resumed), whole, strict=True)):
        for case, mine, theirs in zip(RESUMED, shown, expected, strict=True):
            what = f"rank {rank}: {case}"
            assert_bitwise(mine[1], theirs[1], what)
            assert mine[2] == theirs[2] == LAST, what
            assert len(theirs[0]) == 2 * len(mine[0]) > 0, what
            assert all(map(torch.equal, mine[0], theirs[0][len(mine[0]) :])), f"{what}: other samples"
    for case, folder, uninterrupted in zip(RESUMED, resumed, folders, strict=True):
        assert metrics(folder) == metrics(uninterrupted), case
        assert [line["step"] for line in metrics(folder)] == list(range(1, LAST + 1)), case
        assert_bitwise(
            stored(folder / FOLDER / folder_name(LAST)),
            stored(uninterrupted / FOLDER / folder_name(LAST)),
            str(case),
        )


def go_on_elsewhere(cases: Sequence[Case], folders: Sequence[Path]) -> list[float]:
    """Resume, save at once what was loaded, and make one step; its losses."""
    losses = []
    for case, folder in zip(cases, folders, strict=True):
        state = started(run_config(case, folder))
        assert state.step == SAVED
        Saver(state, folder / "again").save(state)
        data, _ = open_loaders(state.config, state.ctx)
        data.consumed_samples = state.consumed_samples
        losses.append(train_step(state, [batch.to(state.ctx.device) for batch in data.next_step()]).loss)
    return losses


def test_a_run_resumes_in_another_layout(finished: tuple[list[Path], list[Any]], tmp_path: Path) -> None:
    """The state is bitwise the saved one, the next loss the same to 1e-6 in fp32 (fault any-layout-loads)."""
    folders, _ = finished
    moves = [
        (0, Layout(RESUMED[0].layout.model, tp=2, pp=2, sequence_parallel=True, micro_batch_size=6)),
        (0, Layout(RESUMED[0].layout.model, dp=4, zero_stage=0, micro_batch_size=3)),
        (1, Layout(RESUMED[1].layout.model, tp=2, pp=2, zero_stage=0, micro_batch_size=3)),
        (2, Layout(LLAMA, dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3)),
        (3, Layout(ONE_KV_HEAD, tp=4, sequence_parallel=True, micro_batch_size=6)),
    ]
    cases = [Case(layout, RESUMED[number].precision) for number, layout in moves]
    copies = [copy_of_the_checkpoint(folders[number], tmp_path / str(i)) for i, (number, _) in enumerate(moves)]
    losses = run_ranks(4, go_on_elsewhere, cases, copies)
    for i, (number, layout) in enumerate(moves):
        name = folder_name(SAVED)
        saved = stored(folders[number] / FOLDER / name)
        assert_bitwise(stored(copies[i] / "again" / FOLDER / name), saved, str(layout))
        uninterrupted = metrics(folders[number])[SAVED]["loss"]
        # bf16 rounds logits to 2^-9 of themselves; their mean over all tokens is far better.
        tolerance = 1e-6 if cases[i].precision == "fp32" else 2**-9
        for rank in losses:
            assert rank[i] == pytest.approx(uninterrupted, rel=tolerance), layout


# Copies of a parameter


def held_weights(state: TrainState) -> list[logical.Held]:
    return logical.held(state.stages.values(), state.ctx)


def run_long(case: Case, steps: int, every: int, folder: Path) -> tuple[list[list[logical.Held]], Bits]:
    """The weights of this rank at every `every`-th of `steps`, right after a save and a resume, and `every` later."""
    config = replace(case.layout.config(case.precision), run_dir=str(folder))
    config = replace(config, train=replace(config.train, steps=steps + every))
    state = make_state(config)
    shown = []
    for step in range(steps + every):
        if step == steps:
            Saver(state, folder).save(state)
            state = make_state(config)
            checkpoints.resume(state, folder, checkpoints.find(state.config, folder, state.ctx))
            assert state.step == steps
            shown.append(held_weights(state))
        train_step(state, micro_batches(config, state.ctx, step))
        if (step + 1) % every == 0:
            shown.append(held_weights(state))
    return shown, bits(state)


def run_all_long(cases: Sequence[Case], steps: int, every: int, folders: Sequence[Path]) -> list[Any]:
    return [run_long(case, steps, every, folder) for case, folder in zip(cases, folders, strict=True)]


def assert_copies_agree(cases: Sequence[Case], ranks: Sequence[Any]) -> None:
    """`assemble` compares every copy of every element bitwise, over tp, tied ends and replicas."""
    for number, case in enumerate(cases):
        moments = zip(*(rank[number][0] for rank in ranks), strict=True)
        weights = [logical.assemble(parts) for parts in moments]
        assert not torch.equal(weights[0]["norm.weight"], weights[-1]["norm.weight"]), f"{case}: nothing was trained"


@pytest.mark.parametrize("numbers", slow_but([0], [((0, 2),), ((1,),)]), ids=["sp", "tp"])
@pytest.mark.gpus
def test_replicated_parameters_never_drift(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """Fault replicated-parameters-stay-equal: norms, row biases, positions, shared key/value rows and q/k norms after
    10 bf16 steps on two tensor ranks, every 5th step, then saved, resumed and trained on."""
    gpt = replace(GPT, num_hidden_layers=2)
    llama = replace(ONE_KV_HEAD, num_hidden_layers=2)
    cases = [
        Case(Layout(gpt, tp=2, sequence_parallel=True, micro_batch_size=SAMPLES), "bf16"),
        Case(Layout(llama, tp=2, micro_batch_size=SAMPLES), "bf16"),
        Case(Layout(llama, tp=2, sequence_parallel=True, micro_batch_size=SAMPLES), "bf16"),
    ]
    cases = [cases[number] for number in numbers]
    folders = [tmp_path / str(i) for i in range(len(cases))]
    assert_copies_agree(cases, run_ranks(2, run_all_long, cases, 10, 5, folders))


@pytest.mark.parametrize("steps", slow_but([0], [10, 20]))
def test_tied_copies_never_drift(steps: int, tmp_path: Path) -> None:
    """Fault tied-copies-stay-equal: the embedding of the first and of the last stage after many bf16 steps, sizes odd,
    so buckets and shards are padded, overlap on and off, without changing a bit."""
    odd = replace(GPT, hidden_size=36, num_hidden_layers=2, intermediate_size=74, vocab_size=133)
    layout = Layout(odd, dp=2, pp=2, micro_batch_size=6)
    cases = [Case(layout, "bf16"), Case(replace(layout, overlap=False), "bf16")]
    folders = [tmp_path / str(i) for i in range(len(cases))]
    ranks = run_ranks(4, run_all_long, cases, steps, steps // 2, folders)
    assert_copies_agree(cases, ranks)
    for rank in ranks:
        assert_bitwise(rank[1][1], rank[0][1], "overlap off")


# Gradients of one batch


def gradients(state: TrainState, batches: Sequence[MicroBatch]) -> tuple[float, list[logical.Held]]:
    """Loss and reduced gradients of a step, without its update."""
    tokens = count_targets(batches, state.ctx)
    scale = 1024.0 if state.loss_scale.dynamic else 1.0
    state.grads.zero()
    losses = state.pipeline.step(batches, scale / tokens, state.grads.begin)
    state.grads.finish()
    state.grads.flat.div_(scale)
    return (sum_of_losses(losses, state.ctx) / tokens).item(), held_gradients(state)


def only_one_counts(cases: Sequence[Case], chosen: Sequence[int]) -> list[list[list[logical.Held]]]:
    """Gradients of a batch of 12 equal samples with only number i counted, for each i of `chosen`."""
    shown = []
    for case in cases:
        state = make_state(case.layout.config())
        found = []
        for i in chosen:
            batches = []
            for batch in micro_batches(state.config, state.ctx, 0):
                mine = batch.sample_ids_b == i
                tokens = (torch.arange(LENGTH, device=state.ctx.device) * 7 % 131).expand_as(batch.tokens_bs)
                weights = mine[:, None] * torch.linspace(0.5, 1.5, LENGTH, device=state.ctx.device)
                batches.append(
                    MicroBatch.of_samples(tokens, tokens.roll(-1, 1), weights, torch.zeros_like(batch.sample_ids_b))
                )
            found.append(gradients(state, batches)[1])
        shown.append(found)
    return shown


@pytest.mark.gpus
@pytest.mark.parametrize("numbers", slow_but([0], [((0, 1, 3),), ((2,),)]), ids=["", "gpipe"])
def test_each_micro_batch_has_the_same_weight(numbers: tuple[int, ...]) -> None:
    """Fault micro-batches-weigh-the-same: whichever of a step's micro-batches holds the only counted samples, the
    gradient is the same; also if a data-parallel rank is left without any (fault no-target-tokens)."""
    cases = [
        Case(Layout(LLAMA, pp=2)),
        Case(Layout(LLAMA, pp=2, vpp=2, schedule="interleaved")),
        Case(Layout(LLAMA, pp=2, schedule="gpipe")),
        Case(Layout(LLAMA, dp=2)),
    ]
    cases = [cases[number] for number in numbers]
    ranks = run_ranks(2, only_one_counts, cases, (0, 5, 11))
    for number, case in enumerate(cases):
        found = [logical.assemble(parts) for parts in zip(*(rank[number] for rank in ranks), strict=True)]
        assert all(grad.any() for grad in found[0].values()), case
        for other in found[1:]:
            close.assert_close(other, found[0], rtol=1e-6)


# bf16 and fp16


ROUNDINGS = {"llama": 14, "gpt": 19}
"""bf16 results of one layer's forward pass on the way from its input to its output. llama: norm, q/k/v, q/k norm,
rotation, probabilities, attention, output projection, sum; norm, gate/up, silu, product, down projection, sum. gpt:
norm, q/k/v, scores, probabilities, attention, output projection, its bias, two of dropout, sum; norm, up, gelu, down,
its bias, two of dropout, sum, and one to spare for the sum over tensor ranks."""


def rounding_unit(config: Config) -> float:
    """Expected relative error of a gradient in bf16, as if all roundings on the longest path lay in a row.

    Rounding to bf16's 8 significant bits errs by at most 2^-8 of a number, 2^-9 in the root mean square (a uniform
    error of half a unit in the last place: 2^-7 / sqrt(12), times 0.74 for numbers spread evenly in the logarithm).
    Independent errors add up in squares: sqrt(n) 2^-9 after n of them. The backward pass rounds as often as the forward
    pass did, and embedding, final norm, logits and their gradient make four more in each direction. fp16 has three more
    bits: an eighth of that.
    """
    model = config.model
    return math.sqrt(2 * (ROUNDINGS[model.family] * model.num_hidden_layers + 4)) * 2**-9


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of each difference relative to the expected norm, or to 1% of the norm of all gradients if this is more:
    canceling sums (gpt's key biases, because a softmax is blind to them) keep the errors of their terms."""
    floor = 1e-2 * math.hypot(*(tensor.double().norm().item() for tensor in expected.values()))
    return {
        name: (found[name].double() - tensor.double()).norm().item() / max(tensor.double().norm().item(), floor)
        for name, tensor in expected.items()
    }


def half_and_fp32_gradients(cases: Sequence[Case], starts: Sequence[Mapping[str, Tensor]]) -> list[Any]:
    """Loss and gradients at given weights."""
    shown = []
    for case, weights in zip(cases, starts, strict=True):
        state = make_state(case.layout.config(case.precision))
        logical.fill(state.stages.values(), weights)
        shown.append(gradients(state, micro_batches(state.config, state.ctx, 0)))
    return shown


@pytest.mark.parametrize("models", slow_but([0], [((GPT, ONE_KV_HEAD),), ((LLAMA,),)]), ids=["tied", "untied"])
@pytest.mark.parametrize("precision", slow_but([0], ["bf16", "fp16"]))
def test_half_precision_gradients_err_as_derived(precision: Precision, models: tuple[ModelConfig, ...]) -> None:
    """Every gradient in one process and in layouts (tied ends too: fault tied-embeddings-in-bf16), against fp32 from
    the same rounded weights, and layouts against one process: half of the parameters are within `rounding_unit`, all
    within three. In bf16 the medians are 0.3 to 0.7 and the largest 1.6 units, so an error of three times as much
    fails."""
    by_model = {
        GPT: [
            Layout(GPT, dp=2, pp=2, micro_batch_size=2),
            Layout(GPT, tp=2, pp=2, sequence_parallel=True, micro_batch_size=6),
        ],
        LLAMA: [
            Layout(LLAMA, dp=2, tp=2, micro_batch_size=3),
            Layout(LLAMA, tp=4, sequence_parallel=True, micro_batch_size=6),
        ],
        ONE_KV_HEAD: [Layout(ONE_KV_HEAD, tp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3)],
    }
    cases = []
    starts = []
    singles = []
    for model in models:
        alone = Layout(model, micro_batch_size=SAMPLES)
        initial = make_state(alone.config(precision))
        weights = logical.assemble([held_weights(initial)])
        single = half_and_fp32_gradients([Case(alone, precision), Case(alone)], [weights, weights])
        for layout in by_model[model]:
            cases.append(Case(layout, precision))
            starts.append(weights)
            singles.append(single)
    ranks = run_ranks(4, half_and_fp32_gradients, cases, starts)
    for number, (case, (half, fp32)) in enumerate(zip(cases, singles, strict=True)):
        unit = rounding_unit(case.layout.config()) * (1 if precision == "bf16" else 2**-3)
        exact = logical.assemble([fp32[1]])
        alone = logical.assemble([half[1]])
        found = logical.assemble([rank[number][1] for rank in ranks])
        for loss in (half[0], *(rank[number][0] for rank in ranks)):
            assert loss == pytest.approx(fp32[0], rel=2**-9), case
        for what, a, b in (("alone", alone, exact), ("layout", found, exact), ("layout to alone", found, alone)):
            ratios = {name: error / unit for name, error in errors(a, b).items()}
            assert median(ratios.values()) < 1, f"{case}, {what}: {ratios}"
            assert max(ratios.values()) < 3, f"{case}, {what}: {ratios}"


# A batch that grows


def test_no_step_waits_for_a_plan_where_the_batch_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(Case(Layout(LLAMA)), tmp_path)
    config = replace(config, train=replace(config.train, steps=6, batch_ramp=(2, 2, 30), micro_batch_size=2))
    state, _ = start(config, context.single(), build_stages(config, context.single()))
    monkeypatch.delattr("megapar.pipeline.runtime.lower_one")
    train_as_the_program_does(state)
    consumed = [line["consumed_samples"] for line in metrics(tmp_path)]
    assert consumed == [2, 4, 6, 10, 14, 20], "batches of 2, 4 and 6"
    assert "step 6/6" in capsys.readouterr().out


# What is not finite


def poisoned(folder: Path) -> dict[str, Any]:
    """One step, then a NaN in a weight of the last stage, then what `train` does."""
    config = run_config(Case(Layout(LLAMA, pp=2, micro_batch_size=3), "fp32"), folder)
    state = started(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    if state.ctx.pp.last:
        (slot,) = (slot for slot in state.grads.layout.slots if slot.name == "layers.3.mlp_norm.weight")
        slot.param.data[0] = math.nan
    before = bits(state)
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(NumericError) as caught:
        train_as_the_program_does(state)
    assert_bitwise(bits(state), before, "after the error")
    return {
        "message": str(caught.value),
        "code": caught.value.exit_code,
        "log": said.getvalue(),
        "position": (state.step, state.consumed_samples, state.optimizer.step_count),
    }


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update(tmp_path: Path) -> None:
    ranks = run_ranks(2, poisoned, tmp_path)
    for rank in ranks:
        assert rank["message"].startswith("step 2: loss nan, gradient norm nan; first not finite: the ")
        assert "finite before the step: layers.3.mlp_norm.weight on rank 1. No weight was changed" in rank["message"]
        assert (rank["code"], rank["position"]) == (5, (1, SAMPLES, 1))
    assert f"step 2/{LAST} | loss nan" in ranks[0]["log"]
    assert ranks[1]["log"] == ""
    (line,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 2
    assert line["loss"] is None, "JSON has no NaN"
    assert not list((tmp_path / FOLDER).iterdir()), "nothing is saved"


def full_disk(folder: Path) -> str:
    """What rank 0 says when lines are too long for what any file may grow to."""
    said = io.StringIO()
    reporter = Reporter(LogConfig(tensorboard=False), RunInfo(folder, {}, 9), speaks=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    reporter.write({"step": 1})
    with redirect_stderr(said):
        reporter.write({"step": 2, "loss": "x" * 50})
        reporter.write({"step": 3, "loss": "x" * 50})
        reporter.flush()
    reporter.write({"step": 4})
    reporter.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reporter.__exit__(None, None, None)
    return said.getvalue()


def test_metrics_that_the_disk_does_not_take_are_lost_and_told_once(tmp_path: Path) -> None:
    """A line cut short leaves nothing, and later lines are written again once they fit."""
    path = tmp_path / "metrics.jsonl"
    told = f"{path}: step 2 not written (File too large); the run goes on\n"
    assert run_ranks(1, full_disk, tmp_path) == [told]
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'


def test_a_tensorboard_folder_that_is_a_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with pytest.raises(StorageError, match=f"^cannot write {tmp_path}/tensorboard: File exists$"):
        Reporter(LogConfig(), RunInfo(tmp_path, {}, 9), speaks=True)


# fp16


def overflowing(folder: Path) -> list[Any]:
    """Three steps, the second from an overflowing loss scale; then what a resumed state knows."""
    config = run_config(Case(Layout(LLAMA, pp=2, dp=2, micro_batch_size=3), "fp16"), folder)
    state = started(config)
    shown: list[Any] = []
    for step in range(3):
        if step == 1:
            state.loss_scale.scale = 2.0**40
        before = bits(state)
        result = train_step(state, micro_batches(config, state.ctx, step))
        if step == 1:
            assert_bitwise(bits(state), before, "an overflow changes nothing")
        position = (state.step, state.consumed_samples, state.optimizer.step_count)
        shown.append((result.overflowed, result.finite, state.loss_scale.scale, position, state.grads.not_finite()))
        if step == 1:
            state.loss_scale.scale = 2.0**10
    Saver(state, folder).save(state)
    again = started(config)
    checkpoints.resume(again, folder, checkpoints.find(again.config, folder, again.ctx))
    return [*shown, again.loss_scale]


def test_an_overflow_in_fp16_costs_one_update_and_halves_the_loss_scale(tmp_path: Path) -> None:
    for first, second, third, resumed in run_ranks(4, overflowing, tmp_path):
        assert first == (False, True, 2.0**16, (1, SAMPLES, 1), [])
        assert second[:4] == (True, False, 2.0**39, (2, 2 * SAMPLES, 1))
        assert third == (False, True, 2.0**10, (3, 3 * SAMPLES, 2), [])
        assert (resumed.scale, resumed.good_steps, resumed.dynamic) == (2.0**10, 1, True)


def test_the_loss_scale_doubles_after_many_good_steps_and_never_falls_below_one() -> None:
    scale = LossScale.of("fp16")
    for _ in range(LossScale.WINDOW):
        scale.update(True)
    assert scale.scale == 2.0**17
    for _ in range(40):
        scale.update(False)
    assert (scale.scale, scale.good_steps) == (1.0, 0)
    plain = LossScale.of("bf16")
    plain.update(False)
    assert plain == LossScale()


def test_the_loss_scale_changes_no_update() -> None:
    """Fault loss-divided-once, in fp32, because a power of two rounds nothing there: norm, clipping and update,
    bitwise."""
    shown = []
    for scale in (1.0, 2.0**12):
        state = make_state(Layout(GPT, micro_batch_size=3).config())
        state.loss_scale = LossScale(scale)
        result = train_step(state, micro_batches(state.config, state.ctx, 0))
        shown.append((result.loss, result.grad_norm, bits(state)))
    assert shown[0][:2] == shown[1][:2]
    assert_bitwise(shown[1][2], shown[0][2], "loss scale")
