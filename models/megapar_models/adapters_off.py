"""The base of adapters: the layers of a model without the low-rank products that are added to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megapar.expert_parallel.experts import Experts
from megapar.tensor_parallel.lora import Lora


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block the layers of `model` have no adapters."""
    held: list[tuple[nn.Module, str, nn.Module]] = []
    for layer in model.modules():
        if isinstance(layer, Experts):
            held.append((layer, "lora_a", layer.lora_a))
        elif isinstance(lora := getattr(layer, "lora", None), Lora):
            held.append((layer, "lora", lora))
    try:
        for layer, name, child in held:
            # Experts ask for the factors of each matrix, and other layers for all.
            setattr(layer, name, None if isinstance(child, Lora) else nn.ParameterDict())
        yield
    finally:
        for layer, name, child in held:
            setattr(layer, name, child)
