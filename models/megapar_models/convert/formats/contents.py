"""A checkpoint of another framework in our words: which of our tensors, in which state, lie where in its store.

From `Contents` follows a manifest such as a native checkpoint has. Ranks of any layout fill their boxes through
`ContentsReader`, and a conversion writes a native checkpoint of them. Weights become fp32 main weights. Moments keep
their numbers: rows are moved as those of the weights are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.base.precision import LossScale
from megapar.checkpoint.boxes import overlap
from megapar.checkpoint.format import BUFFER, TRAINING_STATE, Manifest, TensorEntry, dtype_name, dtype_of
from megapar.checkpoint.values import examine
from megapar.config.messages import counted, first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, flatten
from megapar.declare.params import MAIN, Box, Sizes
from megapar_models.convert.exported import buffer_shapes, native_shapes
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.recipes import Recipe, places
from megapar_models.counts import WholeModel, training_state
from megapar_models.registry import weight_options

EXP_AVG, EXP_AVG_SQ, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum"
OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    EXP_AVG: {"optimizer": "adamw", "initial": 0.0, "nonnegative": False},
    EXP_AVG_SQ: {"optimizer": "adamw", "initial": 0.0, "nonnegative": True},
    MOMENTUM: {"optimizer": "muon", "initial": 0.0, "nonnegative": False},
}
"""What a manifest declares of the states that other frameworks have (`Manifest.states`)."""


class StoredAt(NamedTuple):
    """The place of one of their tensors in a store: in the tensor `name`, at the numbers `leading` of its first axes.

    A framework may store all layers, or all experts, as one tensor: `leading` has the numbers of layer and expert. Rows
    before `first_row` belong to others, as do those behind the tensor's own (the padding of a vocabulary).
    """

    name: str
    leading: tuple[int, ...] = ()
    first_row: int = 0

    def box(self, inside: Box) -> Box:
        """A box of the tensor as one of the stored tensor."""
        offset = inside.offset
        if offset:
            offset = (self.first_row + offset[0], *offset[1:])
        return Box((*self.leading, *offset), (*(1 for _ in self.leading), *inside.size))


@dataclass(frozen=True)
class Position:
    """Where the training stood, as far as a folder says it. `updates` are those of the optimizer (Adam's step)."""

    step: int = 0
    updates: int = 0
    consumed_samples: int = 0
    loss_scale: float | None = None


@dataclass(frozen=True)
class Contents:
    """What a folder of another framework holds of a model.

    `title` names the framework's format and its iteration, for people. `recipes` say how each of their tensors holds
    ours, by the name that `stored` has for it. `stored` has the places of their tensors for each state of ours: MAIN,
    and those of the optimizer. `left_out` are lines for the user about what is in the folder and is not read. `model`
    is the model of the recipes, as the folder or the caller states it.
    """

    title: str
    store: TensorStore
    recipes: Mapping[str, Recipe]
    stored: Mapping[str, Mapping[str, StoredAt]]
    position: Position = field(default_factory=Position)
    left_out: Sequence[str] = ()
    model: ModelConfig | None = None

    @property
    def states(self) -> list[str]:
        """The states of an optimizer that the folder holds besides the weights."""
        return [state for state in self.stored if state != MAIN]

    def check(self) -> None:
        """Raise CheckpointError unless each state has a place, of the right shape, for all tensors of its recipes.

        The states of one optimizer must be of the same tensors.
        """
        problems = []
        missing = [name for name in self.recipes if name not in self.stored[MAIN]]
        if missing:
            problems.append(f"missing {first_few(sorted(missing))}")
        for state, found in self.stored.items():
            unknown = found.keys() - self.recipes.keys()
            if unknown:
                problems.append(f"unexpected {state} of {first_few(sorted(unknown))}")
            problems += [line for name, at in found.items() if name not in unknown for line in self._misfit(name, at)]
        adam = [self.stored.get(state, {}).keys() for state in (EXP_AVG, EXP_AVG_SQ)]
        halves = adam[0] ^ adam[1]
        if halves:
            problems.append(f"only one of Adam's two moments is there of {first_few(sorted(halves))}")
        if problems:
            text = "; ".join(problems[:_MOST_PROBLEMS])
            raise CheckpointError(f"{self.store.folder}: tensors are not those of its model: {text}")

    def _misfit(self, name: str, at: StoredAt) -> list[str]:
        """What is wrong with the stored shape of one of their tensors: one line or none."""
        wanted = self.recipes[name].shape
        stored = self.store.tensors[at.name].shape
        lead, held = stored[: len(at.leading)], stored[len(at.leading) :]
        inside = len(held) == len(wanted) and all(number < size for number, size in zip(at.leading, lead, strict=False))
        # Rows behind the wanted ones are padding, or other tensors.
        if inside and wanted:
            inside = at.first_row + wanted[0] <= held[0] and held[1:] == wanted[1:]
        return [] if inside else [f"{at.name} has shape {list(stored)}, which holds no {name} of {list(wanted)}"]

    def in_words(self) -> list[str]:
        """Lines for the user: what the folder holds."""
        infos = self.store.tensors
        lines = [f"{self.store.folder}: {self.title}"]
        for state, stored in self.stored.items():
            dtypes = sorted({dtype_name(infos[at.name].dtype) for at in stored.values()})
            name = "weights" if state == MAIN else state
            lines.append(f"  {name}: {counted(len(stored), 'tensor')}, {', '.join(dtypes)}")
        at = self.position
        if at.step or at.updates:
            text = f"step {at.step:,}, {at.updates:,} updates, {at.consumed_samples:,} samples"
            lines.append(f"  position: {text}" + (f", loss scale {at.loss_scale:g}" if at.loss_scale else ""))
        return [*lines, *(f"  left out: {line}" for line in self.left_out)]

    def manifest(self, config: Config) -> Manifest:
        """The manifest that a native checkpoint of these contents would have, without files and chunks.

        `config` is a validated one of the model. Of the run's other options only those of `config.model` are stated.
        Raises CheckpointError if a tensor of the model is in no recipe.
        """
        buffers = buffer_shapes(config.model)
        shapes = native_shapes(config.model) | buffers
        sources: dict[str, set[str]] = {}
        for name, found in places(self.recipes).items():
            sources[name] = {place.source for place in found}
        lacking = shapes.keys() - sources.keys()
        if lacking:
            raise CheckpointError(f"{self.store.folder}: nothing in it holds {first_few(sorted(lacking))}")
        tensors = {}
        for state, stored in self.stored.items():
            for name, shape in shapes.items():
                if name in buffers and state != MAIN:
                    continue
                if sources[name] <= stored.keys():
                    kept = BUFFER if name in buffers else state
                    tensors[f"{kept}.{name}"] = TensorEntry(shape, "float32", ())
        if self.states:
            for name, (shape, dtype) in training_state(WholeModel(config.model)).items():
                tensors[f"{TRAINING_STATE}.{name}"] = TensorEntry(shape, dtype_name(dtype), ())
        options = {path: value for path, value in flatten(config).items() if path.startswith("model.")}
        scale = None
        if self.position.loss_scale is not None:
            scale = asdict(replace(LossScale.of("fp16"), scale=self.position.loss_scale))
        trainer: dict[str, Any] = {"updates": self.position.updates, "loss_scale": scale}
        trainer["config"] = json.loads(json.dumps(options))  # tuples are lists in a manifest
        if not self.states:
            trainer["weights_only"] = True
        return Manifest(
            step=self.position.step,
            consumed_samples=self.position.consumed_samples,
            layout={},
            model_config=json.loads(json.dumps(weight_options(config))),
            trainer=trainer,
            data={},
            files={},
            tensors=tensors,
            states={state: OPTIMIZERS[state] for state in self.states},
            source=self,
        )

    @property
    def notes(self) -> list[str]:
        """Lines for the user of a run that goes on from these contents."""
        notes = [f"read {self.title}"]
        if self.position.step:
            notes.append(
                f"samples from number {self.position.consumed_samples + 1:,} on, and learning rates from step "
                f"{self.position.step + 1:,} on, are those of this run's options, in megapar's order"
            )
        return [*notes, *(f"left out: {line}" for line in self.left_out)]

    def reader(self, manifest: Manifest) -> "ContentsReader":
        """Open what reads boxes of our tensors."""
        return ContentsReader(self, manifest)


_MOST_PROBLEMS = 4  # of a message


class ContentsReader:
    """Reads boxes of our tensors from `contents`, as `megapar.checkpoint.load.Reader` does from a native checkpoint.

    `manifest` is that of the contents. Values that are not finite are refused, as are negative ones of a state that
    has none. `judge=False` lets them through.
    """

    def __init__(self, contents: Contents, manifest: Manifest, *, judge: bool = True):
        self.manifest = manifest
        self._judge = judge
        self._contents = contents
        self._places = places(contents.recipes)

    def __enter__(self) -> "ContentsReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep nothing open: a store closes what it opens after each box."""

    def fill(self, name: str, offset: Sizes, out: Tensor) -> None:
        """Fill `out` with the box of the tensor `name`, such as main.norm.weight, at `offset`. Values are cast.

        What other frameworks have not, such as a router's counts of the step before, is as in a first step: zero.
        """
        state, _, ours = name.partition(".")
        if state == TRAINING_STATE:
            out.zero_()
            return
        stored = self._contents.stored[MAIN if state == BUFFER else state]
        for source, part in self._places[ours]:
            common = overlap(offset, tuple(out.shape), part.box.offset, part.box.size)
            if not common:
                continue
            low, high = common
            at = stored[source]

            def read(box: Box, at: StoredAt = at) -> Tensor:
                values = self._contents.store.read(at.name, at.box(box))
                return values.reshape(box.size)

            size = tuple(stop - start for start, stop in zip(low, high, strict=True))
            values = part.cut(read, Box(low, size))
            _, problem = examine(name, values, nonnegative=self.manifest.is_nonnegative(name))
            if problem and self._judge:
                raise CheckpointError(f"{self._contents.store.folder}: {at.name}: {problem}: it was saved so")
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            out[inside].copy_(values)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in the dtype of the manifest."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        self.fill(name, (0,) * out.ndim, out)
        return out
