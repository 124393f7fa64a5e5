"""The order of samples: frozen, bijective, and the same whatever the layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.data.order import ORDER_VERSION, micro_batch_positions, permute, sample_ids


def test_the_order_is_frozen():
    """A run's data order is a contract: change these values only together with the version's name. They hold on
    numpy 1.26 and 2.x."""
    assert ORDER_VERSION == "feistel-v1"
    assert permute(np.arange(10), 10, (1234, 0)).tolist() == [0, 1, 6, 9, 8, 4, 5, 2, 3, 7]
    assert permute(np.arange(5) + 10**6, 10**6 + 35, (1234, 3)).tolist() == [842096, 925046, 739762, 64412, 679516]
    assert permute(np.arange(4) * 2**31, 2**33 + 5, (0, 1)).tolist() == [6341996205, 8458992155, 5793735128, 6649669283]
    assert sample_ids(np.arange(3) + 2**40, 2**33 + 5, 5).tolist() == [7585200855, 1862549350, 2318027255]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 1000, 2**16 - 1, 2**16, 2**16 + 1, 99_999])
def test_every_index_is_hit_once(n: int):
    assert np.array_equal(np.sort(permute(np.arange(n), n, (7, 0))), np.arange(n))


def test_no_index_repeats_beyond_32_bits():
    """Fault sample-order-beyond-32-bits."""
    n = 2**33 + 5
    ids = permute(np.arange(n - 100_000, n), n, (7, 0))
    assert len(np.unique(ids)) == 100_000
    assert ids.min() >= 0
    assert 0.99 * n < ids.max() < n


def test_the_shuffle_has_no_visible_structure():
    """Place and id fall evenly over 16 x 16 cells (mean 225 for a true shuffle), and steps differ as often as there."""
    n = 200_000
    ids = permute(np.arange(n), n, (1, 0))
    cells = np.histogram2d(np.arange(n), ids, bins=16)[0]
    assert 150 < ((cells - n / 256) ** 2 / (n / 256)).sum() < 310
    shuffled = np.random.default_rng(0).permutation(n)
    assert len(np.unique(np.diff(ids))) == pytest.approx(len(np.unique(np.diff(shuffled))), rel=0.01)


def test_seeds_and_epochs_differ():
    orders = {tuple(permute(np.arange(50), 50, (seed, epoch))) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_a_position_has_its_id_however_it_is_asked_for():
    whole = sample_ids(np.arange(100), 7, 3)
    assert np.array_equal(whole.reshape(20, 5), sample_ids(np.arange(100).reshape(20, 5), 7, 3))
    assert [int(sample_ids(np.array([p]), 7, 3)[0]) for p in range(100)] == whole.tolist()


def test_micro_batches_are_megatrons_slices():
    """Rank i of micro-batch u takes the i-th mbs of the u-th dp * mbs positions."""
    assert micro_batch_positions(100, 12, 2, 1, 3).tolist() == [[102, 103], [108, 109]]


LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3))  # (dp, micro-batch size)


@settings(deadline=None, max_examples=50)
@given(st.lists(LAYOUTS, min_size=1, max_size=4), st.integers(80, 200), st.integers(0, 2**32))
def test_layout_changes_and_restarts_neither_repeat_nor_skip(layouts: list[tuple[int, int]], n: int, seed: int):
    """Faults samples-independent-of-layout, sample-order-across-layouts. Each restart takes another dp and micro-batch
    size; a step's ids stay those of one process."""
    batch, consumed, run = 72, 0, []
    for dp, micro_batch_size in layouts:
        for _ in range(3):
            ranks = [micro_batch_positions(consumed, batch, micro_batch_size, rank, dp) for rank in range(dp)]
            step = np.concatenate([sample_ids(positions, n, seed).ravel() for positions in ranks])
            alone = sample_ids(np.arange(consumed, consumed + batch), n, seed)
            assert sorted(step) == sorted(alone)
            run.append(alone)
            consumed += batch
    ids = np.concatenate(run)
    for epoch in range(consumed // n):
        assert np.array_equal(np.sort(ids[epoch * n : (epoch + 1) * n]), np.arange(n))
