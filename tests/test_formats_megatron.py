"""Fault megatron-core-folders: torch_dist folders as Megatron-Core 0.16.1 itself wrote them, or damaged.

Megatron's own tensors, gathered by Megatron, lie beside each folder (tests/support/megatron_dist_writer.py), and the
logits of its model. Weights and moments must be theirs bit by bit, the logits within 1e-5.
"""

import json
import os
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.convert import megatron_experts
from megapar_models.convert.formats.contents import Contents, ContentsReader
from megapar_models.convert.formats.detect import Asked
from megapar_models.convert.formats.detect import open_folder as open_any
from megapar_models.convert.formats.megatron_dist import Folder, contents_of, find, open_folder, open_megatron_dist
from megapar_models.convert.formats.megatron_names import megatron_recipes, stored_at
from megapar_models.convert.formats.native import CONFIG, write_native
from megapar_models.convert.parity import native_logits
from megapar_models.convert.saved import whole_config
from megapar_models.registry import validate
from megapar_tools.verify import logical
from safetensors.torch import load_file
from torch import Tensor

from megapar.base.errors import CheckpointError, MegaparError
from megapar.checkpoint.format import BUFFER, read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import Config, TrainConfig
from megapar.declare import context
from megapar.declare.params import MAIN, Box
from tests.support import program, tiny_models
from tests.support.foreign_folders import MemoryStore
from tests.support.frameworks import PYTHON, runs
from tests.support.megatron_dist_writer import (
    CASES,
    EXPECTED,
    FOLDER,
    ITERATION,
    LATENT,
    MIXTURE,
    SAMPLES,
    TIED,
    TOKENS,
    UPDATES,
    VOCABULARY,
)
from tests.support.megatron_expected import expected_of

HERE = Path(__file__).parent
KEPT = {
    "tied, small, buckets, tp 2": HERE / "data" / "megatron_dist_buckets",
    "experts, small": HERE / "data" / "megatron_dist_experts",
}
needs_megatron = runs("megatron.core")


def config_of(model: ModelConfig) -> Config:
    return validate(Config(model=model, train=TrainConfig(seq_length=len(TOKENS))), 1)


def check(folder: Path, case: str) -> Contents:
    """Compare the contents of a folder with the expected tensors beside it: all bits, and logits."""
    contents = open_megatron_dist(folder, vocab_size=VOCABULARY)
    theirs = load_file(folder / EXPECTED)
    assert contents.position.step == ITERATION
    assert contents.position.updates == UPDATES
    assert contents.position.consumed_samples == SAMPLES
    assert contents.states == ["exp_avg", "exp_avg_sq"]
    model = megatron_experts.model_of(open_folder(folder / FOLDER).args or {}, VOCABULARY, folder)
    config = config_of(model)
    manifest = contents.manifest(config)
    ours: dict[str, dict[str, Tensor]] = {}
    for state, wanted in ((MAIN, "main"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), (BUFFER, "buffer")):
        expected = expected_of(config.model, theirs, wanted)
        names = {name.removeprefix(f"{state}.") for name in manifest.tensors if name.startswith(f"{state}.")}
        assert names == expected.keys(), f"{case}: {state}"
        with ContentsReader(contents, manifest) as reader:
            ours[state] = {name: reader.tensor(f"{state}.{name}") for name in names}
            for name, values in ours[state].items():
                assert torch.equal(values, expected[name].float()), f"{case}: {state}.{name}"
            _check_boxes(reader, state, ours[state])
    logits_sv = logits_of(config, ours[MAIN], ours[BUFFER])
    expected_sv = theirs["logits"][:, :VOCABULARY]
    assert float((logits_sv - expected_sv).abs().max()) <= 1e-5 * float(expected_sv.abs().max()), case
    return contents


