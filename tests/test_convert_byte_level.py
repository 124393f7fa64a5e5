"""Exports of runs with tokenizers of bytes and of byte pairs: their tokenizer.json encodes as training did."""

import json
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megapar_models.convert.byte_level import merges, tiktoken_json
from megapar_models.convert.tokenizer_files import TEXTS, decoding_differences
from megapar_models.convert.word_pattern import _CATEGORIES, InexpressibleError, oniguruma

from megapar.config.options import DataConfig
from megapar.data.tokenizer import TiktokenTokenizer, Tokenizer, load_tokenizer
from tests.support.exports import make_checkpoint, report
from tests.support.tokenizers import byte_pairs, trained_byte_pairs
from tools.convert_checkpoint import NativeToHf, native_to_hf

transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")

# The words of o200k_base (tiktoken, MIT license).
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNREACHABLE = (b" zqxzqx", "中文".encode(), b"\xe9\x01", b"    \n", b"1234", b"123")
SPECIAL = {"<|endoftext|>": 330, "import": 328, "<s>": 335}  # ids have gaps, and one is a word of texts


class Export(NamedTuple):
    ours: Tokenizer
    auto: Any
    folder: Path


@pytest.fixture(scope="module", params=["bytes", "tiktoken", "tiktoken of its own"])
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("export")
    spec = "bytes"
    if request.param != "bytes":
        facts = {} if request.param == "tiktoken" else {"pattern": O200K, "special_tokens": SPECIAL}
        spec = f"tiktoken:{trained_byte_pairs(folder / 'x.tiktoken', 60, *UNREACHABLE, **facts)}"
    source = make_checkpoint(folder / "native", data=DataConfig(tokenizer=spec))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, lambda *args: pytest.fail("transformers reached for the network"))
        patch.setattr(socket, "getaddrinfo", lambda *args, **options: pytest.fail("transformers asked for a name"))
        native_to_hf(NativeToHf(source, folder / "hf", tokenizer=spec, verify=False))
        auto = transformers.AutoTokenizer.from_pretrained(folder / "hf", split_special_tokens=True)
    return Export(load_tokenizer(spec), auto, folder / "hf")


# Any characters, and characters that tokenizers treat in ways of their own.
ODD = st.text("aeginrt IMPORT'sdſK0123\u0663²½\r\n\t\u00a0\u3000\x00\x7fée\u0301中文🙂<|s>zqx_/", max_size=60)


random_texts_and_bytes = given(text=st.one_of(ODD, st.text(max_size=30)), data=st.binary(max_size=12))
odd_text = example(text="import <s>import<|endoftext|> zqxzqx 1234567", data=b"")


@random_texts_and_bytes
@odd_text
@settings(max_examples=60, deadline=None)
def test_random_texts_and_bytes_are_encoded_and_decoded_as_in_training(export: Export, text: str, data: bytes) -> None:
    """Fault exported-tokenizer: bytes other than UTF-8 are decoded alike too."""
    are_as_in_training(export, text, data)


@pytest.mark.slow
@random_texts_and_bytes
@odd_text
@settings(max_examples=250, deadline=None)
def test_many_random_texts_and_bytes_are_too(export: Export, text: str, data: bytes) -> None:
    are_as_in_training(export, text, data)


def are_as_in_training(export: Export, text: str, data: bytes) -> None:
    ids = export.ours.encode(text).tolist()
    assert export.auto(text)["input_ids"] == ids
    assert export.auto.decode(ids) == export.ours.decode(ids)
    ids = list(data)  # the first ids of each of these tokenizers are the bytes
    assert export.auto.decode(ids) == export.ours.decode(ids)


def test_the_report_and_the_special_tokens_of_an_export(export: Export) -> None:
    found = report(export.folder)
    assert (found["verified"], found["different"], found["decoded_otherwise"]) == (True, 0, 0)
    special = getattr(export.ours, "special_tokens", {"<|endoftext|>": 256})
    for text, token in special.items():
        assert export.auto.convert_tokens_to_ids(text) == token
        parsed = export.auto(f"a{text}", split_special_tokens=False)["input_ids"]
        assert parsed == [*export.ours.encode("a").tolist(), token], "a chat template's token is an id"
    assert export.auto.eos_token_id == export.ours.eod
    assert found["texts"] >= len(TEXTS) + 3 * len(special)


def test_an_export_that_decodes_otherwise_is_found(export: Export) -> None:
    def stripped(ids: list[int]) -> str:
        return export.auto.decode(ids).strip()

    assert decoding_differences(export.ours, stripped, [" a"]) == [export.ours.encode(" a").tolist()]
    assert decoding_differences(export.ours, lambda ids: export.auto.decode(ids).replace("\ufffd\ufffd", "?"), [])


def encoder(made: str) -> Any:
    library = tokenizers.Tokenizer.from_str(made)
    library.encode_special_tokens = True
    return lambda text: library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pattern", [r"[^\n1]+", O200K])
