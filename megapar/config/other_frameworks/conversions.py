"""Conversions of values that frameworks have in common, and those of Megatron-LM's flags."""

import re
from collections.abc import Callable
from typing import NamedTuple

from megapar.config.options import TrainConfig
from megapar.config.other_frameworks.job import Job, NoCounterpart, Ours, Words, number, shown, whole

_MOST_STEPS = 10_000_000  # of a growing batch, walked through one by one


# What several frameworks have


def nothing(job: Job, words: Words) -> Ours:
    """Nothing is to be set: megapar does so by itself."""
    return {}


def times(option: str, factor: float) -> Callable[[Job, Words], Ours]:
    """The value times a constant."""

    def convert(job: Job, words: Words) -> Ours:
        return {option: (shown(number(words[0]) * factor),)}

    return convert


def if_on(option: str, ours: str, switch: str = "") -> Callable[[Job, Words], Ours]:
    """`ours` if the value does not say no, and if the job sets `switch`; otherwise nothing."""

    def convert(job: Job, words: Words) -> Ours:
        is_on = not words or words[0].lower() not in ("false", "no", "none", "off", "0", "null")
        if is_on and (not switch or job.product(switch) > 1):
            return {option: (ours,)}
        return {}

    return convert


def split_elements(elements: float, stage: int) -> Ours:
    """A bucket of so many gradients. From stage 2 on a bucket is a layer."""
    return {} if stage > 1 else {"optimizer.bucket_mb": (shown(elements * 4 / 2**20),)}


def tokenizer_file(path: str) -> Ours:
    """The file of a tokenizer by its name, or tokenizer.json in a folder of Hugging Face's."""
    if path.endswith(".json"):
        return {"data.tokenizer": (f"hf:{path}",)}
    if path.endswith(".model"):
        return {"data.tokenizer": (f"spm:{path}",)}
    return {"data.tokenizer": (f"hf:{path.rstrip('/')}/tokenizer.json",)}


# Megatron-LM: the model


def family_of(job: Job) -> str:
    """The family with the layers that a job of Megatron-LM asks for."""
    if job.is_on("multi-latent-attention"):
        return "deepseek"
    if job.whole("num-experts"):
        of_qwen = job.is_on("qk-layernorm") or job.has("moe-shared-expert-intermediate-size")
        return "qwen3_moe" if of_qwen or job.is_on("add-qkv-bias") else "mixtral"
    return "llama" if job.is_on("swiglu") else "gpt"


class _Layers(NamedTuple):
    """What the layers of a family have, in the values of Megatron-LM's flags."""

    normalization: str = "RMSNorm"
    positions: str = "rope"
    biases: str = "never"
    """Biases of the MLPs: never, always or by option."""
    plain_mlp: bool = False
    dropout: bool = False


_LAYERS = {
    "gpt": _Layers("LayerNorm", "learned_absolute", biases="always", plain_mlp=True, dropout=True),
    "llama": _Layers(biases="by option"),
}
_OTHER_LAYERS = _Layers()


def _family_and_layers(job: Job) -> tuple[str, _Layers]:
    family = family_of(job)
    return family, _LAYERS.get(family, _OTHER_LAYERS)


def layers(job: Job, words: Words) -> Ours:
    """A switch that the family decides."""
    return {"model.family": (family_of(job),)}


def gated(job: Job, words: Words) -> Ours:
    """--swiglu, or its absence: only gpt has a plain MLP."""
    family, ours = _family_and_layers(job)
    if not words and not job.is_on("swiglu") and not ours.plain_mlp:
        raise NoCounterpart(f"family {family} has SwiGLU alone")
    return {"model.family": (family,)}


def normalization(job: Job, words: Words) -> Ours:
    """--normalization: the family has one kind."""
    family, ours = _family_and_layers(job)
    if words[0] != ours.normalization:
        raise NoCounterpart(f"family {family} has {ours.normalization}")
    return {"model.family": (family,)}


def positions(job: Job, words: Words) -> Ours:
    """--position-embedding-type: the family has one kind."""
    family, ours = _family_and_layers(job)
    theirs = "rope" if job.is_on("use-rotary-position-embeddings") else words[0]
    if theirs != ours.positions:
        raise NoCounterpart(f"family {family} has {ours.positions}")
    return {"model.family": (family,)}


