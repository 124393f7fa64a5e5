"""Dropout of attention probabilities, with masks that no layout changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.random import keep_mask, row_keys

ALL = slice(None)


@dataclass(frozen=True)
class AttentionDropout:
    """The masks of one layer's attention, keyed by sample, global head, and position of the query and of the key.

    `heads` are the global numbers of the query heads. `positions_s` are the positions of the queries.
    """

    p: float
    seed: int
    use: int  # the number of the layer's attention among the places of the model that use dropout
    heads: range
    sample_ids_b: Tensor
    positions_s: Tensor

    def keep(self, keys_k: Tensor, samples: slice = ALL, queries: slice = ALL) -> Tensor:
        """The mask, bool [b, n, q, k], of queries and samples in these rows, and of keys at the positions `keys_k`."""
        head = torch.arange(self.heads.start, self.heads.stop, device=keys_k.device)[None, :, None]
        position = self.positions_s[None, None, queries]
        keys = row_keys(self.seed, self.use, self.sample_ids_b[samples, None, None], head, position)
        return keep_mask(keys, keys_k, self.p)
