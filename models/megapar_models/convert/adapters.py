"""Adapters of a native checkpoint: merged into their base, or written as PEFT's files.

PEFT's folder has adapter_config.json and adapter_model.safetensors. For each module of transformers the latter has
`base_model.model.MODULE.lora_A.weight` [r, in] and `.lora_B.weight` [out, r].
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors import safe_open
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint import vocabulary
from megapar.checkpoint.format import BUFFER, Manifest, Sizes, read_manifest, reading
from megapar.checkpoint.load import Reader
from megapar.checkpoint.origin import origin_of
from megapar.config.compatible import saved_adapter
from megapar.config.messages import counted, first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import ADAPTERS, AdapterConfig
from megapar.declare.params import MAIN
from megapar_models.convert.by_name import open_source
from megapar_models.convert.config_json import names_of
from megapar_models.convert.exported import native_shapes
from megapar_models.convert.huggingface import their_tensor
from megapar_models.convert.peft_beside import PeftExtras, modules_to_save, read_beside, trainable, trained_beside
from megapar_models.convert.peft_config import (
    PEFT_CONFIG,
    adapter_from_peft,
    pattern,
    peft_config,
    stacks_in_config,
    words_in_stacks,
)
from megapar_models.convert.progress import progress
from megapar_models.convert.recipes import pairs_of, starred
from megapar_models.convert.safetensors_folder import header_of
from megapar_models.convert.saved import saved_config, text_record
from megapar_models.convert.stacked_experts import EXPERT_MODULES, Stack, of_expert, stacks
from megapar_models.convert.stream import SHARD_BYTES, TensorInfo, new_folder, write_file, write_weights
from megapar_models.convert.typed_fields import COUNT, read_object
from megapar_models.counts import WholeModel
from megapar_models.tensor_layouts import Pairs

PEFT_WEIGHTS = "adapter_model.safetensors"
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Merge:
    """Add the adapters of a checkpoint to their base: W + s B A in fp32, a native checkpoint without adapters.

    A training or an export in 16 bits rounds the sum, once.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint with adapters, such as RUN_DIR/checkpoints/step_00000300."""
    base: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint that they were trained on, as checkpoint.init_from named it."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToPeft:
    """Write the adapters of a checkpoint as PEFT's files, in fp32, and what was trained beside them."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint with adapters, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder for adapter_config.json and adapter_model.safetensors; must not exist."""
    base_name: str = ""
    """The name or the folder of the base at Hugging Face, for PEFT's base_model_name_or_path."""
    base: Path | None = None
    """Folder of the checkpoint that they were trained on, as checkpoint.init_from named it. DoRA needs it."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    stacked_experts: bool = False
    """Write adapters of experts as PEFT's target_parameters, for the stacks of transformers 5. Otherwise each expert
    has modules of its own, as in the files of published weights."""


@dataclass(frozen=True)
class PeftToNative:
    """Make a native checkpoint of PEFT's adapters, to merge them or to train on from them (adapter.init_from)."""

    src: Annotated[str | Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|ORG/MODEL[@REVISION]")]
    """Folder with adapter_config.json and adapter_model.safetensors, or a model at Hugging Face with these files."""
    base: Annotated[Path, tyro.conf.Positional]
    """Folder of the native checkpoint of their base."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""

    @property
    def folder(self) -> Path:
        """The folder with PEFT's files, once `src` is no name."""
        return Path(self.src)


def merge(options: Merge) -> None:
    """Merge adapters. Raises CheckpointError if a checkpoint is damaged, has no adapters, or is not their base."""
    manifest, base = read_manifest(options.src), read_manifest(options.base)
    adapter = adapter_of(options.src, manifest)
    if manifest.base != {"weights": base.weights_digest()}:
        raise CheckpointError(f"{options.src}: its adapters were not trained on {options.base}")
    # The run's model, because it may have a head that its base lacks.
    config = saved_config(manifest, options.family)
    whole = WholeModel(config.model)
    buffers = {name: piece.shape for name, piece in whole.buffers().items()}
    shapes: dict[str, Sizes] = {name: piece.shape for name, piece in whole.tensors().items()} | buffers
    adapted = {name.removesuffix(".lora_a") for name in factors_of(manifest) if name.endswith(".lora_a")}
    needed = sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())
    with new_folder(options.dst, needed) as folder, progress(len(shapes)) as advance:

        def make(name: str) -> Tensor:
            state = BUFFER if name in buffers else MAIN
            matrix = name.removesuffix(".weight")
            # A Reader for each tensor: when it closes, the pages of its mapped files are released.
            with Reader(options.base, base) as reader, Reader(options.src, manifest) as factors:
                # What was trained beside the adapters is in their checkpoint.
                has = factors if f"{state}.{name}" in manifest.tensors else reader
                values = vocabulary.whole(has, f"{state}.{name}", has.tensor(f"{state}.{name}"), shapes[name][0])
                if matrix in adapted:
                    a, b, *magnitude = (factors.tensor(f"{MAIN}.{matrix}.{kind}") for kind in kinds_of(adapter))
                    values = merged(values, a, b, adapter.scale, *magnitude)
            return advance(values)

        texts = text_record(options.src)
        kept: dict[str, Any] = {"texts": texts, "origin": origin_of(base.trainer)}
        write_weights(folder, config, shapes, make, shard_bytes=options.shard_bytes, buffers=buffers, **kept)
    print(f"{options.dst}: {options.base} with the adapters of step {manifest.step} of {options.src}")


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """W + s B A, all in fp32: a sum in 16 bits would round each weight twice, and lose most of small adapters.

    With DoRA its rows get the norms of W's, plus `magnitude`.
    """
    found = weight.addmm(b, a, alpha=scale)
    if magnitude is None:
        return found
    norms = row_norms(found).clamp(min=torch.finfo(found.dtype).tiny)
    return found * ((row_norms(weight) + magnitude) / norms)[:, None]


