"""The rules of a model family for the options of `model`.

megapar knows no family. The program passes the rules of its family to `validate`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.config.options import Config, ModelConfig, MoEConfig, RopeScaling, flatten

EVERY_FAMILY = (
    *("model.family", "model.hidden_size", "model.num_hidden_layers", "model.vocab_size", "model.hidden_act"),
    *("model.num_attention_heads", "model.num_key_value_heads", "model.head_dim", "model.intermediate_size"),
    *("model.max_position_embeddings", "model.rms_norm_eps", "model.tie_word_embeddings", "model.initializer_range"),
)
"""The options of `model` for every family."""
ROPE_SCALING = tuple(f"model.rope_scaling.{name}" for name in flatten(RopeScaling()))
SELECTION_BIAS = "moe.balance"
"""The option, without `model.`, to add a selection bias to each router: its value is "bias" then."""
MOE = tuple(f"model.moe.{name}" for name in flatten(MoEConfig()))


def _no_problems(_: Config) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class ModelRules:
    """The rules of one family. Options are named by their dotted paths, such as `model.rope_theta`."""

    name: str
    """Name of the family in messages."""
    activations: tuple[str, ...]
    """The possible values of model.hidden_act. `auto` means the first."""
    options: type[ModelConfig] = ModelConfig
    """The class of the options of `model`. The fields of a subclass are options of this family alone."""
    reads: tuple[str, ...] = ()
    """The options of ModelConfig read by the family beside EVERY_FAMILY.

    All others are refused unless they have their defaults. So a new option is refused until a family lists it here, and
    none is ignored.
    """
    even_head_dim: bool = False
    """Whether the width of a head must be even, as rotary embeddings need it."""
    problems: Callable[[Config], Iterable[str]] = _no_problems
    """Yields a line for each further problem of a config with derived values. See `megapar.config.messages.problem`."""

    def __post_init__(self) -> None:
        if "__dataclass_fields__" not in vars(self.options):
            raise ValueError(f"{self.options.__name__}: the options of family {self.name} must be a frozen dataclass")

    def all_read(self) -> set[str]:
        """The dotted paths of all options of `model` read by the family."""
        inherited = flatten(ModelConfig(), "model.").keys()
        added = flatten(self.options(), "model.").keys() - inherited
        return {*EVERY_FAMILY, *self.reads, *added}

    @property
    def has_experts(self) -> bool:
        """Whether the layers are mixtures of experts. Such a family needs model.moe.num_experts."""
        return "model.moe.num_experts" in self.reads


@dataclass(frozen=True)
class Families:
    """The model families of a program. `megapar.config.files` finds the options of a run's family here."""

    known: Mapping[str, ModelRules]
    find: Callable[[str], ModelRules]
    """The family of a name: one of `known`, or MODULE:NAME. Raises ConfigError if there is none."""

    def readers(self, path: str) -> dict[str, Any]:
        """The known families with this option of their own: their names, each with the option's default."""
        found = {}
        for name, rules in self.known.items():
            options = flatten(rules.options(), "model.")
            if path in options:
                found[name] = options[path]
        return found


COMMON_OPTIONS = Families({}, lambda name: ModelRules(name=name, activations=()))
"""For callers without families: any family is taken, with the options of ModelConfig."""
