"""Frozen parameters, state other than parameters, and losses of stages before the last."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.registry import validate
from megapar_tools.plan.memory import reports
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_weights
from torch import Tensor, nn

from megapar.base.errors import CheckpointError, ConfigError
from megapar.base.grid import Grid
from megapar.checkpoint.fixed import fixed_slices
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader, load
from megapar.checkpoint.save import save, share
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec, add_loss
from megapar.declare.params import ZEROS, ParamSpec, cut, make_piece
from megapar.pipeline.runtime import PipelineRuntime
from megapar.step.step import train_step
from megapar.step.trainable import freeze, freeze_others
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support import close, program
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, Layout, make_context, make_state, micro_batches
from tests.support.options import load as load_options
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

FACTS: dict[str, Any] = {"step": 1, "consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}


def train_a_part(layout: Layout, patterns: tuple[str, ...], run_dir: Path, resume: bool = False) -> dict[str, Any]:
    """Two steps of training what matches `patterns` alone, saved; or one more step of what was saved."""
    config = layout.config("bf16" if layout.model is GPT else "fp32")
    config = replace(config, run_dir=str(run_dir), train=replace(config.train, trainable=patterns))
    if not resume:
        config = replace(config, checkpoint=replace(config.checkpoint, resume="none"))
    ctx = make_context(config)
    state, notes = start(config, ctx, build_stages(config, ctx))
    for step in [2] if resume else [0, 1]:
        result = train_step(state, micro_batches(config, state.ctx, step))
    trained = {slot.name for slot in state.grads.layout.slots}
    Saver(state, run_dir).save(state)
    return {"weights": held_weights(state), "loss": result.loss, "notes": notes, "trained": trained}


@pytest.mark.parametrize(
    ("layout", "patterns"),
    slow_but(
        [1, 2],
        [
            (Layout(LLAMA, tp=2, pp=2, micro_batch_size=3), ("layers.1.*", "layers.3.mlp.*", "norm.*")),
            # The first pipeline stage has nothing to train.
            (Layout(GPT, dp=2, pp=2, micro_batch_size=3), ("layers.3.*", "norm.*")),
            # Frozen weights stay whole on every rank.
            (Layout(LLAMA, dp=2, pp=2, micro_batch_size=3, zero_stage=3), ("layers.1.*", "layers.3.mlp.*", "norm.*")),
        ],
    ),
    ids=["llama-tp2-pp2", "gpt-bf16-dp2-pp2", "llama-dp2-pp2-zero3"],
)
def test_what_is_frozen_stays_and_the_rest_trains_as_in_one_process(
    tmp_path: Path, layout: Layout, patterns: tuple[str, ...]
) -> None:
    """Saved, and resumed in another layout."""
    single = Layout(layout.model, micro_batch_size=3)
    alone = train_a_part(single, patterns, tmp_path / "one")
    ranks = run_ranks(4, train_a_part, layout, patterns, tmp_path / "many")
    initial = make_state(single.config()).stages.values()
    before = logical.assemble([logical.held(initial, context.single())])
    found = logical.assemble([rank["weights"] for rank in ranks])
    rtol = 1e-5 if layout.model is LLAMA else 1e-2
    close.assert_close(found, logical.assemble([alone["weights"]]), rtol)
    for name, tensor in found.items():
        is_trained = any(fnmatchcase(name, pattern) for pattern in patterns)
        assert torch.equal(tensor.float(), before[name].to(tensor.dtype).float()) != is_trained, name
    assert (min(len(rank["trained"]) for rank in ranks) == 0) == (layout.model is GPT)
    assert ranks[0]["notes"][0].startswith("trains ")
    assert ranks[0]["notes"] == alone["notes"]
    again = train_a_part(single, patterns, tmp_path / "many", resume=True)
    on = train_a_part(single, patterns, tmp_path / "one", resume=True)
    assert again["loss"] == pytest.approx(on["loss"], rel=rtol)
    close.assert_close(logical.assemble([again["weights"]]), logical.assemble([on["weights"]]), rtol)


def test_a_resumption_that_trains_other_parameters_is_refused_with_both_values(tmp_path: Path) -> None:
    """Fewer, more or all; what the message advises then works."""
    layout = Layout(LLAMA, micro_batch_size=3)
    train_a_part(layout, ("layers.1.*", "norm.*"), tmp_path / "run")
    for patterns, words in ((("norm.*",), "norm.*"), (("layers.*", "norm.*"), "layers.* norm.*"), ((), "(empty)")):
        with pytest.raises(CheckpointError) as caught:
            train_a_part(layout, patterns, tmp_path / "run", resume=True)
        head, *lines = str(caught.value).splitlines()
        assert f"does not fit this run; train.trainable differs (layers.1.* norm.* | {words})" in head
        assert "--checkpoint.init_from" in head
        assert any("exp_avg" in line for line in lines)
    assert train_a_part(layout, ("layers.1.*", "norm.*"), tmp_path / "run", resume=True)["loss"] > 0
    config = layout.config("fp32")
    options = replace(config.checkpoint, init_from=str(tmp_path / "run/checkpoints/step_00000002"))
    train = replace(config.train, trainable=("norm.*",))
    config = replace(config, run_dir=str(tmp_path / "other"), train=train, checkpoint=options)
    fresh = make_state(config)
    start(config, fresh.ctx, fresh.stages)


def test_a_resumption_that_balances_experts_otherwise_is_refused_with_both_values(tmp_path: Path) -> None:
    """The weights fit, so a new run can start from them."""
    layout = Layout(MIXTRAL, micro_batch_size=6)
    train_a_part(layout, (), tmp_path / "run")
    other = replace(layout, model=replace(MIXTRAL, moe=replace(MIXTRAL.moe, balance="sequence")))
    with pytest.raises(CheckpointError, match=r"; model\.moe\.balance differs \(global \| sequence\).*init_from"):
        train_a_part(other, (), tmp_path / "run", resume=True)
    config = other.config("fp32")
    options = replace(config.checkpoint, init_from=str(tmp_path / "run/checkpoints/step_00000002"))
    config = replace(config, run_dir=str(tmp_path / "other"), checkpoint=options)
    fresh = make_state(config)
    start(config, fresh.ctx, fresh.stages)


def test_another_reason_than_the_trained_parameters_is_not_blamed_on_them(tmp_path: Path) -> None:
    layout = Layout(LLAMA, micro_batch_size=3)
    train_a_part(layout, ("norm.*",), tmp_path)
    wider = replace(layout, model=replace(LLAMA, intermediate_size=LLAMA.intermediate_size + 12))
    with pytest.raises(CheckpointError, match=r"does not fit this run \(checkpoint \| run\)") as caught:
        train_a_part(wider, ("norm.*",), tmp_path, resume=True)
    assert "trainable" not in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layers.9.*", "norm.*"), "layers.9.*: matches no parameter"),
        (("layers.?.attention.q.*",), "layers.?.attention.q.*: matches a part of"),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused_by_name(patterns: tuple[str, ...], message: str) -> None:
    state = make_state(Layout(LLAMA).config())
    with pytest.raises(ConfigError) as caught:
        freeze_others(state.stages.values(), patterns, state.ctx)
    assert message in str(caught.value)


def freeze_one_expert(patterns: tuple[str, ...], layout: Layout) -> list[str]:
    """What `freeze_others` says on a rank."""
    state = make_state(layout.config())
    try:
        return freeze_others(state.stages.values(), patterns, state.ctx)
    except ConfigError as error:
        return [str(error)]


def test_experts_of_a_layer_are_trained_all_or_none_in_every_layout() -> None:
    """Fault moe-rank-without-tokens-hangs: a rank without a trained expert would leave the others alone in backward.

    With 5 experts on 8 ranks each expert has a parameter of its own.
    """
    one = ("layers.*.mlp.experts.0.*",)
    everywhere = Layout(MIXTRAL, tp=2, dp=4, ep=8, etp=1)
    said = freeze_one_expert(one, Layout(MIXTRAL))
    assert "matches a part of layers.0.mlp.experts.0.down.weight to layers.0.mlp.experts.4.down.weight" in said[0]
    assert run_ranks(8, freeze_one_expert, one, everywhere) == [said] * 8
    all_experts = ("layers.1.mlp.experts.*", "layers.*.mlp.router.*")
    said = freeze_one_expert(all_experts, Layout(MIXTRAL))
    model = MIXTRAL.moe
    experts = 3 * MIXTRAL.hidden_size * model.moe_intermediate_size * model.num_experts
    routers = 2 * MIXTRAL.hidden_size * model.num_experts
    assert said[0].startswith(f"trains {experts + routers:,} of ")
    assert run_ranks(8, freeze_one_expert, all_experts, everywhere) == [said] * 8
    # Experts have other numbers of replicas than the rest.
    assert run_ranks(4, freeze_one_expert, all_experts, Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=1)) == [said] * 4


def test_a_dry_run_refuses_what_a_run_would() -> None:
    config = Layout(LLAMA, pp=2).config()
    config = replace(config, train=replace(config.train, trainable=("layers.9.*",)))
    with pytest.raises(ConfigError, match=r"layers\.9\.\*: matches no parameter"):
        reports(config, PARTS)


def test_what_the_model_itself_has_frozen_stays_frozen() -> None:
    stages = make_state(Layout(LLAMA).config()).stages
    norm = stages[0].norm.weight
    norm.requires_grad_(False)
    freeze(stages.values(), ())
    freeze(stages.values(), ("norm.*", "head.*"))
    trained = [param for param in stages[0].parameters() if param.requires_grad]
    assert not norm.requires_grad
    assert [param.spec.name for param in trained] == ["head.weight"]


class Balanced(nn.Module):
    """A buffer as state: cut over tp, the same on all replicas."""

    def __init__(self, ctx: context.ParallelContext, values: Tensor):
        super().__init__()
        piece = make_piece("bias", (10,), {0: cut(10, ctx.tp)})
        buffer = values[piece.held.slices].clone()
        buffer.spec = ParamSpec((piece,), ZEROS, decay=False, grad_axis=ctx.grad)  # type: ignore[attr-defined]
        self.register_buffer("bias", buffer)


def save_a_buffer(root: Path) -> str:
    ctx = context.create(Grid(tp=2, dp=2))
    module = Balanced(ctx, torch.arange(10.0))
    return str(save(root, slices=share(fixed_slices([module], to_save=True)), ctx=ctx, replicated=False, **FACTS))


def test_state_that_is_no_parameter_is_saved_and_loads_in_another_layout(tmp_path: Path) -> None:
    path = Path(run_ranks(4, save_a_buffer, tmp_path)[0])
    manifest = read_manifest(path)
    assert list(manifest.tensors) == ["buffer.bias"]
    with Reader(path, manifest) as reader:
        assert torch.equal(reader.tensor("buffer.bias"), torch.arange(10.0))
    module = Balanced(context.single(), torch.zeros(10))
    load(path, slices=fixed_slices([module]), ctx=context.single(), model_config={})
    assert torch.equal(module.bias, torch.arange(10.0))


class WithOwnLoss(PipelineStage):
    """Three stages in one: the middle one adds a loss of its own."""

    def __init__(self, stage: int):
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 6).double() * (stage + 1))

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return (TensorSpec(tuple(batch.tokens_bs.shape), torch.float64),) if self.stage else ()

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        y = self.weight * (batch.tokens_bs.double() if x is None else x)
        if self.stage == 1:
            y = add_loss(y, own_loss(self.weight, batch).float(), batch, "own")
        return y if self.stage < 2 else (y.tanh() * batch.weights_bs).sum()


def own_loss(weight: Tensor, batch: MicroBatch) -> Tensor:
    return (weight.square() * batch.weights_bs.double().sum(0)).sum()


def test_a_stage_before_the_last_trains_on_a_loss_of_its_own() -> None:
    """Its gradient has the scale of the step's loss, whatever it is."""
    stages = {number: WithOwnLoss(number) for number in range(3)}
    runtime = PipelineRuntime(stages, context.single(), "gpipe", 3)
    tokens = torch.arange(24).view(4, 6) % 5
    weights = 0.5 + torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    batches = [
        MicroBatch.of_samples(tokens[i : i + 2], tokens[i : i + 2], weights[i : i + 2], torch.arange(2)) for i in (0, 2)
    ]
    runtime.step(batches, scale=0.125)
    expected = {number: WithOwnLoss(number) for number in range(3)}
    for batch in batches:
        x: Tensor | None = None
        for stage in expected.values():
            x = stage(x, batch)
        assert x is not None
        (0.125 * (x + own_loss(expected[1].weight, batch))).backward()
    for number, stage in stages.items():
        torch.testing.assert_close(stage.weight.grad, expected[number].weight.grad, rtol=1e-6, atol=0)


def test_metrics_and_plan_count_no_gradient_of_frozen_weights(tmp_path: Path) -> None:
    patterns = ("layers.3.*", "norm.*", "head.*")
    flags = ("--train.steps", "2", *program.FOUR_LAYERS, "--train.trainable", *patterns)
    ended = program.run(*flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    config = validate(load_options(["--config", str(tmp_path / "run/config.toml")]).config, 1)
    whole = WholeModel(config.model)
    flops = whole.flops_per_token(config.train.seq_length, patterns)
    assert flops < 0.75 * whole.flops_per_token(config.train.seq_length)
    for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        assert line["tflops_per_device"] * line["step_seconds"] * 1e12 == pytest.approx(flops * line["tokens"])
    planned = program.run(*flags, "--dry_run", cwd=tmp_path)
    tokens = config.train.global_batch_size * config.train.seq_length
    assert f"{flops * tokens / 1e15:,.3g} PFLOP" in planned.out
