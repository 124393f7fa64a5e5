"""Mixtures of experts and latent attention in Megatron-Core's `args`: the models of ours that compute the same.

The names and defaults are those of Megatron Core 0.16.1 and of Megatron-LM main in August 2026. What both parts leave
of the args, `megatron.model_of` reads.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from megapar.base.errors import CheckpointError
from megapar.config.model_options import ModelConfig
from megapar_models.convert import megatron
from megapar_models.families.deepseek import LATENT_EPS
from megapar_models.registry import FAMILIES
from megapar_models.rotary import RopeScaling

# Args of mixtures that make a model compute what ours do not, with the values that leave them off.
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_input_jitter_eps": (None, 0.0),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_n_hash_layers": (None, 0),
    "moe_router_force_biased": (None,),
    "moe_router_quantile_balancing_ema": (None, 0.0),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_topk_limited_devices": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_token_dropping": (None, False),
    "moe_use_upcycling": (None, False),
}
_READ = frozenset(
    (
        *("moe_aux_loss_coeff", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_bias_update_rate"),
        *("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_load_balancing_type"),
        *("moe_router_num_groups", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk"),
        *("moe_router_topk_scaling_factor", "moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
        "moe_z_loss_coeff",
    )
)
# Those about kernels, the transport of tokens, precision of the router, memory, and logging.
_HARMLESS = re.compile(
    r"moe_(deepep|flex_dispatcher|hybridep|ncclep|paged_stash|pad_expert|permute_fusion|router_padding_for"
    r"|single_grouped|token_dispatcher)\w*"
    r"|moe_(combine_bwd_dtype|dispatch_fwd_dtype|enable_deepep|enable_routing_replay|extended_tp|grouped_gemm"
    r"|layer_recompute|per_layer_logging|router_dtype|router_fusion|shared_expert_overlap|token_drop_policy"
    r"|upcycling_granularity|use_device_initiated_grouped_gemm|use_grouped_tensor|use_legacy_grouped_gemm)"
)
_BALANCES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def model_of(args: Mapping[str, Any], vocab_size: int, folder: Path, accepted: Collection[str] = ()) -> ModelConfig:
    """The model of Megatron-Core's `args`, as `megatron.model_of`, also with experts and with latent attention.

    Raises CheckpointError for refused or missing args, and for models that none of our families computes.
    """
    mixture, latent = bool(args.get("num_experts")), bool(args.get("multi_latent_attention"))
    if not mixture and not latent:
        return megatron.model_of(args, vocab_size, folder, accepted)
    if not args.get("swiglu"):
        raise CheckpointError(f"{folder}: args.swiglu is off: a mixture or latent attention is read with it alone")
    if latent and not mixture:
        raise CheckpointError(f"{folder}: args.multi_latent_attention without args.num_experts: not supported")
    moe, dense_layers = _mixture(args, folder, accepted)
    left = {name: value for name, value in args.items() if name not in ("num_experts", "multi_latent_attention")}
    if latent:
        # Ours has norms of its latents in any case, and no rotary tables of the base model.
        left |= {"qk_layernorm": False, "kv_channels": None, "group_query_attention": False}
    plain = megatron.model_of(left, vocab_size, folder, accepted)
    shared = {field.name: getattr(plain, field.name) for field in fields(plain) if field.name not in ("family", "moe")}
    if latent:
        return _with_latents(args, folder, shared, moe, dense_layers)
    name = "mixtral"
    if shared["qk_norm"] or shared["attention_bias"] or dense_layers or moe["shared_expert_gate"]:
        name, moe["mlp_only_layers"] = "qwen3_moe", tuple(dense_layers)
    if moe["n_group"] > 1:
        raise CheckpointError(f"{folder}: args.moe_router_group_topk is read with args.multi_latent_attention alone")
    return _made(name, shared, moe)


def _made(name: str, shared: Mapping[str, Any], moe: Mapping[str, Any], **others: Any) -> ModelConfig:
    """A model of the family `name`, which has those of the `shared` options that it knows."""
    options: Any = FAMILIES[name].options
    values = {option: value for option, value in shared.items() if option in options.__dataclass_fields__}
    made = options(family=name, **values | others)
    return cast(ModelConfig, replace(made, moe=replace(made.moe, **moe)))


def _mixture(args: Mapping[str, Any], folder: Path, accepted: Collection[str]) -> tuple[dict[str, Any], list[int]]:
    """The options of model.moe, and the layers without experts."""
    for field, value in args.items():
        if field in _UNUSED and value not in _UNUSED[field]:
            raise CheckpointError(f"{folder}: args.{field} is {value!r}: not supported")
        known = field in _UNUSED or field in _READ or _HARMLESS.fullmatch(field) or field in accepted
        if field.startswith("moe_") and value and not known:
            text = (
                f"this option is not known; if it does not change what the model computes, give --accept_args {field}"
            )
            raise CheckpointError(f"{folder}: args.{field} is {value!r}: {text}")
    chosen = _number(args, folder, "moe_router_topk", 2)
    score = args.get("moe_router_score_function") or "softmax"
    if score not in ("softmax", "sigmoid"):
        raise CheckpointError(f"{folder}: args.moe_router_score_function is {score!r}: softmax and sigmoid are read")
    # Softmax of the chosen logits alone is that of all, divided by its sum over the chosen ones.
    normed = chosen > 1 if score == "sigmoid" else not args.get("moe_router_pre_softmax")
    groups, of_groups = args.get("moe_router_num_groups") or 1, args.get("moe_router_group_topk") or 0
    if of_groups:
        best = chosen // of_groups
        if (score, best) not in (("sigmoid", 2), ("softmax", 1)) or (score == "softmax" and normed):
            text = "a group's score is read as its two best sigmoids, or as its best of softmax over all experts"
            raise CheckpointError(
                f"{folder}: args.moe_router_group_topk is {of_groups} with args.moe_router_topk {chosen}: {text}"
            )
    balance, weight = _balance(args, folder)
    moe = {
        "num_experts": _number(args, folder, "num_experts", 0),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": _number(args, folder, "moe_ffn_hidden_size", args.get("ffn_hidden_size")),
        "scoring_func": score,
        "norm_topk_prob": normed,
        "routed_scaling_factor": float(args.get("moe_router_topk_scaling_factor") or 1.0),
        "n_group": groups if of_groups else 1,
        "topk_group": of_groups or 1,
        "shared_expert_intermediate_size": args.get("moe_shared_expert_intermediate_size") or 0,
        "shared_expert_gate": bool(args.get("moe_shared_expert_gate")),
        "balance": balance,
        "router_z_loss_coef": float(args.get("moe_z_loss_coeff") or 0.0),
    }
    if balance in ("sequence", "global", "bias+sequence"):
        moe["router_aux_loss_coef"] = weight
    if balance.startswith("bias"):
        moe["router_bias_update_rate"] = float(args.get("moe_router_bias_update_rate") or 0.0)
    return moe, _dense_layers(args, folder)


def _balance(args: Mapping[str, Any], folder: Path) -> tuple[str, float]:
    """(model.moe.balance, the weight of its loss). Ours is the nearest: this is an option of training."""
    kinds, weights = args.get("moe_router_load_balancing_type") or "aux_loss", args.get("moe_aux_loss_coeff") or 0.0
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(kinds)
    for kind in kinds:
        if kind not in _BALANCES:
            text = f"{', '.join(_BALANCES)} are read"
            raise CheckpointError(f"{folder}: args.moe_router_load_balancing_type is {kind!r}: {text}")
    lost = {kind: float(weight) for kind, weight in zip(kinds, weights, strict=False) if kind != "none" and weight}
    by_sample = "seq_aux_loss" in lost
    weight = lost.get("seq_aux_loss", next(iter(lost.values()), 0.0))
    if args.get("moe_router_enable_expert_bias"):
        return ("bias+sequence" if by_sample else "bias"), weight
    if not lost:
        return "none", weight
    return ("sequence" if by_sample else "global"), weight


def _dense_layers(args: Mapping[str, Any], folder: Path) -> list[int]:
    """The layers without experts. With moe_layer_freq n, layers 0, n, 2n ... have experts."""
    frequency, layers = args.get("moe_layer_freq"), _number(args, folder, "num_layers", 0)
    frequency = 1 if frequency is None else frequency
    if type(frequency) is int and frequency > 0:
        return [layer for layer in range(layers) if layer % frequency]
    if isinstance(frequency, (list, tuple)) and len(frequency) == layers and all(n in (0, 1) for n in frequency):
        return [layer for layer, has_experts in enumerate(frequency) if not has_experts]
    raise CheckpointError(f"{folder}: args.moe_layer_freq is {frequency!r}: should be a number, or {layers} of 0 and 1")


def _with_latents(
    args: Mapping[str, Any], folder: Path, shared: dict[str, Any], moe: dict[str, Any], dense_layers: list[int]
) -> ModelConfig:
    """A model of the family deepseek."""
    if dense_layers != list(range(len(dense_layers))):
        raise CheckpointError(
            f"{folder}: args.moe_layer_freq with args.multi_latent_attention: dense layers must be the first"
        )
    if not args.get("qk_layernorm"):
        raise CheckpointError(f"{folder}: args.qk_layernorm is off: latents of ours have norms")
    if shared["rms_norm_eps"] != LATENT_EPS:
        text = f"norms of latents have {LATENT_EPS} here"
        raise CheckpointError(f"{folder}: args.norm_epsilon is {shared['rms_norm_eps']}: {text}")
    for field in ("add_qkv_bias", "moe_shared_expert_gate", "use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if args.get(field):
            raise CheckpointError(f"{folder}: args.{field} with args.multi_latent_attention: not supported")
    moe["first_k_dense_replace"] = len(dense_layers)
    q_rank, kv_rank, nope, rotated, value = (args.get(name) for name in _LATENT)
    for name, number in zip(_LATENT[1:], (kv_rank, nope, rotated, value), strict=True):
        if type(number) is not int:
            raise CheckpointError(f"{folder}: args.{name} is {number!r}: must be a number")
    return _made(
        "deepseek",
        shared,
        moe,
        head_dim=rotated,
        num_key_value_heads=shared["num_attention_heads"],
        q_lora_rank=q_rank or 0,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        v_head_dim=value,
        rope_scaling=_latent_scaling(args, folder),
    )


def _latent_scaling(args: Mapping[str, Any], folder: Path) -> RopeScaling:
    """The scaling of rotary positions of latent attention: none or YaRN's."""
    kind, factor = args.get("rope_type") or "yarn", float(args.get("rotary_scaling_factor") or 1.0)
    all_dim = float(args.get("mscale_all_dim") or 0.0)
    if kind == "rope" and factor > 1 and all_dim:
        text = "stretches scores without stretching positions"
        raise CheckpointError(f"{folder}: args.mscale_all_dim with args.rope_type rope: {text}: not supported")
    if kind not in ("rope", "yarn"):
        raise CheckpointError(f"{folder}: args.rope_type is {kind!r}: rope and yarn are read")
    if kind == "rope" or factor <= 1:
        return RopeScaling()
    mscale = 1.0 if args.get("mscale") is None else float(args["mscale"])
    stretched: dict[str, Any] = {"mscale": mscale, "mscale_all_dim": all_dim}
    if not mscale or not all_dim:  # ours takes both or neither
        over, under = (1 + 0.1 * number * math.log(factor) for number in (mscale, all_dim))
        stretched = {"attention_factor": over / under}
        if all_dim:
            raise CheckpointError(f"{folder}: args.mscale is 0 with args.mscale_all_dim {all_dim}: not supported")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=args.get("original_max_position_embeddings") or 4096,
        beta_fast=float(args.get("beta_fast") or 32.0),
        beta_slow=float(args.get("beta_slow") or 1.0),
        truncate=args.get("yarn_correction_range_round_to_int", True) is not False,
        **stretched,
    )


def _number(args: Mapping[str, Any], folder: Path, field: str, default: Any) -> int:
    value = args.get(field)
    value = default if value is None else value
    if type(value) is not int:
        raise CheckpointError(f"{folder}: args.{field} is {value!r}: must be a whole number")
    return value
