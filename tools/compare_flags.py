"""Write the tables of other frameworks' flags into docs/comparison.md, from tools/megapar_tools/migrate/flags."""

import sys
from pathlib import Path

from megapar_tools.migrate.rows import OtherFlag
from megapar_tools.migrate.table import SOURCES, TABLE

PAGE = Path(__file__).resolve().parents[1] / "docs/comparison.md"
BEGIN = "<!-- what follows is written by tools/compare_flags.py -->"
DASHED = ("Megatron-LM", "torchrun")  # their rows are flags; those of the others are keys and fields
MANY = 12  # choices; more of them are only the model types, which docs/families.md lists


def tables() -> str:
    """Return the sections of all frameworks as Markdown."""
    return "\n".join(section(framework) for framework in TABLE)


def section(framework: str) -> str:
    """Return the framework's heading, commit and table. Flags with one counterpart and one note share a row."""
    source = SOURCES[framework]
    tree = f"{source.address}/tree/{source.state}"
    named = f"release {source.state}" if source.state.startswith("v") else f"commit {source.state[:7]} of {source.date}"
    dashes = "--" if framework in DASHED else ""
    names: dict[tuple[str, str], list[str]] = {}
    for row in TABLE[framework]:
        names.setdefault(counterpart(row), []).append(f"`{dashes}{row.name}`")
    rows = [f"| {' '.join(flags)} | {option} | {value} |" for (option, value), flags in names.items()]
    head = [f"### {framework}", "", f"As of [{named}]({tree}).", "", "| theirs | megapar | value |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def counterpart(row: OtherFlag) -> tuple[str, str]:
    """Return the second and third cell of a flag's row: megapar's option, and the value or the reason."""
    option = f"`--{row.option}`"
    note = f"; {row.note}" if row.note else ""
    if row.relation == "lacking":
        return "none", row.note
    if row.relation == "always":
        values = f" for {' and '.join(f'`{value}`' for value in row.choices)}, the only value" if row.choices else ""
        return f"nothing to set{values}", row.note
    if row.relation == "computed":
        return option, row.note
    if row.relation == "same":
        return option, f"same{note}"
    if row.relation == "sets":
        return option, f"`{row.ours}`{note}"
    if len(row.choices) > MANY:
        return option, f"by model type: [Families](families.md){note}"
    theirs: dict[str, list[str]] = {}
    for name, ours in row.choices.items():
        theirs.setdefault("same" if ours == name else f"`{ours}`", []).append(f"`{name}`")
    groups = [f"{ours} for {', '.join(names)}" for ours, names in theirs.items()]
    return option, f"{'; '.join(groups)}{note}"


def page() -> str:
    """Return the whole page: the text above BEGIN as written by hand, then the tables."""
    written, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN}")
    return f"{written}{BEGIN}\n\n{tables()}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