def _check_boxes(reader: ContentsReader, state: str, whole: Mapping[str, Tensor]) -> None:
    """A box in the middle of each tensor, as a rank of another layout reads it, is that of the whole tensor."""
    for name, tensor in whole.items():
        low = [size // 3 for size in tensor.shape]
        size = [max(1, size // 2) for size in tensor.shape]
        out = torch.empty(size)
        reader.fill(f"{state}.{name}", tuple(low), out)
        assert torch.equal(out, tensor[Box(tuple(low), tuple(size)).slices]), f"{state}.{name}"


@torch.no_grad()
def logits_of(config: Config, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Tensor:
    """The logits [s, v] of TOKENS with these weights."""
    stage = build_stages(config, context.single())[0].eval()
    logical.fill([stage], tensors)
    for name, buffer in stage.named_buffers():
        ours = next((ours for ours in buffers if name.endswith(ours)), None)
        if ours is not None:
            buffer.copy_(buffers[ours])
    return native_logits(stage, torch.tensor(TOKENS), 0)[:, : config.model.vocab_size]


@pytest.mark.parametrize("case", KEPT)
def test_kept_folders_hold_what_megatron_has_gathered(case: str) -> None:
    contents = check(KEPT[case], case)
    assert contents.left_out == []


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("case", CASES)
def test_written_folders_hold_what_megatron_has_gathered(case: str, tmp_path: Path) -> None:
    check(write(tmp_path / "run", case), case)


def write(folder: Path, case: str) -> Path:
    """Let Megatron-Core write the folder of a case, in processes of their own."""
    command = [PYTHON, "-m", "tests.support.megatron_dist_writer", str(folder), case]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@needs_megatron
def test_states_that_megatron_saves_at_wrong_places_are_refused(tmp_path: Path) -> None:
    """Fault megatron-misplaced-states: fully_reshardable, several buckets, and sizes that 128 does not divide.

    Megatron Core 0.16.1 warns of "data corruption" then. Main weights that do not round to the model's tell.
    """
    folder = write(tmp_path / "run", "misplaced")
    with pytest.raises(CheckpointError, match="Megatron has saved the states of its optimizer at wrong places"):
        open_megatron_dist(folder, vocab_size=VOCABULARY)
    assert open_megatron_dist(folder, vocab_size=VOCABULARY, weights_only=True).states == []


@pytest.mark.parametrize("case", KEPT)
def test_a_folder_becomes_a_native_checkpoint(case: str, tmp_path: Path) -> None:
    contents = open_any(KEPT[case], Asked(vocab_size=VOCABULARY))
    assert contents.model is not None
    config = whole_config(contents.model)
    write_native(contents, config, tmp_path / "native")
    manifest = read_manifest(tmp_path / "native")
    assert manifest.step == ITERATION
    with Reader(tmp_path / "native", manifest) as native, contents.reader(contents.manifest(config)) as theirs:
        for name in manifest.tensors:
            assert torch.equal(native.tensor(name), theirs.tensor(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("case", KEPT)
def test_a_run_goes_on_from_a_folder_itself(case: str, tmp_path: Path) -> None:
    """Step and updates are Megatron's, and a router's counts, which Megatron has not, are as in a first step."""
    contents = open_any(KEPT[case], Asked(vocab_size=VOCABULARY))
    assert contents.model is not None
    write_native(contents, whole_config(contents.model), tmp_path / "native")
    ended = program.run(
        *("--config", str(tmp_path / "native" / CONFIG), "--data.train", "synthetic", "--launch.device", "cpu"),
        *("--train.seq_length", "32", "--train.global_batch_size", "4", "--train.steps", str(ITERATION + 1)),
        *("--checkpoint.resume", str(KEPT[case])),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.err
    assert f"resumed step {ITERATION} from {KEPT[case]}" in ended.out + ended.err
    assert "changed since" not in ended.out + ended.err
    saved = read_manifest(tmp_path / "run" / "checkpoints" / f"step_{ITERATION + 1:08d}")
    assert saved.trainer["updates"] == UPDATES + 1


# What a folder may hold, and what is refused: kept folders with changes, in memory.


def held(case: str) -> tuple[MemoryStore, dict[str, Any], dict[str, Any]]:
    """All tensors and values of a kept folder in memory, what is no tensor in it, and its args."""
    opened = open_folder(KEPT[case] / FOLDER)
    store = MemoryStore(opened.path, {name: opened.store.read(name) for name in opened.store.tensors})
    store.values = {name: opened.store.values[name] for name in opened.store.values if "per_bucket" not in name}
    assert opened.args is not None
    return store, dict(opened.common), dict(opened.args)


def read(store: MemoryStore, common: Mapping[str, Any], args: Mapping[str, Any] | None, **options: Any) -> Contents:
    model = options.pop("model", None) or megatron_experts.model_of(args or {}, VOCABULARY, store.folder)
    return contents_of(Folder(store.folder, store, common, args), whole_config(model).model, **options)


BUCKETS, EXPERTS = KEPT


def test_unknown_and_missing_tensors_are_refused() -> None:
    """Fault megatron-every-key: experts that a converter drops (Megatron-LM#5844), extra layers found late (#1032)."""
    store, common, args = held(EXPERTS)
    store.held["mtp.layers.0.eh_proj.weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=r"holds mtp\.layers\.0\.eh_proj\.weight"):
        read(store, common, args)
    store, common, args = held(EXPERTS)
    del store.held["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    with pytest.raises(
        CheckpointError, match=r"missing decoder\.layers\.0\.mlp\.experts\.experts\.0\.linear_fc2\.weight"
    ):
        read(store, common, args)
    store, common, args = held(EXPERTS)
    fewer = store.held["decoder.layers.mlp.experts.experts.linear_fc1.weight"][:, :2]
    store.held["decoder.layers.mlp.experts.experts.linear_fc1.weight"] = fewer
    with pytest.raises(CheckpointError, match="which holds no decoder"):
        read(store, common, args)


def test_what_is_no_model_is_left_out_and_said() -> None:
    store, common, args = held(EXPERTS)
    store.values |= {"rng_state/shard_0.0_1.1": None, "rerun_state_machine_state/shard_0_1": None}
    contents = read(store, common, args)
    assert len(contents.left_out) == 2
    store.values["odd_state/shard_0_1"] = None
    with pytest.raises(CheckpointError, match="holds odd_state"):
        read(store, common, args)


@pytest.mark.parametrize("case", KEPT)
def test_weights_alone_are_read_without_states(case: str) -> None:
    store, common, args = held(case)
    contents = read(store, common, args, weights_only=True)
    assert contents.states == []
    assert contents.left_out == ["the states of the optimizer"]
    theirs = load_file(KEPT[case] / EXPECTED)
    assert contents.model is not None
    config = config_of(contents.model)
    expected = expected_of(config.model, theirs, "param")
    with ContentsReader(contents, contents.manifest(config)) as reader:
        for name, values in expected.items():
            assert torch.equal(reader.tensor(f"{MAIN}.{name}"), values.float()), name


def test_experts_may_be_stored_one_by_one() -> None:
    """Layers that differ have names with numbers, and the experts of such layers may have an axis or numbers."""
    store, common, args = held(EXPERTS)
    expected = read(store, common, args)
    by_layer, by_expert = dict(store.held), dict(store.held)
    for name, tensor in store.held.items():
        if "decoder.layers." not in name:
            continue
        del by_layer[name], by_expert[name]
        for layer, of_layer in enumerate(tensor):
            numbered = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            by_layer[numbered] = of_layer
            if "experts.experts." not in name:
                by_expert[numbered] = of_layer
                continue
            for expert, values in enumerate(of_layer):
                by_expert[numbered.replace("experts.experts.", f"experts.experts.{expert}.")] = values
    for tensors in (by_layer, by_expert):
        contents = read(MemoryStore(store.folder, tensors, store.values), common, args)
        for state, places in expected.stored.items():
            for name, at in places.items():
                box = Box((0,) * len(expected.recipes[name].shape), expected.recipes[name].shape)
                there = contents.stored[state][name]
                found = contents.store.read(there.name, there.box(box)).reshape(box.size)
                assert torch.equal(found, expected.store.read(at.name, at.box(box)).reshape(box.size)), name


def test_gates_may_be_stored_apart() -> None:
    store, common, args = held(EXPERTS)
    for name in [name for name in store.held if "linear_fc1.weight" in name]:
        gate, up = store.held.pop(name).chunk(2, -2)
        store.held |= {f"{name}_w": gate, f"{name}_v": up}
    contents = read(store, common, args)
    assert "decoder.layers.0.mlp.experts.experts.2.linear_fc1.weight_v" in contents.recipes
    assert contents.states == ["exp_avg", "exp_avg_sq"]


def test_older_names_of_states_are_read() -> None:
    """Up to Megatron Core 0.15 main weights are `fp32_param`, and states of a chain of optimizers have its numbers."""
    store, common, args = held(EXPERTS)
    expected = read(store, common, args)
    for name in [name for name in store.held if name.startswith("optimizer.state.")]:
        number = int("experts.experts" in name)
        older = name.replace("state.param.", "state.fp32_param.")
        store.held[f"chained_{number}.{older}"] = store.held.pop(name)
    common["optimizer"] = {0: common["optimizer"], 1: common["optimizer"]}
    contents = read(store, common, args)
    assert contents.position == expected.position
    for state, places in expected.stored.items():
        assert contents.stored[state].keys() == places.keys()
    found = contents.stored[MAIN]["decoder.layers.0.mlp.experts.experts.1.linear_fc2.weight"]
    name = "chained_1.optimizer.state.fp32_param.decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert found == (name, (0, 1), 0)


def test_muon_leaves_its_momentum_by_name() -> None:
    store, common, args = held(EXPERTS)
    for name in [name for name in store.held if ".exp_avg." in name and "linear_" in name and "layer_norm" not in name]:
        store.held[name.replace("exp_avg", "momentum_buffer")] = store.held.pop(name)
        del store.held[name.replace("exp_avg", "exp_avg_sq")]
    contents = read(store, common, args)
    assert sorted(contents.states) == ["exp_avg", "exp_avg_sq", "momentum"]
    assert contents.model is not None
    names = contents.manifest(config_of(contents.model)).tensors
    assert "momentum.layers.0.attention.k.weight" in names
    assert "exp_avg.layers.0.attention.k.weight" not in names


def _flatten(store: MemoryStore) -> None:
    """As Megatron Core up to 0.14 stored the parts of data-parallel ranks."""
    for name in [name for name in store.held if name.startswith("optimizer.state.")]:
        store.held[name] = store.held[name].flatten()


def _rename(store: MemoryStore) -> None:
    for name in [name for name in store.held if ".exp_avg_sq." in name]:
        store.held[name.replace("exp_avg_sq", "second_order")] = store.held.pop(name)


def _without_moments(store: MemoryStore) -> None:
    for name in [name for name in store.held if ".exp_avg" in name]:
        del store.held[name]


def _gather(store: MemoryStore) -> None:
    """As dp_zero_gather_scatter stores them: one object of the first data-parallel rank."""
    _without_moments(store)
    store.values = {**store.values, "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": None}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            _gather,
            "dp_zero_gather_scatter",
            r"dp_zero_gather_scatter cannot be named .*param_state.* is an object",
        ),
        (
            _flatten,
            "fully_sharded_model_space",
            r"in the form fully_sharded_model_space cannot be named: Megatron Core up",
        ),
        (_rename, "fully_reshardable", r"second_order\..* is not known"),
        (_without_moments, "fully_reshardable", "no moments of any parameter"),
    ],
)
def test_states_without_a_name_are_refused_with_the_way_on(change: Any, kind: str, words: str) -> None:
    store, common, args = held(EXPERTS)
    change(store)
    common["content_metadata"] = {"distrib_optim_sharding_type": kind}
    with pytest.raises(CheckpointError, match=words) as error:
        read(store, common, args)
    assert str(error.value).endswith("give --weights_only")
    assert read(store, common, args, weights_only=True).states == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_model_parallel_size": 1}, "main weights|would end at|more elements|more parameters"),
        ({"pipeline_model_parallel_size": 2}, "buckets have more elements"),
        ({"pipeline_model_parallel_layout": "Et|tL"}, r"args\.pipeline_model_parallel_layout is 'Et\|tL'"),
        ({"decoder_first_pipeline_num_layers": 1}, r"args\.decoder_first_pipeline_num_layers is 1"),
    ],
)
def test_buckets_of_another_layout_are_refused(changes: dict[str, Any], words: str) -> None:
    """Fault megatron-bucket-layout: states read at the places of other parameters (Megatron-LM#7162, radixark#66)."""
    store, common, args = held(BUCKETS)
    with pytest.raises(CheckpointError, match=rf"cannot be told \(.*({words})") as error:
        read(store, common, args | changes)
    assert "give --weights_only" in str(error.value)


def test_buckets_in_another_order_are_refused() -> None:
    """Fault megatron-bucket-order: two parameters of one size, one in the place of the other. The main weights tell."""
    store, common, args = held(BUCKETS)
    weights = store.held["decoder.layers.mlp.linear_fc2.weight"]
    store.held["decoder.layers.mlp.linear_fc2.weight"] = weights.flip(0)
    with pytest.raises(
        CheckpointError, match=r"main weights in .* are not those of decoder\.layers\.\d\.mlp\.linear_fc2"
    ):
        read(store, common, args)


def test_buckets_of_fused_layers_are_found() -> None:
    """Transformer Engine registers a norm in the module behind it, and some runs do not say their layers."""
    store, common, args = held(BUCKETS)
    for implementation in ("local", "transformer_engine", None):
        contents = read(store, common, args | {"transformer_impl": implementation})
        assert contents.states == ["exp_avg", "exp_avg_sq"]


def test_steps_that_differ_are_refused() -> None:
    """Fault megatron-one-step: optimizers of a chain at different steps, as after a stale asynchronous save."""
    store, common, args = held(EXPERTS)
    common["optimizer"]["optimizer"]["param_groups"][0]["step"] = 5
    with pytest.raises(CheckpointError, match=r"updates the optimizer has made is not one number: it says \[2, 5\]"):
        read(store, common, args)
    common["optimizer"] = {}
    with pytest.raises(CheckpointError, match="it says none: give --weights_only"):
        read(store, common, args)


def copy(case: str, folder: Path) -> Path:
    shutil.copytree(KEPT[case], folder)
    return folder


def test_the_common_state_may_lie_among_the_tensors(tmp_path: Path) -> None:
    """Fault megatron-common-state: Megatron-LM from July 2026 on has no common.pt (ms-swift#9908)."""
    store, common, args = held(EXPERTS)
    for value in ([{**common, "args": args}], {**common, "args": args}):
        moved = MemoryStore(tmp_path, store.held, {**store.values, "common_state/shard_0_1": value})
        opened = open_folder(tmp_path, moved)
        assert (opened.args or {})["num_experts"] == args["num_experts"]
        contents = read(moved, opened.common, opened.args)
        assert contents.position.updates == UPDATES


def test_folders_of_bridge_ask_for_the_model(tmp_path: Path) -> None:
    """Megatron-Bridge: latest_train_state.pt in place of the tracker, run_config.yaml in place of args."""
    folder = copy(EXPERTS, tmp_path / "bridge")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    torch.save({"step": torch.tensor(ITERATION, dtype=torch.int32)}, folder / "latest_train_state.pt")
    inner = folder / FOLDER
    common = torch.load(inner / "common.pt", weights_only=False)
    args = vars(common.pop("args"))
    torch.save(common, inner / "common.pt")
    torch.save({"consumed_train_samples": torch.tensor(SAMPLES)}, inner / "train_state.pt")
    (inner / "run_config.yaml").write_text("model:\n  _target_: os.system\n")
    with pytest.raises(
        CheckpointError, match=r"no args of Megatron-LM \(run_config\.yaml is not read\): give .*--config"
    ):
        open_megatron_dist(folder)
    model = megatron_experts.model_of(args, VOCABULARY, folder)
    contents = open_megatron_dist(folder, whole_config(model).model)
    assert contents.position.consumed_samples == SAMPLES
    assert contents.position.step == ITERATION
    assert contents.states == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 10**12}, r"args\.num_layers is 1000000000000, and its tensors have 1 at most"),
        ({"num_experts": 10**12}, r"args\.num_experts is 1000000000000, and its tensors have \d+ at most"),
        ({"num_layers": "one"}, r"args\.moe_layer_freq|args\.num_layers is 'one'"),
        ({"hidden_size": 2**40}, "which holds no|must be at most"),
        ({"ffn_hidden_size": None}, r"args\.ffn_hidden_size is None: must be a number"),
    ],
)
def test_numbers_that_the_tensors_have_not_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Fault sizes-out-of-files: nothing is looped over for a number that a file names."""
    folder = copy(EXPERTS, tmp_path / "sizes")
    common = torch.load(folder / FOLDER / "common.pt", weights_only=False)
    vars(common["args"]).update(changes)
    torch.save(common, folder / FOLDER / "common.pt")
    with pytest.raises(MegaparError, match=words):
        open_megatron_dist(folder, vocab_size=VOCABULARY)


def test_a_given_model_counts_and_args_that_differ_are_said() -> None:
    folder = KEPT[EXPERTS]
    whole = whole_config(megatron_experts.model_of(held(EXPERTS)[2], VOCABULARY, folder)).model
    assert open_megatron_dist(folder, whole).left_out == []
    contents = open_megatron_dist(folder, replace(whole, rope_theta=5e5))
    assert contents.left_out == ["Megatron's args say model.rope_theta=10000.0; the given model has 500000.0"]
    assert contents.model == replace(whole, rope_theta=5e5)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["common.pt", "../latest_train_state.pt"])
def test_a_pickle_that_runs_code_is_refused(name: str, tmp_path: Path) -> None:
    folder = copy(EXPERTS, tmp_path / "evil")
    if name.startswith(".."):
        (folder / "latest_checkpointed_iteration.txt").unlink()
    torch.save({"args": Namespace(), "step": Evil(tmp_path / "ran")}, folder / FOLDER / name)
    with pytest.raises(CheckpointError, match=r"refused, not unpickled: names posix\.mkdir"):
        open_megatron_dist(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("word", ["../../etc", "12;ls", "", "9" * 40, "release\0"])
def test_a_tracker_names_an_iteration(word: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(CheckpointError, match="neither an iteration nor `release`"):
        find(tmp_path)


def test_other_formats_of_megatron_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither metadata\.json nor latest_checkpointed_iteration\.txt"):
        find(tmp_path)
    for metadata, words in (
        ({"sharded_backend": "zarr"}, "sharded_backend is 'zarr'"),
        ([], "no readable sharded_backend"),
    ):
        (tmp_path / "metadata.json").write_text(json.dumps(metadata))
        with pytest.raises(CheckpointError, match=words):
            find(tmp_path)


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    folder = copy(EXPERTS, tmp_path / "cut")
    path = next(iter(sorted((folder / FOLDER).glob("*.distcp"))))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{path.name}: cut"):
        open_megatron_dist(folder, vocab_size=VOCABULARY)


# What args say of experts and of latent attention.


def model_of(args: Mapping[str, Any]) -> Any:
    return megatron_experts.model_of(args, VOCABULARY, Path("folder"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_expert_capacity_factor": 1.0}, r"args\.moe_expert_capacity_factor is 1\.0: not supported"),
        ({"moe_apply_probs_on_input": True}, r"args\.moe_apply_probs_on_input is True"),
        ({"moe_latent_size": 8}, r"args\.moe_latent_size is 8"),
        ({"moe_input_jitter_eps": 0.01}, r"args\.moe_input_jitter_eps is 0\.01"),
        ({"moe_of_tomorrow": True}, r"args\.moe_of_tomorrow is True: this option is not known"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "is 'sinkhorn': aux_loss, seq_aux_loss, global_aux_loss, none are read",
        ),
        ({"moe_router_score_function": "sqrtsoftplus"}, "softmax and sigmoid are read"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, r"args\.moe_router_group_topk is 1 with .*_topk 2"),
        ({"moe_layer_freq": [0, 1, 1]}, r"args\.moe_layer_freq is \[0, 1, 1\]: should be a number, or 2 of 0 and 1"),
        ({"moe_router_topk": "2"}, r"args\.moe_router_topk is '2': must be a whole number"),
        ({"swiglu": False}, r"args\.swiglu is off"),
        ({"mtp_num_layers": 1}, r"args\.mtp_num_layers is 1: not supported"),
    ],
)
def test_args_of_mixtures_that_ours_do_not_compute_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        model_of(MIXTURE | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_layernorm": False}, r"args\.qk_layernorm is off"),
        ({"norm_epsilon": 1e-5}, r"args\.norm_epsilon is 1e-05: norms of latents have 1e-06 here"),
        ({"moe_layer_freq": [1, 0, 1]}, "dense layers must be the first"),
        ({"num_experts": None}, r"args\.multi_latent_attention without args\.num_experts"),
        ({"kv_lora_rank": None}, r"args\.kv_lora_rank is None: must be a number"),
        ({"rope_type": "spiral"}, r"args\.rope_type is 'spiral'"),
        ({"rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}, r"args\.mscale_all_dim with args\.rope_type rope"),
    ],
)
def test_args_of_latent_attention_that_ours_do_not_compute_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        model_of(LATENT | changes)


def test_args_of_a_router_become_options() -> None:
    """Fault megatron-router-options: norm_topk_prob, scaling and groups lost in a config (torchtitan#1448)."""
    families = [model_of(MIXTURE | {"qk_layernorm": norms}).family for norms in (True, False)]
    assert families == ["qwen3_moe", "mixtral"]
    moe = model_of(MIXTURE | {"moe_router_pre_softmax": True, "moe_layer_freq": 2}).moe
    assert (moe.norm_topk_prob, moe.mlp_only_layers, moe.balance) == (False, (1,), "global")
    moe = model_of(LATENT | {"moe_router_topk": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 2}).moe
    assert (moe.n_group, moe.topk_group, moe.first_k_dense_replace, moe.balance) == (2, 2, 1, "bias")
    assert (moe.routed_scaling_factor, moe.shared_expert_intermediate_size, moe.norm_topk_prob) == (2.5, 20, True)


def test_args_of_yarn_become_options() -> None:
    yarn = {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0, "original_max_position_embeddings": 32}
    scaling = model_of(LATENT | yarn | {"mscale_all_dim": 0.707}).rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.mscale, scaling.mscale_all_dim) == ("yarn", 40.0, 1.0, 0.707)
    assert scaling.original_max_position_embeddings == 32
    scaling = model_of(LATENT | yarn | {"mscale_all_dim": 0.0}).rope_scaling
    assert scaling.attention_factor == pytest.approx(0.1 * torch.tensor(40.0).log().item() + 1)


