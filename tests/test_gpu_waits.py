"""What only a GPU punishes, counted without one: the meta device stands in for it.

Reading a value (`item`, `tolist`, `nonzero`, indexing by a mask) is impossible on the meta device and raises. Making a
tensor from Python numbers is possible there; on a GPU it is a copy waiting for all queued work, so it is counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels import grouped
from megapar_models import moe
from megapar_models.build import build_stages
from megapar_models.registry import validate
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.grid import Grid
from megapar.base.precision import Precision
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, LogConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch, StepScope
from megapar.declare.random import initialize
from megapar.expert_parallel import dispatch, row_counts
from megapar.linear.torch_products import TorchProducts
from megapar.step.state import TrainState
from megapar.step.step import queue_step, train_step
from megapar.system import device
from megapar.train import trainer
from megapar.train.data import open_loaders
from megapar.train.trainer import assemble
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LENGTH,
    LLAMA,
    ONE_KV_HEAD,
    SHARED,
    SIGMOID,
    STRADDLING,
    Layout,
    make_state,
    micro_batches,
)
from tests.support.kernel_checks import DEVICE
from tests.support.sweeps import slow_but

META = torch.device("meta")
FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


class CopiesFromPython(TorchFunctionMode):
    """Notes each tensor made from Python numbers, by the line of its making."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_PYTHON and not isinstance(args[0], Tensor):  # torch itself calls as_tensor of tensors
            self.found.append(f"{func.__name__}{args}")
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts operations with a kernel to launch on a GPU; views cost nothing."""

    VIEWS = ("view", "slice", "detach", "alias", "as_strided", "expand", "transpose", "select", "split", "unbind", "t.")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


class Numbers:
    """Stands in for `device.HostCopy`: notes in `events` when a step's numbers are copied, and when they are read."""

    events: list[str]  # of a subclass
    values = (2.0, 1.0, 24.0, 0.0)  # loss, gradient norm, tokens, votes

    def __init__(self, tensor: Tensor):
        assert tensor.is_meta
        self._numbers = torch.ones(tensor.shape, dtype=tensor.dtype)
        self._of_step = tensor.dim() == 1  # otherwise what modules counted
        if self._of_step:
            for place, value in zip(self._numbers, self.values, strict=False):
                place.fill_(value)
            self._step = 1 + sum(event.startswith("queued") for event in self.events)
            self.events.append(f"queued {self._step}")

    def wait(self) -> Tensor:
        if self._of_step:
            self.events.append(f"read {self._step}")
        return self._numbers


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `Numbers` notes while a test runs."""
    noted: list[str] = []
    monkeypatch.setattr(device, "HostCopy", type("Noted", (Numbers,), {"events": noted}))
    return noted


def state_on_meta(model: ModelConfig, **train: Any) -> TrainState:
    """A state of one process, or of `tp` ranks as the first of them sees it; its tensors have no values."""
    config = Config(
        model=model,
        parallel=ParallelConfig(dp=1),
        train=TrainConfig(global_batch_size=2, seq_length=12, **train),
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    config = validate(config, 1)
    ctx = context.single(META)
    return assemble(config, ctx, build_stages(config, ctx))


def micro_batch(*, packed: bool) -> MicroBatch:
    tokens = torch.zeros(1, 12, dtype=torch.int64, device=META)
    starts = torch.zeros(4, dtype=torch.int32, device=META) if packed else None
    return MicroBatch.of_samples(tokens, tokens, torch.zeros(1, 12, device=META), tokens[:, 0], starts)


@contextmanager
def no_copies_from_python() -> Iterator[None]:
    with CopiesFromPython() as copies:
        yield
    assert copies.found == []


GPT_WITH_DROPOUT = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize(("recompute", "packed"), slow_but([3], product(["none", "full"], [False, True])), ids=str)
@pytest.mark.parametrize(
    "model",
    slow_but([2, 3, 4, 5], [LLAMA, STRADDLING, replace(LLAMA, qk_norm=True), GPT_WITH_DROPOUT, SHARED, SIGMOID]),
    ids=["llama", "gqa", "qk_norm", "gpt", "mixtral", "sigmoid"],
)
def test_a_step_never_waits_for_the_device(model: ModelConfig, recompute: str, packed: bool, events: list[str]) -> None:
    """Two steps, the second queued before a number of the first is read."""
    state = state_on_meta(model, recompute=recompute, z_loss=1e-4)
    batches = [micro_batch(packed=packed) for _ in range(2)]
    torch.utils.checkpoint.checkpoint(torch.sin, torch.zeros(()), use_reentrant=False)  # its imports make tensors
    with no_copies_from_python():
        queued = [queue_step(state, batches) for _ in range(2)]
    assert events == ["queued 1", "queued 2"]
    assert [step.finish().step for step in queued] == [1, 2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_update_in_16_bits_waits_for_nothing(precision: Precision, events: list[str]) -> None:
    """fp16 too: the host reads the numbers of a step when the update is queued behind them."""
    state = state_on_meta(LLAMA, precision=precision)
    with no_copies_from_python():
        queue_step(state, [micro_batch(packed=False)])
    assert events == ["queued 1"]


def trained_on_meta(tmp_path: Path, **train: Any) -> TrainState:
    """A run of 6 steps, with an evaluation after the third and the last one."""
    state = state_on_meta(LLAMA, steps=6, **train)
    config = replace(state.config, log=LogConfig(tensorboard=False), run_dir=str(tmp_path))
    config = replace(config, train=replace(config.train, eval_every=3))
    state.config = replace(config, checkpoint=replace(config.checkpoint, save_last=False))
    data, _ = open_loaders(state.config, context.single())
    trainer.train(trainer.TrainingRun(state, data, {}, tmp_path, flops_per_token=1))
    return state


def test_a_step_is_read_when_the_next_one_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """Only an evaluation, a checkpoint and the end wait for all steps before."""
    monkeypatch.setattr(trainer, "report_validation", lambda *_: events.append("evaluated"))
    trained_on_meta(tmp_path)
    assert events == [
        *("queued 1", "queued 2", "read 1", "queued 3", "read 2", "read 3", "evaluated"),
        *("queued 4", "queued 5", "read 4", "queued 6", "read 5", "read 6", "evaluated"),
    ]


@pytest.mark.usefixtures("events")
def test_who_computes_attention_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the line of the first step. A run on CPUs has one fused operation, and says nothing."""
    monkeypatch.setattr(trainer, "report_validation", lambda *_: None)
    trained_on_meta(tmp_path)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines.count("attention:") == 1
    assert lines[lines.index("attention:") - 1 :][:3] == ["step", "attention:", "step"]


