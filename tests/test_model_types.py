"""Every row of the table of model types: against transformers, and in layouts against one process."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from megapar_models.registry import FAMILIES

from megapar.base.errors import ConfigError
from tests import families_page
from tests.support.grid import Layout, check_on_ranks
from tests.support.model_types import FORMS, TYPES, ModelTypeCase
from tests.support.published import Published, config_of, model_of, published_model, refusal
from tests.support.sweeps import slow_but

ROWS = list(TYPES)


def rows_but(quick: Iterable[str]) -> list[Any]:
    """All rows, for pytest.mark.parametrize. Those that are not `quick` are slow."""
    return slow_but([ROWS.index(name) for name in quick], ROWS)


def published(case: ModelTypeCase, folder: Path) -> Published:
    return Published(folder, case.model_type, case.fields)


def layout(case: ModelTypeCase, sizes: Any) -> Layout:
    return Layout(published_model(case.model_type, case.fields), **sizes)


def test_every_model_type_has_a_row() -> None:
    known = {  # and tests/test_convert_multimodal.py has the text of multimodal files
        name
        for family in FAMILIES.values()
        if family.hugging_face is not None
        for name in family.hugging_face.model_types
    }
    # A file of Kimi K2 is one of DeepSeek-V3 under another name, which transformers does not know.
    assert known - {"kimi_k2"} == {case.model_type for case in TYPES.values()}


# The first row of each model type; "qwen3, windows" and the like vary it.
FIRST = [
    name for name in ROWS if TYPES[name].model_type not in {TYPES[row].model_type for row in ROWS[: ROWS.index(name)]}
]


@pytest.mark.parametrize("name", rows_but(FIRST[::8]))
def test_it_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = published(TYPES[name], tmp_path)
    model.check_logits_and_gradients()
    model.check_packed()
    model.check_fields(TYPES[name].changes, TYPES[name].refused)
    model.check_way_back(TYPES[name].written_as, TYPES[name].saved_as)


@pytest.mark.parametrize("name", rows_but(["gpt2", "deepseek_v3"]))
def test_steps_of_adamw_are_those_of_torch(name: str, tmp_path: Path) -> None:
    published(TYPES[name], tmp_path).check_adamw()


@pytest.mark.parametrize("name", rows_but(["gemma2"]))
def test_bf16_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    published(TYPES[name], tmp_path).check_bf16()


@pytest.mark.parametrize("name", rows_but(["llama"]))
def test_every_field_is_read_or_refused(name: str, tmp_path: Path) -> None:
    published(TYPES[name], tmp_path).check_every_field(TYPES[name].unread, TYPES[name].unlike)


@pytest.mark.parametrize("name", rows_but(FIRST))
def test_an_absent_field_is_what_transformers_takes_for_it(name: str) -> None:
    """Or the line says that it is missing."""
    case = TYPES[name]
    raw = config_of(case.model_type, case.fields)
    for field in sorted(raw.keys() - case.fields.keys() - {"model_type"}):
        rest = {name: value for name, value in raw.items() if name != field}
        filled = config_of(case.model_type, {name: rest[name] for name in rest.keys() - {"model_type"}})
        said = refusal(rest)
        if "is missing" in said:  # under one of its names
            continue
        assert said == refusal(filled), field
        assert said or model_of(rest) == model_of(filled), field


@pytest.mark.parametrize("name", ROWS)
def test_a_form_is_refused_where_the_table_says_so(name: str) -> None:
    case = TYPES[name]
    assert case.refuses.keys() <= {*case.forms()}
    assert case.has_experts == (published_model(case.model_type, case.fields).experts is not None)
    for form in case.forms():
        if form in case.refuses:
            with pytest.raises(ConfigError, match=case.refuses[form]):
                layout(case, FORMS[form]).config()
        else:
            layout(case, FORMS[form]).config()


# Rules of each sort, in layouts of each sort.
IN_LAYOUTS = (
    *("qwen3, windows", "gemma3_text", "granitemoeshared"),
    *("starcoder2", "gpt_oss", "deepseek_v3, whole queries"),
)


@pytest.mark.parametrize("name", rows_but(["gemma3_text", "deepseek_v3, whole queries"]))
def test_it_trains_in_its_layout_as_in_one_process(name: str) -> None:
    check_on_ranks(layout(TYPES[name], TYPES[name].layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name, case in TYPES.items() for form in case.forms() if form not in case.refuses],
)
def test_it_trains_in_every_form_as_in_one_process(name: str, form: str) -> None:
    check_on_ranks(layout(TYPES[name], FORMS[form]))


# docs/families.md


def test_the_page_of_families_has_the_table() -> None:
    assert families_page.PAGE.read_text() == families_page.page(), "run python -m tests.families_page"


def test_every_field_of_a_rule_is_on_the_page() -> None:
    for rule, words in families_page.IN_WORDS.items():
        optional = {field.name for field in fields(rule) if field.default is not MISSING}
        assert words.keys() == optional, rule
