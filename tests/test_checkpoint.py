"""Saving and loading over real ranks: bitwise resume, other layouts, failures shared by all ranks, and kill -9."""

import math
import resource
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.convert.saved import load_model
from megapar_models.registry import validate, weight_options
from torch import Tensor

from megapar.base.errors import CheckpointError, StorageError
from megapar.base.grid import Grid
from megapar.checkpoint.boxes import logical_boxes
from megapar.checkpoint.format import find_complete, read_manifest
from megapar.checkpoint.load import Reader, load, load_weights
from megapar.checkpoint.resume import choose
from megapar.checkpoint.save import save
from megapar.config.options import CheckpointConfig, Config, flatten
from megapar.declare import context
from megapar.declare.params import make_piece
from megapar.step.state import TrainState
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support.checkpoints import (
    STATE,
    cut_slices,
    edit_manifest,
    exported,
    files_limited_to,
    kill_saves,
    load_toy,
    make_slice,
    outcome,
    save_toy,
    spec_of_piece,
    toy_slices,
    whole_spec,
)
from tests.support.distributed import run_ranks
from tests.support.small_training import make_config, make_state, step
from tools.convert_checkpoint import Upcycle, upcycle_dense


def save_state(state: TrainState, root: Path) -> Path:
    return save(
        root,
        slices=state.optimizer.slices(),
        ctx=state.ctx,
        replicated=not state.grads.layout.sharded,
        step=state.step,
        consumed_samples=state.consumed_samples,
        layout={"tp": state.ctx.tp.size, "pp": state.ctx.pp.size, "dp": state.ctx.dp.size},
        model_config=weight_options(state.config),
        trainer={"adam_step": state.optimizer.step_count, "config": flatten(state.config)},
        data={},
    )


def load_state(state: TrainState, path: Path) -> None:
    """Resume as a trainer does."""
    manifest = load(path, slices=state.optimizer.slices(), ctx=state.ctx, model_config=weight_options(state.config))
    state.optimizer.refresh_params_from_main()
    state.optimizer.step_count = manifest.trainer["adam_step"]
    state.step, state.consumed_samples = manifest.step, manifest.consumed_samples


def contents(state: TrainState) -> list[Tensor]:
    """All parts of this rank's past read by a step."""
    kept = [item.tensors[name].clone() for item in state.optimizer.slices() for name in STATE]
    return [*kept, state.weights.flat.clone(), torch.tensor([state.step, state.optimizer.step_count])]


def resume_twice(root: str, configs: list[Config]) -> list[tuple[list[Tensor], list[Tensor]]]:
    found = []
    for number, config in enumerate(configs):
        torch.manual_seed(number)
        straight = make_state(config)
        for _ in range(2):
            step(straight)
        path = save_state(straight, Path(root) / str(number))
        torch.manual_seed(99)
        step(straight)
        resumed = make_state(config, seed=2)
        assert choose("auto", path.parent, resumed.ctx) == path
        load_state(resumed, path)
        torch.manual_seed(99)
        step(resumed)
        found.append((contents(straight), contents(resumed)))
    return found


CONFIGS = [
    make_config(tp=2, pp=2, dp=1),
    make_config(tp=2, dp=2, sequence_parallel=True),
    make_config(dp=2, pp=2, precision="bf16"),
    make_config(dp=4, zero_stage=0),
    make_config(tp=4, dp=1, precision="bf16"),
    make_config(dp=2, pp=2, zero_stage=3, precision="bf16"),
    make_config(tp=2, dp=2, zero_stage=2),
    make_config(dp=4, zero_stage=3),
    make_config(dp=4, zero_stage=3, shard_ranks=2),
    make_config(dp=4, zero_stage=1, shard_ranks=2),
]


@pytest.mark.slow  # tests/test_training.py resumes as well
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(tmp_path: Path) -> None:
    """Fault resumption-is-bitwise: weights, main weights, moments and their dtypes after the next step, in every kind
    of layout."""
    for rank in run_ranks(4, resume_twice, str(tmp_path), CONFIGS):
        for config, (straight, resumed) in zip(CONFIGS, rank, strict=True):
            assert len(straight) == len(resumed)
            for expected, actual in zip(straight, resumed, strict=True):
                assert actual.dtype == expected.dtype
                assert torch.equal(actual, expected), config.parallel


def save_load_save(root: str, configs: list[Config]) -> None:
    path = None
    for number, config in enumerate(configs):
        state = make_state(config)
        if path is None:
            step(state)
        else:
            load_state(state, path)
        path = save_state(state, Path(root) / str(number))


