"""The models, layouts and batches of tests training in many layouts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from megapar_kernels.backend import Backend
from megapar_models.build import build_stages
from megapar_models.families.deepseek import DeepseekExperts
from megapar_models.families.qwen3_moe import Qwen3MoeExperts
from megapar_models.registry import find_objective, num_targets, validate
from megapar_tools.verify import batches, logical
from megapar_tools.verify.logical import held_weights
from megapar_tools.verify.run import GradientsSeen, see_gradients
from torch import Tensor, nn

from megapar.config.derive import layers_of_every
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import (
    NO_ADAPTER,
    AdapterConfig,
    Config,
    DataConfig,
    KernelsConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.declare.params import Init, spec_of
from megapar.declare.random import initial_values, initialize
from megapar.launch.grid import grid_of
from megapar.step.evaluation import evaluate
from megapar.step.state import StepResult, TrainState
from megapar.step.step import train_step
from megapar.step.trainable import freeze_others
from megapar.train.trainer import assemble
from tests.support import close, tiny_models
from tests.support.distributed import apart, rank_device, run_ranks

SAMPLES = 12
LENGTH = 24
DERIVED_PRODUCTS = "megapar.linear.products:MatrixProducts"
STEPS = 2

LLAMA = tiny_models.small(
    "llama",
    48,
    4,
    76,
    num_key_value_heads=2,
    head_dim=10,
    attention_bias=True,
    qk_norm=True,
    initializer_range=0.1,
)
GPT = tiny_models.small(
    "gpt",
    48,
    4,
    76,
    max_position_embeddings=32,
    tie_word_embeddings=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    initializer_range=0.1,
)
ONE_KV_HEAD = replace(LLAMA, num_key_value_heads=1, tie_word_embeddings=True)
STRADDLING = replace(LLAMA, num_attention_heads=12, num_key_value_heads=3, head_dim=4, qk_norm=False)


# Mixtures of experts

# Balance by the load of the step before, and a z-loss.
MIXTRAL = tiny_models.small(
    "mixtral",
    48,
    2,
    76,
    num_key_value_heads=2,
    head_dim=10,
    initializer_range=0.1,
    moe=MoEConfig(
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        router_aux_loss_coef=0.05,
        router_z_loss_coef=0.01,
    ),
)


def of(model: Any, layers: int = 2, **options: Any) -> Any:
    """`model` with other options of `model.moe`."""
    return replace(model, num_hidden_layers=layers, moe=replace(model.moe, **options))


# Balance by sample, a gated shared expert.
SHARED = of(
    MIXTRAL,
    num_experts=8,
    num_experts_per_tok=3,
    balance="sequence",
    norm_topk_prob=False,
    shared_expert_intermediate_size=24,
    shared_expert_gate=True,
)
# Attention, and delta nets of both kinds, with experts.
HYBRID = replace(of(SHARED, num_experts=5), num_hidden_layers=3, family="tests.support.hybrids:MIXTURE_FAMILY")
# As DeepSeek-V3 routes: sigmoids, groups, a bias and no loss.
SIGMOID = of(
    MIXTRAL,
    num_experts=8,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    balance="bias",
    router_aux_loss_coef=0.001,
    router_z_loss_coef=0.0,
    router_bias_update_rate=0.02,
)
ONE = of(MIXTRAL, num_experts_per_tok=1, norm_topk_prob=False)
# Three layers, of which one is a plain MLP and a pipeline stage of its own.
_EXPERTS = {f.name: getattr(MIXTRAL.moe, f.name) for f in fields(MIXTRAL.moe)} | {"num_experts": 8}
DENSE_BETWEEN = tiny_models.small(
    "qwen3_moe",
    48,
    3,
    76,
    num_key_value_heads=2,
    head_dim=10,
    initializer_range=0.1,
    qk_norm=True,
    moe=Qwen3MoeExperts(**_EXPERTS, mlp_only_layers=(1,)),
)

# Latent attention: queries and keys of 12 + 6 dimensions, the latter rotated, and values of 8.
LATENT = tiny_models.small(
    "deepseek",
    48,
    2,
    76,
    head_dim=6,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    v_head_dim=8,
    initializer_range=0.1,
    moe=DeepseekExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
)


@dataclass(frozen=True)
class Layout:
    """A model and how it is laid out; the rest of the configuration is the same for all."""

    model: ModelConfig
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    cp_attention: Literal["gather", "ring", "ulysses"] = "gather"
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tp_overlap_chunks: int = 1
    ep_overlap_chunks: int = 1
    recompute: str = "none"
    every: int = 1
    layers: tuple[str, ...] = ()
    offload: float = 0.0
    zero_stage: int = 1
    shard_ranks: int = 0
    moments: Literal["fp32", "bf16"] = "fp32"
    main_weights: Literal["fp32", "remainder"] = "fp32"
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    micro_batch_size: int = 1
    partition: tuple[int, ...] = ()
    order: str = "tp-cp-dp-pp"
    overlap: bool = True
    backend: Backend = "auto"
    loss_chunk: int = 0
    compile: bool = False
    products: str = "torch"
    packed: bool = False
    follows: bool = False  # one process goes on with the weights of the ranks after each step
    optimizer: str = "adamw"
    trainable: tuple[str, ...] = ()
    adapter: AdapterConfig = NO_ADAPTER
    objective: str = "cross_entropy"
    references: Literal["stored", "adapters_off"] = "stored"
    length: int = LENGTH
    fp8: str = "none"
    fp8_skip: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def config(self, precision: str = "fp32") -> Config:
        parallel = ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            cp_attention=self.cp_attention,
            ep=self.ep,
            etp=self.etp,
            vpp=self.vpp,
            schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
            tp_overlap_chunks=self.tp_overlap_chunks,
            ep_overlap_chunks=self.ep_overlap_chunks,
            partition=self.partition,
            order=self.order,
        )
        train = TrainConfig(
            steps=10,
            global_batch_size=SAMPLES,
            micro_batch_size=self.micro_batch_size,
            seq_length=self.length,
            precision=precision,
            recompute=self.recompute,
            recompute_layers=self.layers or layers_of_every([str(self.every)]),
            offload=self.offload,
            trainable=self.trainable,
            objective=self.objective,
            references=self.references,
            fp8=self.fp8,
            fp8_skip=self.fp8_skip,
        )
        # Buckets of about 16 KiB: several of them, so that reduction really overlaps the backward pass.
        # A first update of AdamW is about g / (|g| + eps): an eps above the rounding of gradients keeps it
        # well-conditioned.
        optimizer = OptimizerConfig(
            name=self.optimizer,
            lr=5e-2,
            eps=1e-2,
            zero_stage=self.zero_stage,
            shard_ranks=self.shard_ranks,
            moments=self.moments,
            main_weights=self.main_weights,
            grad_reduce_dtype=self.grad_reduce_dtype,
            clip_grad=0.5,
            bucket_mb=0.0 if self.zero_stage >= 2 else 1 / 64,
            overlap_grad_reduce=self.overlap,
        )
        kernels = KernelsConfig(self.backend, self.loss_chunk, self.compile, self.products)
        parts: dict[str, Any] = {"parallel": parallel, "train": train, "optimizer": optimizer, "kernels": kernels}
        parts["adapter"] = self.adapter
        if find_objective(self.objective).divided_by == "pairs":
            parts["data"] = DataConfig(documents="apart")
        return validate(Config(model=self.model, **parts), self.world)


def micro_batches(config: Config, ctx: ParallelContext, step: int, packed: bool = False) -> list[MicroBatch]:
    """`verify.batches.micro_batches` with as many targets as the model asks for, in pairs if the objective has them."""
    pairs = find_objective(config.train.objective).divided_by == "pairs"
    return batches.micro_batches(config, ctx, step, num_targets(config), packed=packed, pairs=pairs)


def make_context(config: Config) -> ParallelContext:
    rank = dist.get_rank() if dist.is_initialized() else 0
    parallel = config.parallel
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    return context.create(
        grid_of(config),
        device=rank_device(rank) if world > 1 else torch.device("cpu"),
        use_shared_memory=config.launch.cpu_exchange == "shared_memory",
    )


def make_state(config: Config) -> TrainState:
    ctx = make_context(config)
    stages = build_stages(config, ctx)
    initialize(stages.values(), config.train.seed)
    randomize_adapters(stages.values())
    freeze_others(stages.values(), config.train.trainable, ctx)
    return assemble(config, ctx, stages)


@torch.no_grad()
def randomize_adapters(modules: Iterable[nn.Module]) -> None:
    """Fill B and the magnitudes of adapters, the same in every layout. They begin as zeros, and B hides gradients."""
    for param in (param for module in modules for param in module.parameters()):
        for piece, first, last in spec_of(param).segments():
            if piece.name.endswith((".lora_b", ".lora_magnitude")):
                param.view(-1)[first:last] = initial_values(piece, Init("normal", 0.1), seed=5).view(-1)


# How every layout trains as one process does


def shown_of_step(state: TrainState, result: StepResult, seen: GradientsSeen) -> tuple[Any, ...]:
    """What `check` compares after a step: loss, norm, gradients, weights, and the losses and tallies by name."""
    tables = {name: table.tolist() for name, table in result.tallies.items()}
    return result.loss, result.grad_norm, seen.gradients, held_weights(state), (result.losses, tables)


def train_two_steps(
    config: Config, packed: bool = False, evaluation: bool = True, go_on_with: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, Any]:
    """What one rank has to show: initial weights, loss, norm, gradients and weights of each step, and an evaluation if
    there is one. `go_on_with` replaces the weights after each step, once they are shown."""
    state = make_state(config)
    seen = see_gradients(state)
    shown: dict[str, Any] = {"initial": held_weights(state), "steps": []}
    for step in range(STEPS):
        result = train_step(state, micro_batches(config, state.ctx, step, packed))
        shown["steps"].append(shown_of_step(state, result, seen))
        for weights in go_on_with[step : step + 1]:
            logical.fill(state.stages.values(), weights)
    if evaluation:
        shown["evaluation"] = evaluate(state, micro_batches(config, state.ctx, STEPS, packed))
    return shown


@cache
def reference(layout: Layout) -> dict[str, Any]:
    """What `train_two_steps` shows of a layout that `alone` returned."""
    return apart(train_two_steps, layout.config(), layout.packed)


def alone(layout: Layout) -> Layout:
    """The same training in one process: one micro-batch, nothing recomputed, no ZeRO."""
    return Layout(
        layout.model,
        micro_batch_size=SAMPLES,
        zero_stage=0,
        packed=layout.packed,
        optimizer=layout.optimizer,
        trainable=layout.trainable,
        adapter=layout.adapter,
        objective=layout.objective,
        references=layout.references,
        length=layout.length,
        fp8=layout.fp8,
        fp8_skip=layout.fp8_skip,
        # The derived methods of MatrixProducts are those of torch's products, which one process has.
        products="torch" if layout.products == DERIVED_PRODUCTS else layout.products,
    )


def bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(actual) == set(expected) and all(torch.equal(actual[name], expected[name]) for name in expected)


def check(layout: Layout, ranks: list[dict[str, Any]]) -> None:
    """What ranks show, see `train_two_steps`, is what one process shows."""
    if layout.follows:
        held = [logical.assemble([rank["steps"][step][3] for rank in ranks]) for step in range(STEPS)]
        expected = apart(train_two_steps, alone(layout).config(), layout.packed, True, held)
    else:
        expected = reference(alone(layout))
    initial = logical.assemble([rank["initial"] for rank in ranks])
    assert bitwise(initial, logical.assemble([expected["initial"]])), "initial weights depend on the layout"
    for step in range(STEPS):
        loss, norm, gradients, weights, (losses, tables) = expected["steps"][step]
        for rank in ranks:
            assert rank["steps"][step][0] == pytest.approx(loss, rel=1e-5)
            assert rank["steps"][step][1] == pytest.approx(norm, rel=1e-5)
            assert rank["steps"][step][4][0] == pytest.approx(losses, rel=1e-5)
            assert rank["steps"][step][4][1] == tables
        found = [rank["steps"][step] for rank in ranks]
        close.assert_close(logical.assemble([f[2] for f in found]), logical.assemble([gradients]))
        close.assert_close(logical.assemble([f[3] for f in found]), logical.assemble([weights]))
    for rank in ranks:
        assert rank.get("evaluation", expected["evaluation"]) == pytest.approx(expected["evaluation"], rel=1e-5)


def check_on_ranks(layout: Layout, evaluation: bool = True) -> None:
    check(layout, run_ranks(layout.world, train_two_steps, layout.config(), layout.packed, evaluation))


MODELS = {
    LLAMA: "llama",
    GPT: "gpt",
    ONE_KV_HEAD: "one_kv_head",
    STRADDLING: "straddling",
    MIXTRAL: "mixtral",
    SHARED: "shared",
    HYBRID: "hybrid",
    SIGMOID: "sigmoid",
    ONE: "one",
    DENSE_BETWEEN: "dense_between",
}
SHORT = {
    "sequence_parallel": "sp",
    "tp_overlap_chunks": "overlap",
    "ep_overlap_chunks": "chunks",
    "zero_stage": "zero",
    "micro_batch_size": "batch",
    "loss_chunk": "chunk",
}


def name(layout: Layout) -> str:
    """What differs from one rank's defaults, as a case is called: llama-tp2-sp-batch3."""
    parts = [MODELS.get(layout.model, layout.model.family)]
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name in ("model", "adapter") or value == field.default:
            continue
        word = SHORT.get(field.name, field.name)
        if isinstance(value, bool):
            parts.append(word if value else f"no_{word}")
        elif isinstance(value, str):
            parts.append(value.replace("-", "_"))
        elif isinstance(value, tuple):
            parts.append(word + "_".join(map(str, value)))
        else:
            parts.append(f"{word}{value}")
    return "-".join(parts)
