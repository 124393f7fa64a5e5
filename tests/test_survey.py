"""docs/survey.md: 70 model types of transformers train here as there, or are refused with a reason."""

import re
from pathlib import Path

import pytest
from megapar_models.families.cohere import CohereStage
from megapar_models.layer_kind import Ends

from tests import survey_page
from tests.support.survey import SURVEYED, outcome

TEXT = survey_page.PAGE.read_text()
TRAINED = re.findall(r"^These train, .*$", TEXT, re.MULTILINE)
ROWS = dict.fromkeys(re.findall(r"`(\w+)`", TRAINED[0]), "trains | ")
ROWS |= dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT, re.MULTILINE))


def test_the_page_has_each_model_type_and_none_is_wrong() -> None:
    assert len(SURVEYED) == len({*SURVEYED}) == 70
    assert sorted(ROWS) == [*SURVEYED]
    results = [row.split(" | ")[0] for row in ROWS.values()]
    counts = {result: results.count(result) for result in ("trains", "refused", "WRONG")}
    assert sum(counts.values()) == 70
    assert counts["WRONG"] == 0
    assert counts["trains"] >= 36
    counted = ", ".join(f"{number} {result}" for result, number in counts.items())
    assert f"Of 70 model types: {counted}." in TEXT
    assert all(row.partition(" | ")[2] for row in ROWS.values() if row.startswith("refused")), "without a reason"


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "falcon_mamba", "internlm3"])
def test_rows_of_the_page_are_what_becomes_of_a_model(model_type: str, tmp_path: Path) -> None:
    assert " | ".join(outcome(model_type, tmp_path)) == ROWS[model_type]


def test_a_rule_that_is_left_out_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CohereStage, "ends_of", classmethod(lambda cls, model: Ends()))
    found = outcome("cohere", tmp_path)
    assert found.result == "WRONG"
    assert found.why.startswith("logits differ by ")


@pytest.mark.slow
def test_the_page_is_that_of_the_code() -> None:
    stale = "run python -m tests.survey_page, and look at what changed"
    assert survey_page.page(survey_page.survey()) == survey_page.PAGE.read_text(), stale
