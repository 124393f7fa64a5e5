"""Pairs of conversations for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megapar.data.indexed import IndexedWriter
from megapar.data.prepared import CHAT, write_sidecar, write_weights
from tools import preprocess_data


def prepare(folder: Path, rows: list[Any], name: str, *flags: str) -> Path:
    """Make a pair of conversations with the template chatml and bytes as tokens. Returns its prefix."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["chat", "--input", str(folder / f"{name}.jsonl"), "--output", str(folder / name), "--tokenizer", "bytes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["preprocess_data.py", *words, "--template", "chatml", *flags])
        preprocess_data.main()
    return folder / name


def write_pair(
    prefix: Path,
    tokens: NDArray[np.int64],
    lengths: Sequence[int],
    trained: Sequence[Sequence[int]] = (),
    eod: int = 130,
) -> Path:
    """Write a pair of conversations of so many tokens, trained at the positions `trained` of each.

    By default the second halves are trained. Returns the prefix.
    """
    trained = trained or [range(n // 2 or 1, n) for n in lengths]
    weights = [np.isin(np.arange(n), list(at)).astype(np.uint8) for n, at in zip(lengths, trained, strict=True)]
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(tokens, list(lengths))
    write_weights(prefix, weights)
    tokenizer = {"spec": "bytes", "vocab_size": 257, "sha256": "bytes", "eod": eod}
    counts = {"documents": len(lengths), "tokens": len(tokens), "append_eod": False, "sources": []}
    write_sidecar(prefix, {**counts, "tokenizer": tokenizer, CHAT: {}})
    return prefix
