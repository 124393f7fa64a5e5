"""Writes the table of public jobs into docs/coming-over.md: how many of their options are carried over.

tools/public_jobs.json has the options of each job, with the repository, path and commit that they are from. Flags of a
command stand there with their words; a ds_config and the TOML of torchtitan as tables.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megapar_models.registry import FOR_OPTIONS, presets, validate
from megapar_tools.migrate import sources
from megapar_tools.migrate.account import Account, account_of
from megapar_tools.migrate.carry import Option, move
from megapar_tools.migrate.finish import with_model

JOBS = Path(__file__).parent / "public_jobs.json"
PAGE = Path(__file__).parents[1] / "docs/coming-over.md"
BEGIN = "<!-- what follows is written by tools/coming_over.py -->"


def jobs() -> list[dict[str, Any]]:
    """The public jobs."""
    found: list[dict[str, Any]] = json.loads(JOBS.read_text())
    return found


def account(job: dict[str, Any]) -> Account:
    """Carry a public job over."""
    names = {"from_megatron": ("Megatron-LM",), "from_deepspeed": ("Hugging Face", "DeepSpeed")}
    frameworks = names.get(job["tool"], ("torchtitan",))
    words = [word for name, values in job.get("flags", {}).items() for word in (f"--{name}", *values)]
    options: list[Option] = sources.options_of_table(job.get("ds_config", {}), "DeepSpeed")
    options += sources.options_of_table(job.get("table", {}), "torchtitan")
    options += sources.options_of_words(words, frameworks)
    moved = move(
        options,
        FOR_OPTIONS,
        world=job["world_size"],
        samples=job.get("samples", 0),
        without_defaults=("DeepSpeed",),
        dashes=lambda framework: "--" if framework in ("Megatron-LM", "Hugging Face") else "",
    )
    if job["tool"] == "from_deepspeed":
        with_model(moved, job["model"], "model_name_or_path")
    return account_of(moved, FOR_OPTIONS, presets(), validate, job["world_size"])


def tables() -> str:
    """The table, and the options of each job that were left."""
    rows = [
        "| job | options | set here | nothing to set | no counterpart | carried over |",
        "|---|---|---|---|---|---|",
    ]
    lists, total, carried = [], 0, 0
    for job in jobs():
        found = account(job)
        moved = found.moved
        left = [line for line in moved.left if not line.is_default]
        nothing = sum(line.here.startswith("nothing to set") for line in moved.carried)
        source = f"{job['repository']}/blob/{job['commit']}/{job['path'].split(',')[0]}"
        counts = f"{moved.options} | {moved.options - nothing - len(left)} | {nothing} | {len(left)}"
        rows.append(f"| [{job['name']}]({source}) | {counts} | {found.percent:.0f}% |")
        names = ", ".join(f"`{line.theirs.lstrip('-')}`" for line in left)
        defaults = ", ".join(f"`{line.theirs.lstrip('-')}`" for line in moved.left if line.is_default)
        lists.append(f"- {job['name']}: {names}" + (f"; of defaults there {defaults}" if defaults else "") + ".")
        total, carried = total + moved.options, carried + moved.options - len(left)
    rows.append(f"| all | {total} | | | {total - carried} | {100 * carried / total:.0f}% |")
    return "\n".join([*rows, "", "What was not carried over:", "", *lists, ""])


def page() -> str:
    """The whole page: what a person wrote, then the table."""
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
