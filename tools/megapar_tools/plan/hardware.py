"""What a machine reaches: rates, links, memory and price. `megapar_tools.plan.step_time` predicts a step from them.

A machine is a TOML file. Those of common GPUs are in the folder `machines` beside this module, each figure with its
source. `tools/calibrate.py` writes one from the machine at hand.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from megapar.base.errors import ConfigError
from megapar.system.atomic_files import write_text

FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Link:
    """A way between ranks. It is what one rank reaches in one direction, with large messages."""

    gb_per_second: float
    """10^9 bytes a second."""
    latency_us: float
    """Microseconds of a message without bytes, from rank to rank."""


@dataclass(frozen=True)
class MatrixRates:
    """The speed of matrix products: a share of the peak, and less for small matrices.

    A product [m, k] x [k, n] takes 2 (m + half) (n + half) (k + half_depth) / (share * peak) seconds. So m = half
    reaches half of what large products reach. The time grows with each size.
    """

    share: float
    """Of the peak, reached by large products in training, at the clock allowed by the power limit."""
    half: float
    """Rows or columns of a result."""
    half_depth: float
    """The length of the sums."""
    grouped_share: float
    """Of the rate of a single product of the same size, reached by products of experts."""
    fp8_share: float = 0.0
    """Of the peak of fp8, reached by large products of FP8 blocks in training. 0: the machine has no such products, and
    numbers restored from FP8 are multiplied in 16 bits."""


@dataclass(frozen=True)
class AttentionRate:
    """TFLOP/s of causal attention with heads of one width, with half of the scores counted."""

    forward: float
    backward: float


@dataclass(frozen=True)
class HostMemory:
    """The host memory of a node. Its devices share it evenly."""

    gib: float
    """Of the node."""
    link_gb_per_second: float
    """Between the host and one device, each way."""
    gb_per_second: float
    """Read and written by the cores that serve one device."""


@dataclass(frozen=True)
class Hardware:
    """A machine, and what it reaches. Units are in the names; GB are 10^9 bytes, GiB are 2^30."""

    name: str
    gpus_per_node: int
    """Ranks of a node reach each other over `node`, all others over `network`."""
    memory_gib: float
    """Memory of one device, as its driver reports it."""
    reserve_gib: float
    """Memory kept free by plans: for the CUDA context, communicators, workspaces, and fragments of the allocator."""
    peak_tflops: Mapping[str, float]
    """Dense peak of one device, by precision: bf16, fp16, tf32, fp32, fp8. The others are left out."""
    matrix: MatrixRates
    attention: Mapping[int, AttentionRate]
    """By the width of a head. Another width takes the rates of the next wider one."""
    memory_gb_per_second: float
    memory_share: float
    """Of `memory_gb_per_second`, reached by kernels on whole tensors."""
    node: Link
    network: Link
    host: HostMemory
    all_to_all_share: float
    """Of a link's bandwidth, reached by an all-to-all of rows over experts."""
    interference: float
    """Seconds lost by computing to each second of communication under it. They share cores and memory."""
    kernel_us: float
    """Time of a kernel beside its work: its start and its last, partly filled wave."""
    launch_us: float
    """Time of the host for one operation. A device waits for a slower host."""
    step_overhead_ms: float
    """Further time of a step: reading the clock, counting targets, handing out batches."""
    price_per_hour: float
    """US dollars for one device."""
    watts: float
    """Of one device under load."""

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s. Raises ConfigError for a precision without a peak."""
        if precision not in self.peak_tflops:
            raise ConfigError(
                f"hardware {self.name}: has no peak for {precision}; it has {', '.join(sorted(self.peak_tflops))}"
            )
        return self.peak_tflops[precision] * 1e12

    def product_seconds(self, m: float, n: float, k: float, precision: str) -> float:
        """Seconds of one product [m, k] x [k, n] by `MatrixRates`, without its memory traffic."""
        rates = self.matrix
        work = 2.0 * (m + rates.half) * (n + rates.half) * (k + rates.half_depth)
        share = rates.fp8_share if precision == "fp8" else rates.share
        return work / (share * self.peak(precision))

    @property
    def multiplies_fp8(self) -> bool:
        """Whether it has products of FP8 blocks."""
        return self.matrix.fp8_share > 0

    def attention_rate(self, width: int, precision: str) -> AttentionRate:
        """The rates of the narrowest listed head of at least this width, else those of the widest.

        The listed ones are those of 16 bits, unless the file has no peak for them (tools/calibrate.py). In fp32 the
        share of the peak is taken to be the same. Raises ConfigError for a precision without a peak.
        """
        wide_enough = [listed for listed in self.attention if listed >= width]
        listed = self.attention[min(wide_enough, default=max(self.attention))]
        in_16_bits = [peak for name, peak in self.peak_tflops.items() if name in ("bf16", "fp16")]
        if precision != "fp32" or not in_16_bits:
            return listed
        slower = self.peak("fp32") / 1e12 / max(in_16_bits)
        return AttentionRate(slower * listed.forward, slower * listed.backward)

    def memory_seconds(self, moved_bytes: float) -> float:
        """Seconds to read or write so many bytes in all."""
        return moved_bytes / (self.memory_gb_per_second * self.memory_share * 1e9)

    def host_update_seconds(self, elements: float, weight_bytes: float) -> float:
        """Seconds to update so many elements in host memory. Gradients and weights travel meanwhile."""
        # AdamW reads and writes main weight and moments, and reads the gradient that has just been written.
        updated = (12 + 12 + 4 + 4 + weight_bytes) / self.host.gb_per_second
        sent = max(4, weight_bytes) / self.host.link_gb_per_second
        return elements * max(updated, sent) / 1e9

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for one device."""
        return int(self.host.gib * 2**30 / self.gpus_per_node)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device."""
        return int(self.memory_gib * 2**30)

    @property
    def reserve_bytes(self) -> int:
        """Bytes of it that no plan may use."""
        return int(self.reserve_gib * 2**30)

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device without the reserve."""
        return int((self.memory_gib - self.reserve_gib) * 2**30)


