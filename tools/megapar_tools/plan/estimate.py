"""A rough estimate of the memory and the step time of a layout, which decides what a search plans exactly.

There are millions of layouts on a thousand GPUs. To plan one takes milliseconds, and its model's parts must first be
recorded once. Here a layer is a few products, the bytes of its other kernels, and its communication, all from counts of
parameters. Their times are those of `megapar_tools.plan.durations`, as for an exact plan. What a layer keeps is
recorded, for few layouts. Nothing here is shown to a user.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megapar.base.grid import DEFAULT_ORDER, Grid
from megapar.config.derive import every_nth
from megapar.config.model_options import ModelConfig
from megapar.config.options import BY_LAYER, Config
from megapar.declare.sharding import model_dtype
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import make
from megapar.pipeline.simulation import simulate
from megapar_tools.plan.buffers import state_bytes, update_traffic
from megapar_tools.plan.durations import duration
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.network import Network
from megapar_tools.plan.space import Candidate, GridPart
from megapar_tools.plan.verdict import UNEVEN_EXPERTS
from megapar_tools.plan.work import AttentionWork, Kernel, Operations, Product, Started, Waited

# The pipeline whose idle time and kept micro-batches stand for those of others with the same schedule.
_SAMPLE_PP = 4
_SAMPLE_ROUNDS = 3  # of micro-batches, as many in each as there are ranks
_SAMPLE_MESSAGE = 0.02  # in forwards of a rank


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model: of a layer outside of experts, of a layer's experts, and of embedding and head each.

    `expert_share` is the share of the experts that a token uses. `tied` says whether embedding and head are one matrix.
    `attention` are the FLOPs of a token's attention in a layer, forward, on average: some layers may have windows.
    `queries`, `keys_values` and `outputs` are the widths of all heads together, on average of the layers, and
    `key_width` is the width of the widest query.
    """

    layer: float
    experts: float
    expert_share: float
    end: float
    tied: bool
    attention: float
    queries: float
    keys_values: float
    outputs: float
    key_width: int


class Estimate(NamedTuple):
    """Seconds of a step, and bytes of the fullest rank."""

    seconds: float
    nbytes: float
    layout: Candidate


class _Layer(NamedTuple):
    """Seconds of one micro-batch through a layer, and of its attention forward; bytes that it keeps.

    `light` and `attended` are those with recompute light and all_but_attention.
    """

    forward: float
    backward: float
    attention: float
    kept: float
    light: float
    attended: float
    input: float


class _Pipeline(NamedTuple):
    """A schedule with equal stages: its idle time for each rank but one, and the micro-batches that a rank keeps.

    Times are in forwards of a rank. What it keeps is in micro-batches of a whole rank, for each pipeline rank.
    """

    schedule: str
    vpp: int
    idle: float
    kept: float


class _RankWork(NamedTuple):
    """The work of the slowest rank: seconds of a step, of one forward and backward; bytes kept for backward passes."""

    micro_batches: int
    busy: float
    idle: float
    forward: float
    backward: float
    kept: float


class _State(NamedTuple):
    """What a ZeRO stage and its groups cost: bytes of a rank, and seconds."""

    zero_stage: int
    shard_ranks: int
    nbytes: float
    reduce: float
    gather: float
    update: float

    def seconds(self) -> float:
        return self.reduce + self.gather + self.update


