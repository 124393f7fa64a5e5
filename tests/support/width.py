"""Proves a newcomer's addition without an edit of megapar: it trains in three layouts as in one process."""

from collections.abc import Mapping

import pytest

from megapar.config.model_options import ModelConfig
from tests.support.grid import Layout, check_on_ranks
from tests.support.sweeps import slow_but

LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2": {"tp": 2},
    "pp 2 with vpp 2": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "cp 2 with ZeRO-3": {"cp": 2, "zero_stage": 3},
}
in_each_layout = pytest.mark.parametrize("sizes", slow_but([0], LAYOUTS.values()), ids=list(LAYOUTS))


def trains_as_one_process(model: ModelConfig, sizes: Mapping[str, object]) -> None:
    """Two steps on the ranks of a layout: loss, norm, and every gradient and weight are those of one process.

    `model` has at least four layers, so each of the two pipeline ranks has two stages.
    """
    check_on_ranks(Layout(model, micro_batch_size=3, **sizes))  # type: ignore[arg-type]
