"""One pipeline stage of a decoder-only transformer.

A stage has consecutive layers. The first stage also has the embedding, and the last one the norm, head and loss. Layers
keep their global numbers, so the names of weights do not depend on the split into stages. Between stages go the hidden
states, and what layers hand on beside them (`megapar_models.handed`).

Shapes: s positions of this context-parallel rank (s/tp between layers under sequence parallelism), b micro-batch,
h hidden, v vocabulary, d width of a head.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from megapar.activations.recompute import Recompute
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.declare.batch import MicroBatch, Targets
from megapar.declare.stage_set import AddedLoss, Declared
from megapar.tensor_parallel.layers import vocabulary_bias
from megapar_models.adapters_off import adapters_off
from megapar_models.ends import Embedding, last_norm
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.handed import Bundle
from megapar_models.head import HeadRule, head_weight
from megapar_models.layer import Layer
from megapar_models.layer_kind import Ends, LayerKind, bundle_of
from megapar_models.moe import ROUTER_LOSS, balance_rule
from megapar_models.multi_token import MTPRule, MultiToken, added_losses
from megapar_models.norms import NormRule
from megapar_models.objectives import USUAL, Scored
from megapar_models.stage_layers import Given, LayersOfStage, StageLayers

M = TypeVar("M", bound=ModelConfig, default=ModelConfig)
"""The class of a family's options."""


class LayerRules(Generic[M]):
    """What a family says of its layers and of both ends. Plans, checks and conversions ask without building layers."""

    @classmethod
    def layer_kind(cls, model: M, number: int) -> LayerKind:
        """What the layer with this global number is made of."""
        raise NotImplementedError

    @classmethod
    def ends_of(cls, model: M) -> Ends:
        """What stands before the first layer and behind the last."""
        return Ends()

    @classmethod
    def last_norm(cls, model: M) -> NormRule:
        """The rule of the norm before the head: the last layer's."""
        return cls.layer_kind(model, model.num_hidden_layers - 1).norm

    @classmethod
    def bundle(cls, model: M) -> Bundle:
        """What the layers of the model hand on beside the hidden states."""
        kinds = [cls.layer_kind(model, number) for number in range(model.num_hidden_layers)]
        return bundle_of(kinds, cls.ends_of(model))

    @classmethod
    def mtp_rule(cls, model: M) -> MTPRule | None:
        """How layers of multi-token prediction are made. None: the family has none."""
        return None

    @classmethod
    def declared(cls, model: M) -> Declared:
        """What every rank must know of a model of this family: further targets and losses, and what modules count."""
        targets, losses = 1 + model.num_nextn_predict_layers, added_losses(model)
        kinds = [cls.layer_kind(model, number) for number in range(model.num_hidden_layers)]
        if model.num_nextn_predict_layers and (rule := cls.mtp_rule(model)):
            kinds.append(rule.kind)
        moe = next((kind.mixture for kind in kinds if kind.mixture is not None), None)
        if moe is None:
            return Declared(targets, losses)
        if balance_rule(moe).has_loss:
            losses = (AddedLoss(ROUTER_LOSS, split_over_tp=True), *losses)
        return Declared(targets, losses, {"expert": (model.all_layers, moe.num_experts)})


