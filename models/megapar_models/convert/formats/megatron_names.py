"""Megatron-Core's names of the tensors of its GPT model, and of its hybrids with Mamba-2, by ours.

A name has the number of its layer and of its expert, as folders of layers that differ have them. Where all layers are
alike, a stored tensor has all of them on a leading axis, and experts likewise (`stored_at`). The names are the same
with the local layers of Megatron-Core and with those of Transformer Engine.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.formats.contents import StoredAt
from megapar_models.convert.recipes import Recipe, recipes
from megapar_models.families.deepseek import LatentModel, latent_pairs
from megapar_models.tensor_layouts import Packing

_LAYER = "decoder.layers.*"
_ATTENTION = f"{_LAYER}.self_attention"
_EXPERT = f"{_LAYER}.mlp.experts.experts.*"
_SHARED = f"{_LAYER}.mlp.shared_experts"
_MIXER = f"{_LAYER}.mixer"
_KINDS = ("weight", "bias")
_FUSED_QKV, _GATE_AND_UP = Packing(groups="num_key_value_heads", order=("q", "k", "v")), Packing(order=("gate", "up"))

_MODULES = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
    **{f"layers.*.attention.{name}": f"{_ATTENTION}.linear_qkv" for name in "qkv"},
    **{f"layers.*.attention.{name}_norm": f"{_ATTENTION}.{name}_layernorm" for name in "qk"},
    "layers.*.attention.o": f"{_ATTENTION}.linear_proj",
    **{f"layers.*.mlp.{name}": f"{_LAYER}.mlp.linear_fc1" for name in ("gate", "up")},
    "layers.*.mlp.down": f"{_LAYER}.mlp.linear_fc2",
    "layers.*.mlp.router": f"{_LAYER}.mlp.router",
    "layers.*.mlp.router.bias": f"{_LAYER}.mlp.router.expert_bias",
    **{f"layers.*.mlp.experts.*.{name}": f"{_EXPERT}.linear_fc1" for name in ("gate", "up")},
    "layers.*.mlp.experts.*.down": f"{_EXPERT}.linear_fc2",
    **{f"layers.*.mlp.shared.{name}": f"{_SHARED}.linear_fc1" for name in ("gate", "up")},
    "layers.*.mlp.shared.down": f"{_SHARED}.linear_fc2",
    "layers.*.mlp.shared_gate.weight": f"{_SHARED}.gate_weight",
    # Mamba-2's projection and convolution are stored in parts.
    **{f"layers.*.mamba.{name}.weight": f"{_MIXER}.in_proj.weight.{name}" for name in ("z", "x", "B", "C", "dt")},
    **{f"layers.*.mamba.conv_{name}.{kind}": f"{_MIXER}.conv1d.{kind}.{name}" for name in "xBC" for kind in _KINDS},
    **{f"layers.*.mamba.{name}": f"{_MIXER}.{name}" for name in ("A_log", "dt_bias", "D", "norm")},
    "layers.*.mamba.o": f"{_MIXER}.out_proj",
    # A norm's name is that of the matrix behind it, which Transformer Engine fuses with it, unless there are several.
    **{f"layers.*.attention_norm.{kind}": f"{_ATTENTION}.linear_qkv.layer_norm_{kind}" for kind in _KINDS},
    **{f"layers.*.mlp_norm.{kind}": f"{_LAYER}.mlp.linear_fc1.layer_norm_{kind}" for kind in _KINDS},
}
_LATENT = {
    "layers.*.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.*.attention.q": f"{_ATTENTION}.linear_q_proj",
    "layers.*.attention.q_a": f"{_ATTENTION}.linear_q_down_proj",
    "layers.*.attention.q_b": f"{_ATTENTION}.linear_q_up_proj",
    "layers.*.attention.kv_a": f"{_ATTENTION}.linear_kv_down_proj",
    "layers.*.attention.kv_b": f"{_ATTENTION}.linear_kv_up_proj",
    "layers.*.attention.q_a_norm.weight": f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight",
    "layers.*.attention.kv_a_norm.weight": f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight",
}
_SPLIT_GATES = {
    f"layers.*.mlp.{inner}{name}.{kind}": f"{module}.linear_fc1.{kind}_{letter}"
    for inner, module in (("", f"{_LAYER}.mlp"), ("experts.*.", _EXPERT), ("shared.", _SHARED))
    for name, letter in (("gate", "w"), ("up", "v"))
    for kind in _KINDS
}
# By whole names, because a norm's name has the module's too.
_LAYOUTS = {f"{_ATTENTION}.linear_qkv.{kind}": _FUSED_QKV for kind in _KINDS} | {
    f"{module}.linear_fc1.{kind}": _GATE_AND_UP for module in (f"{_LAYER}.mlp", _EXPERT, _SHARED) for kind in _KINDS
}
# Other names of the same tensors: of versions, of layers that fuse a norm, and of those that do not.
_SPELLINGS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ("mixer.in_proj.layer_norm_", "norm."),
    ("decoder.final_layernorm.", "decoder.final_norm."),
)
_NUMBERS = re.compile(r"^decoder\.layers\.(\d+)\.(?:mlp\.experts\.experts\.(\d+)\.)?")


def megatron_recipes(model: ModelConfig, *, split_gates: bool = False) -> dict[str, Recipe]:
    """How each tensor of Megatron-Core holds ours, by its name with numbers of layer and expert.

    With `split_gates` a gate and its up projection are two tensors. Raises CheckpointError if the model has a part that
    Megatron-Core's GPT model lacks.
    """
    shapes = native_shapes(model) | buffer_shapes(model)
    modules = _MODULES
    if isinstance(model, LatentModel):
        fused = {f"layers.*.attention_norm.{kind}" for kind in _KINDS}
        modules = {ours: theirs for ours, theirs in _MODULES.items() if ours not in fused} | _LATENT
    gated = any(name.endswith(".gate.weight") for name in shapes)
    modules = {**modules, **_norms_of_layers(shapes), **(_SPLIT_GATES if split_gates and gated else {})}
    pairs = latent_pairs(model) if isinstance(model, LatentModel) else None
    try:
        return recipes(shapes, modules, _LAYOUTS, sizes=model, pairs=pairs)
    except KeyError as error:
        text = f"Megatron-Core's GPT model has no {error.args[0]}"
        raise CheckpointError(f"model.family={model.family}: {text}, which the model of the options has") from None


def _norms_of_layers(shapes: Collection[str]) -> dict[str, str]:
    """The names of norms in front of routers, which stand alone because several matrices follow, and of Mamba-2."""
    found: dict[str, str] = {}
    for name in shapes:
        for last, ours, theirs in (
            (".mlp.router.weight", "mlp_norm.", "pre_mlp_layernorm."),
            (".mamba.A_log", "attention_norm.", "mixer.in_proj.layer_norm_"),
        ):
            if name.endswith(last):
                layer = name.removesuffix(last)
                found |= {f"{layer}.{ours}{kind}": f"{_LAYER}.{theirs}{kind}" for kind in _KINDS}
    return found


def stored_at(name: str, stored: Collection[str]) -> StoredAt | None:
    """The place of Megatron's tensor `name`, which has numbers, among `stored` names. None: there is none."""
    for spelling in _spellings(name):
        for numbers, stripped in _stripped(spelling):
            if stripped in stored:
                return StoredAt(stripped, numbers)
    return None


