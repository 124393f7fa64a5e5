"""Writes the tables of docs/families.md from the registry and the table of model types: python -m tests.families_page

It needs transformers, which completes the config.json of each row.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.registry import FAMILIES, find, kinds_of, presets

from megapar.config.model_options import ModelConfig
from tests.support.model_types import FORMS, TYPES
from tests.support.published import published_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/families.md"
BEGIN = "<!-- what follows is written by python -m tests.families_page -->"

# What another value than the default means. A new field needs its words here.
IN_WORDS: dict[type, dict[str, str]] = {
    LayerKind: {
        "mixer": "a mixer other than attention with keys and values of heads, such as Mamba-2, or none",
        "mlp": "an MLP without a gate, with experts, or none",
        "norms": "norms behind a branch, on both sides of a branch, or of the residual stream",
        "mlp_norms": "norms of the MLP in other places than those of attention",
        "parallel": "attention and MLP read the same residual stream",
        "residual_multiplier": "a factor of both branches",
        "stream": "several residual streams (hyper-connections), or sums of blocks of layers (attention residuals)",
        "head_sizes": "heads of the layer's own",
        "mlp_width": "an MLP as wide as the layer says",
        "sizes_from": "sizes of layers by options",
        "rotary": "rotary positions",
        "window": "a window of keys",
        "chunk": "chunks of keys",
        "qkv_bias": "biases of queries, keys and values",
        "qkv_clip": "queries, keys and values within bounds",
        "out_bias": "a bias of attention's output",
        "qk_norm": "norms of queries and keys",
        "qk_norm_over": "norms of queries and keys over all heads, or with a weight a head",
        "qk_norm_rule": "norms of queries and keys by a rule of their own",
        "qk_norm_after_rotary": "norms of queries and keys behind the rotation",
        "attention_scale": "a factor of scores of its own",
        "score_cap": "capped scores",
        "slopes": "scores that fall with the distance (ALiBi)",
        "sinks": "a sink in the softmax of each head",
        "value_factor": "a factor of values",
        "gate_activation": "gates by softplus",
        "output_gate": "a gate on attention's output",
        "head_gate": "a number that gates the output of each head",
        "temperature": "a factor of queries by position",
        "attention_dropout": "dropout of attention's probabilities",
        "activation": "an activation of the layer's own",
        "activation_limit": "a bound of the activation",
        "shared_activation_limit": "a bound of the shared expert's activation",
        "mlp_bias": "biases of the MLP",
        "mixture": "a mixture of experts",
        "router": "a router by a rule of its own",
        "router_bias": "a trained bias of the router",
        "router_dtype": "a router's product in the dtype of the model",
        "expert_bias": "biases of the experts",
        "plain_experts": "experts without a gate",
        "weighted_inputs": "experts whose inputs are multiplied by their weights",
        "expert_latent": "experts in a latent width",
        "averages_shared": "the mean of experts and shared expert",
        "sub_norms": "norms of what the last matrix of a branch reads",
        "reads": "tensors of earlier layers",
        "writes": "tensors handed on to later layers",
        "shared_keys": "keys and values that layers share",
        "keys_as_values": "keys as values",
        "value_norm": "a norm of values",
        "expert_scale": "a trained factor of each expert's weights",
    },
    Ends: {
        "embedding_norm": "a norm of embeddings",
        "embedding_multiplier": "a factor of embeddings",
        "head_bias": "a bias of logits",
        "logits": "a factor or a cap of logits",
        "width": "embeddings of another width than the layers",
        "norm": "no norm before the head",
        "reads": "tensors of layers behind the last one",
        "writes": "tensors handed on from the embedding",
    },
    NormRule: {
        "kind": "LayerNorm",
        "offset": "norms with a weight that is added to 1",
        "cast_first": "norms rounded before the product with the weight",
        "weighted": "norms without weight",
        "biased": "LayerNorm without bias",
    },
}


def models() -> dict[str, ModelConfig]:
    """Return the options of each row of the table."""
    return {name: published_model(case.model_type, case.fields) for name, case in TYPES.items()}


def family_table() -> Iterator[str]:
    """Yield a row for each family: its model types and its presets."""
    yield "| family | model types | presets |"
    yield "|---|---|---|"
    families = {name: tomllib.loads(path.read_text())["model"]["family"] for name, path in presets().items()}
    for family, description in FAMILIES.items():
        names = description.hugging_face
        types = ", ".join(f"`{name}`" for name in names.model_types) if names else ""
        own = [name for name in families if families[name] == family]
        yield f"| `{family}` | {types} | {', '.join(f'`{name}`' for name in own)} |"


def form_table(rows: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Yield the lines of a table of families by form of parallelism. Families with the same cells share a row."""
    yield f"| families | {' | '.join(FORMS)} |"
    yield f"|---|{'---|' * len(FORMS)}"
    notes: list[str] = []
    with_cells: dict[str, list[str]] = {}
    for family in FAMILIES:
        own = [name for name, model in rows.items() if model.family == family]
        cells = " | ".join(form_cell(own, form, notes) for form in FORMS)
        with_cells.setdefault(cells, []).append(f"`{family}`")
    for cells, families in with_cells.items():
        yield f"| {', '.join(families)} | {cells} |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"


def form_cell(own: list[str], form: str, notes: list[str]) -> str:
    """Return the cell of a family with the rows `own`. Words of a refusal join `notes`; the cell has their number."""
    own = [name for name in own if form in TYPES[name].forms()]
    refused = [name for name in own if form in TYPES[name].refuses]
    if not own:
        return ""
    if not refused:
        return "yes"
    numbers = []
    for name in refused:
        note = TYPES[name].refuses[form]
        if note not in notes:
            notes.append(note)
        numbers.append(notes.index(note) + 1)
    word = "no" if refused == own else "part"
    return f"{word} ({', '.join(str(number) for number in sorted(set(numbers)))})"


def rule_table(rows: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Yield a row for each field of a rule: the model types with a value other than the default."""
    yield "| rule | field | model types |"
    yield "|---|---|---|"
    for rule, words in IN_WORDS.items():
        for field, meaning in words.items():
            turned = {
                TYPES[name].model_type
                for name, model in rows.items()
                if any(is_turned(value, field) for value in rules_of(model) if type(value) is rule)
            }
            types = ", ".join(f"`{name}`" for name in sorted(turned))
            yield f"| {meaning} | `{rule.__name__}.{field}` | {types or 'none'} |"


def rules_of(model: ModelConfig) -> list[Any]:
    """Return the rules of all layers of a model and of its ends."""
    stage = find(model.family).stage
    kinds = list(kinds_of(model))
    return [*kinds, *(kind.norm for kind in kinds), stage.ends_of(model), stage.last_norm(model)]


def is_turned(rule: Any, field: str) -> bool:
    if field.startswith("qk_norm_") and not rule.qk_norm:
        return False
    (default,) = (item.default for item in fields(rule) if item.name == field)
    assert default is not MISSING
    return bool(getattr(rule, field) != default)


def tables() -> str:
    rows = models()
    sections = {
        "Families": family_table(),
        "In which form": form_table(rows),
        "Rules": rule_table(rows),
    }
    return "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in sections.items()) + "\n"


def page() -> str:
    """Return the whole page: the text above BEGIN as written by hand, then the tables."""
    written, found, _ = PAGE.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} lacks the line {BEGIN}")
    return f"{written}{BEGIN}\n\n{tables()}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
