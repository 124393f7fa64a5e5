"""tools/benchmark.py at a size of seconds: training in every layout, the door, schedules, profiles."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 and pipelining import it: once here rather than in every forked rank
from megapar_models.registry import validate

from megapar.base.errors import ConfigError
from megapar.system import device
from tests.support import options

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import benchmark
from benchmarks import (
    counting,
    cpu_products,
    cpu_profile,
    families,
    finetuning,
    generation,
    handoff,
    harness,
    layouts,
    linear_attention,
    optimizer_losses,
    optimizers,
    packing,
    program,
    recompute,
    schedules,
    step_times,
)
from benchmarks.contenders import LAYOUTS
from benchmarks.peers import Result
from benchmarks.ranks import BenchmarkError, run_ranks

from tests.support.sweeps import slow_but

# Pipelines in V have two stages on each of two ranks, so four layers and four micro-batches.
SIZES: dict[str, Any] = {"hidden": (128,), "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
SIZES |= {"vocab_size": 256, "seq_length": 16, "global_batch_size": 8, "micro_batch_size": 2, "steps": 1}


def measured_run(layout: str, num_hidden_layers: int) -> dict[str, Any]:
    """What the program writes about a layout, without the memory of contenders."""
    chosen = layouts.Options(layouts=(layout,), **SIZES | {"num_hidden_layers": num_hidden_layers})
    layouts.check_options(chosen)
    for name in layouts.chosen_contenders(chosen, LAYOUTS[layout]):
        LAYOUTS[layout].contenders[name][0].load()  # once here rather than in every forked rank
    body = partial(layouts.measure_reference, chosen, 128, LAYOUTS[layout])
    return layouts.run_layout(chosen, 128, layout, [Result(*result) for result in run_ranks(1, "cpu", body)[0]])


@pytest.mark.parametrize("layout", slow_but(range(0, len(LAYOUTS), 5), LAYOUTS))
def test_contenders_compute_the_same_and_bytes_equal_the_formulas(layout: str) -> None:
    """Every installed peer agrees with plain PyTorch in loss and gradient norm, and megapar sends what the formulas
    say, to the byte, on every rank."""
    run = measured_run(layout, 4 if layout == "pp2" else 2)
    assert not layouts.problems(run)
    assert [c["name"] for c in run["contenders"]] == [
        n for n, (kind, _) in LAYOUTS[layout].contenders.items() if kind.is_installed()
    ]
    for contender in run["contenders"]:
        # The products alone train nothing, so they agree with nothing; all others are measured against them.
        assert len(contender["errors"]) == (0 if contender["name"] == "products alone" else 2)
        # Gradients that are rounded to bf16 change the first update, and so the second loss.
        assert contender["errors"].get("loss", 0.0) < (1e-4 if "in bf16" in contender["name"] else 1e-5)
        assert contender["errors"].get("grad_norm", 0.0) < 1e-3
        assert contender.get("sent") == contender.get("formula")
        assert ("sent" in contender) == contender["name"].startswith("megapar")
        assert contender["share_of_products"]["median"] > 0
    tokens = SIZES["global_batch_size"] * SIZES["seq_length"]
    for contender in run["contenders"]:
        assert ("expert_counts" in contender) == (layout.startswith("moe") and "sent" in contender)
        if "expert_counts" in contender:
            # By rank, layer and expert. Each token chooses 2 of 8 experts.
            counts = torch.tensor(contender["expert_counts"]).sum(0)
            assert counts.sum(1).tolist() == [2 * tokens] * 2


def test_the_program_measures_the_peers_that_were_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    options = layouts.Options(layouts=("tp2",), peers=("shared memory TP",), json=file, **SIZES)
    harness.run(layouts.measure, options)
    found = json.loads(file.read_text())
    assert found["options"]["layouts"] == "('tp2',)"
    assert {"date", "hardware", "versions", "commit"} < set(found)
    (run,) = found["runs"]
    printed = capsys.readouterr().out
    assert [contender["name"] for contender in run["contenders"]] == ["megapar", "shared memory TP"]
    for contender in run["contenders"]:
        assert len(contender["peak_bytes_above_start"]) == 2
        assert min(contender["peak_bytes_above_start"]) > 0
        assert f"{contender['tokens_per_second']:,.0f}" in printed


def test_the_first_word_chooses_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must be one of those listed by --help of the door."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "speed"])
    assert benchmark.main() == 2
    assert capsys.readouterr().err.startswith("ConfigError: speed: no such benchmark; layouts, checkpoint,")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "checkpoint", "--help"])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 0
    assert "--rounds" in capsys.readouterr().out
    assert [line.split()[0] for line in (benchmark.__doc__ or "").splitlines()[2:]] == list(benchmark.MODULES)


def test_costs_and_turns() -> None:
    """Neighbors stay neighbors in both orders, a ratio is taken within a round, and waiting takes no CPU time."""
    assert [counting.in_turn("abc", number) for number in range(3)] == [list("cba"), list("abc"), list("cba")]
    assert counting.ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}
    waited, result = counting.cost(lambda: schedules.time.sleep(0.05) or 7)
    assert result == 7
    assert waited.wall >= 0.05 > 2 * waited.cpu
    held: list[torch.Tensor] = []
    device._keep_freed_memory()  # as ranks set up their process; a test before this one may have done so
    earlier = [torch.ones(2**20) for _ in range(12)]
    del earlier  # 48 MiB are free and resident
    taken = counting.memory(lambda: held.append(torch.ones(2**23)))[1]
    assert 2**25 <= taken < 2**26
    held.clear()
    taken = counting.memory(lambda: held.append(torch.ones(2**10)))[1]
    assert taken < 2**24, "the peak of earlier work counts"


def test_contenders_of_a_case_take_turns() -> None:
    """In reversed order every other round. The warm-up has notes and no times, and a check sees each round whole."""
    did: list[str] = []
    rounds: list[dict[str, str]] = []

    def work(name: str) -> str:
        did.append(name)
        return name.upper()

    works = {name: partial(work, name) for name in ("a", "b", "c")}
    turns = harness.Case(works, 2, note=lambda name, result: name + result, check=rounds.append).measure()
    assert did == [*"cba", *"abc", *"cba"]
    assert rounds == [{"a": "aA", "b": "bB", "c": "cC"}] * 3
    assert {name: (len(found.wall), len(found.cpu), found.notes) for name, found in turns.items()} == {
        name: (2, 2, [name + name.upper()] * 3) for name in ("a", "b", "c")
    }


def test_a_case_is_measured_on_ranks() -> None:
    """Each rank makes its own contenders, and a turn ends when the slowest rank has ended it."""

    def make(device: torch.device) -> harness.Case:
        rank = torch.distributed.get_rank()
        return harness.Case({"sleeper": lambda: schedules.time.sleep(0.05 * rank) or rank}, 1, world=2)

    first, second = harness.on_ranks(2, make)
    assert (first["sleeper"].notes, second["sleeper"].notes) == ([0, 0], [1, 1])
    assert min(first["sleeper"].wall[0], second["sleeper"].wall[0]) >= 0.05


def test_tables_follow_from_the_numbers_of_the_file() -> None:
    """Words and numbers have columns, rounds and medians their ranges, bytes are MiB; what a row lacks is empty."""
    rows = [
        {"name": "ours", "speed": {"median": 1.05, "min": 1.0, "max": 1.25}, "bytes": {"a": 2**21}, "loss": None},
        {"name": "theirs", "seconds": [0.5, 0.125, 0.25], "results": [[1.0]]},
    ]
    of_rows, of_names, others = harness.tables({"rows": rows, "by": {"x": {"n": 1}, "y": {"n": 12345}}, "steps": 7})
    found = {str(column.header): list(column.cells) for column in of_rows.columns}
    assert found == {
        "name": ["ours", "theirs"],
        "speed": ["1.05 (1-1.25)", ""],
        "bytes, a, MiB": ["2.0", ""],
        "loss": ["-", ""],
        "seconds": ["", "0.25 (0.125-0.5)"],
    }
    assert [list(column.cells) for column in of_names.columns] == [["x", "y"], ["1", "12,345"]]
    assert [column.header for column in others.columns] == ["steps"]


def test_worthless_numbers_are_written_and_end_the_benchmark(tmp_path: Path) -> None:
    options = harness.Output(json=tmp_path / "out.json")
    with pytest.raises(BenchmarkError, match=r"^another computation$") as end:
        harness.run(lambda _: harness.Found({"loss": 7.0}, problems=["another computation"]), options)
    assert end.value.exit_code == 70
    assert json.loads((tmp_path / "out.json").read_text())["loss"] == 7.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": (384,), "num_attention_heads": 0}, "--hidden 384 must be a multiple of 256"),
        ({"num_key_value_heads": 1}, "--num_key_value_heads 1 must be even"),
        ({"peers": ("DDP",), "layouts": ("pp2",)}, "--peers 'DDP': --layouts pp2 have megapar, megapar, zb-h1"),
        ({"peers": ("GPT",)}, "--peers 'GPT': --layouts single dp2 tp2 tp2.sp pp2 have megapar, PyTorch, Hugging Face"),
        ({"num_experts": 7, "layouts": ("moe",)}, "--num_experts 7 must be even"),
        ({"num_hidden_layers": 1}, "model.num_hidden_layers"),
        ({"global_batch_size": 4}, "--global_batch_size 4: pipelining DualPipe-V needs at least 4 micro-batches"),
    ],
)
def test_what_a_contender_cannot_train_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        layouts.check_options(layouts.Options(**{**SIZES, **options}))


@pytest.mark.slow
def test_families_are_timed_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each attention of transformers, and no figure if the gradients are of another function."""
    pytest.importorskip("transformers")
    file = tmp_path / "out.json"
    few = families.Options(models=("deepseek_v3",), precisions=("fp32",), length=16, rounds=2, json=file)
    harness.run(families.measure, few)
    rows = json.loads(file.read_text())["rows"]
    assert [row["beside"] for row in rows] == ["transformers, sdpa", "transformers, eager"]
    for row in rows:
        assert 0 < row["kept_bytes"] < row["their_kept_bytes"]
        assert row["speed"]["min"] <= row["speed"]["median"] <= row["speed"]["max"]
        assert f"{row['speed']['median']:.3g} (" in capsys.readouterr().out or row is not rows[0]
    found = families.contenders("gpt_oss", "fp32", 16)
    families.check(found, "fp32")
    with torch.no_grad():
        found["megapar"].model.get_parameter("layers.0.attention.sinks").add_(0.1)
    with pytest.raises(BenchmarkError, match="loss: megapar"):
        families.check(found, "fp32")


