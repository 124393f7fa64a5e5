"""Preprocessing beside the bare tokenizer library on the same text: MB/s and tokens/s of a core, and over cores.

The text is the Python standard library's own sources, the tokenizers are trained on its beginning. "Bare" is the
library's encode on texts that are in memory, in one thread. Preprocessing reads them from .jsonl, checks, tokenises and
writes. Its speed is marginal: what a run over the text three times in a row takes beyond a run over it once, so that
the start of processes, a second each, counts for nothing; `run_seconds` has it in. Work is dealt in pieces of 4 MB: with
less than 8 MB a worker, the slowest decides. Rounds alternate; tables have the medians.

Time is wall clock, and CPU time of all processes together, which other programs on the machine disturb less. "Of bare"
is the bare library's CPU time over ours. "Of linear" is the wall-clock speed over that of 1 worker, per worker.
"""

import base64
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from build_corpus import Arguments as CorpusArguments
from build_corpus import build
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megapar import device
from megapar.data.preprocess import Recipe, preprocess, read_documents
from megapar.data.tokenizer import load_tokenizer, train_sentencepiece
from megapar.errors import ConfigError, reported
from megapar.train.report import in_a_line, provenance


@dataclass(frozen=True)
class Options:
    """Measure preprocessing against the tokenizer libraries, on this machine."""

    megabytes: float = 16.0
    """Text to tokenise; at most 30."""
    workers: tuple[int, ...] = (1, 2)
    """Numbers of processes; begin with 1."""
    rounds: int = 3
    """Measurements of everything."""
    vocab_size: int = 8192
    """Ids of the tokenizers."""
    json: Path | None = None
    """Write all numbers to this file."""


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of all processes on a CPU."""

    wall: float
    cpu: float

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.wall - other.wall, self.cpu - other.cpu)


def cost(work: Callable[[], Any]) -> Cost:
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    return Cost(time.perf_counter() - wall, sum(os.times()[:4]) - cpu)


def train(texts: Sequence[str], vocab_size: int, folder: Path) -> Iterator[str]:
    """Specs of a sentencepiece, a Hugging Face and a tiktoken tokenizer. The last has the second's merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    train_sentencepiece(texts, vocab_size, folder / "spm.model")
    yield f"spm:{folder / 'spm.model'}"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    yield f"hf:{folder / 'tokenizer.json'}"
    # How ByteLevel spells bytes: printable ones as themselves, the others from U+0100 on, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {chr(byte): byte for byte in printable}
    spelled |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    lines = []
    for token, rank in sorted(bpe.get_vocab().items(), key=lambda item: item[1]):
        if token not in special:
            lines.append(f"{base64.b64encode(bytes(spelled[c] for c in token)).decode()} {rank}\n")
    (folder / "bpe.tiktoken").write_text("".join(lines))
    yield f"tiktoken:{folder / 'bpe.tiktoken'}"


def measure(spec: str, texts: Sequence[str], inputs: tuple[Path, Path], options: Options) -> dict[str, Any]:
    """All rounds of one tokenizer; `inputs` are the text once, and three times."""
    tokenizer = load_tokenizer(spec)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)  # warms its caches as well
    bare: list[Cost] = []
    ours: dict[int, list[Cost]] = {workers: [] for workers in options.workers}
    whole: dict[int, list[float]] = {workers: [] for workers in options.workers}
    recipe, output = Recipe(tokenizer=spec, append_eod=True), inputs[0].with_name("out")
    for _ in range(options.rounds):
        bare.append(cost(lambda: [tokenizer.encode(text) for text in texts]))
        for workers in options.workers:
            once, thrice = (cost(partial(preprocess, [path], output, recipe, workers=workers)) for path in inputs)
            ours[workers].append(thrice - once)
            whole[workers].append(thrice.wall)
    return {
        "tokenizer": spec.partition(":")[0],
        "tokens": tokens,
        "bare": [asdict(one) for one in bare],
        "preprocess": {workers: [asdict(one) for one in found] for workers, found in ours.items()},
        "run_seconds": whole,
    }


def rates(found: dict[str, Any], megabytes: float, options: Options) -> dict[str, Any]:
    """Medians: what the table shows."""

    def median(costs: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in costs)

    bare_cpu = megabytes / median(found["bare"], "cpu")
    tokens_per_mb = found["tokens"] / megabytes
    rows = {"bare": {"mb_per_second": megabytes / median(found["bare"], "wall"), "mb_per_cpu_second": bare_cpu}}
    for workers in options.workers:
        costs = found["preprocess"][workers]
        wall, cpu = (2 * megabytes / median(costs, name) for name in ("wall", "cpu"))
        rows[f"{workers} workers"] = {"mb_per_second": wall, "mb_per_cpu_second": cpu, "of_bare": cpu / bare_cpu}
        one = rows.get("1 workers")
        if one:
            rows[f"{workers} workers"]["of_linear"] = wall / one["mb_per_second"] / workers
    for row in rows.values():
        row["tokens_per_second"] = row["mb_per_second"] * tokens_per_mb
        row["tokens_per_cpu_second"] = row["mb_per_cpu_second"] * tokens_per_mb
    return rows


def show(runs: Sequence[dict[str, Any]]) -> Table:
    speeds = ("MB/s", "Mtokens/s", "MB/s of CPU time", "Mtokens/s of CPU time")
    table = Table("tokenizer", "", *speeds, "of bare", "of linear")
    for run in runs:
        for name, row in run["medians"].items():
            shares = [f"{row[key]:.0%}" if key in row else "" for key in ("of_bare", "of_linear")]
            per_core = (f"{row['mb_per_cpu_second']:.2f}", f"{row['tokens_per_cpu_second'] / 1e6:.2f}")
            speed = (f"{row['mb_per_second']:.2f}", f"{row['tokens_per_second'] / 1e6:.2f}")
            table.add_row(run["tokenizer"], name, *speed, *per_core, *shares)
    return table


def main(options: Options) -> None:
    if options.workers[:1] != (1,) or options.rounds < 1 or not 0 < options.megabytes <= 30:
        raise ConfigError("--workers begins with 1, --rounds is at least 1, --megabytes above 0 and at most 30")
    facts = provenance(device.choose("cpu", 0, 1))
    with tempfile.TemporaryDirectory() as folder:
        build(CorpusArguments(output=Path(folder), max_mb=options.megabytes))
        texts = list(read_documents([Path(folder) / "train.jsonl"]))
        inputs = Path(folder) / "once.jsonl", Path(folder) / "thrice.jsonl"
        for path, times in zip(inputs, (1, 3), strict=True):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in times * texts))
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        runs = []
        specs = list(train(texts[: len(texts) // 4], options.vocab_size, Path(folder)))
        for spec in track(specs, "measuring", console=Console(stderr=True)):
            found = measure(spec, texts, inputs, options)
            runs.append({**found, "medians": rates(found, megabytes, options)})
    console = Console(width=120)
    console.print(show(runs))
    console.print(in_a_line(facts))
    if options.json:
        chosen = {key: str(value) for key, value in asdict(options).items() if key != "json"}
        report = {**facts, "options": chosen, "text_megabytes": megabytes, "documents": len(texts), "runs": runs}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    arguments = tyro.cli(Options, description=__doc__, use_underscores=True)
    with reported():
        main(arguments)
