"""DeepSpeed's checkpoints as contents, and native checkpoints as DeepSpeed's universal ones.

The module that DeepSpeed trained is one of transformers, so its parameters have the names of FSDP2's (`formats.fsdp`).
A folder does not hold the model's options: they are an argument.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN
from megapar_models.convert.config_json import names_of
from megapar_models.convert.exported import recipes_in_memory
from megapar_models.convert.formats import deepspeed, deepspeed_universal
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, Contents, Position
from megapar_models.convert.formats.deepspeed_files import FP32, WEIGHT, DeepSpeedStore, find
from megapar_models.convert.formats.derived import RenamedStore
from megapar_models.convert.formats.fsdp import read_fsdp
from megapar_models.convert.formats.torch_export import Advance, NativeSource, in_memory
from megapar_models.convert.stream import TensorInfo

_WEIGHTS, _STATES = "model.", "optim.state."


def is_plain(folder: Path) -> bool:
    """Whether a folder, or the one that its `latest` names, has files as DeepSpeed's engine writes them."""
    return _has(folder, deepspeed.LATEST, "*mp_rank_*_model_states.pt")


def is_universal(folder: Path) -> bool:
    """Whether a folder, or the one that its `latest_universal` names, is a universal checkpoint."""
    return _has(folder, deepspeed_universal.LATEST, f"{deepspeed_universal.ZERO}/*/{FP32}.pt")


def _has(folder: Path, latest: str, pattern: str) -> bool:
    try:
        return any(find(folder, latest).glob(pattern))
    except CheckpointError:
        return (folder / latest).is_file()  # opening it says what is wrong


def open_deepspeed(folder: Path, *, weights_only: bool = False) -> DeepSpeedStore:
    """Open a folder of either form. Raises CheckpointError as the opening of its form does."""
    if is_universal(folder):
        return deepspeed_universal.open_folder(folder)
    return deepspeed.open_folder(folder, weights_only=weights_only)


def read_deepspeed(store: DeepSpeedStore, model: ModelConfig, *, weights_only: bool = False) -> Contents:
    """Find the model and Adam's moments in a store. Main weights go before weights of 16 bits.

    Raises CheckpointError if they are not there, and ConfigError if the family has no names at Hugging Face.
    """
    stored: dict[str, str] = {}
    for key in store.tensors:
        state, _, name = key.partition("/")
        if state in (WEIGHT, FP32):
            if state == FP32 or f"{FP32}/{name}" not in store.tensors:
                stored[_WEIGHTS + name] = key
        elif not weights_only:
            stored[f"{_STATES}{name}.{state}"] = key
    values = store.values
    updates = values.get("step")
    contents = read_fsdp(RenamedStore(store, stored), model, step=updates if type(updates) is int else None)
    form = "universal form" if (store.folder / deepspeed_universal.ZERO).is_dir() else f"ZeRO-{values['zero_stage']}"
    step = _number(values.get("global_steps"))
    left = [
        *contents.left_out,
        *values.get("left_out", ()),
        "learning rates and other values: a run has them as its options",
    ]
    position = Position()
    if contents.states:
        found = values.get("loss_scale")
        scale = float(found) if isinstance(found, int | float) and found > 1 else None  # that of bf16 is 1
        position = Position(step, contents.position.updates, _number(values.get("global_samples")), scale)
    title = f"DeepSpeed's {form}, step {step:,}"
    return replace(contents, title=title, position=position, left_out=left, model=model)


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def export_universal(source: Path, target: Path, *, family: str = "", advance: Advance = lambda values: values) -> None:
    """Write the native checkpoint `source` to `target` as DeepSpeed's universal form, with Adam's moments.

    Names are those of the module of transformers 5. A scheduler of rates goes on from the checkpoint's step. Raises
    CheckpointError if the source is damaged or has no moments of Adam for each parameter, ConfigError if the target
    exists or the family has no names at Hugging Face, and StorageError if it cannot be written.
    """
    found = NativeSource(source, family)
    parameters = in_memory(recipes_in_memory(found.model), names_of(found.model))
    states = {FP32: MAIN, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
    trained = {name: parameter for name, parameter in parameters.items() if found.optimizer_of(parameter) == "adamw"}
    if not trained:
        raise CheckpointError(f"{source}: holds no moments of Adam, without which DeepSpeed loads no universal folder")
    if len(trained) < len(parameters):
        lacking = next(name for name in parameters if name not in trained)
        text = "DeepSpeed loads no weights without moments from a universal folder"
        raise CheckpointError(f"{source}: holds no moments of Adam for {lacking}: {text}")
    tensors = {
        (state, name): TensorInfo(parameter.shape, torch.float32)
        for name, parameter in trained.items()
        for state in states
    }

    def make(state: str, name: str) -> Tensor:
        whole = torch.empty(trained[name].shape)
        for piece in found.pieces(trained[name], states[state]):
            whole[piece.box.slices] = piece.make().view(piece.box.size)
        return advance(whole)

    manifest = found.manifest
    # DeepSpeed's schedulers read last_batch_iteration. Torch's, those of transformers too, read the rest.
    torchs = {"last_epoch": manifest.step, "_step_count": manifest.step + 1, "lr_lambdas": []}
    values: Mapping[str, Any] = {
        "global_steps": manifest.step,
        "global_samples": manifest.consumed_samples,
        "lr": found.group("adamw", decays=True)["lr"],
        "lr_scheduler": {"last_batch_iteration": manifest.step - 1, **torchs},
    }
    deepspeed_universal.write(target, tensors, make, found.updates, values)
