"""Jobs of GPT-NeoX: keys of its YAML become flags of Megatron-LM, which it came from, and keys of DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from megapar.migrate.carry import Line, Moved, Option
from megapar.migrate.job import plain
from megapar.migrate.sources import options_of_table, set_in, words_of

MEGATRON, DEEPSPEED = "Megatron-LM", "DeepSpeed"
_SIGNS = frozenset(("pipe_parallel_size", "model_parallel_size", "pos_emb", "gpt_j_residual", "no_weight_tying"))
_OF_DEEPSPEED = (
    *("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "gradient_clipping", "steps_per_print"),
    *("wall_clock_breakdown", "zero_allow_untested_optimizer", "flops_profiler", "data_types", "comms_logger"),
)
# Keys with another name in Megatron-LM, and the same meaning.
_NAMES = {
    "pipe_parallel_size": "pipeline-model-parallel-size",
    "model_parallel_size": "tensor-model-parallel-size",
    "train_micro_batch_size_per_gpu": "micro-batch-size",
    "train_batch_size": "global-batch-size",
    "no_weight_tying": "untie-embeddings-and-output-weights",
    "intermediate_size": "ffn-hidden-size",
    "num_kv_heads": "num-query-groups",
    "layernorm_epsilon": "norm-epsilon",
    "rms_norm_epsilon": "norm-epsilon",
    "rotary_pct": "rotary-percent",
    "rotary_emb_base": "rotary-base",
    "use_qk_layernorm": "qk-layernorm",
    "warmup": "lr-warmup-fraction",
    "checkpoint_factor": "save-interval",
    "wandb_team": "wandb-entity",
    "wandb_run_name": "wandb-exp-name",
    "profile_step_stop": "profile-step-end",
    "scaled_upper_triang_masked_softmax_fusion": "no-masked-softmax-fusion",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "rope_fusion": "no-rope-fusion",
    "synchronize_each_layer": "use-mcore-models",
    "output_layer_parallelism": "use-mcore-models",
}
# Keys whose values have other names too: the flag, and its value. An empty value is a switch.
_VALUES = {
    ("norm", "layernorm"): ("normalization", "LayerNorm"),
    ("norm", "te_layernorm"): ("normalization", "LayerNorm"),
    ("norm", "rmsnorm"): ("normalization", "RMSNorm"),
    ("norm", "te_rmsnorm"): ("normalization", "RMSNorm"),
    ("pos_emb", "rotary"): ("position-embedding-type", "rope"),
    ("pos_emb", "learned"): ("position-embedding-type", "learned_absolute"),
    ("activation", "swiglu"): ("swiglu", ""),
    ("activation", "gelu"): ("no-bias-gelu-fusion", ""),
    ("precision", "bfloat16"): ("bf16", ""),
    ("precision", "fp16"): ("fp16", ""),
    ("tokenizer_type", "HFTokenizer"): ("tokenizer-type", "HuggingFaceTokenizer"),
    ("tokenizer_type", "SPMTokenizer"): ("tokenizer-type", "SentencePieceTokenizer"),
}
# Where GPT-NeoX's defaults are not those of Megatron-LM.
_DEFAULTS = {"weight_decay": "0.1", "hidden_dropout": "0.0", "attention_dropout": "0.0"}


def is_neox(table: Mapping[str, Any]) -> bool:
    """Whether a file of arguments is GPT-NeoX's."""
    return len(_SIGNS & {plain(key) for key in table}) > 1


def options_of(table: Mapping[str, Any], world: int) -> list[Option]:
    """The options of a file of GPT-NeoX, for `world` ranks, and its defaults where they are not Megatron-LM's."""
    given = {plain(key): value for key, value in set_in(table).items()}
    if isinstance(given.get("fp16"), dict):  # its own switch is `enabled` once more
        given["fp16"] = {key: value for key, value in given["fp16"].items() if key != "fp16"}
    options = options_of_table({key: given[key] for key in _OF_DEEPSPEED if key in given}, DEEPSPEED)
    for key, value in given.items():
        if key not in _OF_DEEPSPEED and key not in ("gpt_j_residual", "gpt_j_tied"):
            options.append(_option(key, value, given, world))
    return [*options, *(_flag(key, (value,)) for key, value in _DEFAULTS.items() if key not in given)]


def _flag(key: str, words: tuple[str, ...], name: str = "") -> Option:
    """A flag of Megatron-LM, spelled as in the file."""
    return Option(MEGATRON, name or _NAMES.get(key, key.replace("_", "-")), words, spelled=key)


def _size(given: Mapping[str, Any], key: str) -> int:
    """A size of the file, 1 if it has none."""
    size = given.get(key)
    return max(size, 1) if isinstance(size, int) else 1


def _option(key: str, value: Any, given: Mapping[str, Any], world: int) -> Option:
    words = words_of(value)
    if key == "gradient_accumulation_steps" and isinstance(value, int):
        ranks = _size(given, "model_parallel_size") * _size(given, "pipe_parallel_size")
        batch = _size(given, "train_micro_batch_size_per_gpu") * value * max(world // ranks, 1)
        words = (str(given.get("train_batch_size", batch)),)
        return Option(MEGATRON, "global-batch-size", words, spelled=f"{key} {value}, in samples of a step")
    if key == "vocab_file" and given.get("tokenizer_type") in ("HFTokenizer", "SPMTokenizer"):
        return _flag(key, words, "tokenizer-model")
    if key == "attention_config" and {w for w in words if not w.isdecimal()} <= {"flash", "global"}:
        return _flag(key, (), "use-flash-attn")
    if key == "activation" and words == ("swiglu",) and "intermediate_size" not in given:
        return Option(MEGATRON, key, words, "its width follows from mlp_multiple_of; give intermediate_size")
    if (key, *words) in _VALUES:
        name, theirs = _VALUES[key, words[0]]
        return _flag(key, (theirs,) if theirs else (), name)
    return _flag(key, words)


def settle_neox(moved: Moved, table: Mapping[str, Any]) -> None:
    """Set what no flag of Megatron-LM says, and count GPT-NeoX's own defaults as such."""
    given = {plain(key): value for key, value in set_in(table).items()}
    residual = "no"
    if given.get("gpt_j_residual"):
        residual = "one_norm" if given.get("gpt_j_tied") else "two_norms"
    for key in [key for key in ("gpt_j_residual", "gpt_j_tied") if key in given]:
        moved.options += 1
        value = str(given[key]).lower()
        moved.carried.append(Line(key, value, f"model.parallel_residual = {residual}"))
        moved.sources["model.parallel_residual"] = f"{key} {value}"
    if "model.parallel_residual" in moved.ours or residual != "no":
        moved.ours["model.parallel_residual"] = (residual,)
        moved.sources.setdefault("model.parallel_residual", "GPT-NeoX's default")
    moved.defaults = [line for line in moved.defaults if "model.parallel_residual" not in line.here]
    own = [line for line in moved.carried if line.theirs in _DEFAULTS.keys() - given.keys()]
    moved.options -= len(_DEFAULTS.keys() - given.keys())
    moved.carried = [line for line in moved.carried if line not in own]
    moved.defaults += [Line(line.theirs, line.value, line.here, is_default=True) for line in own]
