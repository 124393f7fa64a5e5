"""Finds the missing rank from the flight logs of all ranks. Writes a sentence and a table."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megapar.base.errors import CommunicationError
from megapar.comm.rendezvous import RankInfo, in_runs

Log = dict[str, Any]  # what flight.read returns
Group = dict[int, tuple[int, Mapping[str, Any]]]  # position on an axis -> (rank, its log of the axis)
# A process posts its log once a second. One that has been silent for longer than this has stopped or ended, or its host
# is cut off.
SILENT_SECONDS = 3.0


def process_state(pid: int) -> str:
    """The state of a process of this host: "stopped", "ended" or "running"."""
    try:
        # The name of the program is in parentheses and may hold spaces, so fields are counted from the last ")".
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(state, "running")


def diagnose(logs: Mapping[int, Log], members: Sequence[RankInfo]) -> tuple[str, int] | None:
    """A sentence about why ranks wait in vain, and the rank behind it.

    Returns None if the logs do not tell. `logs` has all readable logs by rank. Each log has a field `state`:
    running, stopped, ended, silent or failed. A rank has failed if one of its operations failed, mostly
    because another rank is gone.
    """
    groups = _groups(logs)
    # First, because `_blockers` compares numbers alone: it does not see that two ranks are in different operations.
    different = mismatch(logs, members, groups)
    if different is not None:
        return different
    blockers = {rank: set(_blockers(log, rank, groups)) for rank, log in logs.items()}
    waiting = [rank for rank, log in logs.items() if log["waiting"] and log["state"] in ("running", "failed")]
    unread = [member.rank for member in members if member.rank not in logs]
    reached = _reached(waiting, blockers)
    gone = [rank for rank, log in logs.items() if _has_ended(log) or log["state"] not in ("running", "failed")]
    idle = [rank for rank in reached if not logs[rank]["waiting"]]
    # Others wait for these ranks, and these wait for nobody: they have been held up within their operation.
    stuck = [rank for rank in reached if logs[rank]["waiting"] and not blockers[rank]]
    # A rank that is gone explains why all others wait, so it is named before one that may only be late.
    for candidates in (gone, idle, stuck):
        if candidates:
            return _missing(candidates, waiting, logs, members), candidates[0]
    late = _late(logs, groups)
    if late:
        return _missing(late, _held_by_device(logs), logs, members), late[0]
    if unread:
        return f"nothing was heard of {in_runs(unread)}: see their own messages", unread[0]
    if waiting and all(blockers[rank] for rank in waiting):
        circle = "; ".join(f"rank {rank} waits for {in_runs(sorted(blockers[rank]))}" for rank in waiting[:8])
        return f"ranks wait for each other: {circle}", waiting[0]
    return None


def _held_by_device(logs: Mapping[int, Log]) -> list[int]:
    """The ranks whose hosts wait for what their devices compute."""
    return [rank for rank, log in logs.items() if log["phase"] == "device"]


def _late(logs: Mapping[int, Log], groups: Mapping[tuple[str, int], Group]) -> list[int]:
    """The ranks that have begun fewer collectives than others of a group, the latest first.

    Under NCCL no host waits for an operation: it queues a step and waits for its device, which waits for the rank that
    has not queued the step.
    """
    if not _held_by_device(logs):
        return []
    missing: dict[int, int] = {}
    for group in groups.values():
        most = max(axis["collectives"] for _, axis in group.values())
        for rank, axis in group.values():
            missing[rank] = max(missing.get(rank, 0), most - axis["collectives"])
    return sorted((rank for rank, number in missing.items() if number), key=lambda rank: -missing[rank])


def _has_ended(log: Log) -> bool:
    """Whether the rank has ended with an error of its own. A CommunicationError is the effect of another rank's end."""
    return log["error"] is not None and log["error"]["class"] != CommunicationError.__name__


