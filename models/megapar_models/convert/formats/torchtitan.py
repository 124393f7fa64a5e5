"""Checkpoints of torchtitan: a folder step-N of torch's DCP for each.

    layers.0.attention.qkv_linear.wq.weight                     a weight
    optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg
    train_state.step, train_state.ntokens_seen                  of the run, and of the rank that wrote them
    lr_scheduler.last_epoch, dataloader.dp_rank_N

torchtitan 0.3.0 trains a fused wqkv [kv heads * (heads of a group + 2) * d, h], which has for each kv head the rows of
its queries, its key and its value. It stores the weight as three, and the optimizer's state as one. Names of versions
before 0.3.0 are read too. Llama 3 and DeepSeek-V3 rotate pairs of rows beside each other (complex numbers), Qwen3 has
them half a head apart, as we do.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import MOST
from megapar.config.model_options import ModelConfig
from megapar.declare.params import Box
from megapar_models.convert.config_json import names_of
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.formats.by_parameter import Spelling, contents_by_parameter
from megapar_models.convert.formats.contents import Contents
from megapar_models.convert.formats.derived import Derived, WithDerived
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.recipes import Recipe, TensorPart, recipes
from megapar_models.convert.stream import TensorInfo
from megapar_models.families.deepseek import LATENT_EPS, LatentModel
from megapar_models.tensor_layouts import Packing, Pairs

_LAYER = "layers.*"
_ATTENTION = f"{_LAYER}.attention"
_QKV = f"{_ATTENTION}.qkv_linear"
_SWIGLU = {"gate": "w1", "down": "w2", "up": "w3"}
_MODULES = {
    "embedding": "tok_embeddings",
    "layers.*.attention_norm": f"{_LAYER}.attention_norm",
    **{f"layers.*.attention.{name}": f"{_QKV}.w{name}" for name in "qkv"},
    **{f"layers.*.attention.{name}_norm": f"{_ATTENTION}.{name}_norm" for name in "qk"},
    "layers.*.attention.o": f"{_ATTENTION}.wo",
    "layers.*.mlp_norm": f"{_LAYER}.ffn_norm",
    **{f"layers.*.mlp.{ours}": f"{_LAYER}.feed_forward.{theirs}" for ours, theirs in _SWIGLU.items()},
    "norm": "norm",
    "head": "lm_head",
}
_EXPERTS = f"{_LAYER}.moe.routed_experts.inner_experts"
_MIXTURE = {
    "layers.*.mlp.router": f"{_LAYER}.moe.router.gate",
    "layers.*.mlp.router.bias": f"{_LAYER}.moe.expert_bias_E",
    # Whole names: stacks [experts, rows, columns] are parameters themselves.
    "layers.*.mlp.experts.*.gate.weight": f"{_EXPERTS}.w1_EFD",
    "layers.*.mlp.experts.*.down.weight": f"{_EXPERTS}.w2_EDF",
    "layers.*.mlp.experts.*.up.weight": f"{_EXPERTS}.w3_EFD",
    **{f"layers.*.mlp.shared.{ours}": f"{_LAYER}.moe.shared_experts.{theirs}" for ours, theirs in _SWIGLU.items()},
}
_LATENT = {
    "layers.*.attention.q": f"{_ATTENTION}.wq",
    "layers.*.attention.q_a": f"{_ATTENTION}.wq_a",
    "layers.*.attention.q_a_norm": f"{_ATTENTION}.q_norm",
    "layers.*.attention.q_b": f"{_ATTENTION}.wq_b",
    "layers.*.attention.kv_a": f"{_ATTENTION}.wkv_a",
    "layers.*.attention.kv_a_norm": f"{_ATTENTION}.kv_norm",
    "layers.*.attention.kv_b": f"{_ATTENTION}.wkv_b",
}
MODULES: Mapping[str, Mapping[str, str]] = {
    "llama": _MODULES,
    "qwen3_moe": {**_MODULES, **_MIXTURE},
    "deepseek": {**_MODULES, **_MIXTURE, **_LATENT},
}
"""torchtitan's names of our modules, or of our tensors, by families."""
_BESIDE = ("llama",)
"""Families of which torchtitan has a model that rotates pairs of rows beside each other."""
TIED = {"lm_head.weight": "tok_embeddings.weight"}
ANCHOR = "tok_embeddings.weight"

# Names before 0.3.0, with their counterparts. An earlier file of Llama has `output` for the head.
_OLDER = (
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"\.attention\.(w[qkv])\."), r".attention.qkv_linear.\1."),
    (re.compile(r"\.moe\.experts\.w([13])$"), r".moe.routed_experts.inner_experts.w\1_EFD"),
    (re.compile(r"\.moe\.experts\.w2$"), ".moe.routed_experts.inner_experts.w2_EDF"),
    (re.compile(r"\.moe\.expert_bias$"), ".moe.expert_bias_E"),
)
_FUSED = re.compile(r"(.*\.qkv_linear\.)wqkv(\.(?:weight|bias)\b.*)")


