"""tools/generate.py and the reader of a checkpoint's options that all tools share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_models.build import logical_tensors
from megapar_models.convert import stream
from megapar_models.convert.saved import load_model, saved_config

from megapar.checkpoint.format import read_manifest
from megapar.config import flatten
from megapar.errors import CheckpointError
from tests.support import tiny_models
from tools.generate import Arguments, generate

CONFIG = tiny_models.config(tiny_models.model("llama", num_hidden_layers=1, vocab_size=257))
NEWER = ("train.z_loss", "kernels.loss_chunk", "data.fim_tokens", "model.rope_scaling.factor", "launch.time_limit")


def write_checkpoint(folder: Path) -> Path:
    """Random weights in a checkpoint of step 0."""
    tensors = tiny_models.random_tensors(CONFIG.model)
    folder.mkdir()
    shapes = {name: piece.shape for name, piece in logical_tensors(CONFIG.model).items()}
    stream.write_weights(folder, CONFIG, shapes, lambda name: tensors[name], shard_bytes=10**9)
    return folder


def test_a_checkpoint_older_than_an_option_is_read_and_the_option_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = write_checkpoint(tmp_path / "now")
    without = {path: value for path, value in flatten(CONFIG).items() if path not in NEWER}
    monkeypatch.setattr(stream, "flatten", lambda config: without)
    older = write_checkpoint(tmp_path / "older")
    assert not set(NEWER) & set(read_manifest(older).trainer["config"])
    expected, stage = load_model(now)
    config, older_stage = load_model(older)
    assert config == expected
    assert config.model == CONFIG.model
    for (name, param), other in zip(stage.named_parameters(), older_stage.parameters(), strict=True):
        assert torch.equal(param, other), name
    args = Arguments(older, "", tokens=5, temperature=0)
    assert generate(config, older_stage, [7, 8], 256, args) == generate(expected, stage, [7, 8], 256, args)


def test_options_are_those_of_one_process_and_data_that_is_gone_does_not_matter(tmp_path: Path) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path / "checkpoint"))
    stated = manifest.trainer["config"] | {
        "parallel.tp": 2,
        "optimizer.zero_stage": 3,
        "launch.nproc": 8,
        "data.train": ["a"],
    }
    stated |= {"parallel.dp": 4, "data.validation": ["b"], "train.eval_every": 5, "train.eval_samples": 8}
    found = saved_config(replace(manifest, trainer=manifest.trainer | {"config": stated}), precision="bf16")
    assert (found.parallel.tp, found.parallel.dp, found.launch.nproc) == (1, 1, 0)
    assert found.optimizer.zero_stage < 2, "with 2 and 3 the model would be built in parts"
    assert (found.data.train, found.data.validation) == (("a",), ("b",))
    assert found.train.precision == "bf16"


def test_a_checkpoint_without_options_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match=r"trainer\.config is None, not a run's options"):
        saved_config(replace(manifest, trainer={}))
