"""What is done with .bin/.idx pairs as a whole: put together, shuffled, split, described and verified.

`PREFIX.json` beside a pair (its sidecar) says what made it: tokenizer, end-of-document id, sources, counts, and hashes
of the pair itself. Training does not need it.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapar.data.indexed import IndexedDataset, IndexedWriter, merge
from megapar.data.order import permute
from megapar.errors import ConfigError, DataError
from megapar.files import write_json

_BLOCK = 1 << 20
_GATHERED = 1 << 10  # documents fetched at a time
_HASHES = 1 << 24  # compared at a time when duplicates are looked for: 400 MB
PARTS = ("train", "validation", "test")


def join(
    parts: Sequence[Path], output: Path, dtype: np.dtype, *, shuffle: int | None = None, deduplicate: bool = False
) -> tuple[int, int]:
    """Write the documents of `parts` one after the other, or shuffled; returns how many, and how many tokens.

    `deduplicate` leaves out each document whose hash an earlier one has; PART.hash holds 16 bytes a document. The order
    that `shuffle` names is a keyed permutation of those that stay; documents are then fetched one by one.
    """
    with IndexedWriter(output, dtype) as writer:
        if shuffle is None and not deduplicate:
            for part in parts:
                writer.extend(IndexedDataset(part))
        else:
            datasets = [IndexedDataset(part) for part in parts]
            kept = np.arange(sum(map(len, datasets)))
            if deduplicate:
                kept = first_occurrences([Path(f"{part}.hash") for part in parts])
            for documents in _gather(datasets, _order(kept, shuffle)):
                writer.add_documents(np.concatenate(documents), [len(tokens) for tokens in documents])
    dataset = IndexedDataset(output)
    return len(dataset), len(dataset.tokens)


def _order(kept: NDArray[np.int64], shuffle: int | None) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(kept), _GATHERED):
        block = np.arange(first, min(first + _GATHERED, len(kept)))
        yield kept[block if shuffle is None else permute(block, len(kept), (shuffle, 0, 1))]


def _gather(
    datasets: Sequence[IndexedDataset], order: Iterator[NDArray[np.int64]]
) -> Iterator[list[NDArray[np.integer]]]:
    starts = np.cumsum([0, *map(len, datasets)])
    for block in order:
        which = np.searchsorted(starts, block, "right") - 1
        yield [datasets[part].document(at) for part, at in zip(which, block - starts[which], strict=True)]


def first_occurrences(paths: Sequence[Path]) -> NDArray[np.int64]:
    """Numbers of the hashes, two 64-bit words each, that none before them in `paths` equals.

    In several rounds over the files if there are many, each for a share of all values, so that memory stays bounded.
    """
    total = sum(path.stat().st_size for path in paths) // 16
    rounds = np.uint64(total // _HASHES + 1)
    stays = np.ones(total, bool)
    for number in range(int(rounds)):
        first = 0
        ids = []
        values = []
        for path in paths:
            words = np.fromfile(path, "<u8").reshape(-1, 2)
            mine = np.flatnonzero(words[:, 0] % rounds == number)
            ids.append(first + mine)
            values.append(words[mine])
            first += len(words)
        index = np.concatenate(ids)
        words = np.concatenate(values)
        by_value = np.lexsort((words[:, 1], words[:, 0]))  # stable: equal ones stay in their order
        again = (words[by_value[1:]] == words[by_value[:-1]]).all(axis=1)
        stays[index[by_value[1:][again]]] = False
    return np.flatnonzero(stays)


def sidecar_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, facts: dict[str, Any]) -> None:
    """Write `facts` and the hashes of the pair."""
    hashes = {name: sha256(Path(f"{prefix}.{name}")) for name in ("bin", "idx")}
    write_json(sidecar_path(prefix), facts | {"sha256": hashes})


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """None if there is none. Raises DataError if it is not one of `write_sidecar`."""
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: {error}") from error
    if not isinstance(facts, dict):
        raise DataError(f"{path}: not the description of a .bin/.idx pair: no JSON object")
    missing = {"documents", "tokens", "tokenizer", "append_eod", "sources", "sha256"} - set(facts)
    if missing:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: no {', '.join(sorted(missing))}")
    tokenizer = facts["tokenizer"]
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("sha256"), str) or "spec" not in tokenizer:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: tokenizer has no spec and sha256")
    return facts


def merge_prepared(prefixes: Sequence[Path], output: Path) -> IndexedDataset:
    """Concatenate pairs, in the order given, and their sidecars if all have one.

    Raises DataError for pairs of different tokenizers, or if only some end their documents.
    """
    known = [facts for prefix in prefixes if (facts := read_sidecar(prefix))]
    if len(known) < len(prefixes):
        known = []
    for prefix, facts in zip(prefixes, known, strict=False):
        for name in ("tokenizer", "append_eod"):
            if _essence(facts[name]) != _essence(known[0][name]):
                raise DataError(
                    f"{prefix} was made with {name} {facts[name]}, {prefixes[0]} with {known[0][name]}: "
                    "merge files of one tokenizer"
                )
    sidecar_path(output).unlink(missing_ok=True)
    merge(prefixes, output)
    dataset = IndexedDataset(output)
    if known:
        facts = {"documents": len(dataset), "tokens": len(dataset.tokens), "merged": list(map(str, prefixes))}
        same = {name: known[0][name] for name in ("tokenizer", "append_eod")}
        write_sidecar(output, facts | same | {"sources": [source for each in known for source in each["sources"]]})
    return dataset


def _essence(value: Any) -> Any:
    """A tokenizer may have stood elsewhere when other pairs were made."""
    return {**value, "spec": ""} if isinstance(value, dict) else value


def split(prefix: Path, output: Path, fractions: Sequence[float]) -> dict[str, IndexedDataset]:
    """Cut a pair by documents, in their order, into OUTPUT_train, OUTPUT_validation and, for a third, OUTPUT_test.

    Shares are those of `fractions`, boundaries rounded to the nearest document, as Megatron-LM does. Raises ConfigError
    for other fractions and DataError if a part would have no document.
    """
    if not 2 <= len(fractions) <= 3 or not all(0 < share < math.inf for share in fractions):
        raise ConfigError(f"--fractions {' '.join(map(str, fractions))}: give two or three positive numbers")
    dataset = IndexedDataset(prefix)
    facts = read_sidecar(prefix)
    edges = [round(float(edge)) for edge in np.cumsum([0.0, *fractions]) / math.fsum(fractions) * len(dataset)]
    made = {}
    for name, first, last in zip(PARTS, edges, edges[1:], strict=False):
        if first == last:
            raise DataError(f"{prefix}: {len(dataset)} documents leave none for {name}; give it a larger fraction")
        part = Path(f"{output}_{name}")
        sidecar_path(part).unlink(missing_ok=True)
        with IndexedWriter(part, dataset.dtype) as writer:
            writer.extend(dataset, first, last)
        made[name] = IndexedDataset(part)
        if facts:
            same = {name: facts[name] for name in ("tokenizer", "append_eod", "sources")}
            counts = {"documents": last - first, "tokens": len(made[name].tokens)}
            write_sidecar(part, counts | {"part": f"documents {first} to {last - 1} of {prefix}"} | same)
    return made


def verify(prefix: Path, *, full: bool = False, vocab_size: int | None = None) -> IndexedDataset:
    """Open a pair, which checks sizes, pointers and boundaries, and compare it with its sidecar.

    `full` reads all of it too: hashes, ids against the vocabulary (of the sidecar, unless given), ends of documents.
    Raises DataError, naming file, document and offset.
    """
    dataset = IndexedDataset(prefix)
    facts = read_sidecar(prefix)
    if facts:
        for name, found in (("documents", len(dataset)), ("tokens", len(dataset.tokens))):
            if facts[name] != found:
                raise DataError(f"{prefix}: {found} {name}, but {sidecar_path(prefix)} says {facts[name]}: not a pair")
        vocab_size = vocab_size or facts["tokenizer"]["vocab_size"]
    if not full:
        return dataset
    for name, expected in (facts["sha256"] if facts else {}).items():
        if (digest := sha256(Path(f"{prefix}.{name}"))) != expected:
            raise DataError(
                f"{prefix}.{name}: SHA-256 {digest[:16]}..., but {sidecar_path(prefix)} says {expected[:16]}...: the "
                "file was changed or damaged"
            )
    if vocab_size:
        _verify_ids(dataset, vocab_size)
    if facts and facts["append_eod"]:
        _verify_ends(dataset, facts["tokenizer"]["eod"])
    return dataset


def _verify_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    for first in range(0, len(dataset.tokens), _BLOCK):
        block = dataset.tokens[first : first + _BLOCK]
        if block.min() < 0 or block.max() >= vocab_size:
            at = int(((block < 0) | (block >= vocab_size)).argmax())
            document, offset = dataset.locate(first + at)
            raise DataError(
                f"{dataset.bin_path}: document {document}, offset {offset}: token id {block[at]} is outside the "
                f"vocabulary of {vocab_size}"
            )


def _verify_ends(dataset: IndexedDataset, eod: int) -> None:
    for first in range(0, len(dataset), _BLOCK):
        stops = dataset.document_indices[first + 1 : first + 1 + _BLOCK] - 1
        last_tokens = dataset.tokens[dataset.pointers[stops] // dataset.dtype.itemsize + dataset.lengths[stops] - 1]
        wrong = np.flatnonzero(last_tokens != eod)
        if wrong.size:
            raise DataError(
                f"{dataset.bin_path}: document {first + wrong[0]} ends with {last_tokens[wrong[0]]}, not with the "
                f"end-of-document id {eod}"
            )


def sha256(path: Path, stop: threading.Event | None = None) -> str:
    """Hash of a file; worthless once `stop` is set, which ends the reading."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while (block := file.read(_BLOCK)) and not (stop and stop.is_set()):
            digest.update(block)
    return digest.hexdigest()
