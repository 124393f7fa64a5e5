"""Per-layer inputs (per-layer embeddings of Gemma 4): a row of a table by token id, and a projection of the embedding.

Each layer has its part of the table and of the projection, so a pipeline stage holds those of its layers. The embedding
is handed on from the first stage, and with it the weight of one norm for all layers (`HANDED`).

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, h hidden, v
vocabulary, p width of the inputs.
"""

import math
from functools import partial

import torch
from megapar_kernels.backend import Kernels
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.config.model_options import ModelConfig
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.handed import Handed
from megapar_models.latent_attention import WholeLinear
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import PLAIN
from megapar_models.norms import NormRule

EMBEDDING = "embedding"
NORM = "per_layer_norm"
HANDED = (EMBEDDING, NORM)
"""The names of what the first stage hands on to layers with inputs of their own."""


def handed(hidden_size: int, width: int) -> tuple[Handed, ...]:
    """Return what `Ends.writes` declares for inputs of this width."""
    return (
        Handed(name=EMBEDDING, shape=(hidden_size,), splits_sequence=True),
        Handed(name=NORM, shape=(width,), by_token=False),
    )


class PerLayerInput(nn.Module):
    """The branch of layer `number` with its input u [s, b, p]: norm(projection(act(gate x) * u)), [s, b, h].

    u = (norm(model_projection(embedding) / sqrt(h)) + table[token] sqrt(p)) / sqrt(2). Its weights, each under
    layers.N.per_layer:

        embedding.weight         [v, p]     cut by vocabulary
        model_projection.weight  [p, h]     on every tp rank
        gate.weight              [p, h]     on every tp rank
        projection.weight        [h, p]     on every tp rank
        norm.weight              [h]        on every tp rank
    """

    def __init__(self, number: int, width: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name, hidden = f"layers.{number}.per_layer", model.hidden_size
        whole = partial(WholeLinear, factory=factory, bias=False)
        self.embedding = factory.embedding(f"{name}.embedding", model.vocab_size, width, tied_over=None)
        self.model_projection = whole(f"{name}.model_projection", hidden, width)
        self.gate = whole(f"{name}.gate", hidden, width)
        self.projection = whole(f"{name}.projection", width, hidden)
        self.norm = factory.norm(f"{name}.norm", hidden, kind.norm)
        self.rule: NormRule = kind.norm
        self.kernels: Kernels = factory.kernels
        self.activation = partial(PLAIN[kind.activation or model.hidden_act], impl=factory.kernels.activation)
        # Rounded to the model's dtype as transformers does, like `Ends.embedding_multiplier`.
        self.table_factor = torch.tensor(math.sqrt(width), dtype=factory.sharding.dtype).item()
        self.projection_factor = hidden**-0.5

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        embedding_sbh, weight_p = (context.handed[name] for name in HANDED)
        rows_sbp = self.embedding(context.batch.tokens_bs.t())
        projected_sbp = self.model_projection(embedding_sbh, context)
        gate_sbp = self.gate(x_sbh, context)
        inner_sbp = recompute.remade(self._gated, gate_sbp, projected_sbp, rows_sbp, weight_p)
        y_sbh: Tensor = self.norm(self.projection(inner_sbp, context))
        return y_sbh

    def _gated(self, gate_sbp: Tensor, projected_sbp: Tensor, rows_sbp: Tensor, weight_p: Tensor) -> Tensor:
        normed_sbp = self.rule.normalize(projected_sbp * self.projection_factor, weight_p, None, self.kernels.norm)
        input_sbp = (normed_sbp + rows_sbp * self.table_factor) * 2.0**-0.5
        gated: Tensor = self.activation(gate_sbp) * input_sbp
        return gated
