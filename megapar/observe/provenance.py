"""The circumstances of a run or a benchmark: date, hardware, versions, commit."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megapar.system import device

_NAMED = ("torch", "triton", "numpy", "safetensors", "sentencepiece", "tokenizers", "tiktoken", "liger-kernel")


def provenance(on: torch.device) -> dict[str, Any]:
    """Collect date, hardware, versions and commit, as JSON types. `on` is the device in use."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    # An installed package has no repository, and a machine may have no git: the commit is then unknown.
    if shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": device.describe(on),
        "load_average": os.getloadavg()[0],
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version for name in _NAMED if (version := _version(name))},
        "commit": commit or "unknown",
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def in_a_line(found: Mapping[str, Any]) -> str:
    """The result of `provenance` on one line, for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['hardware']} ({found['processor']}, load {found['load_average']:.1f})"
    return f"{found['date']} | {machine} | python {found['python']}, {versions} | commit {found['commit']}"
