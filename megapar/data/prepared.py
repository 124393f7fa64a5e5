"""Operations on whole .bin/.idx pairs: join, shuffle, deduplicate, merge, split, describe and verify.

The sidecar of a pair is the file `PREFIX.json` beside it. It says what made the pair: tokenizer, end-of-document id,
sources and counts. It also holds hashes of the pair's two files. Training does not need it.
"""

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError, reason_of, storing
from megapar.config.messages import counted
from megapar.data.contents import content_hash
from megapar.data.file_array import DataFile, FileArray
from megapar.data.indexed import IndexedDataset, IndexedWriter, merge
from megapar.data.order import permute
from megapar.system.atomic_files import write_json
from megapar.system.regular_files import open_new, read_regular

_BLOCK = 1 << 20  # bytes hashed, tokens checked, or documents checked at a time; it bounds the memory
_GATHERED = 1 << 10  # documents fetched at a time
_HASHES = 1 << 24  # hashes compared at a time in a search for duplicates; they take 400 MB of memory
PARTS = ("train", "validation", "test")
CHAT = "chat"
"""The key of a sidecar that says how conversations became tokens."""
START = "start_token"
"""The key of a sidecar with the ids in front of each text. Sidecars of earlier versions lack it: there are none."""
PARSE = "special_tokens"
"""The key of a sidecar's tokenizer: whether special tokens in a text are read as their ids."""
TEXTS = "texts"
"""The key of a checkpoint's data section with the record of `record_of`."""


def join(
    parts: Sequence[Path], output: Path, dtype: np.dtype, *, shuffle: int | None = None, deduplicate: bool = False
) -> tuple[int, int]:
    """Write the documents of `parts` to the pair `output` and return the numbers of its documents and tokens.

    Documents keep their order, unless `shuffle` is given. It is the key of a permutation of the remaining documents.
    With `deduplicate`, a document is left out if an earlier one has the same hash. The file PART.hash holds 16 bytes
    for each document of a part.
    """
    with IndexedWriter(output, dtype) as writer:
        if shuffle is None and not deduplicate:
            # The order of the files is kept, so large blocks are copied. The other branch fetches document by document.
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
    """Yield the numbers of the documents in `kept`, in the order of writing, block by block."""
    for first in range(0, len(kept), _GATHERED):
        block = np.arange(first, min(first + _GATHERED, len(kept)))
        if shuffle is not None:
            block = permute(block, len(kept), (shuffle, 0, 1))
        yield kept[block]


def _gather(
    datasets: Sequence[IndexedDataset], order: Iterator[NDArray[np.int64]]
) -> Iterator[list[NDArray[np.integer]]]:
    """Yield the tokens of the documents in each block of `order`. Document numbers run through all `datasets`."""
    starts = np.cumsum([0, *map(len, datasets)])
    for block in order:
        part_of = np.searchsorted(starts, block, "right") - 1
        inside = block - starts[part_of]
        yield [datasets[part].document(at) for part, at in zip(part_of, inside, strict=True)]


