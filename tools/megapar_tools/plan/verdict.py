"""Whether a layout fits into the memory of a device, and if not, what would."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from megapar.base.errors import ConfigError
from megapar.config.options import Config
from megapar.train.levers import Change, changes_of_axes, changes_of_options, describe
from megapar_tools.plan.memory import RankReport, fullest_rank, report_rank, reports
from megapar_tools.plan.parts import Parts

UNEVEN_EXPERTS = 0.5
"""A plan gives each expert an even share of the tokens. So much more of what experts keep is held in reserve."""

_SHOWN = 3  # changes that would fit
_SAVES = 0.1  # less would hardly be felt: fragments and workspaces vary by more


@dataclass(frozen=True)
class Capacity:
    """The memory of a device, and what of it a plan may not use, in bytes.

    The reserve is for what no plan counts: the CUDA context, NCCL, workspaces of kernels, and fragments of the
    allocator. `host_bytes` are those of host memory for the device, None if they are not known.
    """

    name: str
    capacity_bytes: int
    reserve_bytes: int
    host_bytes: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a layout fits, and a text for people with the bytes and what would fit."""

    fits: bool
    text: str


def judge(given: Config, validated: Callable[[Config], Config], parts: Parts, capacity: Capacity) -> Verdict:
    """The verdict on a layout. `given` has the options as the user gave them, and `validated` fills in the others.

    `validated` raises ConfigError for a layout that cannot run. If the layout does not fit, further layouts of as many
    ranks are planned, one option changed in each, and then several.
    """
    config = validated(given)
    fullest = fullest_rank(config, parts)
    reserve = capacity.reserve_bytes + for_uneven_experts(config, fullest)
    needs = f"the fullest rank needs {_gib(fullest.total)} by plan and {_gib(reserve)} in reserve ({_reasons(config)})"
    on_host = max(report.on_host for report in reports(config, parts))
    if capacity.host_bytes is not None and on_host > capacity.host_bytes:
        text = f"a rank puts {_gib(on_host)} into host memory by plan, and there are {_gib(capacity.host_bytes)} for it"
        return Verdict(False, f"does not fit on a host of {capacity.name}: {text}; lower {_offloads(config)}")
    if fullest.total + reserve <= capacity.capacity_bytes:
        left = capacity.capacity_bytes - fullest.total - reserve
        return Verdict(True, f"fits on {capacity.name} of {_gib(capacity.capacity_bytes)}: {needs}, {_gib(left)} left")
    text = f"does not fit on {capacity.name} of {_gib(capacity.capacity_bytes)}: {needs}"
    found = what_fits(config, given, validated, parts, capacity.capacity_bytes - capacity.reserve_bytes)
    if found:
        return Verdict(False, f"{text}; would fit: {'; or '.join(found)}")
    return Verdict(False, f"{text}; nothing tried with as many ranks would: use more ranks, or a smaller model")


def for_uneven_experts(config: Config, report: RankReport) -> int:
    """Bytes held in reserve for a rank whose experts get more tokens than others. 0 if a rank has all experts."""
    if config.parallel.ep <= 1:
        # All rows of a rank's tokens stay on it, however they are spread over the experts.
        return 0
    return round(UNEVEN_EXPERTS * sum(nbytes for name, nbytes in report.kept if name.endswith("mlp")))


def _reasons(config: Config) -> str:
    listed = "CUDA, NCCL, workspaces, fragments"
    if config.parallel.ep > 1:
        listed += f", experts with {1 + UNEVEN_EXPERTS:g} times their even share"
    return listed


def _offloads(config: Config) -> str:
    shares = {"train.offload": config.train.offload, "optimizer.offload": config.optimizer.offload}
    return " or ".join(name for name, share in shares.items() if share)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"


def shortage_of(
    config: Config, given: Config, validated: Callable[[Config], Config], parts: Parts, rank: int
) -> tuple[str, Mapping[str, int], list[str]]:
    """Return what `rank` needs by plan, in words and in bytes by what needs them, and changes that would need less.

    `given` and `validated` are as in `judge`, and `config` is what they make.
    """
    needs = report_rank(config, parts, rank)
    sizes = {
        "weights": needs.weights,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations,
    }
    listed = ", ".join(f"{name} {size / 2**30:,.3f}" for name, size in sizes.items())
    words = f"out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan ({listed}) and workspace"
    return words, needs.rows, what_fits(config, given, validated, parts, int(needs.total * (1 - _SAVES)))


def what_fits(
    config: Config, given: Config, validated: Callable[[Config], Config], parts: Parts, limit: int
) -> list[str]:
    """The first changes with a plan of at most `limit` bytes, in words: of one option, else of several together.

    `given` and `validated` are as in `judge`, and `config` is what they make.
    """

    def fitting(changes: Sequence[Change]) -> str:
        """Return the changes in words if they fit, else an empty text."""
        try:
            changed = validated(_with(given, changes))
            report = fullest_rank(changed, parts)
        except ConfigError:
            return ""  # this layout cannot run
        if report.total + for_uneven_experts(changed, report) > limit:
            return ""
        return f"{', '.join(map(describe, changes))} ({_gib(report.total)})"

    of_options = list(changes_of_options(config))
    of_axes = list(changes_of_axes(config))
    # Of several values of an option, the last one saves most.
    together = _compatible(list(dict(of_options).items()), given, validated)
    found = list(islice(filter(None, map(fitting, [*([change] for change in of_options), *of_axes])), _SHOWN))
    several = [together, *([*together, *changes] for changes in of_axes)]
    return found or list(islice(filter(None, map(fitting, several)), 1))


def _compatible(changes: Sequence[Change], given: Config, validated: Callable[[Config], Config]) -> Sequence[Change]:
    """Return the changes, without the cheapest one whose absence lets the others run together."""
    for kept in (changes, *([*changes[:n], *changes[n + 1 :]] for n in range(len(changes)))):
        with suppress(ConfigError):
            validated(_with(given, kept))
            return kept
    return changes


def _with(config: Config, changes: Sequence[Change]) -> Config:
    for path, value in changes:
        section, _, option = path.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config
