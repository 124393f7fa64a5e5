"""Adapters against PEFT's on a model of transformers, in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.config.options import AdapterConfig
from tests.support import adapters
from tests.support.model_types import TYPES
from tests.support.published import converted, random_model, weights_of

peft = pytest.importorskip("peft", reason="not run: needs peft, pip install peft")

# From our words to the last words of their modules.
THEIR_NAMES = {
    **{letter: f"self_attn.{letter}_proj" for letter in "qkvo"},
    **{word: f"mlp.{word}_proj" for word in ("gate", "up", "down")},
}


class Peft:
    """A model of transformers with adapters of PEFT."""

    def __init__(self, theirs: Any, adapter: AdapterConfig):
        targets = adapter.targets or tuple(THEIR_NAMES)
        config = peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            target_modules=[THEIR_NAMES[word].partition(".")[2] for word in targets],
        )
        self.model = peft.get_peft_model(theirs, config)
        self.factors: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                number, _, rest = name.partition("layers.")[2].partition(".")
                module, _, kind = rest.removesuffix(".default.weight").rpartition(".")
                word = next(word for word, module_of in THEIR_NAMES.items() if module_of == module)
                part = module.partition(".")[0].replace("self_attn", "attention")
                self.factors[f"layers.{number}.{part}.{word}.{kind.lower()}"] = param

    def logits(self, tokens_bs: Tensor) -> Tensor:
        logits_bsv: Tensor = self.model(tokens_bs).logits
        return logits_bsv


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterConfig(rank=3, alpha=7.0),
        AdapterConfig(rank=4, alpha=8.0, targets=("q", "v", "down"), rslora=True),
    ],
    ids=["all", "some, rslora"],
)
def test_adapters_are_those_of_peft(adapter: AdapterConfig, tmp_path: Path) -> None:
    case = TYPES["llama"]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    base = converted(tmp_path / "theirs", tmp_path / "ours")
    other = Peft(theirs, adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in other.factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    tensors = {**weights_of(base), **{name: factor.detach().clone() for name, factor in other.factors.items()}}
    state = adapters.make_state(base.model, adapter, tensors)
    adapters.check(state, other)
