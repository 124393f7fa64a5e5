"""Programs that ask a model make tokens of texts as its training did, and as transformers does with an export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from megapar_models.convert.saved import text_record
from megapar_tools.prepare.chat import BUILT_IN
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess
from megapar_tools.prepare.texts import TextOptions, open_texts

from megapar.base.errors import ConfigError, DataError
from megapar.config.options import DataConfig
from megapar.data.indexed import IndexedDataset
from megapar.data.prepared import merge_prepared, read_sidecar
from megapar.data.tokenizer import load_tokenizer, train_sentencepiece
from tests.support import program
from tests.support.exports import make_checkpoint
from tests.support.hugging_face import Case, save_model
from tests.support.tokenizers import hugging_face
from tools import generate, judge, preprocess_data, score
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

MARKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TALK = f"{MARKED}so it is<|im_end|>\n"
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def tokenizer_in(folder: Path, *, starts: bool, **config: Any) -> str:
    """Bytes with special tokens, the last ids. Returns its spec."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    if starts:
        made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    made.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return f"hf:{folder / 'tokenizer.json'}"


def run(monkeypatch: pytest.MonkeyPatch, tool: Any, *words: object) -> None:
    monkeypatch.setattr("sys.argv", [tool.__name__, *map(str, words)])
    torch.set_num_threads(1)
    assert not tool.main()


def by_transformers(folder: Path, text: str) -> tuple[list[int], torch.Tensor]:
    """The ids that AutoTokenizer makes of `text`, and the log-probability of each but the first."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return ids, found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def assert_scores_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path, export: Path, text: str, *flags: str
) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
    words = ["--input", tmp_path / "texts.jsonl", "--output", tmp_path / "scores.jsonl", "--train.seq_length", 64]
    run(monkeypatch, score, checkpoint, *words, *flags)
    found = json.loads((tmp_path / "scores.jsonl").read_text())
    _, expected = by_transformers(export, text)
    assert found["tokens"] == len(expected)
    assert torch.tensor(found["log_probs"]).double() == pytest.approx(expected, rel=1e-5)
    assert found["log_prob"] == pytest.approx(float(expected.sum()), rel=1e-6)


@pytest.fixture(scope="module")
def conversing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained on conversations. The prepared data are gone."""
    folder = tmp_path_factory.mktemp("conversing")
    spec = tokenizer_in(folder / "tokenizer", starts=False)
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so it is"}]}] * 12
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        words = ["--input", folder / "talks.jsonl", "--output", folder / "talks", "--tokenizer", spec]
        patch.setattr("sys.argv", ["preprocess_data.py", "chat", *map(str, words), "--template", "chatml"])
        preprocess_data.main()
    flags = ["--data.train", str(folder / "talks"), "--data.documents", "apart", "--data.tokenizer", spec]
    flags += [
        "--model.vocab_size",
        "260",
        "--model.max_position_embeddings",
        "128",
        "--train.steps",
        "1",
        "--optimizer.warmup_steps",
        "0",
    ]
    flags += ["--train.global_batch_size", "2", "--train.micro_batch_size", "2"]
    ended = program.run(*flags, cwd=folder)
    assert ended.code == 0, ended.err
    for file in folder.glob("talks.*"):
        file.unlink()
    return folder / "run/checkpoints/step_00000001"


