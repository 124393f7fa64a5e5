"""Log-probabilities of texts by a trained model, or rewards by a reward model, in any layout.

    python tools/score.py CHECKPOINT --input TEXTS.jsonl --output SCORES.jsonl [--parallel.tp 2 --launch.nproc 2 ...]
    python tools/score.py CHECKPOINT --input PREFIX --output PREFIX.reference

The first writes a line for each text, in order: the sum of its tokens' log-probabilities, and each of them. The second
writes a column beside prepared tokens, such as the references of DPO. Tokens see what comes before them in their own
text; the first one has no probability. Flags of pretrain.py choose the layout (parallel, kernels, launch) and
train.seq_length, train.micro_batch_size and train.precision. Everything else is the checkpoint's. A checkpoint of
adapters is scored on its base (checkpoint.init_from), or with --adapters_off the base alone.

A reward model (model.head=score) writes a line for each text or prepared document: its reward, the score of its last
token. It is null for a text without tokens.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import tyro
from megapar_models.build import build_stages
from megapar_models.convert.saved import saved_config
from megapar_models.registry import FOR_OPTIONS, num_targets, validate, weight_options
from megapar_models.stage import Stage
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from megapar import device
from megapar.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import holds, load_weights, verified_manifest, weight_slices, weights_of
from megapar.comm import collectives
from megapar.comm.flight import Board
from megapar.config.compatible import saved_adapter
from megapar.config.files import load
from megapar.config.options import AdapterConfig, Config, flatten, unflatten
from megapar.context import ParallelContext
from megapar.context_parallel.deal import positions
from megapar.data.indexed import IndexedDataset
from megapar.data.order import micro_batch_positions
from megapar.data.preprocess import Reading, read_documents
from megapar.data.samples import Samples, Treatment, micro_batch
from megapar.data.scores import DTYPE, writing_scores
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError, DataError, storing
from megapar.launch.local import preload, start_local_ranks
from megapar.launch.rank_process import join, leave, rank_process
from megapar.launch.reporting import open_streams, reported
from megapar.params import ADAPTER
from megapar.pipeline.runtime import PipelineRuntime
from megapar.system.atomic_files import replacing
from megapar.train import adapter_base
from megapar.train.checkpoints import without_added

_GIVEN = ("parallel", "kernels", "launch")
_GIVEN_OPTIONS = {"train.seq_length", "train.micro_batch_size", "train.precision"}

Tokens = NDArray[np.integer]


@dataclass
class Arguments:
    """Write log-probabilities or rewards of texts. All other flags are those of pretrain.py, such as --parallel.tp."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    input: Path
    """Texts (.jsonl and other files that preprocess_data.py reads), or the prefix of a .bin/.idx pair."""
    output: Path
    """File to write. It appears when it is complete."""
    text_field: str = "text"
    """Key of the text in lines of .jsonl; meta.text is the key text within meta."""
    adapters_off: bool = False
    """Of a checkpoint of adapters: score what it computes without them, as the reference of DPO does."""

    @property
    def is_prepared(self) -> bool:
        return Path(f"{self.input}.idx").exists()


def config_of(args: Arguments, flags: Sequence[str], env: device.Environment) -> Config:
    """The configuration of the checkpoint's model in the layout of `flags`. Raises ConfigError for other flags."""
    resolved = load(flags, {}, FOR_OPTIONS)
    values = flatten(resolved.config)
    given = {path: values[path] for path, source in resolved.sources.items() if source != "default"}
    for path in given:
        if path.partition(".")[0] not in _GIVEN and path not in _GIVEN_OPTIONS:
            raise ConfigError(f"--{path}: is taken from the checkpoint, or has no use here; leave it out")
    manifest = read_manifest(args.checkpoint)
    if args.adapters_off and not manifest.base:
        raise ConfigError(f"--adapters_off: {args.checkpoint} holds no adapters; leave it out")
    saved = saved_config(manifest)
    if manifest.base:
        # With them off too: the base must be theirs.
        saved = replace(saved, adapter=saved_adapter(manifest.trainer["config"]))
        if saved.checkpoint.init_from == "none":
            raise ConfigError(f"{args.checkpoint}: adapters on weights that were drawn, which no file holds")
    config = unflatten(flatten(saved) | given, type(saved.model))
    world = env.world_size if env.launched else max(config.launch.nproc, 1)
    # No data of these options is read: the texts are. A text sees itself alone.
    config = replace(config, data=replace(config.data, train=("synthetic",), stages=(), documents="apart"))
    config = replace(config, data=replace(config.data, split=(), validation=(), fim_rate=0.0, fim_tokens=()))
    config = replace(config, optimizer=replace(config.optimizer, zero_stage=0, shard_ranks=0))
    # As many micro-batches as ranks of the pipeline keep all of them at work.
    dp = config.parallel.dp or world // (config.parallel.tp * config.parallel.cp * config.parallel.pp)
    rows = config.train.micro_batch_size * max(dp, 1) * 2 * config.parallel.pp
    return validate(replace(config, train=replace(config.train, global_batch_size=rows)), world)


