"""Conversions of Megatron-LM's flags of the model: which family has its layers, and the sizes of their parts."""

import re
from collections.abc import Callable
from typing import NamedTuple

from megapar_tools.migrate.job import Job, NoCounterpart, Ours, Words, number, shown, whole

# Of latent attention in Megatron-LM, where its flags are not given.
_LATENT_DEFAULTS = {"kv-lora-rank": "32", "qk-pos-emb-head-dim": "64"}
_LATENT_YARN_LENGTH = "4096"  # no flag reaches it
_MOST_YARN_FLAGS = {"original_max_position_embeddings": "4096", "beta_fast": "32", "beta_slow": "1"}


def family_of(job: Job) -> str:
    """The family with the layers that a job of Megatron-LM asks for."""
    if job.is_on("multi-latent-attention"):
        return "deepseek"
    if job.whole("num-experts"):
        if job.is_on("enable-gpt-oss") or job.is_on("quick-geglu") or job.text("softmax-type") == "learnable":
            return "gpt_oss"
        of_qwen = job.is_on("qk-layernorm") or job.has("moe-shared-expert-intermediate-size")
        return "qwen3_moe" if of_qwen or job.is_on("add-qkv-bias") else "mixtral"
    if job.is_on("swiglu"):
        return "llama"
    if job.is_on("squared-relu"):
        return "nemotron" if job.text("normalization", "LayerNorm") == "LayerNorm" else "arcee"
    return "gpt_neox" if _positions_of(job) == "rope" else "gpt"


class _Layers(NamedTuple):
    """What the layers of a family have, in the values of Megatron-LM's flags."""

    normalization: str = "RMSNorm"
    positions: str = "rope"
    biases: str = "never"
    """Biases of the MLPs: never, always, or by the options of megapar that are named."""
    plain_mlp: bool = False
    dropout: bool = False
    gate: str = "swiglu"
    """The flag of the gated activation."""
    biases_by_default: bool = False
    """Whether megapar's options of biases are true where nobody sets them."""
    in_series: str = ""
    """megapar's option of attention beside the MLP, which Megatron-LM's layers have one after the other."""
    window_every: str = ""
    """The only value of --window-attn-skip-freq."""


_BIASES = "model.attention_bias model.mlp_bias"
_LAYERS = {
    "gpt": _Layers("LayerNorm", "learned_absolute", biases="always", plain_mlp=True, dropout=True),
    "llama": _Layers(biases="model.attention_bias model.attention_out_bias model.mlp_bias"),
    "gpt_oss": _Layers(biases="always", gate="quick-geglu", window_every="2"),
    "nemotron": _Layers("LayerNorm", biases=_BIASES, plain_mlp=True),
    "arcee": _Layers(biases=_BIASES, plain_mlp=True),
    "gpt_neox": _Layers(
        "LayerNorm",
        biases=_BIASES,
        plain_mlp=True,
        biases_by_default=True,
        in_series="model.parallel_residual",
    ),
}
_OTHER_LAYERS = _Layers()


def _family_and_layers(job: Job) -> tuple[str, _Layers]:
    family = family_of(job)
    return family, _LAYERS.get(family, _OTHER_LAYERS)


def layers(job: Job, words: Words) -> Ours:
    """A switch that the family decides."""
    return {"model.family": (family_of(job),)}


def gated(job: Job, words: Words) -> Ours:
    """--swiglu, or its absence: some families have a plain MLP, and some a gated one by another flag."""
    family, ours = _family_and_layers(job)
    is_gated = bool(words) or job.is_on("swiglu") or job.is_on(ours.gate)
    if not is_gated and not ours.plain_mlp:
        raise NoCounterpart(f"family {family} has gated MLPs alone")
    return {"model.family": (family,)} | ({ours.in_series: ("no",)} if ours.in_series else {})


def only_of(
    family: str, feature: str, option: str = "", value: str = "", neutral: str = ""
) -> Callable[[Job, Words], Ours]:
    """A flag of which `family` alone has the layers; with `option`, its words are that option of megapar.

    `feature` says what those layers compute, where the job does not set the flag. `value` is the only one read, and
    `neutral` asks for what all other families compute.
    """

    def convert(job: Job, words: Words) -> Ours:
        ours = family_of(job)
        if not words or (neutral and number_or_text(words[0]) == number_or_text(neutral)):
            if ours == family:
                raise NoCounterpart(f"family {family} {feature}, whatever the flag says")
            return {}
        if ours != family or (value and number_or_text(words[0]) != number_or_text(value)):
            raise NoCounterpart(f"only family {family}{f' with the value {value}' if value else ''} {feature}")
        return {option: words} if option else {"model.family": (family,)}

    return convert


def number_or_text(word: str) -> float | str:
    """A word as a number if it is one: 1 and 1.0 are the same value."""
    try:
        return float(word)
    except ValueError:
        return word


