"""Checks, before anything runs, that a Config can run on a number of ranks.

The checks are pure: they touch no process group, file or device, so every rank comes to the same result alone. All
problems are reported at once. Each is one line with the options and their values, why they do not fit, and what would
fit. data_spec.py checks the section `data`.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config import validate_experts, validate_fp8, validate_optimizer
from megapar.config.data_spec import data_problems
from megapar.config.derive import derive, profiled_steps, recomputed_layers
from megapar.config.messages import around, counted, divisors, listed, problem, shown
from megapar.config.model_options import ModelConfig
from megapar.config.model_rules import ModelRules
from megapar.config.options import ADAPTERS, BY_LAYER, Config, ParallelConfig, default_config, flatten
from megapar.config.plugins import named
from megapar.config.virtual_stages import VirtualStages

_BELOW_ONE = {
    *("adapter.dropout", "model.hidden_dropout", "model.attention_dropout"),
    *("optimizer.betas", "optimizer.ema", "optimizer.momentum"),
}
_UP_TO_ONE = {"optimizer.offload", "train.offload"}
# An option may be 0 if that is its default, or if it is listed here.
_MAY_BE_ZERO = {
    "parallel.partition",
    "parallel.tp_overlap_chunks",
    "parallel.ep_overlap_chunks",
    "parallel.schedule_costs",
    "train.seed",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "data.split",
    "data.fim_tokens",
    "optimizer.zero_stage",
    "model.moe.mlp_only_layers",
    "model.swiglu_limits",
    "model.swiglu_limits_shared",
    "model.no_rope_layers",
    "model.attn_layer_indices",
    "model.layer_rope_theta",
    "model.moe.router_aux_loss_coef",
    "model.moe.router_bias_update_rate",
}
_LARGEST_SIZE = 2**31 - 1  # of a model: the bytes of a matrix with two such sizes fit into 64 bits
_WEEK_SECONDS = 7 * 24 * 3600
_MOST_CTAS = 64  # of one NCCL communicator
_LAST_PORT = 65535
_LEAST_WINDOW = 8  # steps of log.straggler_every: its samples end some steps before it does


def validate(config: Config, world_size: int, rules: ModelRules, stages: VirtualStages) -> Config:
    """Check `config` for `world_size` ranks. Returns it with derived values in place of zeros and "auto".

    `rules` come from the family, `stages` from the schedule. A `model.vocab_size` of 0 is left as it is, see
    `derive.with_vocabulary`. A plain `ModelConfig` becomes one of the family's, whose other options have their
    defaults. Raises ConfigError with a line for each problem.
    """
    if type(config.model) is ModelConfig:
        common = {f.name: getattr(config.model, f.name) for f in fields(config.model)}
        config = replace(config, model=rules.options(**common))
    if not isinstance(config.model, rules.options):
        text = f"family {rules.name} has options of its own; make it a {rules.options.__name__}"
        raise ConfigError(problem(config, "model.family", f"model is a {type(config.model).__name__}, but {text}"))
    size_problems = list(_sizes(config))
    problems = [*size_problems, *_amounts(config), *_launch(config, world_size)]
    # The other checks divide by sizes. With sizes below their least values they would fail or report nonsense.
    if not size_problems:
        derived = derive(config, world_size, rules, stages)
        problems += [
            *_heads(config, rules),
            *_model(derived, rules),
            *_layout_problems(config, derived, world_size, rules, stages),
            *data_problems(derived),
            *_adapter(derived),
            *_checkpoint(derived),
            *_log(derived),
            *_kernels(derived),
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    return derived


def validate_layout(config: Config, world_size: int, rules: ModelRules, stages: VirtualStages) -> Config:
    """`validate` for a search, in a sixth of the time. `config` must be a valid config with another layout.

    So everything else in it is not checked again.
    """
    derived = derive(config, world_size, rules, stages)
    problems = list(_layout_problems(config, derived, world_size, rules, stages))
    if problems:
        raise ConfigError("\n".join(problems))
    return derived


def _layout_problems(
    config: Config, derived: Config, world_size: int, rules: ModelRules, stages: VirtualStages
) -> Iterator[str]:
    """Problems of the axes, and of all options that meet them. `derived` is `config` with derived values."""
    grid_problems = list(_grid(config, world_size))
    yield from grid_problems
    yield from rules.problems(derived, derived.model)
    yield from validate_experts.problems(derived, rules)
    yield from _cut_by_tp(derived, world_size)
    yield from _pipeline(derived, world_size, stages)
    yield from chain.from_iterable(
        check(derived) for check in (_layout, _train, validate_fp8.problems, validate_optimizer.problems)
    )
    # While the grid does not fit, dp is unknown, and nothing can be said about what it divides.
    if not grid_problems:
        yield from validate_experts.grid_problems(derived)
        yield from validate_optimizer.problems_of_shards(derived)
        yield from _batch(derived)


# Ranges of single values


def _sizes(config: Config) -> Iterator[str]:
    """Problems of whole numbers, each option by itself."""
    initial = flatten(default_config(type(config.model)))
    for path, value in flatten(config).items():
        items = value if isinstance(value, tuple) else (value,)
        least = 0 if _may_be_zero(path, initial[path]) else 1
        # A bool is an int to Python, but no size.
        numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if any(number < least for number in numbers):
            yield problem(config, path, f"must be at least {least}")
        elif path.startswith("model.") and any(number > _LARGEST_SIZE for number in numbers):
            yield problem(config, path, f"must be at most {_LARGEST_SIZE:,}")


def _amounts(config: Config) -> Iterator[str]:
    """Problems of texts and fractional numbers, each option by itself."""
    initial = flatten(default_config(type(config.model)))
    for path, value in flatten(config).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and not (item and item.isprintable()):
                yield problem(config, path, "must be printable text, not empty")
            elif isinstance(item, float):
                text = _amount_problem(path, item, _may_be_zero(path, initial[path]))
                if text:
                    yield problem(config, path, f"{text}, such as {shown(initial[path])}")
                    break  # the message shows all items, so once is enough


def _may_be_zero(path: str, default: Any) -> bool:
    return default == 0 or path in _MAY_BE_ZERO


def _amount_problem(path: str, value: float, may_be_zero: bool) -> str:
    """What is wrong with the number, "" if nothing is."""
    if not math.isfinite(value):
        return "must be a finite number"
    if path in _BELOW_ONE:
        if 0 <= value < 1:
            return ""
        return "must be at least 0 and below 1"
    if path in _UP_TO_ONE:
        return "" if 0 <= value <= 1 else "must be from 0 to 1"
    if may_be_zero:
        if value >= 0:
            return ""
        return "must be at least 0"
    if value > 0:
        return ""
    return "must be above 0"


# What fits together. Each check yields a line for each problem of a config with derived values.


def _grid(config: Config, world_size: int) -> Iterator[str]:
    """Problems of tp, cp, pp and dp with the number of ranks."""
    parallel = config.parallel
    dp = parallel.dp  # as given: 0 means that the world size decides
    # A message leaves out context parallelism where it is not used.
    names = [name for name in ("tp", "cp", "pp") if name != "cp" or parallel.cp > 1]
    replica = parallel.tp * parallel.cp * parallel.pp  # ranks of one replica
    product = "*".join(f"{name}({getattr(parallel, name)})" for name in names)
    if world_size % replica:
        text = (
            f"{product}={replica} does not divide world size {world_size}; {'*'.join(names)} may be "
            f"{listed(divisors(world_size))}, or start {around(world_size, replica)} ranks (launch.nproc, torchrun)"
        )
        yield problem(config, " ".join(f"parallel.{name}" for name in names), text)
    elif dp not in (0, world_size // replica):
        text = f"{product}*dp({dp})={replica * dp} is not world size {world_size}; "
        yield problem(config, "parallel.dp", f"{text}use {world_size // replica}, or leave it at 0, which means it")


def _heads(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems of heads. `config` is as given: the messages depend on whether its head_dim is derived."""
    model = config.model
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads
    hidden = model.hidden_size
    multiple = 2 if rules.even_head_dim else 1  # of which the width of a head must be
    width = max(hidden // heads // multiple, 1) * multiple
    fitting = f"use hidden_size {around(hidden, multiple * heads)}, or set model.head_dim {width}"
    if not model.head_dim and hidden % heads:
        text = f"the width must divide by the heads; {fitting}"
        yield problem(config, "model.hidden_size model.num_attention_heads", text)
    elif (model.head_dim or hidden // heads) % multiple:
        # Name the options that decide the width of a head.
        options = "model.head_dim" if model.head_dim else "model.hidden_size model.num_attention_heads"
        works = f"use {around(model.head_dim, multiple)}" if model.head_dim else fitting
        text = "rotary embeddings turn pairs, so a head's width must be even"
        yield problem(config, options, f"{text}; {model.head_dim or hidden // heads} is odd; {works}")
    if kv_heads and heads % kv_heads:
        text = f"query heads must divide by key/value heads; num_key_value_heads may be {listed(divisors(heads))}"
        yield problem(config, "model.num_attention_heads model.num_key_value_heads", text)


def _cut_by_tp(config: Config, world_size: int) -> Iterator[str]:
    """Problems of heads, the MLP and the shared expert, all cut by tp. Each proposes values of tp for all of them."""
    model = config.model
    parallel = config.parallel
    tp = parallel.tp
    widths = {"model.intermediate_size": model.intermediate_size}
    if model.experts is not None:
        widths["model.moe.shared_expert_intermediate_size"] = model.experts.shared_expert_intermediate_size
    fits = [n for n in divisors(model.num_attention_heads) if not any(width % n for width in widths.values())]
    # Without ranks to spare, the other axes stay as they are.
    others = parallel.cp * parallel.pp
    fits = [n for n in fits if world_size % (n * others) == 0] or fits
    heads_fit = model.num_attention_heads % tp == 0
    if not heads_fit:
        text = f"heads must divide by tp; tp may be {listed(fits)}"
        yield problem(config, "model.num_attention_heads parallel.tp", text)
    for path, width in widths.items():
        if width % tp:
            # While tp does not fit the heads, no width for it would help.
            works = f"tp may be {listed(fits)}"
            if heads_fit:
                works = f"use {around(width, tp)}, or set parallel.tp {listed(fits)}"
            what = "the MLP's width" if path == "model.intermediate_size" else "its width"
            yield problem(config, f"{path} parallel.tp", f"{what} must divide by tp; {works}")


def _model(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems by the rules of the model family."""
    if config.model.hidden_act not in rules.activations:
        text = f"family {rules.name} has no such activation; use {' or '.join(rules.activations)}"
        yield problem(config, "model.hidden_act", text)


def _layout(config: Config) -> Iterator[str]:
    """Problems of the rank order, and of what tp cuts."""
    tp = config.parallel.tp
    length = config.train.seq_length
    if sorted(config.parallel.order.split("-")) != ["cp", "dp", "pp", "tp"]:
        yield problem(config, "parallel.order", "must name tp, cp, dp and pp once each, such as tp-cp-dp-pp")
    if config.parallel.cp > 1:
        yield from _context_parallel(config)
    elif config.parallel.sequence_parallel and length % tp:
        text = f"sequence_parallel cuts the sequence over tp; {_lengths(config, tp)}"
        text += ", or leave sequence_parallel at false"
        yield problem(config, "train.seq_length parallel.tp parallel.sequence_parallel", text)
    if config.parallel.cp == 1 and config.parallel.cp_attention != ParallelConfig().cp_attention:
        default = ParallelConfig().cp_attention
        text = f"with one cp rank there is nothing to exchange; set parallel.cp, or leave it at {default}"
        yield problem(config, "parallel.cp_attention parallel.cp", text)
    if config.parallel.tp_overlap_chunks > 1 and tp == 1:
        text = "without tensor parallelism no product waits for other ranks; set parallel.tp, or leave it at 1"
        yield problem(config, "parallel.tp_overlap_chunks parallel.tp", text)
    if config.parallel.tp_symmetric_memory and not (tp > 1 and config.parallel.sequence_parallel):
        text = "only what sequence parallelism gathers and sums over tp is copied; set parallel.tp and "
        text += "parallel.sequence_parallel, or leave it at false"
        yield problem(config, "parallel.tp_symmetric_memory parallel.tp parallel.sequence_parallel", text)
    if length > config.model.max_position_embeddings:
        text = f"sequences longer than the model's positions; {_lengths(config, _unit_of_length(config))}"
        yield problem(config, "train.seq_length model.max_position_embeddings", text)


def _unit_of_length(config: Config) -> int:
    """A sample's length must be a multiple of this number."""
    parallel = config.parallel
    tp = parallel.tp if parallel.sequence_parallel else 1
    # The positions of a cp rank are two chunks, and are cut over tp.
    if parallel.cp == 1:
        return tp
    return parallel.cp * math.lcm(2, tp)


def _lengths(config: Config, unit: int) -> str:
    """What to do about a length beyond the model's positions, or between multiples of `unit`."""
    length = config.train.seq_length
    longest = config.model.max_position_embeddings // unit * unit
    if not longest:
        return f"set model.max_position_embeddings {unit}"
    if length > longest:
        return f"use at most {longest}"
    return f"use {around(length, unit)}"


def _context_parallel(config: Config) -> Iterator[str]:
    """Problems of what cp cuts: positions into two chunks for each rank, and with ulysses the heads of a tp rank."""
    parallel = config.parallel
    length = config.train.seq_length
    unit = _unit_of_length(config)
    options = "train.seq_length parallel.cp"
    reason = "each cp rank holds two chunks of equal length"
    if parallel.sequence_parallel:
        options += " parallel.tp parallel.sequence_parallel"
        reason += ", and sequence_parallel cuts them over tp"
    if length % unit:
        text = f"{reason}, so the length must divide by {unit}; {_lengths(config, unit)}"
        yield problem(config, options, text)
    heads = config.model.num_attention_heads // parallel.tp
    if parallel.cp_attention == "ulysses" and heads % parallel.cp:
        text = (
            f"ulysses deals the {counted(heads, 'query head')} of a tp rank to cp ranks, and cp {parallel.cp} does not "
            "divide them; use gather or ring"
        )
        yield problem(config, "parallel.cp_attention parallel.cp parallel.tp model.num_attention_heads", text)


def _pipeline(config: Config, world_size: int, virtual: VirtualStages) -> Iterator[str]:
    """Problems of layers and stages."""
    parallel = config.parallel
    layers = config.model.num_hidden_layers
    pp = parallel.pp
    partition = parallel.partition
    needs = virtual.nearest_to(parallel.vpp)
    # The first and the last stage may hold only the embedding and only the head.
    fit = [vpp for vpp in (needs, parallel.vpp) if layers >= pp * vpp - 2]
    if parallel.vpp != needs:
        number = {1: "one stage", 2: "two stages"}.get(needs, f"{needs} stages")
        works = []
        # With too many stages in both cases the next line says which pp has enough layers.
        if needs in fit or not fit:
            works.append(f"set parallel.vpp {needs}")
        if parallel.vpp in fit:
            others = "interleaved, zb-interleaved or gpipe" if parallel.vpp > 1 else "1f1b or zb-h1"
            works.append(f"set parallel.schedule {others}")
        text = f"{parallel.schedule} runs {number} on each rank; {', or '.join(works)}"
        yield problem(config, "parallel.vpp parallel.schedule", text)
    if parallel.schedule_costs and len(parallel.schedule_costs) != 3:
        text = "must be three times: forward, gradient of inputs, gradient of weights; such as 1 1.3 0.7"
        yield problem(config, "parallel.schedule_costs", text)
    stages = pp * needs
    if not fit:
        text = f"{stages} stages, of which all but the first and last need a layer; "
        text += _fewer_stages(config, virtual, world_size)
        yield problem(config, "model.num_hidden_layers parallel.pp parallel.vpp", text)
    elif partition and parallel.vpp == needs and not _is_partition(partition, layers, stages):
        text = (
            f"{len(partition)} numbers of sum {sum(partition)}, for {layers} layers on {stages} stages, of which all "
            f"but the first and last need one; use {shown(_even(layers, stages))}, or leave it out"
        )
        yield problem(config, "parallel.partition parallel.pp parallel.vpp model.num_hidden_layers", text)


def _fewer_stages(config: Config, virtual: VirtualStages, world_size: int) -> str:
    """Values of vpp or pp for the given layers."""
    parallel = config.parallel
    enough = config.model.num_hidden_layers + 2
    vpp = virtual.nearest_to(parallel.vpp)
    if not virtual.only:
        if enough >= parallel.pp:
            return f"vpp may be at most {enough // parallel.pp}"
        vpp = min(vpp, enough)
    fits = [pp for pp in range(1, enough // vpp + 1) if world_size % (parallel.tp * parallel.cp * pp) == 0]
    works = f"pp may be {listed(fits or [enough // vpp])}"
    if vpp == parallel.vpp:
        return works
    return f"{works} and vpp may be {vpp}"


def _is_partition(partition: tuple[int, ...], layers: int, stages: int) -> bool:
    return len(partition) == stages and sum(partition) == layers and all(partition[1:-1])


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Numbers of layers of the stages, as equal as possible.

    Leftover layers go to the stages after the first, because a middle stage must not stay empty.
    """
    each, left_over = divmod(layers, stages)
    sizes = [each] * stages
    for stage in range(1, left_over + 1):
        sizes[stage] += 1
    return tuple(sizes)


def _batch(config: Config) -> Iterator[str]:
    """Problems of the global batch and its ramp."""
    batch = config.train.global_batch_size
    step = config.train.micro_batch_size
    options = "train.micro_batch_size"
    reason = f"must be a multiple of train.micro_batch_size {step}"
    otherwise = ""
    if validate_experts.shares_experts(config):
        step *= config.parallel.dp
        options += " parallel.dp parallel.ep parallel.etp"
        reason = f"replicas that share experts need equal numbers of micro-batches: a multiple of {step}"
        otherwise = f", or {validate_experts.not_shared(config)}"
    if batch % step:
        text = f"{reason}; use {around(batch, step)}"
        # With another ep the batch must still divide by the micro-batch.
        if batch % config.train.micro_batch_size == 0:
            text += otherwise
        yield problem(config, f"train.global_batch_size {options}", text)
    ramp = config.train.batch_ramp
    if not ramp:
        return
    # A ramp begins below the batch.
    works = "leave it out"
    if batch > step and batch % step == 0:
        works = f"use {step} {step} {ramp[2] if len(ramp) == 3 else 1000}"
    if len(ramp) != 3:
        text = f"must be three numbers: START INCREMENT SAMPLES; {works}"
        yield problem(config, "train.batch_ramp train.global_batch_size", text)
    elif ramp[0] >= batch or (batch - ramp[0]) % ramp[1]:
        text = f"START plus a number of INCREMENTs must be the global batch; {works}"
        yield problem(config, f"train.batch_ramp train.global_batch_size {options}", text)
    elif ramp[0] % step or ramp[1] % step:
        yield problem(config, f"train.batch_ramp train.global_batch_size {options}", f"{reason}; {works}")


def _train(config: Config) -> Iterator[str]:
    """Options of `train` without effect beside the others. No option is ignored in silence."""
    train = config.train
    defaults = Config().train
    yield from _recomputed_layers(config)
    if train.offload and train.recompute not in BY_LAYER:
        text = "only inputs of recomputed layers go to the host; set train.recompute full, or leave train.offload at 0"
        yield problem(config, "train.offload train.recompute", text)
    if not (config.data.validation or config.data.split):
        for name in ("eval_every", "eval_samples"):
            if getattr(train, name) != getattr(defaults, name):
                text = f"nothing to evaluate; set data.validation, or leave {name} at {getattr(defaults, name)}"
                yield problem(config, f"train.{name} data.validation", text)


def _kernels(config: Config) -> Iterator[str]:
    """Problems of options that choose the implementation of the same ops."""
    kernels = config.kernels
    if kernels.compile and kernels.backend not in ("auto", "torch"):
        text = f"{kernels.backend} has kernels for what would be compiled; use torch, or leave compile at false"
        yield problem(config, "kernels.compile kernels.backend", text)


def _adapter(config: Config) -> Iterator[str]:
    """Options of `adapter` without effect, and an adapter that is not trained."""
    adapter = config.adapter
    if not adapter.rank:
        defaults = Config().adapter
        given = [f"adapter.{f.name}" for f in fields(adapter) if getattr(adapter, f.name) != getattr(defaults, f.name)]
        for option in given:
            yield problem(config, f"{option} adapter.rank", "there is no adapter; set adapter.rank, such as 16")
    elif ADAPTERS not in config.train.trainable:
        text = f"the patterns leave adapters frozen; add '{ADAPTERS}', or leave train.trainable empty"
        yield problem(config, "train.trainable adapter.rank", text)
    if adapter.dora and adapter.dropout:
        text = "magnitudes scale the whole product, and its input has no dropout; use adapter.dropout 0"
        yield problem(config, "adapter.dora adapter.dropout", text)


def _checkpoint(config: Config) -> Iterator[str]:
    """Problems of contradicting or ineffective options of `checkpoint`."""
    options = config.checkpoint
    # The checkpoint of an adapter lacks the weights of its base, which init_from names.
    if options.init_from != "none" and options.resume not in ("auto", "none") and not config.adapter.rank:
        text = "both name a checkpoint to start from; leave resume at auto, or init_from at none"
        yield problem(config, "checkpoint.init_from checkpoint.resume", text)
    if options.init_from == "none" and not options.strict:
        text = "only the weights of init_from may fit in part; set checkpoint.init_from, or leave it at true"
        yield problem(config, "checkpoint.strict checkpoint.init_from", text)
    if options.keep_every and not options.keep_last:
        text = "all checkpoints are kept; set checkpoint.keep_last 1, or leave keep_every at 0"
        yield problem(config, "checkpoint.keep_every checkpoint.keep_last", text)


def _log(config: Config) -> Iterator[str]:
    """Values that no run can use, and steps of log.profile that a run never comes to."""
    steps = config.train.steps
    if config.log.prometheus_port > _LAST_PORT:
        yield problem(config, "log.prometheus_port", f"ports end at {_LAST_PORT}; use one such as 9400, or 0")
    for name in config.log.observers:
        named("log.observers", name, {}, type)  # raises ConfigError
    if 0 < config.log.straggler_every < _LEAST_WINDOW:
        yield problem(config, "log.straggler_every", f"use at least {_LEAST_WINDOW}, or 0")
    try:
        if not shlex.split(config.log.alert_command):
            yield problem(config, "log.alert_command", "has no word; name a program, or none")
    except ValueError as error:
        yield problem(config, "log.alert_command", f"is no command ({error}); quote it as in a shell")
    try:
        profiled = profiled_steps(config.log.profile)
    except ValueError:
        yield problem(config, "log.profile", "must be the first and the last step, such as 10-12, or none")
        return
    if config.log.profile == "none":
        return
    if not profiled or profiled.start < 1:
        yield problem(config, "log.profile", "must be A-B with A at least 1 and B at least A, such as 10-12")
    elif profiled.stop - 1 > steps:
        text = f"the run ends after step {steps}; name steps from 1 to {steps}"
        yield problem(config, "log.profile train.steps", text)


def _recomputed_layers(config: Config) -> Iterator[str]:
    train = config.train
    if not train.recompute_layers:
        return
    if train.recompute not in BY_LAYER:
        text = "it is for whole layers; set train.recompute full or all_but_attention, or leave it empty"
        yield problem(config, "train.recompute_layers train.recompute", text)
    try:
        numbers = recomputed_layers(train)
    except ValueError as error:
        text = f"{error}; name layers in order, such as 0-9 16, or ::2 for every second"
        yield problem(config, "train.recompute_layers", text)
        return
    layers = config.model.all_layers
    if numbers and numbers[-1] >= layers:
        text = f"the last layer is {layers - 1}"
        yield problem(config, "train.recompute_layers model.num_hidden_layers", text)


def _launch(config: Config, world_size: int) -> Iterator[str]:
    """Problems of how ranks are started.

    The device is not checked here but at the start of a rank (device.choose), because it depends on the machine.
    """
    if not 1.0 <= config.launch.timeout_seconds <= _WEEK_SECONDS:
        text = f"must be from 1 to {_WEEK_SECONDS:,} (a week); use 300 for most jobs"
        yield problem(config, "launch.timeout_seconds", text)
    if config.launch.nproc not in (0, world_size):
        text = f"{counted(world_size, 'rank is', 'ranks are')} running already; leave it at 0 under torchrun and Slurm"
        yield problem(config, "launch.nproc", text)
    if not 0 <= config.launch.gradient_ctas <= _MOST_CTAS:
        yield problem(config, "launch.gradient_ctas", f"NCCL takes 1 to {_MOST_CTAS}; 0 leaves the number to NCCL")
    yield from _restarts(config)


def _restarts(config: Config) -> Iterator[str]:
    """Problems of restarts, and of the checkpoints for them."""
    launch = config.launch
    options = config.checkpoint
    if launch.max_restarts and not launch.nproc:
        text = "it restarts the local launcher's ranks; set launch.nproc, or use torchrun's --max-restarts"
        yield problem(config, "launch.max_restarts launch.nproc", text)
    if options.memory_every and not launch.max_restarts:
        text = "snapshots in memory end with the job, and serve its restarts; set launch.max_restarts, or leave it at 0"
        yield problem(config, "checkpoint.memory_every launch.max_restarts", text)
    if bool(options.local_every) != (options.local_dir != "none"):
        yield problem(config, "checkpoint.local_every checkpoint.local_dir", "set both, or neither")
    if config.parallel.dp and launch.min_dp > config.parallel.dp:
        text = "it is the fewest replicas to go on with; use at most parallel.dp"
        yield problem(config, "launch.min_dp parallel.dp", text)
