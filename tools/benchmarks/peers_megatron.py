"""Megatron-Core's own GPTModel with tensor parallelism, or with experts dealt over ranks, on a CPU over gloo.

The model, its matrices, its collectives and its cross entropy are Megatron-Core's. The optimizer is PyTorch's fused
AdamW, because Megatron-Core's makes tensors on CUDA devices. It has no sequence parallelism without kernels for GPUs.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
from megapar_models.convert import megatron_core
from torch import Tensor, nn

from benchmarks.peers import Plain, Weights, summed
from benchmarks.traffic import experts_of_rank
from megapar.config.options import Config

_MOE = "megatron.core.transformer.moe"


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-Core's maybe_move_tensor_to_cpu. The original does not heed `as_numpy` if the tensor is on the host
    already."""
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core build and run a model on a CPU in the block, with a mixture of experts too."""
    with warnings.catch_warnings(), megatron_core.on_cpu(), ExitStack() as stack:
        # It warns of each library for GPUs that is not there.
        warnings.simplefilter("ignore")
        # Its dispatcher of tokens to experts copies counts to the host on a stream of its own. Here they are there.
        event = SimpleNamespace(synchronize=lambda: None)
        stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
        stack.enter_context(patch("torch.cuda.Stream", return_value=stream))
        stack.enter_context(patch("torch.cuda.current_stream", return_value=stream))
        stack.enter_context(patch("torch.cuda.stream", return_value=nullcontext()))
        # That copy also makes the counts numbers for all_to_all.
        stack.enter_context(patch(f"{_MOE}.token_dispatcher.maybe_move_tensor_to_cpu", _as_on_host))
        # Without Transformer Engine its router reads a name that was never set.
        stack.enter_context(patch(f"{_MOE}.moe_utils.te_general_gemm", None, create=True))
        yield


class MegatronCore(Plain):
    """Megatron-Core's tensor parallelism."""

    name = "Megatron-Core TP"
    package: ClassVar[str] = megatron_core.PACKAGE
    modules: ClassVar[tuple[str, ...]] = ("megatron.core.models.gpt",)

    @classmethod
    def is_installed(cls) -> bool:
        return megatron_core.is_installed()

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        with on_cpu():
            super().__init__(config, weights, device)
        sequence = config.train.seq_length
        self.positions_1s = torch.arange(sequence)[None]
        # Without a mask, Megatron-Core would make this one on a GPU. True stands for positions that are not seen.
        self.mask_11ss = torch.ones(1, 1, sequence, sequence, dtype=torch.bool).triu(1)

    def is_split(self, name: str, param: Tensor) -> bool:
        """Norms are whole on every rank, everything else is cut."""
        return param.ndim > 1

    def build(self, weights: Weights) -> nn.Module:
        """This rank's part of the model."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel = self.config.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp, expert_model_parallel_size=parallel.ep
        )
        shape: Any = self.config.model
        experts: dict[str, Any] = {}
        if shape.num_experts:
            experts = {
                "num_moe_experts": shape.num_experts,
                "moe_router_topk": shape.moe.num_experts_per_tok,
                "moe_ffn_hidden_size": shape.moe.moe_intermediate_size,
                "moe_router_load_balancing_type": "none",
                "moe_token_dispatcher_type": "alltoall",
                "expert_model_parallel_size": parallel.ep,
            }
        # What a Llama of this shape is to Megatron-Core: some of it for the configuration, the rest for the model.
        values = megatron_core.values_of(replace(shape, family="llama"))
        names = {field.name for field in fields(TransformerConfig)}
        config = TransformerConfig(
            **{name: value for name, value in values.items() if name in names},
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tp,
            use_cpu_initialization=True,
            perform_initialization=False,
            **experts,
        )
        model: nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=shape.num_experts or None, normalization="RMSNorm"),
            vocab_size=shape.vocab_size,
            parallel_output=True,
            **{name: value for name, value in values.items() if name not in names},
        )
        model.load_state_dict(self.local_tensors(weights))
        return model

    def local_tensors(self, weights: Weights) -> dict[str, Any]:
        """This rank's part of the weights, by Megatron-Core's names."""
        shape = self.config.model
        tp = self.config.parallel.tp

        def part(module: str, dim: int = 0) -> Tensor:
            return weights[f"{module}.weight"].chunk(tp, dim)[self.rank % tp]

        def mlp(ours: str, theirs: str) -> dict[str, Tensor]:
            gate_up = torch.cat([part(f"{ours}.gate"), part(f"{ours}.up")])
            return {f"{theirs}.linear_fc1.weight": gate_up, f"{theirs}.linear_fc2.weight": part(f"{ours}.down", 1)}

        tensors = {
            "embedding.word_embeddings.weight": part("embedding"),
            "decoder.final_layernorm.weight": weights["norm.weight"],
            "output_layer.weight": part("head"),
        }
        for number in range(shape.num_hidden_layers):
            ours = f"layers.{number}"
            theirs = f"decoder.layers.{number}"
            # Rows of a key/value head are together: its query heads, the key, the value.
            groups = [part(f"{ours}.attention.{x}").unflatten(0, (shape.num_key_value_heads // tp, -1)) for x in "qkv"]
            tensors |= {
                f"{theirs}.input_layernorm.weight": weights[f"{ours}.attention_norm.weight"],
                f"{theirs}.self_attention.linear_qkv.weight": torch.cat(groups, 1).flatten(0, 1),
                f"{theirs}.self_attention.linear_proj.weight": part(f"{ours}.attention.o", 1),
                f"{theirs}.pre_mlp_layernorm.weight": weights[f"{ours}.mlp_norm.weight"],
            }
            if not shape.num_experts:
                tensors |= mlp(f"{ours}.mlp", f"{theirs}.mlp")
                continue
            tensors[f"{theirs}.mlp.router.weight"] = weights[f"{ours}.mlp.router.weight"]
            for place, expert in enumerate(experts_of_rank(self.config, self.rank)):
                tensors |= mlp(f"{ours}.mlp.experts.{expert}", f"{theirs}.mlp.experts.local_experts.{place}")
        return tensors

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        with on_cpu():
            return super().accumulate(batch, scale)

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        losses_bs = self.model(tokens_bs, self.positions_1s, self.mask_11ss, labels=targets_bs)
        return cast(Tensor, losses_bs.sum())


class MegatronCoreExperts(MegatronCore):
    """Megatron-Core's expert parallelism: its dispatcher "alltoall", and one MLP after the other on each rank.

    Its data parallelism makes tensors on CUDA devices. So the gradients of weights common to all ranks are summed here,
    by one all-reduce after the last micro-batch.
    """

    name = "Megatron-Core EP"

    def is_split(self, name: str, param: Tensor) -> bool:
        """Experts are dealt over ranks, everything else is whole on every rank."""
        return ".local_experts." in name

    def update(self) -> float:
        """With the sums of the gradients of weights common to all ranks."""
        for param, whole in zip(self.whole, summed([cast(Tensor, param.grad) for param in self.whole]), strict=True):
            param.grad = whole
        return super().update()
