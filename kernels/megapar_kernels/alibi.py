"""A bias of attention's scores that falls with the distance of query and key (ALiBi, Press et al., arXiv 2108.12409).

A distance is a difference of positions. So the bias is the same in a document, in a part of a sample, and in the whole.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """The bias -slope * (query's position - key's position) of scores [b, n, q, k].

    `slopes_n` has the slope of each query head, fp32. `queries_q` and `keys_k` are positions in a sample, of int type.
    """

    slopes_n: Tensor
    queries_q: Tensor
    keys_k: Tensor

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The bias, [n, q, k]."""
        return self.slopes_n.to(dtype)[:, None, None] * (self.keys_k - self.queries_q[:, None]).to(dtype)

    def of(self, queries: slice, keys: slice) -> "Alibi":
        """Return the bias of some rows and columns of the scores."""
        return replace(self, queries_q=self.queries_q[queries], keys_k=self.keys_k[keys])
