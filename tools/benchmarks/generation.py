"""Tokens a second of a small Llama that continues prompts, in turns with `generate` of transformers, on one thread.

transformers makes the model with random weights, and its files are converted. Both keep keys and values, and always
take the most likely token. The benchmark fails if their texts differ.
"""

import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megapar_models.generation import Sampling, generate
from megapar_models.stage import Stage

from benchmarks.counting import ratio, spread
from benchmarks.families import converted
from benchmarks.harness import Case, Found, Output
from benchmarks.ranks import BenchmarkError

OURS, THEIRS = "megapar", "transformers"
VOCABULARY = 4096


@dataclass(frozen=True)
class Options(Output):
    """Measure generation on this machine."""

    prompts: tuple[int, ...] = (1, 8)
    """Numbers of prompts of a batch."""
    length: int = 64
    """Tokens of a prompt."""
    tokens: int = 64
    """Tokens to add."""
    layers: int = 8
    """Layers of the Llama."""
    hidden_size: int = 512
    """Its width, a multiple of 128: two query heads of 64 share a key/value head."""
    rounds: int = 3
    """Rounds that count, after one that warms up."""


def models(options: Options) -> tuple[Stage, Any]:
    """Our model, and that of transformers with the same weights, in fp32."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    width = options.hidden_size
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=options.length + options.tokens,
        initializer_range=0.1,  # at 0.02 a model without training repeats one token
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(f"{folder}/theirs")
        return converted(Path(folder, "theirs"), Path(folder, "ours")), theirs


@torch.no_grad()
def of_transformers(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What generate of transformers gives."""
    ids_bs = torch.tensor(prompts)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    rows: list[list[int]] = model.generate(ids_bs, attention_mask=torch.ones_like(ids_bs), **options).tolist()
    return rows


def check(texts: Mapping[str, list[list[int]]]) -> None:
    """Raise BenchmarkError if the texts differ."""
    if texts[OURS] != texts[THEIRS]:
        raise BenchmarkError(f"the texts after {len(texts[OURS])} prompts differ")


def measure(options: Options) -> Found:
    """Time batches of each number of prompts."""
    torch.set_num_threads(1)
    stage, theirs = models(options)
    rows: list[dict[str, Any]] = []
    for count in options.prompts:
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(VOCABULARY, (count, options.length), generator=generator).tolist()
        ways = {
            OURS: partial(generate, stage, prompts, options.tokens, -1, Sampling(0.0)),
            THEIRS: partial(of_transformers, theirs, prompts, options.tokens),
        }
        found = Case(ways, options.rounds, check=check).measure()
        rates = {way: spread(count * options.tokens / one for one in turns.wall) for way, turns in found.items()}
        speed = ratio(found[THEIRS].wall, found[OURS].wall)
        rows.append({"prompts": count, "tokens_per_second": rates, "speed": speed})
    return Found({"rows": rows})
