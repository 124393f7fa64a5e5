"""What rules of ours a model of Hugging Face asks for: read from its config.json and from names of its tensors.

Neither says all. Where norms stand, how a matrix is divided or which numbers are a rotary pair is often in the code of
the model alone. A sketch is therefore a start for a person, and `convert` compares what becomes of it with
transformers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import Sizes
from megapar.config.model_options import ModelConfig
from megapar_models.convert import sketched_experts
from megapar_models.convert.config_json import FIXED, WITHOUT_EFFECT, is_derived
from megapar_models.convert.field_words import (
    ACTIVATIONS,
    AMBIGUOUS_NORM,
    ATTENTION,
    BY_HAND,
    COUNTS,
    ENDS,
    EXPERT_FOLDERS,
    EXPERTS,
    GROUPED,
    KNOBS,
    LAYERS_BY_HAND,
    LEARNED,
    MISSING,
    MLP,
    NEEDED,
    NORMS,
    OF_LAYER_ALONE,
    OPTIONAL,
    OTHER_TENSORS,
    ROTARY,
    ROTARY_PART,
    SIZES,
    TENSORS_BY_HAND,
    TOLD_BY_LAYER_TYPES,
    TOLD_BY_TENSORS,
    WINDOWS,
    Knob,
)
from megapar_models.convert.recipes import starred
from megapar_models.convert.sketched_experts import SketchedExperts
from megapar_models.delta_fields import LINEAR
from megapar_models.family import Raw, wrong_types
from megapar_models.registry import FAMILIES
from megapar_models.rotary_fields import PartialRope, stated_rope
from megapar_models.windows import FULL, SLIDING


@dataclass
class Sketch:
    """The rules, as code for a draft, and what stands in the way of one. Fields are those of config.json."""

    raw: Raw
    sizes: dict[str, str] = field(default_factory=dict)
    """Fields that are options of every family, each with the option."""
    options: dict[str, Knob] = field(default_factory=dict)
    """Fields of numbers that become options of this family."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields that a draft takes with this value alone."""
    without_effect: list[str] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)
    kind: dict[str, str] = field(default_factory=dict)
    """Arguments of LayerKind, without norm, rotary and window."""
    norm: dict[str, str] = field(default_factory=dict)
    """Arguments of NormRule, without eps."""
    ends: dict[str, str] = field(default_factory=dict)
    logits: dict[str, str] = field(default_factory=dict)
    """Arguments of LogitRule."""
    rotary: bool = False
    rotary_part: bool = False
    windows: bool = False
    experts: SketchedExperts | None = None
    """The experts, if their tensors have a form that a draft can name."""
    modules: dict[str, str] = field(default_factory=dict)
    """From our modules to theirs."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Their modules that hold ours in another way, each with the code of its `Packing`."""
    asks: list[str] = field(default_factory=list)
    """The rules in words, with values."""
    decide: list[str] = field(default_factory=list)
    """What a person must decide."""
    missing: list[str] = field(default_factory=list)
    """What no rule of ours computes."""
    unknown: list[str] = field(default_factory=list)
    """Fields that nobody here knows."""

    @property
    def complete(self) -> bool:
        """Whether a draft may compute the model as it is."""
        return not (self.decide or self.missing or self.unknown)

    def reads(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in self.raw]

    def rule(self, rule: str, code: str) -> None:
        """Set an argument of LayerKind, Ends or LogitRule."""
        owner, _, name = rule.partition(".")
        {"LayerKind": self.kind, "Ends": self.ends, "LogitRule": self.logits}[owner][name] = code


def sketch(raw: Raw, shapes: Mapping[str, Sizes | None]) -> Sketch:
    """The sketch of a config.json and of its tensors, by name: a shape is None if it is not known.

    Without any tensors, their names are taken to be those of Llama. Raises ConfigError for values of wrong types.
    """
    if wrong := list(_wrong_types(raw)):
        raise ConfigError("\n".join(f"config.json: {problem}" for problem in wrong))
    found = Sketch(raw)
    _read_sizes(found)
    _read_knobs(found)
    _read_rotary(found)
    _read_windows(found)
    if shapes:
        _place_tensors(found, shapes)
    else:
        _as_llama(found)
    _read_rest(found)
    return found


# Fields


