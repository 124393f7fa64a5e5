"""The rules that a model family has for the options of `model`.

megapar knows no family. The program passes the rules of its family to `validate`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megapar.config.options import Config, MoEConfig, RopeScaling, flatten

EVERY_FAMILY = (
    *("model.family", "model.hidden_size", "model.num_hidden_layers", "model.vocab_size", "model.hidden_act"),
    *("model.num_attention_heads", "model.num_key_value_heads", "model.head_dim", "model.intermediate_size"),
    *("model.max_position_embeddings", "model.rms_norm_eps", "model.tie_word_embeddings", "model.initializer_range"),
)
"""The options of `model` that every family reads."""
ROPE_SCALING = tuple(f"model.rope_scaling.{name}" for name in flatten(RopeScaling()))
SELECTION_BIAS = "moe.balance"
"""The option, without `model.`, whose value "bias" adds a selection bias to each router."""
MOE = tuple(f"model.moe.{name}" for name in flatten(MoEConfig()))


def _no_problems(_: Config) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class ModelRules:
    """The rules of one family. Options are named by their dotted paths, such as `model.rope_theta`."""

    name: str
    """Name of the family in messages."""
    activations: tuple[str, ...]
    """Values that model.hidden_act may have. `auto` means the first."""
    reads: tuple[str, ...] = ()
    """The options of `model` that the family reads beside EVERY_FAMILY.

    All others are refused unless they have their defaults. So a new option is refused until a family says that it reads
    it, and none is ignored.
    """
    even_head_dim: bool = False
    """Whether the width of a head must be even. Rotary embeddings need that."""
    problems: Callable[[Config], Iterable[str]] = _no_problems
    """Yields a line for each further problem of a config with derived values. See `megapar.config.messages.problem`."""

    @property
    def has_experts(self) -> bool:
        """Whether the layers are mixtures of experts. Such a family needs model.moe.num_experts."""
        return "model.moe.num_experts" in self.reads
