"""Checks, before anything runs, that a Config can run on a number of ranks.

The checks are pure: they touch no process group, file or device, so every rank comes to the same result alone. All
problems are reported at once. Each is one line with the options and their values, why they do not fit, and what would
fit. data/spec.py checks the section `data`.
"""

import math
from collections.abc import Iterator
from itertools import chain

from megapar.config import Config, MoEConfig, ParallelConfig, flatten
from megapar.data.spec import data_problems
from megapar.derive import STAGES_ON_A_RANK, derive
from megapar.errors import ConfigError
from megapar.messages import around, counted, divisors, listed, problem, shown
from megapar.model_rules import MOE, ModelRules

_BELOW_ONE = {"model.hidden_dropout", "model.attention_dropout", "optimizer.betas"}
# An option may be 0 if that is its default, or if it is listed here.
_MAY_BE_ZERO = {path for path, default in flatten(Config()).items() if default == 0} | {
    "parallel.partition",
    "parallel.schedule_costs",
    "train.seed",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "data.split",
    "data.fim_tokens",
    "optimizer.zero_stage",
    "model.moe.mlp_only_layers",
    "model.moe.router_aux_loss_coef",
}
_WEEK_SECONDS = 7 * 24 * 3600


def validate(config: Config, world_size: int, rules: ModelRules) -> Config:
    """Check `config` for `world_size` ranks. Returns it with derived values in place of zeros and "auto".

    `rules` are those of the family that `model.family` names. A `model.vocab_size` of 0 is left as it is, see
    `derive.with_vocabulary`. Raises ConfigError with a line for each problem.
    """
    size_problems = list(_sizes(config))
    problems = [*size_problems, *_amounts(config), *_launch(config, world_size)]
    # The other checks divide by sizes. With sizes below their least values they would fail or report nonsense.
    if not size_problems:
        grid_problems = list(_grid(config, world_size))
        derived = derive(config, world_size, rules)
        checks = (_layout, _pipeline, _train, _optimizer, data_problems, _checkpoint)
        problems += [*grid_problems, *_heads(config, rules), *_model(derived, rules), *_experts(derived, rules)]
        problems += chain.from_iterable(check(derived) for check in checks)
        # While the grid does not fit, dp is unknown, and nothing can be said about the batch.
        if not grid_problems:
            problems += [*_batch(derived), *_expert_batch(derived)]
    if problems:
        raise ConfigError("\n".join(problems))
    return derived


# Ranges of single values


def _sizes(config: Config) -> Iterator[str]:
    """Problems of whole numbers, each option by itself."""
    for path, value in flatten(config).items():
        items = value if isinstance(value, tuple) else (value,)
        least = 0 if path in _MAY_BE_ZERO else 1
        # A bool is an int to Python, but no size.
        numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if any(number < least for number in numbers):
            yield problem(config, path, f"must be at least {least}")


def _amounts(config: Config) -> Iterator[str]:
    """Problems of texts and fractional numbers, each option by itself."""
    for path, value in flatten(config).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and not (item and item.isprintable()):
                yield problem(config, path, "must be printable text, not empty")
            elif isinstance(item, float):
                text = _amount_problem(path, item)
                if text:
                    yield problem(config, path, text)
                    break  # the message shows all items, so once is enough


def _amount_problem(path: str, value: float) -> str:
    """What is wrong with the number, "" if nothing is."""
    if not math.isfinite(value):
        return "must be a finite number"
    if path in _BELOW_ONE:
        return "" if 0 <= value < 1 else "must be at least 0 and below 1"
    if path in _MAY_BE_ZERO:
        return "" if value >= 0 else "must be at least 0"
    return "" if value > 0 else "must be above 0"


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
        yield problem(config, "parallel.dp", f"{text}dp {world_size // replica} fits, as does 0, which means it")


