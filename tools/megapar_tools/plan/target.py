"""What a plan is for: GPUs, or CPUs of one host."""

from dataclasses import replace

from megapar.base.errors import ConfigError, MegaparError
from megapar.comm.transport import PLANNED, PLANNED_ON_ONE_HOST, Transport
from megapar.config.derive import with_vocabulary
from megapar.config.options import Config
from megapar.data.tokenizer import fetch_tokenizer, load_tokenizer
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


def with_planned_vocabulary(config: Config) -> Config:
    """Return `config` with the size of its vocabulary. A plan reads no text: a given size needs no tokenizer.

    Raises ConfigError if no size is given, and the tokenizer cannot be read.
    """
    if config.model.vocab_size:
        return config
    try:
        return with_vocabulary(config, load_tokenizer(fetch_tokenizer(config.data.tokenizer)).vocab_size)
    except MegaparError as error:
        raise ConfigError(
            f"model.vocab_size=0, data.tokenizer={config.data.tokenizer}: the size of the vocabulary is the "
            f"tokenizer's, which cannot be read ({error}); set model.vocab_size"
        ) from error
