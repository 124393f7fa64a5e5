"""Layouts in a few words, such as tp2,sp,pp2,zb-h1,zero1: what a person writes, as options of a configuration."""

import random
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, get_args

from megapar.base.errors import ConfigError
from megapar.config.options import Config, OptimizerConfig, ParallelConfig, flatten, option_types, unflatten
from megapar.pipeline.schedule_files import is_file
from megapar.pipeline.schedules import SCHEDULES, virtual_stages

OWN_LAYOUT = "config"
"""The word for the layout of the configuration itself."""
EVERY = "train.recompute_layers"
NUMBERED = {
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "dp": "parallel.dp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "etp": "parallel.etp",
    "vpp": "parallel.vpp",
    "zero": "optimizer.zero_stage",
    "shard": "optimizer.shard_ranks",
    "chunks": "parallel.tp_overlap_chunks",
    "epchunks": "parallel.ep_overlap_chunks",
    "mb": "train.micro_batch_size",
    "every": EVERY,
}
WORDS: Mapping[str, Mapping[str, Any]] = {
    "sp": {"parallel.sequence_parallel": True},
    "gather": {"parallel.cp_attention": "gather"},
    "ring": {"parallel.cp_attention": "ring"},
    "ulysses": {"parallel.cp_attention": "ulysses"},
    "recompute": {"train.recompute": "full"},
    "selective": {"train.recompute": "selective"},
    "light": {"train.recompute": "light"},
    "all_but_attention": {"train.recompute": "all_but_attention"},
    "param_gather": {"optimizer.overlap_param_gather": True},
    "no_overlap": {"optimizer.overlap_grad_reduce": False},
    **{name: {"parallel.schedule": name} for name in SCHEDULES},
}
# What else a person writes.
SYNONYMS = {
    "sequence_parallel": "sp",
    "full": "recompute",
    "recompute_full": "recompute",
    "recompute_selective": "selective",
    "ddp": "zero0",
    "fsdp": "zero3",
    "zerobubble": "zb-h1",
    "zb": "zb-h1",
    "zbv": "zb-v",
    "interleave": "interleaved",
    "dualpipev": "dualpipe-v",
    "microbatch": "mb",
    "micro_batch_size": "mb",
    "zero_stage": "zero",
    "shard_ranks": "shard",
    "tp_overlap_chunks": "chunks",
    "ep_overlap_chunks": "epchunks",
}
# Axes and stages without which a word says nothing.
_NEEDS = {
    "parallel.sequence_parallel": "tp",
    "parallel.tp_overlap_chunks": "tp",
    "parallel.ep_overlap_chunks": "ep",
    "parallel.cp_attention": "cp",
    "parallel.schedule": "pp",
    "parallel.vpp": "pp",
}
_SIZES = ("parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp", "parallel.ep")
_NUMBER = re.compile(r"([a-z_]+?)[=:_-]?(\d+)")


@dataclass(frozen=True)
class NamedLayout:
    """A layout by its words. `options` are values by dotted path."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks."""
        sizes = [self.options.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "dp", "cp")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]

    def of(self, config: Config) -> Config:
        """`config` in this layout. Sizes without a word are 1. Other options stay, unless they have no effect."""
        options = dict(self.options)
        parallel = replace(
            config.parallel,
            tp=1,
            pp=1,
            dp=1,
            cp=1,
            ep=1,
            etp=0,
            vpp=0,
            partition=(),
            schedule_memory_gb=0.0,
        )
        usual = ParallelConfig()
        if options.get("parallel.tp", 1) == 1:
            parallel = replace(parallel, sequence_parallel=False, tp_overlap_chunks=usual.tp_overlap_chunks)
        if options.get("parallel.ep", 1) == 1:
            parallel = replace(parallel, ep_overlap_chunks=usual.ep_overlap_chunks)
        if options.get("parallel.cp", 1) == 1:
            parallel = replace(parallel, cp_attention=usual.cp_attention)
        if options.get("parallel.pp", 1) == 1:
            parallel = replace(parallel, schedule=usual.schedule, schedule_costs=())
        train = config.train
        if "train.recompute" in options:
            train = replace(train, recompute_layers=())
        optimizer = replace(config.optimizer, shard_ranks=0)
        stage = options.get("optimizer.zero_stage", optimizer.zero_stage)
        if stage not in (1, 2):
            optimizer = replace(optimizer, overlap_param_gather=False)
        if stage >= 2:
            optimizer = replace(optimizer, bucket_mb=0.0)
        if stage == 0:
            optimizer = replace(optimizer, grad_reduce_dtype=OptimizerConfig().grad_reduce_dtype)
        vpp = options.get("parallel.vpp", 0)
        stages = virtual_stages(options.get("parallel.schedule", parallel.schedule))
        if vpp and "parallel.schedule" not in options and stages.nearest_to(vpp) != vpp:
            options["parallel.schedule"] = "interleaved"  # a number of stages alone asks for the schedule with it
        values = flatten(replace(config, parallel=parallel, train=train, optimizer=optimizer))
        return unflatten(values | options, type(config.model))


