"""How a family's tensors at Hugging Face hold ours. `megapar_models.convert.recipes` moves the rows accordingly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How one of their tensors holds several of ours.

    `groups` is the number of groups, or names the option of the model with it, such as num_key_value_heads: each group
    has its rows of the first of ours, then its rows of the second, and so on. "rows": each group has one row of each.
    "": all rows are one group. `order` are the last names of ours as they lie in a group, if not in our order.
    `transposed`: the tensor is [in, out], of an expert too. `by_group`: the tensor is [groups, rows
    of a group], such as a norm's weights by heads. `axes` are the numbers of axes of size 1 in front of theirs and
    behind. `joined`: experts lie below each other in one matrix, [experts * rows, columns], without an axis of their
    own, or with `beside` next to each other, [rows, experts * columns]. What is said of experts holds for layers too,
    if theirs has no * for the layer.
    """

    groups: str | int = ""
    transposed: bool = False
    by_group: bool = False
    axes: tuple[int, int] = (0, 0)
    order: tuple[str, ...] = ()
    joined: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Pairs:
    """The rotary pairs of a projection's rows, or of a norm's weights: those of each head alike.

    A head has `width` rows. Those from `start` on, `size` of them, are rotated: in theirs 2i and 2i + 1 are a pair, in
    ours i and i + size/2. `width` 0: all rows are one head.
    """

    width: int
    start: int
    size: int

    def ours(self, rows: Tensor) -> Tensor:
        """Return rows of Hugging Face's order in the order of megapar."""
        return self._turned(rows, (self.size // 2, 2))

    def theirs(self, rows: Tensor) -> Tensor:
        """Return rows of megapar's order in the order of Hugging Face."""
        return self._turned(rows, (2, self.size // 2))

    def _turned(self, rows: Tensor, sizes: tuple[int, int]) -> Tensor:
        heads = rows.clone().unflatten(0, (-1, self.width or len(rows)))
        turned = heads[:, self.start : self.start + self.size]
        turned.copy_(turned.unflatten(1, sizes).transpose(1, 2).flatten(1, 2).clone())
        return heads.flatten(0, 1)


PairsOf = Callable[[Any], Mapping[str, Pairs]]
"""The rotary pairs of our modules for the options of a model. A name has * for each number, or the numbers."""
