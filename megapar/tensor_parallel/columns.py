"""This rank's outputs of the matrices of a column-parallel layer."""

from dataclasses import dataclass, replace
from typing import Literal

from megapar.comm.axis import Axis
from megapar.declare.params import Box, Piece, cut, cut_unit, make_piece


@dataclass(frozen=True)
class Columns:
    """This rank's outputs of one matrix in a column-parallel layer.

    The logical tensors are `name`.weight [size, in] and `name`.bias [size]. This rank holds their rows [start, stop)
    and owns [own_start, own_stop). With `shared` several ranks hold some of the rows. `blocks` are those of the weight
    (`Piece.blocks`), such as the rows of a head. `unit` divides `start` and `stop` of every rank.
    """

    name: str
    size: int
    start: int
    stop: int
    own_start: int
    own_stop: int
    shared: bool = False
    blocks: tuple[int, ...] = ()
    unit: int = 1

    @classmethod
    def even(cls, name: str, size: int, tp: Axis, blocks: tuple[int, ...] = ()) -> "Columns":
        """`size` outputs, dealt evenly over tp."""
        start, stop = cut(size, tp)
        return cls(name, size, start, stop, start, stop, blocks=blocks, unit=cut_unit(size, tp.size))

    def piece(
        self, kind: Literal["weight", "bias", "lora_b", "lora_magnitude"], shape: tuple[int, ...], tp: Axis
    ) -> Piece:
        """The piece of the weight, of the bias, or of an adapter's B or magnitudes, with logical shape `shape`.

        If several ranks hold a row, each computes a part of its gradient.
        """
        others = shape[1:]  # dimensions that are not cut
        owned = Box((self.own_start, *(0 for _ in others)), (self.own_stop - self.own_start, *others))
        partial = (tp,) if self.shared else ()
        held = make_piece(f"{self.name}.{kind}", shape, {0: (self.start, self.stop)})
        blocks = self.blocks if kind == "weight" else ()
        return replace(held, owned=owned, partial=partial, blocks=blocks)
