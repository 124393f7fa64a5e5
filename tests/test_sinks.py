"""Sinks of metrics: none of them stops or slows training, and each shows one curve of a resumed run."""

import http.client
import json
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megapar.config.options import LogConfig
from megapar.observe.metrics import Reporter
from megapar.observe.sinks import base
from megapar.observe.sinks.base import Line, RunInfo, Sender, scalars
from megapar.observe.sinks.curve import FILE, curve_of, replayed
from megapar.observe.sinks.prometheus import Prometheus
from megapar.observe.sinks.wandb import WeightsAndBiases
from tests.support import program, trackers

LINE = {
    "step": 3,
    "loss": 1.5,
    "mfu": None,
    "comm_bytes": {"tp": 8},
    "expert_load": {"1": 2.0},
    "expert_counts": {"1": [2]},
}
EVERY = ("--checkpoint.every", "2", "--log.no-tensorboard", "--train.global_batch_size", "4")


class Kept:
    """A sink that keeps what it gets. `waits` is called before each call."""

    name = "kept"

    def __init__(self, waits: Callable[[], Any] = lambda: None, failing: Sequence[str] = ()):
        self.lines: list[Line] = []
        self.calls: list[str] = []
        self._waits = waits
        self._failing = list(failing)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self._waits()
        if name in self._failing:
            self._failing.remove(name)
            raise ConnectionError(f"{name} is\nrefused")

    def open(self) -> str:
        self._called("open")
        return ""

    def write(self, lines: Sequence[Line]) -> None:
        self._called("write")
        self.lines += lines

    def close(self) -> None:
        self._called("close")

    def abandon(self) -> None:
        self.calls.append("abandon")


def ended(sender: Sender, seconds: float = 5.0) -> None:
    sender.close()
    sender.wait(seconds)


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


# The sender


def test_a_sink_gets_every_line_in_order_in_another_thread() -> None:
    threads = set()
    sink = Kept(lambda: threads.add(threading.get_ident()))
    sender = Sender(sink)
    for step in range(500):
        sender.put({"step": step})
    ended(sender)
    assert [line["step"] for line in sink.lines] == list(range(500))
    assert (sink.calls[0], sink.calls[-1]) == ("open", "close")
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_service_that_hangs_costs_lines_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    hangs = threading.Event()
    sink = Kept(hangs.wait)
    sender = Sender(sink, capacity=10)
    start = time.monotonic()
    for step in range(1000):
        sender.put({"step": step})
    assert time.monotonic() - start < 0.5
    start = time.monotonic()
    ended(sender, 0.2)
    assert time.monotonic() - start < 1
    assert "abandon" in sink.calls
    hangs.set()
    dropped, left = capsys.readouterr().err.splitlines()
    assert dropped == "kept: metrics not sent (it is too slow); the run goes on, with metrics.jsonl"
    assert left == "kept: does not end within 5 s; 10 lines not sent, the run ends"


def test_an_error_of_a_sink_is_one_line_and_later_lines_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept(failing=["write", "write"])
    sender = Sender(sink)
    for step in range(4):
        until(lambda count=step + 1: len(sink.calls) == count)  # open, and a write for each line
        sender.put({"step": step})
    ended(sender)
    assert [line["step"] for line in sink.lines] == [2, 3]
    first, last = capsys.readouterr().err.splitlines()
    assert first == "kept: metrics not sent (ConnectionError: write is refused); the run goes on, with metrics.jsonl"
    assert last == "kept: 2 lines of metrics.jsonl not sent"


def test_a_service_that_is_down_at_the_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_PAUSE_SECONDS", 0.05)
    sink = Kept(failing=["open", "open"])
    sender = Sender(sink)
    until(lambda: sink.calls.count("open") == 3)
    sender.put({"step": 7})
    ended(sender)
    assert [line["step"] for line in sink.lines] == [7]


