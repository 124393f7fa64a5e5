"""What only a GPU punishes, counted without one: the meta device stands in for it.

Reading a value (`item`, `tolist`, `nonzero`, indexing by a mask) is impossible on the meta device and raises. Making a
tensor from Python numbers is possible there; on a GPU it is a copy that waits for all queued work, so it is counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.registry import validate
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar import context
from megapar.batch import MicroBatch
from megapar.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.optimizer.clip import clip_coefficient, grad_norm
from megapar.train.step import TrainState, count_targets, mean_loss
from megapar.train.trainer import assemble
from tests.support.grid import GPT, LLAMA, ONE_KV_HEAD, STRADDLING

META = torch.device("meta")
FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


class CopiesFromPython(TorchFunctionMode):
    """Notes each tensor that is made from Python numbers, by the line that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_PYTHON and not isinstance(args[0], Tensor):  # torch itself calls as_tensor of tensors
            self.found.append(f"{func.__name__}{args}")
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch a kernel for; views cost nothing."""

    VIEWS = ("view", "slice", "detach", "alias", "as_strided", "expand", "transpose", "select", "split", "unbind", "t.")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


def state_on_meta(model: ModelConfig, **train: Any) -> TrainState:
    """A state of one process, or of `tp` ranks as the first of them sees it, whose tensors have no values."""
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


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "model", [LLAMA, STRADDLING, replace(LLAMA, qk_norm=True), GPT_WITH_DROPOUT], ids=["llama", "gqa", "qk_norm", "gpt"]
)
def test_a_step_never_waits_for_the_device(model: ModelConfig, recompute: str, packed: bool) -> None:
    """All of a step but its last line, which reads loss, norm and tokens."""
    state = state_on_meta(model, recompute=recompute, z_loss=1e-4)
    batches = [micro_batch(packed=packed) for _ in range(2)]
    torch.utils.checkpoint.checkpoint(torch.sin, torch.zeros(()), use_reentrant=False)  # its imports make tensors
    with no_copies_from_python():
        tokens = count_targets(batches, state.ctx)
        state.grads.zero()
        loss_sums = state.pipeline.step(batches, 1.0 / tokens, state.grads.begin)
        state.grads.finish()
        norm = grad_norm(state.grads, state.ctx)
        loss = mean_loss(loss_sums, tokens, state.ctx)
        state.optimizer.step(1e-3, clip_coefficient(norm, 1.0))
    assert loss.is_meta


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("form", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("model", [ONE_KV_HEAD, GPT_WITH_DROPOUT], ids=["llama", "gpt"])
def test_context_parallel_ranks_never_wait_for_the_device(model: ModelConfig, form: Any, packed: bool) -> None:
    """What a rank attends, sends and receives follows from numbers on the host."""
    parallel = ParallelConfig(cp=2, cp_attention=form)
    config = validate(Config(model=model, parallel=parallel, train=TrainConfig(seq_length=12)), 2)
    ctx = context.planned(1, cp=2, device=META)
    (stage,) = build_stages(config, ctx).values()
    whole = micro_batch(packed=False)
    batch = whole.columns(torch.zeros(6, dtype=torch.int64, device=META))
    if packed:
        batch = replace(batch, starts=torch.zeros(4, dtype=torch.int32, device=META), starts_on_host=(0, 5, 8, 12))
    with no_copies_from_python():
        loss = stage(None, batch)
        loss.backward()
    assert loss.is_meta


def test_heads_that_straddle_ranks_wait_for_nothing() -> None:
    """The index of key/value heads is made with the layer, not in each forward pass."""
    from megapar_models.attention import Attention
    from megapar_models.stage import Blueprint, ForwardContext

    from megapar.context import Axis
    from megapar.recompute import Recompute
    from megapar.tensor_parallel.layers import Sharding

    model = validate(Config(model=STRADDLING, parallel=ParallelConfig(tp=4, dp=1)), 4).model
    sharding = Sharding(Axis("tp", 4, 1, (0, 1, 2, 3)), Axis("grad"), False, torch.float32, META)
    layer = Attention(0, Blueprint(model, sharding, Recompute(), 1), qkv_bias=False, out_bias=False)
    assert layer.attend.kv_index is not None
    rows = layer.qkv.weight.shape[0]
    with no_copies_from_python():
        layer._core(torch.zeros(12, 1, rows, device=META), ForwardContext(micro_batch(packed=False)))


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
