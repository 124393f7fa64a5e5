"""Steps read ahead: the same for all workers, layouts and restarts; dead workers named; nodes agreeing on files."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megapar_models.registry import validate

from megapar.base.errors import ConfigError, DataError
from megapar.base.grid import Grid
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, DataConfig, ParallelConfig, TrainConfig
from megapar.data.blend import BlendPhase
from megapar.data.delivery import Delivery, _Processes
from megapar.data.indexed import IndexedWriter
from megapar.data.loader import Loader, Mixture
from megapar.data.order import sample_ids
from megapar.data.sources import ChunkDataset, SyntheticDataset
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.step.divisors import count_targets
from megapar.train.data import open_loaders
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.runs import metrics

S = 8
RAMP = TrainConfig(global_batch_size=72, batch_ramp=(36, 36, 100))


def token_file(prefix: Path, num_tokens: int) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(num_tokens) % 250, [10] * (num_tokens // 10))
    return prefix


def deliveries(mixture: Mixture, dp: int, mbs: int, workers: int, consumed: int) -> list[Delivery]:
    options: dict[str, Any] = {"batch_size": RAMP.batch_size, "seq_length": S, "dp_size": dp, "micro_batch_size": mbs}
    ranks = [Delivery(Loader(mixture, dp_rank=rank, **options), workers) for rank in range(dp)]
    for rank in ranks:
        rank.consumed_samples = consumed
    return ranks


def step(ranks: list[Delivery]) -> dict[int, list[int]]:
    """Position in the run -> tokens, over the micro-batches of all ranks."""
    batches = [batch for rank in ranks for batch in rank.next_step()]
    rows = {int(p): row.tolist() for b in batches for p, row in zip(b.sample_ids_b, b.tokens_bs, strict=True)}
    assert len(rows) == sum(batch.size for batch in batches)
    return rows


CHANGES = st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.sampled_from([0, 0, 1, 2]), st.integers(1, 3))


@settings(deadline=None, max_examples=8)
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_no_change_of_ranks_batches_workers_or_restart_changes_a_step(changes: list[tuple[int, int, int, int]]):
    """Faults samples-independent-of-layout, sample-order-across-layouts. Through a batch-size ramp, a blend with a
    stage and the ends of epochs."""
    sources = [SyntheticDataset(S, 100, seed=1, num_samples=60), SyntheticDataset(S, 100, seed=2)]
    mixture = Mixture(sources, [BlendPhase(0, (0.7, 0.3)), BlendPhase(170, (0.2, 0.8))], seed=5)
    (alone,), consumed = deliveries(mixture, 1, 1, 0, 0), 0
    for dp, mbs, workers, count in changes:
        ranks = deliveries(mixture, dp, mbs, workers, consumed)
        for _ in range(count):
            found = step(ranks)
            assert found == step([alone])
            assert list(found) == sorted(found) or dp > 1
            assert sorted(found) == list(range(consumed, consumed + RAMP.batch_size(consumed)))
            consumed += len(found)
        for rank in ranks:
            assert rank.consumed_samples == consumed
            rank.close()
    alone.close()


def test_a_delivery_goes_on_from_where_it_is_set(tmp_path: Path):
    mixture = Mixture([ChunkDataset(token_file(tmp_path / "t", 1000), S, 250)], seed=1)
    for workers in (0, 2):
        (delivery,) = deliveries(mixture, 1, 1, workers, 0)
        steps = [step([delivery]) for _ in range(4)]
        for again in (2, 0, 3):
            delivery.consumed_samples = min(steps[again])
            assert step([delivery]) == steps[again]
        delivery.close()


class Slow:
    """A stand-in for a slow loader: after its first step it sets `reading` and waits for `may_go_on`."""

    def __init__(self) -> None:
        self.reading, self.may_go_on = threading.Event(), threading.Event()

    def batch_size(self, consumed: int) -> int:
        return 1

    def step_after(self, consumed: int) -> list[MicroBatch]:
        if consumed:
            self.reading.set()
            assert self.may_go_on.wait(20)
        return []


def test_the_next_step_is_read_while_this_one_computes():
    slow = Slow()
    delivery = Delivery(slow)  # type: ignore[arg-type]
    delivery.next_step()
    assert slow.reading.wait(20), "nobody has asked for the second step yet"
    slow.may_go_on.set()
    delivery.next_step()
    delivery.close()


def test_workers_draw_no_random_number_and_errors_come_through(tmp_path: Path):
    """Faults loading-draws-nothing, token-ids-beyond-vocabulary."""
    mixture = Mixture([ChunkDataset(token_file(tmp_path / "t", 1000), S, 250)], seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 2):
        (delivery,) = deliveries(mixture, 1, 1, workers, 0)
        step([delivery])
        delivery.close()
        (delivery,) = deliveries(Mixture([ChunkDataset(tmp_path / "t", S, 240)], seed=1), 1, 1, workers, 0)
        with pytest.raises(DataError, match=r"t.bin: document \d+, offset \d: token id 24\d"):
            step([delivery])
        delivery.close()
    assert torch.equal(torch.get_rng_state(), before)


class Stuck:
    """A loader without any answer."""

    def batch_size(self, consumed: int) -> int:
        return 1

    def step_after(self, consumed: int) -> list[MicroBatch]:
        time.sleep(600)
        return []


def test_a_killed_worker_is_named_with_its_signal():
    """Fault killed-worker. While the training waits for it, and when it is asked again."""
    workers = _Processes(Stuck().step_after, 2)
    (_, process), _ = workers._workers
    workers.ask(0)
    killer = threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(DataError, match=rf"data worker 0 \(pid {process.pid}\) was killed by SIGKILL.*data.workers"):
        workers.take()
    killer.join()
    workers.ask(1)
    with pytest.raises(DataError, match="data worker 0"):
        workers.ask(2)
    workers.close()


class Empty(Stuck):
    """A loader with an immediate answer."""

    def step_after(self, consumed: int) -> list[MicroBatch]:
        return []


def test_workers_of_a_run_that_handles_signals_end_with_it():
    """Fault killed-worker: a fork has the handlers of its parent.

    A scheduler's SIGTERM to all processes is for the parent to answer. `close` must not wait for a worker after it has
    only noted a signal.
    """
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        workers = _Processes(Empty().step_after, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    ((_, process),) = workers._workers
    workers.ask(0)
    assert workers.take() == []
    os.kill(process.pid, signal.SIGTERM)
    workers.ask(1)
    assert workers.take() == []
    late = threading.Timer(20, os.kill, (process.pid, signal.SIGKILL))  # so that a failure does not wait forever
    late.start()
    workers.close()
    assert late.is_alive(), "close() waited for the worker"
    late.cancel()


def test_a_ramp_that_begins_with_fewer_samples_than_replicas_trains_as_one_process(tmp_path: Path):
    """Steps of 1, 2 and 3 samples on 4 replicas: at first three replicas have none, and the last one never has."""
    flags = ("--train.global_batch_size", "3", "--train.micro_batch_size", "1", "--train.batch_ramp", "1", "1", "4")
    flags = (*flags, "--checkpoint.no_save_last")
    losses = []
    for ranks in ("1", "4"):
        folder = tmp_path / ranks
        folder.mkdir()
        ended = program.run(*flags, "--launch.nproc", ranks, "--data.workers", "1", cwd=folder)
        assert ended.code == 0, ended.err
        losses.append([line["loss"] for line in metrics(folder / "run")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_ramp_grows_the_batch_in_equal_stretches():
    """Megatron's --rampup-batch-size 12 12 96 to 48: 32 samples a stretch."""
    train = TrainConfig(steps=10, global_batch_size=48, batch_ramp=(12, 12, 96))
    assert [train.batch_size(n) for n in (0, 31, 32, 63, 64, 95, 96, 10**12)] == [12, 12, 24, 24, 36, 36, 48, 48]
    assert train.samples() == sum(sizes(train))
    assert TrainConfig(steps=10, global_batch_size=48).samples() == 480


