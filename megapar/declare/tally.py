"""State that changes at the end of a step, by counts made in the step. A module declares it, as it declares parameters.

A router is such a module: it counts the tokens of its experts, and moves its selection bias at the end of the step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.comm.axis import Axis


@dataclass(frozen=True)
class Tally:
    """Declares what a module counts during a step.

    `name` is what metrics call it. Modules of one name fill the rows of a table, and `row` is the row of this module,
    such as the number of its layer. The model declares the size of the table
    (`megapar.declare.stage_set.Declared.tallies`). Each rank of `axes` has counted a part.
    """

    name: str
    row: int
    axes: tuple[Axis, ...]


class Counting(Protocol):
    """A module that counts. It is found by its attribute `tally`."""

    tally: Tally
    step_counts: Tensor
    """A buffer, int64 [n]: what this rank has counted since the last step. The forward pass in training adds to it."""

    def end_step(self, counts: Tensor, skip_update: Tensor) -> None:
        """Change the state. `counts`, int64 [n], are those of all ranks.

        `skip_update` is 0-d on the device. Unless it is zero the step has updated no weight, and the state stays too.
        """


def counting_modules(stages: Iterable[nn.Module]) -> list[Counting]:
    """The modules of `stages` with a tally, in their order."""
    modules: list[Counting] = []
    for stage in stages:
        modules += [module for module in stage.modules() if hasattr(module, "tally")]  # type: ignore[misc]
    return modules


@torch.no_grad()
def end_step(modules: Iterable[Counting], skip_update: Tensor) -> list[tuple[Tally, Tensor]]:
    """Sum the counts of a step over the ranks, let each module change its state, and start to count anew.

    A collective over the axes of each tally, with one message for all tallies of the same axes. Returns each module's
    tally with the sums, int64 [n].
    """
    groups: dict[tuple[str, ...], list[Counting]] = {}
    for module in modules:
        groups.setdefault(tuple(axis.name for axis in module.tally.axes), []).append(module)
    found: list[tuple[Tally, Tensor]] = []
    for names in sorted(groups):  # sorted: ranks must agree on the order of their collectives
        group = groups[names]
        totals = torch.cat([module.step_counts for module in group])
        for axis in group[0].tally.axes:
            collectives.all_reduce(totals, axis)
        parts = totals.split([module.step_counts.numel() for module in group])
        for module, counts in zip(group, parts, strict=True):
            module.step_counts.zero_()
            module.end_step(counts, skip_update)
            found.append((module.tally, counts))
    return found


def tables(
    sizes: Mapping[str, tuple[int, int]], counts: Iterable[tuple[Tally, Tensor]], pp: Axis, device: torch.device
) -> dict[str, Tensor]:
    """The tables of all tallies by name, int64 [rows, n]. A collective over `pp`: each rank has other modules.

    `sizes` are the declared ones. Raises ValueError if a module counts what the model has not declared.
    """
    found = {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()}
    for tally, counts_n in counts:
        if tally.name not in found:
            raise ValueError(f"a module counts {tally.name!r}, but the model declares {list(found) or 'no tally'}")
        found[tally.name][tally.row] = counts_n
    return {name: collectives.all_reduce(table, pp) for name, table in found.items()}
