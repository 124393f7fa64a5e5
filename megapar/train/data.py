"""Opens the data of a run on every rank, and checks that all ranks read the same data."""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megapar.base.errors import DataError
from megapar.comm import collectives
from megapar.config.data_spec import DataSource, blend_stages, validation_sets
from megapar.config.derive import with_vocabulary
from megapar.config.messages import first_few
from megapar.config.options import Config, DataConfig
from megapar.context_parallel.deal import positions
from megapar.data import contents
from megapar.data.blend import BLEND_VERSION, BlendPhase
from megapar.data.delivery import Delivery
from megapar.data.loader import Loader, Mixture
from megapar.data.order import ORDER_VERSION
from megapar.data.packs import PACKS_VERSION
from megapar.data.prepared import TEXTS, read_sidecar, record_of
from megapar.data.samples import MiddleTokens, Treatment
from megapar.data.sources import Dataset, SampleKind, open_dataset
from megapar.data.tokenizer import fetch_tokenizer, load_tokenizer, made_by
from megapar.declare.agreement import on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.pipeline.schedules import embedding_ranks
from megapar.step.state import TrainState

TEST = "test"  # the name of the set that is evaluated only after the last step
_SAMPLED = 64  # samples of a source whose ids are looked at before the first step
WHOLE = (0.0, 1.0)  # the part of a source, as fractions of its documents
ORDER = {
    "order": ORDER_VERSION,
    "blend": BLEND_VERSION,
    "packs": PACKS_VERSION,
}  # versions of the algorithms that order samples


def open_loaders(
    config: Config, ctx: ParallelContext, num_targets: int = 1, kind: SampleKind = "texts"
) -> tuple[Delivery, dict[str, Loader]]:
    """Open the training data, and the validation sets by name. A collective.

    `num_targets` is how many of the tokens after each position the model's losses are of
    (`megapar_models.registry.num_targets`), and `kind` what its objective is of (`sample_kind` there).

    Raises DataError on every rank if opening fails on one rank, or if ranks have different files.
    """
    train = config.train
    seed = config.train.seed
    sources = [DataSource.parse(text).source for text in config.data.train]
    apart = config.data.documents == "apart"
    marks = MiddleTokens(*config.data.fim_tokens) if config.data.fim_tokens else None
    fim = Treatment(apart, config.data.fim_rate, marks, seed)

    # Each rank of a tensor group reads for itself. The ranks share a node and so its page cache, where a sample costs
    # microseconds. A transfer between them would cost more, and the step's own transfers would delay it.
    def loader(
        samples: Mixture, batch_size: Callable[[int], int], treatment: Treatment, *, held_out: bool = False
    ) -> Loader:
        return Loader(
            samples,
            batch_size=batch_size,
            micro_batch_size=train.micro_batch_size,
            seq_length=train.seq_length,
            dp_rank=ctx.dp.rank,
            dp_size=ctx.dp.size,
            columns=positions(train.seq_length, ctx.cp.size, ctx.cp.rank),
            needs_tokens=ctx.pp.rank in embedding_ranks(config.parallel),
            treatment=treatment,
            num_targets=num_targets,
            held_out=held_out,
        )

    def open_all() -> tuple[Loader, dict[str, Loader]]:
        part = _parts(config.data.split)[0]
        opened = _open(config, [(source, part) for source in sources], seed, num_targets, kind)
        if train.loss_mean == "sample":
            _weigh_conversations_alike(opened)
        training = Mixture(opened, [BlendPhase(*stage) for stage in blend_stages(config)], seed=seed)
        sets: dict[str, Loader] = {}
        for name, (blend, weights) in _held_out(config).items():
            # No seed: an evaluation reads the samples in their stored order, so that losses can be compared. It takes
            # the mean of tokens for the same reason, whatever train.loss_mean is.
            with _naming(config, name):
                opened = _open(config, blend, seed + 1, num_targets, kind)
            samples = Mixture(opened, [BlendPhase(0, weights)], seed=None)
            sets[name] = loader(samples, lambda _: train.global_batch_size, Treatment(apart), held_out=True)
        return loader(training, train.batch_size, fim), sets

    training, sets = on_all_ranks(open_all, ctx, DataError, "data not opened")
    _agree([training, *sets.values()], ctx)
    return Delivery(training, config.data.workers), sets


def go_on(state: TrainState, train_data: Delivery, sets: Mapping[str, Loader]) -> None:
    """Let the data of a run go on where its state is. The blend of data.split's held-out parts stays what it was."""
    train_data.consumed_samples = state.consumed_samples
    if not state.blend:
        return
    train_data.loader.samples.follow(state.blend)
    data = state.config.data
    if data.split and len(data.train) > 1:
        _, now = blend_stages(state.config)[0]
        weights = tuple(weight for weight, opened in zip(state.blend[0].weights, now, strict=True) if opened > 0)
        for held_out in sets.values():
            if sum(weights) > 0:
                held_out.samples.follow([BlendPhase(0, weights)])