@pytest.mark.slow
def test_a_profile_counts_operations_by_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = partial(layouts.Options, seq_length=16, vocab_size=256)
    monkeypatch.setattr(layouts, "Options", lambda **shape: small(**shape | {"global_batch_size": 2}))
    harness.run(cpu_profile.measure, cpu_profile.Options(num_hidden_layers=1, steps=1, json=tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())["milliseconds"]
    assert list(found) == ["megapar", "PyTorch"]
    for times in found.values():
        assert set(times) >= {"matrix products", "attention", "norms", "loss", "activation"}
        assert min(times.values()) >= 0
        assert times["matrix products"] > times["zeros"]


def test_the_program_is_compared_within_a_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine that becomes half as fast with every run."""
    ran: list[str] = []

    def of(name: str, tokens: float) -> Callable[[program.Options], float]:
        def measure(options: program.Options) -> float:
            ran.append(name)
            return tokens / 2 ** len(ran)

        return measure

    monkeypatch.setattr(program, "_of_program", of("program", 3000.0))
    monkeypatch.setattr(program, "_of_bare_loop", of("bare loop", 2000.0))
    file = tmp_path / "out.json"
    harness.run(program.measure, program.Options(pairs=2, json=file))
    assert ran == ["bare loop", "program", "program", "bare loop"]
    assert json.loads(file.read_text())["speed"] == {"median": 1.875, "min": 0.75, "max": 3.0}


@pytest.mark.slow
def test_a_run_and_a_bare_loop_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    harness.run(program.measure, program.Options(pairs=1, steps=1, hidden=64, num_hidden_layers=1, json=file))
    found = json.loads(file.read_text())
    (ours,), (theirs,) = found["tokens_per_second"].values()
    assert 0.1 < found["speed"]["median"] == ours / theirs < 10


def test_products_and_attention_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a clock that goes on by 3 ms for each product and attention of torch, and by 2 ms for ours."""
    now = 0.0

    def product(seconds: float, x: torch.Tensor, matrix: torch.Tensor) -> None:
        nonlocal now
        now += seconds

    def attention(seconds: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: bool) -> torch.Tensor:
        nonlocal now
        now += seconds
        assert set(options.values()) <= {True}
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)

    monkeypatch.setattr(cpu_products.time, "perf_counter", lambda: now)
    monkeypatch.setattr(cpu_products.F, "linear", partial(product, 0.003))
    monkeypatch.setattr(cpu_products.torch, "matmul", partial(product, 0.003))
    monkeypatch.setattr(cpu_products.onednn, "linear", partial(product, 0.002))
    monkeypatch.setattr(cpu_products.F, "scaled_dot_product_attention", partial(attention, 0.003))
    monkeypatch.setattr(cpu_products, "sdpa", partial(attention, 0.002))
    file = tmp_path / "out.json"
    shapes = {"rows": (2, 3), "matrices": ("8x4",), "attention": ("1x4x2x5x3",)}
    harness.run(cpu_products.measure, cpu_products.Options(**shapes, rounds=2, json=file))
    found = json.loads(file.read_text())
    assert [(row["outputs"], row["inputs"], row["rows"]) for row in found["products"]] == [(8, 4, 2), (8, 4, 3)]
    for row in found["products"]:
        assert row["forward"] + row["backward"] == pytest.approx([1.5] * 4)
    assert found["attention"] == {"1x4x2x5x3": pytest.approx([1.5] * 2)}


