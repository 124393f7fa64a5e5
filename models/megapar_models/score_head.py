"""A head with one number for each token, in place of the vocabulary's: that of a reward model.

Its weight is score.weight, [1, h], whole on every tp rank. Without sequence parallelism every rank computes the same of
it. Under it each has tokens of its own, and a part of the gradient.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megapar.config.model_rules import HEAD
from megapar.config.options import SCORE
from megapar.declare.params import ParamSpec, shared_piece
from megapar.tensor_parallel.layers import local_linear
from megapar.tensor_parallel.regions import reduce_from_tp
from megapar_models.factory import Factory


def score_weight(hidden_size: int, factory: Factory) -> nn.Parameter:
    """The weight of the head, [1, h]. It begins as the matrices of the model do."""
    sharding = factory.sharding
    shape = (1, hidden_size)
    piece = shared_piece(SCORE, shape, sharding.tp, partial=sharding.sequence_parallel)
    spec = ParamSpec(
        (piece,), factory.init, decay=True, grad_axis=sharding.grad_axis, optimizer=sharding.optimizer, added_by=HEAD
    )
    return sharding.parameter_of(spec, shape)


def scores(x_sbh: Tensor, weight: Tensor, factory: Factory) -> Tensor:
    """The scores [s, b, 1] of all tokens, the same on every tp rank, of hidden states [s or s/tp, b, h]."""
    sharding = factory.sharding
    own = local_linear(x_sbh, weight, None, factory.products_of("score"))
    if not sharding.splits_sequence:
        return own
    # A sum of zeros and the scores of each rank. The backward pass of a gather would add up the gradients of all ranks,
    # which are the same: each computes the whole loss.
    length = own.shape[0]
    before = sharding.tp.rank * length
    after = sharding.tp.size * length - before - length
    return reduce_from_tp(F.pad(own, (0, 0, 0, 0, before, after)), sharding.tp)
