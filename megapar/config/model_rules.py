"""The rules of a model family for the options of `model`.

megapar knows no family. The program passes the rules of its family to `validate`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, flatten, option_types

SELECTION_BIAS = "moe.balance"
"""The option, without `model.`, to add a selection bias to each router: weights state "bias" then."""
HEAD = "head"
"""The option, without `model.`, of a head in place of the vocabulary's: its value is "score" then."""


def _no_problems(_: Config, __: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class ModelRules:
    """The rules of one family. Options are named by their dotted paths, such as `model.hidden_size`."""

    name: str
    """Name of the family in messages."""
    activations: tuple[str, ...]
    """The possible values of model.hidden_act. `auto` means the first."""
    options: type[ModelConfig] = ModelConfig
    """The class of the options of `model`: those of every family, and in a subclass those of this family."""
    even_head_dim: bool = False
    """Whether the width of a head must be even, as rotary embeddings need it."""
    problems: Callable[[Config, Any], Iterable[str]] = _no_problems
    """Yields a line for each further problem of a config with derived values and its `model`, one of `options`.

    See `megapar.config.messages.problem`.
    """

    def __post_init__(self) -> None:
        if "__dataclass_fields__" not in vars(self.options):
            raise ValueError(f"{self.options.__name__}: the options of family {self.name} must be a frozen dataclass")

    @property
    def has_experts(self) -> bool:
        """Whether the layers are mixtures of experts. Such a family needs model.moe.num_experts."""
        return self.options().experts is not None


def _described_nowhere(path: Path, _: str) -> str:
    raise ConfigError(f"{path}: this program reads no config.json of Hugging Face")


@dataclass(frozen=True)
class Families:
    """The model families of a program. `megapar.config.files` finds the options of a run's family here."""

    known: Mapping[str, ModelRules]
    find: Callable[[str], ModelRules]
    """The family of a name: one of `known`, or MODULE:NAME. Raises ConfigError if there is none."""
    described: Callable[[Path, str], str] = _described_nowhere
    """The section [model] of a config.json of Hugging Face, read by the family of a name, or if the name is "" by its
    model_type. Raises ConfigError for a model of no family."""

    def types(self) -> dict[str, Any]:
        """The type annotations of the options of all known families, by dotted path."""
        types = option_types()
        for rules in self.known.values():
            types |= option_types(rules.options)
        return types

    def readers(self, path: str) -> dict[str, Any]:
        """The known families with this option of their own: their names, each with the option's default."""
        return {name: options[path] for name, options in self._own.items() if path in options}

    @cached_property
    def _own(self) -> dict[str, dict[str, Any]]:
        """The defaults of each known family's options: those of a job of another framework ask for each row."""
        return {name: flatten(rules.options(), "model.") for name, rules in self.known.items()}


COMMON_OPTIONS = Families({}, lambda name: ModelRules(name=name, activations=()))
"""For callers without families: any family is taken, with the options of every family."""