def test_a_model_of_conversations_reads_markers_as_in_its_training(
    conversing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault markers-read-as-text. The checkpoint alone says that its data were conversations."""
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    native_to_hf(NativeToHf(conversing, tmp_path / "export", verify=False))
    assert_scores_of_transformers(monkeypatch, tmp_path, conversing, tmp_path / "export", TALK)
    assert json.loads((tmp_path / "scores.jsonl").read_text())["tokens"] < len(TALK) - 30
    said = capfd.readouterr().err
    assert "special tokens in a text are read as their ids, as in training" in said
    # As text, if that is asked for.
    words = ["--input", tmp_path / "texts.jsonl", "--output", tmp_path / "text.jsonl", "--train.seq_length", 64]
    run(monkeypatch, score, conversing, *words[:-1], 128, "--special_tokens", "text")
    assert json.loads((tmp_path / "text.jsonl").read_text())["tokens"] == len(TALK) - 1


def test_prompts_with_markers_and_questions_are_the_same_ids(
    conversing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def spy(stage: Any, prompts: Any, *rest: Any, ends: Any) -> list[list[int]]:
        seen.append((prompts, list(ends)))
        return [[*prompt, 65, 66] for prompt in prompts]

    monkeypatch.setattr(generate, "generate", spy)
    words = ["--tokens", "2", "--temperature", "0"]
    run(monkeypatch, generate, conversing, "--prompt", MARKED, "--stop", "<|im_end|>", *words)
    run(monkeypatch, generate, conversing, "--prompt", "hi", "--chat", *words)
    assert seen[0] == seen[1]
    prompts, ends = seen[0]
    assert (len(prompts[0]), prompts[0][0], ends) == (MARKED.count("\n") + 4 + len("userhiassistant") - 1, 258, [259])
    assert capsys.readouterr().out.splitlines()[-2] == "hi"
    with pytest.raises(SystemExit):
        run(monkeypatch, generate, conversing, "--prompt", "hi", "--chat", "--special_tokens", "text")


def test_an_export_has_the_template_and_the_ends_of_answers(
    conversing: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault template-lost-at-export."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    native_to_hf(NativeToHf(conversing, tmp_path / "export", verify=False))
    said = capfd.readouterr().err
    assert "chat_template.jinja: the chat template of the training, chatml" in said
    assert "the ids [259] end an answer" in said
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert auto.chat_template == BUILT_IN["chatml"]
    asked = [{"role": "user", "content": "hi"}]
    assert auto.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == MARKED
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "export")
    assert settings.eos_token_id == [259, 257]

    # A published folder that agrees is kept as it is; of one that does not, a line says so.
    like = shutil.copytree(tmp_path / "export", tmp_path / "like")
    native_to_hf(NativeToHf(conversing, tmp_path / "agrees", like=like, verify=False))
    assert "chat_template.jinja" not in capfd.readouterr().err
    (like / "chat_template.jinja").write_text("another")
    (like / "generation_config.json").write_text('{"eos_token_id": 257, "top_k": 5}')
    native_to_hf(NativeToHf(conversing, tmp_path / "differs", like=like, verify=False))
    assert "It replaces another one" in capfd.readouterr().err
    assert (tmp_path / "differs/chat_template.jinja").read_text() == BUILT_IN["chatml"]
    assert json.loads((tmp_path / "differs/generation_config.json").read_text()) == {
        "eos_token_id": [257, 259],
        "top_k": 5,
    }


def test_a_template_that_no_tokenizer_knows_is_exported_with_the_text_that_ends_an_answer(
    conversing: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with a sentencepiece model, whose pieces spell the markers."""
    from megapar_models.convert.chat_files import write_chat_files

    record = text_record(conversing)
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    chat = record["chat"] | {"end_tokens": []}
    lines = write_chat_files(tmp_path, record | {"chat": chat}, "bytes", load_tokenizer("bytes"))
    assert "<|im_end|> is no token of bytes" in lines[-1]
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings == {"top_k": 5, "stop_strings": ["<|im_end|>"]}
    del chat["template_text"]
    (line,) = write_chat_files(tmp_path, {"chat": chat | {"template_sha256": "0"}}, "bytes", None)
    assert line.startswith("the export has no chat template")


# Start tokens


@pytest.fixture(scope="module", params=["starts", "names"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with Llama 3's kind of post-processor, or with a start token that no text begins with."""
    pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("published")
    tokenizer_in(folder / "hf", starts=request.param == "starts", bos_token="<s>")
    save_model(folder / "hf", Case("llama", {"num_hidden_layers": 2, "vocab_size": 260, "eos_token_id": 257}))
    hf_to_native(HfToNative(folder / "hf", folder / "native", verify=False))
    return folder


@pytest.mark.slow
def test_scores_and_tasks_begin_as_transformers_begins(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault start-token-left-out: judge.py has the numbers of `lm_eval --model hf` on the same weights."""
    pytest.importorskip("lm_eval", reason=f"not run: needs lm_eval, pip install {judge.HARNESS}")
    from lm_eval.models.huggingface import HFLM
    from megapar_models.judging.harness import NativeLM

    assert_scores_of_transformers(monkeypatch, tmp_path, published / "native", published / "hf", "a text")
    theirs = HFLM(pretrained=str(published / "hf"), device="cpu", max_length=24)
    ours = NativeLM(
        lambda kind, request: None, open_texts(f"hf:{published}/native/tokenizer.json", TextOptions(), {}, ()), 24
    )
    assert ours.prefix_token_id == theirs.prefix_token_id == 256
    for text in ("a text", "", " é"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)


TASK = """
task: own_TYPE
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: TYPE
doc_to_target: "{{answer}}"
target_delimiter: ""
"""
TYPES = {
    "loglikelihood_rolling": 'doc_to_text: ""\nmetric_list: [{metric: bits_per_byte}]',
    "multiple_choice": 'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc_norm}]',
    "loglikelihood": 'doc_to_text: "{{text}}"\nmetric_list: [{metric: perplexity}]',
}


@pytest.mark.slow
def test_tasks_have_the_numbers_of_the_harness(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lm_eval --model hf --model_args pretrained=EXPORT` computes them."""
    lm_eval = pytest.importorskip("lm_eval", reason=f"not run: needs lm_eval, pip install {judge.HARNESS}")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"text": text, "answer": 0, "choices": ["x", "yz"]} for text in ("Two and two", "", "The sky is")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, more in TYPES.items():
        text = TASK.replace("TYPE", kind).replace("FOLDER", str(tmp_path)) + more
        (tmp_path / f"{kind}.yaml").write_text(text)
    names = [f"own_{kind}" for kind in TYPES]
    words = ["--tasks", *names, "--include_path", str(tmp_path), "--output", str(tmp_path / "found.json")]
    assert judge.main([str(published / "native"), *words, "--train.seq_length", "24"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["tasks"]["results"]
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={published / 'hf'},max_length=24",
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path)),
        device="cpu",
        log_samples=False,
    )["results"]
    compared = 0
    for name in names:
        for metric, value in expected[name].items():
            if isinstance(value, float):
                assert found[name][metric] == pytest.approx(value, rel=1e-5), (name, metric)
                compared += 1
    assert compared >= len(names)


def test_perplexity_is_of_the_text_behind_its_start_token(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("a bright cold day")
    words = [str(published / "native"), "--texts", str(tmp_path / "text.txt"), "--output", str(tmp_path / "found.json")]

    def nats(*flags: str) -> float:
        assert judge.main([*words, "--train.seq_length", "24", *flags]) == 0
        return float(json.loads((tmp_path / "found.json").read_text())["texts"][str(tmp_path / "text.txt")]["nats"])

    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(published / "hf")("a bright cold day", add_special_tokens=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "hf")

    def behind(first: int) -> float:
        whole = torch.tensor([[first, *ids["input_ids"]]])
        with torch.no_grad():
            log_probs = model(whole).logits[0, :-1].double().log_softmax(-1)
        return -float(log_probs.gather(-1, whole[0, 1:, None]).sum())

    adds = bool(load_tokenizer(f"hf:{published}/native/tokenizer.json").start)
    assert nats() == pytest.approx(behind(256 if adds else 257), rel=1e-6)
    assert nats("--start_token", "always") == pytest.approx(behind(256), rel=1e-6)
    assert nats("--start_token", "never") == pytest.approx(behind(257), rel=1e-6)


def test_documents_begin_as_the_tokenizer_says_and_their_description_tells_it(tmp_path: Path) -> None:
    spec = f"hf:{hugging_face(tmp_path)}"
    (tmp_path / "a.txt").write_text("one two")

    def made(name: str, tokenizer: str = spec, **options: Any) -> tuple[list[int], Any]:
        facts = preprocess([tmp_path / "a.txt"], tmp_path / name, PreprocessOptions(tokenizer=tokenizer, **options))
        return IndexedDataset(tmp_path / name).document(0).tolist(), facts["start_token"]

    ids = load_tokenizer(spec).encode("one two").tolist()
    assert made("auto") == ([0, *ids], [0])
    assert made("never", start_token="never") == (ids, [])
    with pytest.raises(DataError, match=r"was made with start_token \[\], .*auto with \[0\]"):
        merge_prepared([tmp_path / "auto", tmp_path / "never"], tmp_path / "both")
    merge_prepared([tmp_path / "auto", tmp_path / "auto"], tmp_path / "both")
    sidecar = read_sidecar(tmp_path / "both")
    assert sidecar is not None
    assert sidecar["start_token"] == [0]
    # Bytes have none, and a sentencepiece model does not say that its start token is used.
    assert made("bytes", "bytes") == ([*b"one two"], [])
    with pytest.raises(ConfigError, match="--start_token always: bytes names no start token"):
        made("bytes", "bytes", start_token="always")
    train_sentencepiece(["one two " * 9], 270, tmp_path / "spm.model")
    pieces = load_tokenizer(f"spm:{tmp_path}/spm.model").encode("one two").tolist()
    assert made("spm", f"spm:{tmp_path}/spm.model") == (pieces, [])
    assert made("spm", f"spm:{tmp_path}/spm.model", start_token="always") == ([1, *pieces], [1])
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "eos_token": "<|endoftext|>"}')
    assert made("spm", f"spm:{tmp_path}/spm.model") == ([1, *pieces], [1])


@pytest.mark.parametrize("starts", [True, False])
def test_an_export_begins_texts_as_the_training_did(
    starts: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sentencepiece model names a start token, and data say whether their documents began with it."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    train_sentencepiece(["one two " * 9], 270, tmp_path / "tokenizer.model")
    spec = f"spm:{tmp_path}/tokenizer.model"
    (tmp_path / "a.txt").write_text("one two")
    options: Any = {"start_token": "always"} if starts else {}
    preprocess([tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer=spec, **options))
    data = DataConfig(train=(str(tmp_path / "out"),), tokenizer=spec)
    run = make_checkpoint(tmp_path / "run", vocab_size=270, data=data)
    native_to_hf(NativeToHf(run, tmp_path / "export", verify=False))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert auto("one")["input_ids"][: 1 if starts else 0] == ([1] if starts else [])
    assert auto.bos_token == ("<s>" if starts else None)
    assert "in front of a text" not in capfd.readouterr().err


def test_a_tokenizer_that_fails_at_a_text_is_told_in_one_line(tmp_path: Path) -> None:
    """A regular expression that backtracks panics in the library."""
    spec = tokenizer_in(tmp_path, starts=False)
    path = tmp_path / "tokenizer.json"
    facts = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, facts["pre_tokenizer"]]}
    path.write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"fails at a text that begins 'xxx.*over") as caught:
        load_tokenizer(spec).encode("x" * 4000)
    assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_text("x" * 4000)
    with pytest.raises(DataError, match=r"a\.txt: .*fails at a text"):
        preprocess([tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer=spec))
    for config in ("[]", '{"bos_token": 7, "eos_token": "</s>"}', '{"eos_token": ["</s>"]}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(DataError, match=r"tokenizer_config\.json"):
            load_tokenizer(spec)
