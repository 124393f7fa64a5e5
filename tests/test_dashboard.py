"""report.html and tools/dashboard.py: what they show of a run folder, and what a hostile one can do to them."""

import http.client
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import unescape
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from megapar_tools.dashboard import server, words
from megapar_tools.dashboard.curves import Curve, Curves
from megapar_tools.dashboard.options import read_options
from megapar_tools.dashboard.page import html, write_report
from megapar_tools.dashboard.record import RunFolder
from megapar_tools.dashboard.server import Dashboard
from megapar_tools.trace import colors, profile

from megapar.base.errors import ConfigError, DataError
from megapar.base.grid import Grid
from megapar.system.atomic_files import as_json
from megapar.train.report_at_end import ReportAtEnd
from tests.support import program
from tools import report as report_tool
from tools import status

NOW = 1_000_000.0


def append(path: Path, *lines: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def data_of(page: str) -> Any:
    """What is in the page for its program."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


# Curves


def test_curves_read_on_where_they_were_and_anew_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = Curves(path)
    curves.update()
    assert curves.by_name == {}
    append(path, {"step": 1, "loss": 3.0, "step_seconds": 2.0, "comm_bytes": {"tp": 5}})
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    curves.update()
    assert {name: list(curve.values) for name, curve in curves.by_name.items()} == {
        "loss": [3.0],
        "step_seconds": [2.0],
        "comm_bytes/tp": [5.0],
    }
    path.write_bytes(path.read_bytes() + b'ss": 2.5, "step_seconds": 1.0, "data_seconds": 0.25}\n')
    append(path, {"step": 2, "validation_loss": 2.75}, {"step": 3, "loss": 2.25, "step_seconds": 1.0})
    curves.update()
    assert list(curves.by_name["loss"].values) == [3.0, 2.5, 2.25]
    assert list(curves.by_name["validation_loss"].steps) == [2]
    assert (curves.step_seconds, curves.data_seconds) == (4.0, 0.25)
    shorter = tmp_path / "shorter"
    append(
        shorter, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 7.0}, {"step": 3, "loss": 7.5}, {"step": 4, "loss": 1}
    )
    shorter.replace(path)  # as a run does that goes back to a checkpoint
    curves.update()
    assert list(curves.by_name["loss"].values) == [3.0, 7.0, 7.5, 1.0]
    assert curves.step_seconds == 0.0


def test_sums_over_steps_are_those_of_the_steps_that_the_run_still_has() -> None:
    """By hand: step 2 is computed twice, with 5 tokens and then with 7."""
    curve = Curve()
    for step, tokens in ((1, 3.0), (2, 5.0), (3, 1.0), (2, 7.0), (3, 2.0)):
        curve.add_to_sum(step, tokens)
    assert (list(curve.steps), list(curve.values)) == ([1, 2, 3], [3.0, 10.0, 12.0])


def test_what_all_axes_sent_is_a_curve_too(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", {"step": 1, "comm_bytes": {"tp": 5, "pp": 7}})
    curves = Curves(tmp_path / "metrics.jsonl")
    curves.update()
    assert list(curves.by_name["comm_bytes"].values) == [12.0]


def test_a_mixture_is_tables_of_loads_and_no_chart_for_each_layer(tmp_path: Path) -> None:
    """By hand: of 12 tokens of 4 experts the mean is 3."""
    steps = [{"step": step, "loss": 1.0, "expert_load": {"10": float(step), "2": 1.5}} for step in range(1, 1001)]
    append(tmp_path / "metrics.jsonl", *steps, {"step": 1000, "expert_counts": {"10": [0, 3, 3, 6], "2": [3] * 4}})
    record = RunFolder(tmp_path).record(NOW, 100)
    fullest, newest = record["experts"]["fullest"], record["experts"]["newest"]
    assert list(record["curves"]) == ["loss"]
    assert fullest["layers"] == newest["layers"] == ["2", "10"]
    assert (len(fullest["steps"]), fullest["steps"][:2], fullest["loads"][1][-1]) == (200, [1, 6], 1000.0)
    assert newest == {"layers": ["2", "10"], "loads": [[1.0] * 4, [0.0, 1.0, 1.0, 2.0]], "step": 1000}
    odd: list[Any] = [3, {"0": 5}, {"x": [1]}, {"0": []}, {"0": [-1, "a"]}, {"0": [10**400]}]
    for counts in odd:
        append(tmp_path / "metrics.jsonl", {"step": 1001, "loss": 1.0, "expert_counts": counts})
        again = RunFolder(tmp_path).record(NOW, 100)
        assert (again["error"], again["experts"]["newest"]) == ("", {}), counts


# Words


def test_every_event_of_the_documents_is_a_sentence_and_others_are_listed() -> None:
    table = (program.ROOT / "docs/run-folder.md").read_text().partition("## events.jsonl")[2].partition("## MFU")[0]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert len(names) == 13
    for name in names:  # also of a line that has no field
        assert re.fullmatch(r"[A-Z].*", words.tell_event({"event": name}))
        assert "_" not in words.tell_event({"event": name})
    assert words.tell_event({"event": "lunch", "time": 1.0, "step": 3}) == "lunch, step 3"
    layout = {"tp": 2, "pp": 1, "dp": 4, "etp": 0}
    start = {
        "event": "start",
        "attempt": 1,
        "step": 40,
        "tier": "shared",
        "world": 8,
        "layout": layout,
        "steps_lost": 1,
    }
    told = "Start number 2 from the checkpoint of step 40, with 8 ranks (tp 2 x dp 4); 1 step computed again."
    assert words.tell_event(start) == told
    assert words.tell_event({"event": "saved", "step": 4, "tier": "local", "seconds": 0.25}) == (
        "Step 4 is saved on the local disks; training waited 0.25 s."
    )
    fp8 = {"event": "fp8", "matrix": "layers.3.mlp.down", "what": "gradient", "first": 0.004, "now": 0.0231, "step": 9}
    assert words.tell_event({**fp8, "others": ["layers.2.mlp.down"]}) == (
        "FP8 loses more in gradient of layers.3.mlp.down: 2.31% flushed to zero, and 0.40% flushed to zero at the "
        "first watch; and in 1 other product, at step 9."
    )
    failed = {"event": "save_failed", "step": 4, "reason": "checkpoint of step 4 not saved: No space left on device"}
    assert words.tell_event(failed) == "Checkpoint of step 4 not saved: No space left on device."
    stopped = {"event": "exit", "code": 75, "step": 9, "reason": "SIGTERM"}
    assert words.tell_event(stopped) == "Ended after step 9 with exit code 75: SIGTERM."


def test_curves_have_words() -> None:
    names = ("validation_loss/code", "losses/router", "comm_bytes/tp", "my_own/thing")
    assert [words.name_metric(name) for name in names] == [
        "held-out loss, code",
        "router loss",
        "over tp",
        "my own, thing",
    ]


def test_options_are_read_with_their_sources() -> None:
    text = 'run_dir = "a"  # flag\n[a.b]\nx = 0  # default, here 4\ny = "#  # no"  # /tmp/of mine.toml\nz = true\n'
    assert read_options(text) == {
        "run_dir": ("a", "flag"),
        "a.b.x": ("0 → 4", "default"),
        "a.b.y": ("#  # no", "of mine.toml"),
        "a.b.z": ("true", ""),
    }
    with pytest.raises(DataError, match=r"config\.toml is no TOML"):
        read_options("x = ")


def test_each_part_and_each_axis_has_a_color_of_its_own() -> None:
    axes = set(Grid().positions(0))
    assert set(profile.PARTS) <= set(colors.PARTS)
    assert axes <= set(colors.AXES)
    for scheme in (0, 1):
        shades = [shade[scheme] for shade in (*(colors.PARTS[part] for part in profile.PARTS), *colors.AXES.values())]
        assert len(set(shades)) == len(shades)
    assert colors.find_axis("tp") == colors.AXES["tp"]
    assert colors.find_axis("own") == colors.OTHER_AXIS
    page = html("x", [], [], live=False)
    for name, shade in colors.AXES.items():
        assert f"--of-{name}:{shade.light};" in page
        assert f"--of-{name}:{shade.dark};" in page


def test_a_thinned_curve_keeps_its_peaks_its_ends_and_what_is_not_finite() -> None:
    curve = Curve()
    values = np.sin(np.arange(100_000) / 500)
    values[[12_345, 54_321, 77_777]] = 40.0, -30.0, np.nan
    for step, value in enumerate(values.tolist(), 1):
        curve.add(step, value)
    steps, kept = curve.thinned(0, 1 << 62, 500)
    assert len(steps) <= 500
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 100_000)
    assert {12_346, 54_322, 77_778} <= set(steps)
    assert np.array_equal(np.array(kept), values[np.array(steps) - 1], equal_nan=True)
    steps, kept = curve.thinned(1_000, 1_100, 500)
    assert steps == list(range(999, 1_102)), "all steps of a small part, and one beyond on either side"


# The page


def test_a_report_has_everything_in_it_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    flags = ("--launch.nproc", "2", "--parallel.pp", "2", "--log.profile", "3-4", "--train.memory_report")
    run = program.run(*flags, "--log.straggler_every", "8", "--train.steps", "9", cwd=tmp_path)
    assert run.code == 0, run.err
    page = (tmp_path / "run" / "report.html").read_text()
    for link in re.findall(r"""(?:src|href)=["']?([^"' >]+)""", page):
        raise AssertionError(f"the page asks for {link}")
    assert "{{" not in page
    found = data_of(page)
    (shown,), (details,) = found["runs"], found["details"]
    assert (found["live"], shown["name"], shown["status"]["state"], shown["status"]["step"]) == (
        False,
        "run",
        "done",
        9,
    )
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert shown["curves"]["loss"] == [list(range(1, 10)), [line["loss"] for line in lines if "loss" in line]]
    assert sum(shown["status"]["seconds"].values()) == pytest.approx(shown["status"]["wall_seconds"])
    assert shown["status"]["seconds"]["steps"] > 0
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())["bytes_by_rank"]
    assert details["peak_memory_bytes"] == [rank["measured"]["all"] for rank in memory]
    assert len(shown["ranks"]["compute_seconds"]) == len(shown["ranks"]["peak_memory_bytes"]) == 2
    assert [of["rank"] for of in details["profile"]] == [0, 1]
    assert [event["event"] for event in shown["events"]] == ["start", "saved", "exit"]
    assert details["options"]["model.family"] == ["llama", "tiny.toml"]
    assert details["options"]["parallel.dp"] == ["0 → 1", "default"]
    assert details["options"]["train.steps"] == ["9", "flag"]
    assert shown["sums"]["tokens"] == [list(range(1, 10)), [720.0 * step for step in range(1, 10)]]
    assert shown["words"]["comm_bytes/pp"] == "over pp"
    assert shown["events"][0]["text"] == "Start from initial weights, with 2 ranks (pp 2)."
    assert details["environment"]["kernels"]
    assert details["timeline"]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{page.js}}"