def test_a_dynamic_loss_scale_is_read_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.setattr(trainer, "report_validation", lambda *_: None)
    trained_on_meta(tmp_path, precision="fp16")
    assert events == [f"{what} {step}" for step in range(1, 7) for what in ("queued", "read")]


@contextmanager
def torch_forbids_waits() -> Iterator[None]:
    """On a GPU torch raises if the host would wait for it."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_queued_steps_are_the_steps_that_were_waited_for(precision: Precision) -> None:
    """On a GPU also without a wait known to torch, copies of the samples included."""
    config = validate(
        Config(model=LLAMA, train=TrainConfig(global_batch_size=2, seq_length=12, precision=precision)), 1
    )
    ctx = context.single(DEVICE)
    tokens = torch.arange(3 * 24).view(3, 2, 12) % LLAMA.vocab_size
    batches = [MicroBatch.of_samples(x, x + 1, torch.ones(2, 12), x[:, 0]) for x in tokens]
    losses = []
    for waits in (True, False):
        stages = build_stages(config, ctx)
        initialize(stages.values(), 1)
        state = assemble(config, ctx, stages)
        found = [train_step(state, [batches[0].to(DEVICE)]).loss]  # kernels are compiled here
        if waits:
            found += [train_step(state, [batch.to(DEVICE)]).loss for batch in batches[1:]]
        else:
            with torch_forbids_waits():
                queued = [queue_step(state, [batch.to(DEVICE)]) for batch in batches[1:]]
            found += [step.finish().loss for step in queued]
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # kernels of a GPU may add in another order
    assert abs(losses[0][0] - losses[0][2]) > 1e-2, "the steps do something"


@pytest.mark.parametrize(
    ("form", "packed"), slow_but([1, 2, 4], product(["gather", "ring", "ulysses"], [False, True])), ids=str
)
@pytest.mark.parametrize("model", [ONE_KV_HEAD, GPT_WITH_DROPOUT], ids=["llama", "gpt"])
def test_context_parallel_ranks_never_wait_for_the_device(model: ModelConfig, form: Any, packed: bool) -> None:
    """What a rank attends, sends and receives follows from numbers on the host."""
    parallel = ParallelConfig(cp=2, cp_attention=form)
    config = validate(Config(model=model, parallel=parallel, train=TrainConfig(seq_length=12)), 2)
    ctx = context.planned(Grid(cp=2), 1, device=META)
    (stage,) = build_stages(config, ctx).values()
    whole = micro_batch(packed=False)
    batch = whole.columns(torch.zeros(6, dtype=torch.int64, device=META))
    if packed:
        batch = replace(batch, starts=torch.zeros(4, dtype=torch.int32, device=META), starts_on_host=(0, 5, 8, 12))
    with no_copies_from_python():
        loss = stage(None, batch)
        loss.backward()
    assert loss.is_meta


class Seen(TorchDispatchMode):
    """Notes in `events` when rows of tokens and their weights are copied."""

    def __init__(self, events: list[str], rows: int):
        super().__init__()
        self.events = events
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        if name == "index_select" and len(out) == self.rows and out.dtype.is_floating_point:
            self.events.append("copied rows" if out.shape[1] > 1 else "copied weights")
        return out


def events_of_mixture(config: Config, rows: int) -> list[str]:
    """What happens in a training step of two layers with experts, as far as it decides when the host waits."""
    noted: list[str] = []

    class Counts(device.HostCopy):
        def __init__(self, tensor: Tensor):
            super().__init__(tensor)
            noted.append("copy begins")

        def wait(self) -> Tensor:
            noted.append("host waits")
            return super().wait()

    state = make_state(config)
    batches = micro_batches(config, state.ctx, 0)[:1]
    device.HostCopy, real = Counts, device.HostCopy  # type: ignore[misc]
    try:
        (stage,) = state.stages.values()
        with Seen(noted, rows):
            loss = stage(None, replace(batches[0], scope=StepScope(torch.ones(()))))
            noted.append("backward")
            loss.backward()
    finally:
        device.HostCopy = real  # type: ignore[misc]
    return noted


WITH_EXPERTS = [
    Layout(SHARED, recompute="full"),
    Layout(SHARED, dp=2, ep=2),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=4),
    Layout(SHARED, dp=2, ep=2, ep_overlap_chunks=2, recompute="full"),
]


def waits_once_a_layer(layout: Layout) -> bool:
    """Whether the copy of counts begins, rows are copied, then the host waits, once a layer and never in backward."""
    rows = LENGTH * layout.micro_batch_size * SHARED.moe.num_experts_per_tok
    noted = events_of_mixture(layout.config(), rows)
    forward = noted[: noted.index("backward")]
    begins = [index for index, event in enumerate(forward) if event == "copy begins"]
    wanted = ["copy begins", "copied rows", "copied weights", "host waits"]
    in_order = [forward[begin : begin + 4] == wanted for begin in begins]
    once = len(begins) == forward.count("host waits") == SHARED.num_hidden_layers
    return once and all(in_order) and "host waits" not in noted[len(forward) :]


@pytest.mark.parametrize("layout", WITH_EXPERTS, ids=["full", "ep2", "chunks4", "chunks2-full"])
def test_a_layer_with_experts_waits_once_behind_the_copies_of_rows(layout: Layout) -> None:
    """A GPU has work while the host waits. Backward never waits, nor does a recomputed forward pass."""
    assert all(run_ranks(layout.world, waits_once_a_layer, layout))


WITH_BIASES = tiny_models.small(
    "gpt_oss", 48, 2, 76, num_key_value_heads=2, sliding_window=7, moe=replace(SHARED.moe, shared_expert_gate=False)
)


@pytest.mark.parametrize("model", [SHARED, WITH_BIASES], ids=["plain", "biases"])
def test_without_ep_and_with_experts_in_one_launch_nothing_waits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are whose is read on the device alone. A loop stands for the launch of the weight gradients."""

    def add(totals: Tensor, grad: Tensor, x: Tensor, ends: Tensor, *, overwrite: bool = False) -> None:
        for total, stop, start in zip(totals, ends.tolist(), [0, *ends.tolist()], strict=False):
            total.mul_(0.0 if overwrite else 1.0).addmm_(grad[start:stop].t(), x[start:stop])

    layout = Layout(model, recompute="full")
    rows = LENGTH * layout.micro_batch_size * model.moe.num_experts_per_tok
    events = []
    for in_one_launch in (False, True):
        monkeypatch.setattr(TorchProducts, "in_one_launch", lambda *_, found=in_one_launch: found)
        monkeypatch.setattr(grouped, "add_weight_gradients", add)
        events.append(events_of_mixture(layout.config(), rows))
    assert events[0].count("copied rows") == events[1].count("copied rows") >= model.num_hidden_layers
    assert [found.count("host waits") for found in events] == [model.num_hidden_layers, 0]


