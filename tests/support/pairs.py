"""Pairs of answers as lines of JSON, and as tokens with weights."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import preprocess_data

EARLIER = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "a"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3", "chosen": "5", "rejected": "six"},
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "hello"}],
        "rejected": "?",
    },
    {
        "chosen": [*EARLIER, {"role": "assistant", "content": "bb"}],
        "rejected": [*EARLIER, {"role": "assistant", "content": "cccc"}],
    },
    *({"prompt": f"number {n}", "chosen": f"{n}!", "rejected": f"not {n % 3}"} for n in range(9)),
]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def prepare(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[Any], *flags: str, name: str = "pairs") -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "short.jinja").write_text(TEMPLATE)
    words = ["preferences", "--input", str(folder / "rows.jsonl"), "--output", str(folder / name)]
    words += ["--tokenizer", "bytes", "--template", str(folder / "short.jinja"), *flags]
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *words])
    preprocess_data.main()
    return folder / name