def test_a_run_with_sinks_that_hang_ends_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sinks share the few seconds at the end."""
    hangs = threading.Event()
    sinks = [Kept(hangs.wait) for _ in range(3)]
    monkeypatch.setattr("megapar.observe.metrics.chosen", lambda *_: sinks)
    monkeypatch.setattr("megapar.observe.metrics.CLOSING_SECONDS", 0.3)
    reporter = Reporter(LogConfig(), RunInfo(tmp_path, {}, 2), speaks=True)
    with reporter:
        reporter.write({"step": 1, "loss": 2.0})
        start = time.monotonic()
    assert time.monotonic() - start < 1.5
    hangs.set()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_numbers_of_a_line_have_names() -> None:
    assert dict(scalars(LINE)) == {"loss": 1.5, "comm_bytes/tp": 8, "expert_load/1": 2.0}


# Prometheus


def ask(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path) -> Any:
    sink = Prometheus(RunInfo(tmp_path, {}, 9), port := free_port())
    assert sink.open() == f"http://127.0.0.1:{port}/metrics"
    yield sink, port
    sink.close()


def test_prometheus_reads_the_newest_numbers(served: tuple[Prometheus, int]) -> None:
    sink, port = served
    sink.write([{**LINE, "step": 2, "grad_norm": float("nan")}, {**LINE, "tokens_per_second": 10.0, "mfu": 0.5}])
    sink.write([{"step": 3, 'validation_loss/a"b': 2.0}])
    code, text = ask(port)
    assert code == 200
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values.pop("megapar_last_step_timestamp_seconds")) == pytest.approx(time.time(), abs=60)
    assert values == {
        'megapar_comm_bytes{axis="tp"}': "8.0",
        'megapar_expert_load{set="1"}': "2.0",
        "megapar_grad_norm": "NaN",
        "megapar_mfu": "0.5",
        "megapar_step": "3.0",
        "megapar_tokens_per_second": "10.0",
        "megapar_train_steps": "9.0",
        "megapar_training_loss": "1.5",
        'megapar_validation_loss{set="a\\"b"}': "2.0",
    }
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "each name has one TYPE"


def test_prometheus_answers_this_host_by_its_name_alone(served: tuple[Prometheus, int]) -> None:
    _, port = served
    assert ask(port, host=f"localhost:{port}")[0] == 200
    assert ask(port, host="evil.example")[0] == 403
    assert ask(port, host="")[0] == 403
    assert ask(port, "/")[0] == 404
    assert ask(port, "/../etc/passwd")[0] == 404


def test_a_reader_that_says_nothing_does_not_keep_others_out(served: tuple[Prometheus, int]) -> None:
    _, port = served
    silent = socket.create_connection(("127.0.0.1", port))
    assert ask(port)[0] == 200
    silent.close()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ("--train.steps", "2", "--log.no-tensorboard", "--log.prometheus_port", port)
        run = program.run(*flags, cwd=tmp_path)
    assert run.code == 0
    (line,) = run.err.splitlines()
    assert line.startswith(
        f"Prometheus: metrics not sent (OSError: log.prometheus_port={port}: Address already in use)"
    )


# Curves of a tracking service


def test_a_resumed_run_goes_on_with_its_curve_and_a_cut_begins_one(tmp_path: Path) -> None:
    first = curve_of(tmp_path, [("a", 0)], cut=False)
    assert first == ("a", False)
    assert curve_of(tmp_path, [("a", 0), ("b", 4)], cut=False) == ("a", False)
    assert curve_of(tmp_path, [("a", 0), ("c", 4)], cut=True) == ("c", True)
    assert curve_of(tmp_path, [("a", 0), ("c", 4), ("d", 8)], cut=False) == ("c", False)
    assert curve_of(tmp_path, [("e", 0)], cut=False) == ("e", False), "from step 0: another run"
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / FILE, copy)
    assert curve_of(copy, [("e", 0), ("f", 2)], cut=False) == ("f", True), "two runs must not draw one curve"


def test_a_new_curve_gets_evaluations_and_at_most_10000_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in range(1, 25_002)]
    lines.insert(7, {"step": 7, "validation_loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    found = list(replayed(tmp_path, 25_000))
    assert {"step": 7, "validation_loss": 2.0} in found
    assert len(found) < 10_003
    assert found[-1]["step"] == 25_000


def with_wandb(folder: Path) -> Callable[[], None]:
    return lambda: trackers.install(trackers.wandb(folder))


def lines_of(folder: Path) -> list[int]:
    return [json.loads(text)["step"] for text in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "cut"])
def test_wandb_shows_each_step_of_a_resumed_run_once(tmp_path: Path, lost: bool) -> None:
    """Real runs against a stand-in that drops rows of old steps, as W&B does."""
    service = tmp_path / "service"
    service.mkdir()
    flags = (*EVERY, "--log.wandb", "project")
    begun = program.run(*flags, "--train.steps", "4", cwd=tmp_path, plant=with_wandb(service))
    assert begun.code == 0, begun.err
    if lost:  # the run goes on from step 2: steps 3 and 4 are computed again
        shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    again = program.run(*flags, "--train.steps", "6", cwd=tmp_path, plant=with_wandb(service))
    assert again.code == 0, again.err
    ids = trackers.curves(service)
    assert len(ids) == (2 if lost else 1)
    rows = trackers.history(service, ids[-1])
    assert [step for step, _ in rows] == lines_of(tmp_path)
    stored = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [numbers.get("loss") for _, numbers in rows] == [line.get("loss") for line in stored]
    assert f"W&B: https://wandb.example/{ids[-1]}" in again.err
    assert (service / f"{ids[-1]}.finished").exists()


def broken(name: str) -> None:
    module: Any = ModuleType(name)

    def init(**named: Any) -> None:
        raise queue.Full("no network")

    module.init = init
    module.Settings = dict
    trackers.install(module)


def test_a_tracker_that_fails_is_one_line_and_the_run_is_the_same(tmp_path: Path) -> None:
    run = program.run(*EVERY, "--train.steps", "2", "--log.wandb", "p", cwd=tmp_path, plant=partial(broken, "wandb"))
    assert run.code == 0
    (line,) = run.err.splitlines()
    assert line == "W&B: metrics not sent (Full: no network); the run goes on, with metrics.jsonl"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ConnectionResetError("its process is gone"), SystemExit(-9)], ids=["lost", "code"])
def test_a_wandb_that_is_given_up_prints_nothing_at_the_end(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its atexit hook would meet the killed process again, and print a traceback; its teardown removes the hook."""
    torn_down = []

    def teardown() -> None:
        torn_down.append(1)
        raise error

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=teardown))
    sink = WeightsAndBiases(RunInfo(tmp_path, {}, 1), "project")
    sink.abandon()
    assert torn_down == [1]
    assert capfd.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=threading.Event().wait))
    start = time.monotonic()
    sink.abandon()
    assert time.monotonic() - start < 5, "W&B's own end may hang, and the run does not"


def absent(name: str) -> None:
    sys.modules[name] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--log.wandb", "p", "log.wandb=p: wandb is not installed; pip install wandb"),
        ("--log.mlflow", "u", "log.mlflow=u: mlflow is not installed; pip install mlflow-skinny"),
        ("--log.prometheus_port", "70000", "log.prometheus_port=70000: ports end at 65535; use one such as 9400, or 0"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_the_run(tmp_path: Path, flag: str, value: str, said: str) -> None:
    def plant() -> None:
        for name in ("wandb", "mlflow"):
            absent(name)

    run = program.run(flag, value, cwd=tmp_path, plant=plant)
    assert run.code == 2
    assert run.err.strip() == f"ConfigError: {said}"
