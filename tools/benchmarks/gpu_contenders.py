"""What benchmarks/gpu.py compares megapar with, and the weights that all start from."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from megapar_models.counts import WholeModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import Llama, Peer, Result, Weights, clip, make_optimizer
from megapar.config.options import Config, ModelConfig


class RandomWeights(Mapping[str, Tensor]):
    """Logical tensors of a model in bf16, each drawn when it is asked for: matrices N(0, 0.02), norms near 1.

    A tensor is drawn from a seed of its own, so that all contenders have equal weights whatever order they ask in, and
    no contender's memory holds a second model while it is built. A tied head is its embedding, under either name.
    """

    def __init__(self, model: ModelConfig, where: torch.device):
        self.shapes = {name: piece.shape for name, piece in WholeModel(model).tensors().items()}
        self.where = where

    def __getitem__(self, name: str) -> Tensor:
        if name == "head.weight" and name not in self.shapes:
            name = "embedding.weight"
        shape = self.shapes[name]
        generator = torch.Generator(self.where).manual_seed(zlib.crc32(name.encode()))
        empty = torch.empty(shape, dtype=torch.bfloat16, device=self.where)
        return empty.normal_(1.0 if len(shape) == 1 else 0.0, 0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Recomputed(nn.Module):
    """A layer that keeps its input alone and runs its forward again in the backward pass."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x_bsh: Tensor, cos_s1d: Tensor, sin_s1d: Tensor) -> Tensor:
        return checkpoint(self.layer, x_bsh, cos_s1d, sin_s1d, use_reentrant=False)


class MixedPrecision(Peer):
    """Plain PyTorch in bf16 with fp32 main weights, gradients and moments."""

    name = "PyTorch"
    backend: str | None = None

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        with torch.device("meta"):  # in fp32, which shall take no memory
            model = Llama(config.model, config.train.seq_length, range(config.model.num_hidden_layers)).bfloat16()
        self.model = model.to_empty(device=device)
        self._make_tables()
        assert self.model.head is not None
        assert self.model.embedding is not None
        if config.model.tie_word_embeddings:
            self.model.head.weight = self.model.embedding.weight
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(weights[name])
        if config.train.recompute == "full":
            self.model.layers = nn.ModuleDict({n: Recomputed(layer) for n, layer in self.model.layers.items()})
        self.params = list(self.model.parameters())
        self.mains = [p.detach().float() for p in self.params]
        for param, main in zip(self.params, self.mains, strict=True):
            main.grad = torch.zeros_like(main)
            param.register_post_accumulate_grad_hook(partial(self._collect, main.grad))
        self.optimizer = make_optimizer(self.mains, config.optimizer)
        self.loss = torch.compile(self._loss, backend=self.backend, dynamic=False) if self.backend else self._loss

    def _make_tables(self) -> None:
        """cos and sin, which are no parameters, on the device, in bf16 as Hugging Face has them."""
        model = self.config.model
        with self.device:
            tables = Llama(replace(model, vocab_size=1, num_hidden_layers=1), self.config.train.seq_length, range(0))
        self.model.cos = tables.cos.bfloat16()
        self.model.sin = tables.sin.bfloat16()

    @staticmethod
    def _collect(total: Tensor, param: Tensor) -> None:
        assert param.grad is not None
        total.add_(param.grad)
        param.grad = None

    def _loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        logits = self.model(tokens_bs).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_bs.flatten(), reduction="sum")

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros((), device=self.device)
        for tokens, targets in self.micro_batches(tokens_bs, targets_bs):
            loss = self.loss(tokens, targets)
            (loss / targets_bs.numel()).backward()
            total += loss.detach()
        norm = clip([], self.mains, self.config.optimizer.clip_grad, None)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.params], self.mains)
        return Result(total.item() / targets_bs.numel(), norm)


class Compiled(MixedPrecision):
    name = "PyTorch, compiled"
    backend = "inductor"


class CompiledDry(Compiled):
    """Traced and differentiated as a graph, without code generation, which takes a CPU a minute."""

    backend = "aot_eager"
