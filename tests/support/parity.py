"""Compares models of transformers with the same ones here: logits, every gradient, and the files that come back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megapar_models.convert.config_json import from_hugging_face
from megapar_models.convert.parity import load_fp32
from torch import Tensor, nn

from megapar import context
from megapar.batch import MicroBatch
from megapar.errors import ConfigError
from megapar.verify import logical
from tests.support import tiny_models
from tests.support.hugging_face import assert_same_tensors
from tests.support.rules import gradients
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

LENGTH = 24


def random_model(fields: Mapping[str, Any]) -> Any:
    """A model of transformers with eager attention. No weight, bias or buffer of a router is 0, and no norm is 1."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    stated = dict(fields)
    config = transformers.AutoConfig.for_model(stated.pop("model_type"), **stated)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    routers = {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *routers.items()]:
            is_norm = tensor.ndim == 1 and "norm" in name
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + is_norm)
    return model.eval()


def check_parity(fields: Mapping[str, Any], folder: Path) -> None:
    """Logits within 1e-6 of the largest, gradients within 1e-5 of each tensor's, and bitwise the same files."""
    theirs = random_model(fields)
    theirs.save_pretrained(folder / "hf")
    hf_to_native(HfToNative(folder / "hf", folder / "native", verify=False))
    config, stage = load_fp32(folder / "native", torch.float32)
    generator = torch.Generator().manual_seed(1)
    tokens_bs = torch.randint(config.model.vocab_size, (2, LENGTH + 1), generator=generator)
    weights_bs = 0.1 + torch.rand(2, LENGTH, generator=generator)
    batch = MicroBatch.of_samples(tokens_bs[:, :-1], tokens_bs[:, 1:], weights_bs, torch.arange(2))
    logits_bsv = theirs(batch.tokens_bs).logits
    ours_bsv = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., : config.model.vocab_size]
    scale = float(logits_bsv.detach().abs().max())
    difference = float((ours_bsv - logits_bsv).detach().abs().max())
    assert difference <= 1e-6 * max(scale, 1.0), f"logits differ by {difference} of {scale}"
    losses = F.cross_entropy(logits_bsv.flatten(0, 1), batch.targets_bs.flatten(), reduction="none")
    (losses * weights_bs.flatten()).sum().backward()
    stage(None, batch).backward()
    check_gradients(theirs, gradients(stage), folder)
    native_to_hf(NativeToHf(folder / "native", folder / "back", verify=False))
    assert_same_tensors(folder / "back", folder / "hf")


def check_gradients(theirs: nn.Module, found: Mapping[str, Tensor], folder: Path) -> None:
    """Gradients are converted as if they were weights, so every name and every permutation of rows is that of files."""
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            assert param.grad is not None, name
            param.copy_(param.grad)
    theirs.save_pretrained(folder / "gradients")  # type: ignore[operator]
    hf_to_native(HfToNative(folder / "gradients", folder / "native_gradients", verify=False))
    _, expected = load_fp32(folder / "native_gradients", torch.float32)
    for param in expected.parameters():
        param.grad = param.detach()
    for name, tensor in gradients(expected).items():
        scale = tensor.norm()
        # An expert that no token chose has none.
        assert scale > 0 or ".experts." in name, f"{name}: no gradient"
        assert (found[name] - tensor).norm() <= 1e-5 * scale, f"{name}: {(found[name] - tensor).norm()} of {scale}"


def check_flips(
    fields: Mapping[str, Any], changed: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Fields of a config.json with other values: `changed` ones give the logits of transformers, which are others.

    The rest are refused by a line with their name.
    """
    theirs = random_model(fields)
    theirs.save_pretrained(folder / "hf")
    hf_to_native(HfToNative(folder / "hf", folder / "native", verify=False))
    _, whole = load_fp32(folder / "native", torch.float32)
    weights = _tensors(whole)
    raw = json.loads((folder / "hf" / "config.json").read_text())
    tokens_bs = torch.randint(131, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    base = theirs(tokens_bs).logits.detach()
    for flip in changed:
        model = from_hugging_face({**raw, **flip})
        stage = tiny_models.build(tiny_models.config(model), context.single()).eval()
        logical.fill([stage], weights)
        for name, buffer in stage.named_buffers():
            buffer.copy_(whole.get_buffer(name))
        batch = MicroBatch.of_samples(tokens_bs, tokens_bs, torch.zeros(tokens_bs.shape), torch.arange(1))
        ours = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., :131].detach()
        other = random_model({**fields, **flip})
        other.load_state_dict(theirs.state_dict())
        expected = other(tokens_bs).logits.detach()
        scale = float(expected.abs().max())
        assert float((ours - expected).abs().max()) <= 1e-6 * max(scale, 1.0), flip
        assert float((expected - base).abs().max()) > 1e-4 * scale, f"{flip} changes nothing"
    for flip in refused:
        with pytest.raises(ConfigError, match=next(iter(flip))):
            from_hugging_face({**raw, **flip})


def _tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Every logical tensor of a whole model."""
    found = {}
    for param in stage.parameters():
        for piece, first, last in param.spec.segments():  # type: ignore[attr-defined]
            found[piece.name] = param.detach().flatten()[first:last].view(piece.shape)
    return found
