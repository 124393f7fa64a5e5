"""Logits of Megatron-Core's own GPTModel on a classic checkpoint. A conversion is compared with them.

`convert.megatron` turns Megatron's args into our options. If it overlooked or misread an arg with an effect on
the model, the result would be a wrong model without an error. Here Megatron-Core builds its model from all of the args
itself, as Megatron-LM does in `core_transformer_config_from_args` and `gpt_builder` (core_v0.16.1). Such an arg then
makes a difference of logits.

The model is whole (one tensor and one pipeline rank) and in fp32. It is on the CPU, without GPU kernels.
"""

import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from megapar.config.options import flatten
from megapar_models.convert.megatron import MegatronCheckpoint
from megapar_models.convert.megatron_args import HARMLESS
from megapar_models.families.llama import LlamaModel
from megapar_models.registry import FAMILIES

PACKAGE = "megatron-core"

# Names of the fields of TransformerConfig that say how Megatron runs a model, not what it computes: kernels, precision,
# layout, recomputation, initialization, and kinds of models that `megatron.read` has refused. They keep the defaults of
# Megatron-Core, which run on a CPU.
_RUNNING = re.compile(
    r"(account_for|config_logger|cp_comm|cuda_graph|disable|distribute_saved|enable_cuda|external_cuda|fine_grained|first"
    r"_last|fp4|fp8|fused|inference|init|log_max|memory|min_offloaded|moe|num_layers_(at|in)|offload|output_layer_init"
    r"|persist|pipeline|qk_clip|quant|recompute|symmetric|tp_only|transformer_impl|use)_?"
    r"|.*(init_method.*|_fusion|_backend)"
)

# Megatron-Core's names of a layer's tensors, by our names. They are those of its local layers.
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.o": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
_OUTSIDE = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
}


def is_installed() -> bool:
    """Whether Megatron-Core can be imported. It is not imported here."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def version() -> str:
    """Return name and version of the package, such as "megatron-core 0.16.1"."""
    from megatron.core import package_info

    return f"{PACKAGE} {package_info.__version__}"


class MegatronModel:
    """Megatron-Core's GPTModel in fp32, with the weights of `source` rounded to `dtype` first.

    Raises CheckpointError if Megatron-Core refuses the args or the weights.
    """

    def __init__(self, source: MegatronCheckpoint, dtype: torch.dtype):
        tensors = {name: tensor.to(dtype).float() for name, tensor in _weights(source).items()}
        rows = len(tensors[f"{_OUTSIDE['embedding']}.weight"])
        with warnings.catch_warnings():
            # Megatron-Core warns of each library for GPUs that is not there.
            warnings.simplefilter("ignore")
            config = config_values(source.args)
            model = model_values(source.args)
            try:
                with _on_one_cpu():
                    self._model = _build(config, model, rows)
                self._model.load_state_dict(tensors, strict=True)
            except (AssertionError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                reason = " ".join(str(error).split())
                text = f"{source.folder}: {version()} does not build the model of its args: {reason}"
                raise CheckpointError(text) from error
        self._values = config | model

    @torch.no_grad()
    def logits(self, tokens_s: Tensor) -> Tensor:
        """The logits [s, v] of the tokens [s]. v includes the padding rows of Megatron's vocabulary."""
        positions_s = torch.arange(len(tokens_s))
        # Without a mask, Megatron-Core would make this one on a GPU. True stands for positions that are not seen.
        mask_bass = torch.ones(1, 1, len(tokens_s), len(tokens_s), dtype=torch.bool).triu(1)
        with _on_one_cpu():
            logits_bsv: Tensor = self._model(tokens_s[None], positions_s[None], mask_bass)
        return logits_bsv[0]

    def misread(self, model: ModelConfig) -> list[str]:
        """A line for each value taken by Megatron-Core from the args and missing in `model`."""
        values = values_of(model)
        defaults = _defaults()
        lines = []
        for name in sorted({*self._values, *values}):
            if name in HARMLESS or name.endswith("_dropout"):  # dropout is an option of training
                continue
            theirs = self._values.get(name, defaults.get(name))
            ours = values.get(name, defaults.get(name))
            if theirs != ours:
                lines.append(f"{name} is {_shown(theirs)} there, {_shown(ours)} here")
        return lines


def config_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Megatron-Core's TransformerConfig with an effect on the result, from `args`."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Each field that has the name of an arg is taken from it, whether our reader knows that arg or not.
    layout = {field.name for field in fields(ModelParallelConfig)}
    names = {field.name for field in fields(TransformerConfig)} - layout
    values = {name: args[name] for name in names if name in args and not _RUNNING.fullmatch(name)}
    # These args have another name than the field, or another value.
    values["layernorm_epsilon"] = args.get("norm_epsilon") or args.get("layernorm_epsilon")
    values["layernorm_zero_centered_gamma"] = bool(
        args.get("layernorm_zero_centered_gamma") or args.get("apply_layernorm_1p")
    )
    if not args.get("group_query_attention"):
        values["num_query_groups"] = args["num_attention_heads"]
    return values | _activation(args)


