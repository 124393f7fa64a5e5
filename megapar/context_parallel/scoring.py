"""What one attention computes besides its products, and by whom."""

from dataclasses import dataclass

from megapar_kernels.alibi import Alibi
from megapar_kernels.backend import TORCH, Kernels
from megapar_kernels.block_attention import PLAIN_SCORES, ScoreRule

from megapar.context_parallel.dropout import AttentionDropout
from megapar.declare.largest_logits import LargestLogits


@dataclass(frozen=True)
class Scoring:
    """How scores and probabilities are computed. Sinks are weights, so they are arguments of their own.

    `rule` says how a score follows from a query and a key, and `kernels` who computes it. A position reads `window`
    keys at most, its own among them; 0: all up to its own. `dropout` drops probabilities. `alibi` is added to
    scores: its positions of queries and of keys are those of this rank. `largest` notes the largest logits.
    """

    rule: ScoreRule = PLAIN_SCORES
    kernels: Kernels = TORCH
    window: int = 0
    dropout: AttentionDropout | None = None
    largest: LargestLogits | None = None
    alibi: Alibi | None = None


PLAIN = Scoring()
