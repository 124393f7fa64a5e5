"""Training by torchtitan goes on here, and the other way round: the same losses and weights, moments included."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face
from megapar_models.convert.formats.command import AnyToNative, to_native
from megapar_models.convert.formats.fsdp import open_torch
from megapar_models.convert.formats.native import write_native
from megapar_models.convert.formats.torch_export import export_torchtitan
from megapar_models.convert.formats.torchtitan import read_torchtitan, torchtitan_recipes
from megapar_models.convert.recipes import places
from megapar_models.convert.saved import whole_config
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.files import part_toml
from megapar.config.options import Config
from tests.support import foreign_folders, going_on, torchtitan_folders
from tests.support.torchtitan_folders import AFTER, BEFORE, FOLDERS, needs_torchtitan

SAMPLES, LENGTH, VOCABULARY = 4, 12, 31  # of torchtitan_run.py, which imports torchtitan
FIELDS: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"intermediate_size": 20, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
LATENT = {
    **{"model_type": "deepseek_v3", **FIELDS, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8},
    **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 1.5, "norm_topk_prob": True, "tie_word_embeddings": False},
}
LAYOUTS = {"llama3": {"tp": 2}, "qwen3": {"pp": 2}, "deepseek_v3": {"dp": 2, "ep": 2}}


def tokens_of(step: int) -> Tensor:
    """Those of torchtitan_run.py."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)


def config_of(name: str, **layout: int) -> Config:
    case = FOLDERS[name]
    if case["kind"] == "deepseek_v3":
        fields = {key: value for key, value in LATENT.items() if key != "head_dim"}
        model: Any = replace(from_hugging_face(fields), num_nextn_predict_layers=0)
        coef = type(model.moe)().router_aux_loss_coef
        moe = replace(model.moe, balance="bias", router_bias_update_rate=0.0, router_aux_loss_coef=coef)
        return going_on.config_of(replace(model, moe=moe), SAMPLES, LENGTH, **layout)
    kind = {"llama3": "llama"}.get(case["kind"], case["kind"])
    model = from_hugging_face({"model_type": kind, **FIELDS, "tie_word_embeddings": case["tied"]})
    return going_on.config_of(model, SAMPLES, LENGTH, **layout)


def require_equal(checkpoint: Path, parameters: Mapping[str, Tensor], config: Config) -> None:
    """The weights of a native checkpoint are these of torchtitan."""
    ours = going_on.weights_of(checkpoint)
    for name, found in places(torchtitan_recipes(config.model)).items():
        if name in ours:  # the bias of a router is a buffer, and was not moved
            theirs = [
                part.read(parameters[key] if part.expert is None else parameters[key][part.expert])
                for key, part in found
            ]
            torch.testing.assert_close(torch.cat(theirs), ours[name], rtol=0, atol=1e-6)


def go_on_here(folder: Path, wanted: Mapping[str, Any], config: Config) -> None:
    contents = open_torch(folder, config.model)
    assert contents.title == "torchtitan, step 3"
    assert (contents.position.step, contents.position.updates) == (BEFORE, BEFORE)
    write_native(contents, config, folder / "native")
    losses, end = going_on.go_on(config, folder / "native", folder / "run", AFTER, tokens_of)
    torch.testing.assert_close(losses, wanted["losses"], rtol=0, atol=1e-6)
    require_equal(end, wanted["parameters"], config)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_torchtitan_goes_on_here_in_another_layout(name: str, tmp_path: Path) -> None:
    wanted = torchtitan_folders.unpacked(tmp_path, name)
    go_on_here(tmp_path, wanted, config_of(name, **LAYOUTS[FOLDERS[name]["kind"]]))


