"""Chat templates see what transformers shows them, and no template takes a preparation down."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from megapar_tools.prepare import template_process
from megapar_tools.prepare.chat import ChatTemplate, load_template
from megapar_tools.prepare.chat_data import example_of, marked
from megapar_tools.prepare.chat_masks import Rendered, rendered
from megapar_tools.prepare.conversations import ConversationContext, conversation_of
from megapar_tools.prepare.row_keys import Keys
from megapar_tools.prepare.template_process import TemplateProcess

from megapar.base.errors import ConfigError, DataError
from megapar.data.tokenizer import load_tokenizer, train_sentencepiece
from tests.support.chat import CALL, TOOL, answer, asked

PROCESS = TemplateProcess()


def made(source: str, **fields: Any) -> ChatTemplate:
    return ChatTemplate(source, "mine", process=PROCESS, **fields)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools is not none %}[T]{% endif %}{% if documents is defined %}{{ documents }}{% endif %}", "None"),
        ("{{ {'b': 1, 'a': 'é<'} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":"é<","b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1] | tojson(indent=1) }}", '"\\u00e9"[\n 1\n]'),
        ("{{ messages[1].thinking }}{{ messages[1].reasoning_content }}", "so so"),
        ("{{ strftime_now('%d %b %Y %S') }}", "31 Jan 2026 07"),
    ],
)
def test_templates_see_what_transformers_shows_them(source: str, expected: str) -> None:
    """Faults template-sees-other-values, template-reads-clock."""
    messages = [asked("hi"), answer("good", reasoning="so" if "so" in expected else None)]
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    template = made(source, now=datetime(2026, 1, 31, 1, 2, 7))
    assert template.text(messages) == expected.replace("so so", "soso")
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    if "strftime" not in source:
        tool = transformers.utils.chat_template_utils
        theirs = tool.render_jinja_template(conversations=[messages], chat_template=source)[0]
        assert theirs == [template.text(messages)]


def test_a_template_of_its_own_for_tools_is_taken_as_transformers_does(tmp_path: Path) -> None:
    """Fault template-sees-other-values: also where there are tools but no entry of them."""
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    template = load_template("", f"hf:{tmp_path / 'tokenizer.json'}")
    assert [template.text([], beside=ConversationContext(tools)) for tools in (None, [], [TOOL])] == [
        "plain",
        *["with tools"] * 2,
    ]
    (tmp_path / "chat_template.jinja").write_text("newer")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("newer with tools")
    template = load_template("", f"hf:{tmp_path / 'tokenizer.json'}")
    assert [template.text([], beside=ConversationContext(tools)) for tools in (None, [TOOL])] == [
        "newer",
        "newer with tools",
    ]


def test_special_tokens_come_from_every_file_of_a_tokenizer(tmp_path: Path) -> None:
    """Fault template-sees-other-values: files of 2023 name them in special_tokens_map.json alone."""
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ sep_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "sep_token": "!"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load_template("", f"hf:{tmp_path / 'tokenizer.json'}").text([]) == "<s>|</s>|!"


def test_a_sentencepiece_model_ends_turns_with_its_end_token(tmp_path: Path) -> None:
    """Fault end-token-untrained: the name of the end token becomes its id, also of a model that puts spaces first."""
    train_sentencepiece(["hello wörld 🙂 how are you? fine\n"] * 50, 300, tmp_path / "a.model")
    spec = f"spm:{tmp_path / 'a.model'}"
    tokenizer = load_tokenizer(spec, parse_special=True)
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
    source += "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(source + "{% if add_generation_prompt %}[a]{% endif %}")
    template = load_template(str(tmp_path / "t.jinja"), spec, tokenizer)
    template = ChatTemplate(template.source, "t", template.variables, process=PROCESS)
    shown = rendered(template, [asked("hello 🙂"), answer("日fine wörld")])
    assert shown.text == "<s>[u]hello 🙂[a]日fine wörld</s>"
    example = example_of(shown, tokenizer, "here")
    assert (example.tokens[0], example.tokens[-1], example.weights[-1]) == (1, tokenizer.eod, 1)
    shown_text = marked(example, tokenizer, lambda text: f"→{text}←")
    assert shown_text == "<s>[u]hello 🙂[a]→日fine wörld</s>←", "letters of several bytes too"
    with pytest.raises(ConfigError, match="writes bos_token, and the tokenizer bytes has none"):
        load_template(str(tmp_path / "t.jinja"), "bytes", load_tokenizer("bytes"))


HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.2 seconds",
    "{{ 'x'.center(3000000000) }}": "wants too much memory",
    "{{ 'xxxxxxxxxxxx' * 10 }}": "writes 120 letters, more than 100",
    "{{ '{0}{1}'.format('a') }}": "IndexError",
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25: "SyntaxError",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "RecursionError",
    "{{ messages[0].content }}\ud800": "half of a surrogate pair",
    "{{ raise_exception('no system') }}": "refuses it: no system",
}
SLOWLY = {
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}": "",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}": "",
    "{{ 'x' * 3000000000 }}": "",
    "{{ 'x\n' | indent(2000000000, true) }}": "memory",
    "{{ [1]|tojson(indent=100000000) }}": "",
    "{{ 'a'.encode('nope') }}": "LookupError",
    "{{ 'abc'|truncate(-5) }}": "AssertionError",
    "{% if 1 %}" * 120 + "{% endif %}" * 120: "IndentationError",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "RecursionError",
    "{% break %}": "SyntaxError",
    "{{ lipsum(n=100000) }}": "",
}


@pytest.mark.parametrize(
    ("source", "words"), [*HOSTILE.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY.items())]
)
def test_a_hostile_template_ends_in_one_line(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault hostile-template: it takes neither time nor memory without bound, and every error names the template."""
    monkeypatch.setattr(template_process, "LETTERS", 100)
    template = ChatTemplate(source, "bad", process=TemplateProcess(0.2) if "takes" in words or not words else PROCESS)
    with pytest.raises(DataError, match=r"^the template bad (refuses it|fails): ") as caught:
        template.text([asked("hi")])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ChatTemplate("ok", "good", process=template.process).text([]) == "ok", "the next one is rendered"


