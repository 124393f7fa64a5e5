"""The lanes of the suite (tests/conftest.py): what needs a GPU says so, and asking for GPUs leaves forks usable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import durations, lanes
from tests.support.sweeps import slow_but

ROOT = Path(__file__).parents[1]


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_NVML", "MEGAPAR"))}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("lane", slow_but([1], ["gpu", "gpus"]))
def test_a_lane_that_needs_a_gpu_says_so(lane: str) -> None:
    run = python("-m", "pytest", "-m", lane, "tests/test_lanes.py", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"-m {lane} needs a GPU, and torch {torch.__version__} sees none here" in run.stderr


def test_torch_is_imported_after_the_lane_is_chosen() -> None:
    """torch and triton read variables when they are imported, so later ones would come too late."""
    run = python("-c", "import sys, tests.conftest; sys.exit('torch' in sys.modules)")
    assert run.returncode == 0, run.stderr


def test_files_of_the_project_are_there() -> None:
    assert [name for name in lanes.PROJECT if not (ROOT / f"tests/{name}.py").is_file()] == []


def test_lines_of_the_lanes_tell_outcomes_and_seconds() -> None:
    def reports(*nodeids: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]

    grid = reports("tests/test_grid.py::test_a", "tests/test_grid.py::test_b[x/y]", "tests/test_zero.py::test_c")
    stats = {"passed": [*grid, *reports("tests/test_docs.py::test_d")], "error": reports("tests/test_docs.py")}
    files = {name: {"wall": 1.0, "cpu": cpu} for name, cpu in (("test_grid", 2), ("test_zero", 3), ("test_docs", 4))}
    assert durations.lanes(stats, files, lanes.PROJECT) == {
        "proof": "3 passed; 5 s of CPU",
        "project": "1 error, 1 passed; 4 s of CPU",
    }
    assert durations.lanes({"passed": grid}, files, lanes.PROJECT).keys() == {"proof"}


# Stands in for python: notes its words, and exits with a code.
STAND_IN = """#!/bin/sh
echo "$*" >> "$NOTES"
exit 3
"""


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ((), "-m not slow --leave-out"),
        (("--all", "-x"), "-m not slow -x"),
        (("-x", "tests/test_grid.py"), "-m not slow --leave-out -x tests/test_grid.py"),
        (("--proof",), "-m not project and not slow"),
        (("--project", "-x"), "-m project and not slow -x"),
        (("-m", "slow"), "-m not slow -m slow"),
    ],
)
def test_one_command_runs_the_lanes(tmp_path: Path, words: tuple[str, ...], passed_on: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/run.sh").write_text((ROOT / "tests/run.sh").read_text())
    (tmp_path / "pretrain_scripts").mkdir()
    (tmp_path / "pretrain_scripts/setup.sh").write_text("")
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    notes = tmp_path / "notes"
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NOTES": str(notes)}
    command = ["bash", str(tmp_path / "tests/run.sh"), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stderr
    (started,) = notes.read_text().splitlines()
    assert started.endswith(f"--no-loadscope-reorder {passed_on}")


def test_groups_name_files_that_are_there() -> None:
    there = [
        path.relative_to(ROOT).as_posix()
        for folder in (
            "",
            "docs/",
            "tools/megapar_tools/migrate/",
            "pretrain_scripts/",
            "tools/",
            "tools/benchmarks/",
            "tests/",
        )
        for path in ROOT.glob(f"{folder}*.*")
    ]
    for name, group in lanes.GROUPS.items():
        assert {*group.tests} <= {*lanes.PROJECT}, name
        assert [
            pattern
            for pattern in lanes.patterns_of(group)
            if not any(fnmatch(file, pattern) for file in there) and not (ROOT / pattern.removesuffix("*")).exists()
        ] == []


GPUS, PICTURE = "checks of a machine with GPUs", "the architecture's picture"


@pytest.mark.parametrize(
    ("changed", "running"),
    [
        ([], []),
        (["CHANGELOG.md", ".ci/run"], []),
        (["megapar/step/step.py"], [PICTURE]),
        (["tests/test_grid.py"], [GPUS]),
        (["docs/data.md"], ["documents"]),
        (["tools/benchmarks/kernels/ops.py"], ["benchmarks", PICTURE]),
        (["tools/megapar_tools/migrate/table.py"], ["migration", PICTURE]),  # a pattern
        (["megapar/config/options.py"], ["migration", PICTURE]),  # test_come_over imports it
        (["tests/test_survey.py"], [GPUS, "makers of pages"]),
        (None, [*lanes.GROUPS]),  # nobody knows
    ],
)
def test_a_group_runs_if_a_file_of_it_has_changed(changed: Collection[str] | None, running: list[str]) -> None:
    out = lanes.left_out(changed)
    assert [name for name in lanes.GROUPS if name not in out] == running


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_changed_files_are_those_that_differ_from_the_last_commit(tmp_path: Path) -> None:
    """Staged or not, renamed, removed and new ones. Without a commit, in a folder of a checkout and without git nobody
    knows."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    assert lanes.changed_files(tmp_path) is None
    git("init", "-q")
    assert lanes.changed_files(tmp_path) is None
    (tmp_path / "folder").mkdir()
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("same", "edited", "staged", "gone", "moved"):
        (tmp_path / f"folder/{name}").write_text(name)
    git("add", ".")
    git("commit", "-qm", "all")
    assert lanes.changed_files(tmp_path) == set()
    (tmp_path / "folder/edited").write_text("anew")
    (tmp_path / "folder/staged").write_text("anew")
    git("add", "folder/staged")
    git("mv", "folder/moved", "folder/new name")
    (tmp_path / "folder/gone").unlink()
    for name in ("ignored", "new"):
        (tmp_path / name).write_text(name)
    expected = {f"folder/{name}" for name in ("edited", "staged", "gone", "moved", "new name")} | {"new"}
    assert lanes.changed_files(tmp_path) == expected
    assert lanes.changed_files(tmp_path / "folder") is None


