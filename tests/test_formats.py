"""Checkpoints of other frameworks as contents: boxes for ranks of any layout, and native checkpoints with moments."""

import fcntl
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models import doors
from megapar_models.convert.formats import native
from megapar_models.convert.formats.command import AnyToNative
from megapar_models.convert.formats.contents import Contents, Position, StoredAt
from megapar_models.convert.formats.detect import open_folder
from megapar_models.convert.formats.fsdp import open_store, read_fsdp
from megapar_models.convert.formats.native import JOURNAL, write_native
from megapar_models.convert.recipes import recipes
from megapar_models.convert.saved import whole_config
from megapar_models.tensor_layouts import Packing
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, StorageError
from megapar.base.grid import Grid
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader, fill
from megapar.config.files import part_toml
from megapar.config.model_options import ModelConfig
from megapar.declare import context
from megapar.declare.params import Box
from tests.support.checkpoints import STATE, outcome
from tests.support.distributed import run_ranks
from tests.support.foreign_folders import MemoryStore
from tests.support.simulated_ranks import LAYOUTS, LLAMA, Layout, expected, rank_slices, whole
from tools.convert_checkpoint import convert_any

CONFIG = whole_config(LLAMA)
MODULES = {
    **{f"layers.*.attention.{letter}": "blocks.*.qkv" for letter in "qkv"},
    **{f"layers.*.mlp.{name}": "blocks.*.fc1" for name in ("gate", "up")},
    **{f"layers.*.attention.{name}": f"blocks.*.{name}" for name in ("o", "q_norm", "k_norm")},
    "layers.*.mlp.down": "blocks.*.fc2",
    **{f"layers.*.{name}": f"blocks.*.{name}" for name in ("attention_norm", "mlp_norm")},
    **{name: name for name in ("embedding", "norm", "head")},
}
LAYOUTS_OF_THEIRS = {"blocks.*.qkv": Packing(groups="num_key_value_heads")}


@dataclass
class CountingStore(MemoryStore):
    """It counts the elements that were read, and can break off."""

    read_elements: int = 0
    breaks_after: int | None = None

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if self.breaks_after is not None and self.read_elements > self.breaks_after:
            raise KeyboardInterrupt
        values = super().read(name, box)
        self.read_elements += values.numel()
        return values


def foreign(folder: Path, model: ModelConfig = LLAMA, padding: int = 5) -> Contents:
    """A folder with q, k and v by groups, gate above up, all layers in one tensor, and padded rows of the vocabulary,
    of the weights and both moments of `tests.support.simulated_ranks.whole`."""
    shapes = {name.removeprefix("main."): t.shape for name, t in whole(model).items() if name.startswith("main.")}
    made = recipes({name: tuple(shape) for name, shape in shapes.items()}, MODULES, LAYOUTS_OF_THEIRS, sizes=model)
    kept: dict[str, Tensor] = {}
    stored: dict[str, dict[str, StoredAt]] = {}
    for state in STATE:
        stored[state] = {}
        for name, recipe in made.items():
            values = torch.empty(recipe.shape)
            for part in recipe.parts:
                part.view(values).copy_(whole(model)[f"{state}.{part.name}"].unflatten(0, (part.groups, -1)))
            if name.startswith("blocks."):
                layer, _, rest = name.removeprefix("blocks.").partition(".")
                key = f"{state}/blocks.{rest}"
                kept.setdefault(key, torch.empty(model.num_hidden_layers, *recipe.shape))[int(layer)] = values
                stored[state][name] = StoredAt(key, (int(layer),))
            else:
                rows = torch.full((padding, *recipe.shape[1:]), torch.nan) if len(recipe.shape) == 2 else values[:0]
                kept[f"{state}/{name}"] = torch.cat([values, rows])
                stored[state][name] = StoredAt(f"{state}/{name}")
    folder.mkdir(exist_ok=True)
    position = Position(step=7, updates=6, consumed_samples=56, loss_scale=1024.0)
    return Contents("Framework 1.0, iteration 7", CountingStore(folder, kept), made, stored, position, model=model)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_of_every_layout_read_their_boxes(tmp_path: Path, layout: Layout) -> None:
    """Faults foreign-moments-order (q k v by group, gate and up, stacked layers, padded vocabulary): weights and both
    moments, bit for bit. No rank reads more than whole groups of its rows."""
    contents = foreign(tmp_path / "theirs")
    contents.check()
    manifest = contents.manifest(CONFIG)
    for rank in range(layout.world):
        slices = rank_slices(LLAMA, layout, rank)
        for _, view, _ in expected(LLAMA, slices):
            view.fill_(torch.nan)
        store = contents.store
        assert isinstance(store, CountingStore)
        store.read_elements = 0
        fill(tmp_path, manifest, slices)
        for name, view, values in expected(LLAMA, slices):
            assert torch.equal(view, values), f"{layout} rank {rank}: {name}"
        assert store.read_elements <= 3 * sum(tensor.numel() for tensor in store.held.values()) / layout.tp


