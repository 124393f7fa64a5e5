"""Checkpoints of strangers: no name in their files is imported, and no number in them is believed unseen.

Each test plants a field in a manifest with a right SHA-256: whoever writes a checkpoint can compute that too.
"""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megapar_models.convert.saved import is_kept, load_model, saved_config

from megapar.base.errors import CheckpointError, MegaparError
from megapar.checkpoint.format import BASE, read_manifest
from tests.support import program
from tests.support.checkpoints import edit_manifest
from tests.support.exports import make_checkpoint
from tests.support.program import Ended, Program
from tests.support.sweeps import slow_but

ROOT = Path(__file__).parents[1]
EVIL = "evil_module:FAMILY"
TOOLS: Mapping[str, tuple[str, ...]] = {
    "generate.py": ("evil", "--prompt", "a"),
    "judge.py": ("evil", "--texts", "text.txt"),
    "score.py": ("evil", "--input", "texts.jsonl", "--output", "scores.jsonl"),
    "inspect_checkpoint.py": ("evil",),
    "convert_checkpoint.py native-to-hf": ("evil", "out", "--no-verify"),
    "convert_checkpoint.py native-to-dcp": ("evil", "out"),
    "convert_checkpoint.py upcycle": ("evil", "out", "--no-verify"),
    "convert_checkpoint.py average": ("averaged", "out"),
    "convert_checkpoint.py merge": ("adapters", "good", "out"),
    "convert_checkpoint.py native-to-peft": ("adapters", "out"),
    "convert_checkpoint.py peft-to-native": ("peft", "evil", "out"),
}
IMPORTS_NOTHING = ("inspect_checkpoint.py", "convert_checkpoint.py native-to-dcp")


def plant(folder: Path, options: Mapping[str, Any]) -> Path:
    """Change options in the manifest of a checkpoint."""
    edit_manifest(folder, lambda body: body["trainer"]["config"].update(options))
    return folder


def write_module(folder: Path) -> None:
    """A module that leaves a mark when it is imported, and has a right family."""
    text = (
        "from pathlib import Path\n\nfrom tests.toy_family import FAMILY\n\nPath(__file__).with_name('ran').touch()\n"
    )
    (folder / "evil_module.py").write_text(text)


def run_tool(name: str, *flags: str, cwd: Path) -> Ended:
    """Run a tool in `cwd`, where Python finds the modules that lie there too, as with `python -m`."""
    script, _, command = name.partition(" ")
    words = (command, *flags) if command else flags
    return Program(ROOT / "tools" / script, words, cwd, {}, lambda: sys.path.insert(0, str(cwd))).wait()


