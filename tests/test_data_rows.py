"""Rows of conversations and of pairs: every key is used, passed over because it has no meaning, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megapar_tools.prepare.chat import ChatTemplate
from megapar_tools.prepare.chat_data import ChatCounts
from megapar_tools.prepare.chat_masks import rendered
from megapar_tools.prepare.conversations import Conversation, conversation_of, rows
from megapar_tools.prepare.preferences import members, pair_of
from megapar_tools.prepare.row_keys import Keys
from megapar_tools.prepare.template_process import TemplateProcess

from megapar.data.prepared import read_sidecar
from megapar.data.tokenizer import ByteTokenizer
from tests.support.chat import CALL, TOOL, answer, asked
from tests.support.conversations import prepare

PROCESS = TemplateProcess()
SOURCE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ 'quiet ' if enable_thinking is false }}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    ";{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TALK = [asked("hi"), answer("good")]
LONG = [*TALK, asked("x?"), answer("yes")]
SHORT_TOOL = {"function": {"name": "f"}}


def shown(conversation: Conversation) -> tuple[str, list[str]]:
    template = ChatTemplate(SOURCE, "mine", process=PROCESS)
    found = rendered(template, conversation.messages, "all", conversation.beside)
    return found.text, [found.text[first:last] for first, last in found.trained]


@pytest.mark.parametrize(
    ("row", "text", "trained"),
    [
        ({"messages": TALK, "tools": [SHORT_TOOL]}, "[f]<u>hi;<a>good;", ["good;"]),
        ({"messages": TALK, "tools": json.dumps([SHORT_TOOL])}, "[f]<u>hi;<a>good;", ["good;"]),
        ({"messages": TALK, "functions": [{"name": "f"}]}, "[f]<u>hi;<a>good;", ["good;"]),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}], "system": "Be."},
            "<s>Be.;<u>hi;<a>good;",
            ["good;"],
        ),
        ({"messages": TALK, "system_prompt": "Be."}, "<s>Be.;<u>hi;<a>good;", ["good;"]),
        ({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, "quiet <u>hi;<a>good;", ["good;"]),
        (
            {"instruction": "x?", "output": "yes", "history": [["hi", "good"]], "system": "Be."},
            "<s>Be.;<u>hi;<a>good;<u>x?;<a>yes;",
            ["good;", "yes;"],
        ),
        ({"messages": [TALK[0], answer("good", weight=0), *LONG[2:]]}, "<u>hi;<a>good;<u>x?;<a>yes;", ["yes;"]),
        ({"messages": [TALK[0], answer("good", train=False), *LONG[2:]]}, "<u>hi;<a>good;<u>x?;<a>yes;", ["yes;"]),
        (
            {"prompt": LONG[:3], "completion": LONG[3:], "system": "Be."},
            "<s>Be.;<u>hi;<a>good;<u>x?;<a>yes;",
            ["yes;"],
        ),
        ({"prompt": "hi", "prompt_id": 7, "messages": TALK, "source": "x"}, "<u>hi;<a>good;", ["good;"]),
    ],
)
def test_what_a_row_says_beside_its_messages_is_followed(row: Any, text: str, trained: list[str]) -> None:
    """Faults column-dropped, untrained-message-trained."""
    assert shown(conversation_of(row, "here", Keys())) == (text, trained)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": TALK, "reward": 3},
            "the row has reward, which might change what is trained .* --pass_over reward",
        ),
        ({"messages": [TALK[0], answer("good", mask=1)]}, "a message of assistant has mask"),
        ({"messages": TALK, "conversations": [], "prompt": "other"}, "the row has conversations, prompt"),
        ({"messages": [TALK[0], answer("good", weight=0.5)]}, "weight='0.5'; 0 and 1 can be followed"),
        ({"messages": [{**TALK[0], "train": True}, TALK[1]]}, "a message of user has train=True"),
        ({"messages": [TALK[0], answer("good", train=True, weight=0)]}, "weight and train, which disagree"),
        ({"messages": [{"role": "system", "content": "a"}, *TALK], "system": "b"}, "several system messages"),
        ({"messages": TALK, "tools": "none"}, "tools is no JSON"),
        ({"messages": TALK, "tools": ["f"]}, "not a list of objects"),
        ({"messages": TALK, "chat_template_kwargs": {"tools": []}}, "no options of a template"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "history is .* not a list of pairs"),
        ({"messages": [TALK[0], answer("good", thinking="a", reasoning="b")]}, "several that differ"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(row: Any, words: str) -> None:
    """Fault column-dropped."""
    with pytest.raises(ValueError, match=words):
        conversation_of(row, "here", Keys())


def test_what_is_passed_over_is_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of_file = [{"messages": TALK, "id": 1, "reward": 2}, {"messages": TALK, "id": 2}]
    prefix = prepare(tmp_path, rows_of_file, "two", "--pass_over", "reward")
    assert "passed over: 1 x reward, 2 x id" in capsys.readouterr().out
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    assert sidecar["chat"]["passed_over"] == {"reward": 1, "id": 2}
    assert sidecar["chat"]["clock"] is None


def test_a_key_of_a_message_that_the_template_reads_reaches_it() -> None:
    """A name of a tool is written by some templates, and no fault of others."""
    message = {"role": "tool", "content": "sun", "name": "get_weather"}
    row = {"messages": [asked("hi"), answer("", tool_calls=[CALL]), message, answer("fine")], "tools": [TOOL]}
    for reads in (True, False):
        keys = Keys((), lambda _, reads=reads: reads)
        assert ("name" in conversation_of(row, "here", keys).messages[2]) is reads
        assert keys.counts == ({} if reads else {"name": 1})


@pytest.mark.slow
def test_calls_of_parquet_have_their_own_arguments_alone(tmp_path: Path) -> None:
    """Fault template-sees-other-values: Arrow gives all calls of a column the keys of all."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="not run: needs pyarrow, pip install '.[data]'")
    pa = pytest.importorskip("pyarrow")
    other = {**CALL, "function": {"name": "get_time", "arguments": {"zone": "UTC"}}}
    written = [{"messages": [asked("hi"), answer("", tool_calls=[call])]} for call in (CALL, other)]
    parquet.write_table(pa.Table.from_pylist(written), tmp_path / "a.parquet")
    found = [conversation_of(row, place, Keys()).messages for place, row in rows(tmp_path / "a.parquet")]
    assert [messages[1]["tool_calls"] for messages in found] == [[CALL], [other]]


