"""Training on packs of conversations: every layout has the loss, the gradients and the accuracy of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_gradients

from megapar.config.options import Config, DataConfig
from megapar.context_parallel import deal
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from megapar.train.data import open_loaders
from tests.support import close
from tests.support.conversations import write_pair
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LENGTH, LLAMA, ONE_KV_HEAD, SAMPLES, Layout, make_state, name
from tests.support.sweeps import slow_but

VOCABULARY = 131
STEPS = 2


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of odd and even lengths up to a whole sample. Of a few only the last token is trained."""
    draw = np.random.default_rng(1)
    lengths = [*draw.integers(2, 17, 60).tolist(), *[LENGTH + 1, LENGTH, 1 + LENGTH // 2] * 3]
    trained = [list(range(n - 1 if number % 5 == 0 else n // 2, n)) for number, n in enumerate(lengths)]
    return write_pair(tmp_path_factory.mktemp("talks") / "talks", random_tokens(lengths), lengths, trained)


def random_tokens(lengths: list[int]) -> Any:
    return np.random.default_rng(2).integers(0, VOCABULARY, sum(lengths))


def on_conversations(layout: Layout, prefix: Path) -> Config:
    source = (str(prefix),)
    return replace(layout.config(), data=DataConfig(train=source, validation=source, documents="apart"))


def trained(config: Config) -> tuple[list[Any], Any]:
    """Loss, norm, targets and gradients of each step, and an evaluation."""
    state = make_state(config)
    data, sets = open_loaders(config, state.ctx)
    found = []
    for _ in range(STEPS):
        result = train_step(state, data.next_step())
        found.append(((result.loss, result.grad_norm, result.tokens), held_gradients(state)))
    data.close()
    (held_out,) = sets.values()
    return found, evaluate(state, held_out.step_after(0))


def check(layout: Layout, prefix: Path) -> None:
    alone = Layout(layout.model, micro_batch_size=SAMPLES, zero_stage=0)
    expected, evaluated = trained(on_conversations(alone, prefix))
    ranks = run_ranks(layout.world, trained, on_conversations(layout, prefix))
    for number, (numbers, gradients) in enumerate(expected):
        for steps, _ in ranks:
            assert steps[number][0] == pytest.approx(numbers, rel=1e-5)
        found = logical.assemble([steps[number][1] for steps, _ in ranks])
        close.assert_close(found, logical.assemble([gradients]))
    for _, of_rank in ranks:
        assert of_rank == pytest.approx(evaluated, rel=1e-5)
    assert 0 < evaluated.hits < evaluated.divisor


LAYOUTS = [
    Layout(LLAMA, pp=2, cp=2, cp_attention="ring"),
    Layout(LLAMA, pp=2),
    Layout(LLAMA, cp=2),
    Layout(LLAMA, cp=2, cp_attention="ring", micro_batch_size=3),
    Layout(LLAMA, cp=2, cp_attention="ulysses"),
    Layout(LLAMA, tp=2, sequence_parallel=True, loss_chunk=7),
    Layout(LLAMA, dp=2, zero_stage=2),
    Layout(LLAMA, pp=4),
    Layout(GPT, pp=2, cp=2),
    Layout(ONE_KV_HEAD, cp=4, cp_attention="ring"),
    Layout(LLAMA, cp=4),
]


@pytest.mark.parametrize("layout", slow_but({0, 5}, LAYOUTS), ids=name)
def test_packs_train_as_in_one_process(layout: Layout, prefix: Path) -> None:
    """Faults documents-lost-in-middle, odd-packs-cut: odd lengths, cut by cp 2 and 4."""
    check(replace(layout, micro_batch_size=3), prefix)


def test_a_rank_may_hold_no_trained_token_of_a_pack(tmp_path: Path) -> None:
    """Fault part-without-trained-tokens: all lie in the part of the second context-parallel rank; no NaN, and no other
    divisor."""
    inputs = [at for at in deal.positions(LENGTH, 2, 1) if at + 1 < LENGTH]
    lengths = [LENGTH + 1] * SAMPLES
    pair = write_pair(tmp_path / "pair", random_tokens(lengths), lengths, [[at + 1 for at in inputs]] * SAMPLES)
    check(Layout(ONE_KV_HEAD, cp=2, micro_batch_size=3), pair)


def test_micro_batches_of_few_and_of_many_targets_are_one_batch(tmp_path: Path) -> None:
    """Fault micro-batches-of-unlike-targets: one pack in a micro-batch and all together.

    test_data_packs.py compares the sums in fp64.
    """
    lengths = [LENGTH + 1] * SAMPLES
    every = [list(range(1, LENGTH + 1)) if number % 3 else [5] for number in range(SAMPLES)]
    pair = write_pair(tmp_path / "pair", random_tokens(lengths), lengths, every)
    found, expected = (
        trained(on_conversations(Layout(LLAMA, micro_batch_size=size, zero_stage=0), pair))[0] for size in (1, SAMPLES)
    )
    assert {numbers[2] for numbers, _ in found} == {8 * LENGTH + 4}
    for (numbers, gradients), (of_one, of_all) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(of_one, rel=1e-6)
        close.assert_close(logical.assemble([gradients]), logical.assemble([of_all]))


@pytest.mark.parametrize("chunk", [0, 7])
def test_hits_are_those_of_the_highest_logits(tmp_path: Path, chunk: int) -> None:
    """Of a model that has learned a little, by logits that its stage computes apart from the loss."""
    lengths = [LENGTH + 1] * SAMPLES
    pair = write_pair(tmp_path / "pair", random_tokens(lengths) % 5, lengths)
    config = on_conversations(Layout(LLAMA, micro_batch_size=3, loss_chunk=chunk), pair)
    state = make_state(config)
    data, sets = open_loaders(config, state.ctx)
    for _ in range(3):
        train_step(state, data.next_step())
    data.close()
    (held_out,) = sets.values()
    batches = held_out.step_after(0)
    evaluated = evaluate(state, batches)
    (stage,) = state.stages.values()
    hits = 0.0
    with torch.no_grad():
        for batch in batches:
            found_bs = stage.eval().logits(stage.hidden_states(None, batch))[..., :VOCABULARY].argmax(-1).t()
            hits += float((batch.weights_bs * (found_bs == batch.targets_bs)).sum())
    assert evaluated.hits == hits > 10
    assert evaluated.divisor == sum(batch.weights_bs.sum().item() for batch in batches) == SAMPLES * (LENGTH + 1 - 12)
