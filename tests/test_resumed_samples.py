"""A resumed run reads the samples that follow those of its checkpoint, and refuses options by which it would not."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.base.errors import CheckpointError, DataError
from megapar.checkpoint.format import Manifest
from megapar.config.options import Config, DataConfig, TrainConfig, flatten
from megapar.data.blend import Blend, BlendPhase
from megapar.data.indexed import IndexedWriter
from megapar.train.resumed_samples import Resumed, resumed_blend, stages_of
from tests.support import program

SEED = 1234
BUDGET = ("1800tokens:a", "b")


def options(train: tuple[str, ...], steps: int = 5, batch: int = 24, length: int = 30, **others: Any) -> Config:
    sizes = {"steps": steps, "global_batch_size": batch, "seq_length": length}
    given = {name: others.pop(name) for name in ("seed", "batch_ramp") if name in others}
    return Config(data=DataConfig(train=train, **others), train=TrainConfig(**sizes, **given))


def saved(config: Config, consumed: int, stages: tuple[BlendPhase, ...] = (), **data: Any) -> Manifest:
    stated = {"stages": [[stage.first, list(stage.weights)] for stage in stages or stages_of(config)], **data}
    trainer = json.loads(json.dumps({"config": flatten(config)}))
    return Manifest(1, consumed, {}, {}, trainer, stated, {}, {})


def go_on(manifest: Manifest, config: Config, **hashes: str) -> Resumed:
    return resumed_blend(manifest, manifest.trainer["config"], config, hashes, Path("p"))


def refusal(manifest: Manifest, config: Config) -> str:
    with pytest.raises(DataError) as refused:
        go_on(manifest, config)
    assert refused.value.everywhere
    accepting = replace(config, data=replace(config.data, accept_changed=True))
    accepted = go_on(manifest, accepting)
    assert accepted.stages == stages_of(config)
    assert all(line.startswith("data changed since: ") for line in accepted.notes)
    assert accepted.notes
    return str(refused.value)


def turns(stages: tuple[BlendPhase, ...], first: int, last: int) -> list[list[int]]:
    """The numbers of the samples that each source gives in these positions."""
    sources, found = Blend(stages, SEED).locate(np.arange(first, last))
    return [found[sources == number].tolist() for number in range(len(stages[0].weights))]


def test_a_longer_run_keeps_its_budgets_and_its_samples() -> None:
    """Fault samples-move-on-resumption: a has had 61 of its 60 samples."""
    short = options(BUDGET)
    assert Blend(stages_of(short), SEED).taken(120).tolist() == [61, 59]
    resumed = go_on(saved(short, 120), options(BUDGET, steps=10))
    assert turns(resumed.stages, 0, 120) == turns(stages_of(short), 0, 120)
    assert turns(resumed.stages, 120, 240) == [[], list(range(59, 179))]
    (note,) = resumed.notes
    assert note == (
        "data.train: from sample 120 on by the tokens that are left: 1,830 of a read, 0 to come; 1,770 of b read, "
        "3,600 to come"
    )
    # Without a change the run is that of before.
    assert go_on(saved(short, 72), short) == Resumed(stages_of(short), [])


def test_lengths_and_batches_may_change_again_and_again() -> None:
    """Fault samples-move-on-resumption: resumed three times, with a ramp of the batch too, and from an old checkpoint
    without its blend. Each source gives its samples in order, without a gap, and keeps its budget."""
    changes = [
        (72, options(BUDGET, steps=10, batch=48)),
        (120, options(BUDGET, steps=40, batch=12, batch_ramp=(6, 6, 60))),
        (150, options(BUDGET, steps=8)),
    ]
    before = options(BUDGET)
    manifest = saved(before, 72)
    del manifest.data["stages"]
    stages = stages_of(before)
    read: list[list[int]] = [[], []]
    at = 0
    for consumed, config in changes:
        for source, found in zip(read, turns(stages, at, consumed), strict=True):
            source += found
        at = consumed
        manifest = manifest if consumed == 72 else saved(before, consumed, stages)
        stages = go_on(manifest, config).stages
        before = config
        assert go_on(saved(config, consumed + 6, stages), config) == Resumed(stages, [])
    for source, found in zip(read, turns(stages, at, 8 * 24), strict=True):
        source += found
        assert source == list(range(len(source)))
    assert len(read[0]) == pytest.approx(60, abs=2)


CHANGES = [
    (("0.5:a", "0.5:b"), ("0.25:a", "0.75:b"), ["31 samples of a would come again", "31 samples of b would be left"]),
    (("a",), ("0.5:a", "0.5:b"), ["59 samples of a would come again", "59 samples of b would be left out"]),
    (("0.5:a", "0.5:b"), ("b",), ["61 samples of b would be left out", "61 samples of a would come again"]),
    (BUDGET, ("0.5:b", "0.5:c"), ["61 samples of a would come again", "59 samples of c would be left out"]),
]


@pytest.mark.parametrize(("then", "now", "said"), CHANGES)
def test_other_weights_and_sources_are_refused_with_what_works(
    then: tuple[str, ...], now: tuple[str, ...], said: list[str]
) -> None:
    """Fault samples-move-on-resumption: after 120 samples; the options that the refusal gives go on rightly."""
    manifest = saved(options(then), 120)
    text = refusal(manifest, options(now, steps=10))
    for words in said:
        assert words in text
    given = re.search(r"give --data\.train (.*) --data\.stages (.*), or go on", text)
    assert given, text
    works = options(tuple(given[1].split()), steps=10, stages=tuple(given[2].split()))
    resumed = go_on(manifest, works)
    assert resumed == Resumed(stages_of(works), [])
    before = turns(stages_of(options(then)), 0, 120)
    for source, coming in zip(before, turns(resumed.stages, 120, 240), strict=False):
        assert [*source, *coming] == list(range(len(source) + len(coming)))
    # Weights that begin at the position, or later, need no word.
    later = options(("0.5:a", "0.5:b"), stages=("120:0.25,0.75",))
    assert go_on(saved(options(("0.5:a", "0.5:b")), 120), later).notes == []


def test_seeds_lengths_and_splits_are_refused_and_moved_files_are_not() -> None:
    """Fault samples-move-on-resumption."""
    then = options(("a",), split=(90.0, 10.0))
    manifest = saved(then, 120, samples={"a": 399}, hashes={"a.bin": "1", "a.idx": "2"})
    for config, said in (
        (replace(then, train=replace(then.train, seed=5)), "train.seed 1234 -> 5: other samples (30% of a was read"),
        (replace(then, train=replace(then.train, seq_length=60)), "train.seq_length 30 -> 60: other samples (30% of a"),
        (options(("a",), split=(50.0, 50.0)), "data.split 90.0 10.0 -> 50.0 50.0: other samples"),
    ):
        text = refusal(manifest, config)
        assert said in text
        assert "put the old values back, or go on regardless with --data.accept_changed" in text
    moved = options(("new/a",), split=(90.0, 10.0))
    assert go_on(manifest, moved, **{"new/a.bin": "1", "new/a.idx": "2"}).notes == []
    assert "120 samples of a would come again" in refusal(manifest, moved)
    invented = options(("synthetic",), seed=5, length=60)
    assert go_on(saved(options(("synthetic",)), 120), invented).notes == []
    with pytest.raises(CheckpointError, match="no blend of its sources"):
        go_on(saved(then, 120, (BlendPhase(0, (0.5, 0.5)),)), then)


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_that_is_made_longer_goes_on_with_its_samples(ranks: str, tmp_path: Path) -> None:
    """Fault samples-move-on-resumption: through the program, with a refusal that changes nothing on disk."""
    for source in "ab":
        with IndexedWriter(tmp_path / source, np.dtype("<u2")) as writer:
            writer.add_documents(np.random.default_rng(ord(source)).integers(0, 131, 12_028), [97] * 124)
    flags = ("--train.seq_length", "30", "--log.no-tensorboard", "--launch.nproc", ranks, *program.FEW_MICRO_BATCHES)
    budget = (*flags, "--data.train", "1800tokens:a", "b")
    ended = program.run(*budget, "--train.steps", "5", cwd=tmp_path)
    assert ended.code == 0, ended.err
    refused = program.run(*flags, "--data.train", "0.9:a", "0.1:b", "--train.steps", "6", cwd=tmp_path)
    assert refused.code == 3, refused.err
    assert "would come again" in refused.err
    assert refused.err.count("\n") == 1
    for steps, consumed in (("7", 120), ("8", 168)):
        ended = program.run(*budget, "--train.steps", steps, cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert ended.out.count(f"data.train: from sample {consumed} on by the tokens that are left: 1,830 of a") == 1
    manifest = json.loads((tmp_path / "run/checkpoints/step_00000008/manifest.json").read_text())["body"]
    assert manifest["data"]["samples"] == {"a": 400, "b": 400}
    stages = tuple(BlendPhase(first, tuple(weights)) for first, weights in manifest["data"]["stages"])
    assert turns(stages, 120, 192) == [[], list(range(59, 131))]
