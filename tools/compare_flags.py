"""Write the tables of other frameworks' flags into docs/comparison.md, from tools/megapar_tools/migrate/flags."""

import sys
from pathlib import Path

from megapar_tools.migrate.rows import OtherFlag
from megapar_tools.migrate.table import SOURCES, TABLE

PAGE = Path(__file__).resolve().parents[1] / "docs/comparison.md"
BEGIN = "<!-- what follows is written by tools/compare_flags.py -->"
DASHED = ("Megatron-LM", "torchrun")  # their rows are flags; those of the others are keys and fields
WITHOUT_OPTION = {
    "always": "Nothing to set, because megapar always does so or does not need it",
    "lacking": "No counterpart, and what there is instead",
}
MANY = 12  # choices; more of them are only the model types, which docs/families.md lists


def tables() -> str:
    """Return the sections of all frameworks as Markdown."""
    return "\n".join(section(framework) for framework in TABLE)


def section(framework: str) -> str:
    """Return the framework's heading and commit, a table of flags with an option, and lists of flags without one."""
    source = SOURCES[framework]
    tree = f"{source.address}/tree/{source.state}"
    named = f"release {source.state}" if source.state.startswith("v") else f"commit {source.state[:7]} of {source.date}"
    head = [f"### {framework}", "", f"As of [{named}]({tree}).", "", "| theirs | megapar | value |", "|---|---|---|"]
    rows = [f"| {flags} | `--{option}` | {value} |" for (option, value), flags in _grouped(framework, "").items()]
    for relation, words in WITHOUT_OPTION.items():
        found = _grouped(framework, relation)
        if found:
            rows += ["", f"{words}:", "", *(f"- {flags}: {reason}" for (_, reason), flags in found.items())]
    return "\n".join([*head, *rows, ""])


def _grouped(framework: str, relation: str) -> dict[tuple[str, str], str]:
    """Return the flags by option and value. Flags with the same option and value are together.

    `relation` is one of WITHOUT_OPTION, whose flags have a reason for a value; "" takes all flags with an option.
    """
    dashes = "--" if framework in DASHED else ""
    names: dict[tuple[str, str], list[str]] = {}
    for row in TABLE[framework]:
        if row.relation == relation or not (relation or row.relation in WITHOUT_OPTION):
            values = (
                f" ({', '.join(f'`{value}`' for value in row.choices)} alone)"
                if row.relation == "always" and row.choices
                else ""
            )
            key = ("", row.note) if relation else (row.option, value_in_words(row))
            names.setdefault(key, []).append(f"`{dashes}{row.name}`{values}")
    return {key: ", ".join(flags) for key, flags in names.items()}


def value_in_words(row: OtherFlag) -> str:
    """Return what the option of megapar is for a value of the flag."""
    note = f"; {row.note}" if row.note else ""
    if row.relation == "computed":
        return row.note
    if row.relation == "same":
        return f"same{note}"
    if row.relation == "sets":
        return f"`{row.ours}`{note}"
    if len(row.choices) > MANY:
        return f"by model type: [Families](families.md){note}"
    theirs: dict[str, list[str]] = {}
    for name, ours in row.choices.items():
        theirs.setdefault("same" if ours == name else f"`{ours}`", []).append(f"`{name}`")
    groups = [f"{ours} for {', '.join(names)}" for ours, names in theirs.items()]
    return f"{'; '.join(groups)}{note}"


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
