"""The report of train.memory_report: where the bytes of each rank are, by plan and as measured in a step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megapar import comm, device
from megapar.files import write_json
from megapar.train.kept import KeptBytes, Key
from megapar.train.step import TrainState

OTHER = "all else: kernels, messages, allocator, Python"
ALL = "all"


class MemoryReport:
    """Measures one step of a run, and shows the bytes of each rank beside those of the plan.

    `planned` are the rows of this rank by plan (`rows`).
    """

    def __init__(self, planned: Mapping[str, int]):
        self.planned = dict(planned)
        self._kept: KeptBytes | None = None

    @contextmanager
    def measuring(self, state: TrainState) -> Iterator[None]:
        """A context around the step that is measured. Counting what is kept takes a part of its time."""
        self._kept = KeptBytes(state.stages)
        with self._kept.counting():
            yield

    def write(self, state: TrainState, run_dir: Path) -> None:
        """Write run_dir/memory.json with all ranks, and print the rank that has the largest peak. A collective."""
        rows = {"planned": self.planned, "measured": self._measured(state)}
        ranks = comm.gather_json(rows, state.ctx.world, state.ctx.device)
        if not state.ctx.world.first:
            return
        write_json(run_dir / "memory.json", {"bytes_by_rank": ranks})
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["measured"][ALL])
        Console(width=110).print(table(fullest, len(ranks), ranks[fullest]))

    def _measured(self, state: TrainState) -> dict[str, int]:
        assert self._kept is not None
        found = rows(
            state.weights.nbytes,
            state.grads.nbytes,
            state.optimizer.nbytes,
            self._kept.at_peak.items(),
            len(state.stages),
        )
        everything = device.peak_memory_bytes(state.ctx.device)
        return {**found, OTHER: everything - sum(found.values()), ALL: everything}


def rows(weights: int, gradients: int, optimizer: int, kept: Iterable[tuple[Key, int]], stages: int) -> dict[str, int]:
    """Bytes by what they are. `kept` are activations by stage and kind, on a rank with `stages` stages."""
    found = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    for (stage, kind), size in sorted(kept):
        name = f"activations: {kind}" if stages == 1 else f"activations of stage {stage}: {kind}"
        found[name] = found.get(name, 0) + size
    return found


def table(rank: int, ranks: int, found: Mapping[str, Mapping[str, int]]) -> Table:
    """The bytes of a rank by plan beside those measured."""
    shown = Table("MiB", "planned", "measured", title=f"memory of rank {rank}, which has the largest peak of {ranks}")
    planned = {**found["planned"], ALL: sum(found["planned"].values())}
    for name in {**found["planned"], **found["measured"]}:
        columns = [planned.get(name), found["measured"].get(name)]
        shown.add_row(name, *("" if size is None else f"{size / 2**20:,.2f}" for size in columns))
    return shown
