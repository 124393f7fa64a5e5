"""tools/generate.py and the reader of a checkpoint's options for all tools."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_models.convert import stream
from megapar_models.convert.saved import is_kept, load_model, saved_config
from megapar_models.counts import WholeModel
from megapar_models.generation import Sampling, generate

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import read_manifest
from megapar.config.options import flatten
from tests.support import tiny_models

CONFIG = tiny_models.config(tiny_models.model("llama", num_hidden_layers=1, vocab_size=257))
NEWER = ("train.z_loss", "kernels.loss_chunk", "data.fim_tokens", "model.rope_scaling.factor", "launch.time_limit")


def write_checkpoint(folder: Path) -> Path:
    """Random weights in a checkpoint of step 0."""
    tensors = tiny_models.random_tensors(CONFIG.model)
    folder.mkdir()
    shapes = {name: piece.shape for name, piece in WholeModel(CONFIG.model).tensors().items()}
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
    greedy = Sampling(temperature=0)
    assert generate(older_stage, [[7, 8]], 5, 256, greedy) == generate(stage, [[7, 8]], 5, 256, greedy)


def test_a_tool_reads_no_option_but_those_of_the_model_its_data_and_its_weights(tmp_path: Path) -> None:
    """Every option not needed by a tool may have any value, so one of a new layout cannot be forgotten; files of data
    may be gone."""
    manifest = read_manifest(write_checkpoint(tmp_path / "checkpoint"))
    stated = manifest.trainer["config"] | {"data.train": ["a"], "data.validation": ["b"], "train.seq_length": 40}
    stated["checkpoint.init_from"] = "elsewhere"
    expected = saved_config(replace(manifest, trainer={"config": stated}), precision="bf16")
    assert (expected.data.train, expected.data.validation) == (("a",), ("b",))
    assert (expected.train.precision, expected.train.seq_length) == ("bf16", 40)
    assert expected.checkpoint.init_from == "elsewhere"

    others = [path for path in stated if not is_kept(path)]
    assert {"parallel.tp", "optimizer.shard_ranks", "kernels.backend", "launch.nproc"} < set(others)
    impossible = stated | dict.fromkeys(others, -7)
    assert saved_config(replace(manifest, trainer={"config": impossible}), precision="bf16") == expected
    # One process: an axis of 2 ranks, and stages that are built in parts, would not be.
    assert (expected.parallel.tp, expected.parallel.dp, expected.launch.nproc) == (1, 1, 0)
    assert expected.optimizer.zero_stage < 2


def test_a_checkpoint_without_options_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match=r"trainer\.config is None, not a run's options"):
        saved_config(replace(manifest, trainer={}))
