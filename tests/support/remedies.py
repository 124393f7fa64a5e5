"""Refused configurations, and what the reader of the refusal would do.

A line is "OPTION=VALUE, OPTION=VALUE: why; what would work". What would work has these forms, joined by ";" or ", or".
Each of them must work by itself. NAME is an option of the line, with or without its section, or any option in full.
Without a NAME it is the first option of the line.

    use VALUE       use NAME VALUE      set NAME VALUE      NAME may be VALUE       such as VALUE
    leave it at VALUE   leave NAME at VALUE     leave both at VALUE     leave it out        start N ranks

VALUE may also be "at most VALUE", or several values: "1, 2 or 4". Two forms joined by " and " are applied together.
"""

import random
import re
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, get_args, get_origin

from megapar_models.registry import FAMILIES, FOR_OPTIONS, find, validate

from megapar.base.errors import ConfigError
from megapar.config.options import Config, default_config, flatten, unflatten

TYPES = FOR_OPTIONS.types()
DEFAULTS = flatten(Config())
for _rules in FAMILIES.values():
    DEFAULTS |= flatten(default_config(_rules.options))
DEFAULTS["model.family"] = Config().model.family

# Values to draw from. Most fit some other values and not all.
VALUES: dict[str, list[Any]] = {
    "model.family": ["llama", "llama", "gpt", "mixtral", "qwen3_moe"],
    "model.hidden_size": [12, 24, 30, 64],
    "model.num_hidden_layers": [1, 2, 3, 4, 5, 9],
    "model.num_attention_heads": [1, 2, 3, 4, 6, 8],
    "model.num_key_value_heads": [0, 1, 2, 3, 5],
    "model.head_dim": [0, 3, 4, 10],
    "model.intermediate_size": [0, 20, 22, 33, 64],
    "model.max_position_embeddings": [16, 48, 128, 2048],
    "model.hidden_act": ["auto", "silu", "gelu_pytorch_tanh", "relu2"],
    "model.hidden_dropout": [0.0, 0.1, 1.0],
    "model.attention_bias": [True],
    "model.qk_norm": [True],
    "model.rope_theta": [-1.0, 500.0],
    "model.rope_scaling.rope_type": ["default", "linear", "llama3", "yarn"],
    "model.rope_scaling.factor": [0.5, 1.0, 4.0],
    "model.rope_scaling.low_freq_factor": [1.0, 4.0, 5.0],
    "model.rope_scaling.high_freq_factor": [1.0, 4.0],
    "model.rope_scaling.beta_fast": [1.0, 32.0],
    "model.rope_scaling.beta_slow": [1.0, 40.0],
    "model.rope_scaling.attention_factor": [0.0, 1.5],
    "model.rope_scaling.mscale": [0.0, 0.7],
    "model.rope_scaling.mscale_all_dim": [0.0, 0.7],
    "model.moe.num_experts": [0, 4, 5, 8, 12],
    "model.moe.num_experts_per_tok": [1, 2, 3, 4, 6],
    "model.moe.moe_intermediate_size": [0, 8, 9, 20],
    "model.moe.mlp_only_layers": [(), (0,), (1, 3), (7,)],
    "model.moe.n_group": [1, 2, 3, 4],
    "model.moe.topk_group": [1, 2, 3],
    "model.moe.shared_expert_intermediate_size": [0, 12, 15],
    "model.moe.shared_expert_gate": [True],
    "model.moe.balance": ["none", "sequence", "global", "bias", "bias+sequence", "micro_batch"],
    "model.moe.router_aux_loss_coef": [0.01],
    "model.moe.router_bias_update_rate": [0.01],
    "parallel.tp": [1, 2, 3, 4, 8],
    "parallel.pp": [1, 2, 3, 4, 8],
    "parallel.dp": [0, 1, 2, 3, 4],
    "parallel.cp": [1, 2, 3, 4],
    "parallel.cp_attention": ["gather", "ring", "ulysses"],
    "parallel.ep": [1, 2, 3, 4, 6],
    "parallel.etp": [0, 1, 2, 3, 4],
    "parallel.vpp": [0, 1, 2, 3],
    "parallel.schedule": [
        *("1f1b", "interleaved", "gpipe", "breadth", "zb-h1", "zb-2p", "zb-interleaved", "zb-v", "v-half", "v-min"),
        "dualpipe-v",
    ],
    "parallel.schedule_costs": [(1.0,), (1.0, 1.3, 0.7)],
    "parallel.sequence_parallel": [True],
    "parallel.tp_overlap_chunks": [1, 2],
    "parallel.ep_overlap_chunks": [1, 2],
    "parallel.partition": [(1, 2), (2, 2), (1, 0, 2, 1), (1, 1, 1, 1)],
    "parallel.order": ["tp-cp-dp-pp", "dp-tp-cp-pp", "tp-dp-pp-cp", "tp-dp"],
    "train.steps": [1, 10, 100],
    "train.global_batch_size": [1, 5, 6, 8, 12],
    "train.micro_batch_size": [1, 2, 3, 4],
    "train.batch_ramp": [(2, 2, 100), (1, 2), (3, 3, 50), (4, 1, 10), (16, 2, 10)],
    "train.seq_length": [1, 16, 30, 33, 64, 128],
    "train.precision": ["fp32", "bf16", "fp16"],
    "train.recompute": ["none", "selective", "full"],
    "train.recompute_layers": [(), ("::2",), ("0",), ("0-1",)],
    "train.eval_every": [0, 5],
    "train.eval_samples": [16, 64],
    "optimizer.zero_stage": [0, 1, 2, 3],
    "optimizer.shard_ranks": [0, 1, 2, 3, 4, 8],
    "optimizer.bucket_mb": [0.0, 4.0],
    "optimizer.grad_reduce_dtype": ["fp32", "bf16"],
    "optimizer.overlap_param_gather": [True],
    "optimizer.schedule": ["cosine", "linear", "constant", "inverse_sqrt", "wsd"],
    "optimizer.lr": [-1.0, 1e-4, 1e-3],
    "optimizer.min_lr": [0.0, 1e-5, 1e-2],
    "optimizer.betas": [(0.9, 0.95), (0.9, 1.0)],
    "optimizer.eps": [0.0, 1e-8],
    "optimizer.warmup_steps": [0, 5, 60, 200],
    "optimizer.decay_steps": [0, 5, 60],
    "checkpoint.keep_every": [0, 2],
    "checkpoint.keep_last": [0, 1],
    "checkpoint.strict": [False],
    "launch.timeout_seconds": [0.5, 300.0, 1e9],
    "data.split": [(9.0, 1.0)],
    "data.fim_rate": [0.0, 0.5],
}
# Options of one section depend on each other most, so some draws take a whole section.
SECTIONS = ("model.", "model.moe.", "model.rope_scaling.", "parallel.", "train.", "optimizer.")


