"""Small models of 70 model types of transformers, whether we have the type or not: for docs/survey.md and its tests.

Their sizes are chosen by the names of fields alone, so a type that we have not seen mostly needs nothing here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from megapar_models.convert.saved import load_model
from megapar_tools.verify import logical

from megapar.base.errors import CheckpointError, ConfigError
from megapar.declare import context
from tests.support import close
from tests.support.drafts import outcome_of_draft, sketch_of
from tests.support.published import VOCABULARY, assert_equal_logits, random_batch, random_model
from tests.support.rules import gradients
from tools.convert_checkpoint import HfToNative, hf_to_native

# Model types of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES that two other programs serve: vLLM (its registry of text models at
# commit 0002bff) and mlx-lm (commit d78bf58). Both add a type when people ask for it.
SERVED_BY_BOTH = (
    *("afmoe", "apertus", "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid"),
    *("hunyuan_v1_dense", "internlm3", "iquestcoder", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "llama"),
    *("llama4_text", "longcat_flash", "mamba", "mamba2", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2"),
    *("mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "stablelm", "starcoder2"),
)
# Eight of the 34 that one of the two serves, by hand.
SERVED_BY_ONE = ("arcee", "bloom", "falcon", "glm4_moe_lite", "gptj", "ministral3", "opt", "smollm3")
SURVEYED = tuple(sorted((*SERVED_BY_BOTH, *SERVED_BY_ONE)))

# Fields by the spellings of all config classes. Sizes differ from each other, and an eps shows.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), 76),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), 1e-3),
    **dict.fromkeys(("norm_epsilon", "layer_norm_rms_epsilon"), 1e-3),
    **{"vocab_size": VOCABULARY, "head_dim": 16, "sliding_window": 7},
    **{"pad_token_id": None, "use_cache": False, "logit_scale": 0.5, "attention_multiplier": 0.25},
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 28),
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1},
    # Latents, and the width of a head's parts.
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    # State-space mixers and convolutions.
    **{"rotary_dim": 8, "state_size": 8, "time_step_rank": 6, "dt_rank": 6, "mamba_d_state": 8, "mamba_dt_rank": 6},
    **{"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_num_heads": 6, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "mamba_chunk_size": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "block_size": 8},
}

# What these types need beside: a width that follows from others, or a field that their config class leaves empty.
_LATENT = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash"), _LATENT),
    **dict.fromkeys(("minicpm3", "youtu", "axk1"), _LATENT),
    "mistral4": {**_LATENT, "head_dim": SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]},
    "kimi_linear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 6, "rms_norm_eps": 1e-2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "helium": {"head_dim": 12},
    "gpt_neox": {"num_attention_heads": 3},  # a quarter of a head are pairs
    "nemotron": {"num_key_value_heads": 2},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 6, "head_dim": 16},
    # Below it transformers lets no time step be smaller than this, which is no part of the model.
    "nemotron_h": {"time_step_min": 1e-30},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"ffn_hidden_size": 20}},
}


def small_fields(model_type: str) -> dict[str, Any]:
    """The fields of a small model of this type: those of SIZES that its config class has."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    fields = transformers.AutoConfig.for_model(model_type).to_dict()
    known = {name: value for name, value in SIZES.items() if fields.get(name) is not None or name == "pad_token_id"}
    known |= {name: 0.0 for name, value in fields.items() if "drop" in name and isinstance(value, float)}
    return {**known, **OF_TYPE.get(model_type, {})}


def save_noisy(folder: Path, model_type: str, fields: Mapping[str, Any] | None = None) -> Any:
    """Save a small model of transformers with noise on every tensor; returns it. Routers choose by noise too."""
    model = random_model(model_type, {**small_fields(model_type), **(fields or {})})
    model.save_pretrained(folder)
    return model


class Outcome(NamedTuple):
    """What becomes of a model type here."""

    result: Literal["trains", "refused", "WRONG"]
    why: str = ""


def outcome(model_type: str, folder: Path) -> Outcome:
    """Convert a small random model in `folder`, and compare logits, loss and every gradient with transformers."""
    theirs = save_noisy(folder / "theirs", model_type)
    try:
        hf_to_native(HfToNative(folder / "theirs", folder / "ours", verify=False))
    except (ConfigError, CheckpointError) as error:
        return Outcome("refused", reason(model_type, folder, error))
    try:
        compare(theirs, folder)
    except AssertionError as error:
        return Outcome("WRONG", str(error).partition("\n")[0])
    return Outcome("trains")


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


def reason(model_type: str, folder: Path, error: Exception) -> str:
    """Why the model in folder/theirs is refused, in words."""
    if f"model_type={model_type!r} is not supported" not in str(error):
        return str(error).replace("\n", "; ").replace("config.json: ", "")
    if outcome_of_draft(folder / "theirs", folder) == "trains":
        return "no family; the draft of `megapar new-family` trains as it is"
    missing = [line.rpartition(": ")[2] for line in sketch_of(folder / "theirs").missing]
    words = dict.fromkeys(line for line in missing if line != "no module of ours")
    return f"no family, and no rule for {', '.join(words)}" if words else "no family; a person must write it"
