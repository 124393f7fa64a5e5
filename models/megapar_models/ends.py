"""What stands between the token embeddings and the first layer, and between the last layer and the head (`Ends`).

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, h hidden, w width of
embeddings.
"""

from typing import Any

from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.declare.params import shared_piece
from megapar.tensor_parallel.layers import local_linear
from megapar_models.factory import Factory
from megapar_models.layer_kind import Ends
from megapar_models.norms import NoNorm, NormRule


class Projection(nn.Module):
    """x W^T with W [out, in], whole on every tp rank: from embeddings to layers, or from layers to the head.

    Under sequence parallelism each rank has tokens of its own, and a part of the gradient.
    """

    def __init__(self, name: str, in_features: int, out_features: int, factory: Factory, **options: Any):
        super().__init__()
        sharding = factory.sharding
        shape = (out_features, in_features)
        piece = shared_piece(f"{name}.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
        self.weight = sharding.parameter((piece,), shape, factory.init, decay=True, **options)
        self.products = factory.products_of(name)

    def forward(self, x: Tensor) -> Tensor:
        return local_linear(x, self.weight, None, self.products)


class Embedding(nn.Module):
    """Token embeddings [v, w] and what follows them before the first layer: ids [s, b] to [s, b, h]."""

    def __init__(self, model: ModelConfig, ends: Ends, factory: Factory, **options: Any):
        super().__init__()
        self.rows = factory.embedding("embedding", model.vocab_size, ends.width or model.hidden_size, **options)
        self.project = Projection("project_in", ends.width, model.hidden_size, factory) if ends.width else None
        self.norm = None
        if ends.embedding_norm is not None:
            self.norm = factory.norm("embedding_norm", model.hidden_size, ends.embedding_norm)

    @property
    def weight(self) -> nn.Parameter:
        """The matrix of the embeddings."""
        return self.rows.weight

    def forward(self, ids_sb: Tensor) -> Tensor:
        x: Tensor = self.rows(ids_sb)
        for part in (self.project, self.norm):
            x = x if part is None else part(x)
        return x


def last_norm(model: ModelConfig, ends: Ends, rule: NormRule, factory: Factory) -> nn.Module:
    """What maps the hidden states [s, b, h] after the last layer to the input of the head, [s, b, w]."""
    norm = factory.norm("norm", model.hidden_size, rule) if ends.norm else NoNorm()
    if not ends.width:
        return norm
    return nn.Sequential(norm, Projection("project_out", model.hidden_size, ends.width, factory))
