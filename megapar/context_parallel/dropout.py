"""Dropout of attention probabilities, with the same masks in every layout."""

from dataclasses import dataclass

import torch
from megapar_kernels.dropout import RowDropout
from torch import Tensor

from megapar.declare.random import row_keys

ALL = slice(None)


@dataclass(frozen=True)
class AttentionDropout:
    """The dropout masks of one layer's attention.

    Whether a probability is dropped depends on its sample, its global head, and the positions of its query and key. So
    it does not depend on the layout. `heads` are the global numbers of the query heads. `positions_s` are the positions
    of the queries.
    """

    p: float
    seed: int
    use: int  # the number of this attention among all places in the model that use dropout
    heads: range
    sample_ids_b: Tensor
    positions_s: Tensor

    def of(self, keys_k: Tensor, samples: slice = ALL, queries: slice = ALL) -> RowDropout:
        """Return the dropout of `queries` of `samples`, slices of local rows, and keys at positions `keys_k`."""
        sample_b11 = self.sample_ids_b[samples, None, None]
        head_1n1 = torch.arange(self.heads.start, self.heads.stop, device=self.positions_s.device)[None, :, None]
        position_11q = self.positions_s[None, None, queries]
        # Here a key is one of random numbers, and not one of attention.
        random_keys_bnq = row_keys(self.seed, self.use, sample_b11, head_1n1, position_11q)
        return RowDropout(random_keys_bnq, keys_k, self.p)
