"""Checkpoints of DeepSpeed's engine under ZeRO, as data-parallel ranks wrote them (`save_checkpoint`), as a store.

    run/latest                                              the name of a tag's folder, such as global_step1200
    run/TAG/mp_rank_00_model_states.pt                      the module, shapes, plain values; of data rank 0
    run/TAG/zero_pp_rank_3_mp_rank_00_model_states.pt       the same of data rank 3 under ZeRO-3
    run/TAG/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt  data rank 3's main weights and moments (without bf16_ too)
    run/TAG/layer_0_expert_5_mp_rank_00_model_states.pt     weights of an expert of DeepSpeed's MoE

Tensors are named `STATE/NAME`: NAME as the module names the parameter, STATE one of

    weight    as the module held it, in the dtype of training. Under ZeRO-3 only buffers and frozen parameters are
              stored so, without ZeRO all weights, and nothing but them: its moments have numbers, no names
    fp32      the optimizer's main weight
    exp_avg   and the other states of the optimizer, as it calls them (exp_avg_sq, momentum_buffer)

A parameter that the module holds under two names has both, with the same values.

The optimizer's files hold flat vectors. In each group of parameters, ZeRO-1 and ZeRO-2 join all parameters, in the
order of `param_shapes`, and cut the joined vector, padded at its end, into equal parts for the ranks. With
`parameter_alignment` values of padding lie between parameters, and `param_alignment_paddings` counts them. ZeRO-3 cuts
each parameter by itself, into parts of ceil(numel / ranks), padded at the end of the last, and a rank joins its parts
of a group. A group of experts is cut among the ranks that hold the same experts.

No code in a file is run, and no class is imported. Opening reads the files' pickles, and values are read when they are
asked for. A run with tensor or pipeline ranks is read in DeepSpeed's universal form alone (`deepspeed_universal`).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from megapar.base.errors import CheckpointError
from megapar.config.messages import counted, first_few
from megapar.declare.params import Sizes
from megapar_models.convert.formats.deepspeed_files import (
    FP32,
    MODEL_FILE,
    NO_VALUES,
    Cut,
    DeepSpeedStore,
    File,
    Place,
    cut_in_turn,
    find,
    flat_vector,
    load,
    settings,
    shared,
    sizes_of,
    typed,
    weights,
    wholes,
    zero_stage,
)
from megapar_models.convert.formats.pickles import Inert
from megapar_models.convert.formats.torch_files import StoredTensor
from megapar_models.convert.stream import TensorInfo

LATEST = "latest"
_ADVICE = "convert it with DeepSpeed's ds_to_universal.py and name the folder that it makes"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_FUSED_EXPERTS = ("ds_autoep_layers", "autoep_layers", "ds_zero_partition_groups")
# Where a parameter's name has the number of an expert among those of its rank.
_LOCAL_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..+)")


def open_folder(source: Path, *, weights_only: bool = False) -> DeepSpeedStore:
    """Open a checkpoint: `source` is the tag's folder, or the folder of the run, whose `latest` names the tag.

    With `weights_only` the optimizer's states of fused experts (AutoEP) are left out, which are refused otherwise: of
    the experts, `weight/NAME.NUMBER` is read.

    Reads the small parts of all files. Raises CheckpointError if a file is missing, damaged or not safe to unpickle, or
    if the files are not of one checkpoint.
    """
    folder = find(source, LATEST)
    models, optimizers, experts = _files(folder)
    loaded = [load(path) for path in models]
    places = weights(folder, loaded)
    for path in experts:
        expert = load(path)
        places |= wholes(expert, expert.content)
    first = loaded[0]
    values = first.plain({key: value for key, value in first.content.items() if key not in NO_VALUES})
    if not optimizers:
        if first.content.get("param_shapes"):
            raise CheckpointError(f"{folder}: has no *_optim_states.pt, though {first.path.name} was saved under ZeRO")
        left = ["the optimizer's states, which have numbers without ZeRO, and no names of parameters"]
        return DeepSpeedStore(folder, places, {**values, "zero_stage": 0, "left_out": left})
    states = [load(path) for path in optimizers]
    _check_ranks(folder, first, states)
    fused = next((key for key in _FUSED_EXPERTS if first.content.get(key) or _optimizer_of(states[0]).get(key)), None)
    if fused and not (weights_only and fused in first.content and not models[0].name.startswith("zero_")):
        raise CheckpointError(
            f"{folder}: has {fused}: the optimizer's states of AutoEP's experts are not read: {_ADVICE}, or read the "
            "weights alone (--weights_only), which under ZeRO-3 lie in those states too"
        )
    groups = [sizes_of(first, group) for group in first.get("param_shapes", list)]
    held = [_Rank(file) for file in states]
    stages = {rank.stage for rank in held}
    if len(stages) > 1 or (3 in stages) != models[0].name.startswith("zero_"):
        raise CheckpointError(f"{folder}: its files are of different ZeRO stages: {sorted(stages)}, {models[0].name}")
    steps = {rank.step: rank.file.path for rank in held}
    if len(steps) > 1:
        text = ", ".join(f"{path.name} of update {step}" for step, path in steps.items())
        raise CheckpointError(f"{folder}: files are of different checkpoints: {text}")
    places |= _flat_places(folder, first, groups, held, weights_only=weights_only)
    places |= shared(first, places)
    values |= {"step": steps.popitem()[0], **settings(states[0], held[0].whole, held[0].groups)}
    return DeepSpeedStore(folder, places, values)


def _files(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Model files, optimizer files and experts' files, by rank. Raises CheckpointError if one is missing."""
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    experts = []
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: not readable ({error.strerror})") from None
    for path in paths:
        for pattern, found in ((MODEL_FILE, models), (_OPTIMIZER, optimizers)):
            if match := pattern.fullmatch(path.name):
                if int(match[2]):
                    raise CheckpointError(
                        f"{path}: belongs to tensor or pipeline rank {int(match[2])}, and only rank 0 is read here: "
                        + _ADVICE
                    )
                rank = int(match[1] or 0)
                if rank in found:
                    raise CheckpointError(f"{folder}: {path.name} and {found[rank].name} are both of rank {rank}")
                found[rank] = path
        if _EXPERT.fullmatch(path.name):
            experts.append(path)
    if not models:
        raise CheckpointError(f"{folder}: holds no mp_rank_00_model_states.pt, and {LATEST} names no folder in it")
    for found in (models, optimizers):
        for rank in range(len(found)):
            if rank not in found:
                beside = found[max(found)].name
                raise CheckpointError(f"{folder}: data rank {rank} has no file, and {beside} has been found")
    return [models[rank] for rank in sorted(models)], [optimizers[rank] for rank in sorted(optimizers)], experts


