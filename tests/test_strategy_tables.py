"""docs/choosing.md, the guide "which strategy when": its tables are today's predictions, its commands can be run."""

import re
import shlex

import pytest
import tyro
from megapar_kernels import backend, dispatch
from megapar_models.counts import WholeModel
from megapar_models.registry import FOR_OPTIONS, named_configs

from megapar.base.errors import ConfigError
from megapar.config.files import load
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter
from tests.support.plans import PARTS
from tools import plan, strategy_tables

FAST = ("needs", "recompute")
STALE = "run python tools/strategy_tables.py --write, and read the sentences above the tables that have changed"


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)


@pytest.fixture(scope="module")
def planner() -> strategy_tables.Planner:
    found = strategy_tables.Planner()
    found.parts = PARTS
    return found


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in strategy_tables.TABLES]
)
def test_the_page_has_todays_figures(name: str, planner: strategy_tables.Planner) -> None:
    page = strategy_tables.PAGE.read_text()
    assert strategy_tables.page_with(strategy_tables.compute([name], planner), page) == page, STALE


def test_textbook_bytes_are_those_of_the_paper() -> None:
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 billion parameters on 64 GPUs."""
    found = [strategy_tables.textbook_bytes(7_500_000_000, stage, 64) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_a_parameter_takes_eighteen_bytes(planner: strategy_tables.Planner) -> None:
    config = planner.config("llama2-7b", 8, "--parallel.dp 8 --optimizer.zero_stage 0 --train.global_batch_size 8")
    report = planner.memory(config)
    states = report.weights + report.gradients + report.optimizer
    assert states == pytest.approx(18 * WholeModel(config.model).parameters(), rel=1e-4)


def test_each_table_has_a_place_on_the_page_and_a_command() -> None:
    page = strategy_tables.PAGE.read_text()
    placed = re.findall(r"<!-- table (\w+), made by tools/strategy_tables.py -->", page)
    assert placed == list(strategy_tables.TABLES)
    assert re.findall(r"`python tools/strategy_tables.py ([a-z_]+)`", page) == placed
    empty = "no mark on this page"
    with pytest.raises(ConfigError, match="has no line <!-- table needs"):
        strategy_tables.page_with({"needs": [["a"]]}, empty)
    with pytest.raises(ConfigError, match="network, recompute"):
        strategy_tables.compute(["nonsense"], strategy_tables.Planner())


def test_the_page_asks_the_planner_for_what_it_knows() -> None:
    commands = re.findall(r"`(megapar plan [^`]+)`", strategy_tables.PAGE.read_text())
    assert len(commands) >= len(strategy_tables.TABLES)
    for command in commands:
        own, others = plan.split(shlex.split(command)[2:])
        args = tyro.cli(plan.Arguments, args=own, use_underscores=True)
        model = plan.with_sizes(load(others, named_configs(plan.CONFIGS), FOR_OPTIONS)).model
        assert len(plan.fixed_values(args.fix, model)) == len(args.fix), command
