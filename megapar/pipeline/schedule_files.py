"""Schedules in files: our own text, as `show` prints it, and the CSV files of torch.distributed.pipelining."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megapar.errors import ConfigError
from megapar.messages import counted, first_few, listed
from megapar.pipeline.actions import Action, Kind, Orders
from megapar.pipeline.lowering import refuse_circles

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_FUSED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# What torch's schedules hold beside computation, and why it can be left out: transfers are inserted by lowering, and
# weights are gathered, released and reduced by ZeRO, whatever the schedule.
_LEFT_OUT = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F\d+|RECV_F\d+|SEND_B\d+|RECV_B\d+)")


@dataclass(frozen=True)
class ScheduleFile:
    """The schedule that a file holds, for `num_microbatches` micro-batches and, by leaving out, for fewer."""

    path: str
    orders: Orders
    place: list[int]
    num_microbatches: int

    def place_for(self, pp: int, vpp: int) -> list[int]:
        """The rank of each stage. Raises ConfigError if the file is not for pp ranks with vpp stages each."""
        if len(self.orders) != pp or len(self.place) != pp * vpp:
            ranks = len(self.orders)
            stages = len(self.place)
            raise ConfigError(
                f"parallel.schedule={self.path}: is for {counted(ranks, 'rank')} and {counted(stages, 'stage')}, not "
                f"for parallel.pp={pp} and parallel.vpp={vpp}; use parallel.pp {ranks} and parallel.vpp "
                f"{stages // ranks}, or another file"
            )
        return self.place

    def orders_for(self, pp: int, vpp: int, num_microbatches: int) -> Orders:
        """The actions of the first `num_microbatches` micro-batches. Raises ConfigError if the file has fewer."""
        self.place_for(pp, vpp)
        if num_microbatches > self.num_microbatches:
            raise ConfigError(
                f"parallel.schedule={self.path}: holds {counted(self.num_microbatches, 'micro-batch', 'micro-batches')}"
                f", but a step has {num_microbatches}; use a file for at least as many, or a smaller "
                "train.global_batch_size"
            )
        # A valid order stays valid without all actions of a micro-batch.
        return [[action for action in order if action.microbatch < num_microbatches] for order in self.orders]


def is_file(name: str) -> bool:
    """Whether parallel.schedule names a file. Decided by the name alone, so that all machines decide alike."""
    return "/" in name or name.endswith((".txt", ".csv"))


def read(path: str) -> ScheduleFile:
    """Read a schedule and check that it can run. Raises ConfigError that says in one line what is wrong, and where."""
    where = f"parallel.schedule={path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(
            f"{where}: cannot be read ({reason}); a name with a slash, .txt or .csv is a file's"
        ) from None
    try:
        orders = parse(text)
        place = _place(orders)
        num_microbatches = 1 + max(action.microbatch for order in orders for action in order)
        _check_complete(orders, place, num_microbatches)
        refuse_circles(orders, len(place))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return ScheduleFile(path, orders, place, num_microbatches)


def parse(text: str) -> Orders:
    """The orders in a text: lines such as `rank 0: 0F0 0F1 0B0`, or a CSV row of such words for each rank.

    Lines that are empty or begin with # are comments. The two actions in a pair such as `(0F1;3B0)OVERLAP_F_B` run one
    after the other. Words of torch's for transfers and for sharded weights are left out. Raises ValueError for others.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise ValueError("holds no schedule: a line for each rank is needed, such as rank 0: 0F0 0B0")
    if not lines[0].lstrip().startswith("rank"):
        return [list(_actions(row, f"row {rank}")) for rank, row in enumerate(csv.reader(lines))]
    orders = []
    for rank, line in enumerate(lines):
        label, colon, words = line.partition(":")
        if not colon or label.split() != ["rank", str(rank)]:
            raise ValueError(f"line {line[:40]!r} must begin with `rank {rank}:`, as ranks come in ascending order")
        orders.append(list(_actions(words.split(), f"rank {rank}")))
    return orders


def _actions(words: Sequence[str], where: str) -> Iterator[Action]:
    for word in map(str.strip, words):
        fused = _FUSED.fullmatch(word)
        parts = fused[1].split(";") if fused else [word]
        for part in map(str.strip, parts):
            found = _ACTION.fullmatch(part)
            if found:
                yield Action(cast(Kind, found[2]), int(found[1]), int(found[3]))
            elif part and not _LEFT_OUT.fullmatch(part):
                raise ValueError(
                    f"{where}: {part!r} is no action; actions are a stage, one of F, B, I and W, and a micro-batch, "
                    "such as 3F7"
                )


def _place(orders: Orders) -> list[int]:
    """The rank of each stage. Raises ValueError for a stage on two ranks, and if ranks differ in numbers of stages."""
    ranks: dict[int, set[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            ranks.setdefault(action.stage, set()).add(rank)
    for stage, homes in sorted(ranks.items()):
        if len(homes) > 1:
            raise ValueError(f"stage {stage} is on ranks {listed(sorted(homes)).replace(' or ', ' and ')}")
    missing = sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys())
    if missing:
        raise ValueError(f"no rank has stage {missing[0]}")
    place = [min(ranks[stage]) for stage in range(len(ranks))]
    counts = [place.count(rank) for rank in range(len(orders))]
    if len(set(counts)) > 1:
        raise ValueError(f"each rank needs as many stages as the others, but they have {', '.join(map(str, counts))}")
    return place


def _check_complete(orders: Orders, place: Sequence[int], num_microbatches: int) -> None:
    """Raise ValueError unless each micro-batch goes through each stage once forward, and once backward."""
    counts = Counter(action for order in orders for action in order)
    problems = [f"{action} stands {count} times" for action, count in counts.items() if count > 1]
    for stage in range(len(place)):
        for microbatch in range(num_microbatches):
            f, b, i, w = (Action(kind, stage, microbatch) in counts for kind in ("F", "B", "I", "W"))
            if not f:
                problems.append(f"{stage}F{microbatch} is missing")
            if b and (i or w):
                problems.append(f"{stage}B{microbatch} stands beside {stage}{'I' if i else 'W'}{microbatch}")
            elif w and not i:
                problems.append(f"{stage}W{microbatch} has no {stage}I{microbatch}")
            elif i and not w:
                problems.append(f"{stage}I{microbatch} has no {stage}W{microbatch}")
            elif not (b or i):
                problems.append(f"{stage}B{microbatch} is missing")
    if problems:
        raise ValueError(first_few(problems, 3))
