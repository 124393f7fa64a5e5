"""Objectives of preferences: of two answers to a prompt, one was chosen. The losses of DPO, IPO and of reward models.

A sample is a pair: the document with the chosen answer, that with the rejected one, and padding. The weights of the
targets are 0 outside of the answers.
"""

import torch.nn.functional as F
from torch import Tensor

from megapar.config.options import TrainConfig
from megapar_models.objectives import Losses, Objective, Scored

METRICS = ("reward_chosen", "reward_margin", "accuracy")
"""Logged means over pairs: the reward of the chosen answer, how far it is above that of the rejected one, and the share
of pairs in which it is above."""

OPTIONS = ("train.beta", "train.references")


def _rewards(scored: Scored) -> Tensor:
    """log p - log p_reference of each answer, [b, 2], the chosen one first. DPO's rewards are these times beta."""
    references_bd = scored.batch.references_bd
    if references_bd is None:
        raise ValueError("the objective compares with a reference model: give the micro-batch `references_bd`")
    return scored.of_answers() - references_bd


def _mean_rewards(scored: Scored, rewards_bd: Tensor) -> Tensor:
    """The rewards of each answer divided by its length, [b, 2]."""
    return rewards_bd / scored.sums(scored.weights_sb).clamp(min=1.0)


def _differences(rewards_bd: Tensor) -> Tensor:
    """How far the chosen answer is above the rejected one, [b]."""
    return rewards_bd[:, 0] - rewards_bd[:, 1]


def _losses(losses_b: Tensor, rewards_bd: Tensor, beta: float) -> Losses:
    """The losses with METRICS."""
    differences_b = _differences(rewards_bd)
    values = (beta * rewards_bd[:, 0], beta * differences_b, (differences_b > 0).to(losses_b.dtype))
    return Losses(losses_b, dict(zip(METRICS, values, strict=True)))


def _dpo(scored: Scored, train: TrainConfig) -> Losses:
    """DPO (arXiv 2305.18290, equation 7). With label smoothing e its robust form (arXiv 2403.00409, equation 11):

    (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e), with z = beta * difference of rewards.
    """
    rewards_bd = _rewards(scored)
    z_b = train.beta * _differences(rewards_bd)
    losses_b = -F.logsigmoid(z_b)
    flipped = train.label_smoothing
    if flipped:
        losses_b = ((1 - flipped) * losses_b + flipped * F.logsigmoid(-z_b)) / (1 - 2 * flipped)
    return _losses(losses_b, rewards_bd, train.beta)


def _dpo_norm(scored: Scored, train: TrainConfig) -> Losses:
    """DPO of rewards divided by the lengths of the answers (Tulu 3, arXiv 2411.15124, section 5)."""
    rewards_bd = _rewards(scored)
    losses_b = -F.logsigmoid(train.beta * _differences(_mean_rewards(scored, rewards_bd)))
    return _losses(losses_b, rewards_bd, train.beta)


def _ipo(scored: Scored, train: TrainConfig) -> Losses:
    """IPO (arXiv 2310.12036, equation 17), of rewards divided by the lengths of the answers."""
    rewards_bd = _rewards(scored)
    losses_b = (_differences(_mean_rewards(scored, rewards_bd)) - 1 / (2 * train.beta)).square()
    return _losses(losses_b, rewards_bd, train.beta)


def _reward(scored: Scored, train: TrainConfig) -> Losses:
    """-log sigmoid(r_chosen - r_rejected) (Bradley-Terry; arXiv 2203.02155, equation 1).

    The reward r of an answer is the score of its last token.
    """
    rewards_bd = scored.sums(scored.values_sb * scored.batch.last_of_documents_bs().t())
    return _losses(-F.logsigmoid(_differences(rewards_bd)), rewards_bd, 1.0)


PREFERENCES = {
    "dpo": Objective(_dpo, "pairs", METRICS, needs_references=True, options=(*OPTIONS, "train.label_smoothing")),
    "dpo_norm": Objective(_dpo_norm, "pairs", METRICS, needs_references=True, options=OPTIONS),
    "ipo": Objective(_ipo, "pairs", METRICS, needs_references=True, options=OPTIONS),
    "reward": Objective(_reward, "pairs", METRICS, head="score"),
}
"""The objectives of preferences by the name of train.objective."""