Part = tuple[str, tuple[float, float]]
"""A source, and the part of it that is read, as fractions of its documents."""


def _held_out(config: Config) -> dict[str, tuple[list[Part], tuple[float, ...]]]:
    """By name, the parts of sources that each set for evaluations is a blend of, and their weights.

    Those of data.split have the weights of data.train for the first samples of the run, also after a stage with others:
    losses could not be compared otherwise.
    """
    sets: dict[str, tuple[list[Part], tuple[float, ...]]] = {}
    for name, source in validation_sets(config):
        sets[name] = [(source, WHOLE)], (1.0,)
    _, weights = blend_stages(config)[0]
    weighted = [
        (DataSource.parse(text).source, weight) for text, weight in zip(config.data.train, weights, strict=True)
    ]
    read = [(source, weight) for source, weight in weighted if weight > 0]
    for name, part in zip(("validation", TEST), _parts(config.data.split)[1:], strict=False):
        # A share of 0 in data.split leaves no document for its set.
        if part[0] < part[1]:
            sets[name] = [(source, part) for source, _ in read], tuple(weight for _, weight in read)
    return sets


@contextmanager
def _naming(config: Config, name: str) -> Iterator[None]:
    """A context in which a DataError says which set for evaluations it is about."""
    try:
        yield
    except DataError as error:
        option = f"data.validation ({name})" if config.data.validation else f"the {name} share of data.split"
        raise DataError(f"{option}: {error}") from error


def _check_conversations(config: Config, source: str) -> None:
    """Raise DataError for options that would join conversations, or change their order of tokens."""
    if config.data.documents != "apart":
        raise DataError(f"{source} has conversations: packs of them need data.documents=apart, or they read each other")
    if config.data.fim_rate:
        raise DataError(
            f"{source} has conversations: data.fim_rate={config.data.fim_rate} would tear their turns apart"
        )


def conversations_among(sources: Sequence[Dataset]) -> list[Any]:
    """Return the sources that hold conversations."""
    return [source for source in sources if getattr(source, "holds_conversations", False)]


def _weigh_conversations_alike(sources: Sequence[Dataset]) -> None:
    """Give each conversation of all sources the same weight: the mean number of trained tokens of all.

    Raises DataError for a source that has no conversations.
    """
    packs = conversations_among(sources)
    others = [source.name for source in sources if source not in packs]
    if others:
        raise DataError(
            f"{first_few(others, 3)} has no conversations, whose means train.loss_mean=sample takes; use token"
        )
    # One weight for all sources: the mean of each would count those of a source with long answers more.
    mean = float(np.concatenate([source.targets for source in packs]).mean())
    for source in packs:
        source.weigh_alike(mean)


def packs_in_words(loader: Loader) -> list[str]:
    """A line for each source of packed conversations."""
    return [source.describe() for source in conversations_among(loader.samples.sources)]


def holds_conversations(loader: Loader) -> bool:
    """Whether every source of a loader holds conversations."""
    return len(conversations_among(loader.samples.sources)) == len(loader.samples.sources)


def _parts(split: Sequence[float]) -> list[tuple[float, float]]:
    """Start and end of each share of `data.split`, as fractions of the number of documents."""
    if not split:
        return [WHOLE]
    return list(pairwise(sum(split[:n]) / sum(split) for n in range(len(split) + 1)))


def _open(
    config: Config,
    sources: Sequence[Part],
    seed: int,
    num_targets: int,
    kind: SampleKind,
) -> list[Dataset]:
    """Open each source. Raises one DataError with every unreadable source."""
    size = {
        "seq_length": config.train.seq_length,
        "vocab_size": config.model.vocab_size,
        "num_targets": num_targets,
    }
    opened = []
    problems = []
    # Every id is compared with the vocabulary when it is read. If it may be too small, some are read now: then the run
    # ends before its first step.
    looks = not tokenizer_is_named(config) or config.model.vocab_size < load_tokenizer(config.data.tokenizer).vocab_size
    for source, part in sources:
        try:
            _check_tokenizer(source, config.data.tokenizer)
            dataset = open_dataset(source, **size, seed=seed, tokenizer=config.data.tokenizer, part=part, kind=kind)
            if conversations_among([dataset]):
                _check_conversations(config, source)
            if looks and not source.startswith("hf:"):
                dataset.read(np.linspace(0, len(dataset) - 1, _SAMPLED).astype(np.int64))
            opened.append(dataset)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(problems))
    return opened


def with_fetched_tokenizer(config: Config) -> Config:
    """`config` with the commit of a tokenizer at Hugging Face, whose files are then in the cache (`fetch_tokenizer`).

    To be called before ranks are forked: they read the same commit there. A dry run takes no file that it can do
    without.
    """
    if config.dry_run and not needs_tokenizer(config):
        return config
    return replace(config, data=replace(config.data, tokenizer=fetch_tokenizer(config.data.tokenizer)))


