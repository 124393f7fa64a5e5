"""What docs/threats.md says about strangers on a host: real ranks, and real processes of another user beside them.

The page names the tests of this file, and each test says the sentence it proves.
"""

import ctypes
import errno
import multiprocessing
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapar.base.errors import CommunicationError, OutOfMemoryError, StorageError
from megapar.base.grid import Grid
from megapar.comm import collectives, host_meeting
from megapar.comm.flight import Flight, read
from megapar.comm.flight_file import FlightFile
from megapar.comm.shared_memory import Host
from megapar.comm.transport_shared_memory import SharedMemory
from megapar.declare import context
from megapar.launch import reach
from megapar.system import own_folder
from tests.support import program, stranger
from tests.support.distributed import run_ranks
from tests.support.faults import TWO
from tests.support.processes import free_port, slurm
from tests.support.stranger import as_root

ROUNDS = 20

# A stranger at the meeting of the ranks


def knock_everywhere(successes: Path) -> None:
    """Connect to every socket of ours to be found, as each rank, and do what a folder allows, until killed.

    Each success leaves a file in the folder `successes`.
    """
    kept = []
    while True:
        for line in Path("/proc/net/unix").read_text().splitlines():
            if "@megapar-" in line:  # abstract addresses, which have no permissions
                name = line.rpartition("@")[2]
                for rank in range(3):
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    connection.setblocking(False)
                    try:
                        connection.connect(f"\0{name}")
                        connection.send(struct.pack("=Q16s", rank, bytes.fromhex(name.rpartition("-")[2])))
                        kept.append(connection)
                        (successes / "connected").touch()
                    except (OSError, ValueError):
                        connection.close()
        for folder in Path("/dev/shm").glob("megapar-*"):
            attempts: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
                ("listed", os.listdir, (folder,)),
                ("removed", os.rmdir, (folder,)),
                ("renamed", os.rename, (folder, f"/dev/shm/taken-{os.getpid()}")),
                ("made", os.mkfifo, (folder / "log",)),
                ("connected", socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect, (f"{folder}/socket",)),
            ]
            for what, act, args in attempts:
                try:
                    act(*args)
                except OSError:
                    continue
                (successes / what).touch()


def meet_often() -> None:
    for _ in range(ROUNDS):
        axis = context.create(Grid(dp=3), timeout_seconds=10).dp
        assert isinstance(axis.transport, SharedMemory), "a stranger has kept the ranks apart"
        assert axis.transport.host.peers == set(range(3)) - {axis.rank}
        assert (collectives.all_reduce(torch.full((5000,), 1.0 + axis.rank), axis) == 6).all()
        collectives.barrier(axis)


@as_root
def test_a_stranger_can_neither_join_nor_disturb_the_ranks() -> None:
    """Fault stranger-takes-a-rank: whatever another user tries while ranks meet again and again."""
    with stranger.place_of_all() as successes:
        strangers = [stranger.start(knock_everywhere, successes) for _ in range(2)]
        try:
            run_ranks(3, meet_often)
            assert all(process.is_alive() for process in strangers), "they have tried until the end"
        finally:
            for process in strangers:
                process.kill()
                process.join()
        assert os.listdir(successes) == []


def listen_in(folder: Path) -> None:
    """Offer ranks a folder with a socket, closed to others as theirs are, and one open to all."""
    for name, mode in (("closed", 0o700), ("open", 0o777)):
        (folder / name).mkdir()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / name / "socket"))
        os.chmod(folder / name / "socket", 0o777)
        os.chmod(folder / name, mode)
        listener.listen()
        os.set_inheritable(listener.detach(), True)
    (folder / "ready").touch()
    time.sleep(60)


@as_root
def test_a_rank_follows_no_path_to_another_user() -> None:
    """Somebody may have written another path into the store."""
    with stranger.place_of_all() as folder:
        process = stranger.start(listen_in, folder)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        (folder / "link").symlink_to(folder / "closed")
        for name in ("closed", "open", "link", "missing"):
            assert host_meeting._connect(str(folder / name)) is None, name
        process.kill()
        process.join()
        # The mode of the folder is not what decides: the kernel knows who listens.
        os.chown(folder / "open", 0, 0)
        os.chmod(folder / "open", 0o700)
        assert host_meeting._connect(str(folder / "open")) is None, "nobody listens any more"


