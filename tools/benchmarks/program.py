"""pretrain.py, the whole program, beside a bare loop around plain PyTorch.

Both train the Llama of the layouts on synthetic tokens, in one process of one thread, in fp32. A pair is two fresh
processes, one after the other, each alone on the machine. A run of pretrain.py has all that it has for a user: data,
reports of each step, metrics.jsonl. The bare loop has its batches in memory. Each step is forward, backward, clipping
and AdamW, and its loss is read.

- tokens/s: of the median step, without the first ones.
- speed: that of pretrain.py over that of the bare loop, median and range over pairs.
"""

import multiprocessing
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import layouts
from benchmarks.contenders import LAYOUTS
from benchmarks.counting import cost, ratio
from benchmarks.harness import Case, Found, Output
from benchmarks.peers import Plain
from benchmarks.programs import pretrain

_WARMUP = 3  # steps: memory is taken, oneDNN compiles
_BARE_LOOP = "a bare loop around plain PyTorch"


@dataclass(frozen=True)
class Options(Output):
    """Measure pretrain.py on this machine."""

    pairs: int = 5
    """Runs of each."""
    steps: int = 11
    """Timed steps of a run, after 3 others."""
    hidden: int = 256
    """Width of the model; the MLP is 11/4 as wide."""
    num_hidden_layers: int = 8
    """Transformer layers."""


def _of_program(options: Options) -> float:
    """Tokens per second of the median step of a run of pretrain.py."""
    shape = layouts.first_table(options.hidden, options.num_hidden_layers)
    config = layouts.make_config(shape, options.hidden, LAYOUTS["single"], {})
    heads, sizes = ("num_attention_heads", "num_key_value_heads"), ("hidden_size", "intermediate_size", "vocab_size")
    batches = ("seq_length", "global_batch_size", "micro_batch_size")
    flags: dict[str, object] = {
        **{f"model.{name}": getattr(config.model, name) for name in ("family", "num_hidden_layers", *heads, *sizes)},
        **{f"train.{name}": getattr(config.train, name) for name in batches},
        **{"train.steps": _WARMUP + options.steps, "optimizer.lr": config.optimizer.lr, "data.train": "synthetic"},
        **{"launch.device": "cpu", "launch.threads": 1},
    }
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder:
        lines = pretrain(Path(folder, "run"), given)
    return statistics.median([line["tokens_per_second"] for line in lines if "tokens_per_second" in line][_WARMUP:])


def _bare_loop(options: Options) -> float:
    """Tokens per second of the median step of plain PyTorch."""
    torch.set_num_threads(1)
    shape = layouts.first_table(options.hidden, options.num_hidden_layers)
    plain = layouts.build_contender(shape, options.hidden, LAYOUTS["single"], Plain.name, torch.device("cpu"))
    seconds = []
    for batch in layouts.make_batches(plain.config, _WARMUP + options.steps):
        spent, _ = cost(partial(plain.step, *batch))
        seconds.append(spent.wall)
    return shape.global_batch_size * shape.seq_length / statistics.median(seconds[_WARMUP:])


def _of_bare_loop(options: Options) -> float:
    # A new interpreter: what this one has set up for its own runs must not help the bare loop, nor hinder it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_bare_loop, (options,))


def measure(options: Options) -> Found:
    """Run the pairs, the two in reversed order in each next pair."""
    ways = {"pretrain.py": partial(_of_program, options), _BARE_LOOP: partial(_of_bare_loop, options)}
    turns = Case(ways, options.pairs, warmup=0, bar=True).measure()
    tokens = {name: found.notes for name, found in turns.items()}
    return Found({"tokens_per_second": tokens, "speed": ratio(*tokens.values())})