def _heads(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems of heads. `config` is as given: the messages depend on whether its head_dim is derived."""
    model = config.model
    tp = config.parallel.tp
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads
    hidden = model.hidden_size
    if not model.head_dim and hidden % heads:
        text = f"the width must divide by the heads; use hidden_size {around(hidden, heads)}, or set model.head_dim"
        yield problem(config, "model.hidden_size model.num_attention_heads", text)
    elif rules.even_head_dim and (model.head_dim or hidden // heads) % 2:
        # Name the options that decide the width of a head.
        options = "model.head_dim" if model.head_dim else "model.hidden_size model.num_attention_heads"
        text = "rotary embeddings turn pairs, so a head's width must be even"
        yield problem(config, options, f"{text}; {model.head_dim or hidden // heads} is odd")
    if kv_heads and heads % kv_heads:
        text = f"query heads must divide by key/value heads; use {listed(divisors(heads))}"
        yield problem(config, "model.num_attention_heads model.num_key_value_heads", text)
    if heads % tp:
        text = f"heads must divide by tp; tp may be {listed(divisors(heads))}"
        yield problem(config, "model.num_attention_heads parallel.tp", text)


def _model(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems that follow from the rules of the model family."""
    defaults = flatten(Config())
    values = flatten(config)
    for path in rules.unused:
        if values[path] != defaults[path]:
            text = f"family {rules.name} has no such thing; leave it at {shown(defaults[path])}"
            yield problem(config, path, text)
    if config.model.hidden_act not in rules.activations:
        yield problem(config, "model.hidden_act", f"family {rules.name} has {' or '.join(rules.activations)}")
    yield from rules.problems(config)


def _experts(config: Config, rules: ModelRules) -> Iterator[str]:
    """Problems of a mixture of experts, and options of one in a model that has no experts."""
    moe = config.model.moe
    defaults = flatten(Config())
    if moe.num_experts and not rules.has_experts:
        text = f"family {rules.name} has no experts; choose one that has, or leave it at 0"
        yield problem(config, "model.moe.num_experts", text)
    elif rules.has_experts and not moe.num_experts:
        text = f"family {rules.name} is a mixture of experts; such as 8"
        yield problem(config, "model.moe.num_experts", text)
    if not moe.num_experts:
        for path, value in flatten(config).items():
            of_experts = path in MOE or path in ("parallel.ep", "parallel.etp")
            if of_experts and value != defaults[path]:
                text = "the model has no experts; set model.moe.num_experts, or leave it out"
                yield problem(config, path, text)
        return
    yield from _expert_grid(config)
    yield from _router(config)
    yield from _balance(config)


def _expert_grid(config: Config) -> Iterator[str]:
    """Problems of ep and etp, and of the widths that etp and tp cut."""
    parallel = config.parallel
    moe = config.model.moe
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % (parallel.ep * parallel.etp):
        text = (
            f"ep({parallel.ep})*etp({parallel.etp}) must divide the {ranks} ranks of a pipeline rank; their product "
            f"may be {listed(divisors(ranks))}"
        )
        yield problem(config, "parallel.ep parallel.etp", text)
    if moe.moe_intermediate_size % parallel.etp:
        text = f"an expert's width must divide by etp; use {around(moe.moe_intermediate_size, parallel.etp)}"
        yield problem(config, "model.moe.moe_intermediate_size parallel.etp", text)
    if moe.shared_expert_intermediate_size % parallel.tp:
        text = f"its width must divide by tp; use {around(moe.shared_expert_intermediate_size, parallel.tp)}"
        yield problem(config, "model.moe.shared_expert_intermediate_size parallel.tp", text)
    if moe.shared_expert_gate and not moe.shared_expert_intermediate_size:
        text = "there is no shared expert to gate; set its width, or leave the gate out"
        yield problem(config, "model.moe.shared_expert_gate model.moe.shared_expert_intermediate_size", text)
    layers = config.model.num_hidden_layers
    beyond = [layer for layer in moe.mlp_only_layers if layer >= layers]
    if beyond:
        text = f"layers are numbered from 0 to {layers - 1}"
        yield problem(config, "model.moe.mlp_only_layers model.num_hidden_layers", text)


def _router(config: Config) -> Iterator[str]:
    """Problems of how the experts of a token are chosen."""
    moe = config.model.moe
    groups = "model.moe.n_group model.moe.topk_group"
    if moe.num_experts % moe.n_group:
        text = f"groups must have equal numbers of experts; use {listed(divisors(moe.num_experts))}"
        yield problem(config, "model.moe.n_group model.moe.num_experts", text)
    elif moe.topk_group > moe.n_group:
        yield problem(config, groups, f"there are fewer groups; use at most {moe.n_group}")
    else:
        eligible = moe.num_experts // moe.n_group * moe.topk_group
        if moe.num_experts_per_tok > eligible:
            text = f"a token can choose among {eligible} experts; use at most as many"
            yield problem(config, f"model.moe.num_experts_per_tok model.moe.num_experts {groups}", text)
        elif moe.n_group > 1 and moe.num_experts_per_tok % moe.topk_group:
            text = "a group's score adds its best num_experts_per_tok / topk_group experts, so topk_group must divide"
            yield problem(config, "model.moe.num_experts_per_tok model.moe.topk_group", text)


def _balance(config: Config) -> Iterator[str]:
    """Problems of what evens out the load of the experts."""
    moe = config.model.moe
    defaults = MoEConfig()
    if moe.balance == "micro_batch":
        text = (
            "the load of a micro-batch depends on how ranks share the batch, so this loss would change with the "
            "layout; use sequence, global or bias"
        )
        yield problem(config, "model.moe.balance", text)
    if moe.balance not in ("sequence", "global") and moe.router_aux_loss_coef != defaults.router_aux_loss_coef:
        text = "only balance sequence and global have a loss; choose one of them, or leave it out"
        yield problem(config, "model.moe.router_aux_loss_coef model.moe.balance", text)
    if moe.balance != "bias" and moe.router_bias_update_rate != defaults.router_bias_update_rate:
        text = "only balance bias has a bias; choose it, or leave the rate out"
        yield problem(config, "model.moe.router_bias_update_rate model.moe.balance", text)


def _layout(config: Config) -> Iterator[str]:
    """Problems of the rank order, and of what tp cuts."""
    tp = config.parallel.tp
    width = config.model.intermediate_size
    length = config.train.seq_length
    if sorted(config.parallel.order.split("-")) != ["cp", "dp", "pp", "tp"]:
        yield problem(config, "parallel.order", "must name tp, cp, dp and pp once each, such as tp-cp-dp-pp")
    if width % tp:
        text = f"the MLP's width must divide by tp; use {around(width, tp)}"
        yield problem(config, "model.intermediate_size parallel.tp", text)
    if config.parallel.cp > 1:
        yield from _context_parallel(config)
    elif config.parallel.sequence_parallel and length % tp:
        text = f"sequence_parallel cuts the sequence over tp; use {around(length, tp)}, or switch it off"
        yield problem(config, "train.seq_length parallel.tp parallel.sequence_parallel", text)
    if config.parallel.cp == 1 and config.parallel.cp_attention != ParallelConfig().cp_attention:
        default = ParallelConfig().cp_attention
        text = f"with one cp rank there is nothing to exchange; set parallel.cp, or leave it at {default}"
        yield problem(config, "parallel.cp_attention parallel.cp", text)
    if config.parallel.tp_overlap_chunks > 1 and tp == 1:
        text = (
            "without tensor parallelism no product waits for other ranks; use a parallel.tp above 1, or leave it at 1"
        )
        yield problem(config, "parallel.tp_overlap_chunks parallel.tp", text)
    if length > config.model.max_position_embeddings:
        text = f"sequences longer than the model's positions; use at most {config.model.max_position_embeddings}"
        yield problem(config, "train.seq_length model.max_position_embeddings", text)


def _context_parallel(config: Config) -> Iterator[str]:
    """Problems of what cp cuts: positions into two chunks for each rank, and with ulysses the heads of a tp rank."""
    parallel = config.parallel
    length = config.train.seq_length
    unit = 2 * parallel.cp
    options = "train.seq_length parallel.cp"
    reason = "each cp rank holds two chunks of equal length"
    if parallel.sequence_parallel:
        # The positions of a cp rank are cut over tp.
        unit = parallel.cp * math.lcm(2, parallel.tp)
        options += " parallel.tp parallel.sequence_parallel"
        reason += ", and sequence_parallel cuts them over tp"
    if length % unit:
        yield problem(config, options, f"{reason}, so the length must divide by {unit}; use {around(length, unit)}")
    heads = config.model.num_attention_heads // parallel.tp
    if parallel.cp_attention == "ulysses" and heads % parallel.cp:
        text = (
            f"ulysses deals the {counted(heads, 'query head')} of a tp rank to cp ranks; cp may be "
            f"{listed(divisors(heads))}, or use parallel.cp_attention gather or ring"
        )
        yield problem(config, "parallel.cp_attention parallel.cp parallel.tp model.num_attention_heads", text)


def _pipeline(config: Config) -> Iterator[str]:
    """Problems of layers and stages."""
    parallel = config.parallel
    layers = config.model.num_hidden_layers
    stages = parallel.pp * parallel.vpp
    partition = parallel.partition
    needs = STAGES_ON_A_RANK.get(parallel.schedule, parallel.vpp)
    if parallel.vpp != needs:
        number = {1: "one stage", 2: "two stages"}[needs]
        text = f"{parallel.schedule} runs {number} on each rank; set parallel.vpp {needs}, or parallel.schedule "
        others = "interleaved (or zb-interleaved, gpipe)" if parallel.vpp > 1 else "1f1b (or zb-h1)"
        yield problem(config, "parallel.vpp parallel.schedule", text + others)
    if parallel.schedule_costs and len(parallel.schedule_costs) != 3:
        text = "must be three times: forward, gradient of inputs, gradient of weights; such as 1 1.3 0.7"
        yield problem(config, "parallel.schedule_costs", text)
    # The first and the last stage may hold only the embedding and only the head.
    if layers < stages - 2:
        most = (layers + 2) // parallel.pp
        # With more ranks than layers + 2, no vpp helps.
        works = f"parallel.vpp may be up to {most}" if most else f"parallel.pp may be up to {layers + 2}"
        text = f"{stages} stages, of which all but the first and last need a layer; {works}"
        yield problem(config, "model.num_hidden_layers parallel.pp parallel.vpp", text)
    elif partition and not _is_partition(partition, layers, stages):
        text = (
            f"{len(partition)} numbers of sum {sum(partition)}, for {layers} layers on {stages} stages, of which all "
            f"but the first and last need one; {shown(_even(layers, stages))} fits, or leave it out"
        )
        yield problem(config, "parallel.partition parallel.pp parallel.vpp model.num_hidden_layers", text)


def _expert_batch(config: Config) -> Iterator[str]:
    """Replicas that exchange tokens with each other must run the same number of micro-batches."""
    parallel = config.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp}
    # The ranks of one replica follow each other, as many as the axes have that come before dp in the order.
    names = parallel.order.split("-")
    together = math.prod(sizes.get(name, 1) for name in names[: names.index("dp")])
    if not config.model.moe.num_experts or together % (parallel.ep * parallel.etp) == 0:
        return
    train = config.train
    step = train.micro_batch_size * parallel.dp
    text = f"replicas that share experts need equal numbers of micro-batches: a multiple of {step}; use "
    options = "train.micro_batch_size parallel.dp parallel.ep"
    if train.global_batch_size % step:
        yield problem(config, f"train.global_batch_size {options}", f"{text}{around(train.global_batch_size, step)}")
    elif any(size % step for size in train.batch_ramp[:2]):
        works = f"{step} {step} {train.batch_ramp[2]}" if train.global_batch_size > step else "no ramp"
        yield problem(config, f"train.batch_ramp {options}", f"{text}{works}")


