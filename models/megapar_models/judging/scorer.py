"""A checkpoint loaded to score texts: its configuration, its pipeline, and rows of texts as micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megapar.base.errors import ConfigError, DataError
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import holds, load_weights, verified_manifest, weight_slices, weights_of
from megapar.comm import collectives
from megapar.config.compatible import saved_adapter
from megapar.config.files import load
from megapar.config.options import AdapterConfig, Config, flatten, unflatten
from megapar.config.unknown import Hint
from megapar.context_parallel.deal import positions
from megapar.data.order import micro_batch_positions
from megapar.data.samples import Samples, Treatment, micro_batch
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.declare.context import ParallelContext
from megapar.declare.params import ADAPTER
from megapar.pipeline.runtime import PipelineRuntime
from megapar.system.environment import Environment
from megapar.train import adapter_base
from megapar.train.checkpoints import without_added
from megapar_models.build import build_stages
from megapar_models.convert.saved import saved_config
from megapar_models.registry import FOR_OPTIONS, num_targets, validate, weight_options
from megapar_models.stage import Stage

_GIVEN = ("parallel", "kernels", "launch")
_GIVEN_OPTIONS = {"train.seq_length", "train.micro_batch_size", "train.precision"}

Tokens = NDArray[np.integer]
Head = Callable[[Stage, Tensor, MicroBatch], Tensor]
"""What the last stage returns of its hidden states after all layers."""


def config_of(
    checkpoint: Path,
    flags: Sequence[str],
    env: Environment,
    hint: Hint,
    *,
    family: str = "",
    adapters_off: bool = False,
    longest: bool = False,
) -> Config:
    """The configuration of the checkpoint's model in the layout of `flags`. Raises ConfigError for other flags.

    `hint` says what an unknown flag may mean. `family` is as in `saved_config`. `longest`: train.seq_length is the
    model's longest context, unless a flag says otherwise.
    """
    resolved = load(flags, {}, FOR_OPTIONS, hint)
    values = flatten(resolved.config)
    given = {path: values[path] for path, source in resolved.sources.items() if source != "default"}
    for path in given:
        if path.partition(".")[0] not in _GIVEN and path not in _GIVEN_OPTIONS:
            raise ConfigError(f"--{path}: is taken from the checkpoint, or has no use here; leave it out")
    manifest = read_manifest(checkpoint)
    if adapters_off and not manifest.base:
        raise ConfigError(f"--adapters_off: {checkpoint} holds no adapters; leave it out")
    saved = saved_config(manifest, family)
    if manifest.base:
        # With them off too: the base must be theirs.
        saved = replace(saved, adapter=saved_adapter(manifest.trainer["config"]))
        if saved.checkpoint.init_from == "none":
            raise ConfigError(f"{checkpoint}: adapters on weights that were drawn, which no file holds")
    if longest:
        given = {"train.seq_length": saved.model.max_position_embeddings} | given
    config = unflatten(flatten(saved) | given, type(saved.model))
    world = env.world_size if env.launched else max(config.launch.nproc, 1)
    # No data of these options is read: the texts are. A text sees itself alone.
    config = replace(config, data=replace(config.data, train=("synthetic",), stages=(), documents="apart"))
    config = replace(config, data=replace(config.data, split=(), validation=(), fim_rate=0.0, fim_tokens=()))
    config = replace(config, optimizer=replace(config.optimizer, zero_stage=0, shard_ranks=0))
    # As many micro-batches as ranks of the pipeline keep all of them at work.
    dp = config.parallel.dp or world // (config.parallel.tp * config.parallel.cp * config.parallel.pp)
    rows = config.train.micro_batch_size * max(dp, 1) * 2 * config.parallel.pp
    return validate(replace(config, train=replace(config.train, global_batch_size=rows)), world, trains=False)


def values_of(stage: Stage, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
    """The log-probability of each target, or the score of each token, fp32 [s, b]."""
    return stage.scored(x_sbh, batch).values_sb


class Scorer(PipelineStage):
    """The last stage of a model, which returns what `head` makes of its hidden states."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self.head: Head = values_of

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        return self.head(self.stage, self.stage.hidden_states(x_sbh, batch), batch)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return self.stage.boundary(batch)