def normalization(job: Job, words: Words) -> Ours:
    """--normalization: the family has one kind."""
    family, ours = _family_and_layers(job)
    if words[0] != ours.normalization:
        raise NoCounterpart(f"family {family} has {ours.normalization}")
    return {"model.family": (family,)}


def _positions_of(job: Job) -> str:
    """The kind of positions; yarn stretches rotary ones."""
    if job.is_on("use-rotary-position-embeddings"):
        return "rope"
    theirs = job.text("position-embedding-type", "learned_absolute")
    return "rope" if theirs == "yarn" else theirs


def positions(job: Job, words: Words) -> Ours:
    """--position-embedding-type: the family has one kind."""
    family, ours = _family_and_layers(job)
    if _positions_of(job) != ours.positions:
        raise NoCounterpart(f"family {family} has {ours.positions}")
    return {"model.family": (family,), **yarn(job, ())}


def rotary_share(job: Job, words: Words) -> Ours:
    """--rotary-percent: the share of a head that is rotated."""
    if family_of(job) in ("gpt_neox", "nemotron"):
        return {"model.partial_rotary_factor": words}
    if number(words[0]) != 1:
        raise NoCounterpart(f"family {family_of(job)} rotates the whole head")
    return {}


def yarn(job: Job, words: Words) -> Ours:
    """The flags of yarn. Latent attention takes it unless --rope-type is rope; a factor of 1 scales nothing."""
    latent = job.is_on("multi-latent-attention")
    factor = job.number("rotary-scaling-factor", 1.0)
    is_yarn = job.text("rope-type", "yarn") == "yarn" if latent else job.text("position-embedding-type") == "yarn"
    if latent and not is_yarn and factor > 1 and job.number("mscale-all-dim"):
        raise NoCounterpart("the scale of attention follows --rotary-scaling-factor there, without yarn too")
    if not is_yarn or factor <= 1:
        return {}
    ours = {"rope_type": "yarn", "factor": shown(factor)}
    for name, default in _MOST_YARN_FLAGS.items():
        flag = f"yarn-{name.replace('_', '-')}"
        ours[name] = default if latent else job.text(flag, default)
    ours |= {"mscale": job.text("mscale", "1.0"), "mscale_all_dim": job.text("mscale-all-dim", "0.0")}
    if not latent and job.has("no-yarn-correction-range-round-to-int"):
        ours["truncate"] = "false"
    return {f"model.rope_scaling.{name}": (value,) for name, value in ours.items()}


def llama3_scaling(job: Job, words: Words) -> Ours:
    """--use-rope-scaling and its factor, 8 if it is not given."""
    if not job.is_on("use-rope-scaling"):
        return {}
    factor = job.text("rope-scaling-factor", "8")
    return {"model.rope_scaling.rope_type": ("llama3",), "model.rope_scaling.factor": (factor,)}


def interpolated(job: Job, words: Words) -> Ours:
    """--rotary-seq-len-interpolation-factor divides positions."""
    return {"model.rope_scaling.rope_type": ("linear",), "model.rope_scaling.factor": words}


def latent(option: str, flag: str) -> Callable[[Job, Words], Ours]:
    """A width of latent attention, or its default there. Without latent attention the flag counts for nothing."""

    def convert(job: Job, words: Words) -> Ours:
        if not job.is_on("multi-latent-attention"):
            return {}
        words = words or (_LATENT_DEFAULTS.get(flag, ""),)
        return {option: words} if words != ("",) else {}

    return convert


def head_width(job: Job, words: Words) -> Ours:
    """--kv-channels, which latent attention does not read: its heads have the widths of their parts."""
    return {} if job.is_on("multi-latent-attention") else {"model.head_dim": words}


def qk_norm(job: Job, words: Words) -> Ours:
    """--qk-layernorm. With latent attention it is the norm of the latents, which family deepseek always has."""
    if job.is_on("multi-latent-attention"):
        if not words:
            raise NoCounterpart("family deepseek has norms of the latents")
        return {}
    return {"model.qk_norm": ("true",)} if words else {}


def no_linear_bias(job: Job, words: Words) -> Ours:
    """--disable-bias-linear, or its absence."""
    family, ours = _family_and_layers(job)
    if words and ours.biases == "always":
        raise NoCounterpart(f"family {family} always has biases")
    if ours.biases == "always":
        return {"model.family": (family,)}
    if words:
        off = ours.biases.split() if ours.biases_by_default else []
        return {"model.family": (family,), **dict.fromkeys(off, ("false",))}
    if ours.biases == "never":
        raise NoCounterpart(f"family {family} has no biases in its MLPs")
    return dict.fromkeys(ours.biases.split(), ("true",))