class Best:
    """The estimates with the shortest steps, `of_a_kind` of each grid with each recomputation.

    So an error of the estimate hides no other grid. Steps that take more than `within` times the shortest are left out.
    """

    def __init__(self, of_a_kind: int, within: float):
        self._of_a_kind = of_a_kind
        self._within = within
        self._shortest = math.inf
        self.smallest: Estimate | None = None
        """Of all layouts, the one with the fewest bytes."""
        self._kinds: dict[tuple[object, ...], list[Estimate]] = {}
        self._thresholds: dict[tuple[object, ...], float] = {}

    def is_smaller(self, nbytes: float) -> bool:
        """Whether no layout was smaller."""
        return self.smallest is None or nbytes < self.smallest.nbytes

    def threshold(self, layout: Candidate) -> float:
        """Seconds above which an estimate of this kind is not kept."""
        return min(self._thresholds.get(_kind(layout), math.inf), self._within * self._shortest)

    def add(self, estimate: Estimate) -> None:
        self._shortest = min(self._shortest, estimate.seconds)
        kind = _kind(estimate.layout)
        estimates = self._kinds.setdefault(kind, [])
        estimates.append(estimate)
        # Sorted now and then only.
        if len(estimates) >= 2 * self._of_a_kind:
            estimates.sort()
            del estimates[self._of_a_kind :]
            self._thresholds[kind] = estimates[-1].seconds

    def sorted(self) -> list[Estimate]:
        """The kept estimates, the fastest first."""
        kept: list[Estimate] = []
        for estimates in self._kinds.values():
            estimates.sort()
            kept += estimates[: self._of_a_kind]
        # Those from before the shortest was known are left out too, so that the order of grids changes nothing.
        return sorted(estimate for estimate in kept if estimate.seconds <= self._within * self._shortest)


def _kind(layout: Candidate) -> tuple[object, ...]:
    return (layout.pp, layout.tp, layout.cp, layout.ep, layout.etp, layout.recompute, layout.recompute_layers)


KeptByALayer = Callable[[Config], tuple[float, float]]
"""The bytes that one micro-batch keeps in a layer, and those of them in its MLP (`megapar_tools.plan.memory`)."""


class _Networks:
    """The links of layouts' axes: one for each grid and `shard_ranks`, kept because each is asked for often."""

    def __init__(self, config: Config, hardware: Hardware):
        self._config = config
        self._hardware = hardware
        self._found: dict[tuple[object, ...], Network] = {}

    def of(self, layout: Candidate) -> Network:
        """Return the links of the axes of a layout."""
        key = (*layout[:6], layout.shard_ranks)
        if key not in self._found:
            if layout.shard_ranks:
                whole = self.of(layout._replace(shard_ranks=0))
                self._found[key] = whole.with_shards_of(layout.shard_ranks)
                return self._found[key]
            grid = Grid(layout.tp, layout.cp, layout.dp, layout.pp, order=self._config.parallel.order)
            if self._config.model.num_experts:
                grid = replace(grid, ep=layout.ep, etp=layout.etp)
            self._found[key] = Network(grid, self._hardware)
        return self._found[key]


