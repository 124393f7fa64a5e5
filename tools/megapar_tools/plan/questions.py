"""A person's questions about a layout, in the order in which they come up, answered with the figures of one model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megapar.base.errors import ConfigError
from megapar.config.messages import counted, divisors, layout_in_words
from megapar.config.options import Config
from megapar.launch.grid import grid_of
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.network import Network
from megapar_tools.plan.search import Planner, Row
from megapar_tools.plan.space import Candidate

_GIB = 2**30
_ALONE = Candidate(1, 1, 1, 1, 1, 0, "1f1b", 1, 1, 0, False, "gather", "full", (), 1)
"""One rank with the least memory: micro-batches of one sample, and all layers computed again."""


@dataclass(frozen=True)
class Answer:
    """A question and its answer, each in words."""

    question: str
    answer: str


class Questions:
    """Answers about one model on `world_size` GPUs.

    `base` accepts every layout (`megapar_tools.plan.space.searchable`). `validate` is as in `Space`.
    """

    def __init__(
        self,
        base: Config,
        world_size: int,
        hardware: Hardware,
        planner: Planner,
        validate: Callable[[Config, int], Config],
    ):
        self.base = base
        self.world_size = world_size
        self.hardware = hardware
        self._planner = planner
        self._validate = validate
        self._has_experts = base.model.num_experts > 0

    def answers(self, size: str, expert_share: float, rows: Sequence[Row]) -> list[Answer]:
        """All answers. `size` is the model's in words, `expert_share` that of its parameters in experts.

        `rows` are those of a search.
        """
        found = [
            Answer("Does it fit on one GPU?", self._on_one(size)),
            Answer("Data parallel?", self._data_parallel()),
            Answer("Are its states too large? ZeRO", self._zero()),
            Answer("Is a layer too large? Tensor parallel", self._tensor()),
            Answer("Still too large? Pipeline", self._pipeline()),
            Answer("A long context? Context parallel", self._context()),
            Answer("Experts? Expert parallel", self._experts(expert_share)),
        ]
        if rows:
            found.append(Answer("A slow network? Less across nodes", self._network(rows[0])))
        return found

    def _bytes(self, world_size: int, **changes: object) -> int | None:
        """The bytes of the fullest rank of a layout. None if it cannot run."""
        layout = _ALONE._replace(**changes)  # type: ignore[arg-type]
        replicas = world_size // (layout.tp * layout.cp * layout.pp)
        layout = layout._replace(dp=replicas)
        if self._has_experts:
            layout = layout._replace(etp=layout.etp or layout.tp)
        try:
            config = self._validate(layout.of(self.base), world_size)
        except ConfigError:
            return None
        return self._planner.memory(config).total

    def _fits(self, nbytes: int | None) -> bool:
        return nbytes is not None and nbytes <= self.hardware.usable_bytes

    def _on_one(self, size: str) -> str:
        nbytes = self._bytes(1)
        usable = f"{self.hardware.usable_bytes / _GIB:,.1f} GiB that a {self.hardware.name} has for it"
        if nbytes is None:
            return f"{size}; this batch cannot run on one"
        verdict = "Yes" if self._fits(nbytes) else "No"
        return f"{verdict}: {size} need {gib(nbytes)} of the {usable}, with all layers recomputed"

    def _data_parallel(self) -> str:
        nbytes = self._bytes(self.world_size, zero_stage=0)
        samples = self.base.train.global_batch_size
        each = samples / self.world_size
        batch = f"a step of {samples:,} samples gives each of {self.world_size:,} GPUs {each:,.3g}"
        if each < 1:
            batch += ", so some would have nothing to do"
        if nbytes is None:
            return f"Cannot run on {self.world_size:,} GPUs; {batch}"
        return f"Every GPU holds everything, {gib(nbytes)}; {batch}"

    def _zero(self) -> str:
        stages = {stage: self._bytes(self.world_size, zero_stage=stage) for stage in (1, 2, 3)}
        listed = ", ".join(f"ZeRO-{stage} {gib(nbytes)}" for stage, nbytes in stages.items() if nbytes is not None)
        if not listed:
            return f"Cannot run with {self.world_size:,} replicas"
        fits = [stage for stage, nbytes in stages.items() if self._fits(nbytes)]
        verdict = f"ZeRO-{fits[0]} is enough" if fits else "none is enough"
        return f"Over {self.world_size:,} replicas {listed}: {verdict}"

    def _tensor(self) -> str:
        sizes = [n for n in divisors(self.world_size) if 1 < n <= self.hardware.gpus_per_node]
        found = {tp: self._bytes(self.world_size, tp=tp, sequence_parallel=True) for tp in sizes}
        listed = [f"tp {tp} {gib(nbytes)}" for tp, nbytes in found.items() if nbytes is not None]
        if not listed:
            return "No tp within a node divides the heads and the MLP of this model"
        fits = [tp for tp, nbytes in found.items() if self._fits(nbytes)]
        verdict = f"tp {fits[0]} is enough" if fits else "none is enough"
        return f"Within a node, with ZeRO-1, {', '.join(listed)}: {verdict}"

    def _pipeline(self) -> str:
        for pp in divisors(self.world_size)[1:]:
            nbytes = self._bytes(self.world_size, pp=pp)
            if self._fits(nbytes):
                micro_batches = -(-self.base.train.global_batch_size * pp // self.world_size)
                idle = (pp - 1) / (micro_batches + pp - 1)
                count = counted(micro_batches, "micro-batch", "micro-batches")
                return f"pp {pp} alone is enough, with ZeRO-1 {gib(nbytes)}; {count} leave 1f1b {idle:.0%} idle"
        return "No pp alone is enough with ZeRO-1"

    def _context(self) -> str:
        length = self.base.train.seq_length
        kept = {}
        for cp in (1, 2, 4):
            if self.world_size % cp == 0:
                kept[cp] = self._kept(cp)
        listed = ", ".join(f"{gib(nbytes)} at cp {cp}" for cp, nbytes in kept.items() if nbytes is not None)
        if not listed:
            return f"{length:,} tokens cannot be cut"
        return f"A sample of {length:,} tokens keeps {listed} for its backward pass, nothing recomputed and no tp or pp"

    def _kept(self, cp: int) -> int | None:
        layout = _ALONE._replace(cp=cp, dp=1, recompute="none")
        if self._has_experts:
            layout = layout._replace(etp=1)
        try:
            config = self._validate(layout.of(self.base), cp)
        except ConfigError:
            return None
        return self._planner.memory(config).activations

    def _experts(self, share: float) -> str:
        if not self._has_experts:
            return "It has none"
        sizes = [n for n in divisors(self.world_size) if 1 < n <= self.hardware.gpus_per_node]
        found = {ep: self._bytes(self.world_size, ep=ep) for ep in sizes}
        listed = ", ".join(f"ep {ep} {gib(nbytes)}" for ep, nbytes in found.items() if nbytes is not None)
        return f"{share:.0%} of the parameters are in experts; within a node, with ZeRO-1, {listed}"

    def _network(self, row: Row) -> str:
        node = self.hardware.node.gb_per_second
        network = self.hardware.network.gb_per_second
        rates = f"A GPU sends {node:,.0f} GB/s inside its node and {network:,.0f} GB/s out of it"
        if self.world_size <= self.hardware.gpus_per_node:
            return f"All {self.world_size} GPUs are in one node"
        crossing = axes_across_nodes(row.config, self.hardware)
        exposed = sum(row_exposed(row).get(name, 0.0) for name in crossing)
        return (
            f"{rates}; in the first row {' and '.join(crossing) or 'no axis'} cross nodes, and "
            f"{exposed / row.seconds:.1%} of the step waits for that"
        )


def row_exposed(row: Row) -> Mapping[str, float]:
    """Seconds of exposed communication by axis."""
    if row.time is None:
        return {}
    return row.time.exposed


def axes_across_nodes(config: Config, hardware: Hardware) -> list[str]:
    """The axes of a layout whose ranks are on several nodes."""
    network = Network(grid_of(config), hardware)
    names = ["tp", "cp", "pp", "grad"]
    if config.model.num_experts:
        names += ["ep", "etp", "expert_grad"]
    return [name for name in names if network.span(name).nodes > 1]


def gib(nbytes: int | None) -> str:
    """Bytes in words."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / _GIB:,.1f} GiB"


