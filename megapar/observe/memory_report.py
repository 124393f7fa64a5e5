"""The report of train.memory_report: where the bytes of each rank are, by plan and as measured in a step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megapar.comm import collectives
from megapar.data_parallel.layout import HasParameters
from megapar.declare.batch import MicroBatch
from megapar.observe.expert_rows import ExpertRows
from megapar.observe.kept import KeptBytes, Key
from megapar.observe.observer import Observed, Observer
from megapar.step.state import TrainState
from megapar.system import device
from megapar.system.atomic_files import write_json

OTHER = "all else: kernels, messages, allocator, Python"
ALL = "all"
TRAVELLING = "activations: inputs of layers on their way to and from the host"
IN_SLOTS = "activations: inputs of layers, in slots"
CONVERTED = "weights converted for products"
HOST = "in host memory: optimizer"
HOST_INPUTS = "in host memory: inputs of layers"
ON_HOST = (HOST, HOST_INPUTS)


class MemoryReport:
    """Measures one step of a run, and shows the bytes of each rank beside those of the plan.

    `planned` are the rows of this rank by plan (`rows`).
    """

    def __init__(self, planned: Mapping[str, int]):
        self.planned = dict(planned)
        self._kept: KeptBytes | None = None
        self._rows = ExpertRows()

    @contextmanager
    def measuring(self, state: TrainState) -> Iterator[None]:
        """A context around the measured step. Counting what is kept takes a part of its time."""
        self._kept = KeptBytes(state.stages, state.pipeline.deferred_nbytes)
        state.pipeline.after_action.append(self._kept.note_action)
        with self._kept.counting(), self._rows.noting(state.stages):
            yield
        state.pipeline.after_action.clear()

    def write(self, state: TrainState, run_dir: Path) -> str:
        """Write run_dir/memory.json, with all ranks in it, and the rows of experts (`ExpertRows`). A collective.

        Returns a table of the rank with the largest peak on the first rank, and "" on the others.
        """
        self._rows.write(run_dir, state.ctx.world.rank)
        rows = {"planned": self.planned, "measured": self._measured(state)}
        ranks = collectives.gather_json(rows, state.ctx.world, state.ctx.device)
        if not state.ctx.world.first:
            return ""
        write_json(run_dir / "memory.json", {"bytes_by_rank": ranks})
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank]["measured"][ALL])
        return in_words(f"memory of rank {fullest}, which has the largest peak of {len(ranks)}", ranks[fullest])

    def _measured(self, state: TrainState) -> dict[str, int]:
        assert self._kept is not None
        found = measured(state, self._kept, state.ctx.device.type)
        host = {name: found.pop(name) for name in ON_HOST if name in found}
        everything = device.peak_memory_bytes(state.ctx.device)
        return {**found, OTHER: everything - sum(found.values()), ALL: everything, **host}


class MemoryOfStep(Observer):
    """Measures the second step for `report`, because the first one allocates what later ones use again."""

    def __init__(self, report: MemoryReport, seen: Observed):
        self._report = report
        self._seen = seen
        self._step = min(seen.state.step + 2, seen.state.config.train.steps)
        self._measuring = ExitStack()

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        if number == self._step:
            self._measuring.enter_context(self._report.measuring(self._seen.state))

    def after_queue(self, number: int) -> None:
        self._measuring.close()

    def end_step(self, number: int) -> None:
        if number == self._step:
            self._seen.say(self._report.write(self._seen.state, self._seen.run_dir))

    def close(self, error: BaseException | None) -> None:
        self._measuring.close()


def measured(state: TrainState, kept: KeptBytes, device_type: str) -> dict[str, int]:
    """The rows of a step that has run on a device of this type, such as cuda. `kept` has counted in the step."""
    optimizer, host = optimizer_nbytes(state, device_type)
    inputs = state.pipeline.host_inputs
    travelling, on_host_inputs = inputs_by_name(inputs.most_on_device, inputs.nbytes, device_type)
    found = rows(
        weights=state.weights.most_nbytes + frozen_nbytes(state.stages.values()),
        converted=kept.most_converted,
        gradients=state.grads.most_nbytes,
        optimizer=optimizer,
        activations=by_name(kept.at_peak, len(state.stages), state.stages.fine_stages) | travelling,
    )
    return found | on_host(host, on_host_inputs)


def optimizer_nbytes(state: TrainState, device_type: str) -> tuple[int, int]:
    """Bytes of optimizer state in the memory of a device of this type, such as cuda, and beside it on the host."""
    optimizer = state.optimizer
    if device_type == "cpu":  # the host's memory is the device's
        return optimizer.nbytes + optimizer.host_nbytes, 0
    return optimizer.nbytes, optimizer.host_nbytes


def on_device(found: Mapping[str, int]) -> int:
    """The sum of the rows without those of host memory."""
    return sum(nbytes for name, nbytes in found.items() if name not in ON_HOST)


def inputs_by_name(travelling: int, in_slots: int, device_type: str) -> tuple[dict[str, int], int]:
    """Inputs of layers (train.offload): bytes of activations by name, and bytes on the host beside the device."""
    found = {TRAVELLING: travelling} if travelling else {}
    if device_type == "cpu" and in_slots:  # the host's memory is the device's
        return {**found, IN_SLOTS: in_slots}, 0
    return found, in_slots


def on_host(optimizer: int, inputs: int) -> dict[str, int]:
    """The rows of the report for what is in host memory beside the device's. They are not in the sum of the others."""
    return {name: nbytes for name, nbytes in ((HOST, optimizer), (HOST_INPUTS, inputs)) if nbytes}


