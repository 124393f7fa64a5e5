"""The bytes of a rank's buffers, from its declared parameters alone: weights, gradients and optimizer state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.layout import HasParameters
from megapar.data_parallel.placement import Placement
from megapar.declare.params import spec_of
from megapar.observe import memory_report
from megapar.optimizer import table
from megapar.train.trainer import layout_of, types_of


@dataclass(frozen=True)
class Buffers:
    """The bytes of a rank's buffers, and what they hold.

    `parameters` is a number of elements. `optimizers` are the names of the rank's optimizers. `units[i]` are the units
    of the stage i of the rank. `unit_elements` are the elements of each unit, and `unit_gathered` its bytes while
    ZeRO-3 has it gathered; there are none before ZeRO-2.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    optimizers: Sequence[str]
    units: Sequence[Sequence[int]]
    unit_elements: Sequence[int]
    unit_gathered: Sequence[int]

    @classmethod
    def of(cls, options: OptimizerConfig, modules: Sequence[HasParameters]) -> "Buffers":
        """The buffers of a rank with these stages. Gathered and collected units come on top."""
        layout = layout_of(options, modules)
        weights_type, gradients_type = types_of(options.zero_stage)
        num_gradients = Placement(layout, shards_only=gradients_type.SHARDS_ONLY).numel
        state = {True: 0, False: 0}  # by whether it is in host memory
        for updates in layout.updates():
            optimizer = table.find(updates.optimizer)
            found = optimizer.planned_nbytes(layout.shards_of(updates), layout.dtype_of(updates), options)
            state = {on_host: state[on_host] + nbytes for on_host, nbytes in found.items()}
        params = {id(param): param for module in modules for param in module.parameters()}
        units: list[list[int]] = []
        unit_elements: list[int] = []
        unit_gathered: list[int] = []
        if options.zero_stage >= 2:
            units = [layout.buckets_of(module) for module in modules]
            unit_elements = [bucket.numel for bucket in layout.buckets]
            unit_gathered = [layout.gathered_nbytes(bucket) for bucket in layout.buckets]
        return cls(
            parameters=sum(math.prod(p.local_shape) for param in params.values() for p in spec_of(param).pieces),
            weights=weights_type.planned_nbytes(layout) + memory_report.frozen_nbytes(modules),
            gradients=num_gradients * torch.float32.itemsize,
            optimizer=state[False],
            optimizer_on_host=state[True],
            optimizers=table.names_of(options, modules),
            units=units,
            unit_elements=unit_elements,
            unit_gathered=unit_gathered,
        )


def state_bytes(options: OptimizerConfig, weight_size: int) -> int:
    """Bytes of AdamW's state for each parameter whose weight has `weight_size` bytes."""
    moments = 4 if options.moments == "bf16" else 8
    if weight_size == torch.float32.itemsize:
        return moments
    return moments + (2 if options.main_weights == "remainder" else 4)


def update_traffic(options: OptimizerConfig) -> int:
    """Bytes of memory traffic of a step for each parameter updated by AdamW in 16-bit training.

    It reads and writes its state, reads the gradient, and writes the weight; with a remainder it reads the weight too.
    The norm reads the gradient.
    """
    weight = 4 if options.main_weights == "remainder" else 2
    return 2 * state_bytes(options, 2) + 4 + weight + 4
