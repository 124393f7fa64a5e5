"""XGLM (arXiv 2112.10668): BioGPT with positions of sines and cosines, which are not trained.

At Hugging Face: xglm.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megapar_models.codecs import Always, Dropouts, Written
from megapar_models.families.biogpt import BIOGPT, LAYERDROP, BioGPTModel, BioGPTStage
from megapar_models.families.opt import OPT
from megapar_models.family import Codec, Family, ModelType, Raw, like, same


class XGLMStage(BioGPTStage):
    """Consecutive XGLM layers."""

    sizes_of_weights = ()
    learns_positions = False

    def embedded_positions(self, rows: Tensor) -> Tensor:
        """Return sines of a row at h/2 wavelengths, then cosines. With an odd h a zero follows."""
        half = self.model.hidden_size // 2
        # In the order of operations of tensor2tensor: its wavelengths end at 2 pi 10,000.
        step = math.log(10000) / (half - 1)
        frequencies = torch.exp(torch.arange(half, device=rows.device).float() * -step)
        angles = rows.float()[..., None] * frequencies
        table = torch.cat((angles.sin(), angles.cos()), -1)
        if self.model.hidden_size % 2:
            table = torch.nn.functional.pad(table, (0, 1))
        return table.to(self.factory.sharding.dtype)


class _Padding(Codec):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        row = raw.get("pad_token_id", 1)
        if row is not None and row >= XGLMStage.first_position:
            yield f"pad_token_id={row!r} is not supported; 0 and 1 are: transformers has zeros for that position"


XGLM = Family(
    name="xglm",
    stage=XGLMStage,
    activations=BIOGPT.activations,
    options=BioGPTModel,
    hugging_face=like(
        OPT,
        model_types={"xglm": ModelType("XGLMForCausalLM", fixed=LAYERDROP)},
        codecs=(
            Always({"rms_norm_eps": 1e-5}, key_per_head=True),  # the eps of norms is no field
            _Padding(),
            Dropouts(("activation_dropout",)),
            Written({**LAYERDROP, "pad_token_id": None}),
        ),
        modules={
            "embedding": "model.embed_tokens",
            "norm": "model.layer_norm",
            **dict.fromkeys(("positions", "project_in", "project_out")),
            "layers.*.attention_norm": "model.layers.*.self_attn_layer_norm",
            **{f"layers.*.attention.{name}": f"model.layers.*.self_attn.{name}_proj" for name in "qkv"},
            "layers.*.attention.o": "model.layers.*.self_attn.out_proj",
            "layers.*.mlp_norm": "model.layers.*.final_layer_norm",
            "layers.*.mlp.up": "model.layers.*.fc1",
            "layers.*.mlp.down": "model.layers.*.fc2",
        },
        fields={
            **{"word_embed_proj_dim": None, "do_layer_norm_before": None, **same("scale_embedding")},
            **{"d_model": "hidden_size", "num_layers": "num_hidden_layers", "attention_heads": "num_attention_heads"},
        },
        defaults={"activation_function": "gelu", "scale_embedding": True, "attention_dropout": 0.1},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)
