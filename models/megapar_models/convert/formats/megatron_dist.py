"""Megatron-Core's distributed checkpoints (`--ckpt-format torch_dist`) as `Contents`, those of Megatron-Bridge too.

    root/latest_checkpointed_iteration.txt     an iteration; Megatron-Bridge has latest_train_state.pt beside
    root/iter_0001200/metadata.json            {"sharded_backend": "torch_dist", ...}
                      .metadata, *.distcp      a folder of torch.distributed.checkpoint (`formats.dcp`)
                      common.pt                what is no tensor: args, iteration, the optimizer's groups. From July
                                               2026 on an object `common_state` of the DCP folder has it
                      run_config.yaml          Megatron-Bridge's settings in place of args

The states of an optimizer are read where they lie by the names of parameters (fully_reshardable), and where they lie in
Megatron's buckets (dp_reshardable, the default), which `formats.megatron_buckets` takes apart. Nothing stored is run.
"""

import json
import math
import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, MegaparError
from megapar.config.messages import first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import flatten
from megapar.declare.params import MAIN
from megapar.system.regular_files import read_regular
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, MOMENTUM, Contents, Position, StoredAt
from megapar_models.convert.formats.dcp import open_dcp
from megapar_models.convert.formats.megatron_buckets import BUCKET, rounds_to, take_apart
from megapar_models.convert.formats.megatron_names import megatron_recipes, stored_at
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.formats.torch_files import load_mapped
from megapar_models.convert.megatron import METADATA, TRACKER
from megapar_models.convert.megatron_experts import model_of
from megapar_models.convert.recipes import Recipe
from megapar_models.convert.saved import whole_config

BACKEND = "torch_dist"
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 100_000  # of a layer
COMMON, COMMON_STATE = "common.pt", "common_state"
BRIDGE_TRACKER, BRIDGE_STATE, BRIDGE_CONFIG = "latest_train_state.pt", "train_state.pt", "run_config.yaml"

# Megatron's names of the states of an optimizer, by ours. `param` and `fp32_param` are the fp32 main weights.
_STATES = {
    "fp32_param": MAIN,
    "param": MAIN,
    "exp_avg": EXP_AVG,
    "exp_avg_sq": EXP_AVG_SQ,
    "momentum_buffer": MOMENTUM,
}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")
# What a folder may hold that belongs to neither the model nor its optimizer: (name, the line about it, or "").
_LEFT_OUT = (
    (re.compile(r".*_extra_state"), ""),  # of fp8 kernels
    (re.compile(r".*(local_tokens_per_expert|global_tokens_per_expert|ga_steps)"), ""),  # counts of one step
    (re.compile(r"rng_state.*"), "random states: megapar draws its own"),
    (re.compile(r"rerun_state_machine_state.*"), "the state of Megatron's rerun machine"),
    (re.compile(r"(dataloader|data_iterator|energon)\w*.*"), "the position of the data loader: --config gives ours"),
    (
        re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(optimizer|grad_scaler|per_bucket\w+)"),
        "",
    ),
    (re.compile(r"(opt_param_scheduler|common_state|content_metadata|args|iteration|num_floating_point\w*).*"), ""),
)


class Folder(NamedTuple):
    """An opened folder: its DCP store, what is no tensor in it, and its args (None: it has none)."""

    path: Path
    store: TensorStore
    common: Mapping[str, Any]
    args: Mapping[str, Any] | None


def open_megatron_dist(
    source: Path,
    model: ModelConfig | None = None,
    *,
    vocab_size: int = 0,
    accepted: Collection[str] = (),
    weights_only: bool = False,
) -> Contents:
    """Open the checkpoint in `source`: an iteration's folder, or the folder above it. No tensor is read whole.

    `model` is the user's own, and args that say another one are left out; None: the model follows from Megatron's
    args, with `vocab_size` and `accepted` as in `megatron.read`. With `weights_only` the states of an optimizer are not
    looked at.
    Raises CheckpointError in one line if no model of ours computes the same, if the folder holds what is not known, or
    if the states of its optimizer cannot be named.
    """
    opened = open_folder(find(source))
    if model is None:
        return contents_of(opened, _model_of(opened, vocab_size, accepted), weights_only=weights_only)
    contents = contents_of(opened, model, weights_only=weights_only)
    return replace(contents, left_out=[*contents.left_out, *_other_args(opened, model, accepted)])


def is_megatron_dist(source: Path) -> bool:
    """Whether `find` would take the folder: by its metadata.json, or by the one its tracker leads to."""
    try:
        return (_iteration_folder(source) / METADATA).is_file()
    except CheckpointError:
        return False


