"""What a checkpoint says of token sequences, in any layout: log-probabilities, hits, and continuations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from megapar_tools.prepare.texts import TextOptions
from numpy.typing import NDArray
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.comm import collectives
from megapar.config.options import Config
from megapar.data.tokenizer import Tokenizer
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.tensor_parallel.layers import vocabulary_cut
from megapar_models.convert.saved import texts_of
from megapar_models.generation import Decoder, Sampling, decoding, draw, why_no_cache
from megapar_models.judging.scorer import Head, Scorer, batches_of, evaluate_rows, load_pipeline, rows_of, values_of
from megapar_models.stage import Stage

Ids = Sequence[int]
_TAIL = 8  # tokens of a prompt that are decoded with its continuation: some tokenizers drop the space of a first word


class Window(NamedTuple):
    """Token ids, and how many of the last ones are scored. All before them are their context."""

    ids: Ids
    scored: int


class Score(NamedTuple):
    """The sum of the scored tokens' log-probabilities, in nats, and whether each of them has the highest logit."""

    log_prob: float
    greedy: bool


def sliding(ids: Ids, prefix: Ids, length: int, stride: int) -> Iterator[Window]:
    """Yield windows that together score each token of `ids` once. A model sees at most `length` tokens of each.

    The first window begins with `prefix` and scores all of its other tokens. Each later one scores `stride` more.
    """
    whole = [*prefix, *ids]
    last = len(whole) - 1
    stop = min(length, last)
    if ids:
        yield Window(whole[: stop + 1], stop + 1 - len(prefix))
    while stop < last:
        scored = min(stride, last - stop)
        stop += scored
        yield Window(whole[stop - length : stop + 1], scored)


@dataclass(frozen=True)
class Continuation:
    """How to go on from a prompt: up to `tokens` tokens, or up to one of the texts `until`, or the end token."""

    tokens: int
    until: Sequence[str]
    sampling: Sampling


