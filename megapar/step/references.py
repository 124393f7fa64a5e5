"""References of preferences without a column: the base of the adapters computes them in each step."""

from collections.abc import Sequence
from dataclasses import replace

from megapar.declare.batch import MicroBatch
from megapar.step.state import TrainState


def with_references(
    state: TrainState, batches: Sequence[MicroBatch], max_microbatches: int = 0
) -> Sequence[MicroBatch]:
    """The micro-batches, with the log-probabilities by the adapters' base if train.references asks for them.

    It is a forward pass of all stages without dropout and gradients. `max_microbatches` is as in
    `PipelineRuntime.step`.
    """
    if state.config.train.references != "adapters_off":
        return batches
    state.ctx.flight.enter("evaluate")
    training = [stage.training for stage in state.stages.values()]
    for stage in state.stages.values():
        stage.eval()
    for batch in batches:
        batch.scope.asks_references = True
    found = state.pipeline.evaluate(batches, max_microbatches)
    for batch in batches:
        batch.scope.asks_references = False
    for stage, was_training in zip(state.stages.values(), training, strict=True):
        stage.train(was_training)
    # They are found where they are needed: on the ranks of the last stage.
    if not found:
        return batches
    return [replace(batch, references_bd=references) for batch, references in zip(batches, found, strict=True)]
