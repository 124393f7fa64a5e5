"""The model families in one process: against plain PyTorch, published sizes and counted FLOPs."""

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.families.qwen3_moe import Qwen3MoeExperts
from megapar_models.registry import FAMILIES, presets, validate
from megapar_models.rotary import RopeScaling
from megapar_tools.verify import logical
from torch.utils.flop_counter import FlopCounterMode

from megapar.config.model_options import MoEConfig
from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from tests.support import close, reference_models, tiny_models
from tests.support.flat import flatten
from tests.support.options import load
from tests.support.sweeps import one_of_each, slow_but

# Wavelengths of head_dim 12 and theta 1e4 are 6, 29, 135, ... positions: kept, blended and stretched ones.
LLAMA3 = RopeScaling("llama3", factor=8.0, original_max_position_embeddings=32)
YARN = RopeScaling("yarn", factor=8.0, original_max_position_embeddings=32)
YARN_MSCALE = replace(YARN, beta_fast=4.0, beta_slow=0.05, mscale=0.7, mscale_all_dim=1.9, truncate=False)
# Without losses of balance, which plain versions do not have.
MOE = MoEConfig(5, 2, moe_intermediate_size=24, balance="none")
SOME_DENSE = Qwen3MoeExperts(5, 2, moe_intermediate_size=24, balance="none")
ROUTED_AS_DEEPSEEK = replace(MOE, num_experts=6, scoring_func="sigmoid", routed_scaling_factor=2.5, n_group=3)
ROUTED_AS_DEEPSEEK = replace(ROUTED_AS_DEEPSEEK, topk_group=2, shared_expert_intermediate_size=20)
MODELS = {
    "llama": tiny_models.model("llama"),
    "tied": tiny_models.model("llama", tie_word_embeddings=True),
    "grouped": tiny_models.model("llama", num_key_value_heads=2, head_dim=10),
    "one key/value head": tiny_models.model("llama", num_key_value_heads=1, attention_bias=True),
    "q/k norm and biases": tiny_models.model("llama", num_key_value_heads=2, qk_norm=True, attention_bias=True),
    "linear rope": tiny_models.model("llama", rope_scaling=RopeScaling("linear", factor=4.0)),
    "llama3 rope": tiny_models.model("llama", rope_scaling=LLAMA3),
    "yarn rope": tiny_models.model("llama", rope_scaling=YARN),
    "yarn rope, all its options": tiny_models.model("llama", rope_scaling=YARN_MSCALE),
    "rope base": tiny_models.model("llama", rope_theta=500.0),
    "gated gelu": tiny_models.model("llama", hidden_act="gelu_pytorch_tanh"),
    "gated relu2": tiny_models.model("llama", hidden_act="relu2"),
    "gpt": tiny_models.model("gpt"),
    "gpt relu2": tiny_models.model("gpt", hidden_act="relu2"),
    "mixtral": tiny_models.model("mixtral", moe=MOE, num_key_value_heads=2),
    "mixtral, groups and a shared expert": tiny_models.model("mixtral", moe=ROUTED_AS_DEEPSEEK),
    "qwen3_moe": tiny_models.model(
        "qwen3_moe",
        qk_norm=True,
        moe=replace(SOME_DENSE, norm_topk_prob=False, mlp_only_layers=(1,), num_experts_per_tok=3),
    ),
    "qwen3_moe, a gated shared expert": tiny_models.model(
        "qwen3_moe",
        moe=replace(SOME_DENSE, shared_expert_intermediate_size=20, shared_expert_gate=True),
    ),
    "gpt tied": tiny_models.model("gpt", tie_word_embeddings=True),
}


