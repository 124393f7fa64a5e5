"""Evaluations: all samples of a set, whatever the batch and the layout, and sets that data.split holds out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megapar_models.registry import sample_kind, validate

from megapar.base.errors import ConfigError
from megapar.config.options import Config, DataConfig
from megapar.data.indexed import IndexedWriter
from megapar.step.evaluation import Evaluated, evaluate
from megapar.step.evaluation import validate as evaluate_set
from megapar.train.data import open_loaders
from tests.support import pairs, program
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LENGTH, LLAMA, MIXTRAL, Layout, make_state, name
from tests.support.sweeps import slow_but

VOCABULARY = 131
COUNT = 30


def write(prefix: Path, ids: np.ndarray, document: int) -> str:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(ids, [document] * (len(ids) // document))
    return str(prefix)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """30 samples in one document, the last six of another kind."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, COUNT * LENGTH + 1)
    ids[24 * LENGTH :] = 7
    return write(tmp_path_factory.mktemp("held") / "held", ids, len(ids))


def on_set(layout: Layout, source: str, batch: int, samples: int, objective: str = "cross_entropy") -> Config:
    config = replace(layout, objective=objective).config()
    train = replace(config.train, global_batch_size=batch, eval_samples=samples, seed=3)
    documents = "joined" if objective == "cross_entropy" else "apart"
    data = DataConfig(train=(source,), validation=(source,), documents=documents)  # type: ignore[arg-type]
    return validate(replace(config, train=train, data=data), layout.world)


def evaluated(config: Config) -> Evaluated:
    state = make_state(config)
    data, sets = open_loaders(config, state.ctx, kind=sample_kind(config))
    data.close()
    (held_out,) = sets.values()
    return evaluate_set(state, held_out)


def all_at_once(config: Config) -> Evaluated:
    """What one process finds in one micro-batch of all samples."""
    config = replace(config, train=replace(config.train, micro_batch_size=config.train.global_batch_size))
    state = make_state(config)
    _, sets = open_loaders(config, state.ctx, kind=sample_kind(config))
    (held_out,) = sets.values()
    return evaluate(state, held_out.step_after(0))


def test_all_samples_are_evaluated_whatever_the_batch(prefix: str) -> None:
    """Fault evaluation-by-the-batch: 30 samples, of which eval_samples would take 64; then 25 of them, exactly."""
    alone = Layout(LLAMA)
    expected = all_at_once(on_set(alone, prefix, COUNT, 64))
    assert expected.divisor == COUNT * LENGTH
    for batch in (24, 7):
        assert evaluated(on_set(alone, prefix, batch, 64)) == pytest.approx(expected, rel=1e-6)
    assert evaluated(on_set(alone, prefix, 24, 25)).divisor == 25 * LENGTH


