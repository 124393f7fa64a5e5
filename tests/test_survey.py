"""docs/survey.md: each causal model type of transformers trains here as there, or is refused with a reason."""

from pathlib import Path

import pytest
from megapar_models.families.cohere import CohereStage
from megapar_models.layer_kind import Ends
from megapar_models.registry import FAMILIES

from tests import survey_page
from tests.support.model_types import TYPES
from tests.support.survey import MOST_WORKED_ON, causal_types, outcome

ROWS = survey_page.rows()
STALE = "run python -m tests.survey_page, and look at what changed"


def test_the_page_has_each_causal_model_type_once() -> None:
    text = survey_page.PAGE.read_text()
    assert sorted(ROWS) == causal_types(), STALE
    assert text.count("\n| `") == len(ROWS)
    assert text == survey_page.page(ROWS), STALE
    assert len(MOST_WORKED_ON) == 25


def test_no_model_type_is_wrong_and_each_has_a_reason() -> None:
    assert not [name for name, row in ROWS.items() if row.result == "WRONG"]
    assert not [name for name, row in ROWS.items() if not row.why]


def test_the_page_names_families_that_there_are() -> None:
    named = {name: row.why.partition("family `")[2].partition("`")[0] for name, row in ROWS.items()}
    trained = {name: family for name, family in named.items() if ROWS[name].result == "trains"}
    assert {*trained.values()} <= {*FAMILIES}


def test_model_types_with_rows_of_their_own_train() -> None:
    """These are compared with transformers in every field by tests/test_model_types.py."""
    types = {case.model_type for case in TYPES.values()}
    assert not [name for name in types & ROWS.keys() if ROWS[name].result != "trains"], STALE


LANE = ("bert", "deepseek_v3", "emu3", "falcon_mamba", "gemma3")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in LANE else [pytest.mark.slow]) for name in ROWS]
)
def test_a_row_of_the_page_is_what_becomes_of_a_model(model_type: str, tmp_path: Path) -> None:
    assert outcome(model_type, tmp_path) == ROWS[model_type], STALE


def test_a_rule_that_is_left_out_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CohereStage, "ends_of", classmethod(lambda cls, model: Ends()))
    found = outcome("cohere", tmp_path)
    assert found.result == "WRONG"
    assert found.why.startswith("logits differ by ")
