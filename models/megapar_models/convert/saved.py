"""Options and model of a native checkpoint in one process. Any layout may have written it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar import context
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.format import Manifest, open_manifest, read_manifest
from megapar.checkpoint.load import load_weights, weight_slices, weights_of
from megapar.config.data_spec import Entry
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, DataConfig, default_config, flatten, unflatten
from megapar.data.texts import TextOptions, Texts, open_texts, saved_record
from megapar.errors import CheckpointError
from megapar_models.build import build_stages
from megapar_models.registry import find, validate, weight_options
from megapar_models.stage import Stage

# What the tools read of a run's options. All others say how the run was laid out, trained or logged. They have their
# defaults here, which are those of one process, so no option of a layout can be forgotten.
KEPT_SECTIONS = ("model", "data")
KEPT_OPTIONS = {"train.precision", "train.seq_length", "checkpoint.init_from"}


def is_kept(path: str) -> bool:
    """Whether `saved_config` takes the option of this dotted path from the checkpoint."""
    return path.partition(".")[0] in KEPT_SECTIONS or path in KEPT_OPTIONS


def saved_config(manifest: Manifest, **train: Any) -> Config:
    """The options of a checkpoint, for one process. `train` replaces options of that section.

    Options without meaning for the model or its data have their defaults (`is_kept`), and so have options newer than
    the checkpoint. The data section is kept but not validated, because no text will be read. Raises CheckpointError if
    the manifest does not hold the options.
    """
    stated = manifest.trainer.get("config")
    if not isinstance(stated, dict):
        raise CheckpointError(f"checkpoint of step {manifest.step}: trainer.config is {stated!r}, not a run's options")
    # JSON has no tuples.
    saved = {path: tuple(value) if isinstance(value, list) else value for path, value in stated.items()}
    kept = {path: value for path, value in saved.items() if is_kept(path)}
    model = find(str(kept.get("model.family", ModelConfig.family))).options
    config = unflatten(flatten(default_config(model)) | kept, model)
    # Not compiled: texts have other lengths than samples of training, and each would be compiled for.
    kernels = replace(config.kernels, compile=False)
    alone = replace(config, train=replace(config.train, **train), kernels=kernels)
    return replace(validate(with_fitting_objective(alone), 1, trains=False), data=config.data)


def with_fitting_objective(config: Config) -> Config:
    """`config` with no data of its own, and an objective of the model's head. Validation asks for both to fit."""
    if config.model.head == "vocabulary":
        return replace(config, data=DataConfig())
    return replace(config, train=replace(config.train, objective="reward"), data=DataConfig(documents="apart"))


def load_model(checkpoint: Path, **train: Any) -> tuple[Config, Stage]:
    """The options and the model of a checkpoint. The model is one stage on the CPU, in evaluation mode.

    `train` is as in `saved_config`. Raises CheckpointError if the checkpoint is damaged.
    """
    config = saved_config(read_manifest(checkpoint), **train)
    ctx = context.single()
    stage = build_stages(config, ctx)[0]
    trained = (param for param in stage.parameters() if param.requires_grad)
    # Buffers are a part of the model too: the bias of a router decides which experts a token goes to.
    slices = [*weight_slices(trained), *weights_of(fixed_slices([stage]))]
    load_weights(checkpoint, slices=slices, ctx=ctx, model_config=weight_options(config))
    return config, stage.eval()


def texts_of(checkpoint: Path, options: TextOptions) -> Texts:
    """The tokenizer of a checkpoint's training, for texts as the options ask for them."""
    manifest = open_manifest(checkpoint)
    config = saved_config(manifest)
    return open_texts(config.data.tokenizer, options, manifest.data, sources_of(config))


def text_record(checkpoint: Path) -> dict[str, Any]:
    """How the texts of a checkpoint's training became tokens (`megapar.data.texts.record_of`); {} if nothing says."""
    manifest = open_manifest(checkpoint)
    return saved_record(manifest.data, sources_of(saved_config(manifest)))


def sources_of(config: Config) -> tuple[str, ...]:
    """The sources of the training data, without their weights in a blend."""
    return tuple(Entry.parse(text).source for text in config.data.train)
