"""States of Megatron's distributed optimizer as they lie in its buckets (dp_reshardable), by the names of parameters.

Megatron lays all parameters of a rank's model chunk into one buffer, in the reverse order of their registration, each
from a multiple of 64 elements on, and cuts the buffer into buckets. A checkpoint has each bucket whole, for each pair
of tensor and pipeline rank, without the padding at its end:

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(...).bucket_idx_B.STATE
    chained_0. and chained_1. before that: parameters of dense layers, and of experts over several ep ranks

No name of a parameter is stored. The order follows from the model, and some of it from the layers (of Megatron-Core or
of Transformer Engine). The lengths of the buckets must come out, and the main weights in the buckets must round to the
weights of the model, which are stored by name: so a wrong order is found.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.boxes import overlap
from megapar.checkpoint.format import Sizes
from megapar.declare.params import Box
from megapar_models.convert.formats.contents import StoredAt
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.recipes import Recipe
from megapar_models.convert.stream import TensorInfo

BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)"
)
_ALIGNED = 64  # elements
_COMPARED = 1024  # elements of each piece, from its beginning
# Args that give ranks other layers, or other parts of them, than here. Each has the values that leave it off.
_UNEVEN: Mapping[str, tuple[Any, ...]] = {
    "account_for_embedding_in_pipeline_split": (None, False),
    "account_for_loss_in_pipeline_split": (None, False),
    "pipeline_model_parallel_layout": (None,),
    "num_layers_in_first_pipeline_stage": (None,),
    "num_layers_in_last_pipeline_stage": (None,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "standalone_embedding_stage": (None, False),
    "moe_use_legacy_grouped_gemm": (None, False),
    "overlap_param_gather_with_optimizer_step": (None, False),
    "expert_gtp_weight_remat_size": (None, 0, 1),
    "gtp_weight_remat_size": (None, 0, 1),
}
# Matrices that tensor ranks hold by rows, and by columns. All other tensors are whole on each.
_ROWS = re.compile(
    r".*(word_embeddings|output_layer|linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)"
)
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
_DOWN = re.compile(r".*linear_(q|kv)_down_proj\.weight")


_Key = tuple[int, int, int]  # optimizer of a chain, group of ranks, chunk
_Buckets = dict[int, tuple[str, int]]  # name without the state, and elements, by the bucket's number


class _Grid(NamedTuple):
    """The ranks of the run that saved."""

    tp: int
    pp: int
    ep: int
    expert_tp: int
    chunks: int  # of a pipeline rank

    @classmethod
    def of(cls, args: Mapping[str, Any], folder: Path) -> "_Grid":
        tp, pp, ep = (
            _size(args, f"{kind}_model_parallel_size", 1, folder) for kind in ("tensor", "pipeline", "expert")
        )
        chunks = _size(args, "virtual_pipeline_model_parallel_size", 1, folder)
        return cls(tp, pp, ep, _size(args, "expert_tensor_parallel_size", tp, folder), chunks)


def _size(args: Mapping[str, Any], field: str, default: int, folder: Path) -> int:
    value = args.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{folder}: args.{field} is {value!r}: must be a whole number from 1 on")
    return value


class _Form(NamedTuple):
    """What the names in a checkpoint do not say: how the layers were made."""

    fused_norms: bool  # a norm lies in the module of the matrix behind it
    grouped_experts: bool  # the first matrices of all experts, then the second ones
    whole_latents: bool  # every tensor rank has the whole projections to latents


class _Part(NamedTuple):
    """A part of a tensor on one rank: a box of the tensor, row by row, in the buckets of `group` from `start` on."""

    box: Box
    bucket: str
    start: int


@dataclass(frozen=True)
class _Local:
    """A parameter of one rank: the boxes of the tensor `name` in the order in which the rank has them."""

    name: str
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(_numel(box.size) for box in self.boxes)


class _Misfit(Exception):  # noqa: N818, no error: another order is tried
    """Why buckets do not hold the parameters."""


class BucketStore:
    """A store that has, beside the tensors of `inner`, those of `parts`, taken from its buckets."""

    def __init__(self, inner: TensorStore, parts: Mapping[str, list[_Part]], infos: Mapping[str, TensorInfo]):
        self._inner = inner
        self._parts = parts
        self._infos = {**inner.tensors, **infos}

    @property
    def folder(self) -> Path:
        return self._inner.folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @property
    def values(self) -> Mapping[str, Any]:
        return self._inner.values

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor. Of a part, the rows are read that the box has some of."""
        if name not in self._parts:
            return self._inner.read(name, box)
        shape, dtype = self._infos[name]
        box = box or Box((0,) * len(shape), shape)
        out = torch.empty(box.size, dtype=dtype)
        state = name.split(".")[2]
        for part in self._parts[name]:
            common = overlap(box.offset, box.size, part.box.offset, part.box.size)
            if not common:
                continue
            low, high = common
            width = _numel(part.box.size[1:])
            first, rows = low[0] - part.box.offset[0], high[0] - low[0]
            flat = self._inner.read(f"{part.bucket}.{state}", Box((part.start + first * width,), (rows * width,)))
            values = flat.reshape(rows, *part.box.size[1:])
            inside = [slice(a - o, b - o) for a, b, o in zip(low, high, part.box.offset, strict=True)]
            values = values[(slice(None), *inside[1:])]
            out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))] = values
        return out


