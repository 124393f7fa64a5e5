"""GPT-2 (Radford et al., 2019).

It has learned positions, LayerNorm before attention and before the MLP, GELU, biases in all linear layers, and
dropout. An option ties the embeddings.
"""

import torch.nn.functional as F
from megapar_kernels.activations import bias_gelu, gelu, relu_squared
from megapar_kernels.dropout import dropout_add, keep_mask
from megapar_kernels.norms import add_layer_norm, layer_norm
from torch import Tensor, nn

from megapar.batch import MicroBatch
from megapar.params import ZEROS, replicated
from megapar.tensor_parallel.layers import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    norm_weight,
    replicated_vector,
)
from megapar_models.attention import Attention
from megapar_models.stage import Blueprint, DropoutSite, ForwardContext, Stage, dropout_use, hidden_keys, rows_of_rank


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension, with weight and bias."""

    def __init__(self, name: str, blueprint: Blueprint):
        super().__init__()
        size = blueprint.model.hidden_size
        sharding = blueprint.sharding
        self.eps = blueprint.model.rms_norm_eps
        self.impl = blueprint.kernels.norm
        self.weight = norm_weight(f"{name}.weight", size, sharding)
        self.bias = replicated_vector(f"{name}.bias", size, ZEROS, sharding)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.impl)


class GPTMLP(nn.Module):
    """down(act(up x)). tp cuts up by its output dimension and down by its input dimension."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        model = blueprint.model
        sharding = blueprint.sharding
        name = f"layers.{number}.mlp"
        self.activation = model.hidden_act
        self.impl = blueprint.kernels.activation
        columns = [Columns.even(f"{name}.up", model.intermediate_size, sharding.tp)]
        self.up = ColumnParallelLinear(
            model.hidden_size, columns, sharding, init=blueprint.init, bias=True, products=blueprint.products
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            model.intermediate_size,
            model.hidden_size,
            sharding,
            init=blueprint.output_init,
            bias=True,
            products=blueprint.products,
        )

    def forward(self, x_sbh: Tensor) -> Tensor:
        if self.activation == "relu2":
            return self.down(relu_squared(self.up(x_sbh), self.impl))
        if self.impl == "torch" or self.up.bias is None:
            return self.down(gelu(self.up(x_sbh)))
        # The kernel adds the bias itself, which saves a pass over the activations.
        return self.down(bias_gelu(self.up.product(x_sbh), self.up.bias, self.impl))


class GPTLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        name = f"layers.{number}"
        self.number = number
        self.seed = blueprint.seed
        self.sharding = blueprint.sharding
        self.dropout = blueprint.model.hidden_dropout
        self.impl = blueprint.kernels.dropout
        self.attention_norm = LayerNorm(f"{name}.attention_norm", blueprint)
        self.attention = Attention(number, blueprint, qkv_bias=True, out_bias=True)
        self.mlp_norm = LayerNorm(f"{name}.mlp_norm", blueprint)
        self.mlp = GPTMLP(number, blueprint)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        y_sbh = self.attention(self.attention_norm(x_sbh), context)
        if self._dropout():
            x_sbh = self._add(y_sbh, x_sbh, context, DropoutSite.ATTENTION_OUTPUT)
            normed = self.mlp_norm(x_sbh)
        else:
            # Without dropout one kernel adds and normalizes, as in Llama.
            normed, x_sbh = self.mlp_norm.add_and_norm(y_sbh, x_sbh)
        return self._add(self.mlp(normed), x_sbh, context, DropoutSite.MLP_OUTPUT)

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _add(self, y_sbh: Tensor, residual_sbh: Tensor, context: ForwardContext, site: DropoutSite) -> Tensor:
        p = self._dropout()
        keys = None
        if p:
            keys = hidden_keys(context, dropout_use(self.number, site), self.seed, self.sharding)
        return dropout_add(y_sbh, residual_sbh, keys, p, self.impl)


class GPTStage(Stage):
    """Consecutive GPT-2 layers. The first stage also has the table of learned positions."""

    sizes_of_weights = ("model.max_position_embeddings",)

    def __init__(
        self, blueprint: Blueprint, layers: range, *, first: bool, last: bool, tied: nn.Parameter | None = None
    ):
        super().__init__(blueprint, layers, first=first, last=last, tied=tied)
        self.positions = None
        if first:
            sharding = blueprint.sharding
            shape = (blueprint.model.max_position_embeddings, blueprint.model.hidden_size)
            # Under sequence parallelism each tp rank adds the positions of its part of the sequence. Its gradient of
            # the table is then a partial sum.
            piece = replicated("positions.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
            self.positions = sharding.parameter((piece,), shape, blueprint.init, decay=True)

    def make_layer(self, number: int) -> nn.Module:
        return GPTLayer(number, self.blueprint)

    def make_norm(self, name: str) -> nn.Module:
        return LayerNorm(name, self.blueprint)

    def hidden_states(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        context = ForwardContext(batch)
        if x_sbh is None:
            x_sbh = self.embed_with_positions(context)
        return self.run_layers(x_sbh, context)

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        x_sbh = self.hidden_states(x_sbh, batch)
        if not self.last:
            return x_sbh
        return self.loss(x_sbh, batch)  # norm, head and cross entropy

    def embed_with_positions(self, context: ForwardContext) -> Tensor:
        """Token plus position embeddings after dropout, [s or s/tp, b, h].

        Positions count from the start of a document. Under sequence parallelism each rank adds those of its rows.
        """
        assert self.positions is not None
        batch = context.batch
        x_sbh = self.embed(batch)
        p = self.blueprint.model.hidden_dropout if self.training else 0.0
        positions = batch.positions_s[:, None] if batch.starts is None else batch.document_positions_bs().t()
        x_sbh = x_sbh + F.embedding(rows_of_rank(positions, self.blueprint.sharding), self.positions)
        if not p:
            return x_sbh
        keys = hidden_keys(context, dropout_use(0, DropoutSite.EMBEDDING), self.blueprint.seed, self.blueprint.sharding)
        return x_sbh * keep_mask(keys, x_sbh.shape[-1], p) / (1.0 - p)
