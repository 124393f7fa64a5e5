"""Folders of torch.distributed.checkpoint are read bit for bit, in any box of a tensor, and nothing in them runs."""

import io
import os
import pickle
import random
import re
import struct
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import process_time
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megapar_models.convert.formats import pickles, torch_files
from megapar_models.convert.formats.dcp import INDEX, DcpStore, open_dcp
from megapar_models.convert.formats.torch_files import load_mapped
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megapar.base.errors import CheckpointError
from megapar.declare.params import Box
from megapar.system.device import peak_memory_bytes
from tests.support.distributed import apart, run_ranks
from tests.support.sweeps import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch: one process, as we mean it

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16),
)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape)
    return values > 0 if dtype is torch.bool else (values * 50).to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    copies = (values.clone(memory_format=torch.contiguous_format) for values in (found, expected))
    bits = (values.flatten().view(torch.uint8) for values in copies)
    return torch.equal(*bits)


def tensors_of_all_kinds() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): random_tensor(5, 7, dtype=dtype) for dtype in DTYPES}
    return tensors | {
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "transposed": random_tensor(6, 9).t(),
        "permuted": random_tensor(3, 4, 5, dtype=torch.bfloat16).permute(2, 0, 1),
        "strided": random_tensor(8, 9)[::2, 1:],
        "channels_last": random_tensor(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


VALUES = {
    "step": 12,
    "loss": 1.5,
    "name": "run",
    "none": None,
    "optimizer": {"param_groups": {"lr": 1e-4, "betas": [0.9, 0.95], "params": ["a", "b"], "large": 1 << 80}},
}


def write(folder: Path, state: Mapping[str, Any], **options: Any) -> Path:
    """Save as torch does, in one process."""
    dcp.save(dict(state), storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def random_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    corners = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
    return Box(tuple(low for low, _ in corners), tuple(high - low for low, high in corners))


def check_boxes(store: DcpStore, tensors: Mapping[str, Tensor], times: int = 8) -> None:
    rng = random.Random(1)
    assert store.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert store.tensors[name] == (tuple(tensor.shape), tensor.dtype)
        assert same(store.read(name), tensor), name
        for _ in range(times if tensor.numel() else 0):
            box = random_box(tuple(tensor.shape), rng)
            assert same(store.read(name, box), tensor[box.slices]), (name, box)


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}], ids=str)
def test_what_torch_saved_is_read_bit_for_bit_in_any_box(options: dict[str, Any], tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    store = open_dcp(write(tmp_path / "dcp", tensors | VALUES, **options))
    check_boxes(store, tensors)
    groups = {f"optimizer.param_groups.{name}": value for name, value in VALUES["optimizer"]["param_groups"].items()}  # type: ignore[index]
    assert dict(store.values) == {name: VALUES[name] for name in ("step", "loss", "name", "none")} | groups


def save_sharded(folder: Path) -> dict[str, Tensor]:
    """FSDP2's model and Adam's moments, and DTensors of other placements. Returns the whole tensors."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))  # the last one leaves a rank without a row
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    values = torch.randn(6, 5, 4)
    others = {
        "columns": distribute_tensor(values, mesh, [Shard(1)]),
        "replicated": distribute_tensor(values, mesh, [Replicate()]),
    }
    state: dict[str, Any] = {"model": weights, "optim": moments, "others": others, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=folder)
    whole = {f"model.{name}": tensor for name, tensor in weights.items()}
    whole |= {f"others.{name}": tensor for name, tensor in others.items()}
    for name, held in moments["state"].items():
        whole |= {f"optim.state.{name}.{kind}": tensor for kind, tensor in held.items()}  # type: ignore[union-attr]
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in whole.items()}


def test_fsdp2_of_two_ranks_is_read_bit_for_bit(tmp_path: Path) -> None:
    """Weights, moments and step counts, in the layout that two ranks wrote: one holds no row of the last layer."""
    whole = run_ranks(2, save_sharded, tmp_path / "dcp")[0]
    store = open_dcp(tmp_path / "dcp")
    check_boxes(store, whole)
    assert store.values["train_state.step"] == 3
    assert store.values["optim.param_groups.0.weight_decay"] == 0.01


# Indexes of our own making


def by_hand(folder: Path, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Tensor:
    """Write the tensor `w` of the given chunks, each (offset, size), and the value `v`. Returns the whole tensor."""
    folder.mkdir(exist_ok=True)
    whole = torch.arange(float(np.prod(shape))).reshape(shape)
    chunks, storage = [], {}
    with open(folder / "__0_0.distcp", "wb") as file:
        for offset, size in boxes:
            start = file.tell()
            part = whole[Box(offset, size).slices].clone()
            torch.save(part, file)
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            storage[MetadataIndex("w", offset)] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
        start = file.tell()
        torch.save(7, file)
        storage[MetadataIndex("v")] = _StorageInfo("__0_0.distcp", start, file.tell() - start)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    write_index(folder, Metadata({"w": entry, "v": BytesStorageMetadata()}, storage_data=storage))
    return whole


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(index))


def read_index(folder: Path) -> Metadata:
    index: Metadata = pickle.loads((folder / INDEX).read_bytes())
    return index


def guillotine(shape: tuple[int, ...], rng: random.Random, cuts: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that tile the shape and lie in no grid: one after the other is cut in two."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        offset, size = boxes.pop(rng.randrange(len(boxes)))
        dim = max(range(len(size)), key=lambda dim: (size[dim], rng.random()))
        if size[dim] < 2:
            boxes.append((offset, size))
            continue
        at = rng.randrange(1, size[dim])
        low, rest = list(size), list(size)
        low[dim], rest[dim] = at, size[dim] - at
        moved = list(offset)
        moved[dim] += at
        boxes += [(offset, tuple(low)), (tuple(moved), tuple(rest))]
    rng.shuffle(boxes)
    return boxes


@pytest.mark.parametrize("shape", [(40,), (11, 13), (5, 6, 7), (4, 3, 5, 2)], ids=str)
def test_chunks_may_tile_a_tensor_in_any_way(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = by_hand(tmp_path, shape, guillotine(shape, random.Random(2), 20))
    check_boxes(open_dcp(tmp_path), {"w": whole}, times=30)


def covered(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether each element is in one box: counted one by one."""
    count = np.zeros(shape, dtype=int)
    for offset, size in boxes:
        count[Box(offset, size).slices] += 1
    return bool((count == 1).all())


@pytest.mark.parametrize("seed", slow_but(range(2), range(40)))
def test_a_hole_or_an_overlap_is_found_wherever_it_is(seed: int, tmp_path: Path) -> None:
    """A chunk dropped, or a chunk that grows, shrinks or moves: refused exactly if an element is not in one chunk."""
    rng = random.Random(seed)
    shape = ((17,), (7, 9), (4, 5, 6))[seed % 3]
    right = guillotine(shape, rng, 12)
    for _ in range(12):
        boxes = list(right)
        number = rng.randrange(len(boxes))
        offset, size = boxes.pop(number)
        if rng.random() < 0.7:
            dim = rng.randrange(len(shape))
            other_offset, other_size = list(offset), list(size)
            other_offset[dim] = max(0, offset[dim] + rng.choice((-1, 0, 1)))
            other_size[dim] = max(1, min(size[dim] + rng.choice((-1, 0, 1)), shape[dim] - other_offset[dim]))
            if other_offset[dim] + other_size[dim] <= shape[dim]:
                boxes.append((tuple(other_offset), tuple(other_size)))
        if len({offset for offset, _ in boxes}) < len(boxes):
            continue  # pickled, these would be one entry
        by_hand(tmp_path, shape, boxes)
        if covered(shape, boxes):
            open_dcp(tmp_path)
            continue
        with pytest.raises(CheckpointError, match=r"element \[.*\] is in (no chunk|two chunks)$") as caught:
            open_dcp(tmp_path)
        element = tuple(map(int, str(caught.value).partition("element [")[2].partition("]")[0].split(",")))
        holders = sum(
            all(o <= e < o + s for e, o, s in zip(element, offset, size, strict=True)) for offset, size in boxes
        )
        assert (holders == 0) == ("no chunk" in str(caught.value))
        assert holders != 1


# Faults. Each changes a folder of the tensor `w` in four chunks and the value `v`.

FILE = "__0_0.distcp"
FIRST, LAST = MetadataIndex("w", (0, 0)), MetadataIndex("w", (3, 2))
FOUR = [((0, 0), (3, 2)), ((0, 2), (3, 3)), ((3, 0), (4, 2)), ((3, 2), (4, 3))]


def read_all(folder: Path) -> dict[str, Tensor]:
    store = open_dcp(folder)
    dict(store.values)
    return {name: store.read(name) for name in store.tensors}


def refusal(folder: Path) -> str:
    """The one line in which a folder is refused, when it is opened or everything in it is read."""
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    assert len(message) < 500 + len(str(folder))
    return message


def indexed(change: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    """A fault of the index."""

    def apply(folder: Path) -> None:
        index = read_index(folder)
        change(index)
        write_index(folder, index)

    return apply


def placed(key: MetadataIndex = FIRST, **fields: Any) -> Callable[[Path], None]:
    """A fault of a part's place."""
    return indexed(lambda index: index.storage_data.update({key: replace(index.storage_data[key], **fields)}))


def chunked(offset: Any = (0, 0), size: Any = (3, 2)) -> Callable[[Path], None]:
    """The first chunk is another box."""

    def apply(index: Metadata) -> None:
        index.state_dict_metadata["w"].chunks[0] = ChunkStorageMetadata(offset, size)  # type: ignore[union-attr]
        index.storage_data[MetadataIndex("w", offset if type(offset) is tuple else None)] = index.storage_data.pop(
            FIRST
        )

    return indexed(apply)


def truncate(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 1)


def link(folder: Path) -> None:
    (folder / FILE).rename(folder / "other")
    (folder / FILE).symlink_to("other")


def fifo(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def link_index(folder: Path) -> None:
    (folder / INDEX).rename(folder / "other")
    (folder / INDEX).symlink_to("other")


def with_item(data: bytes | Callable[[bytes], bytes], key: MetadataIndex = FIRST) -> Callable[[Path], None]:
    """The part's bytes are others: they are put behind the file's end."""

    def apply(folder: Path) -> None:
        whole = (folder / FILE).read_bytes()
        info = read_index(folder).storage_data[key]
        item = data if isinstance(data, bytes) else data(whole[info.offset : info.offset + info.length])
        (folder / FILE).write_bytes(whole + item)
        placed(key, offset=len(whole), length=len(item))(folder)

    return apply


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def rewritten(
    change: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({}), method: int = zipfile.ZIP_STORED
) -> Callable[[bytes], bytes]:
    """The same archive with other records."""

    def apply(item: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w", method) as new:
            for info in old.infolist():
                record = old.read(info)
                new.writestr(info.filename, change.get(info.filename.partition("/")[2], bytes)(record))
        return out.getvalue()

    return apply


def lying(item: bytes, at: int = 24) -> bytes:
    """The size of the record data/0 in the directory is larger: field `at` of its entry, and the packed size."""
    entry = item.rindex(b"archive/data/0") - 46
    size = struct.pack("<I", 1 << 30)
    return item[: entry + 20] + size + size + item[entry + 28 :]


def flipped(item: bytes) -> bytes:
    """A bit of the mark of the local header of data/0."""
    at = item.index(b"archive/data/0") - 30
    return item[:at] + bytes([item[at] ^ 1]) + item[at + 1 :]


def pickled(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """The tensor's pickle with other bytes."""

    def change(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return rewritten({"data.pkl": change})


def shape_of_w(*shape: int) -> Callable[[Path], None]:
    return indexed(lambda index: setattr(index.state_dict_metadata["w"], "size", torch.Size(shape)))


def dtype_of_w(index: Metadata) -> None:
    index.state_dict_metadata["w"].properties.dtype = torch.int32  # type: ignore[union-attr]


FAULTS: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "cut file": (truncate, r"cut: has [\d,]+ bytes, v ends at byte"),
    "no file": (lambda folder: (folder / FILE).unlink(), "names it, and it is not readable"),
    "link": (link, "is a link, and is not followed"),
    "fifo": (fifo, "is a FIFO"),
    "linked index": (link_index, "is a link, and is not followed"),
    "no index": (lambda folder: (folder / INDEX).unlink(), "no readable index"),
    "empty index": (lambda folder: (folder / INDEX).write_bytes(b""), "cut or damaged"),
    "cut index": (lambda folder: os.truncate(folder / INDEX, 700), "cut"),
    "other object": (lambda folder: write_index(folder, [1, 2]), "is no index"),
    "dropped chunk": (
        indexed(lambda i: (i.state_dict_metadata["w"].chunks.pop(), i.storage_data.pop(LAST))),  # type: ignore[union-attr]
        r"w of shape \[7, 5\]: element \[3, 2\] is in no chunk",
    ),
    "chunk without a place": (
        indexed(lambda i: i.storage_data.pop(LAST)),
        r"w has a chunk at \[3, 2\] that lies nowhere",
    ),
    "place without a chunk": (
        indexed(lambda i: i.state_dict_metadata["w"].chunks.pop()),  # type: ignore[union-attr]
        r"w lies at \(3, 2\) too, where it has no chunk",
    ),
    "chunk twice": (
        indexed(lambda i: i.state_dict_metadata["w"].chunks.append(i.state_dict_metadata["w"].chunks[0])),  # type: ignore[union-attr]
        "lies nowhere, or two of them",
    ),
    "moved chunk": (chunked(offset=(1, 0)), r"element \[0, 0\] is in no chunk"),
    "larger chunk": (chunked(size=(3, 3)), r"element \[0, 2\] is in two chunks"),
    "chunk outside": (chunked(size=(8, 2)), r"chunk of size \[8, 2\] at \[0, 0\], which goes beyond"),
    "negative size": (chunked(size=(-3, 2)), "is no box of 2 dimensions"),
    "overflowing size": (chunked(offset=(1 << 63, 0), size=(1 << 63, 2)), "no numbers from 0 to"),
    "size of a text": (chunked(size="ab"), "is no box of 2 dimensions"),
    "chunk of one dimension": (chunked(size=(6,)), "is no box of 2 dimensions"),
    "huge tensor": (shape_of_w(1 << 40, 1 << 40), "no shape"),
    "negative tensor": (shape_of_w(-7, 5), "no shape"),
    "smaller tensor": (shape_of_w(7, 4), "goes beyond"),
    "larger tensor": (shape_of_w(7, 6), r"element \[0, 5\] is in no chunk"),
    "huge chunk": (
        lambda folder: (
            by_hand(folder, (6,), [((0,), (6,))]),
            shape_of_w(1 << 40)(folder),
            indexed(
                lambda i: setattr(i.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([1 << 40]))  # type: ignore[union-attr]
            )(folder),
        ),
        "has more than the",
    ),
    "negative place": (placed(offset=-1), "no numbers from 0 to"),
    "overflowing place": (placed(offset=1 << 62), "no numbers from 0 to"),
    "place beyond": (placed(offset=1 << 40), "cut: has"),
    "place of a text": (placed(length="5"), "no numbers from 0 to"),
    "same place twice": (placed(LAST, offset=5), "w and w lie in the same bytes"),
    "value in a tensor": (placed(MetadataIndex("v"), offset=5), "lie in the same bytes"),
    "file above": (placed(relative_path="../__0_0.distcp"), "no file of the folder"),
    "absolute file": (placed(relative_path="/etc/passwd"), "no file of the folder"),
    "file of two lines": (placed(relative_path="a\nb"), "no file of the folder"),
    "the folder": (placed(relative_path="."), "no file of the folder"),
    "transform": (placed(transform_descriptors=["stream.zstd"]), r"w is stored through 'stream\.zstd'"),
    "value without a place": (indexed(lambda i: i.storage_data.pop(MetadataIndex("v"))), "v is a BytesStorageMetadata"),
    "place without an entry": (indexed(lambda i: i.state_dict_metadata.pop("w")), "says where w lies"),
    "name of two lines": (indexed(lambda i: i.state_dict_metadata.update({"a\nb": 1})), "has an entry 'a"),
    "other dtype": (indexed(dtype_of_w), "is fp32|is float32"),
    "value for a tensor": (with_item(saved(5)), "is no tensor"),
    "other shape": (with_item(saved(torch.zeros(2, 3))), r"\[2, 3\], \.metadata says .* \[3, 2\]"),
    "tensor of another class": (
        with_item(saved(torch.zeros(3, 2).to_sparse())),
        "names torch._utils._rebuild_sparse_tensor",
    ),
    "no archive": (with_item(bytes(100)), "not readable as an archive"),
    "no record": (with_item(rewritten({"data.pkl": lambda _: b""})), "cut or damaged"),
    "zip bomb": (with_item(rewritten({"data/0": lambda _: bytes(1 << 24)}, zipfile.ZIP_DEFLATED)), "deflated"),
    "long record": (
        with_item(rewritten({"data/0": lambda _: bytes(1 << 20)})),
        r"a storage has 1,048,576 bytes and should",
    ),
    "lying size": (with_item(lying), "is not true"),
    "flipped header": (with_item(flipped), "not readable as an archive"),
    "big-endian": (with_item(rewritten({"byteorder": lambda _: b"big"})), "not little-endian"),
    "storage of other size": (with_item(pickled(b"K\x06t", b"K\x07t")), "should have 28"),
    "beyond its storage": (with_item(pickled(b"QK\x00", b"QK\x01")), "goes beyond its storage"),
    "strides beyond": (with_item(pickled(b"K\x02K\x01\x86", b"K\x09K\x01\x86")), "goes beyond its storage"),
    "repeated elements": (with_item(pickled(b"K\x02K\x01\x86", b"K\x00K\x01\x86")), "share their bytes"),
    "tensor in the same bytes": (with_item(saved(torch.zeros(1).expand(3, 2))), "goes beyond its storage"),
    "damaged value": (with_item(bytes(10), MetadataIndex("v")), "v .*not readable as an archive"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    by_hand(tmp_path, (7, 5), FOUR)
    check_boxes(open_dcp(tmp_path), {"w": torch.arange(35.0).reshape(7, 5)}, times=2)
    fault, words = FAULTS[name]
    fault(tmp_path)
    assert re.search(words, message := refusal(tmp_path)), message


def test_a_folder_of_safetensors_is_refused(tmp_path: Path) -> None:
    """Torch writes them, and its own FileSystemReader cannot read them: the index does not say where they lie."""
    state = {"a": torch.zeros(3), "b": torch.zeros(4)}
    write(tmp_path / "dcp", state, serialization_format=SerializationFormat.SAFETENSORS)
    assert "a and b lie in the same bytes" in refusal(tmp_path / "dcp")


@pytest.mark.slow  # every byte of an archive
def test_a_flipped_bit_outside_of_the_values_changes_none_of_them(tmp_path: Path) -> None:
    whole = by_hand(tmp_path, (3, 2), [((0, 0), (3, 2))])
    info = read_index(tmp_path).storage_data[FIRST]
    original = (tmp_path / FILE).read_bytes()
    values = original.index(whole.numpy().tobytes())
    refused = 0
    for bit in range(0, 8 * info.length, 9):  # another bit of each byte
        at = info.offset + bit // 8
        if values <= at < values + whole.nbytes:
            continue
        damaged = bytearray(original)
        damaged[at] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(damaged)
        try:
            assert same(open_dcp(tmp_path).read("w"), whole), (at, bit % 8)
        except CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.slow  # every byte of an index
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_index_never_ends_in_a_traceback(how: str, tmp_path: Path) -> None:
    whole = by_hand(tmp_path, (7, 5), FOUR)
    original = (tmp_path / INDEX).read_bytes()
    refused = 0
    for at in range(len(original)):
        for bit in range(8 if how == "flipped" else 1):
            damaged = bytearray(original)
            damaged[at] ^= 1 << bit
            (tmp_path / INDEX).write_bytes(damaged if how == "flipped" else original[:at])
            try:
                found = read_all(tmp_path)
            except CheckpointError:
                refused += 1
            else:
                assert "w" not in found or same(found["w"], whole), (at, bit)
    assert refused > len(original) / 2


# Pickles that would do harm


class Call:
    """Calls a function when Python unpickles it."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def calls(ran: Path) -> list[Call]:
    return [
        Call(os.system, f"touch {ran}"),
        Call(eval, f"open({str(ran)!r}, 'w')"),
        Call(Path.touch, ran),
        Call(getattr, os, "system"),
    ]


@pytest.mark.parametrize("protocol", slow_but([1, 2], range(6)))
def test_nothing_in_a_folder_is_called(protocol: int, tmp_path: Path) -> None:
    """Fault nothing-is-unpickled: in the index, in a tensor's archive and in a value's."""
    ran = tmp_path / "ran"
    folder = tmp_path / "dcp"
    for call in calls(ran)[:3]:
        by_hand(folder, (7, 5), FOUR)
        index = read_index(folder)
        index.planner_data = {"a": [call]}
        (folder / INDEX).write_bytes(pickle.dumps(index, protocol=protocol))
        assert re.search("refused, not unpickled: names|is refused: has instruction", refusal(folder))
        assert not ran.exists()
        read_index(folder)  # so it would have run
        assert ran.exists()
        ran.unlink()
        for key in (FIRST, MetadataIndex("v")):
            by_hand(folder, (7, 5), FOUR)
            with_item(rewritten({"data.pkl": lambda _, call=call: pickle.dumps(call, protocol=protocol)}), key)(folder)  # type: ignore[misc]
            assert re.search("refused, not unpickled: names|is refused: has instruction", refusal(folder))
            assert not ran.exists()


def long(code: bytes, length: int, width: int = 8) -> bytes:
    return b"\x80\x04" + code + length.to_bytes(width, "little")


BOMBS: Mapping[str, bytes] = {
    "memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytes": long(b"\x8e", 1 << 40) + b"a.",
    "text": long(b"\x8d", 1 << 62) + b"a.",
    "number": long(b"\x8b", 1 << 20, 4) + b"\x7f" * (1 << 20) + b".",
    "deep lists": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples": b"\x80\x04)" + b"\x85" * 300_000 + b".",
    "tuple as key": b"\x80\x04})" + b"\x94h\x00\x86" * 1 + b"\x85" * 50 + b"Ns.",
    "equal keys": b"\x80\x04}("
    + b"".join(b"\x8a\x0c" + (i * ((1 << 61) - 1)).to_bytes(12, "little") + b"N" for i in range(1, 20_000))
    + b"u.",
    "marks": b"(" * 100_000 + b".",
    "call of a list": b"\x80\x04])R.",
    "extension": b"\x80\x02\x82\x01.",
    "instance": b"(S'ls'\nios\nsystem\n.",
    "name on two lines": b"\x80\x04\x8c\x03a\nb\x8c\x01c\x93.",
}


def try_bombs(folder: Path) -> tuple[dict[str, str], int, float]:
    """The refusal of each bomb, the memory that they took together, and the seconds of this process."""
    messages = {}
    before, seconds = peak_memory_bytes(torch.device("cpu")), process_time()
    for name, bomb in BOMBS.items():
        (folder / INDEX).write_bytes(bomb)
        messages[name] = refusal(folder)
    return messages, peak_memory_bytes(torch.device("cpu")) - before, process_time() - seconds


def test_a_small_index_takes_little_memory_and_time(tmp_path: Path) -> None:
    """Numbers that only look as if much were to come, and texts that hash or nest without end."""
    messages, memory, seconds = apart(try_bombs, tmp_path)
    assert memory < 100e6
    assert seconds < 10
    assert "key of more than 61 bits" in messages["equal keys"]
    assert "key of type tuple" in messages["tuple as key"]
    assert r"names 'a\nb.c'" in messages["name on two lines"]


def test_an_index_of_too_many_lists_is_refused_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MOST_CONTAINERS", 1000)
    (tmp_path / INDEX).write_bytes(b"\x80\x04(" + b"]" * 1001 + b"t.")
    assert "may hold more than 1,000 lists" in refusal(tmp_path)


def with_values(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write values without a look into them, which torch takes: Megatron's objects, for instance."""
    storage, file = {}, io.BytesIO()
    for name, value in values.items():
        start = file.tell()
        file.write(saved(value))
        storage[MetadataIndex(name)] = _StorageInfo(FILE, start, file.tell() - start)
    (folder / FILE).write_bytes(file.getvalue())
    write_index(folder, Metadata({name: BytesStorageMetadata() for name in values}, storage_data=storage))
    return folder


def test_values_that_nest_or_repeat_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_VALUES", 1000)
    cycle: list[Any] = []
    cycle.append(cycle)
    repeated: list[Any] = [1]
    for _ in range(40):
        repeated = [repeated, repeated]
    store = open_dcp(with_values(tmp_path, {"cycle": cycle, "repeated": repeated, "good": 1}))
    assert store.values["good"] == 1
    for name, words in {"cycle": "more than 64 deep", "repeated": "more than 1,000 values"}.items():
        with pytest.raises(CheckpointError, match=words):
            store.values[name]


def class_of(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of a module that is not installed, as long as the test runs."""
    made = type(name, (), {"__module__": module})
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
    monkeypatch.setattr(sys.modules[module], name, made, raising=False)
    return made


def test_objects_are_left_out_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no plain value: Megatron's and numpy's objects. Arguments are a dict, and small tensors stay tensors."""
    kind = class_of("megatron.core.enums", "Backend", monkeypatch)
    args = Namespace(lr=1e-3, backend=kind(), sizes=(1, 2), dtype=torch.bfloat16, tags={"x"})
    state = {
        "args": args,
        "numel": {0: {(torch.bfloat16, torch.float32): [5, 7]}},
        "rng": (np.random.RandomState(0).get_state(), kind()),
        "extra": io.BytesIO(b"abc"),
        "mixed": (kind(), [torch.arange(3), kind()], {"a": kind(), "b": OrderedDict(c=1)}),
        "object": kind(),
    }
    values = open_dcp(with_values(tmp_path, state)).values
    expected = {"lr": 1e-3, "sizes": [1, 2], "dtype": "torch.bfloat16", "tags": ["x"]}
    assert values["args"] == expected
    assert values["numel"] == {0: {("torch.bfloat16", "torch.float32"): [5, 7]}}
    assert values["rng"][0][0] == "MT19937"
    assert values["extra"] is None
    assert values["object"] is None
    [tensors], inner = values["mixed"]
    assert torch.equal(tensors, torch.arange(3))
    assert inner == {"b": {"c": 1}}


def test_classes_of_megatron_in_an_index_stand_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron Core up to 0.14: a class of its own for the index, plans of all ranks, and flattened ranges."""
    whole = by_hand(tmp_path, (7, 5), FOUR)
    module = "megatron.core.dist_checkpointing.strategies.torch"
    made, index = class_of(module, "MCoreMetadata", monkeypatch)(), read_index(tmp_path)
    plan = class_of(module, "MCoreSavePlan", monkeypatch)()
    item = WriteItem(FIRST, WriteItemType.SHARD, tensor_data=TensorWriteData(
        index.state_dict_metadata["w"].chunks[0], TensorProperties(), torch.Size((7, 5))  # type: ignore[union-attr]
    ))  # fmt: skip
    vars(plan).update(items=[item], mcore_data={"w": {"nd_reformulated_orig_global_shape": (7, 5)}})
    vars(made).update(vars(index), mcore_data=plan.mcore_data, all_local_plans=[plan])
    write_index(tmp_path, made)
    check_boxes(open_dcp(tmp_path), {"w": whole})


# What is read, and how much memory it takes


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that says how many bytes were read from data files since its last call."""
    read = [0]
    whole = os.pread

    def counted(file: int, size: int, start: int) -> bytes:
        data = whole(file, size, start)
        read[0] += len(data)
        return data

    def since() -> int:
        found, read[0] = read[0], 0
        return found

    monkeypatch.setattr(torch_files.os, "pread", counted)
    return since


def test_little_more_than_the_box_is_read(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    """Opening reads no data file. Of a chunk, its archive's directory is read and the rows of the box."""
    tensors = {"w": random_tensor(2000, 500), "t": random_tensor(500, 2000).t(), "e": random_tensor(4, 6, 100, 50)}
    store = open_dcp(write(tmp_path / "dcp", tensors | {"layers.0._extra_state/shard_0_1": [1]}))
    assert bytes_read() == 0
    for name, box in {
        "w": Box((100, 0), (7, 500)),
        "t": Box((0, 40), (2000, 3)),
        "e": Box((2, 3, 0, 0), (1, 1, 100, 50)),
    }.items():
        values = store.read(name, box)
        assert same(values, tensors[name][box.slices])
        assert values.nbytes <= bytes_read() < values.nbytes + 2000, name
    narrow = store.read("w", Box((0, 0), (2000, 5)))  # rows are 2,000 bytes: what lies between is read or skipped
    assert same(narrow, tensors["w"][:, :5])
    assert bytes_read() < 4.2e6


def read_rows(folder: Path) -> int:
    """The memory that reading a tensor takes beside its own."""
    store = open_dcp(folder)
    store.read("w", Box((0, 0), (1, 1)))
    before = peak_memory_bytes(torch.device("cpu"))
    values = store.read("w", Box((0, 0), (1000, 500)))
    assert values[-1, -1] == 1
    return peak_memory_bytes(torch.device("cpu")) - before - values.nbytes


def test_reading_a_part_takes_the_memory_of_the_part(tmp_path: Path) -> None:
    write(tmp_path / "dcp", {"w": torch.ones(100_000, 500, dtype=torch.int8).float()})
    assert apart(read_rows, tmp_path / "dcp") < 20e6


def million(folder: Path, chunks: int) -> None:
    """An index of a million chunks: of tensors of `chunks` chunks each, a thousand of them in a grid."""
    entries, storage = {}, {}
    columns = min(chunks, 4)
    shape = torch.Size((16 * (chunks // columns), 64 * columns))
    for number in range(1_000_000 // chunks):
        name = f"model.layers.{number}.self_attention.linear_qkv.weight"
        offsets = [torch.Size((i // columns * 16, i % columns * 64)) for i in range(chunks)]
        listed = [ChunkStorageMetadata(offset, torch.Size((16, 64))) for offset in offsets]
        entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), shape, listed)
        for i, offset in enumerate(offsets):
            place = _StorageInfo(f"__{i % 8}_0.distcp", (number * chunks + i) * 5000, 5000)
            storage[MetadataIndex(name, offset, i)] = place
    write_index(folder, Metadata(entries, storage_data=storage))
    for rank in range(8):
        (folder / f"__{rank}_0.distcp").touch()
        os.truncate(folder / f"__{rank}_0.distcp", 5000 * 1_000_000)


def open_million(folder: Path) -> tuple[int, float, int]:
    before, seconds = peak_memory_bytes(torch.device("cpu")), process_time()
    store = open_dcp(folder)
    return len(store.tensors), process_time() - seconds, peak_memory_bytes(torch.device("cpu")) - before


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("chunks", [1, 1000, 1_000_000])
def test_an_index_of_a_million_chunks_is_read_in_bounded_time_and_memory(chunks: int, tmp_path: Path) -> None:
    apart(million, tmp_path, chunks)
    tensors, seconds, memory = apart(open_million, tmp_path)
    print(f"{chunks} chunks each: {seconds:.1f} s, {memory / 1e9:.2f} GB")
    assert tensors == 1_000_000 // chunks
    assert seconds < 120
    assert memory < 3e9


# Whole files of torch.save


def test_a_whole_file_is_mapped_as_torch_maps_it(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    state = {
        "args": Namespace(lr=1.0),
        "model": OrderedDict(tensors, parameter=nn.Parameter(torch.ones(2))),
        "list": [1, (2, b"\xff"), torch.Size((1, 2))],
    }
    torch.save(state, tmp_path / "file.pt")
    found = load_mapped(tmp_path / "file.pt")
    assert found["args"] == Namespace(lr=1.0)
    assert found["list"] == [1, (2, b"\xff"), (1, 2)]
    for name, tensor in state["model"].items():  # type: ignore[attr-defined]
        assert same(found["model"][name], tensor.detach()), name
        assert found["model"][name].stride() == tensor.stride()
    found["model"]["scalar"].fill_(0)  # in memory alone
    assert load_mapped(tmp_path / "file.pt")["model"]["scalar"] == 3.25


@pytest.mark.parametrize("size", [0, 10, 5000, -1])
def test_a_cut_file_is_refused(size: int, tmp_path: Path) -> None:
    torch.save(tensors_of_all_kinds(), tmp_path / "file.pt")
    os.truncate(tmp_path / "file.pt", size % (tmp_path / "file.pt").stat().st_size)
    with pytest.raises(CheckpointError, match="not readable as an archive"):
        load_mapped(tmp_path / "file.pt")