def first_occurrences(paths: Sequence[Path]) -> NDArray[np.int64]:
    """The numbers of the hashes in the files `paths` without an earlier equal, in ascending order.

    A hash is two 64-bit words. Hashes are counted from 0 through all files.
    """
    # The files are read several times if they hold many hashes. Each round compares a share of all values, so that
    # memory stays bounded. Equal hashes have equal first words, so they meet in the same round.
    total = sum(path.stat().st_size for path in paths) // 16
    rounds = np.uint64(total // _HASHES + 1)
    stays = np.ones(total, bool)
    for number in range(int(rounds)):
        first = 0
        ids = []
        values = []
        for path in paths:
            words = np.fromfile(path, "<u8").reshape(-1, 2)
            in_this_round = np.flatnonzero(words[:, 0] % rounds == number)
            ids.append(first + in_this_round)
            values.append(words[in_this_round])
            first += len(words)
        index = np.concatenate(ids)
        words = np.concatenate(values)
        by_value = np.lexsort((words[:, 1], words[:, 0]))  # stable, so the first of equal hashes is the earliest
        again = (words[by_value[1:]] == words[by_value[:-1]]).all(axis=1)
        stays[index[by_value[1:][again]]] = False
    return np.flatnonzero(stays)


def sidecar_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def weights_path(prefix: str | Path) -> Path:
    """The file beside a pair of conversations: for each token a byte, 1 if it is trained as a target, else 0."""
    return Path(f"{prefix}.weights")


def write_sidecar(prefix: str | Path, description: dict[str, Any]) -> None:
    """Write the sidecar of the pair `prefix`: `description` and the SHA-256 of the pair's files.

    The pair must be complete, since its files are read here.
    """
    names = ("bin", "idx", "weights") if CHAT in description else ("bin", "idx")
    hashes = {name: sha256(Path(f"{prefix}.{name}")) for name in names}
    write_json(sidecar_path(prefix), description | {"sha256": hashes})


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """The sidecar of the pair `prefix`, or None if there is none.

    Raises DataError if the file was not written by `write_sidecar`.
    """
    path = sidecar_path(prefix)
    if not path.exists():
        return None
    try:
        sidecar = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: {reason_of(error)}") from error
    if not isinstance(sidecar, dict):
        raise DataError(f"{path}: not the description of a .bin/.idx pair: no JSON object")
    missing = {"documents", "tokens", "tokenizer", "append_eod", "sources", "sha256"} - set(sidecar)
    if missing:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: no {', '.join(sorted(missing))}")
    tokenizer = sidecar["tokenizer"]
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("sha256"), str) or "spec" not in tokenizer:
        raise DataError(f"{path}: not the description of a .bin/.idx pair: tokenizer has no spec and sha256")
    return sidecar


def record_of(sources: Iterable[str]) -> dict[str, Any]:
    """How the texts of .bin/.idx pairs became tokens, by the descriptions beside them; {} if none has one.

    `special_tokens` is text or parse, `start_token` has the ids in front of each text, and `chat` what the description
    says of conversations. Of several pairs the first with conversations counts, or else the first.
    """
    sidecars = [sidecar for source in sources if (sidecar := read_sidecar(source))]
    sidecars.sort(key=lambda sidecar: CHAT not in sidecar)  # stable
    if not sidecars:
        return {}
    first = sidecars[0]
    tokenizer = first["tokenizer"]
    if CHAT in first:
        parsed = str(tokenizer["spec"]).startswith("hf:") or tokenizer.get(PARSE) == "parse"
        return {PARSE: "parse" if parsed else "text", CHAT: first[CHAT]}
    return {PARSE: tokenizer.get(PARSE, "text"), START: first.get(START, [])}


def merge_prepared(prefixes: Sequence[Path], output: Path) -> IndexedDataset:
    """Concatenate the pairs `prefixes`, in the order given, into the pair `output` and return it.

    The output gets a sidecar if every input has one. Raises DataError if the sidecars name different tokenizers, or if
    only some of the pairs end their documents.
    """
    sidecars = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar:
            sidecars.append(sidecar)
    if len(sidecars) < len(prefixes):
        # Pairs of Megatron-LM have no sidecar. What is unknown of one pair is unknown of the whole.
        sidecars = []
    for prefix, sidecar in zip(prefixes, sidecars, strict=False):
        for name in ("tokenizer", "append_eod", START):
            here, there = (found.get(name, []) for found in (sidecar, sidecars[0]))
            if _without_location(here) != _without_location(there):
                raise DataError(
                    f"{prefix} was made with {name} {here}, {prefixes[0]} with {there}: merge files of one tokenizer"
                )
    chats = [sidecar.get(CHAT) for sidecar in sidecars]
    if any(_rules(chat) != _rules(chats[0]) for chat in chats):
        raise DataError(f"{' '.join(map(str, prefixes))}: merge conversations of one template and one choice of turns")
    # The old sidecar goes before the pair changes: a kill in between must not leave it beside another pair.
    sidecar_path(output).unlink(missing_ok=True)
    merge(prefixes, output)
    dataset = IndexedDataset(output)
    if sidecars:
        if chats[0]:
            weights = (read_weights(prefix, len(IndexedDataset(prefix).tokens)) for prefix in prefixes)
            write_weights(output, (block for of_pair in weights for block in of_pair.blocks(_BLOCK)))
        counts = {"documents": len(dataset), "tokens": len(dataset.tokens), "merged": list(map(str, prefixes))}
        same = {name: sidecars[0][name] for name in ("tokenizer", "append_eod", START, CHAT) if name in sidecars[0]}
        if chats[0]:
            same[CHAT] = _together([chat for chat in chats if chat])
        sources = [source for sidecar in sidecars for source in sidecar["sources"]]
        write_sidecar(output, counts | same | {"sources": sources})
    return dataset


