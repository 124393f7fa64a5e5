"""Python collects garbage at the same steps on all ranks, and at no other time while a run trains."""

import gc
import json
import os
from pathlib import Path

import pytest

from megapar.system import garbage
from megapar.train import trainer
from tests.support import program
from tests.support.faults import TWO

MIXTURE = ("--model.family", "mixtral", "--model.moe.num_experts", "4")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--train.recompute", "full"), (*MIXTURE, "--parallel.ep", "2")])
def test_ranks_collect_garbage_at_the_same_steps(tmp_path: Path, flags: tuple[str, ...]) -> None:
    def plant() -> None:
        garbage.EVERY = 3
        queue_step = trainer.queue_step
        begun: list[int] = []

        def queue(state, *args, **named):  # type: ignore[no-untyped-def]
            begun.append(state.step)
            return queue_step(state, *args, **named)

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and begun:
                with open(f"collections_{os.getpid()}", "a") as file:
                    file.write(f"{json.dumps([begun[-1] + 1, gc.get_freeze_count() > 0])}\n")

        trainer.queue_step = queue
        gc.callbacks.append(note)

    ended = program.run("--train.steps", "8", *TWO, *flags, cwd=tmp_path, plant=plant)
    assert ended.code == 0, ended.err
    by_rank = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("collections_*")]
    assert len(by_rank) == 2
    for collections in by_rank:
        # What comes after the last step belongs to the end of the program.
        assert [step for step, _ in collections if step < 8] == [1, 3, 6]
        assert all(frozen for step, frozen in collections if 1 < step < 8)


def test_a_process_collects_garbage_again_after_training() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with garbage.GarbageCollection() as collection:
        assert not gc.isenabled()
        collection.after_step(7)
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
