"""tools/score.py: log-probabilities are those of transformers, in every layout, in order, and written whole."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedDataset, IndexedWriter
from megapar.data.scores import read_scores
from tests.support.hugging_face import Case, save_model, save_rewards
from tests.support.sweeps import slow_but
from tools import score
from tools.convert_checkpoint import HfToNative, hf_to_native

TEXTS = ["megapar", "a", "two words", "a much longer text than that", "", "xyz" * 13, "ends here", "and one more"]
SIZES = {"num_hidden_layers": 3, "vocab_size": 259}
CASES = {
    "llama": Case("llama", {**SIZES, "tie_word_embeddings": True}),
    "mixtral": Case("mixtral", SIZES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, their conversions, and texts as lines and as tokens."""
    folder = tmp_path_factory.mktemp("score")
    for kind, case in CASES.items():
        save_model(folder / f"{kind}-hf", case)
        options = HfToNative(src=folder / f"{kind}-hf", dst=folder / kind, verify=False)
        hf_to_native(options)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"body": {"text": text}}) + "\n" for text in TEXTS))
    with IndexedWriter(folder / "texts", np.dtype("<u2")) as writer:
        for text in TEXTS:
            writer.add_document(np.frombuffer(text.encode(), np.uint8))
    return folder


def expected(folder: Path, kind: str) -> list[torch.Tensor]:
    """By transformers, each text alone."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-hf")
    found = []
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())], dtype=torch.int64)
        if ids.shape[1] < 2:
            found.append(torch.empty(0))
            continue
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0])
    return found


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, texts: str, output: str, flags: str) -> int:
    words = [str(folder / kind), "--input", str(folder / texts), "--output", str(folder / output)]
    words += ["--text_field", "body.text", *flags.split()]
    if "--train.seq_length" not in words:
        words += ["--train.seq_length", "48"]
    monkeypatch.setattr(sys, "argv", ["score.py", *words])
    torch.set_num_threads(1)
    return score.main()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert [len(x) for x in found] == [len(x) for x in wanted]
    difference = (torch.cat(list(found)) - torch.cat(list(wanted))).norm() / torch.cat(list(wanted)).norm()
    assert difference < 1e-6


LAYOUTS = [
    ("llama", ""),
    ("llama", "--parallel.tp 2 --parallel.sequence_parallel --parallel.pp 2 --kernels.loss_chunk 7"),
    ("mixtral", "--parallel.cp 2 --parallel.ep 2"),
    ("llama", "--parallel.pp 3 --train.micro_batch_size 2"),
    ("llama", "--parallel.dp 2 --parallel.cp 2 --parallel.cp_attention ring"),
    ("llama", "--parallel.tp 2 --parallel.cp 2 --parallel.cp_attention ulysses"),
    ("llama", "--parallel.pp 2 --parallel.vpp 2 --parallel.schedule interleaved"),
    ("mixtral", "--parallel.dp 2 --parallel.ep 2"),
    ("mixtral", "--parallel.tp 2 --parallel.dp 2 --parallel.ep 2 --parallel.etp 2"),
]


@pytest.mark.parametrize(("kind", "flags"), slow_but([0, 1, 2], LAYOUTS))
def test_lines_have_the_log_probabilities_of_transformers_in_order(
    kind: str, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = flags.split()
    world = int(
        np.prod([int(words[i + 1]) for i, word in enumerate(words) if word[-3:] in (".tp", ".cp", ".pp", ".dp")])
    )
    code = run(monkeypatch, folder, kind, "texts.jsonl", "scores.jsonl", f"{flags} --launch.nproc {world}")
    assert code == 0
    found = lines(folder / "scores.jsonl")
    wanted = expected(folder, kind)
    assert_equal([torch.tensor(line["log_probs"]) for line in found], wanted)
    for line, log_probs in zip(found, wanted, strict=True):
        assert line["tokens"] == len(log_probs)
        assert line["log_prob"] == pytest.approx(log_probs.double().sum().item(), rel=1e-6)
    assert {path.name for path in folder.glob("scores*")} == {"scores.jsonl"}


def test_a_column_of_a_pair_is_read_for_its_own_tokens_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, folder, "llama", "texts", "texts.reference", "--train.micro_batch_size 3") == 0
    dataset = IndexedDataset(folder / "texts")
    column = torch.from_numpy(read_scores(folder / "texts.reference", dataset)[:])
    documents = column.split([len(text) for text in TEXTS])
    assert all(not document[:1].any() for document in documents)
    assert_equal([document[1:] for document in documents], expected(folder, "llama"))
    stated = json.loads((folder / "texts.reference.json").read_text())
    assert stated["model"] == {"checkpoint": str(folder / "llama"), "step": 0, "precision": "fp32"}

    with IndexedWriter(folder / "other", np.dtype("<u2")) as writer:
        writer.add_document(np.ones(len(column), np.uint16))
    with pytest.raises(DataError, match=r"of other tokens than .*other\.bin; write it with megapar score"):
        read_scores(folder / "texts.reference", IndexedDataset(folder / "other"))
    with pytest.raises(DataError, match="no column of log-probabilities"):
        read_scores(folder / "none.reference", dataset)


REWARDS = ["", "--parallel.tp 2 --parallel.sequence_parallel --parallel.pp 2", "--parallel.cp 2", "--parallel.dp 3"]


@pytest.mark.parametrize("flags", slow_but([1], REWARDS))
@pytest.mark.parametrize("texts", ["texts.jsonl", "texts"])
def test_a_reward_model_writes_the_rewards_of_transformers(
    texts: str, flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of lines and of prepared documents."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    theirs = save_rewards(tmp_path / "hf", Case("qwen3", {"vocab_size": 259, "num_hidden_layers": 3}))
    if not (folder / "rewards").exists():
        hf_to_native(HfToNative(theirs, folder / "rewards", verify=False))
    world = int(np.prod([int(word) for word in flags.split() if word.isdigit()]))
    assert run(monkeypatch, folder, "rewards", texts, "rewards.jsonl", f"{flags} --launch.nproc {world}") == 0
    found = lines(folder / "rewards.jsonl")
    assert [line["tokens"] for line in found] == [len(text) for text in TEXTS]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(theirs)
    wanted = [model(torch.tensor([list(text.encode())])).logits[0].detach() for text in TEXTS if text]
    assert_equal([torch.tensor([line["reward"]]) for line in found if line["tokens"]], wanted)
    assert [line["reward"] is None for line in found] == [text == "" for text in TEXTS]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.seq_length 16", "document 3 has 28 tokens, more than train.seq_length=16"),
        ("--train.lr 1", "lr"),
        ("--optimizer.lr 1e-3", "--optimizer.lr: is taken from the checkpoint"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_leaves_nothing(
    flags: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "llama", "texts.jsonl", "refused.jsonl", flags)
    error = capfd.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not list(folder.glob("refused*"))