def find(source: Path) -> Path:
    """The iteration's folder in `source`, or `source` itself. Raises CheckpointError if it is in another format."""
    folder = _iteration_folder(source)
    try:
        metadata = json.loads(read_regular(folder / METADATA))
        backend = metadata["sharded_backend"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / METADATA}: no readable sharded_backend ({error})") from None
    if backend != BACKEND:
        raise CheckpointError(f"{folder / METADATA}: sharded_backend is {backend!r}: of Megatron's, {BACKEND} is read")
    return folder


def _iteration_folder(source: Path) -> Path:
    if (source / METADATA).is_file():
        return source
    word = ""
    if (source / TRACKER).is_file():
        try:
            word = read_regular(source / TRACKER).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{source / TRACKER}: not readable ({error})") from None
    elif (source / BRIDGE_TRACKER).is_file():
        state = _plain(load_mapped(source / BRIDGE_TRACKER))
        word = str(_number(state.get("step"))) if isinstance(state, dict) else ""
    else:
        raise CheckpointError(f"{source}: has neither {METADATA} nor {TRACKER}: no checkpoint of Megatron-Core")
    # The word becomes a part of a path, so nothing else may stand there.
    if word != "release" and not re.fullmatch(r"\d{1,9}", word):
        raise CheckpointError(f"{source}: its tracker says {word[:40]!r}, which is neither an iteration nor `release`")
    return source / (word if word == "release" else f"iter_{int(word):07d}")


def open_folder(folder: Path, store: TensorStore | None = None) -> Folder:
    """Open the DCP folder and read what is no tensor. `store` is an opened one, if there is one."""
    store = store or open_dcp(folder)
    common: dict[str, Any] = {}
    if (folder / COMMON).is_file():
        loaded = load_mapped(folder / COMMON)
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{folder / COMMON}: holds no dict")
        common = {str(name): value for name, value in loaded.items()}
    else:
        name = next((name for name in store.values if _SHARD.sub("", name) == COMMON_STATE), None)
        value = None if name is None else store.values[name]
        while isinstance(value, list) and len(value) == 1:  # a sharded object is a list of its data
            value = value[0]
        if isinstance(value, dict):
            common = value
    args = common.get("args")
    if isinstance(args, Namespace):
        args = vars(args)
    return Folder(
        folder, store, {k: v for k, v in common.items() if k != "args"}, args if isinstance(args, dict) else None
    )


def _model_of(opened: Folder, vocab_size: int, accepted: Collection[str]) -> ModelConfig:
    if opened.args is None:
        settings = f" ({BRIDGE_CONFIG} is not read)" if (opened.path / BRIDGE_CONFIG).is_file() else ""
        text = f"has no args of Megatron-LM{settings}: give the model by --config"
        raise CheckpointError(f"{opened.path}: {text} FILE, a config.json of Hugging Face or a TOML file of megapar")
    _check_sizes(opened, opened.args)
    try:
        return model_of(opened.args, vocab_size, opened.path, accepted)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{opened.path}: args describe no model ({error})") from None


def _check_sizes(opened: Folder, args: Mapping[str, Any]) -> None:
    """Raise CheckpointError for numbers of layers or experts that the folder's tensors have not, before any loop."""
    layers, experts = 0, 0
    for name, info in opened.store.tensors.items():
        found = re.match(r"decoder\.layers\.(\d{1,6}\.)?(.*)", name)
        if found:
            layers = max(layers, int(found[1][:-1]) + 1 if found[1] else (*info.shape, 0)[0])
        if found and found[2].startswith("mlp.experts."):
            experts += math.prod(info.shape[: -2 if len(info.shape) > 2 else 0])
    for field, most in (("num_layers", min(layers, _MOST_LAYERS)), ("num_experts", min(experts, _MOST_EXPERTS))):
        value = args.get(field)
        if isinstance(value, int) and value > most:
            raise CheckpointError(f"{opened.path}: args.{field} is {value}, and its tensors have {most} at most")


def _other_args(opened: Folder, model: ModelConfig, accepted: Collection[str]) -> list[str]:
    """Lines about what Megatron's args say of the model that is not as in `model`."""
    if opened.args is None:
        return []
    try:
        theirs = whole_config(_model_of(opened, model.vocab_size, accepted)).model
    except MegaparError as error:
        return [f"Megatron's args, because the model is given ({error})"]
    if theirs.family != model.family:
        return [f"Megatron's args, which say model.family={theirs.family}"]
    said, given = flatten(theirs), flatten(model)
    kept = [name for name in said if name in given and said[name] != given[name]]
    return [f"Megatron's args say model.{name}={said[name]}; the given model has {given[name]}" for name in kept]