class Stage(LayerRules[M], LayersOfStage, Generic[M]):
    """A pipeline stage with the layers `layers`.

    Families subclass it: as Stage[CLASS] if they have a class of options.

    It has the embedding if `first`, or if `last` and the model embeds there too (`embeds_on_last_stage`). It
    has norm, head and loss if `last`. `factory` makes its modules. `tied_weight` is the parameter of the input
    embedding, given to the last stage if it uses the embedding and the first stage is on the same rank. Without it the
    last stage holds a copy, and the gradients of both are summed over `tied_over`, the axis of the pipeline ranks with
    copies. `tied_over` is None if one rank holds all of the embedding, or if the embedding is not tied.

    `objective` makes the loss of the values of tokens (`megapar_models.objectives`). `seed` is the seed of dropout.
    `bundle` is that of the model, if it is known.
    """

    def __init__(
        self,
        model: M,
        factory: Factory,
        layers: range,
        *,
        first: bool,
        last: bool,
        recompute_rule: Recompute,
        tied_weight: nn.Parameter | None = None,
        tied_over: Axis | None = None,
        seed: int = 0,
        z_loss: float = 0.0,
        loss_chunk: int = 0,
        objective: Callable[[Scored], Tensor] = USUAL,
        bundle: Bundle | None = None,
    ):
        super().__init__(first=first, last=last, seed=seed)
        self.model = model
        self.factory = factory
        self.tied_over = tied_over
        self.z_loss = z_loss
        self.objective = objective
        self.ends = self.ends_of(model)
        self.handed = self.bundle(model) if bundle is None else bundle
        self.head_rule = HeadRule(model, factory, self.ends.logits, loss_chunk)
        self.embedding = self.norm = self.head_bias = self.mtp = None
        if first or (last and model.embeds_on_last_stage):
            self.embedding = Embedding(model, self.ends, factory, tied_over=tied_over, weight=tied_weight)
        kinds = {number: self.layer_kind(model, number) for number in layers}
        cuts = self.handed.at(layers.start), self.handed.at(layers.stop)
        rule, width = recompute_rule, model.hidden_size
        stream = self.layer_kind(model, 0).stream
        self.layers = StageLayers(kinds, self.make_layer, cuts, rule, width, factory.sharding, stream)
        if last:
            self.stream_end = None if stream is None else stream.make_end(model, factory)
            self.norm = last_norm(model, self.ends, self.last_norm(model), factory)
            if model.tie_word_embeddings and self.embedding is not None:
                tied_weight = self.embedding.weight  # this stage has the embedding too: its parameter is the head
            tied = tied_weight if model.tie_word_embeddings else None
            self.head = head_weight(model, factory, self.ends.width, tied_over) if tied is None else tied
            if self.ends.head_bias and model.head == "vocabulary":
                self.head_bias = vocabulary_bias("head.bias", model.vocab_size, factory.sharding)
            if model.num_nextn_predict_layers:
                self.mtp = MultiToken(self.mtp_rule(model), model, factory, self.make_layer)
            # A loss in chunks adds the gradient of the head while it has the gradients of logits.
            self.adds_gradients_in_i = loss_chunk > 0

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        """Make the layer with this global number. It maps (x_sbh, ForwardContext) to x_sbh.

        A layer with `leaves_branch` also takes, and then gives back, a branch that is not yet added to x_sbh (`Layer`).
        """
        if kind.stream is not None:
            return kind.stream.make_layer(number, kind, self.model, self.factory)
        return Layer(number, kind, self.model, self.factory)

    def embedding_weight(self) -> nn.Parameter:
        """The weight of the input embedding, for a stage that has it."""
        assert self.embedding is not None
        return self.embedding.weight

    def forward(self, x: Given | None, batch: MicroBatch) -> Given:
        """What the next stage gets (`StageLayers.left`); on the last stage the loss sum."""
        if batch.scope.asks_references:
            with adapters_off(self):
                x_sbh, handed = self.run_layers(x, batch)
                return self.scored(x_sbh, batch).of_answers() if self.last else self.layers.left(x_sbh, handed)
        x_sbh, handed = self.run_layers(x, batch)
        if not self.last:
            return self.layers.left(x_sbh, handed)
        return self.loss(x_sbh, batch)  # norm, head and objective

    def embed(self, context: ForwardContext) -> Tensor:
        """Token embeddings [s or s/tp, b, h]."""
        assert self.embedding is not None
        x_sbh: Tensor = self.embedding(context.batch.tokens_bs.t())
        multiplier = self.ends.embedding_multiplier
        if multiplier == 1.0:
            return x_sbh
        # Rounded as transformers does for Gemma: the root of 2304 is 48, and that of 3072 is 55.5 in bf16.
        return x_sbh * torch.tensor(multiplier, dtype=x_sbh.dtype).item()

    def title(self) -> str:
        """The parts of this stage in words, such as "embedding, layers 0-3"."""
        numbers = [int(number) for number in self.layers]
        return title(numbers, first=self.first, last=self.last)

    def logits(self, x_sbh: Tensor) -> Tensor:
        """The logits of this tp rank's part of the vocabulary, [s, b, its columns]. Padding comes last.

        With model.head=score they are the scores, [s, b, 1], the same on every tp rank.
        """
        assert self.norm is not None
        return self.head_rule.logits(self.norm(x_sbh), self.head, self.head_bias)

    def loss(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """The objective of the next tokens. In training its backward pass is that of multi-token prediction too."""
        if self.mtp is None or batch.scope.grad_scale is None:
            return self.objective(self.scored(x_sbh, batch))
        assert self.norm is not None
        normed_sbh = self.norm(x_sbh)
        return self.mtp.add_losses(self.objective(_scored(self, normed_sbh, batch)), normed_sbh, batch, self)

    def scored(self, x_sbh: Tensor, batch: MicroBatch) -> Scored:
        """The log-probabilities of the next tokens, or the scores, from the hidden states after the last layer."""
        assert self.norm is not None
        return _scored(self, self.norm(x_sbh), batch)

    def cross_entropy(self, normed_sbh: Tensor, targets: Targets) -> Tensor:
        """Return the sum of weight * cross entropy over targets: 0-d fp32, the same on every tp rank."""
        return (self.token_losses(normed_sbh, targets) * targets.weights_bs.t()).sum()

    def token_losses(self, normed_sbh: Tensor, targets: Targets, hits_sb: Tensor | None = None) -> Tensor:
        """Return `HeadRule.token_losses`, in training with train.z_loss."""
        z_loss = self.z_loss if self.training else 0.0  # a validation loss is the cross entropy alone
        return self.head_rule.token_losses(normed_sbh, self.head, self.head_bias, targets, hits_sb, z_loss=z_loss)


def _scored(stage: Stage[Any], normed_sbh: Tensor, batch: MicroBatch) -> Scored:
    if stage.model.head == "score":
        scores_sb1 = stage.head_rule.logits(normed_sbh, stage.head, stage.head_bias)
        return Scored(scores_sb1[..., 0].float(), batch, stage.factory.sharding.cp)
    if batch.scope.hits is None:
        losses_sb = stage.token_losses(normed_sbh, batch.targets())
    else:
        hits_sb = torch.empty(batch.targets_bs.t().shape, dtype=torch.bool, device=normed_sbh.device)
        losses_sb = stage.token_losses(normed_sbh, batch.targets(), hits_sb)
        batch.scope.hits.add_((hits_sb * batch.weights_bs.t()).sum())
    return Scored(-losses_sb, batch, stage.factory.sharding.cp)


def title(layers: Sequence[int], *, first: bool, last: bool) -> str:
    """The parts of a stage with these layers in words. It has the embedding if `first`, and the head if `last`."""
    parts = []
    if first:
        parts.append("embedding")
    if layers:
        parts.append(f"layers {layers[0]}-{layers[-1]}")
    if last:
        parts.append("head")
    return ", ".join(parts)
