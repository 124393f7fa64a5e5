"""The comparison of ranks before they connect: options, code, versions and the kind of device must be the same.

Each rank stores a message in the job's store, and counts itself. The last one to come says so. Rank 0 then reads all
messages and stores a verdict for every rank. So a job of n ranks needs a few requests per rank, and every rank ends
with the same words.
"""

import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megapar.base.errors import CommunicationError, ConfigError

OUR_PACKAGES = ("megapar", "megapar_models", "megapar_kernels")
MOST_DIFFERENCES = 5  # lines of differences in a verdict
READING_SECONDS = 5.0  # time that rank 0 gives the other ranks to read a verdict that ends the job
_BEGUN = "begun"  # the key of the number of meetings that rank 0 has begun
_ANY_BEGUN = "any begun"  # the key that says that there is one
_SUPERSEDED = {"error": "superseded"}  # in place of a verdict: rank 0 has begun another meeting
ERRORS = {"ConfigError": ConfigError, "CommunicationError": CommunicationError}


class Store(Protocol):
    """The methods of torch.distributed's stores used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class RankInfo:
    """One rank of a job: host, kind of device, UUID of the GPU ("" for a CPU), process number."""

    rank: int
    host: str
    device: str
    gpu: str = ""
    pid: int = 0


def this_member(rank: int, device: str, gpu: str) -> RankInfo:
    """The member for this process."""
    return RankInfo(rank, socket.gethostname(), device, gpu, os.getpid())


def hashes_of_files(also: Collection[str] = ()) -> dict[str, str]:
    """A hash of each source file this process has imported from our packages and from the packages `also`.

    The key is "code " and the module's name.
    """
    packages = {*OUR_PACKAGES, *also}
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in packages and file is not None:
            hashes[f"code {name}"] = blake2b(Path(file).read_bytes(), digest_size=6).hexdigest()
    return hashes


class Meeting(NamedTuple):
    """A meeting of all ranks: its number in the job's store, counted from 1, and the members, by rank."""

    number: int
    members: list[RankInfo]


def meet(
    store: Store,
    member: RankInfo,
    world_size: int,
    shared: Mapping[str, Any],
    timeout_seconds: float,
    *,
    outlives_ranks: bool = False,
) -> Meeting:
    """Wait for all ranks of the job, and compare `shared` (JSON types) and GPUs.

    With `outlives_ranks` the store still has the keys of earlier ranks of the job: torchrun's agent serves it, and has
    started the ranks again.

    Raises CommunicationError naming the missing ranks. Raises ConfigError naming each difference with values, ranks and
    hosts. Both are raised on every rank, with the same words. If one rank has two processes, the second one alone
    raises ConfigError.
    """
    # Rank 0 may come just before the timeout, and then wait for other ranks until its own timeout. The 10 seconds more
    # let its verdict arrive.
    deadline = time.monotonic() + 2 * timeout_seconds + 10
    try:
        if member.rank == 0:
            number = _begin(store) if outlives_ranks else 1
            _come(store, number, member, world_size, shared)
            verdict = _judge(store, number, world_size, timeout_seconds)
            _tell(store, number, verdict, world_size)
        else:
            number = _newest(store, member, deadline) if outlives_ranks else 1
            number, verdict = _follow(store, number, member, world_size, shared, deadline, outlives_ranks)
    except RuntimeError as error:  # the store has ended with its process, rank 0 or torchrun's agent
        reason = str(error).splitlines()[0]
        raise CommunicationError(
            f"rank {member.rank} on {member.host} lost the store while ranks met ({reason}): rank 0 or the launcher "
            "has ended; see its message"
        ) from error
    if verdict["error"] is not None:
        raise ERRORS[verdict["error"]](verdict["text"])
    return Meeting(number, [RankInfo(**fields) for fields in verdict["members"]])


def _begin(store: Store) -> int:
    """Begin a meeting, perhaps not the first in this store. Returns its number. Rank 0 calls this.

    A launcher's count of restarts cannot serve as this number: under torchrun each node counts its own.
    """
    number = store.add(_BEGUN, 1)
    store.set(_ANY_BEGUN, "")
    if number > 1:
        # All who came to the meeting before have ended. A rank that has just been started may have come there too.
        _publish(store, number - 1, _SUPERSEDED)
    return number


def _come(store: Store, number: int, member: RankInfo, world_size: int, shared: Mapping[str, Any]) -> bool:
    """Leave this rank's message in the store. Returns whether this is the first process with this rank."""
    # `add` counts atomically, so the second process with this rank finds out.
    if store.add(f"{number}/processes/{member.rank}", 1) > 1:
        return False
    # Nearly always all ranks share the same values, so each set of values is sent once.
    values = json.dumps(dict(shared), sort_keys=True)
    digest = blake2b(values.encode(), digest_size=16).hexdigest()
    if not store.check([f"{number}/shared/{digest}"]):
        store.set(f"{number}/shared/{digest}", values)
    store.set(f"{number}/member/{member.rank}", json.dumps([asdict(member), digest]))
    place = store.add(f"{number}/came", 1)
    store.set(f"{number}/arrival/{place}", str(member.rank))
    if place == world_size:
        store.set(f"{number}/all", "")
    return True


