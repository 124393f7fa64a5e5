"""Contents of folders that name everything by parameters: a prefix, the parameter's name, and behind it a state.

Such are checkpoints of torch's FSDP2 by `get_state_dict`, flattened or not:

    model.layers.0.mlp.up_proj.weight                       a weight, behind the folder's prefix
    optim.state.model.layers.0.mlp.up_proj.weight.exp_avg   a state of the optimizer; `step` is one of each parameter
    optim.param_groups....                                  rates and the like, which a run of ours has as its options

Prefixes differ from program to program, so none is expected: they are what stands before the names of the model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import MOST
from megapar.config.messages import first_few
from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN, Box
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, MOMENTUM, Contents, Position, StoredAt
from megapar_models.convert.formats.derived import Derived, WithDerived
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.recipes import Recipe, starred
from megapar_models.convert.stream import TensorInfo

STATES = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ, "momentum_buffer": MOMENTUM}
"""Our states by torch's names."""
STEP = "step"
GROUPS = "param_groups"
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # modules that torch puts around others
_COMPARED = 1 << 24  # elements at one time
_LONGEST = 1000  # letters of a name


@dataclass(frozen=True)
class Spelling:
    """How a format spells the names of `recipes`.

    `canonical` returns the recipes' name of a stored one, or None if it is no weight. `stacked` is
    `megapar_models.family.HuggingFace.stacked`, of so many `experts`. `tied` names copies, each with its original.
    """

    canonical: Callable[[str], str | None] = str
    stacked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)


class _Inside(NamedTuple):
    """What a parameter of theirs holds: one tensor of the recipes, at these numbers of its first axes."""

    name: str
    leading: tuple[int, ...] = ()
    first_row: int = 0


def contents_by_parameter(
    title: str,
    store: TensorStore,
    recipes: Mapping[str, Recipe],
    spelling: Spelling,
    model: ModelConfig,
    *,
    step: int | None = None,
    weights_only: bool = False,
) -> Contents:
    """Find the tensors of `recipes`, those of `model`, in the store, and the states of an optimizer.

    {prefix} in `title` becomes the prefix of the weights. `step` is that of the run, where the folder says it beside
    the updates of parameters. With `weights_only` no states are looked for. Raises CheckpointError if weights are there
    twice or none is, if a parameter is there that the model does not have, if parameters had different numbers of
    updates or no number is stated, or if the optimizer is none of ours.
    """
    folder = _Folder(store, {name: recipe for name, recipe in recipes.items() if recipe.constant is None}, spelling)
    prefix = folder.prefix()
    weights, parameters, others = folder.weights(prefix)
    left = []
    states: dict[str, dict[str, StoredAt]] = {}
    counts: dict[str, int] = {}
    if weights_only:
        left = ["the state of the optimizer, if there is one"]
    else:
        states, counts, rest = folder.states(parameters, others)
        left += [f"{first_few(rest)}: not of the model or its optimizer"] if rest else []
    stored = {MAIN: weights, **states}
    position = Position()
    if states:
        if not counts and step is None and EXP_AVG in states:
            text = "the number of Adam's updates is nowhere stated: give --weights_only"
            raise CheckpointError(f"{store.folder}: {text}")
        updates = _common(store, counts) if counts else step or 0
        position = Position(step=updates if step is None else step, updates=updates)
        if updates > position.step:
            raise CheckpointError(f"{store.folder}: states {updates} updates of parameters at step {step}")
    if owners := sorted({_owner(name) for name in store.values if name not in counts}):
        left.append(f"values of {first_few(owners)}: a run has them as its options, or makes them anew")
    shown = f"names behind {prefix!r}" if prefix else "no prefix"
    if MOMENTUM in stored:
        store = _rescaled(store, stored[MOMENTUM])
    return Contents(title.format(prefix=shown), store, folder.recipes, stored, position, left, model)