class Scorer(PipelineStage):
    """The last stage of a model, which returns the log-probability of each target, or its scores, fp32 [s, b]."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        return self.stage.scored(self.stage.hidden_states(x_sbh, batch), batch).values_sb

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return self.stage.boundary(batch)


def load_pipeline(config: Config, args: Arguments, ctx: ParallelContext) -> PipelineRuntime:
    """The stages of this rank with the weights of the checkpoint. A collective.

    Raises CheckpointError on every rank if its adapters are of another base than the one that it names.
    """
    base: Path | None = None
    if config.adapter.rank:
        base = Path(config.checkpoint.init_from)
        saved = verified_manifest(args.checkpoint, ctx).base
        adapter_base.require_same(saved, adapter_base.identity(config, ctx), args.checkpoint, config)
    if args.adapters_off:
        config = replace(config, adapter=AdapterConfig())
    stages = build_stages(config, ctx)
    slices = [*weight_slices(nn.ModuleList(stages.values()).parameters()), *weights_of(fixed_slices(stages.values()))]
    options = weight_options(config)
    if base is not None:
        start = without_added(base, [item for item in slices if item.spec.added_by != ADAPTER], options, ctx)
        if args.adapters_off and start.unused:
            raise _everywhere(f"--adapters_off: {base} has no head of rewards; leave it out, or score another model")
        load_weights(base, slices=start.slices, ctx=ctx, model_config=start.model_config, unused=start.unused)
    if not args.adapters_off:
        if base is not None:
            # It has adapters, and the weights of the base that were trained beside them.
            manifest = verified_manifest(args.checkpoint, ctx)
            slices = [item for item in slices if holds(manifest, item)]
        load_weights(args.checkpoint, slices=slices, ctx=ctx, model_config=options)
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
    """This rank's micro-batches of train.global_batch_size rows. Those beyond `rows` are padding."""
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


def score_rows(
    rows: Sequence[Sequence[Tokens]], config: Config, ctx: ParallelContext, pipeline: PipelineRuntime
) -> list[NDArray[np.float32]]:
    """The log-probabilities, or the scores, of the tokens of each document in `rows`, on every rank. A collective."""
    batches = batches_of(rows, config, ctx)
    values_bs = torch.zeros(config.train.global_batch_size, config.train.seq_length, device=ctx.device)
    # Losses come from the ranks of the last stage alone. Each of them has its rows and columns, and all others zeros.
    for batch, found_sb in zip(batches, pipeline.evaluate(batches), strict=False):
        values_bs[batch.sample_ids_b[:, None], batch.positions_s] = found_sb.t()
    whole = collectives.all_reduce(collectives.all_reduce(values_bs, ctx.grad), ctx.pp).cpu().numpy()
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


Write = Callable[[NDArray[np.float32]], None]
"""Writes the scores of the next document."""


@contextmanager
def writer(args: Arguments, config: Config) -> Iterator[Write]:
    """What writes the output on rank 0."""
    line = _line if config.model.head == "vocabulary" else _line_of_reward
    if args.is_prepared and line is _line:
        manifest = read_manifest(args.checkpoint)
        model = {"checkpoint": str(args.checkpoint), "step": manifest.step, "precision": config.train.precision}
        with writing_scores(args.output, IndexedDataset(args.input), model) as file:
            yield lambda scores: _write(args.output, file, scores.astype(DTYPE).tobytes())
        return
    with replacing(args.output) as file:
        yield lambda scores: _write(args.output, file, line(scores))


def _line(scores: NDArray[np.float32]) -> bytes:
    each = [float(score) for score in scores[1:]]
    line = {"log_prob": float(np.sum(scores, dtype=np.float64)), "tokens": len(each), "log_probs": each}
    return (json.dumps(line) + "\n").encode()


def _line_of_reward(scores: NDArray[np.float32]) -> bytes:
    line = {"reward": float(scores[-1]) if len(scores) else None, "tokens": len(scores)}
    return (json.dumps(line) + "\n").encode()


def _write(path: Path, file: object, data: bytes) -> None:
    with storing(path):
        file.write(data)  # type: ignore[attr-defined]


@contextmanager
def no_writer() -> Iterator[Write]:
    """That of the other ranks."""
    yield lambda scores: None


def documents_of(args: Arguments, config: Config) -> Iterator[Tokens]:
    """Yield the tokens of each text. Every rank reads all of them."""
    if args.is_prepared:
        dataset = IndexedDataset(args.input)
        yield from (dataset.document(number) for number in range(len(dataset)))
        return
    tokenizer = load_tokenizer(config.data.tokenizer)
    for text in read_documents([args.input], Reading(text_field=args.text_field)):
        yield tokenizer.encode(text)


def run(args: Arguments, config: Config, env: device.Environment, board: Board | None = None) -> None:
    """Score on one rank. Rank 0 writes."""
    with rank_process(config, env, board) as process:
        ctx = join(config, env, process)
        pipeline = load_pipeline(config, args, ctx)
        rows = rows_of(documents_of(args, config), config.train.seq_length, args.input)
        steps = iter(lambda: list(islice(rows, config.train.global_batch_size)), [])
        console = Console(stderr=True)
        count = 0
        with writer(args, config) if ctx.world.first else no_writer() as write:
            for step in track(steps, "scoring", console=console, disable=not ctx.world.first, transient=True):
                for scores in score_rows(step, config, ctx, pipeline):
                    write(scores)
                    count += 1
        if ctx.world.first:
            what = "log-probabilities" if config.model.head == "vocabulary" else "rewards"
            print(f"{args.output}: {what} of {count:,} texts")
        leave(ctx)


def main() -> int:
    open_streams()
    with reported():
        args, flags = tyro.cli(Arguments, description=__doc__, use_underscores=True, return_unknown_args=True)
        env = device.environment()
        config = config_of(args, flags, env)
        world = config.launch.nproc
        if env.launched or world <= 1:
            run(args, config, env)
            return 0
        preload(config)
        return start_local_ranks(partial(run, args, config), world, config.run_dir)


if __name__ == "__main__":
    sys.exit(main())
