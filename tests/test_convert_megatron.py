"""Megatron-LM's classic checkpoints become ours bit for bit, whatever layout and version of Megatron wrote them.

No Megatron-LM is needed: `megatron_folder` writes what it writes, by loops over heads and ranks.
"""

import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.megatron import FILE, TRACKER, MegatronCheckpoint, read
from megapar_models.convert.parity import load_fp32, native_logits
from megapar_models.counts import WholeModel
from megapar_models.rotary import RopeScaling
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from tests.support import reference_models, tiny_models
from tests.support.megatron_folders import LAYERS, MODELS, STYLES, Backend, megatron_folder
from tests.support.sweeps import slow_but
from tools import convert_checkpoint
from tools.convert_checkpoint import MegatronToNative


def shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: piece.shape for name, piece in WholeModel(shape).tensors().items()}


def imported(root: Path, **options: Any) -> tuple[MegatronCheckpoint, dict[str, Tensor]]:
    source = read(root, **options)
    source.check(shapes(source.model))
    return source, {name: source.tensor(name) for name in shapes(source.model)}


LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (4, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    "layouts", slow_but([0], [([LAYOUTS[0], *LAYOUTS[-2:]],), (LAYOUTS[1:-2],)]), ids=["few", "others"]
)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", slow_but([len(MODELS) - 1], MODELS))
def test_every_logical_tensor_returns_bitwise_from_every_layout(
    kind: str, style: str, layouts: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    """q/k/v by groups (4 tensor ranks share 2 of them), gate and up of each rank, padding, layer numbers, tied ends
    (faults pipeline-schedules-agree, tied-on-one-rank)."""
    model = MODELS[kind]
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_models.random_tensors(model).items()}
    for tp, pp, vpp in layouts:
        root = megatron_folder(tmp_path / f"{tp}_{pp}_{vpp}", model, tensors, tp=tp, pp=pp, vpp=vpp, style=style)
        source, found = imported(root)
        assert source.model == model
        assert source.iteration == 12
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], tensor.float()), f"{name} of tp {tp}, pp {pp}, vpp {vpp}"


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    """The converted folder, through the tool and our own model, against the reference on the tensors before."""
    tensors = tiny_models.random_tensors(MODELS[kind])
    megatron_folder(tmp_path / "megatron", MODELS[kind], tensors, tp=2, pp=2, style="transformer engine")
    convert_checkpoint.megatron_to_native(MegatronToNative(tmp_path / "megatron", tmp_path / "native"))
    config, stage = load_fp32(tmp_path / "native", torch.float32)
    assert config.model == MODELS[kind]
    tokens_s = tiny_models.batch(MODELS[kind], samples=1).tokens_bs[0]
    expected_sv = reference_models.logits(MODELS[kind], tensors, tokens_s[None])[0]
    found_sv = native_logits(stage, tokens_s, 0)[:, : config.model.vocab_size]
    torch.testing.assert_close(found_sv, expected_sv, rtol=0, atol=1e-5 * float(expected_sv.abs().max()))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], **impl: Any) -> None:
    """Change what a rank's file holds."""
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path, **impl)


