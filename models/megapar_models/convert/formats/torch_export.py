"""Native checkpoints as folders of torch's DCP: torchtitan's, and FSDP2's with Hugging Face's names.

The weights, and where the checkpoint has them the states of AdamW and Muon, so that training goes on there. Rates and
the like (`param_groups`) are those of the checkpoint's options. Values are fp32.

A folder of FSDP2 has what torch's get_state_dict asks for with flatten_optimizer_state_dict and without it: states have
the same names in both. Without it there is one group, of all parameters. With it the weight decay of each parameter is
that of megapar: matrices and embeddings decay, norms and biases do not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import Manifest, read_manifest
from megapar.checkpoint.load import has_average
from megapar.config.messages import first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.declare.params import MAIN, Box, Sizes
from megapar.optimizer.schedule import learning_rate
from megapar_models.convert.config_json import names_of
from megapar_models.convert.exported import recipes_in_memory
from megapar_models.convert.formats.by_parameter import GROUPS, STEP
from megapar_models.convert.formats.contents import EXP_AVG, EXP_AVG_SQ, MOMENTUM
from megapar_models.convert.formats.dcp_target import TensorPiece, meta, write_dcp
from megapar_models.convert.formats.torchtitan import TIED, fused_recipes, torchtitan_recipes
from megapar_models.convert.huggingface import their_tensor
from megapar_models.convert.recipes import Recipe, starred
from megapar_models.convert.saved import trained_options
from megapar_models.family import HuggingFace

_ADAMW, _MUON = "adamw", "muon"
_STATES = {_ADAMW: {EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}, _MUON: {MOMENTUM: "momentum_buffer"}}
OTHERWISE_IN_MEMORY = ("kimi_linear", "bailing_hybrid", "olmo_hybrid")
"""Families of which transformers has several tensors of files as one, or names by the kind of a layer."""
_OLDER = (".embedding.",)  # in `HuggingFace.renamed`: of older files, and not of models in memory
Advance = Callable[[Tensor], Tensor]


class _Part(NamedTuple):
    """A box of one of their parameters, and how it is made of ours."""

    box: Box
    recipe: Recipe


@dataclass(frozen=True)
class _Parameter:
    """One of their parameters, in parts."""

    shape: Sizes
    parts: Sequence[_Part]

    @classmethod
    def of(cls, recipe: Recipe) -> "_Parameter":
        """The parameter of one recipe. A stack of experts is in as many parts, since it may be too large for memory."""
        experts = recipe.of_experts()
        if not experts:
            return cls(recipe.shape, [_Part(Box((0,) * len(recipe.shape), recipe.shape), recipe)])
        rest = (0,) * len(experts[0].shape)
        boxes = [Box((number, *rest), (1, *recipe.shape[1:])) for number in range(len(experts))]
        return cls(recipe.shape, [_Part(box, expert) for box, expert in zip(boxes, experts, strict=True)])

    @property
    def names(self) -> list[str]:
        """Our tensors in it."""
        return [part.name for _, recipe in self.parts for part in recipe.parts]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and embeddings."""
        return all(len(part.shape) > 1 for _, recipe in self.parts for part in recipe.parts)


