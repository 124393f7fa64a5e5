"""Who is measured in each layout: megapar, in one or several variants, and its peers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megapar_models.build import build_stages
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.peers import Peer, Result, Weights
from benchmarks.peers_context import GatherByHand
from benchmarks.peers_deepspeed import DeepSpeedZeRO1, DeepSpeedZeRO2, DeepSpeedZeRO3
from benchmarks.peers_huggingface import HuggingFace, HuggingFaceDDP, HuggingFaceMixture, HuggingFaceMixtureDDP
from benchmarks.peers_megatron import MegatronCore, MegatronCoreExperts
from benchmarks.peers_shared_memory import SharedMemoryTensorParallel
from benchmarks.products import Products
from megapar.config.options import Config, ParallelConfig
from megapar.context_parallel.deal import positions
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.params import spec_of
from megapar.expert_parallel.balance import Router, Routing
from megapar.expert_parallel.route import counts
from megapar.launch.grid import grid_of
from megapar.step.step import train_step
from megapar.train.trainer import assemble


class Megapar(Peer):
    """megapar, put together as its trainer does."""

    name = "megapar"

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        self.ctx = context.create(grid_of(config), device=device)
        self.columns = torch.tensor(positions(config.train.seq_length, self.ctx.cp.size, self.ctx.cp.rank))
        stages = build_stages(config, self.ctx)
        load_weights(stages.values(), weights)
        self.state = assemble(config, self.ctx, stages)
        # The experts that this rank's tokens chose in the newest step, by router. They are counted after the step, so
        # that the time of the step does not grow.
        routers = [module for stage in stages.values() for module in stage.modules() if isinstance(module, Router)]
        self.chosen: list[list[Tensor]] = [[] for _ in routers]
        for chosen, router in zip(self.chosen, routers, strict=True):
            router.register_forward_hook(partial(_note_choices, chosen))

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        for chosen in self.chosen:
            chosen.clear()
        batches = [
            MicroBatch.of_samples(
                tokens, targets, torch.ones_like(targets, dtype=torch.float32), torch.zeros_like(targets[:, 0])
            ).columns(self.columns)
            for tokens, targets in self.micro_batches(tokens_bs, targets_bs)
        ]
        result = train_step(self.state, batches)
        return Result(result.loss, result.grad_norm)

    def expert_counts(self) -> list[list[int]]:
        """For each layer and each of its experts: how many of this rank's tokens chose it in the newest step."""
        number = self.config.model.num_experts
        return [counts(torch.cat(chosen), number).tolist() for chosen in self.chosen]


def _note_choices(chosen: list[Tensor], router: nn.Module, inputs: Any, routing: Routing) -> None:
    chosen.append(routing.indices)


@torch.no_grad()
def load_weights(modules: Iterable[nn.Module], weights: Weights) -> None:
    """Copy this rank's slices of logical tensors into its parameters, zeros into padding rows."""
    for param in {id(p): p for module in modules for p in module.parameters()}.values():
        param.zero_()
        for piece, first, last in spec_of(param).segments():
            part = weights[piece.name][piece.held.slices]
            param.view(-1)[first:last].copy_(part.flatten())


Variant = Mapping[str, Any]
"""Fields of `parallel`, `optimizer` and `kernels` in which a contender differs from its layout."""


@dataclass(frozen=True)
class Layout:
    """A way to place the model, and who can: classes of peers, and variants of megapar by name.

    The first one of megapar is what all contenders are compared with. With `experts` the MLPs are mixtures of experts.
    """

    parallel: ParallelConfig
    peers: tuple[type[Peer], ...]
    megapar: Mapping[str, Variant] = field(default_factory=lambda: {"megapar": {}})
    experts: bool = False

    @property
    def world(self) -> int:
        return self.parallel.tp * self.parallel.cp * self.parallel.pp * self.parallel.dp

    @property
    def contenders(self) -> dict[str, tuple[type[Peer], Variant]]:
        """Class and variant by name; megapar as it is by default comes first, and the limit of all last."""
        found: dict[str, tuple[type[Peer], Variant]] = {name: (Megapar, given) for name, given in self.megapar.items()}
        everybody: tuple[type[Peer], ...] = (*self.peers, Products)
        return found | {peer.name: (peer, {**WITHOUT_ZERO, **peer.parallel}) for peer in everybody}

    @property
    def base(self) -> str:
        """The name of the contender to compare all others with."""
        return next(iter(self.megapar))


