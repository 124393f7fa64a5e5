"""Checkpoints to export, and what an export's parity.json says about its tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapar_models.convert.stream import write_weights
from megapar_models.counts import WholeModel
from megapar_models.registry import validate

from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, TrainConfig
from tests.support import tiny_models

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "llama", "qk_norm": True},
    "gpt2": {"family": "gpt", "num_key_value_heads": 4},
    "qwen2": {"family": "llama", "attention_bias": True},
}


def make_run(folder: Path, model: ModelConfig, **sections: Any) -> Path:
    """A checkpoint of random weights, as a training with these sections of options would save it."""
    config = validate(Config(model=model, train=TrainConfig(seq_length=16)), 1)
    tensors = tiny_models.random_tensors(config.model)
    shapes = {name: piece.shape for name, piece in WholeModel(config.model).tensors().items()}
    folder.mkdir(parents=True)
    write_weights(folder, replace(config, **sections), shapes, lambda name: tensors[name], shard_bytes=1 << 30)
    return folder


def make_checkpoint(folder: Path, kind: str = "llama", vocab_size: int = 800, **sections: Any) -> Path:
    """One of a model called `kind` in transformers."""
    model = tiny_models.model(**{"num_hidden_layers": 1, "vocab_size": vocab_size} | KINDS[kind])
    return make_run(folder, model, **sections)


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "parity.json").read_text())["tokenizer"]
