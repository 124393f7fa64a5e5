"""Every rank of a layout, made one after the other in one process: what its optimizer holds, and should hold."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.registry import validate
from torch import Tensor

from megapar.base.grid import Grid
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import ParamSpec
from tests.support import tiny_models
from tests.support.checkpoints import STATE
from tests.support.flat import flatten

LLAMA = tiny_models.small(
    "llama", 12, 4, 20, num_attention_heads=12, num_key_value_heads=3, head_dim=2, attention_bias=True, qk_norm=True
)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    zero_stage: int = 1
    shard_ranks: int = 0
    bucket_mb: float = 1.0
    precision: str = "fp32"

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def config(self, model: ModelConfig) -> Config:
        schedule = "interleaved" if self.vpp > 1 else "1f1b"
        axes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        parallel = ParallelConfig(**axes, vpp=self.vpp, schedule=schedule)
        train = TrainConfig(global_batch_size=120, seq_length=8, precision=self.precision)  # type: ignore[arg-type]
        optimizer = OptimizerConfig(
            zero_stage=self.zero_stage,  # type: ignore[arg-type]
            shard_ranks=self.shard_ranks,
            bucket_mb=self.bucket_mb,
        )
        return validate(Config(model=model, parallel=parallel, train=train, optimizer=optimizer), self.world)

    def context(self, rank: int) -> ParallelContext:
        """The place of `rank`, without process groups: enough to build its part of the model."""
        axes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": self.ep, "etp": self.etp or self.tp}
        return context.planned(Grid(**axes, shard_ranks=self.shard_ranks), rank, device=torch.device("cpu"))


@cache
def rank_slices(model: ModelConfig, layout: Layout, rank: int) -> list[StateSlice]:
    """What this rank's optimizer holds. Every user overwrites all of it."""
    ctx = layout.context(rank)
    stages = build_stages(layout.config(model), ctx)
    options = layout.config(model).optimizer
    buffer = flatten(
        list(stages.values()), ctx, zero_stage=options.zero_stage, bucket_mb=options.bucket_mb, overlap=False
    )
    return list(buffer.optimizers(options).slices())


@cache
def whole(model: ModelConfig) -> Mapping[str, Tensor]:
    """The state of every logical tensor, each element random."""
    tensors = {}
    for name, piece in WholeModel(model).tensors().items():
        for state in STATE:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{state}.{name}".encode()))
            values = torch.randn(piece.shape, generator=generator)
            tensors[f"{state}.{name}"] = values.abs() if state == "exp_avg_sq" else values
    return tensors


def held(tensors: Mapping[str, Tensor], spec: ParamSpec, numel: int, state: str) -> Tensor:
    """What a local parameter of `numel` elements should hold: its cut of each tensor, then zeros."""
    parts = []
    for piece in spec.pieces:
        tensor = tensors[f"{state}.{piece.name}"]
        parts.append(tensor[piece.held.slices].flatten())
    flat = torch.cat(parts)
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def expected(model: ModelConfig, slices: list[StateSlice]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, this slice's view, what it should hold) of all state."""
    for item in slices:
        for state in STATE:
            values = held(whole(model), item.spec, item.param.numel(), state)[item.start : item.stop]
            yield f"{state}.{item.spec.name}", item.tensors[state], values


LAYOUTS = [
    Layout(),
    Layout(cp=4, zero_stage=0),
    Layout(dp=5, bucket_mb=1 / 1024),
    Layout(tp=2, cp=2),
    Layout(tp=4, pp=2, vpp=2),
    Layout(tp=4, dp=2, bucket_mb=1 / 512, precision="bf16"),
    Layout(tp=2, pp=3, dp=2, shard_ranks=1),
    Layout(pp=4, dp=2, zero_stage=0, precision="bf16"),
]
