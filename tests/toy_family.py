"""A model family outside the project's tree, as a user writes one: --model.family tests.toy_family:FAMILY.

Attention and MLP of a layer read the same norm, as in GPT-J and PaLM (arXiv 2204.02311).
"""

from collections.abc import Iterator

from megapar_models.attention import Attention
from megapar_models.factory import Factory
from megapar_models.families.llama import LlamaModel, LlamaStage
from megapar_models.family import Family
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP
from torch import Tensor, nn

from megapar.config.messages import problem
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        self.norm = factory.norm(f"layers.{number}.norm", model.hidden_size, kind.norm)
        self.attention = Attention(number, kind, model, factory)
        self.mlp = DenseMLP(number, kind, model, factory)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        normed = self.norm(x_sbh)
        return x_sbh + self.attention(normed, context) + self.mlp(normed, context)


class ParallelStage(LlamaStage):
    """A run of such layers, with Llama's embedding, rotary positions, last norm and head."""

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        return ParallelLayer(number, kind, self.model, self.factory)


def refuse_deep_models(config: Config, model: LlamaModel) -> Iterator[str]:
    if model.num_hidden_layers > 8:
        yield problem(config, "model.num_hidden_layers", "this family has at most 8")


FAMILY = Family(
    name="parallel",
    stage=ParallelStage,
    activations=("silu",),
    options=LlamaModel,
    even_head_dim=True,
    problems=refuse_deep_models,
)
