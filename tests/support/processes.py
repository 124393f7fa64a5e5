"""Runs pretrain.py in an interpreter of its own, as a person or Slurm starts it: about four seconds a start.

tests/support/program.py is faster, unless the start of the interpreter is tested.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.progress import CAP_SECONDS

SCRIPTS = Path(__file__).parents[2] / "pretrain_scripts"
TINY = ("--config", str(SCRIPTS / "configs/tiny.toml"), "--launch.device", "cpu")


def start(*flags: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The tiny run in folder `cwd`."""
    run_dir = () if "--run_dir" in flags else ("--run_dir", "run")
    command = [sys.executable, str(SCRIPTS / "pretrain.py"), *TINY, *run_dir, *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=CAP_SECONDS)
    return process.returncode, out, err


def slurm(rank: int, world: int, port: int) -> dict[str, str]:
    variables = {"STEP_ID": 0, "STEP_NUM_TASKS": world, "PROCID": rank, "LOCALID": rank, "TASKS_PER_NODE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {f"SLURM_{name}": str(value) for name, value in variables.items()} | address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
