"""Conversions of values that frameworks have in common, and those of Megatron-LM's flags."""

import re
from collections.abc import Callable

from megapar.config.options import TrainConfig
from megapar_tools.migrate.job import Job, NoCounterpart, Ours, Words, number, shown, whole

UNKNOWN_DATA = "PREFIX"
"""The name of data that the job does not tell."""
_MOST_STEPS = 10_000_000  # of a growing batch, walked through one by one


# What several frameworks have


def nothing(job: Job, words: Words) -> Ours:
    """Nothing is to be set: megapar does so by itself."""
    return {}


def as_given(option: str) -> Callable[[Job, Words], Ours]:
    """Return a conversion to the same value."""
    return lambda job, words: {option: words}


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


# Megatron-LM: batches, steps and the learning rate


def replicas(job: Job) -> int:
    """Data-parallel replicas of a job of Megatron-LM; one if its number of ranks is not known."""
    ranks = job.product("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    return max(job.world // ranks, 1)


def global_batch(job: Job, words: Words) -> Ours:
    """--global-batch-size. By default that of the schedule's end, and without one a micro-batch of a replica."""
    if words:
        return {"train.global_batch_size": words}
    if job.has("step-batch-size-schedule"):
        return {"train.global_batch_size": (str(_scheduled(job)[-1][1]),)}
    return {"train.global_batch_size": (str(job.whole("micro-batch-size", 1) * replicas(job)),)}


def batch_of(job: Job) -> int:
    """Samples of a step."""
    return whole(global_batch(job, job.words("global-batch-size"))["train.global_batch_size"][0])


def _scheduled(job: Job) -> list[tuple[int, int]]:
    """--step-batch-size-schedule, such as 0:384 200B:768: samples from which on a step has so many."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    pairs = re.findall(r"([\d.e]+)([KMBT]?):(\d+)", job.text("step-batch-size-schedule").upper().replace("E", "e"))
    length = job.whole("seq-length")
    if not pairs or length < 1:
        raise NoCounterpart("needs pairs TOKENS:SAMPLES, and seq-length")
    return sorted((int(number(tokens) * units.get(unit, 1)) // length, int(batch)) for tokens, unit, batch in pairs)


def ramp_of(job: Job) -> tuple[int, ...]:
    """train.batch_ramp of --rampup-batch-size or --step-batch-size-schedule; empty if the batch does not grow."""
    if not job.has("step-batch-size-schedule"):
        return tuple(whole(word) for word in job.words("rampup-batch-size"))
    steps = _scheduled(job)
    if len(steps) == 1:
        return ()
    samples, first, increment = steps[-1][0], steps[0][1], steps[1][1] - steps[0][1]
    growths = len(steps) - 1
    even = [(-(-samples * growth // growths), first + growth * increment) for growth in range(growths + 1)]
    if increment < 1 or steps != even or batch_of(job) != steps[-1][1]:
        raise NoCounterpart("train.batch_ramp grows by equal increments at equal distances")
    return (first, increment, samples)


def stepped(job: Job, words: Words) -> Ours:
    """--step-batch-size-schedule, as far as it is a ramp."""
    ramp = ramp_of(job)
    batch: Ours = {"train.global_batch_size": (str(batch_of(job)),)}
    return {**batch, "train.batch_ramp": tuple(map(str, ramp))} if ramp else batch


def steps_of(job: Job, samples: int) -> int:
    """The steps of so many samples, with a batch that grows too."""
    batch = batch_of(job)
    ramp = ramp_of(job)
    if len(ramp) != 3:
        return samples // max(batch, 1)
    train = TrainConfig(global_batch_size=batch, batch_ramp=ramp)
    consumed = steps = 0
    while consumed < min(samples, ramp[2]):
        size = train.batch_size(consumed) if ramp[1] > 0 and ramp[2] > 0 else 0
        steps += 1
        consumed += size
        if size < 1 or steps > _MOST_STEPS:
            raise NoCounterpart("the batch of a ramp does not grow to global-batch-size")
    return steps + max(samples - consumed, 0) // max(batch, 1)


def train_steps(job: Job) -> int:
    """Steps of the run, of iterations or of samples."""
    if job.has("train-samples"):
        return steps_of(job, job.whole("train-samples"))
    return job.whole("train-iters")


def _counts_samples(job: Job) -> bool:
    """Whether the lengths of the learning rate are in samples: Megatron-LM takes them as it takes the run's."""
    return any(job.has(name) for name in ("train-samples", "lr-warmup-samples", "lr-decay-samples"))


def _length(job: Job, number: float) -> str:
    """A length of the learning rate, in the unit of the job."""
    return f"{shown(number)} samples" if _counts_samples(job) and number else shown(number)


def _warmup(job: Job) -> float:
    """The length of warm-up in the unit of the job, by whichever of its three flags."""
    if job.has("lr-warmup-fraction"):
        return job.number("lr-warmup-fraction") * _decay_end(job)
    return job.whole("lr-warmup-samples" if _counts_samples(job) else "lr-warmup-iters")


def _decay_end(job: Job) -> int:
    """Where the learning rate has decayed, in the unit of the job."""
    if _counts_samples(job):
        return job.whole("lr-decay-samples") or job.whole("train-samples")
    return job.whole("lr-decay-iters") or train_steps(job)


def to_steps(job: Job, words: Words) -> Ours:
    """--train-samples, which is the end of the decay too unless --lr-decay-samples is given."""
    steps: Ours = {"train.steps": (str(train_steps(job)),)}
    return steps if job.has("lr-decay-samples") else {**steps, **to_decay(job, ())}


def to_warmup(job: Job, words: Words) -> Ours:
    """--lr-warmup-fraction and --lr-warmup-samples."""
    warmup = _warmup(job)
    return {"optimizer.warmup_steps": (_length(job, warmup if _counts_samples(job) else round(warmup)),)}


def to_decay(job: Job, words: Words) -> Ours:
    """--lr-decay-iters and --lr-decay-samples: ours are counted from the end of warm-up, 0 to the end of the run."""
    style, end = job.text("lr-decay-style", "linear"), _decay_end(job)
    last = job.whole("train-samples") if _counts_samples(job) else train_steps(job)
    if style == "constant" or (style == "inverse-square-root" and end >= last):
        return {}
    if style not in ("linear", "cosine"):
        if words and end != last:
            raise NoCounterpart(
                f"{'wsd decays' if style == 'WSD' else 'the rate has its least value'} at the run's end"
            )
        return {}
    # The last whole batch of the run may end a little before its samples.
    if end == (_samples_of_run(job) if _counts_samples(job) else last):
        return {}
    return {"optimizer.decay_steps": (_length(job, max(end - _warmup(job), 1)),)}


def _samples_of_run(job: Job) -> int:
    """Samples of all steps of a run."""
    train = TrainConfig(global_batch_size=batch_of(job), batch_ramp=ramp_of(job), steps=train_steps(job))
    return train.samples()


def to_wsd_decay(job: Job, words: Words) -> Ours:
    """--lr-wsd-decay-samples, the last ones of the run."""
    return {"optimizer.decay_steps": (f"{shown(number(words[0]))} samples",)}


def wsd_style(job: Job, words: Words) -> Ours:
    """--lr-wsd-decay-style, which is exponential by default."""
    style = words[0] if words else "exponential"
    if job.text("lr-decay-style") == "WSD" and style != "linear":
        raise NoCounterpart(f"{style} has no counterpart: optimizer.schedule wsd decays linearly")
    return {}


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


def gathers_overlap(job: Job, words: Words) -> Ours:
    """--overlap-param-gather: a stage 3 of ZeRO overlaps by itself, and without ZeRO nothing is gathered."""
    fsdp = job.is_on("use-megatron-fsdp") and job.text("data-parallel-sharding-strategy", "optim_grads_params")
    if fsdp in ("optim_grads_params", "no_shard") or job.is_on("use-torch-fsdp2"):
        return {}
    sharded = fsdp or job.is_on("use-distributed-optimizer") or job.whole("zero-stage") in (1, 2)
    return {"optimizer.overlap_param_gather": ("true",)} if sharded else {}


def kept_every(job: Job, words: Words) -> Ours:
    """--save-retain-interval: all checkpoints between those kept are removed but for the last."""
    return {"checkpoint.keep_every": words, "checkpoint.keep_last": ("1",)}


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


# Megatron-LM: FP8


def fp8_recipe(job: Job, words: Words) -> Ours:
    """--fp8-recipe, which counts with --fp8-format."""
    if words[0] not in ("blockwise", "tensorwise", "delayed", "mxfp8"):
        raise NoCounterpart("kernels.products MODULE:NAME is a number format of your own")
    return {"train.fp8": ("blocks",)} if job.is_on("fp8-format") else {}


def gathers_codes(job: Job, words: Words) -> Ours:
    """--fp8-param-gather: with ZeRO-3 nothing is to be set."""
    fsdp = job.is_on("use-megatron-fsdp") and job.text("data-parallel-sharding-strategy", "optim_grads_params")
    if fsdp == "optim_grads_params" or job.is_on("use-torch-fsdp2") or not job.is_on("fp8-format"):
        return {}
    raise NoCounterpart("optimizer.zero_stage 3 gathers codes of FP8; 1 and 2 gather weights in bf16")


def layers_out_of_fp8(job: Job, words: Words) -> Ours:
    """--first-last-layers-bf16, whose numbers of layers are other flags."""
    if not (job.is_on("fp8-format") and job.is_on("first-last-layers-bf16")):
        return {}
    first, last = job.whole("num-layers-at-start-in-bf16", 1), job.whole("num-layers-at-end-in-bf16", 1)
    layers = (*range(first), *range(-1, -last - 1, -1))
    return {"train.fp8_skip": tuple(map(str, layers))} if layers else {}


def of_fp4(job: Job, words: Words) -> Ours:
    """--fp4-recipe, which counts with --fp4-format."""
    if job.is_on("fp4-format"):
        raise NoCounterpart("numbers of 4 bits are not built; train.fp8 blocks is the smallest format")
    return {}


# Megatron-LM: data and checkpoints


def _blend(words: Words) -> Words:
    """Prefixes with their weights: of a prefix, or of weights and prefixes in turn."""
    if len(words) == 1:
        return words
    weights, sources = words[::2], words[1::2]
    if len(weights) != len(sources) or not all(re.fullmatch(r"[\d.]+(e-?\d+)?", weight) for weight in weights):
        raise NoCounterpart(
            "prefixes without weights count by their sizes there; give each a weight, such as its tokens"
        )
    return tuple(f"{shown(number(w))}:{source}" for w, source in zip(weights, sources, strict=True))


def data(job: Job, words: Words) -> Ours:
    """--data-path and --train-data-path."""
    return {} if job.is_on("mock-data") else {"data.train": _blend(words)}


def validation_data(job: Job, words: Words) -> Ours:
    """--valid-data-path and --test-data-path, which are sets beside each other."""
    given = [("", job.words("valid-data-path")), ("test=", job.words("test-data-path"))]
    if any(len(paths) > 1 for _, paths in given):
        raise NoCounterpart("a blend is no set; name each set, such as web=PREFIX code=PREFIX")
    return {"data.validation": tuple(f"{prefix}{path}" for prefix, paths in given for path in paths)}


def split(job: Job, words: Words) -> Ours:
    """--split, or its default, which counts with --data-path alone."""
    own_files = any(job.names(f"{part}-data-path") for part in ("train", "valid", "test"))
    if job.is_on("mock-data") or own_files or not (words or job.names("data-path")):
        return {}
    ours: dict[str, Words] = {"data.split": tuple(re.findall(r"[\d.]+", " ".join(words)) or ("969", "30", "1"))}
    # What is not known has a name that cannot be opened: nobody trains on data without their split.
    return ours if job.has("data-path") else {"data.train": (UNKNOWN_DATA,), **ours}


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
    if not any(job.names(name) for name in ("data-path", "valid-data-path", "test-data-path")):
        raise NoCounterpart("no data are known that would be evaluated")
    return True


def evaluated(job: Job, words: Words) -> Ours:
    """--eval-iters."""
    return {"train.eval_samples": (str(whole(words[0]) * batch_of(job)),)} if _has_evaluation(job) else {}


def evaluated_every(job: Job, words: Words) -> Ours:
    """--eval-interval."""
    return {"train.eval_every": words} if _has_evaluation(job) else {}