def _spellings(name: str) -> Iterator[str]:
    yield name
    for one, other in _SPELLINGS:
        for here, there in ((one, other), (other, one)):
            if here in name:
                yield name.replace(here, there)


def _stripped(name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (numbers on leading axes, stored name) for each way to store the layers and experts of `name`."""
    found = _NUMBERS.match(name)
    yield (), name
    if not found:
        return
    layer, expert, rest = found[1], found[2], name[found.end() :]
    if expert is None:
        yield (int(layer),), f"decoder.layers.{rest}"
        return
    yield (int(expert),), f"decoder.layers.{layer}.mlp.experts.experts.{rest}"
    yield (int(layer),), f"decoder.layers.mlp.experts.experts.{expert}.{rest}"
    yield (int(layer), int(expert)), f"decoder.layers.mlp.experts.experts.{rest}"


def stored_names(wanted: Mapping[str, Recipe]) -> dict[str, StoredAt]:
    """The place at which Megatron-Core stores each of its tensors: all layers in one if they are alike, and experts."""
    of_layers: dict[str, dict[str, object]] = {}
    for name, recipe in wanted.items():
        found = _NUMBERS.match(name)
        if found:
            of_layers.setdefault(found[1], {})[name[found.end() :] + str(found[2])] = recipe.shape
    alike = all(parts == next(iter(of_layers.values())) for parts in of_layers.values())
    places = {}
    for name in wanted:
        ways = list(_stripped(name))  # the first has no leading axis, the last has all, the second one that of experts
        numbers, stored = ways[-1] if alike else ways[len(ways) > 2]
        places[name] = StoredAt(stored, numbers)
    return places
