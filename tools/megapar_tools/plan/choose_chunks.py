"""Replaces 0 in parallel.tp_overlap_chunks and parallel.ep_overlap_chunks by the number with the shortest predicted
step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.options import Config
from megapar.config.validate_experts import fewest_experts
from megapar.system.say import say
from megapar_tools.plan import hardware
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.step_time import step_time
from megapar_tools.plan.target import with_planned_kernels

Option = Literal["tp_overlap_chunks", "ep_overlap_chunks"]
OPTIONS: tuple[Option, ...] = ("tp_overlap_chunks", "ep_overlap_chunks")
MOST = 8
"""More chunks are not tried: each is a collective with its latency, and of tp a product of fewer tokens."""


def possible(config: Config, option: Option) -> list[int]:
    """The numbers of chunks that are tried: at most the tokens of a rank in a linear layer, or the experts of a rank.

    A chunk for each expert is tried too, however many they are: its rows need not be sorted.
    """
    parallel = config.parallel
    if option == "tp_overlap_chunks":
        most = config.train.micro_batch_size * config.train.seq_length // (parallel.cp * parallel.tp)
        return list(range(1, max(min(MOST, most), 1) + 1))
    experts = max(fewest_experts(config), 1)
    return sorted({*range(1, min(MOST, experts) + 1), experts})


def with_chunks(config: Config, option: Option, chunks: int) -> Config:
    """`config` with this number of chunks."""
    values: dict[str, int] = {option: chunks}
    return replace(config, parallel=replace(config.parallel, **values))  # type: ignore[arg-type]


def left_open(config: Config) -> list[Option]:
    """The options with 0 for a number that is to be chosen."""
    return [option for option in OPTIONS if not getattr(config.parallel, option)]


def uncut(config: Config) -> Config:
    """`config` with 1 where a number is to be chosen. It keeps as many bytes."""
    for option in left_open(config):
        config = with_chunks(config, option, 1)
    return config


def best(config: Config, seconds: Callable[[Config], float]) -> Config:
    """`config` with the numbers of chunks that take the least `seconds`, where it asks for that. The fewest of equals.

    One option is chosen after the other.
    """
    options = left_open(config)
    config = uncut(config)
    for option in options:
        config = min((with_chunks(config, option, chunks) for chunks in possible(config, option)), key=seconds)
    return config


def check_chunks(config: Config, parts: Parts) -> Config:
    """`config`, validated, with numbers in place of 0. Every rank comes to the same alone.

    Raises ConfigError if there is no machine or no schedule to predict the time of a step for.
    """
    options = left_open(config)
    if not options:
        return config
    name = f"parallel.{options[0]}"
    if config.gpu == "auto":
        text = (
            "0 takes the number with the shortest predicted step, and needs --gpu, such as h100-80g; or give a number"
        )
        raise ConfigError(problem(config, f"{name} gpu", text))
    if config.parallel.schedule == "auto":
        text = "the schedule is not known before it is measured; name one, or give a number of chunks"
        raise ConfigError(problem(config, f"{name} parallel.schedule", text))
    machine: Hardware = hardware.load(config.gpu)

    def seconds(of: Config) -> float:
        return step_time(with_planned_kernels(of), parts, machine).seconds

    chosen = best(config, seconds)
    for option in options:
        gain = seconds(with_chunks(chosen, option, 1)) / seconds(chosen) - 1
        chunks = getattr(chosen.parallel, option)
        say(f"parallel.{option}=0: {chunks}, predicted {gain:.1%} faster on {machine.name} than 1")
    return chosen
