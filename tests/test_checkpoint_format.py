"""Boxes, coverage, discovery, and every way for a checkpoint to be wrong."""

import itertools
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megapar.base.errors import CheckpointError
from megapar.checkpoint import format as checkpoint_format
from megapar.checkpoint.boxes import boxes, logical_boxes
from megapar.checkpoint.format import StoredChunk, TensorEntry, find_complete, folder_name, read_manifest
from megapar.checkpoint.resume import choose
from megapar.checkpoint.save import owned_boxes
from megapar.checkpoint.values import content, sum_of_contents
from megapar.declare import context
from megapar.declare.optimizer_state import StateTensor
from megapar.declare.params import Box, make_piece
from tests.support.checkpoints import (
    FILE,
    MANIFEST,
    MODEL,
    edit_bytes,
    edit_manifest,
    flip_bit,
    load_toy,
    make_slice,
    save_toy,
    spec_of_piece,
    toy_slices,
    whole_spec,
)


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """A shape of up to four dimensions and ascending cut points of its flat range."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    total = math.prod(shape)
    inner = draw(st.lists(st.integers(0, total), max_size=4))
    return shape, [0, *sorted(inner), total]


@given(shapes_and_cuts())
def test_boxes_are_the_flat_range_in_order(case: tuple[tuple[int, ...], list[int]]) -> None:
    shape, cuts = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start, stop in pairwise(cuts):
        found = list(boxes(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        position = start
        for box in found:
            assert box.position == position
            part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]
            assert part.flatten().tolist() == list(range(position, position + part.numel()))
            position += part.numel()
        assert position == max(start, stop)


@given(shapes_and_cuts(), st.booleans(), st.data())
def test_coverage_finds_every_gap_and_overlap(
    case: tuple[tuple[int, ...], list[int]], break_it: bool, data: st.DataObject
) -> None:
    shape, cuts = case
    chunks = [
        StoredChunk("file", str(start), box.offset, box.size, 0)
        for start, stop in pairwise(cuts)
        for box in boxes(shape, start, stop)
    ]
    if break_it:
        index = data.draw(st.integers(0, len(chunks) - 1))
        moved = tuple(
            data.draw(st.integers(0, n - s)) for n, s in zip(shape, chunks[index].size, strict=True)
        )  # may be where it was
        chunks[index] = chunks[index]._replace(offset=moved)
    counts = torch.zeros(shape, dtype=torch.int)
    for chunk in chunks:
        counts[tuple(slice(o, o + s) for o, s in zip(chunk.offset, chunk.size, strict=True))] += 1
    problem = checkpoint_format._problem(TensorEntry(shape, "float32", tuple(chunks)), {"file": 0})
    assert (problem is None) == bool((counts == 1).all())


def test_a_gap_as_large_as_an_overlap_is_found() -> None:
    chunks = (StoredChunk("file", "a", (0,), (4,), 0), StoredChunk("file", "b", (2,), (4,), 0))
    assert "overlap" in str(checkpoint_format._problem(TensorEntry((8,), "float32", chunks), {"file": 0}))


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.data())
def test_owned_boxes_cover_each_logical_tensor_once(
    rows: int, columns: int, tp: int, padding: int, data: st.DataObject
) -> None:
    """Fused pieces, one with rows shared by neighboring ranks; slices cut anywhere."""
    counts = {"a": torch.zeros(rows, columns), "b": torch.zeros(rows, columns)}
    for rank in range(tp):
        start, stop = rank * rows // tp, (rank + 1) * rows // tp
        low = max(0, start - 1)
        pieces = (
            make_piece("a", (rows, columns), {0: (start, stop)}),
            replace(make_piece("b", (rows, columns), {0: (low, stop)}), owned=Box((start, 0), (stop - start, columns))),
        )
        spec = spec_of_piece(*pieces)
        total = (2 * stop - start - low + padding) * columns
        middle = data.draw(st.integers(0, total))
        for first, last in ((0, middle), (middle, total)):
            held = list(logical_boxes(spec, first, last))
            assert sum(math.prod(box.size) for _, box in held) == max(0, min(last, total - padding * columns) - first)
            for piece, box in owned_boxes(make_slice(spec, first, last)):
                counts[piece.name][tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (13,), (7, 11), (3, 5, 6)])
def test_contents_of_boxes_add_up_however_a_tensor_is_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    origin = (0,) * len(shape)
    whole = content("w", shape, origin, values)
    for axis, size in enumerate(shape):
        for at in range(size + 1):
            parts = values.split([at, size - at], dim=axis)
            offsets = (origin, tuple(at if n == axis else 0 for n in range(len(shape))))
            found = [{"main": content("w", shape, o, x.contiguous())} for o, x in zip(offsets, parts, strict=True)]
            assert sum_of_contents(found) == {"main": whole}
    # Another name, another element, and the same elements elsewhere are other contents.
    assert whole != content("v", shape, origin, values)
    changed = values.clone()
    changed.view(-1)[-1] += 1
    assert whole != content("w", shape, origin, changed)
    for axis in range(len(shape)):
        assert whole != content("w", shape, origin, values.roll(1, axis))
        assert whole != content("w", shape, origin, values.flip(axis).contiguous())


def test_padding_is_loaded_as_it_was_before_the_first_update(tmp_path: Path) -> None:
    """Rows behind the last piece are in no checkpoint. An optimizer may keep state starting at another value than
    zero."""
    saved, target = toy_slices(1)[1], toy_slices(2)[1]
    save_toy(tmp_path, 1)
    longer = {name: torch.full((9,), 5.0) for name in target.tensors}
    item = replace(target, stop=9, tensors=longer, states=(StateTensor("exp_avg", initial=0.5),))
    load_toy(tmp_path / "step_00000001", [toy_slices(2)[0], item])
    assert {name: x[7:].tolist() for name, x in longer.items()} == {
        **{"main": [0.0, 0.0], "exp_avg": [0.5, 0.5], "exp_avg_sq": [0.0, 0.0]},
    }
    assert all(torch.equal(longer[name][:7], saved.tensors[name]) for name in longer)


def test_load_returns_what_was_saved_and_only_whole_folders_have_names(tmp_path: Path) -> None:
    path = save_toy(tmp_path, 3)
    assert path == tmp_path / "step_00000003"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    target = toy_slices(9)
    manifest = load_toy(path, target)
    for loaded, saved in zip(target, toy_slices(3), strict=True):
        for state in ("main", "exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded.tensors[state], saved.tensors[state])
    assert (manifest.step, manifest.consumed_samples, manifest.layout) == (3, 24, {"dp": 1})
    assert (manifest.trainer, manifest.data) == ({"lr": 0.1, "loss_scale": 1 / 3}, {"seed": 5})


def swap_file(path: Path, content: bytes) -> None:
    """Another file in place of the shard, with a manifest to match."""
    (path / FILE).write_bytes(content)
    edit_manifest(path, lambda body: body["files"].update({FILE: len(content)}))


class Payload:
    """Unpickling this raises the alarm."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def outside(name: str) -> Callable[[Path], None]:
    def corrupt(path: Path) -> None:
        def edit(body: dict[str, Any]) -> None:
            body["files"] = {name: body["files"][FILE]}
            for entry in body["tensors"].values():
                for chunk in entry["chunks"]:
                    chunk[0] = name

        shutil.copy(path / FILE, path.parent / FILE)
        edit_manifest(path, edit)

    return corrupt


