"""Native checkpoints as Megatron-Core's `torch_dist` folders, from which Megatron-LM goes on in any layout.

    target/latest_checkpointed_iteration.txt
    target/iter_0001200/metadata.json, .metadata, __0_N.distcp       weights, fp32 main weights, both moments
                        common.pt                                    args, counts, the optimizer's groups, its rates

The states have Megatron's form fully_reshardable: names of parameters, no ranks. Where all layers are alike, a tensor
has all of them on its first axis, written in one chunk a layer (and expert). Rows of the vocabulary are not padded:
Megatron-Core takes fewer rows than it pads to (`allow_shape_mismatch`), and keeps what it has for the rest.

A user of Megatron-LM gives the model's options (--use-checkpoint-args takes most of them from the folder) and

    --load TARGET --ckpt-format torch_dist --use-distributed-optimizer
    --use-checkpoint-opt_param-scheduler       the rates of the checkpoint (`_rates`); to give others by flags,
                                               --override-opt_param-scheduler in its place

Objects `_extra_state`, which Megatron-Core asks of every module, are empty, as they are without fp8. Random states are
not in the folder, which the args say (no_save_rng), so --no-load-rng is not needed. Where names depend on the layers,
they are those of Transformer Engine's, the default: with --transformer-impl local neither mixtures nor latent attention
load. With --vocab-file Megatron-LM compares the type of the tokenizer, which no native checkpoint has in its words, and
refuses; with --tokenizer-model it compares none. A mixture has one optimizer, or with --expert-model-parallel-size
above 1 two, and common.pt has the form of one of both (`expert_parallel`): Megatron-Core loads neither from the other.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.lengths import Lengths
from megapar.config.messages import first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import flatten
from megapar.config.rate_schedules import find_rate_schedule
from megapar.declare.params import MAIN, Box, Sizes
from megapar.declare.sharding import model_dtype
from megapar.system.atomic_files import replace_file
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, StoredAt
from megapar_models.convert.formats.dcp_target import TensorPiece, meta, write_dcp
from megapar_models.convert.formats.megatron_names import megatron_recipes, stored_names
from megapar_models.convert.formats.torch_export import Advance, NativeSource
from megapar_models.convert.huggingface import their_tensor
from megapar_models.convert.megatron import METADATA, TRACKER
from megapar_models.convert.megatron_experts import model_of
from megapar_models.convert.recipes import Recipe
from megapar_models.convert.saved import whole_config
from megapar_models.convert.stream import new_folder
from megapar_models.registry import FAMILIES

COMMON = "common.pt"
FORM = "fully_reshardable"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_STATES = {MAIN: "param", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}
_DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "inverse_sqrt": "inverse-square-root",
    "wsd": "WSD",
}
# Losses of experts' loads by model.moe.balance. Megatron's aux_loss takes the load of a micro-batch, where ours takes
# that of the step before.
_LOSSES = {"global": "aux_loss", "sequence": "seq_aux_loss", "bias+sequence": "seq_aux_loss"}
_IN_FP32 = "router.expert_bias"
_FAMILIES = ("llama", "gpt", "mixtral", "qwen3_moe", "deepseek")  # those that `model_of` makes of args
_HYSTERESIS = 2  # overflows in a row until Megatron-LM lowers the scale of the loss, by default


def export_megatron(
    source: Path,
    target: Path,
    *,
    family: str = "",
    moments: bool = True,
    expert_parallel: bool = False,
    advance: Advance = lambda values: values,
) -> None:
    """Write the native checkpoint `source` to `target`, a folder of Megatron-LM's checkpoints with this iteration.

    The folder appears complete or not at all. Weights have the dtype of the training, states and the biases that select
    experts fp32. `expert_parallel`: experts have an optimizer of their own, as over several expert-parallel ranks.
    Raises CheckpointError if the source is damaged, if another optimizer than AdamW has trained it, or if
    Megatron-Core's GPT model does not compute the model, ConfigError if the target exists or if there are no experts to
    be parallel, and StorageError if it cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists; name a folder that does not, nothing is overwritten")
    found = NativeSource(source, family)
    if expert_parallel and not found.model.num_experts:
        raise ConfigError(f"--expert_parallel: {source} is of a model without experts: leave it out")
    trained = moments and any(state in found.manifest.states for state in (EXP_AVG, EXP_AVG_SQ))
    if moments and found.manifest.states:
        _check_trained(found)
    common = _common(found, trained=trained, expert_parallel=expert_parallel)
    state, pieces = _tensors(found, trained=trained)

    def finish(folder: Path) -> None:
        replace_file(folder / METADATA, json.dumps(_BACKEND).encode(), sync=True)
        written = BytesIO()
        torch.save(common, written)
        replace_file(folder / COMMON, written.getvalue(), sync=True)

    with new_folder(target, 0) as folder:
        write_dcp(folder / f"iter_{found.manifest.step:07d}", state, pieces, advance=advance, finish=finish)
        replace_file(folder / TRACKER, str(found.manifest.step).encode(), sync=True)


