"""Writes the tables of docs/survey.md: python -m tests.survey_page

It makes a small random model of each causal model type with transformers, which it needs, in about two minutes.
"""

import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from megapar_models.convert.multimodal import MULTIMODAL

from tests.support.model_types import TYPES
from tests.support.survey import MOST_WORKED_ON, Outcome, Result, causal_types, outcome

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/survey.md"
BEGIN = "<!-- what follows is written by python -m tests.survey_page -->"


def tables(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the lines of all counts and tables."""
    yield counted(outcomes)
    yield ""
    yield "## Decoders of text"
    yield from table({name: found for name, found in outcomes.items() if found.result != "no text"})
    yield ""
    yield "## No decoders of text alone"
    yield from table({name: found for name, found in outcomes.items() if found.result == "no text"})
    yield ""
    yield "## The most worked on"
    yield ""
    groups = [Counter(result_of(name, outcomes) for name in names) for names in MOST_WORKED_ON]
    whole = sum(group.keys() == {"trains"} for group in groups)
    part = sum(group["trains"] > 0 for group in groups) - whole
    yield f"Of the {len(groups)} types most worked on: {whole} train, and of {part} more one of several types trains."
    yield ""
    yield "| rank | model types |"
    yield "|---|---|"
    for rank, names in enumerate(MOST_WORKED_ON, 1):
        yield f"| {rank} | {', '.join(f'`{name}` {result_of(name, outcomes)}' for name in names)} |"


def counted(outcomes: Mapping[str, Outcome]) -> str:
    """The sentence that counts results."""
    results = Counter(found.result for found in outcomes.values())
    words = ", ".join(f"{results[result]} {result}" for result in get_args(Result))
    return f"Of {len(outcomes)} model types: {words}."


def result_of(model_type: str, outcomes: Mapping[str, Outcome]) -> str:
    """The result of a model type, which may be outside of transformers' list: then other classes judge its tests."""
    if model_type in outcomes:
        return outcomes[model_type].result
    judged = {case.model_type for case in TYPES.values()} | MULTIMODAL.keys()
    return "trains" if model_type in judged else "has no causal model"


def table(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield ""
    yield "| model type | result | why |"
    yield "|---|---|---|"
    yield from (f"| `{name}` | {' | '.join(found)} |" for name, found in outcomes.items())


def rows() -> dict[str, Outcome]:
    """The outcomes that the page has, by model type."""
    found = re.findall(r"^\| `(\S+)` \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: Outcome(result, why) for name, result, why in found}


def page(outcomes: Mapping[str, Outcome]) -> str:
    """Return the whole page: the text above BEGIN as written by hand, then the tables."""
    written, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN}")
    return "\n".join([f"{written}{BEGIN}", "", *tables(outcomes), ""])


def survey() -> dict[str, Outcome]:
    """Return the outcome of each model type."""
    outcomes = {}
    types = causal_types()
    for number, name in enumerate(types, 1):
        with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            outcomes[name] = outcome(name, Path(folder))
        print(f"{number}/{len(types)} {name}: {outcomes[name].result} {outcomes[name].why}", file=sys.stderr)
    return outcomes


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    PAGE.write_text(page(survey()))
    print(f"wrote {PAGE}")
