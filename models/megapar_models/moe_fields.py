"""The fields of a mixture of experts in a config.json: `RoutedExperts`, and what codecs of single families share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import shown
from megapar.config.model_options import MixtureModel, MoEConfig
from megapar_models.family import Codec, Raw, typed, wrong_types


@dataclass(frozen=True)
class Balanced(Codec):
    """What all codecs of experts say of transformers' loss of balance."""

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        if raw.get("output_router_logits"):
            # Its loss depends on the micro-batch.
            text = "is not read: model.moe.balance says which loss balances the experts"
            yield f"config.json: output_router_logits=true {text}"


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(Balanced):
    """A mixture of experts in every layer, or in those that a family chooses."""

    names: Mapping[str, str]
    """From their fields to options of model.moe."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names that are read, and not written: transformers 5 writes num_local_experts, version 4 wrote others."""
    defaults: Raw
    """transformers' defaults for absent fields. A field without a default must be there."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Options of model.moe that every model has, each with its only value."""
    has_bias: bool = False
    """Whether routers have a bias that selects experts. Then those of all models have one."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, {**self.names, **self.aliases}, self.defaults)
        balance: dict[str, Any] = {"balance": "bias"} if self.has_bias else {}
        return {"moe": MoEConfig(**self.always, **balance, **moe)}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        refuse_unwritable(model, fields["model_type"], self.always, self.refusals(model), has_bias=self.has_bias)
        fields |= {theirs: getattr(model.moe, ours) for theirs, ours in self.names.items()}
        if "moe_intermediate_size" not in self.names.values():
            # All layers have experts, so their width is the only one.
            fields["intermediate_size"] = model.moe.moe_intermediate_size

    def refusals(self, model: Any) -> Iterable[str]:
        """Yield what else keeps a model from being written."""
        return ()


def read_moe(raw: Raw, names: Mapping[str, str], defaults: Raw) -> tuple[dict[str, Any], list[str]]:
    """Read the options `model.moe` from a config.json; returns their values and problems.

    `names` maps the fields of config.json to options. `defaults` has transformers' defaults for absent fields. A field
    without a default must be there. Several fields may name the same option, if they agree: transformers 5 writes
    num_local_experts, version 4 wrote num_experts.
    """
    values: dict[str, Any] = {}
    problems = []
    for theirs, ours in names.items():
        value = raw.get(theirs)
        if value is None:
            continue
        if values.get(ours, value) != value:
            problems.append(f"{theirs}={value!r} contradicts {values[ours]!r} of another field for the same")
        values[ours] = value
    for theirs, ours in names.items():
        if ours in values:
            continue
        if theirs in defaults:
            values[ours] = defaults[theirs]
        else:
            problems.append(f"{theirs} is missing")
            values[ours] = 1  # so that it is named once
    problems += wrong_types(values, MoEConfig)
    return ({} if problems else typed(values, MoEConfig)), problems


def refuse_unwritable(
    model: MixtureModel, model_type: str, fixed: Mapping[str, Any], because: Iterable[str], *, has_bias: bool = False
) -> None:
    """Raise ConfigError with every option of model.moe the config.json of `model_type` cannot hold.

    `fixed` has further options, each with its only value in transformers' model. `because` are other problems.
    `has_bias` says whether its routers have a bias that selects experts. Then all models of `model_type` have one.
    """
    problems = list(because)
    always: dict[str, Any] = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1}
    always |= {"shared_expert_intermediate_size": 0, **fixed}
    for name, value in always.items():
        found = getattr(model.moe, name)
        if found != value:
            problems.append(f"model.moe.{name}={shown(found)}: {model_type} of transformers has {shown(value)}")
    if model.moe.has_selection_bias and not has_bias:
        problems.append(
            f"model.moe.balance={model.moe.balance}: {model_type} of transformers has no bias that selects experts"
        )
    if has_bias and not model.moe.has_selection_bias:
        problems.append(f"model.moe.balance={model.moe.balance}: {model_type} of transformers has bias")
    if problems:
        raise ConfigError("\n".join(problems))


def wrong_mlp_types(types: Sequence[str], layers: int) -> list[str]:
    """Return a problem of mlp_layer_types, the list of each layer's MLP, unless `types` is one for so many layers."""
    if {*types} - {"dense", "sparse"} or len(types) != layers:
        return [f"mlp_layer_types={types!r} should be dense or sparse for each of {layers} layers"]
    return []