def no_linear_bias(job: Job, words: Words) -> Ours:
    """--disable-bias-linear, or its absence."""
    family, ours = _family_and_layers(job)
    if words and ours.biases == "always":
        raise NoCounterpart(f"family {family} always has biases")
    if words or ours.biases == "always":
        return {"model.family": (family,)}
    if ours.biases == "never":
        raise NoCounterpart(f"family {family} has no biases in its MLPs")
    biases = ("model.attention_bias", "model.attention_out_bias", "model.mlp_bias")
    return dict.fromkeys(biases, ("true",))


def mlp_width(job: Job, words: Words) -> Ours:
    """--ffn-hidden-size. With SwiGLU Megatron-LM's default is two thirds of 4 x width, a multiple of 64."""
    if words:
        return {"model.intermediate_size": words}
    if not job.is_on("swiglu"):
        return {}
    return {"model.intermediate_size": (str(int(4 * job.whole("hidden-size") * 2 / 3) // 64 * 64),)}


def key_value_heads(job: Job, words: Words) -> Ours:
    """--num-query-groups counts with --group-query-attention alone."""
    return {"model.num_key_value_heads": words} if job.is_on("group-query-attention") else {}


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


def balance(job: Job, words: Words) -> Ours:
    """--moe-router-load-balancing-type. Its default is the loss of a micro-batch."""
    theirs = words[0] if words else "aux_loss"
    named = {"none": "none", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
    if not job.whole("num-experts") or job.is_on("moe-router-enable-expert-bias"):
        return {}
    if theirs in named:
        return {"model.moe.balance": (named[theirs],)}
    if theirs == "aux_loss" and not job.number("moe-aux-loss-coeff"):
        return {"model.moe.balance": ("none",)}
    raise NoCounterpart("aux_loss, the loss of a micro-batch, has no counterpart: it depends on the layout")


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
    if not text.isdecimal() or not int(text) or not layers:
        raise NoCounterpart("only a number is read, and with --num-layers; model.layer_types has a type for each layer")
    kinds = ("full_attention", *["sliding_attention"] * (whole(text) - 1))
    return {"model.layer_types": tuple(kinds[number % whole(text)] for number in range(1, layers + 1))}


# Megatron-LM: batches, steps and the learning rate


def replicas(job: Job) -> int:
    """Data-parallel replicas of a job of Megatron-LM; one if its number of ranks is not known."""
    ranks = job.product("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    return max(job.world // ranks, 1)


def global_batch(job: Job, words: Words) -> Ours:
    """--global-batch-size. By default a replica has one micro-batch."""
    if words:
        return {"train.global_batch_size": words}
    return {"train.global_batch_size": (str(job.whole("micro-batch-size", 1) * replicas(job)),)}


def batch_of(job: Job) -> int:
    """Samples of a step."""
    return whole(global_batch(job, job.words("global-batch-size"))["train.global_batch_size"][0])


def steps_of(job: Job, samples: int) -> int:
    """The steps of so many samples, with a batch that grows too."""
    batch = batch_of(job)
    ramp = tuple(whole(word) for word in job.words("rampup-batch-size"))
    if len(ramp) != 3:
        return samples // max(batch, 1)
    train = TrainConfig(global_batch_size=batch, batch_ramp=ramp)
    consumed = steps = 0
    while consumed < min(samples, ramp[2]):
        size = train.batch_size(consumed) if ramp[1] > 0 and ramp[2] > 0 else 0
        steps += 1
        consumed += size
        if size < 1 or steps > _MOST_STEPS:
            raise NoCounterpart("the batch of rampup-batch-size does not grow to global-batch-size")
    return steps + max(samples - consumed, 0) // max(batch, 1)


def train_steps(job: Job) -> int:
    """Steps of the run, of iterations or of samples."""
    if job.has("train-samples"):
        return steps_of(job, job.whole("train-samples"))
    return job.whole("train-iters")


def warmup_steps(job: Job) -> int:
    """Steps of warm-up, by whichever of its three flags."""
    if job.has("lr-warmup-samples"):
        return steps_of(job, job.whole("lr-warmup-samples"))
    if job.has("lr-warmup-fraction"):
        return round(job.number("lr-warmup-fraction") * decay_end(job))
    return job.whole("lr-warmup-iters")


def decay_end(job: Job) -> int:
    """The step at which the learning rate has decayed."""
    if job.has("lr-decay-samples"):
        return steps_of(job, job.whole("lr-decay-samples"))
    return job.whole("lr-decay-iters") or train_steps(job)


def to_steps(job: Job, words: Words) -> Ours:
    """--train-samples."""
    return {"train.steps": (str(train_steps(job)),)}


def to_warmup(job: Job, words: Words) -> Ours:
    """--lr-warmup-fraction and --lr-warmup-samples."""
    return {"optimizer.warmup_steps": (str(warmup_steps(job)),)}


def to_decay(job: Job, words: Words) -> Ours:
    """--lr-decay-iters and --lr-decay-samples: ours are counted from the end of warm-up, 0 to the end of the run."""
    if job.text("lr-decay-style") == "WSD":
        if decay_end(job) != train_steps(job):
            raise NoCounterpart("wsd decays at the end of train.steps")
        return {}
    if decay_end(job) == train_steps(job):
        return {}
    return {"optimizer.decay_steps": (str(max(decay_end(job) - warmup_steps(job), 1)),)}


def to_wsd_decay(job: Job, words: Words) -> Ours:
    """--lr-wsd-decay-samples, as the last steps of the run."""
    begun = job.whole("train-samples") - whole(words[0])
    steps = train_steps(job) - steps_of(job, begun) if job.has("train-samples") else whole(words[0]) // batch_of(job)
    return {"optimizer.decay_steps": (str(max(steps, 1)),)}


def betas(first: str, second: str) -> Callable[[Job, Words], Ours]:
    """Both betas, of two flags."""

    def convert(job: Job, words: Words) -> Ours:
        return {"optimizer.betas": (job.text(first), job.text(second))}

    return convert


# Megatron-LM: layout and memory


def virtual_stages(job: Job, words: Words) -> Ours:
    """--num-virtual-stages-per-pipeline-rank: more than one are interleaved."""
    if whole(words[0]) < 2 or job.product("pipeline-model-parallel-size") < 2:
        return {}
    return {"parallel.vpp": words, "parallel.schedule": ("interleaved",)}


def virtual_stages_by_layers(job: Job, words: Words) -> Ours:
    """--num-layers-per-virtual-pipeline-stage."""
    stages = job.product("pipeline-model-parallel-size") * max(whole(words[0]), 1)
    if job.whole("num-layers") % stages:
        raise NoCounterpart("pipeline stages of it do not divide the layers")
    return virtual_stages(job, (str(job.whole("num-layers") // stages),))


def uneven_ends(job: Job, words: Words) -> Ours:
    """--decoder-first-pipeline-num-layers and -last-: the stages between get equal numbers."""
    pp, total = job.product("pipeline-model-parallel-size"), job.whole("num-layers")
    first, last = job.whole("decoder-first-pipeline-num-layers"), job.whole("decoder-last-pipeline-num-layers")
    between = pp - bool(first) - bool(last)
    if between < 1 or (total - first - last) % between or job.has("num-layers-per-virtual-pipeline-stage"):
        raise NoCounterpart("the other stages get no equal numbers of layers")
    middle = [(total - first - last) // between] * between
    counts = [first] * bool(first) + middle + [last] * bool(last)
    return {"parallel.partition": tuple(map(str, counts))}


def shards(job: Job, words: Words) -> Ours:
    """--num-distributed-optimizer-instances."""
    ranks = replicas(job) * job.product("context-parallel-size")
    if whole(words[0]) < 2:
        return {}
    if not job.world or ranks % whole(words[0]):
        raise NoCounterpart("needs the number of ranks, and must divide those of dp x cp")
    return {"optimizer.shard_ranks": (str(ranks // whole(words[0])),)}


def qk_clip(job: Job, words: Words) -> Ours:
    """--qk-clip, whose limit is another flag."""
    return {"optimizer.qk_clip": (job.text("qk-clip-threshold", "100"),)}


def sharded_optimizer(job: Job, words: Words) -> Ours:
    """--use-distributed-optimizer, or its absence."""
    if any(job.has(name) for name in ("use-megatron-fsdp", "use-torch-fsdp2", "zero-stage")):
        return {}
    return {"optimizer.zero_stage": ("1" if words else "0",)}


def megatron_fsdp(job: Job, words: Words) -> Ours:
    """--use-megatron-fsdp, whose strategy is another flag."""
    return {} if job.has("data-parallel-sharding-strategy") else {"optimizer.zero_stage": ("3",)}


def bucket(job: Job, words: Words) -> Ours:
    """--ddp-bucket-size, in elements."""
    return split_elements(number(words[0]), 0)


def recomputed_modules(job: Job, words: Words) -> Ours:
    """--recompute-modules of granularity selective."""
    if job.text("recompute-granularity") == "full":
        return {}
    if set(words) == {"core_attn"}:
        return {"train.recompute": ("selective",)}
    if set(words) <= {"layernorm", "mlp_act", "moe_act"}:
        return {"train.recompute": ("light",)}
    raise NoCounterpart("core_attn alone, or layernorm, mlp_act and moe_act, have a counterpart")


def granularity(job: Job, words: Words) -> Ours:
    """--recompute-granularity, where --recompute-modules does not say more."""
    if words[0] == "selective" and job.has("recompute-modules"):
        return recomputed_modules(job, job.words("recompute-modules"))
    if words[0] not in ("full", "selective"):
        raise NoCounterpart("full and selective have a counterpart")
    return {"train.recompute": words}


def profiled(job: Job, words: Words) -> Ours:
    """--profile-step-start and -end: ours are numbers of steps, from 1."""
    if not job.is_on("profile"):
        return {}
    start, end = job.whole("profile-step-start", 10), job.whole("profile-step-end", 12)
    return {"log.profile": (f"{start + 1}-{max(end, start + 1)}",)}


# Megatron-LM: data and checkpoints


def data(option: str, prefix: str = "") -> Callable[[Job, Words], Ours]:
    """A prefix, or weights and prefixes in turn."""

    def convert(job: Job, words: Words) -> Ours:
        if job.is_on("mock-data"):
            return {}
        if len(words) == 1:
            return {option: (f"{prefix}{words[0]}",)}
        weights, sources = words[::2], words[1::2]
        if len(weights) != len(sources) or option != "data.train":
            raise NoCounterpart("a weight for each prefix is needed")
        return {option: tuple(f"{shown(number(w))}:{source}" for w, source in zip(weights, sources, strict=True))}

    return convert


def split(job: Job, words: Words) -> Ours:
    """--split, or its default, which counts with --data-path alone."""
    if job.is_on("mock-data") or not job.has("data-path"):
        return {}
    if len(job.words("data-path")) > 1:
        raise NoCounterpart("the documents of one prefix are split, not those of a blend; name data.validation")
    return {"data.split": tuple(re.findall(r"[\d.]+", " ".join(words)) or ("969", "30", "1"))}


def tokenizer(job: Job, words: Words) -> Ours:
    """--tokenizer-type with --tokenizer-model."""
    kind, path = job.text("tokenizer-type"), job.text("tokenizer-model") or job.text("tokenizer-name-or-path")
    if kind == "NullTokenizer":
        return {}
    if not path:
        raise NoCounterpart("names no file; give data.tokenizer")
    if kind in ("Llama2Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        return {"data.tokenizer": (f"spm:{path}",)}
    if kind == "TikTokenizer":
        return {"data.tokenizer": (f"tiktoken:{path}",)}
    if kind in ("HuggingFaceTokenizer", "PretrainedFromHF"):
        return tokenizer_file(path)
    raise NoCounterpart("sentencepiece, Hugging Face's and tiktoken's are read")


def load(job: Job, words: Words) -> Ours:
    """--load of the folder of --save resumes; any other is a checkpoint to be converted."""
    if words == job.words("save"):
        return {}
    raise NoCounterpart("their checkpoint is converted first")


def _has_evaluation(job: Job) -> bool:
    """Whether something is evaluated. Raises NoCounterpart if that is not known, because the data are not."""
    if job.is_on("mock-data"):
        return False
    if not any(job.has(name) for name in ("data-path", "valid-data-path", "test-data-path")):
        raise NoCounterpart("no data are known that would be evaluated")
    return True


def evaluated(job: Job, words: Words) -> Ours:
    """--eval-iters."""
    return {"train.eval_samples": (str(whole(words[0]) * batch_of(job)),)} if _has_evaluation(job) else {}


def evaluated_every(job: Job, words: Words) -> Ours:
    """--eval-interval."""
    return {"train.eval_every": words} if _has_evaluation(job) else {}
