"""Conversations become tokens by chat templates, and the trained ones are the assistant's, with what ends a turn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megapar_tools.prepare.chat import BUILT_IN, ChatTemplate, load_template
from megapar_tools.prepare.chat_data import ChatCounts, Example, end_token, example_of, examples, marked
from megapar_tools.prepare.chat_masks import rendered
from megapar_tools.prepare.conversations import Conversation, conversation_of, read_conversations
from megapar_tools.prepare.row_keys import Keys
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError
from megapar.data.indexed import IndexedDataset
from megapar.data.prepared import merge_prepared, read_sidecar, read_weights, split, verify
from megapar.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.support.conversations import prepare

FOLDER = Path(__file__).parent / "support/chat_templates"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>")
SPECIAL += ("<start_of_turn>", "<end_of_turn>", "<|endoftext|>")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = [
    {"role": "user", "content": "How are you, Zoë?"},
    {"role": "assistant", "content": "Fine — and you? 🙂"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "two"},
]


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), name, VARIABLES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Byte pairs with the special tokens of all templates. Pad and end of text are one token, as in many files."""
    tokenizers = pytest.importorskip("tokenizers", reason="not run: needs tokenizers, pip install '.[data]'")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["How are you? Fine and you two assistant user model\n\n" * 20], trainer)
    made.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return HuggingFaceTokenizer(folder / "tokenizer.json", parse_special=True)


def trained_text(name: str, messages: list[dict[str, Any]], tokenizer: Any, turns: Any = "all") -> list[str]:
    """The texts of the trained parts, found through the tokens."""
    example = example_of(rendered(template(name), messages, turns), tokenizer, "here")
    shown = marked(example, tokenizer, lambda text: f"\0{text}\1")
    return [piece.partition("\1")[0] for piece in shown.split("\0")[1:]]


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("chatml_marked", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")],
)
def test_answers_and_what_ends_a_turn_are_trained_and_nothing_else(
    name: str, end: str, tokenizer: HuggingFaceTokenizer
) -> None:
    """Faults end-token-untrained, first-answer-token-lost: also where pad is the token that ends a turn."""
    tokens = tokenizer.encode(end)
    assert len(tokens) == 1
    example = example_of(rendered(template(name), ASKED), tokenizer, "here")
    spans = np.flatnonzero(np.diff(np.concatenate(([0], example.weights, [0]))))
    found = [example.tokens[start:stop] for start, stop in spans.reshape(-1, 2)]
    for ids, text in zip(found, ("Fine — and you? 🙂", "two"), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text + end))
    for ours, theirs in zip(trained_text(name, ASKED, ByteTokenizer()), ("Fine — and you? 🙂", "two"), strict=True):
        assert ours == theirs + end


def test_the_tokens_that_end_turns_are_told(tokenizer: HuggingFaceTokenizer) -> None:
    """An export needs them. White space behind is not what ends a turn, and letters are no special token."""
    ends = {}
    for name in ("chatml", "llama3"):
        counts = ChatCounts()
        list(examples([Conversation(ASKED, "here")], tokenizer, template(name), "all", 0, "refuse", counts))
        ends[name] = [tokenizer.decode([token]) for token in counts.end_tokens]
    assert ends["llama3"] == ["<|eot_id|>"]
    marked = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}</s>\n{% endgeneration %}{% endfor %}", "x"
    )
    assert (
        tokenizer.decode([end_token(example_of(rendered(marked, ASKED), tokenizer, "here"), tokenizer) or 0]) == "</s>"
    )
    bare = ChatTemplate(marked.source.replace("</s>", ""), "x")
    assert end_token(example_of(rendered(bare, ASKED), tokenizer, "here"), tokenizer) is None


