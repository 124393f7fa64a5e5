"""Small models of all causal model types of transformers, whether we have the type or not: for docs/survey.md.

Sizes of a small model are chosen by the names of fields alone, so a type that we have not seen mostly needs nothing
here.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from megapar_models.convert.multimodal import MULTIMODAL
from megapar_models.convert.saved import load_model
from megapar_tools.verify import logical

from megapar.base.errors import CheckpointError, ConfigError
from megapar.declare import context
from tests.support import close
from tests.support.drafts import outcome_of_draft, sketch_of
from tests.support.published import VOCABULARY, assert_equal_logits, random_batch, random_model
from tests.support.rules import gradients
from tools.convert_checkpoint import HfToNative, hf_to_native
from tools.new_family import nearest, read_shapes

# Fields by the spellings of all config classes. Sizes differ from each other, and an eps shows.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_dim"), 48),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "dff", "dim_ff"), 76),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), 1e-3),
    **dict.fromkeys(("norm_epsilon", "layer_norm_rms_epsilon"), 1e-3),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "kv_channels", "index_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 7),
    **{"pad_token_id": None, "use_cache": False, "logit_scale": 0.5, "attention_multiplier": 0.25},
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 28),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 28),
    **{"n_group": 1, "num_expert_group": 1, "topk_group": 1, "zero_expert_num": 2, "router_hidden_size": 12},
    **{"first_k_dense_replace": 1, "moe_layer_start_index": 1, "mlp_only_layers": [0]},
    # Latents, the width of a head's parts, chosen keys, and streams by layer.
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"o_lora_rank": 12, "index_n_heads": 2, "index_topk": 8, "hidden_size_per_layer_input": 12, "laurel_rank": 8},
    # State-space mixers and convolutions.
    **{"rotary_dim": 8, "state_size": 8, "time_step_rank": 6, "dt_rank": 6, "mamba_d_state": 8, "mamba_dt_rank": 6},
    **{"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_num_heads": 6, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "mamba_chunk_size": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "block_size": 8},
}
# Latent attention has as many heads of keys as of queries, and the width of a head is that of its rotated part.
_LATENT = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}

# What these types need beside: a width that follows from others, or a field that their config class leaves empty.
_DELTA = {"linear_head_dim": 16, "linear_num_heads": 6, "rms_norm_eps": 1e-2}
_WINDOWED_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 20}
# With an eps of 1e-3 both programs are up to 1.5e-6 from fp64.
_WIDE_HEADS = {"per_layer_config": {"1": {"head_dim": 24}, "3": {"head_dim": 24}}, "rms_norm_eps": 3e-1}
_OF_BYTES = {"num_key_value_heads": 4, "head_dim": 12}
_OF_ALL_BYTES = {**_OF_BYTES, "hidden_size_global": 48}
_TABLE = {"rope_type": "default", "rope_theta": 1e4}
OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    # With an eps of 1e-3 the gradient of A_log in transformers is 1.2e-5 from fp64.
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _DELTA),
    "blt": {"encoder_hash_byte_group_vocab": 50},
    **dict.fromkeys(("blt_patcher", "blt_global_transformer"), _OF_BYTES),
    **dict.fromkeys(("blt_local_encoder", "blt_local_decoder"), _OF_ALL_BYTES),
    "cohere_compass_text": {"rope_parameters": {"full_attention": _TABLE, "sliding_attention": _TABLE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"ffn_hidden_size": 20}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": {"1": _WINDOWED_HEADS, "3": _WINDOWED_HEADS}},
    "emu3_text_model": {"pad_token_id": 0},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _WIDE_HEADS),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_neox": {"num_attention_heads": 3},  # a quarter of a head are pairs
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 6, 4, 6]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"ffn_hidden_size": 76},
    "mamba2": {"num_heads": 6, "head_dim": 16},
    "mimo_v2_flash": {"head_dim": 12},  # a third of a head are pairs
    "ministral": {"head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {"num_key_value_heads": 2},
    # Below it transformers lets no time step be smaller than this, which is no part of the model.
    "nemotron_h": {"time_step_min": 1e-30},
    # transformers divides the convolution's rows evenly when it saves a file, so q, k and v are equally wide.
    "olmo_hybrid": {"linear_num_value_heads": 2, "rms_norm_eps": 1e-2},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "hc_lowrank": 12},
        **{"indexer_compress_ratio": 4, "ple_embed_dim": 48, "ngram_vocab_size_base": 131, "output_gate_type": "silu"},
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 32]},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "zamba": {"attention_hidden_size": 96, "attention_head_dim": 24, "num_key_value_heads": 4},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 6, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


# The 25 model types, with their nearest relatives, that most commits of 14 open trainers named in their subjects from
# March to August 2026 (Megatron-LM, Megatron-Bridge, axolotl, LLaMA-Factory, ms-swift, verl, slime, prime-rl,
# torchtitan, TRL, NeMo's Automodel and RL, VeOmni, OLMo-core).
MOST_WORKED_ON: tuple[tuple[str, ...], ...] = (
    *(("qwen3_5", "qwen3_5_moe"), ("qwen3", "qwen3_moe"), ("nemotron_h",), ("gemma4",), ("deepseek_v4",)),
    *(("gpt_oss",), ("glm_moe_dsa", "glm5_next"), ("glm4_moe",), ("deepseek_v3",), ("deepseek_v32",)),
    *(("minimax_m2", "minimax_m3_vl_text"), ("llama",), ("gemma3_text",), ("step3p7",)),
    *(("mistral", "ministral3", "mistral4", "mistral_large4"), ("qwen3_next",), ("kimi_linear",)),
    *(("olmo3", "olmo_hybrid"), ("bailing_hybrid",), ("hy_v3", "hy_v4"), ("mimo_v2_flash",)),
    *(("ernie4_5", "ernie4_5_moe"), ("falcon_h1",), ("lfm2", "lfm2_moe", "lfm3"), ("granitemoehybrid",)),
)


def causal_types() -> list[str]:
    """The model types that transformers makes models for the next token of, by name."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="not run: needs transformers")
    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_fields(model_type: str) -> dict[str, Any]:
    """The fields of a config.json with the defaults of its config class."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    fields: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    return fields


def small_fields(model_type: str) -> dict[str, Any]:
    """The fields of a small model of this type."""
    return _smaller(default_fields(model_type), model_type)


def _smaller(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Those of SIZES that a config class has, a part of each list of layers with all their kinds, and OF_TYPE."""
    known = {name: value for name, value in SIZES.items() if fields.get(name) is not None or name == "pad_token_id"}
    known |= {name: 0.0 for name, value in fields.items() if "drop" in name and isinstance(value, float)}
    if "qk_rope_head_dim" in fields:
        known |= {name: value for name, value in _LATENT.items() if name in known}
    layers = next((fields[name] for name in _LAYERS if name in fields), 0)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == layers and name not in known:
            known[name] = _shortened(value)
        if isinstance(value, dict) and "model_type" in value:
            known[name] = _smaller(value, value["model_type"])
    return {**known, **OF_TYPE.get(model_type, {})}


