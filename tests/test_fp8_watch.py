"""log.fp8_every: what FP8 loses is counted once, over all ranks, and changes nothing; what grows is told."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megapar_kernels import quantize
from megapar_tools.verify.logical import held_weights

from megapar.config.options import LogConfig
from megapar.linear.fp8_products import Fp8Products
from megapar.linear.fp8_watch import SHARES, TENSORS, ProductWatch, by_product, rates
from megapar.observe import fp8_growth
from megapar.observe.fp8_growth import Fp8Growth, line_of
from megapar.step import step as steps
from megapar.step.state import TrainState
from megapar.step.step import train_step
from tests.support import program, tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import LATENT, LENGTH, MIXTRAL, SAMPLES, Layout, alone, make_state, micro_batches, of
from tests.support.sweeps import slow_but

WIDE = {"num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.1}
LLAMA = tiny_models.small("llama", 256, 2, 256, **WIDE)
EXPERTS = replace(
    of(MIXTRAL, num_experts=2, num_experts_per_tok=1, norm_topk_prob=False, moe_intermediate_size=256),
    hidden_size=256,
    intermediate_size=256,
    **WIDE,
)
WHOLE = replace(
    LATENT,
    hidden_size=256,
    intermediate_size=256,
    head_dim=64,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
    moe=replace(LATENT.moe, moe_intermediate_size=128),
)


def in_fp8(model: Any, **options: Any) -> Layout:
    return Layout(model, fp8="blocks", **options)


def state_of(layout: Layout, every: int) -> TrainState:
    return make_state(replace(layout.config(), log=LogConfig(fp8_every=every)))


def step_of(layout: Layout, to_first: bool = False) -> dict[str, Any]:
    """What a watched step counts, and whether it computes what it does without a watch. `to_first`: all tokens are of
    expert 0."""
    shown = []
    for every in (1, 0):
        state = state_of(layout, every)
        if to_first:
            for name, param in (pair for stage in state.stages.values() for pair in stage.named_parameters()):
                if name.endswith("router.weight"):
                    param.data.zero_()
        result = train_step(state, micro_batches(state.config, state.ctx, 0))
        state.weights.wait()
        shown.append((result, held_weights(state)))
    (watched, weights), (plain, plain_weights) = shown
    assert not plain.fp8
    same = (watched.loss, watched.grad_norm) == (plain.loss, plain.grad_norm)
    same = same and all(torch.equal(a.values, b.values) for a, b in zip(weights, plain_weights, strict=True))
    return {"fp8": watched.fp8, "same": same}


@cache
def reference(layout: Layout) -> dict[str, Any]:
    return step_of(layout)


def sums_of_step(layout: Layout) -> dict[str, list[float]]:
    """What one process counts in a step, by product."""
    state = state_of(layout, 1)
    watch = steps.begin_watch(state)
    assert watch is not None
    _, batches = steps.enter_scope(state, micro_batches(state.config, state.ctx, 0))
    divisors = steps.count_divisors(state, batches, SAMPLES)
    steps.run_microbatches(state, batches, SAMPLES, divisors, 1.0)
    state.grads.finish()
    names = state.stages.declared.fp8_products
    return dict(zip(names, watch.end().view(len(names), -1).tolist(), strict=True))


# What is counted


def test_numbers_are_counted_by_their_codes() -> None:
    """In a group whose largest number is 448: what becomes 0, a denormal code, a normal one, and 448."""
    x = torch.zeros(1, 128)
    x[0, :8] = torch.tensor([448.0, -440.0, 2.0**-11, -(2.0**-10), 2.0**-9, -(2.0**-7), 2.0**-6, 1.0])
    watch = ProductWatch(["layers.0.mlp.gate", "layers.0.mlp.up"])
    assert watch.name == "layers.0.mlp.gate|up"
    products = Fp8Products(torch.float32, watch=watch)
    products.convert_gradient(x)  # before `begin` nothing counts
    watch.begin(x.device)
    products.convert_gradient(x)
    products.convert_gradient(x.expand(2, 3, 128))
    found = by_product([watch.name], rates(watch.end()).tolist())[watch.name]
    # 2^-10 lies between 0 and the least code, 2^-9, and the code of 0 is even.
    assert found["gradient"] == {"flushed": 2 / 8, "denormal": 2 / 8, "largest": 2 / 8}
    assert found["x"] == dict.fromkeys(SHARES)
    assert found["decibels"] is None
    products.convert_gradient(x)
    watch.begin(x.device)
    assert not watch.end().any()


def test_the_noise_is_that_of_sampled_rows_with_the_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 300, 256, generator=generator), torch.randn(128, 256, generator=generator)
    watch = ProductWatch(["layers.0.mlp.down"])
    products = Fp8Products(torch.float32, watch=watch)
    watch.begin(x.device)
    for _ in range(2):  # the second micro-batch is not sampled
        products.convert_input(x)
        products.note_weight(weight, products.convert_weight(weight))
    sums = watch.end()
    rows = x.view(600, 256)[::4][:128]
    restored = quantize.restore_rows(quantize.quantize_rows(rows), torch.float32)
    matrix = quantize.restore_blocks(quantize.quantize_blocks(weight), torch.float32)
    exact = rows.double() @ weight.double().t()
    noise = restored.double() @ matrix.double().t() - exact
    torch.testing.assert_close(sums[-2:], torch.stack([exact.square().sum(), noise.square().sum()]), rtol=1e-5, atol=0)
    assert 25 < by_product([watch.name], rates(sums).tolist())[watch.name]["decibels"] < 32
    assert sums[4] == weight.numel(), "the weight is counted once"


@pytest.mark.parametrize("recompute", slow_but([2], ["selective", "light", "full", "all_but_attention"]))
@pytest.mark.parametrize("model", slow_but([1], [LLAMA, EXPERTS]), ids=["llama", "experts"])
def test_a_recomputed_pass_counts_nothing(model: Any, recompute: str) -> None:
    once = sums_of_step(in_fp8(model, micro_batch_size=6))
    assert sums_of_step(in_fp8(model, micro_batch_size=6, recompute=recompute)) == once
    tokens = SAMPLES * LENGTH
    for matrix, sums in once.items():
        of_x, of_weight, of_gradient = sums[:12:4]
        outputs = {"q|k|v": 768, "gate|up": 512}.get(matrix.rpartition(".")[2], 256)
        experts = 2 if "experts" in matrix else 1
        assert (of_x, of_weight) == (256 * tokens, 256 * outputs * experts), matrix
        # Tokens without a target have no gradient.
        assert 0.9 * outputs * tokens < of_gradient <= outputs * tokens, matrix


# Layouts

LAYOUTS = [
    in_fp8(LLAMA, tp=2, pp=2, sequence_parallel=True, recompute="full", schedule="zb-h1", micro_batch_size=3),
    in_fp8(LLAMA, tp=2, tp_overlap_chunks=2),
    in_fp8(LLAMA, dp=2, zero_stage=3, recompute="light", micro_batch_size=2),
    in_fp8(LLAMA, dp=2, pp=2, zero_stage=2, vpp=1, schedule="1f1b"),
    in_fp8(LLAMA, tp=2, sequence_parallel=True, tp_overlap_chunks=2, recompute="all_but_attention"),
    in_fp8(LLAMA, pp=2, schedule="dualpipe-v", vpp=2, fp8_skip=("0", "*.mlp.down")),
    in_fp8(EXPERTS, tp=2, dp=2, ep=2, etp=2, recompute="full"),
    in_fp8(of(EXPERTS, num_experts=4), dp=2, ep=2, ep_overlap_chunks=2, zero_stage=3),
    in_fp8(WHOLE, tp=2, dp=2, ep=2, etp=1),
    in_fp8(LLAMA, dp=2, micro_batch_size=12),  # one rank has no micro-batch
]


def name(layout: Layout) -> str:
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "dp", "ep", "zero_stage") if getattr(layout, key) > 1}
    return f"{layout.model.family} " + " ".join(f"{key}{size}" for key, size in sizes.items()) + layout.recompute


def check(found: Mapping[str, Any], expected: Mapping[str, Any], *, gathers_codes: bool) -> None:
    """Of products of activations the last bits differ between layouts, and so do a few codes.

    Where ZeRO-3 gathers the codes of weights, nobody counts them, and the noise is that of inputs alone: half of it.
    """
    assert list(found) == list(expected)
    for matrix, row in expected.items():
        decibels = row["decibels"] + (3.0 if gathers_codes else 0.0)
        assert found[matrix]["decibels"] == pytest.approx(decibels, abs=0.5), matrix
        for tensor in TENSORS:
            if tensor == "weight" and gathers_codes:
                assert set(found[matrix][tensor].values()) == {None}
                continue
            most = 0.0 if tensor == "weight" else 1e-4
            assert found[matrix][tensor] == pytest.approx(row[tensor], rel=0, abs=most), (matrix, tensor)


@pytest.mark.parametrize("layout", slow_but([0], LAYOUTS), ids=name)
def test_numbers_are_those_of_one_process_and_change_nothing(layout: Layout) -> None:
    expected = reference(alone(layout))
    assert expected["same"]
    assert any(row["gradient"]["denormal"] > 1e-3 for row in expected["fp8"].values())
    for rank in run_ranks(layout.world, step_of, layout):
        assert rank["same"], "watching changes what is computed"
        check(rank["fp8"], expected["fp8"], gathers_codes=layout.zero_stage == 3)


def test_a_rank_whose_experts_get_no_row_has_nothing_to_add() -> None:
    """All tokens are of expert 0, so expert 1 on the other rank multiplies nothing but sampled tokens of its rank."""
    first, second = run_ranks(2, step_of, in_fp8(EXPERTS, dp=2, ep=2, micro_batch_size=3), True)
    assert first["fp8"] == second["fp8"]
    assert first["same"]
    assert second["same"]
    products = {f"layers.{n}.{part}" for n in (0, 1) for part in ("attention.q|k|v", "attention.o")}
    products |= {f"layers.{n}.mlp.experts.{part}" for n in (0, 1) for part in ("gate|up", "down")}
    assert set(first["fp8"]) == products
    assert all(25 < row["decibels"] < 32 for row in first["fp8"].values())


# What is told


def table(decibels: float | None = 28.0, **flushed: float) -> dict[str, Any]:
    shares = {tensor: dict.fromkeys(SHARES, flushed.get(tensor, 0.0)) for tensor in TENSORS}
    return {"layers.0.attention.q|k|v": {"decibels": decibels, **shares}}


def told(folder: Path, *tables: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    ctx = SimpleNamespace(world=SimpleNamespace(first=True))
    seen: Any = SimpleNamespace(state=SimpleNamespace(ctx=ctx), run_dir=folder)
    growth = Fp8Growth(seen, lambda event, text, **fields: found.append((text, fields)))
    for number, each in enumerate(tables, 1):
        result: Any = SimpleNamespace(step=100 * number)
        growth.after_line(result, line_of(each))
        growth.after_line(result, {"step": 100 * number + 1})
    return found


def test_a_share_that_grows_and_a_product_that_loses_decibels_are_told_once(tmp_path: Path) -> None:
    grows = [table(x=0.004), table(x=0.011), table(x=0.02), table(x=0.03), table(x=0.04)]
    ((text, fields),) = told(tmp_path, *grows)
    assert text == (
        "step 300: 2.00% of the inputs of layers.0.attention.q|k|v become zero, and 0.40% did at the first watch; "
        "train.fp8_skip layers.0.attention.q keeps it out of FP8"
    )
    assert fields == {
        "step": 300, "matrix": "layers.0.attention.q|k|v", "what": "x", "first": 0.004, "now": 0.02, "others": []
    }  # fmt: skip
    ((text, fields),) = told(tmp_path, table(28.0), table(24.9), table(28.0), table(24.0), table(23.0))
    assert text.startswith("step 500: the product layers.0.attention.q|k|v is 23.0 dB above its noise, and was 28.0")
    assert not told(tmp_path, table(gradient=0.02), *[table(gradient=0.039)] * 3), "less than twice as many"
    assert not told(tmp_path, table(weight=0.0), *[table(weight=0.009)] * 3), "few"
    assert not told(tmp_path, table(None), *[table(25.1)] * 3, table(None))


def test_several_products_that_grow_are_one_event_with_the_worst(tmp_path: Path) -> None:
    first, later = ({f"layers.{n}.mlp.down": table(x=n * share)["layers.0.attention.q|k|v"] for n in range(1, 4)}
                    for share in (0.001, 0.01))  # fmt: skip
    ((text, fields),) = told(tmp_path, first, later, later)
    assert (fields["matrix"], fields["others"]) == ("layers.3.mlp.down", ["layers.2.mlp.down"])
    assert "and 1 other product loses more too" in text


@pytest.mark.parametrize("noise", ["", '{"step": 2, "fp8": {"layers.0.mlp.down": 7}}', '"fp8": {', "[" * 100_000])
def test_a_resumed_run_compares_with_the_first_watch_of_the_run(noise: str, tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 3.0}, {"step": 2} | line_of(table(x=0.004)), {"step": 4} | line_of(table(x=0.02))]
    texts = [*map(json.dumps, lines[:1]), noise, *map(json.dumps, lines[1:])]
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    found = told(tmp_path, table(x=0.02), table(x=0.02))
    if '{"step": 2' in noise:
        assert not found, "the first watch of this file says nothing of the product"
    else:
        assert [fields["first"] for _, fields in found] == [0.004]


SIZES = (
    *("--model.hidden_size", "256", "--model.intermediate_size", "256", "--model.head_dim", "64"),
    *("--train.fp8", "blocks", "--log.fp8_every", "2", "--train.steps", "5", "--log.no-tensorboard"),
)


def test_a_run_records_what_fp8_loses_and_tells_what_grows(tmp_path: Path) -> None:
    def grow() -> None:
        fp8_growth._DECIBELS = -100.0

    run = program.run(*SIZES, "--checkpoint.no-save_last", cwd=tmp_path, plant=grow)
    assert run.code == 0, run.err
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "fp8" in line] == [2, 4]
    line = lines[3]
    row = line["fp8"]["layers.1.mlp.gate|up"]
    assert line["fp8_decibels_min"] <= row["decibels"]
    assert line["fp8_flushed_max"]["gradient"] >= row["gradient"]["flushed"]
    events = [json.loads(text) for text in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "fp8"]
    assert (event["step"], event["what"], len(event["others"])) == (4, "decibels", len(line["fp8"]) - 1)
    assert f"fp8: step 4: the product {event['matrix']} is " in run.out
    page = (tmp_path / "run/report.html").read_text()
    assert "FP8 loses more in" in page
    assert "noisiest product in FP8" in page


def test_without_fp8_there_is_nothing_to_watch(tmp_path: Path) -> None:
    run = program.run("--log.fp8_every", "2", cwd=tmp_path)
    assert (run.code, run.err.strip()) == (
        2,
        "ConfigError: log.fp8_every=2, train.fp8=none: nothing is in FP8; set fp8 blocks, or leave it at 0",
    )
