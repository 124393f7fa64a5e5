"""Runs of torchtitan in its own Python, and folders of it in tests/data.

`python -m tests.support.torchtitan_folders` makes these anew.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.support.frameworks import PYTHON, runs

DATA = Path(__file__).parents[1] / "data" / "torchtitan"
FOLDERS: dict[str, dict[str, Any]] = {
    "llama3_fused_2": {"kind": "llama3", "tied": False, "fused": True, "ranks": 2},
    "qwen3_tied_1": {"kind": "qwen3", "tied": True, "fused": False, "ranks": 1},
    "deepseek_v3_2": {"kind": "deepseek_v3", "tied": False, "fused": False, "ranks": 2},
}
"""Each is saved by so many ranks after BEFORE steps, and goes on for AFTER steps on another number of them."""
BEFORE, AFTER = 3, 10

needs_torchtitan = runs("torchtitan")


def train(folder: Path, ranks: int, **job: Any) -> dict[str, Any]:
    """Losses, and parameters at the end, of a job of torchtitan_run.py in `folder`."""
    dump = folder / "dump.pt"
    path = folder / "job.json"
    path.write_text(json.dumps({"load": 0, "save": False, **job, "folder": str(folder), "dump": str(dump)}))
    script = Path(__file__).parent / "torchtitan_run.py"
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script, path]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(dump)
    return found


def make(target: Path, name: str) -> dict[str, Any]:
    """Write a folder with step-N and expected.pt to `target`; returns what it expects of the steps behind."""
    job = dict(FOLDERS[name])
    ranks = job.pop("ranks")
    train(target, ranks, **job, steps=BEFORE, save=True)
    wanted = train(target, 3 - ranks, **job, steps=AFTER, load=BEFORE)
    torch.save(wanted, target / "expected.pt")
    return wanted


def unpacked(target: Path, name: str) -> dict[str, Any]:
    """Unpack a folder of tests/data to `target`; returns what it expects."""
    with zipfile.ZipFile(DATA / f"{name}.zip") as archive:
        archive.extractall(target)
    found: dict[str, Any] = torch.load(target / "expected.pt")
    return found


def main() -> None:
    """Make the folders of tests/data anew, or those of the given names."""
    DATA.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FOLDERS:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make(folder, name)
            with zipfile.ZipFile(DATA / f"{name}.zip", "w", zipfile.ZIP_LZMA) as archive:
                for path in sorted([*folder.glob("step-*/*"), folder / "expected.pt"]):
                    archive.write(path, path.relative_to(folder))


if __name__ == "__main__":
    main()
