"""Prints the memory of a layout without training."""

from rich.console import Console
from rich.table import Table

from megapar.config.derive import num_microbatches
from megapar.config.lengths import lengths_in_steps
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config
from megapar.declare.params import VOCAB_MULTIPLE
from megapar.train.levers import planned_device
from megapar_tools.plan.memory import reports
from megapar_tools.plan.parts import Parts


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
    for name in ("parameters", "weights", "gradients", "optimizer", "activations", "total"):
        rows.add_column(name, justify="right", no_wrap=True)
    found = reports(config, parts)
    for r, ranks in found.items():
        sizes = (r.weights, r.gradients, r.optimizer, r.activations, r.total)
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
