"""The example of GRPO learns, in one process and over tensor-parallel ranks."""

from dataclasses import replace
from statistics import mean

import pytest
import torch
from megapar_models.objectives import Scored

from megapar.comm.axis import Axis
from megapar.declare import context
from pretrain_scripts.grpo import CLIP, clipped_ratio, options, rollouts, run
from tests.support.distributed import run_ranks
from tests.support.grid import make_context


def test_the_reward_rises() -> None:
    rewards = run(options(1), context.single())
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.25


def rewards_of_ranks() -> list[float]:
    config = options(2)
    return run(config, make_context(config))


@pytest.mark.slow
def test_the_reward_rises_over_two_ranks_that_draw_the_same_samples() -> None:
    first, second = run_ranks(2, rewards_of_ranks)
    assert first == second
    assert mean(first[-4:]) > mean(first[:4]) + 0.25


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_token_moves_no_further_than_the_clip_in_the_direction_of_its_advantage(advantage: float) -> None:
    batch = replace(rollouts([[1, 0, 10, 0, 1]]), advantages_b=torch.tensor([advantage]))
    for ratio in (1 - 2 * CLIP, 1.0, 1 + 2 * CLIP):
        values_sb = torch.full((4, 1), -1.0, requires_grad=True)
        drawn_sb = values_sb.detach() - torch.tensor(ratio).log()
        drawn = replace(batch, drawn_sb=drawn_sb)
        losses_sb = clipped_ratio(Scored(values_sb, drawn, Axis("cp")), options(1).train).losses
        losses_sb.sum().backward()
        clipped = (ratio > 1 + CLIP and advantage > 0) or (ratio < 1 - CLIP and advantage < 0)
        expected = 0.0 if clipped else -ratio * advantage
        # The prompt has no weight.
        torch.testing.assert_close(values_sb.grad.flatten(), torch.tensor([0.0, 0.0, expected, expected]))  # type: ignore[union-attr]
