"""Conversions of values of DeepSpeed, Hugging Face and torchtitan."""

import json
import math
import re
from collections.abc import Callable

from megapar_tools.migrate.conversions import split_elements
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import Job, NoCounterpart, Ours, Words, number, shown, whole

# DeepSpeed and Hugging Face


def hf_replicas(job: Job) -> int:
    """Data-parallel replicas; one if the number of ranks is not known."""
    names = ("tensor_parallel.autotp_size", "sequence_parallel_size", "pipeline.stages")
    return max(job.world // job.product(*names), 1)


def hf_micro_batch(job: Job) -> int:
    """Samples of a micro-batch of a replica."""
    if job.has("train_micro_batch_size_per_gpu"):
        return job.whole("train_micro_batch_size_per_gpu")
    if job.has("train_batch_size"):
        return max(job.whole("train_batch_size") // (hf_replicas(job) * job.whole("gradient_accumulation_steps", 1)), 1)
    return job.whole("per_device_train_batch_size", 1)


def per_device_batch(job: Job, words: Words) -> Ours:
    """per_device_train_batch_size. Where the job does not set it, a ds_config's train_batch_size decides."""
    if not job.has("per_device_train_batch_size") and job.has("train_batch_size"):
        return {"train.micro_batch_size": (str(hf_micro_batch(job)),)}
    return {"train.micro_batch_size": words}


def hf_batch(job: Job) -> int:
    """Samples of a step."""
    if job.has("train_batch_size"):
        return job.whole("train_batch_size")
    return hf_micro_batch(job) * job.whole("gradient_accumulation_steps", 1) * hf_replicas(job)


def accumulated(job: Job, words: Words) -> Ours:
    """gradient_accumulation_steps."""
    return {"train.global_batch_size": (str(hf_batch(job)),)}


def micro_batch(job: Job, words: Words) -> Ours:
    """train_micro_batch_size_per_gpu, or what follows from train_batch_size."""
    return {"train.micro_batch_size": (str(hf_micro_batch(job)),)}


def hf_epoch(job: Job) -> int:
    """Optimizer steps of an epoch. Raises NoCounterpart if the number of samples is not known."""
    if not job.samples:
        raise NoCounterpart("the number of samples is not known; give it with --samples")
    batches = math.ceil(job.samples / (hf_micro_batch(job) * hf_replicas(job)))
    return math.ceil(batches / job.whole("gradient_accumulation_steps", 1))


def hf_steps(job: Job) -> int:
    """Optimizer steps of the run. Raises NoCounterpart if they depend on an unknown number of samples."""
    if job.whole("max_steps", -1) > 0:
        return job.whole("max_steps")
    return math.ceil(hf_epoch(job) * job.number("num_train_epochs", 3))


def times_an_epoch(option: str) -> Callable[[Job, Words], Ours]:
    """Axolotl's evals_per_epoch and saves_per_epoch: so many in each epoch."""

    def convert(job: Job, words: Words) -> Ours:
        times = number(words[0])
        if times <= 0:
            return {}
        return {option: (str(math.ceil(hf_steps(job) / (times * job.number("num_train_epochs", 3)))),)}

    return convert


def max_steps(job: Job, words: Words) -> Ours:
    """max_steps: -1 leaves it to the epochs."""
    return {"train.steps": words} if whole(words[0]) > 0 else {}


def epochs(job: Job, words: Words) -> Ours:
    """num_train_epochs, which max_steps overrides."""
    return {"train.steps": (str(hf_steps(job)),)}


def hf_warmup(job: Job, words: Words) -> Ours:
    """warmup_steps: below 1 a share of the steps."""
    value = number(words[0])
    steps = math.ceil(value * hf_steps(job)) if 0 < value < 1 else whole(words[0])
    return {"optimizer.warmup_steps": (str(steps),)}


def warmup_ratio(job: Job, words: Words) -> Ours:
    """warmup_ratio, which warmup_steps overrides."""
    if job.number("warmup_steps") or not number(words[0]):
        return {}
    return {"optimizer.warmup_steps": (str(math.ceil(number(words[0]) * hf_steps(job))),)}


def scheduler_arguments(job: Job, words: Words) -> Ours:
    """lr_scheduler_kwargs with a least learning rate."""
    given = json.loads(" ".join(words) or "{}")
    unknown = set(given) - {"min_lr", "min_lr_rate"} if isinstance(given, dict) else {"it"}
    if unknown:
        raise NoCounterpart(f"{', '.join(sorted(unknown))}: min_lr and min_lr_rate are read")
    if "min_lr" in given:
        return {"optimizer.min_lr": (shown(float(given["min_lr"])),)}
    if "min_lr_rate" in given:
        return {"optimizer.min_lr": (shown(float(given["min_lr_rate"]) * job.number("learning_rate")),)}
    return {}


def checkpointing_arguments(job: Job, words: Words) -> Ours:
    """gradient_checkpointing_kwargs: how torch does it makes no difference here."""
    given = json.loads(" ".join(words) or "{}")
    if not isinstance(given, dict) or set(given) - {"use_reentrant"}:
        raise NoCounterpart("use_reentrant alone is read")
    return {}


# trl, PEFT and programs with a loop of their own

_OBJECTIVES = {"sigmoid": "dpo", "sigmoid_norm": "dpo_norm", "ipo": "ipo", "robust": "dpo"}
# Fields that trl's other trainers have beside beta, which is then another.
_NOT_OF_DPO = (
    "num_generations",
    "desirable_weight",
    "undesirable_weight",
    "cpo_alpha",
    "simpo_gamma",
    "max_new_tokens",
)
_MATRICES = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}


def preferences(job: Job, words: Words) -> Ours:
    """loss_type of trl's DPO, and its beta, which decides the objective too: a run without it would read no beta."""
    kinds = job.words("loss_type") or ("sigmoid",)
    if any(job.names(name) for name in _NOT_OF_DPO):
        raise NoCounterpart("of trl's trainers DPO's and the reward model's have an objective here")
    if len(kinds) > 1 or kinds[0] not in _OBJECTIVES:
        raise NoCounterpart(f"{', '.join(_OBJECTIVES)} have a counterpart")
    return {"train.objective": (_OBJECTIVES[kinds[0]],)}


def beta(job: Job, words: Words) -> Ours:
    """beta of trl's DPO."""
    return {**preferences(job, ()), "train.beta": words}


def smoothed(job: Job, words: Words) -> Ours:
    """label_smoothing of trl's DPO: ours is that of the robust loss."""
    if not number(words[0]):
        return {}
    if job.text("loss_type") != "robust":
        raise NoCounterpart("train.label_smoothing is that of loss_type robust")
    return {"train.label_smoothing": words}


def adapted(job: Job, words: Words) -> Ours:
    """lora_target_modules: matrices by transformers' names of Llama and its like, or ours."""
    names = [name for word in words for name in word.split(",") if name]
    if names == ["all-linear"]:
        return {}
    unknown = [name for name in names if name not in _MATRICES and name not in _MATRICES.values()]
    if unknown or not names:
        raise NoCounterpart(f"{', '.join(unknown)}: {', '.join(_MATRICES)} and all-linear have a counterpart")
    return {"adapter.targets": tuple(_MATRICES.get(name, name) for name in names)}


def chat_adapters(job: Job, words: Words) -> Ours:
    """lora_module_name of DeepSpeed-Chat: its products are divided by lora_dim, and what has no adapter is trained."""
    if words not in (("layers.",), ("decoder.layers.",), ("h.",), ("transformer.h.",)):
        raise NoCounterpart("the layers, such as layers., have a counterpart; adapter.targets names matrices")
    if job.is_on("only_optimize_lora"):
        return {"adapter.alpha": ("1",)}
    return {"adapter.alpha": ("1",), "train.trainable": ("*.lora_*", "*norm*", "embedding.*", "head.*")}


def texts(job: Job, words: Words) -> Ours:
    """A file of texts: data.train names tokens."""
    raise NoCounterpart("megapar preprocess makes tokens of it first")


def save_strategy(job: Job, words: Words) -> Ours:
    """save_strategy: steps, no, or epoch, whose length follows from the samples."""
    never = words[0] in ("no", "false")  # YAML reads no as false
    if words[0] == "epoch":
        return {"checkpoint.every": (str(hf_epoch(job)),)}
    if words[0] != "steps" and not never:
        raise NoCounterpart("checkpoint.every counts steps")
    return {"checkpoint.every": ("0",)} if never else {}


def save_steps(job: Job, words: Words) -> Ours:
    """save_steps: below 1 a share of the steps."""
    if job.text("save_strategy", "steps") != "steps":
        return {}
    every = round(number(words[0]) * hf_steps(job)) if 0 < number(words[0]) < 1 else whole(words[0])
    return {"checkpoint.every": (str(every),)}


def eval_strategy(job: Job, words: Words) -> Ours:
    """eval_strategy: without data.validation nothing is evaluated."""
    if words[0] == "epoch":
        return {"train.eval_every": (str(hf_epoch(job)),)}
    if words[0] not in ("steps", "no", "false"):
        raise NoCounterpart("train.eval_every counts steps")
    return {}


def fsdp(job: Job, words: Words) -> Ours:
    """fsdp: a list of words."""
    text = " ".join(words).replace(",", " ").split()
    if "full_shard" in text or "true" in [word.lower() for word in text]:
        return {"optimizer.zero_stage": ("3",)}
    if "shard_grad_op" in text:
        return {"optimizer.zero_stage": ("2",)}
    if not text or text[0].lower() in ("false", "no_shard"):
        return {}
    raise NoCounterpart("full_shard and shard_grad_op are read")


def resumed(job: Job, words: Words) -> Ours:
    """resume_from_checkpoint: true is the default here, a folder is theirs."""
    if words and words[0].lower() not in ("true", "false"):
        raise NoCounterpart("their checkpoint is converted first")
    return {"checkpoint.resume": ("none",)} if words and words[0].lower() == "false" else {}


def reported(job: Job, words: Words) -> Ours:
    """report_to: names of services. Hugging Face's project of Weights & Biases is huggingface by default."""
    services = {word.lower() for word in words}
    if services - {"tensorboard", "wandb", "none", "all"}:
        raise NoCounterpart("log.tensorboard, log.wandb, log.mlflow and log.prometheus_port are the services")
    ours: dict[str, Words] = {"log.tensorboard": ("true" if services & {"tensorboard", "all"} else "false",)}
    return ours | ({"log.wandb": ("huggingface",)} if "wandb" in services else {})


def monitored(job: Job, words: Words) -> Ours:
    """wandb.project, which counts if wandb.enabled is set."""
    return {"log.wandb": words} if job.is_on("wandb.enabled") else {}


def tracked(job: Job, words: Words) -> Ours:
    """metrics.enable_wandb: the project has a name by default."""
    return {"log.wandb": ("torchtitan",)} if not words or words[0].lower() == "true" else {}


def reduce_bucket(job: Job, words: Words) -> Ours:
    """zero_optimization.reduce_bucket_size, in elements."""
    return split_elements(number(words[0]), job.whole("zero_optimization.stage"))


def offloaded(job: Job, words: Words) -> Ours:
    """zero_optimization.offload_optimizer: its device and its ratio."""
    given = json.loads(" ".join(words) or "{}")
    if not isinstance(given, dict) or given.get("device", "none") == "none":
        return {}
    if given["device"] != "cpu":
        raise NoCounterpart("host memory alone holds what is offloaded")
    return {"optimizer.offload": (shown(float(given.get("ratio", 1))),)}


def kept_on_device(job: Job, words: Words) -> Ours:
    """zero_optimization.offload_param, unless its device is none."""
    given = json.loads(" ".join(words) or "{}")
    if isinstance(given, dict) and given.get("device", "none") == "none":
        return {}
    raise NoCounterpart("weights stay on the device; optimizer.zero_stage 3 shards them")


def cos_min_ratio(job: Job, words: Words) -> Ours:
    """scheduler.params.cos_min_ratio."""
    peak = job.number("optimizer.params.lr") or job.number("learning_rate")
    return {"optimizer.min_lr": (shown(number(words[0]) * peak),)}


def ds_decay(job: Job, words: Words) -> Ours:
    """scheduler.params.total_num_steps."""
    warmup = job.whole("scheduler.params.warmup_num_steps") or job.whole("warmup_steps")
    return {"optimizer.decay_steps": (str(max(whole(words[0]) - warmup, 1)),)}


def loss_scale(job: Job, words: Words) -> Ours:
    """Options of the loss scale, which count with fp16 alone."""
    if job.is_on("fp16.enabled") or job.is_on("fp16"):
        raise NoCounterpart("the loss scale of train.precision fp16 is dynamic, and has no options")
    return {}


def breakdown(job: Job, words: Words) -> Ours:
    """wall_clock_breakdown, if it is true, would need the number of a step."""
    if words[0].lower() in ("false", "0"):
        return {}
    raise NoCounterpart("log.profile names the steps")


def memory_report(job: Job, words: Words) -> Ours:
    """memory_breakdown."""
    return {} if words[0].lower() in ("false", "0") else {"train.memory_report": ("true",)}


# torchtitan


def titan_replicas(job: Job) -> int:
    """Data-parallel replicas; one if the number of ranks is not known."""
    names = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
    return max(job.world // job.product(*names), 1)


def titan_micro_batch(job: Job) -> int:
    """Samples of a micro-batch: a pipeline cuts the local batch into further ones."""
    if job.product("parallelism.pipeline_parallel_degree") > 1:
        return job.whole("parallelism.pipeline_parallel_microbatch_size", 1)
    return job.whole("training.local_batch_size", 1)


def _samples_of_tokens(job: Job, words: Words) -> int:
    """Whole samples of so many tokens. Raises NoCounterpart if they are no whole samples."""
    length = job.whole("training.max_context_length") or job.whole("training.seq_len", 2048)
    tokens = whole(words[0])
    if length < 1 or tokens % length:
        raise NoCounterpart(f"is no multiple of the {length:,} tokens of a sample")
    return tokens // length


def micro_tokens(job: Job, words: Words) -> Ours:
    """training.num_tokens_per_microbatch_per_dp_rank, which decides the batch too, where that is not given."""
    micro = _samples_of_tokens(job, words)
    if job.whole("training.num_tokens_per_train_step", -1) > 0:
        return {"train.micro_batch_size": (str(micro),)}
    has_pipeline = job.product("parallelism.pipeline_parallel_degree") > 1
    batch = micro * titan_replicas(job) * (job.product("parallelism.num_pp_microbatches") if has_pipeline else 1)
    return {"train.micro_batch_size": (str(micro),), "train.global_batch_size": (str(batch),)}


def step_tokens(job: Job, words: Words) -> Ours:
    """training.num_tokens_per_train_step: -1 is a micro-batch of every replica."""
    if whole(words[0]) < 0:
        return {}
    return {"train.global_batch_size": (str(_samples_of_tokens(job, words)),)}


def local_batch(job: Job, words: Words) -> Ours:
    """training.local_batch_size. Of later versions num_tokens_per_microbatch_per_dp_rank stands in its place."""
    if job.has("training.num_tokens_per_microbatch_per_dp_rank") and not job.has("training.local_batch_size"):
        return {}
    size = job.whole("training.global_batch_size", -1)
    if size < 1:
        size = whole(words[0]) * titan_replicas(job)
    return {"train.micro_batch_size": (str(titan_micro_batch(job)),), "train.global_batch_size": (str(size),)}


def titan_global_batch(job: Job, words: Words) -> Ours:
    """training.global_batch_size: -1 is the local batch of every replica."""
    return {"train.global_batch_size": words} if whole(words[0]) > 0 else {}


def tensor_parallel(job: Job, words: Words) -> Ours:
    """parallelism.tensor_parallel_degree, with which torchtitan splits activations along the sequence."""
    if whole(words[0]) < 2:
        return {"parallel.tp": words}
    return {"parallel.tp": words, "parallel.sequence_parallel": ("true",)}


def sharded(job: Job, words: Words) -> Ours:
    """parallelism.data_parallel_shard_degree: 1 shards nothing, -1 over all ranks that are left."""
    degree = whole(words[0])
    if degree == 1:
        return {"optimizer.zero_stage": ("0",)}
    reshard = "2" if job.text("parallelism.fsdp_reshard_after_forward") == "never" else "3"
    if degree < 1 or job.product("parallelism.data_parallel_replicate_degree") < 2:
        return {"optimizer.zero_stage": (reshard,)}
    ranks = degree * job.product("parallelism.context_parallel_degree")
    return {"optimizer.zero_stage": (reshard,), "optimizer.shard_ranks": (str(ranks),)}


def replicated(job: Job, words: Words) -> Ours:
    """parallelism.data_parallel_replicate_degree: with a shard degree of -1 the groups follow from the ranks."""
    degree, shard = whole(words[0]), job.whole("parallelism.data_parallel_shard_degree", -1)
    if degree < 2 or shard > 0:
        return {}
    ranks = titan_replicas(job) * job.product("parallelism.context_parallel_degree")
    if not job.world or ranks % degree:
        raise NoCounterpart("needs the number of ranks, and must divide those of dp x cp")
    return {"optimizer.shard_ranks": (str(ranks // degree),)}


def resharded(job: Job, words: Words) -> Ours:
    """parallelism.fsdp_reshard_after_forward: the shard degree's conversion reads it."""
    if words[0] not in ("default", "always", "never"):
        raise NoCounterpart("default, always and never are read")
    return {}


def schedule(job: Job, words: Words) -> Ours:
    """parallelism.pipeline_parallel_schedule, which needs a pipeline."""
    named = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "LoopedBFS": "breadth"}
    named |= {"InterleavedZeroBubble": "zb-interleaved", "ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipe-v"}
    if job.product("parallelism.pipeline_parallel_degree") < 2:
        return {}
    if words[0] not in named:
        raise NoCounterpart("has no schedule of this name")
    return {"parallel.schedule": (named[words[0]],)}


def _decay(job: Job) -> tuple[int, bool]:
    """Steps of the decay, and whether the rate is held before it."""
    steps, warmup = job.whole("training.steps"), job.whole("lr_scheduler.warmup_steps")
    ratio = job.text("lr_scheduler.decay_ratio")
    length = round(number(ratio) * steps) if ratio and ratio.lower() != "none" else steps - warmup
    return min(length, steps - warmup), warmup + length < steps


def decay_type(job: Job, words: Words) -> Ours:
    """lr_scheduler.decay_type: a rate that is held first is wsd here, whose decay is linear."""
    length, held = _decay(job)
    if held and words[0] == "linear":
        return {"optimizer.schedule": ("wsd",), "optimizer.decay_steps": (str(length),)}
    if held or words[0] not in ("linear", "cosine"):
        raise NoCounterpart("linear and cosine have a counterpart, after a stable phase linear alone")
    return {"optimizer.schedule": (words[0],)}


def decay_ratio(job: Job, words: Words) -> Ours:
    """lr_scheduler.decay_ratio: the conversion of the type reads it."""
    return decay_type(job, job.words("lr_scheduler.decay_type"))


def min_lr_factor(job: Job, words: Words) -> Ours:
    """lr_scheduler.min_lr_factor, lr_min before."""
    return {"optimizer.min_lr": (shown(number(words[0]) * job.number("optimizer.lr")),)}


def titan_betas(job: Job, words: Words) -> Ours:
    """optimizer.beta1 and beta2."""
    return {"optimizer.betas": (job.text("optimizer.beta1"), job.text("optimizer.beta2"))}


def _saves(job: Job) -> bool:
    return job.is_on("checkpoint.enable") or job.is_on("checkpoint.enable_checkpoint")


def saving(job: Job, words: Words) -> Ours:
    """checkpoint.enable: without it nothing is saved, not even at the end."""
    return {} if _saves(job) else {"checkpoint.save_last": ("false",)}


def if_saved(job: Job, words: Words) -> Ours:
    """Options of the last checkpoint, which count if there is one."""
    if _saves(job) and words[0].lower() != "false":
        raise NoCounterpart("a checkpoint is complete, and megapar convert native-to-hf writes weights alone")
    return {}


def interval(job: Job, words: Words) -> Ours:
    """checkpoint.interval, of use if checkpoints are written."""
    return {"checkpoint.every": words} if _saves(job) else {}


def recompute_mode(job: Job, words: Words) -> Ours:
    """activation_checkpoint.mode: every n-th layer, products kept, whole layers, or nothing."""
    option = job.text("activation_checkpoint.selective_ac_option", "op")
    if words[0] == "selective" and option.isdigit():
        return {"train.recompute": ("full",), "train.recompute_layers": (f"::{option}",)}
    named = {"full": "full", "selective": "selective", "none": "none"}
    if words[0] not in named:
        raise NoCounterpart("full, selective and none are read")
    return {"train.recompute": (named[words[0]],)}


_CONVERTERS = (
    *("float8", "mx", "quantize.linear.float8", "quantize.linear.mx"),
    *("quantize.grouped_mm.float8", "quantize.grouped_mm.mx"),
)
_FILTERED = {
    **{f"attention.w{name}": (f"*.attention.{name}",) for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b")},
    **{f"feed_forward.w{n}": (f"*.mlp.{name}",) for n, name in ((1, "gate"), (2, "down"), (3, "up"))},
    "attention": ("*.attention.*",),
    "feed_forward": ("*.mlp.gate", "*.mlp.up", "*.mlp.down"),
    **dict.fromkeys(("output", "router.gate", "moe.router.gate"), ()),  # never in FP8 here
}


def converters(job: Job, words: Words) -> Ours:
    """model.converters: those of torchao, all in one recipe here."""
    named = [name for word in words for name in word.split(",") if name]
    unknown = [name for name in named if name not in _CONVERTERS]
    if unknown:
        raise NoCounterpart(f"{', '.join(unknown)}: {', '.join(_CONVERTERS)} have a counterpart")
    return {"train.fp8": ("blocks",)} if named else {}


def filtered(job: Job, words: Words) -> Ours:
    """filter_fqns of a converter, which counts with it: parts of torchtitan's names, of what stays in bf16."""
    if not job.text("model.converters"):
        return {}
    names = [name for word in words for name in word.split(",") if name]
    skipped: list[str] = []
    for name in names:
        if layer := re.fullmatch(r"layers\.(\d+)\.", name):
            skipped.append(layer[1])
        elif name in _FILTERED:
            skipped += _FILTERED[name]
        else:
            raise NoCounterpart(f"{name} is no matrix or layer that is known here; name it in train.fp8_skip")
    return {"train.fp8_skip": tuple(skipped)} if skipped else {}


# Programs around accelerate


def mixed_precision(job: Job, words: Words) -> Ours:
    """mixed_precision, of which fp8 multiplies matrices in FP8, between activations in bf16."""
    named = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    if words[0] not in named:
        raise NoCounterpart(f"{', '.join(named)} have a counterpart")
    precision: Ours = {"train.precision": (named[words[0]],)}
    return {**precision, "train.fp8": ("blocks",)} if words[0] == "fp8" else precision


def of_validation(job: Job, words: Words) -> Ours:
    """Options of validation, which count if it is enabled."""
    if job.is_on("validation.enable"):
        raise NoCounterpart("data.validation names sources of tokens")
    return {}


def printed(job: Job, words: Words) -> Ours:
    """steps_per_print: the Trainer prints by its own logging_steps."""
    return {} if job.has("logging_steps") else {"log.every": words}


def of_profiling(job: Job, words: Words) -> Ours:
    """Options of profiling, which count if it is enabled."""
    if job.is_on("profiling.enable_profiling"):
        raise NoCounterpart("kernels are not profiled")
    return {}


def titan_tokenizer(job: Job, words: Words) -> Ours:
    """model.tokenizer_path: a file of tiktoken, or a folder with tokenizer.json."""
    if words[0].endswith("tokenizer.model"):
        return {"data.tokenizer": (f"tiktoken:{words[0]}",)}
    path = words[0] if words[0].endswith(".json") else f"{words[0].rstrip('/')}/tokenizer.json"
    return {"data.tokenizer": (f"hf:{path}",)}


def flavor(job: Job, words: Words) -> Ours:
    """model.name and model.flavor: a preset has the sizes of the published model."""
    name = job.text("model.name")
    known = read_flags("flavors")
    options = known.get(name, {}).get(job.text("model.flavor"))
    if options is None:
        raise NoCounterpart("no preset is known to be this model; give one with --model")
    # DeepSeek's yarn begins where samples are longer than those of its first training.
    if name == "deepseek_v3" and job.whole("training.seq_len", 2048) <= 4096:
        options |= known["plain_rope"]
    return {option: (value,) for option, value in options.items()}
