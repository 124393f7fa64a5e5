"""GPipe, 1F1B and interleaved 1F1B: orders of forwards and of backwards in one piece.

Each function returns the actions of each pipeline rank. `megapar.pipeline.zero_bubble` has those with backwards in two
halves.
"""

from megapar.pipeline.actions import Action, Orders


def gpipe(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Every micro-batch is in flight at once.

    With several stages on a rank this is the breadth-first pipeline (Lamy-Poirier, arXiv 2211.05953): all micro-batches
    go through one stage of a rank before the first goes through the next.
    """
    microbatches = range(num_microbatches)
    orders = []
    for rank in range(pp):
        stages = range(rank, pp * vpp, pp)
        forwards = [Action("F", s, m) for s in stages for m in microbatches]
        # The gradient goes through this rank's stages from the last to the first.
        backwards = [Action("B", s, m) for s in reversed(stages) for m in microbatches]
        orders.append(forwards + backwards)
    return orders


def one_f_one_b(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """PipeDream-flush (Narayanan et al., arXiv 2006.09503): rank r holds at most pp - r micro-batches."""
    orders = []
    for rank in range(pp):
        forwards = [Action("F", rank, m) for m in range(num_microbatches)]
        backwards = [Action("B", rank, m) for m in range(num_microbatches)]
        # The first backward reaches this rank after the micro-batch has gone through the pp - rank - 1 later stages.
        orders.append(_warm_up_alternate_drain(forwards, backwards, warmup=pp - rank - 1))
    return orders


def interleaved(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """Megatron-LM's looped 1F1B (arXiv 2104.04473): groups of pp micro-batches go through the chunks of every rank.

    If pp does not divide the number of micro-batches, the next multiple of pp is scheduled. The actions of the missing
    micro-batches are then left out. A valid order stays valid without all actions of a micro-batch.
    """
    if vpp == 1:
        # The warm-up below has 2 * (pp - rank - 1) forwards for one chunk. 1F1B holds half as many micro-batches.
        return one_f_one_b(pp, vpp, num_microbatches)
    orders = []
    for rank in range(pp):
        forwards = []
        backwards = []
        for group in range(0, num_microbatches, pp):
            for chunk in range(vpp):
                for m in range(group, group + pp):
                    forwards.append(Action("F", chunk * pp + rank, m))
                    backwards.append(Action("B", (vpp - 1 - chunk) * pp + rank, m))
        # Megatron-LM's warm-up: a group of pp micro-batches goes through all chunks but the last, and two more forwards
        # run for each later rank.
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * pp
        order = _warm_up_alternate_drain(forwards, backwards, warmup)
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


def _warm_up_alternate_drain(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards[warmup:]) :]
