"""What a run leaves: the state of a rank, metrics.jsonl and the tensors of a checkpoint, to compare bitwise."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.step.state import TrainState
from megapar.system import device

Bits = dict[str, Tensor]


def bits(state: TrainState) -> Bits:
    """All state of this rank from step to step: weights as the model has them, main weights and moments."""
    found = {"weights": state.weights.flat.clone()}
    for place, item in enumerate(state.optimizer.slices()):
        for name in ("main", "exp_avg", "exp_avg_sq"):
            found[f"{name} of {item.spec.name} ({place})"] = item.tensors[name].clone()
    return found


def assert_bitwise(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Same names, dtypes and bytes; a NaN equals itself."""
    assert set(found) == set(expected), what
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{what}: {name}"
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), f"{what}: {name} differs"


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock, memory and traffic add to them."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "consumed_samples")
    return [{key: line[key] for key in kept} for line in lines]


def stored(path: Path) -> dict[str, Tensor]:
    """Every logical tensor of a checkpoint."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


def behind_the_host() -> AbstractContextManager[Any]:
    """CPUs count as devices computing behind the host: updates are judged and numbers are read as on a GPU."""
    return patch.object(device, "is_asynchronous", return_value=True)
