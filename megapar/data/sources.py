"""Where samples come from: .bin/.idx pairs, Hugging Face datasets, or a synthetic language."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megapar.data.indexed import IndexedDataset
from megapar.data.order import mix64, permute
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import ConfigError, DataError

_SAMPLES = 64  # of a file, for its hash
_SAMPLE_BYTES = 4096


class Dataset(Protocol):
    """Samples of seq_length + 1 tokens: inputs and, one to the right, targets."""

    name: str
    shuffled: bool  # False: must be read in ascending order, as a stream is

    def __len__(self) -> int: ...

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [len(ids), seq_length + 1] of the samples `ids`, whoever asks and however often."""
        ...

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        """Where documents begin within each of `samples`, which are the tokens of `ids`: 0 first."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """A hash of the content of each file, which all ranks must agree on."""
        ...


class ChunkDataset:
    """Fixed-length pieces of a .bin/.idx pair: sample i is tokens [i*S, i*S + S] of the file, documents in a row.

    Neighbors share one token, the last target of one and first input of the next. `part` is the range of documents
    that is read, as fractions of their number. Raises DataError if the files are damaged or hold no whole sample and,
    while reading, for a token outside `vocab_size`.
    """

    shuffled = True

    def __init__(self, prefix: str | Path, seq_length: int, vocab_size: int, part: tuple[float, float] = (0.0, 1.0)):
        self.name = str(prefix)
        self.file = IndexedDataset(prefix)
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        first, last = (round(fraction * len(self.file)) for fraction in part)  # Megatron rounds its splits so
        self.first_token = self.file.document_start(first)
        tokens = self.file.document_start(last) - self.first_token
        self.num_samples = (tokens - 1) // seq_length
        if self.num_samples < 1:
            where = "" if part == (0.0, 1.0) else f" in documents {first} to {last} (data.split)"
            raise DataError(
                f"{self.file.bin_path} holds {tokens} tokens{where}, a sample of train.seq_length={seq_length} "
                f"needs {seq_length + 1}: add text or shorten the sequence"
            )

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = self.first_token + ids * self.seq_length
        samples = self.file.read_pieces(starts, self.seq_length + 1).astype(np.int64)
        if samples.min() < 0 or samples.max() >= self.vocab_size:
            row, column = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0]
            document, offset = self.file.locate(int(starts[row] + column))
            raise DataError(
                f"{self.file.bin_path}: document {document}, offset {offset}: token id {samples[row, column]} is "
                f"outside the vocabulary of {self.vocab_size}: set data.tokenizer to the one that made this file"
            )
        return samples

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        firsts = (self.first_token + ids * self.seq_length).tolist()
        inner = (self.file.starts_between(first, first + self.seq_length + 1) for first in firsts)
        return [[0, *(start - first for start in found)] for first, found in zip(firsts, inner, strict=True)]

    def fingerprints(self) -> Mapping[str, str]:
        return self.file.fingerprints()


class SyntheticDataset:
    """Endless exercise without a file: tokens walk around one fixed cycle of ids, and a tenth of them jump.

    What follows a token is thus learnable: the best loss is about 0.73 nats with 64 ids in the cycle, against
    log(vocab_size) at the start. The cycle depends on `vocab_size` alone, a sample on (seed, id): train and validation
    sets of different seeds are different walks of one language.
    """

    name = "synthetic"
    shuffled = True
    jump_probability = 0.1

    def __init__(self, seq_length: int, vocab_size: int, seed: int, num_samples: int = 1 << 20):
        self.seq_length = seq_length
        self.seed = seed
        self.num_samples = num_samples
        length = min(vocab_size, 64)
        # Spread over the whole vocabulary, so that every tensor-parallel shard of it meets targets.
        self.cycle = permute(np.arange(length), length, key=(0,)) * vocab_size // length

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = np.arange(self.seq_length + 1)
        keys = mix64(mix64(np.array([self.seed], np.uint64)) + ids.astype(np.uint64))
        bits = mix64(keys[:, None] + columns.astype(np.uint64))
        jumps = bits < np.uint64(self.jump_probability * 2**64)
        last_jump = np.maximum.accumulate(np.where(jumps, columns, 0), axis=1)
        landed = np.take_along_axis(mix64(bits), last_jump, axis=1) % np.uint64(len(self.cycle))
        return self.cycle[(landed.astype(np.int64) + columns - last_jump) % len(self.cycle)]

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        return [[0] for _ in ids]

    def fingerprints(self) -> Mapping[str, str]:
        return {}


class StreamDataset:
    """A Hugging Face `datasets` stream, tokenized while it is read, one document after the other, over and over.

    Sample i is the i-th piece of the stream, in the stream's order: shuffle the files. Every rank reads all of the
    stream, and one that starts in the middle, as a resumed run does, tokenizes what lies before: for trying out data,
    and for small corpora. tools/preprocess_data.py is for the others.
    """

    shuffled = False

    def __init__(self, spec: str, seq_length: int, vocab_size: int, tokenizer: Tokenizer):
        self.name = spec
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        if tokenizer.vocab_size > vocab_size:
            raise DataError(f"{spec}: data.tokenizer has {tokenizer.vocab_size} ids, the vocabulary {vocab_size}")
        self._rows = hugging_face_rows(spec)
        self._pieces = self._from_the_start()
        self._next = 0

    def __len__(self) -> int:
        return 1 << 62  # nobody knows how long a stream is; it starts over by itself

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = []
        for i in ids.tolist():
            if i < self._next:
                self._pieces = self._from_the_start()
                self._next = 0
            samples.append(next(islice(self._pieces, i - self._next, None)))
            self._next = i + 1
        return np.array(samples, np.int64)

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        return [[0, *(np.flatnonzero(sample[:-1] == self.tokenizer.eod) + 1).tolist()] for sample in samples]

    def fingerprints(self) -> Mapping[str, str]:
        return stream_fingerprints(self.name)

    def _from_the_start(self) -> Iterator[list[int]]:
        tokens: list[int] = []
        while True:
            pieces = 0
            for number, row in enumerate(self._rows):
                if not isinstance(text := row.get("text"), str):
                    raise DataError(f"{self.name}: row {number} has no text, but {', '.join(row)}")
                tokens += [*self.tokenizer.encode(text).tolist(), self.tokenizer.eod]
                start = 0
                while len(tokens) - start > self.seq_length:
                    yield tokens[start : start + self.seq_length + 1]
                    start = start + self.seq_length
                    pieces = pieces + 1
                del tokens[:start]
            if not pieces:
                raise DataError(f"{self.name}: its text makes no sample of train.seq_length={self.seq_length}")


def stream_fingerprints(spec: str) -> dict[str, str]:
    """A hash of each local file of `hf:KIND:FILES`: its size and evenly spaced samples, so that it costs the same for
    every size. Empty for what is not local, such as a dataset on the Hub."""
    _, _, files = spec.removeprefix("hf:").partition(":")
    found = {}
    for path in sorted(glob(files, recursive=True)) if files else ():
        if os.path.isfile(path):
            found[path] = _file_hash(path)
    return found


def _file_hash(path: str) -> str:
    size = os.path.getsize(path)
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        for place in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * place // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hugging_face_rows(spec: str) -> Iterable[dict[str, Any]]:
    """The rows of `hf:KIND:FILES`, local files of a kind that `datasets` reads (json, text, parquet), or of `hf:NAME`,
    the train split of a dataset on the Hub or in a folder."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data: {spec} needs Hugging Face's library: pip install datasets") from None
    name, _, files = spec.removeprefix("hf:").partition(":")
    try:
        return datasets.load_dataset(name, data_files=files or None, split="train", streaming=True)
    except Exception as error:  # whatever the library raises for what it cannot find or read
        raise DataError(
            f"{spec}: datasets cannot open it ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def open_dataset(
    source: str, *, seq_length: int, vocab_size: int, seed: int, tokenizer: str, part: tuple[float, float] = (0.0, 1.0)
) -> Dataset:
    """What an entry of `data.train` or `data.validation` names: a .bin/.idx prefix, `hf:...`, or `synthetic`, which
    alone uses `seed`."""
    if source == "synthetic":
        return SyntheticDataset(seq_length, vocab_size, seed)
    if source.startswith("hf:"):
        return StreamDataset(source, seq_length, vocab_size, load_tokenizer(tokenizer))
    return ChunkDataset(source, seq_length, vocab_size, part)