def _shortened(layers: list[Any]) -> list[Any]:
    """All kinds of layers in a list of 4: in turn, or the last kind from its first layer on if kinds are not mixed."""
    kinds = [*dict.fromkeys(layers)]
    mixed = len([*groupby(layers)]) > len(kinds)
    numbers = range(SIZES[_LAYERS[0]])
    return [kinds[number % len(kinds) if mixed else min(number, len(kinds) - 1)] for number in numbers]


def save_noisy(folder: Path, model_type: str, fields: Mapping[str, Any] | None = None) -> Any:
    """Save a small model of transformers with noise on every tensor; returns it. Routers choose by noise too."""
    torch.manual_seed(0)  # biases and decays start from what transformers draws
    model = random_model(model_type, {**small_fields(model_type), **(fields or {})})
    model.save_pretrained(folder)
    return model


Result = Literal["trains", "refused", "WRONG", "no text"]


class Outcome(NamedTuple):
    """What becomes of a model type here."""

    result: Result
    why: str = ""


# Model types whose config does not say that they are no decoders of text alone.
NOT_OF_TEXT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts tokens from the hidden states of another model"
    ),
    "trocr": "the decoder of an encoder-decoder that reads images",
    "xlm": "an encoder; `causal` makes a decoder of it",
    "xlnet": "predicts tokens in a random order, with two streams",
}


def not_of_text(model_type: str) -> str:
    """Why a model type is no decoder of text alone; "" if it is one. A type with a text_config is one."""
    if model_type in NOT_OF_TEXT:
        return NOT_OF_TEXT[model_type]
    fields = default_fields(model_type)
    if fields["is_encoder_decoder"]:
        return "the decoder of an encoder-decoder"
    if fields.keys() >= {"is_decoder", "add_cross_attention"}:
        return "an encoder; `is_decoder` makes a decoder of it"
    if "text_config" not in fields and (other := fields.keys() & {"vision_config", "audio_encoder_config"}):
        return f"text with {'images' if 'vision_config' in other else 'sound'}, and without a text_config"
    return ""


