"""Model types without a class in transformers' map of causal models, each with a judge of transformers' own modules."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel


class Step3p5(nn.Module):
    """The text of Step-3.7 with a head. Its files have the names of the published ones, as transformers reads them."""

    NAMES: ClassVar = {
        ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
        ".mlp.gate.weight": ".moe.gate.weight",
        ".mlp.experts.down_proj": ".moe.down_proj.weight",
        ".mlp.shared_experts.": ".share_expert.",
    }

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.model = Step3p7TextModel._from_config(config, attn_implementation="eager")
        self.model.embed_tokens.padding_idx = None  # the config takes no null, and its token would not be trained
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_bs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(tokens_bs).last_hidden_state))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stored = {}
        for name, tensor in self.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name.endswith(".mlp.experts.gate_up_proj"):
                for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                    stored[name.replace("mlp.experts.gate_up_proj", f"moe.{part}_proj.weight")] = half.contiguous()
                continue
            for theirs, published in self.NAMES.items():
                name = name.replace(theirs, published)
            stored[name] = tensor.contiguous()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(self.config.to_json_string())

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype) -> nn.Module:
        model = cls(AutoConfig.from_pretrained(folder))
        stored = load_file(folder / "model.safetensors")
        for name in model.state_dict():
            if name.endswith(".mlp.experts.gate_up_proj"):
                halves = [name.replace("mlp.experts.gate_up_proj", f"moe.{x}_proj.weight") for x in ("gate", "up")]
                stored[name] = torch.cat([stored.pop(half) for half in halves], dim=1)
                continue
            published = name
            for theirs, ours in cls.NAMES.items():
                published = published.replace(theirs, ours)
            if published in stored:
                stored[name] = stored.pop(published)
        model.load_state_dict(stored, strict=not model.config.tie_word_embeddings)
        return model.to(dtype).eval()


JUDGES = {"step3p5": Step3p5}


def judge_of(folder: Path) -> type[Step3p5] | None:
    """The judge of the model in a folder, if transformers has no class of its own for it."""
    return JUDGES.get(json.loads((folder / "config.json").read_text())["model_type"])
