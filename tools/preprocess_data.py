"""Turn text into tokens: files or folders of documents into a PREFIX.bin / PREFIX.idx pair, described by PREFIX.json.

Input files are .jsonl with a text in each line, plain text (.txt, .md, .py), both also as .gz and .zst, and .parquet. A
killed run continues when it is started again. Further commands, each with its own --help:

  chat     conversations, rendered by a chat template, with a weight for each token
  preferences  pairs of a chosen and a rejected answer, with weights on the answers
  merge    one pair out of several
  split    a pair into train, validation and test, by documents
  verify   a pair against its sizes, pointers and sidecar; with --full every token
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro
from megapar_tools.prepare.chat import ChatTemplate, load_template
from megapar_tools.prepare.chat_data import ChatCounts, describe, examples, marked, write_examples
from megapar_tools.prepare.chat_masks import Turns
from megapar_tools.prepare.conversations import read_conversations
from megapar_tools.prepare.corpus import find_files
from megapar_tools.prepare.preferences import members, read_pairs
from megapar_tools.prepare.preprocess import PreprocessOptions, TextCounts, preprocess
from megapar_tools.prepare.row_keys import Keys
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megapar.data.prepared import merge_prepared, split, verify
from megapar.data.tokenizer import Tokenizer, fetch_tokenizer, load_tokenizer
from megapar.launch.reporting import reported


@dataclass
class Tokenize:
    """Turn text into tokens, in parallel; the result does not depend on the number of workers."""

    input: tuple[Path, ...]
    """Files, or folders of files, in the order of their documents."""
    output: Path
    """Prefix of the .bin, .idx and .json files to write. PREFIX.parts holds what is unfinished."""
    recipe: tyro.conf.OmitArgPrefixes[tyro.conf.FlagCreatePairsOff[PreprocessOptions]]
    workers: int = 1
    """Processes that tokenize."""

    def run(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            total = sum(path.stat().st_size for path in find_files(self.input))
            show = reporter(progress, total)
            sidecar = preprocess(self.input, self.output, self.recipe, workers=self.workers, on_progress=show)
        parts = [f"{sidecar['documents']:,} documents", f"{sidecar['tokens']:,} tokens"]
        if sidecar["start_token"]:
            # Told, because earlier versions put none in front of documents.
            parts.append(f"each begins with the ids {sidecar['start_token']}, see --start_token")
        if sidecar["empty_documents"]:
            parts.append(f"{sidecar['empty_documents']:,} empty documents left out")
        duplicates = sidecar["documents_before_deduplication"] - sidecar["documents"]
        if duplicates:
            parts.append(f"{duplicates:,} duplicates left out")
        parts += [f"{count:,} x {reason}" for reason, count in sidecar["bad_lines"]["counts"].items()]
        print(f"{self.output}.bin: {', '.join(parts)}")


@dataclass
class Merge:
    """Concatenate pairs of one tokenizer."""

    input: tuple[Path, ...]
    """Prefixes of .bin/.idx pairs, in the order of their documents."""
    output: Path
    """Prefix of the pair to write."""

    def run(self) -> None:
        dataset = merge_prepared(self.input, self.output)
        print(f"{self.output}.bin: {len(dataset):,} documents, {len(dataset.tokens):,} tokens")


@dataclass
class Split:
    """Split a pair by documents, in their order. If the order is not random, preprocess with --shuffle first."""

    input: Path
    """Prefix of a .bin/.idx pair."""
    output: Path
    """PREFIX of PREFIX_train, PREFIX_validation and PREFIX_test."""
    fractions: tuple[float, ...] = (0.98, 0.01, 0.01)
    """Shares of the documents; two of them make no test part."""

    def run(self) -> None:
        for name, dataset in split(self.input, self.output, self.fractions).items():
            print(f"{self.output}_{name}.bin: {len(dataset):,} documents, {len(dataset.tokens):,} tokens")


@dataclass
class Verify:
    """Check .bin/.idx pairs; exit code 3 and one line if one is damaged."""

    input: tuple[Path, ...]
    """Prefixes of .bin/.idx pairs."""
    full: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Read everything: hashes, ids against the vocabulary, ends of documents."""
    vocab_size: int | None = None
    """Ids must be below this, for pairs without a sidecar that says it."""

    def run(self) -> None:
        for prefix in self.input:
            dataset = verify(prefix, full=self.full, vocab_size=self.vocab_size)
            print(f"{prefix}: {len(dataset):,} documents, {len(dataset.tokens):,} {dataset.dtype.name} tokens: sound")


