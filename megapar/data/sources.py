"""Sources of samples: .bin/.idx pairs, Hugging Face datasets, and a synthetic language."""

import os
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError
from megapar.data.contents import content_hash
from megapar.data.indexed import IndexedDataset
from megapar.data.order import mix64, permute
from megapar.data.packs import PackDataset
from megapar.data.pairs import PairDataset
from megapar.data.prepared import CHAT, pair_fingerprints, read_sidecar
from megapar.data.tokenizer import Tokenizer, load_tokenizer

SampleKind = Literal["texts", "pairs", "referenced pairs"]
"""What a sample is: text, or two answers to compare, with or without log-probabilities by a reference model."""


class Dataset(Protocol):
    """Samples of seq_length + num_targets tokens: the inputs, and the tokens that follow the last of them.

    The `num_targets` tokens after an input are its targets.
    """

    name: str
    shuffled: bool  # False: must be read in ascending order, as a stream is
    # Samples of conversations say so by an attribute `holds_conversations`, and pairs have `references` (`pairs.py`).

    def __len__(self) -> int: ...

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens [len(ids), seq_length + num_targets] of the samples `ids`, always the same ones."""
        ...

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        """The positions of the starts of documents within each sample. The first is 0.

        `samples` are the tokens of `read(ids)`.
        """
        ...

    def weights(self, ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The weight of each token of the samples `ids` as a target, [len(ids), seq_length + num_targets].

        None: all are 1.
        """
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """A hash of the content of each file, by its path. All ranks must have the same."""
        ...


class ChunkDataset:
    """Fixed-length pieces of a .bin/.idx pair. Sample i is the S + n tokens from i*S on, for n targets of an input.

    Documents follow each other in a row. Neighboring samples share n tokens, which are the last targets of one and the
    first inputs of the next. `part` is the range of documents that is read, as fractions of their number.
    Raises DataError if the files are damaged or hold no whole sample. `read` raises it for a token outside
    `vocab_size`.
    """

    shuffled = True

    def __init__(
        self,
        prefix: str | Path,
        seq_length: int,
        vocab_size: int,
        part: tuple[float, float] = (0.0, 1.0),
        num_targets: int = 1,
    ):
        self.name = str(prefix)
        self.file = IndexedDataset(prefix)
        self.seq_length = seq_length
        self.sample_tokens = seq_length + num_targets
        self.vocab_size = vocab_size
        first, last = (round(fraction * len(self.file)) for fraction in part)  # as Megatron-LM rounds its splits
        self.first_token = self.file.document_start(first)
        tokens = self.file.document_start(last) - self.first_token
        self.num_samples = (tokens - num_targets) // seq_length
        if self.num_samples < 1:
            in_part = ""
            remedy = "add text or shorten the sequence"
            if part != (0.0, 1.0):
                in_part = f" in documents {first} to {last} of {len(self.file)}"
                remedy = "give data.split other shares, or name other files in data.validation"
            raise DataError(
                f"{self.file.bin_path} holds {tokens} tokens{in_part}, a sample of train.seq_length={seq_length} "
                f"needs {self.sample_tokens}: {remedy}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = self.first_token + ids * self.seq_length
        samples = self.file.read_pieces(starts, self.sample_tokens).astype(np.int64)
        if samples.min() < 0 or samples.max() >= self.vocab_size:
            row, column = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0]
            document, offset = self.file.locate(int(starts[row] + column))
            raise DataError(
                f"{self.file.bin_path}: document {document}, offset {offset}: token id {samples[row, column]} is "
                f"outside the vocabulary of {self.vocab_size}: set data.tokenizer to the one that made this file, or "
                "raise model.vocab_size"
            )
        return samples

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        # The index says where documents start. An end-of-document token would not: a file may lack it.
        starts_of_samples = []
        for first in (self.first_token + ids * self.seq_length).tolist():
            inner = self.file.starts_between(first, first + self.sample_tokens)
            starts_of_samples.append([0, *(start - first for start in inner)])
        return starts_of_samples

    def weights(self, ids: NDArray[np.int64]) -> None:
        return None

    def fingerprints(self) -> Mapping[str, str]:
        return pair_fingerprints(self.file, self.name)


