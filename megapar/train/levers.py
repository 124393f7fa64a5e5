"""What saves memory: options with the values that save, from the cheapest to the dearest.

Verdicts, the line about memory that has run out, train.memory_gb, the search and docs/questions.md read this table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import get_args

from megapar.activations.recompute import Mode
from megapar.config.messages import shown
from megapar.config.options import BY_LAYER, Config, flatten
from megapar.optimizer.table import find
from megapar.system import device

MODES: tuple[Mode, ...] = get_args(Mode)
"""Values of train.recompute, from the one that recomputes nothing to the one that recomputes most."""
EVERY = (8, 6, 4, 3, 2, 1)
"""Every n-th layer recomputed, as train.recompute_layers ::n says. Each saves more than the one before."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the state, or of layers' inputs, in host memory."""
LOSS_CHUNK = 1024
"""Tokens with logits in memory at one time."""
ALL_LAYERS = "empty (recompute every layer)"
"""The words for train.recompute_layers without a number."""


def planned_device(config: Config) -> str:
    """The device named by `launch.device`, "cuda" or "cpu".

    For auto, a GPU if a dry run names one, or if this machine has one.
    """
    if config.launch.device != "auto":
        return config.launch.device
    if (config.dry_run and config.gpu != "auto") or device.cuda_devices():
        return "cuda"
    return "cpu"


@dataclass(frozen=True)
class Lever:
    """An option, by dotted path, with values that save memory.

    `values` and `costs` say for docs/questions.md which values these are, and what a user pays. `stronger` returns the
    values that save more than the value of a config, the mildest first, and none where the option does not apply.
    """

    option: str
    values: str
    costs: str
    stronger: Callable[[Config], Sequence[object]]


def _zero_stages(config: Config) -> Sequence[object]:
    if config.parallel.dp * config.parallel.cp == 1:  # ZeRO shards over the replicas
        return ()
    return range(config.optimizer.zero_stage + 1, 4)


def _loss_chunks(config: Config) -> Sequence[object]:
    return () if config.kernels.loss_chunk else (LOSS_CHUNK,)


def _micro_batch_sizes(config: Config) -> Sequence[object]:
    size = config.train.micro_batch_size
    return [size >> n for n in range(1, size.bit_length())]


def _layers(config: Config) -> Sequence[object]:
    return ((),) if config.train.recompute_layers else ()


def _modes(config: Config) -> Sequence[object]:
    return MODES[MODES.index(config.train.recompute) + 1 :]


def _dtypes_of_moments(config: Config) -> Sequence[object]:
    return ("bf16",) if config.optimizer.moments == "fp32" and _reads(config, "moments") else ()


def _main_weights(config: Config) -> Sequence[object]:
    optimizer = config.optimizer
    applies = config.train.precision == "bf16" and not optimizer.ema and not optimizer.offload
    return ("remainder",) if applies and optimizer.main_weights == "fp32" and _reads(config, "main_weights") else ()


def _reads(config: Config, option: str) -> bool:
    """Return whether the run's optimizer reads the option. That of apex keeps fp32 state alone."""
    read = (field.name for field in fields(find(config.optimizer.name).OPTIONS))
    return option in read and config.kernels.backend != "apex"


def _shares_of_inputs(config: Config) -> Sequence[object]:
    # On CPUs the memory of the host is that of the device.
    return () if planned_device(config) != "cuda" or config.train.offload == 1 else (1.0,)


def _shares_of_state(config: Config) -> Sequence[object]:
    if planned_device(config) != "cuda":
        return ()
    return [share for share in SHARES if share > config.optimizer.offload]


LEVERS = (
    Lever("optimizer.zero_stage", "1, 2, 3", "none at 1; 2 and 3 send more; needs replicas", _zero_stages),
    Lever("kernels.loss_chunk", str(LOSS_CHUNK), "logits are computed twice", _loss_chunks),
    Lever(
        "train.micro_batch_size",
        "half, down to 1",
        "smaller products, more passes; the result stays",
        _micro_batch_sizes,
    ),
    Lever("train.recompute_layers", "none, which means all", "more layers compute their forward pass twice", _layers),
    Lever("train.recompute", ", ".join(MODES[1:]), "norms, attention or whole layers are computed twice", _modes),
    Lever("train.offload", "1", "inputs of recomputed layers travel to the host and back", _shares_of_inputs),
    Lever("optimizer.moments", "bf16", "AdamW's moments round stochastically", _dtypes_of_moments),
    Lever("optimizer.main_weights", "remainder", "none in time; needs train.precision bf16", _main_weights),
    Lever("optimizer.offload", "0.25 to 1", "the CPU updates that share of the weights", _shares_of_state),
)

AXES = ("tp", "pp", "cp")
"""Axes that divide what a rank holds, in place of replicas. They send more."""

Change = tuple[str, object]
"""An option, by dotted path, and its new value."""


def changes_of_options(config: Config) -> Iterator[Change]:
    """Yield each value that saves memory in any layout, the cheapest lever first and its mildest value first."""
    for lever in LEVERS:
        for value in lever.stronger(config):
            yield lever.option, value


def changes_of_axes(config: Config) -> Iterator[list[Change]]:
    """Yield layouts of as many ranks with fewer replicas."""
    parallel = config.parallel
    for axis in AXES:
        size: int = getattr(parallel, axis)
        for times in (2, 4, 8):
            if parallel.dp % times == 0:
                yield [(f"parallel.{axis}", size * times), ("parallel.dp", parallel.dp // times)]


def describe(change: Change) -> str:
    """Return a change in words, such as "train.recompute full"."""
    option, value = change
    return f"{option} {ALL_LAYERS if value == () else value}"


def advise(config: Config) -> str:
    """Name the three cheapest levers that apply to a run, each with the value of the run. Nothing is planned."""
    first, second, third = islice(_advice(config), 3)
    return f"try {first}, {second} or {third}"


def _advice(config: Config) -> Iterator[str]:
    """Yield the levers that apply by themselves, the cheapest first, and then the axes."""
    present = flatten(config)
    for lever in LEVERS:
        if lever.option == "train.offload" and config.train.recompute not in BY_LAYER:
            continue  # the inputs of recomputed layers alone can be in host memory
        values = lever.stronger(config)
        if values:
            words = describe((lever.option, values[0]))
            words += f" or {values[-1]}" if len(values) > 1 else ""
            yield f"{words} (now {shown(present[lever.option])})"
    for axis in AXES:
        yield f"larger parallel.{axis} (now {getattr(config.parallel, axis)})"
