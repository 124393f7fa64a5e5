"""The .bin/.idx pair: Megatron's bytes, and a refusal of everything not whole."""

import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.base.errors import DataError, StorageError
from megapar.data.index_format import sequence_pointers
from megapar.data.indexed import IndexedDataset, IndexedWriter, merge, token_dtype

LENGTHS = [5, 3, 7, 1, 9, 4, 6, 8, 2, 10]
DOCUMENTS = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(LENGTHS)]


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def megatron_bytes(documents: list[list[int]], boundaries: list[int]) -> tuple[bytes, bytes]:
    """A pair made by hand from the published layout, uint16."""
    lengths = [len(d) for d in documents]
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    tokens = [token for d in documents for token in d]
    return struct.pack(f"<{len(tokens)}H", *tokens), index


def damage(path: Path, offset: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write(tmp_path / "x", DOCUMENTS)


def test_the_bytes_are_megatrons(pair: Path):
    expected_bin, expected_idx = megatron_bytes(DOCUMENTS, list(range(11)))
    assert Path(f"{pair}.bin").read_bytes() == expected_bin
    index = Path(f"{pair}.idx").read_bytes()
    assert index == expected_idx
    assert len(index) == 242
    assert index[:34].hex() == "4d4d494449445800000100000000000000080a000000000000000b00000000000000"
    assert IndexedDataset(pair).pointers[:].tolist() == [0, 10, 16, 30, 32, 50, 58, 70, 86, 90]


def test_what_was_written_is_read(pair: Path):
    dataset = IndexedDataset(pair)
    assert len(dataset) == len(DOCUMENTS)
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.tokens[:].tolist() == [token for d in DOCUMENTS for token in d]


def test_documents_of_several_sequences_are_read_and_located(tmp_path: Path):
    """Megatron's --split-sentences: one document of three sequences (the second empty), then one of two."""
    bin_bytes, idx_bytes = megatron_bytes([[1, 2, 3], [], [4], [5, 6], [7]], [0, 3, 5])
    (tmp_path / "m.bin").write_bytes(bin_bytes)
    (tmp_path / "m.idx").write_bytes(idx_bytes)
    dataset = IndexedDataset(tmp_path / "m")
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3, 4], [5, 6, 7]]
    assert [dataset.locate(token) for token in range(7)] == [*((0, i) for i in range(4)), *((1, i) for i in range(3))]


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=300), st.data())
def test_documents_are_found_as_a_walk_finds_them(lengths_of_documents: list[list[int]], data: st.DataObject):
    """Documents of several sequences, some empty, and of none; more of them than are looked up at a time."""
    lengths = [length for lengths in lengths_of_documents for length in lengths]
    boundaries = np.cumsum([0, *map(len, lengths_of_documents)]).tolist()
    bin_bytes, idx_bytes = megatron_bytes([[7] * length for length in lengths], boundaries)
    starts = np.cumsum([0, *map(sum, lengths_of_documents)]).tolist()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pair.bin").write_bytes(bin_bytes)
        Path(folder, "pair.idx").write_bytes(idx_bytes)
        dataset = IndexedDataset(f"{folder}/pair")
        documents = range(len(lengths_of_documents) + 1)
        assert [dataset.document_start(number) for number in documents] == starts
        first, last = sorted((data.draw(st.sampled_from(documents)), data.draw(st.sampled_from(documents))))
        assert dataset.document_starts(first, last).tolist() == starts[first : last + 1]
        if starts[-1]:
            token = data.draw(st.integers(0, starts[-1] - 1))
            (document,) = [i for i in documents[:-1] if starts[i] <= token < starts[i + 1]]
            assert dataset.locate(token) == (document, token - starts[document])
            stop = data.draw(st.integers(token + 1, starts[-1]))
            assert dataset.starts_between(token, stop) == sorted({start for start in starts if token < start < stop})


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(257, "<u2"), (65_499, "<u2"), (65_500, "<i4"), (65_535, "<i4"), (65_536, "<i4"), (65_537, "<i4")],
)
def test_the_largest_id_of_a_vocabulary_survives(tmp_path: Path, vocab_size: int, dtype: str):
    """Fault data-beyond-32-bits. 2 bytes below 65,500 ids, as Megatron decides, else 4."""
    assert token_dtype(vocab_size) == np.dtype(dtype)
    prefix = write(tmp_path / "v", [[0, vocab_size - 1]], dtype)
    assert IndexedDataset(prefix).document(0).tolist() == [0, vocab_size - 1]


def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path):
    for bad in (65_536, -1):
        with pytest.raises(DataError, match=f"token id {bad} does not fit"):
            write(tmp_path / "v", [[1, 2], [3, bad]])
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_keeps_the_old_pair(pair: Path):
    before = Path(f"{pair}.bin").read_bytes()
    with pytest.raises(DataError):
        write(pair, [[1], [-1]])
    assert Path(f"{pair}.bin").read_bytes() == before
    assert len(IndexedDataset(pair)) == 10
    assert len(list(pair.parent.iterdir())) == 2


def test_a_disk_that_takes_no_bytes_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        write(tmp_path / "file" / "x", [[1]])


def test_merging_is_the_same_as_writing_at_once(tmp_path: Path, pair: Path):
    shards = [write(tmp_path / f"s{i}", part) for i, part in enumerate([DOCUMENTS[:4], [], DOCUMENTS[4:]])]
    merge(shards, tmp_path / "merged")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == Path(f"{pair}.{suffix}").read_bytes()