# Says that a document has changed, and gives files of tests the names that groups have.
DOCUMENT_CHANGED = "from tests.support import lanes\nlanes.changed_files = lambda: {'docs/data.md'}\n"
SAID = [
    "Left out, because their files are as in the last commit: tests of benchmarks, checks of a machine with GPUs, "
    "migration, makers of pages, the architecture's picture.",
    "`bash tests/run.sh --all` runs them too.",
]


@pytest.mark.parametrize(
    ("words", "passed", "said"),
    [
        (["-n", "1", "--leave-out"], "2 passed", SAID),
        (["test_survey.py", "--leave-out"], "1 passed", []),
        pytest.param(["-n", "1"], "3 passed", [], marks=pytest.mark.slow),
    ],
)
def test_a_run_says_what_it_left_out(tmp_path: Path, words: list[str], passed: str, said: list[str]) -> None:
    """A file that the command names runs."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = project: x\n")
    (tmp_path / "conftest.py").write_text(DOCUMENT_CHANGED)
    for name in ("docs_site", "survey", "grid"):
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    assert [line for line in lines if line in SAID] == said, run.stdout + run.stderr
    assert passed in lines[-1], run.stdout + run.stderr


SPENDS = """import os, subprocess, sys, time
def spend(seconds):
    while time.process_time() < seconds: pass
def test_here_and_in_a_child():
    spend(time.process_time() + 0.2)
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.2: pass"])
"""


@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_a_run_keeps_the_seconds_of_its_files(tmp_path: Path, processes: list[str]) -> None:
    """CPU seconds of children count. What earlier runs kept of other files stays while those are there."""
    (tmp_path / "tests").mkdir()
    for name, text in (("spends", SPENDS), ("idle", "def test_nothing(): pass"), ("other", "")):
        (tmp_path / f"tests/test_{name}.py").write_text(text)
    known = tmp_path / "tests/durations.json"
    known.write_text(json.dumps({f"test_{name}": {"wall": 99, "cpu": 99} for name in ("gone", "spends", "other")}))
    files = [str(tmp_path / f"tests/test_{name}.py") for name in ("idle", "spends")]
    options = ("-p", "tests.support.durations", "--keep-durations", "-p", "no:cacheprovider")
    run = python("-m", "pytest", "-q", *options, *processes, f"--rootdir={tmp_path}", *files)
    assert run.returncode == 0, run.stdout + run.stderr
    kept = durations.read(known)
    assert next(iter(kept)) == "test_other", "the longest comes first"
    assert {*kept} == {"test_other", "test_spends", "test_idle"}
    assert 0.35 <= kept["test_spends"]["cpu"] < 99  # times are in ticks of 10 ms
    assert kept["test_idle"]["cpu"] < kept["test_spends"]["cpu"]
    assert [line[3:8] for line in known.read_text().splitlines()[1:-1]] == ["test_"] * 3
    assert durations.read(tmp_path / "nothing.json") == {}


ASK_THEN_FORK = """
import os
import tests.support.distributed
import torch
torch.cuda.is_available()
torch.cuda.device_count()
child = os.fork()
if child == 0:
    os._exit(torch.cuda._is_in_bad_fork())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build; it needs no GPU")
def test_asking_for_gpus_leaves_cuda_usable_in_a_fork() -> None:
    """torch.cuda.is_available() starts CUDA unless it was told to ask the driver's library, and a fork then cannot use
    it: every rank of a test would fail. GPUs are hidden, because a machine without one has no such library to ask."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert python("-c", ASK_THEN_FORK, **hidden).stdout == "1\n"
    assert python("-c", ASK_THEN_FORK, PYTORCH_NVML_BASED_CUDA_CHECK="1", **hidden).stdout == "0\n"
    conftest = (ROOT / "tests/conftest.py").read_text()
    assert 'os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"' in conftest


CASES = """import pytest
@pytest.mark.parametrize("number", range(25))
def test_a_number(number):
    if number == 7: pytest.skip("needs a moon")
"""


@pytest.mark.parametrize(
    ("share", "minutes", "processes", "lines"),
    [
        pytest.param(*("8/10", 5, [], ["share 8 of 10: 25 cases, 2 chosen, 2 ran, 0 skipped"]), marks=pytest.mark.slow),
        (
            "0/4",
            5,
            ["-n", "1"],
            ["share 0 of 4: 25 cases, 5 chosen, 4 ran, 1 skipped", "  1 skipped: needs a moon"],
        ),
        (
            "12/10",
            0,
            [],
            ["share 2 of 10: 25 cases, 3 chosen, 0 ran, 3 skipped", "  3 skipped: the share's time is over"],
        ),
    ],
)
def test_a_share_of_cases_says_what_was_chosen_run_and_skipped(
    tmp_path: Path, share: str, minutes: int, processes: list[str], lines: list[str]
) -> None:
    (tmp_path / "test_numbers.py").write_text(CASES)
    options = ("-p", "tests.support.share", "--share", share, "--minutes", str(minutes), "-p", "no:cacheprovider")
    run = python("-m", "pytest", "-q", *options, *processes, f"--rootdir={tmp_path}", str(tmp_path / "test_numbers.py"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if "skipped: " in line or "share " in line] == lines
