"""The grammar of data.train, data.stages and data.validation, and the checks of the data options."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megapar.config.messages import counted, first_few, problem
from megapar.config.options import Config

_MOST_SAMPLES = 1 << 60  # positions of samples are computed in 64 bits
_UNSPLIT = ("synthetic", "hf")  # sources without documents to split


class DataSource(NamedTuple):
    """One entry of data.train: a source and its amount, a weight or a number of tokens of the run.

    `amount` is None if the entry states none.
    """

    source: str
    amount: float | None = None
    unit: Literal["weight", "tokens"] = "weight"

    @classmethod
    def parse(cls, text: str) -> "DataSource":
        """Parse SOURCE, WEIGHT:SOURCE or Ntokens:SOURCE.

        Without a number before the colon all of it is SOURCE, as in hf:NAME.
        """
        number, _, source = text.partition(":")
        try:
            amount = float(number.removesuffix("tokens"))
        except ValueError:
            return cls(text)
        return cls(source, amount, "tokens" if number.endswith("tokens") else "weight")


def blend_stages(config: Config) -> list[tuple[int, tuple[float, ...]]]:
    """(first sample, weights of data.train's sources) for each stage of a validated config's blend."""
    entries = [DataSource.parse(text) for text in config.data.train]
    return [(0, _weights(config, entries)), *map(_parse_stage, config.data.stages)]


def weights_to_come(config: Config, consumed: int, taken: Sequence[int]) -> tuple[float, ...]:
    """The weight of each source after `consumed` samples, by what is left of the tokens in data.train.

    `taken` are the numbers of samples that the sources have given. A source that has had its tokens gets no more.
    """
    length = config.train.seq_length
    entries = [DataSource.parse(text) for text in config.data.train]
    given = [
        max(entry.amount - number * length, 0.0)
        for entry, number in zip(entries, taken, strict=True)
        if entry.amount is not None
    ]
    rest = max((config.train.samples() - consumed) * length - sum(given), 0.0)
    left = iter(given)
    return tuple(rest if entry.amount is None else next(left) for entry in entries)


def validation_sets(config: Config) -> list[tuple[str, str]]:
    """(name, source) of each entry of data.validation. Without a name, the last part of the source is it."""
    sets = []
    for text in config.data.validation:
        match = re.fullmatch(r"([\w.-]+)=(.+)", text)
        if match:
            sets.append((match[1], match[2]))
        else:
            sets.append((re.split(r"[/:]", text)[-1], text))
    return sets


def data_problems(config: Config) -> Iterator[str]:
    """Yield a line for each problem of the options of `data`."""
    data = config.data
    entries = [DataSource.parse(text) for text in data.train]
    if not entries:
        yield problem(config, "data.train", "0 entries; give a .bin/.idx prefix, a blend of them, or synthetic")
    checked = [_entry_problem(text, entry) for text, entry in zip(data.train, entries, strict=True)]
    bad = [text for text in checked if text]
    bad += _named_twice([entry.source for entry in entries])
    # Sums of weights say nothing while a single entry is wrong.
    yield from bad or [*_amounts_of_blend(config, entries), *_stages(config, entries)]
    names = [name for name, _ in validation_sets(config)]
    if len(set(names)) < len(names):
        yield problem(config, "data.validation", "two sets of one name; name them: web=PREFIX code=PREFIX")
    yield from _split(config, entries)
    if bool(data.fim_rate) != bool(data.fim_tokens) or len(data.fim_tokens) not in (0, 3) or data.fim_rate > 1:
        text = "a share of at most 1, and three token ids that mark prefix, suffix and middle; or leave both out"
        yield problem(config, "data.fim_rate data.fim_tokens", text)
    elif config.model.vocab_size and any(token >= config.model.vocab_size for token in data.fim_tokens):
        yield problem(config, "data.fim_tokens model.vocab_size", "ids must lie within the vocabulary")
    prefix, _, file = data.tokenizer.partition(":")
    if data.tokenizer != "bytes" and not (prefix in ("spm", "hf", "tiktoken") and file):
        text = "must be bytes, spm:FILE (sentencepiece), hf:FILE or hf:ORG/MODEL (tokenizer.json), or tiktoken:FILE"
        yield problem(config, "data.tokenizer", text)


def _split(config: Config, entries: Sequence[DataSource]) -> Iterator[str]:
    """Yield the problems of data.split."""
    data = config.data
    if not data.split:
        return
    unsplit = [entry.source for entry in entries if entry.source.partition(":")[0] in _UNSPLIT]
    if unsplit:
        text = f"{first_few(unsplit, 3)} has no documents to split; leave it out, and name data.validation"
        yield problem(config, "data.split data.train", text)
    if data.validation:
        text = "the second share of data.split is the validation set already; leave one of the two out"
        yield problem(config, "data.split data.validation", text)
    if len(data.split) not in (2, 3) or not data.split[0] > 0:
        yield problem(config, "data.split", "give two or three shares, the first above 0, such as 969 30 1")


def _named_twice(sources: Sequence[str]) -> list[str]:
    """A problem for each source listed twice in data.train, also under several spellings."""
    spellings: dict[str, list[str]] = {}
    for source in sources:
        spellings.setdefault(_one_spelling(source), []).append(source)
    problems = []
    for names in spellings.values():
        if len(names) > 1:
            also = "" if len(set(names)) == 1 else f", also as {names[1]}"
            problems.append(f"data.train={names[0]}: named twice{also}; give it one weight, the sum")
    return problems


def _one_spelling(source: str) -> str:
    """Return a source with its path absolute and normal, so two spellings of one path are equal. Links stay."""
    prefix = ""
    path = source
    if source.startswith("hf:"):
        prefix, _, path = source.rpartition(":")
        prefix = f"{prefix}:"
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed: absolute paths are as good as ever
        here = ""
    return f"{prefix}{os.path.normpath(os.path.join(here, path))}"


def _entry_problem(text: str, entry: DataSource) -> str:
    """What is wrong with an entry of data.train by itself, or "" if nothing is. `text` is what was given."""
    if not entry.source:
        return f"data.train={text}: names no source; write {text}PREFIX"
    if entry.amount is None or (math.isfinite(entry.amount) and entry.amount >= 0):
        return ""
    return f"data.train={text}: the {entry.unit} must be a finite number of at least 0"


def _amounts_of_blend(config: Config, entries: Sequence[DataSource]) -> Iterator[str]:
    """Yield the problems of data.train's weights or tokens as a whole. Each entry must be right by itself."""
    given = [entry for entry in entries if entry.amount is not None]
    open_entries = len(entries) - len(given)
    units = {entry.unit for entry in given}
    if len(units) > 1:
        yield problem(config, "data.train", "weights and tokens; use one of the two")
    elif units == {"tokens"} and len(config.train.batch_ramp) in (0, 3):
        tokens = sum(entry.amount or 0.0 for entry in given)
        run = config.train.samples() * config.train.seq_length
        if config.data.stages:
            yield problem(config, "data.train data.stages", "stages are weights; give data.train weights too")
        elif open_entries > 1:
            yield problem(config, "data.train", f"{open_entries} entries without tokens; one may take the rest")
        elif _tokens_do_not_fit(tokens, run, has_rest=open_entries > 0):
            text = f"{tokens:,.0f} tokens, the run has {run:,}; give less, and one entry without a number for the rest"
            yield problem(config, "data.train train.steps", text)
    elif open_entries and len(entries) > 1:
        yield problem(config, "data.train", "a blend needs a weight for each source, such as 0.7:A 0.3:B")
    elif entries:
        text = _blend_problem(_weights(config, entries))
        if text:
            yield problem(config, "data.train", text)


def _tokens_do_not_fit(tokens: float, run: int, *, has_rest: bool) -> bool:
    """Whether `tokens` leave nothing for the entry of the rest or, without one, do not fill the run."""
    if has_rest:
        return tokens >= run
    return abs(tokens - run) > 1e-6 * run  # the blend rounds weights to millionths


def _blend_problem(weights: Sequence[float]) -> str:
    """What is wrong with the weights of a stage, or "" if nothing is."""
    total = sum(weights)
    if not total > 0:
        return "the weights sum to 0"
    if any(0 < weight < 1e-6 * total for weight in weights):  # the blend rounds weights to millionths
        return "a weight below a millionth of the sum would be rounded to nothing; use 0 or more"
    return ""


def _stages(config: Config, entries: Sequence[DataSource]) -> Iterator[str]:
    """Yield the problems of data.stages, and of sources without a stage."""
    last = 0
    weighted = {entry.source for entry in entries if entry.amount != 0}
    for text in config.data.stages:
        first, weights = _parse_stage(text)
        if not last < first < _MOST_SAMPLES:
            yield f"data.stages={text}: must be SAMPLE:W,W,... with a sample above {last} and below 2^60"
        elif len(weights) != len(entries):
            count = counted(len(weights), "weight")
            yield f"data.stages={text}: {count} for the {counted(len(entries), 'source')} of data.train"
        elif not all(math.isfinite(w) and w >= 0 for w in weights):
            yield f"data.stages={text}: weights must be finite and at least 0"
        else:
            wrong = _blend_problem(weights)
            if wrong:
                yield f"data.stages={text}: {wrong}"
        last = max(first, last)
        weighted |= {entry.source for entry, weight in zip(entries, weights, strict=False) if weight > 0}
    for entry in entries:
        if entry.source not in weighted:
            yield f"data.train={entry.source}: of weight 0 in the whole run; leave it out, or use it in data.stages"


def _parse_stage(text: str) -> tuple[int, tuple[float, ...]]:
    """(first sample, weights) of an entry of data.stages. The first sample is -1 if the text cannot be read."""
    first, _, weights = text.partition(":")
    try:
        return int(first), tuple(map(float, weights.split(",")))
    except ValueError:
        return -1, ()


def _weights(config: Config, entries: Sequence[DataSource]) -> tuple[float, ...]:
    """The weight of each entry. Among tokens, the entry without a number gets the rest of the run's tokens."""
    rest = 1.0  # a single source needs no number
    if any(entry.unit == "tokens" for entry in entries):
        run = config.train.samples() * config.train.seq_length
        rest = run - sum(entry.amount or 0.0 for entry in entries)
    return tuple(rest if entry.amount is None else entry.amount for entry in entries)
