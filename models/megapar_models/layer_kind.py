"""What one layer of a model is made of. A family says it for each number of a layer (`Stage.layer_kind`)."""

from dataclasses import dataclass
from typing import Literal

from megapar.config.options import MoEConfig
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The parts of a layer, and how they are put together (`megapar_models.layer.Layer`)."""

    mixer: str = "attention"
    """What mixes tokens: a name in `megapar_models.layer.MIXERS`, or MODULE:NAME of a class of your own."""
    mlp: str = "dense"
    """What works on each token: a name in `megapar_models.layer.MLPS`, or MODULE:NAME of a class of your own."""
    norm: NormRule
    norms: Literal["before", "after", "both"] = "before"
    """Norms of a branch's input, of its output before it is added to the residual stream, or of both."""
    rotary: Rotary | None = None
    """The rotary table of queries and keys. None: the layer sees no positions (NoPE)."""
    window: int = 0
    """Attention reads this many keys, the token's own among them. 0: all keys up to its own."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """A norm over each head's query and key, before the rotation."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    mixture: MoEConfig | None = None
    """The experts of mlp "mixture"."""
