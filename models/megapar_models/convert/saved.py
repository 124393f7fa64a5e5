"""Options and model of a native checkpoint in one process. Any layout may have written it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar_tools.prepare.texts import TextOptions, Texts, open_texts, saved_record

from megapar.base.errors import CheckpointError, ConfigError, reason_of
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.format import Manifest, open_manifest, read_manifest
from megapar.checkpoint.load import load_weights, weight_slices, weights_of
from megapar.config.data_spec import DataSource
from megapar.config.messages import counted, first_few, shown
from megapar.config.model_options import ModelConfig
from megapar.config.option_values import convert_all
from megapar.config.options import Config, DataConfig, TrainConfig, default_config, flatten, option_types, unflatten
from megapar.declare import context
from megapar.declare.params import MAIN
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.family import Family
from megapar_models.registry import FAMILIES, find, kinds_of, validate, weight_options
from megapar_models.stage import Stage

_MOST_PARTS = 10_000  # layers, or heads of one: no published model has a thousand
_MOST_EXPERTS = 1_000_000  # in all layers; of Kimi K2 there are 23,040

# What the tools read of a run's options. All others say how the run was laid out, trained or logged. They have their
# defaults here, which are those of one process, so no option of a layout can be forgotten.
KEPT_SECTIONS = ("model", "data")
KEPT_OPTIONS = {"train.precision", "train.seq_length", "checkpoint.init_from"}


def is_kept(path: str) -> bool:
    """Whether `saved_config` takes the option of this dotted path from the checkpoint."""
    return path.partition(".")[0] in KEPT_SECTIONS or path in KEPT_OPTIONS


def saved_config(manifest: Manifest, family: str = "", *, flag: str = "--family", **train: Any) -> Config:
    """The options of a checkpoint, for one process. `train` replaces options of that section.

    Options without meaning for the model or its data have their defaults (`is_kept`), and so have options newer than
    the checkpoint. The data section is kept but not validated, because no text will be read. `family` is MODULE:NAME if
    the user has named the model's family so, by `flag`. Such a name in the manifest alone is no reason to import a
    module. Raises CheckpointError if the manifest does not hold the options of such a model.
    """
    checkpoint = f"checkpoint of step {manifest.step}"
    model = _family_of(_stated(manifest, checkpoint), family, flag, checkpoint).options
    config = _read(manifest, model, checkpoint)
    heads = max(config.model.num_attention_heads, config.model.num_key_value_heads)
    _require_parts(config.model, heads, manifest, checkpoint)
    # Not compiled: texts have other lengths than samples of training, and each would be compiled for.
    kernels = replace(config.kernels, compile=False)
    alone = replace(config, train=replace(config.train, **train), kernels=kernels)
    try:
        whole = replace(validate(with_fitting_objective(alone), 1, trains=False), data=config.data)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint}: trainer.config: {error}") from None
    heads = max(kind.heads_of(whole.model).query_heads for kind in kinds_of(whole.model))
    _require_parts(whole.model, heads, manifest, checkpoint)
    _require_elements(whole.model, manifest, checkpoint)
    return whole


def _stated(manifest: Manifest, checkpoint: str) -> dict[str, Any]:
    """The options of a checkpoint as its manifest has them."""
    stated = manifest.trainer.get("config")
    if not isinstance(stated, dict):
        raise CheckpointError(f"{checkpoint}: trainer.config is {stated!r}, not a run's options")
    return stated


def trained_options(manifest: Manifest, family: str = "") -> Config:
    """The options of a checkpoint that say how it was trained: those of train and of the optimizer, not validated.

    Options that the checkpoint does not state have their defaults. `family` is as in `saved_config`.
    """
    checkpoint = f"checkpoint of step {manifest.step}"
    model = _family_of(_stated(manifest, checkpoint), family, "--family", checkpoint).options
    return _read(manifest, model, checkpoint, lambda path: path.partition(".")[0] in ("model", "train", "optimizer"))


def _read(
    manifest: Manifest, model: type[ModelConfig], checkpoint: str, keeps: Callable[[str], bool] = is_kept
) -> Config:
    """The options of a checkpoint that are kept, with those of a family in `model`, and defaults of all others."""
    types = {path: annotation for path, annotation in option_types(model).items() if keeps(path)}
    kept, wrong = convert_all(_stated(manifest, checkpoint), types)
    if wrong:
        raise CheckpointError(f"{checkpoint}: trainer.config: {first_few(wrong, separator='; ')}")
    return unflatten(flatten(default_config(model)) | kept, model)


def _family_of(stated: Mapping[str, Any], given: str, flag: str, checkpoint: str) -> Family:
    """The family of a checkpoint's model. One outside of this repository is imported only if the user has named it."""
    name = stated.get("model.family", ModelConfig.family)
    if given and name != given:
        raise ConfigError(f"{flag} {given}: the {checkpoint} is of family {shown(name)}")
    if not isinstance(name, str) or (name not in FAMILIES and not given):
        unknown = f"{checkpoint}: model.family={shown(name)} is no family of megapar"
        text = f"{unknown}, and to import what a file names would run it"
        raise CheckpointError(f"{text}; {flag} {shown(name)} imports it, if you trust it")
    return find(name)


