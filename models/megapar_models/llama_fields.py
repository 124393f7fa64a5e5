"""Fields of a config.json in which the model types of family llama differ: rotary positions, biases, windows.

A model of the family is written as the one model type that has its biases, norms and windows (`llama_type`).
"""

from collections.abc import Iterator
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import shown
from megapar_models.family import Codec, Raw
from megapar_models.rotary_fields import Rope, StatedRope, stated_rope, with_rope
from megapar_models.windows import FULL, SLIDING, Windows, read_windows

# Model types with the fields of Llama.
_LLAMAS = ("llama", "internlm3", "iquestcoder")
# What transformers takes for a file of cwm without any field about rotary positions.
_CWM_ROPE = StatedRope(
    default={
        **{"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "high_freq_factor": 4.0},
        **{"low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    }
)


class LlamaRope(Rope):
    """Rotary positions, and what InternLM3 and Code World Model have in their place."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if model_type == "cwm":
            return _CWM_ROPE.read(raw, model_type)
        if model_type == "internlm3" and _is_dynamic(raw):
            # Up to max_position_embeddings, which no sample exceeds, it is the default.
            raw = with_rope(raw, {"rope_theta": raw.get("rope_theta", self.theta)} | _theta(raw))
        return super().read(raw, model_type)

    def warnings(self, raw: Raw, family: str) -> list[str]:
        if raw["model_type"] == "internlm3" and _is_dynamic(raw):
            return ["config.json: rope_type dynamic is not read: it is of texts beyond max_position_embeddings"]
        return super().warnings(raw, family)


def _is_dynamic(raw: Raw) -> bool:
    rope = stated_rope(raw)
    return "dynamic" in (rope.get("rope_type"), rope.get("type"))


def _theta(raw: Raw) -> dict[str, Any]:
    return {name: value for name, value in stated_rope(raw).items() if name == "rope_theta"}


class Biases(Codec):
    """Biases, and norms of queries and keys."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        biased = model_type == "qwen2"  # its config.json has no field for them
        if model_type in (*_LLAMAS, "qwen3", "seed_oss"):
            biased = raw.get("attention_bias", raw.get("qkv_bias", model_type == "seed_oss"))
        out_bias = biased and model_type in (*_LLAMAS, "qwen3")
        if model_type == "seed_oss":
            out_bias = raw.get("attention_out_bias", False)
        biases = {"attention_bias": biased, "attention_out_bias": out_bias}
        biases |= {"mlp_bias": raw.get("mlp_bias", raw.get("bias", False))}
        return {**biases, "qk_norm": model_type == "qwen3"}, []

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if fields["model_type"] in ("llama", "seed_oss"):
            fields |= {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}
        if fields["model_type"] == "seed_oss":
            fields |= {"attention_out_bias": model.attention_out_bias}
            fields |= {"attention_dropout": 0.0, "residual_dropout": 0.0}  # its own files have 0.1
        if fields["model_type"] == "qwen3":
            fields |= {"attention_bias": model.attention_bias}


class LlamaWindows(Windows):
    """Windows from some layer on, in the model types that have any."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if model_type in (*_LLAMAS, "seed_oss"):
            return {}, []
        layers, first = raw["num_hidden_layers"], 0  # the first layer with the window
        window = raw.get("sliding_window", 8192 if model_type == "cwm" else 4096)
        if model_type in ("qwen2", "qwen3"):
            stated = raw.get("max_window_layers")
            first = 28 if stated is None else stated
            if not raw.get("use_sliding_window", False):
                window = None
        if window is None:
            first = layers
        types = [SLIDING if number >= first else FULL for number in range(layers)]
        if model_type == "cwm":
            types = [SLIDING if number % 4 else FULL for number in range(layers)]
        if model_type != "mistral":
            types = raw.get("layer_types") or types
        return read_windows(raw, window, types)

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        if raw.get("dual_chunk_attention_config"):
            # Of Qwen2.5 with a million tokens. Another program cuts long texts by it.
            yield "config.json: dual_chunk_attention_config is not read: as in transformers, chunks are not used"

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        if fields["model_type"] in ("llama", "seed_oss"):
            return
        if fields["model_type"] in ("qwen2", "qwen3"):
            fields |= {"use_sliding_window": model.sliding_window > 0}
        super().write(model, fields)
        if fields["model_type"] == "mistral":
            del fields["layer_types"]  # it has none: all its layers have the window


def llama_type(model: Any) -> str:
    """Return the model_type with these biases, norms and windows. Raises ConfigError if there is none."""
    biases = (model.attention_bias, model.attention_out_bias, model.mlp_bias)
    if model.qk_norm and model.attention_bias == model.attention_out_bias and not model.mlp_bias:
        return "qwen3"
    if not model.qk_norm:
        if biases == (True, False, False):
            return "qwen2"
        if not model.sliding_window:
            return "llama" if model.attention_bias == model.attention_out_bias else "seed_oss"
        if not any(biases):
            return "ministral" if model.layer_types else "mistral"
    names = ("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm", "sliding_window")
    options = ", ".join(f"model.{name}={shown(getattr(model, name))}" for name in names if getattr(model, name))
    raise ConfigError(f"{options}: no model_type of Hugging Face has all this and nothing else")