def test_a_checkpoint_wanders_through_layouts_unchanged(tmp_path: Path) -> None:
    """Faults any-layout-loads and zero-checkpoint-elsewhere, over real ranks: what each layout loaded and saved again
    is what the first one saved. Tools read all of them alike: exports, mixtures made of them and loaded models are
    equal (fault any-layout-exports)."""
    run_ranks(4, save_load_save, str(tmp_path), CONFIGS)
    paths = [tmp_path / str(number) / "step_00000001" for number in range(len(CONFIGS))]
    exports = [exported(path) for path in paths]
    assert exports.count(exports[0]) == len(paths)
    mixtures = [upcycled_weights(path) for path in paths]
    assert mixtures.count(mixtures[0]) == len(paths)
    _, expected = load_model(paths[0], precision="fp32")
    for path in paths[1:]:
        _, stage = load_model(path, precision="fp32")
        for param, first_one in zip(stage.parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, first_one)
    with Reader(paths[0], read_manifest(paths[0])) as first:
        for path in paths[1:]:
            with Reader(path, read_manifest(path)) as later:
                assert later.manifest.tensors.keys() == first.manifest.tensors.keys()
                assert later.manifest.trainer["adam_step"] == first.manifest.trainer["adam_step"]
                for name in first.manifest.tensors:
                    assert torch.equal(first.tensor(name), later.tensor(name)), name


def upcycled_weights(path: Path) -> bytes:
    """The weights of a mixture made of the checkpoint."""
    target = path.with_name("mixture")
    upcycle_dense(Upcycle(path, target, experts=2, experts_per_token=2, verify=False))
    (file,) = target.glob("*.safetensors")
    return file.read_bytes()


