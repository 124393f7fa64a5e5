"""Continue a text with a trained model. It runs in one process, whatever layout trained the model."""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from megapar_models.convert.saved import load_model
from megapar_models.stage import Stage

from megapar.batch import MicroBatch
from megapar.config.options import Config
from megapar.data.tokenizer import load_tokenizer
from megapar.launch.reporting import reported


@dataclass
class Arguments:
    """Sample text from a checkpoint."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    prompt: str
    """Text to continue."""
    tokens: int = 200
    """Tokens to add; generation stops earlier at the end of the document."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    seed: int = 0
    """Seed of the sampling."""


@torch.no_grad()
def next_logits(stage: Stage, ids: list[int], vocab_size: int) -> torch.Tensor:
    """The logits [vocab_size], fp32, of the token after `ids`."""
    tokens_bs = torch.tensor([ids])
    zero = torch.zeros(1, dtype=torch.int64)
    batch = MicroBatch.of_samples(tokens_bs, tokens_bs, torch.zeros(tokens_bs.shape), zero)
    # Without the columns that pad the vocabulary.
    return stage.logits(stage.hidden_states(None, batch)[-1:])[0, 0, :vocab_size].float()


def generate(config: Config, stage: Stage, prompt: list[int], eod: int, args: Arguments) -> list[int]:
    """The ids of `prompt` and of its continuation. The model sees the last `max_position_embeddings` tokens."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = list(prompt)
    for _ in range(args.tokens):
        logits = next_logits(stage, ids[-config.model.max_position_embeddings :], config.model.vocab_size)
        if args.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / args.temperature).softmax(0), 1, generator=generator))
        if token == eod:
            break
        ids.append(token)
    return ids


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        config, stage = load_model(args.checkpoint)
        tokenizer = load_tokenizer(config.data.tokenizer)
        # A document begins behind the end of another one, so an empty prompt becomes the end token.
        prompt = tokenizer.encode(args.prompt).tolist() or [tokenizer.eod]
        print(tokenizer.decode(generate(config, stage, prompt, tokenizer.eod, args)))


if __name__ == "__main__":
    main()