def load_pipeline(
    config: Config, checkpoint: Path, ctx: ParallelContext, *, adapters_off: bool = False
) -> PipelineRuntime:
    """The stages of this rank with the weights of the checkpoint. The last one is a `Scorer`. A collective.

    Raises CheckpointError on every rank if its adapters are of another base than the one that it names.
    """
    base: Path | None = None
    if config.adapter.rank:
        base = Path(config.checkpoint.init_from)
        saved = verified_manifest(checkpoint, ctx).base
        adapter_base.require_same(saved, adapter_base.identity(config, ctx), checkpoint, config)
    if adapters_off:
        config = replace(config, adapter=AdapterConfig())
    stages = build_stages(config, ctx)
    slices = [*weight_slices(nn.ModuleList(stages.values()).parameters()), *weights_of(fixed_slices(stages.values()))]
    options = weight_options(config)
    if base is not None:
        of_base = [item for item in slices if item.spec.added_by != ADAPTER]
        start = without_added(verified_manifest(base, ctx), of_base, options)
        if adapters_off and start.unused:
            raise _everywhere(f"--adapters_off: {base} has no head of rewards; leave it out, or score another model")
        load_weights(base, slices=start.slices, ctx=ctx, model_config=start.model_config, unused=start.unused)
    if not adapters_off:
        if base is not None:
            # It has adapters, and the weights of the base that were trained beside them.
            manifest = verified_manifest(checkpoint, ctx)
            slices = [item for item in slices if holds(manifest, item)]
        load_weights(checkpoint, slices=slices, ctx=ctx, model_config=options)
    own: dict[int, PipelineStage] = {}
    for number, stage in stages.items():
        own[number] = Scorer(stage.eval()) if stage.last else stage.eval()
    return PipelineRuntime(own, ctx, config.parallel.schedule, config.parallel.vpp)


def _everywhere(text: str) -> ConfigError:
    """An error that all ranks raise with the same words."""
    error = ConfigError(text)
    error.everywhere = True
    return error


def rows_of(documents: Iterable[Tokens], length: int, source: Path) -> Iterator[list[Tokens]]:
    """Yield documents in rows of at most `length` tokens, in order. Raises DataError for a longer document."""
    row: list[Tokens] = []
    room = length
    for number, tokens in enumerate(documents):
        if len(tokens) > length:
            raise DataError(
                f"{source}: document {number} has {len(tokens):,} tokens, more than train.seq_length={length}; raise it"
            )
        if len(tokens) > room:
            yield row
            row = []
            room = length
        row.append(tokens)
        room -= len(tokens)
    if row:
        yield row


def batches_of(rows: Sequence[Sequence[Tokens]], config: Config, ctx: ParallelContext) -> list[MicroBatch]:
    """This rank's micro-batches of train.global_batch_size rows. Those beyond `rows` are padding.

    A row has at most train.seq_length tokens, and one more if it is a target only.
    """
    train = config.train
    targets = num_targets(config)
    samples = np.zeros((train.global_batch_size, train.seq_length + targets), np.int64)
    starts: list[list[int]] = [[0] for _ in samples]
    for sample, row, firsts in zip(samples, rows, starts, strict=False):
        tokens = np.concatenate(row)
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= config.model.vocab_size):
            raise DataError(
                f"a token id is outside the vocabulary of {config.model.vocab_size}: is it this tokenizer's?"
            )
        sample[: len(tokens)] = tokens
        lengths = [len(document) for document in row if len(document)]
        firsts += np.cumsum(lengths).tolist()
    held = torch.tensor(positions(train.seq_length, ctx.cp.size, ctx.cp.rank))
    found = []
    for ids in micro_batch_positions(0, len(samples), train.micro_batch_size, ctx.dp.rank, ctx.dp.size):
        documents = Samples(samples[ids], [starts[i] for i in ids])
        batch = micro_batch(documents, ids, Treatment(apart=True), targets)
        found.append(batch.columns(held).to(ctx.device))
    return found


def evaluate_rows(
    rows: Sequence[Sequence[Tokens]], config: Config, ctx: ParallelContext, pipeline: PipelineRuntime, planes: int = 1
) -> Tensor:
    """What the head of `Scorer` says of each position of the rows, fp32 [rows, s, planes], on every rank.

    The head returns [s, b, planes], or with one plane [s, b]. A collective.
    """
    batches = batches_of(rows, config, ctx)
    values_bsk = torch.zeros(config.train.global_batch_size, config.train.seq_length, planes, device=ctx.device)
    # Losses come from the ranks of the last stage alone. Each of them has its rows and columns, and all others zeros.
    for batch, found in zip(batches, pipeline.evaluate(batches), strict=False):
        found_bsk = found.view(batch.seq_length, batch.size, planes).transpose(0, 1)
        values_bsk[batch.sample_ids_b[:, None], batch.positions_s] = found_bsk
    return collectives.all_reduce(collectives.all_reduce(values_bsk, ctx.grad), ctx.pp).cpu()


def score_rows(
    rows: Sequence[Sequence[Tokens]], config: Config, ctx: ParallelContext, pipeline: PipelineRuntime
) -> list[NDArray[np.float32]]:
    """The log-probabilities, or the scores, of the tokens of each document in `rows`, on every rank. A collective."""
    whole = evaluate_rows(rows, config, ctx, pipeline)[..., 0].numpy()
    scores = []
    for values, row in zip(whole, rows, strict=False):
        first = 0
        for document in row:
            inside = values[first : first + len(document)]
            if config.model.head == "vocabulary":
                # The value of a position is that of the token after it.
                inside = np.concatenate([np.zeros(min(len(document), 1), np.float32), inside[:-1]])
            scores.append(inside)
            first += len(document)
    return scores
