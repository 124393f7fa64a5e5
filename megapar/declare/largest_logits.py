"""The largest attention logit of each head in a step, and the rows of weights that QK-clip scales by it.

QK-clip is that of MuonClip (Kimi K2, arXiv 2507.20534, section 2.1). A layer of attention declares what a head's logits
follow from, as it declares its parameters. `megapar.optimizer.qk_clip` scales.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.declare.batch import PipelineStage
from megapar.declare.context import ParallelContext
from megapar.declare.stage_set import StageSet

Share = Literal["all", "half", "none"]
"""How much of a factor rows are scaled by: by all of it, by its square root, or not."""


@dataclass(frozen=True)
class ScaledRows:
    """Rows of the tensor `name`, a weight or a bias, scaled with a group of heads.

    `rows` are so many rows with their share of the group's factor. Those of the next group follow.
    """

    name: str
    rows: tuple[tuple[int, Share], ...]


def rows_of_heads(name: str, width: int, group: int, *, bias: bool) -> list[ScaledRows]:
    """The rows of q and k of the attention `name`, in heads of `width` rows. `group` query heads share a key."""
    kinds = ("weight", "bias") if bias else ("weight",)
    rows: dict[str, int] = {"q": group * width, "k": width}
    return [ScaledRows(f"{name}.{letter}.{kind}", ((rows[letter], "half"),)) for letter in rows for kind in kinds]


class LargestLogits(nn.Module):
    """The largest logit of each head of layer `layer` so far in a step, -inf for none.

    A logit is the score that the softmax reads: of the pairs of a query and a key that causality, window and documents
    let meet, scaled, but before a cap. This rank has the query heads `heads` of the `total` ones. `groups` groups of
    consecutive heads share a key, and so a factor. `maxima` is fp32 [total].
    """

    maxima: Tensor

    def __init__(
        self, layer: int, total: int, heads: range, groups: int, scaled: Sequence[ScaledRows], device: torch.device
    ):
        super().__init__()
        self.layer = layer
        self.heads = heads
        self.groups = groups
        self.scaled = tuple(scaled)
        self.register_buffer("maxima", torch.full((total,), -torch.inf, device=device), persistent=False)

    def add(self, logits_n: Tensor, first: int = 0) -> None:
        """Note the largest logits [n] of some pairs, of this rank's heads from the one numbered `first` on."""
        start = self.heads.start + first
        part = self.maxima[start : start + len(logits_n)]
        torch.maximum(part, logits_n.to(part.dtype), out=part)

    def factors(self, logits_n: Tensor, limit: float) -> Tensor:
        """The factor of each group, fp32, from the largest logits [n] of all heads: 1 or limit / logit."""
        logits_g = logits_n.unflatten(0, (self.groups, -1)).amax(1)
        return torch.where(logits_g > limit, limit / logits_g, 1.0)


def measuring_modules(stages: Iterable[nn.Module]) -> list[LargestLogits]:
    """The modules of `stages` that measure logits, in their order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, LargestLogits)]


def forget(modules: Iterable[LargestLogits]) -> None:
    """Begin to measure anew."""
    for module in modules:
        module.maxima.fill_(-torch.inf)


def reduce_largest_logits(stages: StageSet[PipelineStage], ctx: ParallelContext) -> Tensor | None:
    """Return the largest logits of a step over all ranks, fp32 [layers, heads]. A collective.

    Layers that measure nothing have -inf, as have columns beyond a layer's heads. All begin to measure anew. Returns
    None if the model declares no table (`megapar.declare.stage_set.Declared.logits`).
    """
    if stages.declared.logits is None:
        return None
    table = torch.full(stages.declared.logits, -torch.inf, device=ctx.device)
    modules = measuring_modules(stages.values())
    for module in modules:
        table[module.layer, : len(module.maxima)] = module.maxima  # a layer may have fewer heads than another
    forget(modules)
    # Heads lie on tp, tokens on dp x cp, layers on pp. A head of keys may serve query heads of several tensor ranks.
    for axis in (ctx.tp, ctx.grad, ctx.pp):
        collectives.all_reduce(table, axis, "max")
    return table
