"""Config.json files that are refused, in words. tests/test_model_types.py refuses fields by name."""

from dataclasses import replace
from typing import Any

import pytest

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from tests.support.grid import LLAMA, Layout
from tests.support.model_types import HEADS, LONGROPE, MIXED, PLAIN, RMS, YARN
from tests.support.published import model_of

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ministral", {"layer_types": ["chunked_attention"] * 4}, "layer_types=.* is not supported"),
    ("ministral", {"sliding_window": None, "layer_types": MIXED}, "but there is no sliding_window"),
    ("ministral", {"sliding_window": 5, "layer_types": MIXED[:3]}, "give a type for each of the 4"),
    ("mistral", {"sliding_window": 5, "layer_types": MIXED}, "layer_types=.* is not known"),
    ("mistral", {"sliding_window": 0}, "should be a whole number from 1 on"),
    ("qwen2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* should be a list"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ("smollm3", {"sliding_window": 5, "layer_types": MIXED}, "but there is no sliding_window"),
    ("exaone4", {"sliding_window": None}, "layer_types is missing"),
    ("exaone4", {"sliding_window_pattern": "LLG"}, "layer_types is missing"),
    ("phi3", {"partial_rotary_factor": 0.5}, "rotates 5 of a head's 10 dimensions"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported"),
    ("helium", {}, "hidden_size=48 should be num_attention_heads x head_dim"),
    ("glm4", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("starcoder2", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ("apertus", {"rope_theta": 1e4}, "releases of transformers disagree"),
    ("apertus", {"qk_norm": False}, "qk_norm=False is not supported"),
    ("nemotron", {"kv_channels": 12}, "kv_channels=12 is not supported unless it is the width of a head, 10"),
    ("hunyuan_v1_dense", {"attention_head_dim": 12}, "unless it is head_dim, 10"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supp"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": "2"}}, "alpha='2' should be a number"),
    ("hunyuan_v1_moe", {"num_shared_expert": [1, 1, 1, 2]}, "num_shared_expert=.* is not supported unless all layers"),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1, 1]}, "moe_topk=.* is not supported unless all layers have the same"),
    ("cohere2_moe", {"rope_scaling": YARN}, "transformers reads rope_parameters alone"),
    ("cohere2_moe", {"num_shared_experts": None}, "null is not supported"),
    ("exaone_moe", {"mlp_layer_types": ["dense", "sparse"]}, "should be dense or sparse for each of 4 layers"),
    ("hy_v3", {"mlp_layer_types": ["sparse", "dense", *["sparse"] * 2]}, "unless its dense layers are the first"),
    ("granite_swa", {"layer_rope_theta": [1.0, 2.0]}, "give a base from 0 on for each of the 4 layers"),
    ("ministral3", {"rope_theta": 1e4}, "releases of transformers disagree"),
    ("ministral3", {"rope_parameters": PLAIN}, "rope_parameters lacks llama_4_scaling_beta"),
    ("ministral3", {"rope_parameters": PLAIN | {"llama_4_scaling_beta": 0.1}}, "this rope_type does not have; use"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_type longrope lacks long_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": 1}}, "short_factor=1 should be a list"),
    (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
        "original_max_position_embeddings=1: must be at least 2",
    ),
    (
        "phi3",
        {"rope_scaling": LONGROPE | {"partial_rotary_factor": 1.0}},
        "has 3 factors; give 5 above 0, one for each rotated pair",
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "words"), REFUSED)
def test_what_a_family_does_not_compute_is_refused(model_type: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of({"model_type": model_type, **RMS, **changes})


def test_a_type_without_a_family_names_the_way_on() -> None:
    with pytest.raises(ConfigError, match="'rwkv' is not supported; `megapar new-family FOLDER`") as refused:
        model_of({"model_type": "rwkv", **RMS})
    assert "types that are supported (docs/families.md), llama is the nearest by its fields" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250, "a list of all types helps nobody whose model is none of them"


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
        return model_of({"model_type": "mistral", **HEADS, **fields})

    assert read(sliding_window=64) == read(sliding_window=None) != read(sliding_window=63)
