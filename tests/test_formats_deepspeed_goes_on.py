"""Training by DeepSpeed goes on here, and the other way round: the same losses and weights, moments included."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face, names_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.formats.deepspeed_contents import export_universal
from megapar_models.convert.formats.detect import Asked, open_folder
from megapar_models.convert.formats.native import write_native
from megapar_models.convert.formats.torch_export import in_memory
from megapar_models.convert.huggingface import their_tensor
from megapar_models.convert.saved import whole_config
from safetensors.torch import load_file
from torch import Tensor

from megapar.checkpoint.format import read_manifest
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.declare.params import MAIN
from tests.support import deepspeed_run, going_on, program
from tests.support.deepspeed_run import KEPT, KEPT_FIELDS
from tests.support.distributed import run_ranks
from tests.support.frameworks import runs

ROOT = Path(__file__).parents[1]
SAMPLES, LENGTH, VOCABULARY = 4, 16, 31
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 6},
    **{"num_key_value_heads": 2, "intermediate_size": 38, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "initializer_range": 0.1, "tie_word_embeddings": False},
}
TIED = {**LLAMA, "tie_word_embeddings": True}
CASES = [
    pytest.param(LLAMA, 1, {"tp": 2, "pp": 2}, id="zero1"),
    pytest.param(TIED, 2, {"tp": 2, "pp": 2}, id="zero2-tied"),
    pytest.param(LLAMA, 3, {"tp": 2, "pp": 2}, id="zero3"),
    pytest.param(TIED, 3, {"tp": 2}, id="zero3-tied"),
]
needs_deepspeed = runs("deepspeed", here=True)


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)


def train_there(
    fields: Mapping[str, Any], stage: int, steps: range, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """`deepspeed_run.train` on two ranks."""
    train = partial(deepspeed_run.train, fields, stage, steps, tokens_of, **options)
    found: tuple[list[float], dict[str, Tensor]] = run_ranks(2, train)[0]
    return found


def tensors_of(checkpoint: Path, model: ModelConfig, state: str = MAIN) -> dict[str, Tensor]:
    """A state of a native checkpoint by the names that transformers has in memory."""
    manifest = read_manifest(checkpoint)
    return {
        name: their_tensor(checkpoint, manifest, recipe, state=state)
        for name, parameter in in_memory(hf_recipes(model), names_of(model)).items()
        for _, recipe in parameter.parts
    }


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Differences are below 1e-6 of a tensor's largest value."""
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        bound = 1e-6 * expected[name].abs().max().item()
        torch.testing.assert_close(ours, expected[name], rtol=0, atol=bound, msg=lambda text, of=name: f"{of}: {text}")


def kept(folder: Path) -> Path:
    """The kept folder, as transformers' Trainer has it in checkpoint-3: with config.json beside `latest`."""
    with zipfile.ZipFile(ROOT / f"tests/data/deepspeed/{KEPT}.zip") as packed:
        packed.extractall(folder)
    (folder / "config.json").write_text(json.dumps(KEPT_FIELDS))
    return folder


def test_a_native_checkpoint_has_what_deepspeed_held(tmp_path: Path) -> None:
    """Main weights in fp32 of a run in bf16, both moments, steps."""
    contents = open_folder(kept(tmp_path / "theirs"))
    assert contents.model == from_hugging_face(KEPT_FIELDS)
    assert contents.title == "DeepSpeed's ZeRO-2, step 3"
    manifest = write_native(contents, whole_config(contents.model), tmp_path / "native")
    assert (manifest.step, manifest.consumed_samples, manifest.trainer["updates"]) == (3, 12, 3)
    assert manifest.trainer["loss_scale"] is None
    held = load_file(tmp_path / "theirs/held.safetensors")
    for state in (MAIN, "exp_avg", "exp_avg_sq"):
        found = tensors_of(tmp_path / "native", contents.model, state)
        theirs = "fp32" if state == MAIN else state
        assert {f"{theirs}/{name}" for name in found} == {name for name in held if name.startswith(f"{theirs}/")}
        for name, tensor in found.items():
            assert torch.equal(tensor, held[f"{theirs}/{name}"]), (state, name)


