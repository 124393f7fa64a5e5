"""Binds a process to the cores and the memory node next to its GPU, as Linux's sysfs describes them."""

import ctypes
import os
import platform
from pathlib import Path

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_PREFERRED = 1  # take memory from this node, and from others when the node has none left
_MOST_NODES = 1024


def bind(pci_address: str, sysfs: Path = Path("/sys")) -> str:
    """Bind this thread, and threads and processes that it starts, to the memory node of the PCI device.

    `pci_address` is such as 0000:1b:00.0. Returns what was bound in words, or "" if nothing was: on a host with one
    node, for a device whose node sysfs does not know, and where somebody has chosen the cores of this process already.
    """
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    device = sysfs / "bus/pci/devices" / pci_address / "numa_node"
    if len(nodes) < 2 or not device.is_file():
        return ""
    node = int(device.read_text())  # -1 where the firmware does not tell
    cpulist = sysfs / f"devices/system/node/node{node}/cpulist"
    near = read_cpulist(cpulist) if cpulist.is_file() else set()
    is_chosen = {*cores()} != read_cpulist(sysfs / "devices/system/cpu/online")
    if is_chosen or not near:
        return ""
    os.sched_setaffinity(0, near)
    words = f"{len(near)} cores of memory node {node}"
    return words if _prefer_memory(node) else f"{words}, without its memory: the system refuses set_mempolicy"


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use; none where the system has no affinity masks."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def read_cpulist(file: Path) -> set[int]:
    """Return the numbers in a list such as 0-3,8,10-11."""
    found: set[int] = set()
    for part in filter(None, file.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _prefer_memory(node: int) -> bool:
    """Take memory from `node` from now on. Returns False if the system refuses, as containers' filters of calls do."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node // bits] = 1 << (node % bits)
    return ctypes.CDLL(None).syscall(number, _PREFERRED, mask, _MOST_NODES) == 0