def with_vocabulary_of_tokenizer(config: Config) -> Config:
    """`config` with the size of the tokenizer's vocabulary, if it needs the tokenizer.

    Raises ConfigError if the two do not fit, and DataError if there is no such tokenizer.
    """
    if not needs_tokenizer(config):
        return config
    tokenizer = load_tokenizer(config.data.tokenizer)
    # Ids that no data hold do no harm, such as that of an added padding token. Each id is compared when it is read.
    if tokenizer.eod < config.model.vocab_size < tokenizer.vocab_size:
        return config
    return with_vocabulary(config, tokenizer.vocab_size)


def needs_tokenizer(config: Config) -> bool:
    """Whether the size of the tokenizer decides the vocabulary, or must fit it."""
    if not config.model.vocab_size:
        return True
    # If no text will be read, the tokenizer need not be there.
    reads_text = not config.dry_run and config.data.train != ("synthetic",)
    return reads_text and tokenizer_is_named(config)


def tokenizer_is_named(config: Config) -> bool:
    """Whether the options, or the description beside a file of data, name the tokenizer of the run.

    Data prepared by another program has no such description, and training needs no tokenizer for it.
    """
    if config.data.tokenizer != DataConfig.tokenizer:
        return True
    sources = [DataSource.parse(text).source for text in config.data.train]
    sources += [source for _, source in validation_sets(config)]
    return any(source.startswith("hf:") or read_sidecar(source) is not None for source in sources)


def _check_tokenizer(source: str, spec: str) -> None:
    """Raise DataError if the description beside a .bin/.idx pair names another tokenizer than the run's."""
    sidecar = read_sidecar(source)
    if sidecar and not made_by(load_tokenizer(spec), sidecar["tokenizer"]["sha256"]):
        raise DataError(
            f"{source}.json: the tokens were made by {sidecar['tokenizer']['spec']}, and data.tokenizer={spec} is "
            "another: name the one that made them"
        )


def _agree(loaders: Sequence[Loader], ctx: ParallelContext) -> None:
    """Raise DataError on every rank if a file's content differs from rank 0's."""
    files = _fingerprints(loaders)
    # One digest a rank is compared first: with thousands of files and ranks all lists would be gigabytes.
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    digests = collectives.gather_json(digest, ctx.world, ctx.device)
    if len(set(digests)) == 1:
        return
    (node, first), *others = collectives.gather_json([socket.gethostname(), files], ctx.world, ctx.device)
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
    """What the samples of a run depend on besides its options: by path, a hash of the contents of each file.

    `modified` has the time of the last change, in ns, of each file too large to be hashed whole, and `samples` the
    number of samples of each source of training. `texts` says how their texts became tokens
    (`megapar.data.prepared.record_of`).
    """
    hashes = _fingerprints([train.loader, *validation_sets.values()])
    status = {file: os.stat(file) for file in hashes}
    modified = {file: found.st_mtime_ns for file, found in status.items() if found.st_size > contents.WHOLE}
    sources = train.loader.samples.sources
    samples = {source.name: len(source) for source in sources}
    return {"hashes": hashes, "modified": modified, "samples": samples, TEXTS: record_of(s.name for s in sources)}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path, *, accept: bool) -> list[str]:
    """Compare the data of a checkpoint's training with this run's; returns lines for the user.

    `saved` is the `data` section of the manifest of `path`, `now` is this run's. Paths and weights are options, and
    options are compared elsewhere. This function finds changes nobody asked for: a file with other contents, or another
    order of samples. The run would then repeat or skip samples. Raises DataError on every rank if it finds one, unless
    `accept` is set. The lines tell of large files written since, with equal hashes.
    """
    lines = [
        f"{name}: {saved[name]} -> {version}" for name, version in ORDER.items() if saved.get(name, version) != version
    ]
    before = saved.get("hashes", {})
    hashes = now.get("hashes", {})
    lines += [
        f"{file}: content hash {before[file]} -> {hashes[file]}"
        for file in hashes
        if file in before and before[file] != hashes[file]
    ]
    if lines and not accept:
        problem = DataError(
            f"data changed since {path} was saved: {'; '.join(lines)}; put the old data back, or go on with the new "
            "with --data.accept_changed"
        )
        problem.everywhere = True
        raise problem
    if hashes and "hashes" not in saved:
        return [f"data not compared: {path} holds no content hashes of its files, or those of an older version"]
    changed = [f"data changed since: {line}" for line in lines]
    return [*changed, *_written_since(saved.get("modified", {}), now.get("modified", {}))]


def _written_since(before: Mapping[str, int], modified: Mapping[str, int]) -> list[str]:
    """A line about the large files with another time of their last change, if there are any."""
    # A copy has another time too, so this is no error. Only the bytes could tell, and there may be terabytes of them.
    written = [file for file in modified if before.get(file, modified[file]) != modified[file]]
    if not written:
        return []
    return [
        f"data written since: {first_few(written, 3)}: size and samples are equal, other bytes were not compared; "
        "megapar preprocess verify --full compares all of them with the SHA-256 of PREFIX.json"
    ]
