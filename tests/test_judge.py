"""tools/judge.py: perplexity and tasks of lm-evaluation-harness are those of transformers, in every layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megapar_models.judging.judge import Window, sliding

from megapar.data.tokenizer import load_tokenizer
from tests.support.hugging_face import Case, save_model
from tests.support.sweeps import slow_but
from tools import judge
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

EOD = 256  # of the bytes' tokenizer
LENGTH = 24
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. Ünïcode."
LINES = ["a", "two words", "", "a text that is longer than the model's whole window of tokens"]
CASES = {
    "llama": Case("llama", {"num_hidden_layers": 4, "vocab_size": 259}),
    "mixtral": Case("mixtral", {"num_hidden_layers": 2, "vocab_size": 259}),
}
LAYOUTS = [
    ("llama", ""),
    ("llama", "--parallel.tp 2 --parallel.sequence_parallel --parallel.pp 2"),
    ("mixtral", "--parallel.cp 2 --parallel.ep 2"),
    ("llama", "--parallel.dp 2 --parallel.cp 2 --parallel.cp_attention ring"),
    ("llama", "--parallel.pp 2 --parallel.vpp 2 --parallel.schedule interleaved"),
    ("mixtral", "--parallel.tp 2 --parallel.dp 2 --parallel.ep 2 --parallel.etp 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, their conversions, and texts."""
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("judge")
    for kind, case in CASES.items():
        save_model(folder / f"{kind}-hf", case)
        hf_to_native(HfToNative(src=folder / f"{kind}-hf", dst=folder / kind, verify=False))
    (folder / "text.txt").write_text(TEXT)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES))
    return folder