def row_norms(weight: Tensor) -> Tensor:
    """The norms of the rows of a matrix. They are summed in fp64, so they are the same on every machine."""
    return weight.double().norm(dim=1).to(weight.dtype)


def native_to_peft(options: NativeToPeft) -> None:
    """Write PEFT's files. What was trained beside the adapters becomes modules_to_save.

    Raises CheckpointError if the checkpoint is damaged or has no adapters, and ConfigError if transformers keeps a
    matrix with an adapter in a tensor with others, if PEFT has no place for what was trained beside them, or if DoRA's
    base is not named.
    """
    manifest = read_manifest(options.src)
    adapter = adapter_of(options.src, manifest)
    if adapter.dora and options.base is None:
        raise ConfigError("native-to-peft: needs --base: PEFT has DoRA's magnitudes with the norms of its rows in them")
    base = read_manifest(options.base) if options.base and adapter.dora else manifest
    if adapter.dora and manifest.base != {"weights": base.weights_digest()}:
        raise CheckpointError(f"{options.src}: its adapters were not trained on {options.base}")
    model = saved_config(manifest, options.family).model
    if model.head != "vocabulary":
        raise ConfigError(f"{options.src}: model.head={model.head}: PEFT's files get no head; merge, then native-to-hf")
    stored = factors_of(manifest)
    in_stacks = [name for name in stored if options.stacked_experts and of_expert(name)]
    theirs, stacked, shapes = tensors_of_peft(model, stored, in_stacks, adapter.rank)
    adapted = {split(name)[0] for name in stored}
    kept = modules_to_save(model, trained_beside(manifest, model, stored), adapted)
    shapes |= {f"{PREFIX}{name}": recipe.shape for name, recipe in kept.items()}
    plan = {name: TensorInfo(shape, torch.float32) for name, shape in sorted(shapes.items())}
    pairs = names_of(model).pairs(model)
    with new_folder(options.dst, sum(info.nbytes for info in plan.values())) as folder, progress(len(plan)) as advance:

        def make(name: str) -> Tensor:
            if recipe := kept.get(name.removeprefix(PREFIX)):
                return advance(their_tensor(options.src, manifest, recipe, torch.float32))
            with Reader(options.src, manifest) as reader:
                if name in stacked:
                    return advance(stacked[name].join(lambda ours: reader.tensor(f"{MAIN}.{ours}")))
                values = reader.tensor(f"{MAIN}.{theirs[name]}")
            matrix, kind = split(theirs[name])
            if kind == "lora_magnitude" and options.base:
                with Reader(options.base, base) as reader:
                    values += row_norms(reader.tensor(f"{MAIN}.{matrix}.weight"))
            rotary = pairs_of(f"{matrix}.weight", pairs)
            # The rows of B are those of the matrix, and the magnitudes too.
            return advance(rotary.theirs(values) if rotary is not None and kind != "lora_a" else values)

        write_file(folder / PEFT_WEIGHTS, plan, make)
        # PEFT would take a module with the name of an expert's, such as gate_proj of a dense layer, for the experts.
        apart = {name for name in theirs if stacked and module_of(name).rpartition(".")[2] in EXPERT_MODULES}
        modules = {name: ours for name, ours in theirs.items() if name not in apart}
        saved = sorted({name.rpartition(".")[0] for name in kept})
        document = peft_config(adapter, targets(model, modules), saved, options.base_name)
        if stacked:
            document |= stacks_in_config(adapter, stacked.values())
            document["target_parameters"] += sorted({f"{module_of(name)}.weight" for name in apart})
        (folder / PEFT_CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    beside = f" and {counted(len(saved), 'module')} trained beside them" if saved else ""
    print(f"{options.dst}: adapters of rank {adapter.rank}{beside}, step {manifest.step} of {options.src}")


def peft_to_native(options: PeftToNative) -> None:
    """Make a checkpoint of adapters of PEFT's files, with the hash of the base, for `merge` and adapter.init_from.

    Raises CheckpointError if the files are damaged or do not fit the base, and ConfigError for a field of
    adapter_config.json that means something else.
    """
    source = open_source(options.src, (PEFT_CONFIG, PEFT_WEIGHTS), [PEFT_CONFIG, PEFT_WEIGHTS])
    options = replace(options, src=source.folder)
    base = read_manifest(options.base)
    config = saved_config(base, options.family)
    document = read_object(options.folder / PEFT_CONFIG)
    adapter = adapter_from_peft(document)
    header = header_of(options.folder / PEFT_WEIGHTS)
    found = {name: shape for name, (_, shape) in header.items()}
    wanted = factors_for(config.model, adapter)
    stacked_words = words_in_stacks(document)
    in_stacks = [name for name in wanted if of_expert(name) in stacked_words]
    joint = pattern(document, "rank_pattern", COUNT, adapter.rank)
    known, stacked, shapes = tensors_of_peft(config.model, wanted, in_stacks, adapter.rank, joint, refuse=False)
    further = {name.removeprefix(PREFIX): shape for name, shape in found.items() if ".lora_" not in name}
    words = document.get("modules_to_save") or ()
    beside, wrong = read_beside(config.model, further, words, ties=bool(document.get("ensure_weight_tying")))
    factors = {name: shape for name, shape in found.items() if ".lora_" in name}
    require_fitting(options, config.model, factors, shapes, known, stacked, len(kinds_of(adapter)), wrong)
    ours = {known[name]: name for name in factors if name in known}
    for name, stack in stacked.items():
        ours |= {factor: name for n in range(stack.num_experts) for factor in stack.ours(n)}
    adapted = {split(name)[0] for name in ours}
    whole = native_shapes(config.model)
    stored: dict[str, Sizes] = {name: wanted[name] for name in sorted(ours)}
    stored |= {name: whole[name] for name in sorted(beside.kept)}
    reader = PeftTensors(options, base, ours, stacked, beside, names_of(config.model).pairs(config.model))
    reader.require_base()
    with (
        new_folder(options.dst, 4 * sum(map(math.prod, stored.values()))) as folder,
        progress(len(stored)) as advance,
    ):
        write_weights(
            folder,
            replace(config, adapter=replace(adapter, targets=tuple(sorted(adapted)))),
            stored,
            lambda name: advance(reader.tensor(name)),
            shard_bytes=SHARD_BYTES,
            base={"weights": base.weights_digest()},
            origin=source.origin,
        )
    further_way = next_command(options, config.model, adapter, adapted, beside)
    print(f"{options.dst}: adapters of rank {adapter.rank}; {further_way}")


@dataclass(frozen=True)
class PeftTensors:
    """Our tensors in a file of PEFT: `ours` are the names there of factors, some of them in `stacked` ones.

    `base` is the manifest of the adapters' base, and `pairs` are the rotary pairs of its modules.
    """

    options: PeftToNative
    base: Manifest
    ours: Mapping[str, str]
    stacked: Mapping[str, Stack]
    beside: PeftExtras
    pairs: Mapping[str, Pairs]

    def tensor(self, name: str) -> Tensor:
        """One of our tensors, fp32: a factor, or one that was trained beside the factors."""
        if found := self.beside.kept.get(name):
            parts = [place.part.read(self._stored(f"{PREFIX}{place.source}")) for place in found]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        matrix, kind = split(name)
        values = self._stored(self.ours[name]).float()
        if stack := self.stacked.get(self.ours[name]):
            _, number, word = matrix.rsplit(".", 2)
            return stack.cut(values, int(number), word)
        rotary = pairs_of(f"{matrix}.weight", self.pairs)
        values = rotary.ours(values) if rotary is not None and kind != "lora_a" else values
        if kind == "lora_magnitude":
            # If they differ by less than a factor of 2, the difference is exact.
            with Reader(self.options.base, self.base) as reader:
                values = values - row_norms(reader.tensor(f"{MAIN}.{matrix}.weight"))
        return values

    def require_base(self) -> None:
        """Raise CheckpointError if the file has a tensor of another base, or tied ones that differ."""
        for name, place in self.beside.copies.items():
            of_file = self._stored(f"{PREFIX}{name}")
            with Reader(self.options.base, self.base) as reader:
                of_base = torch.empty(of_file.shape)
                place.part.write(reader, of_base)
            if not of_file.equal(of_base.to(of_file.dtype)):
                text = "it differs from the base, and is in no module of modules_to_save"
                raise CheckpointError(f"{self.options.src}: does not fit {self.options.base}: {name}: {text}")
        for copy, name in self.beside.tied.items():
            if not self._stored(f"{PREFIX}{copy}").equal(self._stored(f"{PREFIX}{name}")):
                text = f"{copy} and {name} are one matrix here, and two that differ in the file"
                raise CheckpointError(f"{self.options.src}: does not fit {self.options.base}: {text}")

    def _stored(self, name: str) -> Tensor:
        path = self.options.folder / PEFT_WEIGHTS
        with reading(str(path)), safe_open(path, "pt") as file:
            values: Tensor = file.get_tensor(name)
        return values


def next_command(
    options: PeftToNative, model: ModelConfig, adapter: AdapterConfig, adapted: Set[str], beside: PeftExtras
) -> str:
    """What can be done with a checkpoint of PEFT's adapters, and the options of a run that trains them on."""
    merges = f"merge them with {options.base}"
    every = WholeModel(model).tensors()
    in_layers = {name.removesuffix(".weight") for name, piece in every.items() if is_adaptable(name, piece.shape)}
    if apart := sorted(adapted - in_layers):
        return f"{merges}; a run trains no adapter of {first_few(apart)}"
    # A word names the matrices of all layers.
    lacking = {matrix.rpartition(".")[2] for matrix in in_layers if matrix not in adapted}
    words = {matrix.rpartition(".")[2] for matrix in adapted}
    named = sorted(words - lacking) + sorted(matrix for matrix in adapted if matrix.rpartition(".")[2] in lacking)
    flags = [
        f"--checkpoint.init_from {options.base} --adapter.init_from {options.dst} --adapter.rank {adapter.rank}",
        f"--adapter.alpha {adapter.alpha:g}",
        *["--adapter.rslora"] * adapter.rslora,
        *["--adapter.dora"] * adapter.dora,
        f"--adapter.targets {' '.join(named)}",
    ]
    if beside.kept:
        patterns = " ".join(f"'{pattern}'" for pattern in (ADAPTERS, *trainable(model, beside.kept.keys())))
        flags.append(f"--train.trainable {patterns}")
    return f"{merges}, or train on from them:\n  {' '.join(flags)}"


def is_adaptable(name: str, shape: Sizes) -> bool:
    """Whether a run can have an adapter of the tensor: of a matrix of the layers but those of routers and gates."""
    apart = (".router.weight", ".shared_gate.weight", ".eh_proj.weight")
    return len(shape) == 2 and name.startswith("layers.") and not name.endswith(apart)


def factors_for(model: ModelConfig, adapter: AdapterConfig) -> dict[str, Sizes]:
    """The shapes of the factors that adapters of all matrices of the model would have."""
    wanted: dict[str, Sizes] = {}
    for name, piece in WholeModel(model).tensors().items():
        if len(piece.shape) == 2:
            outputs, inputs = piece.shape
            shapes = ((adapter.rank, inputs), (outputs, adapter.rank), (outputs,))
            matrix = name.removesuffix(".weight")
            wanted |= {f"{matrix}.{kind}": shape for kind, shape in zip(kinds_of(adapter), shapes, strict=False)}
    return wanted


def kinds_of(adapter: AdapterConfig) -> list[str]:
    """The last words of the tensors that a matrix with an adapter has."""
    return [kind for kind in FACTORS if adapter.dora or kind != "lora_magnitude"]


def tensors_of_peft(
    model: ModelConfig,
    factors: Mapping[str, Sizes],
    in_stacks: Collection[str],
    rank: int,
    joint: int = 0,
    *,
    refuse: bool = True,
) -> tuple[dict[str, str], dict[str, Stack], dict[str, Sizes]]:
    """Where PEFT has our `factors`: tensors of one factor each, those of stacks, and the shapes of all, by its names.

    `refuse` is as for `their_factors`, `joint` as for `stacks`.
    """
    theirs = their_factors(model, [name for name in factors if name not in {*in_stacks}], refuse=refuse)
    stacked = {f"{PREFIX}{name}": stack for name, stack in stacks(model, in_stacks, rank, joint).items()}
    shapes = {name: factors[ours] for name, ours in theirs.items()}
    return theirs, stacked, shapes | {name: stack.shape(factors) for name, stack in stacked.items()}


def require_fitting(
    options: PeftToNative,
    model: ModelConfig,
    found: Mapping[str, Sizes],
    shapes: Mapping[str, Sizes],
    known: Mapping[str, str],
    stacked: Collection[str],
    number: int,
    further: Iterable[str],
) -> None:
    """Raise CheckpointError unless the factors of a file, `found`, are of the base, and each matrix has `number`.

    `further` are problems of its other tensors.
    """
    wrong = [f"{name} {list(found[name])}" for name in found if shapes.get(name) != found[name]]
    wrong += [f"{name}: missing" for name in stacked if name not in found]
    if model.tie_word_embeddings and any("lm_head" in name or "embed_tokens" in name for name in found):
        wrong.append("the head is the embedding, and one adapter would change both")
    wrong += further
    factors = [split(known[name])[0] for name in found if name in known]
    wrong += [f"not all factors of {matrix}" for matrix in sorted({*factors}) if factors.count(matrix) != number]
    if wrong or not found:
        raise CheckpointError(f"{options.src}: does not fit {options.base}: {first_few(wrong) or 'no factors'}")


def adapter_of(path: Path, manifest: Manifest) -> AdapterConfig:
    """The options of a checkpoint's adapters. Raises CheckpointError if it has none."""
    config = manifest.trainer.get("config")
    if not manifest.base or not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no adapters")
    adapter = saved_adapter(config)
    if adapter.rank < 1:
        raise CheckpointError(f"{path}: adapter.rank is {adapter.rank}, of a checkpoint with adapters")
    return adapter


def factors_of(manifest: Manifest) -> dict[str, Sizes]:
    """The shapes of a checkpoint's factors, by logical name."""
    stored = {name.removeprefix(f"{MAIN}."): shape for name, (_, shape) in manifest.kinds().items() if MAIN in name}
    return {name: shape for name, shape in stored.items() if split(name)[1] in FACTORS}


def split(name: str) -> tuple[str, str]:
    """The matrix of a factor, and lora_a or lora_b."""
    matrix, _, kind = name.rpartition(".")
    return matrix, kind


def module_of(name: str) -> str:
    """The module of one of PEFT's factors."""
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]