def preset(name: str, **changes: Any) -> Any:
    """A preset as a run would see it, with derived values filled in."""
    model = load(["--config", str(presets()[name])]).config.model
    return validate(Config(model=replace(model, **changes)), 1).model


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_plain_pytorch(name: str) -> None:
    config = tiny_models.config(MODELS[name])
    stage = tiny_models.build(config, context.single())
    ctx = context.single()
    batches = [tiny_models.batch(config.model, seed) for seed in (0, 1)]
    losses = [stage(None, batch) for batch in batches]
    (sum(losses) / 100).backward()
    loss, expected = reference_models.loss_and_gradients(
        config.model, tiny_models.random_tensors(config.model), batches, scale=1 / 100
    )
    assert sum(losses).item() / 100 == pytest.approx(loss, rel=1e-6)
    close.assert_close(logical.assemble([logical.held([stage], ctx, logical.gradients, unsummed=True)]), expected)


@pytest.mark.parametrize("name", ["grouped", "q/k norm and biases", "gpt tied"])
def test_packed_documents_train_as_if_each_were_alone(name: str) -> None:
    """Two samples of three and two documents against plain PyTorch on five documents: attention and positions start
    anew at each, rotary ones by their differences."""
    config = tiny_models.config(MODELS[name])
    ctx = context.single()
    batch = tiny_models.batch(config.model)
    lengths = ((5, 1, tiny_models.LENGTH - 6), (20, tiny_models.LENGTH - 20))
    starts = torch.tensor([0, *lengths[0], *lengths[1]]).cumsum(0).int()
    stage = tiny_models.build(config, ctx)
    loss = stage(None, replace(batch, starts=starts))
    loss.backward()
    alone = []
    for sample, parts in enumerate(lengths):
        rows = (x[sample : sample + 1].split(parts, 1) for x in (batch.tokens_bs, batch.targets_bs, batch.weights_bs))
        alone += [MicroBatch.of_samples(*row, batch.sample_ids_b[:1]) for row in zip(*rows, strict=True)]
    tensors = tiny_models.random_tensors(config.model)
    expected, gradients = reference_models.loss_and_gradients(config.model, tensors, alone)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    close.assert_close(logical.assemble([logical.held([stage], ctx, logical.gradients, unsummed=True)]), gradients)


def test_z_loss_is_part_of_the_training_loss_alone() -> None:
    """And of its gradient; evaluation measures cross entropy."""
    config = tiny_models.config(MODELS["grouped"], z_loss=0.1)
    stage, ctx, batch = tiny_models.build(config, context.single()), context.single(), tiny_models.batch(config.model)
    loss = stage(None, batch)
    loss.backward()
    tensors = tiny_models.random_tensors(config.model)
    expected, gradients = reference_models.loss_and_gradients(config.model, tensors, [batch], z_loss=0.1)
    plain, _ = reference_models.loss_and_gradients(config.model, tensors, [batch])
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    close.assert_close(logical.assemble([logical.held([stage], ctx, logical.gradients, unsummed=True)]), gradients)
    assert plain < 0.9 * expected
    assert stage.eval()(None, batch).item() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", ["grouped", "q/k norm and biases", "gpt tied"])
def test_bf16_gradients_equal_plain_pytorch_to_bf16_rounding(name: str) -> None:
    """The reference runs in fp64 on the same bf16 weights. A rounding to bf16 errs by up to 2^-9; some tens of them, of
    both signs, lie between loss and farthest weight: 2^-4 holds also for key biases, although their terms nearly
    cancel."""
    config = tiny_models.config(MODELS[name], precision="bf16")
    ctx = context.single()
    stage = tiny_models.build(config, ctx)
    batch = tiny_models.batch(config.model)
    buffer = flatten([stage], ctx, zero_stage=0, bucket_mb=1.0, overlap=True)
    stage(None, batch).backward()
    buffer.gradients.finish()
    rounded = {n: t.bfloat16() for n, t in tiny_models.random_tensors(config.model).items()}
    _, expected = reference_models.loss_and_gradients(config.model, rounded, [batch])
    found = logical.assemble([logical.held([stage], ctx, logical.main_gradients)])
    if "positions.weight" in expected:
        # Without a rotation, a key bias adds one number to all scores of a query. Softmax does not see it, so that the
        # gradient is zero but for rounding.
        for key_bias in [n for n in expected if n.endswith(".k.bias")]:
            del found[key_bias], expected[key_bias]
    close.assert_close(found, expected, rtol=2**-4)
    for projection in [n for n in found if n.startswith("layers.") and found[n].dim() == 2]:
        exact = found[projection]
        assert not torch.equal(exact, exact.bfloat16().float()), f"{projection}: rounded to bf16 before it was added"


