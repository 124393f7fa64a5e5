"""Stages balanced by measured costs: what is measured, what follows from it, and its persistence in a resumed run."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megapar_models.build import StageBuilder, stage_layers
from megapar_models.counts import WholeModel
from megapar_models.families.qwen3_moe import Qwen3MoeExperts, Qwen3MoeModel
from megapar_models.registry import validate
from megapar_tools.plan import measure
from torch.utils.flop_counter import FlopCounterMode

from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, ParallelConfig, TrainConfig
from tests.support import program

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_what_is_timed_is_a_layer_the_embedding_and_the_head(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced by a counter of FLOPs. All layers and the head make up the FLOPs of the model."""

    def flops_of(run: Callable[[], None], where: torch.device) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    monkeypatch.setattr(measure, "_seconds", flops_of)
    model = ModelConfig(family=family, hidden_size=64, num_hidden_layers=5, intermediate_size=96, **SIZES)
    # So short that attention's scores, which the counter and the formula count differently, are less than 2%.
    train = TrainConfig(seq_length=2, micro_batch_size=3, global_batch_size=12)
    config = validate(Config(model=model, train=train, parallel=ParallelConfig(pp=2, balance="measured")), 2)
    layers, first, last = measure.measure(StageBuilder(), config, torch.device("cpu"))
    tokens = 6
    head = 6 * 300 * 64 * tokens
    assert first == 0, "a lookup"
    assert last == pytest.approx(head * 384 / 300), "the vocabulary is padded to 384"
    assert len(layers) == 5
    assert sum(layers) == pytest.approx(WholeModel(config.model).flops_per_token(2) * tokens - head, rel=0.02)


def test_layers_of_other_kinds_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture with some plain layers, each kind once; computed costs count the chosen experts of a token."""
    timed = []
    monkeypatch.setattr(measure, "_seconds", lambda run, where: timed.append(run) or float(len(timed)))
    moe = Qwen3MoeExperts(8, 2, moe_intermediate_size=96, mlp_only_layers=(0, 1))
    model = Qwen3MoeModel(
        family="qwen3_moe", hidden_size=64, num_hidden_layers=5, intermediate_size=1000, moe=moe, **SIZES
    )
    train = TrainConfig(seq_length=2, micro_batch_size=3, global_batch_size=12)
    config = validate(Config(model=model, train=train, parallel=ParallelConfig(pp=2)), 2)
    assert measure.measure(StageBuilder(), config, torch.device("cpu")) == ([1.0, 1.0, 2.0, 2.0, 2.0], 3.0, 4.0)
    # A token's MLP is 1000 wide in the first two layers and 2 * 96 in the others. With all 8 * 96 it would be 2, 3.
    assert [len(layers) for layers in stage_layers(config)] == [1, 4]


def costs(layer: float, first: float, last: float) -> Callable[[], None]:
    """Plants measured costs."""

    def plant() -> None:
        measure.measure = lambda builder, config, where: ([layer] * config.model.num_hidden_layers, first, last)

    return plant


def partition_of(folder: Path) -> list[int]:
    return tomllib.loads((folder / "run/config.toml").read_text())["parallel"]["partition"]


def test_a_run_keeps_the_stages_that_it_has_measured(tmp_path: Path) -> None:
    """tiny.toml has four layers. An expensive head gets a stage with fewer of them."""
    flags = ["--launch.nproc", "2", "--parallel.pp", "2", "--parallel.balance", "measured", "--checkpoint.every", "1"]
    flags += ["--optimizer.warmup_steps", "0"]
    ended = program.run(*flags, "--train.steps", "1", cwd=tmp_path, plant=costs(1.0, 0.0, 2.0))
    assert ended.code == 0, ended.err
    assert partition_of(tmp_path) == [3, 1]
    assert (
        "stages of 3, 1 layers: a layer takes 1e+03 ms, the embedding 0 ms, norm, head and loss 2e+03 ms" in ended.out
    )
    assert "# measured at the first start" in (tmp_path / "run/config.toml").read_text()

    # Had it measured again, the first stage would have the fewer layers.
    ended = program.run(*flags, "--train.steps", "2", cwd=tmp_path, plant=costs(1.0, 2.0, 0.0))
    assert ended.code == 0, ended.err
    assert partition_of(tmp_path) == [3, 1]
    assert "stages of 3, 1 layers, as measured at the first start" in ended.out

    # Another layout has other stages, and what the user says comes first.
    other = [*flags, "--parallel.schedule", "interleaved", "--parallel.vpp", "2"]
    ended = program.run(*other, "--train.steps", "3", cwd=tmp_path, plant=costs(1.0, 2.0, 0.0))
    assert ended.code == 0, ended.err
    assert partition_of(tmp_path) == [0, 1, 1, 2]
    ended = program.run(
        *flags, "--train.steps", "4", "--parallel.partition", "1", "3", cwd=tmp_path, plant=costs(1, 0, 2)
    )
    assert partition_of(tmp_path) == [1, 3]


def test_a_dry_run_says_that_it_measures_nothing(tmp_path: Path) -> None:
    ended = program.run("--parallel.pp", "2", "--parallel.balance", "measured", "--dry_run", cwd=tmp_path)
    assert (
        "stages balanced by FLOPs here: with parallel.balance=measured a run measures when it first starts" in ended.out
    )
