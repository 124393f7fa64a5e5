"""The grammar of data.train, data.stages and data.validation, and what of them cannot be."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megapar.config import Config
from megapar.messages import problem

_UNSPLIT = ("synthetic", "hf")  # sources without documents to split


class Entry(NamedTuple):
    """One entry of data.train: a source, and how much of it: a weight, or tokens of the run."""

    source: str
    amount: float | None = None
    unit: Literal["weight", "tokens"] = "weight"

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """SOURCE, WEIGHT:SOURCE or Ntokens:SOURCE; what stands before a colon and is no number belongs to SOURCE."""
        number, _, source = text.partition(":")
        try:
            amount = float(number.removesuffix("tokens"))
        except ValueError:
            return cls(text)
        return cls(source, amount, "tokens" if number.endswith("tokens") else "weight")


def blend_stages(config: Config) -> list[tuple[int, tuple[float, ...]]]:
    """(first sample, weights of data.train's sources) for each mix of a validated config's run."""
    entries = [Entry.parse(text) for text in config.data.train]
    return [(0, _weights(config, entries)), *map(_parse_stage, config.data.stages)]


def validation_sets(config: Config) -> list[tuple[str, str]]:
    """(name, source) of each of data.validation; a source without a name goes by its last part."""
    matches = [(re.fullmatch(r"([\w.-]+)=(.+)", text), text) for text in config.data.validation]
    return [(m[1], m[2]) if m else (re.split(r"[/:]", text)[-1], text) for m, text in matches]


def data_problems(config: Config) -> Iterator[str]:
    """A line for each problem of the options of `data`."""
    data = config.data
    entries = [Entry.parse(text) for text in data.train]
    if not entries:
        yield problem(config, "data.train", "0 entries; give a .bin/.idx prefix, a blend of them, or synthetic")
    found = [_entry_problem(text, entry) for text, entry in zip(data.train, entries, strict=True)]
    bad = [text for text in found if text]
    bad += _named_twice([entry.source for entry in entries])
    yield from bad or [*_amounts_of_blend(config, entries), *_stages(config, entries)]
    names = [name for name, _ in validation_sets(config)]
    if len(set(names)) < len(names):
        yield problem(config, "data.validation", "two sets of one name; name them: web=PREFIX code=PREFIX")
    if data.split and (data.validation or len(entries) != 1 or entries[0].source.partition(":")[0] in _UNSPLIT):
        text = "splits the documents of a single .bin/.idx pair; leave it out, and name data.validation"
        yield problem(config, "data.split data.train data.validation", text)
    elif data.split and (len(data.split) not in (2, 3) or not data.split[0] > 0):
        yield problem(config, "data.split", "give two or three shares, the first above 0, such as 969 30 1")
    if bool(data.fim_rate) != bool(data.fim_tokens) or len(data.fim_tokens) not in (0, 3) or data.fim_rate > 1:
        text = "a share of at most 1, and three token ids that mark prefix, suffix and middle; or neither"
        yield problem(config, "data.fim_rate data.fim_tokens", text)
    elif config.model.vocab_size and any(token >= config.model.vocab_size for token in data.fim_tokens):
        yield problem(config, "data.fim_tokens model.vocab_size", "ids must lie within the vocabulary")
    kind, _, file = data.tokenizer.partition(":")
    if data.tokenizer != "bytes" and not (kind in ("spm", "hf", "tiktoken") and file):
        text = "must be bytes, spm:FILE (sentencepiece), hf:FILE (tokenizer.json) or tiktoken:FILE"
        yield problem(config, "data.tokenizer", text)


def _named_twice(sources: Sequence[str]) -> list[str]:
    """A problem for each source that stands in data.train more than once, under other spellings too."""
    spellings: dict[str, list[str]] = {}
    for source in sources:
        spellings.setdefault(_one_spelling(source), []).append(source)
    return [
        f"data.train={names[0]}: named twice{'' if len(set(names)) == 1 else f', also as {names[1]}'}; "
        "give it one weight, the sum"
        for names in spellings.values()
        if len(names) > 1
    ]


def _one_spelling(source: str) -> str:
    """The same text for two paths to one place, as far as they tell: links are not followed."""
    kind, colon, path = source.rpartition(":") if source.startswith("hf:") else ("", "", source)
    return f"{kind}{colon}{os.path.abspath(path)}"


def _entry_problem(text: str, entry: Entry) -> str:
    if not entry.source:
        return f"data.train={text}: names no source; write {text}PREFIX"
    if entry.amount is None or (math.isfinite(entry.amount) and entry.amount >= 0):
        return ""
    return f"data.train={text}: the {entry.unit} must be a finite number of at least 0"


def _amounts_of_blend(config: Config, entries: Sequence[Entry]) -> Iterator[str]:
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
        elif tokens >= run if open_entries else abs(tokens - run) > 1e-6 * run:
            text = f"{tokens:,.0f} tokens, the run has {run:,}; give less, and one entry without a number for the rest"
            yield problem(config, "data.train train.steps", text)
    elif open_entries and len(entries) > 1:
        yield problem(config, "data.train", "a blend needs a weight for each source, such as 0.7:A 0.3:B")
    elif entries and (text := _blend_problem(_weights(config, entries))):
        yield problem(config, "data.train", text)


def _blend_problem(weights: Sequence[float]) -> str:
    total = sum(weights)
    if not total > 0:
        return "the weights sum to 0"
    small = any(0 < weight < 1e-6 * total for weight in weights)
    return "a weight below a millionth of the sum would be rounded to nothing; use 0 or more" if small else ""


def _stages(config: Config, entries: Sequence[Entry]) -> Iterator[str]:
    last = 0
    weighted = {entry.source for entry in entries if entry.amount != 0}
    for text in config.data.stages:
        first, weights = _parse_stage(text)
        if first <= last:
            yield f"data.stages={text}: must be SAMPLE:W,W,... with a sample above {last}"
        elif len(weights) != len(entries):
            yield f"data.stages={text}: {len(weights)} weights for the {len(entries)} sources of data.train"
        elif not all(math.isfinite(w) and w >= 0 for w in weights):
            yield f"data.stages={text}: weights must be finite and at least 0"
        elif wrong := _blend_problem(weights):
            yield f"data.stages={text}: {wrong}"
        last = max(first, last)
        weighted |= {entry.source for entry, weight in zip(entries, weights, strict=False) if weight > 0}
    for entry in entries:
        if entry.source not in weighted:
            yield f"data.train={entry.source}: of weight 0 in the whole run; leave it out, or use it in data.stages"


def _parse_stage(text: str) -> tuple[int, tuple[float, ...]]:
    """(first sample, weights); a first sample of -1 where the text cannot be read."""
    first, _, weights = text.partition(":")
    try:
        return int(first), tuple(map(float, weights.split(",")))
    except ValueError:
        return -1, ()


def _weights(config: Config, entries: Sequence[Entry]) -> tuple[float, ...]:
    rest = 1.0
    if any(entry.unit == "tokens" for entry in entries):
        run = config.train.samples() * config.train.seq_length
        rest = run - sum(entry.amount or 0.0 for entry in entries)
    return tuple(rest if entry.amount is None else entry.amount for entry in entries)
