"""tools/benchmark.py at a size of seconds."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.registry import validate

from megapar.config.options import Config, ModelConfig
from megapar.errors import ConfigError

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from benchmarks import cpu_profile, layouts, schedules
from benchmarks.peers import Result, v_partition

ROOT = Path(__file__).parent.parent

# Pipelines in V have two stages on each of two ranks, so four layers and four micro-batches.
SIZES = {"num_hidden_layers": 4, "vocab_size": 256, "seq_length": 16, "global_batch_size": 4, "steps": 1}


def measured_run(layout: str, **options: Any) -> dict[str, Any]:
    """What the program writes about a layout, without the memory of contenders."""
    chosen = layouts.Options(hidden=(256,), layouts=(layout,), **{**SIZES, **options})
    layouts.check_options(chosen)
    body = partial(layouts.measure_reference, chosen, 256, layouts.LAYOUTS[layout])
    reference = layouts.run_ranks(1, "cpu", body)[0]
    run = layouts.run_layout(chosen, 256, layout, [Result(*result) for result in reference])
    assert not layouts.problems(run)
    return run


def by_name(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {contender["name"]: contender for contender in run["contenders"]}


def measured(layout: str, **options: Any) -> dict[str, dict[str, Any]]:
    """What the program writes about the contenders of a layout, by name, without their memory."""
    return by_name(measured_run(layout, **options))


def assert_equal_to_pytorch(contender: dict[str, Any]) -> None:
    # Gradients that are rounded to bf16 change the first update, and so the second loss.
    assert contender["errors"]["loss"] < (1e-4 if "in bf16" in contender["name"] else 1e-5)
    assert contender["errors"]["grad_norm"] < 1e-3


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_contenders_compute_the_same_and_bytes_equal_the_formulas(layout):
    """Every peer that is installed agrees with plain PyTorch in loss and gradient norm, and what megapar sends is what
    the formulas say, to the byte, on every rank."""
    layers = 4 if layout == "pp2" else 2
    run = measured_run(layout, num_hidden_layers=layers)
    contenders = by_name(run)
    # The products alone train nothing, so they agree with nothing; all others are measured against them.
    assert contenders.pop("products alone")["errors"] == {}
    installed = [name for name, (kind, _) in layouts.LAYOUTS[layout].contenders.items() if kind.is_installed()]
    assert [*contenders, "products alone"] == installed
    for contender in contenders.values():
        assert_equal_to_pytorch(contender)
        assert contender.get("sent") == contender.get("formula")
        assert contender["share_of_products"]["median"] > 0
    check_loads(run)


def check_loads(run: dict[str, Any]) -> None:
    """The attended pairs of a deal and the tokens of experts: that all are counted, and what the largest load is."""
    expected_pairs = None
    if run["layout"] == "cp2":
        # Of 16 positions the second rank of a contiguous deal has the last 8, which see 9 to 16 positions: 100 of 136.
        expected_pairs = {"zigzag": 1.0, "contiguous": pytest.approx(100 / 68)}
    assert run.get("attended_pairs") == expected_pairs
    tokens = SIZES["global_batch_size"] * SIZES["seq_length"]
    for contender in run["contenders"]:
        assert ("expert_load" in contender) == ("expert_counts" in contender)
        if "expert_counts" not in contender:
            continue
        # By rank, layer and expert. Each token chooses 2 of 8 experts.
        counts = torch.tensor(contender["expert_counts"]).sum(0)
        assert counts.shape == (2, 8)
        assert counts.sum(1).tolist() == [2 * tokens] * 2
        assert contender["expert_load"] == pytest.approx(counts.max().item() * 8 / (2 * tokens))
        first, second = counts[:, :4].sum(1), counts[:, 4:].sum(1)  # tokens of the two ranks of ep, by layer
        expected_load = pytest.approx((torch.maximum(first, second) / tokens).mean().item())
        assert contender.get("rank_load", 1.0) == (expected_load if "ep" in contender["sent"][0] else 1.0)
    ours = [name for name in by_name(run) if name.startswith("megapar")]
    has_counts = [name for name in ours if "expert_counts" in by_name(run)[name]]
    assert has_counts == (ours if run["layout"].startswith("moe") else [])


@pytest.mark.parametrize(
    ("package", "module", "layout", "peers"),
    [
        ("deepspeed", "deepspeed", "dp2", ["DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"]),
        ("megatron-core", "megatron", "tp2", ["Megatron-Core TP"]),
        ("megatron-core", "megatron", "moe_ep2", ["Megatron-Core EP"]),
    ],
)
def test_a_peer_of_another_package_computes_the_same(package, module, layout, peers):
    """With heads and micro-batches of other sizes than the derived ones."""
    options: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "peers": tuple(peers)}
    options |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    if importlib.util.find_spec(module) is None:
        with pytest.raises(ConfigError, match=f"^--peers {peers[0]!r} needs a package: pip install {package}$"):
            measured(layout, **options)
        pytest.skip(f"not run: needs {package}, pip install {package}")
    contenders = measured(layout, **options)
    assert list(contenders) == ["megapar", *peers]
    for contender in contenders.values():
        assert_equal_to_pytorch(contender)


def test_the_program_measures_the_peers_that_were_chosen(tmp_path):
    file = tmp_path / "out.json"
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), *sizes, "--hidden", "256", "--json", str(file)]
    command += ["--layouts", "tp2", "--peers", "shared memory TP"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(file.read_text())["runs"]
    assert [contender["name"] for contender in run["contenders"]] == ["megapar", "shared memory TP"]
    for contender in run["contenders"]:
        assert len(contender["peak_bytes_above_start"]) == 2
        assert min(contender["peak_bytes_above_start"]) > 0
        assert f"{contender['tokens_per_second']:,.0f}" in done.stdout


def test_the_first_word_chooses_the_benchmark():
    """It must be one of those that --help of the door lists."""
    command = [sys.executable, str(ROOT / "tools/benchmark.py")]
    done = subprocess.run([*command, "speed"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: speed: no such benchmark; layouts, checkpoint,")
    helped = subprocess.run([*command, "manifest", "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "--ranks" in helped.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": (384,)}, "--hidden 384 must be a multiple of 256"),
        ({"num_key_value_heads": 1}, "--num_key_value_heads 1 must be even"),
        ({"peers": ("DDP",), "layouts": ("pp2",)}, "--peers 'DDP': --layouts pp2 have megapar, megapar, zb-h1"),
        ({"peers": ("shared memory TP",), "device": "cuda"}, "--peers 'shared memory TP' runs on a CPU only"),
        ({"num_experts": 7, "layouts": ("moe",)}, "--num_experts 7 must be even"),
        ({"num_hidden_layers": 2}, "--num_hidden_layers 2: a pipeline in V needs at least 4"),
        ({"global_batch_size": 2}, "--global_batch_size 2: a pipeline in V needs at least 4 micro-batches"),
    ],
)
def test_what_a_contender_cannot_train_is_refused(options, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        layouts.check_options(layouts.Options(**{**SIZES, **options}))


def test_layers_of_a_pipeline_in_v_balance_the_head():
    """The first rank has the head too, which costs as much as 1.4 of these layers: so it has fewer of them."""
    shape = ModelConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=704,
        vocab_size=4096,
    )
    assert v_partition(validate(Config(model=shape), 1).model, 2) == [2, 3, 2, 1]


@pytest.mark.slow
def test_a_profile_counts_operations_by_kind(capsys):
    kinds = {
        "aten::addmm_": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::cat": "copies, concatenations, lookups",
        "aten::_fused_adamw_": "optimizer and norm of gradients",
        "_NormBackward": cpu_profile.OTHER,
    }
    assert {name: cpu_profile.kind_of(name) for name in kinds} == kinds
    cpu_profile.main(cpu_profile.Arguments(hidden=256, num_hidden_layers=1, steps=1))
    rows = dict(re.findall(r"│ ([a-z][a-z ,]*?) +│ ([\d,]+) ", capsys.readouterr().out))
    assert set(rows) >= {*cpu_profile.KINDS, "all"} - {"optimizer and norm of gradients"}
    assert int(rows["all"].replace(",", "")) > int(rows["matrix products"].replace(",", "")) > 0


def test_schedules_are_timed_beside_their_simulation(tmp_path: Path):
    """Simulated times are those of the textbook: a fill of one forward, and m forwards and backwards."""
    file = tmp_path / "out.json"
    names = ("1f1b", "zb-h1", "zb-v")
    schedules.main(schedules.Arguments(pp=2, schedules=names, microbatches=(3,), milliseconds=4, steps=2, json=file))
    rows = json.loads(file.read_text())["rows"]
    assert [row["schedule"] for row in rows] == list(names)
    expected = [0.004 * (3 + 9), 0.004 * (1 + 9), 0.004 * (0.5 + 9)]
    assert [row["simulated_seconds"] for row in rows] == pytest.approx(expected)
    for row in rows:
        assert len(row["step_seconds"]) == 2
        # A sleep may take longer, and never less.
        assert min(row["step_seconds"]) >= row["simulated_seconds"]
        assert row["idle"] >= row["simulated_idle"]