def _require_parts(model: ModelConfig, heads: int, manifest: Manifest, checkpoint: str) -> None:
    """Raise CheckpointError for more layers, heads or experts than a model has, before anything counts them.

    `heads` are the most of a layer, or those of the model while it is not validated.
    """
    # Adapters may be of a few layers; any other layer has tensors.
    most = _MOST_PARTS if manifest.base else min(_MOST_PARTS, len(manifest.tensors))
    experts = model.all_layers * model.num_experts
    if model.all_layers > most or heads > _MOST_PARTS or experts > _MOST_EXPERTS:
        text = f"{model.all_layers} layers with {heads} heads and {model.num_experts} experts"
        tensors = counted(len(manifest.tensors), "tensor")
        raise CheckpointError(
            f"{checkpoint}: trainer.config: {text}: no such model has {tensors}, as the checkpoint has"
        )


def _require_elements(model: ModelConfig, manifest: Manifest, checkpoint: str) -> None:
    """Raise CheckpointError if the model has more parameters than the checkpoint, before there is memory for them."""
    if manifest.base:
        return
    held = sum(math.prod(shape) for name, (_, shape) in manifest.kinds().items() if name.startswith(f"{MAIN}."))
    try:
        described = WholeModel(model).parameters()
    except RuntimeError as error:  # torch cannot describe tensors beyond 2^63 bytes
        raise CheckpointError(f"{checkpoint}: trainer.config: no model of these sizes: {reason_of(error)}") from None
    if described > held:
        text = f"describes a model of {described:,} parameters, and the checkpoint has {held:,}"
        raise CheckpointError(f"{checkpoint}: trainer.config: {text}")


def with_fitting_objective(config: Config) -> Config:
    """`config` with no data of its own, and an objective of the model's head. Validation asks for both to fit."""
    if config.model.head == "vocabulary":
        return replace(config, data=DataConfig())
    return replace(config, train=replace(config.train, objective="reward"), data=DataConfig(documents="apart"))


def whole_config(model: ModelConfig) -> Config:
    """The options of a run with this model, derived values filled in. Raises ConfigError for an invalid model."""
    config = Config(model=model, train=TrainConfig(seq_length=min(2048, model.max_position_embeddings)))
    return validate(with_fitting_objective(config), 1, trains=False)


def load_model(checkpoint: Path, family: str = "", **train: Any) -> tuple[Config, Stage]:
    """The options and the model of a checkpoint. The model is one stage on the CPU, in evaluation mode.

    `family` and `train` are as in `saved_config`. Raises CheckpointError if the checkpoint is damaged.
    """
    config = saved_config(read_manifest(checkpoint), family, **train)
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
    config = _without_family(manifest)
    return open_texts(config.data.tokenizer, options, manifest.data, sources_of(config))


def text_record(checkpoint: Path) -> dict[str, Any]:
    """Return how a checkpoint's texts became tokens (`megapar.data.prepared.record_of`), or {} if nothing says."""
    manifest = open_manifest(checkpoint)
    return saved_record(manifest.data, sources_of(_without_family(manifest)))


def _without_family(manifest: Manifest) -> Config:
    """The options of a checkpoint without those of its model's family, which may be in a module of the user's."""
    return _read(manifest, ModelConfig, f"checkpoint of step {manifest.step}")


def sources_of(config: Config) -> tuple[str, ...]:
    """The sources of the training data, without their weights in a blend."""
    return tuple(DataSource.parse(text).source for text in config.data.train)
