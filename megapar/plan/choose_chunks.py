"""Replaces parallel.tp_overlap_chunks=0 by the number of chunks with the shortest predicted step."""

from collections.abc import Callable
from dataclasses import replace

from megapar.config.messages import problem
from megapar.config.options import Config
from megapar.errors import ConfigError
from megapar.launch.reporting import say
from megapar.plan import hardware
from megapar.plan.hardware import Hardware
from megapar.plan.parts import Parts
from megapar.plan.simulate import with_planned_kernels
from megapar.plan.step_time import step_time

MOST = 8
"""More chunks are not tried: each is a product of fewer tokens, and a collective with its latency."""


def possible(config: Config) -> range:
    """The numbers of chunks that a linear layer can be cut into: at most its tokens of a rank."""
    tokens = config.train.micro_batch_size * config.train.seq_length // (config.parallel.cp * config.parallel.tp)
    return range(1, max(min(MOST, tokens), 1) + 1)


def with_chunks(config: Config, chunks: int) -> Config:
    """`config` with this number of chunks."""
    return replace(config, parallel=replace(config.parallel, tp_overlap_chunks=chunks))


def best(config: Config, seconds: Callable[[Config], float]) -> Config:
    """`config` with the number of chunks that takes the least `seconds`, if it asks for that. The fewest of equals."""
    if config.parallel.tp_overlap_chunks:
        return config
    return min((with_chunks(config, chunks) for chunks in possible(config)), key=seconds)


def check_chunks(config: Config, parts: Parts) -> Config:
    """`config`, validated, with a number in place of tp_overlap_chunks 0. Every rank comes to the same alone.

    Raises ConfigError if there is no machine or no schedule to predict the time of a step for.
    """
    if config.parallel.tp_overlap_chunks:
        return config
    if config.gpu == "auto":
        text = (
            "0 takes the number with the shortest predicted step, and needs --gpu, such as h100-80g; or give a number"
        )
        raise ConfigError(problem(config, "parallel.tp_overlap_chunks gpu", text))
    if config.parallel.schedule == "auto":
        text = "the schedule is not known before it is measured; name one, or give a number of chunks"
        raise ConfigError(problem(config, "parallel.tp_overlap_chunks parallel.schedule", text))
    machine: Hardware = hardware.load(config.gpu)

    def seconds(of: Config) -> float:
        return step_time(with_planned_kernels(of), parts, machine).seconds

    chosen = best(config, seconds)
    gain = seconds(with_chunks(config, 1)) / seconds(chosen) - 1
    chunks = chosen.parallel.tp_overlap_chunks
    say(f"parallel.tp_overlap_chunks=0: {chunks}, predicted {gain:.1%} faster on {machine.name} than 1")
    return chosen