def others_knock() -> None:
    """Processes of the same user: one saying nothing, one being no rank, and a second one of each rank."""
    rank = dist.get_rank()
    answer = host_meeting._Party.answer
    kept = []

    def answer_after_knocks(party: Any, expected: Any) -> None:
        for text in (b"", b"short", struct.pack("=Q", 7), struct.pack("=Q", 0), struct.pack("=Q", 1)):
            other = host_meeting._connect(party.path)
            assert other is not None
            if text:
                socket.send_fds(other, [text], [0])
            kept.append(other)
        answer(party, expected)

    host_meeting._Party.answer = answer_after_knocks
    ctx = context.create(Grid(dp=2))
    assert isinstance(ctx.dp.transport, SharedMemory)
    assert ctx.dp.transport.host.peers == {1 - rank}
    assert collectives.all_reduce(torch.tensor(1.0 + rank), ctx.dp) == 3


def test_each_rank_is_taken_once_and_the_first_one_stays() -> None:
    """Fault stranger-takes-a-rank: not by a second process of the same user either."""
    run_ranks(2, others_knock)


def test_a_meeting_that_was_killed_is_swept() -> None:
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        party = host_meeting._Party(0)
        Path(party.path, "more").touch()
        os.write(sender, party.path.encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    dead = Path(os.read(receiver, 1000).decode())
    os.close(receiver)
    os.close(sender)
    living = host_meeting._Party(0)
    # Another start of this user may have swept it away by now. So the test does not look whether it was left behind.
    assert not dead.exists()
    assert Path(living.path).is_dir()
    own_folder.sweep(Path("/dev/shm"), "megapar-meeting-")
    assert Path(living.path).is_dir()
    living.leave_door()
    assert not Path(living.path).exists()


# What a stranger puts where flight logs lie


def set_traps(place: Path, pid: int) -> None:
    """Everything a name may be, under the names of ranks of process `pid` and others."""
    os.mkfifo(place / "megapar-flight-1")
    os.mkfifo(place / f"megapar-flight-{pid}")
    os.mkfifo(place / f"megapar-flight-{pid}-aaaaaaaa")
    (place / f"megapar-flight-{pid}-bbbbbbbb").symlink_to("/")
    (place / "megapar-flight-2").write_bytes(b"x")
    for letter in "0zc":
        folder = place / f"megapar-flight-{pid}-{letter}"
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        (folder / "log").write_bytes(b"\xff" * (1 << 20))
        (folder / ".told").touch()
        (folder / "log").chmod(0o666)


@as_root
def test_what_a_stranger_puts_beside_flight_logs_is_neither_opened_nor_believed() -> None:
    """Fault stranger-beside-flight-logs: no FIFO is waited for, no log believed, no error silenced, nothing removed."""
    with stranger.place_of_all() as place:
        stranger.let(set_traps, place, os.getpid())
        before = set(os.listdir(place))
        file = FlightFile(place)
        Flight(file.memory).step = 1
        found = file.peer(os.getpid())
        assert found is not None
        assert read(found, 1)["pid"] == os.getpid()
        assert file.peer(1) is None
        assert file.claim(os.getpid())
        assert not file.claim(os.getpid())
        file.remove()
        assert set(os.listdir(place)) == before


def mount_small(place: Path) -> None:
    """A file system of 64 KiB at `place`, for this process alone."""
    library = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE | MS_REC
    assert library.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert library.mount(b"none", b"/", None, private, None) == 0
    assert library.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=64k") == 0


@as_root
def test_a_full_place_for_flight_logs_is_not_used(tmp_path: Path) -> None:
    """Fault full-shared-memory: the log lies elsewhere, or one line says so; SIGBUS would end the rank."""
    small, other = tmp_path / "small", tmp_path / "other"
    small.mkdir()
    other.mkdir()

    def act() -> None:
        mount_small(small)
        file = FlightFile(small, other)
        Flight(file.memory).enter("save")
        assert file.peer(os.getpid()) is not None
        assert os.listdir(small) == []
        assert len(os.listdir(other)) == 1
        with pytest.raises(StorageError, match=r"no room for a rank's flight log of .* No space left on device"):
            FlightFile(small)

    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join()
    assert process.exitcode == 0


# Limits


def meet_with_few_files(rank: int, limited_rank: int, folder: Path, spare: int, barrier: Any) -> None:
    """Two ranks meet. The limited one may open `spare` more files than it has."""
    store = dist.FileStore(str(folder / "store"), 2)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == limited_rank:
        store.add("opened", 1)
        used = max(map(int, os.listdir("/proc/self/fd")))
        filled = os.dup(0)
        while filled < used:  # no number below the limit is free
            filled = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled + 1 + spare, hard))
    try:
        host = host_meeting.meet(rank, store, barrier.wait, 5)
        text = "met" if isinstance(host, Host) else "apart"
    except OutOfMemoryError as error:
        text = str(error)
        barrier.abort()
    except CommunicationError:
        text = "lost"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (folder / f"{rank}").write_text(text)
    os._exit(0)