def test_a_hostile_folder_stays_data(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>run&{{data}}"
    run_dir.mkdir()
    append(run_dir / "metrics.jsonl", {"step": 1, "loss": 3.0, HOSTILE: 1.0, "grad_norm": float("nan")})
    append(run_dir / "events.jsonl", {"time": NOW, "event": "fault", "message": HOSTILE, "host": HOSTILE})
    (run_dir / "config.toml").write_bytes(HOSTILE.encode() + b"\xff")
    (run_dir / "environment.json").write_text("[" * 100_000)
    (run_dir / "ranks.json").write_text(json.dumps({"ranks": [{"host": HOSTILE}]}))
    page = write_report(run_dir).read_text()
    assert page.count("</script>") == 3
    assert "<img src=x" not in page
    assert unescape(re.findall("<title>(.*?)</title>", page)[0]) == "<b>run&{{data}}: report"
    (shown,), (details,) = data_of(page)["runs"], data_of(page)["details"]
    assert shown["curves"][HOSTILE] == [[1], [1.0]]
    assert shown["curves"]["grad_norm"] == [[1], [None]]
    assert details["ranks"] == [{"host": HOSTILE}]
    assert f"{run_dir}/environment.json is no JSON: " in shown["error"]
    assert "default-src 'none'" in page


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser: chromium")
def test_a_hostile_folder_does_not_stop_the_page_of_the_other_run(tmp_path: Path) -> None:
    """In a browser: names that are properties of every object, and markup."""
    folders = [tmp_path / "odd", tmp_path / "good"]
    names = ["__proto__", "constructor", "toString", HOSTILE, "expert_load", "losses", "comm_bytes"]
    for folder in folders:
        folder.mkdir()
    for step in (1, 2):
        append(folders[0] / "metrics.jsonl", {"step": step, "loss": 3.0, **dict.fromkeys(names, float(step))})
        append(folders[1] / "metrics.jsonl", {"step": step, "loss": 2.0})
    append(folders[0] / "events.jsonl", {"time": NOW, "event": "__proto__", "layout": {"__proto__": 2}, "x": HOSTILE})
    (folders[0] / "config.toml").write_text('__proto__ = "x"\nconstructor = 1\n')
    (folders[0] / "environment.json").write_text('{"versions": null, "commit": {}, "__proto__": [1]}')
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom")
    with served(*folders) as dashboard:
        command = ["chromium", *flags, "--virtual-time-budget=2000", dashboard.address]
        page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    shown = page.partition('id="runs"')[2].partition("<script")[0]
    assert shown.count('<div class="card chart">') >= 5, "charts of all names"
    assert "options that were set" in shown
    assert "starts, checkpoints, faults" in shown
    assert "<img" not in shown


def test_a_huge_folder_takes_bounded_memory_and_its_end_is_shown(tmp_path: Path) -> None:
    """10 GB in one line, then lines of a run; a million names; 1 GB of events. The files are holes on the disk."""
    for name, size in (("metrics.jsonl", 10 << 30), ("events.jsonl", 1 << 30)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(b"\n")
    append(tmp_path / "metrics.jsonl", {"step": 7, **{f"n{number}": 1.0 for number in range(20_000)}})
    append(tmp_path / "metrics.jsonl", {"step": 8, "loss": 3.0, "step_seconds": 1.0})
    append(tmp_path / "events.jsonl", {"time": NOW, "event": "start", "step": 0})
    program = (
        "import pathlib, resource, sys; from megapar_tools.dashboard.page import write_report;"
        "from megapar_tools.dashboard import curves; curves._MOST_BYTES = 1 << 26;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print(write_report(pathlib.Path(sys.argv[1])));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(ended.stdout.split()[1]) < 300 << 10, "KiB"
    (shown,) = data_of((tmp_path / "report.html").read_text())["runs"]
    assert "its first 10,67" in shown["error"]
    assert len(shown["curves"]) == 1000
    assert (shown["goodput"], [event["event"] for event in shown["events"]]) == (None, ["start"])


def test_links_lead_neither_into_a_page_nor_out_of_a_folder(tmp_path: Path) -> None:
    """Pages are passed on, and somebody else may have written the folder."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    secret = tmp_path / "secret"
    secret.write_text('{"key": "s3cret"}')
    for name in ("config.toml", "environment.json", "ranks.json", "memory.json", "report.html", "events.jsonl"):
        (run_dir / name).symlink_to(secret)
    append(run_dir / "metrics.jsonl", {"step": 1, "loss": 3.0})
    page = write_report(run_dir)
    assert "s3cret" not in page.read_text()
    assert not page.is_symlink()
    assert secret.read_text() == '{"key": "s3cret"}'


def test_an_unreadable_folder_says_so_on_the_page(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    record = RunFolder(tmp_path).record(NOW, 100)
    assert (record["status"]["state"], "is a FIFO" in record["error"]) == ("no run", True)
    assert RunFolder(tmp_path / "nowhere").record(NOW, 100)["error"] == ""


LONG = "1" * 400
ODD = {
    "memory.json": [
        '{"bytes_by_rank": [{}, 3]}',
        '{"bytes_by_rank": 5}',
        f'{{"bytes_by_rank": [{{"measured": {{"all": {LONG}}}}}]}}',
    ],
    "ranks.json": ['{"ranks": 5}', "[]", "{"],
    "environment.json": ["3", f"[{LONG}0{LONG}]", "[" * 900 + "]" * 900],
    "config.toml": ["x" * 300_000],
    "profile/rank_00000.jsonl": [
        '{"meetings": 1, "start": {}}\n',
        '{"meetings": [], "start": 1, "world": "x"}\n',
        "[3]\n",
    ],
}


def fill(folder: Path) -> None:
    """A run folder whose lines have odd values beside good ones."""
    odd = f'"a": {LONG}, "mfu": 1e400, "step_seconds": 1e300'
    lines = [f'{{"step": {LONG}, "loss": 1}}', f'{{"step": 4, "loss": 2.5, {odd}}}', '{"step": 5, "loss": null}']
    start = '"event": "start"'
    times = [f'{{"time": {LONG}, {start}}}', f'{{"time": 1e300, {start}}}', f'{{"time": "x", {start}}}']
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text("\n".join(times) + "\n")


def test_odd_files_cost_their_own_part_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault odd-file-hides-runs: types, numbers beyond 64 bits, sizes, FIFOs. The other run of the page is shown."""
    odd, good = tmp_path / "odd", tmp_path / "good"
    good.mkdir()
    append(good / "metrics.jsonl", {"step": 1, "loss": 0.5})
    fill(odd)
    (odd / "profile").mkdir()
    with served(odd, good) as dashboard:
        for name, contents in ODD.items():
            for content in contents:
                (odd / name).write_text(content)
                for run in dashboard._runs:
                    run.details()
                first, second = json.loads(get(dashboard, f"/{dashboard.secret}/data")[1])["runs"]
                assert first["curves"]["loss"] == [[4, 5], [2.5, None]], (name, content)
                assert name.partition("/")[0] in first["error"] or "profile" in name, (name, content)
                assert (second["error"], second["status"]["step"]) == ("", 1)
            (odd / name).unlink()
        os.mkfifo(odd / "memory.json")
        assert "memory.json: is a FIFO" in data_of(write_report(odd).read_text())["runs"][0]["error"]
        (odd / "events.jsonl").unlink()
        (odd / "events.jsonl").mkdir()
        assert "events.jsonl: Is a directory" in RunFolder(odd).record(NOW, 10)["error"]
    nameless = tmp_path / ("x" * 300)
    with ReportAtEnd() as report:
        report.run_dir = nameless
    assert "File name too long" in capfd.readouterr().err
    for tool, folder in ((status, odd), (report_tool, nameless), (status, nameless)):
        monkeypatch.setattr(sys, "argv", [tool.__name__, str(folder)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        assert (ended.value.code, capfd.readouterr().err.count("\n")) == (3, 1)


def test_odd_numbers_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault odd-file-hides-runs: and JSON of a run that failed with NaN is read by every reader of JSON."""
    fill(tmp_path / "odd")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path / "odd"), *flags])
        assert status.main() == 1
    *text, line = capfd.readouterr().out.splitlines()
    assert "gone | step 5" in text[0]
    assert json.loads(line, parse_constant=refuse)["loss"] is None
    written = as_json({"a": [float("nan"), (float("inf"), 1)]})
    assert json.loads(written, parse_constant=refuse) == {"a": [None, [None, 1]]}


def test_a_report_is_written_at_the_end_of_a_failed_run_and_not_into_the_folder_of_another(tmp_path: Path) -> None:
    run = program.run("--train.steps", "9", "--optimizer.lr", "1e30", "--optimizer.clip_grad", "0", cwd=tmp_path)
    assert run.code == 5
    assert data_of((tmp_path / "run" / "report.html").read_text())["runs"][0]["status"]["state"] == "failed"
    (tmp_path / "run" / "report.html").unlink()
    holder = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    lock = str(tmp_path / "run" / ".lock")
    other = subprocess.Popen(
        [sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin
    assert other.stdout
    other.stdout.readline()
    with ReportAtEnd() as report:
        report.run_dir = tmp_path / "run"
    assert not (tmp_path / "run" / "report.html").exists()
    other.communicate("\n")
    with ReportAtEnd() as report:
        report.run_dir = tmp_path / "run"
    assert (tmp_path / "run" / "report.html").exists()


def test_a_report_that_cannot_be_written_is_a_line_and_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "metrics.jsonl", {"step": 1, "loss": 3.0})
    (tmp_path / "report.html").mkdir()
    with ReportAtEnd() as report:
        report.run_dir = tmp_path
    assert re.fullmatch(r".*report\.html not written: .*directory.*\n", capfd.readouterr().err)


# The server


@contextmanager
def served(*run_dirs: Path) -> Iterator[Dashboard]:
    with Dashboard(run_dirs, 0) as dashboard:
        thread = Thread(target=dashboard.serve_forever)
        thread.start()
        try:
            yield dashboard
        finally:
            dashboard.shutdown()
            thread.join()


def get(dashboard: Dashboard, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.server_address[1], timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_dashboard_follows_runs_and_zooms(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    append(tmp_path / "one/metrics.jsonl", *({"step": step, "loss": 1 / step} for step in range(1, 5_001)))
    with served(tmp_path / "one", tmp_path / "two") as dashboard:
        root = f"/{dashboard.secret}/"
        code, page = get(dashboard, root)
        first = data_of(page)
        assert (code, first["live"]) == (200, True)
        assert [run["status"]["state"] for run in first["runs"]] == ["gone", "no run"]
        assert len(first["runs"][0]["curves"]["loss"][0]) < 1_300
        append(tmp_path / "two/metrics.jsonl", {"step": 7, "loss": 2.5})
        found = json.loads(get(dashboard, f"{root}data?points=50&steps=100-110")[1])
        assert found["runs"][0]["curves"]["loss"][0] == list(range(99, 112))
        assert found["runs"][1]["curves"]["loss"] == [[7], [2.5]]
        thin = json.loads(get(dashboard, f"{root}data?points=50&steps=x-y")[1])
        assert len(thin["runs"][0]["curves"]["loss"][0]) <= 50
        shutil.rmtree(tmp_path / "two")
        assert json.loads(get(dashboard, f"{root}data")[1])["runs"][1]["status"]["state"] == "no run"


def test_connections_without_a_request_are_cut_and_browsers_that_leave_are_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault held-dashboard: a letter now and then does not count as a request, and only so many may be waited for."""
    append(tmp_path / "metrics.jsonl", *({"step": step, "loss": 0.5, "text": "x" * 1000} for step in range(100)))
    told = f"{server._MOST_WAITING} connections open for {server._PATIENCE_SECONDS:g} seconds each"
    assert told in (program.ROOT / "docs/threats.md").read_text()
    monkeypatch.setattr(server, "_MOST_WAITING", 3)
    monkeypatch.setattr(server, "_PATIENCE_SECONDS", 1000.0)
    with served(tmp_path) as dashboard:
        # Of five connections the two oldest are cut, and a wrong address is answered once.
        held = [socket.create_connection(dashboard.server_address[:2], timeout=60) for _ in range(5)]
        assert [one.recv(1) for one in held[:2]] == [b"", b""]
        held[2].sendall(b"GET / HTTP/1.1\r\n\r\n" * 2)
        answer = b"".join(iter(lambda: held[2].recv(4096), b""))
        assert answer.count(b"HTTP/1.1 404") == 1
        for one in held:
            one.close()
    monkeypatch.setattr(server, "_PATIENCE_SECONDS", 0.2)
    with served(tmp_path) as dashboard:
        held = [socket.create_connection(dashboard.server_address[:2]) for _ in range(5)]
        with suppress(ConnectionError):
            for _ in range(1000):
                held[-1].sendall(b"G")
                time.sleep(0.02)
            raise AssertionError("a letter every 20 ms holds a connection for ever")
        for one in held:
            one.close()
        gone = socket.create_connection(dashboard.server_address[:2])
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset in place of an end
        gone.sendall(f"GET /{dashboard.secret}/ HTTP/1.1\r\n\r\n".encode())
        gone.close()
        assert get(dashboard, f"/{dashboard.secret}/data")[0] == 200
    assert capfd.readouterr().err == ""


def test_another_user_of_the_host_does_not_see_runs(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("s")
    append(tmp_path / "metrics.jsonl", {"step": 1, "loss": 0.5})
    with served(tmp_path) as dashboard:
        assert dashboard.server_address[0] == "127.0.0.1"
        for path in ("/", "/data", "/x/data", f"/{dashboard.secret}", f"/{dashboard.secret}/../secret.txt"):
            assert get(dashboard, path)[0] == 404, path
        with pytest.raises(ConfigError, match=r"--port \d+: Address already in use; --port 0 takes a free one"):
            Dashboard([tmp_path], dashboard.server_address[1])


def test_two_dashboards_of_one_run_do_not_share_their_secrets(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", {"step": 1, "loss": 0.5})
    with served(tmp_path) as one, served(tmp_path) as other:
        for dashboard in (one, other):
            assert json.loads(get(dashboard, f"/{dashboard.secret}/data")[1])["runs"][0]["status"]["step"] == 1
        assert get(one, f"/{other.secret}/data")[0] == 404


def test_curves_of_something_else_than_a_file_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Is a directory"):
        Curves(tmp_path).update()
