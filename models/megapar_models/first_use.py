"""Compares kernels of linear attention with torch's forms before a model's first step."""

from collections.abc import Callable
from typing import Any

from megapar_kernels.dispatch import Implementation

from megapar.base.errors import ConfigError
from megapar_models.factory import Factory


def check_once(factory: Factory, impl: Implementation, check: Callable[..., None], *sizes: Any) -> None:
    """Let `check` of `megapar_kernels.first_use` compare kernels of `impl` with torch's forms, once for these sizes.

    On a GPU alone. Raises ConfigError with one line if they differ.
    """
    device = factory.sharding.device
    key = (check, *sizes)
    if impl == "torch" or device.type != "cuda" or key in factory.checked:
        return
    try:
        check(device, factory.sharding.dtype, *sizes, impl)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    factory.checked.add(key)
