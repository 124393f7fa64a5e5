"""tools/plot_schedule.py: what it prints, what it draws, and a run beside its simulation."""

import json
import sys
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from megapar_tools.trace import colors, timeline

from megapar.pipeline.actions import Event, show
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import SCHEDULES, make
from megapar.pipeline.simulation import simulate
from megapar.pipeline.zero_bubble import Durations
from tests.support.profiles import write_profile
from tools import plot_schedule


def run(monkeypatch: pytest.MonkeyPatch, *flags: object) -> int:
    """The exit code of the tool with these flags."""
    monkeypatch.setattr(sys, "argv", ["plot_schedule.py", *map(str, flags)])
    try:
        plot_schedule.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def test_it_prints_the_orders_and_what_they_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "zb-h1", "--pp", 3, "--microbatches", 4) == 0
    out = capsys.readouterr().out
    assert show(make("zb-h1", 3, 1, 4)) in out
    assert "zb-h1: 3 ranks, 3 stages: 14.3% idle in 14 times of --forward" in out
    assert "keeps: 3 3 3" in out
    assert run(monkeypatch, "zb-h1", "--pp", 3, "--microbatches", 4, "--memory", 1) == 0
    assert "keeps: 1 1 1" in capsys.readouterr().out


def test_an_order_is_made_for_other_times_than_are_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = SCHEDULES["zb-v"].within(durations=Durations(1, 1.3, 0.7))
    shown = []
    for flags, schedule in (((), "zb-v"), (("--made_for", "1,1.3,0.7"), known)):
        orders = make(schedule, 3, 2, 3)
        bubble = simulate(lower(orders, 6), 0.5, (1 + 2.5) / 2, weights=2.5 / 2).bubble
        assert run(monkeypatch, "zb-v", "--pp", 3, "--microbatches", 3, "--weights", 2.5, *flags) == 0
        out = capsys.readouterr().out
        assert show(orders) in out
        assert f"{bubble:.1%} idle" in out
        shown.append(show(orders))
    assert shown[0] != shown[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("zb-v", "--vpp", 3), "--vpp 3: zb-v needs 2, which 0 means"),
        (("1f1b", "--memory", 2), "--memory 2: only zb-h1,"),
        (("1f1b", "--made_for", "1,1,1"), "--made_for 1,1,1: only zb-h1,"),
        (("zb-v", "--made_for", "1,1"), "--made_for 1,1: must be three times, of F, I and W, such as 1,1.3,0.7"),
        (("zb-v", "--made_for", "0,1,1"), "--made_for 0,1,1: must be three times"),
        (("1f1b", "--out", "a.bmp"), "--out a.bmp: the name must end in .png, .svg, .json"),
        (("zigzag",), "parallel.schedule=zigzag: unknown"),
    ],
)
def test_what_it_cannot_draw_ends_with_2(
    flags: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *flags) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_profile_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--run", tmp_path) == 3
    assert "--log.profile" in capsys.readouterr().err


def test_traces_and_pictures_hold_every_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("a.json", "a.svg", "a.png")]
    assert run(monkeypatch, "zb-v", "--pp", 2, "--microbatches", 3, "--out", *files) == 0
    rows = json.loads(files[0].read_text())["traceEvents"]
    actions = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert set(actions) == {str(action) for order in make("zb-v", 2, 2, 3) for action in order}
    assert actions["0F0"]["ts"] == 0
    assert actions["0F0"]["dur"] == pytest.approx(500)  # half of a rank's time, a millisecond, in microseconds
    assert actions["1F0"]["ts"] == pytest.approx(500)
    assert actions["1W2"]["tid"] == 1
    assert all(file.stat().st_size > 1000 for file in files)


def test_halves_of_a_backward_have_colors_of_their_own(tmp_path: Path) -> None:
    """The areas of the colors are in proportion to time."""
    result = simulate(lower(make("zb-h1", 4, 1, 8), 4), 1, 2.5, weights=1.5)
    timeline.draw(result.events, tmp_path / "timeline.png", "zb-h1", "forwards")
    pixels = matplotlib.image.imread(tmp_path / "timeline.png")[..., :3]
    area = {}
    for kind in "FIW":
        color = np.array(matplotlib.colors.to_rgb(colors.CHUNKS[kind][0].light))
        area[kind] = int((np.abs(pixels - color).max(-1) < 0.01).sum())
    assert area["I"] / area["F"] == pytest.approx(1, rel=0.1)
    assert area["W"] / area["F"] == pytest.approx(1.5, rel=0.1)


def test_a_run_is_simulated_with_its_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timeline itself simulated, with a pause in the middle: without it both are the same."""
    forward = [1.0, 2.0, 1.5, 1.0]
    backward = [2 * cost for cost in forward]
    for name in ("zb-v", "dualpipe-v"):
        plans = lower(make(name, 2, 2, 4), 4)
        exact = simulate(plans, forward, backward, weights=[0.4 * cost for cost in forward])
        orders, again = plot_schedule.as_measured(exact.events)
        assert orders == make(name, 2, 2, 4)
        assert again.makespan == pytest.approx(exact.makespan)

    later = [e for e in exact.events if e.start > 9]
    paused = [e for e in exact.events if e not in later]
    paused += [Event(e.rank, e.action, e.start + 5, e.end + 5) for e in later]
    write_profile(tmp_path, paused)
    assert run(monkeypatch, "--run", tmp_path, "--out", tmp_path / "both.json", tmp_path / "both.png") == 0
    out = capsys.readouterr().out
    assert f"measured: {1 - 3 * sum(forward) * 4 / (2 * (exact.makespan + 5)):.1%} idle" in out
    assert f"simulated with its median times: {exact.bubble:.1%} idle" in out
    assert {row["pid"] for row in json.loads((tmp_path / "both.json").read_text())["traceEvents"]} == {0, 1}