def test_what_is_no_template_is_refused_with_its_place(tmp_path: Path) -> None:
    for source, words in (("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "SyntaxError"), ("{{ x", "unexpected end")):
        (tmp_path / "t.jinja").write_text(source)
        with pytest.raises(ConfigError, match=rf"t.jinja: no jinja template: .*{words}"):
            load_template(str(tmp_path / "t.jinja"), "bytes")


# What is trained


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if not add_generation_prompt %}{% generation %}#{% endgeneration %}{% endif %}"
)
TALK = [asked("hi"), answer("good"), asked("x?"), answer("yes")]


def trained(shown: Rendered) -> list[str]:
    return [shown.text[first:last] for first, last in shown.trained]


def test_the_last_turn_has_all_its_marked_parts() -> None:
    """Fault part-of-turn-trained: a template may mark an answer and the end token apart from each other."""
    assert trained(rendered(made(PARTS), TALK, "last")) == ["yes;", "#"]
    assert trained(rendered(made(PARTS), TALK)) == ["good;", "yes;", "#"]
    first = ConversationContext(untrained=frozenset({3}))
    assert trained(rendered(made(PARTS), TALK, beside=first)) == ["good;"]


PLAIN = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{{ m.tool_calls | default('') }}.\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<a>{% endif %}"
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
    "{{ m.content.split('</think>')[-1] }}<E>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
QWEN = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<E>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
OPENED = QWEN.replace("<a>{% endif %}", "<a><think>\n{% endif %}")


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        pytest.param(DEEPSEEK, TALK, ["good<E>", "yes<E>"], id="prompt-opens-thoughts"),
        pytest.param(OPENED, TALK[:2], ["good<E>"], id="opened-thoughts-are-closed"),
        pytest.param(QWEN, [asked("hi"), answer("  indented")], ["  indented<E>"], id="white-space-of-answer"),
        pytest.param(QWEN, [answer("good"), *TALK[2:]], ["good<E>", "yes<E>"], id="assistant-begins"),
        pytest.param(
            QWEN,
            [answer("good", reasoning_content="so")],
            ["<think>\nso\n</think>\n\ngood<E>"],
            id="assistant-begins-with-thoughts",
        ),
        pytest.param(PLAIN, [asked("hi"), answer("")], ["."], id="empty-answer"),
        pytest.param(
            PLAIN, [asked("hi"), answer("", tool_calls=[CALL]), answer("x")], [f"{[CALL]}.", "x."], id="call-ends-alike"
        ),
        pytest.param(PLAIN.replace(".\n", "\n"), TALK[:2], ["good\n"], id="white-space-ends-turn"),
    ],
)
def test_prefixes_cut_an_answer_exactly(source: str, messages: list[Any], expected: list[str]) -> None:
    """Faults first-answer-token-lost, empty-thoughts-trained, end-token-untrained."""
    assert trained(rendered(made(source), messages)) == expected
    assert trained(rendered(made(source), messages, "last")) == expected[-1:]