@pytest.mark.parametrize("limited_rank", [0, 1], ids=["the one that accepts", "the one that connects"])
def test_files_that_run_out_at_any_point_of_a_meeting_are_named(tmp_path: Path, limited_rank: int) -> None:
    """Fault descriptors-run-out: also when a descriptor is lost on its way to a process at its limit of open files."""
    fork = multiprocessing.get_context("fork")
    said = []
    for spare in range(12):
        folder = tmp_path / str(spare)
        folder.mkdir()
        barrier = fork.Barrier(2, timeout=20)
        args = (limited_rank, folder, spare, barrier)
        ranks = [fork.Process(target=meet_with_few_files, args=(rank, *args)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        said.append(((folder / str(limited_rank)).read_text(), (folder / str(1 - limited_rank)).read_text()))
    assert said[-1] == ("met", "met")
    assert said[0] != ("met", "met")
    for own, other in said:
        assert (own, other) == ("met", "met") or (other == "lost" and "raise the limit (ulimit -n)" in own), said


def limited(which: int, soft: int, hard: int) -> Callable[[], None]:
    def plant() -> None:
        os.closerange(3, 1000)  # what this fork has of the tests' own files
        resource.setrlimit(which, (soft, hard))

    return plant


LIMITS = [
    pytest.param(resource.RLIMIT_NOFILE, 24, "each rank opens about 34 files and sockets", id="files at the start"),
    pytest.param(resource.RLIMIT_FSIZE, 4096, "files of this process may not be larger than 4,096", id="file size"),
    pytest.param(
        resource.RLIMIT_FSIZE, 150_000, "may not be larger than 150,000 bytes", id="file size of the exchange"
    ),
]


@pytest.mark.parametrize(("which", "limit", "words"), LIMITS)
def test_a_limit_that_is_reached_is_named(tmp_path: Path, which: int, limit: int, words: str) -> None:
    """Faults descriptors-run-out, file-size-limit."""
    ended = program.run(*TWO, "--launch.timeout_seconds", "5", cwd=tmp_path, plant=limited(which, limit, limit))
    assert ended.code == 8, ended.err
    assert ended.err.startswith("OutOfMemoryError: ")
    assert words in ended.err
    assert ended.err.count("\n") == 1


SNAPSHOTS = (*TWO, "--checkpoint.memory_every", "1", "--launch.max_restarts", "1")


@pytest.mark.parametrize("flags", [(), SNAPSHOTS], ids=["one rank", "two with snapshots"])
def test_a_run_that_may_open_almost_no_file_ends_in_one_line(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Fault descriptors-run-out: the limit is named, whichever file came too late, and cleaning up hides nothing."""
    before = set(Path("/dev/shm").glob("megapar-snapshots-*"))
    ended = program.run(*flags, cwd=tmp_path, plant=limited(resource.RLIMIT_NOFILE, 6, 6))
    for left in set(Path("/dev/shm").glob("megapar-snapshots-*")) - before:
        left.rmdir()  # the next run with snapshots would
    assert ended.code in (StorageError.exit_code, OutOfMemoryError.exit_code), ended.err
    assert "may not open more than 6" in ended.err
    assert "raise the limit (ulimit -n)" in ended.err
    assert ended.err.count("\n") == 1


def test_four_ranks_run_with_few_files(tmp_path: Path) -> None:
    """Fault descriptors-run-out: the soft limit is raised to the hard one, and the hard one may be low."""
    plant = limited(resource.RLIMIT_NOFILE, 40, 64)
    ended = program.run("--launch.nproc", "4", "--parallel.tp", "2", cwd=tmp_path, plant=plant)
    assert ended.code == 0, ended.err


def refuse_memfd() -> None:
    def memfd_create(name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    os.memfd_create = memfd_create


def test_without_memory_to_share_ranks_use_gloo_and_say_so(tmp_path: Path) -> None:
    """Fault no-memfd: of the local launcher too; its store is then a file nobody else can open."""
    ended = program.run(*TWO, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}, plant=refuse_memfd)
    assert ended.code == 0, ended.err
    assert "dp exchange over gloo: their ranks are on several hosts, or cannot share memory" in ended.out
    assert not list(tmp_path.glob("megapar-store-*"))


# What listens


def listening(pids: list[int]) -> set[str]:
    """The addresses of processes listening for TCP connections, as the kernel writes them in hexadecimal."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # the listing itself, or a file that is closed meanwhile
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def test_the_local_launcher_listens_on_this_host_alone(tmp_path: Path) -> None:
    running = program.start(*TWO, "--train.steps", "100000", cwd=tmp_path)
    running.until(" 2/100000 | loss")
    found = listening([running.pid, *running.children()])
    running.kill_all()
    assert found <= {"0100007F"}, "127.0.0.1"


def addresses_of_this_host() -> set[str]:
    """Where gloo listens: the addresses of this host's name, as `listening` has them, or loopback without any."""
    found = set()
    for name in (socket.gethostname(), "127.0.0.1", "::1"):
        with suppress(socket.gaierror):
            for family, *_, address in socket.getaddrinfo(name, None):
                words = struct.iter_unpack("<I", socket.inet_pton(family, str(address[0])))
                found.add("".join(f"{word:08X}" for (word,) in words))
    return found


def test_the_store_of_a_job_listens_everywhere(tmp_path: Path) -> None:
    """Of Slurm's rank 0 here: the page says so, and what to do."""
    port = free_port()
    flags = ("--train.steps", "100000")
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ranks[0].until(" 2/100000 | loss")
    everywhere = {"0" * 32, "0" * 8}
    assert listening([ranks[0].pid]) & everywhere
    of_gloo = listening([ranks[1].pid])
    assert of_gloo, "gloo listens on every rank"
    assert of_gloo <= addresses_of_this_host()
    for rank in ranks:
        rank.kill_all()


def test_a_preflight_listens_at_the_address_of_its_host_and_sends_a_token() -> None:
    """Where the address is another machine's to translate, it listens at all interfaces."""
    before = listening([os.getpid()])
    for address, expected in (("127.0.0.1", "0100007F"), ("192.0.2.1", "0" * 8)):
        with reach._listening(address, b"token", 60) as port:
            assert listening([os.getpid()]) - before == {expected}
            with socket.create_connection(("127.0.0.1", port)) as connection:
                assert b"".join(iter(lambda: connection.recv(100), b"")) == b"token"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


# What others see


def look_at(pid: int, successes: Path) -> None:
    """Note what another user may read about a process."""
    for name in ("cmdline", "environ", "fd"):
        path = Path(f"/proc/{pid}/{name}")
        with suppress(OSError):
            if list(path.iterdir()) if path.is_dir() else path.read_bytes():
                (successes / name).touch()


@as_root
def test_a_stranger_sees_command_lines_and_no_environment() -> None:
    """The environment may hold keys of services."""
    with stranger.place_of_all() as successes:
        stranger.let(look_at, os.getpid(), successes)
        assert set(os.listdir(successes)) <= {"cmdline"}  # none where /proc is mounted with hidepid


def test_a_run_folder_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    ended = program.run("--train.steps", "2", "--checkpoint.every", "1", cwd=tmp_path, plant=lambda: os.umask(0o027))
    assert ended.code == 0, ended.err
    found = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]}
    assert tmp_path / "run/checkpoints/step_00000002/manifest.json" in found
    for path, mode in found.items():
        assert mode == (0o750 if path.is_dir() else 0o640), path


def test_the_page_names_tests_that_are_there() -> None:
    page = (program.ROOT / "docs/threats.md").read_text()
    named = re.findall(r"`(test_\w+)\.(\w+)`", page)
    assert len(named) >= 12
    for module, name in named:
        assert f"def test_{name}(" in (program.ROOT / f"tests/{module}.py").read_text(), name
    own = re.findall(r"^def test_(\w+)", Path(__file__).read_text(), re.MULTILINE)
    assert set(own) - {name for _, name in named} == {"the_page_names_tests_that_are_there"}
