"""DeepSpeed's universal checkpoints (version 0.4), which runs of any number of ranks load: read as a store, written.

    run/latest_universal                        the name of the folder, such as global_step1200_universal
    run/FOLDER/zero/NAME/fp32.pt                a parameter's main weight; also exp_avg.pt, exp_avg_sq.pt, step.pt
    run/FOLDER/zero/optimizer_state.pt          hyperparameters and loss scale
    run/FOLDER/mp_rank_00_model_states.pt       plain values, buffers (zero_pp_rank_0_mp_rank_00_... under ZeRO-3)

DeepSpeed's ds_to_universal.py makes them out of plain ones, where tensor ranks' parts are joined and the padding rows
of a vocabulary (`vocabulary_parameter_patterns` of `universal_checkpoint_info`) are left out. Of ZeRO-3 the tensors are
flat, and get the shapes of `param_shapes`.

Tensors are named `STATE/NAME` as in `megapar_models.convert.formats.deepspeed`. The file fp32.pt of buffers, frozen
parameters and second names is a copy in fp32 of what the module holds, in 16 bits often, so it is not read: they are
`weight/NAME` of the model file, and a second name has the states of its parameter.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import dtype_name
from megapar.config.messages import first_few
from megapar.declare.params import Sizes
from megapar_models.convert.formats.deepspeed_files import (
    FP32,
    MODEL_FILE,
    NO_VALUES,
    Cut,
    DeepSpeedStore,
    File,
    Place,
    Whole,
    cut_in_turn,
    find,
    load,
    settings,
    shared,
    sizes_of,
    weights,
)
from megapar_models.convert.formats.torch_files import StoredTensor
from megapar_models.convert.stream import TensorInfo, new_folder

LATEST = "latest_universal"
ZERO = "zero"
OPTIMIZER = "optimizer_state.pt"
STATES = (FP32, "exp_avg", "exp_avg_sq")
VERSION = "0.19.8"
"""The version of DeepSpeed whose rules `write` follows; DeepSpeed asks for one."""


def _tensor(file: File, shape: Sizes, *, cut: bool) -> Place:
    """The tensor of a parameter's file. Raises CheckpointError if it has none, or none of the parameter's shape.

    `shape` is that of param_shapes, and `cut` says that it is a tensor rank's part.
    """
    content = file.content
    stored = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(stored, StoredTensor):
        raise CheckpointError(f"{file.path}: holds no tensor `param`")
    found = stored.shape
    # The padding rows of a vocabulary are left out.
    lean = len(found) == len(shape) > 0 and found[1:] == shape[1:] and found[0] < shape[0]
    if found == shape or cut or lean:
        return Whole(TensorInfo(found, stored.dtype), file, stored)
    if len(found) == 1 and found[0] == math.prod(shape):  # ZeRO-3's conversion stores it flat
        return Cut(TensorInfo(shape, stored.dtype), [(file, stored)], 0, found[0], joined=False)
    raise CheckpointError(f"{file.path}: holds {list(found)}, and the model file's param_shapes says {list(shape)}")


def open_folder(source: Path) -> DeepSpeedStore:
    """Open a universal checkpoint: `source` is its folder, or the folder of the run with `latest_universal`.

    The values are those of the plain form. Raises CheckpointError if a file is missing, damaged or not safe to
    unpickle, or if the files are not of one checkpoint.
    """
    folder = find(source, LATEST)
    models, others = _model_files(folder)
    first = models[0]
    shapes: dict[str, Sizes] = {}
    for file in (first, *others):
        for group in file.get("param_shapes", list):
            shapes |= sizes_of(file, group)
    for name in shapes:
        if "/" in name or "\0" in name or name in ("", ".", ".."):  # the name becomes a part of a path
            raise CheckpointError(f"{first.path}: its param_shapes names {name[:80]!r}, which is no folder's name")
    if not shapes:
        raise CheckpointError(f"{first.path}: its param_shapes names no parameter of an optimizer")
    places = weights(folder, models)
    if others:
        _check_frozen(first, shapes)
    if cut_in_turn(first) and first.content.get("dp_world_size") != 1 and not models[0].path.name.startswith("zero_"):
        raise CheckpointError(
            f"{folder}: is of a run with round_robin_gradients, and DeepSpeed's ds_to_universal.py mixes up the values "
            "of such a run's parameters: name the folder that it was made of"
        )
    held: dict[str, Place] = {}
    optimizer = load(folder / ZERO / OPTIMIZER)
    values = first.plain({key: value for key, value in first.content.items() if key not in NO_VALUES})
    values |= settings(optimizer, optimizer.content, optimizer.content.get("param_groups"))
    steps = {step: optimizer.path for step in [_step(optimizer)] if step is not None}
    for name, shape in shapes.items():
        for path in _parameter_files(folder / ZERO / name):
            file = load(path, bare=True)
            if path.name != "step.pt":
                held[f"{path.stem}/{name}"] = _tensor(file, shape, cut=bool(others))
            elif (step := file.number(file.content)) is not None:
                steps[step] = path
    if len(steps) > 1:
        text = ", ".join(f"{path.relative_to(folder)} of update {step}" for step, path in steps.items())
        raise CheckpointError(f"{folder}: files are of different checkpoints: {text}")
    values["step"] = steps.popitem()[0] if steps else None
    places |= held
    return DeepSpeedStore(folder, places | shared(first, places), values)


def _model_files(folder: Path) -> tuple[list[File], list[File]]:
    """Model files of tensor rank 0 of the first stage (under ZeRO-3, of each data rank), and first ones of the others.

    Raises CheckpointError if there is none.
    """
    if not (folder / ZERO).is_dir():
        raise CheckpointError(f"{folder}: has no folder {ZERO}, and {LATEST} names none in it: no universal checkpoint")
    found: dict[tuple[bool, int], dict[int, Path]] = {}
    for path in sorted(folder.glob("*mp_rank_*_model_states.pt")):
        if match := MODEL_FILE.fullmatch(path.name):
            found.setdefault((match[1] is not None, int(match[2])), {})[int(match[1] or 0)] = path
    for of_each in (False, True):  # what `write` makes has both
        ranks = found.get((of_each, 0))
        if ranks:
            others = [paths[min(paths)] for (kind, rank), paths in found.items() if rank and kind == of_each]
            return [load(ranks[rank]) for rank in sorted(ranks)], [load(path) for path in others]
    raise CheckpointError(f"{folder}: has no mp_rank_00_model_states.pt, nor zero_pp_rank_0_mp_rank_00_model_states.pt")


def _parameter_files(folder: Path) -> list[Path]:
    """The files of a parameter. Raises CheckpointError if its main weight is not among them."""
    files = sorted(folder.glob("*.pt"))
    if not (folder / f"{FP32}.pt").is_file():
        raise CheckpointError(f"{folder / FP32}.pt: is missing, and the model file names the parameter")
    return files


def _step(optimizer: File) -> int | None:
    """Adam's count of updates in optimizer_state.pt, where ZeRO-3 and fused optimizers have it."""
    inner = optimizer.content.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, Mapping) else None
    state = states.get(0) if isinstance(states, Mapping) else None
    return optimizer.number(state.get("step")) if isinstance(state, Mapping) else None