def text_type(model_type: str) -> str:
    """The model type of the text of a composite one, else itself."""
    text = default_fields(model_type).get("text_config")
    return text["model_type"] if isinstance(text, dict) else model_type


def outcome(model_type: str, folder: Path) -> Outcome:
    """What becomes of a model type. A composite one counts as its text; `folder` is for files."""
    if why := not_of_text(model_type):
        return Outcome("no text", why)
    text = text_type(model_type)
    found = outcome_of_text(text if text in causal_types() else model_type, folder)
    if text == model_type:
        return found
    alone = found.result == "trains" and model_type not in MULTIMODAL
    lacking = "; files of the text alone are read, and those of all parts are not" if alone else ""
    return found._replace(why=f"its text is `{text}`: {found.why}{lacking}")


def outcome_of_text(model_type: str, folder: Path) -> Outcome:
    """Convert a small random model in `folder`, and compare logits, loss and every gradient with transformers."""
    theirs = save_noisy(folder / "theirs", model_type)
    with torch.no_grad():
        assert theirs(random_batch().tokens_bs).logits.isfinite().all(), "transformers cannot judge"
    try:
        hf_to_native(HfToNative(folder / "theirs", folder / "ours", verify=False))
    except (ConfigError, CheckpointError) as error:
        return Outcome("refused", reason(folder, error))
    try:
        compare(theirs, folder)
    except AssertionError as error:
        return Outcome("WRONG", str(error).partition("\n")[0])
    return Outcome("trains", f"family `{load_model(folder / 'ours')[0].model.family}`")


def compare(theirs: Any, folder: Path) -> None:
    """Raise AssertionError unless the model in folder/ours computes what `theirs` does. Changes the weights of both."""
    _, stage = load_model(folder / "ours")
    batch = random_batch()
    expected_bsv = theirs(batch.tokens_bs).logits
    assert expected_bsv.std() > 0.1, "logits too small to compare"
    assert_equal_logits(stage, batch, expected_bsv.detach())
    losses = F.cross_entropy(expected_bsv.flatten(0, 1), batch.targets_bs.flatten(), reduction="none")
    expected = (losses * batch.weights_bs.flatten()).sum()
    expected.backward()
    loss = stage(None, batch)  # in evaluation mode: no loss that balances experts
    loss.backward()
    assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item(), f"loss {loss.item()}, theirs {expected.item()}"
    # Gradients take the way of the weights.
    with torch.no_grad():
        for param in theirs.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    theirs.save_pretrained(folder / "gradients")
    hf_to_native(HfToNative(folder / "gradients", folder / "ours_gradients", verify=False))
    _, wanted = load_model(folder / "ours_gradients")
    close.assert_close(gradients(stage), logical.assemble([logical.held([wanted], context.single())]))


def reason(folder: Path, error: Exception) -> str:
    """Why the model in folder/theirs is refused, in words."""
    if not re.search(r"model_type='\S+' is not supported", str(error)):
        return str(error).replace("\n", "; ").replace("config.json: ", "")
    source = folder / "theirs"
    found, drafted = sketch_of(source), outcome_of_draft(source, folder)
    near = nearest(found.raw, read_shapes(source)).model_type
    if drafted == "trains":
        why = "the draft of `megapar new-family` trains as it is"
    elif found.missing:
        why = f"no rule for {_words(found.missing)}"
    elif found.decide:
        why = f"a person must decide: {_words(found.decide)}"
    elif found.unknown:
        why = f"nobody here knows {', '.join(line.partition('=')[0] for line in found.unknown)}"
    elif "logits differ" in drafted:
        why = "the draft computes something else, which fields and tensors do not say"
    else:
        why = drafted.removeprefix(f"{source}: ")
    return f"no family, the nearest is that of `{near}`; {why}"


def _words(lines: list[str]) -> str:
    """What lines of a sketch ask for, each once. If they have no words, some tensors that nobody knows."""
    bare = re.compile(r"; family \w+ has .*| \((?:modules|layouts|always|layer_kind|.*,.*)\)\??$")
    said = [*dict.fromkeys(bare.sub("", line.rpartition(": ")[2]) for line in lines)]
    words = ", ".join(word for word in said if word != "no module of ours")
    unknown = [line.removeprefix("tensors ").rpartition(": ")[0].rpartition("*.")[2] for line in lines]
    return words or ", ".join(f"`{name}`" for name in unknown[:3])
