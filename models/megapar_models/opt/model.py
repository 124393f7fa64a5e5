"""OPT (arXiv 2205.01068): GPT-2 with ReLU, and a table of positions with two rows in front that no position reads.

Its weights are those of GPT-2; positions.weight has 2 + max_position_embeddings rows.
"""

from dataclasses import dataclass

from megapar_models.gpt.model import GPTModel, GPTStage


@dataclass(frozen=True)
class OPTModel(GPTModel):
    """The options of OPT."""


class OPTStage(GPTStage):
    """Consecutive OPT layers."""

    first_position = 2