def _wrong_types(raw: Raw) -> Iterator[str]:
    """Yield a problem for each value that no model has."""
    for name, ours in ((name, ours) for ours, names in SIZES.items() for name in names):
        if raw.get(name) is not None and ours != "hidden_act" and not _by_layer(raw[name]):
            for problem in wrong_types({ours: raw[name]}, ModelConfig):
                yield problem if name == ours else f"{name}: {problem}"
    for name, least in COUNTS.items():
        value = raw.get(name, least)
        if not isinstance(value, (int, NoneType)) or isinstance(value, bool) or (value or least) < least:
            yield f"{name}={value!r} should be a whole number from {least} on"
    for name in (name for ours in NEEDED for name in SIZES[ours]):
        value = raw.get(name, 1)
        if not isinstance(value, int) or value < 1:
            yield f"{name}={value!r} should be a whole number from 1 on"
    for name in KNOBS:
        if not isinstance(raw.get(name), (bool, int, float, NoneType)):
            yield f"{name}={raw[name]!r} should be a number, true, false or null"
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name), (dict, NoneType)):
            yield f"{name}={raw[name]!r} should be an object or null"
    types = raw.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        yield f"layer_types={types!r} should be a list of names"
    for names in (SIZES["hidden_act"], ("model_type",)):
        yield from (
            f"{name}={raw[name]!r} should be a name" for name in names if not isinstance(raw.get(name, ""), str)
        )


def _by_layer(value: Any) -> bool:
    """Whether a size is a list of whole numbers, for each layer one."""
    return isinstance(value, list) and len(value) > 1 and all(type(number) is int for number in value)


def _read_sizes(found: Sketch) -> None:
    for ours, names in SIZES.items():
        present = sorted(found.reads(names), key=lambda name: found.raw[name] is None)
        if not present or (found.raw[present[0]] is None and ours not in OPTIONAL):
            without = ours == "intermediate_size" and not found.reads(EXPERTS["moe_intermediate_size"])
            if ours not in OPTIONAL or without:
                found.decide.append(f"no field says {ours} ({', '.join(names)})")
            continue
        if _by_layer(found.raw[present[0]]):
            found.missing.append(f"{present[0]}={found.raw[present[0]]}: sizes by layer")
            continue
        if ours != "hidden_act":
            found.sizes[present[0]] = ours
            continue
        value = found.raw[present[0]]
        if value in ACTIVATIONS:
            found.sizes[present[0]] = ours
        elif value in OF_LAYER_ALONE:
            found.kind["activation"] = repr(value).replace("'", '"')
            found.fixed[present[0]] = value
        else:
            found.missing.append(f"{present[0]}={value!r}: no such activation")
    shown = [f"{name} {value}" for name in found.sizes if (value := found.raw[name]) is not None]
    found.asks.append(f"sizes and options of every family: {', '.join(shown)}")


def _read_knobs(found: Sketch) -> None:
    for name in found.reads(tuple(KNOBS)):
        knob, value = KNOBS[name], found.raw[name]
        if value is None or isinstance(value, bool):
            found.fixed[name] = value
            if value:
                for rule in knob.rules:
                    found.rule(rule, "True")
        else:
            found.options[name] = knob
            for rule in knob.rules:
                found.rule(rule, knob.code.format(f"model.{name}"))
        if value is not None and value != knob.neutral:
            found.asks.append(f"{', '.join(knob.rules)}: {knob.words} ({name}={value!r})")


def _read_rotary(found: Sketch) -> None:
    given = found.reads(ROTARY)
    if not given:
        return
    found.rotary = True
    rope = stated_rope(found.raw)
    if any(isinstance(value, dict) for value in rope.values()):
        found.decide.append("rope_parameters: a rotary table for each kind of layer; family gemma2 has that")
    else:
        found.decide += [f"rotary positions: {problem}" for problem in PartialRope().read(found.raw, "")[1]]
    part = found.reads(ROTARY_PART)
    found.rotary_part = bool(part) or "partial_rotary_factor" in rope
    shown = ", ".join(f"{name}={found.raw[name]!r}" for name in (*given, *part))
    words = "rotary positions of a part of each head" if found.rotary_part else "rotary positions"
    found.asks.append(f"LayerKind.rotary: {words} ({shown})")


def _read_windows(found: Sketch) -> None:
    found.windows = bool(found.reads(("sliding_window", "layer_types")))
    types = found.raw.get("layer_types") or []
    others = sorted({*types} - {FULL, SLIDING})
    by_hand = {**LAYERS_BY_HAND, **({LINEAR: "qwen3_5"} if "linear_num_key_heads" in found.raw else {})}
    for kind in [kind for kind in others if kind in by_hand]:
        others.remove(kind)
        found.decide.append(f"layer_types: layers of {kind}; family {by_hand[kind]} has them")
    if others:
        found.missing.append(f"layer_types: layers of {', '.join(others)}")
    window = found.raw.get("sliding_window")
    if window is not None and found.raw.get("use_sliding_window", True) and (SLIDING in types or not types):
        where = f"{types.count(SLIDING)} of {len(types)} layers" if types else "all layers"
        found.asks.append(f"LayerKind.window: {where} read {window} keys (sliding_window, layer_types)")