def _missing(
    missing: Sequence[int], waiting: Sequence[int], logs: Mapping[int, Log], members: Sequence[RankInfo]
) -> str:
    """The sentence about the ranks of `missing`: the first in detail, the others by number."""
    first = missing[0]
    log = logs[first]
    last = _newest(log)
    text = f"{name(members[first], log)} did not arrive: {_state(log)} {position_in_step(log)}"
    text += f", for {_ago(log['since'])}"
    if last is not None:
        text += f"; its last operation: {_operation(*last)}"
    if len(missing) > 1:
        text += f"; {in_runs(missing[1:])} did not arrive either"
    others = [rank for rank in waiting if rank != first]
    if others:
        other = logs[others[0]]
        if other["waiting"] is None:
            return f"{text}. rank {others[0]} waited {_ago(other['since'])} for its device"
        text += f". rank {others[0]} waited {_ago(other['waiting']['since'])} in {position_in_step(other)},"
        for record in other["waiting"]["records"][:1]:
            text += f" for {_operation(record, other['waiting']['axis'])}"
    return text


def name(member: RankInfo, log: Log) -> str:
    """A rank in words, such as "rank 1 (process 4711 on node-a)"."""
    return f"rank {member.rank} (process {log['pid']} on {member.host})"


def position_in_step(log: Log) -> str:
    """The position of a rank in words, such as "step 5, forward"."""
    if log["step"]:
        return f"step {log['step']}, {log['phase']}"
    return str(log["phase"])


def _state(log: Log) -> str:
    words = {
        "stopped": "its process is stopped (by SIGSTOP or a debugger) in",
        "ended": "its process has ended in",
        "silent": "nothing was heard of it in",
    }
    if log["error"] is not None:
        return f"it ended with {log['error']['class']} ({log['error']['message']}) in"
    return words.get(log["state"], "it was in")


def _ago(since: float) -> str:
    return f"{max(0.0, time.time() - since):.1f} s"


def _operation(record: Mapping[str, Any], axis: str) -> str:
    """An operation, such as "all_reduce 57 on tp (4,096 bytes float32, tensor_parallel/regions.py:41, step 5)"."""
    preposition = {"send": "to", "receive": "from"}.get(record["operation"])
    peer = ""
    if preposition:
        peer = f" {preposition} position {record['peer']}"
    content = ""
    if record["operation"] != "barrier":  # a barrier carries no data
        content = f"{record['bytes']:,} bytes {record['dtype']}, "
    return (
        f"{record['operation']} {record['number']}{peer} on {axis} ({content}{record['site']}, step {record['step']})"
    )


def _newest(log: Log) -> tuple[Mapping[str, Any], str] | None:
    """The newest operation of the rank, and its axis; None before the first."""
    records = [(axis["records"][-1], axis["name"]) for axis in log["axes"] if axis["records"]]
    return max(records, key=lambda pair: pair[0]["started"], default=None)


def _groups(logs: Mapping[int, Log]) -> dict[tuple[str, int], Group]:
    """The logs of each group of the rank grid, by the name of its axis and its lowest rank."""
    groups: dict[tuple[str, int], Group] = {}
    for rank, log in logs.items():
        for axis in log["axes"]:
            groups.setdefault((axis["name"], axis["first"]), {})[axis["position"]] = rank, axis
    return groups


def _reached(start: Sequence[int], blockers: Mapping[int, set[int]]) -> list[int]:
    """The ranks for which those of `start` wait, directly or through others."""
    seen: dict[int, None] = {}  # as an ordered set: the first rank is named in the message
    waiting = list(start)
    while waiting:
        for rank in sorted(blockers[waiting.pop()]):
            if rank not in seen:
                seen[rank] = None
                waiting.append(rank)
    return list(seen)


