"""Checks of FP8 (train.fp8) that need no model: recipes known by name, and what they go with."""

from collections.abc import Iterator

from megapar.config.messages import problem, shown
from megapar.config.options import Config

POSITIONS = 128
"""Positions of a sample that a context-parallel chunk must be a multiple of: those of a group along positions."""

_REFUSED = {
    "tensorwise": "one scale of a whole tensor depends on the micro-batch and on dp, cp and tp",
    "rowwise": "the scale of a row is a maximum over all ranks of tp, and on Hopper its products are no faster",
    "delayed": "scales of earlier steps are state that differs between layouts and must be saved",
    "mxfp8": "groups of 32 are not built; blocks run on Blackwell too, by its products of MXFP8",
    "nvfp4": "numbers of 4 bits are not built",
}
_OTHER_NAMES = {"tensor": "tensorwise", "row": "rowwise", "rows": "rowwise", "mx": "mxfp8", "fp4": "nvfp4"}


def problems(config: Config) -> Iterator[str]:
    """Yield the problems of train.fp8, train.fp8_skip and log.fp8_every with each other and with the layout."""
    train = config.train
    if train.fp8 == "none":
        if train.fp8_skip:
            yield problem(config, "train.fp8_skip train.fp8", "nothing is in FP8; set fp8 blocks, or leave it empty")
        if config.log.fp8_every > 0:
            yield problem(config, "log.fp8_every train.fp8", "nothing is in FP8; set fp8 blocks, or leave it at 0")
        return
    if train.fp8 != "blocks":
        reason = _REFUSED.get(_OTHER_NAMES.get(train.fp8, train.fp8))
        yield problem(config, "train.fp8", f"{reason or 'unknown'}; use blocks or none")
        return
    if train.precision == "fp16":
        text = "numbers of FP8 with their scales are exact in bf16 and fp32, and do not fit fp16; use bf16"
        yield problem(config, "train.fp8 train.precision", text)
    if config.kernels.products != "torch":
        text = "both say in which number format layers multiply; use fp8 none, or products torch"
        yield problem(config, "train.fp8 kernels.products", text)
    parts = 2 * config.parallel.cp
    if config.parallel.cp > 1 and train.seq_length % (parts * POSITIONS):
        fits = [n for n in _neighbours(train.seq_length, parts * POSITIONS) if n]
        text = (
            f"FP8 groups {POSITIONS} positions, so each of the {parts} chunks of a sample over cp must be a multiple "
            f"of {POSITIONS}; use {' or '.join(map(shown, fits))}"
        )
        yield problem(config, "train.seq_length parallel.cp train.fp8", text)


def _neighbours(size: int, multiple: int) -> tuple[int, int]:
    """The multiples next to `size`, below and above."""
    below = size // multiple * multiple
    return below, below + multiple
