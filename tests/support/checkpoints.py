"""Small checkpoints without a model, ways to damage them, and processes that die while they work on them."""

import hashlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar import context
from megapar.checkpoint import format as checkpoint_format
from megapar.checkpoint.load import load
from megapar.checkpoint.save import save
from megapar.context import Axis
from megapar.params import ZEROS, ParamSpec, Piece, StateSlice, make_piece

MODEL = {"hidden_size": 6, "rope": {"factor": 1.0}, "tie_word_embeddings": False}
FILE = "rank_00000.safetensors"
MANIFEST = "manifest.json"


STATE = ("main", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


def spec_of_piece(*pieces: Piece) -> ParamSpec:
    return ParamSpec(pieces, ZEROS, decay=True, replicas=Axis("grad"))


def whole_spec(name: str, shape: Sequence[int]) -> ParamSpec:
    """A parameter that one rank holds whole."""
    return spec_of_piece(make_piece(name, shape, {}))


def make_slice(spec: ParamSpec, start: int, stop: int, **tensors: Tensor) -> StateSlice:
    return StateSlice(torch.empty(0), spec, start, stop, tensors)


def toy_slices(step: int = 1, columns: int = 5) -> list[Any]:
    """Two whole parameters with values that the step decides."""
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
    """Save the toy's state after `step`; `trainer` is that section of the manifest."""
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
    """Change a stored box, to which the manifest then attests, as if it had been saved so."""
    tensors = load_file(path / FILE)
    edit(tensors[key])
    save_file(tensors, path / FILE)
    name, _, number = key.rpartition("#")

    def attest(body: dict[str, Any]) -> None:
        body["tensors"][name]["chunks"][int(number)][4] = checkpoint_format.checksum(tensors[key])

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
