"""tools/plan.py and the search behind it: which layouts are tried, how they are ranked, and what is said of them."""

import itertools
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import matplotlib.image
import pytest
from megapar_models.registry import presets, validate, validate_layout
from megapar_tools.plan import hardware
from megapar_tools.plan.estimate import Estimator
from megapar_tools.plan.hardware import Hardware, Link
from megapar_tools.plan.memory import reports
from megapar_tools.plan.plan_report import rejections
from megapar_tools.plan.search import Found, nearest, search
from megapar_tools.plan.space import Candidate, Space, layout_of, searchable
from megapar_tools.plan.step_time import StepTime
from megapar_tools.plan.verdict import for_uneven_experts

from megapar.base.errors import ConfigError
from megapar.config.messages import divisors
from megapar.config.options import BY_LAYER, Config, option_types
from tests.support.built_plan import built_report
from tests.support.options import load
from tests.support.plans import PARTS
from tools import plan

TINY = str(Path(__file__).parents[1] / "pretrain_scripts/configs/tiny.toml")
MOE = str(Path(TINY).with_name("moe_laptop.toml"))
H100 = hardware.load("h100-80g")
# What keeps a search small: a few grids, stages of ZeRO and sizes are left.
FEW = ("train.recompute=none", "parallel.schedule=1f1b", "optimizer.shard_ranks=0", "train.micro_batch_size=2")


