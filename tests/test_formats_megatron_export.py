"""Fault megatron-export: what is exported reads back bit for bit, and Megatron-Core itself goes on from it."""

import json
import math
import shutil
import subprocess
import zlib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.formats import megatron_export
from megapar_models.convert.formats.command import AnyToNative, from_native
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, Contents, Position, StoredAt
from megapar_models.convert.formats.dcp import open_dcp
from megapar_models.convert.formats.megatron_dist import open_megatron_dist
from megapar_models.convert.formats.megatron_export import args_of, export_megatron
from megapar_models.convert.formats.native import write_native
from megapar_models.convert.recipes import recipes, starred
from megapar_models.convert.saved import whole_config
from megapar_models.registry import FAMILIES, validate
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, StorageError
from megapar.checkpoint.format import BUFFER, read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, OptimizerConfig, TrainConfig, flatten
from megapar.declare.params import MAIN
from tests.support import going_on
from tests.support.checkpoints import edit_manifest, files_limited_to, killed_at
from tests.support.foreign_folders import MemoryStore
from tests.support.frameworks import PYTHON, runs
from tests.support.megatron_expected import expected_of

HERE = Path(__file__).parent
KEPT = HERE / "data" / "megatron_dist_experts"  # written by Megatron-Core
needs_megatron = runs("megatron.core")

STEP, UPDATES, SAMPLES, VOCABULARY = 7, 6, 56, 131
BATCH = 8
ADAMW = OptimizerConfig(
    **{"lr": 2e-2, "min_lr": 1e-3, "schedule": "cosine", "warmup_steps": 3, "decay_steps": 20},
    **{"betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.2},  # type: ignore[arg-type]
)
SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 40, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
}
FEWER = {"num_hidden_layers": 2}


def model_like(family: str, moe: Mapping[str, Any] | None = None, **changes: Any) -> ModelConfig:
    options: Any = FAMILIES[family].options
    model = options(family=family, **SIZES | changes)
    if moe is not None:
        model = replace(model, moe=replace(model.moe, **{"moe_intermediate_size": 12, **moe}))
    made: ModelConfig = whole_config(model).model
    return made


