"""Routing: which experts a token goes to, and with which weights.

`select` chooses the experts, without a gradient. `weights` computes the weights of chosen experts, with a gradient.
They are apart so that a recomputed forward pass can be given the experts that were chosen first: logits that are equal,
or almost, could otherwise choose others the second time.

Shapes: t tokens of this rank, e experts, k experts of a token. Scores are computed in fp32 (or in fp64, given fp64
logits).

Sources: Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088; groups, sigmoid scores and the selection bias:
DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_SIGMOID_EPSILON = 1e-20  # as in DeepSeek-V3: the scores of chosen experts may all be 0


@dataclass(frozen=True)
class RouterRule:
    """How logits become experts and weights.

    The scores of a token are the softmax or the sigmoid of its logits. The `top_k` experts with the highest scores are
    chosen. Their scores, divided by their sum if `norm_topk_prob`, and multiplied by `routed_scaling_factor`, are the
    weights. A softmax over the chosen logits alone, as the paper on Mixtral writes it, gives the same weights as
    "softmax" with `norm_topk_prob`.

    With `n_group` above 1 experts are chosen from the best `topk_group` of `n_group` groups of consecutive experts. The
    score of a group is the sum of its best top_k / topk_group scores. `n_group` must divide the number of experts, and
    `topk_group` must divide `top_k`.
    """

    top_k: int
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1


def scores(logits_te: Tensor, rule: RouterRule) -> Tensor:
    """The score of each expert for each token, [t, e]: softmax or sigmoid, as `rule.scoring_func` says."""
    logits = _at_least_fp32(logits_te)
    if rule.scoring_func == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def probabilities(logits_te: Tensor, rule: RouterRule) -> Tensor:
    """The scores [t, e] as probabilities, for losses that balance experts: sigmoids are divided by their sum."""
    all_scores = scores(logits_te, rule)
    if rule.scoring_func == "softmax":
        return all_scores
    return all_scores / (all_scores.sum(dim=-1, keepdim=True) + _SIGMOID_EPSILON)


@torch.no_grad()
def select(logits_te: Tensor, rule: RouterRule, bias_e: Tensor | None = None) -> Tensor:
    """The experts of each token, int64 [t, k], the best one first.

    `bias_e` is added to the scores. It changes which experts are chosen, and not their weights. Of experts with equal
    scores, the one with the lowest number is chosen.
    """
    biased = scores(logits_te, rule)
    if bias_e is not None:
        biased = biased + bias_e
    if rule.n_group > 1:
        biased = _only_best_groups(biased, rule)
    return _best(biased, rule.top_k)


def weights(logits_te: Tensor, indices_tk: Tensor, rule: RouterRule) -> Tensor:
    """The weights of the chosen experts, [t, k], from scores without the selection bias."""
    chosen = scores(logits_te, rule).gather(-1, indices_tk)
    if rule.norm_topk_prob:
        total = chosen.sum(dim=-1, keepdim=True)
        if rule.scoring_func == "sigmoid":
            total = total + _SIGMOID_EPSILON
        chosen = chosen / total
    if rule.routed_scaling_factor != 1.0:
        chosen = chosen * rule.routed_scaling_factor
    return chosen


@torch.no_grad()
def counts(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in `indices`, which may have any shape: int64 [num_experts]."""
    flat = indices.reshape(-1)
    # Not torch.bincount: it reads the largest index, and so waits for a GPU.
    return flat.new_zeros(num_experts).index_add_(0, flat, torch.ones_like(flat))


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _best(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of the last dimension, the largest first."""
    # Not torch.topk: which of equal values it takes depends on device and shape. A stable sort keeps their order.
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _only_best_groups(biased_te: Tensor, rule: RouterRule) -> Tensor:
    """`biased_te` with -inf for the experts of all groups but the best."""
    grouped = biased_te.unflatten(-1, (rule.n_group, -1))
    best_of_group = grouped.topk(rule.top_k // rule.topk_group, dim=-1).values
    best_groups = _best(best_of_group.sum(dim=-1), rule.topk_group)
    dropped = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=biased_te.device)
    dropped.scatter_(-1, best_groups, False)
    # Not 0: a bias may make all scores of the best groups negative.
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
