"""Before they connect, ranks compare what they must share: options, code, versions, the kind of device.

Each rank stores a message in the job's store. Rank 0 reads all messages and stores a verdict, which every rank reads.
So a job of n ranks needs n messages, and every rank ends with the same words.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from megapar.errors import CommunicationError, ConfigError

OUR_PACKAGES = ("megapar", "megapar_models", "megapar_kernels")
MOST_DIFFERENCES = 5  # lines of differences in a verdict
READING_SECONDS = 5.0  # time that rank 0 gives the other ranks to read a verdict that ends the job
ERRORS = {"ConfigError": ConfigError, "CommunicationError": CommunicationError}


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class Member:
    """One rank of a job: host, kind of device, UUID of the GPU ("" for a CPU), process number."""

    rank: int
    host: str
    device: str
    gpu: str = ""
    pid: int = 0


def this_member(rank: int, device: str, gpu: str) -> Member:
    """The member that describes this process."""
    return Member(rank, socket.gethostname(), device, gpu, os.getpid())


def hashes_of_files(also: Collection[str] = ()) -> dict[str, str]:
    """A hash of each source file that this process has imported from our packages and from the packages `also`.

    The key is "code " and the module's name.
    """
    packages = {*OUR_PACKAGES, *also}
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in packages and file is not None:
            hashes[f"code {name}"] = blake2b(Path(file).read_bytes(), digest_size=6).hexdigest()
    return hashes


def meet(
    store: Store, member: Member, world_size: int, shared: Mapping[str, Any], timeout_seconds: float
) -> list[Member]:
    """Wait for all ranks of the job, and compare `shared` (JSON types) and GPUs. Returns all members, by rank.

    Raises CommunicationError that names the ranks that did not come. Raises ConfigError that names each difference with
    values, ranks and hosts. Both are raised on every rank, with the same words.
    """
    try:
        verdict = _verdict(store, member, world_size, shared, timeout_seconds)
    except RuntimeError as error:  # the store has ended with its process, rank 0 or torchrun's agent
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
    """The verdict of rank 0, as JSON types.

    Rank 0 returns a verdict with an error only after every rank has read it, or has had time to.
    """
    # `add` counts atomically, so the second process with this rank finds out.
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
        # Rank 0 ends after this, and the store may be in its process.
        end = time.monotonic() + READING_SECONDS
        while readers < world_size and time.monotonic() < end:
            time.sleep(0.02)
            readers = store.add("readers", 0)
    return verdict


def _judge(store: Store, world_size: int, timeout_seconds: float) -> dict[str, Any]:
    """Compare the messages of all ranks. Rank 0 calls this. Returns the verdict, as JSON types."""
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
    # Rank 0 may come just before the timeout, and then wait for other ranks until its own timeout. The 10 seconds more
    # let its verdict arrive.
    try:
        store.wait(["verdict"], timedelta(seconds=2 * timeout_seconds + 10))
    except RuntimeError as error:
        came = "did not come"
        if store.check(["member/0"]):
            came = "came, but ended before it had compared the ranks"
        raise CommunicationError(
            f"rank 0 {came}; rank {member.rank} on {member.host} waited {2 * timeout_seconds + 10:g} s"
        ) from error


def _shared_gpus(members: Sequence[Member]) -> list[str]:
    """A line for each GPU that several ranks use. NCCL would hang, or fail without saying which GPU and ranks."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for member in members:
        if member.gpu:
            ranks_of.setdefault((member.host, member.gpu), []).append(member.rank)
    lines = []
    for (host, gpu), ranks in ranks_of.items():
        if len(ranks) > 1:
            lines.append(
                f"{in_runs(ranks)} on {host} share one GPU ({gpu}): start one rank a GPU, or show each task its own"
            )
    return lines


def differences(members: Sequence[Member], shared: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name in `shared` whose value differs between ranks. The most common value comes first."""
    if all(values == shared[0] for values in shared):
        return []
    lines = []
    # The names of all ranks: ranks with different code may lack some.
    for name in sorted({name for values in shared for name in values}):
        ranks_of: dict[str, list[int]] = {}
        # Values are compared as JSON text, because a list cannot be the key of a dict.
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
    """Ranks with their hosts, such as "ranks 0-3 and 6 (node-a, node-b)". Names at most three hosts."""
    hosts = sorted({members[rank].host for rank in ranks})
    shown = ", ".join(hosts[:3])
    if len(hosts) > 3:
        shown += f" and {len(hosts) - 3} more"
    return f"{in_runs(ranks)} ({shown})"


def in_runs(ranks: Sequence[int]) -> str:
    """Ranks as text, such as "rank 4" or "ranks 0-3 and 6". Lists at most ten runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs[:10]:
        words.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    if len(runs) > 10:
        words.append(f"{sum(len(run) for run in runs[10:])} more")
    joined = words[0]
    if len(words) > 1:
        joined = f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank {joined}" if len(ranks) == 1 else f"ranks {joined}"
