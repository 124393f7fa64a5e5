"""StarCoder2 against transformers, and in a layout against one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapar.errors import ConfigError
from tests.support import tiny_models
from tests.support.config_fields import assert_read_or_refused
from tests.support.grid import Layout, check_on_ranks
from tests.support.published import SIZES, Published, model_of

COMMON = {**SIZES, "head_dim": 10, "norm_epsilon": 1e-3, "sliding_window": 5}


@pytest.mark.parametrize("biased", [True, False])
def test_it_computes_what_transformers_does(biased: bool, tmp_path: Path) -> None:
    published = Published(tmp_path, "starcoder2", {**COMMON, "use_bias": biased, "bos_token_id": 0, "eos_token_id": 0})
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_way_back()
    assert_read_or_refused(published.raw, ("attention_dropout", "residual_dropout", "embedding_dropout"))


def test_its_layers_train_as_in_one_process() -> None:
    model = tiny_models.small("starcoder2", 48, 4, 76, num_key_value_heads=2, head_dim=10, initializer_range=0.1)
    check_on_ranks(Layout(replace(model, sliding_window=5), tp=2, pp=2, sequence_parallel=True))


def test_an_activation_that_it_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act='relu' is not supported"):
        model_of({"model_type": "starcoder2", **COMMON, "hidden_act": "relu"})
