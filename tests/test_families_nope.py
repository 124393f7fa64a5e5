"""SmolLM3 and EXAONE 4, with layers that see no positions: against transformers, and in a layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megapar_models.exaone4.family import EXAONE4
from megapar_models.smollm3.family import SMOLLM3

from megapar.errors import ConfigError
from tests.support import tiny_models
from tests.support.config_fields import assert_read_or_refused
from tests.support.grid import Layout, check_on_ranks
from tests.support.published import SIZES, Published, model_of

# Without a padding token, whose row of the embedding gets no gradient in transformers.
COMMON = {**SIZES, "head_dim": 10, "rms_norm_eps": 1e-3, "pad_token_id": None}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FIELDS: dict[str, dict[str, Any]] = {
    "smollm3": {
        **{"no_rope_layers": [1, 0, 1, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        **{"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
    },
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 3},
}
# With a list of layers transformers does not read the pattern that the list was made of.
UNREAD = ("no_rope_layer_interval", "sliding_window_pattern")


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    published = Published(tmp_path, kind, COMMON | FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_way_back()
    assert_read_or_refused(published.raw, UNREAD)


def test_exaone4_without_windows_has_positions_in_all_layers(tmp_path: Path) -> None:
    fields = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    Published(tmp_path, "exaone4", COMMON | fields).check_logits_and_gradients()


@pytest.mark.parametrize("family", [SMOLLM3, EXAONE4], ids=lambda family: family.name)
def test_its_layers_train_as_in_one_process(family: Any) -> None:
    model = tiny_models.small(family.name, 48, 4, 76, num_key_value_heads=2, head_dim=10, initializer_range=0.1)
    model = replace(model, sliding_window=5, layer_types=tuple(MIXED))
    if family is SMOLLM3:
        model = replace(model, no_rope_layers=(1, 0, 1, 0))
    check_on_ranks(Layout(model, tp=2, pp=2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* should be a list"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ("smollm3", {"sliding_window": 5, "layer_types": MIXED}, "but there is no sliding_window"),
        ("exaone4", {"sliding_window": None}, "layer_types is missing"),
        ("exaone4", {"sliding_window_pattern": "LLG"}, "layer_types is missing"),
    ],
)
def test_what_they_do_not_compute_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of({"model_type": kind, **COMMON, **changes})
