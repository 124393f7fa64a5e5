"""The lanes of the suite (tests/conftest.py): what needs a GPU says so, and asking for GPUs leaves forks usable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import LONGEST, PROJECT
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


def test_files_that_begin_first_and_those_of_the_project_are_there() -> None:
    assert [name for name in (*LONGEST, *PROJECT) if not (ROOT / f"tests/{name}.py").is_file()] == []


# Stands in for python: notes its words, and exits with the code of the lane that they name.
STAND_IN = """#!/bin/sh
echo "$*" >> "$NOTES"
case "$*" in
    *"-m not project and not slow"*) exit "$PROOF" ;;
    *"-m project and not slow"*) exit "$PROJECT" ;;
esac
"""


@pytest.mark.parametrize(
    ("words", "proof", "project", "code", "lanes", "report"),
    [
        ((), 0, 0, 0, 2, ["proof lane: passed, ", "project lane: passed, "]),
        (("-x", "tests/test_grid.py"), 1, 5, 1, 2, ["proof lane: ended with 1, ", "project lane: has no such test, "]),
        ((), 0, 1, 1, 2, ["proof lane: passed, ", "project lane: ended with 1, "]),
        (("nowhere.py",), 5, 5, 5, 2, ["proof lane: has no such test, ", "project lane: has no such test, "]),
        (("--proof",), 0, 1, 0, 1, ["proof lane: passed, "]),
        (("--project", "-x"), 1, 0, 0, 1, ["project lane: passed, "]),
        (("-m", "slow"), 1, 1, 0, 1, []),
    ],
)
def test_one_command_runs_the_lanes_and_tells_their_times(
    tmp_path: Path, words: tuple[str, ...], proof: int, project: int, code: int, lanes: int, report: list[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/run.sh").write_text((ROOT / "tests/run.sh").read_text())
    (tmp_path / "pretrain_scripts").mkdir()
    (tmp_path / "pretrain_scripts/setup.sh").write_text("")
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    notes = tmp_path / "notes"
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NOTES": str(notes)}
    environment |= {"PROOF": str(proof), "PROJECT": str(project)}
    command = ["bash", str(tmp_path / "tests/run.sh"), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    assert [line[: line.rindex(",") + 2] for line in run.stdout.splitlines()] == report
    started = notes.read_text().splitlines()
    assert len(started) == lanes
    others = [word for word in words if word not in ("--proof", "--project")]
    assert all(line.endswith(" ".join(others)) for line in started)


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


# Imports tests' files as the lane `-m gpus` does on a machine with a GPU, and says which would start CUDA.
COLLECT = """
import os, sys
os.environ["MEGAPAR_TEST_LANE"] = "gpus"
import pytest
import torch

def refuse():
    raise RuntimeError("starts CUDA")

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = refuse
sys.exit(pytest.main(["-m", "gpus", "--collect-only", "-q", *sys.argv[1:]]))
"""


PLANTED = """
import torch
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    raise RuntimeError(f"planted: {error}")
"""


def files_with_tensors_on_gpus() -> list[str]:
    """The tests' files that name a device of the lanes. On a GPU, tests/conftest.py asks after all files."""
    words = ("kernel_checks", "rank_device", "mark.gpus")
    return [str(path) for path in sorted(ROOT.glob("tests/test_*.py")) if any(x in path.read_text() for x in words)]


def test_no_file_starts_cuda_while_it_is_imported(tmp_path: Path) -> None:
    """None but a planted one."""
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    run = python("-c", COLLECT, "-c", "pyproject.toml", *files_with_tensors_on_gpus(), str(planted))
    (error,) = [line for line in run.stdout.splitlines() if line.startswith("ERROR ")]
    assert error.endswith("RuntimeError: planted: starts CUDA")


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
