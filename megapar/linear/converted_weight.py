"""A parameter's values in the number format of its products, kept until they change."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megapar.linear.products import MatrixProducts


class ConvertedWeight:
    """What `MatrixProducts.convert_weight` made of a parameter's values. It is the parameter's attribute `converted`.

    It is made once for all forward passes, input gradients and recomputations until the values change. Changes counted
    by torch (`Tensor._version`) are seen here. Torch counts neither an update of the flat buffer, nor that ZeRO-3 frees
    a parameter's memory. So `FlatWeights` and `UnitWeights` call `forget_converted`. If products return the weight
    itself, nothing is kept.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, torch.Size], Any] = {}  # by the place and the shape of the view
        self._made: tuple[MatrixProducts, int] | None = None  # by which products, of which version of the weight

    @classmethod
    def of(cls, param: Tensor) -> "ConvertedWeight":
        """The converted weight of `param`. Read it in forward: tensors unpacked in backward may have no attributes."""
        found: ConvertedWeight | None = getattr(param, "converted", None)
        if found is None:
            found = cls()
            param.converted = found  # type: ignore[attr-defined]
        return found

    def get(self, weight: Tensor, products: MatrixProducts) -> Any:
        """`products.convert_weight(weight)`, made now or before. `weight` is the parameter, a view or a part of it."""
        wanted = products, weight._version
        if self._made != wanted:
            self.forget()
        part = int(weight.storage_offset()), weight.shape
        if part in self._values:
            return self._values[part]
        value = products.convert_weight(weight)
        if value is not weight:
            self._values[part] = value
            self._made = wanted
        return value

    def forget(self) -> None:
        self._values = {}
        self._made = None


def forget_converted(params: Iterable[Tensor]) -> None:
    """Free what is converted of `params`, because their values change or lose their memory."""
    for param in params:
        found: ConvertedWeight | None = getattr(param, "converted", None)
        if found is not None:
            found.forget()