# The machine of a GPU, by what the name of the GPU contains.
_OF_GPUS = {
    "H200": "h200-141g",
    "H100": "h100-80g",
    "A100-SXM4-40GB": "a100-40g",
    "A100": "a100-80g",
    "GB300": "gb300-279g",
    "B300": "b300-270g",
    "GB200": "gb200-186g",
    "B200": "b200-180g",
    "MI300X": "mi300x-192g",
    "L40S": "l40s-48g",
    "RTX 4090": "rtx4090-24g",
}


def name_of(described: str) -> str:
    """The machine of the GPU with this name, such as "NVIDIA H100 80GB HBM3". Empty: it is not known."""
    return next((name for part, name in _OF_GPUS.items() if part in described), "")


def names() -> list[str]:
    """The machines known to `load` by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, gpus_per_node: int = 0) -> Hardware:
    """The machine called `name`, or of the TOML file of that path. `gpus_per_node` replaces that of the file, if given.

    Raises ConfigError for an unknown name, a file of another format, and a wrong key or number.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
    if not path.is_file():
        near = get_close_matches(name, names())
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names())}"
        raise ConfigError(f"hardware {name}: unknown, and no TOML file of that path; {hint}")
    try:
        found = _build(Hardware, tomllib.loads(path.read_text()), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"hardware {path}: no TOML file: {error}") from error
    if gpus_per_node:
        found = replace(found, gpus_per_node=gpus_per_node)
    _check(found, str(path))
    return found


def write(hardware: Hardware, path: Path, comments: Mapping[str, str] | None = None) -> None:
    """Write the file `in_toml` for `load`."""
    write_text(path, in_toml(hardware, comments))


def in_toml(hardware: Hardware, comments: Mapping[str, str] | None = None) -> str:
    """The text of a file for `load`. `comments` are put beside the figures, by dotted key."""
    notes = comments or {}
    lines: list[str] = []
    tables: list[str] = []
    for key, value in asdict(hardware).items():
        if isinstance(value, dict):
            tables += _table(key, value, notes)
        else:
            lines.append(_line(key, value, notes.get(key, "")))
    return "\n".join([*lines, *tables]) + "\n"