def _read_rest(found: Sketch) -> None:
    """The fields that nobody has read yet."""
    read = {*found.sizes, *found.options, *found.fixed, *ROTARY, *ROTARY_PART, *WINDOWS, *WITHOUT_EFFECT, *FIXED}
    read |= {"model_type", "quantization_config"}
    told = (*TOLD_BY_TENSORS, *(TOLD_BY_LAYER_TYPES if found.raw.get("layer_types") else ()))
    found.fixed |= {name: found.raw[name] for name in found.reads(told)}
    read |= {*told}
    if found.experts:
        read |= found.experts.fields
    elsewhere = {
        name for family in FAMILIES.values() if family.hugging_face for name in family.hugging_face.without_effect
    }
    for name in sorted(found.raw.keys() - read):
        value = found.raw[name]
        missing = None
        if name not in BY_HAND:
            missing = next((words for start, words in MISSING.items() if name.startswith(start)), None)
        if isinstance(value, dict) and name.endswith("_config"):
            inner = ((field, start) for field in value for start in MISSING if field.startswith(start))
            for field, start in inner:
                if not _is_neutral(field, value[field]):
                    found.missing.append(f"{name}.{field}={value[field]!r}: {MISSING[start]}")
        if "drop" in name:
            found.dropouts.append(name)
        elif (missing or name in BY_HAND) and _is_neutral(name, value):
            found.fixed[name] = value
        elif missing:
            found.missing.append(f"{name}={value!r}: {missing}")
        elif name in BY_HAND:
            found.decide.append(f"{name}={value!r}: {_with_owner(*BY_HAND[name])}")
        elif name in elsewhere:
            found.without_effect.append(name)
        elif value is None or value is False:
            found.fixed[name] = value  # nothing is asked for, and another value will be refused
        else:
            found.unknown.append(f"{name}={value!r}")


def _with_owner(words: str, owner: str) -> str:
    """Return the words, with the family or the rule that has what they say."""
    return f"{words}; {owner if owner.startswith('rule ') else f'family {owner}'} has it"


def _is_neutral(name: str, value: Any) -> bool:
    """Whether the value asks for nothing."""
    if value is None or value is False or value in ([], {}, 0):
        return True
    is_factor = "factor" in name or "multiplier" in name or name in ("n_group", "topk_group")
    return is_factor and value is not True and value == 1


# Tensors


def _as_llama(found: Sketch) -> None:
    """Names and norms of Llama, because no tensors are known."""
    found.decide.append("no names of tensors: Llama's are taken, with norms before both branches and a gated MLP")
    layer, parts = "model.layers.*", {"self_attn": (ATTENTION, ("q", "k", "v", "o")), "mlp": (MLP, MLP)}
    for folder, (leaves, ours) in parts.items():
        branch = "attention" if leaves is ATTENTION else "mlp"
        for name in ours:
            if " " not in name:
                found.modules[f"layers.*.{branch}.{name}"] = f"{layer}.{folder}.{leaves[name][0]}"
    found.modules |= {"layers.*.attention_norm": f"{layer}.input_layernorm"}
    found.modules |= {"layers.*.mlp_norm": f"{layer}.{AMBIGUOUS_NORM}", "embedding": "model.embed_tokens"}
    found.modules |= {"norm": "model.norm", "head": "lm_head"}
    _read_norm(found, biased=False)


def _place_tensors(found: Sketch, shapes: Mapping[str, Sizes | None]) -> None:
    """Our module for each of theirs, and what their names say of norms, biases and the MLP."""
    theirs: dict[str, dict[str, Sizes | None]] = {}
    for name, shape in shapes.items():
        if not is_derived(name):
            module, _, kind = starred(name)[0].rpartition(".")
            theirs.setdefault(module, {})[kind] = shape
    experts = [module for module in theirs if _is_of_experts(found, module)]
    placed = sketched_experts.place_experts(theirs, experts)
    if experts and not placed:
        found.decide.append(f"tensors {', '.join(experts)}: experts and their router; family mixtral has such layers")
    norms: dict[str, str] = {}
    for module, kinds in theirs.items():
        if module in experts:
            continue
        ours = _module(module, norms)
        if not kinds.keys() <= {"weight", "bias"} or (not ours and module not in norms.values()):
            _read_other(found, f"{module}.{'/'.join(sorted(kinds))}")
        for name in ours:
            found.modules[name] = module
    if placed:
        found.modules |= placed
        _take_experts(found, sketched_experts.read_experts(found.raw, found.modules, theirs))
    _read_norms(found, norms)
    _read_norm(found, biased=any("bias" in theirs[module] for module in norms.values()))
    _read_biases(found, {ours: theirs[module] for ours, module in found.modules.items() if module in theirs})
    _read_qk_norm(found, theirs)
    _read_matrices(found, theirs)


