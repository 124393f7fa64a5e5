"""The doors to `megapar_models.convert`: what a run asks of it if an option names another framework's file or folder.

No other module that trains imports anything of `convert`, and these functions import it when they are called.
"""

from pathlib import Path

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import MANIFEST, Manifest
from megapar.config.files import part_toml
from megapar.config.options import Config
from megapar.declare.agreement import on_all_ranks
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
    on every rank if a folder is damaged or not of `config.model`, and ConfigError if adapters start from one.
    """
    options = config.checkpoint
    found = {}
    for option, name in (("resume", options.resume), ("init_from", options.init_from)):
        folder = Path(name)
        if name in ("auto", "none") or not folder.is_dir() or (folder / MANIFEST).exists():
            continue

        def open_here(folder: Path = folder, option: str = option) -> Manifest | None:
            from megapar_models.convert.formats.detect import Asked, format_of, open_folder
            from megapar_models.convert.saved import whole_config

            if format_of(folder) is None:
                return None  # what reads checkpoints says what is wrong
            asked = Asked(config.model, config.model.vocab_size, weights_only=option == "init_from")
            contents = open_folder(folder, asked)
            return contents.manifest(whole_config(contents.model or config.model))

        manifest = on_all_ranks(open_here, ctx, CheckpointError, f"--checkpoint.{option} {folder}")
        if manifest is None:
            continue
        if config.adapter.rank:
            raise ConfigError(
                f"checkpoint.{option}={folder}: adapters name their base by a hash, which another framework's folder "
                f"has not: megapar convert {folder} NATIVE first"
            )
        found[folder] = manifest
    return found