def _check_ranks(folder: Path, first: File, states: Sequence[File]) -> None:
    """Raise CheckpointError unless there are as many optimizer files as data-parallel ranks."""
    ranks = first.get("dp_world_size", int)
    if ranks != len(states):
        raise CheckpointError(
            f"{folder}: has optimizer files of {counted(len(states), 'rank')}, and {first.path.name} says that "
            f"{counted(ranks, 'rank')} saved: files are missing, or left from another run"
        )


def _optimizer_of(file: File) -> Mapping[str, Any]:
    """The optimizer's part of a file, or nothing."""
    state = file.content.get("optimizer_state_dict")
    return state if isinstance(state, Mapping) else {}


class _Rank:
    """What a data rank's optimizer file holds: vectors of each group by state, and the number of updates."""

    def __init__(self, file: File):
        self.file = file
        whole = file.get("optimizer_state_dict", Mapping)
        self.whole: Mapping[str, Any] = whole
        self.stage = zero_stage(whole)
        if self.stage == 3:
            base = typed(file.path, whole, "optimizer_state_dict", Mapping)
            mains = typed(file.path, whole, "fp32_flat_groups", list)
        else:
            base = typed(file.path, whole, "base_optimizer_state", (Mapping, list))
            mains = typed(file.path, whole, "single_partition_of_fp32_groups", list)
        self.mains = [flat_vector(file, mains, group) for group in range(len(mains))]
        if isinstance(base, list):  # elastic_checkpoint
            self.groups: list[Any] = []
            found = dict(enumerate(base))
        else:
            self.groups = typed(file.path, base, "param_groups", list)
            found = typed(file.path, base, "state", Mapping)
        self.states: list[dict[str, StoredTensor]] = []
        steps = set()
        for group in range(len(self.mains)):
            state = found.get(group, {})
            if not isinstance(state, Mapping):
                raise CheckpointError(f"{file.path}: the optimizer's state of group {group} is no dict")
            stored = [key for key, value in state.items() if isinstance(value, StoredTensor) and value.shape]
            if not all(isinstance(key, str) and re.fullmatch(r"\w+", key) for key in stored):
                raise CheckpointError(f"{file.path}: the optimizer's state of group {group} has names unlike words")
            self.states.append({key: flat_vector(file, state, key) for key in stored})
            steps.add(file.number(state.get("step")))
        # Apex's and DeepSpeed's fused Adam count in the group, or there too; elastic files have one number.
        counts = [file.number(item.get("step")) for item in self.groups if isinstance(item, Mapping)]
        steps = steps - {None} or {*counts, file.number(whole.get("base_optimizer_state_step"))} - {None}
        if len(steps) > 1:
            raise CheckpointError(f"{file.path}: its groups are of different updates: {sorted(map(str, steps))}")
        self.step: int | None = steps.pop() if steps else None