def _without_ends(weights: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`weights` without the last token of each trained part."""
    return weights * np.append(weights[1:], 0)


@pytest.mark.parametrize("planted", [np.ones_like, np.zeros_like, _without_ends], ids=["ones", "zeros", "ends"])
def test_a_planted_mask_is_seen(planted: Any, tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults mask-all-ones-or-zeros, end-token-untrained."""

    right = example_of

    def example_with_fault(*args: Any) -> Example:
        example = right(*args)
        return Example(example.tokens, planted(example.weights), example.place)

    check = test_answers_and_what_ends_a_turn_are_trained_and_nothing_else
    check("chatml", "<|im_end|>", tokenizer)
    monkeypatch.setitem(check.__globals__, "example_of", example_with_fault)
    with pytest.raises((AssertionError, ValueError)):
        check("chatml", "<|im_end|>", tokenizer)


def test_masks_are_those_of_transformers(tokenizer: HuggingFaceTokenizer) -> None:
    """With generation tags transformers masks by letters, at the first and the last token too (fault
    masks-at-span-ends)."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    whole = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    whole += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ends = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "How"}, ASKED[1] | {"content": "you"}]
    for source, messages in (
        ((FOLDER / "chatml_marked.jinja").read_text(), ASKED),
        (BUILT_IN["chatml"], ASKED),
        (whole, ends),
    ):
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, chat_template=source)
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        example = example_of(rendered(ChatTemplate(source, "here"), messages), tokenizer, "here")
        assert example.tokens.tolist() == expected["input_ids"]
        # A letter of several tokens, such as an emoji, is masked at its first token alone in transformers.
        masks = np.array([example.weights, expected["assistant_masks"]])
        assert (masks[0] >= masks[1]).all()
        assert (masks[0] != masks[1]).sum() <= 3


# TRL's name of a template for training, and ours of the same format.
TRAINED_BY_TRL = {"qwen2_5": "chatml", "llama3": "llama3", "gemma": "gemma"}


@pytest.mark.parametrize("theirs", TRAINED_BY_TRL)
def test_masks_by_prefixes_are_those_of_templates_for_training(theirs: str) -> None:
    """What TRL's templates with generation tags train, is trained here by templates without tags.

    TRL's train the line break behind the end of a turn too, and Qwen's the one in front of the answer.
    """
    golden = json.loads((Path(__file__).parent / "golden/trl_masks.json").read_text())
    expected = golden["templates"][theirs]
    shown = rendered(template(TRAINED_BY_TRL[theirs]), expected["messages"])
    assert shown.text == expected["text"]
    spans = []
    for start, stop in expected["trained"]:
        piece = expected["text"][start:stop]
        spans.append((start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())))
    assert list(shown.trained) == spans


@pytest.mark.slow
def test_templates_of_trl_are_masked_as_transformers_masks_them(tokenizer: HuggingFaceTokenizer) -> None:
    """Every template that TRL has for training, and the golden file is what it says."""
    trl = pytest.importorskip("trl", reason="not run: needs trl, pip install '.[judges]'")
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    golden = json.loads((Path(__file__).parent / "golden/trl_masks.json").read_text())
    asked = golden["templates"]["gemma"]["messages"]  # without a system message, which Gemma refuses
    folder = Path(trl.__file__).parent / "chat_templates"
    compared = 0
    for path in sorted(folder.glob("*_training.jinja")):
        ours = ChatTemplate(path.read_text(), path.name, VARIABLES)
        name = path.name.removesuffix("_training.jinja")
        messages = golden["templates"].get(name, {"messages": asked})["messages"]
        # The contents of these are parts, texts and images: they write no content that is a text.
        if "{% generation" not in ours.source or name in ("llava_next", "idefics3", "smolvlm"):
            continue
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **VARIABLES)
        theirs.chat_template = ours.source
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        shown = rendered(ours, messages)
        example = example_of(shown, tokenizer, path.name)
        assert example.tokens.tolist() == expected["input_ids"], path.name
        assert example.weights.tolist() == expected["assistant_masks"], path.name
        compared += 1
        if golden["trl"] == trl.__version__ and name in golden["templates"]:
            found = {"messages": messages, "text": shown.text, "trained": [list(span) for span in shown.trained]}
            assert found == golden["templates"][name]
    assert compared > 20


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "thinking"])
def test_texts_are_those_of_transformers(name: str, tokenizer: HuggingFaceTokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **VARIABLES)
    theirs.chat_template = template(name).source
    for prompt in (False, True):
        found = template(name).text(ASKED, add_generation_prompt=prompt)
        assert found == theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=prompt)


def test_empty_thoughts_are_no_answer(tokenizer: HuggingFaceTokenizer) -> None:
    """Fault empty-thoughts-trained: the template writes an empty block where the message has no thoughts."""
    assert trained_text("thinking", ASKED[:2], tokenizer) == ["Fine — and you? 🙂<|im_end|>"]
    thought = {**ASKED[1], "reasoning_content": "a smile"}
    assert trained_text("thinking", [ASKED[0], thought], tokenizer) == [
        "<think>\na smile\n</think>\n\nFine — and you? 🙂<|im_end|>"
    ]
    assert trained_text("thinking", ASKED, tokenizer, "last") == ["two<|im_end|>"]


def test_a_template_that_cannot_be_masked_is_refused() -> None:
    """Thoughts of earlier turns are dropped, so a turn depends on what follows."""
    with pytest.raises(DataError, match=r"thinking cannot be masked: .* up to message 2 changes .* --turns"):
        rendered(template("thinking"), ASKED)
    upper = ChatTemplate("{% filter upper %}{% generation %}a{% endgeneration %}{% endfilter %}", "upper")
    with pytest.raises(DataError, match="upper changes what is between generation tags"):
        rendered(upper, ASKED)


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"messages": ASKED}, ["How are you, Zoë?", "Fine — and you? 🙂", "1+1", "two"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a", "b"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["a", "b"]),
        ({"instruction": "a", "input": "x", "output": "b", "system": "s"}, ["s", "a\n\nx", "b"]),
        ({"prompt": "a", "completion": "b"}, ["a", "b"]),
        (
            {"prompt": ASKED[:1], "completion": ASKED[1:2], "messages": None},
            ["How are you, Zoë?", "Fine — and you? 🙂"],
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}, ["b"]),
    ],
)
def test_forms_of_conversations(row: Any, texts: list[str]) -> None:
    found = conversation_of(row, "here", Keys()).messages
    assert [message["content"] for message in found] == texts
    assert {message["role"] for message in found} <= {"system", "user", "assistant"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "is list, not an object"),
        ({"text": "a"}, "has text; it needs messages"),
        ({"messages": "a"}, "messages is 'a', not a list"),
        ({"messages": [{"content": "a"}]}, "a message without role"),
        ({"messages": [{"role": "user", "content": 3}]}, "a message of user has content='3', not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has parts that are no text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"conversations": [{"from": "owl", "value": "a"}]}, "a message from 'owl'"),
        ({"prompt": 1, "completion": "b"}, "prompt and completion are texts or lists"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_place(row: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n' + json.dumps(row) + "\n")
    with pytest.raises(DataError) as caught:
        list(read_conversations([path]))
    assert str(caught.value).startswith(f"{path}: line 3: ")
    assert words in str(caught.value)


@pytest.mark.slow
def test_rows_of_parquet_are_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="not run: needs pyarrow, pip install '.[data]'")
    pa = pytest.importorskip("pyarrow")
    rows = [{"messages": ASKED[:2]}, {"messages": [{"role": "user", "content": "a"}, ASKED[3]]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = list(read_conversations([tmp_path / "a.parquet"]))
    assert [item.messages for item in found] == [row["messages"] for row in rows]
    assert found[1].place.endswith("a.parquet: row 2")


def only(*conversations: Conversation, max_length: int = 0, too_long: Any = "refuse") -> tuple[list[Any], ChatCounts]:
    counts = ChatCounts()
    rules: tuple[Any, ...] = ("all", max_length, too_long, counts)
    return list(examples(conversations, ByteTokenizer(), template("chatml"), *rules)), counts


def test_nothing_trained_and_too_long_are_never_dropped_in_silence() -> None:
    """Fault mask-all-ones-or-zeros: a mask of zeros is refused, and the trained share is counted."""
    good = Conversation(ASKED, "line 1")
    _, counts = only(good)
    assert counts.trained_tokens == len("Fine — and you? 🙂two<|im_end|><|im_end|>".encode())
    silent = ChatTemplate("{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}", "no")
    with pytest.raises(DataError, match="line 1: no token would be trained"):
        list(examples([good], ByteTokenizer(), silent, "all", 0, "refuse", ChatCounts()))
    with pytest.raises(DataError, match=r"line 1: has \d+ tokens, above --max_length 50; .* --too_long skip"):
        only(good, max_length=50)
    short = Conversation([{"role": "assistant", "content": "b"}], "line 2")
    found, counts = only(good, short, max_length=50, too_long="skip")
    assert [item.place for item in found] == ["line 2"]
    assert counts.left_out == {"above 50 tokens": 1}


def test_a_pair_has_the_weights_of_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": ASKED}, {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "dd"}]
    prefix = prepare(tmp_path, rows, "three")
    assert "3 conversations, " in capsys.readouterr().out
    dataset = verify(prefix, full=True)
    weights = read_weights(prefix, len(dataset.tokens))[:]
    trained = bytes(np.array(dataset.tokens)[weights == 1].astype(np.uint8)).decode()
    assert trained == "Fine — and you? 🙂<|im_end|>two<|im_end|>b<|im_end|>dd<|im_end|>"
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    assert sidecar["chat"]["trained_tokens"] == weights.sum()
    assert sidecar["chat"]["template_text"] == BUILT_IN["chatml"]
    # Parts and wholes keep the weights of their documents.
    split(prefix, tmp_path / "part", (2, 1))
    parts = [tmp_path / "part_train", tmp_path / "part_validation"]
    merge_prepared(parts, tmp_path / "again")
    said = []
    for part in (*parts, tmp_path / "again"):
        verify(part, full=True)
        said.append((read_sidecar(part) or {})["chat"]["trained_tokens"])
    assert said == [said[2] - said[1], len("dd<|im_end|>"), weights.sum()]
    again = IndexedDataset(tmp_path / "again")
    np.testing.assert_array_equal(again.tokens, dataset.tokens)
    np.testing.assert_array_equal(read_weights(tmp_path / "again", len(again.tokens)), weights)
    other = prepare(tmp_path, rows, "last", "--turns", "last")
    with pytest.raises(DataError, match="merge conversations of one template and one choice of turns"):
        merge_prepared([prefix, other], tmp_path / "mixed")
    with (tmp_path / "three.weights").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(DataError, match=r"three.weights: SHA-256"):
        verify(prefix, full=True)


def test_examples_are_shown_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path, [{"messages": ASKED}], "one", "--show", "3")
    shown = capsys.readouterr().out
    assert "→Fine — and you? 🙂<|im_end|>←" in shown
    assert "tokens are trained" in shown
    assert not list(tmp_path.glob("one.[bw]*"))


def test_a_conversation_that_cannot_be_trained_leaves_no_pair(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        prepare(tmp_path, [{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_templates_are_found_beside_the_tokenizer(tmp_path: Path) -> None:
    spec = f"hf:{tmp_path / 'tokenizer.json'}"
    with pytest.raises(ConfigError, match="has no chat template beside it; --template names a file, or chatml"):
        load_template("", spec)
    both = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": both, "bos_token": {"content": "<s>"}})
    )
    assert load_template("", spec).text([]) == "<s>yes"
    (tmp_path / "chat_template.jinja").write_text("newer{% if %}")
    with pytest.raises(ConfigError, match="no jinja template"):
        load_template("", spec)
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_template("", spec).text([]) == "newer"
    with pytest.raises(ConfigError, match="nowhere: cannot be read: No such file"):
        load_template("nowhere", spec)


def test_a_hostile_template_reaches_nothing() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(DataError, match=r"the template bad (refuses it|fails)"):
            ChatTemplate(source, "bad").text(list(ASKED))