def run(monkeypatch: pytest.MonkeyPatch, *flags: object) -> int:
    """The exit code of the tool with these flags."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, flags)])
    try:
        return plan.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def config_of(*flags: str) -> Config:
    return load(["--config", TINY, "--launch.device", "cuda", *flags]).config


def space_of(config: Config, world_size: int, *fix: str, gpus_per_node: int = 8) -> Space:
    fixed = plan.fixed_values(fix, config.model)
    return Space(
        searchable(config, fixed, "cuda"), world_size, gpus_per_node, validate_layout, fixed, layout_of(config)
    )


def found(config: Config, world_size: int, machine: Hardware, *fix: str, top: int = 20, reverse: bool = False) -> Found:
    space = space_of(config, world_size, *fix)
    if reverse:
        space.grids.reverse()
        # `GridPart.layouts` begins with the last values then.
        space.grids = [
            replace(grid, states=grid.states[::-1], pipelines=grid.pipelines[::-1], sequences=grid.sequences[::-1])
            for grid in space.grids
        ]
    planned = space.check(space.grids[0].mildest)
    sizes, _, _ = plan.sizes_of(planned)
    given = replace(config, parallel=replace(config.parallel, dp=0))
    planner = plan.ModelPlanner(machine)
    planner.parts = PARTS
    return search(
        space,
        Estimator(planned, sizes, machine, planner.kept_by_a_layer),
        planner,
        machine,
        (given, validate(given, world_size)),
        top,
    )


def all_layouts(world_size: int, batch: int) -> Iterable[Candidate]:
    """Layouts of the tiny model that name each thing in one way only. Many of them cannot run."""
    stages = get_args(option_types()["optimizer.zero_stage"])
    forms = get_args(option_types()["parallel.cp_attention"])
    recomputes = get_args(option_types()["train.recompute"])
    several = {1: (), 2: (2,), 4: (2,)}  # numbers of stages on a rank, of which each has layers of equal number
    for tp, cp, pp in itertools.product(divisors(world_size), repeat=3):
        dp = world_size // (tp * cp * pp)
        if tp * cp * pp * dp != world_size:
            continue
        pipelines = [("1f1b", 1), ("breadth", 1)]
        if pp > 1:
            pipelines += [(name, 1) for name in ("zb-h1", "zb-2p")]
            pipelines += [(name, 2) for name in ("zb-v", "v-half", "v-min", "dualpipe-v")]
            pipelines += itertools.product(("interleaved", "zb-interleaved"), several[pp])
        states = [(1, 0)] if dp * cp == 1 else list(itertools.product(stages, [0, *divisors(dp * cp)[1:-1]]))
        parts = itertools.product(pipelines, states, (False, True), forms, recomputes, ((), ("::2",)), (1, 2, 4, 8, 16))
        for (name, vpp), (stage, ranks), in_parts, form, recompute, layers, size in parts:
            if (in_parts and tp == 1) or (form != "gather" and cp == 1) or (layers and recompute not in BY_LAYER):
                continue
            if (name == "breadth" and stage < 2) or (ranks and not stage) or size > -(-batch // dp):
                continue
            yield Candidate(pp, tp, cp, dp, 1, 0, name, vpp, stage, ranks, in_parts, form, recompute, layers, size)


def can_run(layout: Candidate, base: Config, world_size: int) -> bool:
    try:
        validate_layout(layout.of(base), world_size)
    except ConfigError:
        return False
    return True


def test_all_layouts_that_can_run_are_tried_and_no_others() -> None:
    space = space_of(config_of("--train.seq_length", "24"), 4)
    tried = {layout for grid in space.grids for layout in grid.layouts()}
    assert len(tried) == len(space) > 2000
    assert tried == {layout for layout in all_layouts(4, 24) if can_run(layout, space.base, 4)}


def test_what_a_search_checks_is_what_a_run_refuses() -> None:
    base = space_of(config_of("--train.seq_length", "24"), 4).base
    layouts = list(all_layouts(4, 24))
    agreed = {True: 0, False: 0}
    for layout in random.Random(3).sample(layouts, 300):
        try:
            validate(layout.of(base), 4)
            legal = True
        except ConfigError:
            legal = False
        assert can_run(layout, base, 4) == legal
        agreed[legal] += 1
    assert min(agreed.values()) > 50


def test_only_fixed_options_are_pinned() -> None:
    config = config_of("--parallel.pp", "2", "--train.recompute", "full", "--parallel.partition", "1", "3")
    free = space_of(config, 4)
    tried = {layout for grid in free.grids for layout in grid.layouts()}
    assert {layout.pp for layout in tried} == {1, 2, 4}
    assert {layout.recompute for layout in tried} == {"none", "selective", "light", "all_but_attention", "full"}
    pinned = space_of(config, 4, "parallel.pp=2", "train.recompute=selective", "train.micro_batch_size=2")
    some = {layout for grid in pinned.grids for layout in grid.layouts()}
    assert some == {
        layout for layout in tried if (layout.pp, layout.recompute, layout.micro_batch_size) == (2, "selective", 2)
    }


def test_tensor_ranks_stay_within_a_node_unless_they_are_fixed() -> None:
    config = config_of()
    assert {grid.mildest.tp for grid in space_of(config, 6, gpus_per_node=2).grids} == {1, 2}
    assert {grid.mildest.tp for grid in space_of(config, 6, "parallel.tp=6", gpus_per_node=2).grids} == {6}


def first_rows(result: Found) -> list[tuple[Candidate, float, int]]:
    return [(row.layout, row.seconds, row.memory_bytes) for row in result.rows]


def test_memory_of_a_row_is_that_of_the_fullest_rank_when_it_is_built() -> None:
    # 48 micro-batches: more than a search looks at first.
    few = ("train.recompute=none", "optimizer.shard_ranks=0", "train.micro_batch_size=1")
    result = found(config_of("--train.global_batch_size", "48"), 2, H100, *few)
    assert len({row.layout.schedule for row in result.rows}) > 5
    for row in result.rows:
        listed = [rank for ranks in reports(row.config, PARTS).values() for rank in ranks]
        built = replace(row.config, kernels=replace(row.config.kernels, backend="triton"))
        assert row.memory_bytes == max(built_report(built, rank).total for rank in listed)


def test_order_of_enumeration_and_estimates_change_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (*FEW[1:], "train.recompute_layers=")
    result = found(config_of(), 2, H100, *few)
    rows = first_rows(result)
    assert len(rows) > 10
    assert rows == sorted(rows, key=lambda row: (row[1], row[0]))
    assert first_rows(found(config_of(), 2, H100, *few, reverse=True)) == rows
    # As in a large space, where only layouts with short estimated steps are planned.
    monkeypatch.setattr("megapar_tools.plan.search._ALL", 0)
    estimated = first_rows(found(config_of(), 2, H100, *few))
    assert first_rows(found(config_of(), 2, H100, *few, reverse=True)) == estimated
    assert estimated[0] == rows[0]


def test_times_that_are_a_little_wrong_change_no_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are simulated. What chooses them may be off by some percent, to either side."""
    few = (*FEW[1:], "train.recompute_layers=")
    rows = first_rows(found(config_of(), 2, H100, *few, top=5))[:5]
    time = plan.ModelPlanner.time
    noise = random.Random(7)

    def wrong(self: plan.ModelPlanner, config: Config) -> StepTime:
        right = time(self, config)
        return replace(right, seconds=noise.uniform(0.95, 1.05) * right.seconds)

    monkeypatch.setattr(plan.ModelPlanner, "time", wrong)
    assert first_rows(found(config_of(), 2, H100, *few, top=5))[:5] == rows


