"""A small model of the same kind, for layouts to be compared in seconds.

What makes layouts differ stays: the family and its options, how query heads share keys, precision, dropout, tied
matrices. Sizes shrink to what the layouts need. Windows and other thresholds of length become shorter than a sample, so
that tokens lie on both sides of them. Experts become an odd number, so that ranks hold unequal numbers of them.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from megapar.config.model_options import MixtureModel, ModelConfig, MoEConfig
from megapar.config.options import (
    CheckpointConfig,
    Config,
    DataConfig,
    KernelsConfig,
    LaunchConfig,
    LogConfig,
    TrainConfig,
)
from megapar.optimizer.table import find

SAMPLES = 12
"""Samples of a step. dp 2, 3, 4 and 6 divide them; dp 5 shows replicas with unequal numbers of micro-batches."""
MICRO_BATCH = 2
_LENGTH = 24
_VOCABULARY = 131
_LAYERS = 4
_HEADS = 8
_HEAD_DIM = 10
_PARTIAL_HEAD_DIM = 16  # of which a quarter is even too
_WIDTH = 40
# Sizes of layers with a state, by option: their heads with what groups of heads share, and widths.
_STATE_HEADS = {
    "linear_num_value_heads": "linear_num_key_heads",
    "linear_num_heads": "",
    "mamba_n_heads": "mamba_n_groups",
}
_STATE_EPS = 1e-2
_STATE_WIDTHS = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 10, "linear_head_dim": 16},
    **{"mamba_d_state": 16, "mamba_d_head": 10},
}
_EXPERTS = 7  # of which no two, three or four ranks hold equal numbers
_GROUPS = 5
_WINDOW = 7  # keys; a sample has at least `_LENGTH` tokens
_ORIGINAL_LENGTH = 8  # where scaled positions begin
_BUCKET_MB = 1 / 64
_EMA = 0.9  # nearer to 1, two steps would move no average


def _reads_eps(name: str) -> bool:
    """Return whether a run with this optimizer has AdamW's eps: those of matrices alone leave vectors to AdamW."""
    optimizer = find(name)
    return optimizer.MATRICES_ONLY or any(option.name == "eps" for option in fields(optimizer.OPTIONS))


def tested(config: Config) -> Config:
    """`config` as it is compared: on CPUs, with synthetic data, and with updates large enough to show mistakes.

    A first update of AdamW is about g / (|g| + eps). With an eps above the rounding of gradients it is
    well-conditioned, and with a high learning rate it is large beside the weights.
    """
    optimizer = replace(
        config.optimizer,
        lr=5e-2,
        min_lr=0.0,
        schedule="constant",
        warmup_steps=0,
        decay_steps=0,
        eps=1e-2 if _reads_eps(config.optimizer.name) else config.optimizer.eps,
        clip_grad=0.5,
        weight_decay=config.optimizer.weight_decay or 0.1,
        ema=_EMA if config.optimizer.ema else 0.0,
    )
    usual = TrainConfig()
    train = replace(
        config.train,
        steps=10,
        batch_ramp=(),
        eval_every=usual.eval_every,
        eval_samples=usual.eval_samples,
        memory_report=False,
    )
    return replace(
        config,
        train=train,
        optimizer=optimizer,
        data=DataConfig(documents=config.data.documents),
        checkpoint=CheckpointConfig(resume="none", save_last=False),
        log=LogConfig(),
        kernels=replace(KernelsConfig(), loss_chunk=config.kernels.loss_chunk),
        launch=replace(
            LaunchConfig(device="cpu", threads=1),
            timeout_seconds=config.launch.timeout_seconds,
            cpu_exchange=config.launch.cpu_exchange,
        ),
    )