def _together(chats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the sidecar of merged conversations says of them: counts are added up."""
    counts: dict[str, dict[str, int]] = {"left_out": {}, "passed_over": {}}
    for chat in chats:
        for name, of_all in counts.items():
            for key, count in chat.get(name, {}).items():
                of_all[key] = of_all.get(key, 0) + count
    clocks = {chat["clock"] for chat in chats if chat.get("clock")}
    return {
        **chats[0],
        **counts,
        "trained_tokens": sum(chat.get("trained_tokens", 0) for chat in chats),
        "end_tokens": sorted({token for chat in chats for token in chat.get("end_tokens", [])}),
        "clock": ", ".join(sorted(clocks)) or None,
    }


def _rules(chat: Any) -> Any:
    """What of a sidecar's entry decides the tokens of a conversation."""
    return {name: chat.get(name) for name in ("template_sha256", "turns", "pairs")} if isinstance(chat, dict) else None


def write_weights(prefix: str | Path, weights: Iterable[NDArray[np.uint8]]) -> None:
    """Write the weights of all tokens of a pair, block by block."""
    path = weights_path(prefix)
    partial = path.with_name(f".{path.name}.partial")
    with storing(path):
        with open_new(partial) as file:
            for block in weights:
                file.write(block.astype(np.uint8, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def read_weights(prefix: str | Path, tokens: int) -> FileArray:
    """The weights of the `tokens` tokens of a pair, uint8, read when they are used.

    Raises DataError if the file is missing, or has another number of bytes.
    """
    try:
        file = DataFile(weights_path(prefix))
    except DataError as error:
        raise DataError(f"{error}; {sidecar_path(prefix)} says that the pair has weights") from error
    if file.size != tokens:
        raise DataError(
            f"{file.path}: has {file.size:,} bytes, and the pair has {tokens:,} tokens: not of one preparation"
        )
    return FileArray(file, np.dtype(np.uint8))


def pair_fingerprints(pair: IndexedDataset, prefix: str | Path) -> dict[str, str]:
    """A hash of the contents of each file of a pair, by its path: the pair's, and those beside it if there are some."""
    found = pair.fingerprints()
    sidecar = read_sidecar(prefix)
    if sidecar:
        # It states the SHA-256 of the other files. So a pair that was made anew is found, wherever it differs.
        stated = json.dumps(sidecar["sha256"], sort_keys=True).encode()
        found[str(sidecar_path(prefix))] = hashlib.blake2b(stated, digest_size=8).hexdigest()
        if CHAT in sidecar:
            found[str(weights_path(prefix))] = content_hash(weights_path(prefix))
    return found


def _without_location(value: Any) -> Any:
    """A sidecar's value without the tokenizer's path: the same file may have stood elsewhere on another day."""
    if isinstance(value, dict):
        return {**value, "spec": ""}
    return value


def split(prefix: Path, output: Path, fractions: Sequence[float]) -> dict[str, IndexedDataset]:
    """Cut the pair `prefix` into OUTPUT_train, OUTPUT_validation and, if there are three fractions, OUTPUT_test.

    Returns the new pairs by the names train, validation and test. Documents keep their order. `fractions` need not sum
    to 1. Boundaries are rounded to the nearest document, as in Megatron-LM.
    Raises ConfigError unless there are two or three positive fractions, and DataError if a part would have no document.
    """
    if not 2 <= len(fractions) <= 3 or not all(0 < share < math.inf for share in fractions):
        raise ConfigError(f"--fractions {' '.join(map(str, fractions))}: give two or three positive numbers")
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    # The two members of a pair of answers stay together.
    together = 2 if sidecar and CHAT in sidecar and sidecar[CHAT].get("pairs") else 1
    shares = np.cumsum([0.0, *fractions]) / math.fsum(fractions)
    edges = [together * round(float(share) * len(dataset) / together) for share in shares]
    made = {}
    for name, first, last in zip(PARTS, edges, edges[1:], strict=False):
        if first == last:
            all_documents = counted(len(dataset), "document leaves", "documents leave")
            raise DataError(f"{prefix}: {all_documents} none for {name}; give it a larger fraction")
        part = Path(f"{output}_{name}")
        sidecar_path(part).unlink(missing_ok=True)
        with IndexedWriter(part, dataset.dtype) as writer:
            writer.extend(dataset, first, last)
        made[name] = IndexedDataset(part)
        if sidecar:
            kept = ("tokenizer", "append_eod", START, "sources", CHAT)
            same = {name: sidecar[name] for name in kept if name in sidecar}
            if CHAT in sidecar:
                starts = dataset.document_starts(first, last)
                weights = read_weights(prefix, len(dataset.tokens))[int(starts[0]) : int(starts[-1])]
                write_weights(part, [weights])
                # The first token of a document is no target.
                trained = int(weights.sum(dtype=np.int64) - weights[starts[:-1] - starts[0]].sum(dtype=np.int64))
                same[CHAT] = {**sidecar[CHAT], "trained_tokens": trained}
            counts = {"documents": last - first, "tokens": len(made[name].tokens)}
            write_sidecar(part, counts | {"part": f"documents {first} to {last - 1} of {prefix}"} | same)
    return made


def verify(prefix: Path, *, full: bool = False, vocab_size: int | None = None) -> IndexedDataset:
    """Open a pair, compare it with its sidecar if there is one, and return it.

    Opening checks sizes, pointers and boundaries. `full` also reads all tokens: it compares the hashes of the files, it
    compares ids with `vocab_size` (by default the sidecar's), and it checks the ends of documents.
    Raises DataError with file, document and offset.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    if sidecar:
        for name, count in (("documents", len(dataset)), ("tokens", len(dataset.tokens))):
            if sidecar[name] != count:
                stated = f"{sidecar_path(prefix)} says {sidecar[name]}"
                raise DataError(f"{prefix}: {count} {name}, but {stated}: not a pair")
        vocab_size = vocab_size or sidecar["tokenizer"]["vocab_size"]
    if not full:
        return dataset
    hashes = sidecar["sha256"] if sidecar else {}
    for name, expected in hashes.items():
        digest = sha256(Path(f"{prefix}.{name}"))
        if digest != expected:
            raise DataError(
                f"{prefix}.{name}: SHA-256 {digest[:16]}..., but {sidecar_path(prefix)} says {expected[:16]}...: the "
                "file was changed or damaged"
            )
    if vocab_size:
        _verify_ids(dataset, vocab_size)
    if sidecar and sidecar["append_eod"]:
        _verify_ends(dataset, sidecar["tokenizer"]["eod"])
    return dataset


def _verify_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Raise DataError for the first token id outside range(vocab_size)."""
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
    """Raise DataError for the first document without `eod` at its end."""
    for first in range(0, len(dataset), _BLOCK):
        ends = dataset.document_starts(first + 1, min(first + _BLOCK, len(dataset)))
        last_tokens = dataset.read_pieces(np.maximum(ends - 1, 0), 1)[:, 0]
        wrong = np.flatnonzero(last_tokens != eod)
        if wrong.size:
            raise DataError(
                f"{dataset.bin_path}: document {first + wrong[0]} ends with {last_tokens[wrong[0]]}, not with the "
                f"end-of-document id {eod}"
            )


def sha256(path: Path, stop: threading.Event | None = None) -> str:
    """The SHA-256 of a file.

    Once `stop` is set, reading ends early and the result means nothing.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if stop and stop.is_set():
                break
            digest.update(block)
    return digest.hexdigest()
