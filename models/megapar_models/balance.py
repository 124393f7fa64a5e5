"""Balances pipeline stages by what a layer, the embedding and the head cost on this machine (parallel.balance)."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megapar import comm, device
from megapar.batch import MicroBatch
from megapar.config import Config
from megapar.config_io import Resolved, load
from megapar.context import ParallelContext, single
from megapar.errors import ConfigError
from megapar_models.build import balanced, layer_kinds, make_blueprint
from megapar_models.registry import find

_REPETITIONS = 5


def with_measured_partition(
    resolved: Resolved, config: Config, ctx: ParallelContext
) -> tuple[Resolved, Config, list[str]]:
    """Fill in parallel.partition if parallel.balance asks for measured costs and no partition is given. A collective.

    Rank 0 measures, or takes the partition that the run folder's config.toml holds from an earlier start: a run that is
    resumed keeps its stages. Returns both configurations with the partition, and lines that say where it is from.
    """
    parallel = config.parallel
    if parallel.balance != "measured" or parallel.partition or parallel.pp * parallel.vpp == 1:
        return resolved, config, []
    found: tuple[list[int], str] = ([], "")
    if ctx.world.first:
        found = _earlier_partition(resolved.config) or _measured_partition(config, ctx.device)
    sizes, line = comm.gather_json(found, ctx.world, ctx.device)[0]
    chosen = replace(parallel, partition=tuple(sizes))
    # Where the run folder's config.toml shows the value, its source says that nobody typed it.
    sources = dict(resolved.sources) | {"parallel.partition": "measured at the first start"}
    given = replace(resolved.config, parallel=replace(resolved.config.parallel, partition=tuple(sizes)))
    return Resolved(given, sources), replace(config, parallel=chosen), [line]


def _earlier_partition(config: Config) -> tuple[list[int], str] | None:
    """The partition in the config.toml of the run folder, if it was measured for the same model and layout.

    `config` has its options as they were given, as that file has.
    """
    file = Path(config.run_dir) / "config.toml"
    if not file.exists():
        return None
    try:
        earlier = load(["--config", str(file)]).config
    except ConfigError:  # of another version, or damaged: then it says nothing about this run
        return None
    sizes = earlier.parallel.partition
    # Replicas do not change what a stage costs.
    same_layout = replace(earlier.parallel, partition=(), dp=config.parallel.dp) == config.parallel
    if not sizes or earlier.model != config.model or not same_layout:
        return None
    return list(sizes), f"stages of {_in_words(sizes)} layers, as measured when {file} was written"


def _measured_partition(config: Config, where: torch.device) -> tuple[list[int], str]:
    layers, first, last = measure(config, where)
    sizes = [len(stage) for stage in balanced(config, layers, first, last)]
    each = " or ".join(f"{1e3 * seconds:.3g}" for seconds in sorted(set(layers)))
    line = (
        f"stages of {_in_words(sizes)} layers: a layer takes {each} ms, the embedding {1e3 * first:.3g} ms, "
        f"norm, head and loss {1e3 * last:.3g} ms, forward and backward"
    )
    return sizes, line


def _in_words(sizes: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def measure(config: Config, where: torch.device) -> tuple[list[float], float, float]:
    """Seconds of one micro-batch's forward and backward: through each layer, through the embedding, and through norm,
    head and loss.

    Layers with the same tensors take the same time, so one of each kind is measured.

    Measured with whole matrices on this rank alone: tensor parallelism divides all three about alike.
    """
    model = config.model
    blueprint = make_blueprint(config, single(where))
    family = find(model.family)
    batch = _random_batch(config, where)
    shape = config.train.seq_length, config.train.micro_batch_size, model.hidden_size
    x_sbh = torch.randn(shape, device=where).to(blueprint.sharding.dtype).requires_grad_()
    grad_sbh = torch.ones_like(x_sbh)

    def seconds_of(layers: range, first: bool, last: bool) -> float:
        stage = family.stage(blueprint, layers, first=first, last=last)
        for param in stage.parameters():
            nn.init.normal_(param, std=model.initializer_range)

        def forward_and_backward() -> None:
            output: Tensor = stage(None if first else x_sbh, batch)
            output.backward(None if last else grad_sbh)
            x_sbh.grad = None
            stage.zero_grad(set_to_none=True)

        return _seconds(forward_and_backward, where)

    end = model.num_hidden_layers
    kinds = layer_kinds(model)
    of_kind = {kind: seconds_of(range(kind, kind + 1), first=False, last=False) for kind in sorted(set(kinds))}
    return (
        [of_kind[kind] for kind in kinds],
        seconds_of(range(0), first=True, last=False),
        seconds_of(range(end, end), first=False, last=True),
    )


def _random_batch(config: Config, where: torch.device) -> MicroBatch:
    shape = config.train.micro_batch_size, config.train.seq_length + 1
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(shape[0], shape[1] - 1)
    return MicroBatch.of_samples(tokens[:, :-1], tokens[:, 1:], weights, torch.arange(shape[0])).to(where)


def _seconds(run: Callable[[], None], where: torch.device) -> float:
    """The least time of several runs: whatever else the machine does only adds to it."""
    times = []
    for _ in range(1 + _REPETITIONS):
        device.synchronize(where)
        start = time.perf_counter()
        run()
        device.synchronize(where)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one warms up
