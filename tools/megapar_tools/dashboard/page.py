"""One self-contained HTML page of runs: a file that opens without a network, or what the dashboard serves.

The charts are drawn by uPlot (MIT), whose file lies beside this one.
"""

import json
import re
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megapar.base.errors import storing
from megapar.system.atomic_files import replace_file
from megapar_tools.dashboard.record import RunFolder
from megapar_tools.trace.colors import AXES, CHUNKS, OTHER_AXIS, PARTS

FILE = "report.html"
POINTS = 1200  # of a curve
_HERE = Path(__file__).parent


def html(title: str, runs: Sequence[dict[str, Any]], details: Sequence[dict[str, Any]], *, live: bool) -> str:
    """The page of `runs` (`RunFolder.record`) and their `details`. If it is `live`, it asks for newer data."""
    # A run's files may hold anything. Only "<" could end a script element, and JSON has it in strings alone.
    shown = {"live": live, "shades": [*PARTS.values(), *chain(*CHUNKS.values())], "runs": runs, "details": details}
    data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")
    parts = {"title": title.replace("&", "&amp;").replace("<", "&lt;"), "data": data, "colors": _colors()}

    def part(found: re.Match[str]) -> str:
        name = found[1]
        return parts[name] if name in parts else (_HERE / name).read_text(encoding="utf-8")

    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{\{([\w.]+)\}\}", part, (_HERE / "page.html").read_text(encoding="utf-8"))


def _colors() -> str:
    """The colors of parts and axes as CSS, light and dark."""
    shades = {**PARTS, **AXES, "axis": OTHER_AXIS}
    names = {re.sub(r"\W", "-", name): shade for name, shade in shades.items()}
    light, dark = ("".join(f"--of-{name}:{shade[of]};" for name, shade in names.items()) for of in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run folder, and return its path. Raises StorageError if it cannot be written."""
    run = RunFolder(run_dir)
    details = run.details()
    record = run.record(time.time(), POINTS)
    path = run_dir / FILE
    text = html(f"{record['name']}: report", [record], [details], live=False)
    with storing(path):
        replace_file(path, text.encode())
    return path