@dataclass(kw_only=True)
class Rendered:
    """What conversations and pairs of answers are made of."""

    input: tuple[Path, ...]
    """Files, or folders of files, in the order of their rows."""
    output: Path
    """Prefix of the .bin, .idx, .weights and .json files to write."""
    tokenizer: str
    """The tokenizer, as in data.tokenizer. With hf: and spm: special tokens in the text become their ids."""
    template: str = ""
    """A file with a chat template, or chatml; by default the one beside the tokenizer."""
    pass_over: tuple[str, ...] = ()
    """Keys of rows and messages to leave out, besides those that are known to have no meaning."""
    date: str = ""
    """The time that a template with strftime_now writes, as 2026-01-31 or 2026-01-31T12:00; by default now."""
    max_length: int = 0
    """The most tokens of a conversation, or of both answers of a pair together; 0: any number."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """What happens to a longer one."""

    def opened(self) -> tuple[list[Path], Tokenizer, ChatTemplate, Keys, ChatCounts]:
        """The files, and what is read from the other options."""
        self.tokenizer = fetch_tokenizer(self.tokenizer)
        tokenizer = load_tokenizer(self.tokenizer, parse_special=self.tokenizer.startswith(("hf:", "spm:")))
        template = load_template(self.template, self.tokenizer, tokenizer, self.date)
        keys = Keys(self.pass_over, template.reads)
        return find_files(self.input), tokenizer, template, keys, ChatCounts(passed_over=keys.counts)

    def told(self, what: str, counts: ChatCounts, template: ChatTemplate) -> None:
        """Print what was made."""
        parts = [what, f"{counts.tokens:,} tokens", f"{counts.trained_tokens:,} of them trained"]
        parts[-1] += f" ({counts.trained_share:.1%})"
        print(f"{self.output}.bin: {', '.join([*parts, *counts.words()])}")
        if template.process.read_clock:
            moment = template.now.isoformat(timespec="seconds")
            print(f"The template writes the time. The same tokens are made on another day by --date {moment}")


@dataclass(kw_only=True)
class Chat(Rendered):
    """Turn conversations into tokens, of which those of the assistant are trained.

    Lines of .jsonl or rows of .parquet have messages, ShareGPT's conversations, instruction with output, or prompt with
    completion.
    """

    turns: Turns = "all"
    """Which turns of the assistant are trained."""
    show: int = 0
    """Print so many examples, their trained tokens marked, and write nothing."""

    def run(self) -> None:
        files, tokenizer, template, keys, counts = self.opened()
        rules = (self.turns, self.max_length, self.too_long, counts)
        found = examples(read_conversations(files, keys), tokenizer, template, *rules)
        if self.show:
            console = Console(highlight=False)
            for example in islice(found, self.show):
                share = f"{example.weights.sum():,} of {len(example.tokens):,} tokens are trained"
                console.print(f"{example.place}: {share}", style="bold", markup=False)
                console.print(marked(example, tokenizer, lambda text: f"\u2192{text}\u2190"), markup=False)
            return
        made = partial(describe, files, self.tokenizer, tokenizer, template, self.turns, counts)
        write_examples(found, self.output, tokenizer, made)
        self.told(f"{counts.examples:,} conversations", counts, template)


@dataclass(kw_only=True)
class Preferences(Rendered):
    """Turn pairs of answers into tokens: of two answers to a prompt, one was chosen and one rejected.

    Lines of .jsonl or rows of .parquet have prompt, chosen and rejected. Each is a text or a list of messages. chosen
    and rejected may also be whole conversations; then their common beginning is the prompt.
    """

    def run(self) -> None:
        files, tokenizer, template, keys, counts = self.opened()
        found = members(read_pairs(files, keys), tokenizer, template, self.max_length, self.too_long, counts)
        made = partial(describe, files, self.tokenizer, tokenizer, template, "last", counts, pairs=True)
        write_examples(found, self.output, tokenizer, made)
        self.told(f"{counts.examples // 2:,} pairs", counts, template)


Command = Tokenize | Chat | Preferences | Merge | Split | Verify
COMMANDS: dict[str, type[Command]] = {
    "chat": Chat,
    "preferences": Preferences,
    "merge": Merge,
    "split": Split,
    "verify": Verify,
}


def reporter(progress: Progress, total: int) -> Callable[[TextCounts], None]:
    """A function to show counts on a progress bar."""
    bar = progress.add_task("starting", total=total)
    start = time.perf_counter()
    before = list[int]()

    def show(counts: TextCounts) -> None:
        # The first counts are those of an earlier run that was killed. They do not count for the speed of this one.
        if not before:
            before.append(counts.num_bytes)
        speed = (counts.num_bytes - before[0]) / 1e6 / max(time.perf_counter() - start, 1e-3)
        text = f"{counts.documents:,} documents  {counts.tokens:,} tokens  {speed:.1f} MB/s"
        bad = sum(counts.bad.values())
        if bad:
            text += f"  {bad:,} bad lines"
        progress.update(bar, completed=counts.num_bytes, description=text)

    return show


def main() -> None:
    command_class: type[Command] = Tokenize
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        command_class = COMMANDS[words.pop(0)]
    description = __doc__ if command_class is Tokenize else None
    with reported():
        command = tyro.cli(command_class, args=words, description=description, use_underscores=True)
        command.run()


if __name__ == "__main__":
    main()