def test_a_native_checkpoint_has_the_moments_and_the_position(tmp_path: Path) -> None:
    write_native(foreign(tmp_path / "theirs"), CONFIG, tmp_path / "native")
    manifest = read_manifest(tmp_path / "native")
    assert (manifest.step, manifest.consumed_samples, manifest.trainer["updates"]) == (7, 56, 6)
    assert manifest.trainer["loss_scale"]["scale"] == 1024
    assert {name: declared["optimizer"] for name, declared in manifest.states.items()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), "adamw"
    )
    with Reader(tmp_path / "native", manifest) as reader:
        for name, values in whole(LLAMA).items():
            assert torch.equal(reader.tensor(name), values), name


def test_a_broken_off_conversion_goes_on_where_it_was(tmp_path: Path) -> None:
    """The second run reads the rest alone, the result is that of a run in one go, and a changed source begins anew."""
    contents = foreign(tmp_path / "theirs")
    store = contents.store
    assert isinstance(store, CountingStore)
    write_native(contents, CONFIG, tmp_path / "whole", file_bytes=4000)
    in_all, store.read_elements, store.breaks_after = store.read_elements, 0, store.read_elements // 2
    with pytest.raises(KeyboardInterrupt):
        write_native(contents, CONFIG, tmp_path / "native", file_bytes=4000)
    assert not (tmp_path / "native").exists()
    partial = tmp_path / ".partial-native"
    assert len(list(partial.glob("*.safetensors"))) > 2
    with (partial / JOURNAL).open("ab") as file:
        file.write(b'{"file": "cut')  # the line that a kill leaves
    first, store.read_elements, store.breaks_after = store.read_elements, 0, None
    write_native(contents, CONFIG, tmp_path / "native", file_bytes=4000)
    assert first + store.read_elements < in_all + 3000  # a file's tensors were read again
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "native" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not partial.exists()

    store.breaks_after, store.read_elements = in_all // 2, 0
    with pytest.raises(KeyboardInterrupt):
        write_native(contents, CONFIG, tmp_path / "other", file_bytes=4000)
    store.breaks_after, store.read_elements = None, 0
    write_native(replace(contents, title="another iteration"), CONFIG, tmp_path / "other", file_bytes=4000)
    assert store.read_elements == in_all


