"""What a plan is for: GPUs, or CPUs of one host."""

from dataclasses import replace

from megapar.comm.transport import PLANNED, PLANNED_ON_ONE_HOST, Transport
from megapar.config.options import Config
from megapar.train.levers import planned_device


def planned_transport(config: Config) -> Transport:
    """What stands for the transport of every axis. A plan for CPUs is one for a single host."""
    on_one_host = planned_device(config) == "cpu" and config.launch.cpu_exchange == "shared_memory"
    return PLANNED_ON_ONE_HOST if on_one_host else PLANNED


def with_planned_kernels(config: Config) -> Config:
    """`config` with the kernels that auto means on the planned device. On the meta device it would mean torch's."""
    if config.kernels.backend != "auto" or config.kernels.compile or planned_device(config) == "cpu":
        return config
    return replace(config, kernels=replace(config.kernels, backend="triton"))
