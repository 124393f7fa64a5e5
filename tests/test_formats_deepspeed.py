"""DeepSpeed's checkpoints are read bit for bit as its engines held them, and DeepSpeed goes on from what we write.

tests/data/deepspeed has folders that DeepSpeed wrote (`tests.support.deepspeed_folders`), each with what its accessors
said of every tensor. The slow tests run DeepSpeed itself.
"""

import os
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.formats import deepspeed, deepspeed_universal
from megapar_models.convert.formats.deepspeed_files import DeepSpeedStore
from megapar_models.convert.stream import TensorInfo
from safetensors.torch import load_file
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.declare.params import Box
from tests.support.deepspeed_folders import KEPT
from tests.support.frameworks import PYTHON, runs

DATA = Path(__file__).parent / "data/deepspeed"
SCRIPT = Path(__file__).parent / "support/deepspeed_folders.py"
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def unpacked(kind: str, folder: Path) -> Path:
    """A kept folder, such as zero1_2."""
    with zipfile.ZipFile(DATA / f"{kind}.zip") as packed:
        packed.extractall(folder)
    return folder


def check_equal(store: DeepSpeedStore, held: Mapping[str, Tensor]) -> None:
    """Whole tensors and boxes of them: inner rows, an inner element."""
    for name, expected in held.items():
        assert store.tensors[name] == TensorInfo(tuple(expected.shape), expected.dtype), name
        found = store.read(name)
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
        for box in (
            Box((1, *(0 for _ in expected.shape[1:])), (expected.shape[0] - 2, *expected.shape[1:])),
            Box((2,) * expected.dim(), (1,) * expected.dim()),
        ):
            assert torch.equal(store.read(name, box), expected[box.slices]), (name, box)