MODELS = {
    "dense": model_like("llama"),
    "tied": model_like("llama", tie_word_embeddings=True, attention_bias=True, qk_norm=True),
    "learned": model_like("gpt", num_key_value_heads=6, head_dim=4, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "mixtral": model_like("mixtral", {"num_experts": 4, "balance": "none"}, **FEWER),
    "qwen3_moe": model_like(
        "qwen3_moe", {"num_experts": 4, "balance": "none", "norm_topk_prob": False}, qk_norm=True, **FEWER
    ),
    "latent": model_like(
        "deepseek",
        {
            **{"num_experts": 4, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "balance": "bias"},
            **{"shared_expert_intermediate_size": 20, "routed_scaling_factor": 2.5},
        },
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6},
        **{"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "v_head_dim": 8},
    ),
}


def native(folder: Path, model: ModelConfig, precision: str = "fp32", states: bool = True, **changes: Any) -> Path:
    """A native checkpoint of random weights, moments and biases of routers, by the options ADAMW. Weights of a training
    in bf16 are not those of bf16: the main weights."""
    shapes = native_shapes(model)
    buffers = buffer_shapes(model)
    modules = {starred(name)[0]: starred(name)[0] for name in shapes | buffers}
    made = recipes(shapes | buffers, modules, sizes=model)
    kinds = (MAIN, EXP_AVG, EXP_AVG_SQ) if states else (MAIN,)
    held, stored = {}, {}
    for kind in kinds:
        names = list(shapes | buffers) if kind == MAIN else list(shapes)
        stored[kind] = {name: StoredAt(f"{kind}/{name}") for name in names}
        for name in names:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}.{name}".encode()))
            values = torch.randn((shapes | buffers)[name], generator=generator) * 0.1
            held[f"{kind}/{name}"] = values.square() if kind == EXP_AVG_SQ else values
    contents = Contents("random", MemoryStore(folder.parent, held), made, stored, Position(STEP, UPDATES, SAMPLES))
    train = TrainConfig(steps=40, global_batch_size=BATCH, seq_length=16, precision=precision)  # type: ignore[arg-type]
    config = validate(Config(model=model, train=train, optimizer=replace(ADAMW, **changes)), 1)
    write_native(contents, config, folder)
    options = json.loads(json.dumps(flatten(config)))
    edit_manifest(folder, lambda body: body["trainer"].update(config=options))
    return folder


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    manifest = read_manifest(checkpoint)
    with Reader(checkpoint, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_reads_back_bit_for_bit(name: str, precision: str, tmp_path: Path) -> None:
    source = native(tmp_path / "native", MODELS[name], precision)
    export_megatron(source, tmp_path / "megatron")
    contents = open_megatron_dist(tmp_path / "megatron")
    assert contents.position == Position(STEP, UPDATES, SAMPLES)
    assert contents.model is not None
    again = write_native(contents, whole_config(contents.model), tmp_path / "again")
    assert again.trainer["updates"] == UPDATES
    ours, theirs = tensors_of(source), tensors_of(tmp_path / "again")
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert torch.equal(values, theirs[key]), key
    store = open_dcp(tmp_path / "megatron" / f"iter_{STEP:07d}")
    for key, info in store.tensors.items():
        plain = not key.startswith("optimizer.") and not key.endswith("expert_bias")
        assert info.dtype == (torch.bfloat16 if plain and precision == "bf16" else torch.float32), key


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Megatron-Core wrote itself, as a native checkpoint of a training in bf16."""
    folder = tmp_path_factory.mktemp("kept") / "native"
    contents = open_megatron_dist(KEPT, vocab_size=VOCABULARY)
    assert contents.model is not None
    write_native(contents, whole_config(contents.model), folder)
    edit_manifest(folder, lambda body: body["trainer"]["config"].update({"train.precision": "bf16"}))
    return folder


def test_an_export_has_the_tensors_of_megatrons_own_folder(kept: Path, tmp_path: Path) -> None:
    """Their shapes, dtypes and bits are Megatron's, without the padding of the vocabulary; so are names and objects.

    The norm before experts has the name of Transformer Engine's layers, and there that of Megatron's own.
    """
    export_megatron(kept, tmp_path / "megatron")
    ours, theirs = (open_dcp(folder / f"iter_{STEP:07d}") for folder in (tmp_path / "megatron", KEPT))
    of_local = {key: key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_") for key in ours.tensors}
    assert {*of_local.values()} == theirs.tensors.keys()
    for key, of_theirs in of_local.items():
        shape, dtype = theirs.tensors[of_theirs]
        padded = key.endswith("word_embeddings.weight")
        assert ours.tensors[key] == (((VOCABULARY, *shape[1:]) if padded else shape), dtype), key
        values = theirs.read(of_theirs)
        assert torch.equal(ours.read(key), values[:VOCABULARY] if padded else values), key
    objects = {key for key in theirs.values if "_extra_state" in key}
    assert objects <= ours.values.keys()
    assert all(ours.values[key] == theirs.values[key] for key in objects)


def common_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"iter_{STEP:07d}" / "common.pt", weights_only=False)
    return found


# What Megatron-LM's check_checkpoint_args compares (core_v0.16.1, and main in August 2026).
COMPARED = (
    *("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding", "max_position_embeddings"),
    *("make_vocab_size_divisible_by", "tokenizer_type", "data_parallel_random_init", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)


def test_what_is_no_tensor_has_megatrons_form(tmp_path: Path) -> None:
    source = native(tmp_path / "native", MODELS["qwen3_moe"])
    export_megatron(source, tmp_path / "one")
    export_megatron(source, tmp_path / "two", expert_parallel=True)
    export_megatron(source, tmp_path / "weights", moments=False)
    one, two, weights = (common_of(tmp_path / name) for name in ("one", "two", "weights"))
    assert isinstance(one["args"], Namespace)
    assert all(hasattr(one["args"], name) for name in COMPARED)
    assert (one["args"].no_save_rng, one["args"].no_save_optim, weights["args"].no_save_optim) == (True, False, True)
    assert not weights.keys() & {"optimizer", "opt_param_scheduler"}
    assert not [key for key in open_dcp(tmp_path / "weights" / f"iter_{STEP:07d}").tensors if "optimizer" in key]
    theirs = torch.load(KEPT / f"iter_{STEP:07d}" / "common.pt", weights_only=False)
    groups = one["optimizer"]["optimizer"]["param_groups"]
    for group, expected in zip(groups, theirs["optimizer"]["optimizer"]["param_groups"], strict=True):
        assert expected.keys() <= group.keys()
        assert (group["wd_mult"], group["is_expert_parallel"]) == (expected["wd_mult"], False)
    assert [type(group["step"]) for group in groups] == [int, int]
    assert two["optimizer"][0] == one["optimizer"]
    (of_experts,) = two["optimizer"][1]["optimizer"]["param_groups"]
    assert (of_experts["is_expert_parallel"], of_experts["wd_mult"]) == (True, 1.0)


def test_rates_have_megatrons_lengths(tmp_path: Path) -> None:
    """Its decay ends where ours does: behind the warm-up, or with the run."""
    for number, (changes, warmup, end) in enumerate(
        [
            ({"schedule": "linear"}, 3 * BATCH, 23 * BATCH),
            ({"schedule": "linear", "decay_steps": 0}, 3 * BATCH, 40 * BATCH),
            ({"schedule": "wsd"}, 3 * BATCH, 40 * BATCH),
            ({"schedule": "inverse_sqrt", "warmup_steps": 0, "decay_steps": 0}, BATCH, 40 * BATCH),
            ({"warmup_steps": "30 samples", "decay_steps": "100 samples"}, 30, 130),
        ]
    ):
        source = native(tmp_path / f"native{number}", MODELS["dense"], **changes)
        export_megatron(source, tmp_path / f"{number}")
        rates = common_of(tmp_path / f"{number}")["opt_param_scheduler"]
        assert (rates["lr_warmup_steps"], rates["lr_decay_steps"], rates["num_steps"]) == (warmup, end, SAMPLES)


REFUSED = [
    (MODELS["dense"], {"attention_out_bias": True}, r"attention_out_bias=True|no layers\.0\.attention\.o\.bias"),
    (MODELS["dense"], {"sliding_window": 16}, "does not compute model.sliding_window=16"),
    (MODELS["dense"], {"hidden_act": "gelu_pytorch_tanh"}, "args"),
    (MODELS["latent"], {"q_lora_rank": 0, "rms_norm_eps": 1e-5}, "args.norm_epsilon"),
]


@pytest.mark.parametrize(("model", "changes", "words"), REFUSED)
def test_models_that_megatron_does_not_compute_are_refused(
    model: ModelConfig, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """In one line, before anything is written."""
    with pytest.raises(CheckpointError, match=words) as raised:
        export_megatron(native(tmp_path / "native", replace(model, **changes)), tmp_path / "megatron")
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]


def test_families_and_trainings_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.family=olmo: Megatron-Core's GPT model computes llama"):
        args_of(whole_config(FAMILIES["olmo"].options(family="olmo", vocab_size=VOCABULARY)).model, tmp_path)
    source = native(tmp_path / "native", MODELS["dense"])
    with pytest.raises(ConfigError, match=r"--expert_parallel: .* without experts"):
        export_megatron(source, tmp_path / "megatron", expert_parallel=True)
    with pytest.raises(ConfigError, match="--expert_parallel: is not read for --to fsdp2"):
        from_native(AnyToNative(source, tmp_path / "megatron", "fsdp2", expert_parallel=True))
    for option, value, words in (
        ("optimizer.groups", ["embedding.*:lr=0.1"], "optimizer.groups="),
        ("optimizer.schedule", "module:NAME", "rates fall by cosine, linear, constant"),
    ):
        other = native(tmp_path / option, MODELS["dense"])
        edit_manifest(other, lambda body, o=option, v=value: body["trainer"]["config"].update({o: v}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=words):
            export_megatron(other, tmp_path / "megatron")
        assert not (tmp_path / "megatron").exists()


def test_nothing_is_half_written(kept: Path, tmp_path: Path) -> None:
    """Neither when a file of the source is damaged, nor when the disk is full."""
    shutil.copytree(kept, tmp_path / "native")
    file = next((tmp_path / "native").glob("*.safetensors"))
    with files_limited_to(20_000), pytest.raises(StorageError):
        export_megatron(tmp_path / "native", tmp_path / "runs" / "megatron")
    assert list((tmp_path / "runs").iterdir()) == []
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        export_megatron(tmp_path / "native", tmp_path / "runs" / "megatron")
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(ConfigError, match="exists"):
        export_megatron(kept, tmp_path / "runs")


@pytest.mark.parametrize("number", [3, 20, 40, 41, 42, 43])
def test_an_export_killed_in_the_middle_is_absent(number: int, kept: Path, tmp_path: Path) -> None:
    """At the making of tensors, at each further file, and before the folder gets its name."""
    calls = [(megatron_export, "their_tensor"), (megatron_export, "replace_file"), (Path, "rename")]
    assert killed_at(calls, number, lambda: export_megatron(kept, tmp_path / "megatron"))
    assert not (tmp_path / "megatron").exists()
    export_megatron(kept, tmp_path / "megatron")
    assert open_megatron_dist(tmp_path / "megatron").position.updates == 2


# Megatron-Core itself goes on.

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("dense", {}),
    ("dense", {"tp": 2, "pp": 2}),
    ("tied", {"dp": 2}),
    ("tied", {"tp": 2, "pp": 2}),
    ("learned", {"tp": 2}),
    ("learned", {"pp": 2, "dp": 2}),
    ("mixtral", {"tp": 2}),
    ("mixtral", {"dp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("qwen3_moe", {"pp": 2, "dp": 2, "ep": 2}),
    ("latent", {"tp": 2}),
    ("latent", {"dp": 2, "ep": 2}),
]


def load(folder: Path, out: Path, **spec: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Let Megatron-Core load a folder, in processes of its own. Returns the tensors that it held, and what it said."""
    command = [PYTHON, "-m", "tests.support.megatron_dist_loader", str(folder), str(out), json.dumps(spec)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    with safe_open(out, "pt") as file:
        said = json.loads(file.metadata()["said"])
    return load_file(out), said


def held_of(model: ModelConfig, tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our tensors of those that Megatron held, such as of kind updated/main."""
    of_kind = {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}
    return expected_of(model, of_kind, "")


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_megatron_holds_our_values_and_updates_them(
    name: str, layout: dict[str, int], precision: str, tmp_path: Path
) -> None:
    """Behind its load all bits are ours, and after two updates its weights are those of AdamW on our values."""
    model = MODELS[name]
    source = native(tmp_path / "native", model, precision)
    export_megatron(source, tmp_path / "megatron", expert_parallel=layout.get("ep", 1) > 1)
    theirs, said = load(
        tmp_path / "megatron", tmp_path / "out.safetensors", **layout, fp32=precision == "fp32", updates=2
    )
    ours = tensors_of(source)
    for state, held in ((MAIN, "main"), (EXP_AVG, "exp_avg"), (EXP_AVG_SQ, "exp_avg_sq"), (BUFFER, "buffer")):
        found = held_of(model, theirs, f"loaded/{held}")
        assert {f"{state}.{key}" for key in found} == {key for key in ours if key.startswith(f"{state}.")}
        for key, values in found.items():
            assert torch.equal(values, ours[f"{state}.{key}"]), f"{state}.{key}"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for key, values in held_of(model, theirs, "loaded/param").items():
        assert torch.equal(values, ours[f"main.{key}"].to(dtype)), key
    assert all(bool(tensor.isfinite().all()) for tensor in theirs.values())
    _check_said(said, layout.get("ep", 1) > 1)
    _check_updates(model, ours, theirs, said)


def _check_said(said: Mapping[str, Any], expert_parallel: bool) -> None:
    """Steps, and the rates of the groups by our schedule, which Megatron reads at the samples consumed."""
    assert (said["iteration"], said["consumed_train_samples"], said["steps"]) == (STEP, SAMPLES, [UPDATES])
    share = (1 + math.cos(math.pi * (SAMPLES - 3 * BATCH) / (20 * BATCH))) / 2
    for group in said["groups"]:
        assert group["lr"] == pytest.approx(ADAMW.min_lr + (ADAMW.lr - ADAMW.min_lr) * share, rel=1e-12)
        assert group["weight_decay"] == pytest.approx(0.1 * group["wd_mult"])  # of Megatron's flag
        assert (group["betas"], group["eps"]) == ([*ADAMW.betas], ADAMW.eps)
        assert (group["max_lr"], group["min_lr"], group["step"]) == (ADAMW.lr, ADAMW.min_lr, UPDATES)
    assert [group["is_expert_parallel"] for group in said["groups"]] == [False, False] + [True] * expert_parallel
    assert said["scheduler"]["num_steps"] == SAMPLES
    assert said["scheduler"]["lr_decay_steps"] == 23 * BATCH
    assert said["scheduler"]["lr_warmup_steps"] == 3 * BATCH


def _check_updates(
    model: ModelConfig, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], said: Mapping[str, Any]
) -> None:
    """Torch's AdamW on our values, with Megatron's gradients and rates."""
    gradients = [held_of(model, theirs, f"gradient/{number}") for number in range(2)]
    updated = {state: held_of(model, theirs, f"updated/{state}") for state in ("param", "main", "exp_avg")}
    rates = {group["wd_mult"]: group for group in said["groups"]}
    for key, main in updated["main"].items():
        parameter = torch.nn.Parameter(ours[f"main.{key}"].clone())
        group = rates[0.0 if parameter.ndim == 1 else 1.0]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adamw = torch.optim.AdamW([parameter], betas=tuple(group["betas"]), **options)
        adamw.state[parameter] = {
            "step": torch.tensor(float(UPDATES)),
            "exp_avg": ours[f"exp_avg.{key}"].clone(),
            "exp_avg_sq": ours[f"exp_avg_sq.{key}"].clone(),
        }
        for gradient in gradients:
            parameter.grad = gradient[key].float().reshape(parameter.shape)
            adamw.step()
        torch.testing.assert_close(main, parameter.detach(), rtol=0, atol=1e-6, msg=key)
        torch.testing.assert_close(updated["exp_avg"][key], adamw.state[parameter]["exp_avg"], rtol=0, atol=1e-6)
        assert torch.equal(updated["param"][key], main.to(updated["param"][key].dtype)), key


# Losses go on. Gradients are of Megatron's own model, and updates of its own optimizer, on one rank in fp32.

LENGTH = 10
GOES_ON = {
    "dense": MODELS["dense"],
    "tied": MODELS["tied"],
    "learned": MODELS["learned"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "latent": replace(MODELS["latent"], moe=replace(MODELS["latent"].moe, balance="none")),  # type: ignore[attr-defined]
}


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)


@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("name", GOES_ON)
def test_losses_go_on_in_megatron_and_back(name: str, tmp_path: Path) -> None:
    """Three steps here, five in Megatron from the export, which Megatron saves itself: ten more, here and there, have
    the losses and weights of eighteen steps here."""
    model = GOES_ON[name]
    config = going_on.config_of(model, 4, LENGTH)
    # Where gradients are tiny, Adam divides rounding by rounding: eps and the rate decide what a rounding becomes.
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-3, eps=1e-3))
    _, begun = going_on.go_on(config, None, tmp_path / "begun", 3, tokens_of)
    wanted, end = going_on.go_on(config, begun, tmp_path / "run", 15, tokens_of)
    export_megatron(begun, tmp_path / "megatron")
    save_file({str(number): tokens_of(3 + number) for number in range(15)}, tmp_path / "tokens.safetensors")
    spec = {"fp32": True, "divisible": 1, "tokens": str(tmp_path / "tokens.safetensors")}
    saves = {"saves": str(tmp_path / "theirs"), "saves_after": 5}
    theirs, said = load(tmp_path / "megatron", tmp_path / "out.safetensors", **spec, **saves)
    assert said["steps"] == [3]
    torch.testing.assert_close(theirs["losses"].tolist(), wanted, rtol=1e-6, atol=0)
    weights = going_on.weights_of(end)
    for key, values in held_of(model, theirs, "updated/main").items():
        torch.testing.assert_close(values, weights[key], rtol=0, atol=1e-6, msg=key)
    contents = open_megatron_dist(tmp_path / "theirs")
    assert contents.position == Position(8, 8, 32)
    write_native(contents, config, tmp_path / "back")
    losses, ours = going_on.go_on(config, tmp_path / "back", tmp_path / "again", 10, tokens_of)
    torch.testing.assert_close(losses, wanted[5:], rtol=1e-6, atol=0)
    for key, values in going_on.weights_of(ours).items():
        torch.testing.assert_close(values, weights[key], rtol=0, atol=1e-6, msg=key)
