"""Whether the hosts of a job reach each other, before the first process group is made (launch.preflight).

All ranks have reached the job's store by then, so each host reaches one other host. Gloo and NCCL need every pair of
hosts. They would wait for launch.timeout_seconds, and then name an address alone.
"""

import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from urllib.parse import urlsplit

from megapar.base.errors import CommunicationError
from megapar.comm.rendezvous import RankInfo, Store, in_runs

_TOKEN_BYTES = 16
_AT_ONCE = 32  # connections that a host makes at a time
_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface
_MOST_NAMED = 3


def check_hosts(
    store: Store, members: Sequence[RankInfo], rank: int, meeting: str, interface: str, limit_seconds: float
) -> None:
    """Let each host connect to each other one. A collective over all ranks; the first rank of each host connects.

    `meeting` is the job's store as a URL. `interface` is the network interface for exchange, "" for the one that leads
    to the store. Raises CommunicationError on every rank, with the same words: it names the hosts that others do not
    reach, and their ranks.
    """
    ranks_of: dict[str, list[int]] = {}
    for member in members:
        ranks_of.setdefault(member.host, []).append(member.rank)
    if len(ranks_of) == 1:
        return
    host = members[rank].host
    if rank == ranks_of[host][0]:
        _connect_to_all(store, host, ranks_of, _own_address(meeting, interface, serves=rank == 0), limit_seconds)
    if rank == 0:
        store.set("verdict", _verdict(store, ranks_of, limit_seconds))
    try:
        store.wait(["verdict"], timedelta(seconds=4 * limit_seconds))
        verdict = store.get("verdict").decode()
    except RuntimeError as failure:
        raise CommunicationError(f"preflight: rank 0 on {members[0].host} gave no answer about the hosts") from failure
    if verdict:
        error = CommunicationError(verdict)
        error.everywhere = True
        error.patience_seconds = 0.0 if rank == 0 else 1.0  # a launcher ends the others when the first one has ended
        raise error


def _own_address(meeting: str, interface: str, *, serves: bool) -> str:
    """The address at which other hosts reach this one. `serves`: the store is on this host."""
    address = urlsplit(meeting)
    assert address.hostname is not None
    if interface and (named := _address_of(interface)):
        return named
    # Nothing is sent: connecting a datagram socket makes the kernel choose the address for the way there.
    found = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(found[0], socket.SOCK_DGRAM)) as probe:
        probe.connect(found[4])
        own = str(probe.getsockname()[0])
    # A host often knows its own name as 127.0.1.1. Others have found it by MASTER_ADDR.
    if serves and (own.startswith("127.") or own == "::1"):
        return address.hostname
    return own


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface, "" if there is none of this name or it has none."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def _connect_to_all(
    store: Store, host: str, ranks_of: Mapping[str, Sequence[int]], address: str, limit_seconds: float
) -> None:
    """Listen at `address` while this host connects to all others. Posts the hosts that it does not reach."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    with _listening(address, token, limit_seconds) as port:
        store.set(f"at/{host}", f"{address} {port} {token.hex()}")

        end = time.monotonic() + limit_seconds
        # One after the other: the store's client serves one request at a time.
        listens = {other: _posted(store, other, end) for other in ranks_of if other != host}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda where: _reach(where, limit_seconds), listens.values())
            reasons = dict(zip(listens, found, strict=True))
        store.set(f"missed/{host}", "\n".join(f"{other}\t{reason}" for other, reason in reasons.items() if reason))
        # Others may still want to connect. They have posted what they miss when they no longer do.
        with suppress(RuntimeError):
            store.wait([f"missed/{other}" for other in ranks_of], timedelta(seconds=2 * limit_seconds))


@contextmanager
def _listening(address: str, token: bytes, limit_seconds: float) -> Iterator[int]:
    """Answer with `token` at a port of `address`, which is yielded."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family, backlog=512)
    except OSError:  # a name or an address that is another machine's to translate, as in a cluster of containers
        server = socket.create_server(("", 0), family=family, backlog=512)
    closed = threading.Event()

    def answer() -> None:
        server.settimeout(0.2)
        while not closed.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                with closing(connection):
                    connection.settimeout(limit_seconds)
                    connection.sendall(token)

    thread = threading.Thread(target=answer, name="preflight", daemon=True)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        closed.set()
        thread.join()
        server.close()


