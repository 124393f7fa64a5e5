"""What cannot run, said before anything runs: pure checks of a Config against the number of ranks.

No process group, file or device is touched, so every rank comes to the same verdict alone. All problems are reported at
once, a line each: the options with their values, why they do not fit, and what would.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from megapar.config import Config, RopeScaling, flatten
from megapar.errors import ConfigError

_BELOW_ONE = {"model.hidden_dropout", "model.attention_dropout", "optimizer.betas"}
# An option may be 0 if that is its default, or if it stands here.
_MAY_BE_ZERO = {path for path, default in flatten(Config()).items() if default == 0} | {
    "parallel.partition",
    "train.seed",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "data.split",
    "data.fim_tokens",
    "optimizer.zero_stage",
}
_WEEK_SECONDS = 7 * 24 * 3600
_UNSPLIT = ("synthetic", "hf")  # sources without documents to split
_ROPE_SCALING = tuple(f"model.rope_scaling.{name}" for name in flatten(RopeScaling()))
_UNUSED_BY_FAMILY = {
    "llama": ("model.hidden_dropout", "model.attention_dropout"),
    "gpt": ("model.attention_bias", "model.qk_norm", "model.rope_theta", *_ROPE_SCALING),
}
_UNUSED_BY_ROPE_TYPE = {"default": _ROPE_SCALING[1:], "linear": _ROPE_SCALING[2:], "llama3": ()}
# Of the model's options, those that any weights go with; gpt's position table makes one exception.
_FREE_OF_WEIGHTS = {
    "model.max_position_embeddings",
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.initializer_range",
    *_ROPE_SCALING,
}


class Entry(NamedTuple):
    """One entry of data.train: a source, and how much of it: a weight, or tokens of the run."""

    source: str
    amount: float | None = None
    unit: Literal["weight", "tokens"] = "weight"

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """SOURCE, WEIGHT:SOURCE or Ntokens:SOURCE; what stands before a colon and is no number belongs to SOURCE."""
        number, _, source = text.partition(":")
        try:
            amount = float(number.removesuffix("tokens"))
        except ValueError:
            return cls(text)
        return cls(source, amount, "tokens" if number.endswith("tokens") else "weight")


def validate(config: Config, world_size: int) -> Config:
    """The config with what means "derived" (zeros, auto) filled in, for `world_size` ranks.

    `model.vocab_size` 0 stays: see `with_vocabulary`. Raises ConfigError with a line for each problem.
    """
    sizes = list(_sizes(config))
    problems = [*sizes, *_amounts(config), *_launch(config, world_size)]
    if not sizes:  # arithmetic with sizes below their least value would report nonsense
        grid = list(_grid(config, world_size))  # while it does not fit, dp is unknown and no batch can be judged
        derived = _derive(config, world_size)
        checks = (_family, _layout, _pipeline, _train, _optimizer, _data, _checkpoint)
        problems += [*grid, *_heads(config), *chain.from_iterable(check(derived) for check in checks)]
        problems += [] if grid else _batch(derived)
    if problems:
        raise ConfigError("\n".join(problems))
    return derived


def with_vocabulary(config: Config, tokenizer_size: int) -> Config:
    """The config with the tokenizer's size for `model.vocab_size` 0. Raises ConfigError if a given size is smaller."""
    if config.model.vocab_size == 0:
        return replace(config, model=replace(config.model, vocab_size=tokenizer_size))
    if config.model.vocab_size < tokenizer_size:
        text = f"the tokenizer has {tokenizer_size} ids; use 0 for its size, or at least {tokenizer_size}"
        raise ConfigError(_problem(config, "model.vocab_size data.tokenizer", text))
    return config