def contents_of(opened: Folder, model: ModelConfig, *, weights_only: bool = False) -> Contents:
    """The contents of an opened folder for a model. Raises CheckpointError as `open_megatron_dist`."""
    folder, store, common, _ = opened
    split = any(name.endswith("linear_fc1.weight_w") for name in store.tensors)
    wanted = megatron_recipes(model, split_gates=split)
    names = frozenset(name for name in store.tensors if not _is_optimizer(name))
    weights = {name: at for name in wanted if (at := stored_at(name, names))}
    stored: dict[str, dict[str, StoredAt]] = {MAIN: weights}
    Contents("", store, wanted, stored).check()  # before states are looked for at the names of weights
    used = {at.name for at in weights.values()}
    kind = sharding_type(common)
    iteration, position = _number(common.get("iteration")), Position()
    unread = []
    states = [name for name in store.tensors if _is_optimizer(name)]
    objects = [name for name in store.values if _is_optimizer(name) and not _ignored(name)]
    if weights_only:
        unread = ["the states of the optimizer"] if states or objects else []
    elif objects:
        raise _unnamed(folder, kind, f"{first_few(sorted(objects))} is an object")
    elif states:
        if any(BUCKET.match(name) for name in states):
            store = take_apart(opened.store, wanted, weights, opened.args, folder)
        found, of_states = _states(store, wanted)
        _check_named(folder, store, weights, found, set(states) - of_states, kind)
        _check_mains(folder, store, wanted, weights, found.get(MAIN, {}))
        for state, places in found.items():
            stored[state] = weights | places if state == MAIN else places
        position = Position(iteration, _updates(opened), _samples(opened), _loss_scale(opened))
    left = _left_over(opened, model, names - used)
    title = f"Megatron-Core's {BACKEND}, iteration {iteration}"
    contents = Contents(title, store, wanted, stored, position, [*unread, *left], model)
    contents.check()
    return contents


def sharding_type(common: Mapping[str, Any]) -> str:
    """How a distributed optimizer's states were saved, such as dp_reshardable. "": the folder does not say it."""
    content = common.get("content_metadata")
    if isinstance(content, dict) and isinstance(content.get("distrib_optim_sharding_type"), str):
        return str(content["distrib_optim_sharding_type"])
    found = [group.get("param_state_sharding_type") for group in _optimizers(common)]
    return next((kind for kind in found if isinstance(kind, str)), "")


def _is_optimizer(name: str) -> bool:
    return re.match(r"(chained_\d+\.)?optimizer\.", name) is not None


def _ignored(name: str) -> bool:
    return any(pattern.fullmatch(_SHARD.sub("", name)) for pattern, _ in _LEFT_OUT)


def _states(store: TensorStore, wanted: Mapping[str, Recipe]) -> tuple[dict[str, dict[str, StoredAt]], set[str]]:
    """The places of the states of each of Megatron's tensors, by our names of states, and the stored names of them."""
    by_state: dict[str, dict[str, str]] = {}
    for name in store.tensors:
        found = _STATE.fullmatch(name)
        if found and found[1] in _STATES:
            by_state.setdefault(found[1], {})[found[2]] = name
    places: dict[str, dict[str, StoredAt]] = {}
    used = set()
    for theirs, names in by_state.items():
        state = places.setdefault(_STATES[theirs], {})
        for name in wanted:
            at = stored_at(name, names)
            if at is not None:
                used.add(names[at.name])
                state[name] = StoredAt(names[at.name], at.leading)
    return {state: found for state, found in places.items() if found}, used


def _check_named(
    folder: Path,
    store: TensorStore,
    weights: Mapping[str, StoredAt],
    found: Mapping[str, Mapping[str, StoredAt]],
    unnamed: Collection[str],
    kind: str,
) -> None:
    """Raise CheckpointError if a state of the optimizer has no name or another shape than its weight."""
    unnamed = {name for name in unnamed if not BUCKET.match(name)}
    problem = ""
    for places in found.values():
        for name, at in places.items():
            if name in weights and not BUCKET.match(at.name):
                stored, weight = store.tensors[at.name].shape, store.tensors[weights[name].name].shape
                if len(stored) - len(at.leading) != len(weight) - len(weights[name].leading):
                    problem = f"{at.name} has shape {list(stored)}, its weight {list(weight)}"
    if unnamed:
        problem = f"{first_few(sorted(unnamed))} is not known"
    if not problem and not found.keys() - {MAIN}:
        problem = "no moments of any parameter are there"
    if problem:
        raise _unnamed(folder, kind, problem)


def _unnamed(folder: Path, kind: str, problem: str) -> CheckpointError:
    """The error about states that have no place here. `kind` is how they were saved, "" if unknown."""
    form = f" in the form {kind}" if kind else ""
    older = ": Megatron Core up to 0.14 flattened them" if kind.startswith("fully_sharded") else ""
    text = f"states of the optimizer{form} cannot be named{older} ({problem}): give --weights_only"
    return CheckpointError(f"{folder}: {text}")


