"""Small checkpoints without a model, ways to damage them, and processes dying at work on them."""

import hashlib
import json
import math
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.base.errors import MegaparError
from megapar.checkpoint.format import checkpoint_folders, find_complete
from megapar.checkpoint.load import load
from megapar.checkpoint.save import save
from megapar.checkpoint.values import checksum
from megapar.comm.axis import Axis
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import ZEROS, ParamSpec, Piece, make_piece
from megapar.optimizer.adamw import AdamW
from tools.convert_checkpoint import NativeToHf, native_to_hf

MODEL = {"hidden_size": 6, "rope": {"factor": 1.0}, "tie_word_embeddings": False}
FILE = "rank_00000.safetensors"
MANIFEST = "manifest.json"


STATE = ("main", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


def spec_of_piece(*pieces: Piece) -> ParamSpec:
    return ParamSpec(pieces, ZEROS, decay=True, grad_axis=Axis("grad"))


def whole_spec(name: str, shape: Sequence[int]) -> ParamSpec:
    """A parameter held whole by one rank."""
    return spec_of_piece(make_piece(name, shape, {}))


def make_slice(spec: ParamSpec, start: int, stop: int, **tensors: Tensor) -> StateSlice:
    return StateSlice(torch.empty(0), spec, start, stop, tensors, AdamW.STATE, "adamw")


def toy_slices(step: int = 1, columns: int = 5) -> list[Any]:
    """Two whole parameters with values by the step."""
    slices = []
    for number, shape in enumerate([(6, columns), (7,)]):
        spec = whole_spec(f"p{number}", shape)
        state = {
            name: torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(100 * step + 10 * number + i))
            for i, name in enumerate(("main", "exp_avg", "exp_avg_sq"))
        }
        state["exp_avg_sq"].abs_()  # means of squares: nothing saves a negative one
        slices.append(make_slice(spec, 0, math.prod(shape), **state))
    return slices


def save_toy(root: Path, step: int, trainer: Mapping[str, Any] | None = None) -> Path:
    """Save the toy's state after `step`; `trainer` is the manifest's section of this name."""
    return save(
        root,
        slices=toy_slices(step),
        ctx=context.single(),
        replicated=False,
        step=step,
        consumed_samples=8 * step,
        layout={"dp": 1},
        model_config=MODEL,
        trainer=trainer or {"lr": 0.1, "loss_scale": 1 / 3},
        data={"seed": 5},
    )


def exported(path: Path) -> bytes:
    """The weights in fp32 as written by tools/convert_checkpoint.py for Hugging Face, and its config.json."""
    target = path.with_name("hf")
    options = NativeToHf(path, target, dtype="float32", verify=False, verify_tokenizer=False)
    native_to_hf(options)
    return (target / "model.safetensors").read_bytes() + (target / "config.json").read_bytes()


def load_toy(path: Path, slices: list[Any], model_config: dict[str, Any] | None = None) -> Any:
    return load(path, slices=slices, ctx=context.single(), model_config=model_config or MODEL)


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    """Change the body of a manifest; `sign`: its SHA-256 then attests the change."""
    document = json.loads((path / "manifest.json").read_text())
    edit(document["body"])
    if sign:
        text = json.dumps(document["body"], sort_keys=True)
        document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(document, sort_keys=True))


def edit_bytes(path: Path, edit: Callable[[bytearray], None]) -> None:
    """Change the bytes of rank 0's file of the checkpoint `path`."""
    content = bytearray((path / FILE).read_bytes())
    edit(content)
    (path / FILE).write_bytes(content)


def edit_tensor(path: Path, key: str, edit: Callable[[torch.Tensor], Any]) -> None:
    """Change a stored box and the manifest with it, as if it had been saved so."""
    tensors = load_file(path / FILE)
    edit(tensors[key])
    save_file(tensors, path / FILE)
    name, _, number = key.rpartition("#")

    def attest(body: dict[str, Any]) -> None:
        body["tensors"][name]["chunks"][int(number)][4] = checksum(tensors[key])

    edit_manifest(path, attest)


def flip_bit(content: bytearray) -> None:
    content[-20] ^= 1


def killed_at(calls: Sequence[tuple[Any, str]], number: int, work: Callable[[], object]) -> bool:
    """Whether `work`, in a process of its own, came to the `number`-th of `calls` (owner and name of each), counted
    from 0: there it ends at once, as by kill -9."""
    count = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == number:
                os._exit(9)
            count += 1
            return original(*args, **kwargs)

        return call

    def main() -> None:
        for owner, name in calls:
            setattr(owner, name, dying(getattr(owner, name)))
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def cut_slices(ctx: ParallelContext) -> list[Any]:
    """One tensor cut over all ranks."""
    rows = (3 * ctx.world.rank, 3 * ctx.world.rank + 3)
    spec = spec_of_piece(make_piece("p", (3 * ctx.world.size, 50), {0: rows}))
    state = {name: torch.full((150,), float(ctx.world.rank)) for name in STATE}
    return [make_slice(spec, 0, 150, **state)]


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def outcome(action: Any) -> tuple[str, int, str]:
    """Class, exit code and words of the error raised by `action`; "", 0 and "" if there is none."""
    try:
        action()
    except MegaparError as error:
        return type(error).__name__, error.exit_code, str(error)
    return "", 0, ""


def kill_soon_after_a_save_began(writer: BaseProcess, root: Path, seconds: float) -> None:
    before = set(root.glob(".tmp-*"))
    while writer.is_alive() and before.issuperset(root.glob(".tmp-*")):
        pass
    time.sleep(seconds)
    writer.kill()
    writer.join()


def kill_saves(write: Callable[[Path, int, Connection], None], ahead: int, root: Path, trials: int) -> None:
    """After each kill all folders are complete, none reported as saved is gone, the newest loads bitwise. `write` saves
    toys for ever, and has up to `ahead` more on disk than it has reported."""
    torch.set_num_threads(1)
    fork, chance = multiprocessing.get_context("fork"), random.Random(0)
    newest = killed_inside = 0
    for trial in range(trials):
        receive, send = fork.Pipe(duplex=False)
        writer = fork.Process(target=write, args=(root, newest + 1, send))
        writer.start()
        assert receive.poll(300)
        kill_soon_after_a_save_began(writer, root, 0.004 * (trial + chance.random()) / trials)  # a toy takes 2 ms
        saved = 0
        while receive.poll():
            saved = receive.recv()
        killed_inside += len(list(root.glob(".tmp-*")))
        complete = list(find_complete(root))
        assert complete == checkpoint_folders(root)
        newest = int(complete[0].name.removeprefix("step_"))
        assert saved <= newest <= saved + ahead
        target = toy_slices(0)
        load_toy(complete[0], target)
        for loaded, expected in zip(target, toy_slices(newest), strict=True):
            assert all(torch.equal(loaded.tensors[name], expected.tensors[name]) for name in STATE)
    assert killed_inside, "no kill fell into a save: the test proves nothing"