class Payload:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of two tensor and two pipeline ranks, without objects of unknown classes."""
    shape = MODELS["llama"]
    tensors = tiny_models.random_tensors(shape)
    return megatron_folder(tmp_path / "megatron", shape, tensors, tp=2, pp=2, attention_backend=None)


def first_file(root: Path) -> Path:
    return root / "iter_0000012" / "mp_rank_00_000" / FILE


def test_a_pickle_that_would_run_code_is_refused_before_it_runs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault nothing-is-unpickled: whatever it calls, wherever it lies, in every protocol; nothing is written."""
    ran, path = tmp_path / "ran", first_file(small)
    whole = path.read_bytes()
    calls = (
        Payload(os.system, f"touch {ran}"),
        Payload(eval, f"open({str(ran)!r}, 'w')"),
        Payload(Path.touch, ran),
        Payload(getattr(torch, "load"), str(ran)),  # noqa: B009
    )
    for payload in calls[:3]:
        rewrite(path, lambda state, payload=payload: vars(state["args"]).update(spec=payload))
        with pytest.raises(CheckpointError, match="refused, not unpickled"):
            read(small)
        assert not ran.exists()
        torch.load(path, weights_only=False)  # so it would have run
        assert ran.exists()
        ran.unlink()
        path.write_bytes(whole)
    rewrite(path, lambda state: state.update(optimizer=calls[3]))
    with pytest.raises(CheckpointError, match=r"refused, not unpickled: names torch\.serialization\.load"):
        read(small)
    for pickled in ({"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}):
        torch.save({"args": Namespace(spec=calls[0])}, path, **pickled)
        with pytest.raises(CheckpointError, match=r"refused|not readable"):
            read(small)
    path.write_bytes(pickle.dumps(calls[0]))
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", "megatron-to-native", str(small), f"{tmp_path}/native"])
    with pytest.raises(SystemExit) as ended:
        convert_checkpoint.main()
    assert ended.value.code == 4
    assert capsys.readouterr().err.count("\n") == 1
    assert not ran.exists()
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("stored", ["by value", "by name"])
def test_an_object_of_megatron_is_left_out_without_being_imported(
    tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings hold an enumeration of Megatron's, and Megatron is not installed here.

    Python 3.11.0 to 3.11.3 stores a member by its name.
    """

    def reduce(member: Backend, protocol: int) -> tuple[Any, ...]:
        return (getattr, (Backend, member.name)) if stored == "by name" else (Backend, (member.value,))

    monkeypatch.setattr(Backend, "__reduce_ex__", reduce)
    shape = MODELS["llama"]
    root = megatron_folder(tmp_path / "megatron", shape, tiny_models.random_tensors(shape))
    assert "megatron" not in sys.modules
    source = read(root)
    assert source.model == shape
    assert "megatron" not in sys.modules


def test_a_whole_number_is_an_epsilon_and_true_is_none(tmp_path: Path) -> None:
    shape = MODELS["llama"]
    tensors = tiny_models.random_tensors(shape)
    source = read(megatron_folder(tmp_path / "whole", shape, tensors, norm_epsilon=1))
    assert repr(source.model.rms_norm_eps) == "1.0"
    with pytest.raises(CheckpointError, match=r"args\.norm_epsilon is True: must be a number"):
        read(megatron_folder(tmp_path / "true", shape, tensors, norm_epsilon=True))
    with pytest.raises(CheckpointError, match=r"args\.hidden_size is 48\.0: must be a number"):
        read(megatron_folder(tmp_path / "wide", shape, tensors, hidden_size=48.0))


REFUSED = {
    "num_experts": 8,
    "multi_latent_attention": True,
    "mtp_num_layers": 1,
    "apply_layernorm_1p": True,
    "layernorm_zero_centered_gamma": True,
    "hybrid_layer_pattern": "M*M*",
    "heterogeneous_layers_config_encoded_json": "{}",
    "spec": ["elsewhere.layers", "make"],
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "window_size": (128, 0),
    "softmax_type": "learnable",
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "num_layers": LAYERS + 1,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 1,
    "norm_epsilon": None,
    "num_query_groups": 4,
    "vocab_size": 4000,
    "hidden_size": "wide",
    "qk_layernorm": True,
    "add_qkv_bias": True,
}
# What the message has in place of the field's name, such as a tensor that contradicts it.
NAMED = {
    "num_experts": "args.num_experts is 8: not supported; convert a mixture of experts through Hugging Face",
    "num_query_groups": "attention.k.weight",
    "vocab_size": "embedding.weight",
    "qk_layernorm": "missing layers.0.attention.k_norm.weight",
    "add_qkv_bias": "missing layers.0.attention.qkv.bias",
}


def test_what_our_models_cannot_be_is_refused_by_the_name_of_the_field(small: Path) -> None:
    for field, value in REFUSED.items():
        before: list[Any] = []

        def change(state: dict[str, Any], field: str = field, value: Any = value, kept: Any = before) -> None:
            kept.append(getattr(state["args"], field, None))
            setattr(state["args"], field, value)

        rewrite(first_file(small), change)
        with pytest.raises(CheckpointError, match=NAMED.get(field, field)) as caught:
            imported(small)
        assert "\n" not in str(caught.value)
        rewrite(first_file(small), lambda state, field=field, old=before[0]: setattr(state["args"], field, old))
    imported(small)


UNKNOWN = ("embedding_scale", "use_rmsnorm_1p", "logit_cap", "sliding_window", "post_mlp_layernorm", "rope_v2_theta")
# Of Megatron-LM's 838 options, those with a default that is neither false nor None and a name that speaks of the
# arithmetic; and some that users switch on.
DEFAULTS = {
    **dict.fromkeys(("add_position_embedding", "apply_rope_fusion", "bias_swiglu_fusion"), True),
    **dict.fromkeys(("masked_softmax_fusion", "no_persist_layer_norm"), True),
    **dict.fromkeys(("create_attention_mask_in_dataloader", "use_mamba_mem_eff_path", "use_flash_attn"), True),
    **dict.fromkeys(("yarn_correction_range_round_to_int", "attention_softmax_in_fp32", "reset_position_ids"), True),
    **{"hidden_dropout": 0.1, "attention_dropout": 0.1, "rotary_scaling_factor": 1.0, "moe_router_topk": 2},
    **{"mtp_loss_scaling_factor": 0.1, "mup_width_mult": 1.0, "dsa_indexer_rotate_activation": True, "spec": None},
    **{"loss_scale_window": 1000, "muon_scale_mode": "spectral", "mamba_head_dim": 64, "rope_scaling_factor": 8.0},
    **{"relative_attention_num_buckets": 32, "kitchen_attention_backend": "sdpa", "window_size": [-1, -1]},
}


def test_an_option_that_we_do_not_know_is_refused_if_its_name_speaks_of_the_arithmetic(small: Path) -> None:
    """Fault megatron-options: Megatron renames options, and a conversion ignoring one is silently wrong. Its defaults
    pass."""
    rewrite(first_file(small), lambda state: vars(state["args"]).update(DEFAULTS, **dict.fromkeys(UNKNOWN)))
    imported(small)
    for field in UNKNOWN:
        rewrite(first_file(small), lambda state, field=field: setattr(state["args"], field, True))
        with pytest.raises(CheckpointError, match=rf"args\.{field} is True: this option is not known.*--accept_args"):
            imported(small)
        imported(small, accepted=[field])
        rewrite(first_file(small), lambda state, field=field: setattr(state["args"], field, False))
    rewrite(first_file(small), lambda state: setattr(state["args"], "layernorm_zero_centered_gamma", True))
    with pytest.raises(CheckpointError, match="layernorm_zero_centered_gamma is True: not supported"):
        imported(small, accepted=["layernorm_zero_centered_gamma"])  # it is known, and known to matter


def test_a_distributed_checkpoint_of_megatron_is_named(tmp_path: Path) -> None:
    """Both the root and the iteration's folder are recognized, and another command reads Megatron's default format."""
    folder = tmp_path / "iter_0000012"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / TRACKER).write_text("12")
    for source in (tmp_path, folder):
        with pytest.raises(CheckpointError, match=r"format torch_dist .*`megapar convert SRC DST` reads it"):
            read(source)
    (folder / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    with pytest.raises(CheckpointError, match=r"format fsdp_dtensor .*--ckpt-convert-format torch_dist"):
        read(folder)


def test_tensors_that_the_args_do_not_speak_of_are_refused(tmp_path: Path) -> None:
    shape = MODELS["llama, tied, biased"]
    root = megatron_folder(tmp_path / "m", shape, tiny_models.random_tensors(shape), add_qkv_bias=False)
    with pytest.raises(CheckpointError, match=r"unexpected layers\.0\.attention\.qkv\.bias"):
        imported(root)


def test_gelu_by_erf_is_refused_and_its_tanh_form_is_not(tmp_path: Path) -> None:
    shape = MODELS["gpt"]
    tensors = tiny_models.random_tensors(shape)
    exact = megatron_folder(tmp_path / "exact", shape, tensors, bias_gelu_fusion=False)
    with pytest.raises(CheckpointError, match=r"args\.bias_gelu_fusion"):
        read(exact)
    tanh = megatron_folder(tmp_path / "tanh", shape, tensors, bias_gelu_fusion=False, openai_gelu=True)
    assert read(tanh).model == shape


def test_the_number_of_true_token_ids_is_never_guessed(tmp_path: Path) -> None:
    """Files hold 192 rows; the tokenizer's 131 come from the args or from --vocab_size."""
    shape = MODELS["llama"]
    tensors = tiny_models.random_tensors(shape)
    for number, stated in enumerate(({"vocab_size": None}, {"vocab_size": 130, "tokenizer_type": "NullTokenizer"})):
        root = megatron_folder(tmp_path / str(number), shape, tensors, **stated)
        with pytest.raises(CheckpointError, match="--vocab_size"):
            read(root)
        _, found = imported(root, vocab_size=131)
        assert torch.equal(found["embedding.weight"], tensors["embedding.weight"])


def test_rotary_scaling_is_megatrons(tmp_path: Path) -> None:
    shape = MODELS["llama"]
    tensors = tiny_models.random_tensors(shape)
    scalings = (
        ({"rotary_seq_len_interpolation_factor": 4}, RopeScaling("linear", 4.0)),
        ({"use_rope_scaling": True}, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
    )
    for number, (stated, scaling) in enumerate(scalings):
        root = megatron_folder(tmp_path / str(number), shape, tensors, **stated)
        assert read(root).model.rope_scaling == scaling


def test_files_that_do_not_belong_together_are_refused(small: Path, tmp_path: Path) -> None:
    """Faults missing-file, missing-tensors: a missing rank or tensor, another iteration, stages or ranks disagreeing on
    tensors held by both."""

    def refused(change: Callable[[dict[str, Any]], Any], words: str) -> None:
        path = small / "iter_0000012" / "mp_rank_01_001" / FILE
        old = path.read_bytes()
        rewrite(path, change)
        with pytest.raises(CheckpointError, match=words):
            imported(small)
        path.write_bytes(old)

    norm, matrix = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"
    refused(lambda state: state["model"][norm].add_(1e-3), "different values of norm.weight")
    refused(lambda state: state.update(iteration=13), "different iterations")
    refused(lambda state: state["model"].pop(matrix), "hold different names")
    refused(lambda state: state["model"].update(adapter=torch.ones(2)), "holds adapter")
    refused(lambda state: state["model"].update({matrix: state["model"][matrix][:-2]}), "mlp.(gate|up).weight")
    refused(lambda state: state["model"].update({matrix: state["model"][matrix].double()}), "float64")
    (small / "iter_0000012" / "mp_rank_01_001" / FILE).rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="tensor rank 1 of pipeline rank 1"):
        read(small)
    (small / TRACKER).write_text("../../elsewhere")
    with pytest.raises(CheckpointError, match="neither an iteration nor `release`"):
        read(small)


@pytest.mark.parametrize("name", ["decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, small: Path, tmp_path: Path) -> None:
    """Fault non-finite-weights: one whole on all tensor ranks, and one dealt over them."""
    rewrite(small / "iter_0000012" / "mp_rank_01_001" / FILE, lambda state: state["model"][name][3:].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"(norm|mlp\.(gate|up))\.weight: holds NaN"):
        convert_checkpoint.megatron_to_native(MegatronToNative(small, tmp_path / "native"))
    assert not (tmp_path / "native").exists()


def test_tied_ends_that_have_drifted_apart_are_refused(tmp_path: Path) -> None:
    shape = MODELS["gpt"]
    root = megatron_folder(tmp_path / "m", shape, tiny_models.random_tensors(shape), pp=2, attention_backend=None)
    imported(root)
    last = root / "iter_0000012" / "mp_rank_00_001" / FILE
    rewrite(last, lambda state: state["model"]["output_layer.weight"][3].add_(1e-3))
    with pytest.raises(CheckpointError, match="the last stage's embedding differs"):
        imported(root)
