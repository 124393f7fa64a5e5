"""The end of a model: from normed hidden states to logits, and to the losses of tokens.

Shapes: s positions of this context-parallel rank (s/tp under sequence parallelism), b micro-batch, h hidden.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.declare.batch import Targets
from megapar.tensor_parallel.cross_entropy import LogitRule, ruled_logits, vocab_parallel_cross_entropy
from megapar.tensor_parallel.layers import column_linear, vocabulary_cut
from megapar.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megapar_models.factory import Factory
from megapar_models.score_head import score_weight, scores


def head_weight(model: ModelConfig, factory: Factory, width: int, tied_over: Axis | None) -> nn.Parameter:
    """Make the head's weight [v, width], or with model.head=score [1, width]. `width` 0 is that of the layers.

    The copy of a tied embedding has the embedding's name: it is one tensor in a checkpoint.
    """
    width = width or model.hidden_size
    if model.head == "score":
        return score_weight(width, factory)
    tie = model.tie_word_embeddings
    name = "embedding.weight" if tie else "head.weight"
    return factory.vocabulary(name, model.vocab_size, width, tied_over=tied_over if tie else None)


@dataclass(frozen=True)
class HeadRule:
    """How logits and the losses of tokens follow from hidden states and the head's weight.

    `rule` says what becomes of the head's products. `loss_chunk` is the number of tokens with logits in memory at one
    time; 0 takes all tokens of a micro-batch.
    """

    model: ModelConfig
    factory: Factory
    rule: LogitRule
    loss_chunk: int = 0

    def logits(self, normed_sbh: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of this tp rank's columns, [s, b, columns], or with model.head=score [s, b, 1]."""
        if self.model.head == "score":
            return scores(normed_sbh, weight, self.factory)
        products = self.factory.products_of("head")
        products_sbv = column_linear(normed_sbh, weight, bias, self.factory.sharding, products)
        return ruled_logits(products_sbv, self.rule)

    def token_losses(
        self,
        normed_sbh: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        hits_sb: Tensor | None = None,
        *,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Return the cross entropy of each target, fp32 [s, b], the same on every tp rank, with `z_loss` added.

        `hits_sb`, bool, is filled with whether a target has the highest logit.
        """
        sharding = self.factory.sharding
        impl = self.factory.kernels.cross_entropy
        vocab_size = self.model.vocab_size
        targets_sb = targets.tokens_bs.t()
        start, _, _ = vocabulary_cut(vocab_size, sharding.tp)
        # In chunks the logits of all tokens are never in memory at one time, but the backward pass computes them again.
        # A single chunk would save nothing.
        if 0 < self.loss_chunk < targets_sb.numel():
            return linear_cross_entropy(
                normed_sbh,
                weight,
                targets_sb,
                vocab_size,
                start,
                sharding.tp,
                sequence_parallel=sharding.splits_sequence,
                chunk_rows=self.loss_chunk,
                z_loss=z_loss,
                impl=impl,
                products=self.factory.products_of("head"),
                bias=bias,
                rule=self.rule,
                hits_sb=hits_sb,
            )
        return vocab_parallel_cross_entropy(
            self.logits(normed_sbh, weight, bias),
            targets_sb,
            vocab_size,
            start,
            sharding.tp,
            z_loss=z_loss,
            impl=impl,
            inplace=not self.rule.cap,  # a cap keeps its logits for its own gradient
            hits_sb=hits_sb,
        )
