"""Finds out which framework a folder is of, and opens it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import MANIFEST
from megapar.config.model_options import ModelConfig
from megapar_models.convert.by_name import HF_CONFIG
from megapar_models.convert.config_json import from_hugging_face
from megapar_models.convert.formats.classic import open_classic
from megapar_models.convert.formats.contents import Contents
from megapar_models.convert.formats.dcp import INDEX, open_dcp
from megapar_models.convert.formats.deepspeed_contents import is_plain, is_universal, open_deepspeed, read_deepspeed
from megapar_models.convert.formats.fsdp import is_torch, open_store, open_torch
from megapar_models.convert.formats.hugging_face import HuggingFaceStore, open_hugging_face
from megapar_models.convert.formats.megatron_dist import find, is_megatron_dist, open_megatron_dist
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.huggingface import HFWeights
from megapar_models.convert.megatron import METADATA, TRACKER
from megapar_models.convert.safetensors_folder import INDEX as HF_INDEX
from megapar_models.convert.safetensors_folder import SINGLE
from megapar_models.convert.typed_fields import read_object


@dataclass(frozen=True)
class Asked:
    """What the user says of a folder besides its name.

    `model` is for folders that do not describe their model. `vocab_size` is the number of token ids without padding,
    and `accepted` are fields or args that do not change what the model computes, though they are unknown here.
    `weights_only` lets a folder be opened whose states of an optimizer cannot be read.
    """

    model: ModelConfig | None = None
    vocab_size: int = 0
    accepted: tuple[str, ...] = ()
    weights_only: bool = False


class Format(NamedTuple):
    """A framework's format: its name for people, how its folders look, and what opens one.

    `store` opens its tensors by their own names, and `contents` what they hold of a model. `states_model` is False if
    folders do not say of which model they are.
    """

    title: str
    matches: Callable[[Path], bool]
    store: Callable[[Path], TensorStore]
    contents: Callable[[Path, Asked], Contents]
    states_model: bool = True

    def describes_model(self, folder: Path) -> bool:
        """Whether a folder says of which model it is."""
        return self.states_model or (folder / HF_CONFIG).is_file()


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's with weights in safetensors.

    A folder with DeepSpeed's checkpoint beside weights in 16 bits, as transformers' Trainer saves both, is DeepSpeed's.
    """
    saved = (folder / HF_CONFIG).is_file() and any((folder / name).is_file() for name in (SINGLE, HF_INDEX))
    return saved and not _is_deepspeed(folder)


def _is_deepspeed(folder: Path) -> bool:
    return is_universal(folder) or is_plain(folder)


def _is_classic(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*/model_optim_rng.pt")) or any(folder.glob("*/mp_rank_*/model_optim_rng.pt"))


def _model(folder: Path, asked: Asked) -> ModelConfig:
    """The model of a folder that does not describe it: the user's, or that of a config.json in it.

    Programs with such folders train no layers of multi-token prediction.
    """
    model = asked.model
    if model is None and (folder / HF_CONFIG).is_file():
        model = from_hugging_face(read_object(folder / HF_CONFIG))
    if model is not None:
        return replace(model, num_nextn_predict_layers=0)
    raise ConfigError(f"{folder}: does not describe its model: give --config FILE, a config.json or a TOML file")


FORMATS: tuple[Format, ...] = (
    Format(
        "Hugging Face (config.json, safetensors)",
        is_hugging_face,
        lambda folder: HuggingFaceStore(HFWeights(folder)),
        lambda folder, asked: open_hugging_face(folder, asked.model, asked.accepted),
    ),
    Format(
        f"Megatron-Core's torch_dist, also of Megatron-Bridge ({TRACKER}, {METADATA})",
        is_megatron_dist,
        lambda folder: open_dcp(find(folder)),
        lambda folder, asked: open_megatron_dist(
            folder,
            asked.model,
            vocab_size=asked.vocab_size,
            accepted=asked.accepted,
            weights_only=asked.weights_only,
        ),
    ),
    Format(
        f"Megatron-LM's classic format ({TRACKER}, mp_rank_*)",
        _is_classic,
        lambda folder: open_classic(folder).store,
        lambda folder, asked: open_classic(folder, asked.vocab_size, asked.accepted),
    ),
    # Behind Megatron's: its folders have further files, by which they are known.
    Format(
        f"torch's DCP ({INDEX}) of torchtitan, and of FSDP2 with Hugging Face's names",
        is_torch,
        open_store,
        lambda folder, asked: open_torch(folder, _model(folder, asked), weights_only=asked.weights_only),
        states_model=False,
    ),
    Format(
        "DeepSpeed's ZeRO 1 to 3 (latest, *_optim_states.pt) and universal form (latest_universal, zero/)",
        _is_deepspeed,
        open_deepspeed,
        lambda folder, asked: read_deepspeed(
            open_deepspeed(folder, weights_only=asked.weights_only),
            _model(folder, asked),
            weights_only=asked.weights_only,
        ),
        states_model=False,
    ),
)


def is_native(folder: Path) -> bool:
    """Whether a folder is one of our checkpoints."""
    return (folder / MANIFEST).is_file()


def format_of(folder: Path) -> Format | None:
    """The format of another framework's folder, or None if no format here looks like it."""
    return next((each for each in FORMATS if folder.is_dir() and each.matches(folder)), None)


def open_folder(folder: Path, asked: Asked | None = None) -> Contents:
    """Open the folder of another framework. Nothing of it but indexes is read, and nothing in it is executed.

    Raises CheckpointError if no format looks like it, if it is damaged, or if its tensors are not those of its model.
    """
    found = format_of(folder)
    if found is None:
        known = "; ".join(each.title for each in FORMATS)
        raise CheckpointError(f"{folder}: a checkpoint of no format that is read here, which are ours and: {known}")
    asked = asked or Asked()
    contents = found.contents(folder, asked)
    contents.check()
    if contents.model is None:
        contents = replace(contents, model=asked.model)
    return contents