@dataclass(frozen=True)
class Drawn:
    """A configuration and the number of ranks to run it on."""

    values: dict[str, Any]
    world: int

    def problems(self) -> list[str]:
        """The lines of the configuration's refusal; none if it may run."""
        try:
            validate(unflatten(self.values, find(self.values["model.family"]).options), self.world)
        except ConfigError as error:
            return str(error).splitlines()
        return []


def draw(chance: random.Random) -> Drawn:
    """A configuration with values of VALUES for some options."""
    paths = chance.sample(sorted(VALUES), chance.randint(1, 12))
    if chance.random() < 0.5:
        section = chance.choice(SECTIONS)
        paths += chance.sample([path for path in sorted(VALUES) if path.startswith(section)], 4)
    changed = {path: chance.choice(VALUES[path]) for path in paths}
    # A draw for every family, because most options of experts say nothing in a dense model.
    changed["model.family"] = chance.choice(VALUES["model.family"])
    if changed.get("model.family") in ("mixtral", "qwen3_moe"):
        changed.setdefault("model.moe.num_experts", 8)
    values = DEFAULTS | changed
    exact = values["parallel.tp"] * values["parallel.cp"] * values["parallel.pp"] * max(values["parallel.dp"], 1)
    world = exact if chance.random() < 0.8 else chance.choice([1, 2, 4, 6, 8])
    return Drawn(values, world)


# What a person does

Change = dict[str, Any]  # values of options; under the name "" a number of ranks

_VERBS = re.compile(
    r"(?:use|set) (?:(?P<name>[a-z][\w.]*) )?(?P<values>\S.*)"
    r"|(?P<may>[a-z][\w.]*) may be (?P<may_values>\S.*)"
    r"|leave (?P<leave>it|both|one of them|[\w.]+|the gate) (?:out|at (?P<at>\S.*))"
    r"|start (?P<ranks>\d[\d or]*) ranks?"
)
# The values that a line allows without naming one.
_RANGES = (("must be at least 0 and below 1", 0.5), ("must be at least 0", 0), ("must be at least 1", 1))


