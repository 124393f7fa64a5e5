"""Fault megatron-core-logits: a conversion of a Megatron checkpoint against Megatron-Core's own model of it.

`test_convert_megatron.py` compares with our knowledge of Megatron. Here an unknown or wrongly read argument must show.
These tests need the package megatron-core, but for one test: of the line telling its absence.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megapar_models.convert import megatron, megatron_args, megatron_core

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from tests.support import tiny_models
from tests.support.megatron_folders import MODELS, megatron_folder
from tools import convert_checkpoint
from tools.convert_checkpoint import MegatronToNative, megatron_to_native

needs_megatron_core = pytest.mark.skipif(
    not megatron_core.is_installed(), reason="not run: needs megatron-core, pip install megatron-core==0.16.1"
)


def folder(root: Path, shape: ModelConfig, **args: Any) -> Path:
    """A checkpoint of two tensor and two pipeline ranks, every norm and bias of it random too."""
    return megatron_folder(root, shape, tiny_models.random_tensors(shape), tp=2, pp=2, **args)


@needs_megatron_core
@pytest.mark.parametrize("style", ["core", "transformer engine", "legacy"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_megatron_core(kind: str, style: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "megatron", MODELS[kind], style=style)
    megatron_to_native(MegatronToNative(source, tmp_path / "native", verify=True))
    report = json.loads((tmp_path / "native" / "parity.json").read_text())
    assert report["reference"] == megatron_core.version()
    assert len(report["prompts"]) == 3
    for row in report["prompts"]:
        assert row["largest_logit"] > 0.1
        assert row["relative"] < 1e-5, row


@needs_megatron_core
@pytest.mark.parametrize(
    "args", [{"rotary_seq_len_interpolation_factor": 4}, {"use_rope_scaling": True}, {"norm_epsilon": 0.1}]
)
def test_scaled_positions_and_another_epsilon_are_those_of_megatron_core(args: dict[str, Any], tmp_path: Path) -> None:
    source = folder(tmp_path / "megatron", MODELS["llama"], **args)
    megatron_to_native(MegatronToNative(source, tmp_path / "native", verify=True))
    rows = json.loads((tmp_path / "native" / "parity.json").read_text())["prompts"]
    assert max(row["relative"] for row in rows) < 1e-5


def refused(source: Path, target: Path, words: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        megatron_to_native(MegatronToNative(source, target, verify=True, **options))
    assert "\n" not in str(caught.value)
    assert not target.exists()


# What our reader makes of the args, if it makes a mistake; and what the refusal must name.
MISREAD = [
    ({"rope_theta": 500.0}, r"rotary_base is 10000 there, 500\.0 here"),
    ({"rms_norm_eps": 0.1}, r"layernorm_epsilon is 0\.001 there, 0\.1 here"),
]


@needs_megatron_core
@pytest.mark.parametrize(("change", "words"), MISREAD)
def test_an_argument_that_is_read_wrongly_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "megatron", MODELS["llama"])
    read = megatron.model_of
    monkeypatch.setattr(megatron, "model_of", lambda *values: replace(read(*values), **change))
    refused(source, tmp_path / "native", f"logits differ from those of megatron-core .*{words}")


@needs_megatron_core
def test_an_argument_that_is_not_read_at_all_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our list of arguments lacks it, and by the user's word it does no harm."""
    listed = megatron_args.UNUSED
    for field, value, words in (
        ("rotary_percent", 0.5, r"logits differ from those of megatron-core .*rotary_percent is 0\.5 there, 1\.0 here"),
        ("qk_l2_norm", True, r"logits differ from those of megatron-core .*qk_l2_norm is True there, False here"),
        ("layernorm_zero_centered_gamma", True, "does not build the model of its args: zero_centered_gamma not supp"),
    ):
        source = folder(tmp_path / field, MODELS["llama"], **{field: value})
        unused = {name: values for name, values in listed.items() if name != field}
        monkeypatch.setattr(megatron_args, "UNUSED", unused)
        refused(source, tmp_path / "native", words, accept_args=(field,))


@needs_megatron_core
def test_a_factor_that_megatrons_gpt_ignores_is_refused(tmp_path: Path) -> None:
    """Megatron-LM does not hand --rope-scaling-factor to its GPT, so the GPT computes with 8."""
    source = folder(tmp_path / "megatron", MODELS["llama"], use_rope_scaling=True, rope_scaling_factor=32.0)
    refused(source, tmp_path / "native", r"rope_scaling_factor is 8\.0 there, 32\.0 here")


def test_without_megatron_core_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.startswith("megatron") else find(name, *rest)
    )
    source = folder(tmp_path / "megatron", MODELS["llama"])
    command = ["convert_checkpoint.py", "megatron-to-native", str(source), f"{tmp_path}/native", "--verify"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        convert_checkpoint.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Megatron-Core, which is not installed: pip install megatron-core" in said
    assert not (tmp_path / "native").exists()
