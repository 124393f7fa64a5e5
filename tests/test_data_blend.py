"""Blends: exact in every block, the same however they are asked for, and a source's samples each once an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megapar_models.registry import validate
from numpy.typing import NDArray

from megapar.base.errors import ConfigError
from megapar.config.data_spec import blend_stages
from megapar.config.options import Config, DataConfig, TrainConfig
from megapar.data.blend import BLEND_VERSION, BLOCK, PARTS, Blend, BlendPhase, block_counts, parts_of
from megapar.data.loader import Mixture

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(WEIGHTS)
def test_every_block_and_all_first_blocks_are_within_one_sample_of_the_weights(weights: list[float]):
    """Fault blend-proportions. Of the weights in millionths for any number of blocks, of those as given for one
    block."""
    parts = parts_of(weights)
    share, given_share = parts / BLOCK, np.array(weights) / sum(weights) * BLOCK
    assert parts.sum() == PARTS
    counts = block_counts(parts)
    assert (counts.sum(axis=1) == BLOCK).all()
    assert (abs(counts - share) < 1).all()
    assert (abs(counts - given_share) < 1 + 1e-6).all()
    sums = counts.cumsum(axis=0)
    assert (abs(sums - share * np.arange(1, BLOCK + 1)[:, None]) < 1).all()
    assert np.array_equal(sums[-1], parts)


# Dealt by deadlines alone, without the ties that PD2 breaks, these millionths would miss some.
TIES = (500, 500, 500, 250, 500, 500, 750, 750, 750, 995_000)


@pytest.mark.parametrize(
    "weights", [TIES, (0.001, 0.999), (1, 1, 1), (5, 0, 3), (1e-6, 1), (0.7, 0.3), (3,), (1,) * 7 + (90,)]
)
def test_blends_at_the_edges(weights: tuple[float, ...]):
    """Fault blend-proportions. Rare sources, sources of weight 0, weights without common divisors."""
    counts = block_counts(parts_of(weights))
    share = np.array(weights) / sum(weights)
    assert (abs(counts - share * BLOCK) < 1.001).all()
    assert (abs(counts.sum(axis=0) - share * PARTS) < 1).all()
    exact = share * BLOCK * np.arange(1, BLOCK + 1)[:, None]
    assert (abs(counts.cumsum(axis=0) - exact) < (1 if weights == TIES else 2)).all(), "2: weights were rounded"
    assert (counts[:, share == 0] == 0).all()
    if weights == (0.7, 0.3):
        assert (counts == [700, 300]).all()


def test_the_blend_is_frozen():
    """As the order inside sources: change these values only together with the version's name."""
    assert BLEND_VERSION == "blocks-v1"
    blend = Blend([BlendPhase(0, (0.5, 0.3, 0.2)), BlendPhase(12_345, (0.2, 0.0, 0.8))], seed=1234)
    sources, turns = blend.locate(np.arange(12_339, 12_351))
    assert sources.tolist() == [1, 1, 0, 0, 0, 0, 2, 2, 2, 2, 0, 2]
    assert turns.tolist() == [3701, 3702, 6164, 6165, 6166, 6167, 2474, 2475, 2476, 2477, 6168, 2478]
    far, _ = blend.locate(np.arange(8) + 2**40)
    assert far.tolist() == [2, 2, 2, 0, 2, 2, 2, 2]


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 5), st.integers(0, 2**32))
def test_sources_are_walked_through_without_gap_or_repetition(data: st.DataObject, sources: int, seed: int):
    """Over all stages: the turns of a source are 0, 1, 2, ... in the order of positions, from wherever one starts."""
    weights = st.tuples(*[st.floats(0.01, 1)] * sources)
    firsts = sorted(data.draw(st.sets(st.integers(1, 5000), max_size=3)))
    blend = Blend([BlendPhase(first, data.draw(weights)) for first in (0, *firsts)], seed)
    chosen, turns = blend.locate(np.arange(7000))
    for source in range(sources):
        assert np.array_equal(turns[chosen == source], np.arange((chosen == source).sum()))
    start = data.draw(st.integers(0, 6999))
    some = np.arange(start, 7000)
    assert all(np.array_equal(x, y[start:]) for x, y in zip(blend.locate(some), (chosen, turns), strict=True))
    assert np.array_equal(blend.taken(start), np.bincount(chosen[:start], minlength=sources))


def test_samples_beyond_32_bits_are_placed():
    """Fault sample-order-beyond-32-bits."""
    blend = Blend([BlendPhase(0, (0.7, 0.3)), BlendPhase(2**33 + 7, (0.1, 0.9))], seed=1)
    sources, turns = blend.locate(np.arange(3000) + 2**40)
    for source, share in ((0, 0.1), (1, 0.9)):
        before = (0.7, 0.3)[source] * (2**33 + 7) + share * (2**40 - 2**33 - 7)
        mine = turns[sources == source]
        assert mine[0] == pytest.approx(before, abs=1000)
        assert np.array_equal(mine, np.arange(mine[0], mine[0] + len(mine)))


