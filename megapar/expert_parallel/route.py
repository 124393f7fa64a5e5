"""Routing: which experts a token goes to, and with which weights.

`scores` come from the logits. `select` chooses the experts by them, without a gradient. `weights` are the weights of
chosen experts, with a gradient. Choosing is a function of its own, so a recomputed forward pass can use the experts
chosen by the first one. If it chose again, logits with a different last bit could give other experts.

Shapes: t tokens of this rank, e experts, k experts of a token. Scores are computed in fp32, or in fp64 if logits are
fp64.

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
    chosen. Their scores are their weights. With `norm_topk_prob` the weights are divided by their sum. Then they are
    multiplied by `routed_scaling_factor`. The paper on Mixtral writes a softmax over the chosen logits alone. It gives
    the same weights as "softmax" with `norm_topk_prob`.

    With `n_group` above 1, consecutive experts form `n_group` groups of equal size. Experts are then chosen only from
    the best `topk_group` groups. The score of a group is the sum of its best top_k / topk_group scores, of its best 2,
    or its best one, as `group_score` says. `n_group` must divide the number of experts. With group score "share"
    `topk_group` must divide `top_k`. The experts of other groups are never chosen. With `zero_other_groups` their
    scores become 0, as in DeepSeek-V2: they may be chosen if a bias makes better ones negative.

    `norm_epsilon` is added to the sum that weights are divided by. The default changes no sum of a softmax.

    With a `logit_cap` logits x become logit_cap * tanh(x / logit_cap) first. 0: they stay as they are.
    With `selects_by` "logit" the experts with the highest logits are chosen, and a selection bias is added to logits.
    """

    top_k: int
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["share", "best_2", "best"] = "share"
    zero_other_groups: bool = False
    norm_epsilon: float = _SIGMOID_EPSILON
    logit_cap: float = 0.0
    selects_by: Literal["score", "logit"] = "score"

    @property
    def counted_in_group(self) -> int:
        """How many of a group's best scores are added up to the score of the group."""
        return {"share": self.top_k // self.topk_group, "best_2": 2, "best": 1}[self.group_score]


def capped(logits_te: Tensor, rule: RouterRule) -> Tensor:
    """The logits [t, e] within the bounds of `rule.logit_cap`, if there is one."""
    if not rule.logit_cap:
        return logits_te
    return rule.logit_cap * torch.tanh(_at_least_fp32(logits_te) / rule.logit_cap)


def scores(logits_te: Tensor, rule: RouterRule) -> Tensor:
    """The score of each expert for each token, [t, e]: softmax or sigmoid, as `rule.scoring_func` says."""
    logits = _at_least_fp32(logits_te)
    if rule.scoring_func == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def probabilities(scores_te: Tensor, rule: RouterRule) -> Tensor:
    """The scores [t, e] as probabilities with the sum 1, for the losses that balance experts."""
    if rule.scoring_func == "softmax":
        return scores_te  # their sum is 1 already
    return scores_te / (scores_te.sum(dim=-1, keepdim=True) + _SIGMOID_EPSILON)


def ranked_by(logits_te: Tensor, scores_te: Tensor, rule: RouterRule) -> Tensor:
    """What experts are selected by, [t, e]: the scores, or the logits with as many digits."""
    return scores_te if rule.selects_by == "score" else _at_least_fp32(logits_te)


@torch.no_grad()
def select(scores_te: Tensor, rule: RouterRule, bias_e: Tensor | None = None) -> Tensor:
    """The experts of each token, int64 [t, k], the best one first.

    `scores_te` may also be logits (`ranked_by`). `bias_e` is added to them. It changes the choice of experts, but not
    their weights. Of experts with equal scores, those with the lowest numbers are chosen.
    """
    biased_te = scores_te if bias_e is None else scores_te + bias_e
    if rule.n_group > 1:
        biased_te = _only_best_groups(biased_te, rule)
    return _best(biased_te, rule.top_k)


def weights(scores_te: Tensor, indices_tk: Tensor, rule: RouterRule) -> Tensor:
    """The weights of the chosen experts, [t, k], from scores without the selection bias."""
    chosen = scores_te.gather(-1, indices_tk)
    if rule.norm_topk_prob:
        total = chosen.sum(dim=-1, keepdim=True)
        chosen = chosen / (total + rule.norm_epsilon)
    if rule.routed_scaling_factor != 1.0:
        chosen = chosen * rule.routed_scaling_factor
    return chosen


@torch.no_grad()
def counts(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in `indices`, of any shape: int64 [num_experts]."""
    flat = indices.reshape(-1)
    # Not torch.bincount, which waits for the GPU to read the largest index.
    return flat.new_zeros(num_experts).index_add_(0, flat, torch.ones_like(flat))


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _best(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of the last dimension, the largest first."""
    # Not torch.topk, where device and shape decide which of equal values is taken. A stable sort keeps their order.
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def _only_best_groups(biased_te: Tensor, rule: RouterRule) -> Tensor:
    """`biased_te` with -inf for the experts of all groups but the best, or 0 as the rule says."""
    grouped = biased_te.unflatten(-1, (rule.n_group, -1))
    best_scores = grouped.topk(rule.counted_in_group, dim=-1).values  # of each group; ties do not matter
    best_groups = _best(best_scores.sum(dim=-1), rule.topk_group)
    is_dropped = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=biased_te.device)
    is_dropped.scatter_(-1, best_groups, False)
    # A 0 may win over the best groups: a bias may make all their scores negative.
    dropped_score = 0.0 if rule.zero_other_groups else float("-inf")
    return grouped.masked_fill(is_dropped[..., None], dropped_score).flatten(-2)