class LayerEstimates:
    """Estimates the time and the kept bytes of a layer in each layout. `kept_by_a_layer` is called for few configs."""

    def __init__(
        self, config: Config, sizes: Sizes, hardware: Hardware, networks: _Networks, kept_by_a_layer: KeptByALayer
    ):
        self.config = config
        self.sizes = sizes
        self.hardware = hardware
        self._networks = networks
        self._kept_by_a_layer = kept_by_a_layer
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}
        self._layers: dict[tuple[object, ...], _Layer] = {}
        self.width = model_dtype(config.train.precision).itemsize  # bytes of a weight or an activation
        self.in_fp8 = config.train.fp8 != "none"
        self.sent = 1 if self.in_fp8 else self.width  # bytes of what products read, on its way between ranks

    def like(self, layout: Candidate) -> _Layer:
        """The layer of a layout, from another layout with an equal layer if there was one."""
        # In the default order of ranks, where tp and cp communicate depends on no other axis.
        key: tuple[object, ...] = layout
        if self.config.parallel.order == DEFAULT_ORDER:
            dp = layout.dp if layout.ep > 1 else 0
            key = (layout.tp, layout.cp, dp, layout.ep, layout.etp, *layout[10:12], layout.micro_batch_size)
        if key not in self._layers:
            self._layers[key] = self._layer(layout)
        return self._layers[key]

    def _layer(self, layout: Candidate) -> _Layer:
        model = self.config.model
        tokens = layout.micro_batch_size * self.config.train.seq_length / layout.cp
        tp = layout.tp
        wide = tokens * model.hidden_size  # elements of the residual stream
        heads = tokens * (self.sizes.queries + self.sizes.keys_values) / tp
        active = model.intermediate_size
        if model.experts and model.num_experts:
            active = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
        inner = tokens * active / tp
        between = wide / tp if layout.sequence_parallel else wide
        moved = self.width * (6 * between + 3 * heads + 5 * inner)
        products = self._products(layout, tokens)
        sends, sends_back = self.communication(layout, tokens)
        network = self._networks.of(layout)
        timed = partial(duration, hardware=self.hardware, network=network)
        attention = self.attention(layout, tokens)
        weights = products
        again = 2 * moved
        if self.in_fp8:
            # Two kernels write the scales of a product's operands.
            products = [p if p.grouped else p._replace(precision="fp8", launches=3 * p.number) for p in products]
            inputs, outputs = 2 * between + heads + inner, heads + 2 * inner + 2 * between
            restored = _restored_for_experts(model, self.sizes, layout, tokens)
            # Quantizing and restoring move a byte and a number. Weight gradients are of restored numbers.
            moved += (1 + self.width) * (inputs + restored)
            again += (1 + self.width) * (inputs + 2 * outputs + restored) + 2 * self.sizes.layer / tp
        forward = timed((*products, attention, Kernel(int(moved)), *sends))
        backward = timed((*products, *weights, attention._replace(backward=True), Kernel(int(again)), *sends_back))
        return _Layer(
            max(forward.seconds, forward.host),
            max(backward.seconds, backward.host),
            timed((attention,)).seconds,
            self._kept_like(layout, "none") * layout.micro_batch_size / layout.cp,
            self._kept_like(layout, "light") * layout.micro_batch_size / layout.cp,
            self._kept_like(layout, "all_but_attention") * layout.micro_batch_size / layout.cp,
            self.width * between,
        )

    def _kept_like(self, layout: Candidate, recompute: str) -> float:
        """The bytes that a whole sample keeps in a layer, with experts that get more than their even share."""
        ep = min(layout.ep, 2)  # with more ranks, a rank has fewer experts with more rows each
        key = (layout.tp, layout.sequence_parallel, ep, layout.etp, recompute)
        if key not in self._kept:
            alone = Candidate(
                *(1, layout.tp, 1, ep * max(layout.etp, 1), ep, layout.etp, "1f1b", 1, 1, 0),
                *(layout.sequence_parallel, "gather", recompute, (), 1),
            )
            self._kept[key] = self._kept_by_a_layer(alone.of(self.config))
        kept, in_mlp = self._kept[key]
        if layout.ep > 1:
            kept += UNEVEN_EXPERTS * in_mlp
        return kept

    def attention(self, layout: Candidate, tokens: float) -> AttentionWork:
        """Forward."""
        flops = tokens * self.sizes.attention / layout.tp
        return AttentionWork(flops, self.sizes.key_width, False, self.config.train.precision, 0)

    def _products(self, layout: Candidate, tokens: float) -> list[Product]:
        """The products of a forward pass: four matrices, and those of a rank's experts."""
        h = self.config.model.hidden_size
        precision = self.config.train.precision
        found = [Product(tokens, self.sizes.layer / (4 * h * layout.tp), h, 4, precision, 0)]
        experts = self.config.model.experts
        if self.sizes.experts and experts:
            here = max(experts.num_experts // layout.ep, 1)
            rows = tokens * experts.num_experts_per_tok * layout.etp / layout.tp
            width = self.sizes.experts / experts.num_experts / h / layout.etp
            weights = int(self.sizes.experts / layout.ep / layout.etp * self.width)
            found.append(Product(rows / here, width, h, here, precision, weights, grouped=True))
        return found

    def communication(self, layout: Candidate, tokens: float) -> tuple[Operations, Operations]:
        """What a layer sends in its forward and in its backward pass, each waited for at once."""
        model = self.config.model
        nbytes = int(self.width * tokens * model.hidden_size)
        read = int(self.sent * tokens * model.hidden_size)
        forward: list[Started | Waited] = []
        backward: list[Started | Waited] = []

        def send(both: bool, axis: str, operation: str, size: float) -> None:
            for direction in (forward, backward) if both else (backward,):
                direction.append(Started(len(direction), axis, operation, int(size)))
                direction.append(Waited(len(direction) - 1))

        if layout.tp > 1:
            for _ in range(2):
                if layout.sequence_parallel:
                    send(True, "tp", "all_gather", read)
                    send(True, "tp", "reduce_scatter", nbytes)
                else:
                    send(True, "tp", "all_reduce", nbytes)
        if layout.cp > 1:
            if layout.cp_attention == "ulysses":
                heads = self.sizes.queries + self.sizes.keys_values + self.sizes.outputs
                send(True, "cp", "all_to_all", self.width * tokens * heads / layout.tp)
            else:
                keys = self.width * tokens * layout.cp * self.sizes.keys_values / layout.tp
                send(True, "cp", "all_gather", keys)
                send(False, "cp", "reduce_scatter", 2 * keys)
        if layout.ep > 1 and model.experts:
            rows = (nbytes + read) / 2 * model.experts.num_experts_per_tok * layout.etp / layout.tp
            # Of the chunks one is waited for. The others travel under the products of experts, if these take as long.
            here = max(model.experts.num_experts // layout.ep, 1)
            chunks = min(self.config.parallel.ep_overlap_chunks or here, here)
            for _ in range(2):
                send(True, "ep", "all_to_all", rows / chunks)
        return tuple(forward), tuple(backward)


def _restored_for_experts(model: ModelConfig, sizes: Sizes, layout: Candidate, tokens: float) -> float:
    """The numbers restored from FP8 for a pass of a layer's experts: their rows, and their matrices."""
    if not sizes.experts or not model.experts:
        return 0.0
    width = model.hidden_size + 2 * model.experts.moe_intermediate_size
    rows = tokens * model.experts.num_experts_per_tok * width / layout.tp
    return rows + sizes.experts / layout.ep / max(layout.etp, 1)


class _StateEstimates:
    """Estimates what each ZeRO stage and its groups cost: bytes of the state, and seconds to send and update it."""

    def __init__(self, config: Config, sizes: Sizes, hardware: Hardware, networks: _Networks):
        self.config = config
        self.sizes = sizes
        self.hardware = hardware
        self._networks = networks
        self.width = model_dtype(config.train.precision).itemsize  # bytes of a weight or an activation

    def of(self, grid: Candidate, zero_stage: int, shard_ranks: int) -> _State:
        """What weights, gradients and optimizer state need on the first or the last pipeline rank."""
        sizes = self.sizes
        layers = self.config.model.all_layers / grid.pp
        ends = sizes.end
        if grid.pp == 1 and not sizes.tied:
            ends = 2 * sizes.end
        dense = (layers * sizes.layer + ends) / grid.tp
        replicas = grid.dp * grid.cp
        nbytes = reduce = gather = update = 0.0
        experts = layers * sizes.experts / (grid.ep * max(grid.etp, 1))
        for parameters, of_layers, ranks, axis in (
            (dense, layers * sizes.layer / grid.tp, replicas, "grad"),
            (experts, experts, self._expert_replicas(grid), "expert_grad"),
        ):
            if not parameters:
                continue
            shards = 1
            if zero_stage:
                shards = min(shard_ranks or ranks, ranks)
            unit = parameters / max(layers, 1)
            offload = self.config.optimizer.offload
            nbytes += state_bytes(self.config.optimizer, self.width) * parameters / shards * (1 - offload)
            nbytes += 4 * (parameters / shards + unit if zero_stage >= 2 else parameters)
            # ZeRO-3 gathers weights of layers, or their FP8 codes. A rank keeps those of its shards.
            codes = of_layers if self.config.train.fp8 != "none" else 0.0
            gathered = self.width * parameters - (self.width - 1) * codes * (zero_stage == 3)
            if zero_stage == 3:
                nbytes += self.width * parameters / shards + codes / shards + 2 * gathered / max(layers, 1)
            else:
                nbytes += self.width * parameters + codes
            network = self._networks.of(grid._replace(shard_ranks=shard_ranks))
            over = axis
            if shards < ranks and zero_stage:
                over = f"{axis}_shards"
                reduce += network.seconds("all_reduce", f"{axis}_copies", 4 * parameters / shards)
            operation = "reduce_scatter" if zero_stage else "all_reduce"
            reduce += network.seconds(operation, over, 4 * parameters)
            if zero_stage:
                gather += network.seconds("all_gather", over, gathered)
            on_device = self.hardware.memory_seconds(
                update_traffic(self.config.optimizer) * parameters / shards * (1 - offload)
            )
            update += max(on_device, self.hardware.host_update_seconds(offload * parameters / shards, self.width))
        return _State(zero_stage, shard_ranks, nbytes, reduce, gather, update)

    def _expert_replicas(self, grid: Candidate) -> int:
        return max(grid.tp * grid.cp * grid.dp // max(grid.ep * grid.etp, 1), 1)


class Estimator:
    """Estimates layouts of one model on one machine. `kept_by_a_layer` is called for few configs, and not twice."""

    def __init__(self, config: Config, sizes: Sizes, hardware: Hardware, kept_by_a_layer: KeptByALayer):
        self.config = config
        self.sizes = sizes
        self.hardware = hardware
        networks = _Networks(config, hardware)
        self.layers = LayerEstimates(config, sizes, hardware, networks, kept_by_a_layer)
        self._states = _StateEstimates(config, sizes, hardware, networks)
        self._pipelines: dict[tuple[str, int, int], _Pipeline] = {}

    def of_grid(self, part: GridPart, limit: float, best: Best) -> int:
        """Add the layouts of a grid that fit into `limit` bytes to `best`. Returns the number of the others."""
        grid = part.mildest
        states = sorted((self._states.of(grid, *state) for state in part.states), key=_State.seconds)
        by_size = {
            breadth: sorted(state.nbytes for state in states if not breadth or state.zero_stage >= 2)
            for breadth in (False, True)
        }
        # The layers of a rank depend on no other part of a layout.
        layers_of_rank = {vpp: self._layers_of_rank(grid.pp, vpp) for _, vpp in part.pipelines}
        too_large = 0
        for in_parts, form in part.sequences:
            for size in part.micro_batch_sizes:
                sized = grid._replace(sequence_parallel=in_parts, cp_attention=form, micro_batch_size=size)
                layer = self.layers.like(sized)
                micro_batches = -(-self.config.train.global_batch_size // (size * grid.dp))
                pipelines = [
                    (self._pipeline(grid.pp, schedule, vpp, micro_batches), layers_of_rank[vpp])
                    for schedule, vpp in part.pipelines
                ]
                ends_kept = self._ends_kept(sized)
                for recompute, recomputed in part.recomputes:
                    layout = sized._replace(recompute=recompute, recompute_layers=recomputed)
                    forward, backward, kept_by_layer = self._recomputed(layout, layer)
                    kept_by_rank = self.config.model.all_layers / grid.pp * kept_by_layer
                    threshold = best.threshold(layout)
                    # Millions of layouts come by here, so nothing is called or made for those that do not fit.
                    for pipeline, layers in pipelines:
                        live: float = micro_batches
                        sizes = by_size[pipeline.schedule == "breadth"]
                        if pipeline.schedule != "breadth":
                            live = min(max(pipeline.kept * grid.pp, 1.0), micro_batches)
                        kept = live * kept_by_rank + ends_kept
                        fitting = bisect_right(sizes, limit - kept)
                        too_large += len(sizes) - fitting
                        if sizes and best.is_smaller(sizes[0] + kept):
                            whole = layout._replace(schedule=pipeline.schedule, vpp=pipeline.vpp)
                            self._keep_smallest(whole, kept, states, best)
                        busy = micro_batches * layers * (forward + backward)
                        idle = pipeline.idle * (grid.pp - 1) * layers * forward
                        if fitting and busy + idle <= threshold:
                            whole = layout._replace(schedule=pipeline.schedule, vpp=pipeline.vpp)
                            work = _RankWork(micro_batches, busy, idle, layers * forward, layers * backward, kept)
                            self._add(whole, work, states, limit, best)
                            threshold = best.threshold(layout)
        return too_large

    def _keep_smallest(self, layout: Candidate, kept: float, states: Sequence[_State], best: Best) -> None:
        usable = [state for state in states if layout.schedule != "breadth" or state.zero_stage >= 2]
        state = min(usable, key=lambda state: state.nbytes)
        layout = layout._replace(zero_stage=state.zero_stage, shard_ranks=state.shard_ranks)
        best.smallest = Estimate(math.inf, state.nbytes + kept, layout)

    def _add(self, layout: Candidate, work: _RankWork, states: Sequence[_State], limit: float, best: Best) -> None:
        """Add the layout with each of `states` that fits to `best`."""
        for state in states:
            if state.nbytes + work.kept > limit or (layout.schedule == "breadth" and state.zero_stage < 2):
                continue
            # With ZeRO-2 and 3 every micro-batch is communicated for.
            times = 1
            if state.zero_stage >= 2 and layout.schedule != "breadth":
                times = work.micro_batches
            exposed = times * max(state.reduce - 0.8 * work.backward, 0.05 * state.reduce)
            if state.zero_stage == 3:
                hidden = 0.5 * (work.forward + work.backward)
                exposed += times * max(2 * state.gather - hidden, 0.05 * state.gather)
            elif state.zero_stage > 0:
                exposed += state.gather
            seconds = work.busy + work.idle + exposed + state.update
            if seconds <= best.threshold(layout):
                found = layout._replace(zero_stage=state.zero_stage, shard_ranks=state.shard_ranks)
                best.add(Estimate(seconds, state.nbytes + work.kept, found))

    def _recomputed(self, layout: Candidate, layer: _Layer) -> tuple[float, float, float]:
        """Seconds of forward and backward of a layer, and the bytes that it keeps."""
        if layout.recompute in BY_LAYER:
            share = 1 / every_nth(layout.recompute_layers)
            again, of_recomputed = layer.forward, layer.input
            if layout.recompute == "all_but_attention":
                again -= layer.attention
                of_recomputed = layer.attended
            of_recomputed -= self.config.train.offload * layer.input
            kept = share * of_recomputed + (1 - share) * layer.kept
            return layer.forward, layer.backward + share * again, kept
        if layout.recompute == "none":
            return layer.forward, layer.backward, layer.kept
        if layout.recompute == "light":
            # What is made again is written once, from as much that is read twice.
            again = self.hardware.memory_seconds(3 * (layer.kept - layer.light))
            return layer.forward, layer.backward + again, layer.light
        return layer.forward, layer.backward + layer.attention, 0.95 * layer.kept

    def _layers_of_rank(self, pp: int, vpp: int) -> float:
        """The layers of the slowest rank. The head counts as the layers that it is as large as."""
        layers = self.config.model.all_layers
        active = self.sizes.layer + self.sizes.experts * self.sizes.expert_share
        whole = layers + self.sizes.end / active
        stages = pp * vpp
        largest = max(-(-layers // stages), whole / stages)
        # Ranks with several stages have larger and smaller ones.
        return (whole / pp + largest * vpp) / 2

    def _ends_kept(self, layout: Candidate) -> float:
        """Bytes of the logits and their gradient, beside what the first rank keeps."""
        if layout.pp > 1:
            return 0.0  # the last rank keeps few micro-batches
        tokens = layout.micro_batch_size * self.config.train.seq_length / layout.cp
        return tokens * self.config.model.head_rows / layout.tp * (self.layers.width + 4)

    def _pipeline(self, pp: int, schedule: str, vpp: int, micro_batches: int) -> _Pipeline:
        if pp == 1:
            return _Pipeline(schedule, vpp, 0.0, 1.0)
        # Several stages on a rank leave it idle in a round that has fewer micro-batches than there are ranks.
        rounds, rest = divmod(micro_batches, pp)
        batches = min(rounds, _SAMPLE_ROUNDS) * _SAMPLE_PP + -(-rest * _SAMPLE_PP // pp)
        key = (schedule, vpp, batches)
        if key not in self._pipelines:
            orders = make(schedule, _SAMPLE_PP, vpp, batches)
            timeline = simulate(lower(orders, _SAMPLE_PP * vpp), 1 / vpp, 2 / vpp, _SAMPLE_MESSAGE / vpp)
            idle = (timeline.makespan - 3 * batches) / (_SAMPLE_PP - 1)
            self._pipelines[key] = _Pipeline(schedule, vpp, idle, max(timeline.peak_live) / vpp / _SAMPLE_PP)
        return self._pipelines[key]
