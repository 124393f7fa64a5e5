"""Model families: each says of itself what it reads, refuses and is called elsewhere; one outside the tree is named by
its import path."""

import ast
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from megapar_models.convert.config_json import to_hugging_face
from megapar_models.families.gpt import GPTStage
from megapar_models.registry import FAMILIES, find, validate, weight_options
from megapar_models.rotary_fields import read_rope

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, option_types
from tests.support import program

ROOT = Path(__file__).parents[1]
TOY = "tests.toy_family:FAMILY"
# An eps above the rounding of gradients keeps AdamW's first updates well-conditioned.
RUN = ("--model.family", TOY, "--optimizer.eps", "1e-2", "--checkpoint.every", "2")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, by name."""
    manifest = read_manifest(folder)
    with Reader(folder, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors}


def assert_same_state(found: Path, expected: Path) -> None:
    """Every weight and both its moments agree to rounding; the moments sum up the gradients of all steps."""
    expected_tensors = tensors(expected)
    found_tensors = tensors(found)
    assert found_tensors.keys() == expected_tensors.keys()
    assert any(".layers.0.norm.weight" in name for name in expected_tensors), "not the toy family's layers"
    for name, tensor in expected_tensors.items():
        error = (found_tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name}: {error}"


def test_a_family_outside_the_tree_trains_saves_and_loads_in_any_layout(tmp_path: Path) -> None:
    """Two steps in one process and in two tensor ranks give the same state; each goes on from the other's."""
    layouts = {"one": (), "two": ("--parallel.tp", "2", "--launch.nproc", "2")}
    for name, flags in layouts.items():
        ended = program.run(*RUN, *flags, "--train.steps", "2", "--run_dir", name, cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert f"{TOY}, " in ended.out
    first = {name: tmp_path / name / "checkpoints/step_00000002" for name in layouts}
    assert_same_state(first["two"], first["one"])
    for name, other in (("one", "two"), ("two", "one")):
        flags = (*layouts[name], "--train.steps", "3", "--checkpoint.resume", str(first[other]))
        ended = program.run(*RUN, *flags, "--run_dir", f"{name}_again", cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert f"resumed step 2 from {first[other]}" in ended.out
    again = [tmp_path / f"{name}_again" / "checkpoints/step_00000003" for name in layouts]
    assert_same_state(*again)
    assert json.loads(json.dumps(read_manifest(again[0]).model_config))["family"] == TOY


def test_the_toy_family_is_short() -> None:
    assert len((ROOT / "tests/toy_family.py").read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (
            "mistral",
            f"model.family=mistral: unknown; there are {', '.join(FAMILIES)}, and MODULE:NAME names one of your own",
        ),
        ("tests.toy_family:", "unknown; there are"),
        (":FAMILY", "unknown; there are"),
        ("no_such_package.model:FAMILY", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_pack"),
        ("tests.toy_family:FAMILIES", r"cannot be imported \(AttributeError: .*FAMILIES"),
        ("tests.toy_family:ParallelStage", "is type, not a megapar_models.family.Family"),
        ("megapar_models.families.llama:_FIXED", "is dict, not a megapar_models.family.Family"),
    ],
)
def test_a_family_that_is_none_is_refused_in_one_line(family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        validate(Config(ModelConfig(family=family)), 1)
    assert "\n" not in str(refused.value)


def test_a_module_that_fails_while_it_is_imported_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_family.py").write_text("FAMILY = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported \(ZeroDivisionError: division by zero\); the module"):
        find("broken_family:FAMILY")


def test_the_program_ends_with_2_where_there_is_no_such_family(tmp_path: Path) -> None:
    ended = program.run("--model.family", "nowhere:FAMILY", cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.startswith("ConfigError: model.family=nowhere:FAMILY: cannot be imported")
    assert len(ended.err.splitlines()) == 1


def test_rules_of_a_family_outside_the_tree_are_applied() -> None:
    """What it does not read, its activations, its own problems, and what auto means."""
    assert validate(Config(ModelConfig(family=TOY)), 1).model.hidden_act == "silu"
    wrong = ModelConfig(family=TOY, num_hidden_layers=9, head_dim=5, hidden_act="relu2")
    with pytest.raises(ConfigError) as refused:
        validate(Config(wrong), 1)
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    assert "a head's width must be even" in lines[0]
    assert lines[1] == "model.hidden_act=relu2: family parallel has no such activation; use silu"
    assert lines[2] == "model.num_hidden_layers=9: this family has at most 8"


@pytest.mark.parametrize("name", FAMILIES)
def test_activations_of_a_family_are_values_of_the_option(name: str) -> None:
    """Else a checkpoint of the family states an option that its tools refuse."""
    family = find(name)
    values = get_args(option_types(family.options)["model.hidden_act"])
    assert {*family.activations} <= {*values}


def test_sizes_of_weights_are_those_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(ModelConfig(family="gpt"))
    assert "max_position_embeddings" in weight_options(config)
    monkeypatch.setattr(GPTStage, "sizes_of_weights", ())
    assert "max_position_embeddings" not in weight_options(config)


def test_a_family_without_names_elsewhere_is_not_exported() -> None:
    with pytest.raises(ConfigError, match=rf"model\.family={TOY}: has no names at Hugging Face"):
        to_hugging_face(validate(Config(ModelConfig(family=TOY)), 1).model)


def test_nothing_but_the_families_themselves_asks_for_a_family_by_name() -> None:
    """Comparing with a family's name anywhere else would leave out families outside the tree."""
    names = {*FAMILIES}
    wrong = []
    for folder in ("megapar", "models", "pretrain_scripts", "kernels", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"\bfamily\b", text):  # most files: they need not be parsed
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Compare):
                    continue
                sides = [node.left, *node.comparators]
                named = any(isinstance(side, ast.Constant) and side.value in names for side in sides)
                if named and re.search(r"\bfamily\b", ast.unparse(node)):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_rotary_fields_that_are_no_object_are_refused() -> None:
    for name in ("rope_parameters", "rope_scaling"):
        assert read_rope({name: 3}, 1e4) == ({}, [f"{name}=3 should be an object of fields"])