@pytest.mark.slow
def test_schedules_that_an_estimate_cannot_tell_apart_hide_no_faster_one() -> None:
    """Six layouts with zb-interleaved hid v-half of Llama 2 7B."""
    config = load(["--config", str(Path(TINY).with_name("llama_7b.toml"))], presets()).config
    every = found(config, 8, H100, "train.recompute=none", top=4)
    v_half = found(
        config,
        8,
        H100,
        "train.recompute=none",
        "parallel.pp=2",
        "parallel.schedule=v-half",
        "parallel.vpp=2",
        "optimizer.zero_stage=1",
        "optimizer.shard_ranks=0",
        top=1,
    )
    assert every.rows[0].seconds <= v_half.rows[0].seconds


@pytest.mark.slow
def test_more_rows_hide_no_faster_one() -> None:
    """For 40 rows, 20 variants of each grid were planned, and too few grids: the first row took 11% longer."""
    flags = ("--config", "qwen3-30b-a3b", "--launch.device", "cuda", "--train.precision", "bf16")
    sizes = ("--train.seq_length", "4096", "--train.global_batch_size", "512", "--parallel.etp", "1")
    config = load([*flags, *sizes], presets()).config
    few, many = (found(config, 64, H100, "parallel.ep_overlap_chunks=0", top=top).rows[0] for top in (10, 40))
    assert many.seconds <= few.seconds