def test_merging_shifts_the_boundaries_of_split_documents(tmp_path: Path):
    bin_bytes, idx_bytes = megatron_bytes([[1], [2], [3]], [0, 2, 3])
    (tmp_path / "m.bin").write_bytes(bin_bytes)
    (tmp_path / "m.idx").write_bytes(idx_bytes)
    merge([tmp_path / "m", tmp_path / "m"], tmp_path / "merged")
    assert IndexedDataset(tmp_path / "merged").document_indices[:].tolist() == [0, 2, 3, 5, 6]


def test_merging_different_types_is_refused(tmp_path: Path, pair: Path):
    with pytest.raises(DataError, match="int32 tokens"):
        merge([pair, write(tmp_path / "wide", [[1]], "<i4")], tmp_path / "merged")


def test_pointers_pass_two_gib(tmp_path: Path):
    """Fault data-beyond-32-bits. Lengths are int32; their byte sum is not."""
    pointers = sequence_pointers(np.full(5, 2**31 - 1, np.int32), 4)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [i * 4 * (2**31 - 1) for i in range(5)]


def test_a_file_of_more_than_two_billion_tokens_is_read(tmp_path: Path):
    """Faults data-beyond-32-bits, sample-order-beyond-32-bits. A sparse file: three sequences of 2^30 tokens and one
    of 3."""
    lengths = np.array([2**30] * 3 + [3], "<i4")
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 5) + lengths.tobytes()
    index += np.array([i * 2**31 for i in range(4)], "<i8").tobytes() + np.arange(5, dtype="<i8").tobytes()
    (tmp_path / "big.idx").write_bytes(index)
    with (tmp_path / "big.bin").open("wb") as file:
        file.seek(3 * 2**31)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    dataset = IndexedDataset(tmp_path / "big")
    assert dataset.document(3).tolist() == [7, 8, 9]
    assert dataset.locate(3 * 2**30 + 1) == (3, 1)
    assert dataset.locate(3 * 2**30 - 1) == (2, 2**30 - 1)


def refused(prefix: Path, *parts: str) -> None:
    """Opening fails with every part in one line."""
    with pytest.raises(DataError, match=".*".join(map(re.escape, parts))) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path, pair: Path):
    refused(tmp_path / "none", "none.idx", "not a file: name the part")
    refused(Path(f"{pair}.bin"), "x.bin.idx", f"not a file: give {pair}, without the suffix")
    Path(f"{pair}.bin").unlink()
    refused(pair, "x.bin", "not a file")


def test_a_truncated_bin_is_refused(pair: Path):
    """Fault truncated-bin."""
    path = Path(f"{pair}.bin")
    path.write_bytes(path.read_bytes()[:-2])
    refused(pair, "x.bin has 108 bytes", "x.idx needs 110")


def test_a_longer_bin_is_refused(pair: Path):
    """Fault longer-bin."""
    path = Path(f"{pair}.bin")
    path.write_bytes(path.read_bytes() + b"\0\0")
    refused(pair, "x.bin has 112 bytes", "x.idx needs 110")


@pytest.mark.parametrize(("keep", "said"), [(0, "needs 34"), (33, "needs 34"), (34, "needs 242"), (241, "needs 242")])
def test_a_truncated_idx_is_refused(pair: Path, keep: int, said: str):
    """Fault damaged-idx."""
    path = Path(f"{pair}.idx")
    path.write_bytes(path.read_bytes()[:keep])
    refused(pair, f"x.idx has {keep} bytes", said)


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (0, b"XX", "offset 0: found b'XXIDIDX"),
        (9, b"\x02", "offset 9: index version 2, expected 1"),
        (17, b"\x63", "offset 17: dtype code 99"),
        (17, b"\x07", "offset 17: dtype code 7"),
        (18, b"\x0b", "offset 18: 11 sequences"),
        (25, b"\xff", "x.idx has 242 bytes"),
        (34, b"\x06", "offset 82: sequence 1"),
        (34, b"\xff\xff\xff\xff", "offset 74: sequence 0"),
        (34 + 40 + 72, b"\x5c", "offset 146: sequence 9 (length 10) points to byte 92, expected 90"),
        (34 + 120, b"\x01", "offset 154: documents must span sequences 0 to 10, and span 1 to 10"),
        (34 + 120 + 80, b"\x09", "and span 0 to 9: some programs write such an index when they merge"),
        (34 + 120 + 40, b"\x00", "offset 194: document 4 starts at sequence 4 and ends at 0"),
    ],
)
def test_a_damaged_idx_is_refused(pair: Path, offset: int, value: bytes, said: str):
    """Faults damaged-idx, mismatched-idx. The message names the byte."""
    damage(Path(f"{pair}.idx"), offset, value)
    refused(pair, said)


def test_the_idx_of_another_bin_is_refused(tmp_path: Path, pair: Path):
    """Fault mismatched-idx."""
    other = write(tmp_path / "other", DOCUMENTS[:-1])
    Path(f"{other}.idx").replace(f"{pair}.idx")
    refused(pair, "x.bin has 110 bytes", "needs 90")


def test_multimodal_files_are_refused(pair: Path):
    path = Path(f"{pair}.idx")
    path.write_bytes(path.read_bytes() + b"\0" * 10)
    refused(pair, "multimodal")
