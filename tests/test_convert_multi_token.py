"""Layers of multi-token prediction of Hugging Face: logits, losses and gradients of a plain version, and the way back.

transformers' models leave these layers out. The plain version is their decoder layer between the parts that the papers
and vLLM put around it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert import adapters
from megapar_models.convert.exported import hf_recipes, recipes_in_memory
from megapar_models.convert.saved import load_model
from megapar_models.stage import Stage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megapar.base.errors import CheckpointError, ConfigError
from megapar.declare.batch import MicroBatch, StepScope, Targets
from tests.support import close
from tests.support.hugging_face import assert_same_tensors
from tests.support.model_types import LENGTH, TYPES, VOCABULARY
from tests.support.multi_token import logits_of_layers
from tests.support.published import losses_of, model_of, random_model, weights_of
from tests.support.rules import gradients
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf


@dataclass(frozen=True)
class Case:
    """A row of `TYPES` with `depths` further layers, each like layer `like`, and their names in files."""

    row: str
    depths: int
    like: int
    fields: Mapping[str, Any]
    parts: Mapping[str, str]
    """Beginnings of names: of the layer, the norms of embedding and hidden states, the projection, the last norm."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    copies: bool = False


_DEEPSEEK = {
    "layer": "model.layers.{number}.",
    **{name: f"model.layers.{{number}}.{name}" for name in ("enorm", "hnorm", "eh_proj")},
    "norm": "model.layers.{number}.shared_head.norm",
}
_QWEN = {"layer": "mtp.layers.0.", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
_QWEN |= {"eh_proj": "mtp.fc", "norm": "mtp.norm"}
_MIMO = {
    "layer": "model.mtp.layers.{depth}.",
    **{name: f"model.mtp.layers.{{depth}}.{name}" for name in ("enorm", "hnorm", "eh_proj")},
    "norm": "model.mtp.layers.{depth}.final_layernorm",
}
_SINKS = {".post_attention_layernorm.": ".pre_mlp_layernorm.", ".self_attn.sinks": ".self_attn.attention_sink_bias"}
CASES = [
    Case("deepseek_v3", 2, 3, {"num_mtp_layers": 2}, _DEEPSEEK, copies=True),
    Case("mimo_v2_flash", 3, 0, {}, _MIMO, _SINKS),
    Case("glm4_moe", 1, 3, {"num_mtp_layers": 1}, _DEEPSEEK, copies=True),
    Case("glm4_moe_lite", 1, 3, {"num_nextn_predict_layers": 1}, _DEEPSEEK, copies=True),
    Case("qwen3_5_text", 1, 0, {"mtp_num_hidden_layers": 1}, _QWEN),
    Case("qwen3_5_moe_text", 1, 0, {"mtp_num_hidden_layers": 1}, _QWEN),
    Case("qwen3_next", 1, 0, {}, _QWEN),
]


class Plain(nn.Module):
    """A model of transformers, and further layers of its own class around which stand norms and projections."""

    def __init__(self, case: Case):
        super().__init__()
        self.theirs = random_model(TYPES[case.row].model_type, {**TYPES[case.row].fields, **case.fields})
        config = self.theirs.config
        base = self.theirs.model
        like = case.like
        if getattr(config, "layer_types", None) and case.row.startswith("qwen"):
            like = config.layer_types.index("full_attention")
        if case.row.startswith("mimo"):
            like = config.layer_types.index("sliding_attention")
            config = type(config).from_dict({**config.to_dict(), "mlp_layer_types": ["dense"] * 4})
            config._attn_implementation = "eager"
        self.window = config.sliding_window if case.row.startswith("mimo") else 0
        self.type = "sliding_attention" if self.window else None
        norm = type(base.norm)

        def further() -> nn.ModuleDict:
            parts = {name: norm(config.hidden_size, config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")}
            parts["eh_proj"] = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            parts["layer"] = type(base.layers[0])(config, like)
            return nn.ModuleDict(parts)

        self.depths = nn.ModuleList(further() for _ in range(case.depths))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in self.depths.state_dict().values():
                noise = torch.randn(tensor.shape, generator=generator) * 0.1
                tensor.copy_(noise + (tensor.nan_to_num() if tensor.ndim == 1 else 0.0))
        self.depths.eval()

    def logits(self, batch: MicroBatch) -> list[Tensor]:
        """Of the model, and of each further layer, [b, s, v]."""
        base = self.theirs.model
        hidden = base(batch.tokens_bs).last_hidden_state
        found = [self.theirs.lm_head(hidden)]
        positions = torch.arange(LENGTH)[None]
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        hidden_keys = (distance < 0) | ((distance >= self.window) if self.window else False)
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(hidden_keys, -torch.inf)[None, None]
        for number, depth in enumerate(self.depths, 1):
            embedded = base.embed_tokens(batch.targets(number).tokens_bs)
            x = depth["eh_proj"](torch.cat([depth["enorm"](embedded), depth["hnorm"](hidden)], -1))
            rotary = base.rotary_emb(x, positions, self.type) if self.type else base.rotary_emb(x, positions)
            x = depth["layer"](x, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
            hidden = depth["norm"](x[0] if isinstance(x, tuple) else x)
            found.append(self.theirs.lm_head(hidden))
        return found


def saved(plain: Plain, case: Case, folder: Path, *, copies: bool = True, stacked: bool = False) -> Path:
    """The folder of Hugging Face with the weights of the plain version."""
    plain.theirs.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(raw | (case.fields if "mtp_num_hidden_layers" in case.fields else {}))
    )
    tensors = load_file(folder / "model.safetensors")
    for depth, modules in enumerate(plain.depths):
        number = plain.theirs.config.num_hidden_layers + depth
        parts = {name: text.format(number=number, depth=depth) for name, text in case.parts.items()}
        for name, tensor in modules.state_dict().items():
            part, _, rest = name.partition(".")
            full = parts[part] + rest if part == "layer" else f"{parts[part]}.{rest}"
            for ours, theirs in case.renamed.items():
                full = full.replace(ours, theirs)
            tensors |= {full: tensor} if stacked else unstacked(full, tensor)
        if case.copies and copies:
            tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def unstacked(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices of each expert in a tensor of all of them, as `save_pretrained` writes them."""
    if not (found := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
        return {name: tensor}
    matrices = ("gate", "up") if found[2] == "gate_up" else ("down",)
    return {
        f"{found[1]}.{expert}.{matrix}_proj.weight": part
        for expert, both in enumerate(tensor)
        for matrix, part in zip(matrices, both.chunk(len(matrices)), strict=True)
    }


def batch_of(depths: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1 + depths), generator=generator)
    targets = [
        Targets(tokens[:, ahead : ahead + LENGTH], 0.1 + torch.rand((2, LENGTH), generator=generator))
        for ahead in range(1, 2 + depths)
    ]
    batch = MicroBatch.of_samples(tokens[:, :LENGTH], *targets[0], torch.arange(2), later_targets=targets[1:])
    zeros = {f"mtp_{depth}": torch.zeros((), dtype=torch.float64) for depth in range(1, 1 + depths)}
    return replace(batch, scope=StepScope(grad_scale=torch.ones(()), loss_sums=zeros))


def converted(source: Path, native: Path, **options: Any) -> Stage:
    hf_to_native(HfToNative(source, native, verify=False, **options))
    return load_model(native)[1].eval()


@pytest.mark.parametrize("case", slow_but([2], CASES), ids=lambda case: case.row)
def test_it_computes_what_the_plain_version_does_and_comes_back(case: Case, tmp_path: Path) -> None:
    plain = Plain(case)
    theirs = saved(plain, case, tmp_path / "theirs")
    stage = converted(theirs, tmp_path / "ours")
    assert stage.model.num_nextn_predict_layers == case.depths
    batch = batch_of(case.depths)
    expected = plain.logits(batch)
    for found, logits in zip(logits_of_layers(stage, batch), expected[1:], strict=True):
        assert (found - logits).norm() <= 1e-6 * logits.norm()
    check_gradients(plain, stage, case, expected, tmp_path)
    # The way back, with the config.json of the import and with our own.
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "copied", verify=False))
    assert_same_tensors(tmp_path / "copied", theirs)
    (tmp_path / "ours/config.json").unlink()
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "again", verify=False))
    assert_same_tensors(tmp_path / "again", theirs)
    again = converted(tmp_path / "again", tmp_path / "ours_again")
    assert again.model == stage.model


def check_gradients(plain: Plain, stage: Stage, case: Case, expected: Sequence[Tensor], folder: Path) -> None:
    """Of the sum of all losses: each of the main model's and of the further layers' to 1e-5, and the losses to 1e-6."""
    batch = batch_of(case.depths)
    sums = []
    for ahead, logits in enumerate(expected, 1):
        tokens_bs, weights_bs = batch.targets(ahead)
        shifted = replace(batch, targets_bs=tokens_bs)
        sums.append((losses_of(logits, shifted) * weights_bs.flatten()).sum())
    torch.stack(sums).sum().backward()
    loss = stage(None, batch)
    loss.backward()
    assert loss.item() == pytest.approx(sums[0].item(), rel=1e-6)
    assert batch.scope.loss_sums is not None
    found = [total.item() for total in batch.scope.loss_sums.values()]
    assert found == pytest.approx([total.item() for total in sums[1:]], rel=1e-6)
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    wanted = weights_of(converted(saved(plain, case, folder / "gradients", copies=False), folder / "ours_gradients"))
    close.assert_close(gradients(stage), wanted)
    assert all(wanted[f"layers.{stage.model.num_hidden_layers}.{name}.weight"].any() for name in ("enorm", "eh_proj"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.row)
def test_the_plain_version_is_what_transformers_proposes_tokens_with(case: Case) -> None:
    """The class that `generate(use_mtp=True)` of transformers makes; of these families it has the fields."""
    layers = pytest.importorskip("transformers.modeling_layers", reason="not run: needs transformers")
    plain, batch = Plain(case), batch_of(case.depths)
    with torch.no_grad():
        expected = plain.logits(batch)
        theirs = layers.MtpModel(plain.theirs, case.depths).eval()
        hidden = plain.theirs.model(batch.tokens_bs).last_hidden_state
        positions = torch.arange(LENGTH)[None].expand(2, -1)
        for depth, (layer, ours) in enumerate(zip(theirs.layers, plain.depths, strict=True)):
            names = {"mtp_block": "layer", "post_norm": "norm"}
            for name, module in layer.named_children():
                module.load_state_dict(ours[names.get(name, name)].state_dict())
            tokens_bs = batch.targets(depth + 1).tokens_bs
            hidden = theirs.forward_layer(depth, hidden, positions, None, input_ids=tokens_bs)
            logits = plain.theirs.lm_head(hidden)
            assert (logits - expected[depth + 1]).norm() <= 1e-6 * logits.norm()


@pytest.mark.slow
def test_experts_of_further_layers_may_be_stacked(tmp_path: Path) -> None:
    """Qwen3.6 has them so; Qwen3.5 has the matrices of each expert."""
    case = CASES[5]
    plain = Plain(case)
    apart, together = (saved(plain, case, tmp_path / str(stacked), stacked=stacked) for stacked in (False, True))
    found, expected = converted(together, tmp_path / "one"), converted(apart, tmp_path / "other")
    close.assert_close(weights_of(found), weights_of(expected), rtol=0)


def test_further_layers_are_left_out_on_request_and_a_folder_may_lack_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[2]
    plain = Plain(case)
    theirs = saved(plain, case, tmp_path / "theirs")
    stage = converted(theirs, tmp_path / "without", mtp=False)
    assert stage.model.num_nextn_predict_layers == 0
    assert "left out: 43 tensors model.layers.4.*" in capsys.readouterr().err
    # The folder names its origin, and an export puts them back.
    native_to_hf(NativeToHf(tmp_path / "without", tmp_path / "whole", like=theirs, verify=False))
    assert_same_tensors(tmp_path / "whole", theirs)
    plain.theirs.save_pretrained(tmp_path / "lacking")
    assert json.loads((tmp_path / "lacking/config.json").read_text())["num_nextn_predict_layers"] == 1
    lacking = converted(tmp_path / "lacking", tmp_path / "read")
    assert lacking.model == stage.model
    assert "config.json states 1 layer of multi-token prediction, and the files hold 0" in capsys.readouterr().err


def test_copies_of_embedding_and_head_must_be_equal(tmp_path: Path) -> None:
    case = CASES[2]
    theirs = saved(Plain(case), case, tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.layers.4.shared_head.head.weight"][3, 5] += 1
    save_file(tensors, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight differs from lm_head\.weight: .*--no-mtp"):
        converted(theirs, tmp_path / "ours")


@pytest.mark.slow
def test_several_layers_of_their_own_are_no_qwen(tmp_path: Path) -> None:
    case = CASES[4]
    stage = converted(saved(Plain(case), case, tmp_path / "theirs"), tmp_path / "ours")
    with pytest.raises(ConfigError, match="several layers share a projection and norms at Hugging Face"):
        hf_recipes(replace(stage.model, num_nextn_predict_layers=2))


def test_adapters_of_further_layers_are_merged_and_no_files_of_peft() -> None:
    model = model_of({"model_type": "glm4_moe", **TYPES["glm4_moe"].fields, "num_nextn_predict_layers": 1})
    factors = ["layers.3.attention.q.lora_a", "layers.4.attention.q.lora_a"]
    assert len(adapters.their_factors(model, factors[:1])) == 1
    with pytest.raises(ConfigError, match=r"native-to-peft: layers\.4\.attention\.q is of multi-token prediction"):
        adapters.their_factors(model, factors)


def test_frameworks_that_train_the_model_of_transformers_get_no_further_layers() -> None:
    model = model_of({"model_type": "glm4_moe", **TYPES["glm4_moe"].fields, "num_nextn_predict_layers": 1})
    with pytest.raises(ConfigError, match=r"^model\.num_nextn_predict_layers=1: transformers' model leaves .* out; "):
        recipes_in_memory(model)