def _check_frozen(first: File, shapes: Mapping[str, Sizes]) -> None:
    """Raise CheckpointError about frozen parameters of tensor ranks: nobody joins their parts."""
    module = first.content.get("module")
    names = module.keys() if isinstance(module, Mapping) else ()
    second = first.content.get("shared_params")
    known = [*shapes, *first.get("buffer_names", list), *(second if isinstance(second, Mapping) else ())]
    frozen = sorted(str(name) for name in names if name not in known)
    if frozen:
        raise CheckpointError(
            f"{first.path}: {first_few(frozen)}: not trained, and cut by tensor ranks: ds_to_universal.py joins no "
            "parts of such parameters"
        )


def write(
    folder: Path,
    tensors: Mapping[tuple[str, str], TensorInfo],
    make: Callable[[str, str], Tensor],
    step: int,
    values: Mapping[str, Any],
) -> None:
    """Write a universal checkpoint, which DeepSpeed loads with `"checkpoint": {"load_universal": true}`.

    The folder must not exist; it gets `latest_universal`. `tensors` has the infos by (state, name), for each parameter
    the states of `STATES` in fp32; `make` returns them one after the other, and none is kept. `step` is the optimizer's
    count of updates. Under ZeRO-1 and ZeRO-2 torch's AdamW and DeepSpeed's FusedAdam and CPUAdam go on from it.

    Of `values`, `global_steps` is needed. `global_samples`, `skipped_steps`, `lr_scheduler` (its state_dict; needed by
    a run with a scheduler) and `universal_checkpoint_info` are DeepSpeed's. `lr` is the rate of the next update, since
    a scheduler sets the rate after each; other hyperparameters are those of the run. All else reaches the trainer as
    client state. Rows of the parameters in `vocabulary_parameter_patterns` may lack padding, but for ZeRO-3.

    DeepSpeed does not load buffers, frozen parameters and fp16's loss scale from a universal checkpoint: the run must
    set them. ZeRO-3 of DeepSpeed 0.19.8 gives one object as step to all groups, and a tensor would count the update of
    each. So ZeRO-3 reads an int, which torch's AdamW refuses: such a run makes a tensor of each group's after loading.

    Raises CheckpointError for a tensor unlike its info, ConfigError if the folder exists, and StorageError if it cannot
    be written.
    """
    shapes = _checked_shapes(tensors)
    info = {"universal_checkpoint_version": 0.4, **values.get("universal_checkpoint_info", {})}
    vocabulary = [re.compile(pattern) for pattern in info.get("vocabulary_parameter_patterns", ())]
    rates = {"lr": values["lr"]} if "lr" in values else {}
    tag = f"global_step{values['global_steps']}_universal"
    with new_folder(folder, sum(info.nbytes for info in tensors.values())) as new:
        zero = new / tag / ZERO
        for name in shapes:
            (zero / name).mkdir(parents=True)
            padded = {"vocab_tensor": True} if any(pattern.match(name) for pattern in vocabulary) else {}
            for state in STATES:
                made = _made(make, state, name, tensors[state, name])
                _save(zero / name / f"{state}.pt", {"param": made, "cat_dim": 0, **padded})
            _save(zero / name / "step.pt", torch.tensor(float(step)))
        # ZeRO-1 and ZeRO-2 read a dict for each group of the run, of which there are not more than parameters. ZeRO-3
        # gives the first dict's values to all groups. So each has the rate alone.
        outer = {"ds_version": VERSION, "param_groups": [dict(rates) for _ in shapes]}
        inner = {"state": {0: {"step": step}}, "param_groups": [dict(rates)]}
        _save(zero / OPTIMIZER, {**outer, "optimizer_state_dict": inner})
        content = {
            **{key: value for key, value in values.items() if key not in _OWN_VALUES},
            "module": {},
            "buffer_names": [],
            "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
            "shared_params": {},
            "universal_checkpoint_info": info,
            "skipped_steps": values.get("skipped_steps", 0),
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": VERSION,
        }
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            _save(new / tag / file, content)
        (new / LATEST).write_text(tag)


