"""Models of transformers, saved by it, and what tests of their conversion compare."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

POSITIONS = 2048 + 64


@dataclass(frozen=True)
class Case:
    """A model_type and the fields of its config.json other than in `sizes`."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.kind, *self.changes])


def sizes(kind: str) -> dict[str, Any]:
    """config.json of two layers, complete but for what has a default."""
    if kind == "gpt2":
        fields = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
    else:
        fields = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        fields |= {"intermediate_size": 88, "max_position_embeddings": POSITIONS, "head_dim": 12}
    if kind == "mixtral":
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return {"model_type": kind, "vocab_size": 131, "bos_token_id": None, "eos_token_id": 0, **fields}


def save_model(folder: Path, case: Case, dtype: torch.dtype = torch.float32, **impl: Any) -> Path:
    """A model of transformers, saved by it: every bias random and not zero, every norm's weight random and not one."""
    return _save("AutoModelForCausalLM", folder, case, dtype, **impl)


def save_rewards(folder: Path, case: Case, labels: int = 1) -> Path:
    """As `save_model`, with a head for whole sequences. The last id is the padding."""
    last = {**sizes(case.kind), **case.changes}["vocab_size"] - 1
    changed = Case(case.kind, {**case.changes, "num_labels": labels, "pad_token_id": last})
    return _save("AutoModelForSequenceClassification", folder, changed, torch.float32)


def _save(auto_class: str, folder: Path, case: Case, dtype: torch.dtype, **impl: Any) -> Path:
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    fields = {**sizes(case.kind), **case.changes}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = getattr(transformers, auto_class).from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = param.ndim == 1 and name.endswith("weight")
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1 + is_norm)
    model.to(dtype).save_pretrained(folder, **impl)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same_tensors(found: Path, expected: Path, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
    """The folders have the same tensors bit by bit. `renamed` has parts of names expected, with those found."""
    ours, theirs = tensors(found), tensors(expected)
    for other, here in renamed.items():
        theirs = {name.replace(other, here): tensor for name, tensor in theirs.items()}
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def assert_parity(folder: Path) -> None:
    """Its report names three prompts, one of them with positions beyond 2,048, and differences below 1e-5."""
    report = json.loads((folder / "parity.json").read_text())
    assert report["reference"].startswith("transformers ")
    rows = report["prompts"]
    assert [(row["tokens"], row["first_position"]) for row in rows] == [(64, 0), (64, 0), (POSITIONS, 2048)]
    assert all(0 <= row["relative"] <= 1e-5 and row["largest_logit"] > 0.5 for row in rows)


def refused(kind: type[Exception], options: HfToNative | NativeToHf, words: str) -> None:
    """The conversion fails with these words in its message, in one line, and leaves nothing behind."""
    before = sorted(options.dst.parent.iterdir())
    with pytest.raises(kind) as caught:
        (hf_to_native if isinstance(options, HfToNative) else native_to_hf)(options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(options.dst.parent.iterdir()) == before