def test_a_clock_with_seconds_stands_still() -> None:
    """Fault template-reads-clock: the renderings of one conversation have one time, and what read the clock is told."""
    source = "{{ strftime_now('%S.%f') }}" + PARTS
    template = ChatTemplate(source, "mine")
    assert trained(rendered(template, TALK, "last")) == ["yes;", "#"]
    assert template.process.read_clock


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (answer("", tool_calls=[CALL]), "does not write the call of get_weather of message 2"),
        (answer("good", thinking="so"), "does not write the thoughts of message 2 .* --pass_over"),
        (answer("<think>so</think>good"), "does not write the thoughts of message 2"),
    ],
)
def test_what_a_template_does_not_write_is_refused(message: Any, words: str) -> None:
    """Fault message-not-written: the model would learn to say nothing where it should call or think."""
    source = DEEPSEEK if "<think>" in message["content"] else "chatml"
    template = made(source) if source == DEEPSEEK else load_template("chatml", "bytes")
    with pytest.raises(DataError, match=words):
        rendered(template, [asked("hi"), message])


def test_texts_tools_and_options_that_a_template_does_not_write_are_refused() -> None:
    """Fault message-not-written: a tool may have the name of a word in the text."""
    template = made("{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}")
    with pytest.raises(DataError, match="does not write the tool get_weather; --pass_over tools"):
        rendered(template, [asked("get_weather"), answer("good")], beside=ConversationContext(tools=[TOOL]))
    with pytest.raises(DataError, match="does not read enable_thinking of chat_template_kwargs"):
        rendered(template, TALK, beside=ConversationContext(options={"enable_thinking": False}))
    silent = made("{% for m in messages %}<{{ m.role }}>{{ m.content if m.role != 'user' }};{% endfor %}")
    with pytest.raises(DataError, match=r"does not write the text of message 1 \(user\)"):
        rendered(silent, TALK)


@pytest.mark.slow
def test_every_template_of_trl_renders_and_masks_as_transformers() -> None:
    """Text and marked spans of six conversations by each template; refusals are those of docs/conversations.md."""
    trl = pytest.importorskip("trl", reason="not run: needs trl, pip install '.[judges]'")
    tool = pytest.importorskip("transformers.utils.chat_template_utils", reason="not run: needs transformers")
    thought = answer("good", reasoning_content="I think")
    rows: list[dict[str, Any]] = [
        {"messages": TALK[:2]},
        {"messages": TALK},
        {"messages": [{"role": "system", "content": "Be kind."}, *TALK[:2]]},
        {"messages": [TALK[0], thought]},
        {"messages": [TALK[0], thought, TALK[2], answer("yes", reasoning="so")]},
        {
            "messages": [TALK[0], answer("", tool_calls=[CALL]), {"role": "tool", "content": "sun"}, TALK[1]],
            "tools": [TOOL],
        },
    ]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    texts = spans = 0
    reasons = []
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        source = path.read_text()
        template = ChatTemplate(source, path.name, variables, process=PROCESS)
        for row in rows:
            given: dict[str, Any] = {"conversations": [row["messages"]], "tools": row.get("tools"), **variables}
            has_marks = "{%- generation" in source or "{% generation" in source
            conversation = conversation_of(row, "here", Keys((), template.reads))
            try:
                shown = rendered(template, conversation.messages, "all", conversation.beside)
            except DataError as error:
                reasons.append(str(error))
                if "refuses it" in reasons[-1] or " fails: " in reasons[-1]:
                    with pytest.raises((jinja2.TemplateError, TypeError)):
                        tool.render_jinja_template(chat_template=source, **given)
                continue
            found = tool.render_jinja_template(chat_template=source, return_assistant_tokens_mask=has_marks, **given)
            assert found[0] == [shown.text], path.name
            texts += 1
            if has_marks:
                assert [list(span) for span in shown.trained] == [list(span) for span in found[1][0]], path.name
                spans += 1
    assert texts > 250
    assert spans > 120
    known = ("does not write", "changes with what follows", "is not the beginning", "refuses it", " fails: ")
    assert not [reason for reason in reasons if not any(words in reason for words in known)]
    assert len(reasons) < 170
