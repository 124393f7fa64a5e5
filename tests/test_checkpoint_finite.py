"""Values no training can go on from: neither saved nor loaded, and never in place of good ones."""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.base.errors import CheckpointError, NumericError
from megapar.checkpoint.format import checkpoint_folders
from megapar.checkpoint.load import load, load_weights, weight_slices
from megapar.checkpoint.tiers import FOLDER
from megapar.checkpoint.values import examine
from megapar.config.options import CheckpointConfig
from megapar.declare import context
from megapar.declare.sharding import model_dtype
from megapar.optimizer.optimizers import Optimizers
from megapar.train.saver import Saver
from tests.support import program
from tests.support.checkpoints import MODEL, STATE, edit_tensor, load_toy, outcome, save_toy, toy_slices
from tests.support.distributed import run_ranks
from tests.support.small_training import make_config, make_state, step

NONE = {"main": math.nan, "exp_avg": -math.inf, "exp_avg_sq": -1e-30}


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 200_000])
def test_one_pass_finds_the_crc_and_any_bad_value(size: int) -> None:
    values = torch.randn(size) * 1e30
    assert examine("main.p", values) == (zlib.crc32(values.numpy().tobytes()), "")
    for place in {0, size // 2, size - 1}:
        for bad in (math.nan, -math.nan, math.inf, -math.inf):
            for nonnegative in (False, True):
                spoilt = values.abs()
                spoilt[place] = bad
                assert "not finite" in examine("main.p", spoilt, nonnegative=nonnegative)[1]
        for edge in (3.4e38, 1e-45, 0.0, -0.0):
            fine = values.abs()
            fine[place] = edge
            assert examine("exp_avg_sq.p", fine, nonnegative=True)[1] == ""
            assert examine("main.p", -fine)[1] == ""
        spoilt = values.abs()
        spoilt[place] = -1e-38
        assert "negative" in examine("exp_avg_sq.p", spoilt, nonnegative=True)[1]
        assert examine("exp_avg.p", spoilt)[1] == ""
    assert examine("main.p", torch.full((size,), 3e38))[1] == "", "a sum that overflows is only a suspicion"
    assert examine("main.p", torch.arange(5))[1] == ""
    assert "not finite" in examine("main.p", torch.tensor([1.0, math.nan], dtype=torch.bfloat16))[1]
    assert examine("main.p", torch.empty(0)) == (0, "")


def spoil_and_save(root: str) -> list[tuple[str, int, str]]:
    """Each state in turn holds one bad value on rank 1, in a synchronous and an asynchronous save with one checkpoint
    kept."""
    outcomes = []
    for kind in ("sync", "async"):
        options = CheckpointConfig(async_save=kind == "async", keep_last=1)
        state = make_state(replace(make_config(dp=2), checkpoint=options))
        with Saver(state, Path(root) / kind) as saver:
            step(state)
            saver.save(state)
            list(saver.completed(wait=True))
            for name, value in NONE.items():
                state.step += 1
                flat = next(state.optimizer.slices()).tensors[name]
                kept = flat[3].clone()
                if state.ctx.world.rank == 1:
                    flat[3] = value

                def save(saver: Saver = saver, state: object = state) -> None:
                    saver.save(state)  # type: ignore[arg-type]
                    list(saver.completed(wait=True))

                outcomes.append(outcome(save))
                flat[3] = kept
    return outcomes


def test_a_save_of_a_bad_value_fails_by_name_and_removes_nothing(tmp_path: Path) -> None:
    """Fault non-finite-state: NumericError on every rank with tensor, rank and step; the one good checkpoint stays."""
    ranks = run_ranks(2, spoil_and_save, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 2 * len(NONE)
    for number, (kind, code, message) in enumerate(ranks[0]):
        assert (kind, code) == ("NumericError", NumericError.exit_code)
        name = list(NONE)[number % 3]
        assert message.startswith(f"checkpoint of step {2 + number % 3} not saved (rank 1): rank 1: {name}.")
        assert ("negative" if name == "exp_avg_sq" else "not finite") in message
        assert "\n" not in message
    for kind in ("sync", "async"):
        assert sorted(p.name for p in (tmp_path / kind / FOLDER).iterdir()) == ["latest", "step_00000001"]


def test_weights_that_the_last_update_spoiled_are_not_saved(tmp_path: Path) -> None:
    """Fault non-finite-state in the program: the loss of the step was finite, what its update left is not."""
    flags = ("--checkpoint.every", "1", "--checkpoint.keep_last", "1", "--log.no-tensorboard")
    assert program.run("--train.steps", "2", *flags, cwd=tmp_path).code == 0
    bad = ("--train.steps", "4", *flags)
    for save in ("--checkpoint.no-async_save", "--checkpoint.async_save"):
        ended = program.run(*bad, save, cwd=tmp_path, plant=spoil_after_update)
        assert ended.code == 5, ended.err
        # Behind an asynchronous save the next step may see it first.
        first = "checkpoint of step 3 not saved: rank 0: main." if save.count("no-") else ""
        assert ended.err.startswith(f"NumericError: {first}")
        assert ended.err.count("\n") == 1
        folders = checkpoint_folders(tmp_path / "run" / FOLDER)
        assert [folder.name for folder in folders] == ["step_00000002"]
    ended = program.run("--train.steps", "4", *flags, cwd=tmp_path)
    assert ended.code == 0, ended.err


def spoil_after_update() -> None:
    """The update of the third step leaves an infinite weight."""
    original = Optimizers.step

    def step(self: Optimizers, *args: Any) -> None:
        original(self, *args)
        if self.step_count == 3:
            next(self.slices()).main[5] = math.inf

    Optimizers.step = step  # type: ignore[method-assign]


def enlarge(value: float) -> Callable[[], None]:
    """Plant a weight of this size after the update of the third step."""

    def plant() -> None:
        original = Optimizers.step

        def step(self: Optimizers, *args: Any) -> None:
            original(self, *args)
            if self.step_count == 3:
                next(self.slices()).main[5] = value

        Optimizers.step = step  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize(
    ("precision", "fits", "too_large"),
    [("fp16", 65_519.0, 65_520.0), pytest.param("bf16", 3.3953e38, 3.397e38, marks=pytest.mark.slow)],
)
def test_weights_beyond_the_precision_are_not_saved(
    precision: str, fits: float, too_large: float, tmp_path: Path
) -> None:
    """Fault weights-beyond-precision: finite in fp32, infinite in the model's precision. Nothing is removed."""
    flags = ("--checkpoint.every", "1", "--checkpoint.keep_last", "1", "--log.no-tensorboard")
    flags = (*flags, "--train.precision", precision, "--train.steps", "3")
    folder = tmp_path / "run" / FOLDER
    ended = program.run(*flags, cwd=tmp_path, plant=enlarge(-too_large))
    assert ended.code == 5, ended.err
    assert ended.err.startswith("NumericError: checkpoint of step 3 not saved: rank 0: main.")
    assert f" of train.precision holds {torch.finfo(model_dtype(precision)).max:.6g} at most; " in ended.err
    assert ended.err.count("\n") == 1
    assert [path.name for path in checkpoint_folders(folder)] == ["step_00000002"]
    ended = program.run(*flags, cwd=tmp_path, plant=enlarge(fits))
    assert ended.code == 0, ended.err
    assert [path.name for path in checkpoint_folders(folder)] == ["step_00000003"]


@pytest.mark.parametrize("start", ["resume", pytest.param("init_from", marks=pytest.mark.slow)])
def test_weights_beyond_the_precision_are_not_loaded(start: str, tmp_path: Path) -> None:
    """Fault weights-beyond-precision: a run in fp32 may have them, and its checkpoint is not for fp16."""
    flags = ("--log.no-tensorboard", "--train.steps")
    assert program.run(*flags, "3", cwd=tmp_path, plant=enlarge(70_000.0)).code == 0
    path = f"run/{FOLDER}/step_00000003"
    other = () if start == "resume" else ("--run_dir", "other")
    ended = program.run(*flags, "4", "--train.precision", "fp16", f"--checkpoint.{start}", path, *other, cwd=tmp_path)
    assert ended.code == 4, ended.err
    assert ended.err.startswith(f"CheckpointError: {path} does not fit this run: ")
    assert " holds 70000, and float16 of train.precision holds 65504 at most; go on in " in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", STATE)
def test_a_checkpoint_that_holds_a_bad_value_is_refused_with_the_tensors_name(tmp_path: Path, name: str) -> None:
    """Fault non-finite-state: one saved by an older version, its CRC right."""
    save_toy(tmp_path, 2)
    path = save_toy(tmp_path, 3)
    edit_tensor(path, f"{name}.p1#0", lambda values: values[4].fill_(NONE[name]))
    with pytest.raises(CheckpointError) as caught:
        load_toy(path, toy_slices(9))
    message = str(caught.value)
    assert f"{name}.p1 holds" in message
    assert f"--checkpoint.resume {tmp_path / 'step_00000002'} goes on from the one before" in message
    parameters = [torch.nn.Parameter(torch.zeros(6, 5)), torch.nn.Parameter(torch.zeros(7))]
    for parameter, item in zip(parameters, toy_slices(9), strict=True):
        parameter.spec = item.spec  # type: ignore[attr-defined]
    ctx = context.single()

    def weights() -> None:
        load_weights(path, slices=weight_slices(parameters), ctx=ctx, model_config=MODEL)

    assert (outcome(weights)[0] == "CheckpointError") == (name == "main")


def test_a_flipped_bit_names_the_checkpoint_before_as_a_command(tmp_path: Path) -> None:
    """Fault flipped-bit: of those before, the newest complete one; for the only one the line says there is none."""
    path = save_toy(tmp_path, 1)
    edit_bits(path)
    with pytest.raises(CheckpointError, match="no older checkpoint lies beside it"):
        load(path, slices=toy_slices(9), ctx=context.single(), model_config=MODEL)
    for number in (2, 3, 100_000_000):
        path = save_toy(tmp_path, number)
    edit_bits(path)
    (tmp_path / "step_00000003/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"CRC-32.*; --checkpoint\.resume {tmp_path}/step_00000002 goes on"):
        load(path, slices=toy_slices(9), ctx=context.single(), model_config=MODEL)


def edit_bits(path: Path) -> None:
    file = path / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
