"""Imports what an option names outside of this repository, such as a model family or a pipeline schedule."""

import importlib
from collections.abc import Mapping
from typing import TypeVar

from megapar.base.errors import ConfigError
from megapar.config.options import Config

T = TypeVar("T")


def package_of(name: str) -> str:
    """The top-level package of MODULE:NAME, or "" for a name of our own and for a file's."""
    module, colon, _ = name.partition(":")
    if "/" in name:
        return ""
    if colon:
        return module.partition(".")[0]
    return ""


def named_outside(config: Config) -> list[tuple[str, str]]:
    """Return the options that name code outside of megapar, as MODULE:NAME, with their values."""
    options = [
        ("model.family", config.model.family),
        ("parallel.schedule", config.parallel.schedule),
        ("optimizer.name", config.optimizer.name),
        ("optimizer.schedule", config.optimizer.schedule),
        ("kernels.products", config.kernels.products),
        ("train.objective", config.train.objective),
        *(("log.observers", name) for name in config.log.observers),
    ]
    return [(option, name) for option, name in options if package_of(name)]


def named(option: str, name: str, known: Mapping[str, T], kind: type[T]) -> T:
    """The object named by `option`: a key of `known`, or MODULE:NAME for a `kind` in an importable module.

    Raises ConfigError if there is no such object.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(
            f"{option}={name}: unknown; there are {', '.join(known)}, and MODULE:NAME names one of your own"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:  # Ctrl-C, while it is imported
        raise
    except BaseException as error:  # a module may raise anything: a script without a __main__ guard calls sys.exit
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{option}={name}: cannot be imported ({reason}); the module must lie where Python looks (PYTHONPATH)"
        ) from error
    if not isinstance(found, kind):
        wanted = "class" if kind is type else f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(f"{option}={name}: is {type(found).__name__}, not a {wanted}")
    return found
