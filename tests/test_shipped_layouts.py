"""The layouts of the shipped configs for GPUs are what the planner would choose for the machine that each names."""

import re
from pathlib import Path
from typing import Any

import pytest
from megapar_kernels import backend, dispatch
from megapar_models.registry import presets, validate, validate_layout
from megapar_tools.plan import hardware
from megapar_tools.plan.estimate import Estimator
from megapar_tools.plan.network import Network
from megapar_tools.plan.search import search
from megapar_tools.plan.space import Space, layout_of, searchable
from megapar_tools.plan.verdict import for_uneven_experts

from megapar.config.options import Config
from megapar.launch.grid import grid_of
from tests.support.options import load
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but
from tools import plan

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"

# What a person may try in place of the shipped layout: what changes, as a layout of another shape.
NEIGHBORS: dict[str, list[dict[str, Any]]] = {
    "gpt_125m": [{"micro_batch_size": 8}, {"recompute": "full"}],
    "llama3_8b_1gpu": [{"recompute": "full"}, {"recompute": "selective"}, {"micro_batch_size": 2}],
    "llama_7b": [
        {"zero_stage": 0},
        {"zero_stage": 3},
        {"dp": 4, "pp": 2, "schedule": "interleaved", "vpp": 8},
        {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
        {"dp": 4, "tp": 2, "sequence_parallel": True},
    ],
    "llama_70b": [
        {"zero_stage": 2},
        {"recompute": "full"},
        {"dp": 32, "cp": 1, "cp_attention": "gather", "recompute": "full"},
        {
            "dp": 2,
            "tp": 8,
            "cp": 1,
            "cp_attention": "gather",
            "pp": 4,
            "schedule": "interleaved",
            "vpp": 5,
            "zero_stage": 1,
        },
        {"cp_attention": "gather"},
    ],
    "mixtral_8x7b": [
        {"dp": 8, "tp": 1, "sequence_parallel": False, "zero_stage": 1, "recompute": "full"},
        {"dp": 8, "tp": 1, "sequence_parallel": False, "zero_stage": 1, "recompute": "none"},
        {"zero_stage": 3},
        {"recompute": "full"},
    ],
    "qwen3_30b_a3b": [
        {"ep": 8},
        {"recompute": "full"},
        {"dp": 64, "tp": 1, "sequence_parallel": False, "recompute": "all_but_attention"},
        {"dp": 16, "cp": 2, "cp_attention": "ring", "recompute": "none"},
        {"tp": 1, "sequence_parallel": False, "cp": 2, "cp_attention": "ring"},
        {"dp": 4, "cp": 2, "cp_attention": "ring", "pp": 4, "ep": 8, "zero_stage": 1, "recompute": "full"},
    ],
    "qwen3_30b_a3b_chat": [
        {"micro_batch_size": 1, "recompute": "selective"},
        {"dp": 32, "cp": 2, "cp_attention": "ring"},
        {"ep": 8},
        {"recompute": "full"},
        {"dp": 16, "tp": 4, "sequence_parallel": True, "zero_stage": 2},
    ],
}
WITHIN = 1.035
"""A shipped layout may take so many times the time of another."""


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)


def shipped(name: str) -> tuple[Config, int, hardware.Hardware]:
    """A shipped config with derived values, its number of GPUs, and the machine that its first comment names."""
    path = CONFIGS / f"{name}.toml"
    config = load(["--config", str(path), "--launch.device", "cuda"], presets()).config
    named = re.search(r"\((\w+-\d+g)\)", path.read_text().partition("\nbase")[0])
    assert named is not None, f"{path} does not say which GPU it is for"
    parallel = config.parallel
    world_size = parallel.tp * parallel.cp * parallel.pp * max(parallel.dp, 1)
    return validate(config, world_size), world_size, hardware.load(named[1])


def planner_of(machine: hardware.Hardware) -> plan.ModelPlanner:
    planner = plan.ModelPlanner(machine)
    planner.parts = PARTS
    return planner


@pytest.mark.parametrize("name", slow_but([0, 1, 2, 4], NEIGHBORS))
def test_a_shipped_layout_is_no_slower_than_its_neighbors(name: str) -> None:
    config, world_size, machine = shipped(name)
    planner = planner_of(machine)
    report = planner.memory(config)
    assert report.total + for_uneven_experts(config, report) <= machine.usable_bytes
    time = planner.simulated(config)
    assert time.idle_share < 0.05
    # What experts exchange stays within a node.
    assert Network(grid_of(config), machine).level("ep") == "node"
    base = searchable(config, {}, "cuda")
    layout = layout_of(config)
    compared = 0
    for changes in [*NEIGHBORS[name], {"recompute": "none"}]:
        other = validate_layout(layout._replace(**changes).of(base), world_size)
        kept = planner.memory(other)
        if kept.total + for_uneven_experts(other, kept) <= machine.usable_bytes:
            assert time.seconds < WITHIN * planner.simulated(other).seconds, changes
            compared += 1
    assert compared >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NEIGHBORS)
def test_a_shipped_layout_is_one_of_the_first_rows_of_a_search(name: str) -> None:
    config, world_size, machine = shipped(name)
    base = searchable(config, {}, "cuda")
    space = Space(base, world_size, machine.gpus_per_node, validate_layout, {}, layout_of(config))
    sizes, _, _ = plan.sizes_of(config)
    planner = planner_of(machine)
    estimator = Estimator(space.check(space.grids[0].mildest), sizes, machine, planner.kept_by_a_layer)
    found = search(space, estimator, planner, machine, (config, config), 10)
    assert found.given is not None
    assert found.given.fits
    assert found.given.seconds <= WITHIN * found.rows[0].seconds, found.rows[0].layout


def test_every_config_for_gpus_is_planned() -> None:
    named = {path.stem for path in CONFIGS.glob("*.toml") if re.search(r"\(\w+-\d+g\)", path.read_text())}
    assert named == set(NEIGHBORS)
