"""Checks of the options that keep the optimizer's state in 16 bits."""

from collections.abc import Iterator

from megapar.config.messages import problem
from megapar.config.options import Config


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each problem."""
    optimizer = config.optimizer
    if optimizer.main_weights == "remainder":
        if config.train.precision != "bf16":
            text = (
                "only bf16 weights are the upper halves of fp32 ones; use precision bf16, or leave main_weights at fp32"
            )
            yield problem(config, "optimizer.main_weights train.precision", text)
        if optimizer.offload:
            text = "the parameters are halves of the main weights, and stay on the device; use one of the two"
            yield problem(config, "optimizer.main_weights optimizer.offload", text)
        if optimizer.ema:
            text = "the average is that of whole fp32 weights; use one of the two"
            yield problem(config, "optimizer.main_weights optimizer.ema", text)
    if config.kernels.backend == "apex":
        for name in ("moments", "main_weights"):
            if getattr(optimizer, name) != "fp32":
                text = f"apex's AdamW keeps fp32 state alone; use backend auto, or leave {name} at fp32"
                yield problem(config, f"optimizer.{name} kernels.backend", text)
