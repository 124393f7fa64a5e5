"""Faults to plant in the running code of a layout, each as somebody has written it or could have.

A comparison would prove nothing if it saw none of them. Each fault replaces a function of this project in the processes
of the ranks, and nowhere else: the reference and the comparison stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import torch

from megapar import linear
from megapar.batch import MicroBatch
from megapar.comm import collectives
from megapar.comm.pending import Pending
from megapar.config.model_options import ModelConfig
from megapar.context import Axis
from megapar.context_parallel import gather
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.ring import _Round
from megapar.context_parallel.ulysses import Ulysses
from megapar.data import order
from megapar.data_parallel import accumulate
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.partial_sums import _Aligned, _Overlapping
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.data_parallel.weights import FlatWeights
from megapar.errors import ConfigError
from megapar.expert_parallel import dispatch, route, row_counts
from megapar.grid import TIED_AXIS
from megapar.main_grad import WeightGradientQueue
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.base import Optimizer
from megapar.pipeline.runtime import PipelineRuntime
from megapar.tensor_parallel import layers, regions
from megapar.train import step, trainer

NONE = "none"
"""The plant that plants nothing."""
LIST = "list"
"""The word that asks for the names."""

Wrap = Callable[[Any], Any]
"""From the original function to the one in its place."""
Patch = Callable[[Any, str, Wrap], None]
"""Replaces an attribute of a module or class as a `Wrap` says, for as long as the rank runs."""


@dataclass(frozen=True)
class Plant:
    """A fault by name. `sentence` says what somebody has done wrong.

    It shows in `layouts`. A model shows it if it `serves`; otherwise the program takes its model `model`. `options` are
    further options, by dotted path.
    """

    name: str
    sentence: str
    layouts: tuple[str, ...]
    patch: Callable[[Patch, int], None]
    model: str = "dense"
    serves: Callable[[ModelConfig], bool] = lambda model: True
    options: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def planted(self, rank: int) -> Iterator[None]:
        """A context with the fault in the code of this process. `rank` is the number of this rank."""
        with ExitStack() as stack:

            def patch(owner: Any, name: str, wrap: Wrap) -> None:
                original = getattr(owner, name)
                setattr(owner, name, wrap(original))
                stack.callback(setattr, owner, name, original)

            self.patch(patch, rank)
            yield


def find(name: str) -> Plant | None:
    """The fault called `name`; None for NONE. Raises ConfigError for an unknown name."""
    if name == NONE:
        return None
    for plant in PLANTS:
        if plant.name == name:
            return plant
    near = get_close_matches(name, [plant.name for plant in PLANTS], n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"--plant {LIST} prints their names"
    raise ConfigError(f"--plant {name}: no such fault; {hint}")


# Tensor parallelism


def _no_row_sum(patch: Patch, rank: int) -> None:
    patch(layers, "reduce_from_tp", lambda original: lambda x, tp: x)


def _no_input_gradient_sum(patch: Patch, rank: int) -> None:
    patch(regions.Copy, "leave_async", lambda original: lambda self, grad_x: (grad_x, Pending()))


def _no_sum_over(name: str) -> Callable[[Patch, int], None]:
    """No partial gradients of equal boxes are summed over the axis `name`."""

    def plant(patch: Patch, rank: int) -> None:
        def wrap(original: Any) -> Callable[..., None]:
            def summed(self: _Aligned, grads: torch.Tensor) -> None:
                if self.axis.name != name:
                    original(self, grads)

            return summed

        patch(_Aligned, "sum", wrap)

    return plant


def _no_head_sum(patch: Patch, rank: int) -> None:
    patch(_Overlapping, "sum", lambda original: lambda self, grads: None)


def _seed_by_rank(patch: Patch, rank: int) -> None:
    patch(trainer, "initialize", lambda original: lambda modules, seed, **how: original(modules, seed + rank, **how))


def _heads_from_zero(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., Any]:
        def of(self: AttentionDropout, *args: Any, **kwargs: Any) -> Any:
            return original(replace(self, heads=range(len(self.heads))), *args, **kwargs)

        return of

    patch(AttentionDropout, "of", wrap)


# Data parallelism and ZeRO


def _averaged(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def finish(self: Gradients) -> None:
            original(self)
            for bucket in self.layout.buckets:
                self.flat[bucket.start : bucket.stop].div_(self.layout.axis(bucket).size)

        return finish

    patch(Gradients, "finish", wrap)


def _last_bucket_kept(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def reduce_next(self: Gradients) -> None:
            if len(self._started) < len(self.layout.buckets) - 1:
                original(self)
            else:
                self._started.append(Pending())

        return reduce_next

    patch(Gradients, "_reduce_next", wrap)


def _local_divisor(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        def count(batches: Sequence[MicroBatch], ctx: Any) -> torch.Tensor:
            original(batches, ctx)
            return torch.stack([batch.weights_bs.sum() for batch in batches]).sum().clamp_(min=1.0)

        return count

    patch(step, "count_targets", wrap)


def _same_samples(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., Any]:
        return lambda consumed, batch, micro_batch, dp_rank, dp_size: original(consumed, batch, micro_batch, 0, dp_size)

    patch(order, "micro_batch_positions", wrap)


def _rounded_sums(patch: Patch, rank: int) -> None:
    """Main gradients rounded to bf16 after each addition."""

    def wrap(original: Any) -> Callable[..., None]:
        def add(*args: Any) -> None:
            original(*args)
            total = next(arg for arg in args if isinstance(arg, torch.Tensor))
            total.copy_(total.bfloat16())

        return add

    patch(accumulate, "_add", wrap)
    patch(linear, "_add_product", wrap)


def _weights_not_gathered(patch: Patch, rank: int) -> None:
    patch(FlatWeights, "start_gather", lambda original: lambda self: None)


def _first_sum_twice(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def add(self: UnitGradients, unit: int) -> None:
            first = unit in self._untouched
            original(self, unit)
            if first:
                self._shards[unit].mul_(2.0)

        return add

    patch(UnitGradients, "add", wrap)


def _weights_before_update(patch: Patch, rank: int) -> None:
    kept: list[torch.Tensor] = []

    def wrap(original: Any) -> Callable[..., None]:
        def gather_unit(self: UnitWeights, unit: int) -> None:
            if not kept:
                kept.extend(shard.clone() for shard in self._shards)
            shards = self._shards
            self._shards = kept
            original(self, unit)
            self._shards = shards

        return gather_unit

    patch(UnitWeights, "gather_unit", wrap)


def _weights_freed(patch: Patch, rank: int) -> None:
    """The memory of a unit is used for something else at every second use of the unit."""
    uses: dict[int, int] = {}

    def wrap(original: Any) -> Callable[..., None]:
        def wait_for(self: UnitWeights, unit: int) -> None:
            original(self, unit)
            uses[unit] = uses.get(unit, 0) + 1
            if uses[unit] % 2 == 0:
                self._whole[unit].zero_()

        return wait_for

    patch(UnitWeights, "wait_for", wrap)


def _copies_not_summed(patch: Patch, rank: int) -> None:
    patch(FlatLayout, "copies", lambda original: lambda self, bucket: Axis("copies"))


# Pipeline


def _one_less(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., Any]:
        return lambda self, batches, *args, **kwargs: original(self, batches[:-1], *args, **kwargs)

    patch(PipelineRuntime, "step", wrap)


def _documents_lost(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., Any]:
        def step(self: PipelineRuntime, batches: Sequence[MicroBatch], *args: Any, **kwargs: Any) -> Any:
            if not self.axis.first and not self.axis.last:
                batches = [replace(batch, starts=None, starts_on_host=None) for batch in batches]
            return original(self, batches, *args, **kwargs)

        return step

    patch(PipelineRuntime, "step", wrap)


def _one_twice(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., Any]:
        return lambda self, batches, *args, **kwargs: original(self, [*batches, batches[0]], *args, **kwargs)

    patch(PipelineRuntime, "step", wrap)


def _first_weight_gradient_lost(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def run(self: WeightGradientQueue) -> None:
            self._entries.popleft()
            original(self)

        return run

    patch(WeightGradientQueue, "run", wrap)


def _chunks_swapped(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def create(self: PipelineRuntime, stages: Mapping[int, Any], *args: Any, **kwargs: Any) -> None:
            swapped = dict(stages)
            # Those with embedding and head stay: they take and return something else.
            first, second = [number for number, stage in sorted(stages.items()) if not (stage.first or stage.last)][:2]
            swapped[first] = stages[second]
            swapped[second] = stages[first]
            original(self, swapped, *args, **kwargs)

        return create

    patch(PipelineRuntime, "__init__", wrap)


# Context parallelism


def _positions_from_zero(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., MicroBatch]:
        def columns(self: MicroBatch, positions_s: torch.Tensor) -> MicroBatch:
            return replace(original(self, positions_s), positions_s=torch.arange(len(positions_s)))

        return columns

    patch(MicroBatch, "columns", wrap)


def _contiguous_chunks(patch: Patch, rank: int) -> None:
    def chunks(length: int, cp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        size = length // (2 * cp)
        return (2 * rank * size, (2 * rank + 1) * size), ((2 * rank + 1) * size, (2 * rank + 2) * size)

    patch(gather, "chunks", lambda original: chunks)


def _key_gradients_kept(patch: Patch, rank: int) -> None:
    def first_part(parts: torch.Tensor, cp: Axis) -> torch.Tensor:
        return parts.view(cp.size, -1)[cp.rank].clone()

    patch(
        gather,
        "collectives",
        lambda original: SimpleNamespace(all_gather=collectives.all_gather, reduce_scatter=first_part),
    )


def _other_direction(patch: Patch, rank: int) -> None:
    patch(_Round, "source", lambda original: lambda self, step: (self.cp.rank + step) % self.cp.size)


def _heads_reversed(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def create(self: Ulysses, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.kv_order = self.kv_order.flip(0)

        return create

    patch(Ulysses, "__init__", wrap)


# Experts


def _not_sorted(patch: Patch, rank: int) -> None:
    patch(row_counts.Chunk, "arrives_sorted", lambda original: False)
    patch(row_counts.Chunk, "expert_order", lambda original: None)


def _norm_of_weights_forgotten(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        def weights(scores_te: torch.Tensor, indices_tk: torch.Tensor, rule: route.RouterRule) -> torch.Tensor:
            other = replace(rule, norm_topk_prob=not rule.norm_topk_prob)
            chosen: torch.Tensor = original(scores_te, indices_tk, other)
            return chosen

        return weights

    patch(route, "weights", wrap)


def _experts_scaled(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        def finish(self: Gradients) -> None:
            original(self)
            for slot in self.layout.slots:
                if slot.spec.grad_axis.name.startswith("expert"):
                    self.flat[slot.start : slot.stop].mul_(2.0)

        return finish

    patch(Gradients, "finish", wrap)


def _slices_not_summed(patch: Patch, rank: int) -> None:
    def sum_rows(parts: torch.Tensor, brought_rows: Sequence[int], etp: Axis) -> torch.Tensor:
        return parts.split(list(brought_rows))[etp.rank]

    patch(dispatch, "_sum_rows", lambda original: sum_rows)


# Norm and update


def _copies_counted(patch: Patch, rank: int) -> None:
    patch(FlatLayout, "norm_ranges", lambda original: FlatLayout.shards)


def _all_decayed(patch: Patch, rank: int) -> None:
    patch(Optimizer, "ranges_where_decayed", lambda original: lambda self, shard: [(0, shard.stop - shard.start)])


def _one_step_later(patch: Patch, rank: int) -> None:
    def wrap(original: Any) -> Callable[..., None]:
        return lambda self, shard, grad, params, step: original(
            self, shard, grad, params, replace(step, number=step.number + 1)
        )

    patch(AdamW, "update", wrap)


def _nothing_frozen(patch: Patch, rank: int) -> None:
    patch(trainer, "freeze_others", lambda original: lambda stages, patterns, ctx: [])


def _has_experts(model: ModelConfig) -> bool:
    return model.num_experts > 1


def _is_tied(model: ModelConfig) -> bool:
    return model.tie_word_embeddings


def _has_key_value_heads(model: ModelConfig) -> bool:
    return model.num_key_value_heads != 1


def _has_six_layers(model: ModelConfig) -> bool:
    return model.num_hidden_layers >= 6


def _has_attention_dropout(model: ModelConfig) -> bool:
    return bool(getattr(model, "attention_dropout", 0.0))  # an option of some families


def _never(model: ModelConfig) -> bool:
    return False


PLANTS = (
    # Name, what somebody has done wrong, layouts, the fault, and what model it needs.
    Plant("tp-row-sum-missing", "no sum over tp after a row-parallel layer", ("tp2",), _no_row_sum),
    Plant("tp-input-gradient-sum-missing", "no sum over tp of an input's gradient", ("tp2",), _no_input_gradient_sum),
    Plant("sp-norm-gradient-sum-missing", "gradients of norms not summed over tp", ("tp2,sp",), _no_sum_over("tp")),
    Plant(
        "kv-head-sum-missing",
        "gradients of heads that two ranks hold not summed",
        ("tp2",),
        _no_head_sum,
        "straddling",
        _never,
    ),
    Plant("weights-by-rank", "initial weights drawn with the rank's number", ("tp2",), _seed_by_rank),
    Plant(
        "dropout-mask-by-rank",
        "each rank numbers its heads from 0",
        ("tp2",),
        _heads_from_zero,
        "dropout",
        _has_attention_dropout,
    ),
    Plant("dp-gradient-averaged", "gradients divided by dp once more", ("dp2,zero1",), _averaged),
    Plant("dp-bucket-not-reduced", "the last bucket is never reduced", ("dp2,zero1",), _last_bucket_kept),
    Plant("loss-divisor-local", "each replica divides by its own tokens", ("dp2",), _local_divisor),
    Plant("replicas-read-the-same", "all replicas train on the same samples", ("dp2",), _same_samples),
    Plant("main-gradient-in-bf16", "micro-batches added in bf16", ("dp2,zero1",), _rounded_sums),
    Plant("zero1-weights-stale", "updated weights not gathered", ("dp2,zero1",), _weights_not_gathered),
    Plant("zero2-unit-added-twice", "the first sum of a unit added twice", ("dp2,zero2",), _first_sum_twice),
    Plant("zero3-weights-stale", "gathers send weights of before the update", ("dp2,zero3",), _weights_before_update),
    Plant(
        "zero3-weights-released-early", "memory of weights freed while they are in use", ("dp2,zero3",), _weights_freed
    ),
    Plant("shard-copies-not-summed", "groups of shard_ranks not summed", ("dp2,zero1,shard1",), _copies_not_summed),
    Plant(
        "tied-embedding-sum-missing",
        "gradients of both ends not summed",
        ("pp2",),
        _no_sum_over(TIED_AXIS),
        "tied",
        _is_tied,
    ),
    Plant("micro-batch-dropped", "the last micro-batch is never run", ("pp2",), _one_less),
    Plant(
        "documents-lost-in-middle",
        "stages in the middle do not know where documents begin",
        ("pp3",),
        _documents_lost,
        options={"data.documents": "apart"},
    ),
    Plant("micro-batch-counted-twice", "the first micro-batch is run again", ("pp2",), _one_twice),
    Plant("weight-gradient-skipped", "W leaves out its first matrix", ("pp2,zb-h1",), _first_weight_gradient_lost),
    Plant(
        "vpp-chunks-swapped",
        "stages of a rank in another order",
        ("pp2,vpp3",),
        _chunks_swapped,
        "six-layers",
        _has_six_layers,
    ),
    Plant("cp-positions-local", "positions counted from 0 on each rank", ("cp2",), _positions_from_zero),
    Plant("cp-mask-contiguous", "mask of a rank with one run of positions", ("cp2,gather",), _contiguous_chunks),
    Plant("cp-key-gradients-local", "keys' gradients not summed over cp", ("cp2,gather",), _key_gradients_kept),
    Plant("ring-direction-wrong", "keys taken for those of the next rank", ("cp3,ring",), _other_direction),
    Plant(
        "ulysses-kv-order",
        "key/value heads sent in reverse",
        ("cp2,ulysses",),
        _heads_reversed,
        "dense",
        _has_key_value_heads,
    ),
    Plant(
        "expert-rows-not-sorted",
        "arrived rows not sorted by expert",
        ("dp2,ep2",),
        _not_sorted,
        "experts",
        _has_experts,
    ),
    Plant(
        "expert-slices-not-summed",
        "results of an expert not summed over etp",
        ("tp2,etp2",),
        _slices_not_summed,
        "experts",
        _has_experts,
    ),
    Plant(
        "combine-weights-not-normed",
        "scores of experts not divided by their sum",
        ("dp2,ep2",),
        _norm_of_weights_forgotten,
        "experts",
        _never,
    ),
    Plant(
        "expert-gradient-scaled",
        "gradients of experts multiplied by ep",
        ("dp2,ep2,zero1",),
        _experts_scaled,
        "experts",
        _has_experts,
    ),
    Plant("clip-norm-counts-copies", "copies of tp ranks counted twice", ("tp2",), _copies_counted),
    Plant("norms-decayed", "weight decay of norms and biases", ("dp2,zero1",), _all_decayed),
    Plant("adam-step-off-by-one", "bias correction of the next step", ("dp2,zero1",), _one_step_later),
    Plant(
        "frozen-parameter-trained",
        "train.trainable without effect",
        ("dp2",),
        _nothing_frozen,
        serves=_never,
        options={"train.trainable": ("layers.*",)},
    ),
    Plant(
        "whole-factor-not-summed",
        "gradients of adapters' whole factors not summed over tp",
        ("tp2",),
        _no_sum_over("tp"),
        serves=_never,
        options={"adapter.rank": 4},
    ),
)
