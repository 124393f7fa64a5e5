"""One direction of the rank grid: the ranks along it, what moves tensors between them, and the bytes that it moved."""

from dataclasses import dataclass, field

from megapar.comm.flight import AxisLog
from megapar.comm.transport import ALONE, PLANNED, Transport


@dataclass
class Traffic:
    """Calls, and bytes sent by this rank (with ring algorithms), over one axis, by name of the operation."""

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def record(self, operation: str, sent_bytes: int) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent[operation] = self.sent.get(operation, 0) + sent_bytes

    def total(self) -> int:
        """Bytes sent so far, over all operations."""
        return sum(self.sent.values())


@dataclass(frozen=True)
class Axis:
    """One direction of the rank grid: the ranks differing from this rank in this direction alone.

    `ranks` are global ranks. `rank` is this rank's position among them. `transport` moves tensors between the ranks. In
    a dry run nothing moves them (`megapar.comm.transport.Meta`). `log` keeps the newest operations; it is None at size
    1 and in a plan. `inner` and `outer` are set if the axis is split: into groups of neighbors, and the ranks of one
    position in these groups.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    transport: Transport = field(default=ALONE, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    log: AxisLog | None = field(default=None, compare=False)
    inner: "Axis | None" = field(default=None, compare=False)
    outer: "Axis | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.transport is ALONE:
            object.__setattr__(self, "transport", PLANNED)  # the only way to complete a frozen object

    @property
    def shards(self) -> "Axis":
        """The ranks ZeRO shards over: all of them, or a group of neighbors (optimizer.shard_ranks)."""
        return self.inner or self

    @property
    def copies(self) -> "Axis":
        """The ranks with copies of this rank's shard: this rank alone, or one of each group of neighbors."""
        return self.outer or Axis(f"{self.name}_copies")

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1
