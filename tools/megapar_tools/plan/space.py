"""The layouts of a model on a number of GPUs: which values of which options are tried, and which of them can run."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from megapar.base.errors import ConfigError
from megapar.config.derive import every_nth
from megapar.config.messages import divisors
from megapar.config.options import BY_LAYER, Config, flatten, option_types, unflatten
from megapar.pipeline.schedules import SCHEDULES, virtual_stages
from megapar.train.levers import MODES

Validate = Callable[[Config, int], Config]
"""Checks a config for a number of ranks, and fills in derived values. Raises ConfigError with a line a problem."""

# gpipe takes as long as 1f1b and keeps more. Only breadth can be better, because ZeRO-2 and 3 send less under it.
# A stage needs a layer, and each stage more on a rank sends the activations once more around. Llama 3 had 16 layers on
# a rank (arXiv 2407.21783), and Megatron-LM's published configurations have up to 12 stages on one.
_MOST_STAGES = 12
_LARGEST_MICRO_BATCH = 16
_RECOMPUTE_LAYERS = ((), ("::2",))


class Candidate(NamedTuple):
    """The options that a search decides. The fields are ordered so that simpler layouts are smaller."""

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    schedule: str
    vpp: int
    zero_stage: int
    shard_ranks: int
    sequence_parallel: bool
    cp_attention: str
    recompute: str
    recompute_layers: tuple[str, ...]
    micro_batch_size: int

    def options(self) -> dict[str, Any]:
        """The values by dotted path, such as {"parallel.tp": 4}."""
        return {f"{SECTIONS[name]}.{name}": value for name, value in self._asdict().items()}

    def of(self, base: Config) -> Config:
        """`base` with this layout."""
        changed: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
        for name, value in self._asdict().items():
            changed[SECTIONS[name]][name] = value
        sections = {section: replace(getattr(base, section), **values) for section, values in changed.items()}
        return replace(base, **sections)


SECTIONS = {
    **dict.fromkeys(Candidate._fields, "parallel"),
    "zero_stage": "optimizer",
    "shard_ranks": "optimizer",
    "recompute": "train",
    "recompute_layers": "train",
    "micro_batch_size": "train",
}
"""The section of each field of a layout."""


def layout_of(config: Config) -> Candidate:
    """The layout of a config."""
    return Candidate(**{name: getattr(getattr(config, section), name) for name, section in SECTIONS.items()})


def searchable(config: Config, fixed: Mapping[str, Any], device: str) -> Config:
    """`config` with `fixed`, and with defaults for the options that only serve its own layout.

    The result accepts every layout as far as the model, the batch and `fixed` do. `device` is a value of launch.device.
    """
    defaults = flatten(Config())
    for_own_layout = (
        *Candidate(*[None] * len(Candidate._fields)).options(),  # type: ignore[arg-type]
        # A partition is for one number of stages, chunks are refused without tp or ep, and the others meet some ZeRO
        # stages.
        *("parallel.partition", "parallel.schedule_memory_gb"),
        *("parallel.tp_overlap_chunks", "parallel.ep_overlap_chunks"),
        "train.offload",  # it is refused without recomputed layers
        *("optimizer.bucket_mb", "optimizer.overlap_param_gather"),
        "launch.nproc",  # it starts ranks on this machine
    )
    values = flatten(config) | {path: defaults[path] for path in for_own_layout}
    return unflatten(values | {"launch.device": device} | dict(fixed), type(config.model))


@dataclass(frozen=True)
class GridPart:
    """A legal grid of ranks: a layout with the mildest values elsewhere, and the legal values of its other parts."""

    mildest: Candidate
    sequences: tuple[tuple[bool, str], ...]
    """(sequence_parallel, cp_attention)."""
    pipelines: tuple[tuple[str, int], ...]
    """(schedule, vpp)."""
    states: tuple[tuple[int, int], ...]
    """(zero_stage, shard_ranks)."""
    micro_batch_sizes: tuple[int, ...]
    recomputes: tuple[tuple[str, tuple[str, ...]], ...]
    """(recompute, recompute_layers)."""

    def pairs(self) -> Iterator[tuple[tuple[str, int], tuple[int, int]]]:
        """Yield each pipeline with each state of use to it."""
        for pipeline in self.pipelines:
            for state in self.states:
                # Below ZeRO-2 nothing is sent for a micro-batch. breadth is gpipe then.
                if pipeline[0] != "breadth" or state[0] >= 2:
                    yield pipeline, state

    def __len__(self) -> int:
        """The number of layouts."""
        pairs = sum(1 for _ in self.pairs())
        return pairs * len(self.sequences) * len(self.micro_batch_sizes) * len(self.recomputes)

    def layouts(self) -> Iterator[Candidate]:
        for schedule, vpp, zero_stage, shard_ranks in ((*pipeline, *state) for pipeline, state in self.pairs()):
            ordered = self.mildest._replace(schedule=schedule, vpp=vpp, zero_stage=zero_stage, shard_ranks=shard_ranks)
            for sequence_parallel, cp_attention in self.sequences:
                for recompute, layers in self.recomputes:
                    for size in self.micro_batch_sizes:
                        yield ordered._replace(
                            sequence_parallel=sequence_parallel,
                            cp_attention=cp_attention,
                            recompute=recompute,
                            recompute_layers=layers,
                            micro_batch_size=size,
                        )


class TriedValues:
    """The values that a search tries for each part of a layout. `fixed` ones win, and `given` ones are among them."""

    def __init__(self, base: Config, world_size: int, gpus_per_node: int, fixed: Mapping[str, Any], given: Candidate):
        self.base = base
        self.world_size = world_size
        self._gpus_per_node = gpus_per_node
        self._fixed = fixed
        self._given = given

    def _values(self, name: str, candidates: Iterable[Any]) -> list[Any]:
        """The values of a field of `Candidate`: the fixed one, or else `candidates`."""
        path = f"{SECTIONS[name]}.{name}"
        if path in self._fixed:
            return [self._fixed[path]]
        return list(candidates)

    def _with_given(self, name: str, candidates: Iterable[Any]) -> list[Any]:
        """Return `_values` with the value of the given config, which may be none of `candidates`."""
        return sorted(self._values(name, {*candidates, getattr(self._given, name)}))

    def grids(self) -> Iterator[Candidate]:
        """Yield all grids, with the mildest values elsewhere."""
        world = self.world_size
        # Tensor ranks exchange activations in every layer, which no network between nodes carries in time.
        in_node = [n for n in divisors(world) if n <= max(self._gpus_per_node, self._given.tp)]
        for tp in self._values("tp", in_node):
            for cp in self._values("cp", divisors(max(world // tp, 1))):
                for pp in self._values("pp", divisors(max(world // (tp * cp), 1))):
                    dp = world // (tp * cp * pp)
                    if self._fixed.get("parallel.dp", dp) not in (0, dp):
                        continue
                    for ep, etp in self._experts(tp, tp * cp * dp):
                        yield Candidate(
                            *(pp, tp, cp, dp, ep, etp, "1f1b", 1, 1, 0, False, "gather", "none", (), 1),
                        )

    def _experts(self, tp: int, ranks: int) -> list[tuple[int, int]]:
        """Pairs of ep and etp for the `ranks` of a pipeline rank."""
        num_experts = self.base.model.num_experts
        if not num_experts:
            return [(1, 0)]
        eps = self._values("ep", [n for n in divisors(max(ranks, 1)) if n <= num_experts])
        # Experts are narrow already: they are whole, or cut as the rest of the layer is.
        etps = [etp or tp for etp in self._with_given("etp", (1, tp))]
        return [(ep, etp) for ep in eps for etp in dict.fromkeys(etps) if ep * etp <= ranks]

    def pipelines(self, pp: int) -> list[tuple[str, int]]:
        """Pairs of schedule and vpp for so many pipeline ranks."""
        if pp == 1 and "parallel.schedule" not in self._fixed:
            # Without a pipeline all schedules accumulate gradients. breadth gathers a layer once for all micro-batches.
            names = ["1f1b", "breadth"]
        else:
            useful = [name for name, each in SCHEDULES.items() if each.breadth_first or not each.keeps_all]
            names = self._with_given("schedule", useful)
        pairs = []
        for name in names:
            stages = virtual_stages(name)
            layers = -(-self.base.model.num_hidden_layers // pp)
            several = [n for n in divisors(layers) if 1 < n <= _MOST_STAGES] or [2]
            numbers = [1]
            if stages.only:
                numbers = [stages.only]
            elif stages.default > 1:
                numbers = several
            if "parallel.vpp" in self._fixed:
                numbers = [self._fixed["parallel.vpp"] or stages.meant_by(0)]
            elif name == self._given.schedule and pp == self._given.pp:
                numbers = sorted({*numbers, self._given.vpp or stages.meant_by(0)})
            pairs += [(name, number) for number in numbers]
        return pairs

    def sequences(self, tp: int, cp: int) -> list[tuple[bool, str]]:
        """Pairs of sequence_parallel and cp_attention. With one rank to share with, both would have no effect."""
        in_parts = [False]
        if tp > 1:
            in_parts = self._values("sequence_parallel", (True, False))
        forms = ["gather"]
        if cp > 1:
            forms = self._values("cp_attention", get_args(option_types()["parallel.cp_attention"]))
        elif "parallel.cp_attention" in self._fixed:
            forms = [self._fixed["parallel.cp_attention"]]
        if "parallel.sequence_parallel" in self._fixed:
            in_parts = [self._fixed["parallel.sequence_parallel"]]
        return [(in_part, form) for in_part in in_parts for form in forms]

    def states(self, replicas: int) -> list[tuple[int, int]]:
        """Pairs of zero_stage and shard_ranks for `replicas` ranks of dp x cp."""
        stages = self._values("zero_stage", get_args(option_types()["optimizer.zero_stage"]))
        if replicas == 1 and "optimizer.zero_stage" not in self._fixed:
            stages = [1]  # with one replica nothing is sharded in any stage
        groups = self._values("shard_ranks", [0, *divisors(max(replicas, 1))[1:-1]])
        groups = [ranks for ranks in groups if ranks < max(replicas, 2)] or groups
        return [(stage, ranks) for stage in stages for ranks in groups if stage or not ranks]

    def micro_batch_sizes(self, dp: int) -> list[int]:
        """Powers of two up to the samples of a replica."""
        of_a_replica = -(-self.base.train.global_batch_size // max(dp, 1))
        sizes = [2**n for n in range(_LARGEST_MICRO_BATCH.bit_length()) if 2**n <= of_a_replica]
        return [n for n in self._with_given("micro_batch_size", sizes or [1]) if n <= of_a_replica] or [1]

    def recomputes(self) -> list[tuple[str, tuple[str, ...]]]:
        names = self._values("recompute", MODES)
        # Layers by number are for the stages of one layout.
        given = self._given.recompute_layers if every_nth(self._given.recompute_layers) else ()
        tried = sorted(self._values("recompute_layers", {*_RECOMPUTE_LAYERS, given}))
        return [(name, layers) for name in names for layers in tried if name in BY_LAYER or not layers]


class Space:
    """All layouts of `base` on `world_size` ranks.

    `base` is a result of `searchable`. `fixed` are the values, by dotted path, that no layout may change. `given` is
    the config's own layout: its values are tried too. `validate` decides what is legal. Parts of a layout are checked
    one by one, with the mildest values elsewhere: a grid with each form of attention, then with each schedule, each
    ZeRO stage, each micro-batch. No rule couples these parts in another way. A layout is validated as a whole before it
    is planned.
    """

    def __init__(
        self,
        base: Config,
        world_size: int,
        gpus_per_node: int,
        validate: Validate,
        fixed: Mapping[str, Any],
        given: Candidate,
    ):
        self.base = base
        self.world_size = world_size
        self.rejected: Counter[str] = Counter()
        """Numbers of layouts that cannot run, by reason."""
        self.first_problems: dict[str, str] = {}
        """One whole message for each reason."""
        self._validate = validate
        self._tried = TriedValues(base, world_size, gpus_per_node, fixed, given)
        self._pipelines_of: dict[int, tuple[tuple[str, int], ...]] = {}
        self.grids = list(self._legal_grids())

    def __len__(self) -> int:
        """The number of legal layouts."""
        return sum(map(len, self.grids))

    def check(self, layout: Candidate) -> Config:
        """The config of a layout, with derived values. Raises ConfigError if it cannot run."""
        return self._validate(layout.of(self.base), self.world_size)

    def _legal_grids(self) -> Iterator[GridPart]:
        recomputes = tuple(self._tried.recomputes())
        for grid in self._tried.grids():
            pipelines = self._tried.pipelines(grid.pp)
            states = self._tried.states(grid.dp * grid.cp)
            sizes = self._tried.micro_batch_sizes(grid.dp)
            # How many layouts a refused value rules out. Refused values of two parts are counted once for each.
            layouts = len(pipelines) * len(states) * len(sizes) * len(recomputes)
            sequences = []
            for in_part, form in self._tried.sequences(grid.tp, grid.cp):
                if self._is_legal(grid._replace(sequence_parallel=in_part, cp_attention=form), layouts):
                    sequences.append((in_part, form))
            if not sequences:
                continue
            grid = grid._replace(sequence_parallel=sequences[0][0], cp_attention=sequences[0][1])
            layouts *= len(sequences)
            part = GridPart(
                grid,
                tuple(sequences),
                self._which_pipelines(grid, pipelines, layouts // len(pipelines)),
                self._which_states(grid, states, layouts // len(states)),
                self._which_sizes(grid, sizes, layouts // len(sizes)),
                recomputes,
            )
            if len(part):
                yield part

    def _which_pipelines(
        self, grid: Candidate, pipelines: list[tuple[str, int]], layouts: int
    ) -> tuple[tuple[str, int], ...]:
        # Which schedules can run depends on no axis but pp.
        if grid.pp not in self._pipelines_of:
            self._pipelines_of[grid.pp] = tuple(
                pair for pair in pipelines if self._is_legal(grid._replace(schedule=pair[0], vpp=pair[1]), layouts)
            )
        return self._pipelines_of[grid.pp]

    def _which_states(
        self, grid: Candidate, states: list[tuple[int, int]], layouts: int
    ) -> tuple[tuple[int, int], ...]:
        # Which groups can shard depends on the ranks that hold the same weights, not on the stage, as far as it shards.
        stages = [stage for stage in dict(states) if self._is_legal(grid._replace(zero_stage=stage), layouts)]
        groups = {
            ranks
            for ranks in {ranks for _, ranks in states}
            if not ranks or self._is_legal(grid._replace(shard_ranks=ranks), layouts)
        }
        return tuple((stage, ranks) for stage, ranks in states if stage in stages and ranks in groups)

    def _which_sizes(self, grid: Candidate, sizes: list[int], layouts: int) -> tuple[int, ...]:
        return tuple(n for n in sizes if self._is_legal(grid._replace(micro_batch_size=n), layouts))

    def _is_legal(self, layout: Candidate, layouts: int) -> bool:
        """Whether `layout` can run. If not, `layouts` layouts are counted as rejected."""
        try:
            self.check(layout)
        except ConfigError as error:
            self.reject(error, layouts)
            return False
        return True

    def reject(self, error: ConfigError, layouts: int) -> None:
        """Count layouts that cannot run."""
        problem = str(error).splitlines()[0]
        # Without the options in front, what would work behind, and numbers, many messages are one reason.
        reason = re.sub(r"\d[\d,]*", "N", problem.partition(": ")[2].partition(";")[0])
        self.rejected[reason] += layouts
        self.first_problems.setdefault(reason, problem)