def _is_partition(partition: tuple[int, ...], layers: int, stages: int) -> bool:
    return len(partition) == stages and sum(partition) == layers and all(partition[1:-1])


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Numbers of layers of the stages, as equal as possible.

    Layers that are left over go to the stages after the first, because a middle stage must not stay empty.
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
    if batch % step:
        text = f"must be a multiple of train.micro_batch_size {step}; use {around(batch, step)}"
        yield problem(config, "train.global_batch_size train.micro_batch_size", text)
    ramp = config.train.batch_ramp
    if not ramp:
        return
    options = "train.batch_ramp train.global_batch_size"
    if len(ramp) != 3:
        yield problem(config, options, "must be three numbers: START INCREMENT SAMPLES")
    elif ramp[0] >= batch or (batch - ramp[0]) % ramp[1]:
        text = "START plus a number of INCREMENTs must be the global batch"
        yield problem(config, options, f"{text}; such as {step} {step} {ramp[2]}")
    elif ramp[0] % step or ramp[1] % step:
        text = f"START and INCREMENT must be multiples of train.micro_batch_size {step}"
        yield problem(config, f"{options} train.micro_batch_size", text)


def _train(config: Config) -> Iterator[str]:
    """Options of `train` that have no effect with the others as they are. No option is ignored in silence."""
    train = config.train
    defaults = Config().train
    if train.recompute_every > 1 and train.recompute != "full":
        text = "only recompute full has an every; set train.recompute full, or train.recompute_every 1"
        yield problem(config, "train.recompute_every train.recompute", text)
    if not (config.data.validation or config.data.split):
        for name in ("eval_every", "eval_samples"):
            if getattr(train, name) != getattr(defaults, name):
                text = f"nothing to evaluate; set data.validation, or leave {name} at {getattr(defaults, name)}"
                yield problem(config, f"train.{name} data.validation", text)