def with_small_batch(config: Config, layouts: Sequence[Config]) -> Config:
    """`config` with a small batch of short samples for all `layouts`: the same configuration, laid out."""
    unit = _unit_of_length(layouts)
    length = min(_rounded(_LENGTH, unit), config.model.max_position_embeddings // unit * unit)
    samples = SAMPLES
    if config.model.num_experts:  # replicas that share experts need equal numbers of micro-batches
        samples = math.lcm(SAMPLES, *(layout.parallel.dp * MICRO_BATCH for layout in layouts))
    train = replace(
        config.train,
        global_batch_size=samples,
        micro_batch_size=MICRO_BATCH,
        # A model with fewer positions is refused in words of its own.
        seq_length=max(length, unit),
    )
    return replace(config, train=train)


def with_small_model(config: Config, layouts: Sequence[Config]) -> list[Config]:
    """Each of `layouts`, validated, with one small model in place of the model of `config`."""
    model = small_model(config.model, layouts, _units(layouts))
    made = []
    for layout in layouts:
        parallel = layout.parallel
        if model.num_hidden_layers != layout.model.num_hidden_layers:
            parallel = replace(parallel, partition=())
        optimizer = layout.optimizer
        if optimizer.zero_stage < 2:
            # Several buckets, so that their order and their ends count.
            optimizer = replace(optimizer, bucket_mb=_BUCKET_MB)
        made.append(replace(layout, model=model, parallel=parallel, optimizer=optimizer))
    return made


def small_model(model: ModelConfig, layouts: Sequence[Config], units: tuple[int, int]) -> ModelConfig:
    """`model` with smaller sizes for these layouts. `units` come from `_units`."""
    heads_unit, width_unit = units
    whole = model.num_hidden_layers
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    shared_by = heads // kv_heads
    if heads > _HEADS:
        heads = min(heads, _rounded(min(max(_HEADS // 2, 2 * shared_by), _HEADS), heads_unit))
    # Two key/value heads at least, if the model has them: so tensor ranks have a head of their own.
    kv_limit = max(heads // shared_by, min(2, kv_heads))
    head_dim = min(model.head_dim or model.hidden_size // model.num_attention_heads, _HEAD_DIM)
    if getattr(model, "partial_rotary_factor", 1.0) < 1:
        head_dim = _PARTIAL_HEAD_DIM
    hidden_size = heads * head_dim
    if model.head_dim and model.head_dim * model.num_attention_heads != model.hidden_size:
        hidden_size += 6  # a width that is not that of all heads
    stages = max(layout.parallel.pp * max(layout.parallel.vpp, 1) for layout in layouts)
    layers = min(model.num_hidden_layers, max(_LAYERS, stages))
    small = replace(
        model,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(n for n in range(1, kv_limit + 1) if heads % n == 0),
        head_dim=head_dim if model.head_dim else 0,
        intermediate_size=_rounded(2 * hidden_size + 2, width_unit),
        vocab_size=min(model.vocab_size or _VOCABULARY, _VOCABULARY),
        max_position_embeddings=min(model.max_position_embeddings, 64 * _unit_of_length(layouts)),
        initializer_range=0.1,
    )
    if base := getattr(model, "dim_model_base", 0):  # a factor of logits is its ratio to the width
        small = replace(small, dim_model_base=max(1, base * hidden_size // model.hidden_size))  # type: ignore[call-arg]
    # Of options with a value for each layer, such as layer_types: those of the first layers.
    lists = {name: value for name, value in vars(model).items() if isinstance(value, tuple)}
    first: dict[str, Any] = {name: value[:layers] for name, value in lists.items() if len(value) == whole}
    small = replace(small, **first)
    small = _with_short_lengths(small, model, layers)
    small = _with_small_states(small, heads_unit)
    small = _with_few_heads_of_layers(small, model, heads_unit)
    if scaling := getattr(small, "rope_scaling", None):
        # Factors of wavelengths, one for each rotated pair of dimensions: the first ones.
        pairs = replace(small, head_dim=head_dim).rotary_width // 2  # type: ignore[attr-defined]
        small = replace(small, rope_scaling=replace(scaling, **_cut(scaling, pairs)))  # type: ignore[call-arg]
    if isinstance(small, MixtureModel):
        small = replace(small, moe=_small_experts(small.moe, layouts, layers, width_unit))
    return small


def _with_small_states(model: ModelConfig, heads_unit: int) -> ModelConfig:
    """`model` with few heads of states, of which two share a key or a group if any do in the model."""
    changes = {name: min(getattr(model, name), most) for name, most in _STATE_WIDTHS.items() if hasattr(model, name)}
    for heads_name, groups_name in _STATE_HEADS.items():
        if not hasattr(model, heads_name):
            continue
        heads = min(getattr(model, heads_name), _rounded(_HEADS // 2, math.lcm(2, heads_unit)))
        changes[heads_name] = heads
        if groups_name:
            groups = getattr(model, groups_name)
            changes[groups_name] = heads if groups == getattr(model, heads_name) else min(groups, heads // 2)
    if changes:
        # A first token reads (q k) v of a state. Where q k is near 0, the norm behind makes much of a rounding.
        return replace(model, **changes, rms_norm_eps=max(model.rms_norm_eps, _STATE_EPS))
    return model


def _with_few_heads_of_layers(small: ModelConfig, model: ModelConfig, heads_unit: int) -> ModelConfig:
    """`small` with few heads in layers that have numbers of their own, unlike the others if those of `model` are."""
    changes: dict[str, Any] = {}
    listed: tuple[int, ...] = getattr(small, "num_attention_heads_per_layer", ())
    if max(listed, default=0) > _HEADS:
        step = math.lcm(heads_unit, small.num_key_value_heads)
        numbers = [model.num_attention_heads, *sorted({*listed} - {model.num_attention_heads})]
        few = {number: small.num_attention_heads + step * index for index, number in enumerate(numbers)}
        changes["num_attention_heads_per_layer"] = tuple(few[number] for number in listed)
    if getattr(model, "num_sliding_attention_heads", 0) > _HEADS:
        step = math.lcm(heads_unit, small.num_key_value_heads)
        changes["num_sliding_attention_heads"] = small.num_attention_heads + step
    if keys := getattr(model, "swa_num_key_value_heads", 0):
        most = max(small.num_key_value_heads * keys // model.num_key_value_heads, 1)
        fit = [number for number in range(1, most + 1) if small.num_attention_heads % number == 0]
        changes["swa_num_key_value_heads"] = fit[-1]
    for name in ("partial_rotary_factor", "local_partial_rotary_factor"):
        if int(getattr(small, name, 0.0) * (small.head_dim or 2)) % 2:
            changes[name] = 0.5  # of a short head, the part of the model may be no pairs
    return replace(small, **changes)


def _with_short_lengths(small: ModelConfig, model: ModelConfig, layers: int) -> ModelConfig:
    """`small` with windows and an original length below that of a sample, and layers with and without a window."""
    changes: dict[str, Any] = {}
    for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
        if length := getattr(model, name, 0):
            changes[name] = min(length, _WINDOW)
    if kinds := getattr(model, "layer_types", ()):
        changes["layer_types"] = _of_each_kind(kinds, layers)
    if numbers := getattr(model, "attn_layer_indices", ()):
        changes["attn_layer_indices"] = tuple(number for number in numbers if number < layers) or (layers - 1,)
    if letters := getattr(model, "hybrid_override_pattern", ""):
        changes["hybrid_override_pattern"] = "".join(_of_each_kind(letters, layers))
    scaling = getattr(model, "rope_scaling", None)
    if scaling and scaling.rope_type in ("llama3", "yarn", "longrope"):  # others have no original length
        original = min(scaling.original_max_position_embeddings, _ORIGINAL_LENGTH)
        changes["rope_scaling"] = replace(scaling, original_max_position_embeddings=original)
    return replace(small, **changes)


def _of_each_kind(kinds: Sequence[str], layers: int) -> tuple[str, ...]:
    """Return the kinds of the first layers, as many as `layers`, the last of which are of the kinds that lack."""
    lacking = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:layers]]
    return (*kinds[: layers - len(lacking)], *lacking)


def _cut(options: object, length: int) -> dict[str, Any]:
    """The values of all options that are tuples, with so many entries at most."""
    return {name: value[:length] for name, value in vars(options).items() if isinstance(value, tuple)}


def _small_experts(moe: MoEConfig, layouts: Sequence[Config], layers: int, width_unit: int) -> MoEConfig:
    if not moe.num_experts:
        return moe
    # Each rank of ep has as many experts as it has chunks, at least.
    needed = max(layout.parallel.ep * layout.parallel.ep_overlap_chunks for layout in layouts)
    # Groups keep their number of chosen ones, and get as few experts as these need.
    groups = min(moe.n_group, _GROUPS)
    chosen_groups = min(moe.topk_group, groups)
    top_k = min(moe.num_experts_per_tok, 3)
    if groups > 1:
        top_k = chosen_groups
    of_group = min(max(-(-max(_EXPERTS, needed) // groups), 2) | 1, moe.num_experts // moe.n_group)
    if of_group % 2 == 0 and (of_group - 1) * groups >= max(needed, 2):
        of_group -= 1
    experts = groups * of_group
    shared = _rounded(_WIDTH // 2, width_unit) if moe.shared_expert_intermediate_size else 0
    dense: dict[str, Any] = {}
    if numbers := getattr(moe, "mlp_only_layers", ()):  # of families with layers without experts
        dense["mlp_only_layers"] = tuple(number for number in numbers if number < layers)
    if step := getattr(moe, "interleave_moe_layer_step", 0):
        dense["interleave_moe_layer_step"] = min(step, layers)
    return replace(
        moe,
        **dense,
        num_experts=experts,
        num_experts_per_tok=min(top_k, experts),
        n_group=groups,
        topk_group=chosen_groups,
        moe_intermediate_size=_rounded(_WIDTH, width_unit),
        shared_expert_intermediate_size=shared,
    )


def _units(layouts: Sequence[Config]) -> tuple[int, int]:
    """What heads and widths must be multiples of, for all layouts."""
    heads = [
        layout.parallel.tp * (layout.parallel.cp if layout.parallel.cp_attention == "ulysses" else 1)
        for layout in layouts
    ]
    widths = [math.lcm(layout.parallel.tp, max(layout.parallel.etp, 1)) for layout in layouts]
    return math.lcm(*heads), math.lcm(*widths)


def _unit_of_length(layouts: Sequence[Config]) -> int:
    """What the length of a sample must be a multiple of, for all layouts."""
    units = [1]
    for layout in layouts:
        parallel = layout.parallel
        tp = parallel.tp if parallel.sequence_parallel else 1
        units.append(tp if parallel.cp == 1 else parallel.cp * math.lcm(2, tp))
    return math.lcm(*units)


def _rounded(size: int, unit: int) -> int:
    """`size`, or the next multiple of `unit` above it."""
    return -(-size // unit) * unit