def _judge(store: Store, number: int, world_size: int, timeout_seconds: float) -> dict[str, Any]:
    """Wait for all ranks and compare their messages. Rank 0 calls this. Returns the verdict, as JSON types."""
    came = list(range(world_size))
    try:
        store.wait([f"{number}/all"], timedelta(seconds=timeout_seconds))
    except RuntimeError:
        # Only those that came are looked up: a wrong WORLD_SIZE may be much larger.
        arrivals = [f"{number}/arrival/{place}" for place in range(1, store.add(f"{number}/came", 0) + 1)]
        came = sorted(int(store.get(key)) for key in arrivals if store.check([key]))
    messages = [json.loads(store.get(f"{number}/member/{rank}")) for rank in came]
    members = [RankInfo(**fields) for fields, _ in messages]
    verdict = {"error": None, "text": "", "members": [asdict(member) for member in members]}
    if len(came) < world_size:
        missing = sorted(set(range(world_size)).difference(came))
        text = (
            f"{in_runs(missing)} of {world_size} did not come within {timeout_seconds:g} s "
            "(launch.timeout_seconds): see whether their processes started, and their own messages"
        )
        return verdict | {"error": "CommunicationError", "text": text}
    digests = [digest for _, digest in messages]
    values = {digest: json.loads(store.get(f"{number}/shared/{digest}")) for digest in set(digests)}
    text = "\n".join([*_shared_gpus(members), *differences(members, [values[digest] for digest in digests])])
    return verdict | {"error": "ConfigError" if text else None, "text": text}


def _tell(store: Store, number: int, verdict: Mapping[str, Any], world_size: int) -> None:
    """Store the verdict. If it ends the job, wait until every rank has read it, or has had time to."""
    _publish(store, number, verdict)
    if verdict["error"] is None:
        return
    # Rank 0 ends after this, and the store may be in its process.
    end = time.monotonic() + READING_SECONDS
    while store.add(f"{number}/readers", 0) < world_size - 1 and time.monotonic() < end:
        time.sleep(0.02)


def _follow(
    store: Store,
    number: int,
    member: RankInfo,
    world_size: int,
    shared: Mapping[str, Any],
    deadline: float,
    outlives_ranks: bool,
) -> tuple[int, dict[str, Any]]:
    """Come to the meeting and wait for rank 0's verdict. Returns the meeting's number and the verdict.

    If the store outlives ranks, the meeting may turn out to be one of earlier ranks. This rank then waits for the next
    one.
    """
    is_first = _come(store, number, member, world_size, shared)
    while is_first or outlives_ranks:
        verdict = _verdict(store, number, member, deadline)
        if verdict == _SUPERSEDED:
            number += 1
            is_first = _come(store, number, member, world_size, shared)
        elif not outlives_ranks or asdict(member) in verdict["members"]:
            store.add(f"{number}/readers", 1)
            return number, verdict
        elif time.monotonic() > deadline:
            break
        else:
            time.sleep(0.2)  # rank 0 will begin another meeting, and say so here
    error = ConfigError(
        f"two processes are rank {member.rank} of this job, one of them on {member.host} (process {member.pid}): check "
        "RANK, NODE_RANK or the number of tasks"
    )
    error.everywhere = False  # the first of the two, and all other ranks, do not know
    raise error


def _newest(store: Store, member: RankInfo, deadline: float) -> int:
    """The number of the newest meeting begun by a rank 0. It may have ended."""
    # Nobody comes to a meeting before that: who came and ended would be taken for a rank that is there.
    _wait_for_first(store, _ANY_BEGUN, "", member, deadline)
    return store.add(_BEGUN, 0)


def _verdict(store: Store, number: int, member: RankInfo, deadline: float) -> dict[str, Any]:
    """Wait for the verdict of a meeting."""
    key = f"{number}/verdict"
    _wait_for_first(store, key, f"{number}/member/0", member, deadline)
    verdict: dict[str, Any] = json.loads(zlib.decompress(store.get(key)))
    return verdict


def _wait_for_first(store: Store, key: str, its_message: str, member: RankInfo, deadline: float) -> None:
    """Wait for a key to be set by rank 0. `its_message` is the key of rank 0's message, "" if it has none yet."""
    began = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - began)))
    except RuntimeError as error:
        came = "did not come"
        if its_message and store.check([its_message]):
            came = "came, but ended before it had compared the ranks"
        raise CommunicationError(
            f"rank 0 {came}; rank {member.rank} on {member.host} waited {time.monotonic() - began:.0f} s"
        ) from error


def _publish(store: Store, number: int, verdict: Mapping[str, Any]) -> None:
    # Compressed: a verdict names all ranks, and all ranks read it.
    packed = zlib.compress(json.dumps(verdict).encode(), 1)
    store.set(f"{number}/verdict", packed)  # type: ignore[arg-type]  # bytes are as good


def _shared_gpus(members: Sequence[RankInfo]) -> list[str]:
    """A line for each GPU used by several ranks. NCCL would hang, or fail without naming the GPU and the ranks."""
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


def differences(members: Sequence[RankInfo], shared: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each name in `shared` with different values on different ranks. The most common value comes first."""
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
            parts = [f"{value} on {name_hosts(ranks, members)}" for value, ranks in by_size[:3]]
            lines.append(f"ranks disagree on {name}: {'; '.join(parts)}")
    if len(lines) > MOST_DIFFERENCES:
        rest = len(lines) - MOST_DIFFERENCES
        lines = [*lines[:MOST_DIFFERENCES], f"ranks disagree on {rest} more"]
    return lines


def name_hosts(ranks: Sequence[int], members: Sequence[RankInfo]) -> str:
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
    if len(ranks) == 1:
        return f"rank {joined}"
    return f"ranks {joined}"
