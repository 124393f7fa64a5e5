"""Learning by trying, on a CPU: GRPO (arXiv 2402.03300) with a reward that a line of Python checks.

A small model learns to sort digits. Examples teach it a little. Then it samples answers, and right ones are rewarded.
Each iteration hands the weights over to a model that generates. `python grpo.py` trains in one process, and
`torchrun --nproc-per-node 2 grpo.py` over two tensor-parallel ranks.
"""

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from megapar_models.build import build_stages
from megapar_models.convert.handoff import Handoff, StreamLoader
from megapar_models.generation import Sampling, generate
from megapar_models.objectives import Losses, Objective, Scored
from megapar_models.registry import validate
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.launch.grid import grid_of
from megapar.launch.rank_process import job
from megapar.launch.reporting import reported
from megapar.step.step import train_step
from megapar.system import environment
from megapar.train.trainer import start

EQUALS, VOCABULARY = 10, 11
DIGITS = 2
PROMPTS, SAMPLES = 32, 8  # of an iteration: prompts, and samples of each
WARM_UP, ITERATIONS, UPDATES = 30, 20, 2  # steps by examples; iterations by samples, and steps of each
CLIP = 0.2


@dataclass(frozen=True)
class Rollouts(MicroBatch):
    """Samples with their advantages [b], and the log-probabilities of their tokens when they were drawn, [s, b].

    Without these the ratio of both is 1, and an advantage of 1 gives the gradient of the cross entropy.
    """

    advantages_b: Tensor = field(default_factory=lambda: torch.ones(()))
    drawn_sb: Tensor | None = None


def clipped_ratio(scored: Scored, train: TrainConfig) -> Losses:
    """-min(r A, clip(r) A) of each token of the answers, r = p now / p when drawn (equation 3 without its KL term)."""
    batch = cast(Rollouts, scored.batch)
    drawn_sb = scored.values_sb.detach() if batch.drawn_sb is None else batch.drawn_sb
    ratio_sb = (scored.values_sb - drawn_sb).exp()
    gains_sb = torch.minimum(ratio_sb * batch.advantages_b, ratio_sb.clamp(1 - CLIP, 1 + CLIP) * batch.advantages_b)
    return Losses(-gains_sb * scored.weights_sb)


GRPO = Objective(clipped_ratio)


def options(ranks: int) -> Config:
    """A Llama of two layers, over `ranks` tensor-parallel ranks."""
    model = ModelConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=16)
    samples = PROMPTS * SAMPLES
    objective = f"{'grpo' if __name__ == '__main__' else __name__}:GRPO"
    train = TrainConfig(
        steps=WARM_UP + ITERATIONS * UPDATES,
        global_batch_size=samples,
        micro_batch_size=samples,
        seq_length=2 * DIGITS,
        objective=objective,
    )
    optimizer = OptimizerConfig(lr=1e-3, schedule="constant", warmup_steps=0, weight_decay=0.0)
    return validate(
        Config(
            model=model,
            parallel=ParallelConfig(tp=ranks),
            train=train,
            optimizer=optimizer,
            checkpoint=CheckpointConfig(resume="none"),
        ),
        ranks,
    )


def answer_of(prompt: list[int]) -> list[int]:
    """The digits of a prompt in order."""
    return sorted(prompt[:DIGITS])


def rollouts(texts: list[list[int]]) -> Rollouts:
    """Texts of a prompt and an answer. The answers alone have weights."""
    tokens_bs = torch.tensor(texts)
    weights_bs = torch.zeros(len(texts), tokens_bs.shape[1] - 1)
    weights_bs[:, -DIGITS:] = 1.0
    positions_s = torch.arange(weights_bs.shape[1])
    numbers_b = torch.arange(len(texts))
    return Rollouts(tokens_bs[:, :-1], tokens_bs[:, 1:], weights_bs, numbers_b, positions_s, len(positions_s))


def prompts_of(count: int, random: torch.Generator) -> list[list[int]]:
    """Random digits."""
    return [[*digits, EQUALS] for digits in torch.randint(10, (count, DIGITS), generator=random).tolist()]


def run(config: Config, ctx: context.ParallelContext, seed: int = 0) -> list[float]:
    """Train; returns the mean reward of each iteration. Every rank generates the same samples from the same weights."""
    state, _ = start(config, ctx, build_stages(config, ctx))
    everyone = range(ctx.world.size)
    slices = state.optimizer.slices()
    handoff = Handoff(config, grid_of(config), ctx, state.stages.values(), state.weights, slices, receivers=everyone)
    alone = context.single(ctx.device)
    generator = build_stages(options(1), alone)[0].eval()
    loader = StreamLoader(generator)
    random = torch.Generator().manual_seed(seed)
    for _ in range(WARM_UP):
        prompts = prompts_of(PROMPTS * SAMPLES, random)
        train_step(state, [rollouts([prompt + answer_of(prompt) for prompt in prompts])])
    rewards = []
    for iteration in range(ITERATIONS):
        for tensors in handoff.stream():
            loader.load(tensors)
        prompts = prompts_of(PROMPTS, random)
        seeds = torch.randint(2**31, (PROMPTS,), generator=random).tolist()
        texts = generate(generator, prompts, DIGITS, -1, Sampling(temperature=1.0), SAMPLES, seeds)
        right = [float(text[-DIGITS:] == answer_of(text)) for text in texts]
        reward_pn = torch.tensor(right).view(PROMPTS, SAMPLES)
        # How much better than the other samples of the same prompt.
        spread_p1 = reward_pn.std(dim=1, keepdim=True) + 1e-4
        advantages_pn = (reward_pn - reward_pn.mean(dim=1, keepdim=True)) / spread_p1
        batch = rollouts(texts)
        with torch.no_grad():
            drawn = generator.scored(generator.hidden_states(None, batch), batch)
        batch = replace(batch, advantages_b=advantages_pn.flatten(), drawn_sb=drawn.values_sb)
        for _ in range(UPDATES):
            train_step(state, [batch])
        rewards.append(reward_pn.mean().item())
        if ctx.world.first:
            print(f"iteration {iteration + 1} | reward {rewards[-1]:.2f}")
    return rewards


def main() -> None:
    with reported():
        env = environment.read()
        config = options(env.world_size)
    with job(config, env) as (ctx, _):
        run(config, ctx)


if __name__ == "__main__":
    main()
