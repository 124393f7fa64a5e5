"""A rank holds nothing of megapar_tools until an option, an unknown flag or an error opens a door to it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import program

OBSERVER = """
import sys

from megapar.observe.observer import Observed, Observer


class Modules(Observer):
    def __init__(self, seen: Observed):
        self._file = seen.run_dir / "modules.txt"

    def close(self, error: BaseException | None) -> None:
        self._file.write_text("\\n".join(sys.modules))
"""


def test_a_rank_that_torchrun_starts_holds_nothing_of_the_tools(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(OBSERVER)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = (*program.TINY, *program.FEW_LAYERS, *program.FEW_MICRO_BATCHES, "--train.steps", "2")
    command = [sys.executable, str(program.PRETRAIN), *flags, "--log.observers", "look:Modules"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **rank, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    held = (tmp_path / "run/modules.txt").read_text().split()
    assert "megapar.train.doors" in held
    assert not [name for name in held if name.startswith("megapar_tools")]
    assert (tmp_path / "run/report.html").is_file()