def take_apart(
    store: TensorStore,
    wanted: Mapping[str, Recipe],
    weights: Mapping[str, StoredAt],
    args: Mapping[str, Any] | None,
    folder: Path,
) -> BucketStore:
    """A store with `optimizer.state.STATE.NAME` for each state in the buckets of `store` and each name in `wanted`.

    `weights` are the places of the model's weights. Raises CheckpointError if the order of the parameters in the
    buckets is not found.
    """
    try:
        if args is None:
            raise _Misfit("there are no args, which have the layout of the run")
        for field, off in _UNEVEN.items():
            if args.get(field) not in off:
                raise _Misfit(f"args.{field} is {args[field]!r}")
        return _taken_apart(store, wanted, weights, args, _Grid.of(args, folder))
    except _Misfit as error:
        raise CheckpointError(
            f"{folder}: states of the optimizer lie in buckets of Megatron (dp_reshardable), and which parameter is "
            f"where cannot be told ({error}): give --weights_only, or save with --dist-ckpt-optim-fully-reshardable"
        ) from None


def _taken_apart(
    store: TensorStore,
    wanted: Mapping[str, Recipe],
    weights: Mapping[str, StoredAt],
    args: Mapping[str, Any],
    grid: _Grid,
) -> BucketStore:
    buckets, states = _buckets(store)
    problem: _Misfit | None = None
    for form in _forms(args, wanted, grid):
        try:
            parts = _parts(wanted, weights, buckets, store, args, grid, form)
        except _Misfit as error:
            problem = problem or error
            continue
        return _named(store, parts, states, wanted)
    raise problem or _Misfit("no order fits")


def _forms(args: Mapping[str, Any], wanted: Mapping[str, Recipe], grid: _Grid) -> Iterator[_Form]:
    """Yield the forms that the layers may have had, the likeliest first."""
    engine = args.get("transformer_impl", "transformer_engine") == "transformer_engine"
    grouped = bool(args.get("moe_grouped_gemm"))
    experts = any(".experts." in name for name in wanted)
    latents = grid.tp > 1 and any(_DOWN.fullmatch(name) for name in wanted)
    for fused, together, whole in product(
        (engine, not engine),
        (grouped, not grouped) if experts else (False,),
        (engine, not engine) if latents else (True,),
    ):
        yield _Form(fused, together, whole)