def family_of(preset: Path) -> str:
    return str(tomllib.loads(preset.read_text())["model"]["family"])


OF_FAMILIES = slow_but(one_of_each(map(family_of, presets().values()))[::2], presets())
MIXTURES = {name: path for name, path in presets().items() if "[model.moe]" in path.read_text()}


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    """The first line of a preset states the number published by its source."""
    first_line = presets()[name].read_text().splitlines()[0]
    published = re.search(r": ([\d,]+) parameters", first_line)
    assert published is not None, first_line
    assert WholeModel(preset(name)).parameters() == int(published[1].replace(",", ""))


@pytest.mark.parametrize("name", slow_but(one_of_each(map(family_of, MIXTURES.values()))[::3], MIXTURES))
def test_presets_of_mixtures_have_the_published_number_of_active_parameters(name: str) -> None:
    """The first line of a preset states it, as its source does: cut or rounded after the last digit."""
    published = re.search(r", (\d+)(\.\d)?B active", presets()[name].read_text().splitlines()[0])
    assert published is not None
    stated = float(published[1] + (published[2] or ""))
    assert abs(WholeModel(preset(name)).active_parameters() / 1e9 - stated) < (0.1 if published[2] else 1)


def test_parameters_of_mistrals_first_version() -> None:
    """It has another vocabulary than the preset of version 0.3."""
    assert WholeModel(preset("mistral-7b", vocab_size=32000)).parameters() == 7_241_732_096


# No public copy of a config.json with all values of their models was found.
WITHOUT_PRESETS = {"flint", "granite_swa", "granitemoe_swa"}


def test_every_family_has_presets() -> None:
    assert len(presets()) > 14
    assert {family_of(path) for path in presets().values()} == FAMILIES.keys() - WITHOUT_PRESETS


@pytest.mark.parametrize("name", ["grouped", "q/k norm and biases", "gpt tied", "mixtral", "qwen3_moe"])
def test_flops_per_token_are_those_of_the_plain_model(name: str) -> None:
    """The plain model computes all s^2 scores; causal attention needs, and flops_per_token counts, half of them."""
    model = tiny_models.config(MODELS[name]).model
    batch = tiny_models.batch(model)
    with FlopCounterMode(display=False) as counter:
        reference_models.loss_and_gradients(model, tiny_models.random_tensors(model), [batch])
    width = model.num_attention_heads * model.head_dim
    not_needed = 6 * tiny_models.LENGTH * width * model.num_hidden_layers
    per_token = WholeModel(model).flops_per_token(tiny_models.LENGTH)
    assert counter.get_total_flops() == batch.tokens_bs.numel() * (per_token + not_needed)


@pytest.mark.parametrize("name", ["grouped", "gpt tied"])
@pytest.mark.parametrize("patterns", [("layers.1.*", "norm.*"), ("norm.*",), ("layers.0.*",), ("embedding.*",)])
def test_flops_per_token_with_frozen_parameters_are_those_of_the_plain_model(
    name: str, patterns: tuple[str, ...]
) -> None:
    """As above."""
    model = tiny_models.config(MODELS[name]).model
    batch = tiny_models.batch(model)
    tensors = tiny_models.random_tensors(model)
    for tensor_name, tensor in tensors.items():
        tensor.requires_grad_(any(fnmatchcase(tensor_name, pattern) for pattern in patterns))
    with FlopCounterMode(display=False) as counter:
        reference_models.loss(model, tensors, batch).backward()
    found = counter.get_total_flops() / batch.tokens_bs.numel()
    width = model.num_attention_heads * model.head_dim
    first = 1 if patterns[0].startswith("layers.1") else 0
    layers_back = 0 if patterns == ("norm.*",) else model.num_hidden_layers - first
    not_needed = 2 * tiny_models.LENGTH * width * (model.num_hidden_layers + 2 * layers_back)
    counted = WholeModel(model).flops_per_token(tiny_models.LENGTH, patterns)
    assert found == counted + not_needed