class SyntheticDataset:
    """A synthetic language without a file. Tokens walk around one fixed cycle of ids, and a tenth of them jump.

    So a model can learn which token follows another. The best loss is about 0.73 nats with 64 ids in the cycle. The
    loss before training is log(vocab_size).
    The cycle depends on `vocab_size` alone, and a sample depends on (seed, id). So train and validation sets of
    different seeds are different walks of one language.
    """

    name = "synthetic"
    shuffled = True
    jump_probability = 0.1

    def __init__(self, seq_length: int, vocab_size: int, seed: int, num_samples: int = 1 << 20, num_targets: int = 1):
        self.sample_tokens = seq_length + num_targets
        self.seed = seed
        self.num_samples = num_samples
        length = min(vocab_size, 64)
        # The cycle is spread over the whole vocabulary, so that each tensor-parallel shard of it has targets.
        self.cycle = permute(np.arange(length), length, key=(0,)) * vocab_size // length

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = np.arange(self.sample_tokens)
        keys = mix64(mix64(np.array([self.seed], np.uint64)) + ids.astype(np.uint64))
        bits = mix64(keys[:, None] + columns.astype(np.uint64))
        jumps = bits < np.uint64(self.jump_probability * 2**64)
        # A token's id follows from the newest jump before it, so the walk needs no loop over positions.
        last_jump = np.maximum.accumulate(np.where(jumps, columns, 0), axis=1)
        landed = np.take_along_axis(mix64(bits), last_jump, axis=1) % np.uint64(len(self.cycle))
        return self.cycle[(landed.astype(np.int64) + columns - last_jump) % len(self.cycle)]

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        return [[0] for _ in ids]

    def weights(self, ids: NDArray[np.int64]) -> None:
        return None

    def fingerprints(self) -> Mapping[str, str]:
        return {}


class StreamDataset:
    """A Hugging Face `datasets` stream. It is tokenized while it is read, and starts over at its end.

    Sample i is the i-th piece of the stream. The order is the stream's, so shuffle the files.
    Every rank reads the whole stream. A reader that starts in the middle, as in a resumed run, tokenizes everything
    before. So this class is for trying out data and for small corpora. For larger ones use megapar preprocess.
    Raises DataError for an id outside the vocabulary.
    """

    shuffled = False

    def __init__(self, spec: str, seq_length: int, vocab_size: int, tokenizer: Tokenizer, num_targets: int = 1):
        self.name = spec
        self.seq_length = seq_length
        self.sample_tokens = seq_length + num_targets
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        if tokenizer.eod >= vocab_size:
            text = f"ends documents with id {tokenizer.eod}, outside the vocabulary of {vocab_size}"
            raise DataError(f"{spec}: data.tokenizer {text}: raise model.vocab_size")
        self._rows = hugging_face_rows(spec)
        self._pieces = self._from_the_start()
        self._next = 0

    def __len__(self) -> int:
        return 1 << 62  # the length of a stream is not known; it starts over by itself

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = []
        for i in ids.tolist():
            if i < self._next:  # a stream cannot go back
                self._pieces = self._from_the_start()
                self._next = 0
            samples.append(next(islice(self._pieces, i - self._next, None)))
            self._next = i + 1
        return np.array(samples, np.int64)

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        return [[0, *(np.flatnonzero(sample[:-1] == self.tokenizer.eod) + 1).tolist()] for sample in samples]

    def weights(self, ids: NDArray[np.int64]) -> None:
        return None

    def fingerprints(self) -> Mapping[str, str]:
        return stream_fingerprints(self.name)

    def _from_the_start(self) -> Iterator[list[int]]:
        """Yield the pieces of the stream from its first document on, without end."""
        tokens: list[int] = []
        while True:
            pieces = 0
            for number, row in enumerate(self._rows):
                text = row.get("text")
                if not isinstance(text, str):
                    raise DataError(f"{self.name}: row {number} has no text, but {', '.join(row)}")
                ids = self.tokenizer.encode(text)
                if len(ids) and ids.max() >= self.vocab_size:
                    where = f"row {number}: token id {ids.max()} is outside the vocabulary of {self.vocab_size}"
                    raise DataError(f"{self.name}: {where}: raise model.vocab_size")
                tokens += [*ids.tolist(), self.tokenizer.eod]
                start = 0
                while len(tokens) - start >= self.sample_tokens:
                    yield tokens[start : start + self.sample_tokens]
                    start += self.seq_length  # neighbors share tokens, as in ChunkDataset
                    pieces += 1
                del tokens[:start]
            if not pieces:  # the loop would never end
                raise DataError(f"{self.name}: its text makes no sample of train.seq_length={self.seq_length}")


