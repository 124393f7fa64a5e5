"""The adapter of a linear layer: its factors as parameters, cut over tp. `megapar.linear.low_rank` has its products.

For a matrix `name` [out, in] these are its logical tensors, with r the rank of the adapter:

    name.lora_a   [r, in]    drawn evenly from +-1/sqrt(in), as PEFT draws it
    name.lora_b   [out, r]   zeros, so a model with new adapters computes what it did without
    name.lora_magnitude [out]  with DoRA: zeros; what is added to the norms of the rows of W
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from megapar_kernels.dropout import keys_from_column
from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.comm.collectives import all_reduce
from megapar.declare.params import ADAPTER, ZEROS, Init, ParamSpec, Piece, Sizes, cut, make_piece, shared_piece
from megapar.declare.random import Tokens
from megapar.declare.sharding import Sharding
from megapar.linear.low_rank import InputDropout, LoraRule, LowRank, ScaledColumns
from megapar.linear.number_format import NumberFormat
from megapar.tensor_parallel.columns import Columns


class Lora(nn.Module):
    """The adapters of the matrices of one layer. `a` and `b` are the pieces of their factors.

    `columns` are those of each matrix in the layer's output on this rank. `magnitudes` are the pieces of their
    magnitudes, used with DoRA. Norms of rows are summed over `norm_axis`.
    """

    def __init__(
        self,
        rule: LoraRule,
        a: Sequence[Piece],
        b: Sequence[Piece],
        magnitudes: Sequence[Piece],
        columns: Sequence[slice],
        sharding: Sharding,
        norm_axis: Axis | None = None,
    ):
        super().__init__()
        self.norm_axis = norm_axis
        self.options = rule
        self.rule = LowRank(rule.scale, tuple(columns))
        self.name = a[0].name
        self.first_input = a[0].held.offset[1]
        self.a = factor(a, Init("uniform", 1 / math.sqrt(a[0].shape[1])), sharding)
        self.b = factor(b, ZEROS, sharding)
        self.magnitude = factor(magnitudes, ZEROS, sharding) if rule.dora else None

    @classmethod
    def of_rows(cls, rule: LoraRule, name: str, shape: Sizes, sharding: Sharding) -> "Lora":
        """Make the adapter of a matrix cut by its inputs. A is cut too: ranks have parts of A x and of B's gradient."""
        out_features, in_features = shape
        a = make_piece(f"{name}.lora_a", (rule.rank, in_features), {1: cut(in_features, sharding.tp)})
        b = shared_piece(f"{name}.lora_b", (out_features, rule.rank), sharding.tp, partial=True)
        m = shared_piece(f"{name}.lora_magnitude", (out_features,), sharding.tp, partial=sharding.sequence_parallel)
        return cls(rule, [a], [b], [m], [slice(0, out_features)], sharding, sharding.tp)

    @classmethod
    def of_whole(cls, rule: LoraRule, name: str, shape: Sizes, sharding: Sharding) -> "Lora":
        """Make the adapter of a matrix that every rank has whole. Under sequence parallelism their tokens differ."""
        out_features, in_features = shape
        partial = sharding.sequence_parallel
        a = shared_piece(f"{name}.lora_a", (rule.rank, in_features), sharding.tp, partial=partial)
        b = shared_piece(f"{name}.lora_b", (out_features, rule.rank), sharding.tp, partial=partial)
        m = shared_piece(f"{name}.lora_magnitude", (out_features,), sharding.tp, partial=partial)
        return cls(rule, [a], [b], [m], [slice(0, out_features)], sharding)

    def bias_inside(self, bias: Tensor | None) -> Tensor | None:
        """The bias that the product of W and A adds: none with DoRA, which scales the product alone."""
        return bias if self.magnitude is None else None

    def scale_output(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, from y = W x + s B A x, summed over tp. Without DoRA it is y, which has the bias."""
        if self.magnitude is None:
            return y
        squares = self.rule.squared_norms(weight, self.a, self.b)
        if self.norm_axis is not None:
            # Each rank has a part of every row.
            all_reduce(squares, self.norm_axis)
        scaled: Tensor = ScaledColumns.apply(y, self.magnitude, squares.sqrt_(), self.rule.columns)
        return scaled if bias is None else scaled + bias

    def for_pass(self, tokens: Tokens | None) -> LowRank:
        """The products of a forward pass over these tokens, and of its backward. In training some inputs are dropped.

        Raises ValueError if dropout needs the tokens, and they are None.
        """
        p = self.options.dropout
        if not p or not self.training:
            return self.rule
        if tokens is None:
            raise ValueError(f"adapter.dropout: the layer of {self.name} is called without the tokens of its input")
        # The number of this place among all with dropout: it follows from the name alone, as initial weights do.
        use = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "little")
        keys = keys_from_column(tokens.keys(use), self.first_input)
        return replace(self.rule, dropped=InputDropout(keys, p, self.options.impl))


def factor(pieces: Sequence[Piece], init: Init, sharding: Sharding) -> nn.Parameter:
    """A parameter of factors, one below the other. Magnitudes are not decayed: it would pull them to the norms of W."""
    spec = ParamSpec(
        tuple(pieces),
        init,
        decay=len(pieces[0].shape) == 2,
        grad_axis=sharding.grad_axis,
        optimizer=sharding.optimizer,
        added_by=ADAPTER,
    )
    return sharding.parameter_of(spec, (sum(p.local_shape[0] for p in pieces), *pieces[0].local_shape[1:]))


def lora_of_columns(
    rule: LoraRule, in_features: int, columns: Sequence[Columns], adapted: Sequence[bool], sharding: Sharding
) -> Lora | None:
    """The adapters of the `adapted` matrices of a column-parallel layer, or None if there are none.

    Each B is cut as its matrix. Each A is whole on every rank, and gets a part of its gradient from the rank's columns.
    """
    a: list[Piece] = []
    b: list[Piece] = []
    magnitudes: list[Piece] = []
    places: list[slice] = []
    end = 0
    for c, is_adapted in zip(columns, adapted, strict=True):
        start, end = end, end + c.stop - c.start
        if is_adapted:
            a.append(shared_piece(f"{c.name}.lora_a", (rule.rank, in_features), sharding.tp, partial=True))
            b.append(c.piece("lora_b", (c.size, rule.rank), sharding.tp))
            magnitudes.append(c.piece("lora_magnitude", (c.size,), sharding.tp))
            places.append(slice(start, end))
    return Lora(rule, a, b, magnitudes, places, sharding) if places else None


def reads_codes(products: NumberFormat, lora: Lora | None) -> bool:
    """Return whether passes read a weight as FP8 codes alone (`ParamSpec.quantized`). A DoRA reads its values too."""
    return products.in_blocks and (lora is None or lora.magnitude is None)
