"""The data of a run: opened on every rank, and the same on all of them."""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megapar import comm
from megapar.agreement import on_all_ranks
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.data.blend import BLEND_VERSION, Stage
from megapar.data.delivery import Delivery
from megapar.data.loader import Loader, Mixture
from megapar.data.order import ORDER_VERSION
from megapar.data.prepared import read_sidecar
from megapar.data.samples import MiddleTokens, Treatment
from megapar.data.sources import Dataset, open_dataset
from megapar.data.spec import Entry, blend_stages, validation_sets
from megapar.data.tokenizer import load_tokenizer, made_by
from megapar.errors import DataError
from megapar.pipeline.schedules import embedding_ranks

TEST = "test"  # the set that is evaluated after the last step only
WHOLE = (0.0, 1.0)
ORDER = {"order": ORDER_VERSION, "blend": BLEND_VERSION}  # names of what decides the order of samples


def open_loaders(config: Config, ctx: ParallelContext) -> tuple[Delivery, dict[str, Loader]]:
    """Training data, and validation sets by name. A collective: raises DataError on every rank if it fails on one, or
    if ranks have different files.

    Every rank of a tensor group reads for itself: they share a node and so its page cache, where a sample costs
    microseconds. A transfer would cost more, and could not run beside those of the step that it is read ahead of.
    """
    train = config.train
    seed = config.train.seed
    sources = [Entry.parse(text).source for text in config.data.train]
    parts = dict(zip(("train", "validation", TEST), _parts(config.data.split), strict=False))
    held_out = [(name, source, WHOLE) for name, source in validation_sets(config)]
    held_out += [(name, sources[0], part) for name, part in parts.items() if name != "train" and part[0] < part[1]]

    apart = config.data.documents == "apart"
    marks = MiddleTokens(*config.data.fim_tokens) if config.data.fim_tokens else None
    fim = Treatment(apart, config.data.fim_rate, marks, seed)

    def loader(samples: Mixture, batch_size: Callable[[int], int], treatment: Treatment) -> Loader:
        return Loader(
            samples,
            batch_size=batch_size,
            micro_batch_size=train.micro_batch_size,
            seq_length=train.seq_length,
            dp_rank=ctx.dp.rank,
            dp_size=ctx.dp.size,
            needs_tokens=ctx.pp.rank in embedding_ranks(config.parallel),
            treatment=treatment,
        )

    def open_all() -> tuple[Loader, dict[str, Loader]]:
        opened = _open(config, [(source, parts["train"]) for source in sources], seed)
        training = Mixture(opened, [Stage(*stage) for stage in blend_stages(config)], seed=seed)
        sets = {
            name: loader(
                Mixture(_open(config, [(source, part)], seed + 1), seed=None),
                lambda _: train.global_batch_size,
                Treatment(apart),
            )
            for name, source, part in held_out
        }
        return loader(training, train.batch_size, fim), sets

    training, sets = on_all_ranks(open_all, ctx, DataError, "data not opened")
    _agree([training, *sets.values()], ctx)
    return Delivery(training, config.data.workers), sets


def _parts(split: Sequence[float]) -> list[tuple[float, float]]:
    """First and last document of each share, as fractions of their number."""
    return list(pairwise(sum(split[:n]) / sum(split) for n in range(len(split) + 1))) if split else [WHOLE]


def _open(config: Config, sources: Sequence[tuple[str, tuple[float, float]]], seed: int) -> list[Dataset]:
    """Each source, or one DataError for all that cannot be opened."""
    size = {"seq_length": config.train.seq_length, "vocab_size": config.model.vocab_size}
    opened = []
    problems = []
    for source, part in sources:
        try:
            _check_tokenizer(source, config.data.tokenizer)
            opened.append(open_dataset(source, **size, seed=seed, tokenizer=config.data.tokenizer, part=part))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(problems))
    return opened


def _check_tokenizer(source: str, spec: str) -> None:
    """Raise DataError if the description beside a .bin/.idx pair names another tokenizer than the run's."""
    facts = read_sidecar(source)
    if facts and not made_by(load_tokenizer(spec), facts["tokenizer"]["sha256"]):
        raise DataError(
            f"{source}.json: the tokens were made by {facts['tokenizer']['spec']}, and data.tokenizer={spec} is "
            "another: name the one that made them"
        )


def _agree(loaders: Sequence[Loader], ctx: ParallelContext) -> None:
    """Raise DataError on every rank if a file's content is not that of the first rank's.

    Ranks compare one digest each: all lists on all ranks would be gigabytes with thousands of both.
    """
    files = _fingerprints(loaders)
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    digests = comm.gather_json(digest, ctx.world, ctx.device)
    if len(set(digests)) == 1:
        return
    (node, first), *others = comm.gather_json([socket.gethostname(), files], ctx.world, ctx.device)
    for rank, (other_node, others_files) in enumerate(others, 1):
        for file in sorted({*first, *others_files}):
            here = first.get(file, "none")
            there = others_files.get(file, "none")
            if here != there:
                problem = DataError(
                    f"{file} is not the same everywhere: content hash {here} on node {node} (rank 0), "
                    f"{there} on node {other_node} (rank {rank}): copy it again"
                )
                problem.everywhere = True
                raise problem


def _fingerprints(loaders: Sequence[Loader]) -> dict[str, str]:
    return {file: value for loader in loaders for file, value in loader.samples.fingerprints().items()}


def identity(train: Delivery, validation_sets: Mapping[str, Loader]) -> dict[str, Any]:
    """What the samples of a run depend on besides its options: a hash of each file's content, by path."""
    return {"files": _fingerprints([train.loader, *validation_sets.values()])}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path, *, accept: bool) -> list[str]:
    """What became of the data that a checkpoint's training read, in lines for people. `saved` is its `data` section.

    Other paths and weights are options, which are compared as such. Here it is about what nobody asked for: the same
    file with other contents, or another order of samples. The samples that follow would then not be those that did not
    come yet. Raises DataError on every rank unless `accept`.
    """
    lines = [
        f"{name}: {saved[name]} -> {version}" for name, version in ORDER.items() if saved.get(name, version) != version
    ]
    before = saved.get("files", {})
    files = now.get("files", {})
    lines += [
        f"{file}: content hash {before[file]} -> {files[file]}"
        for file in files
        if file in before and before[file] != files[file]
    ]
    if lines and not accept:
        problem = DataError(
            f"data changed since {path} was saved: {'; '.join(lines)}; put the old data back, or go on with the new "
            "with --data.accept_changed"
        )
        problem.everywhere = True
        raise problem
    if files and "files" not in saved:
        return [f"data not compared: {path} holds no content hashes of its files"]
    return [f"data changed since: {line}" for line in lines]