def _flat_places(
    folder: Path, first: File, groups: Sequence[Mapping[str, Sizes]], ranks: Sequence[_Rank], *, weights_only: bool
) -> dict[str, Place]:
    """Return `STATE/NAME` of all parameters of the optimizer.

    Raises CheckpointError unless the vectors are of the sizes that the parameters' shapes make.
    """
    places: dict[str, Place] = {}
    for rank in ranks:
        if len(rank.mains) != len(groups):
            raise CheckpointError(
                f"{rank.file.path}: holds {counted(len(rank.mains), 'group')} of parameters, and {first.path.name} "
                f"names {len(groups)}"
            )
    for number, shapes in enumerate(groups):
        for members, names in _holders(folder, first, number, shapes, ranks, weights_only=weights_only):
            states = {state for rank in members for state in rank.states[number]}
            for state in (FP32, *sorted(states)):
                held = []
                for rank in members:
                    vector = rank.mains[number] if state == FP32 else rank.states[number].get(state)
                    if vector is None:
                        raise CheckpointError(f"{rank.file.path}: has no {state} of group {number}, as other ranks do")
                    held.append((rank.file, vector))
                if len({vector.dtype for _, vector in held}) > 1:
                    raise CheckpointError(f"{folder}: ranks hold {state} of group {number} in different dtypes")
                make = _of_each if ranks[0].stage == 3 else _of_joined
                offsets, share = make(members[0], number, state, list(names.values()), held)
                for (name, shape), offset, size in zip(names.items(), offsets, share, strict=True):
                    info = TensorInfo(shape, held[0][1].dtype)
                    places[f"{state}/{name}"] = Cut(info, held, offset, size, joined=ranks[0].stage != 3)
            if ranks[0].stage != 3 and not cut_in_turn(first):
                _check_mappings(number, names, shapes, members, places)
    return places


def _holders(
    folder: Path, first: File, number: int, shapes: Mapping[str, Sizes], ranks: Sequence[_Rank], *, weights_only: bool
) -> Iterator[tuple[Sequence[_Rank], dict[str, Sizes]]]:
    """Yield the ranks that cut a group of parameters among themselves, and the parameters' names.

    All ranks cut most groups. Each set of ranks that holds the same experts cuts its own experts: their names have
    numbers among those of the rank, and get those among all. With `weights_only` experts without numbers are left out.
    """
    counts = ranks[0].whole.get("partition_count")
    sharing = counts[number] if isinstance(counts, list) and number < len(counts) else len(ranks)
    if sharing == len(ranks):
        yield ranks, dict(shapes)
        return
    if type(sharing) is not int or sharing < 1 or len(ranks) % sharing:
        raise CheckpointError(f"{ranks[0].file.path}: partition_count of group {number} is {str(sharing)[:80]}")
    matches = {name: _LOCAL_EXPERT.fullmatch(name) for name in shapes}
    if not all(matches.values()):
        if weights_only:
            return
        raise CheckpointError(
            f"{folder}: moments of {first_few([name for name, match in matches.items() if not match])} have no number "
            "of an expert, so that it is not known whose they are: read the weights alone (--weights_only), or "
            + _ADVICE
        )
    own = 1 + max(int(match[2]) for match in matches.values() if match)
    config = first.content.get("ds_config")
    together = isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism")
    parallel = len(ranks) // sharing
    for part in range(parallel):
        members = ranks[part * sharing : (part + 1) * sharing] if together else ranks[part::parallel]
        yield (
            members,
            {
                f"{match[1]}{int(match[2]) + part * own}{match[3]}": shapes[name]
                for name, match in matches.items()
                if match
            },
        )