def _check_mains(
    folder: Path,
    store: TensorStore,
    wanted: Mapping[str, Recipe],
    weights: Mapping[str, StoredAt],
    mains: dict[str, StoredAt],
) -> None:
    """Raise CheckpointError if main weights are not those of the model: then the moments are not either.

    Megatron Core 0.16.1 saves states in the form fully_reshardable at wrong places, if its buffer has several buckets
    (overlap_grad_reduce) and one does not end at a multiple of 128 elements. Of each stored tensor the first and the
    last layer, or expert, are compared.
    """
    last = {at.name: name for name, at in mains.items()}
    first = {mains[name].name: name for name in reversed(mains)}
    for name in dict.fromkeys([*first.values(), *last.values()]):
        if name in weights and not rounds_to(store, mains[name], weights[name], wanted[name].shape):
            raise CheckpointError(
                f"{folder}: {mains[name].name} does not round to {weights[name].name}: Megatron has saved the states "
                "of its optimizer at wrong places, so the moments are lost: give --weights_only"
            )


def _optimizers(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The dict of each of Megatron's optimizers: one, or one for each number from 0 on."""
    whole = common.get("optimizer")
    if not isinstance(whole, dict):
        return []
    numbered = [value for name, value in whole.items() if type(name) is int or str(name).isdecimal()]
    return [value for value in (numbered or [whole]) if isinstance(value, dict)]


def _distributed(opened: Folder, part: str) -> Iterator[Any]:
    """Yield the dict `optimizer.distributed.dp_group_idx_N.PART` of each group of ranks."""
    pattern = re.compile(rf"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.{part}")
    for name in opened.store.values:
        if pattern.fullmatch(_SHARD.sub("", name)):
            value = opened.store.values[name]
            while isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, dict):
                yield value


def _updates(opened: Folder) -> int:
    """The updates that the optimizer has made: Adam's step. Raises CheckpointError if there are none, or several."""
    steps: set[int] = set()
    inner = [one.get("optimizer", one) for one in _optimizers(opened.common)]
    for optimizer in [*inner, *_distributed(opened, "optimizer")]:
        if not isinstance(optimizer, dict):
            continue
        state = optimizer.get("state")
        values = [group.get("step") for group in optimizer.get("param_groups") or () if isinstance(group, dict)]
        values.append(state.get("common_step") if isinstance(state, dict) else None)
        steps |= {_number(value) for value in values if value is not None}
    if len(steps) != 1:
        text = f"says {sorted(steps)}" if steps else "says none"
        raise CheckpointError(
            f"{opened.path}: how many updates the optimizer has made is not one number: it {text}: give --weights_only"
        )
    return steps.pop()


def _loss_scale(opened: Folder) -> float | None:
    """The scale of the loss in fp16, or None."""
    scalers = [one.get("grad_scaler") for one in _optimizers(opened.common)]
    scalers += _distributed(opened, "grad_scaler")
    for scaler in scalers:
        if isinstance(scaler, dict) and isinstance(scaler.get("scale"), (int, float, Tensor)):
            scale = scaler["scale"]
            return float(scale.item() if isinstance(scale, Tensor) else scale)
    return None


def _samples(opened: Folder) -> int:
    """The samples that training has consumed, by the args or by Megatron-Bridge's train_state.pt."""
    if opened.args is not None:
        return _number(opened.args.get("consumed_train_samples"))
    if (opened.path / BRIDGE_STATE).is_file():
        state = _plain(load_mapped(opened.path / BRIDGE_STATE))
        if isinstance(state, dict):
            return _number(state.get("consumed_train_samples"))
    return 0


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Namespace) else value


def _number(value: Any) -> int:
    """A whole number, also one in a tensor of one element; 0 for everything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        value = value.item()
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1 << 62 else 0


def _left_over(opened: Folder, model: ModelConfig, unused: Collection[str]) -> list[str]:
    """Lines about what is left out. Raises CheckpointError about names that nobody knows."""
    tied = {"output_layer.weight"} if model.tie_word_embeddings else set()
    lines = []
    unknown = []
    values = (_SHARD.sub("", name) for name in opened.store.values if not _is_optimizer(name))
    for name in dict.fromkeys([*sorted(unused), *values]):
        known = next(((pattern, line) for pattern, line in _LEFT_OUT if pattern.fullmatch(name)), None)
        if known is None and name not in tied:
            unknown.append(name)
        elif known and known[1] and known[1] not in lines:
            lines.append(known[1])
    if unknown:
        raise CheckpointError(
            f"{opened.path}: holds {first_few(unknown)}, which model.family={model.family} of these options has not"
        )
    return lines