def _check_trained(source: NativeSource) -> None:
    """Raise CheckpointError if Megatron-LM's optimizer and its scheduler cannot go on where the training stood."""
    path, options = source.path, source.config.optimizer
    alone = "and with --weights_only the weights alone"
    if others := {declared["optimizer"] for declared in source.manifest.states.values()} - {"adamw"}:
        text = f"was trained by {', '.join(sorted(others))} too; of Megatron-Core AdamW's states are written"
        raise CheckpointError(f"{path}: {text}, {alone}")
    if options.groups:
        text = "Megatron-LM's flags have no rates of single tensors; --weights_only exports the weights"
        raise CheckpointError(f"{path}: optimizer.groups={list(options.groups)}: {text}")
    if options.schedule not in _DECAYS:
        text = f"Megatron-LM's rates fall by {', '.join(_DECAYS)}; these are written, {alone}"
        raise CheckpointError(f"{path}: optimizer.schedule={options.schedule}: {text}")


def _tensors(source: NativeSource, *, trained: bool) -> tuple[dict[str, Any], dict[str, list[TensorPiece]]]:
    """Shape and dtype of each stored tensor by its name, and its pieces. Modules have empty `_extra_state`."""
    wanted = megatron_recipes(source.model)
    places = stored_names(wanted)
    dtype = model_dtype(source.config.train.precision)
    kinds = [("", MAIN, dtype)]
    if trained:
        kinds += [(f"optimizer.state.{theirs}.", ours, torch.float32) for ours, theirs in _STATES.items()]
    state: dict[str, Any] = {}
    pieces: dict[str, list[TensorPiece]] = {}
    for prefix, ours, of_kind in kinds:
        for key, members in _grouped(wanted, places).items():
            # The bias that selects experts is no parameter.
            if prefix and not all(source.has_state(EXP_AVG, wanted[name]) for name, _ in members):
                continue
            kept = torch.float32 if key.endswith(_IN_FP32) else of_kind
            state[f"{prefix}{key}"] = meta(_shape(wanted, members), kept)
            pieces[f"{prefix}{key}"] = [
                TensorPiece(_box(leading, wanted[name].shape), partial(_make, source, wanted[name], ours, kept))
                for name, leading in members
            ]
            if not prefix:
                state |= _extra_states(key, [leading for _, leading in members])
    return state, pieces


def _extra_states(key: str, numbers: Sequence[tuple[int, ...]]) -> dict[str, list[None]]:
    """What Megatron-Core keeps of a module beside its tensors, for each layer (and expert): nothing without fp8."""
    module = key.rpartition(".")[0]
    modules = [module]
    if module.endswith("self_attention.linear_proj"):
        modules.append(module.replace("linear_proj", "core_attention"))
    shape = ".".join(str(max(axis) + 1) for axis in zip(*numbers, strict=True)) or "1"
    at = [".".join(map(str, leading)) or "0" for leading in numbers]
    return {f"{each}._extra_state/shard_{number}_{shape}": [None] for each in modules for number in at}