def test_schedules_are_timed_beside_their_simulation(tmp_path: Path) -> None:
    """Simulated times are those of the textbook: a fill of one forward, and m forwards and backwards."""
    file = tmp_path / "out.json"
    names = ("1f1b", "zb-h1", "zb-v")
    harness.run(
        schedules.measure,
        schedules.Options(pp=2, schedules=names, microbatches=(3,), milliseconds=4, steps=2, json=file),
    )
    rows = json.loads(file.read_text())["rows"]
    assert [row["schedule"] for row in rows] == list(names)
    expected = [0.004 * (3 + 9), 0.004 * (1 + 9), 0.004 * (0.5 + 9)]
    assert [row["simulated_seconds"] for row in rows] == pytest.approx(expected)
    for row in rows:
        assert len(row["step_seconds"]) == 2
        # A sleep may take longer, and never less.
        assert min(row["step_seconds"]) >= row["simulated_seconds"]
        assert row["idle"] >= row["simulated_idle"]


def test_predicted_and_measured_times_are_summed_up() -> None:
    """By hand: three layouts, of which the two slower ones are ranked the other way round."""
    found = {
        "a": step_times.Times(predicted=1.1, measured=1.0),
        "b": step_times.Times(predicted=3.0, measured=2.0),
        "c": step_times.Times(predicted=2.0, measured=4.0),
    }
    summary = step_times.summary(found)
    assert summary["mean_error"] == pytest.approx((0.1 + 0.5 + 0.5) / 3)
    assert summary["rank_correlation"] == pytest.approx(0.5)
    assert summary["first_choice"] == summary["best_measured"] == "a"
    assert step_times.summary(found | {"d": step_times.Times(0.5, 1.2)})["regret"] == pytest.approx(0.2)