def test_random_ranks(pattern: str, tmp_path: Path) -> None:
    """No training gives such an order of ranks: a token may be made of tokens with higher ranks.

    One pattern leaves text out.
    """
    rng = random.Random(1)
    unreachable = 0
    for _ in range(25):
        words = sorted({"".join(rng.choices("ab1é ", k=rng.randint(2, 5))).encode() for _ in range(25)})
        rng.shuffle(words)
        path = byte_pairs(tmp_path / "x", *words)
        lines = path.read_text().splitlines()
        ranks = rng.sample(range(len(lines)), len(lines))
        path.write_text("".join(f"{line.split()[0]} {rank}\n" for line, rank in zip(lines, ranks, strict=True)))
        Path(f"{path}.json").write_text(json.dumps({"pattern": pattern}))
        tokenizer = TiktokenTokenizer(path)
        unreachable += len(words) - len(merges(tokenizer.ranks))
        encode = encoder(tiktoken_json(tokenizer))
        for length in (4, 20, 400):
            text = "".join(rng.choices("ab1é \n", k=length))
            assert encode(text) == tokenizer.encode(text).tolist(), (words, text)
    assert unreachable > 50


def pieces(pattern: str, text: str) -> list[str]:
    """The parts of `text` matched by tiktoken."""
    every = {text[first:last] for first in range(len(text)) for last in range(first + 1, len(text) + 1)}
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {part.encode(): 256 + at for at, part in enumerate(sorted(every)) if len(part.encode()) > 1}
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [encoding.decode([token]) for token in encoding.encode_ordinary(text)]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\p{N}{1,3}+", "1234567"),  # Ruby: {1,3} one or more times
        (r"a$|^b|[^ab]", "a\nb\na"),  # Ruby: the ends of each line
        (r"a++b?|\s*+x|c?+c", "aaab  x c cc"),
        (r"(?i:'[sk]|ll|ve)", "'S 'ſ 'K LL vE"),
        (r"[a\-z]|[\x30-\x32\u0035]|[~^$&]", "b-a.019 5^~&$"),
        (r"(a|b)+?(?=c)|(?>a+)b|\z.|.", "abcaab\nb"),
        (r"\pL+|\P{L}", "Aé1中 ٣"),
        (r"a{2}|b{1,2}?|c{2,}|d{2}+", "aaabbbccccdddd"),
        (r"[^\S\r\n]+|[\t-\r]|[a-]", " \t\u3000\n\x0b-a"),
    ],
)
def test_patterns_match_the_same_words(pattern: str, text: str) -> None:
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(oniguruma(pattern)), "removed", invert=True)
    assert [part for part, _ in cut.pre_tokenize_str(text)] == pieces(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"\w+|\W", r"\w at character 1 of its pattern is not known to mean the same"),
        (r"[a-z&&[^b]]", "[a-z&& (a set) at character 5"),
        (r"a|[[:alpha:]]", "(a set) at character 4"),
        (r".(?<=b)", "(?<= at character 2"),
        (r"(?i)a", "(?i) at character 1"),
        (r"(?i:ss)", "(?i:ss) at character 1"),  # Ruby: also U+00DF
        (r"(?i:é)", "(?i: at character 1"),
        (r"a{2}?", "{2}? at character 2"),
        (r"(a?)*b", "* at character 5"),
        (r"\bfoo", r"\b at character 1"),
        (r"\p{Greek}", r"\p{Greek} at character 1"),
        (r"a|(?=b)", "its pattern may match no character"),
        (r"(a", "a group without an end at character 3"),
        (r"a)", ") at character 2"),
        (r"a++*", "++* at character 2"),
    ],
)
def test_what_the_libraries_may_read_differently_is_named(pattern: str, said: str) -> None:
    with pytest.raises(InexpressibleError) as caught:
        oniguruma(pattern)
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(rf"\p{{{name}}}" for name in _CATEGORIES), r"\s", r"\d"])
def test_both_libraries_take_the_same_characters_for_a_class(name: str) -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("x", pat_str=name, mergeable_ranks=ranks, special_tokens={})
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(oniguruma(name)), "removed", invert=True)
    assert "".join(part for part, _ in cut.pre_tokenize_str(every)) == encoding.decode(encoding.encode_ordinary(every))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"pattern": r"\w+|\W"}, r"\w at character 1"),
        ({"special_tokens": {"<|endoftext|>": 300, "<s>": 7}}, "'<s>' with id 7, below the last rank, 256"),
        (
            {"special_tokens": {"<|endoftext|>": 300, "th": 301}},
            "'th' cannot have the id 301: 'th' is the text of another token",
        ),
        ({"special_tokens": {"<|endoftext|>": 300, "<s>": 300}}, "cannot have the id 300"),
        ({"special_tokens": {"<|endoftext|>": 300, "<s>": 99_999}}, "more than 10000 of its ids have no token"),
    ],
)
def test_what_cannot_be_written_is_told(
    facts: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = byte_pairs(tmp_path / "x", b"th")
    Path(f"{path}.json").write_text(json.dumps(facts))
    source = make_checkpoint(tmp_path / "native", data=DataConfig(tokenizer=f"tiktoken:{path}"))
    options = NativeToHf(source, tmp_path / "hf", verify=False)
    native_to_hf(options)
    assert not (tmp_path / "hf/tokenizer.json").exists()
    why = report(tmp_path / "hf")["why"]
    assert why.startswith("no tokenizer.json is known to encode as training did: ")
    assert said in why
    assert f"the folder has no tokenizer: {why}\n" in capsys.readouterr().err
    native_to_hf(replace(options, dst=tmp_path / "unverified", verify_tokenizer=False))
    assert report(tmp_path / "unverified")["why"] == why
