"""How full packs of conversations are, beside those of TRL (`trl.pack_dataset`), for the same lengths.

TRL's bfd packs 1,000 conversations at a time, its default. Its wrapped cuts conversations wherever a sample is full.
The lengths are lognormal, and those of conversations that tools/docstrings.py makes of Python's docstrings, in bytes
with the template chatml.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megapar_tools.prepare.chat import BUILT_IN, ChatTemplate

from benchmarks.harness import Found, Output
from benchmarks.ranks import BenchmarkError
from megapar.base.errors import ConfigError
from megapar.data.packs import best_fit


@dataclass(frozen=True)
class Options(Output):
    """Measure packs on this machine."""

    conversations: int = 4_000
    """Lognormal lengths of each kind."""
    means: tuple[int, ...] = (400, 1_000)
    """About the mean tokens of those."""
    seq_lengths: tuple[int, ...] = (2_048, 4_096)
    """Tokens of a sample."""


def docstrings() -> list[int]:
    """The bytes of each conversation about Python's library."""
    template = ChatTemplate(BUILT_IN["chatml"], "chatml")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).parents[1] / "docstrings.py"), "--output", folder]
        subprocess.run(command, check=True, capture_output=True)
        lines = Path(folder, "train.jsonl").read_text().splitlines()
    return [len(template.text(json.loads(line)["messages"]).encode()) for line in lines]


def their_packs(lengths: Sequence[int], seq_length: int, strategy: str) -> list[list[int]]:
    """The lengths of the documents in each pack of TRL. Those of wrapped have no boundaries: one document each."""
    trl, datasets = map(importlib.import_module, ("trl", "datasets"))
    datasets.disable_progress_bars()
    rows = datasets.table.InMemoryTable.from_pydict({"input_ids": [[0] * length for length in lengths]})
    packed = trl.pack_dataset(datasets.Dataset(rows, fingerprint="lengths"), seq_length, strategy)
    if strategy == "wrapped":
        return [[len(ids)] for ids in packed["input_ids"]]
    return list(packed["seq_lengths"])


def our_packs(lengths: Sequence[int], seq_length: int) -> list[list[int]]:
    """The lengths of the conversations in each of our packs."""
    return [[lengths[number] for number in numbers] for numbers in best_fit(lengths, seq_length)]


def cuts(lengths: Sequence[int], seq_length: int) -> int:
    """How many conversations are cut if each 1,000 of them follow each other through samples."""
    cut = 0
    for first in range(0, len(lengths), 1000):
        stops = np.cumsum(lengths[first : first + 1000])
        starts = stops - lengths[first : first + 1000]
        cut += int((starts // seq_length != (stops - 1) // seq_length).sum())
    return cut


def packed(name: str, lengths: Sequence[int], seq_length: int) -> list[dict[str, Any]]:
    """A row for each way. Raises BenchmarkError if one loses tokens."""
    fitting = [min(length, seq_length) for length in lengths]
    ways = {
        "megapar": partial(our_packs, fitting, seq_length),
        "TRL, bfd": partial(their_packs, fitting, seq_length, "bfd"),
        "TRL, wrapped": partial(their_packs, fitting, seq_length, "wrapped"),
    }
    rows = []
    for way, work in ways.items():
        packs = work()
        if sum(map(sum, packs)) != sum(fitting):
            raise BenchmarkError(f"{way}: {sum(map(sum, packs)):,} of {sum(fitting):,} tokens are in packs")
        cut = cuts(fitting, seq_length) if way == "TRL, wrapped" else 0
        facts = {"lengths": name, "conversations": len(fitting), "mean": float(np.mean(fitting)), "sample": seq_length}
        full = sum(fitting) / (len(packs) * seq_length)
        rows.append({**facts, "way": way, "packs": len(packs), "fullness": full, "cut": cut})
    return rows


def measure(options: Options) -> Found:
    """Pack each set of lengths into samples of each length."""
    if missing := [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"packs are compared with TRL's: pip install {' '.join(missing)}")
    rng = np.random.default_rng(0)
    sets = {}
    for mean in options.means:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, options.conversations)  # their mean is exp(mu + 1 / 2)
        sets[f"lognormal, {mean:,}"] = np.maximum(drawn, 8).astype(int).tolist()
    sets["docstrings"] = docstrings()
    cases = [(name, lengths, seq_length) for name, lengths in sets.items() for seq_length in options.seq_lengths]
    rows = [row for case in cases for row in packed(*case)]
    return Found({"peers": {"trl": importlib.metadata.version("trl")}, "rows": rows})