def read(text: str) -> NamedLayout:
    """The layout called `text`. Raises ConfigError for an unknown word, with known ones."""
    options: dict[str, Any] = {}
    for word in filter(None, re.split(r"[,+]", text)):
        for path, value in _meaning(word, text).items():
            if options.get(path, value) != value:
                raise ConfigError(f"--layouts {text}: {path} is {options[path]} and {value}; say one of them")
            options[path] = value
    if not options:
        raise ConfigError(f"--layouts {text!r}: names no layout; write words with commas, such as tp2,pp2 or dp2,zero3")
    for path, axis in _NEEDS.items():
        if path in options and options.get(f"parallel.{axis}", 1) == 1:
            raise ConfigError(f"--layouts {text}: {path} has no effect without {axis}; add {axis}2")
    return NamedLayout(text, _with_ranks_for_experts(options))


def _meaning(word: str, layout: str) -> dict[str, Any]:
    """The options set by one word."""
    lower = word.lower()
    known = SYNONYMS.get(lower.replace("-", "_"), lower)
    if known in WORDS:
        return dict(WORDS[known])
    if (":" in word and not _NUMBER.fullmatch(lower)) or is_file(word):
        return {"parallel.schedule": word}
    option, equals, value = word.partition("=")
    name = SYNONYMS.get(option.rpartition(".")[2], option.rpartition(".")[2])
    if equals and value.isdigit() and name in NUMBERED:
        return _numbered(name, int(value), layout)
    if equals and SYNONYMS.get(value, value) in WORDS:
        return dict(WORDS[SYNONYMS.get(value, value)])
    parts = _NUMBER.findall(known.replace("x", ""))
    if parts and "".join(name + number for name, number in parts) == re.sub(r"[=:_x-]", "", known):
        sizes = {SYNONYMS.get(name, name): int(number) for name, number in parts}
        if len(sizes) == len(parts) and sizes.keys() <= NUMBERED.keys():
            return dict(ChainMap(*(_numbered(name, number, layout) for name, number in sizes.items())))
    raise ConfigError(f"--layouts {layout}: {word!r} is no word of a layout; {_advice(known)}")


def _numbered(name: str, number: int, layout: str) -> dict[str, Any]:
    """Return the option of a word with a number. Raises ConfigError if the option takes no such number."""
    if NUMBERED[name] == EVERY:
        return {EVERY: (f"::{number}",)}
    choices = get_args(option_types()[NUMBERED[name]])
    if choices and number not in choices:
        raise ConfigError(f"--layouts {layout}: {name}{number}: use {' '.join(f'{name}{each}' for each in choices)}")
    return {NUMBERED[name]: number}


def _advice(word: str) -> str:
    """What would work in place of an unknown word."""
    if word in NUMBERED:
        return f"it needs a number, such as {word}2"
    if word in ("bf16", "fp16", "fp32"):
        return f"the precision is the same in all layouts: --train.precision {word}"
    near = get_close_matches(word, (*WORDS, *SYNONYMS, *NUMBERED), n=2)
    if near:
        return f"did you mean {' or '.join(f'{name}2' if name in NUMBERED else name for name in near)}?"
    numbered = " ".join(f"{name}N" for name in NUMBERED)
    return f"use {numbered} {' '.join(WORDS)}, MODULE:NAME or FILE.txt for a schedule, or {OWN_LAYOUT}"


def _with_ranks_for_experts(options: dict[str, Any]) -> dict[str, Any]:
    """Experts lie on the ranks of tp, cp and dp. Without a word for any of these, they get replicas."""
    experts = options.get("parallel.ep", 1) * max(options.get("parallel.etp", 1), 1)
    if experts > 1 and not {"parallel.tp", "parallel.cp", "parallel.dp"} & options.keys():
        return {**options, "parallel.dp": experts}
    return options


def of_config(config: Config) -> NamedLayout:
    """The own layout of a validated configuration."""
    values = flatten(config)
    paths = [*_SIZES, "parallel.etp", "parallel.vpp", "parallel.partition", "optimizer.shard_ranks"]
    return NamedLayout(OWN_LAYOUT, {path: values[path] for path in paths})


def drawn(seed: int, most_ranks: int, experts: bool) -> Iterator[NamedLayout]:
    """Layouts at random, without end; many of them cannot run. The same seed draws the same ones."""
    draw = random.Random(seed)
    while True:
        words = []
        room = most_ranks
        for axis in draw.sample(("tp", "pp", "dp", "cp"), k=4):
            size = draw.choice([n for n in (1, 1, 2, 2, 3, 4) if n <= room])
            room //= size
            words += [f"{axis}{size}"] * (size > 1)
        joined = ",".join(words)
        if not words:
            continue
        if "tp" in joined:
            words += draw.choice([[], ["sp"], ["sp", "chunks2"], ["chunks2"]])
        if "cp" in joined:
            words.append(draw.choice(("gather", "ring", "ulysses")))
        if "pp" in joined:
            name = draw.choice(list(SCHEDULES))
            stages = SCHEDULES[name].vpp.nearest_to(2)
            words += [name] if stages == 1 else [f"vpp{stages}", name]
        if "dp" in joined or "cp" in joined:
            words.append(draw.choice(("zero0", "zero1", "zero2", "zero3")))
        if experts:
            words += draw.choice([[], ["ep2"], ["etp1"], ["ep2", "etp1"], ["ep4", "etp1"]])
        words += draw.choice([[], [], ["recompute"], ["selective"], ["light"], ["all_but_attention"]])
        yield read(",".join(words))