def test_two_conversions_at_once_and_an_existing_target_are_refused(tmp_path: Path) -> None:
    contents = foreign(tmp_path / "theirs")
    partial = tmp_path / ".partial-native"
    partial.mkdir()
    descriptor = os.open(partial / JOURNAL, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another process converts to"):
        write_native(contents, CONFIG, tmp_path / "native")
    os.close(descriptor)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        write_native(contents, CONFIG, tmp_path / "there")
    partial.rename(tmp_path / "elsewhere")
    partial.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is not this user's"):
        write_native(contents, CONFIG, tmp_path / "native")


def test_contents_that_are_not_of_the_model_are_refused_in_one_line(tmp_path: Path) -> None:
    whole_contents = foreign(tmp_path / "theirs")
    main, exp_avg = whole_contents.stored["main"], whole_contents.stored["exp_avg"]
    lacking = {name: at for name, at in main.items() if name != "blocks.2.fc2.weight"}
    unknown = {**exp_avg, "blocks.9.fc2.weight": StoredAt("exp_avg/blocks.fc2.weight", (9,))}
    narrow = {**main, "norm.weight": StoredAt("main/blocks.o.weight", (1,))}
    beyond = {**main, "blocks.3.fc2.weight": StoredAt("main/blocks.fc2.weight", (4,))}
    halves = {name: at for name, at in exp_avg.items() if name != "norm.weight"}
    for stored, words in (
        ({"main": lacking}, "missing blocks.2.fc2.weight"),
        ({"main": main, "exp_avg": unknown}, "unexpected exp_avg of blocks.9.fc2.weight"),
        ({"main": narrow}, "holds no norm.weight of"),
        ({"main": beyond}, "holds no blocks.3.fc2.weight of"),
        ({**whole_contents.stored, "exp_avg": halves}, "one of Adam's two moments is there of norm.weight"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            replace(whole_contents, stored=stored).check()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("state", "value"), [("main", torch.nan), ("exp_avg_sq", -1.0), ("exp_avg", torch.inf)])
def test_values_unfit_for_training_are_refused(tmp_path: Path, state: str, value: float) -> None:
    contents = foreign(tmp_path / "theirs")
    store = contents.store
    assert isinstance(store, CountingStore)
    store.held[f"{state}/blocks.fc2.weight"][2, 1, 3] = value
    with pytest.raises(CheckpointError, match=r"blocks\.fc2\.weight: .*it was saved so"):
        write_native(contents, CONFIG, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_weights_alone_are_those_of_step_0(tmp_path: Path) -> None:
    with_moments = foreign(tmp_path / "theirs")
    contents = replace(with_moments, stored={"main": with_moments.stored["main"]}, position=Position())
    manifest = native.write_native(contents, CONFIG, tmp_path / "native")
    assert manifest.trainer["weights_only"]
    assert (manifest.step, manifest.states) == (0, {})
    body = json.loads((tmp_path / "native/manifest.json").read_text())["body"]
    assert all(name.startswith("main.") for name in body["tensors"])


def test_a_folder_of_no_format_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no format that is read here, which are ours and: Hugging Face"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"to": "deepspeed", "weights_only": True}, "--weights_only: is not read for --to deepspeed"),
        ({"to": "fsdp2", "expert_parallel": True}, "--expert_parallel: is not read for --to fsdp2"),
        ({"vocab_size": 7}, "--vocab_size: is not read for a native checkpoint that becomes Hugging Face's"),
    ],
)
def test_an_option_that_a_conversion_does_not_read_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_native(foreign(tmp_path / "theirs"), CONFIG, tmp_path / "native")
    with pytest.raises(ConfigError, match=re.escape(words)):
        convert_any(AnyToNative(tmp_path / "native", tmp_path / "out", **changes))


def test_a_checkpoint_comes_back_from_each_framework_with_its_moments(tmp_path: Path) -> None:
    """`megapar convert SRC DST --to NAME`, and `megapar convert DST BACK`, bit for bit."""
    write_native(foreign(tmp_path / "theirs"), CONFIG, tmp_path / "native")
    (tmp_path / "model.toml").write_text(part_toml(CONFIG, ("model",)))
    ours = read_manifest(tmp_path / "native")
    for name in ("megatron", "torchtitan", "fsdp2", "deepspeed"):
        convert_any(AnyToNative(tmp_path / "native", tmp_path / name, to=name))  # type: ignore[arg-type]
        convert_any(AnyToNative(tmp_path / name, tmp_path / "back" / name, config=str(tmp_path / "model.toml")))
        back = read_manifest(tmp_path / "back" / name)
        step = 6 if name == "fsdp2" else 7  # FSDP2's folders count updates alone
        assert (back.step, back.trainer["updates"], back.states) == (step, 6, ours.states)
        with Reader(tmp_path / "back" / name, back) as reader:
            for tensor, values in whole(LLAMA).items():
                assert torch.equal(reader.tensor(tensor), values), f"{name}: {tensor}"


def test_adams_moments_without_its_step_are_refused(tmp_path: Path) -> None:
    """Fault deepspeed-as-from-scratch: at step 0 the bias correction would begin anew."""
    write_native(foreign(tmp_path / "theirs"), CONFIG, tmp_path / "native")
    convert_any(AnyToNative(tmp_path / "native", tmp_path / "out", to="fsdp2"))
    store = open_store(tmp_path / "out")
    kept = {name: store.read(name) for name in store.tensors if not name.endswith(".step")}
    without = MemoryStore(tmp_path / "out", kept)
    with pytest.raises(CheckpointError, match="number of Adam's updates is nowhere stated: give --weights_only"):
        read_fsdp(without, LLAMA)
    assert read_fsdp(without, LLAMA, weights_only=True).states == []


def open_on_two_hosts(root: str) -> list[tuple[str, int, str]]:
    """Outcomes of opening a folder that rank 1 lacks, and one that is another iteration there."""
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    os.chdir(Path(root) / f"host{ctx.world.rank}")
    outcomes = []
    for name in ("lacking", "other"):
        config = replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, resume=name))
        outcomes.append(outcome(lambda config=config: doors.opened(config, ctx)))
    return outcomes


def test_ranks_that_see_different_folders_of_a_name_end_with_one_error(tmp_path: Path) -> None:
    """Fault foreign-folders-at-odds: a folder on the disk of one host alone, or another one there. No rank waits."""
    contents = foreign(tmp_path / "theirs")
    for host, step, names in ((0, 7, ("lacking", "other")), (1, 9, ("other",))):
        native_folder = tmp_path / f"native{host}"
        write_native(replace(contents, position=Position(step=step, updates=6)), CONFIG, native_folder)
        for name in names:
            convert_any(AnyToNative(native_folder, tmp_path / f"host{host}" / name, to="megatron"))
    ranks = run_ranks(2, open_on_two_hosts, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert [(kind, code) for kind, code, _ in ranks[0]] == [("CheckpointError", 4)] * 2
    assert "lacking: is no folder here, and rank 0 has one" in ranks[0][0][2]
    assert "other: ranks see different folders of this name" in ranks[0][1][2]