def sizes(train: TrainConfig) -> list[int]:
    consumed: list[int] = []
    for _ in range(train.steps):
        consumed.append(train.batch_size(sum(consumed)))
    return consumed


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ((4,), "three numbers"),
        ((4, 5, 100), "START plus a number of INCREMENTs must be the global batch"),
        ((16, 4, 100), "START plus"),
        ((3, 13, 100), "a multiple of train.micro_batch_size 2; use 2 2 100"),
        ((0, 4, 100), "must be at least 1"),
    ],
)
def test_ramps_that_do_not_fit_are_refused(ramp: tuple[int, ...], said: str):
    train = TrainConfig(global_batch_size=16, micro_batch_size=2, batch_ramp=ramp)
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        validate(Config(train=train, parallel=ParallelConfig(dp=2)), 2)


# Ranks


def opened(prefixes: list[Path], data: DataConfig) -> tuple[str, int]:
    """What opening says on a rank with a folder of its node's own; exit code."""
    os.chdir(prefixes[dist.get_rank()].parent)
    config = Config(
        model=ModelConfig(vocab_size=250),
        data=data,
        train=TrainConfig(seq_length=S, global_batch_size=4),
    )
    ctx = context.create(Grid(dp=dist.get_world_size()))
    try:
        delivery, _ = open_loaders(replace(config, parallel=ParallelConfig(dp=ctx.dp.size, vpp=1)), ctx)
    except DataError as error:
        return str(error), error.exit_code
    rows = [row for batch in delivery.next_step() for row in batch.sample_ids_b.tolist()]
    delivery.close()
    return str(rows), 0


