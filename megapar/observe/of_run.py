"""The observers of a run."""

from collections.abc import Callable

from megapar.base.errors import ConfigError
from megapar.config.plugins import named
from megapar.observe.fp8_growth import Fp8Growth
from megapar.observe.memory_report import MemoryOfStep, MemoryReport
from megapar.observe.observer import Observed, Observer, Observers
from megapar.observe.prediction import Comparison, Prediction
from megapar.observe.profiler import Profiler
from megapar.observe.rehearsal import Rehearsal
from megapar.observe.replicas import Replicas
from megapar.observe.report import AttentionInWords
from megapar.observe.stragglers import Stragglers
from megapar.observe.watch import Watch


def observers_of(
    seen: Observed, watch: Watch, planned: MemoryReport | None, prediction: Prediction | None
) -> Observers:
    """Return the observers of a run, for its options. A collective.

    `planned` is what train.memory_report asks for, and `prediction` is None if there is no model of this machine's
    time. Raises ConfigError if log.observers names anything but a subclass of Observer.
    """
    state = seen.state
    options = state.config
    # Before Stragglers, which pass over the steps that the profiler records.
    stragglers = Stragglers(state.ctx, options.log.straggler_every, watch.straggler, seen.write)
    found: list[Observer] = [Profiler(seen), stragglers]
    if options.guard.check_replicas_every:
        found.append(Replicas(seen))
    if options.kernels.compile:
        found.append(Rehearsal(seen))
    if planned is not None:
        found.append(MemoryOfStep(planned, seen))
    if state.ctx.device.type != "cpu":  # a CPU has one fused attention, and GPUs several
        found.append(AttentionInWords(seen))
    found.append(watch)
    if options.log.fp8_every:
        found.append(Fp8Growth(seen, watch.event))
    if prediction is not None:
        found.append(Comparison(prediction, seen))
    found += [_named(name)(seen) for name in options.log.observers]
    return Observers(found)


def _named(name: str) -> Callable[[Observed], Observer]:
    """Return the class of an observer of one's own."""
    found = named("log.observers", name, {}, type)
    if not issubclass(found, Observer):
        raise ConfigError(f"log.observers={name}: {found.__name__} is no subclass of megapar.observe.observer.Observer")
    return found
