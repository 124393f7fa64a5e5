"""Comparison of a converted model's logits with those of another implementation with the same weights."""

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.declare.batch import MicroBatch
from megapar.declare.params import spec_of
from megapar_models.convert import megatron, megatron_core
from megapar_models.convert.config_json import is_of_sequences, known_type
from megapar_models.convert.exported import ours_in_fp32
from megapar_models.convert.saved import load_model
from megapar_models.stage import Stage

# Relative to the largest logit. A wrong conversion differs by much more, the rounding of deep models by less.
TOLERANCE = 1e-4


class Reference(NamedTuple):
    """Another implementation of the model with the same weights.

    `logits` takes tokens [s] and the first wanted position; it returns [s - first, v]. `misread` names our options
    with other values than the reference's, if the reference can tell.
    """

    name: str
    logits: Callable[[Tensor, int], Tensor]
    misread: Callable[[ModelConfig], list[str]] = lambda model: []


def check_transformers(wanted: bool) -> None:
    """Raise ConfigError if transformers is `wanted` and not installed."""
    if wanted and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--verify compares with transformers, which is not installed: pip install 'megapar[convert]' or --no-verify"
        )


def transformers_reference(folder: Path) -> Reference:
    """The model in a Hugging Face folder, in fp32. Raises ConfigError if transformers has no class for its type."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    name = f"transformers {importlib.metadata.version('transformers')}"
    # Left at None, transformers would ask at the terminal whether to run code of the folder.
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **how)
    for field, value in known_type(config.model_type).judged_with(config).items():
        setattr(config, field, value)
    how["config"] = config
    if "/" in str(config._attn_implementation):  # a file that names a kernel of a hub is no reason to run one
        how["attn_implementation"] = "eager"
    if is_of_sequences(config.to_dict()):
        scorer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **how)
        scorer.eval()
        # It returns the score of the last token alone.
        return Reference(name, lambda tokens_s, first: scorer.score(scorer.model(tokens_s[None])[0])[0, first:])
    model = causal_class(config).from_pretrained(folder, dtype=torch.float32, **how).eval()

    def logits(tokens_s: Tensor, first: int) -> Tensor:
        return model(tokens_s[None], logits_to_keep=len(tokens_s) - first).logits[0]

    return Reference(name, logits)


def causal_class(config: Any) -> Any:
    """Return transformers' class that gives logits of the next token for a config: one of the Auto classes, or its own.

    Raises ConfigError if there is none.
    """
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    found = getattr(transformers, known_type(config.model_type).architecture, None)
    if found is None:
        text = f"transformers has no class of logits for model_type={config.model_type!r}"
        raise ConfigError(f"--verify: {text}, so nothing can be compared; --no-verify converts")
    return found


def native_reference(checkpoint: Path, family: str = "") -> Reference:
    """The model of a native checkpoint, in fp32. `family` is as in `saved_config`."""
    _, stage = load_fp32(checkpoint, torch.float32, family)
    return Reference(str(checkpoint), lambda tokens_s, first: native_logits(stage, tokens_s, first))


def megatron_reference(source: megatron.MegatronCheckpoint, dtype: torch.dtype) -> Reference:
    """Megatron-Core's model of a classic checkpoint, in fp32 from weights rounded to `dtype`."""
    model = megatron_core.MegatronModel(source, dtype)
    return Reference(megatron_core.version(), lambda tokens_s, first: model.logits(tokens_s)[first:], model.misread)


def verify(
    native: Path, reference: Reference, dtype: torch.dtype, family: str = "", found_fp32: Collection[str] = ()
) -> dict[str, Any]:
    """Compare logits, print the differences and return them for parity.json. CheckpointError beyond the tolerance.

    `family` is as in `saved_config`, and `found_fp32` that of `dtypes_of`.
    """
    config, rows = parity(native, reference, dtype, family, found_fp32)
    table = Table("prompt", "tokens", "compared from", "largest logit", "largest difference", "relative")
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        table.add_row(*cells)
    Console().print(table)
    worst = max(row["relative"] for row in rows)
    # The sum, because max() does not order NaN.
    if not math.isfinite(sum(row["relative"] for row in rows)):
        raise CheckpointError(f"{native}: logits are not finite, though the weights are: this model overflows")
    if not worst <= TOLERANCE:
        misread = reference.misread(config.model)
        reasons = f": {'; '.join(misread)}" if misread else ""
        raise CheckpointError(
            f"logits differ from those of {reference.name} by {worst:.3g} of the largest, more than {TOLERANCE}; "
            f"nothing was written: the conversion is wrong for this model{reasons}"
        )
    summary = {"reference": reference.name, "computed_in": "float32", "weights": str(dtype).removeprefix("torch.")}
    return {**summary, "tolerance": TOLERANCE, "prompts": rows}


@torch.no_grad()
def parity(
    native: Path, reference: Reference, dtype: torch.dtype, family: str = "", found_fp32: Collection[str] = ()
) -> tuple[Config, list[dict[str, Any]]]:
    """The options of `native`, and the largest difference of logits on each prompt, in fp32 from weights in `dtype`."""
    config, stage = load_fp32(native, dtype, family, found_fp32)
    rows = []
    for name, tokens_s, first in prompts(config.model):
        ours_sv = native_logits(stage, tokens_s, first)[:, : config.model.vocab_size]
        theirs_sv = reference.logits(tokens_s, first)[:, : config.model.vocab_size]
        largest = float(theirs_sv.abs().max())
        difference = float((ours_sv - theirs_sv).abs().max())
        rows.append(
            {
                "prompt": name,
                "tokens": len(tokens_s),
                "first_position": first,
                "largest_logit": largest,
                "largest_difference": difference,
                "relative": difference / largest,
            }
        )
    return config, rows


def prompts(model: ModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, tokens [s], first position to compare): a fixed prompt, a short random one, and a long random one.

    The last tokens of the long one are beyond position 2,048, if the model has so many positions.
    """
    generator = torch.Generator().manual_seed(0)
    short = min(64, model.max_position_embeddings)
    length = min(2048 + 64, model.max_position_embeddings)
    yield "fixed", (7919 * torch.arange(short) + 13) % model.vocab_size, 0
    yield "random", torch.randint(model.vocab_size, (short,), generator=generator), 0
    yield "random, last positions", torch.randint(model.vocab_size, (length,), generator=generator), length - short


@torch.no_grad()
def load_fp32(
    checkpoint: Path, dtype: torch.dtype, family: str = "", found_fp32: Collection[str] = ()
) -> tuple[Config, Stage]:
    """The whole model in one stage, in fp32 from weights rounded to `dtype`; those of `found_fp32` are not rounded."""
    config, stage = load_model(checkpoint, family, precision="fp32")
    exact = ours_in_fp32(config.model, found_fp32)
    for param in stage.parameters():
        if not any(piece.name in exact for piece in spec_of(param).pieces):
            param.copy_(param.to(dtype))
    return config, stage


@torch.no_grad()
def native_logits(stage: Stage, tokens_s: Tensor, first: int) -> Tensor:
    """The logits [s - first, v] of the positions from `first` on."""
    tokens_bs = tokens_s[None]
    batch = MicroBatch.of_samples(tokens_bs, tokens_bs, torch.zeros(tokens_bs.shape), torch.zeros(1, dtype=torch.int64))
    return stage.logits(stage.hidden_states(None, batch)[first:])[:, 0]
