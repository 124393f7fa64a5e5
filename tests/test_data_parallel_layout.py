"""Places in the flat buffer, as arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.data_parallel.buckets import ALIGNMENT, Bucket, BucketGroup, intersect, lay_out, merge

SIZES = [300, 1000, 64, 100, 10]


def test_one_bucket() -> None:
    starts, buckets = lay_out([BucketGroup(SIZES, 4)], bucket_elements=10**6)
    assert starts == [0, 320, 1344, 1408, 1536]
    assert buckets == [Bucket(0, 1792, 0, 5)]
    assert [buckets[0].shard(rank, 4) for rank in range(4)] == [(0, 448), (448, 896), (896, 1344), (1344, 1792)]


def test_a_bucket_is_closed_when_it_is_large_enough() -> None:
    starts, buckets = lay_out([BucketGroup(SIZES, 2)], bucket_elements=500)
    assert starts == [0, 320, 1408, 1472, 1600]
    assert buckets == [Bucket(0, 1408, 0, 2), Bucket(1408, 1664, 2, 5)]


def test_groups_share_no_bucket() -> None:
    starts, buckets = lay_out(
        [BucketGroup([10, 20], 3), BucketGroup([], 3), BucketGroup([30], 3)], bucket_elements=10**6
    )
    assert starts == [0, 64, 192]
    assert buckets == [Bucket(0, 192, 0, 2), Bucket(192, 384, 2, 3)]


def test_no_parameters() -> None:
    assert lay_out([BucketGroup([], 2), BucketGroup([], 2)], bucket_elements=10) == ([], [])


@given(
    groups=st.lists(st.lists(st.integers(1, 5000), max_size=8), min_size=1, max_size=3),
    bucket_elements=st.integers(0, 8000),
    shards=st.integers(1, 9),
)
def test_parameters_do_not_overlap_and_all_starts_are_aligned(
    groups: list[list[int]], bucket_elements: int, shards: int
) -> None:
    starts, buckets = lay_out([BucketGroup(counts, shards) for counts in groups], bucket_elements)
    sizes = [size for group in groups for size in group]
    assert [i for bucket in buckets for i in range(bucket.first_param, bucket.end_param)] == list(range(len(sizes)))
    end = 0
    for bucket in buckets:
        assert bucket.start == end
        for i in range(bucket.first_param, bucket.end_param):
            assert end <= starts[i]
            end = starts[i] + sizes[i]
        assert end <= bucket.stop < end + ALIGNMENT * (shards + 1)
        end = bucket.stop
        cuts = [bucket.shard(rank, shards) for rank in range(shards)]
        assert [cut[0] for cut in cuts] + [bucket.stop] == [bucket.start] + [cut[1] for cut in cuts]
        assert all(start % ALIGNMENT == 0 for start, _ in cuts)
    assert all(start % ALIGNMENT == 0 for start in starts)


@given(counts=st.lists(st.integers(1, 5000), min_size=1, max_size=12), shards=st.integers(1, 5))
def test_whole_parameters_lie_in_one_slice_each(counts: list[int], shards: int) -> None:
    starts, buckets = lay_out([BucketGroup([7], 3), BucketGroup(counts, shards, whole=True)], bucket_elements=6000)
    assert [i for bucket in buckets for i in range(bucket.first_param, bucket.end_param)] == list(
        range(len(counts) + 1)
    )
    end = 0
    for bucket in buckets[1:]:
        slices = [bucket.shard(rank, shards) for rank in range(shards)]
        longest = max(counts[bucket.first_param - 1 : bucket.end_param - 1])
        total = sum(
            -(-count // ALIGNMENT) * ALIGNMENT for count in counts[bucket.first_param - 1 : bucket.end_param - 1]
        )
        assert bucket.stop - bucket.start <= shards * (total // shards + longest + 2 * ALIGNMENT)
        for i in range(bucket.first_param, bucket.end_param):
            start, stop = starts[i], starts[i] + counts[i - 1]
            assert end <= start
            assert start % ALIGNMENT == 0
            assert any(first <= start and stop <= last for first, last in slices)
            end = stop


range_lists = st.lists(st.integers(1, 6), max_size=12).map(
    lambda steps: [(sum(steps[: i + 1]), sum(steps[: i + 2])) for i in range(0, len(steps) - 1, 2)]
)


def elements(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@given(range_lists, range_lists)
def test_intersection_holds_the_common_elements(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert elements(intersect(left, right)) == sorted(set(elements(left)) & set(elements(right)))


@pytest.mark.parametrize(
    ("ranges", "merged"),
    [
        ([], []),
        ([(0, 2), (2, 5)], [(0, 5)]),
        ([(0, 2), (3, 5), (5, 6), (6, 9)], [(0, 2), (3, 9)]),
    ],
)
def test_adjacent_ranges_merge(ranges: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    assert merge(ranges) == merged