def test_the_programs_go_on_from_a_folder_of_deepspeed(tmp_path: Path) -> None:
    """Two tensor ranks read it themselves, or what `megapar convert` has made of it: the same losses, bit for bit. Of
    the Trainer's model.safetensors in the same folder nothing is read (fault deepspeed-weights-alone)."""
    folder = kept(tmp_path / "theirs")
    config = folder / "config.json"
    (folder / "model.safetensors").write_bytes(b"of no use")
    words = [str(folder), str(tmp_path / "native"), "--config", str(config)]
    ended = program.Program(ROOT / "tools/convert_checkpoint.py", words, tmp_path, {}).wait()
    assert ended.code == 0, ended.err
    assert "DeepSpeed's ZeRO-2, step 3" in ended.err
    losses = []
    for source in (folder, tmp_path / "native"):
        flags = {
            "--config": str(config),
            "--checkpoint.resume": str(source),
            "--launch.nproc": "2",
            "--parallel.tp": "2",
            "--data.train": "synthetic",
            "--train.steps": "5",
            "--train.seq_length": "8",
            "--train.global_batch_size": "4",
            "--optimizer.lr": "1e-2",
            "--run_dir": source.name,
        }
        ended = program.run(*(word for pair in flags.items() for word in pair), cwd=tmp_path)
        assert ended.code == 0, ended.err
        lines = (tmp_path / source.name / "metrics.jsonl").read_text().splitlines()
        losses.append({line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line})
    assert losses[0].keys() == {4, 5}
    assert losses[0] == losses[1]


@pytest.mark.slow  # starts seven processes
@needs_deepspeed
@pytest.mark.parametrize(("fields", "stage", "layout"), CASES)
def test_training_of_deepspeed_goes_on_here(
    fields: dict[str, Any], stage: int, layout: dict[str, int], tmp_path: Path
) -> None:
    """From the plain form. What is read of the universal form that DeepSpeed makes of it is the same bit for bit."""
    wanted, weights = train_there(fields, stage, range(13), save=tmp_path / "theirs")
    config = going_on.config_of(from_hugging_face(fields), SAMPLES, LENGTH, **layout)
    for form in ("step3", "step3_universal"):
        contents = open_folder(tmp_path / "theirs" / form, Asked(config.model))
        assert contents.title == f"DeepSpeed's {f'ZeRO-{stage}' if form == 'step3' else 'universal form'}, step 3"
        manifest = write_native(contents, config, tmp_path / form)
        assert (manifest.step, manifest.consumed_samples, manifest.trainer["updates"]) == (3, 3 * SAMPLES, 3)
    for state in (MAIN, "exp_avg", "exp_avg_sq"):
        plain, universal = (tensors_of(tmp_path / form, config.model, state) for form in ("step3", "step3_universal"))
        assert all(torch.equal(universal[name], tensor) for name, tensor in plain.items())
    losses, end = going_on.go_on(config, tmp_path / "step3", tmp_path / "run", 10, tokens_of)
    torch.testing.assert_close(losses, wanted[3:], rtol=1e-6, atol=0)
    require_close(tensors_of(end, config.model), weights)


@pytest.mark.slow  # starts six processes or more
@needs_deepspeed
@pytest.mark.parametrize(("fields", "stage", "layout"), CASES)
def test_training_here_goes_on_with_deepspeed(
    fields: dict[str, Any], stage: int, layout: dict[str, int], tmp_path: Path
) -> None:
    """Rates still grow when DeepSpeed goes on."""
    model = from_hugging_face(fields)

    def config(**layout: int) -> Config:
        made = going_on.config_of(model, SAMPLES, LENGTH, **layout)
        return replace(made, optimizer=replace(made.optimizer, warmup_steps=20))

    _, begun = going_on.go_on(config(tp=2), None, tmp_path / "begun", 3, tokens_of)
    wanted, end = going_on.go_on(config(**layout), begun, tmp_path / "run", 10, tokens_of)
    export_universal(begun, tmp_path / "universal")
    losses, weights = train_there(fields, stage, range(3, 13), load=tmp_path / "universal", warmup=20)
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0)
    require_close(tensors_of(end, model), weights)