# Pairs


def both(prompt: list[Any], chosen: str = "good", rejected: str = "bad") -> dict[str, Any]:
    return {"chosen": [*prompt, answer(chosen)], "rejected": [*prompt, answer(rejected)]}


SYSTEM = [{"role": "system", "content": "Be."}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "hi", "chosen": "good", "rejected": "bad"}, "<u>hi;<a>"),
        ({"prompt": "hi", **both(TALK[:1])}, "<u>hi;<a>"),
        ({"prompt": TALK[:1], **both(TALK[:1])}, "<u>hi;<a>"),
        ({"prompt": "hi", **both([*SYSTEM, *TALK[:1]])}, "<s>Be.;<u>hi;<a>"),
        ({"prompt": SYSTEM, **both(TALK[:1])}, "<s>Be.;<u>hi;<a>"),
        ({"prompt": "x?", **both(LONG[:3])}, "<u>hi;<a>good;<u>x?;<a>"),
        ({"prompt": "hi", **both([]), "tools": [SHORT_TOOL], "system": "Be."}, "[f]<s>Be.;<u>hi;<a>"),
        ({"messages": [TALK[0], answer("good")], "prompt_id": 1, "score_chosen": 2, **both(TALK[:1])}, "<u>hi;<a>"),
    ],
)
def test_a_prompt_is_written_once_whatever_its_form(row: Any, text: str) -> None:
    """Fault prompt-written-twice."""
    chosen, rejected = pair_of(row, "here", Keys())
    assert shown(chosen) == (f"{text}good;", ["good;"])
    assert shown(rejected) == (f"{text}bad;", ["bad;"])


def test_all_turns_behind_the_common_beginning_are_compared() -> None:
    """As TRL's extract_prompt: a continuation of several turns is compared as a whole."""
    row = {"chosen": [*LONG[:3], answer("a"), asked("b"), answer("c")], "rejected": [*LONG[:3], answer("d")]}
    chosen, rejected = pair_of(row, "here", Keys())
    assert shown(chosen)[1] == ["a;", "c;"]
    assert shown(rejected)[1] == ["d;"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"chosen": both([asked("hi")])["chosen"], "rejected": both([asked("other")])["rejected"]},
            "answers to different prompts: message 1 differs, and is of user",
        ),
        ({"prompt": "something else", **both(TALK[:1])}, "prompt says something else; --pass_over prompt"),
        ({"prompt": LONG[2:3], **both(TALK[:1])}, "prompt says something else"),
        ({"prompt": "hi", "chosen": "a", "rejected": "b", "margin": 2}, "the row has margin"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(row: Any, words: str) -> None:
    """Faults different-prompts-compared and column-dropped."""
    with pytest.raises(ValueError, match=words):
        pair_of(row, "here", Keys())


def test_pairs_are_compared_by_all_marked_parts(tmp_path: Path) -> None:
    """Fault part-of-turn-trained: by the end token alone otherwise."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
        "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
        "{% if not add_generation_prompt %}{% generation %}#{% endgeneration %}{% endif %}"
    )
    pair = pair_of({"prompt": "hi", "chosen": "good", "rejected": "bad"}, "here", Keys())
    template = ChatTemplate(source, "mine", process=PROCESS)
    found = members([pair], ByteTokenizer(), template, 0, "refuse", ChatCounts())
    texts = [bytes(example.tokens[example.weights == 1].tolist()).decode() for example in found]
    assert texts == ["good;#", "bad;#"]


@pytest.mark.slow
def test_prompts_are_those_of_trl() -> None:
    """The prompt and both answers of whole conversations, by TRL's maybe_extract_prompt."""
    trl = pytest.importorskip("trl.data_utils", reason="not run: needs trl, pip install '.[judges]'")
    extract: Callable[[Any], Any] = trl.maybe_extract_prompt
    for row in ({"prompt": "hi", **both(TALK[:1])}, both(LONG[:3]), {"prompt": "hi", **both([*SYSTEM, *TALK[:1]])}):
        theirs = extract(row)
        for name, ours in zip(("chosen", "rejected"), pair_of(row, "here", Keys()), strict=True):
            assert list(ours.messages) == [*theirs["prompt"], *theirs[name]]
            untrained = {n for n in range(len(theirs["prompt"])) if ours.messages[n]["role"] == "assistant"}
            assert ours.beside.untrained == untrained
