"""Checks of a family against transformers: a tiny random model of theirs, converted, computes and learns the same.

A family's test gives a `Case` of tests.support.hugging_face. Its sizes should be unequal, its eps 1e-3, its windows
shorter than LENGTH, and its layers more than one pattern of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from megapar_models.stage import Stage
from torch import Tensor

from megapar import context
from megapar.config.options import Config
from megapar.errors import MegaparError
from megapar.verify import logical
from tests.support import close, tiny_models
from tests.support.grid import Layout, check_on_ranks
from tests.support.hugging_face import Case, assert_same_tensors, save_model, tensors
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf
from tools.generate import load_model

LENGTH = 24
# Fields about files and versions. transformers itself would load another class, or none, with other values.
NOT_FLIPPED = frozenset(("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"))


@dataclass(frozen=True)
class Pair:
    """A model of transformers, and ours made of its files."""

    source: Path
    native: Path
    theirs: Any
    config: Config
    stage: Stage


def converted(folder: Path, case: Case) -> Pair:
    """The pair of a case, with every 1-D tensor and bias random."""
    return _pair(save_model(folder / "hf", case), folder / "native")


def _pair(source: Path, native: Path) -> Pair:
    hf_to_native(HfToNative(source, native, verify=False))
    config, stage = load_model(native)
    return Pair(source, native, _theirs(source), config, stage)


def _theirs(source: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def logits(pair: Pair) -> tuple[Tensor, Tensor]:
    """Ours and theirs, [b, s, v], of the same random tokens."""
    batch = tiny_models.batch(pair.config.model, length=LENGTH)
    with torch.no_grad():
        ours = pair.stage.logits(pair.stage.hidden_states(None, batch)).transpose(0, 1)
        return ours[..., : pair.config.model.vocab_size], pair.theirs(batch.tokens_bs).logits


def assert_logits(pair: Pair, tolerance: float = 1e-6) -> None:
    """The largest difference is below `tolerance` of the largest logit."""
    ours, theirs = logits(pair)
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def assert_gradients(pair: Pair, folder: Path, tolerance: float = 1e-5) -> None:
    """Loss with a weight for each token, and every gradient.

    Their gradients are saved in place of their weights and converted, so names and layouts are those of the weights.
    """
    ctx = context.single()
    batch = tiny_models.batch(pair.config.model, length=LENGTH)
    loss = pair.stage(None, batch)
    loss.backward()
    logits_bsv = pair.theirs(batch.tokens_bs).logits
    losses = torch.nn.functional.cross_entropy(logits_bsv.transpose(1, 2), batch.targets_bs, reduction="none")
    expected = (losses * batch.weights_bs).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        for name, param in pair.theirs.named_parameters():
            assert param.grad is not None, name
            param.copy_(param.grad)
    pair.theirs.save_pretrained(folder / "gradients")
    hf_to_native(HfToNative(folder / "gradients", folder / "native_gradients", verify=False))
    _, gradients = load_model(folder / "native_gradients")
    found = logical.assemble([logical.held([pair.stage], ctx, logical.gradients, unsummed=True)])
    wanted = logical.assemble([logical.held([gradients], ctx, logical.weights)])
    close.assert_close(found, wanted, rtol=tolerance)


def assert_round_trip(pair: Pair, folder: Path) -> None:
    """Exported with the config.json of the import and with our own: the same tensors, bit for bit."""
    native_to_hf(NativeToHf(pair.native, folder / "copied", verify=False))
    assert_same_tensors(folder / "copied", pair.source)
    (pair.native / "config.json").rename(pair.native / "config.json.kept")
    native_to_hf(NativeToHf(pair.native, folder / "exported", verify=False))
    assert_same_tensors(folder / "exported", pair.source)


def assert_layout(pair: Pair, **sizes: Any) -> None:
    """Two steps on the ranks of a layout, such as tp=2, pp=2, equal one process: loss, gradients and weights."""
    check_on_ranks(Layout(pair.config.model, **sizes))


def flipped(value: Any) -> Any:
    """Another value of a field of config.json."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return {"silu": "gelu_pytorch_tanh"}.get(value, "relu2")
    if isinstance(value, dict):
        return {name: flipped(item) if isinstance(item, int | float) else item for name, item in value.items()}
    if isinstance(value, list):
        return value[::-1] if value != value[::-1] else value[1:]
    return 3


def assert_every_field_is_read(pair: Pair, folder: Path) -> dict[str, str]:
    """Flip each field of config.json: it is refused, or our logits are still those of transformers.

    Returns by field what happened: "refused" by us, "theirs refuses", "same" logits as before, or "changed" ones.
    """
    raw = json.loads((pair.source / "config.json").read_text())
    before, _ = logits(pair)
    outcomes = {}
    for field in sorted(raw.keys() - NOT_FLIPPED):
        source = folder / "flipped" / field / "hf"
        source.mkdir(parents=True)
        (source / "config.json").write_text(json.dumps({**raw, field: flipped(raw[field])}))
        for file in pair.source.glob("*.safetensors*"):
            (source / file.name).symlink_to(file)
        native = source.parent / "native"
        try:
            hf_to_native(HfToNative(source, native, verify=False))
        except MegaparError:
            outcomes[field] = "refused"
            continue
        config, stage = load_model(native)
        try:
            theirs = _theirs(source)
        except (ValueError, TypeError, RuntimeError, StrictDataclassError):
            outcomes[field] = "theirs refuses"
            continue
        changed = Pair(source, native, theirs, config, stage)
        ours, theirs = logits(changed)
        difference = (ours - theirs).abs().max() / theirs.abs().max()
        assert difference <= 1e-5, f"{field}={flipped(raw[field])!r} is silently wrong by {difference:.1e}"
        outcomes[field] = "same" if torch.equal(ours, before) else "changed"
    return outcomes


def assert_one_dimensional_tensors_differ(pair: Pair) -> None:
    """No norm's weight and no bias is constant: a swapped or dropped one would not be seen."""
    for name, tensor in tensors(pair.source).items():
        assert tensor.numel() == 1 or tensor.std() > 0, name
