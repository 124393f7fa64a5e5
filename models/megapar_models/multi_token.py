"""Multi-token prediction: layers behind the last one, each of which predicts a token further ahead.

Layer k of them, counted from 0, reads what layer k - 1 gives for a position, and the token k + 1 positions ahead. Its
loss is of the token k + 2 positions ahead, through the model's own head (DeepSeek-V3, arXiv 2412.19437, equations 21 to
25). With h the hidden states of the model behind its last norm, as in Megatron-LM, transformers and vLLM:

    x = W [norm(embedding of the token); norm(h)]    h = norm(layer(x))    logits = head(h)

Both tokens are data (`megapar.declare.batch.ahead`): nothing is shifted at the end of a document, of a
context-parallel rank's positions, or of a micro-batch. The layers belong to the last pipeline stage.

The weights of these layers, numbered on from the others, are those of a layer of the family, and with h hidden:

    layers.N.{enorm,hnorm}.weight        [h]         on every tp rank: norms of the embedding and of the hidden states
    layers.N.eh_proj.weight              [h, 2 h]    on every tp rank
    layers.N.shared_head_norm.weight     [h]         on every tp rank: the norm before the head

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, h hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.activations.recompute import Recompute
from megapar.config.model_options import ModelConfig
from megapar.declare.batch import MicroBatch, Targets, add_loss, ahead
from megapar.declare.stage_set import AddedLoss
from megapar_models.ends import Projection
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.head import HeadRule
from megapar_models.layer_kind import LayerKind
from megapar_models.stage_layers import StageLayers

MOST_DEPTHS = 64
"""The most layers of multi-token prediction: published models have 1 to 3."""


@dataclass(frozen=True, kw_only=True)
class MTPRule:
    """What a family says of its layers of multi-token prediction."""

    kind: LayerKind
    """The parts of each layer of multi-token prediction."""
    hidden_first: bool = False
    """Whether hidden states stand before the embedding in the input of `eh_proj`."""

    def __post_init__(self) -> None:
        if self.kind.reads or self.kind.writes or self.kind.stream is not None:
            raise ValueError("MTPRule.kind: reads, writes and stream are for the model's own layers; leave them empty")


def added_losses(model: ModelConfig) -> tuple[AddedLoss, ...]:
    """Return the losses mtp_1, mtp_2, ... of a model, one for each layer of multi-token prediction."""
    depths = model.num_nextn_predict_layers
    return tuple(
        AddedLoss(_name(depth), divided_by="own", ahead=1 + depth, weight=model.mtp_loss_weight / depths)
        for depth in range(1, 1 + depths)
    )


def _name(depth: int) -> str:
    return f"mtp_{depth}"


class PredictionLayer(nn.Module):
    """A layer of multi-token prediction: from embeddings and hidden states, both [s, b, h], to hidden states."""

    def __init__(
        self,
        number: int,
        rule: MTPRule,
        model: ModelConfig,
        factory: Factory,
        make_layer: Callable[[int, LayerKind], nn.Module],
    ):
        super().__init__()
        name, width = f"layers.{number}", model.hidden_size
        self.number = number
        self.rule = rule
        self.enorm = factory.norm(f"{name}.enorm", width, rule.kind.norm)
        self.hnorm = factory.norm(f"{name}.hnorm", width, rule.kind.norm)
        self.eh_proj = Projection(f"{name}.eh_proj", 2 * width, width, factory, update="matrix")
        self.layer = make_layer(number, rule.kind)
        self.shared_head_norm = factory.norm(f"{name}.shared_head_norm", width, rule.kind.norm)

    def forward(self, embedded_sbh: Tensor, hidden_sbh: Tensor, context: ForwardContext, rule: Recompute) -> Tensor:
        """Return the input of the head, which the next of these layers reads too. `rule` is that of recomputation."""
        both = [self.enorm(embedded_sbh), self.hnorm(hidden_sbh)]
        x_sbh = self.eh_proj(torch.cat(both[::-1] if self.rule.hidden_first else both, dim=-1))
        again, offloads = rule.layer(self.number), rule.offloads(self.number)
        x_sbh = recompute.run(
            again, self.layer, x_sbh, context, keeps_attention=rule.keeps_attention, offloads=offloads
        )
        normed_sbh: Tensor = self.shared_head_norm(x_sbh)
        return normed_sbh


class SharedEnds(Protocol):
    """What these layers share with the last stage, which has it: the embedding, the head, and rules of a run."""

    head_rule: HeadRule
    head: nn.Parameter
    head_bias: nn.Parameter | None
    layers: StageLayers
    seed: int

    def embed(self, context: ForwardContext) -> Tensor:
        """Return the embeddings [s or s/tp, b, h] of the tokens of the context's micro-batch."""


class MultiToken(nn.Module):
    """All layers of multi-token prediction of a model."""

    def __init__(
        self,
        rule: MTPRule | None,
        model: ModelConfig,
        factory: Factory,
        make_layer: Callable[[int, LayerKind], nn.Module],
    ):
        super().__init__()
        assert rule is not None, "validate() refuses the option for families without a rule"
        self.rotary = rule.kind.rotary
        self.detach = model.mtp_detach
        numbers = range(model.num_hidden_layers, model.all_layers)
        self.depths = nn.ModuleList(PredictionLayer(n, rule, model, factory, make_layer) for n in numbers)

    def add_losses(self, loss: Tensor, normed_sbh: Tensor, batch: MicroBatch, ends: SharedEnds) -> Tensor:
        """Return `loss`, 0-d, unchanged. Its backward pass also runs that of the losses of multi-token prediction.

        `normed_sbh` are the hidden states after the model's last norm.
        """
        hidden_sbh = normed_sbh
        with recompute.light(ends.layers.rule.mode == "light"):
            for depth in range(1, 1 + len(self.depths)):
                later = ahead(batch, depth)
                hidden_sbh = self.hidden_states(depth - 1, hidden_sbh, later, ends)
                loss = add_loss(loss, self._loss(hidden_sbh, later.targets(), ends), batch, _name(depth))
        return loss

    def hidden_states(self, depth: int, hidden_sbh: Tensor, later: MicroBatch, ends: SharedEnds) -> Tensor:
        """Return the input of the head of layer `depth`, counted from 0, from what the layer before it gives.

        `later` has the tokens depth + 1 positions ahead. Their weights are those of this layer's loss, and so of the
        loss that balances its experts.
        """
        rule = ends.layers.rule
        tables = {} if self.rotary is None else {self.rotary: self.rotary.tables(later)}
        context = ForwardContext(later, tables, ends.seed, rule.attention())
        embedded_sbh = ends.embed(context)
        if self.detach:
            embedded_sbh = embedded_sbh.detach()
        given_sbh: Tensor = self.depths[depth](embedded_sbh, hidden_sbh, context, rule)
        return given_sbh

    def _loss(self, hidden_sbh: Tensor, targets: Targets, ends: SharedEnds) -> Tensor:
        """The sum of weight * cross entropy of the targets, 0-d fp32."""
        head: Tensor = ends.head
        bias: Tensor | None = ends.head_bias
        if self.detach:
            head, bias = head.detach(), None if bias is None else bias.detach()
        return (ends.head_rule.token_losses(hidden_sbh, head, bias, targets) * targets.weights_bs.t()).sum()
