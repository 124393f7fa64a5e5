"""Hugging Face's own model, LlamaForCausalLM of transformers, in one process and with DistributedDataParallel."""

from typing import ClassVar

import torch
from megapar_models.convert.config_json import names_of, to_hugging_face
from torch import Tensor, nn

from benchmarks.peers import DDP, Plain, Weights


class HuggingFace(Plain):
    """LlamaForCausalLM in one process, with its own loss."""

    name = "Hugging Face"
    package: ClassVar[str] = "transformers"
    modules: ClassVar[tuple[str, ...]] = ("transformers", "transformers.models.llama.modeling_llama")

    def build(self, weights: Weights) -> nn.Module:
        """The model, with `weights` under Hugging Face's names."""
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = self.config.model
        values = to_hugging_face(shape) | {"attn_implementation": "sdpa", "use_cache": False}
        with self.device:
            model: nn.Module = LlamaForCausalLM(LlamaConfig(**values))
        modules = names_of(shape).modules
        tensors = {}
        for name, tensor in weights.items():
            parts = name.split(".")
            number = parts[1] if parts[0] == "layers" else ""
            ours = ".".join("*" if part == number else part for part in parts[:-1])
            tensors[f"{modules[ours].replace('*', number)}.{parts[-1]}"] = tensor
        model.load_state_dict(tensors)
        return model.train()

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        # Without num_items_in_batch the loss is the mean of the micro-batch. With 1 it is the sum. Targets that are
        # given as shift_labels are taken as they are; labels alone would be moved by one place, and lose the last.
        output = self.model(tokens_bs, labels=targets_bs, shift_labels=targets_bs, num_items_in_batch=1)
        loss: torch.Tensor = output.loss
        return loss


class HuggingFaceDDP(HuggingFace, DDP):
    """LlamaForCausalLM with DistributedDataParallel."""

    name = "Hugging Face on DDP"
