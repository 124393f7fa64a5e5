"""The doors to `megapar_models.convert`: what a run asks of it if an option names another framework's file or folder.

No other module that trains imports anything of `convert`, and these functions import it when they are called.
"""

import hashlib
import json
from pathlib import Path

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import MANIFEST, Manifest
from megapar.comm import collectives
from megapar.config.files import part_toml
from megapar.config.options import Config
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext


def described(path: Path, family: str) -> str:
    """The section [model] of the config.json `path` as TOML, by the family of a name, or if it is "" by model_type.

    Raises ConfigError for a file that no family reads.
    """
    from megapar_models.convert.config_json import from_hugging_face
    from megapar_models.convert.typed_fields import read_object

    return part_toml(Config(model=from_hugging_face(read_object(path), family)), ("model",))


def opened(config: Config, ctx: ParallelContext) -> dict[Path, Manifest]:
    """The manifests of the folders of other frameworks that checkpoint.resume and checkpoint.init_from name.

    Each rank opens them by itself, and reads its own boxes later. A collective over `ctx.world`. Raises CheckpointError
    on every rank if a folder is damaged, not of `config.model`, or not the same on all ranks, and ConfigError if
    adapters start from one.
    """
    options = config.checkpoint
    named = {"resume": Path(options.resume), "init_from": Path(options.init_from)}
    manifests = {folder: _opened(folder, option, config, ctx) for option, folder in named.items()}
    return {folder: manifest for folder, manifest in manifests.items() if manifest is not None}


def _opened(folder: Path, option: str, config: Config, ctx: ParallelContext) -> Manifest | None:
    """Open the folder that checkpoint.`option` names on all ranks. None: no framework's folder looks like it."""
    doing = f"--checkpoint.{option} {folder}"
    # Rank 0 decides: a rank that does not see the folder would otherwise leave the others in the collective.
    here = on_all_ranks(lambda: ctx.world.first and _is_foreign(folder), ctx, CheckpointError, doing)
    if not from_first(here, ctx):
        return None
    if config.adapter.rank:
        raise ConfigError(
            f"checkpoint.{option}={folder}: adapters name their base by a hash, which another framework's folder "
            f"has not: megapar convert {folder} NATIVE first"
        )
    weights_only = option == "init_from"
    manifest = on_all_ranks(lambda: _manifest(folder, config, weights_only), ctx, CheckpointError, doing)
    described = json.dumps([manifest.header(), manifest.kinds()], sort_keys=True)
    digests = collectives.gather_json(hashlib.sha256(described.encode()).hexdigest(), ctx.world, ctx.device)
    if len({*digests}) > 1:
        error = CheckpointError(f"{folder}: ranks see different folders of this name: all must see the same one")
        error.everywhere = True
        raise error
    return manifest


def _is_foreign(folder: Path) -> bool:
    """Whether a folder looks like another framework's. Names such as auto are of none."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return False
    from megapar_models.convert.formats.detect import format_of

    return format_of(folder) is not None


def _manifest(folder: Path, config: Config, weights_only: bool) -> Manifest:
    """Make the manifest of another framework's folder. Raises CheckpointError as `open_folder`."""
    from megapar_models.convert.formats.detect import Asked, open_folder
    from megapar_models.convert.saved import whole_config

    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is no folder here, and rank 0 has one: all ranks must see the same folder")
    contents = open_folder(folder, Asked(config.model, config.model.vocab_size, weights_only=weights_only))
    return contents.manifest(whole_config(contents.model or config.model))