def test_flops_per_token_with_frozen_parameters_by_hand() -> None:
    """The last layer and the head of Llama 2 7B: forward everywhere; weights' gradients of one layer and the head."""
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    head = 32000 * 4096
    scores = 2 * 4096 * 4096  # forward of one layer: s n d, for both products, of which half is computed
    forward = 2 * (32 * layer + head) + 32 * scores
    backward = 4 * (layer + head) + 2 * scores
    mlp = 3 * 4096 * 11008
    whole = WholeModel(preset("llama2-7b"))
    assert whole.flops_per_token(4096, ("layers.31.*", "norm.*", "head.*")) == forward + backward
    assert whole.flops_per_token(4096, ("head.*",)) == forward + 2 * head
    # The attention of a layer whose MLP alone trains counts as if its inputs needed gradients too.
    only_mlp = forward + 2 * (layer + head) + 2 * mlp + 2 * scores
    assert whole.flops_per_token(4096, ("layers.31.mlp.*",)) == only_mlp


def test_flops_per_token_of_llama_7b_by_hand() -> None:
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    assert WholeModel(preset("llama2-7b")).flops_per_token(4096) == 6 * matrices + 32 * (12 * 4096 * 4096) // 2


@pytest.mark.parametrize("vpp", [1, 2])
def test_tied_embedding_on_one_rank_is_one_parameter(vpp: int) -> None:
    """Fault tied-on-one-rank: one object with one place in the buffers, with a gradient summed over both uses, and
    counted once."""
    config = tiny_models.config(MODELS["gpt tied"])
    config = replace(config, parallel=replace(config.parallel, vpp=vpp))
    stages = build_stages(config, context.single())
    logical.fill(stages.values(), tiny_models.random_tensors(config.model))
    assert stages[vpp - 1].head is stages[0].embedding_weight()
    buffer = flatten(list(stages.values()), context.single(), zero_stage=1, bucket_mb=1.0, overlap=True)
    assert [slot.name for slot in buffer.slots].count("embedding.weight") == 1
    assert sum(p.numel() for p in logical.unique_parameters(stages.values())) == (
        WholeModel(config.model).parameters() + (256 - 131) * 48
    )
    batch = tiny_models.batch(config.model)
    x = None
    for stage in stages.values():
        x = stage(x, batch)
    x.backward()
    buffer.gradients.finish()
    _, expected = reference_models.loss_and_gradients(config.model, tiny_models.random_tensors(config.model), [batch])
    found = logical.held(stages.values(), context.single(), logical.main_gradients)
    close.assert_close(logical.assemble([found]), expected)
    norm = sum(t.double().pow(2).sum() for t in expected.values()).sqrt()
    owned = torch.cat([buffer.grads[start:stop] for start, stop in buffer.layout.norm_ranges()])
    assert owned.double().norm().item() == pytest.approx(norm.item(), rel=1e-6)


IMPORTED = """
import sys
from megapar_models.registry import FOR_OPTIONS, NAMES, named_configs, validate
from megapar.config.files import load
validate(load(["--model.family", "gemma"], families=FOR_OPTIONS).config, 1)
print(*(name for name in NAMES if f"megapar_models.families.{name}" in sys.modules))
"""


def test_a_run_imports_its_own_family() -> None:
    """And those that its own is made of, but no other one."""
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["llama", "gemma"]
