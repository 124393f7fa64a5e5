"""Families of tests whose layers have several residual streams, in the forms of three published models.

DeepSeek V4 mixes four streams and ends by a learned head; GLM-5.3-Flash ends by the mean; Hy4 mixes none.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from megapar_models import reference as plain
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.families.mixtral import MIXTRAL as MIXTRAL_FAMILY
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.layer_kind import LayerKind
from megapar_models.reference import Tensors
from megapar_models.streams import HyperConnections
from torch import Tensor

from megapar.config.model_options import ModelConfig
from tests.support.grid import LLAMA, MIXTRAL, of

# Numbers of streams other than the published ones, so that none is right by chance.
V4 = HyperConnections(count=3, eps=1e-3, norm_eps=1e-3, mixing_steps=20, learns_end=True)
GLM = replace(V4, count=2, mixing_steps=3, learns_end=False)
HY4 = HyperConnections(
    count=4, eps=1e-3, norm_eps=1e-3, post_factor=1.5, post_eps=1e-3, scale=0.5, pre_bias=-1.0, learns_end=True
)


class V4Stage(MixtralStage[MixtralModel]):
    """Experts in every layer."""

    @classmethod
    def layer_kind(cls, model: MixtralModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), stream=V4)


class GlmStage(LlamaStage):
    STREAM: ClassVar[HyperConnections] = GLM

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), stream=cls.STREAM)


class Hy4Stage(GlmStage):
    """A layer without an MLP, and one without a mixer, among others."""

    STREAM = HY4

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return [kind, replace(kind, mlp="none"), replace(kind, mixer="none", rotary=None, qk_norm=False), kind][number]


# In plain PyTorch


def plain_numbers(rule: HyperConnections, tensors: Tensors, name: str, x_bsnh: Tensor, kinds: str) -> list[Tensor]:
    """Logits of pre, and if `kinds` say so of post and comb, from the definition in arXiv 2409.19606."""
    flat = x_bsnh.flatten(2)
    normed = flat / (flat.square().mean(-1, keepdim=True) + rule.norm_eps).sqrt()
    n = rule.count
    rows = {"pre": range(n), "post": range(n, 2 * n), "comb": range(2 * n, 2 * n + n * n)}
    found = []
    for number, kind in enumerate(kinds.split()):
        matrix = tensors[f"{name}.weight"][list(rows[kind])]
        found.append(normed @ matrix.t() * tensors[f"{name}.scale"][number] + tensors[f"{name}.{kind}_bias"])
    return found


def plain_connection(
    rule: HyperConnections, tensors: Tensors, name: str, x_bsnh: Tensor, branch: Callable[[Tensor], Tensor]
) -> Tensor:
    kinds = "pre post comb" if rule.mixing_steps else "pre post"
    pre, post, *comb = plain_numbers(rule, tensors, name, x_bsnh, kinds)
    streams = list(x_bsnh.unbind(2))
    read = sum((pre[..., i, None].sigmoid() + rule.eps) * stream for i, stream in enumerate(streams))
    y = branch(read)
    if comb:
        mix = comb[0].unflatten(-1, (rule.count, -1)).softmax(-1) + rule.eps
        for step in range(2 * rule.mixing_steps - 1):
            mix = mix / (mix.sum(-1 if step % 2 else -2, keepdim=True) + rule.eps)
        streams = [sum(mix[..., i, j, None] * stream for i, stream in enumerate(streams)) for j in range(rule.count)]
    factors = rule.post_factor * post.sigmoid() + rule.post_eps
    return torch.stack([stream + factors[..., i, None] * y for i, stream in enumerate(streams)], dim=2)


def plain_logits(form: str, model: Any, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """Logits in plain PyTorch."""
    rule = {"v4": V4, "glm": GLM, "hy4": HY4}[form]
    x = torch.stack([tensors["embedding.weight"][tokens_bs]] * rule.count, dim=2)
    for number in range(4):
        name = f"layers.{number}"

        def attention(x: Tensor, name: str = name) -> Tensor:
            return plain.attention(
                model, tensors, f"{name}.attention", plain.rms_norm(model, tensors, f"{name}.attention_norm", x)
            )

        def mlp(x: Tensor, name: str = name) -> Tensor:
            part = plain.mlp
            normed = plain.rms_norm(model, tensors, f"{name}.mlp_norm", x)
            if form == "v4":
                return plain.mixture(model, tensors, f"{name}.mlp", normed, part)
            return part(model, tensors, f"{name}.mlp", normed)

        if (form, number) != ("hy4", 2):
            x = plain_connection(rule, tensors, f"{name}.attention_stream", x, attention)
        if (form, number) != ("hy4", 1):
            x = plain_connection(rule, tensors, f"{name}.mlp_stream", x, mlp)
    if form == "glm":
        ended = sum(x.unbind(2)) / rule.count
    else:
        (pre,) = plain_numbers(rule, tensors, "stream_end", x, "pre")
        ended = sum((pre[..., i, None].sigmoid() + rule.eps) * stream for i, stream in enumerate(x.unbind(2)))
    return plain.rms_norm(model, tensors, "norm", ended) @ tensors["head.weight"].t()


V4_FAMILY = replace(MIXTRAL_FAMILY, name="streams_v4", stage=V4Stage, reference=partial(plain_logits, "v4"))
GLM_FAMILY = replace(LLAMA_FAMILY, name="streams_glm", stage=GlmStage, reference=partial(plain_logits, "glm"))
HY4_FAMILY = replace(LLAMA_FAMILY, name="streams_hy4", stage=Hy4Stage, reference=partial(plain_logits, "hy4"))
PLAIN_LLAMA = replace(LLAMA, attention_bias=False, qk_norm=False)
MODELS = {
    "v4": replace(of(MIXTRAL, layers=4), family=f"{__name__}:V4_FAMILY"),
    "glm": replace(PLAIN_LLAMA, family=f"{__name__}:GLM_FAMILY"),
    "hy4": replace(PLAIN_LLAMA, family=f"{__name__}:HY4_FAMILY"),
}
