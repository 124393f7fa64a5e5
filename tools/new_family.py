"""Shows what a model of Hugging Face asks for that has no family here, and writes a draft of one.

It reads config.json, and the names and shapes of tensors if their safetensors files or their index are there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from megapar_models.convert.by_name import HF_CONFIG, open_outline
from megapar_models.convert.config_json import (
    canonical_name,
    differences,
    distance,
    from_hugging_face,
    is_derived,
    is_multimodal,
)
from megapar_models.convert.draft import draft, module_name
from megapar_models.convert.recipes import starred
from megapar_models.convert.safetensors_folder import INDEX, SINGLE, header_of
from megapar_models.convert.sketch import Sketch, sketch
from megapar_models.registry import FAMILIES

from megapar.base.errors import CheckpointError, ConfigError, storing
from megapar.checkpoint.format import Sizes
from megapar.launch.reporting import reported
from megapar.system.regular_files import read_regular

CAUSAL = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead")


@dataclass(frozen=True)
class Options:
    """Read a model of Hugging Face, and say what a family for it needs."""

    folder: Annotated[str | Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|ORG/MODEL[@REVISION]")]
    """Folder with config.json, and with safetensors files or their index if there are any; or a model at Hugging Face,
    of which config.json and the index are downloaded, so no shapes of tensors are known."""
    write: Path | None = None
    """Folder for a draft, a Python file called after the model_type; it must not be there."""


class Near(NamedTuple):
    """A model_type that we have, and how a model differs from it."""

    model_type: str
    family: str
    fields: list[str]
    tensors: list[str]


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a causal language model. Raises ConfigError."""
    path = folder / HF_CONFIG
    try:
        raw = json.loads(read_regular(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: is not there; name a folder of Hugging Face") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{path}: has no model_type, so it is none of transformers")
    classes = raw.get("architectures") or []
    if raw.get("is_encoder_decoder"):
        raise ConfigError(f"{path}: is_encoder_decoder; models here are decoders alone")
    if isinstance(raw.get("text_config"), dict) and not is_multimodal(raw):
        raise ConfigError(f"{path}: multimodal; put its text_config into a config.json of its own, with model_type")
    if classes and not is_multimodal(raw) and not any(str(name).endswith(CAUSAL) for name in classes):
        raise ConfigError(f"{path}: architectures={classes} predict no next token; one that ends in {CAUSAL[0]} does")
    return raw


def read_shapes(folder: Path) -> dict[str, Sizes | None]:
    """The tensors by name, with shapes if their files are there; nothing without files and index."""
    index = folder / INDEX
    names: list[str] = []
    if index.is_file():
        try:
            names = [*json.loads(read_regular(index))["weight_map"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files ({error!r})") from None
    shapes: dict[str, Sizes | None] = dict.fromkeys(names)
    for path in sorted(folder.glob("*.safetensors")) if names else [folder / SINGLE]:
        if path.is_file():
            shapes |= {name: shape for name, (_, shape) in header_of(path).items()}
    return shapes


# What is nearest


def nearest(raw: dict[str, Any], shapes: dict[str, Sizes | None]) -> Near:
    """The model_type itself if we have it, else that of ours with the fewest tensors, then fields, that differ."""
    other = raw["model_type"]
    return min(
        candidates(raw, shapes),
        key=lambda near: (near.model_type != other, len(near.tensors), *distance(near.fields)),
    )


def candidates(raw: dict[str, Any], shapes: dict[str, Sizes | None]) -> Iterator[Near]:
    for family, description in FAMILIES.items():
        names = description.hugging_face
        if names is None:
            continue
        known = {*names.modules.values(), *names.constants}
        stacked = {*names.stacked, *(f"{name}.weight" for name in known), *(f"{name}.bias" for name in known), *known}
        theirs = {starred(canonical_name(name, names) or "")[0] for name in shapes if not is_derived(name)}
        tensors = sorted(theirs - stacked - {*names.tied})
        for model_type in names.model_types:
            yield Near(model_type, family, differences(raw, family, model_type), tensors)


# What is printed


def report(raw: dict[str, Any], found: Sketch, near: Near, folder: str | Path) -> Iterator[str]:
    yield from known(raw, folder)
    yield from section("asks for these rules", found.asks)
    yield from section("a person must decide", found.decide)
    yield from section("no rule here computes", found.missing)
    yield from section("fields that are not known here", found.unknown)
    if near.model_type == raw["model_type"]:
        return
    differing = [*near.fields, *(f"tensor {name} has no counterpart" for name in near.tensors)]
    title = f"nearest: model_type {near.model_type} of family {near.family}"
    yield from section(f"{title}, which differs in", differing or ["no field and no tensor"])


def section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)


def known(raw: dict[str, Any], folder: str | Path) -> Iterator[str]:
    """What to do if there is a family already."""
    model_type = raw["model_type"]
    if not is_multimodal(raw) and not any(
        family.hugging_face and model_type in family.hugging_face.model_types for family in FAMILIES.values()
    ):
        yield f"model_type {model_type}: no family has it"
        return
    try:
        family = from_hugging_face(raw).family
    except ConfigError as error:
        yield f"model_type {model_type} is known, and this file is refused:"
        yield from (f"  {line}" for line in str(error).splitlines())
        return
    yield f"model_type {model_type} is known: family {family}. To train it:"
    yield f"  megapar convert hf-to-native {folder} native"
    yield "  megapar pretrain --config native/config.toml --checkpoint.init_from native"


def write_draft(found: Sketch, options: Options) -> Iterator[str]:
    """Write the draft; yields what to do with it."""
    assert options.write is not None
    name = module_name(found.raw["model_type"])
    path = options.write / f"{name}.py"
    with storing(path):
        options.write.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x") as file:
                file.write(draft(found, Path(options.folder).name))
        except FileExistsError:
            raise ConfigError(f"--write: {path} is there already; it may have been edited, so name another") from None
    todo = len(found.decide) + len(found.missing) + len(found.unknown)
    yield f"wrote {path}: {f'{todo} lines say TODO' if todo else 'nothing is missing'}"
    if not todo:
        yield "to compare it with transformers, and to have a checkpoint to train from:"
        command = f"megapar convert hf-to-native {options.folder} native --family {name}:FAMILY"
        yield f"  PYTHONPATH={options.write} {command}"


def main() -> None:
    with reported():
        options = tyro.cli(Options, description=__doc__, use_underscores=True)
        folder = open_outline(options.folder).folder
        raw = read_config(folder)
        shapes = read_shapes(folder)
        found = sketch(raw, shapes)
        print(*report(raw, found, nearest(raw, shapes), options.folder), sep="\n")
        if options.write:
            print(*write_draft(found, options), sep="\n")


if __name__ == "__main__":
    main()
