"""Each family against a tiny random model of transformers: logits, gradients and every field of config.json."""

from pathlib import Path

import pytest

from tests.support import family_checks as checks
from tests.support.hugging_face import Case
from tests.support.sweeps import slow_but

CASES = [
    Case("qwen2", {"rms_norm_eps": 1e-3, "head_dim": 10, "num_hidden_layers": 4}),
    Case("gpt2", {"layer_norm_epsilon": 1e-3, "n_layer": 4}),
    Case("qwen3", {"rms_norm_eps": 1e-3, "head_dim": 10}),
    Case("qwen3_moe", {"rms_norm_eps": 1e-3, "head_dim": 10, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_gradients_and_tensors_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    pair = checks.converted(tmp_path, case)
    checks.assert_one_dimensional_tensors_differ(pair)
    checks.assert_logits(pair)
    checks.assert_round_trip(pair, tmp_path)
    checks.assert_gradients(pair, tmp_path)


@pytest.mark.parametrize("case", slow_but([0], CASES), ids=str)
def test_every_field_of_a_config_is_read_or_refused(case: Case, tmp_path: Path) -> None:
    outcomes = checks.assert_every_field_is_read(checks.converted(tmp_path, case), tmp_path)
    assert {"refused", "changed"} <= set(outcomes.values())
