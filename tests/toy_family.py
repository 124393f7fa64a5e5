"""A model family outside the project's tree, as a user writes one: --model.family tests.toy_family:FAMILY.

Attention and MLP of a layer read the same norm, as in GPT-J and PaLM (arXiv 2204.02311).
"""

from collections.abc import Iterator

from megapar_models.attention import Attention
from megapar_models.family import Family
from megapar_models.llama.model import LlamaMLP, LlamaStage, RMSNorm
from megapar_models.stage import Blueprint, ForwardContext
from torch import Tensor, nn

from megapar.config.messages import problem
from megapar.config.options import Config


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, number: int, blueprint: Blueprint):
        super().__init__()
        self.norm = RMSNorm(f"layers.{number}.norm", blueprint)
        self.attention = Attention(number, blueprint, qkv_bias=False, out_bias=False)
        self.mlp = LlamaMLP(f"layers.{number}.mlp", blueprint.model.intermediate_size, blueprint)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        normed = self.norm(x_sbh)
        return x_sbh + self.attention(normed, context) + self.mlp(normed)


class ParallelStage(LlamaStage):
    """A run of such layers, with Llama's embedding, rotary positions, last norm and head."""

    def make_layer(self, number: int) -> nn.Module:
        return ParallelLayer(number, self.blueprint)


def refuse_deep_models(config: Config) -> Iterator[str]:
    if config.model.num_hidden_layers > 8:
        yield problem(config, "model.num_hidden_layers", "this family has at most 8")


FAMILY = Family(
    name="parallel",
    stage=ParallelStage,
    activations=("silu",),
    reads=("model.rope_theta", "model.qk_norm"),
    even_head_dim=True,
    problems=refuse_deep_models,
)