def remedies(line: str) -> list[Change]:
    """The remedies in a line: changes, each working by itself."""
    head, _, text = line.partition(": ")
    options = re.findall(r"([a-z]\w*(?:\.\w+)+)=", head)
    found = []
    text = text.replace("use a number such as", "use").replace(" at most ", " ")
    for part in re.split(r"; or |; |, or |, (?=such as )", text):
        together: list[list[Change]] = []
        for verb in re.split(r" and (?=[\w.]+ may be )", part.replace("such as", "use", 1)):
            match = _VERBS.match(verb)
            changes = _changes(match, options) if match else []
            if changes:
                together.append(changes)
        found += [dict(chain.from_iterable(one.items() for one in choice)) for choice in product(*together) if choice]
    if not found:
        found = [{options[0]: TYPES[options[0]](value)} for text_of, value in _RANGES if text_of in text][:1]
    return found


def _changes(match: re.Match[str], options: list[str]) -> list[Change]:
    if match["ranks"]:
        return [{"": int(number)} for number in re.findall(r"\d+", match["ranks"])]
    if match["leave"]:
        word = match["leave"]
        named = options if word == "both" else [_option(word, options) or options[0]]
        if match["at"]:
            return [{name: _values(name, match["at"])[0] for name in named}]
        return [{name: DEFAULTS[name] for name in named}]
    name = match["name"] or match["may"] or ""
    option = _option(name, options)
    values = match["values"] or match["may_values"]
    if not option:  # the word is a value
        if match["may"]:
            return []
        option = options[0]
        values = f"{name} {values}".strip()
    return [{option: value} for value in _values(option, values)]


def _option(name: str, options: list[str]) -> str:
    """The option named by a word of a line, or "" if it names none."""
    if name in TYPES:
        return name
    return next((path for path in options if path.rpartition(".")[2] == name), "")


def _values(option: str, text: str) -> list[Any]:
    """The values at the beginning of `text`; none if it begins with no value of the option."""
    kind = TYPES[option]
    if get_origin(kind) is tuple:
        words = re.match(r"[\w.-]+(?: [\w.-]+)*|\(empty\)", text)
        return [_value(option, words[0])] if words else []
    item = r"[\w.*-]*[\w*]"
    words = re.match(rf"{item}(?:(?:, | or ){item})*", text)
    found = []
    for word in re.split(", | or ", words[0] if words else ""):
        try:
            found.append(_value(option, word))
        except (ValueError, KeyError):  # the next words belong to another sentence
            break
    return found


def _value(option: str, text: str) -> Any:
    """Parse the words of a flag."""
    kind = TYPES[option]
    if get_origin(kind) is tuple:
        if text == "(empty)":
            return ()
        return tuple(get_args(kind)[0](word) for word in text.split())
    if kind is bool:
        return {"true": True, "false": False}[text]
    if kind in (int, float, int | str):  # int | str: a length in steps, or in samples or tokens by a word
        return (float if kind is float else int)(text.replace(",", ""))
    if kind is str:
        return text
    return {str(choice): choice for choice in get_args(kind)}[text]


def contradictions(lines: list[str]) -> list[str]:
    """Options named in two lines with values, and with no value in common."""
    named: dict[str, list[set[Any]]] = {}
    for line in lines:
        values: dict[str, set[Any]] = {}
        for change in remedies(line):
            for option, value in change.items():
                values.setdefault(option, set()).add(value)
        for option, ones in values.items():
            named.setdefault(option, []).append(ones)
    return [option for option, sets in named.items() if not set.intersection(*sets)]


def apply(drawn: Drawn, lines: list[str], chance: random.Random) -> Drawn:
    """Do what each line says, one of its remedies by chance. An option set by an earlier line stays as it is."""
    values = dict(drawn.values)
    world = drawn.world
    changed = set[str]()
    for line in lines:
        alternatives = remedies(line)
        assert alternatives, f"says no value that works: {line}"
        chosen = chance.choice(alternatives)
        # What a line before has set stays.
        if all(values.get(option) == chosen[option] for option in changed & chosen.keys()):
            changed |= chosen.keys()
            world = chosen.get("", world)
            values |= {option: value for option, value in chosen.items() if option}
    return Drawn(values, world)
