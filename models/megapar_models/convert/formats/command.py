"""`megapar convert SRC DST`: from any framework's folder that is read here to a native checkpoint, moments included."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.config.files import load
from megapar.config.model_options import ModelConfig
from megapar_models.convert.formats.contents import Contents
from megapar_models.convert.formats.deepspeed_contents import export_universal
from megapar_models.convert.formats.detect import Asked, format_of, open_folder
from megapar_models.convert.formats.megatron_export import export_megatron
from megapar_models.convert.formats.native import CONFIG, write_native
from megapar_models.convert.formats.torch_export import export_fsdp, export_torchtitan
from megapar_models.convert.progress import progress
from megapar_models.convert.saved import whole_config
from megapar_models.registry import FOR_OPTIONS


@dataclass(frozen=True)
class AnyToNative:
    """Convert a folder, of whichever framework it is: `megapar convert SRC DST` finds that out.

    Ours becomes Hugging Face's, or with --to another framework's, with the optimizer's state. Hugging Face's is
    converted as by hf-to-native. Any other one becomes a native checkpoint with the optimizer's state, from which a run
    resumes. A conversion to a native checkpoint that was broken off goes on where it was.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint, or of a run of the other framework: then its newest checkpoint."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder to write; must not exist."""
    to: Literal["auto", "megatron", "torchtitan", "fsdp2", "deepspeed"] = "auto"
    """Of a native checkpoint the framework that is to go on from DST: Megatron-Core (torch_dist), torchtitan, FSDP2
    (torch's DCP, Hugging Face's names), DeepSpeed (universal). auto: Hugging Face."""
    expert_parallel: bool = False
    """--to megatron, a mixture: Megatron is to go on with --expert-model-parallel-size above 1. Its optimizer then has
    another form."""
    family: str = ""
    """The family of the model of a native checkpoint, or of Hugging Face's, if it is MODULE:NAME of your own."""
    config: str = ""
    """The model, for a folder that does not describe it: a TOML file with the section [model], or a config.json."""
    vocab_size: int = 0
    """The number of token ids, for a folder that pads them and does not state it."""
    weights_only: bool = False
    """Leave out the optimizer's state: a run starts from the weights by checkpoint.init_from."""
    accept: tuple[str, ...] = ()
    """Names of args or fields to accept though they are unknown here: they do not change what the model computes."""


def open_asked(options: AnyToNative) -> Contents:
    """The contents of the folder that a user asks for. Raises CheckpointError or ConfigError as `open_folder`."""
    model: ModelConfig | None = None
    if options.config:
        model = load(["--config", options.config], {}, FOR_OPTIONS).config.model
    return open_folder(options.src, Asked(model, options.vocab_size, options.accept, options.weights_only))


def require_read(options: AnyToNative, read: Collection[str], conversion: str) -> None:
    """Raise ConfigError for an option with a value that a conversion does not read. `read` are those that it reads."""
    for option in fields(options):
        if option.name not in ("src", "dst", *read) and getattr(options, option.name) != option.default:
            raise ConfigError(f"--{option.name}: is not read for {conversion}: leave it out")


def from_native(options: AnyToNative) -> None:
    """Convert a native checkpoint to the folder of the framework `options.to`.

    Raises CheckpointError, ConfigError and StorageError as the export does, before DST exists.
    """
    read = {"to", "family", "weights_only", "expert_parallel"}
    if options.to != "megatron":
        read.discard("expert_parallel")
    if options.to == "deepspeed":
        read.discard("weights_only")  # DeepSpeed loads no universal folder without moments
    require_read(options, read, f"--to {options.to}")
    given: dict[str, Any] = {"family": options.family}
    if "weights_only" in read:
        given["moments"] = not options.weights_only
    if "expert_parallel" in read:
        given["expert_parallel"] = options.expert_parallel
    with progress(len(read_manifest(options.src).tensors)) as advance:
        lines = EXPORTS[options.to](options.src, options.dst, **given, advance=advance)
    print("\n".join([*(lines or ()), f"{options.dst}: {options.to} goes on from it; docs/frameworks.md says how"]))


EXPORTS: Mapping[str, Callable[..., Sequence[str] | None]] = {
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
    "fsdp2": export_fsdp,
    "deepspeed": export_universal,
}


def to_native(options: AnyToNative) -> None:
    """Convert a folder of another framework.

    Says what the folder holds before any tensor is read. Raises CheckpointError, ConfigError and StorageError as
    `write_native`.
    """
    found = format_of(options.src)
    of_args = ("vocab_size", "accept") if found and found.states_model else ()
    require_read(options, ("config", "weights_only", *of_args), found.title if found else str(options.src))
    contents = open_asked(options)
    if contents.model is None:
        raise ConfigError(f"{options.src}: {contents.title} does not describe its model: give --config MODEL.toml")
    print("\n".join(contents.in_words()), file=sys.stderr)
    manifest = write_native(contents, whole_config(contents.model), options.dst)
    config = f"--config {options.dst / CONFIG}"
    if contents.states:
        print(f"step {manifest.step}: go on from it with {config} --checkpoint.resume {options.dst}")
    else:
        print(f"train from {options.dst} with {config} --checkpoint.init_from {options.dst}")