@pytest.mark.parametrize("flags", step_times.LAYOUTS.values(), ids=step_times.LAYOUTS)
def test_layouts_of_step_times_can_run(flags: str) -> None:
    config = options.load([*step_times.SIZES, *flags.split()]).config
    assert validate(config, 2 if "parallel" in flags else 1).train.global_batch_size == 8


@pytest.mark.slow
def test_generation_is_measured_beside_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    file = tmp_path / "out.json"
    harness.run(
        generation.measure,
        generation.Options(prompts=(2,), length=5, tokens=4, layers=1, hidden_size=128, rounds=1, json=file),
    )
    (row,) = json.loads(file.read_text())["rows"]
    rates = row["tokens_per_second"]
    assert row["speed"]["median"] == pytest.approx(rates["megapar"]["median"] / rates["transformers"]["median"])


def test_a_handoff_is_measured_to_every_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if the two ways hand over other bits to any of them."""
    file = tmp_path / "out.json"
    options = handoff.Options(layers=1, hidden_size=128, bucket_mb=1, rounds=1, json=file)
    harness.run(handoff.measure, options)
    found = json.loads(file.read_text())
    assert list(found["targets"]) == list(handoff.TARGETS)
    assert found["buckets"] > 1
    assert all(min(one["seconds"][way]) > 0 for one in found["targets"].values() for way in handoff.WAYS)
    monkeypatch.setattr(handoff, "gathered", lambda stages: iter([("norm", torch.ones(3))]))
    with pytest.raises(BenchmarkError, match="the two ways handed over other bits to rank"):
        harness.run(handoff.measure, options)


@pytest.mark.slow
def test_fine_tuning_is_the_same_as_that_of_the_trainer(tmp_path: Path) -> None:
    """The benchmark itself compares losses and norms of gradients after each of the steps."""
    for package in ("accelerate", "peft"):
        pytest.importorskip(package, reason=f"not run: needs {package}, pip install accelerate peft")
    file = tmp_path / "out.json"
    harness.run(
        finetuning.measure, finetuning.Options(layers=1, seq_length=128, mean_length=30, packs=4, rounds=2, json=file)
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layout"], row["trained"]) for row in rows] == [
        (layout, trained) for layout in ("single", "dp2") for trained in ("all", "adapters")
    ]
    for row in rows:
        assert all(len(results) == 3 for results in row["results"].values())
        assert min(row["bytes"].values()) > 0


@pytest.mark.slow
def test_packs_are_compared_with_those_of_trl() -> None:
    for package in ("trl", "datasets"):
        pytest.importorskip(package, reason=f"not run: needs {package}, pip install '.[judges]'")
    ours, bfd, wrapped = packing.packed("three", [6, 5, 4, 3, 2], 8)
    assert [row["packs"] for row in (ours, bfd, wrapped)] == [3, 3, 3]
    assert ours["fullness"] == 20 / 24
    assert wrapped["cut"] == 2, "5 tokens from the 7th on, and 3 from the 16th"


def test_optimizers_are_measured_by_rank_and_in_turns(tmp_path: Path) -> None:
    """Two ranks own matrices of unequal cost. The shares of offload, and a clip of nothing, give the same losses."""
    file = tmp_path / "optimizers.json"
    sizes: dict[str, Any] = {"ranks": 2, "layers": 1, "hidden_size": 128, "tokens": 128, "rounds": 1}
    harness.run(optimizers.measure, optimizers.Options(**sizes, json=file))
    found = json.loads(file.read_text())
    whole, heads = found["newton_schulz"]
    flops = [sum(rank["flops"] for rank in one["ranks"]) for one in (whole, heads)]
    assert flops[1] < flops[0], "heads cost less than one matrix of all"
    assert all(rank["seconds"] > 0 for one in (whole, heads) for rank in one["ranks"])
    assert 1 <= whole["largest_over_mean"]["flops"] < 1.1
    assert [row["time"]["median"] for row in found["steps"][:1]] == [1.0]


def test_losses_of_ended_runs_are_read_and_drawn(tmp_path: Path) -> None:
    for case, loss in (("fp32", 5.0), ("bf16", 5.25)):
        for seed in (1, 2):
            folder = tmp_path / f"{case}-4-{seed}"
            folder.mkdir()
            lines: list[dict[str, float]] = [
                {"step": step, "loss": 6.0 - step, "step_seconds": 2.0} for step in range(1, 5)
            ]
            lines += [{"step": step, "validation_loss": loss + seed} for step in (2, 4)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "cpu_seconds.json").write_text('{"cpu": 7.5}')
    files: dict[str, Any] = {"json": tmp_path / "losses.json", "picture": tmp_path / "losses.png"}
    options = optimizer_losses.Options(("fp32", "bf16"), (1, 2), 4, 2, runs=tmp_path, **files)
    harness.run(optimizer_losses.measure, options)
    found = json.loads(files["json"].read_text())["cases"]["bf16"]
    assert [run["held_out"] for run in found] == [{"2": 6.25, "4": 6.25}, {"2": 7.25, "4": 7.25}]
    assert found[0]["losses"] == [5.0, 4.0, 3.0, 2.0]
    assert files["picture"].stat().st_size > 10_000


def test_modes_of_recompute_are_measured_beside_their_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are compared, and kept bytes with the plan; where they differ it fails. With 192 positions attention goes
    in blocks of rows."""
    file = tmp_path / "recompute.json"
    options = recompute.Options(lengths=(16, 192), tokens=384, layers=1, hidden_size=128, rounds=1, json=file)
    harness.run(recompute.measure, options)
    rows = json.loads(file.read_text())["rows"]
    kept = {row["mode"]: row["kept_bytes"] for row in rows}
    assert kept["full"] < kept["all_but_attention"] < kept["light"] < kept["none"]
    monkeypatch.setattr(recompute, "kept_bytes", lambda state, batch: (7, 0))
    with pytest.raises(BenchmarkError, match=r"bytes of device and host are \(7, 0\), and "):
        harness.run(recompute.measure, options)


def test_the_delta_rule_is_timed_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[judges]'")
    monkeypatch.setattr(linear_attention, "HEADS", 2)
    monkeypatch.setattr(linear_attention, "WIDTH", 8)
    options = linear_attention.Options(lengths=(70,), ranks=(2,), lengths_over_ranks=(16,), rounds=2)
    found = linear_attention.measure(options).numbers
    assert [row["a decay for each"] for row in found["rules"]] == ["head", "channel"]
    assert all(row["kept_bytes"] < row["their_kept_bytes"] for row in found["rules"])
    # Two runs of each of two ranks: maps and states, forward and backward.
    assert {row["sent_bytes"] for row in found["over_ranks"]} == {2 * 2 * 2 * 8 * (8 + 8) * 4}


def test_a_rule_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[judges]'")
    monkeypatch.setattr(linear_attention, "of_transformers", lambda decays: lambda *x: 1.01 * linear_attention.ours(*x))
    options = linear_attention.Options(lengths=(16,), decays=("head",), rounds=2)
    with pytest.raises(BenchmarkError, match="transformers: 1"):
        linear_attention.in_one_process(options)
