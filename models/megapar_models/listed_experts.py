"""`ListedExperts` reads a mixture of experts by the names of its fields. Drafts of `megapar new-family` name them.

Names and the layers with a plain MLP are data, so a draft has no code of its own for its experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megapar.base.errors import ConfigError
from megapar.config.messages import shown
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config
from megapar_models.families.qwen3_moe import Qwen3MoeExperts, dense_layers, numbering_problems
from megapar_models.family import Raw
from megapar_models.moe_fields import Balanced, read_moe

DENSE, SPARSE = "dense", "sparse"
_OF_FUNCTION = (
    *("scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    *("shared_expert_intermediate_size", "shared_expert_gate"),
)


class DenseLayers(NamedTuple):
    """How a field says which layers have a plain MLP."""

    read: Callable[[Raw, str], tuple[tuple[int, ...], list[str]]]
    """Their numbers, and problems of the field."""
    write: Callable[[tuple[int, ...], int], Any]
    """The field's value, for their numbers and the number of layers."""


def _read_first(raw: Raw, name: str) -> tuple[tuple[int, ...], list[str]]:
    first = raw.get(name)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        return (), [f"{name}={first!r} should be a whole number from 0 on"]
    return tuple(range(min(first, raw["num_hidden_layers"]))), []


def _write_first(dense: tuple[int, ...], layers: int) -> int:
    if dense != tuple(range(len(dense))):
        raise ConfigError(f"model.moe.mlp_only_layers={shown(dense)}: this file can say of the first layers alone")
    return len(dense)


def _read_types(raw: Raw, name: str) -> tuple[tuple[int, ...], list[str]]:
    types = raw.get(name)
    if not isinstance(types, list) or len(types) != raw["num_hidden_layers"] or {*map(str, types)} - {DENSE, SPARSE}:
        return (), [f"{name}={types!r} should list {DENSE} or {SPARSE} for each layer"]
    return tuple(number for number, kind in enumerate(types) if kind == DENSE), []


_FIRST = DenseLayers(_read_first, _write_first)
DENSE_FIELDS: Mapping[str, DenseLayers] = {
    "mlp_layer_types": DenseLayers(
        _read_types, lambda dense, layers: [DENSE if number in dense else SPARSE for number in range(layers)]
    ),
    "mlp_only_layers": DenseLayers(lambda raw, name: dense_layers(raw), lambda dense, layers: [*dense]),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), _FIRST),
}


@dataclass(frozen=True, kw_only=True)
class ListedExperts(Balanced):
    """A mixture of experts by the names of its fields, which must be there."""

    names: Mapping[str, str]
    """From their fields to options of model.moe."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Options of model.moe that every model has, each with its only value."""
    shared: str = ""
    """The field with the number of shared experts, each as wide as another one."""
    dense: tuple[str, ...] = ()
    """Fields of DENSE_FIELDS, which say the same of the layers with a plain MLP."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        moe, problems = read_moe(raw, self.names, {})
        if self.shared and not problems:
            count = raw.get(self.shared) or 0
            if not isinstance(count, int):
                return {"moe": Qwen3MoeExperts()}, [f"{self.shared}={count!r} should be a whole number"]
            width = moe.get("moe_intermediate_size") or raw["intermediate_size"]
            moe["shared_expert_intermediate_size"] = count * width
        for name in self.dense:
            dense, wrong = DENSE_FIELDS[name].read(raw, name)
            if moe.setdefault("mlp_only_layers", dense) != dense and not wrong:
                wrong = [f"{name}={raw[name]!r} contradicts {self.dense[0]}"]
            problems = [*problems, *wrong]
        return {"moe": Qwen3MoeExperts(**{**self.always, **moe})}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        moe, width = model.moe, model.moe.moe_intermediate_size or model.intermediate_size
        problems = list(self._unwritable(moe))
        fields |= {theirs: getattr(moe, ours) for theirs, ours in self.names.items()}
        if self.shared:
            fields[self.shared], rest = divmod(moe.shared_expert_intermediate_size, width)
            problems += [f"shared_expert_intermediate_size: should be a multiple of {width}"] if rest else []
        if moe.mlp_only_layers and not self.dense:
            problems.append("mlp_only_layers: all layers have experts")
        if problems:
            raise ConfigError("\n".join(f"{fields['model_type']} of transformers: model.moe.{x}" for x in problems))
        layers = model.num_hidden_layers
        fields |= {name: DENSE_FIELDS[name].write(moe.mlp_only_layers, layers) for name in self.dense}

    def _unwritable(self, moe: MoEConfig) -> Iterator[str]:
        """Yield the options without a field that have another value than every model has."""
        only = {name: getattr(MoEConfig(), name) for name in _OF_FUNCTION} | dict(self.always)
        if self.shared:
            del only["shared_expert_intermediate_size"]
        has_bias = only.pop("balance", "") == "bias"
        for name in only.keys() - {*self.names.values()}:
            if getattr(moe, name) != only[name]:
                yield f"{name}={shown(getattr(moe, name))}: {shown(only[name])} is the only value"
        if moe.has_selection_bias != has_bias:
            yield f"balance={moe.balance}: its routers have {'a' if has_bias else 'no'} bias that selects experts"

    def problems(self, config: Config, model: Any) -> Iterator[str]:
        return numbering_problems(config, model)
