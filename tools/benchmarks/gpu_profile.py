"""Where the GPU's time of one training step goes: torch.profiler's kernels by category, beside the model's columns."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_model import CATEGORIES, OFF
from megapar import device

OTHER = "copies and other"

# Tried in this order, against names in lower case. Attention comes before the matrix products, because attention's
# kernels are built from CUTLASS too and have it in their names.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|attention|\b_softmax_|softmax_warp|cudnn::fusion::(compute_dot_do_o|convert_dq)"),
    ("norms", r"\b_norm_|rms_?norm|layer_norm|rowwisemoments|gammabeta"),
    ("activation", r"\b_activation_"),
    ("rope", r"\b_rotate"),
    ("cross entropy", r"\b_statistics_kernel|\b_gradient_kernel|cunn_softmax|nll_loss"),
    ("optimizer and norm", r"\b_adamw_|\b_square_sum|fusedadam|lpnorm"),
    ("matrix products", r"nvjet|cutlass|xmma|gemm|gemv|splitk|cublas|matmul"),
)


class Kernel(NamedTuple):
    """All launches of one kernel in a step."""

    name: str
    calls: int
    ms: float


def categorize(name: str) -> str:
    """The category of `gpu_model.CATEGORIES` that a kernel's name, as the profiler prints it, belongs to."""
    lowered = name.lower()
    return next((category for category, pattern in PATTERNS if re.search(pattern, lowered)), OTHER)


def record(step: Callable[[], object], where: torch.device) -> list[Kernel]:
    """Kernels of `step`, the longest first. On a CPU torch's ops stand in for kernels, for dry runs."""
    on_gpu = where.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        step()
        device.synchronize(where)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return gather((e.name, e.time_range.elapsed_us()) for e in profiler.events() if e.device_type == kind)


def gather(launches: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Launches, as (name, microseconds), by kernel."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in launches:
        found[name].append(microseconds)
    kernels = [Kernel(name, len(times), sum(times) / 1e3) for name, times in found.items()]
    return sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)


def by_category(kernels: Iterable[Kernel], predicted: Mapping[str, float], micro_batches: int) -> list[dict[str, Any]]:
    """Milliseconds and launches of a step by category beside what the model predicts for a micro-batch, scaled."""
    measured = dict.fromkeys(CATEGORIES, 0.0)
    calls = dict.fromkeys(CATEGORIES, 0)
    for kernel in kernels:
        category = categorize(kernel.name)
        measured[category] += kernel.ms
        calls[category] += kernel.calls
    return [
        {"category": name, "ms": measured[name], "calls": calls[name], "predicted_ms": predicted[name] * micro_batches}
        for name in CATEGORIES
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def categories_as_text(found: Mapping[str, Any]) -> str:
    """Each category beside its prediction; those that differ by more than OFF are marked.

    `found` is what the JSON file holds. Times that are None were not measured.
    """
    total = sum(row["ms"] or 0.0 for row in found["categories"])
    lines = [f"One step of {found['workload']}: {_number(found['step_ms'], '.1f')} ms, kernels {total:.1f} ms", ""]
    lines.append(f"{'category':<20}{'ms':>10}{'predicted':>11}{'ratio':>7}{'launches':>10}")
    for row in found["categories"]:
        ratio = None if row["ms"] is None else row["ms"] / row["predicted_ms"]
        mark = "  <-- off" if ratio is not None and abs(ratio - 1) > OFF else ""
        lines.append(
            f"{row['category']:<20}{_number(row['ms'], '.2f'):>10}{row['predicted_ms']:>11.2f}"
            f"{_number(ratio, '.2f'):>7}{row['calls']:>10}{mark}"
        )
    return "\n".join(lines) + "\n"


def kernels_as_text(found: Mapping[str, Any], most: int = 40) -> str:
    """The `most` longest kernels."""
    total = sum(row["ms"] or 0.0 for row in found["categories"])
    lines = [f"{'ms':>10}{'share':>8}{'launches':>10}  {'category':<20}kernel"]
    for name, calls, ms in found["kernels"][:most]:
        share = ms / total if ms is not None and total else None
        numbers = f"{_number(ms, '.3f'):>10}{_number(share, '.1%'):>8}{calls:>10}"
        lines.append(f"{numbers}  {categorize(name):<20}{name[:120]}")
    return "\n".join(lines) + "\n"
