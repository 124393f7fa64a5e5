"""Writes the table of docs/survey.md: python -m tests.survey_page

It makes a small random model of each of 70 model types with transformers, which it needs, in about two minutes.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.survey import SURVEYED, Outcome, outcome

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/survey.md"
BEGIN = "<!-- what follows is written by python -m tests.survey_page -->"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return a sum, the model types that train, and a row with the reason for each other model type."""
    counted = Counter(found.result for found in outcomes.values())
    total = ", ".join(f"{counted[result]} {result}" for result in ("trains", "refused", "WRONG"))
    trained = ", ".join(f"`{name}`" for name, found in outcomes.items() if found.result == "trains")
    rows = [f"| `{name}` | {' | '.join(found)} |" for name, found in outcomes.items() if found.result != "trains"]
    head = [
        f"Of {len(outcomes)} model types: {total}.",
        "",
        f"These train, each by the family that [Families](families.md) names: {trained}.",
        "",
        "| model type | result | why |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def page(outcomes: Mapping[str, Outcome]) -> str:
    """Return the whole page: the text above BEGIN as written by hand, then the table."""
    written, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN}")
    return f"{written}{BEGIN}\n\n{table(outcomes)}"


def survey() -> dict[str, Outcome]:
    """Return the outcome of each model type."""
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