def _buckets(
    store: TensorStore,
) -> tuple[dict[tuple[int, int, int], dict[int, tuple[str, int]]], dict[str, torch.dtype]]:
    """(name without the state, elements) of each bucket, by (optimizer, group, chunk) and number; and the states."""
    found: dict[tuple[int, int, int], dict[int, tuple[str, int]]] = {}
    states: dict[str, torch.dtype] = {}
    kinds: dict[tuple[int, int, int], str] = {}
    for name, info in store.tensors.items():
        match = BUCKET.fullmatch(name)
        if not match:
            continue
        key = (int(match[1] or 0), int(match[2]), int(match[3]))
        if kinds.setdefault(key, match[4]) != match[4]:
            raise _Misfit(f"a chunk has parameters of {kinds[key]} and of {match[4]}")
        if len(info.shape) != 1:
            raise _Misfit(f"{name} has shape {list(info.shape)}")
        bucket = (name.rpartition(".")[0], info.shape[0])
        if found.setdefault(key, {}).setdefault(int(match[5]), bucket) != bucket:
            raise _Misfit(f"states of {bucket[0]} have several lengths")
        if states.setdefault(match[6], info.dtype) != info.dtype:
            raise _Misfit(f"buckets have {match[6]} in several dtypes")
    for key, of_chunk in found.items():
        if sorted(of_chunk) != list(range(len(of_chunk))):
            raise _Misfit(f"group {key[1]} has buckets {sorted(of_chunk)}")
        missing = [state for state in states for name, _ in of_chunk.values() if f"{name}.{state}" not in store.tensors]
        if missing:
            raise _Misfit(f"group {key[1]} has no {missing[0]}")
    return found, states


def _parts(
    wanted: Mapping[str, Recipe],
    weights: Mapping[str, StoredAt],
    buckets: Mapping[_Key, _Buckets],
    store: TensorStore,
    args: Mapping[str, Any],
    grid: _Grid,
    form: _Form,
) -> dict[str, list[_Part]]:
    """The parts of each tensor. Raises _Misfit unless all buckets are filled exactly, with the weights of the model."""
    shapes = {}
    for name, recipe in wanted.items():
        at = weights.get(name)
        if at is not None and not name.endswith("expert_bias"):
            shapes[name] = (*store.tensors[at.name].shape[len(at.leading) :],) if recipe.shape else recipe.shape
    order = _Order(shapes, args, grid, form)
    left = set(buckets)
    parts: dict[str, list[_Part]] = {}
    for key, chunk in order.chunks():
        if key not in buckets:
            if chunk:
                raise _Misfit(f"group {key[1]} has no buckets")
            continue
        left.discard(key)
        for local, bucket, start in _walk(chunk, buckets[key]):
            for box in local.boxes:
                parts.setdefault(local.name, []).append(_Part(box, bucket, start))
                start += _numel(box.size)
    if left:
        raise _Misfit(f"{len(left)} groups of buckets are of no rank of its args")
    unknown = shapes.keys() - parts.keys()
    if unknown:
        raise _Misfit(f"the place of {min(unknown)} is not known")
    # Tensor ranks have copies of whole tensors, and the last stage may have one of the embedding: the first is taken.
    kept = {name: list({part.box: part for part in reversed(of_name)}.values()) for name, of_name in parts.items()}
    for name, of_name in kept.items():
        if sum(_numel(part.box.size) for part in of_name) != _numel(shapes[name]):
            raise _Misfit(f"the ranks of its args do not hold all of {name}")
        _check_main(store, name, of_name, weights[name])
    return kept


