"""The bytes of a rank's buffers, from its declared parameters alone: weights, gradients and optimizer state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.layout import HasParameters
from megapar.data_parallel.placement import Placement
from megapar.optimizer import table
from megapar.params import spec_of
from megapar.train import memory_report
from megapar.train.trainer import layout_of, types_of


@dataclass(frozen=True)
class Buffers:
    """The bytes of a rank's buffers, and what they hold.

    `parameters` is a number of elements. `optimizers` are the names of the rank's optimizers. `units[i]` are the units
    of the stage i of the rank, and `unit_elements` the elements of each unit; there are none before ZeRO-2.
    `weight_size` is the bytes of one weight.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    optimizers: Sequence[str]
    units: Sequence[Sequence[int]]
    unit_elements: Sequence[int]
    weight_size: int

    @classmethod
    def of(cls, options: OptimizerConfig, modules: Sequence[HasParameters]) -> "Buffers":
        """The buffers of a rank with these stages. Gathered and collected units come on top."""
        layout = layout_of(options, modules)
        weights_type, gradients_type = types_of(options.zero_stage)
        num_weights = Placement(layout, shards_only=weights_type.SHARDS_ONLY).numel
        num_gradients = Placement(layout, shards_only=gradients_type.SHARDS_ONLY).numel
        names = table.names_of(modules)
        state = {True: 0, False: 0}  # by whether it is in host memory
        for name in names:
            optimizer = table.find(name)
            elements = sum(stop - start for start, stop in layout.shards_of(name))
            state[optimizer.ON_HOST] += optimizer.planned_nbytes(elements, layout.dtype)
        params = {id(param): param for module in modules for param in module.parameters()}
        units: list[list[int]] = []
        unit_elements: list[int] = []
        if options.zero_stage >= 2:
            units = [layout.buckets_of(module) for module in modules]
            unit_elements = [bucket.numel for bucket in layout.buckets]
        return cls(
            parameters=sum(math.prod(p.local_shape) for param in params.values() for p in spec_of(param).pieces),
            weights=num_weights * layout.dtype.itemsize + memory_report.frozen_nbytes(modules),
            gradients=num_gradients * torch.float32.itemsize,
            optimizer=state[False],
            optimizer_on_host=state[True],
            optimizers=names,
            units=units,
            unit_elements=unit_elements,
            weight_size=layout.dtype.itemsize,
        )
