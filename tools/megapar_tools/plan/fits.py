"""What a plan says of a run: the memory of its ranks, whether that fits a machine, and how long a step takes."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from megapar.base.errors import ConfigError
from megapar.config.derive import num_microbatches
from megapar.config.lengths import lengths_in_steps
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.declare.params import VOCAB_MULTIPLE
from megapar.observe.prediction import Prediction
from megapar.system import device
from megapar.system.say import say
from megapar.train.levers import planned_device
from megapar_tools.plan import hardware
from megapar_tools.plan.choose import with_choices_of
from megapar_tools.plan.memory import reports
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.verdict import Capacity, judge


def show(config: Config, parts: Parts, parameters: str, flops_per_token: int) -> None:
    """Print the sizes of the layout and of the batch, and the memory of each kind of rank.

    `parameters` is the number of parameters, in words.
    """
    console = Console(width=140)
    # As text, because rich ends the process with 1 if the reader has gone.
    with console.capture() as text:
        _write(config, parts, parameters, flops_per_token, console)
    print(text.get(), end="")


def _write(config: Config, parts: Parts, parameters: str, flops_per_token: int, console: Console) -> None:
    """Write what `show` prints."""
    parallel = config.parallel
    train = config.train
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    tokens = train.global_batch_size * train.seq_length
    vocabulary = config.model.vocab_size
    console.print(
        f"{parameters}; "
        f"{counted(world, 'rank')} = {layout_in_words(parallel)}, "
        f"{counted(parallel.vpp, 'stage')} a rank, {parallel.schedule}\n"
        f"a step: {counted(train.global_batch_size, 'sample')} x {train.seq_length} tokens = {tokens:,} tokens, "
        f"{counted(num_microbatches(config), 'micro-batch', 'micro-batches')} of {train.micro_batch_size} a replica, "
        f"{flops_per_token * tokens / 1e15:,.3g} PFLOP; {counted(train.steps, 'step')} = "
        f"{train.samples() * train.seq_length:,} tokens\n"
        f"vocabulary {vocabulary:,} -> {-(-vocabulary // VOCAB_MULTIPLE) * VOCAB_MULTIPLE:,} rows, padded to a "
        f"multiple of {VOCAB_MULTIPLE}",
        highlight=False,
    )
    for line in parts.builder.in_fp8(config):
        console.print(line, highlight=False)
    rate = lengths_in_steps(config.optimizer, train)
    if rate:
        console.print(rate, highlight=False)
    console.print(_planned_in_words(config), highlight=False)
    if parallel.balance == "measured" and not parallel.partition and parallel.pp * parallel.vpp > 1:
        console.print(
            "stages balanced by FLOPs here: with parallel.balance=measured a run measures when it first starts"
        )
    # Replicas and context-parallel ranks need the same memory, so `reports` lists the first of them.
    ranks_listed = "ranks of replica 0" if parallel.cp == 1 else "ranks of replica 0, cp 0"
    if config.model.num_experts % parallel.ep:
        # Ranks of other replicas are listed too, because they hold other numbers of experts.
        ranks_listed = "ranks"
    rows = Table(ranks_listed, "pp", "stages", title="GiB on each rank")
    found = reports(config, parts)
    in_format = any(report.converted for report in found)
    columns = ["parameters", "weights", *(["in FP8"] if in_format else []), "gradients", "optimizer", "activations"]
    for name in (*columns, "total"):
        rows.add_column(name, justify="right", no_wrap=True)
    for r, ranks in found.items():
        sizes = (r.weights, *((r.converted,) if in_format else ()), r.gradients, r.optimizer, r.activations, r.total)
        row = [" ".join(map(str, ranks)), str(r.pp), r.stages, f"{r.parameters:,}"]
        rows.add_row(*row, *(f"{n / 2**30:,.3f}" for n in sizes))
    console.print(rows)
    for what, on_host in (
        ("optimizer state", max(r.optimizer_on_host for r in found)),
        ("inputs of layers", max(r.inputs_on_host for r in found)),
    ):
        if on_host:
            console.print(f"and {what} in host memory, {on_host / 2**30:,.3f} GiB a rank at most", highlight=False)


def _planned_in_words(config: Config) -> str:
    name = {"cuda": "GPUs", "cpu": "CPUs"}[planned_device(config)]
    if config.launch.device != "auto":
        return f"planned for {name}"
    if config.gpu != "auto":
        return f"planned for {name}, because --gpu names one; --launch.device cpu plans for CPUs"
    # The plan may be made on a laptop for a cluster, so the message names the flag for the other device.
    other = "--launch.device cpu plans for CPUs" if name == "GPUs" else "--launch.device cuda plans for GPUs"
    return f"planned for {name}, which launch.device auto chooses on this machine; {other}"


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
