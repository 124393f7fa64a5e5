"""Forward and backward of small models of other families than Llama, beside transformers with its attention sdpa and
eager, in one process of one thread: their time, and the bytes that autograd keeps for backward, without parameters.

transformers makes a model with random weights, and its files are converted. All contenders take turns on the same
batch. The benchmark fails if their losses or the norms of their gradients differ.
"""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from megapar_models.convert.saved import load_model
from megapar_models.stage import Stage
from torch import Tensor, nn

from benchmarks.counting import ratio, spread
from benchmarks.harness import Case, Found, Output
from benchmarks.ranks import BenchmarkError
from megapar.declare.batch import MicroBatch
from megapar.observe.kept import KeptBytes

CONVERT = Path(__file__).parents[1] / "convert_checkpoint.py"
VOCABULARY, SAMPLES = 4096, 2
SIZES: Mapping[str, Any] = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "pad_token_id": None, "use_cache": False},
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
# A model_type each, with what makes it itself: windows, shared keys, sinks, latents, experts, delta nets, Mamba-2.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        **{**SIZES, "intermediate_size": 2048, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128},
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        **{**SIZES, "intermediate_size": 2048, "head_dim": 64, "global_head_dim": 128, "sliding_window": 128},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 64},
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gpt_oss": {**SIZES, "intermediate_size": 512, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{**SIZES, **EXPERTS, "num_key_value_heads": 8, "intermediate_size": 2048, "n_routed_experts": 8},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        **{"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    },
    "qwen3_5_text": {
        **{**SIZES, "intermediate_size": 2048, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **{**SIZES, "intermediate_size": 2048, "head_dim": 64, "mamba_num_heads": 16, "n_groups": 2},
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
        "time_step_min": 1e-30,  # transformers lets no time step be smaller, and its default is part of no model
    },
}
Name = Literal["gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_5_text", "nemotron_h"]
# transformers computes gpt_oss's sinks by eager attention alone on a CPU.
ATTENTIONS = {name: ("eager",) if name == "gpt_oss" else ("sdpa", "eager") for name in MODELS}
# How far loss and norm of gradients may differ, relative.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options(Output):
    """Measure small models of families beside transformers."""

    models: tuple[Name, ...] = get_args(Name)
    """The model types."""
    length: int = 512
    """Tokens of each of the two samples."""
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """The dtypes of weights and activations."""
    rounds: int = 9
    """Rounds that count, after one that warms up."""


@dataclass
class Trained:
    """A model, and how its loss is computed: the sum of cross entropies over all tokens of the batch."""

    model: nn.Module
    loss: Callable[[], Tensor]

    def run(self) -> float:
        """Forward and backward."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss.item()

    def gradient_norm(self) -> float:
        """In fp64: on a CPU torch sums the squares of a large fp32 tensor to four digits."""
        gradients = [param.grad.double() for param in self.model.parameters() if param.grad is not None]
        return torch.stack([gradient.norm() for gradient in gradients]).norm().item()

    def kept_bytes(self) -> int:
        """Return the bytes that autograd keeps for backward, without parameters and buffers."""
        with KeptBytes({0: self.model}).counting() as kept:
            loss = self.loss()
        nbytes = kept.live.total()
        del loss
        return nbytes


def their_loss(model: nn.Module, inputs_bs: Tensor, targets_bs: Tensor) -> Tensor:
    # With 1 as the number of targets the loss is the sum. Targets given as shift_labels are taken as they are.
    loss: Tensor = model(inputs_bs, labels=targets_bs, shift_labels=targets_bs, num_items_in_batch=1).loss
    return loss


def converted(theirs: Path, folder: Path, precision: Literal["fp32", "bf16"] = "fp32") -> Stage:
    """The model of transformers' files in the folder `theirs`. `folder` gets ours."""
    command = [sys.executable, str(CONVERT), "hf-to-native", str(theirs), str(folder), "--no-verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{theirs}: {done.stderr.strip()}")
    return load_model(folder, precision=precision)[1]


def contenders(model_type: str, precision: Literal["fp32", "bf16"], length: int) -> dict[str, Trained]:
    """megapar, and transformers with each of its attentions that the model has, with the same weights."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    tokens_bs = torch.randint(VOCABULARY, (SAMPLES, length + 1), generator=torch.Generator().manual_seed(1))
    inputs_bs, targets_bs = tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()
    found: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "theirs")
        stage = converted(folder / "theirs", folder / "ours", precision)
        batch = MicroBatch.of_samples(inputs_bs, targets_bs, torch.ones(SAMPLES, length), torch.arange(SAMPLES))
        found["megapar"] = Trained(stage, partial(stage, None, batch))  # in evaluation mode: no loss of balance
        for attention in ATTENTIONS[model_type]:
            options = {"dtype": DTYPES[precision], "attn_implementation": attention, "local_files_only": True}
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", **options)
            found[f"transformers, {attention}"] = Trained(theirs, partial(their_loss, theirs, inputs_bs, targets_bs))
    return found


def check(found: Mapping[str, Trained], precision: str) -> None:
    """Raise BenchmarkError unless all contenders compute the same."""
    numbers = {name: (one.run(), one.gradient_norm()) for name, one in found.items()}
    for name, theirs in numbers.items():
        for what, ours, other in zip(("loss", "gradient norm"), numbers["megapar"], theirs, strict=True):
            if not abs(ours - other) <= TOLERANCE[precision] * abs(other):
                raise BenchmarkError(f"{what}: megapar {ours}, {name} {other}, {precision}")


def measure(options: Options) -> Found:
    """Time each contender beside megapar. A row has its time over megapar's, the seconds of both, and their bytes."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model_type, precision in product(options.models, options.precisions):
        found = contenders(model_type, precision, options.length)
        check(found, precision)
        kept = {name: one.kept_bytes() for name, one in found.items()}
        ours, *others = Case({name: one.run for name, one in found.items()}, options.rounds).measure().items()
        for name, theirs in others:
            figures = {"speed": ratio(theirs.wall, ours[1].wall), "cpu": ratio(theirs.cpu, ours[1].cpu)}
            seconds = {"seconds": spread(ours[1].wall), "their_seconds": spread(theirs.wall)}
            facts = {"model_type": model_type, "precision": precision, "beside": name}
            both = {"kept_bytes": kept["megapar"], "their_kept_bytes": kept[name]}
            rows.append({**facts, **figures, **seconds, **both})
    return Found({"rows": rows})