class NativeSource:
    """A native checkpoint with the optimizer's options."""

    def __init__(self, path: Path, family: str):
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        if self.manifest.base:
            raise CheckpointError(f"{path}: holds adapters alone: megapar convert merge makes a whole model of them")
        self.config: Config = trained_options(self.manifest, family)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    def notes(self, *, moments: bool) -> list[str]:
        """Lines for the user about what the written folder does not have from the checkpoint."""
        lines = []
        if moments and "optimizer.lr" not in self.manifest.trainer["config"]:
            what = "rates, betas and decay in param_groups are megapar's defaults"
            lines.append(f"{self.path} does not state optimizer.lr: {what}")
        if moments and self.config.optimizer.groups:
            lines.append("optimizer.groups: their factors are not in param_groups")
        if has_average(self.manifest):
            lines.append(
                "the average of the weights (optimizer.ema) is left out; megapar convert average makes it a model"
            )
        return lines

    @property
    def updates(self) -> int:
        return int(self.manifest.trainer.get("updates", 0))

    def has(self, state: str, parameter: _Parameter) -> bool:
        """Whether the checkpoint has this state of a parameter. Raises CheckpointError if it has it of a part."""
        there = [f"{state}.{name}" in self.manifest.tensors for name in parameter.names]
        if any(there) and not all(there):
            lacking = [name for name, found in zip(parameter.names, there, strict=True) if not found]
            raise CheckpointError(
                f"{self.path}: has {state} of some tensors of one parameter there, and none of {first_few(lacking)}"
            )
        return bool(there) and all(there)

    def has_state(self, state: str, recipe: Recipe) -> bool:
        """Whether the checkpoint has this state of all of our tensors in one of theirs; weights it has."""
        return state == MAIN or all(f"{state}.{part.name}" in self.manifest.tensors for part in recipe.parts)

    def optimizer_of(self, parameter: _Parameter) -> str:
        """The optimizer of a parameter, "" if it has no state. Raises CheckpointError if torch has no such one."""
        found = {self.manifest.optimizer_of(name) for name in parameter.names}
        unknown = found - {"", *_STATES}
        if unknown:
            raise CheckpointError(
                f"{self.path}: was trained by {first_few(sorted(unknown))}, and states of {', '.join(_STATES)} are "
                "written; with --weights_only the weights alone"
            )
        kinds = [kind for kind, states in _STATES.items() if all(self.has(state, parameter) for state in states)]
        return kinds[0] if kinds else ""

    def pieces(self, parameter: _Parameter, state: str = MAIN, factor: float = 1.0) -> list[TensorPiece]:
        """The pieces of a parameter, or of a state of it."""
        return [TensorPiece(box, partial(self._make, recipe, state, factor)) for box, recipe in parameter.parts]

    def _make(self, recipe: Recipe, state: str, factor: float) -> Tensor:
        values = their_tensor(self.path, self.manifest, recipe, state=state)
        return values if factor == 1.0 else values.mul_(factor)

    def group(self, kind: str, *, decays: bool) -> dict[str, Any]:
        """What torch's optimizer of this kind says of a group of parameters, by the checkpoint's options."""
        options = self.config.optimizer
        rate = learning_rate(self.manifest.step, self.manifest.consumed_samples, options, self.config.train)
        given: dict[str, Any] = {"lr": rate, "weight_decay": options.weight_decay if decays else 0.0}
        # Of the torch that writes: the names of a group's options differ from version to version.
        one = [torch.nn.Parameter(torch.zeros(1, 1))]
        if kind == _MUON:
            scales = {"adam_rms": "match_rms_adamw", "keller": "original"}
            if options.muon_scale not in scales:
                raise ConfigError(f"optimizer.muon_scale={options.muon_scale}: torch's Muon has {', '.join(scales)}")
            muon: dict[str, Any] = {"momentum": options.momentum, "nesterov": options.nesterov}
            made = torch.optim.Muon(one, adjust_lr_fn=scales[options.muon_scale], **muon, **given)
        else:
            made = torch.optim.AdamW(one, betas=options.betas, eps=options.eps, **given)  # type: ignore[assignment]
        group = dict(made.state_dict()[GROUPS][0])
        del group["params"]
        return group | {"initial_lr": options.lr}  # schedulers of torch keep the peak there


def export_fsdp(
    source: Path, target: Path, *, family: str = "", moments: bool = True, advance: Advance = lambda values: values
) -> list[str]:
    """Write the native checkpoint `source` to the DCP folder `target` under names of FSDP2 and Hugging Face.

    Names are model.NAME and optim.state.NAME.exp_avg. Stacks of experts have the names that transformers 5 has in
    memory. Returns lines for the user. Raises CheckpointError if the source is damaged or of another optimizer than
    AdamW and Muon, ConfigError if the target exists or the family has no names at Hugging Face, and StorageError if it
    cannot be written.
    """
    found = NativeSource(source, family)
    names = names_of(found.model)
    if found.model.family in OTHERWISE_IN_MEMORY:
        text = "transformers has other tensors in memory than in its files, which native-to-hf writes"
        raise ConfigError(f"model.family={found.model.family}: {text}")
    parameters = in_memory(recipes_in_memory(found.model), names)
    tied = {renamed(copy, names): renamed(original, names) for copy, original in names.tied.items()}
    state, pieces = _weights(found, parameters, tied if found.model.tie_word_embeddings else {}, "model.")
    nested: dict[str, Any] = {"model": state}
    if moments:
        states, groups = _optimizer(found, parameters, pieces, "optim.")
        if states:
            kinds = sorted({kind for kind, _ in groups.values()})
            of_kind = [[name for name, (kind, _) in groups.items() if kind == each] for each in kinds]
            together = [
                {**found.group(kind, decays=True), "params": of} for kind, of in zip(kinds, of_kind, strict=True)
            ]
            nested["optim"] = {"state": states, GROUPS: together, **_flat_groups(found, groups)}
    write_dcp(target, nested, pieces, advance=advance)
    return found.notes(moments=moments)


