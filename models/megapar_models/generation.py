"""Continues token sequences with a model in one process: a batch of prompts, with a cache of keys and values.

Prompts of unequal lengths stand at the right ends of their rows. What fills a row in front of its prompt is a document
of its own, which the prompt does not attend to.

Shapes: b prompts, s columns, n query heads, d width of a query and a key, v vocabulary.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megapar.declare.batch import MicroBatch
from megapar_models.stage import Stage

Ids = Sequence[int]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from its logits."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw among this many most likely tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest tokens with this probability together (arXiv 1904.09751)."""
    seed: int = 0
    """Seed of the sampling. A prompt is continued in the same way alone and in a batch."""

    def problems(self) -> list[str]:
        """A line for each value that means nothing."""
        lines = []
        if self.temperature < 0:
            lines.append(f"--temperature {self.temperature}: must be at least 0, which takes the most likely token")
        if self.top_k < 0:
            lines.append(f"--top_k {self.top_k}: must be at least 0, which draws among all tokens")
        if not 0 < self.top_p <= 1:
            lines.append(f"--top_p {self.top_p}: must be above 0 and at most 1, which draws among all tokens")
        return lines

    def generator(self, sample: int = 0) -> torch.Generator:
        """The random numbers of one continuation. `sample` tells several of one prompt apart."""
        seed = self.seed if sample == 0 else int(np.random.SeedSequence([self.seed, sample]).generate_state(1)[0])
        return torch.Generator().manual_seed(seed)


