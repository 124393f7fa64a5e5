"""Fields of `LayerKind`: the mixer or the MLP of a layer obeys each of them, or the layer is refused."""

import ast
import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
from megapar_models import attention, delta_net, gated_convolution, latent_attention, layer, mamba2, mlp, moe, qk_norm
from megapar_models.delta_net import GatedDelta
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.gated_convolution import GatedConvolution
from megapar_models.latent_attention import Latent
from megapar_models.layer_kind import READ_BY_LAYERS, HeadSizes, LayerKind, Temperature
from megapar_models.mamba2 import Mamba2
from megapar_models.moe import router_rule
from megapar_models.norms import NormRule
from megapar_models.registry import validate
from megapar_models.rotary import Rotary
from megapar_models.side_by_side import Factors, SideBySide

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import Config
from tests.support.grid import LLAMA

NORM = NormRule(1e-5)
MIXTURE = MoEConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
# Another value than the default of each field that layers do not read themselves.
OTHER: dict[str, Any] = {
    "sub_norms": True,
    "head_sizes": HeadSizes(4, 2, 10, 10),
    "mlp_width": 20,
    "rotary": Rotary(1e4, 10),
    "window": 5,
    "chunk": 5,
    "qkv_bias": True,
    "qkv_clip": 3.0,
    "out_bias": True,
    "qk_norm": True,
    "qk_norm_over": "width",
    "qk_norm_rule": NORM,
    "qk_norm_after_rotary": True,
    "attention_scale": 0.3,
    "score_cap": 2.0,
    "slopes": (0.5, 0.25, 0.5, 0.25),
    "sinks": True,
    "value_factor": 0.5,
    "output_gate": True,
    "head_gate": True,
    "gate_activation": "softplus",
    "temperature": Temperature(0.1, 8),
    "attention_dropout": 0.1,
    "activation": "relu",
    "activation_limit": 7.0,
    "mlp_bias": True,
    "mixture": MIXTURE,
    "router": router_rule(MIXTURE),
    "router_bias": True,
    "router_dtype": "model",
    "expert_scale": True,
    "expert_bias": True,
    "plain_experts": True,
    "averages_shared": True,
    "weighted_inputs": True,
    "shared_activation_limit": 7.0,
    "expert_latent": 6,
    "shared_keys": "full",
    "keys_as_values": True,
    "value_norm": NormRule(1e-5, weighted=False),
}
MAMBA = Mamba2(heads=4, head_width=10, groups=2, state_width=7, conv_width=4, norm=NORM)
LATENT = Latent(q_rank=8, kv_rank=8, nope_width=6, rope_width=4, value_width=6, norm=NORM)
DELTA = GatedDelta(key_heads=2, value_heads=4, key_width=6, value_width=4, conv_width=4, norm=NORM)
ONES = Factors(1.0, 1.0)
ATTENTION = (attention.Attention, qk_norm.make_qk_norm)
DENSE = (mlp.DenseMLP, mlp.gated_activation)
PLAIN = (mlp.PlainMLP, mlp.UngatedMLP)
# A shared expert without gate is an UngatedMLP without biases: beside experts mlp_bias is refused.
EXPERTS = (moe.MixtureOfExperts, moe.SharedExpert, mlp.gated_activation, mlp.plain_activation)
# Layers, and the code that may read their fields.
LAYERS: dict[str, tuple[LayerKind, tuple[Any, ...]]] = {
    "attention": (LayerKind(norm=NORM), (*ATTENTION, *DENSE)),
    "latents": (LayerKind(norm=NORM, mixer=LATENT), (latent_attention.LatentAttention, *DENSE)),
    "delta net": (LayerKind(norm=NORM, mixer=DELTA), (GatedDelta, delta_net.DeltaNet, *DENSE)),
    "Mamba-2": (LayerKind(norm=NORM, mixer=MAMBA), (Mamba2, mamba2.Mamba2Mixer, *DENSE)),
    "convolution": (LayerKind(norm=NORM, mixer=GatedConvolution(3)), (gated_convolution.GatedConvolutionMixer, *DENSE)),
    "both mixers": (LayerKind(norm=NORM, mixer=SideBySide(MAMBA, ONES, ONES)), (*ATTENTION, *DENSE)),
    "no mixer": (LayerKind(norm=NORM, mixer="none"), DENSE),
    "no MLP": (LayerKind(norm=NORM, mlp="none"), ATTENTION),
    "plain MLP": (LayerKind(norm=NORM, mlp="plain"), (*ATTENTION, *PLAIN)),
    "experts": (LayerKind(norm=NORM, mlp="mixture", mixture=MIXTURE), (*ATTENTION, *EXPERTS)),
}


class OneKindStage(LlamaStage):
    KIND = LayerKind(norm=NORM)

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        return cls.KIND


FAMILY = replace(LLAMA_FAMILY, name="one_kind", stage=OneKindStage)


def read_in(code: tuple[Any, ...]) -> set[str]:
    """Fields of LayerKind that functions and classes read: KIND.FIELD in their source, and methods that read one."""
    read = set()
    for part in code:
        for node in ast.walk(ast.parse(inspect.getsource(part))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("kind", "self.kind"):
                read.add({"heads_of": "head_sizes", "width_of_mlp": "mlp_width"}.get(node.attr, node.attr))
    return read


def refused(kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines about fields of a model whose layers are of this kind."""
    monkeypatch.setattr(OneKindStage, "KIND", kind)
    try:
        validate(Config(replace(LLAMA, family=f"{__name__}:FAMILY")), 1)
    except ConfigError as error:
        return [line for line in str(error).splitlines() if "LayerKind." in line]
    return []


def test_every_field_is_read_by_the_layer_its_mixer_or_its_mlp() -> None:
    everywhere = {field.name for field in fields(LayerKind)}
    of_parts = set().union(*(read_in(code) for _, code in LAYERS.values()))
    # Messages alone read where sizes are from, and stages what is handed on and who makes a layer.
    assert read_in((layer,)) | {"sizes_from", "stream", "reads", "writes"} == READ_BY_LAYERS
    assert everywhere == READ_BY_LAYERS | of_parts
    assert everywhere - READ_BY_LAYERS == OTHER.keys()


@pytest.mark.parametrize("name", LAYERS)
def test_a_field_that_no_part_of_a_layer_reads_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, code = LAYERS[name]
    assert not refused(kind, monkeypatch)
    wrong = {}
    for field, value in OTHER.items():
        if field == "sub_norms" and (kind.mixer != "attention" or kind.mlp != "dense"):
            with pytest.raises(ValueError, match=r"LayerKind\.sub_norms"):  # of both parts, as the kind itself knows
                replace(kind, **{field: value})
            continue
        lines = refused(replace(kind, **{field: value}), monkeypatch)
        if bool(lines) == (field in read_in(code)) or not all(f"LayerKind.{field}=" in line for line in lines):
            wrong[field] = lines
    assert not wrong


def test_the_line_names_field_value_mixer_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = LayerKind(norm=NORM, mixer=LATENT, sinks=True)
    assert refused(sinks, monkeypatch) == [
        f"model.family={__name__}:FAMILY: LayerKind.sinks=true: neither mixer Latent nor MLP dense of layer 0 reads "
        "the field; leave it out, or name it in READS of one of them"
    ]
