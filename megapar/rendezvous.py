"""Ranks compare what they must share, before they connect: options, code, versions, the kind of device.

Each rank leaves a message in the job's store. Rank 0 reads them all and leaves a verdict, which every rank reads. So a
job of n ranks costs n messages, and every rank ends with the same words.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from megapar.errors import CommunicationError, ConfigError

OUR_PACKAGES = ("megapar", "megapar_models", "megapar_kernels")
MOST_DIFFERENCES = 5  # lines of a verdict
READING_SECONDS = 5.0  # that rank 0 gives the others to read a verdict that ends the job
ERRORS = {"ConfigError": ConfigError, "CommunicationError": CommunicationError}


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class Member:
    """One rank of a job: its machine, its device, the device's serial number ("" for a CPU), its process number."""

    rank: int
    host: str
    device: str
    gpu: str = ""
    pid: int = 0


def this_member(rank: int, device: str, gpu: str) -> Member:
    """This process."""
    return Member(rank, socket.gethostname(), device, gpu, os.getpid())


def hashes_of_our_files() -> dict[str, str]:
    """A hash of each source file of ours that this process has imported, by "code " and its module's name."""
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OUR_PACKAGES and file is not None:
            hashes[f"code {name}"] = blake2b(Path(file).read_bytes(), digest_size=6).hexdigest()
    return hashes


def meet(
    store: Store, member: Member, world_size: int, shared: Mapping[str, Any], timeout_seconds: float
) -> list[Member]:
    """Wait for all ranks of the job and compare `shared` (JSON types) and GPUs; returns all members.

    Raises CommunicationError that names ranks that did not come, ConfigError that names what differs with values, ranks
    and hosts: each on every rank, with the same words.
    """
    try:
        verdict = _verdict(store, member, world_size, shared, timeout_seconds)
    except RuntimeError as error:  # the store is gone: it lives in rank 0, or in torchrun's agent
        reason = str(error).splitlines()[0]
        raise CommunicationError(
            f"rank {member.rank} on {member.host} lost the store while ranks met ({reason}): rank 0 or the launcher "
            "has ended; see its message"
        ) from error
    if verdict["error"] is not None:
        raise ERRORS[verdict["error"]](verdict["text"])
    return [Member(**fields) for fields in verdict["members"]]


def _verdict(
    store: Store, member: Member, world_size: int, shared: Mapping[str, Any], timeout_seconds: float
) -> dict[str, Any]:
    """What rank 0 found, as JSON types; every rank has read it, or had time to, before rank 0 returns."""
    number = store.add(f"arrivals/{member.rank}", 1)
    if number > 1:
        raise ConfigError(
            f"two processes are rank {member.rank} of this job, one of them on {member.host}: check RANK, NODE_RANK or "
            "the number of tasks"
        )
    store.set(f"member/{member.rank}", json.dumps([asdict(member), dict(shared)], sort_keys=True))
    if member.rank == 0:
        store.set("verdict", json.dumps(_judge(store, world_size, timeout_seconds)))
    else:
        _wait_for_verdict(store, member, timeout_seconds)
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    readers = store.add("readers", 1)
    if member.rank == 0 and verdict["error"] is not None:
        # Rank 0 is about to end, and the store may end with it.
        end = time.monotonic() + READING_SECONDS
        while readers < world_size and time.monotonic() < end:
            time.sleep(0.02)
            readers = store.add("readers", 0)
    return verdict


def _judge(store: Store, world_size: int, timeout_seconds: float) -> dict[str, Any]:
    """Rank 0's verdict, as JSON types."""
    keys = [f"member/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        text = (
            f"{in_runs(missing)} of {world_size} did not come within {timeout_seconds:g} s "
            "(launch.timeout_seconds): see whether their processes started, and their own messages"
        )
        return {"error": "CommunicationError", "text": text}
    messages = [json.loads(store.get(key)) for key in keys]
    members = [Member(**fields) for fields, _ in messages]
    text = "\n".join([*_shared_gpus(members), *differences(members, [shared for _, shared in messages])])
    if text:
        return {"error": "ConfigError", "text": text}
    return {"error": None, "members": [asdict(member) for member in members]}


def _wait_for_verdict(store: Store, member: Member, timeout_seconds: float) -> None:
    # Rank 0 may have come as late as allowed, and then waits as long for others. The margin lets its verdict arrive.
    try:
        store.wait(["verdict"], timedelta(seconds=2 * timeout_seconds + 10))
    except RuntimeError as error:
        came = "came, but ended before it had compared the ranks" if store.check(["member/0"]) else "did not come"
        raise CommunicationError(
            f"rank 0 {came}; rank {member.rank} on {member.host} waited {2 * timeout_seconds + 10:g} s"
        ) from error


def _shared_gpus(members: Sequence[Member]) -> list[str]:
    """A line for each GPU that several ranks were given. NCCL would hang or refuse it without saying which."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for member in members:
        if member.gpu:
            ranks_of.setdefault((member.host, member.gpu), []).append(member.rank)
    return [
        f"{in_runs(ranks)} on {host} share one GPU ({gpu}): start one rank a GPU, or show each task its own"
        for (host, gpu), ranks in ranks_of.items()
        if len(ranks) > 1
    ]


def differences(members: Sequence[Member], shared: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name of `shared` whose value is not the same on all ranks, the most common value first."""
    if all(values == shared[0] for values in shared):
        return []
    lines = []
    for name in sorted({name for values in shared for name in values}):
        ranks_of: dict[str, list[int]] = {}
        for member, values in zip(members, shared, strict=True):
            ranks_of.setdefault(json.dumps(values.get(name)), []).append(member.rank)
        if len(ranks_of) > 1:
            by_size = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
            parts = [f"{value} on {_placed(ranks, members)}" for value, ranks in by_size[:3]]
            lines.append(f"ranks disagree on {name}: {'; '.join(parts)}")
    if len(lines) > MOST_DIFFERENCES:
        rest = len(lines) - MOST_DIFFERENCES
        lines = [*lines[:MOST_DIFFERENCES], f"ranks disagree on {rest} more"]
    return lines


def _placed(ranks: Sequence[int], members: Sequence[Member]) -> str:
    """Such as "ranks 0-3 and 6 (node-a, node-b)"."""
    hosts = sorted({members[rank].host for rank in ranks})
    shown = ", ".join(hosts[:3])
    if len(hosts) > 3:
        shown += f" and {len(hosts) - 3} more"
    return f"{in_runs(ranks)} ({shown})"


def in_runs(ranks: Sequence[int]) -> str:
    """Such as "rank 4" or "ranks 0-3 and 6"; at most ten runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:10]]
    if len(runs) > 10:
        words.append(f"{sum(len(run) for run in runs[10:])} more")
    joined = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank {joined}" if len(ranks) == 1 else f"ranks {joined}"