_OWN_VALUES = (*NO_VALUES, "lr", "step", "loss_scale", "param_groups", "zero_stage")


def _checked_shapes(tensors: Mapping[tuple[str, str], TensorInfo]) -> dict[str, Sizes]:
    """The shapes of parameters. Raises CheckpointError unless each has the states that DeepSpeed loads."""
    shapes = {name: info.shape for (_, name), info in tensors.items()}
    wanted = {(state, name) for name in shapes for state in STATES}
    if wanted != tensors.keys():
        lines = [f"{state} of {name}" for state, name in sorted(wanted ^ tensors.keys())]
        raise CheckpointError(f"DeepSpeed loads {', '.join(STATES)} of each parameter: not so {first_few(lines)}")
    return shapes


def _made(make: Callable[[str, str], Tensor], state: str, name: str, info: TensorInfo) -> Tensor:
    """A tensor to write. Raises CheckpointError if it is not as planned."""
    made = make(state, name).detach().contiguous()
    if (tuple(made.shape), made.dtype) != info:
        raise CheckpointError(
            f"{state} of {name}: {dtype_name(made.dtype)} {list(made.shape)}, {dtype_name(info.dtype)} "
            f"{list(info.shape)} was planned"
        )
    # A part of a tensor would be saved with its whole storage.
    return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made


def _save(path: Path, content: Any) -> None:
    """Write a file by torch.save, and flush it to the disk."""
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