def _table(name: str, values: Mapping[Any, Any], notes: Mapping[str, str]) -> list[str]:
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [] if nested else ["", f"[{name}]"]
    for key, value in values.items():
        if key in nested:
            lines += _table(f"{name}.{key}", value, notes)
        else:
            lines.append(_line(str(key), value, notes.get(f"{name}.{key}", "")))
    return lines


def _line(key: str, value: object, note: str) -> str:
    written = f'"{value}"' if isinstance(value, str) else f"{value}"
    if not note:
        return f"{key} = {written}"
    return f"{key} = {written}  # {note}"


def _build(kind: type[Any], values: Mapping[str, Any], file: str, prefix: str = "") -> Any:
    """An object of the dataclass `kind` from the tables of a file."""
    expected = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    for problem, keys in (("unknown key", set(values) - expected), ("missing key", needed - set(values))):
        if keys:
            raise ConfigError(
                f"hardware {file}: {problem} {prefix}{min(keys)}; the keys are {', '.join(sorted(expected))}"
            )
    types = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        arguments[name] = _value(types[name], value, file, prefix + name)
    return kind(**arguments)


def _value(wanted: Any, value: Any, file: str, key: str) -> Any:
    if wanted in (Link, HostMemory, MatrixRates, AttentionRate) and isinstance(value, dict):
        return _build(wanted, dict(value), file, f"{key}.")
    if wanted == Mapping[int, AttentionRate] and isinstance(value, dict):
        rates = {}
        for width, rate in value.items():
            rates[int(width)] = _value(AttentionRate, rate, file, f"{key}.{width}")
        return rates
    if wanted == Mapping[str, float] and isinstance(value, dict):
        return {name: _value(float, part, file, f"{key}.{name}") for name, part in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted in (float, int, str) and type(value) is wanted:
        return value
    raise ConfigError(f"hardware {file}: {key}={value!r} is not what the key takes; see {FOLDER / 'h100-80g.toml'}")


def _check(hardware: Hardware, file: str) -> None:
    """Raise ConfigError for impossible numbers."""
    positive = {
        "gpus_per_node": hardware.gpus_per_node,
        "memory_gib": hardware.memory_gib,
        "matrix.share": hardware.matrix.share,
        "matrix.grouped_share": hardware.matrix.grouped_share,
        "memory_gb_per_second": hardware.memory_gb_per_second,
        "memory_share": hardware.memory_share,
        "node.gb_per_second": hardware.node.gb_per_second,
        "network.gb_per_second": hardware.network.gb_per_second,
        "host.gib": hardware.host.gib,
        "host.link_gb_per_second": hardware.host.link_gb_per_second,
        "host.gb_per_second": hardware.host.gb_per_second,
        "all_to_all_share": hardware.all_to_all_share,
    }
    positive |= {f"peak_tflops.{name}": peak for name, peak in hardware.peak_tflops.items()}
    for width, rate in hardware.attention.items():
        positive |= {f"attention.{width}.forward": rate.forward, f"attention.{width}.backward": rate.backward}
    for key, value in positive.items():
        if value <= 0:
            raise ConfigError(f"hardware {file}: {key}={value:g} must be above 0")
    if hardware.matrix.fp8_share and "fp8" not in hardware.peak_tflops:
        raise ConfigError(f"hardware {file}: matrix.fp8_share needs a peak; add peak_tflops.fp8, or leave it out")
    if not hardware.attention or not hardware.peak_tflops:
        raise ConfigError(f"hardware {file}: needs at least one row of attention and one of peak_tflops")
    if hardware.reserve_gib >= hardware.memory_gib:
        raise ConfigError(
            f"hardware {file}: reserve_gib={hardware.reserve_gib:g} leaves nothing of memory_gib="
            f"{hardware.memory_gib:g}"
        )
