"""OLMo, Granite and Cohere against transformers, and in layouts against one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.grid import Layout, check_on_ranks
from tests.support.published import SIZES, Published, model_of
from tests.support.sweeps import slow_but

TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
RMS = {**SIZES, "head_dim": 10, "rms_norm_eps": 1e-3, "attention_bias": True}
LAYER_NORM = {**SIZES, "layer_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 20}
FACTORS = {"embedding_multiplier": 2.5, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.7}
GRANITE = {**RMS, **FACTORS}
FIELDS: dict[str, dict[str, Any]] = {
    "olmo": {**SIZES, "head_dim": 10, "attention_bias": True},
    "olmo2": RMS,
    "olmo3": {**RMS, "sliding_window": 5, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    "olmoe": {**SIZES, **EXPERTS, "rms_norm_eps": 1e-3, "attention_bias": True, "num_experts": 5},
    "granite": {**GRANITE, "mlp_bias": True},
    "granitemoe": {**GRANITE, **EXPERTS},
    "granitemoeshared": {**GRANITE, **EXPERTS, "shared_intermediate_size": 28},
    "cohere": {**LAYER_NORM, "logit_scale": 0.3, "num_key_value_heads": 1},
    "cohere2": {**LAYER_NORM, "logit_scale": 0.3, "sliding_window": 5},
}
del FIELDS["olmoe"]["num_local_experts"]
COMMON = [{"hidden_act": "gelu_pytorch_tanh"}, {"rope_parameters": YARN}]
RMS_EPS = {"rms_norm_eps": 1e-1}
OF_GRANITE = [*COMMON, RMS_EPS, *({name: 0.9} for name in FACTORS)]
WINDOWS = [{"sliding_window": 3}, {"layer_types": TYPES}]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "olmo": COMMON,
    "olmo2": [*COMMON, RMS_EPS],
    "olmo3": [COMMON[0], RMS_EPS, *WINDOWS, {"rope_parameters": {"full_attention": PLAIN}}],
    "olmoe": [*COMMON, RMS_EPS, {"num_experts_per_tok": 2}, {"norm_topk_prob": True}],
    "granite": OF_GRANITE,
    "granitemoe": [*OF_GRANITE, {"num_experts_per_tok": 2}],
    "granitemoeshared": [*OF_GRANITE, {"num_experts_per_tok": 2}],
    "cohere": [*COMMON, {"layer_norm_eps": 1e-1}, {"logit_scale": 0.9}],
    "cohere2": [
        *COMMON,
        *WINDOWS,
        {"layer_norm_eps": 1e-1},
        {"logit_scale": 0.9},
        {"layer_types": None, "sliding_window_pattern": 3},
    ],
}
REFUSED: dict[str, dict[str, Any]] = {
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5},
    "cohere2": {"sliding_window": None},
}


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """Each field of config.json with another value too, or it is refused."""
    published = Published(tmp_path, kind, FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_fields(CHANGES[kind], {"attention_dropout": 0.1, **REFUSED.get(kind, {})})
    published.check_way_back()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    slow_but(
        [1, 4],
        [
            ("olmo", {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
            ("olmo3", {"tp": 2}),
            ("olmoe", {"tp": 2, "ep": 2, "etp": 1}),
            ("granite", {"tp": 2, "sequence_parallel": True}),
            ("granitemoeshared", {"dp": 2, "ep": 2, "zero_stage": 3}),
            ("cohere2", {"cp": 2, "cp_attention": "ulysses"}),
        ],
    ),
)
def test_it_trains_in_a_layout_as_in_one_process(kind: str, sizes: dict[str, Any]) -> None:
    check_on_ranks(Layout(model_of({"model_type": kind, **FIELDS[kind]}), **sizes))
