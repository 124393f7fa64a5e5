"""How linear layers convert inputs, weights and gradients before they are sent, multiplied and kept."""

from typing import Any, Self

from megapar_kernels.packed import Packed
from torch import Tensor


class NumberFormat:
    """The format of numbers that enter the products of linear layers. This one leaves all tensors as they are.

    A tensor is converted once: what `convert_input` returns is gathered, multiplied and kept for backward, and what
    `convert_gradient` returns is gathered and multiplied.
    """

    @classmethod
    def serves(cls, name: str) -> bool:
        """Return whether the matrix of module `name`, such as layers.3.mlp.down or head, is computed in this format."""
        return name.startswith("layers.")

    def convert_input(self, x: Tensor) -> Tensor:
        """Return the input x [..., in] of a layer as it is sent, multiplied and kept for backward: [..., any number].

        Another format overrides this to quantize x before ranks gather it. The result is one tensor of any dtype, so
        one message carries all of it: a row of uint8 may have the bytes of the values, and behind them those of their
        scales. Each row must follow from the same row of x alone, because rows are gathered and cut in chunks. A
        row-parallel layer has only this rank's columns of x. Scales of blocks of columns are the same in every layout
        if tp cuts between the blocks.

        Backward takes the gradient of the result as the gradient of x, as if nothing had been rounded.
        """
        return x

    def convert_gradient(self, grad_y: Tensor) -> Tensor:
        """Return the gradient [..., out] of a layer's output as it is sent, multiplied and kept: [..., any number].

        It is called once, before ranks gather the gradient. What `convert_input` says of a row holds here too.
        """
        return grad_y

    def convert_weight(self, weight: Tensor) -> Any:
        """Return the weight [out, in], or [groups, out, in] of experts, as products get it.

        The result of experts gives the matrix of group g at index g. What is no view of the weight is kept beside the
        parameter until its values change (see `ConvertedWeight`). Plans count its `nbytes`, if it has that.
        """
        return weight

    def restore(self, converted: Tensor) -> Tensor:
        """Return the numbers of what `convert_input` or `convert_gradient` returned, in the dtype of activations.

        A format that overrides either of the two overrides this one too. Adapters and gradients of biases need it.
        """
        return converted

    @property
    def converts(self) -> bool:
        """Whether `convert_input` returns something else than its argument."""
        return type(self).convert_input is not NumberFormat.convert_input

    @property
    def in_blocks(self) -> bool:
        """Whether `convert_weight` quantizes the weight in blocks (`megapar_kernels.quantize.quantize_blocks`)."""
        return False

    @property
    def takes_packed(self) -> bool:
        """Whether kernels in front of a product may write its input in this format (`Packed`), and not its numbers."""
        return False

    def of_own_positions(self) -> Self:
        """The products of a layer that reads this rank's part of the sequence, where others read all of it."""
        return self

    def note_weight(self, weight: Tensor | None, converted: Any) -> None:
        """Note what products get of a weight. It changes nothing. `weight` is None if only `converted` was gathered."""

    def as_input(self, x: Tensor) -> Tensor:
        """Return `convert_input(x)`. What has been converted already is taken as it is."""
        if isinstance(x, Packed):
            return x.rows if self.converts else x.restored()
        return self.convert_input(x)

    def as_gradient(self, grad_y: Tensor) -> Tensor:
        """Return `convert_gradient(grad_y)`. What has been converted already is taken as it is."""
        if isinstance(grad_y, Packed):
            return grad_y.rows if self.converts else grad_y.restored()
        return self.convert_gradient(grad_y)

    def numbers(self, converted: Tensor, like: Tensor) -> Tensor:
        """Return the numbers of what `convert_input` or `convert_gradient` made of `like`, or ranks gathered of it."""
        return converted if _is_as_it_was(converted, like) else self.restore(converted)

    def carry(self, converted: Tensor, like: Tensor) -> Tensor:
        """Return what `convert_input` or `convert_gradient` made of `like`, or ranks gathered of it, for autograd.

        Autograd sees the numbers, of the features and the dtype of `like`.
        """
        if _is_as_it_was(converted, like):
            return converted
        return Packed(converted, like.shape[-1], like.dtype, self.restore)


def _is_as_it_was(converted: Tensor, like: Tensor) -> bool:
    """Whether a format has left a tensor as it is: it may convert inputs alone."""
    return converted.dtype == like.dtype and converted.shape[-1] == like.shape[-1]