def stream_fingerprints(spec: str) -> dict[str, str]:
    """A hash of each local file of `hf:KIND:FILES`, by its path.

    The result is empty for what is not local, such as a dataset on the Hub.
    """
    _, _, files = spec.removeprefix("hf:").partition(":")
    if not files:
        return {}
    return {path: content_hash(path) for path in sorted(glob(files, recursive=True)) if os.path.isfile(path)}


def hugging_face_rows(spec: str) -> Iterable[dict[str, Any]]:
    """The rows of a Hugging Face dataset as a stream.

    `hf:KIND:FILES` names local files of a kind that `datasets` reads (json, text, parquet). `hf:NAME` names the train
    split of a dataset on the Hub or in a folder.
    Raises ConfigError if `datasets` is not installed, DataError if it cannot open the dataset.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data: {spec} needs Hugging Face's library: pip install datasets") from None
    name, _, files = spec.removeprefix("hf:").partition(":")
    try:
        return datasets.load_dataset(name, data_files=files or None, split="train", streaming=True)
    except Exception as error:  # the library has no common class for what it cannot find or read
        raise DataError(
            f"{spec}: datasets cannot open it ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def open_dataset(
    source: str,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    tokenizer: str,
    part: tuple[float, float] = (0.0, 1.0),
    num_targets: int = 1,
    kind: SampleKind = "texts",
) -> Dataset:
    """Open the source that an entry of `data.train` or `data.validation` names.

    A source is a .bin/.idx prefix, of text or of conversations, `hf:...`, or `synthetic`. Only `synthetic` uses `seed`,
    only `hf:...` uses `tokenizer`, and only a prefix uses `part`. A sample has `num_targets` tokens more than
    `seq_length`. `kind` is what the objective is of. Raises DataError for a source of another kind.
    """
    sidecar = None if source.startswith(("synthetic", "hf:")) else read_sidecar(source)
    has_pairs = bool(sidecar and CHAT in sidecar and sidecar[CHAT].get("pairs"))
    if has_pairs != (kind != "texts"):
        if has_pairs:
            raise DataError(f"{source} has pairs of a chosen and a rejected answer; use train.objective dpo or another")
        raise DataError(f"{source} has no pairs of answers; megapar preprocess preferences writes them")
    if has_pairs:
        referenced = kind == "referenced pairs"
        return PairDataset(source, seq_length, vocab_size, part, num_targets, with_references=referenced)
    if source == "synthetic":
        return SyntheticDataset(seq_length, vocab_size, seed, num_targets=num_targets)
    if source.startswith("hf:"):
        return StreamDataset(source, seq_length, vocab_size, load_tokenizer(tokenizer), num_targets)
    made = PackDataset if sidecar and CHAT in sidecar else ChunkDataset
    return made(source, seq_length, vocab_size, part, num_targets)
