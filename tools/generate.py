"""Continue texts with a trained model. It runs in one process, whatever layout trained the model."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from megapar_models.convert.saved import load_model
from megapar_models.generation import Sampling, generate, why_no_cache

from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError
from megapar.launch.reporting import reported


@dataclass(frozen=True)
class Arguments(Sampling):
    """Sample text from a checkpoint."""

    checkpoint: tyro.conf.Positional[Path] = tyro.MISSING
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    prompt: tuple[str, ...] = tyro.MISSING
    """Texts to continue. They go through the model together."""
    tokens: int = 200
    """Tokens to add; generation stops earlier at the end of the document."""
    samples: int = 1
    """Continuations of each text."""
    stop: str = ""
    """Cut each continuation before this text, such as the end of a turn."""


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        problems = args.problems()
        if args.samples < 1 or args.tokens < 0:
            problems.append(f"--samples {args.samples}, --tokens {args.tokens}: must be at least 1, and at least 0")
        if problems:
            raise ConfigError("\n".join(problems))
        config, stage = load_model(args.checkpoint)
        if config.model.head != "vocabulary":
            text = f"model.head={config.model.head}: the model rates texts and writes none; use score.py"
            raise ConfigError(f"{args.checkpoint}: {text}")
        tokenizer = load_tokenizer(config.data.tokenizer)
        # A document begins behind the end of another one, so an empty prompt becomes the end token.
        prompts = [tokenizer.encode(text).tolist() or [tokenizer.eod] for text in args.prompt]
        if reason := why_no_cache(stage, prompts, args.tokens):
            print(f"without a cache of keys and values: {reason}", file=sys.stderr)
        texts = generate(stage, prompts, args.tokens, tokenizer.eod, args, args.samples)
        shown = []
        for number, ids in enumerate(texts):
            given = len(prompts[number // args.samples])
            continuation = tokenizer.decode(ids)[len(tokenizer.decode(ids[:given])) :]
            if args.stop:
                continuation = continuation.partition(args.stop)[0]
            shown.append(tokenizer.decode(ids[:given]) + continuation)
        print("\n--\n".join(shown))


if __name__ == "__main__":
    main()
