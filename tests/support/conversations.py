"""Pairs of conversations for tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import preprocess_data


def prepare(folder: Path, rows: list[Any], name: str, *flags: str) -> Path:
    """Make a pair of conversations with the template chatml and bytes as tokens. Returns its prefix."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["chat", "--input", str(folder / f"{name}.jsonl"), "--output", str(folder / name), "--tokenizer", "bytes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["preprocess_data.py", *words, "--template", "chatml", *flags])
        preprocess_data.main()
    return folder / name