def _walk(chunk: list[_Local], buckets: _Buckets) -> Iterator[tuple[_Local, str, int]]:
    """Yield (parameter, bucket, its first element there) in the order of a buffer, the reverse of the chunk's."""
    number, end = 0, 0
    closed = False
    for local in reversed(chunk):
        start = -(-end // _ALIGNED) * _ALIGNED
        if number not in buckets:
            raise _Misfit("there are more parameters than buckets")
        name, length = buckets[number]
        # A bucket before the one of a tied embedding ends with the padding in front of the embedding.
        if closed or start == length:
            number, start = number + 1, 0
            if number not in buckets:
                raise _Misfit("there are more parameters than buckets")
            name, length = buckets[number]
        end = start + local.numel
        if end > length:
            raise _Misfit(f"{local.name} would end at element {end} of {length} of {name}")
        closed = end == length
        yield local, name, start
    if not closed or number + 1 != len(buckets):
        raise _Misfit("buckets have more elements than the parameters")


def rounds_to(store: TensorStore, main: StoredAt, weight: StoredAt, shape: Sizes) -> bool:
    """Whether a main weight of this shape rounds to the model's weight, at its beginning and at its end."""
    dtype = store.tensors[weight.name].dtype
    width = max(1, _numel(shape[1:]))
    rows = max(1, min(shape[0], _COMPARED // width))
    for first in {0, shape[0] - rows}:
        box = Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        found, held = (store.read(at.name, at.box(box)).flatten() for at in (main, weight))
        if not torch.equal(found.to(dtype).nan_to_num(), held.nan_to_num()):
            return False
    return True


def _check_main(store: TensorStore, name: str, parts: list[_Part], weight: StoredAt) -> None:
    """Raise _Misfit unless the main weights in the buckets round to the model's, at the beginning of each part."""
    info = store.tensors[weight.name]
    for part in parts:
        width = max(1, _numel(part.box.size[1:]))
        rows = max(1, min(part.box.size[0], _COMPARED // width))
        if f"{part.bucket}.param" not in store.tensors:
            raise _Misfit("they have no main weights")
        main = store.read(f"{part.bucket}.param", Box((part.start,), (rows * width,)))
        box = Box(part.box.offset, (rows, *part.box.size[1:]))
        held = store.read(weight.name, weight.box(box)).flatten()
        if not torch.equal(main.to(info.dtype).nan_to_num(), held.nan_to_num()):
            raise _Misfit(f"main weights in {part.bucket} from element {part.start} on are not those of {name}")


def _named(
    store: TensorStore,
    parts: Mapping[str, list[_Part]],
    states: Mapping[str, torch.dtype],
    wanted: Mapping[str, Recipe],
) -> BucketStore:
    named, infos = {}, {}
    for name, of_name in parts.items():
        shape = tuple(
            max(part.box.offset[axis] + part.box.size[axis] for part in of_name)
            for axis in range(len(wanted[name].shape))
        )
        for state, dtype in states.items():
            named[f"optimizer.state.{state}.{name}"] = of_name
            infos[f"optimizer.state.{state}.{name}"] = TensorInfo(shape, dtype)
    return BucketStore(store, named, infos)


def _numel(size: Sizes) -> int:
    count = 1
    for number in size:
        count *= number
    return count


class _Order:
    """The parameters of each rank in the order of registration, by the names in `shapes`."""

    def __init__(self, shapes: Mapping[str, Sizes], args: Mapping[str, Any], grid: _Grid, form: _Form):
        self.shapes = shapes
        self.args = args
        self.grid = grid
        self.form = form
        self.layers = _size(args, "num_layers", 0, Path())
        self.experts = args.get("num_experts") or 0
        if self.layers % (grid.pp * grid.chunks):
            raise _Misfit(f"{self.layers} layers do not divide by {grid.pp} pipeline ranks")
        if self.experts % grid.ep:
            raise _Misfit(f"{self.experts} experts do not divide by {grid.ep} ranks")

    def chunks(self) -> Iterator[tuple[_Key, list[_Local]]]:
        """Yield ((optimizer, group, chunk), the parameters of it) for each model chunk of all ranks."""
        grid = self.grid
        apart = grid.ep > 1  # then experts have buffers and an optimizer of their own
        for stage, rank, chunk in product(range(grid.pp), range(grid.tp), range(grid.chunks)):
            names = [
                name for name in self._names(stage, chunk, range(self.experts)) if not (apart and _is_expert(name))
            ]
            yield (0, stage * grid.tp + rank, chunk), [self._local(name, rank) for name in names]
        if not apart:
            return
        held = self.experts // grid.ep
        sizes = (range(grid.pp), range(grid.ep), range(grid.expert_tp), range(grid.chunks))
        for stage, ep_rank, rank, chunk in product(*sizes):
            experts = range(ep_rank * held, (ep_rank + 1) * held)
            names = [name for name in self._names(stage, chunk, experts) if _is_expert(name)]
            group = (stage * grid.ep + ep_rank) * grid.expert_tp + rank
            yield (1, group, chunk), [self._local(name, rank) for name in names]

    def _names(self, stage: int, chunk: int, experts: range) -> Iterator[str]:
        """Yield the names of a model chunk's parameters that the model has."""
        for name in self._all_names(stage, chunk, experts):
            for kind in ("weight", "bias"):
                whole = f"{name}{kind}"
                if whole in self.shapes:
                    yield whole

    def _all_names(self, stage: int, chunk: int, experts: range) -> Iterator[str]:
        """Yield the modules of a model chunk, with what stands before `weight` or `bias`."""
        grid = self.grid
        number, stages = chunk * grid.pp + stage, grid.pp * grid.chunks
        if number == 0:
            yield from ("embedding.word_embeddings.", "embedding.position_embeddings.")
        for layer in range(self.layers * number // stages, self.layers * (number + 1) // stages):
            yield from self._layer(f"decoder.layers.{layer}.", experts)
        if number == stages - 1:
            yield "decoder.final_layernorm."
            tied = "output_layer.weight" not in self.shapes
            if not tied:
                yield "output_layer."
            elif stages > 1:
                yield "embedding.word_embeddings."

    def _layer(self, layer: str, experts: range) -> Iterator[str]:
        attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
        yield f"{layer}input_layernorm."
        if not self.form.fused_norms:
            yield f"{attention}linear_qkv.layer_norm_"
        yield f"{attention}linear_proj."
        if self.form.fused_norms:
            yield f"{attention}linear_qkv.layer_norm_"
        yield f"{attention}linear_qkv."
        yield from (f"{attention}{letter}_layernorm." for letter in "qk")
        yield from (f"{attention}linear_q_proj.", f"{attention}linear_q_down_proj.")
        latents = [f"{attention}linear_{name}_up_proj.layer_norm_" for name in ("q", "kv")]
        if self.form.fused_norms:
            yield latents[0]
        yield from (f"{attention}linear_q_up_proj.", f"{attention}linear_kv_down_proj.")
        if self.form.fused_norms:
            yield latents[1]
        yield f"{attention}linear_kv_up_proj."
        if not self.form.fused_norms:
            yield from latents
        yield from (
            f"{layer}pre_mlp_layernorm.",
            f"{mlp}linear_fc1.layer_norm_",
            f"{mlp}linear_fc1.",
            f"{mlp}linear_fc2.",
        )
        yield f"{mlp}router."
        both = ("linear_fc1.", "linear_fc2.")
        pairs = [(expert, matrix) for expert in experts for matrix in both]
        if self.form.grouped_experts:
            pairs = [(expert, matrix) for matrix in both for expert in experts]
        yield from (f"{mlp}experts.experts.{expert}.{matrix}" for expert, matrix in pairs)
        yield from (f"{mlp}shared_experts.{name}" for name in ("gate_", *both))

    def _local(self, name: str, rank: int) -> _Local:
        """What a tensor rank has of a tensor."""
        shape = self.shapes[name]
        ranks = self.grid.expert_tp if _is_expert(name) else self.grid.tp
        whole = Box((0,) * len(shape), shape)
        by_rows = _ROWS.fullmatch(name) or (_DOWN.fullmatch(name) and not self.form.whole_latents)
        if ranks == 1:
            return _Local(name, (whole,))
        if by_rows:
            halves = 2 if self.args.get("swiglu") and "linear_fc1" in name else 1
            if shape[0] % (halves * ranks):
                raise _Misfit(f"{name} has {shape[0]} rows, {ranks} tensor ranks")
            rows = shape[0] // halves // ranks
            starts = (half * (shape[0] // halves) + rank * rows for half in range(halves))
            return _Local(name, tuple(Box((start, *whole.offset[1:]), (rows, *shape[1:])) for start in starts))
        if _COLUMNS.fullmatch(name):
            if shape[1] % ranks:
                raise _Misfit(f"{name} has {shape[1]} columns, {ranks} tensor ranks")
            columns = shape[1] // ranks
            return _Local(name, (Box((0, rank * columns), (shape[0], columns)),))
        return _Local(name, (whole,))


def _is_expert(name: str) -> bool:
    return ".experts.experts." in name
