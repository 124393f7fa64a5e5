"""What benchmarks/gpu.py compares megapar with, and the first weights of all."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from megapar_models.counts import WholeModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.contenders import Megapar
from benchmarks.peers import Llama, Plain, Weights, loss_sum, make_optimizer
from benchmarks.peers_huggingface import HuggingFaceMixture
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config


class RandomWeights(Mapping[str, Tensor]):
    """Logical tensors of a model in bf16, each drawn on request: matrices N(0, 0.02), norms near 1.

    A tensor is drawn from a seed of its own, so all contenders have equal weights whatever order they ask in, and no
    contender's memory holds a second model while it is built. A tied head is its embedding, under either name.
    """

    def __init__(self, model: ModelConfig, target: torch.device):
        self.shapes = {name: piece.shape for name, piece in WholeModel(model).tensors().items()}
        self.target = target

    def __getitem__(self, name: str) -> Tensor:
        if name == "head.weight" and name not in self.shapes:
            name = "embedding.weight"
        shape = self.shapes[name]
        generator = torch.Generator(self.target).manual_seed(zlib.crc32(name.encode()))
        empty = torch.empty(shape, dtype=torch.bfloat16, device=self.target)
        return empty.normal_(1.0 if len(shape) == 1 else 0.0, 0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class MegaparInFp8(Megapar):
    """megapar with train.fp8 blocks."""

    name = "megapar, FP8"

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(replace(config, train=replace(config.train, fp8="blocks")), weights, device)


class Recomputed(nn.Module):
    """A layer with full recompute: it keeps its input alone and runs its forward again in the backward pass."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x_bsh: Tensor, cos_s1d: Tensor, sin_s1d: Tensor) -> Tensor:
        return checkpoint(self.layer, x_bsh, cos_s1d, sin_s1d, use_reentrant=False)


class MixedPrecision(Plain):
    """Plain PyTorch in bf16 with fp32 main weights, gradients and moments."""

    def build(self, weights: Weights) -> nn.Module:
        """The model in bf16. Its tables are no parameters, as with Hugging Face."""
        config = self.config
        with torch.device("meta"):  # in fp32, which shall take no memory
            model = Llama(config.model, config.train.seq_length, range(config.model.num_hidden_layers)).bfloat16()
        with self.device:
            small = replace(config.model, vocab_size=1, num_hidden_layers=1)
            tables = Llama(small, config.train.seq_length, range(0))
        model = model.to_empty(device=self.device)
        model.cos = tables.cos.bfloat16()
        model.sin = tables.sin.bfloat16()
        assert model.head is not None
        assert model.embedding is not None
        if config.model.tie_word_embeddings:
            model.head.weight = model.embedding.weight
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        if config.train.recompute == "full":
            model.layers = nn.ModuleDict({n: Recomputed(layer) for n, layer in model.layers.items()})
        return model

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of fp32 main weights, to whose gradients each micro-batch adds its own."""
        self.params = params
        self.whole = [p.detach().float() for p in params]
        for param, main in zip(params, self.whole, strict=True):
            main.grad = torch.zeros_like(main)
            param.register_post_accumulate_grad_hook(partial(self._collect, main.grad))
        return make_optimizer(self.whole, self.config.optimizer)

    @staticmethod
    def _collect(total: Tensor, param: Tensor) -> None:
        assert param.grad is not None
        total.add_(param.grad)
        param.grad = None

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        return loss_sum(self.model(tokens_bs).float(), targets_bs)

    def update(self) -> float:
        norm = super().update()
        with torch.no_grad():
            torch._foreach_copy_([*self.params], self.whole)
        return norm


Loss = Callable[[Tensor, Tensor], Tensor]


def compiled(loss: Loss, device: torch.device) -> Loss:
    """`loss` by torch.compile. On a CPU, where code generation takes a minute, it is a dry run: traced and
    differentiated as a graph."""
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    return torch.compile(loss, backend=backend, dynamic=False)


class CompiledLoss(MixedPrecision):
    """Model and loss compiled together by torch.compile."""

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        self.compiled = compiled(super().loss, device)

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        return self.compiled(tokens_bs, targets_bs)


class Compiled(CompiledLoss):
    """Model and loss as one graph of torch.compile."""

    name = "PyTorch, compiled"


class MixedPrecisionMixture(HuggingFaceMixture, MixedPrecision):
    """Hugging Face's mixture of experts in bf16 with fp32 main weights, gradients and moments."""

    name = "Hugging Face"
    dtype = torch.bfloat16


class CompiledMixture(CompiledLoss, MixedPrecisionMixture):
    """Hugging Face's mixture in bf16, compiled by torch.compile, which breaks the graph where it must."""

    name = "Hugging Face, compiled"