def test_more_memory_brings_more_rows_and_more_bandwidth_no_slower_first_one() -> None:
    few = ("parallel.schedule=1f1b", "train.micro_batch_size=2", "optimizer.shard_ranks=0")
    config = config_of("--train.global_batch_size", "24")
    all_bytes = [row.memory_bytes for row in found(config, 2, H100, *few).rows]
    counts = []
    for limit in (min(all_bytes), sorted(all_bytes)[len(all_bytes) // 2], max(all_bytes)):
        machine = replace(H100, memory_gib=limit / 2**30, reserve_gib=0.0)
        counts.append(len(found(config, 2, machine, *few).rows))
    assert 0 < counts[0] < counts[1] < counts[2] == len(all_bytes)
    seconds = []
    for gb_per_second in (0.01, 1.0, 100.0):
        machine = replace(H100, node=Link(gb_per_second, 5.0), network=Link(gb_per_second / 10, 5.0))
        seconds.append(found(config, 2, machine, *few).rows[0].seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_what_it_writes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--config", TINY, "--gpus", 2, "--fix", *FEW[:1], *FEW[2:], "--explain", 1, "--tokens", 10**9)
    assert run(monkeypatch, *flags, "--parallel.pp", 2, "--json", "plan.json", "--write", "best.toml") == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    first = written["rows"][0]
    # The rows are in order, and one of them is the given layout.
    given = [row for row in written["rows"] if row["given"]]
    assert [row["layout"]["parallel.pp"] for row in given] == [2]
    seconds = [row["step_seconds"] for row in written["rows"] if not row["given"]]
    assert seconds == sorted(seconds)
    assert written["why_first"] in " ".join(out.split())
    for answer in written["questions"]:
        assert f"{answer['question']}: {answer['answer']}" in " ".join(out.split())
    # The rates of a row agree with each other.
    assert first["tokens_per_second"] == pytest.approx(24 * 30 / first["step_seconds"])
    assert first["gpu_hours"] == pytest.approx(10**9 / first["tokens_per_second_per_gpu"] / 3600)
    assert first["dollars"] == pytest.approx(first["gpu_hours"] * H100.price_per_hour)
    assert first["days"] == pytest.approx(first["gpu_hours"] / 48)
    # The written file is the first row, and plans to its bytes.
    config = load(["--config", "best.toml", "--launch.device", "cuda"]).config
    options = json.loads(json.dumps(layout_of(config).options()))  # JSON has lists for tuples
    assert options == {path: first["layout"][path] for path in options}
    fullest = max(report.total for report in reports(validate(config, 2), PARTS))
    assert first["memory_bytes"] == fullest == max(rank["memory_bytes"] for rank in written["explained"]["ranks"])
    assert sum(first["bytes_by_kind"].values()) == fullest
    (layers,) = written["explained"]["layers"]
    assert layers["layers"] == 4
    assert 0 < layers["seconds"] < first["step_seconds"]
    # It has one row if it is the given layout, too.
    few = ("--fix", *FEW[:1], *FEW[2:])
    assert run(monkeypatch, "--config", "best.toml", "--gpus", 2, *few, "--json", "again.json") == 0
    again = json.loads((tmp_path / "again.json").read_text())["rows"]
    assert [row["given"] for row in again if row["layout"] == again[0]["layout"]] == [True]
    picture = matplotlib.image.imread(tmp_path / "plan_1.png")
    assert picture.std() > 0.1
    events = json.loads((tmp_path / "plan_1.trace.json").read_text())["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") <= 1e6 * first["step_seconds"] * 2


def test_sizes_of_a_step_that_nobody_gave_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset has none: 70B would be planned for 8 samples of 128 tokens, in fp32."""
    flags = ("--config", "gpt2-124m", "--gpus", 1, "--top", 1, "--fix", *FEW, "--train.global_batch_size", 4)
    assert run(monkeypatch, *flags) == 0
    assert "planned for --train.seq_length 128 --train.precision fp32, by default" in capsys.readouterr().out
    assert run(monkeypatch, *flags, "--train.precision", "bf16", "--train.seq_length", 64) == 0
    assert "by default" not in capsys.readouterr().out


def test_a_given_layout_that_does_not_fit_is_marked_with_the_nearest_that_does() -> None:
    config = config_of("--train.micro_batch_size", "24", "--train.recompute", "none")
    few = ("parallel.schedule=1f1b", "optimizer.zero_stage=1", "train.recompute_layers=", "optimizer.shard_ranks=0")
    given = found(config, 1, H100, *few).given
    assert given is not None
    machine = replace(H100, memory_gib=(given.memory_bytes - 1) / 2**30, reserve_gib=0.0)
    result = found(config, 1, machine, *few)
    assert result.given is not None
    assert not result.given.fits
    assert result.given.seconds > 0
    assert result.given not in result.rows
    other = nearest(result.given, result.rows)
    assert other is not None
    changed = [name for name, a, b in zip(Candidate._fields, given.layout, other.layout, strict=True) if a != b]
    assert changed in (["micro_batch_size"], ["recompute"])
    space = space_of(config, 1, *few)
    lines = list(rejections(result, space, machine))
    assert any("the given layout does not fit" in line and "in place of" in line for line in lines)


def test_a_layout_fits_only_if_uneven_experts_fit_too() -> None:
    config = load(["--config", MOE, "--launch.device", "cuda", "--parallel.ep", "2"]).config
    config = replace(config, parallel=replace(config.parallel, cp=1, dp=2), launch=replace(config.launch, nproc=0))
    few = (*FEW, "optimizer.zero_stage=1", "parallel.pp=1", "parallel.tp=1", "parallel.cp=1", "parallel.ep=2")
    given = found(config, 2, H100, *few).given
    assert given is not None
    uneven = for_uneven_experts(given.config, given.report)
    assert uneven > 1000
    needed = given.memory_bytes + uneven
    for nbytes, fits in ((needed, True), (needed - 1, False)):
        machine = replace(H100, memory_gib=nbytes / 2**30, reserve_gib=0.0)
        again = found(config, 2, machine, *few).given
        assert again is not None
        assert again.fits == fits


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--config", TINY, "--gpu", "h1000"), "hardware h1000: unknown"),
        (("--gpus", "2"), "there is no model to plan; name one by --config, such as llama3-8b"),
        (("--config", TINY, "--gpus", "0"), "--gpus 0 --top 10: must be at least 1"),
        (("--config", TINY, "--gpus", "2", "--explain", "99"), "--explain 99: there are rows 1 to"),
        (("--config", TINY, "--fix", "parallel.tp"), "--fix parallel.tp: expected an option and a value"),
        (("--config", TINY, "--fix", "parallel.pt=2"), "--fix parallel.pt: no such flag"),
        (("--config", TINY, "--fix", "parallel.tp=x"), "--fix parallel.tp x: expected a whole number"),
        (
            ("--config", TINY, "--gpus", "4", "--fix", "parallel.tp=4"),
            "--gpus 4 --fix parallel.tp=4: no layout can run: model.num_attention_heads=6, parallel.tp=4: heads must "
            "divide by tp; tp may be 1 or 2; parallel.tp may be 1, 2",
        ),
        (
            ("--config", TINY, "--gpus", "7", "--fix", "parallel.pp=2"),
            "tp(1)*pp(2)=2 does not divide world size 7; tp*pp may be 1 or 7",
        ),
        (
            ("--config", "llama3-70b", "--gpus", "2", "--gpu", "rtx4090-24g", "--train.precision", "bf16"),
            "no layout fits into the 22.",
        ),
        (
            ("--config", "llama3-70b", "--model.vocab_size", "0", "--data.tokenizer", "spm:none.model"),
            "set model.vocab",
        ),
    ],
)
def test_what_it_refuses(
    flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = () if "--fix" in flags else ("--fix", *FEW)
    assert run(monkeypatch, *flags, *few) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_a_budget_has_chosen_is_no_hindrance_to_a_search() -> None:
    """train.memory_gb leaves layers to recompute and inputs on the host in config.toml. Layouts without recomputation
    are tried beside them."""
    config = config_of("--train.recompute", "full", "--train.recompute_layers", "0-1", "--train.offload", "1")
    tried = {layout.recompute for grid in space_of(config, 2).grids for layout in grid.layouts()}
    assert {"none", "full"} <= tried
