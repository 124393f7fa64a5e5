"""A parameter's values in the number format of its products, kept until they change."""

from collections.abc import Iterable
from typing import Any

import torch
from megapar_kernels.quantize import GROUP, Quantized
from torch import Tensor

from megapar.linear.products import MatrixProducts


class ConvertedWeight:
    """What `MatrixProducts.convert_weight` made of a parameter's values. It is the parameter's attribute `converted`.

    It is made once for all forward passes, input gradients and recomputations until the values change. Changes counted
    by torch (`Tensor._version`) are seen here. Torch counts neither an update of the flat buffer, nor that ZeRO-3 frees
    a parameter's memory. So `FlatWeights` and `UnitWeights` call `forget_converted`. If products return the weight
    itself, nothing is kept.

    If ZeRO-3 gathers codes of the parameter instead of its values, it calls `set`. The parameter has no memory then.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, torch.Size], Any] = {}  # by the place and the shape of the view
        self._made: tuple[MatrixProducts, int] | None = None  # by which products, of which version of the weight
        self._given: Quantized | None = None  # by `set`: codes [rows, in] of the whole parameter
        self._first = 0  # where the parameter begins in its storage

    @classmethod
    def of(cls, param: Tensor) -> "ConvertedWeight":
        """The converted weight of `param`. Read it in forward: tensors unpacked in backward may have no attributes."""
        found: ConvertedWeight | None = getattr(param, "converted", None)
        if found is None:
            found = cls()
            param.converted = found  # type: ignore[attr-defined]
        return found

    def set(self, param: Tensor, values: Quantized) -> None:
        """Let `get` return `values`, or the part of them that it is asked for, until `forget`.

        They are blocks of 128 x 128, with codes [rows, in]. No value of `param` [rows, in] is read, and `get` is asked
        for views of it: with the same columns, and rows at multiples of 128.
        """
        self.forget()
        self._given = values
        self._first = int(param.storage_offset())

    def get(self, weight: Tensor, products: MatrixProducts, part: slice | None = None) -> Any:
        """`products.convert_weight(weight)`, made now or before. `weight` is the parameter, a view or a part of it.

        With `part`, this of weight[part] instead. Torch refuses to slice a parameter without memory, so whoever wants
        a part names it here.
        """
        if self._given is not None:
            given = self._part_of_given(weight, part)
            products.note_weight(None, given)
            return given
        if part is not None:
            weight = weight[part]
        wanted = products, weight._version
        if self._made != wanted:
            self.forget()
        key = int(weight.storage_offset()), weight.shape
        value = self._values.get(key)
        if value is None:
            value = products.convert_weight(weight)
            if value is not weight:
                self._values[key] = value
                self._made = wanted
        products.note_weight(weight, value)
        return value

    def _part_of_given(self, weight: Tensor, part: slice | None) -> Quantized:
        """The codes of a view [..., in] of the parameter, or of this part of the view."""
        assert self._given is not None
        columns = self._given.codes.shape[-1]
        first, between = divmod(int(weight.storage_offset()) - self._first, columns)
        rows = weight.numel() // columns
        if between or weight.shape[-1] != columns or first % GROUP or weight.shape[-2] % GROUP:
            raise RuntimeError(
                f"products ask for a part {tuple(weight.shape)} of a matrix of {columns} columns, of which ZeRO-3 has "
                f"gathered codes in blocks of {GROUP} x {GROUP}: the part must have whole blocks of all columns"
            )
        blocks = slice(first // GROUP, (first + rows) // GROUP)
        shape = weight.shape[:-2]
        found = Quantized(
            self._given.codes[first : first + rows].view(weight.shape),
            self._given.exponents[blocks].view(*shape, weight.shape[-2] // GROUP, columns // GROUP),
            self._given.group,
            self._given.layout,
        )
        return found if part is None else found[part]

    @property
    def nbytes(self) -> int:
        """The bytes that are kept beside the parameter, of formats with an attribute `nbytes`."""
        return sum(getattr(value, "nbytes", 0) for value in self._values.values())

    def forget(self) -> None:
        self._values = {}
        self._made = None
        self._given = None


def converted_nbytes(params: Iterable[Tensor]) -> int:
    """Return the bytes of what is kept converted of `params`."""
    kept: list[ConvertedWeight | None] = [getattr(param, "converted", None) for param in params]
    return sum(found.nbytes for found in kept if found is not None)


def forget_converted(params: Iterable[Tensor]) -> None:
    """Free what is converted of `params`, because their values change or lose their memory."""
    for param in params:
        found: ConvertedWeight | None = getattr(param, "converted", None)
        if found is not None:
            found.forget()
