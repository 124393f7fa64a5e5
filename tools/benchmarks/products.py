"""The limit of every contender: the matrix products and the attention of a step, and nothing else.

megapar's own functions compute them, which choose the faster library. All tensors are contiguous. Products of one input
are one product: query, key and value, and gate and up.
"""

import torch
import torch.nn.functional as F
from megapar_kernels.attention import sdpa
from torch import Tensor

from benchmarks.peers import Peer, Result, Weights
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.linear.torch_products import TORCH_PRODUCTS


class Products(Peer):
    """What one rank has to multiply in a step. It trains nothing, so `step` returns no numbers.

    Every product is there three times, as in training: forward, gradient of the input, gradient of the weight. Layers
    have their own weights and gradients; activations would change with every layer, but are one tensor for each shape
    here.
    """

    name = "products alone"

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        model = config.model
        parallel = config.parallel
        pp_rank = self.rank if parallel.pp > 1 else 0
        samples = config.train.micro_batch_size
        # A context-parallel rank has a part of the positions. Its queries attend half of all keys in the mean.
        queries = config.train.seq_length // parallel.cp
        self.is_causal = parallel.cp == 1
        keys = queries if self.is_causal else config.train.seq_length // 2
        heads = model.num_attention_heads // parallel.tp
        kv_heads = model.num_key_value_heads // parallel.tp
        self.layers = parallel.partition[pp_rank]
        rows = samples * queries
        # (rows, outputs, inputs) of each product.
        shapes = [
            (rows, (heads + 2 * kv_heads) * model.head_dim, model.hidden_size),
            (rows, model.hidden_size, heads * model.head_dim),
            *mlp_products(config, rows),
        ] * self.layers
        if pp_rank == parallel.pp - 1:
            shapes.append((rows, model.vocab_size // parallel.tp, model.hidden_size))
        self.products = []
        self.activations = {}  # one for each shape
        for count, outputs, inputs in shapes:
            weight = torch.randn(outputs, inputs, device=device) * 0.02
            self.products.append((count, weight, torch.zeros_like(weight)))
            for width in (outputs, inputs):
                self.activations[count, width] = torch.randn(count, width, device=device)
        # The key/value heads are shared: a tensor of all query heads would be other work.
        self.q = torch.randn(samples, heads, queries, model.head_dim, device=device, requires_grad=True)
        self.k = torch.randn(samples, kv_heads, keys, model.head_dim, device=device, requires_grad=True)
        self.v = torch.randn_like(self.k, requires_grad=True)

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        for _ in range(num_microbatches(self.config)):
            for _ in range(self.layers):
                self.attention()
            for rows, weight, grad in self.products:
                self.product(rows, weight, grad)
        return Result(float("nan"), float("nan"))

    def product(self, rows: int, weight: Tensor, weight_grad: Tensor) -> None:
        """The three products of one matrix. The gradient of the weight is added to the sum over earlier
        micro-batches."""
        outputs, inputs = weight.shape
        x = self.activations[rows, inputs]
        y_grad = self.activations[rows, outputs]
        TORCH_PRODUCTS.forward(x, weight, None)
        TORCH_PRODUCTS.input_gradient(y_grad, weight)
        TORCH_PRODUCTS.add_weight_gradient(weight_grad, y_grad, x)

    def attention(self) -> None:
        """Forward and backward."""
        if self.is_causal:
            y = sdpa(self.q, self.k, self.v)
        else:
            shared = self.k.shape[1] != self.q.shape[1]
            y = F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=shared)
        torch.autograd.grad(y, (self.q, self.k, self.v), self.q.detach())


def mlp_products(config: Config, rows: int) -> list[tuple[int, int, int]]:
    """(rows, outputs, inputs) of the products of an MLP, or of the experts of a rank if they are loaded evenly."""
    hidden = config.model.hidden_size
    moe = config.model.experts
    if moe is None:
        width = config.model.intermediate_size // config.parallel.tp
        return [(rows, 2 * width, hidden), (rows, hidden, width)]
    router = (rows, moe.num_experts, hidden)
    # Each rank of ep has some of the experts, and the rows of all ranks for them.
    ep = config.parallel.ep
    rows_of_expert = rows * ep * moe.num_experts_per_tok // moe.num_experts
    width = moe.moe_intermediate_size
    expert = [(rows_of_expert, 2 * width, hidden), (rows_of_expert, hidden, width)]
    return [router, *expert * (moe.num_experts // ep)]