def mlp_width(job: Job, words: Words) -> Ours:
    """--ffn-hidden-size. With SwiGLU Megatron-LM's default is two thirds of 4 x width, a multiple of 64."""
    if words:
        return {"model.intermediate_size": words}
    if not job.is_on("swiglu"):
        return {}
    return {"model.intermediate_size": (str(int(4 * job.whole("hidden-size") * 2 / 3) // 64 * 64),)}


def key_value_heads(job: Job, words: Words) -> Ours:
    """--num-query-groups counts with --group-query-attention alone, and not with latent attention."""
    counts = job.is_on("group-query-attention") and not job.is_on("multi-latent-attention")
    return {"model.num_key_value_heads": words} if counts else {}


def dropout(option: str) -> Callable[[Job, Words], Ours]:
    """A dropout: gpt has it, the other families have none."""

    def convert(job: Job, words: Words) -> Ours:
        family, ours = _family_and_layers(job)
        if ours.dropout:
            return {option: words}
        if number(words[0]):
            raise NoCounterpart(f"family {family} has no dropout")
        return {}

    return convert


def normalized(job: Job, words: Words) -> Ours:
    """--moe-router-pre-softmax, or its absence: whether the weights of the chosen experts add up to 1.

    The flag acts on softmax alone. Sigmoid scores are divided by their sum, but for a single expert.
    """
    if not job.whole("num-experts"):
        return {}
    if job.text("moe-router-score-function", "softmax") == "softmax":
        return {"model.moe.norm_topk_prob": ("false" if words or job.is_on("moe-router-pre-softmax") else "true",)}
    return {"model.moe.norm_topk_prob": ("true" if job.whole("moe-router-topk", 2) > 1 else "false",)}


def _balances(job: Job) -> str:
    """What evens out the load in a job with experts: a value of model.moe.balance, or `micro_batch`, or two at once."""
    theirs = job.text("moe-router-load-balancing-type", "aux_loss")
    named = {"seq_aux_loss": "sequence", "global_aux_loss": "global", "aux_loss": "micro_batch", "none": "none"}
    loss = named.get(theirs, theirs) if any(map(number, job.words("moe-aux-loss-coeff"))) else "none"
    if not job.is_on("moe-router-enable-expert-bias"):
        return loss
    return "bias" if loss == "none" else f"bias+{loss}"


def balance(job: Job, words: Words) -> Ours:
    """--moe-router-load-balancing-type. Its default is the loss of a micro-batch, with the weight 0."""
    if not job.whole("num-experts"):
        return {}
    ours = _balances(job)
    if ours == "micro_batch":
        raise NoCounterpart(
            "aux_loss, the loss of a micro-batch, has no counterpart: it depends on the layout. global is taken"
        )
    if ours not in ("none", "bias", "sequence", "global", "bias+sequence"):
        raise NoCounterpart(f"{ours} at once has no counterpart, only bias+sequence; the bias is taken")
    return {"model.moe.balance": (ours,)}


def selection_bias(job: Job, words: Words) -> Ours:
    """--moe-router-enable-expert-bias, alone or beside a loss."""
    return {"model.moe.balance": ("bias+sequence" if _balances(job) == "bias+sequence" else "bias",)}


def loss_weight(job: Job, words: Words) -> Ours:
    """--moe-aux-loss-coeff, of a loss that there is."""
    has_loss = _balances(job) in ("sequence", "global", "micro_batch", "bias+sequence")
    return {"model.moe.router_aux_loss_coef": words} if has_loss else {}


def dense_layers(job: Job, words: Words) -> Ours:
    """--moe-layer-freq: 1, or a list such as [0]*3+[1]*58. Only leading layers without experts are read."""
    text = "".join(words).strip("()")
    if text == "1":
        return {}
    found = re.fullmatch(r"\[0\]\*(\d+)\+\[1\]\*(\d+)", text.replace(" ", ""))
    if not found or not job.is_on("multi-latent-attention"):
        raise NoCounterpart("only 1 is read, and with latent attention a list such as ([0]*3+[1]*58)")
    return {"model.moe.first_k_dense_replace": (found[1],)}


def window(job: Job, words: Words) -> Ours:
    """--window-size (before, after). megapar's number also counts the token itself."""
    found = re.fullmatch(r"\(?(\d+),\s*0\)?", " ".join(words))
    if not found:
        raise NoCounterpart("only windows such as (4095, 0), of earlier tokens alone, are read")
    return {"model.sliding_window": (str(whole(found[1]) + 1),)}


def layers_with_window(job: Job, words: Words) -> Ours:
    """--window-attn-skip-freq N: each N-th layer has no window."""
    text = "".join(words)
    layers = job.whole("num-layers", 0)
    family, ours = _family_and_layers(job)
    if ours.window_every:
        if text != ours.window_every:
            raise NoCounterpart(f"family {family} has a window on every layer but each {ours.window_every}nd")
        return {"model.family": (family,)}
    if not text.isdecimal() or not int(text) or not layers:
        raise NoCounterpart("only a number is read, and with --num-layers; model.layer_types has a type for each layer")
    kinds = ("full_attention", *["sliding_attention"] * (whole(text) - 1))
    return {"model.layer_types": tuple(kinds[number % whole(text)] for number in range(1, layers + 1))}
