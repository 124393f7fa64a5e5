"""The limit of every contender: the matrix products and the attention of a step, and nothing else.

All tensors are contiguous. Products of one input are one product: query, key and value, and gate and up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import Peer, Result, Weights
from megapar.config import Config


class Products(Peer):
    """What one rank has to multiply in a step. It trains nothing, so `step` returns no numbers.

    Every product is there three times, as in training: forward, gradient of the input, gradient of the weight. Layers
    have their own weights and gradients; activations, which would change with every layer, are one tensor for each
    shape.
    """

    name = "products alone"

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        model = config.model
        parallel = config.parallel
        pp_rank = self.rank if parallel.pp > 1 else 0
        samples = config.train.micro_batch_size
        sequence = config.train.seq_length
        heads = model.num_attention_heads // parallel.tp
        kv_heads = model.num_key_value_heads // parallel.tp
        mlp = model.intermediate_size // parallel.tp
        self.micro_batch_count = config.train.global_batch_size // samples // parallel.dp
        self.layers = parallel.partition[pp_rank]
        # (outputs, inputs) of each matrix.
        shapes = [
            ((heads + 2 * kv_heads) * model.head_dim, model.hidden_size),
            (model.hidden_size, heads * model.head_dim),
            (2 * mlp, model.hidden_size),
            (model.hidden_size, mlp),
        ] * self.layers
        if pp_rank == parallel.pp - 1:
            shapes.append((model.vocab_size // parallel.tp, model.hidden_size))
        self.weights = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
        self.weight_grads = [torch.zeros_like(weight) for weight in self.weights]
        # One activation for each width, with the outputs of the products.
        widths = {width for shape in shapes for width in shape}
        self.activations = {width: torch.randn(samples * sequence, width, device=device) for width in widths}
        self.outputs = {width: torch.empty(samples * sequence, width, device=device) for width in widths}
        # The key/value heads are shared: a tensor of all query heads would be other work.
        self.q = torch.randn(samples, heads, sequence, model.head_dim, device=device, requires_grad=True)
        self.k, self.v = (
            torch.randn(samples, kv_heads, sequence, model.head_dim, device=device, requires_grad=True)
            for _ in range(2)
        )

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        for _ in range(self.micro_batch_count):
            for _ in range(self.layers):
                self.attention()
            for weight, grad in zip(self.weights, self.weight_grads, strict=True):
                self.product(weight, grad)
        return Result(float("nan"), float("nan"))

    def product(self, weight: Tensor, weight_grad: Tensor) -> None:
        """The three products of one matrix. The gradient of the weight is added to that of earlier micro-batches."""
        outputs, inputs = weight.shape
        x = self.activations[inputs]
        y_grad = self.activations[outputs]
        torch.mm(x, weight.t(), out=self.outputs[outputs])
        torch.mm(y_grad, weight, out=self.outputs[inputs])
        weight_grad.addmm_(y_grad.t(), x)

    def attention(self) -> None:
        """Forward and backward."""
        shared = self.k.shape[1] != self.q.shape[1]
        y = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=shared)
        torch.autograd.grad(y, (self.q, self.k, self.v), self.q.detach())
