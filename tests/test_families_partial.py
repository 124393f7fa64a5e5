"""Rotary pairs beside each other and a rotated part of each head: ERNIE 4.5, Helium, Phi-3 and GLM-4."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapar.errors import ConfigError
from tests.support import tiny_models
from tests.support.config_fields import assert_read_or_refused
from tests.support.grid import Layout, check_on_ranks
from tests.support.published import SIZES, Published, model_of

# Without a padding token, whose row of the embedding gets no gradient in transformers.
COMMON = {**SIZES, "head_dim": 10, "rms_norm_eps": 1e-3, "pad_token_id": None, "tie_word_embeddings": False}
FIELDS: dict[str, dict[str, Any]] = {
    "ernie4_5": {"use_bias": True},
    "helium": {"attention_bias": True, "head_dim": 12},
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.6},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.6},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.6},
}
# transformers prefers the factor among rope_parameters, and writes phi3's in both places.
UNREAD = ("original_max_position_embeddings", "partial_rotary_factor")


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    published = Published(tmp_path, kind, COMMON | FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_way_back()
    assert_read_or_refused(published.raw, UNREAD)


def test_a_rotated_part_and_norms_on_both_sides_train_as_in_one_process() -> None:
    model = tiny_models.small("glm", 48, 4, 76, num_key_value_heads=2, head_dim=10, initializer_range=0.1)
    model = replace(model, partial_rotary_factor=0.6, attention_bias=True, output_norms=True)
    check_on_ranks(Layout(model, tp=2, pp=2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("phi3", {"partial_rotary_factor": 0.5}, "rotates 5 of a head's 10 dimensions"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported"),
        ("helium", {}, "hidden_size=48 should be num_attention_heads x head_dim"),
        ("glm4", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_what_they_do_not_compute_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of({"model_type": kind, **COMMON, **changes})