class Numbers:
    """A source with [i] as its sample i."""

    name, shuffled = "numbers", True

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids[:, None]

    def weights(self, ids: NDArray[np.int64]) -> None:
        return None

    def fingerprints(self) -> dict[str, str]:
        return {}


def test_each_sample_is_read_once_an_epoch_of_its_source_and_epochs_are_told():
    """Fault samples-independent-of-layout. 300 samples of weight 0.7 beside 2,000 of weight 0.3; the second stage makes
    it 0.1."""
    sources = [Numbers(300), Numbers(2000)]
    mixture = Mixture(sources, [BlendPhase(0, (0.7, 0.3)), BlendPhase(1500, (0.9, 0.1))], seed=5)
    positions = np.arange(4000)
    ids, chosen = mixture.read(positions)[:, 0], mixture.blend.locate(positions)[0]
    orders = []
    for epoch in range(10):
        orders.append(ids[chosen == 0][300 * epoch : 300 * (epoch + 1)])
        assert np.array_equal(np.sort(orders[-1]), np.arange(300))
    assert not np.array_equal(orders[0], orders[1])
    assert len(np.unique(ids[chosen == 1])) == (chosen == 1).sum()
    said = [(p, line) for p in range(0, 4000, 8) for line in mixture.started_over(p, p + 8)]
    seconds = np.flatnonzero(chosen == 0)[300::300]
    assert [p for p, _ in said] == (seconds // 8 * 8).tolist()
    assert said[0][1] == "data: numbers starts over: epoch 2 of its 300 samples"


def config(train: tuple[str, ...], stages: tuple[str, ...] = (), **fields: int) -> Config:
    return Config(data=DataConfig(train=train, stages=stages), train=TrainConfig(**fields))


def test_weights_and_token_budgets_become_mixes():
    run = {"steps": 10, "global_batch_size": 8, "seq_length": 100}
    assert blend_stages(config(("a",))) == [(0, (1.0,))]
    assert blend_stages(config(("7:a", "3:b"), ("500:1,0",))) == [(0, (7.0, 3.0)), (500, (1.0, 0.0))]
    assert blend_stages(config(("2e3tokens:a", "b:c"), **run)) == [(0, (2000.0, 6000.0))]
    validate(config(("2e3tokens:a", "6000tokens:b"), **run), 1)


@pytest.mark.parametrize(
    ("train", "stages", "said"),
    [
        (("0.5:a", "nan:b"), (), ["data.train=nan:b: the weight must be a finite number of at least 0"]),
        (("-1:a", "inf:b"), (), ["data.train=-1:a: the weight", "data.train=inf:b: the weight"]),
        (("0.5:a", "0.5:a"), (), ["data.train=a: named twice"]),
        (("0.5:",), (), ["data.train=0.5:: names no source"]),
        (
            ("0:a", "0:b"),
            (),
            ["data.train=0:a 0:b: the weights sum to 0", "data.train=a: of weight 0", "data.train=b: of"],
        ),
        (("1:a", "0:b"), (), ["data.train=b: of weight 0 in the whole run"]),
        (("1:a", "0:b"), ("5:1,1",), []),
        (("a", "b"), (), ["data.train=a b: a blend needs a weight for each source"]),
        (("1:a", "2tokens:b"), (), ["weights and tokens; use one of the two"]),
        (("9tokens:a", "b", "c"), (), ["2 entries without tokens"]),
        (("1e9tokens:a", "b"), (), ["1,000,000,000 tokens, the run has 102,400; give less"]),
        (("9tokens:a", "3tokens:b"), (), ["12 tokens, the run has 102,400"]),
        (("9tokens:a", "b"), ("5:1,1",), ["stages are weights"]),
        (("1:a", "1:b"), ("5:1",), ["data.stages=5:1: 1 weight for the 2 sources"]),
        (
            ("1:a", "1:b"),
            ("x:1,1", "5:0,0"),
            ["data.stages=x:1,1: must be SAMPLE", "data.stages=5:0,0: the weights sum to 0"],
        ),
        (("1:a", "1:b"), ("5:nan,1",), ["data.stages=5:nan,1: weights must be finite"]),
        (("1:a", "1e-7:b"), ("5:1,1e-7",), ["data.train=1:a 1e-7:b: a weight below", "data.stages=5:1,1e-7: a weight"]),
        (("1:a", "1:b"), ("9:1,2", "9:2,1"), ["data.stages=9:2,1: must be SAMPLE:W,W,... with a sample above 9"]),
    ],
)
def test_blends_that_cannot_be_are_refused_entry_by_entry(
    train: tuple[str, ...], stages: tuple[str, ...], said: list[str]
):
    """Fault bad-blends."""
    lines = []
    try:
        validate(config(train, stages), 1)
    except ConfigError as error:
        lines = str(error).splitlines()
    assert len(lines) == len(said), lines
    for line, text in zip(lines, said, strict=True):
        assert text in line