def _activation(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TransformerConfig for the activation function."""
    from megatron.core.activations import quick_gelu, squared_relu

    if args.get("swiglu"):
        return {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": False}
    if args.get("squared_relu"):
        return {"activation_func": squared_relu, "gated_linear_unit": False, "bias_activation_fusion": False}
    if args.get("quick_geglu"):
        return {"activation_func": quick_gelu, "gated_linear_unit": True, "bias_activation_fusion": False}
    # The fused function is the tanh form of GELU. The other one is GELU by erf.
    fused = args.get("bias_gelu_fusion", True)
    return {"activation_func": F.gelu, "gated_linear_unit": False, "bias_activation_fusion": fused}


def model_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-Core's GPTModel itself, from `args`."""
    # Without rope_scaling_factor: gpt_builder does not pass it, so GPTModel uses its default of 8, whatever the arg is.
    return {
        "max_sequence_length": args["max_position_embeddings"],
        "share_embeddings_and_output_weights": not args.get("untie_embeddings_and_output_weights"),
        "position_embedding_type": _position_embedding(args),
        "rotary_percent": 1.0 if args.get("rotary_percent") is None else args["rotary_percent"],
        "rotary_base": args.get("rotary_base") or 10000,
        "rope_scaling": bool(args.get("use_rope_scaling")),
        "seq_len_interpolation_factor": args.get("rotary_seq_len_interpolation_factor"),
    }


def _position_embedding(args: Mapping[str, Any]) -> str:
    """The kind of positions. Older versions of Megatron-LM state it by another arg."""
    older = "rope" if args.get("use_rotary_position_embeddings") else "learned_absolute"
    return args.get("position_embedding_type") or older


def values_of(model: ModelConfig) -> dict[str, Any]:
    """What `config_values` and `model_values` would return for the args of `model`, without its experts."""
    from megatron.core.activations import squared_relu

    described = FAMILIES[model.family].megatron
    assert described is not None, "megatron.read gives a family that Megatron has"
    # Megatron's GPT model has all of Llama's options; those that a family lacks are off.
    options = flatten(LlamaModel()) | flatten(model)
    scaling = options["rope_scaling.rope_type"]
    factor = options["rope_scaling.factor"]
    acts = {"silu": F.silu, "relu2": squared_relu, "gelu_pytorch_tanh": F.gelu}
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.intermediate_size,
        "normalization": described.normalization,
        "layernorm_epsilon": model.rms_norm_eps,
        "add_bias_linear": described.add_bias_linear,
        "add_qkv_bias": options["attention_bias"],
        "qk_layernorm": options["qk_norm"],
        "activation_func": acts[model.hidden_act],
        "gated_linear_unit": described.swiglu,
        "bias_activation_fusion": model.hidden_act == "gelu_pytorch_tanh",
        "max_sequence_length": model.max_position_embeddings,
        "share_embeddings_and_output_weights": model.tie_word_embeddings,
        "position_embedding_type": described.position_embedding_type,
        "rotary_base": options["rope_theta"],
        "rope_scaling": scaling == "llama3",
        "rope_scaling_factor": factor if scaling == "llama3" else 8.0,
        "seq_len_interpolation_factor": factor if scaling == "linear" else None,
    }


def _defaults() -> dict[str, Any]:
    """Megatron-Core's defaults, for names missing in the args and in our options."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = {field.name: field.default for field in fields(TransformerConfig)}
    return config | {"rotary_percent": 1.0, "rope_scaling_factor": 8.0}


def _shown(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def _weights(source: MegatronCheckpoint) -> dict[str, Tensor]:
    """All tensors, by Megatron-Core's names, as one tensor and one pipeline rank would hold them."""
    tensors = {}
    for name in source.parts:
        # The last pipeline stage has a copy of a tied embedding. A model in one stage has none.
        if name == "head.weight" and not source.args.get("untie_embeddings_and_output_weights"):
            continue
        layer, inside = re.fullmatch(r"(layers\.\d+\.)?(.+)", name).groups()  # type: ignore[union-attr]
        module, _, weight_or_bias = inside.rpartition(".")
        theirs = f"decoder.{layer}{_LAYER[module]}" if layer else _OUTSIDE[module]
        tensors[f"{theirs}.{weight_or_bias}"] = source.gathered(name)
    return tensors


def _build(config: Mapping[str, Any], model: Mapping[str, Any], rows: int) -> nn.Module:
    """GPTModel without its weights. `rows` is the number of token ids, padding included."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    whole = TransformerConfig(**config, use_cpu_initialization=True, perform_initialization=False)
    layers = get_gpt_layer_local_spec(
        qk_layernorm=whole.qk_layernorm, qk_l2_norm=whole.qk_l2_norm, normalization=whole.normalization
    )
    groups = ProcessGroupCollection(tp=_OneRank(), pp=_OneRank(), cp=_OneRank(), embd=None)
    return GPTModel(whole, layers, vocab_size=rows, parallel_output=False, pg_collection=groups, **model).eval()


class _OneRank:
    """A stand-in for a process group of one rank: torch.distributed need not be initialized."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextmanager
def _on_one_cpu() -> Iterator[None]:
    """Let Megatron-Core build and run a model on a CPU, without torch.distributed, in the block.

    All stand-ins for what it expects are here.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import GlobalMemoryBuffer

    with on_cpu(), ExitStack() as stack:
        # Layers use the groups that they are given only if torch.distributed is initialized.
        stack.enter_context(patch("torch.distributed.is_initialized", return_value=True))
        # Otherwise initialize_model_parallel would make that buffer, which needs torch.distributed.
        stack.enter_context(patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()))
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core build and run a model on a CPU in the block."""
    with ExitStack() as stack:
        # The rotary table and the buffer of attention scores lie on CUDA's current device, wherever the weights are.
        stack.enter_context(patch("torch.cuda.current_device", return_value="cpu"))
        # Attention forks CUDA's random state for its dropout, even if there is no dropout.
        no_state = SimpleNamespace(fork=nullcontext)
        stack.enter_context(patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=no_state))
        # Megatron-Core compiles its fused functions at their first call, which needs a C++ compiler on a CPU.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
