"""Where kernels write FP8 codes directly: in front of products that alone read what they write.

A mixer or an MLP names the layer that reads its input in a class attribute `READER`. Without one its input is numbers.
"""

from torch import nn

from megapar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megapar_models.norms import Norm, RMSNorm


def takes_packed(layer: nn.Module) -> bool:
    """Return whether products alone read the input of a linear layer, in FP8. Modules beside matrices read numbers."""
    if type(layer) not in (ColumnParallelLinear, RowParallelLinear):
        return False
    assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
    return layer.products.takes_packed


def pack_norm(norm: Norm, *readers: nn.Module | None) -> None:
    """Let a norm write FP8 codes, if the mixer or MLP that reads its result takes them, or both."""
    layers = [getattr(reader, getattr(reader, "READER", ""), None) for reader in readers]
    if isinstance(norm, RMSNorm) and all(layer is not None and takes_packed(layer) for layer in layers):
        norm.pack()
