"""The models, layouts and batches of tests that train in many layouts."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megapar_kernels.backend import Backend
from megapar_models.build import build_stages
from megapar_models.registry import validate
from torch import Tensor

from megapar import comm, context
from megapar.batch import MicroBatch
from megapar.config import Config, KernelsConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.context import ParallelContext
from megapar.data.order import micro_batch_positions
from megapar.random import initialize
from megapar.train.step import TrainState
from megapar.train.trainer import assemble
from tests.support import layouts
from tests.support.distributed import rank_device

SAMPLES, LENGTH = 12, 24

LLAMA = ModelConfig(
    family="llama",
    hidden_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=76,
    vocab_size=131,
    attention_bias=True,
    qk_norm=True,
    initializer_range=0.1,
)
GPT = ModelConfig(
    family="gpt",
    hidden_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    intermediate_size=76,
    vocab_size=131,
    max_position_embeddings=32,
    tie_word_embeddings=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    initializer_range=0.1,
)
ONE_KV_HEAD = replace(LLAMA, num_key_value_heads=1, tie_word_embeddings=True)
STRADDLING = replace(LLAMA, num_attention_heads=12, num_key_value_heads=3, head_dim=4, qk_norm=False)


@dataclass(frozen=True)
class Layout:
    """A model and how it is laid out; the rest of the configuration is the same for all."""

    model: ModelConfig
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tp_overlap_chunks: int = 1
    recompute: str = "none"
    every: int = 1
    zero_stage: int = 1
    micro_batch_size: int = 1
    partition: tuple[int, ...] = ()
    order: str = "tp-cp-dp-pp"
    overlap: bool = True
    backend: Backend = "auto"
    loss_chunk: int = 0
    packed: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def config(self, precision: str = "fp32") -> Config:
        parallel = ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            vpp=self.vpp,
            schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
            tp_overlap_chunks=self.tp_overlap_chunks,
            partition=self.partition,
            order=self.order,
        )
        train = TrainConfig(
            steps=10,
            global_batch_size=SAMPLES,
            micro_batch_size=self.micro_batch_size,
            seq_length=LENGTH,
            precision=precision,
            recompute=self.recompute,
            recompute_every=self.every,
        )
        # Buckets of about 16 KiB: several of them, so that reduction really overlaps the backward pass.
        # A first update of AdamW is about g / (|g| + eps): an eps above the rounding of gradients keeps it
        # well-conditioned.
        optimizer = OptimizerConfig(
            lr=5e-2,
            eps=1e-2,
            zero_stage=self.zero_stage,
            clip_grad=0.5,
            bucket_mb=1 / 64,
            overlap_grad_reduce=self.overlap,
        )
        kernels = KernelsConfig(self.backend, self.loss_chunk)
        parts: dict[str, Any] = {"parallel": parallel, "train": train, "optimizer": optimizer, "kernels": kernels}
        return validate(Config(model=self.model, **parts), self.world)


def micro_batches(config: Config, ctx: ParallelContext, step: int, packed: bool = False) -> list[MicroBatch]:
    """Random tokens, a distinct weight for each of them, and one sample that is masked whole; `packed` samples are two
    documents each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, (SAMPLES, LENGTH + 1), generator=generator)
    weights = 0.1 + torch.rand(SAMPLES, LENGTH, generator=generator)
    weights[3] = 0.0
    ids = torch.arange(SAMPLES) + step * SAMPLES
    positions = micro_batch_positions(0, SAMPLES, config.train.micro_batch_size, ctx.dp.rank, ctx.dp.size)
    rows = [torch.from_numpy(row) for row in positions]
    batches = [MicroBatch.of_samples(tokens[r, :-1], tokens[r, 1:], weights[r], ids[r]) for r in rows]
    if packed:
        batches = [replace(batch, starts=two_documents(row)) for batch, row in zip(batches, rows, strict=True)]
    return [batch.to(ctx.device) for batch in batches]


def two_documents(samples: Tensor) -> Tensor:
    """`MicroBatch.starts` of samples whose second document starts at position 1 + the sample's number."""
    firsts = torch.arange(len(samples)) * LENGTH
    inner = torch.stack((firsts, firsts + 1 + samples), dim=1).flatten()
    return torch.cat((inner, torch.tensor([len(samples) * LENGTH]))).int()


def make_state(config: Config) -> TrainState:
    parallel = config.parallel
    rank = dist.get_rank() if dist.is_initialized() else 0
    where = (
        rank_device(rank) if config.parallel.tp * config.parallel.pp * config.parallel.dp > 1 else torch.device("cpu")
    )
    ctx = context.create(
        tp=parallel.tp,
        dp=parallel.dp,
        pp=parallel.pp,
        order=parallel.order,
        device=where,
        use_shared_memory=config.launch.cpu_exchange == "shared_memory",
    )
    stages = build_stages(config, ctx)
    initialize(stages.values(), config.train.seed)
    return assemble(config, ctx, stages)


def held_gradients(state: TrainState) -> list[layouts.Held]:
    """Reduced gradients; with ZeRO-1 every rank holds only its shards of them, so they are gathered first."""
    if state.grads.layout.sharded:
        for bucket in state.grads.layout.buckets:
            comm.all_gather_shard_async(state.grads.flat[bucket.start : bucket.stop], state.ctx.grad).wait()
    return layouts.held(state.pipeline.stages.values(), state.ctx, layouts.main_gradients)