class Judge:
    """A checkpoint's model, spread over all ranks. Its methods are collectives with equal results on all ranks.

    `texts` makes tokens of texts, by default as in the checkpoint's training. `longest` is the longest context.
    """

    def __init__(
        self,
        config: Config,
        checkpoint: Path,
        ctx: ParallelContext,
        *,
        adapters_off: bool = False,
        reading: TextOptions | None = None,
    ):
        if config.model.head != "vocabulary":
            text = f"model.head={config.model.head}: the model rates texts, and says nothing of next tokens"
            error = ConfigError(f"{checkpoint}: {text}; use score.py")
            error.everywhere = True
            raise error
        self.texts = texts_of(checkpoint, reading or TextOptions())
        self.tokenizer: Tokenizer = self.texts.tokenizer
        self.longest = config.train.seq_length
        self._config = config
        self._ctx = ctx
        self._pipeline = load_pipeline(config, checkpoint, ctx, adapters_off=adapters_off)
        self._scorers = [stage for stage in self._pipeline.stages.values() if isinstance(stage, Scorer)]

    def score(self, windows: Sequence[Window]) -> list[Score]:
        """The score of each window, in order. Raises ConfigError if one needs a longer context than `longest`."""
        # The longest first: it then shows at once whether the memory is enough.
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number].ids))
        tokens = sum(len(window.ids) for window in windows)
        found: dict[int, Score] = {}
        while len(found) < len(order):
            waiting = order[len(found) :]
            config = self._config_for(len(windows[waiting[0]].ids), tokens)
            arrays = (np.array(windows[number].ids, np.int64) for number in waiting)
            rows = rows_of(arrays, config.train.seq_length + 1, Path("a text"))
            step = list(islice(rows, config.train.global_batch_size))
            with self._head(_log_probs_and_hits):
                values_bsk = evaluate_rows(step, config, self._ctx, self._pipeline, planes=2)
            for number, place in zip(waiting, _places(step), strict=False):
                scored = slice(place.stop - windows[number].scored, place.stop)
                log_probs, hits = values_bsk[place.row, scored].unbind(-1)
                found[number] = Score(float(log_probs.sum(dtype=torch.float64)), bool(hits.all()))
                tokens -= len(windows[number].ids)
        return [found[number] for number in range(len(windows))]

    def continuations(self, prompts: Sequence[Ids], rule: Continuation) -> list[str]:
        """The text after each prompt, without the text that ended it. Prompts are cut on the left to make room."""
        room = self.longest - rule.tokens
        if room < 1:
            raise ConfigError(f"{rule.tokens} tokens to generate leave no room in train.seq_length={self.longest}")
        prompts = [list(prompt[-room:]) for prompt in prompts]
        size = self._config.train.global_batch_size
        found = []
        for first in range(0, len(prompts), size):
            found += self._continued(prompts[first : first + size], rule)
        return found

    def _continued(self, prompts: Sequence[Ids], rule: Continuation) -> list[str]:
        rows = [list(prompt) for prompt in prompts]
        texts = [""] * len(rows)
        going = [True] * len(rows)
        generators = [rule.sampling.generator() for _ in rows]
        with self._logits(rows, rule.tokens) as logits:
            for _ in range(rule.tokens):
                for number, token in enumerate(draw(next(logits), rule.sampling, generators)):
                    # Rows that have ended go on, for the others.
                    rows[number].append(token)
                    if going[number] and token != self.tokenizer.eod:
                        texts[number] = self._text(rows[number], len(prompts[number]))
                    going[number] &= token != self.tokenizer.eod and not any(end in texts[number] for end in rule.until)
                if not any(going):
                    break
        for end in rule.until:
            texts = [text.partition(end)[0] for text in texts]
        return texts

    def _text(self, row: list[int], given: int) -> str:
        first = max(0, given - _TAIL)
        before = self.tokenizer.decode(row[first:given])
        return self.tokenizer.decode(row[first:])[len(before) :]

    @contextmanager
    def _logits(self, rows: list[list[int]], tokens: int) -> Iterator[Iterator[Tensor]]:
        """The logits [b, v] after the rows, again and again while they grow by a token each."""
        # One process on a CPU has the whole model in one stage, and can keep keys and values.
        alone = self._ctx.world.size == 1 and self._ctx.device.type == "cpu"
        if alone and not why_no_cache(self._scorers[0].stage, rows, tokens):
            with decoding(self._scorers[0].stage, rows, tokens) as decoder:
                yield _with_cache(decoder, rows)
        else:
            yield self._by_whole_rows(rows)

    def _by_whole_rows(self, rows: list[list[int]]) -> Iterator[Tensor]:
        vocabulary = self._config.model.vocab_size
        while True:
            config = self._config_for(max(map(len, rows)) + 1)
            batches = batches_of([[np.array(row, np.int64)] for row in rows], config, self._ctx)
            # The weights of targets tell the head which column is a row's last.
            last_b = torch.tensor([len(row) - 1 for row in rows] + [0] * (config.train.global_batch_size - len(rows)))
            batches = [_weighing(batch, last_b) for batch in batches]
            logits_bv = torch.zeros(config.train.global_batch_size, vocabulary, device=self._ctx.device)
            with self._head(_last_logits):
                for batch, found_bv in zip(batches, self._pipeline.evaluate(batches), strict=False):
                    logits_bv[batch.sample_ids_b] = found_bv
            collectives.all_reduce(collectives.all_reduce(logits_bv, self._ctx.grad), self._ctx.pp)
            yield logits_bv.cpu()[: len(rows)]

    @contextmanager
    def _head(self, head: Head) -> Iterator[None]:
        for scorer in self._scorers:
            scorer.head = head
        yield
        for scorer in self._scorers:
            scorer.head = values_of

    def _config_for(self, longest: int, tokens: int = 0) -> Config:
        """The configuration with rows for a window of `longest` tokens, or for `tokens` in one step if that is more."""
        if longest - 1 > self.longest:
            raise ConfigError(
                f"a text of {longest - 1:,} tokens is longer than train.seq_length={self.longest}; raise it"
            )
        train = self._config.train
        share = min(-(-tokens // train.global_batch_size), self.longest)
        unit = 2 * self._ctx.cp.size * self._ctx.tp.size  # as context and sequence parallelism cut rows
        length = -(-max(longest - 1, share) // unit) * unit
        return replace(self._config, train=replace(train, seq_length=min(length, self.longest)))


class _Place(NamedTuple):
    """Where the log-probability of a window's last token stands: in front of column `stop` of a row."""

    row: int
    stop: int


def _places(rows: Sequence[Sequence[NDArray[np.integer]]]) -> Iterator[_Place]:
    for number, row in enumerate(rows):
        first = 0
        for window in row:
            first += len(window)
            yield _Place(number, first - 1)


def _log_probs_and_hits(stage: Stage, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
    """The log-probability of each target, and whether it has the highest logit, fp32 [s, b, 2]."""
    assert stage.norm is not None
    hits_sb = torch.empty(batch.targets_bs.t().shape, dtype=torch.bool, device=x_sbh.device)
    losses_sb = stage.token_losses(stage.norm(x_sbh), batch.targets(), hits_sb)
    return torch.stack([-losses_sb, hits_sb], dim=-1)


def _last_logits(stage: Stage, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
    """The logits [b, v] of the column whose target has a weight, fp32; zeros for rows without one."""
    sharding = stage.factory.sharding
    vocabulary = stage.model.vocab_size
    own_sbv = stage.logits(x_sbh).float()
    own_bv = torch.where(batch.weights_bs.t()[..., None] > 0, own_sbv, 0.0).sum(0)
    start, stop, _ = vocabulary_cut(vocabulary, sharding.tp)
    logits_bv = torch.zeros(batch.size, vocabulary, device=own_bv.device)
    logits_bv[:, start:stop] = own_bv[:, : stop - start]  # padding comes last
    return collectives.all_reduce(logits_bv, sharding.tp)


def _weighing(batch: MicroBatch, last_b: Tensor) -> MicroBatch:
    """The micro-batch with weight 1 at column `last_b` of each row, counted over all samples, and 0 elsewhere."""
    columns_b = last_b.to(batch.positions_s.device)[batch.sample_ids_b]
    return replace(batch, weights_bs=(batch.positions_s == columns_b[:, None]).float())


def _with_cache(decoder: Decoder, rows: list[list[int]]) -> Iterator[Tensor]:
    while True:
        yield decoder.logits_bv
        decoder.append([row[-1] for row in rows])