def their_factors(model: ModelConfig, factors: Iterable[str], *, refuse: bool = True) -> dict[str, str]:
    """From PEFT's names to our `factors`. Those that PEFT has in another form are refused, or left out.

    Raises ConfigError.
    """
    names = names_of(model)
    modules = {**names.modules, **names.modules_of(model)}
    found = {}
    for name in factors:
        matrix, kind = split(name)
        pattern, numbers = starred(matrix)
        theirs = modules.get(matrix) or modules.get(pattern, "")
        shared = [other for other, module in modules.items() if module == theirs and starred(other)[0] != pattern]
        layout = names.layouts.get(theirs)
        if refuse and int(numbers[0]) >= model.num_hidden_layers:
            text = "is of multi-token prediction, which transformers' model leaves out; merge it instead"
            raise ConfigError(f"native-to-peft: {matrix} {text}")
        if shared or theirs.count("*") != len(numbers) or (layout is not None and layout.transposed):
            if refuse:
                text = (
                    f"transformers keeps {matrix} with others in {theirs or 'no module of its own'}; merge it instead"
                )
                raise ConfigError(f"native-to-peft: {text}")
            continue
        for number in numbers:
            theirs = theirs.replace("*", number, 1)
        found[f"{PREFIX}{theirs}.{FACTORS[kind]}"] = name
    return found


def targets(model: ModelConfig, theirs: Mapping[str, str]) -> list[str]:
    """PEFT's target_modules: the last word of a module if all modules with it have an adapter, else its whole name."""
    adapted = {split(ours)[0]: module_of(name) for name, ours in theirs.items()}
    names = names_of(model)
    modules = {**names.modules, **names.modules_of(model)}
    every: dict[str, set[str]] = {}
    for name in WholeModel(model).tensors():
        matrix = name.removesuffix(".weight")
        module = modules.get(matrix) or modules.get(starred(matrix)[0], "")
        every.setdefault(module.rpartition(".")[2], set()).add(matrix)
    found = set()
    for module in adapted.values():
        word = module.rpartition(".")[2]
        found.add(word if every[word] <= adapted.keys() else module)
    return sorted(found)
