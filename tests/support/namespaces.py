"""Three hosts as network namespaces of this machine, with a link between any two. Needs root and the program ip."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import program
from tests.support.processes import slurm
from tests.support.program import Program

NAMES = ("a", "b", "c")


def ip(*words: str, tool: str = "ip") -> None:
    subprocess.run([tool, *words], check=True, capture_output=True, text=True)


@contextmanager
def three_hosts() -> Iterator[str]:
    """Yield the prefix of the namespaces' names: PREFIXa, PREFIXb and PREFIXc, at 10.77.0.1 to .3.

    The link from one to another is called "to" and the other's name. Skips the test where that cannot be.
    """
    prefix = f"mp{os.getpid() % 10000}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    made = []
    try:
        for number, name in enumerate(NAMES, 1):
            try:
                ip("netns", "add", f"{prefix}{name}")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine refuses network namespaces: {error.stderr.strip()}")
            made.append(name)
            inside = ("-n", f"{prefix}{name}")
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "link", "add", "own", "type", "bridge")
            ip(*inside, "addr", "add", f"10.77.0.{number}/32", "dev", "own")
            ip(*inside, "link", "set", "own", "up")
        for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
            ends = (f"to{other}", f"to{one}")
            here, there = f"{prefix}{one}", f"{prefix}{other}"
            ip("link", "add", ends[0], "netns", here, "type", "veth", "peer", "name", ends[1], "netns", there)
            for space, link, to, source in ((here, ends[0], other, one), (there, ends[1], one, other)):
                ip("-n", space, "link", "set", link, "up")
                route(space, link, to, source)
        yield prefix
    finally:
        for name in made:
            ip("netns", "del", f"{prefix}{name}")


def route(space: str, link: str, to: str, source: str) -> None:
    """Let packets of host `source`, in namespace `space`, go to host `to` by `link`."""
    addresses = f"10.77.0.{NAMES.index(to) + 1}", f"10.77.0.{NAMES.index(source) + 1}"
    ip("-n", space, "route", "add", addresses[0], "dev", link, "src", addresses[1])


def cut(prefix: str, one: str, other: str) -> None:
    """Cut the link between two hosts: packets on it are lost, as by a switch that has failed."""
    ip("-n", f"{prefix}{one}", "link", "set", f"to{other}", "down")


def mend(prefix: str, one: str, other: str) -> None:
    """Undo `cut`."""
    ip("-n", f"{prefix}{one}", "link", "set", f"to{other}", "up")
    route(f"{prefix}{one}", f"to{other}", other, one)  # the kernel has removed it with the link


def slow(prefix: str, one: str, other: str, rate: str) -> None:
    """Let a host send no more than `rate`, such as 10mbit, on its link to another."""
    limits = ("rate", rate, "burst", "64kbit", "latency", "2s")
    ip("-n", f"{prefix}{one}", "qdisc", "add", "dev", f"to{other}", "root", "tbf", *limits, tool="tc")


def start(prefix: str, folder: Path, *flags: str, plant: Callable[[], None] = lambda: None) -> list[Program]:
    """Start the tiny configuration on three ranks, one on each host, as Slurm would."""

    def install() -> None:
        name = NAMES[int(os.environ["SLURM_PROCID"])]
        space = os.open(f"/run/netns/{prefix}{name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        socket.gethostname = lambda: f"node-{name}"
        plant()

    ranks = []
    for rank in range(3):
        env = slurm(rank, 3, 29500) | {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "own"}
        env |= {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
        ranks.append(program.start(*flags, cwd=folder, env=env, plant=install))
    return ranks