def test_two_nodes_with_folders_of_their_own_agree_or_stop(tmp_path: Path):
    """Fault nodes-with-own-disks. Two ranks a node. Nobody writes a cache, and no node needs to see the other's
    folder."""
    nodes = [token_file(tmp_path / name / "t", 1000) for name in ("one", "two")]
    ranks = [nodes[0], nodes[0], nodes[1], nodes[1]]
    data = DataConfig(train=("t",), validation=("held=t",))
    assert run_ranks(4, opened, ranks, data) == [(f"[{rank}]", 0) for rank in range(4)]
    assert sorted(p.name for p in nodes[1].parent.iterdir()) == ["t.bin", "t.idx"]
    content = bytearray(Path(f"{nodes[1]}.bin").read_bytes())
    content[1000] ^= 1
    Path(f"{nodes[1]}.bin").write_bytes(content)
    said = run_ranks(4, opened, ranks, data)
    assert len(set(said)) == 1, "the same words everywhere"
    assert said[0][0].startswith("t.bin is not the same everywhere: content hash ")
    assert "(rank 2)" in said[0][0]
    assert said[0][1] == 3


def test_all_that_is_missing_is_named_at_once(tmp_path: Path):
    """Fault bad-blends."""
    here = token_file(tmp_path / "t", 1000)
    data = DataConfig(train=("0.5:t", "0.3:none", "0.2:nothing"))
    ((said, code),) = run_ranks(1, opened, [here], data)
    assert code == 3
    assert "none.idx is not a file" in said
    assert "nothing.idx is not a file" in said
    assert "\n" not in said


def test_sample_ids_of_many_samples_need_neither_time_nor_memory():
    """Fault sample-order-beyond-32-bits. A step of 10^10 samples is as quick to find as one of 10^6; what is kept are
    a few arrays."""
    for n in (10**6, 10**8, 10**10):
        assert len(np.unique(sample_ids(np.arange(n - 512, n), n, 1))) == 512


def counted() -> tuple[float, bool]:
    """The step's targets as this rank counts them, and whether it was given tokens."""
    train = TrainConfig(seq_length=S, global_batch_size=6, micro_batch_size=2)
    config = Config(model=ModelConfig(vocab_size=250), parallel=ParallelConfig(pp=3, dp=1, vpp=1), train=train)
    ctx = context.create(Grid(pp=3))
    delivery, _ = open_loaders(config, ctx)
    batches = delivery.next_step()
    delivery.close()
    return count_targets(batches, ctx).item(), any(bool(batch.tokens_bs.any()) for batch in batches)


def test_only_the_ends_of_a_pipeline_read_and_all_of_it_counts_alike():
    assert run_ranks(3, counted) == [(6.0 * S, True), (6.0 * S, False), (6.0 * S, True)]