def test_a_run_of_torchtitan_is_converted_by_its_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`megapar convert RUN NATIVE --config MODEL.toml` takes the newest step."""
    torchtitan_folders.unpacked(tmp_path / "run", "llama3_fused_2")
    with pytest.raises(ConfigError, match="does not describe its model: give --config"):
        to_native(AnyToNative(tmp_path / "run", tmp_path / "native"))
    model = tmp_path / "model.toml"
    model.write_text(part_toml(config_of("llama3_fused_2"), ("model",)))
    to_native(AnyToNative(tmp_path / "run", tmp_path / "native", config=str(model)))
    out, err = capsys.readouterr()
    assert "torchtitan, step 3\n  weights: 21 tensors, float32\n  exp_avg: 21 tensors, float32" in err
    assert "left out: values of dataloader, lr_scheduler, optimizer.param_groups, train_state" in err
    assert out.startswith("step 3: go on from it with --config")


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.parametrize("name", FOLDERS)
def test_training_of_torchtitan_goes_on_here(name: str, tmp_path: Path) -> None:
    wanted = torchtitan_folders.make(tmp_path, name)
    go_on_here(tmp_path, wanted, config_of(name))


@pytest.mark.slow
@needs_torchtitan
@pytest.mark.parametrize("name", FOLDERS)
def test_training_here_goes_on_with_torchtitan(name: str, tmp_path: Path) -> None:
    config = config_of(name, **LAYOUTS[FOLDERS[name]["kind"]])
    _, begun = going_on.go_on(config, None, tmp_path / "begun", BEFORE, tokens_of)
    wanted, end = going_on.go_on(config, begun, tmp_path / "run", AFTER, tokens_of)
    export_torchtitan(begun, tmp_path / f"step-{BEFORE}")
    job = dict(FOLDERS[name])
    found = torchtitan_folders.train(tmp_path, job.pop("ranks"), **job, steps=AFTER, load=BEFORE)
    torch.testing.assert_close(found["losses"], wanted, rtol=0, atol=1e-6)
    require_equal(end, found["parameters"], config)


def plain_config(model_type: str, **fields: Any) -> Config:
    model = from_hugging_face({"model_type": model_type, **FIELDS, **fields})
    return whole_config(replace(model, num_nextn_predict_layers=0))


MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS = {
    "llama": lambda: plain_config("llama", tie_word_embeddings=True),
    "qwen3": lambda: plain_config("qwen3"),
    "qwen3_moe": lambda: plain_config("qwen3_moe", **MIXTURE),
    "deepseek_v3": lambda: config_of("deepseek_v3_2"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_native_checkpoint_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]()
    native = foreign_folders.random_native(config, tmp_path)
    export_torchtitan(native, tmp_path / "step-4")
    contents = open_torch(tmp_path, config.model)  # the folder of all steps: the newest is taken
    assert contents.title == "torchtitan, step 4"
    write_native(contents, config, tmp_path / "again")
    foreign_folders.require_equal(native, tmp_path / "again")


def stored(config: Config, **changes: Any) -> foreign_folders.store_of:
    """A folder of torchtitan without an optimizer, in memory."""
    tensors: dict[str, Any] = {name: recipe.shape for name, recipe in torchtitan_recipes(config.model).items()}
    return foreign_folders.store_of({**tensors, **changes})


def test_names_before_0_3_0_are_read() -> None:
    config = CONFIGS["qwen3_moe"]()
    older = {}
    for name, info in stored(config).tensors.items():
        name = name.replace(".qkv_linear.", ".").replace("lm_head.", "output.")
        name = name.replace(".routed_experts.inner_experts.", ".experts.")
        older[name.removesuffix("_EFD").removesuffix("_EDF")] = info.shape
    assert {"output.weight", "layers.1.attention.wk.weight", "layers.0.moe.experts.w2"} <= older.keys()
    read_torchtitan(foreign_folders.store_of(older), config.model).check()


def test_other_folders_are_refused_by_name() -> None:
    config = CONFIGS["llama"]()
    gemma = plain_config("gemma")
    with pytest.raises(ConfigError, match=r"model\.family=gemma: torchtitan's names are known of llama, qwen3_moe"):
        read_torchtitan(stored(config), gemma.model)
    biased = plain_config("llama", attention_bias=False, mlp_bias=False, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"missing layers.2.attention.qkv_linear.wk.weight"):
        read_torchtitan(stored(config), biased.model).check()
    with pytest.raises(CheckpointError, match=r"holds layers.0.attention.q_norm.weight, which the model of --config"):
        read_torchtitan(stored(config, **{"layers.0.attention.q_norm.weight": (6,)}), config.model)
    fused = {"optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg": (40, 16)}
    with pytest.raises(CheckpointError, match=r"wqkv.weight.exp_avg has 40 rows, and those of the model 48"):
        read_torchtitan(stored(config, **fused), config.model)
    store = stored(config)
    store.values = {"train_state.step": "7"}
    with pytest.raises(CheckpointError, match=r"train_state.step is '7', and no count of steps"):
        read_torchtitan(store, config.model)