def export_torchtitan(
    source: Path, target: Path, *, family: str = "", moments: bool = True, advance: Advance = lambda values: values
) -> list[str]:
    """Write the native checkpoint `source` to the folder `target`, which torchtitan 0.3.0 reads as a step-N.

    Of q, k and v it has the states both apart and as one, for models with a fused wqkv and without. torchtitan is to go
    on with --checkpoint.exclude_from_loading dataloader: the order of texts is that of megapar until here. Returns
    lines for the user.
    Raises as `export_fsdp` does, and ConfigError if torchtitan has no such model.
    """
    found = NativeSource(source, family)
    parameters = {name: _Parameter.of(recipe) for name, recipe in torchtitan_recipes(found.model).items()}
    state, pieces = _weights(found, parameters, TIED if found.model.tie_word_embeddings else {}, "")
    nested: dict[str, Any] = dict(state)
    if moments:
        fused = {name: _Parameter.of(recipe) for name, recipe in fused_recipes(found.model).items()}
        states, groups = _optimizer(found, parameters | fused, pieces, "optimizer.")
        if states:
            nested["optimizer"] = {"state": states, **_flat_groups(found, groups)}
            step, length = found.manifest.step, found.config.train.seq_length
            nested["lr_scheduler"] = {"last_epoch": step}
            nested["train_state"] = {"step": step, "ntokens_seen": found.manifest.consumed_samples * length}
    write_dcp(target, nested, pieces, advance=advance)
    return found.notes(moments=moments)


def _weights(
    source: NativeSource, parameters: Mapping[str, _Parameter], tied: Mapping[str, str], prefix: str
) -> tuple[dict[str, Tensor], dict[str, list[TensorPiece]]]:
    """The state of the weights, and the pieces of all. Copies of tied tensors are written too."""
    state, pieces = {}, {}
    everything = {**parameters, **{copy: parameters[original] for copy, original in tied.items()}}
    for name, parameter in everything.items():
        state[name] = meta(parameter.shape)
        pieces[f"{prefix}{name}"] = source.pieces(parameter)
    return state, pieces


def _optimizer(
    source: NativeSource, parameters: Mapping[str, _Parameter], pieces: dict[str, list[TensorPiece]], prefix: str
) -> tuple[dict[str, dict[str, Tensor]], dict[str, tuple[str, bool]]]:
    """The states of the optimizer by parameter, and each one's optimizer and whether it decays. Adds to `pieces`."""
    states: dict[str, dict[str, Tensor]] = {}
    groups = {}
    for name, parameter in parameters.items():
        kind = source.optimizer_of(parameter)
        if not kind:
            continue
        groups[name] = kind, parameter.decays
        # Torch's Muon keeps the mean of the gradients, where ours keeps the sum (`by_parameter._rescaled`).
        factor = 1 - source.config.optimizer.momentum if kind == _MUON else 1.0
        states[name] = {}
        for ours, theirs in _STATES[kind].items():
            states[name][theirs] = meta(parameter.shape)
            pieces[f"{prefix}state.{name}.{theirs}"] = source.pieces(parameter, ours, factor)
        if kind == _ADAMW:
            states[name][STEP] = torch.tensor(float(source.updates))
    return states, groups


def _flat_groups(source: NativeSource, groups: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    """The options of each parameter, by names with it inside, as torch flattens them."""
    known = {key: source.group(key[0], decays=key[1]) for key in sorted({*groups.values()})}
    return {f"{GROUPS}.{name}.{option}": value for name, key in groups.items() for option, value in known[key].items()}


def in_memory(recipes: Mapping[str, Recipe], names: HuggingFace) -> dict[str, _Parameter]:
    """Return the parameters of a module of transformers 5 by their names there. `recipes` have the names of files."""
    stacks: dict[str, tuple[str, int]] = {}  # of a module's pattern: the stack's pattern, and which part of its rows
    for stack, modules in names.stacked.items():
        above = stack.rpartition(".")[0]
        stacks |= {f"{above}.*.{module}.weight": (stack, number) for number, module in enumerate(modules)}
    found: dict[str, _Parameter] = {}
    stacked: dict[str, dict[tuple[int, int], Recipe]] = {}
    for name, recipe in recipes.items():
        pattern, numbers = starred(name)
        if pattern in stacks:
            stack, number = stacks[pattern]
            for layer in numbers[:-1]:
                stack = stack.replace("*", layer, 1)
            stacked.setdefault(renamed(stack, names), {})[int(numbers[-1]), number] = recipe
        else:
            found[renamed(name, names)] = _Parameter.of(recipe)
    return found | {name: _Parameter(*_stack(parts)) for name, parts in stacked.items()}


def _stack(parts: Mapping[tuple[int, int], Recipe]) -> tuple[Sizes, list[_Part]]:
    """Shape and parts of a stack of all experts' matrices. A key has the numbers of expert and module."""
    rows, columns = next(iter(parts.values())).shape
    experts, modules = (max(numbers) + 1 for numbers in zip(*parts, strict=True))
    placed = [
        _Part(Box((expert, module * rows, 0), (1, rows, columns)), recipe)
        for (expert, module), recipe in sorted(parts.items())
    ]
    return (experts, modules * rows, columns), placed


def renamed(name: str, names: HuggingFace) -> str:
    """The name that transformers 5 has in memory, of one in files."""
    for theirs, ours in names.renamed.items():
        if theirs not in _OLDER:
            name = name.replace(ours, theirs)
    return name
