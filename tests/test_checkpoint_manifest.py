"""Manifests read in parts: the same as all of it, from any text, and no more of it than is asked for."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.base.errors import CheckpointError
from megapar.base.grid import Grid
from megapar.checkpoint import format as checkpoint_format
from megapar.checkpoint.folder import Keep, prune
from megapar.checkpoint.format import Manifest, checkpoint_folders, open_manifest, read_manifest
from megapar.checkpoint.load import load_weights
from megapar.checkpoint.manifest import encode, index, seal
from megapar.checkpoint.save import save
from megapar.declare import context
from tests.support.checkpoints import cut_slices, edit_manifest, load_toy, save_toy, toy_slices
from tests.support.distributed import run_ranks

NAMES = st.text(min_size=1, max_size=8)
ENTRIES = st.fixed_dictionaries(
    {
        "chunks": st.lists(st.tuples(NAMES, NAMES).map(list), max_size=3),
        "dtype": NAMES,
        "shape": st.lists(st.integers(0, 9), max_size=3),
    }
)
# Keys and texts that look like the ones that are searched for, wherever JSON allows them.
LURES = st.sampled_from(["chunks", "tensors", '"tensors": {', 'x": {"chunks": [', '], "dtype": ', "}", '"', "\\", "é"])
OTHERS = st.recursive(LURES | st.integers(), lambda inner: st.dictionaries(LURES, inner, max_size=3), max_leaves=6)


@given(st.dictionaries(LURES | NAMES, ENTRIES, max_size=4), OTHERS, OTHERS)
def test_an_index_says_what_parsing_all_would_say(tensors: dict[str, Any], before: Any, behind: Any) -> None:
    """Or there is none, and all is parsed; never something else."""
    body = {"data": before, "tensors": tensors, "trainer": behind}
    text = seal(body).encode()
    found = index(text)
    if found is None:
        return
    assert found.header == {"data": before, "trainer": behind}
    assert list(found.spans) == sorted(tensors)
    for name, span in found.spans.items():
        assert json.loads(text[span.first : span.stop]) == tensors[name]
        assert (span.dtype, list(span.shape)) == (tensors[name]["dtype"], tensors[name]["shape"])


def test_our_own_text_is_indexed_and_a_changed_one_is_not(tmp_path: Path) -> None:
    text = (save_toy(tmp_path, 3) / "manifest.json").read_bytes()
    assert index(text) is not None
    document = json.loads(text)
    assert seal(document["body"]).encode() == text
    assert document["sha256"] == hashlib.sha256(encode(document["body"]).encode()).hexdigest()
    assert index(text.replace(b'"step": 3', b'"step": 4')) is None
    assert index(text[:-9]) is None
    assert index(b"") is None


def test_a_manifest_that_somebody_spaced_otherwise_is_read_as_well(tmp_path: Path) -> None:
    path = save_toy(tmp_path, 3)
    ours = read_manifest(path)
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document, indent=2))
    theirs = read_manifest(path)
    assert theirs == ours
    assert theirs.kinds() == ours.kinds()
    assert ours.outline() is not None
    assert theirs.outline() is None
    load_toy(path, toy_slices(9))


def test_a_manifest_that_is_replaced_under_a_reader_is_noticed(tmp_path: Path) -> None:
    path = save_toy(tmp_path, 3)
    outline = json.loads(json.dumps(read_manifest(path).outline()))
    assert Manifest.from_outline(path, outline) == read_manifest(path)
    edit_manifest(path, lambda body: body["tensors"]["main.p0"]["chunks"][0].__setitem__(4, 7))
    manifest = Manifest.from_outline(path, outline)
    with pytest.raises(CheckpointError, match="another file than rank 0's"):
        _ = manifest.tensors["main.p0"]
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="all ranks must see the same folder"):
        Manifest.from_outline(path, outline)


def watch(root: str, spaced: bool) -> tuple[set[str], int, list[float]]:
    """What a load of the weights parses on this rank, how many files it asks for, and what it fills."""
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    facts: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}
    path = save(Path(root), slices=cut_slices(ctx), ctx=ctx, replicated=False, step=1, **facts)
    if spaced and ctx.world.first:
        document = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(document, indent=1))
    parsed: set[str] = set()
    asked: list[str] = []
    entry_of, lstat = checkpoint_format._entry_of, checkpoint_format.os.lstat

    def parse(file: Path, name: str, text: bytes) -> Any:
        parsed.add(name)
        return entry_of(file, name, text)

    def ask(name: Any) -> Any:
        asked.append(str(name))
        return lstat(name)

    checkpoint_format._entry_of = parse
    checkpoint_format.os.lstat = ask  # type: ignore[assignment]
    slices = cut_slices(ctx)
    slices[0].main.fill_(-1.0)
    load_weights(path, slices=slices, ctx=ctx, model_config={})
    return parsed, len([name for name in asked if "rank_" in name]), slices[0].main.unique().tolist()


def test_other_ranks_parse_what_they_load_and_ask_for_no_file(tmp_path: Path) -> None:
    """Fault thousands-of-ranks: with thousands of ranks, all of them at every file of all would be millions of
    requests."""
    (first, files, filled), (second, none, others) = run_ranks(2, watch, str(tmp_path), False)
    assert first == {"main.p", "exp_avg.p", "exp_avg_sq.p"}
    assert files == 2
    assert second == {"main.p"}
    assert none == 0
    assert (filled, others) == ([0.0], [1.0])
    for rank, (_, _, filled) in enumerate(run_ranks(2, watch, str(tmp_path / "spaced"), True)):
        assert filled == [float(rank)], "a manifest of another text is read by every rank"


def test_retention_parses_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault thousands-of-ranks: it reads every kept manifest after each save, while training wants the interpreter."""
    for step in (1, 2, 3, 4):
        save_toy(tmp_path, step)
    parsed: list[str] = []
    monkeypatch.setattr(checkpoint_format, "_entry_of", lambda path, name, text: parsed.append(name))
    prune(tmp_path, 4, Keep(last=2))
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step_00000004", "step_00000003"]
    assert parsed == []
    assert open_manifest(tmp_path / "step_00000004").step == 4
    assert parsed == []