LAYOUTS = [
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=2),
    Layout(LLAMA, dp=2, micro_batch_size=2),
    Layout(LLAMA, dp=2, zero_stage=3),
    Layout(LLAMA, pp=4),
    Layout(LLAMA, cp=2, cp_attention="ring", micro_batch_size=4),
    Layout(GPT, pp=2, dp=2, micro_batch_size=4),
    Layout(LLAMA, tp=2, dp=2, zero_stage=2, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", slow_but({0}, LAYOUTS), ids=name)
def test_every_layout_evaluates_all_samples(layout: Layout, prefix: str) -> None:
    """Fault evaluation-by-the-batch: 30 samples in batches of 8, whose last micro-batches some replicas lack."""
    expected = all_at_once(on_set(Layout(layout.model), prefix, COUNT, 64))
    for of_rank in run_ranks(layout.world, evaluated, on_set(layout, prefix, 8, 64)):
        assert of_rank == pytest.approx(expected, rel=1e-5)


def test_padding_is_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault evaluation-by-the-batch: 12 pairs in batches of 8. A pair without a trained token would lose log 2."""
    source = str(pairs.prepare(monkeypatch, tmp_path, pairs.ROWS))
    model = replace(LLAMA, vocab_size=257, head="score", max_position_embeddings=64)
    config = on_set(Layout(model), source, 12, 64, "reward")

    def of_batch(batch: int) -> Config:
        sizes = {"global_batch_size": batch, "micro_batch_size": batch, "seq_length": 48}
        return replace(config, train=replace(config.train, **sizes))

    expected = all_at_once(of_batch(12))
    assert expected.divisor == 12
    assert evaluated(of_batch(8)) == pytest.approx(expected, rel=1e-5)


FLAGS = ("--model.vocab_size", "131", "--log.no-tensorboard", "--checkpoint.no-save_last", "--train.steps", "2")


def test_held_out_shares_of_a_blend_are_its_blend(tmp_path: Path) -> None:
    """Sources of 813 and 30 documents; their last tenths hold samples of the ids 9 and 5 alone."""
    for source, (kind, count) in zip("ab", ((9, 813), (5, 30)), strict=True):
        ids = np.random.default_rng(1).integers(10, VOCABULARY, (count, 31))
        ids[round(count * 0.9) :] = kind
        write(tmp_path / source, ids.ravel(), 31)
    config = Layout(LLAMA, micro_batch_size=1).config()
    train = replace(config.train, seq_length=30, eval_samples=1000)
    blend = (f"0.3:{tmp_path}/a", f"0.7:{tmp_path}/b")
    config = validate(replace(config, train=train, data=DataConfig(train=blend, split=(90.0, 10.0, 0.0))), 1)
    state = make_state(config)
    training, sets = open_loaders(config, state.ctx)
    training.close()
    assert list(sets) == ["validation"]
    samples = sets["validation"].samples
    assert [len(source) for source in samples.sources] == [81 * 31 // 30, 3 * 31 // 30]
    number = samples.before_any_repeats()
    found = samples.read(np.arange(number))[:, 0]
    assert (found == 5).sum() == 3
    assert samples.blend.taken(number + 1).tolist() == [(found == 9).sum(), 4], "the next sample would be a second one"
    assert set(training.loader.samples.read(np.arange(500)).ravel().tolist()) <= set(range(10, VOCABULARY))
    assert evaluate_set(state, sets["validation"]).divisor == 30 * number


def test_small_shares_are_evaluated_and_empty_ones_refused_by_name(tmp_path: Path) -> None:
    """Fault evaluation-by-the-batch: 813 samples in 97, 2 and 1 parts, batches of 24, and eval_samples of 64."""
    write(tmp_path / "big", np.random.default_rng(1).integers(0, VOCABULARY, 813 * 31), 31)
    write(tmp_path / "tiny", np.arange(20), 20)
    data = ("--data.train", "big", "--train.seq_length", "30", "--data.split")
    ended = program.run(*FLAGS, *data, "97", "2", "1", "--run_dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"validation_loss", "test_loss"} < set(lines[-1])
    ended = program.run(*FLAGS, *data, "999999", "1", cwd=tmp_path)
    assert ended.code == 3
    assert "the validation share of data.split: big.bin holds 0 tokens in documents 813 to 813 of 813" in ended.err
    assert "give data.split other shares, or name other files in data.validation" in ended.err
    ended = program.run(*FLAGS, *data[:-1], "--data.validation", "tiny", cwd=tmp_path)
    assert ended.code == 3
    assert "data.validation (tiny): tiny.bin holds 20 tokens, a sample of train.seq_length=30 needs 31" in ended.err


def test_splits_beside_what_cannot_be_split() -> None:
    for data, said in (
        (DataConfig(train=("1:a", "1:synthetic"), split=(9.0, 1.0)), "synthetic has no documents to split"),
        (DataConfig(train=("1:a", "1:b"), split=(9.0, 1.0), validation=("c",)), "leave one of the two out"),
    ):
        with pytest.raises(ConfigError, match=said):
            validate(Config(data=data), 1)
    budgets = DataConfig(train=("900tokens:a", "b"), split=(9.0, 1.0))
    validate(Config(data=budgets), 1)


def test_a_step_without_targets_leaves_no_line(tmp_path: Path) -> None:
    """Documents of one token, apart: every target is another document's. A .npy file says what would work."""
    write(tmp_path / "apart", np.arange(1000) % VOCABULARY, 1)
    ended = program.run(*FLAGS, "--data.train", "apart", "--data.documents", "apart", cwd=tmp_path)
    assert ended.code == 3, ended.err
    assert "if documents have one token, use joined" in ended.err
    assert not (tmp_path / "run/metrics.jsonl").read_text()
    ended = program.run(*FLAGS, "--data.train", "ids.npy", cwd=tmp_path)
    assert ended.code == 3
    assert "ids.npy.idx is not a file: a .npy file, such as OLMo's and dolma's" in ended.err