def _optimizer(config: Config) -> Iterator[str]:
    """Problems of the learning rate's schedule."""
    if config.optimizer.overlap_param_gather and config.optimizer.zero_stage == 0:
        text = "without ZeRO every rank updates all weights, and none are gathered; use zero_stage 1, or leave it out"
        yield problem(config, "optimizer.overlap_param_gather optimizer.zero_stage", text)
    if config.optimizer.overlap_param_gather and config.optimizer.zero_stage == 3:
        text = "stage 3 gathers the weights of each layer while the layer before runs; use zero_stage 1 or 2, or "
        yield problem(config, "optimizer.overlap_param_gather optimizer.zero_stage", f"{text}leave it out")
    yield from _shard_ranks(config)
    if config.optimizer.grad_reduce_dtype == "bf16" and config.optimizer.zero_stage == 0:
        text = "without ZeRO every rank needs the whole sum, which is not rounded; use zero_stage 1, 2 or 3, or fp32"
        yield problem(config, "optimizer.grad_reduce_dtype optimizer.zero_stage", text)
    if config.optimizer.bucket_mb and config.optimizer.zero_stage >= 2:
        text = "stages 2 and 3 reduce the gradients of one layer at a time; leave bucket_mb at 0, or use zero_stage 1"
        yield problem(config, "optimizer.bucket_mb optimizer.zero_stage", text)
    optimizer = config.optimizer
    steps = config.train.steps
    if optimizer.schedule != "wsd" and optimizer.decay_steps:
        text = "only schedule wsd has a decay of its own; set optimizer.schedule wsd, or leave decay_steps at 0"
        yield problem(config, "optimizer.decay_steps optimizer.schedule", text)
    if optimizer.warmup_steps > steps:
        text = f"the warm-up would not end within the run; use at most {steps}"
        yield problem(config, "optimizer.warmup_steps train.steps", text)
    elif optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.decay_steps > steps:
        text = f"warm-up and decay together are longer than the run; decay may be {steps - optimizer.warmup_steps}"
        yield problem(config, "optimizer.warmup_steps optimizer.decay_steps train.steps", text)
    if optimizer.schedule == "constant" and optimizer.min_lr:
        text = "a constant rate has no end; choose cosine, linear, inverse_sqrt or wsd, or leave it at 0"
        yield problem(config, "optimizer.min_lr optimizer.schedule", text)
    elif optimizer.min_lr > optimizer.lr >= 0:  # a negative lr has its own message
        text = f"the rate must not end above its peak; use at most {shown(optimizer.lr)}"
        yield problem(config, "optimizer.min_lr optimizer.lr", text)


