"""Explains in a run where memory went when it runs out, and what would need less."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from megapar import device
from megapar.config.options import Config
from megapar.errors import OutOfMemoryError
from megapar.launch.reporting import tell
from megapar.plan.memory import RankReport, report_rank
from megapar.plan.parts import Parts
from megapar.plan.verdict import what_fits
from megapar.system import limits
from megapar.train import memory_report

_SAVES = 0.1  # less would hardly be felt: fragments and workspaces vary by more


@dataclass(frozen=True)
class Explanation:
    """Explains errors of a run on `rank`.

    `given` has the options as the user gave them. `validated` makes `config` of it, and raises ConfigError for what
    cannot run.
    """

    config: Config
    given: Config
    validated: Callable[[Config], Config]
    parts: Parts
    rank: int

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context around a run. If memory or files run out within it, raises OutOfMemoryError.

        The error says in one line what the rank needs and which options would help, or which limit was reached.
        """
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            limit = limits.reached(error)
            if limit:
                raise OutOfMemoryError(limit) from error
            reason = device.out_of_memory(error)
            if not reason:
                raise
            raise OutOfMemoryError(self._in_words(reason)) from error

    def _in_words(self, reason: str) -> str:
        in_use = device.peak_memory_bytes(_device_in_use())
        needs = None
        smaller: list[str] = []
        # The plan fails too if the sizes are too large for torch, or if no memory is left to plan with. The error is
        # then raised without the bytes.
        with suppress(MemoryError, RuntimeError, OSError):
            needs = report_rank(self.config, self.parts, self.rank)
            smaller = what_fits(self.config, self.given, self.validated, self.parts, self._limit(needs))
        if needs and self.config.train.memory_report:
            sizes = {"planned": needs.rows, "in use": {memory_report.ALL: in_use}}
            tell(memory_report.in_words(f"memory of rank {self.rank}", sizes))
        advice = _what_would_help(self.config)
        if smaller:
            advice = f"by plan this would do with less: {'; or '.join(smaller)}"
        return f"{_needs_in_words(needs)} ({reason}; at most {_gib(in_use)} were in use); {advice}"

    def _limit(self, needs: RankReport) -> int:
        """What a plan must stay below to be of help."""
        return int(needs.total * (1 - _SAVES))


def _device_in_use() -> torch.device:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind or torch.device("cpu")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.3f} GiB"


def _needs_in_words(needs: RankReport | None) -> str:
    """The memory a rank needs by plan, in words. `needs` is None if it could not be planned."""
    if needs is None:
        return "out of memory"
    sizes = {
        "weights": needs.weights,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations,
    }
    listed = ", ".join(f"{name} {size / 2**30:,.3f}" for name, size in sizes.items())
    return f"out of memory: this rank needs {needs.total / 2**30:,.3f} GiB by plan ({listed}) and workspace"


def _what_would_help(config: Config) -> str:
    """Name the first three options to save memory here. The least costly come first."""
    parallel = config.parallel
    train = config.train
    zero_stage = config.optimizer.zero_stage
    several_replicas = parallel.dp * parallel.cp > 1  # ZeRO shards over them
    # What to try, the value now, and whether it applies.
    options = [
        ("smaller train.micro_batch_size", train.micro_batch_size, train.micro_batch_size > 1),
        ("train.recompute light or full", train.recompute, train.recompute in ("none", "selective")),
        ("train.recompute full", train.recompute, train.recompute in ("light", "all_but_attention")),
        ("optimizer.zero_stage 1", zero_stage, zero_stage == 0 and several_replicas),
        ("optimizer.zero_stage 2 or 3", zero_stage, zero_stage == 1 and several_replicas),
        ("kernels.loss_chunk 1024", config.kernels.loss_chunk, config.kernels.loss_chunk == 0),
        ("larger parallel.tp", parallel.tp, True),
        ("larger parallel.pp", parallel.pp, True),
        ("larger parallel.cp", parallel.cp, True),
        ("shorter train.seq_length", train.seq_length, True),
    ]
    first, second, third, *_ = [f"{text} (now {now})" for text, now, applies in options if applies]
    return f"try {first}, {second} or {third}"