def counts_are_waited_for_too_early(patch: pytest.MonkeyPatch) -> None:
    plan_dispatch = dispatch.plan_dispatch

    def plan(*args: Any) -> dispatch.Dispatch:
        planned = plan_dispatch(*args)
        assert planned.chunks[0].sent_rows is not None
        return planned

    patch.setattr(moe, "plan_dispatch", plan)


def every_chunk_waits_for_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(row_counts.RowCounts, "on_host", property(row_counts.RowCounts.on_host.func))


def waits_with(plant: Callable[[pytest.MonkeyPatch], None], layout: Layout) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return waits_once_a_layer(layout)


@pytest.mark.parametrize("plant", [counts_are_waited_for_too_early, every_chunk_waits_for_counts])
def test_a_wait_for_counts_at_another_place_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert run_ranks(2, waits_with, plant, WITH_EXPERTS[2]) == [False, False]


def test_heads_that_straddle_ranks_wait_for_nothing() -> None:
    """The index of key/value heads is made with the layer, not in each forward pass."""
    from megapar_models.attention import Attention
    from megapar_models.factory import Factory
    from megapar_models.families.llama import LlamaStage
    from megapar_models.forward import ForwardContext

    from megapar.comm.axis import Axis
    from megapar.declare.params import ONES
    from megapar.declare.sharding import Sharding

    model = validate(Config(model=STRADDLING, parallel=ParallelConfig(tp=4, dp=1)), 4).model
    sharding = Sharding(Axis("tp", 4, 1, (0, 1, 2, 3)), Axis("grad"), False, torch.float32, META)
    layer = Attention(0, LlamaStage.layer_kind(model, 0), model, Factory(sharding, ONES, ONES))
    assert layer.attend.kv_index is not None
    rows = layer.qkv.weight.shape[0]
    with no_copies_from_python():
        batch = micro_batch(packed=False)
        table = layer.kind.rotary
        assert table is not None
        rotary = {table: table.tables(batch)}
        layer._core(torch.zeros(12, 1, rows, device=META), ForwardContext(batch, rotary))


def test_a_copy_from_python_would_be_counted() -> None:
    with pytest.raises(AssertionError), no_copies_from_python():
        torch.tensor([1, 2], device=META)


def test_the_gradient_norm_takes_few_launches_however_the_buffer_is_cut() -> None:
    """8 million elements in hundreds of ranges, as ZeRO-1 with small buckets has them, by torch's ops."""
    from megapar_kernels.adamw import FlatRanges, square_sum

    ranges = [(start, start + 16_000) for start in range(0, 8_000_000, 16_384)]
    counted = FlatRanges.of(ranges, META)
    grads: Tensor = torch.zeros(8_000_000, device=META)
    with Launches() as launches:
        total = square_sum(grads, "torch", counted)
    assert total.shape == ()
    assert launches.count < 10, launches.count
