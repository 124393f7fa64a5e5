"""Preprocessing beside the bare tokenizer library on the same text: MB/s and tokens/s of a core, and over cores.

The text is the Python standard library's own sources, the tokenizers are trained on its beginning. "Bare" is the
library's encode on texts in memory, in one thread of as many processes as there are workers: cores of one chip slow
each other down, whatever runs on them. Preprocessing reads the texts from .jsonl, checks, tokenizes and writes. Its
speed is marginal: the time of a run over the text three times in a row, less the time of a run over it once. So the
start of processes, a second each, counts for nothing. Work is dealt in pieces of 4 MB: with
less than 8 MB a worker, the slowest decides. Rounds alternate; tables have the medians.

Time is wall clock, and CPU time of all processes together; other programs on the machine disturb the latter less. "Of
bare" is the CPU time of as many bare processes over ours. "Of linear" is the wall-clock speed per process over the
speed of one process.
"""

import base64
import json
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from build_corpus import Arguments as CorpusArguments
from build_corpus import build
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess, read_documents

from benchmarks.counting import Cost, cost, with_children
from benchmarks.harness import Found, Output, progress, table
from megapar.base.errors import ConfigError
from megapar.data.tokenizer import load_tokenizer, train_sentencepiece


@dataclass(frozen=True)
class Options(Output):
    """Measure preprocessing against the tokenizer libraries, on this machine."""

    megabytes: float = 16.0
    """Text to tokenize; at most 30."""
    workers: tuple[int, ...] = (1, 2)
    """Numbers of processes; begin with 1."""
    rounds: int = 3
    """Measurements of everything."""
    vocab_size: int = 8192
    """Ids of the tokenizers."""


def train(texts: Sequence[str], vocab_size: int, folder: Path) -> Iterator[str]:
    """Specs of a sentencepiece, a Hugging Face and a tiktoken tokenizer. The last has the second's merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    train_sentencepiece(texts, vocab_size, folder / "spm.model")
    yield f"spm:{folder / 'spm.model'}"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
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


def _encode(spec: str, texts: Sequence[str], barrier: Barrier, costs: "Queue[Cost]") -> None:
    tokenizer = load_tokenizer(spec)

    def encode() -> None:
        for text in texts:
            tokenizer.encode(text)

    encode()  # warms its caches
    barrier.wait()
    costs.put(cost(encode)[0])


def bare(spec: str, texts: Sequence[str], processes: int) -> Cost:
    """What the texts cost when `processes` encode them at the same time, all of them each."""
    spawn = multiprocessing.get_context("spawn")  # as fresh as a worker: old heaps make tokenizers slower
    barrier = spawn.Barrier(processes)
    costs = spawn.Queue()
    running = [spawn.Process(target=_encode, args=(spec, texts, barrier, costs)) for _ in range(processes)]
    for process in running:
        process.start()
    found = [costs.get() for _ in running]
    for process in running:
        process.join()
    return Cost(max(one.wall for one in found) / processes, sum(one.cpu for one in found) / processes)


def measure_tokenizer(spec: str, texts: Sequence[str], inputs: tuple[Path, Path], options: Options) -> dict[str, Any]:
    """All rounds of one tokenizer; `inputs` are the text once, and three times."""
    tokenizer = load_tokenizer(spec)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    costs: dict[str, dict[int, list[Cost]]] = {"bare": defaultdict(list), "preprocess": defaultdict(list)}
    recipe = PreprocessOptions(tokenizer=spec, append_eod=True)
    output = inputs[0].with_name("out")
    for _ in range(options.rounds):
        for workers in options.workers:
            costs["bare"][workers].append(bare(spec, texts, workers))
            runs = [partial(preprocess, [path], output, recipe, workers=workers) for path in inputs]
            once, thrice = (cost(run, with_children)[0] for run in runs)
            marginal = Cost((thrice.wall - once.wall) / 2, (thrice.cpu - once.cpu) / 2)
            costs["preprocess"][workers].append(marginal)
    plain = {who: {n: [asdict(one) for one in found] for n, found in each.items()} for who, each in costs.items()}
    return {"tokenizer": spec.partition(":")[0], "tokens": tokens, **plain}


def rates(found: dict[str, Any], megabytes: float, options: Options) -> dict[str, Any]:
    """Medians, of the cost of the text once: what the table shows."""
    rows: dict[str, dict[str, float]] = {}
    for workers in options.workers:
        for who in ("bare", "preprocess"):
            cpu, wall = (statistics.median(one[name] for one in found[who][workers]) for name in ("cpu", "wall"))
            speeds = {"mb_per_second": megabytes / wall, "mb_per_cpu_second": megabytes / cpu}
            row = speeds | {f"tokens{name[2:]}": speed / megabytes * found["tokens"] for name, speed in speeds.items()}
            row["of_linear"] = row["mb_per_second"] / rows.get(f"{who} 1", row)["mb_per_second"] / workers
            rows[f"{who} {workers}"] = row
        row["of_bare"] = row["mb_per_cpu_second"] / rows[f"bare {workers}"]["mb_per_cpu_second"]
    return rows


def measure(options: Options) -> Found:
    """Train the tokenizers and measure each."""
    if options.workers[:1] != (1,) or options.rounds < 1 or not 0 < options.megabytes <= 30:
        raise ConfigError("--workers begins with 1, --rounds is at least 1, --megabytes above 0 and at most 30")
    with tempfile.TemporaryDirectory() as folder:
        build(CorpusArguments(output=Path(folder), max_mb=options.megabytes))
        texts = list(read_documents([Path(folder) / "train.jsonl"]))
        inputs = Path(folder) / "once.jsonl", Path(folder) / "thrice.jsonl"
        for path, times in zip(inputs, (1, 3), strict=True):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in times * texts))
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        runs = []
        specs = list(train(texts[: len(texts) // 4], options.vocab_size, Path(folder)))
        for spec in progress(specs):
            found = measure_tokenizer(spec, texts, inputs, options)
            runs.append({**found, "medians": rates(found, megabytes, options)})
    rows = [
        {"tokenizer": run["tokenizer"], "what": name, **row} for run in runs for name, row in run["medians"].items()
    ]
    return Found({"text_megabytes": megabytes, "documents": len(texts), "runs": runs}, [table(rows)])
