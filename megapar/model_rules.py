"""What a model family says of the options of `model`. megapar knows no family: the program hands one to `validate`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megapar.config import Config, RopeScaling, flatten

ROPE_SCALING = tuple(f"model.rope_scaling.{name}" for name in flatten(RopeScaling()))


def _no_problems(_: Config) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class ModelRules:
    """Options are named by their dotted paths, such as `model.rope_theta`."""

    name: str
    """For messages."""
    activations: tuple[str, ...]
    """What model.hidden_act may be; `auto` means the first."""
    unused: tuple[str, ...] = ()
    """Options of `model` that the family does not read. Other values than their defaults are refused."""
    even_head_dim: bool = False
    """Whether a head's width must be even, as rotary embeddings need it."""
    problems: Callable[[Config], Iterable[str]] = _no_problems
    """A line for each further problem of a config with derived values; see `megapar.messages.problem`."""
