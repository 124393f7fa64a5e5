"""Computes what follows from the options of a run: options left to be derived, and numbers."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import MixtureModel
from megapar.config.model_rules import ModelRules
from megapar.config.options import ADAPTERS, SCORE, Config, ParallelConfig, TrainConfig
from megapar.config.virtual_stages import VirtualStages


def derive(config: Config, world_size: int, rules: ModelRules, stages: VirtualStages) -> Config:
    """Fill in the options given as 0 or "auto" for "derived", for `world_size` ranks. Returns a new config.

    `rules` are those of the model's family, `stages` those of the schedule.
    """
    model = config.model
    parallel = config.parallel
    activation: Any = rules.activations[0]
    model = replace(
        model,
        hidden_act=activation if model.hidden_act == "auto" else model.hidden_act,
        num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
    )
    parallel = replace(
        parallel,
        dp=parallel.dp or world_size // (parallel.tp * parallel.cp * parallel.pp),
        vpp=stages.meant_by(parallel.vpp),
        # Without tp or ep there is nothing to overlap. Else a plan chooses (`megapar_tools.plan.choose`).
        tp_overlap_chunks=1 if parallel.tp == 1 and not parallel.tp_overlap_chunks else parallel.tp_overlap_chunks,
        ep_overlap_chunks=1 if parallel.ep == 1 and not parallel.ep_overlap_chunks else parallel.ep_overlap_chunks,
    )
    if isinstance(model, MixtureModel) and model.experts is not None:
        width = model.moe.moe_intermediate_size or model.intermediate_size
        model = replace(model, moe=replace(model.moe, moe_intermediate_size=width))
        parallel = replace(parallel, etp=parallel.etp or parallel.tp)
    # A reduce-scatter over dp x cp gives each rank an equal share of a bucket. With a share of 4 MiB (2^20 fp32
    # elements) the transfer takes longer than its latency. Megatron-LM's buckets grow alike: max(40 M, 1 M * dp)
    # elements.
    bucket_mb = config.optimizer.bucket_mb
    if config.optimizer.zero_stage < 2:  # from 2 on a layer is a bucket
        bucket_mb = bucket_mb or max(64.0, 4.0 * parallel.dp * parallel.cp)
    optimizer = replace(config.optimizer, bucket_mb=bucket_mb)
    train = config.train
    if config.adapter.rank and not train.trainable:
        # The head of a reward model is new, so adapters alone could not learn.
        train = replace(train, trainable=(ADAPTERS, SCORE) if model.head == "score" else (ADAPTERS,))
    return replace(config, model=model, parallel=parallel, train=train, optimizer=optimizer)


def smallest_world(parallel: ParallelConfig) -> int:
    """The smallest number of ranks of the given layout: with one replica if dp is derived."""
    return parallel.tp * parallel.cp * parallel.pp * max(parallel.dp, 1)


def with_vocabulary(config: Config, tokenizer_size: int) -> Config:
    """Replace `model.vocab_size` 0 by the size of the tokenizer.

    Raises ConfigError if `model.vocab_size` is given and smaller than the tokenizer.
    """
    if config.model.vocab_size == 0:
        return replace(config, model=replace(config.model, vocab_size=tokenizer_size))
    if config.model.vocab_size < tokenizer_size:
        text = f"the tokenizer has {tokenizer_size} ids; use 0 for its size, or at least {tokenizer_size}"
        text += "; checkpoint.init_from keeps the rows of a smaller vocabulary"
        raise ConfigError(problem(config, "model.vocab_size data.tokenizer", text))
    return config


def num_microbatches(config: Config, batch_size: int = 0) -> int:
    """The largest number of micro-batches of a data-parallel replica in one step. Others may have one fewer.

    The step has `batch_size` samples, or train.global_batch_size if `batch_size` is 0.
    """
    samples = config.train.micro_batch_size * config.parallel.dp
    return -(-(batch_size or config.train.global_batch_size) // samples)


def every_nth(layers: Sequence[str]) -> int:
    """Return n of train.recompute_layers ::n, 1 if it is empty, and 0 if it names layers by number."""
    if not layers:
        return 1
    match = re.fullmatch(r"::([1-9][0-9]{0,4})", layers[0])
    return int(match[1]) if match and len(layers) == 1 else 0


def layers_of_every(words: Sequence[str]) -> tuple[str, ...]:
    """Return train.recompute_layers of the words behind its old spelling, train.recompute_every n. 1 means all layers.

    Words that are no number stay what they are, and are refused as layers.
    """
    return () if [*words] == ["1"] else tuple(f"::{word}" if word.isdecimal() else word for word in words)


def recomputed_layers(train: TrainConfig) -> tuple[int, ...]:
    """Return the numbers of the layers that train.recompute_layers names, none if it names every n-th.

    Raises ValueError unless they are in order.
    """
    numbers: list[int] = []
    for words in () if every_nth(train.recompute_layers) else train.recompute_layers:
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", words)
        if match is None:
            raise ValueError(f"{words} is neither a layer nor A-B, nor alone ::N")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or (numbers and first <= numbers[-1]):
            raise ValueError(f"{words} is not behind the layers before it")
        numbers += range(first, last + 1)
    return tuple(numbers)


def profiled_steps(profile: str) -> range:
    """The steps that log.profile names, counted from 1. Raises ValueError for a text other than A-B and none."""
    if profile == "none":
        return range(0)
    # Up to nine digits: Python refuses to read thousands of them.
    match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", profile)
    if match is None:
        raise ValueError(f"{profile} is not A-B")
    return range(int(match[1]), int(match[2]) + 1)