def _blockers(log: Log, rank: int, groups: Mapping[tuple[str, int], Group]) -> Iterator[int]:
    """Yield the ranks behind `rank`: it waits for an operation they have not begun."""
    if not log["waiting"]:
        return
    axis = next(axis for axis in log["axes"] if axis["name"] == log["waiting"]["axis"])
    group = groups[axis["name"], axis["first"]]
    for record in log["waiting"]["records"]:
        if record["peer"] < 0:  # a collective: all ranks of the group take part
            yield from (r for r, other in group.values() if r != rank and other["collectives"] < record["number"])
        elif record["peer"] in group:
            peer, other = group[record["peer"]]
            wanted = "receive" if record["operation"] == "send" else "send"
            begun = [
                r["number"] for r in other["records"] if r["operation"] == wanted and r["peer"] == axis["position"]
            ]
            if max(begun, default=0) < record["number"]:
                yield peer


def mismatch(
    logs: Mapping[int, Log], members: Sequence[RankInfo], groups: Mapping[tuple[str, int], Group] | None = None
) -> tuple[str, int] | None:
    """Find the first collective of a group, or message of a link, on which two ranks disagree.

    Returns a sentence and the later rank of the two, or None. `groups` are the logs' groups, if known already.
    """
    if groups is None:
        groups = _groups(logs)
    for (axis_name, _), group in groups.items():
        begun: dict[tuple[Any, ...], tuple[int, Mapping[str, Any]]] = {}
        for position, (rank, axis) in sorted(group.items()):
            for record in axis["records"]:
                key, what = _key(record, position)
                known = begun.setdefault(key, (rank, record))
                if _key(known[1], 0)[1] != what:
                    second = f"{_operation(record, axis_name)} on {name(members[rank], logs[rank])}"
                    first = f"{_operation(known[1], axis_name)} on {name(members[known[0]], logs[known[0]])}"
                    return f"ranks did different things: {first}, but {second}", rank
    return None


def _key(record: Mapping[str, Any], position: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Two tuples: the identity of the operation on its axis, and its properties, equal on all ranks taking part."""
    if record["operation"] == "all_to_all":
        # No bytes: each rank sends as many rows as its tokens chose experts elsewhere.
        return ("all", record["number"]), (record["operation"], record["dtype"])
    if record["peer"] < 0:
        return ("all", record["number"]), (record["operation"], record["bytes"], record["dtype"])
    # Sender first, so that a send and its receive have one key. Their operations differ, and are not compared.
    ends = (position, record["peer"]) if record["operation"] == "send" else (record["peer"], position)
    return (*ends, record["number"]), (record["bytes"], record["dtype"])


def rows(logs: Mapping[int, Log], members: Sequence[RankInfo]) -> list[dict[str, Any]]:
    """The state and position of each rank, as JSON types."""
    table = []
    for member in members:
        log = logs.get(member.rank)
        if log is None:
            table.append({"rank": member.rank, "host": member.host, "pid": member.pid, "state": "unknown"})
            continue
        newest = {
            axis["name"]: _operation(axis["records"][-1], axis["name"]) for axis in log["axes"] if axis["records"]
        }
        row = {"rank": member.rank, "host": member.host, "pid": log["pid"], "state": log["state"]}
        row |= {"step": log["step"], "phase": log["phase"], "seconds": round(time.time() - log["since"], 1)}
        table.append({**row, "waits": log["waiting"] is not None, "last": newest})
    return table


def as_table(logs: Mapping[int, Log], members: Sequence[RankInfo]) -> str:
    """`rows` as text: a row for each rank, a line for the newest operation of each axis."""
    table = Table("rank", "host", "pid", "state", "step", "phase", "for s", "newest operation of each axis", box=None)
    for row in rows(logs, members):
        state = "waits" if row.get("waits") and row["state"] == "running" else row["state"]
        cells = [row["rank"], row["host"], row["pid"], state, row.get("step", ""), row.get("phase", "")]
        newest = "\n".join(row.get("last", {}).values())
        table.add_row(*map(str, cells), str(row.get("seconds", "")), newest)
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
