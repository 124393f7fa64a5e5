"""What AFM, Nemotron, Apertus and HunYuan have beside rows of the table: xIELU, and their published files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import warnings_of
from megapar_models.registry import presets, validate
from safetensors.torch import load_file, save_file

from megapar.base.errors import CheckpointError
from megapar.declare.params import spec_of
from tests.support import tiny_models
from tests.support.model_types import LLAMA3, TYPES
from tests.support.options import load
from tests.support.published import Published, converted, model_of, whole_stage


def test_xielu_starts_with_the_slopes_of_its_paper() -> None:
    xielu = (
        whole_stage(tiny_models.small("apertus", 48, 4, 76, num_key_value_heads=2, head_dim=10)).layers["0"].mlp.xielu
    )
    with torch.no_grad():
        for param in xielu.parameters():
            param.fill_(spec_of(param).init.value)
        found = xielu(torch.tensor([3.0, -2.0]))
    expected = [0.8 * 9 + 1.5, 0.8 * (math.expm1(-2) + 2) - 1]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("missing", [False, True])
def test_a_constant_of_xielu_with_another_value_or_without_one_is_refused(missing: bool, tmp_path: Path) -> None:
    Published(tmp_path, "apertus", TYPES["apertus"].fields)
    file = tmp_path / "theirs/model.safetensors"
    stored = load_file(file)
    name = "model.layers.2.mlp.act_fn.beta"
    stored[name] = torch.tensor(0.25)
    if missing:
        del stored[name]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing {name}" if missing else f"{name} is 0.25; models here .* 0.5"):
        converted(tmp_path / "theirs", tmp_path / "refused")


SIZES_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus-8b": {
        **{**SIZES_8B, "model_type": "apertus", "num_attention_heads": 32, "intermediate_size": 21504},
        **{"hidden_act": "xielu", "hidden_dropout": 0.0, "max_position_embeddings": 65536, "mlp_bias": False},
        **{"post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05, "vocab_size": 131072},
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "type": "llama3", "rope_theta": 12000000},
    },
    "hunyuan-7b": {
        **{**SIZES_8B, "model_type": "hunyuan_v1_dense", "num_attention_heads": 32, "intermediate_size": 14336},
        **{"add_classification_head": False, "attention_dropout": 0.1, "attention_head_dim": 128, "class_num": 0},
        **{"cla_share_factor": 2, "dense_list": [4096, 0], "eod_token_id": 127967, "hidden_act": "silu"},
        **{"im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "pad_id": 127961},
        **{"max_position_embeddings": 32768, "norm_type": "rms", "org_vocab_size": 128167, "pool_type": "last"},
        **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 7, "text_start_id": 6},
        **{"tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True, "vocab_size": 128167},
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "type": "dynamic"},
    },
    "minitron-8b": {
        **{**SIZES_8B, "model_type": "nemotron", "num_attention_heads": 48, "intermediate_size": 16384},
        **{"hidden_act": "relu2", "initializer_range": 0.0134, "max_position_embeddings": 4096, "norm_eps": 1e-05},
        **{"rope_theta": 10000, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "vocab_size": 256000},
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_config_json_is_its_preset(name: str) -> None:
    preset = load(["--config", str(presets()[name])]).config
    assert model_of(PUBLISHED[name]) == validate(preset, 1).model


def test_dropout_of_a_family_without_is_told() -> None:
    (line,) = warnings_of(PUBLISHED["hunyuan-7b"])
    assert "attention_dropout=0.1 is not read: family hunyuan trains without dropout" in line