WITHOUT_ZERO: Variant = {"zero_stage": 0}
LAYOUTS: dict[str, Layout] = {
    "single": Layout(ParallelConfig(dp=1), (peers.Plain, HuggingFace)),
    "dp2": Layout(
        ParallelConfig(dp=2),
        (
            *(peers.DDP, peers.ZeroRedundancy, peers.FSDP2, peers.FSDP2Reshard),
            *(HuggingFaceDDP, DeepSpeedZeRO1, DeepSpeedZeRO2, DeepSpeedZeRO3),
        ),
        {
            "megapar": {},
            "megapar, zero_stage 0": WITHOUT_ZERO,
            "megapar, zero_stage 1, gradients sent in bf16": {"grad_reduce_dtype": "bf16"},
            "megapar, zero_stage 2": {"zero_stage": 2},
            "megapar, zero_stage 3": {"zero_stage": 3},
            "megapar, zero_stage 3, breadth": {"zero_stage": 3, "schedule": "breadth"},
        },
    ),
    "tp2": Layout(
        ParallelConfig(dp=1, tp=2),
        (peers.TensorParallel, SharedMemoryTensorParallel, MegatronCore),
        {"megapar": {}, "megapar, 2 chunks": {"tp_overlap_chunks": 2}},
    ),
    "tp2+sp": Layout(
        ParallelConfig(dp=1, tp=2, sequence_parallel=True),
        (peers.SequenceTensorParallel,),
        {
            "megapar": {},
            "megapar, 2 chunks": {"tp_overlap_chunks": 2},
            "megapar, 4 chunks": {"tp_overlap_chunks": 4},
        },
    ),
    "pp2": Layout(
        ParallelConfig(dp=1, pp=2),
        (peers.Pipeline1F1B, peers.PipelineDualPipeV, peers.PipelineZeroBubbleV),
        {
            "megapar": {},
            "megapar, zb-h1": {"schedule": "zb-h1"},
            "megapar, zb-v": {"schedule": "zb-v", "vpp": 2},
        },
    ),
    "cp2": Layout(
        ParallelConfig(dp=1, cp=2),
        (GatherByHand,),
        {
            "megapar, gather": {},
            "megapar, ring": {"cp_attention": "ring"},
            "megapar, ulysses": {"cp_attention": "ulysses"},
            # The other way to cut activations along the sequence, for comparison.
            "megapar, tp2+sp": {"cp": 1, "tp": 2, "sequence_parallel": True},
        },
    ),
    # Beside torch's ops one by one. It is a layout of its own, because compiling takes a minute.
    "compiled": Layout(
        ParallelConfig(dp=1),
        (peers.Plain, peers.CompiledLayers),
        {"megapar": {}, "megapar, compiled": {"compile": True}},
    ),
    "offload": Layout(
        ParallelConfig(dp=1),
        (),
        {"megapar": {}, "megapar, offload 0.5": {"offload": 0.5}, "megapar, offload 1": {"offload": 1.0}},
    ),
    "moe": Layout(ParallelConfig(dp=1), (peers.Plain, HuggingFaceMixture), experts=True),
    "moe_ep2": Layout(
        ParallelConfig(dp=2, ep=2),
        (peers.DDP, HuggingFaceMixtureDDP, MegatronCoreExperts),
        # Without ep each rank holds all experts, and their gradients are summed over ranks, as those of peers are.
        {
            "megapar": {},
            "megapar, ep 1": {"ep": 1},
            "megapar, 2 chunks": {"ep_overlap_chunks": 2},
            "megapar, 4 chunks": {"ep_overlap_chunks": 4},
        },
        experts=True,
    ),
}
