"""log.view: what a terminal shows below the lines of a run."""

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from megapar.observe.terminal import History, View
from tests.support.program import PRETRAIN, TINY


def test_a_history_shows_all_steps_in_the_width_that_there_is() -> None:
    history = History()
    for step in range(100_000):
        history.add(100_000 - step)
    drawn = history.drawn(16)
    assert drawn == "".join(sorted(drawn, reverse=True))
    assert (len(drawn), drawn[0], drawn[-1]) == (16, "█", "▁")
    assert len(history._means) < 512


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([2.0], "."), ([1.0, 8.0], ".@"), ([3.0] * 3, "..."), ([1.0, math.nan, 8.0, math.inf], ".!@!")],
)
def test_short_and_odd_histories(values: list[float], drawn: str) -> None:
    history = History()
    for value in values:
        history.add(value)
    assert history.drawn(10, ".:-=+*#@") == drawn


def test_the_rows_say_how_far_how_good_and_how_fast() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=True, color_system=None)
    view = View(console, 250_000, 10)
    console.print(view.rows())
    assert "step 10/250000" in out.getvalue()
    line = {"step": 11, "loss": 2.5, "tokens_per_second": 51_234.5, "mfu": 0.412, "peak_memory_bytes": 3 * 2**29}
    view.step(line, 3_661.0)
    console.print(view.rows())
    shown = out.getvalue()
    for text in ("step 11/250000", "1:01:01 left", "2.5000", "51,234, mfu 41.2%", "1.50 GiB"):
        assert text in shown, shown


@pytest.mark.parametrize("view", ["live", "lines"])
def test_a_run_on_a_terminal(view: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, str(PRETRAIN), *TINY, "--train.steps", "3", "--log.view", view, "--log.no-tensorboard"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110"}
    run = subprocess.Popen(words, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([ours], [], [], 1)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the run has closed its end
                break
    assert run.wait(60) == 0, shown
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "step 3/3 | loss" in text
    assert ("tokens/s  " in text) == (view == "live")
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == (view == "live"), "the cursor is there again"