def frozen_nbytes(stages: Iterable[HasParameters]) -> int:
    """Bytes of the untrained parameters. They are in no buffer."""
    params = {id(p): p for stage in stages for p in stage.parameters() if not p.requires_grad}
    return sum(param.nbytes for param in params.values())


def by_name(kept: Mapping[Key, int], num_stages: int, fine_stages: Sequence[int]) -> dict[str, int]:
    """Bytes of activations by their name in the report. The rank has `num_stages`.

    `fine_stages` are those of its `StageSet`.
    """
    # Fine stages are as many as layers, so their sum is shown.
    several = num_stages > 1 and not fine_stages
    found: dict[str, int] = {}
    for (stage, kind), size in sorted(kept.items()):
        name = f"activations: {kind}"
        if several:
            name = f"activations of stage {stage}: {kind}"
        if size:
            found[name] = found.get(name, 0) + size
    return found


def rows(
    weights: int, converted: int, gradients: int, optimizer: int, activations: Mapping[str, int]
) -> dict[str, int]:
    """Bytes by what they are, in the order of the report. `activations` are from `by_name`.

    `converted` are those of weights in the number format of their products, such as FP8, beside the weights.
    """
    in_format = {CONVERTED: converted} if converted else {}
    return {"weights": weights, **in_format, "gradients": gradients, "optimizer": optimizer, **activations}


def in_words(title: str, found: Mapping[str, Mapping[str, int]]) -> str:
    """A table of bytes by plan and measured. Either may be missing."""
    shown = Table("MiB", *found, title=title, title_justify="left")
    columns = {who: {ALL: on_device(sizes), **sizes} for who, sizes in found.items()}
    names = dict.fromkeys(name for sizes in found.values() for name in sizes)
    last = [name for name in (ALL, *ON_HOST) if name == ALL or name in names]
    for name in (*(name for name in names if name not in last), *last):
        sizes = [column.get(name) for column in columns.values()]
        shown.add_row(name, *("" if size is None else f"{size / 2**20:,.2f}" for size in sizes))
    console = Console(width=110)
    with console.capture() as capture:
        console.print(shown)
    return capture.get().rstrip()