def _posted(store: Store, other: str, end: float) -> str:
    """What a host has posted until `end` (time.monotonic): address, port and token; "" for nothing."""
    try:
        store.wait([f"at/{other}"], timedelta(seconds=max(0.1, end - time.monotonic())))
    except RuntimeError:
        return ""
    return store.get(f"at/{other}").decode()


def _reach(listens: str, limit_seconds: float) -> str:
    """Why a host is not reached, "" if it is. `listens` is what it has posted."""
    if not listens:
        return "it did not say where it listens"
    address, port, token = listens.split()
    where = f"{address} port {port}"
    end = time.monotonic() + limit_seconds
    try:
        with closing(socket.create_connection((address, int(port)), timeout=limit_seconds)) as connection:
            heard = b""
            while len(heard) < _TOKEN_BYTES and time.monotonic() < end:
                part = connection.recv(_TOKEN_BYTES - len(heard))
                if not part:
                    break
                heard += part
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    return "" if heard.hex() == token else f"{where}: another program answers there"


def _verdict(store: Store, ranks_of: Mapping[str, Sequence[int]], limit_seconds: float) -> str:
    """What is wrong in one line, "" if every host reaches every other one. Rank 0 calls this."""
    missed: dict[tuple[str, str], str] = {}
    silent = []
    # A host waits for the others' addresses, and then for its connections.
    end = time.monotonic() + 3 * limit_seconds
    for host in ranks_of:
        try:
            store.wait([f"missed/{host}"], timedelta(seconds=max(0.1, end - time.monotonic())))
        except RuntimeError:
            silent.append(host)
            continue
        for line in store.get(f"missed/{host}").decode().splitlines():
            other, _, reason = line.partition("\t")
            missed[host, other] = reason
    if silent:
        named = "; ".join(_named(host, ranks_of) for host in silent[:_MOST_NAMED])
        return f"preflight: {named} did not answer within {3 * limit_seconds:g} s: its first rank is stopped or lost"
    return describe(missed, ranks_of)


def describe(missed: Mapping[tuple[str, str], str], ranks_of: Mapping[str, Sequence[int]]) -> str:
    """The hosts behind failed connections, in one line; "" if there are none.

    `missed` has a reason for each pair of a host and another one that it does not reach. A host in most of the pairs is
    the cause. Where two have as many, the one with the higher ranks is named first.
    """
    lines: list[str] = []
    left = dict(missed)
    while left and len(lines) < _MOST_NAMED:
        count = {host: sum(host in pair for pair in left) for host in ranks_of}
        worst = max(reversed(list(ranks_of)), key=lambda host: count[host])
        others = {pair[0] if pair[1] == worst else pair[1] for pair in left if worst in pair}
        from_others = next((left[pair] for pair in left if pair[1] == worst), "")
        reason = from_others or next(left[pair] for pair in left if worst in pair)
        shown = ", ".join(_named(host, ranks_of) for host in ranks_of if host in list(others)[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        unreached = any((other, worst) in left for other in others)
        verb = "is not reached from" if unreached else "does not reach"
        lines.append(f"{_named(worst, ranks_of)} {verb} {shown}{more} ({reason})")
        left = {pair: reason for pair, reason in left.items() if worst not in pair}
    if not lines:
        return ""
    return f"preflight: {'; '.join(lines)}; ranks need every port between their hosts: see the firewall and the route"


def _named(host: str, ranks_of: Mapping[str, Sequence[int]]) -> str:
    return f"{host} ({in_runs(ranks_of[host])})"
