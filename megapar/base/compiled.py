"""What torch.compile has done in this process: graphs and graph breaks (`kernels.compile`)."""

from typing import NamedTuple

import torch
from megapar_kernels.one_graph import in_one_line


class Compiled(NamedTuple):
    """What torch has compiled in this process: every OneGraph, and any other code."""

    graphs: int
    breaks: tuple[str, ...]
    """The place of each graph break and torch's reason. None is of a OneGraph: it raises NoGraphError instead."""

    def since(self, earlier: "Compiled") -> "Compiled":
        """What has been done after `earlier`."""
        return Compiled(self.graphs - earlier.graphs, self.breaks[len(earlier.breaks) :])


def compiled_so_far() -> Compiled:
    """What torch has counted in this process. Imports the compiler, which takes seconds."""
    utils = torch._dynamo.utils
    breaks = []
    # Not counters["graph_break"]: it has no branch by a tensor's value in the function that is compiled itself.
    for found in utils.graph_break_reasons:
        places = [f"{frame.filename}:{frame.lineno}: " for frame in found.user_stack[-1:]]
        breaks.append("".join([*places, in_one_line(found.reason)]))
    return Compiled(utils.counters["stats"]["unique_graphs"], tuple(breaks))
