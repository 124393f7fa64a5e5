"""What a plan says of a run on a named machine: whether it fits, and how long a step takes."""

from collections.abc import Callable
from dataclasses import replace

from megapar.base.errors import ConfigError
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.observe.prediction import Prediction
from megapar.system import device
from megapar.system.say import say
from megapar_tools.plan import hardware
from megapar_tools.plan.choose_memory import with_choices_of
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.verdict import Capacity, judge


def show_verdict(given: Config, config: Config, parts: Parts, validated: Callable[[Config], Config]) -> None:
    """Print whether a layout fits the machine of option gpu, if that is given. `given` became `config`.

    `validated` is as in `verdict.judge`. Raises ConfigError for an unknown machine.
    """
    if config.gpu == "auto":
        return
    machine = hardware.load(config.gpu)
    capacity = Capacity(machine.name, machine.memory_bytes, machine.reserve_bytes, machine.host_bytes)
    # The size of the vocabulary is known now, and what was chosen.
    given = with_choices_of(config, replace(given, model=config.model))
    print(judge(given, validated, parts, capacity).text)


def prediction_of(config: Config, parts: Parts, ctx: ParallelContext) -> Prediction | None:
    """The predicted time of a step of this run, on the first rank. None without a machine to predict it for.

    It takes a second or two, in which the other ranks wait in their first collective. A machine that is not known, or
    lacks the precision, costs the prediction and a line, never the run.
    """
    name = config.gpu if config.gpu != "auto" else hardware.name_of(device.describe(ctx.device))
    if not name:
        say(f"no prediction of the step: {device.describe(ctx.device)} is no known machine; --gpu names one")
        return None
    try:
        time = step_time(config, parts, hardware.load(name), simulated=True)
    except ConfigError as error:
        say(f"no prediction of the step: {error}")
        return None
    return Prediction(name, time.seconds, time.idle_share)