def write_all(folder: Path) -> None:
    """Checkpoints whose family is a module, and what the tools need beside them."""
    good = make_checkpoint(folder / "good", vocab_size=257)
    digest = read_manifest(good).weights_digest()
    for name in ("evil", "averaged", "adapters"):
        plant(make_checkpoint(folder / name, vocab_size=257), {"model.family": EVIL})
    of_base = {BASE: {"weights": digest}}
    edit_manifest(plant(folder / "adapters", {"adapter.rank": 4}), lambda body: body["trainer"].update(of_base))

    def average(body: dict[str, Any]) -> None:
        body["tensors"]["average.norm.weight"] = body["tensors"].pop("main.norm.weight")

    edit_manifest(folder / "averaged", average)
    (folder / "peft").mkdir()
    (folder / "peft/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    (folder / "text.txt").write_text("text")
    (folder / "texts.jsonl").write_text('{"text": "text"}\n')
    write_module(folder)


def test_a_family_that_a_file_names_is_imported_only_if_the_user_names_it(tmp_path: Path) -> None:
    """Fault names-out-of-files, for a tool and the reader of all tools."""
    write_all(tmp_path)
    ended = run_tool("generate.py", *TOOLS["generate.py"], cwd=tmp_path)
    assert ended.code == CheckpointError.exit_code, ended.err
    assert f"model.family={EVIL} is no family of megapar" in ended.err
    assert f"--family {EVIL} imports it, if you trust it" in ended.err
    assert not (tmp_path / "ran").exists()
    manifest = read_manifest(tmp_path / "evil")
    for other in ("evil_module:OTHER", "llama"):
        with pytest.raises(MegaparError, match="is of family evil_module:FAMILY"):
            saved_config(manifest, other)


@pytest.mark.slow  # a fork for each tool
@pytest.mark.parametrize("name", TOOLS)
def test_no_tool_imports_what_a_manifest_names(name: str, tmp_path: Path) -> None:
    """Fault names-out-of-files: the message names the flag, and with the flag the module is imported."""
    write_all(tmp_path)
    flags = TOOLS[name]
    ended = run_tool(name, *flags, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in ended.err
    if name in IMPORTS_NOTHING:
        assert ended.code == 0, ended.err
        return
    assert ended.code == CheckpointError.exit_code, (ended.code, ended.err)
    assert f"model.family={EVIL} is no family of megapar" in ended.err
    flag = "--source_family" if name.endswith("upcycle") else "--family"  # upcycle's --family is the mixture's
    assert f"{flag} {EVIL} imports it, if you trust it" in ended.err
    run_tool(name, *flags, flag, EVIL, cwd=tmp_path)  # that the tensors are not this family's does not matter
    assert (tmp_path / "ran").exists()


@pytest.mark.slow  # several hundred options
def test_no_option_in_a_manifest_is_imported_or_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault names-out-of-files: every option as the name of a module, and as values of wrong types and
    sizes: a CheckpointError, or an option that the tools leave out."""
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = make_checkpoint(tmp_path / "checkpoint", vocab_size=257)
    manifest = read_manifest(path)
    stated = dict(manifest.trainer["config"])
    values: list[Any] = [
        EVIL,
        [EVIL],
        {"a": EVIL},
        None,
        True,
        -1,
        0,
        10**9,
        10**30,
        1e300,
        float("nan"),
        "",
        [],
        [[1]],
    ]
    for option in stated:
        for value in values:
            manifest.trainer["config"] = stated | {option: value}
            with suppress(CheckpointError) if is_kept(option) else nullcontext():
                saved_config(manifest)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("model.num_hidden_layers", "four", "model.num_hidden_layers is four, not a whole number"),
        ("model.num_hidden_layers", None, "model.num_hidden_layers is None, not a whole number"),
        ("model.num_hidden_layers", 10**9, "1000000000 layers with 4 heads and 0 experts: no such model has"),
        ("model.num_attention_heads", 10**9, "layers with 1000000000 heads"),
        ("model.hidden_size", 2**20, "parameters, and the checkpoint has"),
        ("model.hidden_size", 2**62, "must be at most 2,147,483,647"),
        ("data.tokenizer", ["bytes"], "data.tokenizer is bytes, not a string"),
        ("data.tokenizer", 5, "data.tokenizer is 5, not a string"),
        ("train.precision", "fp7", "train.precision is fp7, not one of fp32, bf16, fp16"),
        ("model.family", ["llama"], "model.family=llama is no family of megapar"),
        ("model.rms_norm_eps", -1.0, "trainer.config: model.rms_norm_eps"),
    ],
)
def test_options_of_wrong_types_and_sizes_are_one_line(option: str, value: Any, said: str, tmp_path: Path) -> None:
    """Fault sizes-out-of-files: nothing is allocated, and nothing looped over, for a number that a file names."""
    path = plant(make_checkpoint(tmp_path / "checkpoint", vocab_size=257), {option: value})
    with pytest.raises(CheckpointError) as raised:
        load_model(path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


NAMING = ("optimizer.schedule", "optimizer.name", "parallel.schedule", "train.objective", "kernels.products")


@pytest.mark.parametrize("option", slow_but([0], NAMING))
def test_a_resumed_run_imports_nothing_that_its_checkpoint_names(option: str, tmp_path: Path) -> None:
    """Fault names-out-of-files: the run says what has changed, or refuses the checkpoint."""
    write_module(tmp_path)
    assert program.run("--train.steps", "2", cwd=tmp_path).code == 0
    plant(tmp_path / "run/checkpoints/step_00000002", {option: EVIL})
    here = partial(sys.path.insert, 0, str(tmp_path))
    ended = program.run("--train.steps", "4", cwd=tmp_path, plant=here)
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in ended.err
    assert ended.code in (0, CheckpointError.exit_code), ended.err
    assert re.search(rf"{option}\b.*{EVIL}", ended.out + ended.err)