def probabilities(logits_bv: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [b, v] to draw the next tokens with, for a temperature above 0."""
    probs_bv = (logits_bv / sampling.temperature).softmax(-1)
    if 0 < sampling.top_k < probs_bv.shape[-1]:
        least = probs_bv.topk(sampling.top_k).values[:, -1:]
        probs_bv = probs_bv.masked_fill(probs_bv < least, 0.0)
        probs_bv = probs_bv / probs_bv.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        ordered, tokens = probs_bv.sort(descending=True, stable=True)
        # A token stays if those before it have less than top_p. So the first always stays.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs_bv = probs_bv.masked_fill(dropped.scatter(-1, tokens, dropped), 0.0)
        probs_bv = probs_bv / probs_bv.sum(-1, keepdim=True)
    return probs_bv


def draw(logits_bv: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """The next token of each row, by a generator for each."""
    if sampling.temperature == 0:
        return logits_bv.argmax(-1).tolist()
    rows = zip(probabilities(logits_bv, sampling), generators, strict=True)
    return [int(torch.multinomial(probs_v, 1, generator=generator)) for probs_v, generator in rows]


# Keys and values


@contextmanager
def _caches(stage: Stage, first_b: Tensor, capacity: int) -> Iterator[None]:
    """Keep within the block what later columns need of earlier ones, such as keys and values.

    A module with `with_cache(first_b, capacity)` makes the module that takes its place. Row i begins at column
    `first_b[i]`, and a row has at most `capacity` columns.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for module in list(stage.modules()):
        for name, child in module.named_children():
            if hasattr(child, "with_cache"):
                found.append((module, name, child))
    for module, name, core in found:
        setattr(module, name, core.with_cache(first_b, capacity))
    try:
        yield
    finally:
        for module, name, core in found:
            setattr(module, name, core)


def why_no_cache(stage: Stage, prompts: Sequence[Ids], tokens: int) -> str:
    """Say why no cache can be kept while `tokens` are added; "" if one can."""
    for number, layer in stage.layers.items():
        if getattr(layer, "attention", layer) is None:
            continue  # its MLP reads a token alone
        if not any(hasattr(module, "with_cache") for module in layer.modules()):
            return f"the mixer of layer {number} has no cache"
    shortest, longest = min(map(len, prompts)), max(map(len, prompts)) + tokens
    most = stage.model.max_position_embeddings
    if longest > most:
        return f"{longest:,} tokens are more than model.max_position_embeddings={most:,}; the model sees the last ones"
    for rotary in stage.layers.rotary:
        original = rotary.scaling.original_max_position_embeddings
        if rotary.scaling.rope_type == "longrope" and shortest <= original < longest:
            return f"longrope turns keys in another way beyond {original:,} tokens"
    return ""


# Generation


def _first_columns(rows: Sequence[Ids], length: int) -> list[int]:
    return [length - len(row) for row in rows]


def _starts(first: Sequence[int], length: int) -> Tensor | None:
    """The starts of documents in rows of `length` columns, with text from columns `first` on. None: all are full."""
    if not any(first):
        return None
    starts = []
    for row, column in enumerate(first):
        starts += [row * length, row * length + column] if column else [row * length]
    return torch.tensor([*starts, len(first) * length], dtype=torch.int32)


def _columns(tokens_bs: Tensor, first: Sequence[int], length: int) -> MicroBatch:
    """The last columns of rows of `length` columns."""
    zero_b = torch.zeros(len(tokens_bs), dtype=torch.int64)
    positions_s = torch.arange(length - tokens_bs.shape[1], length)
    weights_bs = torch.zeros(tokens_bs.shape)
    return MicroBatch(tokens_bs, tokens_bs, weights_bs, zero_b, positions_s, length, _starts(first, length))


def _logits_of_last(stage: Stage, batch: MicroBatch) -> Tensor:
    """The logits [b, v], fp32, of the token after the last column, without the columns that pad the vocabulary."""
    return stage.logits(stage.hidden_states(None, batch)[-1:])[0, :, : stage.model.vocab_size].float()


def next_logits(stage: Stage, rows: Sequence[Ids]) -> Tensor:
    """The logits [b, v], fp32, of the token after each row."""
    length = max(map(len, rows))
    first = _first_columns(rows, length)
    tokens_bs = torch.tensor([[0] * column + [*row] for column, row in zip(first, rows, strict=True)])
    return _logits_of_last(stage, _columns(tokens_bs, first, length))


class Decoder:
    """Logits after rows that grow by one token each at a time, with a cache of keys and values (`decoding`)."""

    def __init__(self, stage: Stage, rows: Sequence[Ids]):
        self._stage = stage
        self._length = max(map(len, rows))
        self._first = _first_columns(rows, self._length)
        self.logits_bv = next_logits(stage, rows)
        """The logits of the token after each row."""

    def append(self, tokens: Ids) -> None:
        """Add a token to each row."""
        self._length += 1
        batch = _columns(torch.tensor(tokens)[:, None], self._first, self._length)
        self.logits_bv = _logits_of_last(self._stage, batch)


@contextmanager
def decoding(stage: Stage, rows: Sequence[Ids], tokens: int) -> Iterator[Decoder]:
    """A decoder of `rows`, for up to `tokens` further columns. Meanwhile the stage computes nothing else."""
    length = max(map(len, rows))
    with torch.no_grad(), _caches(stage, torch.tensor(_first_columns(rows, length)), length + tokens):
        yield Decoder(stage, rows)


@torch.no_grad()
def generate(
    stage: Stage,
    prompts: Sequence[Ids],
    tokens: int,
    eod: int,
    sampling: Sampling,
    samples: int = 1,
    seeds: Sequence[int] = (),
    ends: Collection[int] = (),
) -> list[list[int]]:
    """The ids of each prompt with its continuation: `samples` of the first prompt, then of the second, and so on.

    A continuation ends before the token `eod` or one of `ends`, or after `tokens` tokens. The model sees the last
    `max_position_embeddings` tokens. `seeds` has a seed for each prompt in place of that of `sampling`, which gives all
    prompts the same random numbers.
    """
    rows = [list(prompt) for prompt in prompts for _ in range(samples)]
    of_prompts = [replace(sampling, seed=seed) for seed in seeds] or [sampling] * len(prompts)
    generators = [
        own.generator(sample) for own, _ in zip(of_prompts, prompts, strict=True) for sample in range(samples)
    ]
    last = {eod, *ends}
    if not why_no_proposals(stage, prompts, tokens, sampling):
        rows = _with_proposals(stage, rows, tokens, last)
        return [_cut(row, len(prompts[number // samples]), last) for number, row in enumerate(rows)]
    if why_no_cache(stage, prompts, tokens):
        logits = _logits_by_whole_rows(stage, rows)
    else:
        logits = _logits_by_cache(stage, rows, tokens)
    going = [True] * len(rows)
    with closing(logits):
        for _ in range(tokens):
            for number, token in enumerate(draw(next(logits), sampling, generators)):
                going[number] &= token not in last
                # Rows that have ended go on, for the others, and are cut below.
                rows[number].append(token)
            if not any(going):
                break
    return [_cut(row, len(prompts[number // samples]), last) for number, row in enumerate(rows)]


def _cut(row: list[int], start: int, ends: Collection[int]) -> list[int]:
    """The row up to the first of `ends` from `start` on."""
    return row[: next((at for at in range(start, len(row)) if row[at] in ends), len(row))]


def _logits_by_whole_rows(stage: Stage, rows: list[list[int]]) -> Generator[Tensor]:
    """Yield the logits after the rows while they grow, computed from whole rows."""
    while True:
        yield next_logits(stage, [row[-stage.model.max_position_embeddings :] for row in rows])


def _logits_by_cache(stage: Stage, rows: list[list[int]], tokens: int) -> Generator[Tensor]:
    """Yield the logits after the rows while they grow, computed from their last tokens and a cache."""
    with decoding(stage, rows, tokens) as decoder:
        while True:
            yield decoder.logits_bv
            decoder.append([row[-1] for row in rows])


# Proposals of multi-token prediction


def why_no_proposals(stage: Stage, prompts: Sequence[Ids], tokens: int, sampling: Sampling) -> str:
    """Say why no tokens are proposed while `tokens` are added; "" if some are."""
    if stage.mtp is None:
        return "the model has no layers of multi-token prediction"
    if sampling.temperature:
        return f"proposals are of greedy decoding, and --temperature {sampling.temperature:g} draws others; use 0"
    if reason := why_no_cache(stage, prompts, tokens + len(stage.mtp.depths)):
        return reason
    for number, layer in stage.layers.items():
        if any(hasattr(module, "with_cache") and not hasattr(module, "REWINDS") for module in layer.modules()):
            return f"the mixer of layer {number} keeps a state, which cannot drop a wrong proposal"
    return ""


class Proposer:
    """Greedy decoding of rows, several tokens in a step where proposals of multi-token prediction are right.

    Layers of multi-token prediction propose tokens; one forward pass of the model then gives its own most likely token
    behind each. All rows take the proposals up to the first that disagrees in any row, and one token of the model.
    """

    def __init__(self, stage: Stage, rows: Sequence[Ids]):
        assert stage.mtp is not None
        self._stage, self._mtp = stage, stage.mtp
        length = max(map(len, rows))
        self._first = _first_columns(rows, length)
        self.tokens_bs = torch.tensor([[0] * column + [*row] for column, row in zip(self._first, rows, strict=True)])
        """All tokens. The last one has not been read."""
        self.proposed, self.taken = 0, 0
        # What each layer of multi-token prediction reads, and how many columns of that stay right.
        self._states = [self._read(self.tokens_bs, length)] * len(self._mtp.depths)
        self._right = [0] * len(self._mtp.depths)
        self.tokens_bs = torch.cat([self.tokens_bs, self._best(self._states[0][-1:])], dim=1)

    def step(self, going_b: Tensor) -> None:
        """Add one to 1 + depths tokens to each row. `going_b`, bool [b], is False for rows that have ended."""
        proposals_bs = self._proposals()
        read = self.tokens_bs.shape[1]
        given_bs = torch.cat([self.tokens_bs[:, -1:], proposals_bs], dim=1)
        hidden_sbh = self._read(given_bs, read + proposals_bs.shape[1])
        best_bs = self._best(hidden_sbh)
        agree_bs = (best_bs[:, :-1] == proposals_bs) | ~going_b[:, None]
        count = int(agree_bs.all(0).int().cumprod(0).sum())
        self.proposed, self.taken = self.proposed + proposals_bs.shape[1], self.taken + count
        self.tokens_bs = torch.cat([self.tokens_bs, best_bs[:, : count + 1]], dim=1)
        _rewind(self._stage.layers, read + count)
        self._states[0] = torch.cat([self._states[0], hidden_sbh[: count + 1]])

    def _proposals(self) -> Tensor:
        """Return the tokens [b, depths] that the layers of multi-token prediction propose."""
        known_bs, length = self.tokens_bs, self.tokens_bs.shape[1]
        for depth, layer in enumerate(self._mtp.depths):
            # All columns behind those that stay right. The last ones read proposals of the layers before.
            start = self._right[depth]
            later = _columns(known_bs[:, start + depth + 1 :], self._first, length - 1)
            given_sbh = self._mtp.hidden_states(depth, self._states[depth][start:], later, self._stage)
            self._right[depth] = max(length - 1 - depth, 0)
            _rewind(layer, self._right[depth])
            if depth + 1 < len(self._states):
                self._states[depth + 1] = torch.cat([self._states[depth + 1][:start], given_sbh])
            known_bs = torch.cat([known_bs, self._best(given_sbh[-1:])], dim=1)
        return known_bs[:, length:]

    def _read(self, tokens_bs: Tensor, length: int) -> Tensor:
        """Return the normed hidden states [s, b, h] of the columns `tokens_bs`, the last ones of `length`."""
        assert self._stage.norm is not None
        hidden_sbh = self._stage.hidden_states(None, _columns(tokens_bs, self._first, length))
        normed_sbh: Tensor = self._stage.norm(hidden_sbh)
        return normed_sbh

    def _best(self, normed_sbh: Tensor) -> Tensor:
        """Return the most likely token behind each position, int64 [b, s]."""
        stage = self._stage
        logits_sbv = stage.head_rule.logits(normed_sbh, stage.head, stage.head_bias)
        return logits_sbv[..., : stage.model.vocab_size].float().argmax(-1).t()


def _rewind(module: nn.Module, length: int) -> None:
    for part in module.modules():
        rewind: Callable[[int], None] | None = getattr(part, "rewind", None)
        if rewind is not None:
            rewind(length)


@contextmanager
def proposing(stage: Stage, rows: Sequence[Ids], tokens: int) -> Iterator[Proposer]:
    """Yield a proposer of `rows` with room for `tokens` further columns. The stage computes nothing else meanwhile."""
    assert stage.mtp is not None
    length = max(map(len, rows))
    capacity = length + tokens + 1 + len(stage.mtp.depths)
    with torch.no_grad(), _caches(stage, torch.tensor(_first_columns(rows, length)), capacity):
        yield Proposer(stage, rows)


def _with_proposals(stage: Stage, rows: list[list[int]], tokens: int, last: set[int]) -> list[list[int]]:
    """Return the rows with up to `tokens` tokens of greedy decoding behind each."""
    if not tokens:
        return rows
    length = max(map(len, rows))
    with proposing(stage, rows, tokens) as proposer:
        while True:
            added = proposer.tokens_bs[:, length : length + tokens].tolist()
            going = [not last.intersection(new) for new in added]
            if not any(going) or len(added[0]) == tokens:
                return [[*row, *new] for row, new in zip(rows, added, strict=True)]
            proposer.step(torch.tensor(going))
