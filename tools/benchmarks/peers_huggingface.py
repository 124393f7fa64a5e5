"""Hugging Face's own models, in one process and with DistributedDataParallel: LlamaForCausalLM of transformers, and
MixtralForCausalLM or Qwen3MoeForCausalLM for mixtures of experts."""

import importlib
from typing import ClassVar

import torch
from megapar_models.convert.config_json import names_of, to_hugging_face
from megapar_models.convert.recipes import recipes
from torch import Tensor, nn

from benchmarks.peers import DDP, Plain, Weights


class HuggingFace(Plain):
    """The model of config.json's model_type in one process, with its own loss."""

    name = "Hugging Face"
    package: ClassVar[str] = "transformers"
    modules: ClassVar[tuple[str, ...]] = ("transformers", "transformers.models.llama.modeling_llama")
    dtype: ClassVar[torch.dtype] = torch.float32
    """Of the weights."""

    def build(self, weights: Weights) -> nn.Module:
        """The model, with `weights` under Hugging Face's names."""
        transformers = importlib.import_module("transformers")
        # Experts are computed by torch's grouped_mm, its default, which is faster than its loop ("eager") on a CPU too.
        values = to_hugging_face(self.config.model) | {"attn_implementation": "sdpa", "use_cache": False}
        config = transformers.AutoConfig.for_model(**values)
        with self.device:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        model.load_state_dict(self.named(weights))
        return model.train()

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """The weights under Hugging Face's names."""
        modules = names_of(self.config.model).modules
        made = recipes({name: tuple(tensor.shape) for name, tensor in weights.items()}, modules)
        return {theirs: torch.cat([weights[part.name] for part in recipe.parts]) for theirs, recipe in made.items()}

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        # Without num_items_in_batch the loss is the mean of the micro-batch. With 1 it is the sum. Targets that are
        # given as shift_labels are taken as they are; labels alone would be moved by one place, and lose the last.
        output = self.model(tokens_bs, labels=targets_bs, shift_labels=targets_bs, num_items_in_batch=1)
        loss: torch.Tensor = output.loss
        return loss


class HuggingFaceDDP(HuggingFace, DDP):
    """LlamaForCausalLM with DistributedDataParallel."""

    name = "Hugging Face on DDP"


class HuggingFaceMixture(HuggingFace):
    """MixtralForCausalLM or Qwen3MoeForCausalLM in one process, without its loss of balance."""

    name = "Hugging Face, mixture"
    modules: ClassVar[tuple[str, ...]] = ("transformers", "transformers.models.mixtral.modeling_mixtral")

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """The weights under the names of transformers 5, with all experts of a layer stacked."""
        named = super().named(weights)
        for layer in range(self.config.model.num_hidden_layers):
            stacked = f"model.layers.{layer}.mlp"
            theirs, gate, up, down = stacked, "gate_proj", "up_proj", "down_proj"
            if f"model.layers.{layer}.block_sparse_moe.gate.weight" in named:  # Mixtral's names
                theirs, gate, up, down = f"model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2"
            experts = [f"{theirs}.experts.{number}" for number in range(self.config.model.num_experts)]
            gate_up = [torch.cat([named.pop(f"{expert}.{x}.weight") for x in (gate, up)]) for expert in experts]
            named[f"{stacked}.experts.gate_up_proj"] = torch.stack(gate_up)
            named[f"{stacked}.experts.down_proj"] = torch.stack([named.pop(f"{x}.{down}.weight") for x in experts])
            named[f"{stacked}.gate.weight"] = named.pop(f"{theirs}.gate.weight")
        return named


class HuggingFaceMixtureDDP(HuggingFaceMixture, DDP):
    """A mixture of Hugging Face with DistributedDataParallel."""

    name = "Hugging Face, mixture on DDP"