def num_microbatches(config: Config) -> int:
    """Forward passes that a data-parallel replica makes in one step, at most: some may make one fewer."""
    return -(-config.train.global_batch_size // (config.train.micro_batch_size * config.parallel.dp))


def blend_stages(config: Config) -> list[tuple[int, tuple[float, ...]]]:
    """(first sample, weights of data.train's sources) for each mix of a validated config's run."""
    entries = [Entry.parse(text) for text in config.data.train]
    return [(0, _weights(config, entries)), *map(_parse_stage, config.data.stages)]


def validation_sets(config: Config) -> list[tuple[str, str]]:
    """(name, source) of each of data.validation; a source without a name goes by its last part."""
    matches = [(re.fullmatch(r"([\w.-]+)=(.+)", text), text) for text in config.data.validation]
    return [(m[1], m[2]) if m else (re.split(r"[/:]", text)[-1], text) for m, text in matches]


def weight_options(config: Config) -> dict[str, Any]:
    """The model's options that decide which weights there are, by name: no run with others can go on from them."""
    free = _FREE_OF_WEIGHTS - ({"model.max_position_embeddings"} if config.model.family == "gpt" else set())
    options = {path: value for path, value in flatten(config).items() if path.startswith("model.") and path not in free}
    return {path.removeprefix("model."): value for path, value in options.items()}


def changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Lines "option: saved -> now" for a run that goes on. `saved` is a flattened config that may have been JSON."""
    now = json.loads(json.dumps(flatten(config)))
    return [f"{path}: {saved[path]} -> {now[path]}" for path in now if path in saved and saved[path] != now[path]]


# Ranges of single values


def _sizes(config: Config) -> Iterator[str]:
    for path, value in flatten(config).items():
        items = value if isinstance(value, tuple) else (value,)
        least = 0 if path in _MAY_BE_ZERO else 1
        if any(isinstance(item, int) and not isinstance(item, bool) and item < least for item in items):
            yield _problem(config, path, f"must be at least {least}")


def _amounts(config: Config) -> Iterator[str]:
    for path, value in flatten(config).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and not (item and item.isprintable()):
                yield _problem(config, path, "must be printable text, not empty")
            elif isinstance(item, float) and (text := _amount_problem(path, item)):
                yield _problem(config, path, text)
                break


def _amount_problem(path: str, value: float) -> str:
    if not math.isfinite(value):
        return "must be a finite number"
    if path in _BELOW_ONE:
        return "" if 0 <= value < 1 else "must be at least 0 and below 1"
    if path in _MAY_BE_ZERO:
        return "" if value >= 0 else "must be at least 0"
    return "" if value > 0 else "must be above 0"


# What fits together. Each check yields a line for each problem of a config with derived values.


def _derive(config: Config, world_size: int) -> Config:
    model, parallel = config.model, config.parallel
    activation: Any = {"llama": "silu", "gpt": "gelu_pytorch_tanh"}[model.family]
    model = replace(
        model,
        hidden_act=activation if model.hidden_act == "auto" else model.hidden_act,
        num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
    )
    parallel = replace(parallel, dp=parallel.dp or world_size // (parallel.tp * parallel.pp))
    # A reduce-scatter gives each replica its share of a bucket: 4 MiB (2^20 elements) keep it from waiting for latency.
    # Megatron-LM's buckets grow alike, max(40 M, 1 M * dp) elements.
    bucket_mb = config.optimizer.bucket_mb or max(64.0, 4.0 * parallel.dp)
    optimizer = replace(config.optimizer, bucket_mb=bucket_mb)
    return replace(config, model=model, parallel=parallel, optimizer=optimizer)


def _grid(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if world_size % (tp * pp):
        text = (
            f"tp({tp})*pp({pp})={tp * pp} does not divide world size {world_size}; tp*pp may be "
            f"{_listed(_divisors(world_size))}, or start {_around(world_size, tp * pp)} ranks (launch.nproc, torchrun)"
        )
        yield _problem(config, "parallel.tp parallel.pp", text)
    elif dp not in (0, world_size // (tp * pp)):
        text = f"tp({tp})*pp({pp})*dp({dp})={tp * pp * dp} is not world size {world_size}; "
        yield _problem(config, "parallel.dp", f"{text}dp {world_size // (tp * pp)} fits, as does 0, which means it")


def _heads(config: Config) -> Iterator[str]:
    """Checks of a config as given: whether its head_dim is derived decides what to say."""
    model, tp = config.model, config.parallel.tp
    heads, kv_heads, hidden = model.num_attention_heads, model.num_key_value_heads, model.hidden_size
    width = "model.head_dim" if model.head_dim else "model.hidden_size model.num_attention_heads"
    if not model.head_dim and hidden % heads:
        text = f"the width must divide by the heads; use hidden_size {_around(hidden, heads)}, or set model.head_dim"
        yield _problem(config, width, text)
    elif model.family == "llama" and (model.head_dim or hidden // heads) % 2:
        text = "rotary embeddings turn pairs, so a head's width must be even"
        yield _problem(config, width, f"{text}; {model.head_dim or hidden // heads} is odd")
    if kv_heads and heads % kv_heads:
        text = f"query heads must divide by key/value heads; use {_listed(_divisors(heads))}"
        yield _problem(config, "model.num_attention_heads model.num_key_value_heads", text)
    if heads % tp:
        text = f"heads must divide by tp; tp may be {_listed(_divisors(heads))}"
        yield _problem(config, "model.num_attention_heads parallel.tp", text)


def _family(config: Config) -> Iterator[str]:
    defaults, values = flatten(Config()), flatten(config)
    model = config.model
    for path in _UNUSED_BY_FAMILY[model.family]:
        if values[path] != defaults[path]:
            yield _problem(
                config, path, f"family {model.family} has no such thing; leave it at {_shown(defaults[path])}"
            )
    if model.family == "gpt":
        if model.hidden_act == "silu":
            yield _problem(config, "model.hidden_act", "family gpt has gelu_pytorch_tanh or relu2")
        return
    scaling = model.rope_scaling
    for path in _UNUSED_BY_ROPE_TYPE[scaling.rope_type]:
        if values[path] != defaults[path]:
            text = f"rope_type {scaling.rope_type} does not use it; set model.rope_scaling.rope_type, or leave it out"
            yield _problem(config, path, text)
    if scaling.rope_type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        options = "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
        yield _problem(config, options, "low must be below high; Llama 3.1 uses 1 and 4")


def _layout(config: Config) -> Iterator[str]:
    tp, width, length = config.parallel.tp, config.model.intermediate_size, config.train.seq_length
    if sorted(config.parallel.order.split("-")) != ["cp", "dp", "pp", "tp"]:
        yield _problem(config, "parallel.order", "must name tp, cp, dp and pp once each, such as tp-cp-dp-pp")
    if width % tp:
        text = f"the MLP's width must divide by tp; use {_around(width, tp)}"
        yield _problem(config, "model.intermediate_size parallel.tp", text)
    if config.parallel.sequence_parallel and length % tp:
        text = f"sequence_parallel cuts the sequence over tp; use {_around(length, tp)}, or switch it off"
        yield _problem(config, "train.seq_length parallel.tp parallel.sequence_parallel", text)
    if length > config.model.max_position_embeddings:
        text = f"sequences longer than the model's positions; use at most {config.model.max_position_embeddings}"
        yield _problem(config, "train.seq_length model.max_position_embeddings", text)


def _pipeline(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_hidden_layers
    stages, partition = parallel.pp * parallel.vpp, parallel.partition
    if parallel.vpp > 1 and parallel.schedule == "1f1b":
        text = "1f1b runs one stage on each rank; set parallel.schedule interleaved (or gpipe), or parallel.vpp 1"
        yield _problem(config, "parallel.vpp parallel.schedule", text)
    if layers < stages - 2:
        most = (layers + 2) // parallel.pp
        works = f"parallel.vpp may be up to {most}" if most else f"parallel.pp may be up to {layers + 2}"
        text = f"{stages} stages, of which all but the first and last need a layer; {works}"
        yield _problem(config, "model.num_hidden_layers parallel.pp parallel.vpp", text)
    elif partition and not _is_partition(partition, layers, stages):
        text = (
            f"{len(partition)} numbers of sum {sum(partition)}, for {layers} layers on {stages} stages, of which all "
            f"but the first and last need one; {_shown(_even(layers, stages))} fits, or leave it out"
        )
        yield _problem(config, "parallel.partition parallel.pp parallel.vpp model.num_hidden_layers", text)


def _is_partition(partition: tuple[int, ...], layers: int, stages: int) -> bool:
    return len(partition) == stages and sum(partition) == layers and all(partition[1:-1])


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers dealt evenly, the stages after the first served first: an end stage may stay empty, a middle one not."""
    return tuple(layers // stages + (0 < stage <= layers % stages) for stage in range(stages))


def _batch(config: Config) -> Iterator[str]:
    batch = config.train.global_batch_size
    step = config.train.micro_batch_size
    if batch % step:
        text = f"must be a multiple of train.micro_batch_size {step}; use {_around(batch, step)}"
        yield _problem(config, "train.global_batch_size train.micro_batch_size", text)
    if not (ramp := config.train.batch_ramp):
        return
    options = "train.batch_ramp train.global_batch_size"
    if len(ramp) != 3:
        yield _problem(config, options, "must be three numbers: START INCREMENT SAMPLES")
    elif ramp[0] >= batch or (batch - ramp[0]) % ramp[1]:
        text = "START plus a number of INCREMENTs must be the global batch"
        yield _problem(config, options, f"{text}; such as {step} {step} {ramp[2]}")
    elif ramp[0] % step or ramp[1] % step:
        text = f"START and INCREMENT must be multiples of train.micro_batch_size {step}"
        yield _problem(config, f"{options} train.micro_batch_size", text)


def _train(config: Config) -> Iterator[str]:
    train, defaults = config.train, Config().train
    if train.recompute_every > 1 and train.recompute != "full":
        text = "only recompute full has an every; set train.recompute full, or train.recompute_every 1"
        yield _problem(config, "train.recompute_every train.recompute", text)
    if not (config.data.validation or config.data.split):
        for name in ("eval_every", "eval_samples"):
            if getattr(train, name) != getattr(defaults, name):
                text = f"nothing to evaluate; set data.validation, or leave {name} at {getattr(defaults, name)}"
                yield _problem(config, f"train.{name} data.validation", text)


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule != "wsd" and optimizer.decay_steps:
        text = "only schedule wsd has a decay of its own; set optimizer.schedule wsd, or leave decay_steps at 0"
        yield _problem(config, "optimizer.decay_steps optimizer.schedule", text)
    if optimizer.warmup_steps > steps:
        text = f"the warm-up would not end within the run; use at most {steps}"
        yield _problem(config, "optimizer.warmup_steps train.steps", text)
    elif optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.decay_steps > steps:
        text = f"warm-up and decay together are longer than the run; decay may be {steps - optimizer.warmup_steps}"
        yield _problem(config, "optimizer.warmup_steps optimizer.decay_steps train.steps", text)
    if optimizer.schedule == "constant" and optimizer.min_lr:
        text = "a constant rate has no end; choose cosine, linear, inverse_sqrt or wsd, or leave it at 0"
        yield _problem(config, "optimizer.min_lr optimizer.schedule", text)
    elif optimizer.min_lr > optimizer.lr >= 0:
        text = f"the rate must not end above its peak; use at most {_shown(optimizer.lr)}"
        yield _problem(config, "optimizer.min_lr optimizer.lr", text)


def _data(config: Config) -> Iterator[str]:
    data = config.data
    entries = [Entry.parse(text) for text in data.train]
    if not entries:
        yield _problem(config, "data.train", "0 entries; give a .bin/.idx prefix, a blend of them, or synthetic")
    bad = [problem for text, entry in zip(data.train, entries, strict=True) if (problem := _entry_problem(text, entry))]
    bad += _named_twice([entry.source for entry in entries])
    yield from bad or [*_amounts_of_blend(config, entries), *_stages(config, entries)]
    names = [name for name, _ in validation_sets(config)]
    if len(set(names)) < len(names):
        yield _problem(config, "data.validation", "two sets of one name; name them: web=PREFIX code=PREFIX")
    if data.split and (data.validation or len(entries) != 1 or entries[0].source.partition(":")[0] in _UNSPLIT):
        text = "splits the documents of a single .bin/.idx pair; leave it out, and name data.validation"
        yield _problem(config, "data.split data.train data.validation", text)
    elif data.split and (len(data.split) not in (2, 3) or not data.split[0] > 0):
        yield _problem(config, "data.split", "give two or three shares, the first above 0, such as 969 30 1")
    if bool(data.fim_rate) != bool(data.fim_tokens) or len(data.fim_tokens) not in (0, 3) or data.fim_rate > 1:
        text = "a share of at most 1, and three token ids that mark prefix, suffix and middle; or neither"
        yield _problem(config, "data.fim_rate data.fim_tokens", text)
    elif config.model.vocab_size and any(token >= config.model.vocab_size for token in data.fim_tokens):
        yield _problem(config, "data.fim_tokens model.vocab_size", "ids must lie within the vocabulary")
    kind, _, file = data.tokenizer.partition(":")
    if data.tokenizer != "bytes" and not (kind in ("spm", "hf", "tiktoken") and file):
        text = "must be bytes, spm:FILE (sentencepiece), hf:FILE (tokenizer.json) or tiktoken:FILE"
        yield _problem(config, "data.tokenizer", text)


def _named_twice(sources: Sequence[str]) -> list[str]:
    """A problem for each source that stands in data.train more than once, under other spellings too."""
    spellings: dict[str, list[str]] = {}
    for source in sources:
        spellings.setdefault(_one_spelling(source), []).append(source)
    return [
        f"data.train={names[0]}: named twice{'' if len(set(names)) == 1 else f', also as {names[1]}'}; "
        "give it one weight, the sum"
        for names in spellings.values()
        if len(names) > 1
    ]


def _one_spelling(source: str) -> str:
    """The same text for two paths to one place, as far as they tell: links are not followed."""
    kind, colon, path = source.rpartition(":") if source.startswith("hf:") else ("", "", source)
    return f"{kind}{colon}{os.path.abspath(path)}"


def _entry_problem(text: str, entry: Entry) -> str:
    if not entry.source:
        return f"data.train={text}: names no source; write {text}PREFIX"
    if entry.amount is None or (math.isfinite(entry.amount) and entry.amount >= 0):
        return ""
    return f"data.train={text}: the {entry.unit} must be a finite number of at least 0"


def _amounts_of_blend(config: Config, entries: Sequence[Entry]) -> Iterator[str]:
    given = [entry for entry in entries if entry.amount is not None]
    open_entries, units = len(entries) - len(given), {entry.unit for entry in given}
    if len(units) > 1:
        yield _problem(config, "data.train", "weights and tokens; use one of the two")
    elif units == {"tokens"} and len(config.train.batch_ramp) in (0, 3):
        tokens, run = sum(entry.amount or 0.0 for entry in given), config.train.samples() * config.train.seq_length
        if config.data.stages:
            yield _problem(config, "data.train data.stages", "stages are weights; give data.train weights too")
        elif open_entries > 1:
            yield _problem(config, "data.train", f"{open_entries} entries without tokens; one may take the rest")
        elif tokens >= run if open_entries else abs(tokens - run) > 1e-6 * run:
            text = f"{tokens:,.0f} tokens, the run has {run:,}; give less, and one entry without a number for the rest"
            yield _problem(config, "data.train train.steps", text)
    elif open_entries and len(entries) > 1:
        yield _problem(config, "data.train", "a blend needs a weight for each source, such as 0.7:A 0.3:B")
    elif entries and (text := _blend_problem(_weights(config, entries))):
        yield _problem(config, "data.train", text)


def _blend_problem(weights: Sequence[float]) -> str:
    total = sum(weights)
    if not total > 0:
        return "the weights sum to 0"
    small = any(0 < weight < 1e-6 * total for weight in weights)
    return "a weight below a millionth of the sum would be rounded to nothing; use 0 or more" if small else ""


def _stages(config: Config, entries: Sequence[Entry]) -> Iterator[str]:
    last, weighted = 0, {entry.source for entry in entries if entry.amount != 0}
    for text in config.data.stages:
        first, weights = _parse_stage(text)
        if first <= last:
            yield f"data.stages={text}: must be SAMPLE:W,W,... with a sample above {last}"
        elif len(weights) != len(entries):
            yield f"data.stages={text}: {len(weights)} weights for the {len(entries)} sources of data.train"
        elif not all(math.isfinite(w) and w >= 0 for w in weights):
            yield f"data.stages={text}: weights must be finite and at least 0"
        elif problem := _blend_problem(weights):
            yield f"data.stages={text}: {problem}"
        last = max(first, last)
        weighted |= {entry.source for entry, weight in zip(entries, weights, strict=False) if weight > 0}
    for entry in entries:
        if entry.source not in weighted:
            yield f"data.train={entry.source}: of weight 0 in the whole run; leave it out, or use it in data.stages"


def _parse_stage(text: str) -> tuple[int, tuple[float, ...]]:
    """(first sample, weights); a first sample of -1 where the text cannot be read."""
    first, _, weights = text.partition(":")
    try:
        return int(first), tuple(map(float, weights.split(",")))
    except ValueError:
        return -1, ()


def _weights(config: Config, entries: Sequence[Entry]) -> tuple[float, ...]:
    rest = 1.0
    if any(entry.unit == "tokens" for entry in entries):
        run = config.train.samples() * config.train.seq_length
        rest = run - sum(entry.amount or 0.0 for entry in entries)
    return tuple(rest if entry.amount is None else entry.amount for entry in entries)


def _checkpoint(config: Config) -> Iterator[str]:
    options = config.checkpoint
    if options.init_from != "none" and options.resume not in ("auto", "none"):
        text = "both name a checkpoint to start from; leave resume at auto, or init_from at none"
        yield _problem(config, "checkpoint.init_from checkpoint.resume", text)
    if options.init_from == "none" and not options.strict:
        text = "only the weights of init_from may fit in part; set checkpoint.init_from, or leave strict on"
        yield _problem(config, "checkpoint.strict checkpoint.init_from", text)
    if options.keep_every and not options.keep_last:
        text = "all checkpoints are kept; set checkpoint.keep_last, or leave keep_every at 0"
        yield _problem(config, "checkpoint.keep_every checkpoint.keep_last", text)


def _launch(config: Config, world_size: int) -> Iterator[str]:
    """Which device ranks get is judged where they start (device.choose): it depends on the machine."""
    if not 1.0 <= config.launch.timeout_seconds <= _WEEK_SECONDS:
        text = f"must be from 1 to {_WEEK_SECONDS:,} (a week); 300 suits most jobs"
        yield _problem(config, "launch.timeout_seconds", text)
    if config.launch.nproc not in (0, world_size):
        text = f"{world_size} ranks are running already; leave it at 0 under torchrun and Slurm"
        yield _problem(config, "launch.nproc", text)


# Words


def _problem(config: Config, options: str, text: str) -> str:
    values = flatten(config)
    return f"{', '.join(f'{path}={_shown(values[path])}' for path in options.split())}: {text}"


def _shown(value: Any) -> str:
    """A value as a flag takes it, but for booleans and empty ones."""
    if isinstance(value, tuple):
        return " ".join(map(_shown, value)) or "(empty)"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" or not str(value).isprintable() else str(value)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + " or " * (len(numbers) > 1) + str(numbers[-1])


def _around(n: int, step: int) -> str:
    """The multiples of `step` next to `n`, 0 left out."""
    return _listed([multiple for multiple in (n // step * step, -(-n // step) * step) if multiple])
