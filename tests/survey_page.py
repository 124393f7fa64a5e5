"""Writes the table of docs/survey.md: python -m tests.survey_page

It makes a small random model of each of 70 model types with transformers, which it needs, in about two minutes.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from megapar_models.registry import FAMILIES

from tests.support.survey import SURVEYED, Outcome, outcome

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/survey.md"
BEGIN = "<!-- what follows is written by python -m tests.survey_page -->"


def family_of(model_type: str) -> str:
    """The family that has a model type, as a cell."""
    for name, family in FAMILIES.items():
        if family.hugging_face and model_type in family.hugging_face.model_types:
            return f"`{name}`"
    return ""


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A sum, and a row for each model type."""
    counted = Counter(found.result for found in outcomes.values())
    total = ", ".join(f"{counted[result]} {result}" for result in ("trains", "refused", "WRONG"))
    rows = [f"| `{name}` | {family_of(name)} | {found.result} | {found.why} |" for name, found in outcomes.items()]
    head = [
        f"Of {len(outcomes)} model types: {total}.",
        "",
        "| model type | family | result | why |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The whole page: what a person wrote, then the table."""
    written, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN}")
    return f"{written}{BEGIN}\n\n{table(outcomes)}"


def survey() -> dict[str, Outcome]:
    """The outcome of each model type."""
    outcomes = {}
    for number, name in enumerate(SURVEYED, 1):
        with TemporaryDirectory() as folder:
            outcomes[name] = outcome(name, Path(folder))
        print(f"{number}/{len(SURVEYED)} {name}: {outcomes[name].result} {outcomes[name].why}", file=sys.stderr)
    return outcomes


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    PAGE.write_text(page(survey()))
    print(f"wrote {PAGE}")