def why_first(rows: Sequence[Row]) -> str:
    """One sentence about why the first row is faster than the fastest row of another grid."""
    if not rows:
        return ""
    first = rows[0]
    grid = layout_in_words(first.config.parallel)
    other = next((row for row in rows if layout_in_words(row.config.parallel) != grid), None)
    if other is None:
        return f"{grid} wins because no other grid of ranks is among the planned layouts that fit."
    ours = _seconds_by_cause(first)
    theirs = _seconds_by_cause(other)
    saved = {cause: theirs.get(cause, 0.0) - ours.get(cause, 0.0) for cause in {*ours, *theirs}}
    cause = max(sorted(saved), key=lambda cause: saved[cause])
    longer = other.seconds / first.seconds - 1
    sentence = (
        f"{grid} wins because {layout_in_words(other.config.parallel)}, the next grid, takes {longer:.1%} longer: it "
        f"{cause} {1e3 * saved[cause]:,.0f} ms more in a step"
    )
    lost = min(sorted(saved), key=lambda cause: saved[cause])
    if saved[lost] < 0 and -saved[lost] > 0.1 * saved[cause]:
        sentence += f", which outweighs that it {lost} {-1e3 * saved[lost]:,.0f} ms less"
    return f"{sentence}."


def _seconds_by_cause(row: Row) -> dict[str, float]:
    """The seconds of a step by what a GPU does in them."""
    assert row.time is not None
    causes = {f"waits for {axis}": seconds for axis, seconds in row.time.exposed.items()}
    causes["idles in the pipeline"] = row.time.idle_share * row.seconds
    causes["computes"] = sum(row.time.busy.values())
    return causes