def _shard_ranks(config: Config) -> Iterator[str]:
    """Problems of the groups of ranks over which ZeRO shards."""
    number = config.optimizer.shard_ranks
    if not number:
        return
    if config.optimizer.zero_stage == 0:
        text = "without ZeRO nothing is sharded; use zero_stage 1, 2 or 3, or leave it at 0"
        yield problem(config, "optimizer.shard_ranks optimizer.zero_stage", text)
        return
    parallel = config.parallel
    replicas = parallel.dp * parallel.cp
    if replicas % number:
        text = f"must divide the {counted(replicas, 'rank')} of dp x cp; use {listed(divisors(replicas))}, or 0 for all"
        yield problem(config, "optimizer.shard_ranks parallel.dp parallel.cp", text)
    elif config.model.moe.num_experts:
        holders = parallel.tp * replicas // (parallel.ep * parallel.etp)
        if number < holders and holders % number:
            works = [n for n in divisors(replicas) if n >= holders or holders % n == 0]
            text = (
                f"must divide the {holders} ranks that hold the same experts, or be at least as many; use "
                f"{listed(works)}, or 0 for all"
            )
            yield problem(config, "optimizer.shard_ranks parallel.ep parallel.etp", text)


def _checkpoint(config: Config) -> Iterator[str]:
    """Problems of options of `checkpoint` that contradict each other or have no effect."""
    options = config.checkpoint
    if options.init_from != "none" and options.resume not in ("auto", "none"):
        text = "both name a checkpoint to start from; leave resume at auto, or init_from at none"
        yield problem(config, "checkpoint.init_from checkpoint.resume", text)
    if options.init_from == "none" and not options.strict:
        text = "only the weights of init_from may fit in part; set checkpoint.init_from, or leave strict on"
        yield problem(config, "checkpoint.strict checkpoint.init_from", text)
    if options.keep_every and not options.keep_last:
        text = "all checkpoints are kept; set checkpoint.keep_last, or leave keep_every at 0"
        yield problem(config, "checkpoint.keep_every checkpoint.keep_last", text)


def _launch(config: Config, world_size: int) -> Iterator[str]:
    """Problems of how ranks are started.

    The device is not checked here but where a rank starts (device.choose), because it depends on the machine.
    """
    if not 1.0 <= config.launch.timeout_seconds <= _WEEK_SECONDS:
        text = f"must be from 1 to {_WEEK_SECONDS:,} (a week); 300 suits most jobs"
        yield problem(config, "launch.timeout_seconds", text)
    if config.launch.nproc not in (0, world_size):
        text = f"{counted(world_size, 'rank is', 'ranks are')} running already; leave it at 0 under torchrun and Slurm"
        yield problem(config, "launch.nproc", text)
