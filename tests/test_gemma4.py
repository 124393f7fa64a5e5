"""Gemma 4: gradients through what its layers hand on, whatever is recomputed and wherever the model is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import stage_maker
from megapar_models.families.gemma4 import Gemma4Model
from megapar_models.stage import Stage
from megapar_tools.verify import logical
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.config.options import AdapterConfig
from megapar.declare import context
from megapar.pipeline.schedules import SCHEDULES
from tests.support import tiny_models
from tests.support.gemma4 import MIXTURE, MODEL
from tests.support.grid import Layout, bitwise, check_on_ranks, name
from tests.support.hugging_face import assert_same_tensors
from tests.support.model_types import TYPES
from tests.support.published import Published
from tests.support.rules import gradients
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

MODES = ("selective", "light", "all_but_attention", "full")


def trained(model: Gemma4Model, **train: Any) -> dict[str, Tensor]:
    """The gradients of one micro-batch in one process."""
    stage = tiny_models.build(tiny_models.config(model, **train), context.single())
    stage(None, tiny_models.batch(model)).backward()
    return gradients(stage)


def cut_at(model: Gemma4Model, number: int) -> dict[str, Tensor]:
    """The gradients of two stages, of which the second one begins with layer `number`."""
    config, ctx = tiny_models.config(model), context.single()
    make: Callable[..., Stage] = stage_maker(config, ctx)
    first = make(range(number), first=True, last=False)
    second = make(range(number, model.num_hidden_layers), first=False, last=True)
    logical.fill([first, second], tiny_models.random_tensors(model))
    batch = tiny_models.batch(model)
    left = first(None, batch)
    specs = second.boundary(batch)
    assert [tuple(x.shape) for x in left] == [spec.shape for spec in specs]
    given = tuple(x.detach().requires_grad_(spec.has_gradient) for x, spec in zip(left, specs, strict=True))
    second(given, batch).backward()
    torch.autograd.backward(left, [x.grad for x in given])
    return gradients(first) | gradients(second)


@pytest.mark.parametrize("model", slow_but([0], [MODEL, MIXTURE]), ids=["dense", "mixture"])
def test_recomputation_changes_no_bit(model: Gemma4Model) -> None:
    """Fault shared-keys-recomputed: unsloth-zoo#813 had gradients of keys with a cosine of 0.14 to 0.55."""
    expected = trained(model)
    for mode in MODES:
        assert bitwise(trained(model, recompute=mode), expected), mode
    assert bitwise(trained(model, recompute="full", recompute_layers=("4", "5")), expected)
    assert bitwise(trained(model, recompute="full", offload=1.0), expected)


@pytest.mark.parametrize("model", slow_but([0], [MODEL, MIXTURE]), ids=["dense", "mixture"])
def test_a_cut_anywhere_changes_no_bit(model: Gemma4Model) -> None:
    expected = trained(model)
    for number in range(model.num_hidden_layers):  # behind the last one only hidden states are left
        assert bitwise(cut_at(model, number), expected), number


def test_keys_have_the_gradients_of_all_their_readers() -> None:
    """Of a frozen reader too: its queries are not trained, and the keys that it reads are."""
    stage = tiny_models.build(tiny_models.config(MODEL), context.single())
    for param in stage.layers["4"].parameters():
        param.requires_grad_(False)
    stage(None, tiny_models.batch(MODEL)).backward()
    expected = trained(MODEL)
    found = {name: x for layer in "0123" for name, x in gradients(stage.layers[layer]).items()}
    assert bitwise(found, {name: expected[name] for name in found})


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_gradients_of_one_process(schedule: str, recompute: str) -> None:
    vpp = SCHEDULES[schedule].vpp.nearest_to(2)
    check_on_ranks(Layout(MIXTURE, pp=2, vpp=vpp, schedule=schedule, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(MODEL, tp=4, sequence_parallel=True, pp=2),  # four ranks share two heads, or one
        Layout(MIXTURE, tp=4, dp=2, ep=2, zero_stage=3),
        Layout(MIXTURE, tp=2, cp=2, cp_attention="ulysses", pp=2, sequence_parallel=True, recompute="selective"),
        Layout(MODEL, pp=3, dp=2, zero_stage=2, packed=True, recompute="full", offload=0.5),
        Layout(MODEL, tp=2, pp=2, sequence_parallel=True, adapter=AdapterConfig(rank=4)),
        Layout(MODEL, pp=2, trainable=("layers.[45].*", "norm*")),  # the keys that are read have no gradient
        Layout(MODEL, pp=2, trainable=("layers.2.*", "per_layer_norm*"), recompute="selective"),
        Layout(MIXTURE, tp=2, dp=2, optimizer="muon"),
    ],
    ids=name,
)
def test_layouts_change_nothing(layout: Layout) -> None:
    check_on_ranks(layout)


def test_keys_of_layers_that_read_those_of_others_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers leaves them: old files have some."""
    source = Published(tmp_path, "gemma4_text", TYPES["gemma4_text"].fields).folder / "theirs"
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"model.layers.3.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    hf_to_native(HfToNative(source, tmp_path / "again"))
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert said == [
        "left out: 2 tensors model.layers.3.self_attn.k_*, 24 bytes",
        "left out: 1 tensors model.layers.3.self_attn.v_*, 12 bytes",
    ]


@pytest.mark.parametrize("scalars", [torch.bfloat16, torch.float32])
def test_files_in_bf16_come_back_bit_by_bit(scalars: torch.dtype, tmp_path: Path) -> None:
    """With the factors of layers in bf16, as they are published, or in fp32."""
    source = Published(tmp_path, "gemma4_text", TYPES["gemma4_text"].fields).folder / "theirs"
    tensors = {name: x.to(torch.bfloat16) for name, x in load_file(source / "model.safetensors").items()}
    tensors |= {name: x.to(scalars) for name, x in tensors.items() if name.endswith("layer_scalar")}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    hf_to_native(HfToNative(source, tmp_path / "again", verify=False))
    native_to_hf(NativeToHf(tmp_path / "again", tmp_path / "back", verify=False))
    assert_same_tensors(tmp_path / "back", source)
