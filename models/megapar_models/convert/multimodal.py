"""Multimodal files of Hugging Face. Their language model is read alone, and the other parts are left out."""

from dataclasses import dataclass, field

from megapar.base.errors import ConfigError
from megapar_models.family import Raw


@dataclass(frozen=True)
class Multimodal:
    """A multimodal `model_type`. The field text_config is the config.json of a language model of its own model_type."""

    text_type: str
    """The model_type of a text_config that does not say it."""
    fixed: Raw = field(default_factory=dict)
    """Fields of text_config that the multimodal model does not read, with the values of which this is no matter."""


MULTIMODAL = {
    # The multimodal model does not read the cap of logits.
    "gemma3": Multimodal("gemma3_text", {"final_logit_softcapping": None}),
    "gemma4": Multimodal("gemma4_text"),
    "gemma4_unified": Multimodal("gemma4_unified_text"),
    "llama4": Multimodal("llama4_text"),
    "mistral3": Multimodal("mistral"),
    "qwen3_5": Multimodal("qwen3_5_text"),
    "qwen3_5_moe": Multimodal("qwen3_5_moe_text"),
    "step3p7": Multimodal("step3p5"),
}
# Beginnings of the names of tensors: those of the language model with their counterparts in files of it alone, and
# those of other parts.
PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
OTHER_PARTS = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("vision_model.", "vit_large_projector.", "model.vision_model."),
    *("model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.vision_embedder."),
)


def language_model(file: Raw) -> Raw:
    """The config.json of the language model in a file: itself, if it is not multimodal. Raises ConfigError."""
    multimodal = MULTIMODAL.get(str(file.get("model_type")))
    if multimodal is None:
        return file
    text = file.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError("config.json: text_config is missing")
    for name, value in multimodal.fixed.items():
        if text.get(name, value) != value:
            raise ConfigError(f"config.json: {name}={text[name]!r} is not supported; {value!r} is")
    shared = {name: file[name] for name in ("tie_word_embeddings", "quantization_config") if name in file}
    return {"model_type": multimodal.text_type, **text, **shared}
