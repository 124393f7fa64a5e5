"""The model families by name, a line for each. A family outside this repository is named by its import path."""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from megapar.base.errors import ConfigError
from megapar.config import compatible
from megapar.config import validate as checks
from megapar.config.messages import counted, divisors, listed, problem, shown
from megapar.config.model_options import ModelConfig
from megapar.config.model_rules import Families, ModelRules
from megapar.config.options import Config, TrainConfig, flatten
from megapar.config.plugins import named
from megapar.config.virtual_stages import VirtualStages
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TorchProducts
from megapar.pipeline.schedules import virtual_stages
from megapar_models.doors import described
from megapar_models.family import Family
from megapar_models.layer import MIXERS, MLPS
from megapar_models.layer_kind import READ_BY_LAYERS, LayerKind, MixerRule
from megapar_models.moe import router_rule
from megapar_models.multi_token import MOST_DEPTHS
from megapar_models.objectives import CROSS_ENTROPY, Objective
from megapar_models.preferences import PREFERENCES

NAMES = (
    "llama",
    "gpt",
    "mixtral",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma4",
    "olmo",
    "olmoe",
    "granite",
    "granitemoe",
    "cohere",
    "smollm3",
    "exaone4",
    "helium",
    "phi3",
    "glm",
    "gpt_oss",
    "starcoder2",
    "deepseek",
    "glm4_moe",
    "arcee",
    "nemotron",
    "apertus",
    "hunyuan",
    "ministral3",
    "ernie4_5_moe",
    "minimax_m2",
    *("laguna", "mimo_v2_flash", "step3p5"),
    "stablelm",
    "phi",
    "opt",
    "biogpt",
    "xglm",
    "gpt_neo",
    "gptj",
    "codegen",
    "gpt_neox",
    "persimmon",
    "gpt_bigcode",
    "falcon",
    "youtu",
    "minicpm3",
    "axk1",
    "mistral4",
    "llama4",
    "bloom",
    *("mpt", "dbrx", "bitnet"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("jais2", "hyperclovax", "granite_swa", "granitemoe_swa"),
    *(
        "afmoe",
        "exaone_moe",
        "hy_v3",
        "mellum",
        "kolibri1",
        "hunyuan_moe",
        "cohere2_moe",
        "flint",
        "nanochat",
        "gpt_neox_japanese",
    ),
    *("lfm2", "lfm2_moe", "lfm3", "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"),
)
"""The families of this package. Each is a file in `families`, with its `Family` under the name in capitals."""


class _Families(Mapping[str, Family]):
    """The families by name. A family is imported when it is asked for: a run needs one of them."""

    def __getitem__(self, name: str) -> Family:
        if name not in NAMES:
            raise KeyError(name)
        family: Family = getattr(import_module(f"megapar_models.families.{name}"), name.upper())
        return family

    def __contains__(self, name: object) -> bool:
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


FAMILIES: Mapping[str, Family] = _Families()


def find(name: str) -> Family:
    """The family named by model.family: a key of FAMILIES, or MODULE:NAME. Raises ConfigError if there is none."""
    return named("model.family", name, FAMILIES, Family)


OBJECTIVES = {"cross_entropy": CROSS_ENTROPY, **PREFERENCES}


def find_objective(name: str) -> Objective:
    """The objective named by train.objective: a key of OBJECTIVES, or MODULE:NAME. Raises ConfigError without one."""
    return named("train.objective", name, OBJECTIVES, Objective)


def find_number_format(config: Config) -> MatrixProducts | None:
    """Return the products of kernels.products, MODULE:NAME of a subclass of MatrixProducts. None for torch's.

    Raises ConfigError if there is no such class, or if it cannot be made without arguments.
    """
    name = config.kernels.products
    found = named("kernels.products", name, {"torch": TorchProducts}, type)
    if not issubclass(found, MatrixProducts):
        raise ConfigError(f"kernels.products={name}: is no subclass of megapar.linear.products.MatrixProducts")
    if found is TorchProducts:
        return None
    try:
        return found()
    except Exception as error:  # code outside of megapar may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"kernels.products={name}: cannot be made without arguments ({reason})") from error


FOR_OPTIONS = Families(FAMILIES, find, described)
"""What `megapar.config.files.load` must know to read the options of any family."""


def presets() -> dict[str, Path]:
    """Published models by name: TOML files of options of `model`, in `families/presets`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("families/presets/*.toml"))}


def named_configs(folder: Path) -> dict[str, Path]:
    """What `--config` and `base` find by name: the presets, and the configurations of whole runs in `folder`."""
    return presets() | {path.stem: path for path in sorted(folder.glob("*.toml"))}


def validate(config: Config, world_size: int, *, trains: bool = True) -> Config:
    """Call `megapar.config.validate.validate` with what the family, its layers and the schedule say of themselves.

    Without `trains` a model may be one that cannot be trained well, and is only read, converted or run.
    """
    return checks.validate(config, world_size, *_rules(config, trains=trains))


def validate_layout(config: Config, world_size: int, kinds: Mapping[LayerKind, int] | None = None) -> Config:
    """Call `megapar.config.validate.validate_layout` alike. `kinds` are `kinds_of` the model, if they are known."""
    return checks.validate_layout(config, world_size, *_rules(config, kinds))


def kinds_of(model: ModelConfig) -> Mapping[LayerKind, int]:
    """The kinds of a model's layers, each with its first layer. A hundred layers take longer than all other checks."""
    stage = find(model.family).stage
    # Of a number of layers that somebody has mistyped, the first few are enough.
    numbers = range(min(model.num_hidden_layers, 10_000))
    kinds: dict[LayerKind, int] = {}
    for number in numbers:
        kinds.setdefault(stage.layer_kind(model, number), number)
    rule = stage.mtp_rule(model) if model.num_nextn_predict_layers else None
    if rule is not None:
        kinds.setdefault(rule.kind, model.num_hidden_layers)
    return kinds


def _rules(
    config: Config, kinds: Mapping[LayerKind, int] | None = None, *, trains: bool = True
) -> tuple[ModelRules, VirtualStages]:
    """The rules of the family and its layers, and the schedule's."""
    family = find(config.model.family)

    def problems(config: Config, model: Any) -> Iterator[str]:
        names = family.hugging_face
        # Codecs of several model types may tell the same.
        of_codecs = names.problems(config, model) if names else ()
        yield from dict.fromkeys(chain(of_codecs, family.problems(config, model)))
        own = kinds_of(model) if kinds is None else kinds
        yield from _size_problems(config, own)
        yield from _attention_problems(config, own.keys())
        yield from _mixer_problems(config, own.keys())
        yield from _unread_problems(config, own)
        yield from _clip_problems(config, own.keys())
        yield from _router_problems(config, own.keys())
        if trains:
            yield from _learning_problems(config, own.keys())
        yield from _number_format_problems(config)
        yield from _objective_problems(config)
        yield from _head_problems(config)
        yield from _mtp_problems(config)

    return replace(family, problems=problems), virtual_stages(config.parallel.schedule)


def _size_problems(config: Config, kinds: Mapping[LayerKind, int]) -> Iterator[str]:
    """Problems of the first layer whose own heads or width do not fit the layout, as those of the model must.

    `megapar.config.validate` checks the model's sizes.
    """
    model, parallel = config.model, config.parallel
    of_layers = {number: kind for kind, number in kinds.items() if kind.head_sizes or kind.mlp_width}
    if not of_layers:
        return
    heads = [model.num_attention_heads, *(kind.heads_of(model).query_heads for kind in of_layers.values())]
    widths = [kind.mlp_width for kind in of_layers.values()]
    fits = divisors(math.gcd(*heads, *widths))
    for number, kind in of_layers.items():
        problems = list(_head_size_problems(config, number, kind, heads, fits))
        if kind.mlp_width % parallel.tp:
            text = f"the MLP of layer {number} is {kind.mlp_width} wide, which must divide by tp"
            problems.append(problem(config, f"{kind.sizes_from} parallel.tp", f"{text}; tp may be {listed(fits)}"))
        if problems:
            yield from problems
            return


def _head_size_problems(
    config: Config, number: int, kind: LayerKind, all_heads: list[int], fits: list[int]
) -> Iterator[str]:
    """Problems of the heads of layer `number`. `all_heads` are those of all layers, and `fits` the possible tp."""
    sizes, parallel = kind.head_sizes, config.parallel
    if sizes is None:
        return
    whose = f"layer {number} has {counted(sizes.query_heads, 'query head')}"
    if min(sizes.query_heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim) < 1:
        yield problem(config, kind.sizes_from, f"layer {number}: {sizes}: each of these must be at least 1")
        return
    if sizes.query_heads % sizes.kv_heads:
        text = f"{whose}, which must divide by its {counted(sizes.kv_heads, 'key/value head')}"
        works = f"it may have {listed(divisors(sizes.query_heads))} key/value heads"
        yield problem(config, kind.sizes_from, f"{text}; {works}")
    if sizes.query_heads % parallel.tp:
        text = f"{whose}, which must divide by tp; tp may be {listed(fits)}"
        yield problem(config, f"{kind.sizes_from} parallel.tp", text)
    elif parallel.cp_attention == "ulysses" and sizes.query_heads // parallel.tp % parallel.cp:
        works = listed(divisors(math.gcd(*all_heads) // math.gcd(*all_heads, parallel.tp)))
        text = f"{whose}, and ulysses deals the {sizes.query_heads // parallel.tp} of a tp rank to cp ranks"
        yield problem(config, f"{kind.sizes_from} parallel.cp parallel.tp", f"{text}; cp may be {works}")


def _attention_problems(config: Config, kinds: Set[LayerKind]) -> Iterator[str]:
    """Attention with a window needs whole samples."""
    parallel = config.parallel
    windows = {kind.window for kind in kinds} - {0}
    if windows and parallel.cp > 1 and parallel.cp_attention != "ulysses":
        text = f"the family has layers that read {listed(sorted(windows))} keys; use cp_attention ulysses, or cp 1"
        yield problem(config, "parallel.cp parallel.cp_attention", text)


def _mixer_problems(config: Config, kinds: Set[LayerKind]) -> Iterator[str]:
    """A mixer of the user's reads tokens of other context-parallel ranks only if the class does so, and says so."""
    for name, mixer in _mixers(kinds).items():
        if config.parallel.cp > 1 and not getattr(mixer, "OVER_CP", False):
            text = (
                f"mixer {name} does not declare OVER_CP, that tokens meet those of other ranks (by the factory's "
                "core_attention, or by megapar.context_parallel.states); use cp 1"
            )
            yield problem(config, "parallel.cp model.family", text)
    for mixer in dict.fromkeys(kind.mixer for kind in kinds):
        if isinstance(mixer, MixerRule):
            yield from mixer.problems(config)


def _unread_problems(config: Config, kinds: Mapping[LayerKind, int]) -> Iterator[str]:
    """Fields of LayerKind with a value that neither the mixer nor the MLP of a layer reads, with the first layer."""
    found: dict[str, str] = {}
    for kind, number in kinds.items():
        mixer = kind.mixer if isinstance(kind.mixer, MixerRule) else _class_of("mixer", kind.mixer, MIXERS)
        parts = (mixer, _class_of("mlp", kind.mlp, MLPS))
        reads = READ_BY_LAYERS.union(*(getattr(part, "READS", ()) for part in parts))
        mixer_name = kind.mixer if isinstance(kind.mixer, str) else type(kind.mixer).__name__
        for field in fields(kind):
            value = getattr(kind, field.name)
            if field.name in reads or value == field.default:
                continue
            given = type(value).__name__ if is_dataclass(value) else shown(value)
            whose = f"neither mixer {mixer_name} nor MLP {kind.mlp} of layer {number} reads the field"
            text = f"LayerKind.{field.name}={given}: {whose}; leave it out, or name it in READS of one of them"
            found.setdefault(field.name, problem(config, "model.family", text))
    yield from found.values()


def _class_of(field: str, name: str, known: Mapping[str, type]) -> type | None:
    """Return the class that a field of LayerKind names, or None for "none". Raises ConfigError for a wrong name."""
    return None if name == "none" else named(f"LayerKind.{field}", name, known, type)


def _mixers(kinds: Set[LayerKind]) -> dict[str, object]:
    """Return the rules and the classes of mixers other than MIXERS, by name. Raises ConfigError for a wrong name."""
    found: dict[str, object] = {}
    for mixer in {kind.mixer for kind in kinds} - {*MIXERS, "none"}:
        if isinstance(mixer, str):
            found[mixer] = named("LayerKind.mixer", mixer, MIXERS, type)
        else:
            found[type(mixer).__name__] = mixer
    return dict(sorted(found.items()))


def _clip_problems(config: Config, kinds: Set[LayerKind]) -> Iterator[str]:
    """What optimizer.qk_clip does not go with: logits that do not follow the weights, or that nobody measures."""
    if not config.optimizer.qk_clip:
        return
    if any(kind.qk_norm for kind in kinds):
        text = "the family norms queries and keys, so to scale their weights changes no logit; use 0"
        yield problem(config, "optimizer.qk_clip", text)
    if any(kind.shared_keys or kind.keys_as_values for kind in kinds):
        text = "keys of several layers, or values that are keys, would shrink with the keys of one layer; use 0"
        yield problem(config, "optimizer.qk_clip", text)
    if others := [name for name, mixer in _mixers(kinds).items() if not getattr(mixer, "MEASURES_LOGITS", False)]:
        yield problem(config, "optimizer.qk_clip", f"{', '.join(others)} measures no logits; use 0")


def _router_problems(config: Config, kinds: Set[LayerKind]) -> Iterator[str]:
    """A group's score needs the experts whose scores it adds: whole shares, two of V3, or the best one of V2."""
    for kind in kinds:
        if kind.mixture is None or not kind.mixture.num_experts:
            continue
        rule = kind.router or router_rule(kind.mixture)
        if rule.n_group > 1 and rule.group_score == "share" and rule.top_k % rule.topk_group:
            eligible = kind.mixture.num_experts // rule.n_group * rule.topk_group
            multiples = list(range(rule.topk_group, eligible + 1, rule.topk_group))
            text = "a group's score adds its best num_experts_per_tok / topk_group experts, so topk_group must divide"
            text += f"; use {listed(multiples)}" if multiples else ""
            yield problem(config, "model.moe.num_experts_per_tok model.moe.topk_group", text)
            return
        uneven = kind.mixture.num_experts % rule.n_group  # which a line of its own refuses, with other values
        if rule.n_group > 1 and not uneven and rule.counted_in_group > kind.mixture.num_experts // rule.n_group:
            fits = [
                n for n in divisors(kind.mixture.num_experts) if kind.mixture.num_experts // n >= rule.counted_in_group
            ]
            text = (
                f"a group's score adds its best {rule.counted_in_group} experts, and there are fewer in a group; use "
            )
            text += listed(fits or [1])
            yield problem(config, "model.moe.n_group model.moe.num_experts", text)
            return


def _learning_problems(config: Config, kinds: Set[LayerKind]) -> Iterator[str]:
    """Trained routers whose gradient is zero but for the losses of balance: the weight of a single expert is 1."""
    mixtures = [kind for kind in kinds if kind.mixture is not None and kind.mixture.num_experts > 1]
    rules = [kind.router or router_rule(kind.mixture) for kind in mixtures if kind.mixture is not None]
    if not any(rule.top_k == 1 and rule.norm_topk_prob for rule in rules):
        return
    patterns = config.train.trainable
    names = [f"layers.{number}.mlp.router.weight" for number in range(min(config.model.num_hidden_layers, 10_000))]
    if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in names):
        text = (
            "the weight of a single expert, divided by itself, is always 1, so the router would get no gradient and "
            "never learn; use norm_topk_prob false (--model.moe.no_norm_topk_prob), or 2 experts"
        )
        yield problem(config, "model.moe.num_experts_per_tok model.moe.norm_topk_prob", text)


def _number_format_problems(config: Config) -> Iterator[str]:
    """Dropout changes the input of an adapter, which products of another format have converted already."""
    products = find_number_format(config)
    if products is not None and products.converts and products.plain is products and config.adapter.dropout:
        text = "the format converts inputs, of which the adapters would drop some; use dropout 0.0"
        yield problem(config, "adapter.dropout kernels.products", text)


def _objective_problems(config: Config) -> Iterator[str]:
    """What does not fit the objective: options that it does not read, and documents of a pair in a row."""
    objective = find_objective(config.train.objective)
    defaults = flatten(TrainConfig(), "train.")
    for path, value in flatten(config.train, "train.").items():
        readers = [name for name, known in OBJECTIVES.items() if path in known.options]
        if readers and path not in objective.options and value != defaults[path]:
            text = f"the objective does not read it; use {shown(defaults[path])}, or objective {' or '.join(readers)}"
            yield problem(config, f"{path} train.objective", text)
    if config.train.references == "adapters_off" and objective.needs_references:
        yield from _reference_problems(config)
    if config.train.label_smoothing >= 0.5:
        text = "the share of pairs with the wrong answer chosen; use less than 0.5"
        yield problem(config, "train.label_smoothing", text)
    if objective.divided_by == "pairs" and config.data.documents != "apart":
        text = "a sample has two answers, which must not attend to each other; use documents apart"
        yield problem(config, "train.objective data.documents", text)
    if objective.divided_by == "pairs" and config.train.loss_mean == "sample":
        text = "the objective divides by pairs already; use token, or objective dpo_norm"
        yield problem(config, "train.objective train.loss_mean", text)
    further = config.model.num_nextn_predict_layers
    if objective.divided_by == "pairs" and not further and num_targets(config) > 1:
        text = "the family has losses of later tokens, which pairs of answers have none of; use another"
        yield problem(config, "train.objective model.family", text)


def _head_problems(config: Config) -> Iterator[str]:
    """What does not fit model.head."""
    head = find_objective(config.train.objective).head
    if head != config.model.head:
        fitting = [name for name, known in OBJECTIVES.items() if known.head == config.model.head]
        text = f"the objective is of a head {head}; use that, or objective {' or '.join(fitting)}"
        yield problem(config, "train.objective model.head", text)
    if config.model.head == "vocabulary":
        return
    if config.model.tie_word_embeddings:
        text = "a head of one row is not the embedding's matrix; use False"
        yield problem(config, "model.tie_word_embeddings model.head", text)
    if config.kernels.loss_chunk:
        yield problem(config, "kernels.loss_chunk model.head", "there are no logits to compute in chunks; use 0")


def _mtp_problems(config: Config) -> Iterator[str]:
    """What does not fit multi-token prediction: families without it, and objectives of whole answers."""
    model = config.model
    if not model.num_nextn_predict_layers:
        for name in ("mtp_loss_weight", "mtp_detach"):
            if getattr(model, name) != getattr(ModelConfig(), name):
                text = "no layer predicts further tokens; set num_nextn_predict_layers, or leave it out"
                yield problem(config, f"model.{name} model.num_nextn_predict_layers", text)
        return
    stage = find(model.family).stage
    ends = stage.ends_of(model)
    if not 0 < model.num_nextn_predict_layers <= MOST_DEPTHS:
        yield problem(config, "model.num_nextn_predict_layers", f"must be 0, for none, to {MOST_DEPTHS}")
    elif stage.mtp_rule(model) is None:
        text = "the family has no layers of multi-token prediction (Stage.mtp_rule); use 0"
        yield problem(config, "model.num_nextn_predict_layers model.family", text)
    elif ends.width or ends.embedding_norm is not None:
        text = "the last stage embeds by the matrix of token embeddings alone, and the family has more; use 0"
        yield problem(config, "model.num_nextn_predict_layers model.family", text)
    if model.head != "vocabulary":
        text = "layers of multi-token prediction share a head of tokens; use 0"
        yield problem(config, "model.num_nextn_predict_layers model.head", text)
    elif find_objective(config.train.objective).divided_by == "pairs":
        text = "pairs of answers have no targets further ahead; use 0, or objective cross_entropy"
        yield problem(config, "model.num_nextn_predict_layers train.objective", text)


def _reference_problems(config: Config) -> Iterator[str]:
    """What makes of adapters turned off another model than the one that training began from."""
    if not config.adapter.rank:
        text = "there are no adapters to turn off; use stored, or set adapter.rank"
        yield problem(config, "train.references adapter.rank", text)
    if any(".lora_" not in pattern for pattern in config.train.trainable):
        text = "the base is trained too, and is no reference; use stored, or leave train.trainable empty"
        yield problem(config, "train.references train.trainable", text)
    experts = config.model.experts
    if experts is not None and experts.has_selection_bias and experts.router_bias_update_rate:
        text = "the selection bias of the base moves, and is no reference; use stored, or the rate 0"
        yield problem(config, "train.references model.moe.router_bias_update_rate", text)


def weight_options(config: Config) -> dict[str, Any]:
    """Call `compatible.weight_options` with the options that decide the sizes of the family's weights."""
    return compatible.weight_options(config, find(config.model.family).stage.sizes_of_weights)


def num_targets(config: Config) -> int:
    """How many of the tokens after each position the model's losses are of: what `open_loaders` must know."""
    return find(config.model.family).stage.declared(config.model).num_targets


def sample_kind(config: Config) -> Literal["texts", "pairs", "referenced pairs"]:
    """What the samples of the objective are: what `open_loaders` must know too."""
    objective = find_objective(config.train.objective)
    if objective.divided_by == "tokens":
        return "texts"
    stored = objective.needs_references and config.train.references == "stored"
    return "referenced pairs" if stored else "pairs"