def _grouped(
    wanted: Mapping[str, Recipe], places: Mapping[str, StoredAt]
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The tensors with numbers in each stored one, and their numbers."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name in wanted:
        at = places[name]
        found.setdefault(at.name, []).append((name, at.leading))
    return found


def _shape(wanted: Mapping[str, Recipe], members: Sequence[tuple[str, tuple[int, ...]]]) -> Sizes:
    numbers = [leading for _, leading in members]
    return (*(max(axis) + 1 for axis in zip(*numbers, strict=True)), *wanted[members[0][0]].shape)


def _box(leading: tuple[int, ...], shape: Sizes) -> Box:
    return Box((*leading, *(0 for _ in shape)), (*(1 for _ in leading), *shape))


def _make(source: NativeSource, recipe: Recipe, state: str, dtype: torch.dtype) -> Tensor:
    return their_tensor(source.path, source.manifest, recipe, dtype, state)


def args_of(model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Megatron's args of a model. Raises CheckpointError, with the options, if they do not describe it whole."""
    if model.family not in _FAMILIES:
        text = f"Megatron-Core's GPT model computes {', '.join(_FAMILIES)}"
        raise CheckpointError(f"{folder}: model.family={model.family}: {text}")
    options = flatten(whole_config(model).model)
    args = _args_of_layers(model, options)
    if model.num_experts:
        args |= _args_of_experts(model, options)
    if options.get("kv_lora_rank"):
        args |= _args_of_latents(options)
    read = flatten(whole_config(model_of(args, 0, folder)).model)
    plain = flatten(type(model)())
    different = [
        f"model.{name}={options[name]!r}"
        for name in sorted(options)
        if options[name] != read.get(name, plain[name]) and name not in _OF_TRAINING
    ]
    if different:
        raise CheckpointError(f"{folder}: Megatron-Core's GPT model does not compute {first_few(different)}")
    return args


# What `model_of` does not read of args, or reads into the nearest option.
_OF_TRAINING = (
    *("family", "initializer_range", "attention_dropout", "hidden_dropout"),
    *("moe.router_aux_loss_coef", "moe.router_bias_update_rate"),
)


def _args_of_layers(model: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The args of attention, norms, positions and dense MLPs."""
    swiglu = options["hidden_act"] == "silu"
    described = FAMILIES[model.family].megatron or FAMILIES["llama"].megatron
    assert described is not None
    args: dict[str, Any] = {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": options["num_key_value_heads"] != model.num_attention_heads,
        "num_query_groups": options["num_key_value_heads"],
        "kv_channels": options["head_dim"],
        "ffn_hidden_size": options["intermediate_size"],
        "swiglu": swiglu,
        "squared_relu": options["hidden_act"] == "relu2",
        "bias_gelu_fusion": options["hidden_act"] == "gelu_pytorch_tanh",
        "normalization": described.normalization,
        "norm_epsilon": model.rms_norm_eps,
        "position_embedding_type": described.position_embedding_type,
        "add_position_embedding": described.position_embedding_type == "learned_absolute",
        "add_bias_linear": described.add_bias_linear,
        "add_qkv_bias": bool(options.get("attention_bias")),
        "qk_layernorm": bool(options.get("qk_norm")),
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "init_method_std": model.initializer_range,
        "attention_dropout": options.get("attention_dropout", 0.0),
        "hidden_dropout": options.get("hidden_dropout", 0.0),
        "vocab_size": model.vocab_size,  # padded_vocab_size is left to the layout that loads
        "rotary_base": options.get("rope_theta", 10000.0),
    }
    kind, factor = options.get("rope_scaling.rope_type"), options.get("rope_scaling.factor")
    if kind == "linear":
        args["rotary_seq_len_interpolation_factor"] = factor
    if kind == "llama3":
        args |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return args


def _args_of_experts(model: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    moe = {name.removeprefix("moe."): value for name, value in options.items() if name.startswith("moe.")}
    dense = {*(moe.get("mlp_only_layers") or ()), *range(moe.get("first_k_dense_replace") or 0)}
    softmax = moe.get("scoring_func", "softmax") == "softmax"
    balance = moe["balance"]
    weight = moe["router_aux_loss_coef"] if balance in _LOSSES else 0.0
    args = {
        "num_experts": moe["num_experts"],
        "moe_router_topk": moe["num_experts_per_tok"],
        "moe_ffn_hidden_size": moe.get("moe_intermediate_size") or model.intermediate_size,
        "moe_router_score_function": "softmax" if softmax else "sigmoid",
        "moe_router_pre_softmax": softmax and not moe.get("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": moe.get("routed_scaling_factor") or 1.0,
        "moe_router_load_balancing_type": _LOSSES[balance] if weight else "none",
        "moe_aux_loss_coeff": weight,
        "moe_z_loss_coeff": moe.get("router_z_loss_coef") or None,
        "moe_router_enable_expert_bias": balance.startswith("bias"),
        "moe_router_bias_update_rate": moe.get("router_bias_update_rate") or 0.0,
        "moe_shared_expert_intermediate_size": moe.get("shared_expert_intermediate_size") or None,
        "moe_shared_expert_gate": bool(moe.get("shared_expert_gate")),
        "moe_layer_freq": [int(n not in dense) for n in range(model.num_hidden_layers)] if dense else 1,
    }
    if moe.get("n_group", 1) > 1:
        args |= {"moe_router_num_groups": moe["n_group"], "moe_router_group_topk": moe["topk_group"]}
    return args


def _args_of_latents(options: Mapping[str, Any]) -> dict[str, Any]:
    args = {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "kv_channels": None,
        "qk_layernorm": True,
        "q_lora_rank": options["q_lora_rank"] or None,
        "kv_lora_rank": options["kv_lora_rank"],
        "qk_head_dim": options["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": options["head_dim"],
        "v_head_dim": options["v_head_dim"],
        "rope_type": "rope",
    }
    if options["rope_scaling.rope_type"] == "yarn":
        scaling = {name.removeprefix("rope_scaling."): value for name, value in options.items()}
        args |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling["beta_fast"],
            "beta_slow": scaling["beta_slow"],
            "mscale": scaling["mscale"],
            "mscale_all_dim": scaling["mscale_all_dim"],
            "yarn_correction_range_round_to_int": scaling["truncate"],
        }
    return args


def _common(source: NativeSource, *, trained: bool, expert_parallel: bool) -> dict[str, Any]:
    """What Megatron-LM stores besides tensors."""
    manifest, train = source.manifest, source.config.train
    args = args_of(source.model, source.path) | {
        "consumed_train_samples": manifest.consumed_samples,
        "iteration": manifest.step,
        "seq_length": train.seq_length,
        "global_batch_size": train.global_batch_size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        # What Megatron-LM's check_checkpoint_args asks for with some flags, at its defaults.
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": None,
        "data_parallel_random_init": False,
        # So Megatron-LM does not ask for what is not there.
        "no_save_rng": True,
        "no_save_optim": not trained,
    }
    content: dict[str, Any] = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    common: dict[str, Any] = {
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": manifest.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if not trained:
        return common
    content["distrib_optim_sharding_type"] = FORM
    dense, experts = (_optimizer(source, experts=each) for each in (False, True))
    common["optimizer"] = {0: dense, 1: experts} if expert_parallel else dense
    common["opt_param_scheduler"] = _rates(source)
    return common


def _optimizer(source: NativeSource, *, experts: bool) -> dict[str, Any]:
    """What one optimizer says of its groups of parameters: those that decay, and norms and biases, which do not."""
    options = source.config.optimizer
    groups = []
    for decays in (True,) if experts else (True, False):
        group = source.group("adamw", decays=decays)
        del group["initial_lr"]
        groups.append(
            {
                "is_expert_parallel": experts,
                "default_config": True,
                "wd_mult": 1.0 if decays else 0.0,
                "lr_mult": 1.0,
                "is_decoupled_lr": False,
                "max_lr": options.lr,
                "min_lr": options.min_lr,
                "bias_correction": True,  # Adam of Transformer Engine and of apex reads it
                **group,
                "step": source.updates,  # an int, because their kernels take no other
            }
        )
    optimizer: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": FORM}
    scale = source.manifest.trainer.get("loss_scale")
    if scale and scale["dynamic"]:
        optimizer["grad_scaler"] = {
            "scale": torch.tensor([float(scale["scale"])]),
            "growth_tracker": int(scale["good_steps"]),
            "hysteresis_tracker": _HYSTERESIS,
        }
    return optimizer


def _rates(source: NativeSource) -> dict[str, Any]:
    """The state of Megatron's scheduler of rates, in samples.

    Megatron reads the rate of a step at the samples consumed before the step, so rates of a run whose lengths count
    steps come one step later there. The length of WSD's final decay is no part of the state: --lr-wsd-decay-iters.
    """
    options, train = source.config.optimizer, source.config.train
    lengths = Lengths.of(options, train)
    in_all = train.samples()

    def samples(length: float) -> int:
        return round(length) if lengths.unit == "samples" else replace(train, steps=round(length)).samples()

    warmup = samples(lengths.warmup)
    if options.schedule == "inverse_sqrt" and not warmup:
        warmup = samples(1)
    falls = find_rate_schedule(options.schedule).decay == "after_warmup"
    return {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": samples(lengths.warmup + lengths.decay) if falls and lengths.decay else in_all,
        "lr_decay_style": _DECAYS[options.schedule],
        "num_steps": source.manifest.consumed_samples,
        "start_wd": options.weight_decay,
        "end_wd": options.weight_decay,
        "wd_incr_steps": in_all,
        "wd_incr_style": "constant",
    }
