"""Reads schedules from files: text as `actions.show` prints it, and the CSV files of torch.distributed.pipelining."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from megapar.base.errors import ConfigError
from megapar.config.messages import counted, first_few, listed
from megapar.pipeline.actions import Action, Kind, Orders
from megapar.pipeline.lowering import refuse_circles
from megapar.system.regular_files import read_regular

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_FUSED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Actions of torch's schedules that compute nothing. They are left out, because `lowering` inserts the transfers, and
# `sharding_plan` inserts the gathers of weights and the reductions of gradients.
_LEFT_OUT = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F\d+|RECV_F\d+|SEND_B\d+|RECV_B\d+)")


@dataclass(frozen=True)
class ScheduleFile:
    """A file's schedule, for up to `num_microbatches` micro-batches.

    `orders` are the actions of each rank, and `rank_of` is the rank of each stage.
    """

    path: str
    orders: Orders
    rank_of: list[int]
    num_microbatches: int

    def placement_for(self, pp: int, vpp: int) -> list[int]:
        """The rank of each stage. Raises ConfigError if the file is not for pp ranks with vpp stages each."""
        ranks = len(self.orders)
        stages = len(self.rank_of)
        if ranks != pp or stages != pp * vpp:
            raise ConfigError(
                f"parallel.schedule={self.path}: is for {counted(ranks, 'rank')} and {counted(stages, 'stage')}, not "
                f"for parallel.pp={pp} and parallel.vpp={vpp}; use parallel.pp {ranks} and parallel.vpp "
                f"{stages // ranks}, or another file"
            )
        return self.rank_of

    def orders_for(self, pp: int, vpp: int, num_microbatches: int) -> Orders:
        """The actions of each rank, for the first `num_microbatches` micro-batches.

        Raises ConfigError if the file has fewer, or if it is not for pp ranks with vpp stages each.
        """
        self.placement_for(pp, vpp)  # raises if the file is for other sizes
        if num_microbatches > self.num_microbatches:
            raise ConfigError(
                f"parallel.schedule={self.path}: holds {counted(self.num_microbatches, 'micro-batch', 'micro-batches')}"
                f", but a step has {num_microbatches}; use a file for at least as many, or a smaller "
                "train.global_batch_size"
            )
        # A valid order stays valid without all actions of a micro-batch.
        return [[action for action in order if action.microbatch < num_microbatches] for order in self.orders]


def is_file(name: str) -> bool:
    """Whether `name`, the value of parallel.schedule, names a file.

    Only the name decides, not the file's existence. So all machines decide alike.
    """
    return "/" in name or name.endswith((".txt", ".csv"))


def read(path: str) -> ScheduleFile:
    """Read a schedule and check it. Raises ConfigError if it cannot be read or cannot run."""
    line_name = f"parallel.schedule={path}"
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(
            f"{line_name}: cannot be read ({reason}); a name with a slash, .txt or .csv is a file's"
        ) from None
    try:
        orders = parse(text)
        rank_of = _rank_of(orders)
        num_microbatches = 1 + max(action.microbatch for order in orders for action in order)
        _check_complete(orders, rank_of, num_microbatches)
        refuse_circles(orders, len(rank_of))
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{line_name}: {error}") from None
    return ScheduleFile(path, orders, rank_of, num_microbatches)


def parse(text: str) -> Orders:
    """The orders in a text: a line such as `rank 0: 0F0 0F1 0B0` for each rank, or a CSV row of actions for each rank.

    Empty lines and lines from # on are skipped, and so are torch's actions for transfers and for sharded weights.
    The two actions of a pair such as `(0F1;3B0)OVERLAP_F_B` become one action after the other. Raises ValueError if the
    text holds anything else.
    """
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append(line)
    if not lines:
        raise ValueError("holds no schedule: a line for each rank is needed, such as rank 0: 0F0 0B0")
    orders = []
    if not lines[0].lstrip().startswith("rank"):
        for rank, row in enumerate(csv.reader(lines)):
            orders.append(list(_actions(row, f"row {rank}")))
        return orders
    for rank, line in enumerate(lines):
        label, colon, words = line.partition(":")
        if not colon or label.split() != ["rank", str(rank)]:
            raise ValueError(f"line {line[:40]!r} must begin with `rank {rank}:`, as ranks come in ascending order")
        orders.append(list(_actions(words.split(), f"rank {rank}")))
    return orders


def _actions(words: Sequence[str], line_name: str) -> Iterator[Action]:
    """Yield the actions of one rank. `line_name` names its line or row in the error."""
    for word in words:
        fused = _FUSED.fullmatch(word.strip())
        parts = fused[1].split(";") if fused else [word]
        for part in parts:
            text = part.strip()
            found = _ACTION.fullmatch(text)
            if found:
                stage, kind, microbatch = found.groups()
                yield Action(cast(Kind, kind), int(stage), int(microbatch))
            elif text and not _LEFT_OUT.fullmatch(text):  # a CSV file may have empty cells
                raise ValueError(
                    f"{line_name}: {text[:40]!r} is no action; actions are a stage, one of F, B, I and W, and a "
                    "micro-batch, such as 3F7"
                )


def _rank_of(orders: Orders) -> list[int]:
    """The rank of each stage.

    Raises ValueError if a stage is on no rank or on several, and if ranks have different numbers of stages.
    """
    ranks_of: dict[int, set[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            ranks_of.setdefault(action.stage, set()).add(rank)
    for stage, ranks in sorted(ranks_of.items()):
        if len(ranks) > 1:
            # `listed` writes "0, 1 or 2". The stage is on all of these ranks.
            raise ValueError(f"stage {stage} is on ranks {listed(sorted(ranks)).replace(' or ', ' and ')}")
    last_stage = max(ranks_of, default=0)
    for stage in range(last_stage + 1):
        if stage not in ranks_of:
            raise ValueError(f"no rank has stage {stage}")
    rank_of = [min(ranks_of[stage]) for stage in range(last_stage + 1)]
    stages_on_rank = [rank_of.count(rank) for rank in range(len(orders))]
    if len(set(stages_on_rank)) > 1:
        numbers = ", ".join(map(str, stages_on_rank))
        raise ValueError(f"each rank needs as many stages as the others, but they have {numbers}")
    return rank_of


def _check_complete(orders: Orders, rank_of: Sequence[int], num_microbatches: int) -> None:
    """Raise ValueError unless each micro-batch goes through each stage once forward, and once backward."""
    counts = Counter(action for order in orders for action in order)
    # A mistyped number could be huge. Each micro-batch has two actions at least.
    if num_microbatches > len(counts):
        raise ValueError(
            f"names micro-batch {num_microbatches - 1}, and has {counted(len(counts), 'action')}: too few for all "
            "micro-batches from 0 on"
        )
    problems = [f"{action} stands {count} times" for action, count in counts.items() if count > 1]
    for stage in range(len(rank_of)):
        for microbatch in range(num_microbatches):
            kinds = [kind for kind in get_args(Kind) if Action(kind, stage, microbatch) in counts]
            problems += _problems(stage, microbatch, kinds)
    if problems:
        raise ValueError(first_few(problems, 3))


def _problems(stage: int, microbatch: int, kinds: Sequence[Kind]) -> Iterator[str]:
    """Yield what is wrong with the actions of one micro-batch in one stage, given the kinds that exist."""
    if "F" not in kinds:
        yield f"{stage}F{microbatch} is missing"
    halves = [kind for kind in ("I", "W") if kind in kinds]
    if "B" in kinds:
        # A backward is either one B, or an I and a W.
        if halves:
            yield f"{stage}B{microbatch} stands beside {stage}{halves[0]}{microbatch}"
    elif halves == ["W"]:
        yield f"{stage}W{microbatch} has no {stage}I{microbatch}"
    elif halves == ["I"]:
        yield f"{stage}I{microbatch} has no {stage}W{microbatch}"
    elif not halves:
        yield f"{stage}B{microbatch} is missing"
