"""Continue texts with a trained model, or answer. It runs in one process, whatever layout trained the model."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from megapar_models.convert.saved import load_model, text_record, texts_of
from megapar_models.generation import Sampling, generate, why_no_cache, why_no_proposals
from megapar_tools.prepare.texts import TextOptions, Texts, end_of_turn, template_of

from megapar.base.errors import ConfigError
from megapar.launch.reporting import reported


@dataclass(frozen=True)
class Arguments(Sampling, TextOptions):
    """Sample text from a checkpoint."""

    checkpoint: tyro.conf.Positional[Path] = tyro.MISSING
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    prompt: tuple[str, ...] = tyro.MISSING
    """Texts to continue. They go through the model together."""
    chat: bool = False
    """Each prompt is a message of a user, in the chat template of the training. The answer to it is printed."""
    tokens: int = 200
    """Tokens to add; generation stops earlier at the end of the document."""
    samples: int = 1
    """Continuations of each text."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    stop: str = ""
    """Cut each continuation before this text, such as the end of a turn; with --chat by default what ends a turn."""


def questions(args: Arguments, spec: str) -> tuple[list[str], str]:
    """Return the messages as the template writes them, and what ends an answer. Raises ConfigError without template."""
    template = template_of(text_record(args.checkpoint), spec)
    if template is None:
        text = f"neither the checkpoint nor the folder of {spec} holds a chat template; write its markers into --prompt"
        raise ConfigError(f"--chat: {args.checkpoint}: {text}")
    written = [template.text([{"role": "user", "content": text}], add_generation_prompt=True) for text in args.prompt]
    return written, end_of_turn(template)


def reading_of(args: Arguments, spec: str) -> TextOptions:
    """How the prompts become tokens."""
    if not args.chat:
        return args
    # A template writes special tokens, the start token among them, as in the training.
    parses = spec.startswith("hf:") or text_record(args.checkpoint).get("special_tokens") == "parse"
    return TextOptions(special_tokens="parse" if parses else "text", start_token="never")


def check(args: Arguments) -> None:
    """Raise ConfigError for values that mean nothing."""
    problems = args.problems()
    if args.samples < 1 or args.tokens < 0:
        problems.append(f"--samples {args.samples}, --tokens {args.tokens}: must be at least 1, and at least 0")
    if args.chat and (args.special_tokens, args.start_token) != ("auto", "auto"):
        problems.append("--chat: the template decides what --special_tokens and --start_token say; leave them out")
    if problems:
        raise ConfigError("\n".join(problems))


def continued(args: Arguments, texts: Texts, ids: list[int], given: int, stop: str) -> str:
    """The text of `ids` behind the first `given` ones, up to the text `stop`."""
    decode = texts.tokenizer.decode
    continuation = decode(ids)[len(decode(ids[:given])) :]
    return continuation.partition(stop)[0] if stop else continuation


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        check(args)
        config, stage = load_model(args.checkpoint, args.family)
        if config.model.head != "vocabulary":
            text = f"model.head={config.model.head}: the model rates texts and writes none; use score.py"
            raise ConfigError(f"{args.checkpoint}: {text}")
        given, stop = list(args.prompt), args.stop
        if args.chat:
            given, end = questions(args, config.data.tokenizer)
            stop = stop or end
        texts = texts_of(args.checkpoint, reading_of(args, config.data.tokenizer))
        for note in () if args.chat else texts.notes:
            print(note, file=sys.stderr)
        # A document begins behind the end of another one, so an empty prompt becomes the end token.
        prompts = [texts.encode(text).tolist() or [texts.tokenizer.eod] for text in given]
        if reason := why_no_cache(stage, prompts, args.tokens):
            print(f"without a cache of keys and values: {reason}", file=sys.stderr)
        elif stage.mtp is not None and (reason := why_no_proposals(stage, prompts, args.tokens, args)):
            print(f"without proposals of multi-token prediction: {reason}", file=sys.stderr)
        ends = texts.tokenizer.encode(stop).tolist() if stop else []
        found = generate(
            stage,
            prompts,
            args.tokens,
            texts.tokenizer.eod,
            args,
            args.samples,
            ends=ends if len(ends) == 1 else (),
        )
        shown = []
        for number, ids in enumerate(found):
            asked = number // args.samples
            before = f"{args.prompt[asked]}\n" if args.chat else args.prompt[asked]
            shown.append(before + continued(args, texts, ids, len(prompts[asked]), stop))
        print("\n--\n".join(shown))


if __name__ == "__main__":
    main()