def fail_in_turn(root: str) -> list[tuple[str, int, str]]:
    """Save once, then let each kind of trouble befall one rank or all."""
    ctx = context.create(Grid(tp=1, dp=4, pp=1))
    folder, mine, rank = Path(root), cut_slices(ctx), ctx.world.rank
    facts = {"consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}

    def attempt(slices: list[Any], where: Path = folder) -> None:
        save(where, slices=slices, ctx=ctx, replicated=False, step=2, **facts)  # type: ignore[arg-type]

    save(folder, slices=mine, ctx=ctx, replicated=False, step=1, **facts)  # type: ignore[arg-type]
    outcomes = []
    with files_limited_to(500 if rank == 2 else resource.RLIM_INFINITY):
        outcomes.append(outcome(lambda: attempt(mine)))
    outcomes.append(outcome(lambda: attempt([] if rank == 1 else mine)))
    outcomes.append(outcome(lambda: attempt([*mine, *cut_slices(ctx)] if rank == 3 else mine)))
    huge = replace(mine[0], spec=whole_spec("p", (10**15,)), stop=10**15)
    outcomes.append(outcome(lambda: attempt([huge] if rank == 3 else mine)))
    outcomes.append(outcome(lambda: attempt(mine, folder / "step_00000001" / "manifest.json")))
    return outcomes


def test_a_failed_save_is_reported_on_every_rank_and_leaves_what_was_there(tmp_path: Path) -> None:
    """Fault disk-without-space: one rank cannot write, elements missing or twice, too little space, a file at the
    path."""
    ranks = run_ranks(4, fail_in_turn, str(tmp_path))
    said = ["(rank 2): ", "(rank 0): ", "(rank 0): ", "(rank 0): ", "(rank 0): "]
    why = ["rank_00002.safetensors", "cover 450 of 600", "overlap", "free some space", "manifest.json"]
    for outcomes in ranks:
        assert outcomes == ranks[0]
        for (kind, code, message), who, reason in zip(outcomes, said, why, strict=True):
            assert (kind, code) == ("StorageError", StorageError.exit_code)
            assert who in message
            assert reason in message
            assert "\n" not in message
    assert "bytes needed" in ranks[0][0][2]
    assert "12,000,0" in ranks[0][3][2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert [p.name for p in find_complete(tmp_path)] == ["step_00000001"]


def load_wrongly(root: str) -> list[tuple[str, int, str]]:
    ctx = context.create(Grid(tp=1, dp=4, pp=1))
    folder = Path(root)
    mine = cut_slices(ctx)
    facts = {"consumed_samples": 0, "layout": {}, "model_config": {"layers": 3}, "trainer": {}, "data": {}}
    path = save(folder, slices=mine, ctx=ctx, replicated=False, step=1, **facts)  # type: ignore[arg-type]
    outcomes = [outcome(lambda: load(path, slices=mine, ctx=ctx, model_config={"layers": 4}))]
    other = replace(mine[0], spec=whole_spec("q", (12,)))
    unknown = [other] if ctx.world.rank == 3 else []
    outcomes.append(outcome(lambda: load(path, slices=[*mine, *unknown], ctx=ctx, model_config={"layers": 3})))
    if ctx.world.rank == 1:
        shard = path / "rank_00001.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    outcomes.append(outcome(lambda: load(path, slices=mine, ctx=ctx, model_config={"layers": 3})))
    outcomes.append(outcome(lambda: choose("auto", folder / "step_00000001" / "none", ctx)))
    return outcomes


def test_a_load_fails_on_every_rank_alike(tmp_path: Path) -> None:
    """One rank's missing tensor or damaged chunk is everyone's error, in the same words (faults any-layout-loads,
    flipped-bit, checkpoint-of-another-model, missing-tensors)."""
    ranks = run_ranks(4, load_wrongly, str(tmp_path))
    for outcomes in ranks:
        assert outcomes == ranks[0]
        assert [code for _, code, _ in outcomes] == [4, 4, 4, 0]
    assert "model.layers: 3 | 4" in ranks[0][0][2]
    assert "main.q: missing | [12]" in ranks[0][1][2]
    assert "(rank 1): " in ranks[0][2][2]
    assert "rank_00001.safetensors: chunk " in ranks[0][2][2]


def write_for_ever(root: Path, first: int, done: Connection) -> None:
    number = first
    while True:
        save_toy(root, number)
        done.send(number)
        number += 1


def test_kill_9_loses_no_complete_checkpoint(tmp_path: Path) -> None:
    """Fault killed-saves."""
    kill_saves(write_for_ever, 1, tmp_path, 8)


@pytest.mark.slow
def test_kill_9_many_times(tmp_path: Path) -> None:
    """Fault killed-saves: 25 trials; test_checkpoint_async.py has as many of asynchronous saves."""
    kill_saves(write_for_ever, 1, tmp_path, 25)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_alone_are_where_training_goes_on_from(tmp_path: Path, precision: str) -> None:
    """Fault loaded-weights-survive: a step of learning rate 0 changes no bit, a later step moves from the loaded
    weights."""
    config = make_config(precision=precision)
    source = make_state(config, seed=1)
    step(source)
    path = save_state(source, tmp_path)
    state = make_state(config, seed=2)
    load_weights(path, slices=state.optimizer.slices(), ctx=state.ctx, model_config=weight_options(config))
    state.optimizer.refresh_params_from_main()
    loaded = state.weights.flat.clone()
    assert torch.equal(loaded, source.weights.flat)
    for item in state.optimizer.slices():
        assert not item.tensors["exp_avg"].any()
        assert not item.tensors["exp_avg_sq"].any()
    state.grads.flat.uniform_(-1, 1)
    state.optimizer.step(lr=0.0)
    assert torch.equal(state.weights.flat, loaded)
    state.optimizer.step(lr=1e-2)
    moved = (state.weights.flat - loaded).abs()
    assert 0 < moved.max() < 0.05


def test_a_checkpoint_asked_for_by_name_must_be_complete(tmp_path: Path) -> None:
    """Fault incomplete-checkpoint: never another one in its place."""
    save_toy(tmp_path, 1)
    path = save_toy(tmp_path, 2)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000002: incomplete"):
        choose(str(path), tmp_path, context.single())
    with pytest.raises(CheckpointError, match=r"step_00000002: incomplete"):
        load_toy(path, toy_slices(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_state_on_a_gpu_is_saved_and_loaded_bitwise(tmp_path: Path) -> None:
    """Boxes cut within rows, so copies into the device's memory are strided."""
    device = torch.device("cuda", 0)
    ctx = context.single(device)
    piece = make_piece("p", (6, 5), {})

    def cut(bounds: list[int], values: Tensor) -> list[Any]:
        spec = spec_of_piece(piece)
        flats = [values.flatten()[a:b].clone() for a, b in pairwise(bounds)]
        return [
            make_slice(spec, a, b, **{name: flat.clone() for name in STATE})
            for (a, b), flat in zip(pairwise(bounds), flats, strict=True)
        ]

    values = torch.rand(6, 5, device=device)  # no moment is negative
    facts = {"step": 1, "consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}
    path = save(tmp_path, slices=cut([0, 13, 30], values), ctx=ctx, replicated=False, **facts)  # type: ignore[arg-type]
    target = cut([0, 3, 11, 22, 30], torch.zeros_like(values))
    load(path, slices=target, ctx=ctx, model_config={})
    for name in STATE:
        loaded = torch.cat([item.tensors[name] for item in target]).view(6, 5)
        assert loaded.device == device
        assert torch.equal(loaded, values)


def differing(config: Config, **changes: Any) -> Config:
    return validate(replace(config, model=replace(config.model, **changes)), 1)


def initialized(config: Config, run_dir: Path, init_from: Path, strict: bool = True) -> tuple[TrainState, list[str]]:
    """As the program starts: what came of `checkpoint.init_from`."""
    options = CheckpointConfig(init_from=str(init_from), strict=strict)
    config = replace(config, run_dir=str(run_dir), checkpoint=options)
    ctx = context.single()
    return start(config, ctx, build_stages(config, ctx))


def test_a_run_starts_from_another_runs_weights(tmp_path: Path) -> None:
    """Faults loaded-weights-survive, missing-tensors: at step 0 with moments 0, strict unless asked; a resuming run
    does not start over."""
    config = make_config(precision="bf16", dp=1)
    source = make_state(config, seed=1)
    step(source)
    (path,) = Saver(source, tmp_path / "source").save(source)
    state, notes = initialized(config, tmp_path / "run", path)
    assert notes == [f"started from the weights of {path}, step 0"]
    assert torch.equal(state.weights.flat, source.weights.flat)
    for mine, theirs in zip(state.optimizer.slices(), source.optimizer.slices(), strict=True):
        assert torch.equal(mine.main, theirs.main)
        assert not mine.tensors["exp_avg"].any()
    assert (state.step, state.consumed_samples, state.optimizer.step_count) == (0, 0, 0)
    step(state)
    Saver(state, tmp_path / "run").save(state)
    assert "resumed step 1" in initialized(config, tmp_path / "run", path)[1][0]

    other = differing(config, num_hidden_layers=4, qk_norm=True, intermediate_size=24)
    with pytest.raises(CheckpointError) as caught:
        initialized(other, tmp_path / "other", path)
    assert "model.num_hidden_layers: 3 | 4" in str(caught.value)
    state, notes = initialized(other, tmp_path / "other", path, strict=False)
    fresh = make_state(other, seed=other.train.seed)
    assert "does not fit (checkpoint | run): main.layers.3.attention.q.weight: missing | [16, 12]" in notes
    lacking = {line.split()[6].removesuffix(":") for line in notes if ": main." in line}
    kept = 0
    with Reader(path, read_manifest(path)) as reader:
        for item, untouched in zip(state.optimizer.slices(), fresh.optimizer.slices(), strict=True):
            for piece, box in logical_boxes(item.spec, item.start, item.stop):
                place = slice(box.position - item.start, box.position - item.start + math.prod(box.size))
                values, name = item.main[place], f"main.{piece.name}"
                if name in lacking:
                    kept += 1
                    assert torch.equal(values, untouched.main[place]), name
                else:
                    cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
                    assert torch.equal(values, reader.tensor(name)[cut].flatten()), name
    assert kept > 10


def test_a_run_that_is_made_longer_says_how_its_learning_rate_changes(tmp_path: Path) -> None:
    """Fault resumed-learning-rate: 2 steps of cosine have come to their end, and 4 have not."""
    config = make_config(dp=1)
    config = replace(config, train=replace(config.train, steps=2), run_dir=str(tmp_path))
    source = make_state(config)
    step(source)
    step(source)
    Saver(source, tmp_path).save(source)

    def notes(**optimizer: Any) -> list[str]:
        changed = replace(config.optimizer, **optimizer)
        longer = replace(config, train=replace(config.train, steps=4), optimizer=changed)
        return start(longer, context.single(), build_stages(longer, context.single()))[1]

    said = "the learning rate goes on at 0.00146: step 2 had 0, and 0 would have come next"
    assert f"{said}; --optimizer.decay_steps 2 keeps the schedule of 2 steps" in notes()
    assert not any("learning rate" in line for line in notes(decay_steps=2))


def test_weights_alone_cannot_be_resumed_and_the_message_says_what_can(tmp_path: Path) -> None:
    path = save_toy(tmp_path, 1)

    def drop(body: dict[str, Any]) -> None:
        body["tensors"] = {name: entry for name, entry in body["tensors"].items() if name.startswith("main.")}

    edit_manifest(path, drop)
    with pytest.raises(CheckpointError, match=r"it holds weights alone: --checkpoint.init_from starts from them"):
        load_toy(path, toy_slices(0))
