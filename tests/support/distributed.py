"""Runs a function on several real ranks: forked processes, over gloo on the CPU.

In the lane `-m gpus` (tests/run.sh --gpus) ranks use NCCL and a GPU each. Where there are fewer GPUs, ranks share them:
NCCL refuses two ranks of one host on one GPU, so each says that it is a host of its own, and NCCL then sends through
sockets of this machine. That is slow, and everything else is as on many GPUs: kernels, streams, what a wait waits for.
"""

import io
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapar.comm import collectives
from megapar.system import device
from tests.support import garbage
from tests.support.progress import Watch

ON_GPUS = os.environ.get("MEGAPAR_TEST_LANE") == "gpus"  # set by tests/conftest.py


def rank_device(rank: int) -> torch.device:
    """The device of a test's tensors on this rank."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if ON_GPUS else torch.device("cpu")


def shares_gpus(world: int) -> bool:
    """Whether some of `world` ranks have the same GPU."""
    return ON_GPUS and world > torch.cuda.device_count()


def _be_a_host_of_its_own(rank: int) -> None:
    """What NCCL takes for the host of this rank, and the network of this machine alone."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_NET"] = "Socket"


def packed(result: Any) -> bytes:
    """Anything that pickle takes, for `unpacked` in another process. Tensors arrive as plain ones on the CPU.

    For hundreds of small tensors torch.save and torch.load take four times as long.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(result)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (value.dtype, tuple(value.shape), content)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def apart(body: Callable[..., Any], *args: Any) -> Any:
    """`body(*args)` in a forked process, without other ranks and on the CPU.

    For what trains beside the ranks of a test marked gpus: the first backward of a process starts CUDA, and no fork of
    it could use a GPU afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        process = multiprocessing.get_context("fork").Process(target=_apart_main, args=(body, folder, args))
        process.start()
        process.join()
        if (error := Path(f"{folder}/error")).exists():
            raise AssertionError(error.read_text())
        assert process.exitcode == 0, f"the process ended with {process.exitcode}"
        return unpacked(Path(f"{folder}/result").read_bytes())


def _apart_main(body: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    try:
        Path(f"{folder}/result").write_bytes(packed(body(*args)))
    except BaseException:
        Path(f"{folder}/error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _rank_main(body: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        mine = rank_device(rank)
        if shares_gpus(world):
            _be_a_host_of_its_own(rank)
        if ON_GPUS:
            torch.cuda.set_device(mine)
        store = dist.FileStore(f"{folder}/store", world)
        collectives.initialize(device.backend(mine), rank, world, store=store, timeout_seconds=300, device=mine)
        result = body(*args)
        dist.barrier()
        Path(f"{folder}/result_{rank}").write_bytes(packed(result))
        collectives.shutdown()
    except BaseException:
        Path(f"{folder}/error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_ranks(world: int, body: Callable[..., Any], *args: Any, idle_seconds: float = 60) -> list[Any]:
    """`body(*args)` on `world` forked ranks; returns what each rank returned (see `packed`), on the CPU.

    Raises AssertionError with every failing rank's traceback, also when a rank dies, or when ranks have not ended and
    together used almost no CPU time for `idle_seconds`.
    """
    if os.environ.get("MEGAPAR_TEST_LANE") == "gpu":
        raise AssertionError("forked ranks do not belong to the lane -m gpu: mark the test gpus")
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(world, body, folder, args)
        hung = _join(ranks, idle_seconds)
        errors = [f"rank {p.name[6:]}:\n{p.read_text()}" for p in sorted(Path(folder).glob("error_*"))]
        dead = [r for r, process in enumerate(ranks) if process.exitcode not in (0, None) and r not in hung]
        if errors or hung or dead:
            raise AssertionError("\n".join([*errors, f"hung ranks {hung}, failed ranks {dead}"]))
        return [unpacked(Path(f"{folder}/result_{rank}").read_bytes()) for rank in range(world)]


def _start(world: int, body: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> list[ForkProcess]:
    torch.set_num_threads(1)  # a fork among the threads of OpenMP hangs at its first parallel region
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank_main, args=(body, rank, world, folder, args)) for rank in range(world)]
    garbage.freeze()  # a start takes 0.1 s then, so that keeping ranks for the next test would save next to nothing
    for process in ranks:
        process.start()
    return ranks


def _join(ranks: list[ForkProcess], idle_seconds: float) -> list[int]:
    """Wait for the end of all ranks; the hung ones, killed here."""
    watch = Watch(idle_seconds, lambda: [process.pid for process in ranks if process.pid and process.is_alive()])
    for process in ranks:
        while process.is_alive() and not watch.hung():
            process.join(1)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    return hung