def log_probs(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """By transformers: the log-probability of each id, given all before it in `ids`, from the second one on."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-hf")
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def nats(folder: Path, kind: str, text: str, stride: int) -> float:
    """By hand: the window of a token begins where it must, and no earlier."""
    whole = [EOD, *text.encode()]
    total = 0.0
    done = 0  # tokens of the text
    while done < len(whole) - 1:
        last = min(LENGTH if not done else done + stride, len(whole) - 1)
        window = whole[max(0, last - LENGTH) : last + 1]
        total -= float(log_probs(folder, kind, window)[-(last - done) :].sum())
        done = last
    return total


def world_of(flags: str) -> int:
    words = flags.split()
    sizes = [int(words[i + 1]) for i, word in enumerate(words) if word[-3:] in (".tp", ".cp", ".pp", ".dp")]
    return int(np.prod(sizes))


def run(folder: Path, kind: str, output: Path, *words: str, flags: str = "") -> dict[str, Any]:
    torch.set_num_threads(1)
    given = [str(folder / kind), "--output", str(output), "--train.seq_length", str(LENGTH), *words, *flags.split()]
    assert judge.main([*given, "--launch.nproc", str(world_of(flags))]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize(("kind", "flags"), slow_but([0, 1, 2], LAYOUTS))
def test_perplexity_is_that_of_transformers(
    kind: str, flags: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [str(folder / "text.txt"), str(folder / "lines.jsonl")]
    found = run(folder, kind, tmp_path / "found.json", "--texts", *paths, "--stride", "10", flags=flags)["texts"]
    for path, texts in zip(paths, ([TEXT], LINES), strict=True):
        expected = sum(nats(folder, kind, text, 10) for text in texts)
        tokens = sum(len(text.encode()) for text in texts)
        assert found[path]["tokens"] == found[path]["num_bytes"] == tokens
        assert found[path]["nats"] == pytest.approx(expected, rel=1e-6)
        assert found[path]["per_token"] == pytest.approx(math.exp(expected / tokens), rel=1e-6)
        assert found[path]["bits_per_byte"] == pytest.approx(expected / tokens / math.log(2), rel=1e-6)
    shown = capfd.readouterr().out
    assert f"{paths[0]}: perplexity {found[paths[0]]['per_token']:.4f} per token" in shown


def test_windows_score_each_token_once_with_as_much_context_as_they_may() -> None:
    for number in range(1, 40):
        for stride in (1, 3, 8):
            ids = list(range(100, 100 + number))
            windows = list(sliding(ids, (7,), 8, stride))
            assert [token for window in windows for token in window.ids[-window.scored :]] == ids
            assert windows[0].ids[0] == 7
            assert all(len(window.ids) == 9 for window in windows[1:])
            assert all(1 <= window.scored <= stride for window in windows[1:])
    assert list(sliding([], (7,), 8, 8)) == []
    assert list(sliding([1, 2], (7,), 8, 8)) == [Window([7, 1, 2], 2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to judge by: give --texts FILE ... or --tasks NAME ..."),
        (["--texts", "text.txt", "--stride", "25"], "--stride 25: must be from 1 to train.seq_length=24, or 0"),
        (["--texts", "empty.txt"], "no document has any text"),
        (["--texts", "nowhere.txt"], "nowhere.txt"),
        (["--texts", "text.txt", "--optimizer.lr", "1"], "--optimizer.lr: is taken from the checkpoint, or has no use"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(
    words: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    Path("empty.txt").write_text("")
    with pytest.raises(SystemExit) as ended:
        judge.main(["llama", *words, "--train.seq_length", str(LENGTH), "--output", "refused.json"])
    assert ended.value.code in (2, 3)
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert not Path("refused.json").exists()


# lm-evaluation-harness

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " a long answer wrong"], "answer": 0},
    {"question": "Two and two", "choices": [" four", " five"], "answer": 0},
    {"question": "", "choices": ["x", "yz"], "answer": 1},
]
CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: own_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/lines.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
CONTINUED = """
task: own_continued
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}} ..."
doc_to_target: "{{continued}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def greedy(folder: Path, kind: str, text: str, tokens: int) -> str:
    """What transformers goes on with."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{kind}-hf")
    ids = list(text.encode())
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOD:
            break
    tokenizer = load_tokenizer("bytes")
    return tokenizer.decode(ids)[len(text) :]


def write_tasks(folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write the tasks, which need no download, and their files to `tmp_path`; returns their names."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{**question, "continued": greedy(folder, kind, f"{question['question']} ...", 6)} for question in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES if text))
    for name, task in (("choice", CHOICE), ("rolling", ROLLING), ("continued", CONTINUED)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", str(tmp_path)))
    return ["own_choice", "own_rolling", "own_continued"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "flags"), LAYOUTS)
def test_tasks_have_the_numbers_of_the_harness_s_own_model_on_an_export(
    kind: str, flags: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its HFLM computes them on the model of transformers. The tasks need no download."""
    lm_eval = pytest.importorskip("lm_eval", reason=f"not run: needs lm_eval, pip install {judge.HARNESS}")
    names = write_tasks(folder, kind, tmp_path, monkeypatch)
    words = ["--tasks", *names, "--include_path", str(tmp_path)]
    found = run(folder, kind, tmp_path / "found.json", *words, flags=flags)["tasks"]
    results = found["results"]
    assert found["lm_eval"] == lm_eval.__version__

    by_hand = []
    for question in QUESTIONS:
        context = list(question["question"].encode()) or [EOD]  # type: ignore[attr-defined]
        sums = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            ids = [*context, *choice.encode()][-LENGTH - 1 :]
            sums.append(float(log_probs(folder, kind, ids)[-len(choice.encode()) :].sum()))
        lengths = [len(choice) for choice in question["choices"]]  # type: ignore[attr-defined]
        normed = [total / length for total, length in zip(sums, lengths, strict=True)]
        by_hand.append((int(np.argmax(sums)) == question["answer"], int(np.argmax(normed)) == question["answer"]))
    right, right_by_length = np.mean(by_hand, axis=0)
    assert results["own_choice"]["acc,none"] == pytest.approx(right)
    assert results["own_choice"]["acc_norm,none"] == pytest.approx(right_by_length)
    texts = [text for text in LINES if text]
    total = sum(nats(folder, kind, text, LENGTH) for text in texts)
    expected = total / sum(len(text.encode()) for text in texts) / math.log(2)
    assert results["own_rolling"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
    assert results["own_continued"]["exact_match,none"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CASES))
def test_an_export_has_the_numbers_of_its_checkpoint_without_a_flag(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lm_eval --model hf --model_args pretrained=EXPORT` starts it; windows are as long as the model's here."""
    lm_eval = pytest.importorskip("lm_eval", reason=f"not run: needs lm_eval, pip install {judge.HARNESS}")
    names = write_tasks(folder, kind, tmp_path, monkeypatch)
    words = ["--tasks", *names, "--include_path", str(tmp_path)]
    found = run(folder, kind, tmp_path / "found.json", *words)["tasks"]["results"]
    native_to_hf(NativeToHf(folder / kind, tmp_path / "export", tokenizer="bytes", verify=False))
    from lm_eval.tasks import TaskManager

    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'export'},max_length={LENGTH}",
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path)),
        device="cpu",
        log_samples=False,
    )["results"]
    for name in names:
        for metric, value in expected[name].items():
            if isinstance(value, float):
                assert found[name][metric] == pytest.approx(value, rel=1e-5), (name, metric)


def test_a_missing_harness_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(judge, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        judge.main(["nowhere", "--tasks", "arc_easy"])
    assert f"--tasks needs the package lm_eval: pip install {judge.HARNESS}" in capfd.readouterr().err
