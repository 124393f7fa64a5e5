"""The experts of a sketch: `place_experts` names their tensors, `read_experts` reads their fields, for drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.checkpoint.format import Sizes
from megapar_models.convert.field_words import (
    EVERY_LAYER,
    EXPERTS,
    EXPERTS_FIXED,
    MLP,
    ROUTERS,
    SELECTION_BIASES,
    SHARED_COUNTS,
)
from megapar_models.family import Raw
from megapar_models.listed_experts import DENSE, DENSE_FIELDS, SPARSE

_BIAS = "layers.*.mlp.router.bias"
_IS_DENSE = "number in model.moe.mlp_only_layers"
_NEEDED = {f"layers.*.mlp.{name}" for name in ("router", "experts.*.gate", "experts.*.up", "experts.*.down")}


def place_experts(theirs: Mapping[str, Mapping[str, Any]], experts: list[str]) -> dict[str, str]:
    """Our modules of a mixture, from their modules `experts`; nothing unless the form of all of these is known.

    `theirs` has the tensors of each of their modules by their last name.
    """
    found: dict[str, str] = {}
    for module, kind in [(name, kind) for name in experts for kind in theirs[name]]:
        part = module.partition("*.")[2].partition(".")[2]
        folder, _, leaf = part.rpartition(".")
        ours = next((ours for ours in ("gate", "up", "down") if leaf in MLP[ours]), "")
        if kind in SELECTION_BIASES:
            found[_BIAS] = f"{module}.{kind}"
        elif kind == "weight" and part in ROUTERS:
            found["layers.*.mlp.router"] = module
        elif kind == "weight" and part == "shared_expert_gate":
            found["layers.*.mlp.shared_gate"] = module
        elif kind == "weight" and ours and folder == "experts.*":
            found[f"layers.*.mlp.experts.*.{ours}"] = module
        elif kind == "weight" and ours and folder.startswith("shared") and "." not in folder:
            found[f"layers.*.mlp.shared.{ours}"] = module
        else:
            return {}
    return found if found.keys() >= _NEEDED else {}


@dataclass
class SketchedExperts:
    """A mixture whose tensors are placed: arguments of `ListedExperts`, and what becomes of other fields."""

    names: dict[str, str] = field(default_factory=dict)
    always: dict[str, Any] = field(default_factory=dict)
    shared: str = ""
    dense: tuple[str, ...] = ()

    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields that a draft takes with this value alone."""
    kind: dict[str, str] = field(default_factory=dict)
    """Arguments of LayerKind."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Their tensors that hold ours in another way."""
    decide: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def fields(self) -> set[str]:
        """The fields that the mixture reads."""
        return {*self.names, self.shared, *self.dense}

    def asks(self, raw: Raw) -> str:
        """The rule in words."""
        shown = ", ".join(f"{name} {raw[name]}" for name in self.names)
        return f"LayerKind.mixture: experts by {self.always['scoring_func']} ({shown})"


def read_experts(
    raw: Raw, modules: Mapping[str, str], theirs: Mapping[str, Mapping[str, Sizes | None]]
) -> SketchedExperts:
    """The mixture of a config.json. `modules` are ours for theirs, those of experts among them."""
    experts = SketchedExperts()
    _read_names(experts, raw)
    # transformers' routers with a bias that selects have sigmoid scores, and others a softmax, but for a few.
    bias = modules.get(_BIAS, "")
    experts.always.setdefault("scoring_func", "sigmoid" if bias else "softmax")
    if bias:
        experts.always["balance"] = "bias"
        module, _, kind = bias.rpartition(".")
        if len(theirs[module][kind] or ()) == 2:
            experts.layouts[bias] = "Packing(by_group=True)"  # [1, experts]
    _read_shared(experts, raw, modules)
    _read_dense(experts, raw, modules)
    if "n_group" in experts.names.values():
        sigmoid = experts.always["scoring_func"] == "sigmoid"
        score = 'group_score="best_2"' if sigmoid else 'group_score="best", zero_other_groups=True'
        # Layers with a plain MLP read no rule.
        plain = "" if experts.kind["mlp"] == '"mixture"' else f"None if {_IS_DENSE} else "
        experts.kind["router"] = f"{plain}replace(router_rule(model.moe), {score})"
    return experts


def _read_names(experts: SketchedExperts, raw: Raw) -> None:
    for ours, name in ((ours, name) for ours, names in EXPERTS.items() for name in names if name in raw):
        if ours == "scoring_func":
            experts.fixed[name] = experts.always[ours] = raw[name]
            if raw[name] not in ("softmax", "sigmoid"):
                experts.missing.append(f"{name}={raw[name]!r}: scores of experts")
        elif raw[name] is None:
            experts.fixed[name] = None
        else:
            experts.names[name] = ours
    for ours in ("num_experts", "num_experts_per_tok"):
        if ours not in experts.names.values():
            experts.decide.append(f"no field says {ours} ({', '.join(EXPERTS[ours])})")
    experts.fixed |= {name: raw[name] for name in EXPERTS_FIXED if name in raw}
    experts.fixed |= {name: 1 for name in EVERY_LAYER if raw.get(name) == 1}


def _read_shared(experts: SketchedExperts, raw: Raw, modules: Mapping[str, str]) -> None:
    """The expert for every token."""
    counts = [name for name in SHARED_COUNTS if name in raw]
    widths = [name for name, ours in experts.names.items() if ours == "shared_expert_intermediate_size"]
    if "layers.*.mlp.shared_gate" in modules:
        experts.always["shared_expert_gate"] = True
    if "layers.*.mlp.shared.up" not in modules:
        for name in (*widths, *counts):
            experts.names.pop(name, None)
            experts.fixed[name] = raw[name]
            if raw[name]:
                experts.decide.append(f"{name}={raw[name]}: no tensors were found for a shared expert (modules)")
    elif widths:
        experts.fixed |= {name: raw[name] for name in counts}
        if any(raw[name] not in (1, None) for name in counts):
            experts.decide.append(f"{', '.join((*widths, *counts))}: is the width that of all shared experts?")
    elif counts:
        experts.shared = counts[0]
    else:
        experts.decide.append("no field says the width of the shared expert (always)")


def _read_dense(experts: SketchedExperts, raw: Raw, modules: Mapping[str, str]) -> None:
    """Which layers have a plain MLP."""
    experts.dense = tuple(name for name in DENSE_FIELDS if name in raw)
    kinds = raw.get("mlp_layer_types")
    if others := sorted({*map(str, kinds if isinstance(kinds, list) else ())} - {DENSE, SPARSE}):
        experts.missing.append(f"mlp_layer_types: MLPs of {', '.join(others)}")
    if "layers.*.mlp.up" not in modules:
        experts.kind |= {"mlp": '"mixture"', "mixture": "model.moe"}
        return
    if not experts.dense:
        experts.decide.append("layers without experts: no field says which (layer_kind)")
    if "layers.*.mlp.gate" not in modules:
        experts.decide.append("layers without experts have an MLP without a gate (layer_kind)")
    experts.kind["mlp"] = f'"dense" if {_IS_DENSE} else "mixture"'
    experts.kind["mixture"] = f"None if {_IS_DENSE} else model.moe"
