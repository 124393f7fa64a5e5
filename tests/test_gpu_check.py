"""tools/gpu_check.sh as far as a machine without a GPU goes: its facts, and one line for each reason why a stage cannot
run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# A Python that lacks a package, as one sees it that asks for the package's place.
WITHOUT_TYRO = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "tyro" else find(name, package)
"""


def gpu_check(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = ["bash", str(ROOT / "tools/gpu_check.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_facts_are_json_and_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TYRO)
    run = gpu_check("facts", str(tmp_path / "out"), PYTHONPATH=str(tmp_path), WHEELS=str(tmp_path / "no_wheels"))
    assert run.returncode == 0, run.stderr
    facts = json.loads((tmp_path / "out/facts.json").read_text())
    assert facts["torch"] == torch.__version__
    assert facts["missing"] == ["tyro"]
    assert facts["gpus"] == []
    assert "copy_gb_per_second" not in facts, "no figure without a GPU"


@pytest.mark.slow
def test_a_stage_without_its_packages_says_which(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TYRO)
    wheels = str(tmp_path / "no_wheels")
    run = gpu_check("train", str(tmp_path / "out"), PYTHONPATH=str(tmp_path), WHEELS=wheels)
    assert run.returncode == 2
    assert run.stderr == f"gpu_check.sh train: missing packages: tyro; put their wheels into {wheels}\n"


@pytest.mark.slow
def test_a_stage_without_a_gpu_says_so(tmp_path: Path) -> None:
    run = gpu_check("kernels", str(tmp_path))
    assert run.returncode == 2
    assert run.stderr == (
        "gpu_check.sh kernels: torch sees no GPU here; --dry_run does everything on a CPU without figures\n"
    )


def test_words_that_are_not_known_are_refused(tmp_path: Path) -> None:
    assert gpu_check("benchmark", str(tmp_path)).returncode == 2
    assert gpu_check("facts").returncode == 2
    assert gpu_check("facts", str(tmp_path), "--fast").returncode == 2
    run = gpu_check("facts", str(tmp_path), PYTHON="no-such-python")
    assert run.returncode == 2
    assert "no Python from 3.11 with torch from 2.11; no-such-python:" in run.stderr


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = gpu_check("facts", str(tmp_path), LIMIT="0.1")
    assert run.returncode != 0
    assert "ended after 0.1 s" in run.stderr


def test_the_stage_of_kernels_runs_every_file_with_tests_for_a_gpu() -> None:
    script = (ROOT / "tools/gpu_check.sh").read_text()
    words = " ".join(re.findall(r'^tests\+?="(.*)"', script, re.MULTILINE)).split()
    run = {path for word in words for path in ROOT.glob(word)}
    marked = {path for path in (ROOT / "tests").glob("test_*.py") if re.search(r"mark\.gpu\b", path.read_text())}
    assert len(run) > 10
    assert marked - {Path(__file__)} <= run
