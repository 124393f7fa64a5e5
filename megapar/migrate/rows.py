"""Rows of the table of other frameworks' flags, and notes shared by several rows.

A row names a flag as its framework spells it, our option, and how the value becomes ours. A note is words for a person:
it stands in hints and in docs/comparison.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megapar.migrate.job import Job, Ours, Words

Convert = Callable[[Job, Words], Ours]
"""Turns the words of a value into options of ours, none if there is nothing to set. Raises NoCounterpart."""

FROM_OTHERS = "from others"
"""A default that follows from other options: `convert` is called without words."""


@dataclass(frozen=True)
class OtherFlag:
    """A flag or key of another framework.

    `relation` says how its value becomes ours:

    - same: our option takes the same value
    - sets: the flag, if it is set, is our option with the value `ours`
    - choice: `choices` has our value for each of theirs
    - computed: `note` says how the value of our option follows
    - always: there is nothing to set. If `choices` has values, this holds for these alone; megapar has no others
    - lacking: megapar has nothing like it; `note` says what there is instead, or what to do

    `option` is ours by dotted path, such as train.steps, and "" with always and lacking. `convert` computes what
    `note` says. `default` is the value where the flag is not set, if ours differs. `auto` is the field of Hugging
    Face's arguments that stands for "auto" in a ds_config.
    """

    name: str
    relation: Literal["same", "sets", "choice", "computed", "always", "lacking"]
    option: str = ""
    note: str = ""
    ours: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    convert: Convert | None = None
    default: str = ""
    auto: str = ""


def same(
    name: str, option: str, note: str = "", convert: Convert | None = None, default: str = "", auto: str = ""
) -> OtherFlag:
    """A row with our value."""
    return OtherFlag(name, "same", option, note, convert=convert, default=default, auto=auto)


def sets(
    name: str,
    option: str,
    ours: str,
    note: str = "",
    convert: Convert | None = None,
    default: str = "",
    auto: str = "",
) -> OtherFlag:
    """A row of a switch: it sets our option to the value `ours`."""
    return OtherFlag(name, "sets", option, note, ours=ours, convert=convert, default=default, auto=auto)


def choice(
    name: str,
    option: str,
    choices: Mapping[str, str],
    note: str = "",
    convert: Convert | None = None,
    default: str = "",
    auto: str = "",
) -> OtherFlag:
    """A row with other names of its values here."""
    return OtherFlag(name, "choice", option, note, choices=choices, convert=convert, default=default, auto=auto)


def computed(
    name: str, option: str, note: str, convert: Convert | None = None, default: str = "", auto: str = ""
) -> OtherFlag:
    """A row with a value that follows as `note` says: by `convert`, or without it by a person."""
    return OtherFlag(name, "computed", option, note, convert=convert, default=default, auto=auto)


def always(name: str, note: str, *values: str) -> OtherFlag:
    """A row without an option here, because megapar always does so; with `values` for these values alone."""
    return OtherFlag(name, "always", note=note, choices=dict.fromkeys(values, ""))


def lacking(name: str, note: str, convert: Convert | None = None) -> OtherFlag:
    """A row of what megapar does not have. `convert` says of which values it needs nothing."""
    return OtherFlag(name, "lacking", note=note, convert=convert)


# Notes of several rows

NO_TOKEN_IS_DROPPED = "no token is dropped here, because an expert computes every token that chose it"
NO_NOISE = "routers add no noise here"
NO_TRACKER = "the numbers of each step are in metrics.jsonl and TensorBoard, in run_dir"
NO_FP8 = "train.precision bf16 is the smallest format"
OFFLOADS = "optimizer.offload 0 to 1 is the share of main weights and moments in host memory, train.offload of inputs"
WEIGHTS_STAY = "weights stay on the device; optimizer.zero_stage 3 shards them"
INPUTS_ALONE = "with train.recompute full, train.offload 0 to 1 is the share of layers with inputs in host memory"
PLANS = "tools/plan.py ranks layouts and micro-batches; train.memory_gb chooses what to recompute"
LOCAL_DISKS = "all ranks write to run_dir; checkpoint.local_dir keeps a copy on each host's own disk"
NO_PROFILER = "log.profile A-B times the parts of steps; profile kernels with torch.profiler or nsys"
COMPILES = "norms, activations and rotations are compiled, by inductor; products and communication stay outside"
ONE_COMPILER = "kernels.compile has no options: inductor compiles, for the shapes of the run"
NO_CUDA_GRAPHS = "CUDA graphs are not used"
NO_HUB = "push the folder that tools/convert_checkpoint.py native-to-hf writes"
LESS_WARMUP = "less optimizer.warmup_steps, as the decay is counted from the end of warm-up; 0: to train.steps"
COUNTS_STEPS = "samples / train.global_batch_size, as far as train.batch_ramp is not used"
IN_SAMPLES = "the number with its unit, such as '2000 samples'"
COUNTS_TOKENS = "tokens / train.seq_length"
COUNTS_BATCH = "train.micro_batch_size x this number x dp"
RESUMES = "checkpoint.resume auto goes on with what is in run_dir"
EPOCHS = "runs are counted in steps: samples x epochs / train.global_batch_size"
LAYERS_OF_STAGES = "numbers of layers of all stages, such as 3 4 4 2"
OF_MEMORY = "memory is torch's to manage"
WORKERS_OF_TEXTS = "data.workers are of use for hf: sources; a thread is enough for token files"
COLLECTS_TOGETHER = "all ranks collect Python's garbage after every 50th step"
NO_MTP = "one token is predicted"
BY_ALL_TO_ALL = "tokens travel by all-to-all, whatever dispatches them there"
WARMUP_FROM_0 = "warm-up starts at 0"
SCALES_ITSELF = "the loss scale of train.precision fp16 is dynamic, and has no options"
GRADIENTS_ARE_SUMS = "gradients are sums, divided once by the number of target tokens"