def without_weights(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those that ZeRO-3 does not store: what the module holds of trained parameters."""
    return {
        name: tensor
        for name, tensor in held.items()
        if not (name.startswith("weight/") and f"fp32/{name.removeprefix('weight/')}" in held)
    }


@pytest.mark.parametrize("kind", [f"{kind}_{world}" for kind, world in KEPT])
def test_every_tensor_is_as_deepspeed_held_it(kind: str, tmp_path: Path) -> None:
    """Stages 1 to 3, 2 to 4 ranks, padding between and behind parameters, sub groups, experts, frozen parameters,
    buffers, a tied head, DeepSpeed's optimizer for bf16, elastic files (fault deepspeed-moments-of-experts)."""
    folder = unpacked(kind, tmp_path)
    store = deepspeed.open_folder(folder)
    held = load_file(folder / "held.safetensors")
    check_equal(store, without_weights(held) if kind == "zero3_3" else held)
    second = {f"{state}/head.weight" for state in ("weight", *STATES)}
    assert store.tensors.keys() - held.keys() <= second | (store.tensors.keys() if "round_robin" in kind else set())
    assert torch.equal(store.read("exp_avg/head.weight"), store.read("exp_avg/embedding.weight"))
    values = store.values
    assert (values["step"], values["global_steps"], values["skipped_steps"]) == (3, 3, 0)
    assert (values["global_samples"], values["note"], values["seen"]) == (6 * int(kind[-1]), "kept", 3)
    assert values["lr_scheduler"] == {"last_batch_iteration": 2}
    assert values["zero_stage"] == (2 if kind == "moe_4" else int(kind[4]))
    assert values["loss_scale"] == (None if "master" in kind else 1.0)
    assert values["ds_config"]["gradient_clipping"] == 1.0
    if "elastic" not in kind:
        assert [group["weight_decay"] for group in values["param_groups"]][:2] == [0.1, 0.0]
    assert store.folder == folder / "step3"
    assert torch.equal(deepspeed.open_folder(folder / "step3").read("fp32/norm.bias"), store.read("fp32/norm.bias"))


def test_round_robin_gradients_change_nothing_of_a_run(tmp_path: Path) -> None:
    """The order of parameters is then another one, and DeepSpeed's accessors and slice mappings take the usual one
    (fault deepspeed-values-mixed-up)."""
    store = deepspeed.open_folder(unpacked("zero2_round_robin_3", tmp_path / "in turn"))
    check_equal(store, load_file(unpacked("zero2_3", tmp_path / "plain") / "held.safetensors"))
    universal = tmp_path / "in turn/universal"
    (universal / "zero").mkdir(parents=True)
    shutil.copy(tmp_path / "in turn/step3/mp_rank_00_model_states.pt", universal)
    with pytest.raises(CheckpointError, match=r"round_robin_gradients, and DeepSpeed's ds_to_universal.py mixes up"):
        deepspeed_universal.open_folder(universal)


@pytest.mark.parametrize("kind", ["zero1_2", "zero3_3"])
def test_every_tensor_of_a_universal_folder(kind: str, tmp_path: Path) -> None:
    """Of ZeRO-1 the padding rows of the vocabulary are left out; of ZeRO-3 the tensors are flat."""
    folder = unpacked(kind, tmp_path)
    store = deepspeed_universal.open_folder(folder)
    held = load_file(folder / "held.safetensors")
    if kind == "zero1_2":
        held |= {f"{state}/embedding.weight": held[f"{state}/embedding.weight"][:13].clone() for state in STATES}
    check_equal(store, without_weights(held) if kind == "zero3_3" else held)
    assert torch.equal(store.read("fp32/head.weight"), store.read("fp32/embedding.weight"))
    assert store.values["step"] == store.values["global_steps"] == 3
    assert store.values["universal_checkpoint_info"]["original_vocab_size"] == 13


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def cut(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def other_step(path: Path) -> None:
    """Change Adam's step in a file: the records of 4 bytes that hold 3.0."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size == 4 and archive.read(entry) == struct.pack("<f", 3):
                at = entry.header_offset + 30 + sum(struct.unpack_from("<HH", data, entry.header_offset + 26))
                data[at : at + 4] = struct.pack("<f", 4)
    path.write_bytes(data)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def poison(path: Path) -> None:
    torch.save({"optimizer_state_dict": Evil()}, path)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What is done to a folder of two ranks, and what the message says.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rank 0": (lambda f: rank_file(f, 0).unlink(), "step3: data rank 0 has no file"),
    "no rank 1": (
        lambda f: rank_file(f, 1).unlink(),
        r"of 1 rank.* mp_rank_00_model_states.pt says that 2 ranks saved",
    ),
    "no optimizer": (
        lambda f: [rank_file(f, rank).unlink() for rank in range(2)],
        r"no \*_optim_states.pt, though mp_rank_00_model_states.pt was saved under ZeRO",
    ),
    "no module": (lambda f: (f / "step3/mp_rank_00_model_states.pt").unlink(), "holds no mp_rank_00_model_states.pt"),
    "one rank more": (lambda f: shutil.copy(rank_file(f, 1), rank_file(f, 2)), "of 3 ranks.*2 ranks saved"),
    "a rank twice": (
        lambda f: shutil.copy(rank_file(f, 1), f / "step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        "are both of rank 1",
    ),
    "tensor ranks": (
        lambda f: shutil.copy(f / "step3/mp_rank_00_model_states.pt", f / "step3/mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt: belongs to tensor or pipeline rank 1.*ds_to_universal",
    ),
    "cut": (lambda f: cut(rank_file(f, 1)), "rank_1_mp_rank_00_optim_states.pt: not readable"),
    "empty": (lambda f: rank_file(f, 1).write_bytes(b""), "rank_1_mp_rank_00_optim_states.pt: not readable"),
    "another update": (
        lambda f: other_step(rank_file(f, 1)),
        "different checkpoints: .*rank_0.* of update 3.* of update 4",
    ),
    "another rank's": (lambda f: shutil.copy(rank_file(f, 0), rank_file(f, 1)), "rank_1_.*: .*param_slice_mappings"),
    "no dict": (lambda f: torch.save([1], rank_file(f, 1)), "rank_1_.*: holds no dict"),
    "hostile": (lambda f: poison(rank_file(f, 1)), "rank_1_.*: refused, not unpickled: names posix.mkdir"),
    "a FIFO": (lambda f: fifo(rank_file(f, 1)), "rank_1_.*: .*is a FIFO"),
    "latest astray": (lambda f: (f / "latest").write_text("../step3"), r"latest: '../step3' is no name of a folder"),
    "latest too new": (lambda f: (f / "latest").write_text("step4"), "latest: names step4, which is no folder"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_folder_is_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = unpacked("zero1_2", tmp_path / "run")
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as refused:
        deepspeed.open_folder(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """Files of another stage, of another number of ranks, and of ZeRO-3 with a rank's part missing."""
    one, two = unpacked("zero1_2", tmp_path / "1"), unpacked("zero2_3", tmp_path / "2")
    three = unpacked("zero3_3", tmp_path / "3")
    shutil.copy(rank_file(two, 1), rank_file(one, 1))
    with pytest.raises(CheckpointError, match=r"different ZeRO stages: \[1, 2\]"):
        deepspeed.open_folder(one)
    shutil.copy(rank_file(unpacked("zero2_aligned_2", tmp_path / "a"), 1), rank_file(two, 1))
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states.pt: holds .* values of fp32 in group 0"):
        deepspeed.open_folder(two)
    (three / "step3/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="data rank 1 has no file"):
        deepspeed.open_folder(three)


def test_a_file_changed_after_opening_is_refused(tmp_path: Path) -> None:
    folder = unpacked("zero1_2", tmp_path)
    store = deepspeed.open_folder(folder)
    cut(rank_file(folder, 1), 0.9)
    store.read("fp32/embedding.weight")  # rank 0 has all of it
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states.pt: has changed since it was opened"):
        store.read("fp32/norm.bias")
    with pytest.raises(CheckpointError, match="rank_1_"):
        store.read("fp32/layers.0.up.weight")


UNIVERSAL = "step3_universal/zero/layers.0.up.weight"
BROKEN_UNIVERSAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no main weight": (lambda f: (f / UNIVERSAL / "fp32.pt").unlink(), "layers.0.up.weight/fp32.pt: is missing"),
    "cut": (lambda f: cut(f / UNIVERSAL / "exp_avg.pt"), "layers.0.up.weight/exp_avg.pt: not readable"),
    "another shape": (
        lambda f: torch.save({"param": torch.zeros(7, 5)}, f / UNIVERSAL / "exp_avg.pt"),
        r"exp_avg.pt: holds \[7, 5\], and the model file's param_shapes says \[7, 6\]",
    ),
    "no tensor": (lambda f: torch.save({}, f / UNIVERSAL / "fp32.pt"), "fp32.pt: holds no tensor `param`"),
    "another update": (lambda f: other_step(f / UNIVERSAL / "step.pt"), "different checkpoints: .*step.pt of update"),
    "hostile": (lambda f: torch.save(Evil(), f / UNIVERSAL / "step.pt"), "step.pt: refused, not unpickled"),
    "no optimizer": (
        lambda f: (f / "step3_universal/zero/optimizer_state.pt").unlink(),
        "optimizer_state.pt: not readable",
    ),
    "a name that leads out": (
        lambda f: torch.save(
            {"module": {}, "param_shapes": [{"../../latest": torch.Size((2,))}]},
            f / "step3_universal/mp_rank_00_model_states.pt",
        ),
        "names '../../latest', which is no folder's name",
    ),
    "no folder": (lambda f: shutil.rmtree(f / "step3_universal/zero"), "no universal checkpoint"),
    "no module": (lambda f: (f / "step3_universal/mp_rank_00_model_states.pt").unlink(), "has no mp_rank_00_model"),
}


@pytest.mark.parametrize("case", BROKEN_UNIVERSAL)
def test_a_damaged_universal_folder_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = unpacked("zero1_2", tmp_path / "run")
    damage, message = BROKEN_UNIVERSAL[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as refused:
        deepspeed_universal.open_folder(folder)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


MODEL, RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def contents(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What model file and optimizer file of one rank hold, with a parameter `w` of 2 x 3 and a frozen one."""
    flat = torch.arange(6.0)
    base = {"state": {0: {"exp_avg": flat + 1}}, "param_groups": [{"lr": 0.1, "step": 7}]}
    module = {"w": flat.view(2, 3), "table": torch.ones(2)}
    model = {"module": module, "param_shapes": [{"w": torch.Size((2, 3))}], "dp_world_size": 1, "shared_params": {}}
    if stage == 1:
        state = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat], "partition_count": [1]}
        return model, {"optimizer_state_dict": {**state, "param_alignment_paddings": [[0]]}}
    frozen = {"frozen_param_shapes": {"f": torch.Size((2,))}, "frozen_param_fragments": {"f": torch.ones(2)}}
    state = {"optimizer_state_dict": base, "fp32_flat_groups": [flat], "partition_count": 1}
    return {**model, **frozen, "buffer_names": ["table"]}, {"optimizer_state_dict": state}


def small(folder: Path, *, model: Mapping[str, Any], **optimizer: Any) -> Path:
    """A checkpoint of one rank under ZeRO-1, with other values for some."""
    good, rank = contents(1)
    folder.mkdir()
    torch.save(good | model, folder / MODEL)
    torch.save({"optimizer_state_dict": rank["optimizer_state_dict"] | optimizer}, folder / RANK)
    return folder


def test_small_folders(tmp_path: Path) -> None:
    """Adam's step in the group, as fused optimizers have it; no ZeRO; shapes that claim more than is stored; experts
    without a number."""
    store = deepspeed.open_folder(small(tmp_path / "fused", model={}))
    assert store.values["step"] == 7
    assert torch.equal(store.read("exp_avg/w", Box((1, 1), (1, 2))), torch.tensor([[5.0, 6.0]]))
    plain = small(tmp_path / "plain", model={"param_shapes": None})
    (plain / RANK).unlink()
    store = deepspeed.open_folder(plain)
    assert store.tensors.keys() == {"weight/w", "weight/table"}
    assert "the optimizer's states" in store.values["left_out"][0]
    for number, (model, optimizer, message) in enumerate(
        [
            ({"param_shapes": [{"w": torch.Size((2**40, 3))}]}, {}, "values by param_shapes, and 6 of fp32 are stored"),
            ({"param_shapes": [{"w": (2, -3)}]}, {}, "the shape of w is"),
            ({"param_shapes": [{"w": torch.Size((2, 3))}, {}]}, {}, "holds 1 group of parameters"),
            ({"dp_world_size": "1"}, {}, "its dp_world_size is a str"),
            ({}, {"single_partition_of_fp32_groups": [torch.zeros(2, 3)]}, "are no vector"),
            ({}, {"param_alignment_paddings": [[0, 0]]}, "param_alignment_paddings do not fit group 0"),
            ({}, {"single_partition_of_fp32_groups": [torch.zeros(99)]}, "6 values by param_shapes, and 99 of fp32"),
            ({"module": {"w": torch.zeros(1).expand(2**40)}}, {}, "beyond its storage"),
            ({}, {"single_partition_of_fp32_groups": [torch.zeros(1).expand(6)]}, "beyond its storage"),
            ({}, {"partition_count": [5]}, r"partition_count of group 0 is 5"),
            ({"ds_autoep_layers": [{}]}, {}, "has ds_autoep_layers: .*ds_to_universal.*--weights_only"),
        ]
    ):
        folder = small(tmp_path / str(number), model=model, **optimizer)
        with pytest.raises(CheckpointError, match=message):
            deepspeed.open_folder(folder)


ODD = (None, 0, -1, 2**60, "x", [], {}, [None], True, float("nan"), torch.tensor(1), torch.ones(2, 2), torch.ones(0))


def variants(value: Any) -> Iterator[Any]:
    """Yield `value` with one of its parts, at any depth, as an odd value."""
    yield from ODD
    if isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: odd} for odd in variants(part))
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from ([*value[:number], odd, *value[number + 1 :]] for odd in variants(part))


def outcome(opener: Callable[[Path], DeepSpeedStore], folder: Path) -> str:
    """Read all tensors of a folder, and return the error's message, if any."""
    try:
        store = opener(folder)
        for name in store.tensors:
            store.read(name)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
def test_an_odd_value_anywhere_is_refused_or_of_no_effect(stage: int, tmp_path: Path) -> None:
    """Files of torch.save with values of wrong types and sizes, as nobody's writer makes them."""
    names = (MODEL, RANK) if stage == 1 else (f"zero_pp_rank_0_{MODEL}", RANK)
    good = contents(stage)
    messages = set()
    for which, name in enumerate(names):
        for content, file in zip(good, names, strict=True):
            torch.save(content, tmp_path / file)
        for odd in variants(good[which]):
            torch.save(odd, tmp_path / name)
            messages.add(outcome(deepspeed.open_folder, tmp_path))
    assert "" in messages
    assert len(messages) > 30
    assert [message for message in messages if (message and str(tmp_path) not in message) or "\n" in message] == []


@pytest.mark.parametrize("stage", [1, 3])
def test_an_odd_value_in_a_universal_folder(stage: int, tmp_path: Path) -> None:
    """The same for the files of the universal form. `stage` is that of the model file."""
    model = MODEL if stage == 1 else f"zero_pp_rank_0_{MODEL}"
    files: dict[str, Any] = {
        model: contents(stage)[0],
        "zero/optimizer_state.pt": contents(3)[1]["optimizer_state_dict"] | {"param_groups": [{"lr": 0.1}]},
        "zero/w/fp32.pt": {"param": torch.ones(2, 3)},
        "zero/w/step.pt": 7,
    }
    (tmp_path / "zero/w").mkdir(parents=True)
    messages = set()
    for name, good in files.items():
        for other, content in files.items():
            torch.save(content, tmp_path / other)
        for odd in variants(good):
            torch.save(odd, tmp_path / name)
            messages.add(outcome(deepspeed_universal.open_folder, tmp_path))
    assert "" in messages
    assert len(messages) > 20
    assert [message for message in messages if (message and str(tmp_path) not in message) or "\n" in message] == []


def test_states_of_experts_without_numbers_are_left_out_if_asked_for(tmp_path: Path) -> None:
    """Two ranks with an expert each: whose w is it? The expert's file says it of the weight."""
    folder = small(tmp_path / "run", model={"dp_world_size": 2, "module": {}, "ds_autoep_layers": [{}]})
    first = folder / RANK
    shutil.copy(first, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    torch.save({"w.1": torch.ones(3)}, folder / "layer_0_expert_1_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="--weights_only"):
        deepspeed.open_folder(folder)
    store = deepspeed.open_folder(folder, weights_only=True)
    assert store.tensors.keys() == {"weight/w.1"}
    model = {"dp_world_size": 2}
    other = small(tmp_path / "other", model=model)
    shutil.copy(first, other / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"moments of w have no number of an expert.*--weights_only"):
        deepspeed.open_folder(other)


def rewritten(store: DeepSpeedStore, folder: Path) -> dict[tuple[str, str], TensorInfo]:
    """Write a universal folder of a store, and return what was written."""
    tensors = {}
    for key, info in store.tensors.items():
        state, _, name = key.partition("/")
        if state in STATES and name not in store.values["shared_params"]:
            tensors[state, name] = info
    values = {**store.values, "lr": store.values["param_groups"][0]["lr"]}
    step = values["step"]
    deepspeed_universal.write(folder, tensors, lambda state, name: store.read(f"{state}/{name}"), step, values)
    return tensors


@pytest.mark.parametrize("kind", ["zero1_2", "zero3_3"])
def test_a_written_universal_folder_is_read_bitwise(kind: str, tmp_path: Path) -> None:
    store = deepspeed.open_folder(unpacked(kind, tmp_path / "plain"))
    tensors = rewritten(store, tmp_path / "written")
    again = deepspeed_universal.open_folder(tmp_path / "written")
    assert again.tensors == {f"{state}/{name}": info for (state, name), info in tensors.items()}
    for name in again.tensors:
        assert torch.equal(again.read(name), store.read(name)), name
    assert (again.values["step"], again.values["global_steps"], again.values["seen"]) == (3, 3, 3)


def test_nothing_is_written_of_states_that_deepspeed_would_not_load(tmp_path: Path) -> None:
    """A parameter without a moment; a tensor unlike its info."""
    info = TensorInfo((2,), torch.float32)
    tensors = {("fp32", "w"): info, ("exp_avg", "w"): info}
    with pytest.raises(CheckpointError, match="not so exp_avg_sq of w"):
        deepspeed_universal.write(tmp_path / "x", tensors, lambda *_: torch.zeros(2), 1, {"global_steps": 1})
    tensors["exp_avg_sq", "w"] = info
    with pytest.raises(CheckpointError, match=r"fp32 of w: float32 .*was planned"):
        deepspeed_universal.write(tmp_path / "x", tensors, lambda *_: torch.zeros(3), 1, {"global_steps": 1})
    assert not [*tmp_path.iterdir()]


needs_deepspeed = runs("deepspeed")


def run_deepspeed(*words: Any) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([PYTHON, SCRIPT, *map(str, words)], check=True, env=environment, timeout=600)


@needs_deepspeed
@pytest.mark.parametrize(("kind", "world"), [("zero1", 2), ("zero2", 3), ("zero3", 3)])
def test_deepspeed_goes_on_from_what_we_write(kind: str, world: int, tmp_path: Path) -> None:
    """Three steps after DeepSpeed has loaded our universal folder, each tensor is that of the run that went on (fault
    deepspeed-as-from-scratch)."""
    run_deepspeed("write", kind, world, tmp_path / "run")
    held = load_file(tmp_path / "run/held.safetensors")
    store = deepspeed.open_folder(tmp_path / "run")
    before = {name: tensor for name, tensor in held.items() if not name.startswith("after/")}
    check_equal(store, without_weights(before) if kind == "zero3" else before)
    rewritten(store, tmp_path / "ours")
    run_deepspeed("continue", kind, world, tmp_path / "ours")
    found = load_file(tmp_path / "ours/continued.safetensors")
    for name, expected in held.items():
        if name.startswith("after/"):
            assert torch.equal(found[name.removeprefix("after/")], expected), name