def torchtitan_recipes(model: ModelConfig) -> dict[str, Recipe]:
    """How each tensor of torchtitan is made of ours, by the names of 0.3.0. Raises ConfigError for other families."""
    modules = MODULES.get(model.family)
    if modules is None:
        raise ConfigError(
            f"model.family={model.family}: torchtitan's names are known of {', '.join(MODULES)}, its llama3, qwen3 and "
            "deepseek_v3"
        )
    try:
        return recipes(native_shapes(model) | buffer_shapes(model), modules, sizes=model, pairs=_pairs(model))
    except KeyError as error:
        text = f"names of torchtitan are not known of its tensor {error.args[0]}"
        raise ConfigError(f"model.family={model.family}: {text}, which torchtitan's models do not have") from None


def fused_recipes(model: ModelConfig) -> dict[str, Recipe]:
    """How each fused wqkv of the optimizer is made of our queries, keys and values. Nothing for latent attention."""
    if isinstance(model, LatentModel):
        return {}
    fused = re.compile(r"layers\.\d+\.attention\.[qkv]\.")
    shapes = {name: shape for name, shape in native_shapes(model).items() if fused.match(name)}
    modules = {f"layers.*.attention.{name}": f"{_QKV}.wqkv" for name in "qkv"}
    layouts = {f"{_QKV}.wqkv": Packing("num_key_value_heads")}
    return recipes(shapes, modules, layouts, sizes=model, pairs=_pairs(model))


def _pairs(model: ModelConfig) -> Mapping[str, Pairs]:
    """The rotary pairs of our modules that torchtitan has beside each other."""
    if model.family in _BESIDE and not getattr(model, "qk_norm", False):  # its Qwen3 has norms of heads
        return {f"layers.*.attention.{name}": Pairs(model.head_dim, 0, model.head_dim) for name in "qk"}
    return names_of(model).pairs(model)


def is_torchtitan(store: TensorStore) -> bool:
    """Whether a store has torchtitan's names."""
    return ANCHOR in store.tensors


def read_torchtitan(store: TensorStore, model: ModelConfig, *, weights_only: bool = False) -> Contents:
    """Find the model and the state of its optimizer in a step-N folder. With `weights_only` no state is looked for.

    Raises CheckpointError if they are not there, and ConfigError if torchtitan has no such model.
    """
    wanted = torchtitan_recipes(model)

    def canonical(name: str) -> str:
        if name in wanted:
            return name
        for pattern, newer in _OLDER:
            name = pattern.sub(newer, name)
        return name

    spelling = Spelling(canonical, tied=TIED if model.tie_word_embeddings else {})
    step = _number(store, "train_state.step")
    title = "torchtitan" if step is None else f"torchtitan, step {step}"
    separate = unfused(store, model)
    contents = contents_by_parameter(title, separate, wanted, spelling, model, step=step, weights_only=weights_only)
    if isinstance(model, LatentModel):
        note = (
            f"the eps of the norms of latents: {LATENT_EPS:g} here, and 1e-5 in torchtitan unless it is changed there"
        )
        return replace(contents, left_out=[*contents.left_out, note])
    return contents


def _number(store: TensorStore, name: str) -> int | None:
    value: Any = store.values.get(name)
    if value is not None and not (type(value) is int and 0 <= value < MOST):
        raise CheckpointError(f"{store.folder}: {name} is {str(value)[:40]!r}, and no count of steps")
    return value


def fused_parts(model: ModelConfig, columns: tuple[int, ...]) -> dict[str, TensorPart]:
    """The parts wq, wk and wv of a fused wqkv, whose further axes have the sizes `columns`."""
    groups = model.num_key_value_heads
    width = model.head_dim
    of_group = {"wq": model.num_attention_heads // groups * width, "wk": width, "wv": width}
    rows = sum(of_group.values())
    parts = {}
    first = 0
    for name, height in of_group.items():
        shape = (height * groups, *columns)
        parts[name] = TensorPart(name, shape, first, rows, groups, None, False, False, None)
        first += height
    return parts


def unfused(store: TensorStore, model: ModelConfig) -> TensorStore:
    """The store with wq, wk and wv in the place of each fused wqkv."""
    derived = {}
    hidden = []
    for key, info in store.tensors.items():
        found = _FUSED.fullmatch(key)
        if found is None:
            continue
        hidden.append(key)
        if not info.shape:  # its count of steps
            derived[f"{found[1]}wq{found[2]}"] = Derived(info, _reading(store, key))
            continue
        parts = fused_parts(model, info.shape[1:])
        rows = sum(part.shape[0] for part in parts.values())
        if info.shape[0] != rows:
            raise CheckpointError(f"{store.folder}: {key} has {info.shape[0]} rows, and those of the model {rows}")
        for name, part in parts.items():
            derived[f"{found[1]}{name}{found[2]}"] = _part(store, key, info, part)
    return WithDerived(store, derived, hidden) if derived else store


def _reading(store: TensorStore, key: str) -> Callable[[Box], Tensor]:
    return lambda box: store.read(key, box)


def _part(store: TensorStore, key: str, info: TensorInfo, part: TensorPart) -> Derived:
    return Derived(TensorInfo(part.shape, info.dtype), lambda box: part.cut(_reading(store, key), box))