def test_hybrids_are_read_with_a_given_model() -> None:
    """Mamba-2's projections in parts, each layer with its own number, and another name of the last norm.

    These are the names in the source of Megatron-Core 0.16.1. Its Mamba-2 does not run without a GPU.
    """
    experts = MoEConfig(num_experts=2, moe_intermediate_size=8, scoring_func="sigmoid", balance="bias")
    sizes = {"mamba_n_heads": 6, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 5, "moe": experts}
    hybrid = tiny_models.model("nemotron_h", num_hidden_layers=4, hybrid_override_pattern="M-*E", **sizes)
    model = whole_config(hybrid).model
    ours = tiny_models.random_tensors(model)
    mamba, attention = "decoder.layers.0.mixer", "decoder.layers.2.self_attention"
    of_mamba = {name: ours[f"layers.0.mamba.{name}.weight"] for name in ("z", "x", "B", "C", "dt")}
    theirs = {
        "embedding.word_embeddings.weight": torch.cat([ours["embedding.weight"], torch.ones(5, 48)]),
        "output_layer.weight": ours["head.weight"],
        "decoder.final_norm.weight": ours["norm.weight"],
        f"{mamba}.in_proj.layer_norm_weight": ours["layers.0.attention_norm.weight"],
        **{f"{mamba}.in_proj.weight.{name}": tensor for name, tensor in of_mamba.items()},
        **{f"{mamba}.conv1d.weight.{name}": ours[f"layers.0.mamba.conv_{name}.weight"] for name in "xBC"},
        **{f"{mamba}.conv1d.bias.{name}": ours[f"layers.0.mamba.conv_{name}.bias"] for name in "xBC"},
        **{f"{mamba}.{name}": ours[f"layers.0.mamba.{name}"] for name in ("A_log", "dt_bias", "D", "norm.weight")},
        f"{mamba}.out_proj.weight": ours["layers.0.mamba.o.weight"],
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": ours["layers.1.mlp_norm.weight"],
        "decoder.layers.1.mlp.linear_fc1.weight": ours["layers.1.mlp.up.weight"],
        "decoder.layers.1.mlp.linear_fc2.weight": ours["layers.1.mlp.down.weight"],
        f"{attention}.linear_qkv.layer_norm_weight": ours["layers.2.attention_norm.weight"],
        f"{attention}.linear_qkv.weight": torch.cat(
            [ours[f"layers.2.attention.{part}.weight"].split(12)[head] for head in range(4) for part in "qkv"]
        ),
        f"{attention}.linear_proj.weight": ours["layers.2.attention.o.weight"],
        "decoder.layers.3.pre_mlp_layernorm.weight": ours["layers.3.mlp_norm.weight"],
        "decoder.layers.3.mlp.router.weight": ours["layers.3.mlp.router.weight"],
        "decoder.layers.3.mlp.router.expert_bias": torch.ones(2),
        **{
            f"decoder.layers.3.mlp.experts.experts.linear_{theirs}.weight": torch.stack(
                [ours[f"layers.3.mlp.experts.{expert}.{name}.weight"] for expert in range(2)]
            )
            for theirs, name in (("fc1", "up"), ("fc2", "down"))
        },
    }
    contents = contents_of(Folder(Path("hybrid"), MemoryStore(Path("hybrid"), theirs), {}, None), model)
    with contents.reader(contents.manifest(whole_config(model))) as reader:
        for name, tensor in ours.items():
            assert torch.equal(reader.tensor(f"{MAIN}.{name}"), tensor), name


def test_the_names_of_a_model_that_megatron_lacks_are_refused() -> None:
    model = model_of(TIED)
    with pytest.raises(CheckpointError, match="Megatron-Core's GPT model has no"):
        megatron_recipes(whole_config(tiny_models.model("gemma2")).model)
    assert "decoder.layers.3.self_attention.linear_qkv.bias" in megatron_recipes(model)
    assert stored_at("decoder.layers.3.self_attention.linear_qkv.bias", ()) is None
