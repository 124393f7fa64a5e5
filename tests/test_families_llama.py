"""The model types of family llama against transformers, and in a layout against one process: biases and windows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapar.config.options import ModelConfig
from megapar.errors import ConfigError
from tests.support.config_fields import assert_read_or_refused
from tests.support.grid import LLAMA, Layout, check_on_ranks
from tests.support.published import SIZES, Published, model_of

# Without a padding token, whose row of the embedding gets no gradient in transformers.
COMMON = {**SIZES, "head_dim": 10, "rms_norm_eps": 1e-3, "pad_token_id": None}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "ministral": {"sliding_window": 5, "layer_types": MIXED},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
}
# With a list of layers transformers does not read max_window_layers, and dropout is for training alone.
UNREAD = ("max_window_layers", "attention_dropout", "residual_dropout")


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    published = Published(tmp_path, kind, COMMON | FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_way_back()
    assert_read_or_refused(published.raw, UNREAD)


def test_biases_and_windows_by_layer_train_as_in_one_process() -> None:
    model = replace(LLAMA, attention_out_bias=True, mlp_bias=True, sliding_window=5, layer_types=tuple(MIXED))
    check_on_ranks(Layout(model, tp=2, pp=2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("ministral", {"layer_types": ["chunked_attention"] * 4}, "layer_types=.* is not supported"),
        ("ministral", {"sliding_window": None, "layer_types": MIXED}, "but there is no sliding_window"),
        ("ministral", {"sliding_window": 5, "layer_types": MIXED[:3]}, "give a type for each of the 4"),
        ("mistral", {"sliding_window": 5, "layer_types": MIXED}, "layer_types=.* is not known"),
        ("mistral", {"sliding_window": 0}, "should be a whole number from 1 on"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_what_it_does_not_compute_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of({"model_type": kind, **COMMON, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": -1}, "must be at least 0"),
        ({"sliding_window": 5, "layer_types": ("local",) * 4}, "local unknown"),
        ({"layer_types": tuple(MIXED)}, "needs a window above 0"),
    ],
)
def test_windows_that_contradict_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Layout(replace(LLAMA, **changes)).config()


def test_a_window_that_no_token_leaves_is_none() -> None:
    def read(**fields: Any) -> ModelConfig:
        return model_of({"model_type": "mistral", **COMMON, **fields})

    assert read(sliding_window=64) == read(sliding_window=None) != read(sliding_window=63)
