"""A run with a larger vocabulary than the weights that it starts from: old rows are kept, new ones are their mean."""

from pathlib import Path

import pytest
import torch
from megapar_models.convert.adapters import Merge, merge
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess

from megapar.base.errors import ConfigError, DataError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, DataConfig, TrainConfig
from megapar.data.indexed import IndexedDataset
from megapar.data.tokenizer import load_tokenizer
from megapar.train import data as train_data
from tests.support import program
from tests.support.tokenizers import hugging_face
from tools import score

OLD, NEW = 131, 140
STILL = ("--optimizer.lr", "0", "--optimizer.min_lr", "0", "--optimizer.weight_decay", "0", "--train.steps", "1")
ONE_STEP = (*STILL, "--optimizer.warmup_steps", "0", "--train.global_batch_size", "2", "--train.micro_batch_size", "1")
BASE = ("--model.vocab_size", str(OLD), "--run_dir", "base", *ONE_STEP)
GROWN = ("--model.vocab_size", str(NEW), "--checkpoint.init_from", "base/checkpoints/step_00000001", *ONE_STEP)


def tensor(folder: Path, name: str) -> torch.Tensor:
    path = folder / "checkpoints/step_00000001"
    with Reader(path, read_manifest(path)) as reader:
        return reader.tensor(f"main.{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    for name, flags in (("base", ()), ("tied", ("--model.tie_word_embeddings",))):
        ended = program.run(*BASE[:3], name, *ONE_STEP, *flags, cwd=folder)
        assert ended.code == 0, ended.err
    return folder


def assert_grown(grown: torch.Tensor, old: torch.Tensor) -> None:
    assert grown.shape == (NEW, *old.shape[1:])
    assert torch.equal(grown[:OLD], old)
    assert torch.equal(grown[OLD:], old.double().mean(0).float().expand(NEW - OLD, -1))


LAYOUTS = ["", "--launch.nproc 2 --parallel.tp 2", "--launch.nproc 2 --parallel.pp 2 --optimizer.zero_stage 1"]
LAYOUTS += ["--launch.nproc 4 --parallel.tp 2 --parallel.dp 2 --optimizer.zero_stage 3"]
LAYOUTS += ["--launch.nproc 3 --parallel.dp 3 --optimizer.zero_stage 2"]


@pytest.mark.parametrize(
    "flags", [pytest.param(f, marks=[] if n == 1 else pytest.mark.slow) for n, f in enumerate(LAYOUTS)]
)
def test_old_rows_are_kept_and_new_ones_begin_as_their_mean(flags: str, folder: Path) -> None:
    """Fault vocabulary-that-grows. In every layout the values are those of one process: bitwise these."""
    run_dir = f"grown{LAYOUTS.index(flags)}"
    ended = program.run(*GROWN, "--run_dir", run_dir, *flags.split(), cwd=folder)
    assert ended.code == 0, ended.err
    assert "model.vocab_size 131 -> 140: embedding and head keep their 131 rows, and the 9 new ones" in ended.out
    for name in ("embedding.weight", "head.weight"):
        assert_grown(tensor(folder / run_dir, name), tensor(folder / "base", name))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--launch.nproc 2 --parallel.pp 2", "--launch.nproc 2 --parallel.tp 2"])
def test_a_tied_embedding_grows_at_both_ends(flags: str, folder: Path) -> None:
    words = [*GROWN[:2], "--checkpoint.init_from", "tied/checkpoints/step_00000001", *ONE_STEP]
    run_dir = f"grown_tied{len(flags)}"
    ended = program.run(*words, "--model.tie_word_embeddings", "--run_dir", run_dir, *flags.split(), cwd=folder)
    assert ended.code == 0, ended.err
    assert_grown(tensor(folder / run_dir, "embedding.weight"), tensor(folder / "tied", "embedding.weight"))


def test_no_strict_grows_too_and_names_what_it_throws_away(folder: Path) -> None:
    other = ("--checkpoint.no-strict", "--model.intermediate_size", "150", "--run_dir", "lost")
    ended = program.run(*GROWN, *other, cwd=folder)
    assert ended.code == 0, ended.err
    assert (
        "main.layers.0.mlp.gate.weight: shape [162, 66] | [150, 66]: the checkpoint's values are thrown away, and"
        in (ended.out)
    )
    assert_grown(tensor(folder / "lost", "head.weight"), tensor(folder / "base", "head.weight"))


@pytest.mark.slow
def test_adapters_on_a_grown_base_resume_merge_and_are_scored(folder: Path, tmp_path: Path) -> None:
    adapters = ("--adapter.rank", "2", "--run_dir", "adapter")
    for steps in ("1", "2"):
        flags = [word if word != "1" or GROWN[at - 1] != "--train.steps" else steps for at, word in enumerate(GROWN)]
        ended = program.run(*flags, *adapters, cwd=folder)
        assert ended.code == 0, ended.err
    checkpoint, base = folder / "adapter/checkpoints/step_00000001", folder / "base/checkpoints/step_00000001"
    merge(Merge(checkpoint, base, tmp_path / "merged"))
    with Reader(tmp_path / "merged", read_manifest(tmp_path / "merged")) as reader:
        for name in ("embedding.weight", "head.weight"):
            assert_grown(reader.tensor(f"main.{name}"), tensor(folder / "base", name))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "abc"}\n')
    scores = []
    for name, where in (("adapter", checkpoint), ("merged", tmp_path / "merged")):
        words = ["--input", str(text), "--output", str(tmp_path / f"{name}.scores")]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("sys.argv", ["score.py", str(where), *words])
            assert score.main() == 0
        scores.append((tmp_path / f"{name}.scores").read_text())
    assert scores[0] == scores[1]  # factors that were not trained yet add nothing


def test_ids_that_no_data_holds_are_no_error(tmp_path: Path) -> None:
    """As that of a padding token that was added to a published tokenizer. Fault token-ids-beyond-vocabulary."""
    spec = f"hf:{hugging_face(tmp_path)}"
    (tmp_path / "a.txt").write_text("def main(self) -> None:\n" * 40)
    preprocess([tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer=spec))
    largest = int(IndexedDataset(tmp_path / "out").tokens[:].max())
    data = DataConfig(train=(str(tmp_path / "out"),), tokenizer=spec)

    def opened(vocab_size: int) -> int:
        config = Config(ModelConfig(vocab_size=vocab_size), train=TrainConfig(seq_length=8), data=data)
        assert train_data.with_vocabulary_of_tokenizer(config) == config
        return len(train_data._open(config, [(data.train[0], (0.0, 1.0))], seed=0, num_targets=1, kind="texts"))

    assert largest + 1 < load_tokenizer(spec).vocab_size
    assert opened(largest + 1) == 1
    with pytest.raises(DataError, match=rf"token id {largest} is outside .*, or raise model\.vocab_size"):
        opened(largest)
    with pytest.raises(ConfigError, match=r"at least 400; checkpoint\.init_from keeps the rows"):
        opened(1)  # the token that ends a document is none of its ids
