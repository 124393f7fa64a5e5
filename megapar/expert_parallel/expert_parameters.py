"""The parameters of a rank's experts: which logical tensors each holds, and how ep and etp cut them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from megapar.declare.params import ADAPTER, Init, ParamSpec, Piece, cut, held_by_all, make_piece
from megapar.declare.sharding import Sharding


@dataclass(frozen=True)
class ExpertParameters:
    """Makes the parameters of the experts `numbers`, of `num_experts` experts of `width` on all ranks of ep.

    `name` and `token_share` are those of `megapar.expert_parallel.experts.Experts`.
    """

    name: str
    num_experts: int
    numbers: range
    width: int
    sharding: Sharding
    token_share: Fraction

    def make(
        self,
        matrices: Sequence[str],
        shape: tuple[int, ...],
        cut_dim: int | None,
        init: Init,
        kind: str = "",
        *,
        quantized: bool = False,
    ) -> nn.Parameter:
        """Return the parameter with these matrices, their biases or factors, of each expert of the rank.

        `shape` is the logical shape of one. `kind` names the factors of an adapter. etp cuts along `cut_dim`. With None
        all ranks of etp hold them, and have parts of their gradient. `quantized` is that of `ParamSpec`.
        """
        sharding = self.sharding
        is_factor = kind != ""
        kind = kind or ("weight" if len(shape) == 2 else "bias")
        numbers: Sequence[int] = self.numbers
        cuts = {} if cut_dim is None else {cut_dim: cut(self.width, sharding.etp)}
        if not numbers:
            # The spec of a parameter without elements still has a shape, with rows cut to nothing. Its columns are as
            # many as on other ranks: so many has the gradient of no rows.
            numbers = [self.numbers.start]
            cuts = {**cuts, 0: (0, 0)}
        pieces: list[Piece] = []
        for number in numbers:
            pieces += [make_piece(f"{self.name}.{number}.{matrix}.{kind}", shape, cuts) for matrix in matrices]
        if cut_dim is None:
            pieces = [held_by_all(piece, sharding.etp, partial=True) for piece in pieces]
        rows = sum(piece.local_shape[0] for piece in pieces)
        spec = ParamSpec(
            tuple(pieces),
            init,
            decay=len(shape) == 2,
            grad_axis=sharding.expert_grad_axis,
            update="matrix" if kind == "weight" else "element",
            optimizer=sharding.optimizer,
            token_share=self.token_share,
            # Those of other ranks too: which experts share a parameter depends on ep.
            selected_with=tuple(
                f"{self.name}.{number}.{matrix}.{kind}" for number in range(self.num_experts) for matrix in matrices
            ),
            added_by=ADAPTER if is_factor else "",
            quantized=quantized,
        )
        return sharding.parameter_of(spec, (rows, *pieces[0].local_shape[1:]))
