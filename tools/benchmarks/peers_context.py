"""Context parallelism as one writes it by hand in PyTorch: attention to gathered keys and values (Llama 3, arXiv
2407.21783, section 3.3.2).

A sample is cut into 2 n chunks for n ranks, and rank r holds the chunks r and 2 n - 1 - r, so all ranks have about the
same work under a causal mask. Weights are whole on every rank, and DDP sums their gradients.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import DDP, Attention, Llama, Weights, build


class AllGather(torch.autograd.Function):
    """The tensors of all ranks, [n, ...], from this rank's [...]. Backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gathered = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        # Not a reduce-scatter: over gloo it takes longer than the all-reduce.
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class GatheredAttention:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, seq_length: int, device: torch.device):
        world = dist.get_world_size()
        rank = dist.get_rank()
        size = seq_length // (2 * world)
        # Ranks' chunks in the order in which they arrive, and from that where each chunk of the sample is.
        arrived = [chunk for source in range(world) for chunk in (source, 2 * world - 1 - source)]
        self.order = torch.tensor([arrived.index(chunk) for chunk in range(2 * world)], device=device)
        # For each of this rank's two chunks: how many keys it may see, and which of them each query sees.
        self.ends = [(chunk + 1) * size for chunk in (rank, 2 * world - 1 - rank)]
        self.masks = [torch.ones(size, end, dtype=torch.bool, device=device).tril(end - size) for end in self.ends]

    def __call__(self, q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
        # Keys and values are one message. Two chunks of each rank: [rank, k or v, b, h, chunk, c, d].
        kv = torch.stack([k_bnsd, v_bnsd]).unflatten(3, (2, -1))
        by_chunk = AllGather.apply(kv).movedim(4, 1).flatten(0, 1)[self.order]
        k, v = by_chunk.movedim(0, 3).flatten(3, 4)
        outputs = []
        for q, end, mask in zip(q_bnsd.chunk(2, dim=2), self.ends, self.masks, strict=True):
            keys = k[:, :, :end]
            shared = q.shape[1] != keys.shape[1]
            attend = F.scaled_dot_product_attention
            outputs.append(attend(q, keys, v[:, :, :end], attn_mask=mask, enable_gqa=shared))
        return torch.cat(outputs, dim=2)


class GatherByHand(DDP):
    """The plain model with attention to keys and values gathered over gloo or NCCL."""

    name = "all-gather by hand"

    def build(self, weights: Weights) -> nn.Module:
        """The whole model, for the positions of this rank."""
        model: Llama = build(self.config, weights, self.device)
        length = self.config.train.seq_length
        chunks = torch.arange(length).chunk(2 * self.world)
        self.positions = torch.cat([chunks[self.rank], chunks[2 * self.world - 1 - self.rank]]).to(self.device)
        model.cos = model.cos[self.positions]
        model.sin = model.sin[self.positions]
        attend = GatheredAttention(length, self.device)
        for layer in model.layers.values():
            cast(Attention, layer.attention).attend = attend
        return model

    def micro_batches(self, tokens_bs: Tensor, targets_bs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """All micro-batches of the batch, at this rank's positions."""
        return super().micro_batches(tokens_bs[:, self.positions], targets_bs[:, self.positions])
