"""The config.json of an export to Hugging Face: that of the folder it comes from, or a new one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megapar.config.compatible import decided_by
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, flatten
from megapar.data.tokenizer import Tokenizer
from megapar_models.convert.by_name import HF_CONFIG
from megapar_models.convert.config_json import is_multimodal, to_hugging_face
from megapar_models.convert.typed_fields import read_object
from megapar_models.family import Raw


def hf_config(config: Config, origin: Path | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The config.json of the folder `origin`, or a new one with the end token of the training's tokenizer."""
    if origin is not None:
        raw = read_object(origin / HF_CONFIG)
    # Of a multimodal model the language model alone is written, so its file is made anew.
    if origin is not None and not is_multimodal(raw):
        raw.pop("dtype", None)  # transformers 5's name of torch_dtype
        raw.pop("quantization_config", None)  # what is written is not quantized
        return _with_stated_layers(raw, config.model)
    eod = None
    # A wrong end token would make generation stop early or never, so without a known tokenizer there is none.
    if tokenizer is not None and tokenizer.eod < config.model.vocab_size:
        eod = tokenizer.eod
    return {**to_hugging_face(config.model), "bos_token_id": None, "eos_token_id": eod}


def _with_stated_layers(raw: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a config.json that states as many layers of multi-token prediction as are written, if there are any."""
    made = to_hugging_face(model) if model.num_nextn_predict_layers else {}
    number = {name: value for name, value in made.items() if name in raw and name.endswith(_NUMBERS)}
    return {**raw, **number}


_NUMBERS = ("nextn_predict_layers", "mtp_num_hidden_layers")


def computed(model: ModelConfig) -> dict[str, Any]:
    """The options of the model without those used only in training, by dotted path."""
    # A file's number of positions is no matter of training: other programs read it.
    used_in_training = decided_by("training", model) - {"model.max_position_embeddings"}
    options = flatten(model, "model.")
    options = {path: value for path, value in options.items() if path not in used_in_training}
    # What a folder holds of these layers goes before what its config.json says of them.
    del options["model.num_nextn_predict_layers"]
    # A bias is part of the model. The losses that balance experts are not.
    if model.experts is not None:
        options["model.moe.balance"] = model.experts.has_selection_bias
    return options


def unlike(theirs: ModelConfig, ours: ModelConfig) -> Iterator[str]:
    """Yield each option that decides what a model computes and differs, with both values."""
    found, wanted = computed(theirs), computed(ours)
    for path in sorted({*found} | {*wanted}):
        if found.get(path) != wanted.get(path):
            yield f"{path} {found.get(path)} in place of {wanted.get(path)}"


def with_dtype(raw: Raw, dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json with this dtype wherever it states one, also for its language model."""
    name = str(dtype).removeprefix("torch.")
    changed: dict[str, Any] = {field: name for field in ("dtype", "torch_dtype") if field in raw}
    if isinstance(raw.get("text_config"), dict):
        changed["text_config"] = with_dtype(raw["text_config"], dtype)
    return {**raw, **changed}