class _Folder:
    """A store, and the names that are looked for in it."""

    def __init__(self, store: TensorStore, recipes: Mapping[str, Recipe], spelling: Spelling):
        self.store = store
        self.recipes = recipes
        self.spelling = spelling
        self.roots = {name.partition(".")[0] for name in (*recipes, *spelling.tied)}

    def prefix(self) -> str:
        """What stands before the names of the model's weights."""
        found: dict[str, set[str]] = defaultdict(set)
        for key in self.store.tensors:
            for start in _starts(key):
                for inside in self.inside(key[start:], self.store.tensors[key]):
                    if inside.name in self.recipes:
                        found[key[:start]].add(inside.name)
        whole = [prefix for prefix, names in found.items() if len(names) == len(self.recipes)]
        if len(whole) > 1:
            text = " and ".join(f"behind {prefix!r}" for prefix in sorted(whole))
            raise CheckpointError(f"{self.store.folder}: holds the model more than once: {text}; keep one of them")
        if not found:
            asked, held = next(iter(self.recipes)), first_few(sorted(self.store.tensors))
            raise CheckpointError(
                f"{self.store.folder}: no tensor has a name of the model, such as {asked}, behind any prefix; it holds "
                f"{held}: is the model of --config another one?"
            )
        return max(found, key=lambda prefix: len(found[prefix]))

    def inside(self, name: str, info: TensorInfo) -> list[_Inside]:
        """What of the recipes a stored parameter of this name holds. Nothing if it is no weight."""
        found = self.spelling.canonical(_unwrapped(name))
        if found is None:
            return []
        modules = self.spelling.stacked.get(starred(found)[0], ())
        if (
            not modules
            or len(info.shape) != 3
            or info.shape[0] != self.spelling.experts
            or info.shape[1] % len(modules)
        ):
            return [_Inside(found)]
        rows = info.shape[1] // len(modules)
        above = found.rpartition(".")[0]
        return [
            _Inside(f"{above}.{expert}.{module}.weight", (expert,), number * rows)
            for expert in range(info.shape[0])
            for number, module in enumerate(modules)
        ]

    def weights(self, prefix: str) -> tuple[dict[str, StoredAt], dict[str, list[_Inside]], list[str]]:
        """The places of the weights, the parameters by their own names, and the names of all other tensors."""
        found: dict[str, StoredAt] = {}
        parameters: dict[str, list[_Inside]] = {}
        others, copies, unexpected = [], [], []
        for key, info in self.store.tensors.items():
            name = _unwrapped(key.removeprefix(prefix))
            root = (self.spelling.canonical(name) or name).partition(".")[0]
            if not key.startswith(prefix) or root not in self.roots:
                others.append(key)
                continue
            insides = self.inside(name, info)
            parameters[name] = insides
            for inside in insides:
                if inside.name in self.recipes:
                    found[inside.name] = StoredAt(key, inside.leading, inside.first_row)
                elif inside.name in self.spelling.tied:
                    copies.append((key, name, self.spelling.tied[inside.name]))
                else:
                    unexpected.append(key)
        if unexpected:
            names = first_few(sorted({*unexpected}))
            raise CheckpointError(f"{self.store.folder}: holds {names}, which the model of --config does not have")
        for key, name, original in copies:
            self._require_equal(key, found, original)
            parameters[name] = [_Inside(original)]  # an optimizer may have its state under either name
        return found, parameters, others

    def _require_equal(self, copy: str, found: Mapping[str, StoredAt], original: str) -> None:
        """Raise CheckpointError if the copy of a tied tensor differs from its original."""
        if original not in found:
            return
        key = found[original].name
        (rows, *columns), _ = self.store.tensors[copy]
        same = self.store.tensors[key].shape == self.store.tensors[copy].shape
        height = max(1, _COMPARED // max(1, torch.Size(columns).numel()))
        for first in range(0, rows if same else 0, height):
            box = Box((first, *(0 for _ in columns)), (min(height, rows - first), *columns))
            same = same and torch.equal(self.store.read(copy, box), self.store.read(key, box))
        if not same:
            raise CheckpointError(
                f"{self.store.folder}: tie_word_embeddings, but {copy} differs from {key}: if the folder is right, set "
                "it to false in the model's options"
            )

    def states(
        self, parameters: Mapping[str, list[_Inside]], others: Sequence[str]
    ) -> tuple[dict[str, dict[str, StoredAt]], dict[str, int], list[str]]:
        """The places of each of our states, the steps by the names that say so, and the names of further tensors."""
        found: dict[str, dict[str, StoredAt]] = {}
        steps: dict[str, int] = {}
        unknown, rest = set(), []
        for key in others:
            owner, _, kind = key.rpartition(".")
            owner = _unwrapped(owner)
            start = next((start for start in _starts(owner) if owner[start:] in parameters), None)
            if start is None or f".{GROUPS}." in f".{key}":
                rest.append(key)
            elif kind == STEP:
                steps[key] = _whole(self.store, key, self.store.read(key))
            elif kind not in STATES:
                unknown.add(kind)
            else:
                places = found.setdefault(STATES[kind], {})
                for inside in parameters[owner[start:]]:
                    at = StoredAt(key, inside.leading, inside.first_row)
                    if places.setdefault(inside.name, at) != at and inside.name == owner[start:]:
                        text = f"{kind} of {inside.name} twice, as {places[inside.name].name} and as {key}"
                        raise CheckpointError(f"{self.store.folder}: holds {text}")
        if unknown:
            raise CheckpointError(
                f"{self.store.folder}: its optimizer has states {first_few(sorted(unknown))}, and is neither AdamW nor "
                f"Muon, which have {first_few(sorted(STATES))}; convert the weights alone with --weights_only"
            )
        for key in self.store.values:  # torch stores a number that is no tensor so
            if key.endswith(f".{STEP}") and any(key[start : -len(STEP) - 1] in parameters for start in _starts(key)):
                steps[key] = _whole(self.store, key, self.store.values[key])
        return found, steps, rest


def _starts(name: str) -> Iterator[int]:
    """The positions where a dotted name, or a part of it to its end, begins. Of longer names than any, the first."""
    yield 0
    for position, letter in enumerate(name[:_LONGEST]):
        if letter == ".":
            yield position + 1


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _owner(name: str) -> str:
    """What a value belongs to, such as optim.param_groups or lr_scheduler."""
    before, groups, _ = name.partition(f"{GROUPS}.")
    return f"{before}{GROUPS}" if groups else name.partition(".")[0]


def _whole(store: TensorStore, key: str, value: object) -> int:
    """A count of steps, stored as a number or as a tensor of one."""
    number: Any = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if type(number) not in (int, float) or not 0 <= number < MOST or number != int(number):
        raise CheckpointError(f"{store.folder}: {key} is {str(number)[:40]}, and no count of steps")
    return int(number)


def _common(store: TensorStore, steps: Mapping[str, int]) -> int:
    """Return the number of updates that all parameters had. `steps` has it by the name of what states it.

    Raises CheckpointError if the numbers differ.
    """
    of_count: dict[int, list[str]] = defaultdict(list)
    for name, count in steps.items():
        of_count[count].append(name)
    if len(of_count) > 1:
        text = "; ".join(f"{count} by {first_few(sorted(names))}" for count, names in sorted(of_count.items()))
        raise CheckpointError(
            f"{store.folder}: parameters had different numbers of updates, and one run counts one: {text}"
        )
    return next(iter(of_count), 0)


def _rescaled(store: TensorStore, stored: Mapping[str, StoredAt]) -> TensorStore:
    """The store with torch's momentum of Muon as ours.

    Torch's is the mean B = mu B + (1 - mu) G of the gradients, ours the sum M = mu M + G = B / (1 - mu). Raises
    CheckpointError if the folder does not say mu, or is of SGD.
    """
    groups = [key for key in store.values if f".{GROUPS}." in f".{key}"]
    if any(key.endswith(".dampening") for key in groups):
        raise CheckpointError(f"{store.folder}: its momentum is that of SGD; convert the weights alone, --weights_only")
    stated = [store.values[key] for key in groups if key.endswith(".momentum")]
    factors = sorted({factor for factor in stated if type(factor) is float and 0 <= factor < 1})
    if len(factors) != 1 or len({str(factor) for factor in stated}) > 1:
        told = first_few([str(each)[:40] for each in stated]) or "of no group"
        raise CheckpointError(
            f"{store.folder}: Muon's momentum has the factors {told}: one number from 0 to below 1 in {GROUPS} is "
            "needed to read it; convert the weights alone with --weights_only"
        )
    kept = 1 - factors[0]

    def scaled(key: str) -> Derived:
        return Derived(store.tensors[key], lambda box: store.read(key, box).float() / kept)

    return WithDerived(store, {key: scaled(key) for key in sorted({at.name for at in stored.values()})})
