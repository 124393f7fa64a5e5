"""tools/inspect_gradients.py: norms against one process, the order of reductions, and a gradient that is left out."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import program
from tests.support.program import Program
from tests.support.source_tree import ROOT
from tools import inspect_gradients

TINY = ("--config", str(ROOT / "pretrain_scripts/configs/tiny.toml"), "--launch.device", "cpu")
SMALL = ("--train.global_batch_size", "8", "--optimizer.bucket_mb", "0.1")


def inspected(folder: Path, *flags: str) -> dict[str, Any]:
    """All numbers that the tool writes for two replicas."""
    ended = Program(
        ROOT / "tools/inspect_gradients.py",
        (*TINY, *SMALL, "--launch.nproc", "2", "--json", "found.json", *flags),
        folder,
        {},
    ).wait()
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With replica 1 left out of the sum for three steps."""
    folder = tmp_path_factory.mktemp("gradients")
    found = inspected(folder, "--leave_out", "1", "--steps", "3")
    assert (folder / "gradient_drift.png").read_bytes().startswith(b"\x89PNG")
    return found


def test_the_norm_of_all_sums_is_that_of_one_process(left_out: dict[str, Any], tmp_path: Path) -> None:
    assert program.run(*SMALL, *program.FOUR_LAYERS, "--train.steps", "2", cwd=tmp_path).code == 0
    line = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[0]
    total = math.sqrt(sum(row["total"] ** 2 for row in left_out["parameters"]))
    assert total == pytest.approx(json.loads(line)["grad_norm"], rel=1e-5)


def test_each_replica_has_a_gradient_of_its_own(left_out: dict[str, Any]) -> None:
    assert len(left_out["parameters"]) == 27
    for row in left_out["parameters"]:
        first, second = row["local"]
        assert first != second, "they have other samples"
        assert abs(first - second) <= row["total"] <= (first + second) * (1 + 1e-6), row["name"]


def test_without_zero_the_sums_are_the_same(left_out: dict[str, Any], tmp_path: Path) -> None:
    whole = inspected(tmp_path, "--optimizer.zero_stage", "0")
    totals = {row["name"]: row["total"] for row in whole["parameters"]}
    assert totals == pytest.approx({row["name"]: row["total"] for row in left_out["parameters"]}, rel=1e-6)
    assert whole["drift"] == {}


def test_buckets_are_reduced_in_order_under_the_backward(left_out: dict[str, Any]) -> None:
    reductions = left_out["reductions"]
    assert [row["bucket"] for row in reductions] == list(range(len(reductions)))
    assert len(reductions) > 4
    assert {row["bucket"] for row in left_out["parameters"]} == {row["bucket"] for row in reductions}
    assert sum(row["parameters"] for row in reductions) == len(left_out["parameters"])
    started = [row["started"] for row in reductions]
    assert started == sorted(started)
    assert all(0 < row["started"] <= row["asked"] <= row["done"] for row in reductions)
    # The last bucket is complete when the backward ends. The first one was on its way then.
    assert started[0] < started[-1] <= reductions[0]["asked"]


def test_replicas_stay_equal_bit_by_bit_unless_one_gradient_is_left_out(left_out: dict[str, Any]) -> None:
    synchronized, apart = left_out["drift"]["synchronized"], left_out["drift"]["left out"]
    assert synchronized["distance"] == [0.0] * 4
    assert all(first == second for first, second in synchronized["losses"])
    assert apart["distance"][0] == 0.0
    assert apart["losses"][0] == synchronized["losses"][0]
    # The learning rate of the last step is 0.
    assert apart["distance"][0] < apart["distance"][1] < apart["distance"][2] <= apart["distance"][3]
    assert all(first != second for first, second in apart["losses"][1:])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--launch.nproc", "2", "--parallel.tp", "2"), "parallel.tp=2: the tool compares replicas that hold the same"),
        ((), "parallel.dp=1: one replica has nobody to synchronize with; --launch.nproc 2"),
        (("--launch.nproc", "2", "--leave_out", "2"), "--leave_out 2: replicas are 0 to 1"),
        (("--launch.nproc", "2", "--optimizer.zero_stage", "3"), "stages 2 and 3 keep no whole gradient"),
        (
            ("--launch.nproc", "2", "--steps", "0"),
            "--steps 0: must be above optimizer.warmup_steps=2, which come first",
        ),
        (("--bogus", "1"), "--bogus: no such flag"),
    ],
)
def test_what_it_cannot_show_ends_with_2(
    flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_gradients.py", *TINY, *flags])
    with pytest.raises(SystemExit) as ended:
        inspect_gradients.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