def _read_other(found: Sketch, tensors: str) -> None:
    """Say what tensors are that no module of a draft has."""
    path = f".{tensors}."
    for start, (words, owner) in TENSORS_BY_HAND.items():
        if f".{start}" in path:
            found.decide.append(f"tensors {tensors}: {_with_owner(words, owner)}")
            return
    words = next((words for start, words in OTHER_TENSORS.items() if f".{start}" in path), "no module of ours")
    found.missing.append(f"tensors {tensors}: {words}")


def _take_experts(found: Sketch, experts: SketchedExperts) -> None:
    found.experts = experts
    found.fixed |= experts.fixed
    found.kind |= experts.kind
    found.layouts |= experts.layouts
    found.decide += experts.decide
    found.missing += experts.missing
    found.asks.append(experts.asks(found.raw))


def _is_of_experts(found: Sketch, module: str) -> bool:
    """Whether a module of theirs is a router, or holds experts."""
    if module.count("*") > 1 or ".experts" in module:
        return True
    has_experts = any(name in found.raw and "experts" in BY_HAND[name][0] for name in BY_HAND)
    in_mlp = re.search(rf"\*\.({'|'.join(EXPERT_FOLDERS)})\b", module) is not None
    return has_experts and in_mlp and not _module(module, {})


def _module(module: str, norms: dict[str, str]) -> list[str]:
    """Our modules in one of theirs; nothing if there are none. A norm of a layer is noted in `norms` by its name."""
    *above, leaf = module.split(".")
    if "*" not in above:
        return [ours for ours, leaves in ENDS.items() if leaf in leaves]
    within = above[above.index("*") + 1 :]
    if any("att" in name for name in within):
        found = [ours for ours, leaves in ATTENTION.items() if leaf in leaves]
        return [f"layers.*.attention.{ours}" for names in found for ours in names.split()]
    if leaf == AMBIGUOUS_NORM or any(leaf in leaves for leaves in NORMS.values()):
        norms[leaf] = module
        return []
    if not all(name in ("mlp", "feed_forward", "ffn") for name in within):
        return []
    found = [ours for ours, leaves in MLP.items() if leaf in leaves]
    return [f"layers.*.mlp.{ours}" for names in found for ours in names.split()]


def _read_norms(found: Sketch, norms: Mapping[str, str]) -> None:
    """Where the norms of a layer stand."""
    placed = {ours: norms[leaf] for leaf in norms for ours, leaves in NORMS.items() if leaf in leaves}
    if AMBIGUOUS_NORM in norms:
        before = "attention_norm" in placed and "mlp_norm" not in placed
        placed["mlp_norm" if before else "attention_output_norm"] = norms[AMBIGUOUS_NORM]
    found.modules |= {f"layers.*.{ours}": module for ours, module in placed.items()}
    both, outputs = {"attention_norm", "mlp_norm"}, {"attention_output_norm", "mlp_output_norm"}
    parallel = found.kind.pop("parallel", None)
    if placed.keys() == outputs:
        found.kind["norms"] = '"after"'
    elif placed.keys() == both | outputs:
        found.kind["norms"] = '"both"'
    elif placed.keys() == {"attention_norm"}:
        found.kind["parallel"] = '"one_norm"'
    elif placed.keys() == both and parallel:
        found.kind["parallel"] = '"two_norms"'
    elif not placed:
        found.norm["weighted"] = "False"
    elif placed.keys() != both:
        found.missing.append(f"norms {', '.join(norms)}: norms that stand elsewhere at one of both branches")
    placement = found.kind.get("norms") or found.kind.get("parallel") or '"before"'
    found.asks.append(f"LayerKind.norms, .parallel: {placement.strip(chr(34))} ({', '.join(norms) or 'no weights'})")


def _read_norm(found: Sketch, *, biased: bool) -> None:
    """RMSNorm or LayerNorm, by biases and by the spelling of eps."""
    eps = next((name for name, ours in found.sizes.items() if ours == "rms_norm_eps"), "")
    if biased or "layer_norm" in eps or "layernorm" in eps:
        found.norm["kind"] = '"layer"'
        if not biased and "weighted" not in found.norm:
            found.norm["biased"] = "False"
    words = "LayerNorm" if found.norm else "RMSNorm"
    without = {"weighted": " without weight", "biased": " without bias"}
    words += "".join(text for name, text in without.items() if found.norm.get(name) == "False")
    found.asks.append(f"LayerKind.norm: {words} ({eps or 'no field of eps'})")