def _of_joined(
    rank: _Rank, number: int, state: str, shapes: Sequence[Sizes], held: Sequence[tuple[File, StoredTensor]]
) -> tuple[list[int], list[int]]:
    """Return each parameter's place in the joined vector of a group, and how many values each rank has (ZeRO-1, -2).

    Ranks have equal parts, but padding at the end is left out by some versions and for some states.
    """
    paddings: Any = [0] * len(shapes)
    stated = rank.whole.get("param_alignment_paddings")
    if isinstance(stated, list):
        paddings = stated[number] if number < len(stated) else None
    good = isinstance(paddings, list) and len(paddings) == len(shapes)
    if not good or any(type(size) is not int or not 0 <= size < 64 for size in paddings):
        raise CheckpointError(f"{rank.file.path}: its param_alignment_paddings do not fit group {number}")
    offsets = [0]
    for shape, padding in zip(shapes, paddings, strict=True):
        offsets.append(offsets[-1] + math.prod(shape) + padding)
    end = offsets.pop()
    share = held[0][1].shape[0]
    if not end:
        return offsets, [max(share, 1)] * len(shapes)
    # Rank 0 has padding only if it has all values.
    for member, (file, vector) in enumerate(held):
        own = max(0, min(share, end - member * share))
        if not own <= vector.shape[0] <= share:
            raise CheckpointError(
                f"{file.path}: holds {vector.shape[0]} values of {state} in group {number}, and {own} are its part of "
                f"{end} among {counted(len(held), 'rank')}"
            )
    # The joined vector is padded to a multiple of twice the number of ranks.
    if not end <= share * len(held) < end + 2 * len(held):
        raise CheckpointError(
            f"{held[0][0].path}: group {number} has {end} values by param_shapes, and {share * len(held)} of {state} "
            f"are stored by {counted(len(held), 'rank')}"
        )
    return offsets, [share] * len(shapes)


def _of_each(
    rank: _Rank, number: int, state: str, shapes: Sequence[Sizes], held: Sequence[tuple[File, StoredTensor]]
) -> tuple[list[int], list[int]]:
    """Return each parameter's place in a rank's vector of a group, and how many values a rank has of it (ZeRO-3)."""
    shares = [-(-math.prod(shape) // len(held)) for shape in shapes]
    offsets = [0, *accumulate(shares)][:-1]
    for file, vector in held:
        if vector.shape[0] != sum(shares):
            raise CheckpointError(
                f"{file.path}: holds {vector.shape[0]} values of {state} in group {number}, and by param_shapes "
                f"{sum(shares)} are its part among {counted(len(held), 'rank')}"
            )
    return offsets, shares


def _check_mappings(
    number: int,
    names: Mapping[str, Sizes],
    given: Mapping[str, Sizes],
    members: Sequence[_Rank],
    places: Mapping[str, Place],
) -> None:
    """Raise CheckpointError unless the parts of parameters lie where a file's param_slice_mappings say.

    `given` has the names that the ranks gave the parameters, in the order of `names`.
    """
    theirs = dict(zip(given, names, strict=True))
    for index, rank in enumerate(members):
        stated = rank.whole.get("param_slice_mappings")
        if not isinstance(stated, list) or number >= len(stated) or not isinstance(stated[number], Mapping):
            continue
        for name, fragment in stated[number].items():
            place = places.get(f"{FP32}/{theirs.get(name)}")
            if not isinstance(place, Cut) or not isinstance(fragment, Inert):
                raise CheckpointError(
                    f"{rank.file.path}: param_slice_mappings names {str(name)[:80]}, not of its group"
                )
            low = index * place.share - place.offset
            start, end = max(low, 0), min(low + place.share, math.prod(place.info.shape))
            found = (fragment.get("start"), fragment.get("numel"))
            if found != (start - low, end - start):
                raise CheckpointError(
                    f"{rank.file.path}: {name} lies at {found[0]} with {found[1]} values by param_slice_mappings, and "
                    f"at {start - low} with {end - start} by param_shapes"
                )
