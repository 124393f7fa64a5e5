"""A model with right gradients known in closed form in every layout: each element p of each tensor adds c (p - t)^2 / 2
a sample, with c and t drawn from the tensor's name and the sample. If several ranks hold an element, each computes a
different share of its gradient."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.config.options import OptimizerConfig
from megapar.declare.context import ParallelContext
from megapar.declare.params import (
    ZEROS,
    Box,
    ParamSpec,
    Piece,
    cut,
    held_by_all,
    make_piece,
    parameter,
    shared_piece,
    spec_of,
)
from megapar.optimizer.clip import clip_coefficient

Q_HEADS, HEAD, WIDTH = 6, 2, 40
DECAYED = {"embed", "q", "k", "v", "row"}


def shapes(kv_heads: int) -> dict[str, tuple[int, ...]]:
    """The whole model: name to global shape."""
    kv = (kv_heads * HEAD, WIDTH)
    return {
        "embed": (11, 50),
        "q": (Q_HEADS * HEAD, WIDTH),
        "k": kv,
        "v": kv,
        "row": (4, 90),
        "norm": (70,),
        "bias": (150,),
        "scale": (1,),
    }


def draw(kv_heads: int, *key: object) -> dict[str, Tensor]:
    """Every whole tensor, uniform in [0, 1), decided by `key`."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    wanted = shapes(kv_heads)
    flat = torch.rand(sum(map(math.prod, wanted.values())), generator=generator)
    parts = flat.split([math.prod(shape) for shape in wanted.values()])
    return {name: part.view(shape) for (name, shape), part in zip(wanted.items(), parts, strict=True)}


def held_rows(kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """Rows of k and v for the query heads of a tensor rank; neighbors overlap."""
    group = Q_HEADS // kv_heads
    first, last = rank * Q_HEADS // size, (rank + 1) * Q_HEADS // size
    return first // group * HEAD, -(-last // group) * HEAD


def kv_piece(name: str, kv_heads: int, tp: Axis) -> Piece:
    start, stop = held_rows(kv_heads, tp.rank, tp.size)
    before = held_rows(kv_heads, tp.rank - 1, tp.size)[1] if tp.rank else 0
    own = max(start, before)
    piece = make_piece(name, (kv_heads * HEAD, WIDTH), {0: (start, stop)})
    return replace(piece, owned=Box((own, 0), (stop - own, WIDTH)), partial=(tp,))


def specs(ctx: ParallelContext, kv_heads: int) -> dict[str, ParamSpec]:
    """What this rank's stage holds: without a pipeline all; else embed, q+k+v, norm | row, bias, scale, embed again."""
    tp, wanted = ctx.tp, shapes(kv_heads)
    embed = held_by_all(make_piece("embed", wanted["embed"], {0: cut(11, tp)}), ctx.tied, partial=True)
    q_first, q_last = cut(Q_HEADS, tp)
    q = make_piece("q", wanted["q"], {0: (q_first * HEAD, q_last * HEAD)})

    def spec(*pieces: Piece, decay: bool) -> ParamSpec:
        return ParamSpec(pieces, ZEROS, decay=decay, grad_axis=ctx.grad)

    first = {
        "embed": spec(embed, decay=True),
        "qkv": spec(q, kv_piece("k", kv_heads, tp), kv_piece("v", kv_heads, tp), decay=True),
        "norm": spec(shared_piece("norm", wanted["norm"], tp, partial=True), decay=False),
    }
    last = {
        "row": spec(make_piece("row", wanted["row"], {1: cut(90, tp)}), decay=True),
        "bias": spec(shared_piece("bias", wanted["bias"], tp), decay=False),
        "scale": spec(shared_piece("scale", wanted["scale"], tp), decay=False),
        "embed": spec(embed, decay=True),
    }
    if ctx.pp.size == 1:
        return {**last, **first}
    return first if ctx.pp.first else last


def local(spec: ParamSpec, whole: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of a parameter, out of whole tensors by piece name; without its padding rows."""
    return torch.cat([whole[piece.name][piece.held.slices] for piece in spec.pieces])


class Toy(nn.Module):
    """This rank's stage. Its embedding has an inert padding row below the real ones."""

    def __init__(self, ctx: ParallelContext, kv_heads: int = 2, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.ctx, self.kv_heads = ctx, kv_heads
        start = draw(kv_heads, "start")
        for name, spec in specs(ctx, kv_heads).items():
            value = local(spec, start)
            padding = 1 if name == "embed" else 0
            param = parameter(spec, (value.shape[0] + padding, *value.shape[1:]), dtype=dtype, device=ctx.device)
            param.data.zero_()[: value.shape[0]] = value
            self.register_parameter(name, param)

    def share(self, spec: ParamSpec, sample: int) -> Tensor:
        """What this rank computes of each element's gradient; adds up to 1 over the ranks with the element."""
        tp, tied = self.ctx.tp, self.ctx.tied
        weights = [1 + (3 * rank + 2 * sample) % 5 for rank in range(tp.size)]
        whole = {}
        for piece in spec.pieces:
            holders = torch.ones(piece.shape)
            if piece.is_partial_over("tp"):
                holders.zero_()
                for rank, weight in enumerate(weights):
                    rows = (0, piece.shape[0])
                    if piece.name in ("k", "v"):
                        rows = held_rows(self.kv_heads, rank, tp.size)
                    holders[slice(*rows)] += weight
                holders.reciprocal_().mul_(weights[tp.rank])
            whole[piece.name] = holders
        first = 0.3 + 0.1 * (sample % 3)
        if tied.size == 2 and any(piece.is_partial_over("tied") for piece in spec.pieces):
            return local(spec, whole) * (first, 1 - first)[tied.rank]
        return local(spec, whole)

    def forward(self, sample: int) -> Tensor:
        loss = torch.zeros(())
        coefficients, targets = draws(sample, self.kv_heads)
        for param in self.parameters():
            spec = spec_of(param)
            c = local(spec, coefficients) * self.share(spec, sample)
            real = param[: c.shape[0]].float()
            loss = loss + (c * (real - local(spec, targets)).square()).sum() / 2
        return loss


def draws(sample: int, kv_heads: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(c, t) of every whole tensor for one sample."""
    return draw(kv_heads, sample, "c"), draw(kv_heads, sample, "t")


class Reference:
    """The same training in one process on whole tensors, with torch.optim.AdamW and autograd-free gradients."""

    def __init__(self, options: OptimizerConfig, kv_heads: int):
        self.options, self.kv_heads = options, kv_heads
        self.weights = {name: nn.Parameter(whole) for name, whole in draw(kv_heads, "start").items()}
        groups = [
            {"params": [w for name, w in self.weights.items() if name in DECAYED]},
            {"params": [w for name, w in self.weights.items() if name not in DECAYED], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        )

    def gradients(self, samples: range) -> dict[str, Tensor]:
        """Mean over `samples` of c (p - t), summed in fp64."""
        total = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in self.weights.items()}
        for sample in samples:
            c, t = draws(sample, self.kv_heads)
            for name, weight in self.weights.items():
                total[name] += (c[name] * (weight.detach() - t[name])).double() / len(samples)
        return {name: grad.float() for name, grad in total.items()}

    def step(self, grads: Mapping[str, Tensor]) -> float:
        """Clip and update; returns the norm before clipping."""
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        coefficient = clip_coefficient(torch.tensor(norm), self.options.clip_grad)
        for name, weight in self.weights.items():
            weight.grad = grads[name] * coefficient
        self.adamw.step()
        return norm
