"""A rank binds itself to the cores and the memory next to its GPU: real masks and system calls, a made-up sysfs."""

import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from megapar.system import numa

GPU = "0000:1b:00.0"


def make_sysfs(folder: Path, node: int, cpulists: list[str], online: str) -> Path:
    """A host with memory nodes of these cores, and a GPU next to `node`."""
    for number, text in enumerate(cpulists):
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / f"devices/system/node/node{number}/cpulist").write_text(f"{text}\n")
    (folder / f"bus/pci/devices/{GPU}").mkdir(parents=True)
    (folder / f"bus/pci/devices/{GPU}/numa_node").write_text(f"{node}\n")
    (folder / "devices/system/cpu").mkdir(parents=True)
    (folder / "devices/system/cpu/online").write_text(f"{online}\n")
    return folder


def bound(sysfs: Path, address: str) -> tuple[str, set[int]]:
    """Return what `bind` says in a process of its own, and the cores of this process afterwards."""
    context = get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        there.send((numa.bind(address, sysfs), os.sched_getaffinity(0)))

    process = context.Process(target=run)
    process.start()
    found: tuple[str, set[int]] = here.recv()
    process.join()
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not run: this system has no affinity masks")
def test_a_rank_runs_on_the_cores_next_to_its_gpu(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("not run: needs two cores")
    online = ",".join(map(str, usable))
    first, others = str(usable[0]), ",".join(map(str, usable[1:]))
    near = make_sysfs(tmp_path / "near", 0, [others, first], online)
    words, cores = bound(near, GPU)
    assert words.startswith(f"{len(usable) - 1} cores of memory node 0")
    assert cores == {*usable[1:]}
    # A node that this host lacks: the cores are bound, and the memory is not.
    far = make_sysfs(tmp_path / "far", 900, ["", ""], online)
    (far / "devices/system/node/node900").mkdir()
    (far / "devices/system/node/node900/cpulist").write_text(first)
    words, cores = bound(far, GPU)
    assert words == "1 cores of memory node 900, without its memory: the system refuses set_mempolicy"
    assert cores == {usable[0]}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not run: this system has no affinity masks")
@pytest.mark.parametrize("case", ["one node", "no node known", "another device", "cores chosen by a launcher"])
def test_what_is_chosen_or_unknown_stays(tmp_path: Path, case: str) -> None:
    usable = sorted(os.sched_getaffinity(0))
    online = ",".join(map(str, usable)) if case != "cores chosen by a launcher" else f"0-{usable[-1] + 8}"
    nodes = [str(usable[0])] * (1 if case == "one node" else 2)
    sysfs = make_sysfs(tmp_path, -1 if case == "no node known" else 0, nodes, online)
    address = "0000:00:00.0" if case == "another device" else GPU
    assert bound(sysfs, address) == ("", {*usable})