def link(path: Path) -> None:
    (path / FILE).rename(path.parent / "elsewhere")
    (path / FILE).symlink_to(path.parent / "elsewhere")


def shift_chunk(body: dict[str, Any]) -> None:
    """A gap and an overlap of equal size."""
    row = body["tensors"]["main.p1"]["chunks"][0]
    first = [*row[:3], [4], row[4]]
    body["tensors"]["main.p1"]["chunks"] = [first, [row[0], row[1], [1], [3], row[4]]]


def lose_chunk(body: dict[str, Any]) -> None:
    body["tensors"]["exp_avg.p0"]["chunks"] = []


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped bit": (lambda p: edit_bytes(p, flip_bit), FILE, "CRC-32"),
    "a truncated shard": (lambda p: edit_bytes(p, lambda b: b.__delitem__(slice(-9, None))), FILE, "bytes, the manif"),
    "a missing shard": (lambda p: (p / FILE).unlink(), FILE, "missing"),
    "half a manifest": (lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text()[:300]), MANIFEST, "incomplete"),
    "an edited manifest": (lambda p: edit_manifest(p, lambda b: b.update(step=4), sign=False), MANIFEST, "sha256"),
    "no manifest": (lambda p: (p / MANIFEST).unlink(), MANIFEST, "incomplete"),
    "a manifest that is a list": (lambda p: (p / MANIFEST).write_text("[1]"), MANIFEST, "not a manifest"),
    "a linked manifest": (
        lambda p: ((p / MANIFEST).rename(p / "m"), (p / MANIFEST).symlink_to(p / "m")),  # type: ignore[dict-item]
        MANIFEST,
        "not readable",
    ),
    "another format": (lambda p: edit_manifest(p, lambda b: b.update(format=2)), MANIFEST, "format 2"),
    "no tensors": (lambda p: edit_manifest(p, lambda b: b.pop("tensors")), MANIFEST, "not a manifest"),
    "a negative size": (lambda p: edit_manifest(p, lambda b: b["files"].update({FILE: -1})), MANIFEST, "integers"),
    "a gap": (lambda p: edit_manifest(p, lose_chunk), "exp_avg.p0", "cover 0 of 30"),
    "an overlap": (lambda p: edit_manifest(p, shift_chunk), "main.p1", "overlap"),
    "an unknown dtype": (
        lambda p: edit_manifest(p, lambda b: b["tensors"]["main.p0"].update(dtype="Tensor")),
        "main.p0",
        "no dtype",
    ),
    "a path outside": (outside(f"../{FILE}"), f"../{FILE}", "outside"),
    "an absolute path": (outside("/etc/passwd"), "/etc/passwd", "outside"),
    "a path with NUL": (outside("a\0b"), "a\\x00b", "outside"),
    "a linked shard": (link, FILE, "not a regular file"),
    "a pickle": (lambda p: swap_file(p, pickle.dumps(Payload()) + bytes(5000)), FILE, "not readable as safetensors"),
    "a header of 2^63 bytes": (
        lambda p: swap_file(p, (2**63).to_bytes(8, "little") + bytes(5000)),
        FILE,
        "safetensors",
    ),
    "a shard too short for its tensors": (lambda p: swap_file(p, bytes(100)), FILE, "bytes of chunks in 100"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_one_line_naming_the_file(tmp_path: Path, name: str) -> None:
    """Faults truncated-file, missing-file, flipped-bit, incomplete-checkpoint, nothing-is-unpickled,
    paths-leaving-the-folder, lying-headers: no corruption loads, and the message names its place."""
    corrupt, culprit, reason = CORRUPTIONS[name]
    path = save_toy(tmp_path, 3)
    corrupt(path)
    with pytest.raises(CheckpointError) as caught:
        load_toy(path, toy_slices(9))
    message = str(caught.value)
    assert culprit in message
    assert reason in message
    assert "\n" not in message
    assert caught.value.exit_code == 4


def test_a_file_removed_while_it_is_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault removed-while-read: safetensors opens a file twice, and torch's own error is not an OSError."""
    path = save_toy(tmp_path, 3)
    opened = torch.UntypedStorage.from_file

    def open_too_late(name: str, *args: Any, **named: Any) -> Any:
        Path(name).unlink()
        return opened(name, *args, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", open_too_late)
    with pytest.raises(CheckpointError, match=r"not readable as safetensors .*No such file") as caught:
        load_toy(path, toy_slices(9))
    assert FILE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chunk_of_another_dtype_or_shape_is_refused(tmp_path: Path) -> None:
    for change, found in ((lambda x: x.half(), "float16 [7]"), (lambda x: x[:-1].clone(), "float32 [6]")):
        path = save_toy(tmp_path, 3)
        tensors = load_file(path / FILE)
        save_file(tensors | {"main.p1#0": change(tensors["main.p1#0"])}, path / "other")
        shutil.move(path / "other", path / FILE)
        size = (path / FILE).stat().st_size
        edit_manifest(path, lambda body, size=size: body["files"].update({FILE: size}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=r"main\.p1#0") as caught:
            load_toy(path, toy_slices(9))
        assert found in str(caught.value)


def test_another_model_is_a_table_of_differences_and_nothing_is_loaded(tmp_path: Path) -> None:
    """Faults checkpoint-of-another-model, missing-tensors, other-dtypes: a line for each difference, and no partial
    load (fault any-layout-loads)."""
    path = save_toy(tmp_path, 3)
    edit_manifest(path, lambda body: body["tensors"]["exp_avg.p1"].update(dtype="int32"))
    target = toy_slices(9, columns=4)
    target.append(replace(target[1], spec=whole_spec("p2", (7,))))
    with pytest.raises(CheckpointError) as caught:
        load_toy(path, target, {**MODEL, "hidden_size": 8, "rope": {"factor": 2.0}})
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "model.hidden_size: 6 | 8",
        "model.rope.factor: 1.0 | 2.0",
        "exp_avg.p0: shape [6, 5] | [6, 4]",
        "exp_avg.p1: dtype int32 | float32",
        "exp_avg.p2: missing | [7]",
        "exp_avg_sq.p0: shape [6, 5] | [6, 4]",
        "exp_avg_sq.p2: missing | [7]",
        "main.p0: shape [6, 5] | [6, 4]",
        "main.p2: missing | [7]",
    ]
    assert torch.equal(target[0].main, toy_slices(9, columns=4)[0].main)
    with pytest.raises(CheckpointError, match=r"main\.p1: \[7\] \| unknown"):
        load_toy(path, toy_slices(9)[:1])


def test_discovery_takes_the_newest_complete_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault pointer-is-not-trusted: what `latest` says is never needed, and incomplete ones are passed over with a
    warning."""
    for step in (5, 12, 100_000_000):
        save_toy(tmp_path, step)
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / ".tmp-step_00000200-abc").mkdir()
    (tmp_path / "step_00000300_copy").mkdir()
    edit_bytes(tmp_path / "step_100000000", lambda content: content.clear())
    for advice in ("", "garbage \0", "step_00000300", "step_00000005"):
        (tmp_path / "latest").write_text(advice)
        caplog.clear()
        assert [p.name for p in find_complete(tmp_path)] == [folder_name(12), folder_name(5)]
        assert [name in caplog.text for name in ("step_100000000", "step_00000007")] == [True, True]
    assert choose("auto", tmp_path, context.single()) == tmp_path / folder_name(12)
    assert choose("none", tmp_path, context.single()) is None
    assert choose(str(tmp_path / folder_name(5)), tmp_path, context.single()) == tmp_path / folder_name(5)


def test_a_path_that_is_no_checkpoint_is_answered_with_those_that_are(tmp_path: Path) -> None:
    """Fault path-without-checkpoint: names tried by people in place of a checkpoint's folder."""
    root = tmp_path / "run/checkpoints"
    for step in (5, 12):
        save_toy(root, step)
    for tried in ("latest", "12", str(tmp_path / "run"), str(root), str(root / "latest"), str(root / "step_00000006")):
        with pytest.raises(CheckpointError) as caught:
            choose(tried, root, context.single())
        assert f"no manifest.json; checkpoints: {root / folder_name(12)}, {root / folder_name(5)}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_resuming_among_broken_checkpoints_alone_is_an_error(tmp_path: Path) -> None:
    """A run without its state must not start over in silence (fault killed-saves)."""
    assert choose("auto", tmp_path / "absent", context.single()) is None
    assert choose("auto", tmp_path, context.single()) is None
    (save_toy(tmp_path, 3) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="none of 1 checkpoint is complete"):
        choose("auto", tmp_path, context.single())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    path = save_toy(tmp_path, 3)
    edit_bytes(path, flip_bit)
    save_toy(tmp_path, 3)
    load_toy(path, toy_slices(9))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]
    assert read_manifest(path).step == 3


def test_the_frozen_checkpoint_of_format_1_loads_for_ever() -> None:
    """Fault older-checkpoint-format: written once, by two ranks, and never again; a later format must still read it."""
    frozen = Path(__file__).parent / "data/checkpoint_format_1/step_00000002"
    target = toy_slices(0)
    manifest = load_toy(frozen, target)
    for loaded, state in itertools.product(target, ("main", "exp_avg", "exp_avg_sq")):
        values = torch.arange(loaded.stop) / 8 + len(state) + loaded.spec.pieces[0].shape[0]
        assert torch.equal(loaded.tensors[state], values)
    assert (manifest.step, manifest.consumed_samples, manifest.layout) == (2, 16, {"dp": 2})
    assert manifest.trainer == {"updates": 2, "loss_scale": None}
    assert len(manifest.files) == 2