def _read_biases(found: Sketch, kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """Biases of matrices. What the tensors have is what there is."""
    parts = {"qkv_bias": "layers.*.attention.q", "out_bias": "layers.*.attention.o", "mlp_bias": "layers.*.mlp.up"}
    for rule, module in parts.items():
        found.kind.pop(rule, None)
        if "bias" in kinds.get(module, {}):
            found.kind[rule] = "True"
            if not any(f"LayerKind.{rule}" in line for line in found.asks):
                found.asks.append(f"LayerKind.{rule}: {found.modules[module]}.bias")
    if "bias" in kinds.get("head", {}):
        found.ends["head_bias"] = "True"
        found.asks.append("Ends.head_bias: a bias of logits")
    if "layers.*.mlp.gate" not in found.modules and "layers.*.mlp.up" in found.modules:
        found.kind.setdefault("mlp", '"plain"')
        found.asks.append("LayerKind.mlp: plain, without a gate")


def _read_qk_norm(found: Sketch, theirs: Mapping[str, Mapping[str, Sizes | None]]) -> None:
    """Norms of queries and keys, by the shape of their weights."""
    module = found.modules.get("layers.*.attention.q_norm")
    if module is None:
        if found.kind.pop("qk_norm", None):
            found.decide.append("norms of queries and keys without weights: LayerKind.qk_norm_rule says so")
        return
    found.kind["qk_norm"] = "True"
    if "layers.*.attention.k_norm" not in found.modules:
        found.missing.append(f"{module}: a norm of queries and none of keys")
        return
    sizes = {ours: found.raw[name] for name, ours in found.sizes.items()}
    heads, shape = sizes.get("num_attention_heads", 0), theirs[module].get("weight")
    width = sizes.get("head_dim") or sizes.get("hidden_size", 0) // (heads or 1)
    forms = {(width,): "head", (heads * width,): "width", (heads, width): "each_head"}
    if shape is None:
        found.decide.append(f"{module}: over each head or over all (LayerKind.qk_norm_over): the shape is not known")
    elif shape not in forms:
        found.missing.append(f"{module}: weights {list(shape)} are neither of a head ({width}) nor of all {heads}")
    else:
        over = forms[shape]
        found.asks.append(f"LayerKind.qk_norm: queries and keys are normalized over {over} ({module})")
        if over != "head":
            found.kind["qk_norm_over"] = f'"{over}"'
        if over == "each_head":
            for part, option in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                found.layouts[found.modules[f"layers.*.attention.{part}_norm"]] = f'Packing("{option}", by_group=True)'


def _read_matrices(found: Sketch, theirs: Mapping[str, Mapping[str, Sizes | None]]) -> None:
    """Matrices of several of ours, and transposed ones."""
    fused = found.modules.get("layers.*.attention.q", "")
    if fused.rpartition(".")[2] in GROUPED:
        found.decide.append(f"{fused}: are its rows q, then k, then v, or head by head (layouts)?")
    sizes = {ours: found.raw[name] for name, ours in found.sizes.items()}
    up = theirs.get(found.modules.get("layers.*.mlp.up", ""), {}).get("weight")
    if up == (sizes.get("hidden_size"), sizes.get("intermediate_size")) and up[0] != up[1]:
        for ours, module in found.modules.items():
            if ".attention." in ours or ".mlp." in ours:
                found.layouts[module] = "Packing(transposed=True)"
    told = found.rotary or found.reads((*ROTARY_PART, "rotary_dim")) or any(LEARNED in line for line in found.missing)
    if "layers.*.attention.q" in found.modules and not told:
        found.decide.append("no rotary fields: positions that no field tells, such as none, ALiBi or sinusoids")
    wanted = {"embedding", "norm", "layers.*.attention.o"}
    if not found.raw.get("kv_lora_rank"):
        wanted.add("layers.*.attention.q")
    if not any(_is_of_experts(found, module) for module in theirs):
        wanted.add("layers.*.mlp.down")
    if lacking := sorted(wanted - found.modules.keys()):
        found.decide.append(f"no tensors were found for {', '.join(lacking)} (modules)")
    if not found.raw.get("tie_word_embeddings") and "head" not in found.modules:
        found.decide.append("no tensor was found for head, and tie_word_embeddings is not true (modules)")
    found.modules.setdefault("head", "lm_head")
