"""Adapters of a native checkpoint: merged into their base, or written as PEFT's files.

PEFT's folder has adapter_config.json and adapter_model.safetensors. For each module of transformers the latter has
`base_model.model.MODULE.lora_A.weight` [r, in] and `.lora_B.weight` [out, r].
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors import safe_open
from torch import Tensor

from megapar.checkpoint.format import BUFFER, Manifest, Sizes, read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.compatible import saved_adapter
from megapar.config.messages import first_few
from megapar.config.options import AdapterConfig, ModelConfig
from megapar.errors import CheckpointError, ConfigError
from megapar.params import MAIN
from megapar_models.convert.config_json import names_of
from megapar_models.convert.progress import progress
from megapar_models.convert.recipes import starred
from megapar_models.convert.saved import saved_config
from megapar_models.convert.stream import SHARD_BYTES, TensorInfo, new_folder, write_file, write_weights
from megapar_models.counts import WholeModel

# The version of PEFT whose files these are.
PEFT_VERSION = "0.21.2"
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}
PREFIX = "base_model.model."
# Fields of adapter_config.json with the only value that is written, and read.
UNCHANGED: dict[str, Any] = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "use_dora": False, "bias": "none"},
    **{"fan_in_fan_out": False, "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}},
    "modules_to_save": None,
}


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
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToPeft:
    """Write the adapters of a checkpoint as PEFT's files, in fp32."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint with adapters, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder for adapter_config.json and adapter_model.safetensors; must not exist."""
    base_name: str = ""
    """The name or the folder of the base at Hugging Face, for PEFT's base_model_name_or_path."""


@dataclass(frozen=True)
class PeftToNative:
    """Make a native checkpoint of PEFT's adapters, to merge them or to train on from them (adapter.init_from)."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder with adapter_config.json and adapter_model.safetensors."""
    base: Annotated[Path, tyro.conf.Positional]
    """Folder of the native checkpoint of their base."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""


def merge(options: Merge) -> None:
    """Merge adapters. Raises CheckpointError if a checkpoint is damaged, has no adapters, or is not their base."""
    manifest, base = read_manifest(options.src), read_manifest(options.base)
    adapter = adapter_of(options.src, manifest)
    if manifest.base != {"weights": base.weights_digest()}:
        raise CheckpointError(f"{options.src}: its adapters were not trained on {options.base}")
    config = saved_config(base)
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
                values = reader.tensor(f"{state}.{name}")
                if matrix in adapted:
                    a, b = (factors.tensor(f"{MAIN}.{matrix}.{kind}") for kind in FACTORS)
                    values = merged(values, a, b, adapter.scale)
            return advance(values)

        write_weights(folder, config, shapes, make, shard_bytes=options.shard_bytes, buffers=buffers)
    print(f"{options.dst}: {options.base} with the adapters of step {manifest.step} of {options.src}")


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, all in fp32: a sum in 16 bits would round each weight twice, and lose most of small adapters."""
    return weight.addmm(b, a, alpha=scale)


def native_to_peft(options: NativeToPeft) -> None:
    """Write PEFT's files.

    Raises CheckpointError if the checkpoint is damaged or has no adapters, and ConfigError if transformers keeps a
    matrix with an adapter in a tensor with others.
    """
    manifest = read_manifest(options.src)
    adapter = adapter_of(options.src, manifest)
    model = saved_config(manifest).model
    stored = factors_of(manifest)
    theirs = their_factors(model, stored)
    plan = {name: TensorInfo(stored[ours], torch.float32) for name, ours in sorted(theirs.items())}
    pairs = names_of(model).pairs(model)
    with new_folder(options.dst, sum(info.nbytes for info in plan.values())) as folder, progress(len(plan)) as advance:

        def make(name: str) -> Tensor:
            with Reader(options.src, manifest) as reader:
                values = reader.tensor(f"{MAIN}.{theirs[name]}")
            matrix, kind = split(theirs[name])
            rotary = pairs.get(starred(matrix)[0])
            # The rows of B are those of the matrix.
            return advance(rotary.theirs(values) if rotary is not None and kind == "lora_b" else values)

        write_file(folder / PEFT_WEIGHTS, plan, make)
        document = peft_config(adapter, targets(model, theirs), options.base_name)
        (folder / PEFT_CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    print(f"{options.dst}: adapters of rank {adapter.rank}, step {manifest.step} of {options.src}")


def peft_to_native(options: PeftToNative) -> None:
    """Make a checkpoint of adapters of PEFT's files, with the hash of the base, for `merge` and adapter.init_from.

    Raises CheckpointError if the files are damaged or do not fit the base, and ConfigError for a field of
    adapter_config.json that means something else.
    """
    base = read_manifest(options.base)
    config = saved_config(base)
    adapter = adapter_from_peft(json.loads((options.src / PEFT_CONFIG).read_text()))
    matrices = {name.removesuffix(".weight"): piece.shape for name, piece in WholeModel(config.model).tensors().items()}
    pairs = names_of(config.model).pairs(config.model)
    with safe_open(options.src / PEFT_WEIGHTS, "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wanted: dict[str, Sizes] = {}
        for matrix, shape in matrices.items():
            if len(shape) == 2:
                wanted |= {f"{matrix}.lora_a": (adapter.rank, shape[1]), f"{matrix}.lora_b": (shape[0], adapter.rank)}
        known = their_factors(config.model, wanted, refuse=False)
        wrong = [f"{name} {list(found[name])}" for name in found if wanted.get(known.get(name, "")) != found[name]]
        alone = {split(known[name])[0] for name in found if name in known}
        if config.model.tie_word_embeddings and any("lm_head" in name or "embed_tokens" in name for name in found):
            wrong.append("the head is the embedding, and one adapter would change both")
        wrong += [f"a factor of {m} alone" for m in alone if sum(split(known.get(n, ""))[0] == m for n in found) != 2]
        if wrong or not found:
            raise CheckpointError(f"{options.src}: does not fit {options.base}: {first_few(wrong) or 'no factors'}")
        ours = {known[name]: name for name in found}
        adapter = replace(adapter, targets=tuple(sorted(alone)))
        with new_folder(options.dst, 4 * sum(map(math.prod, found.values()))) as folder, progress(len(ours)) as advance:

            def make(name: str) -> Tensor:
                matrix, kind = split(name)
                values = file.get_tensor(ours[name]).float()
                rotary = pairs.get(starred(matrix)[0])
                return advance(rotary.ours(values) if rotary is not None and kind == "lora_b" else values)

            write_weights(
                folder,
                replace(config, adapter=adapter),
                {name: wanted[name] for name in sorted(ours)},
                make,
                shard_bytes=SHARD_BYTES,
                base={"weights": base.weights_digest()},
            )
    print(f"{options.dst}: adapters of rank {adapter.rank}; merge them with {options.base}, or train on from them:")
    words = " ".join(sorted({matrix.rpartition(".")[2] for matrix in alone}))
    print(
        f"  --checkpoint.init_from {options.base} --adapter.init_from {options.dst} --adapter.rank {adapter.rank} "
        f"--adapter.alpha {adapter.alpha:g}{' --adapter.rslora' * adapter.rslora} --adapter.targets {words}"
    )


def adapter_of(path: Path, manifest: Manifest) -> AdapterConfig:
    """The options of a checkpoint's adapters. Raises CheckpointError if it has none."""
    config = manifest.trainer.get("config")
    if not manifest.base or not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no adapters")
    return saved_adapter(config)


def factors_of(manifest: Manifest) -> dict[str, Sizes]:
    """The shapes of a checkpoint's factors, by logical name."""
    stored = {name.removeprefix(f"{MAIN}."): shape for name, (_, shape) in manifest.kinds().items() if MAIN in name}
    return {name: shape for name, shape in stored.items() if split(name)[1] in FACTORS}


def split(name: str) -> tuple[str, str]:
    """The matrix of a factor, and lora_a or lora_b."""
    matrix, _, kind = name.rpartition(".")
    return matrix, kind


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
        theirs = modules.get(pattern, "")
        shared = [other for other, module in modules.items() if module == theirs and other != pattern]
        layout = names.layouts.get(theirs)
        if shared or theirs.count("*") != len(numbers) or (layout is not None and layout.transposed):
            if refuse:
                text = (
                    f"transformers keeps {matrix} with others in {theirs or 'no module of its own'}; merge it instead"
                )
                raise ConfigError(f"native-to-peft: {text}")
            continue
        for number in numbers:
            theirs = theirs.replace("*", number, 1)
        found[f"{PREFIX}{theirs}.{FACTORS[kind]}.weight"] = name
    return found


def targets(model: ModelConfig, theirs: Mapping[str, str]) -> list[str]:
    """PEFT's target_modules: the last word of a module if all modules with it have an adapter, else its whole name."""
    adapted = {split(ours)[0]: name.removeprefix(PREFIX).rpartition(".lora_")[0] for name, ours in theirs.items()}
    modules = names_of(model).modules
    every: dict[str, set[str]] = {}
    for name in WholeModel(model).tensors():
        matrix = name.removesuffix(".weight")
        module = modules.get(starred(matrix)[0], "")
        every.setdefault(module.rpartition(".")[2], set()).add(matrix)
    found = set()
    for module in adapted.values():
        word = module.rpartition(".")[2]
        found.add(word if every[word] <= adapted.keys() else module)
    return sorted(found)


def peft_config(adapter: AdapterConfig, target_modules: Sequence[str], base_name: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        **UNCHANGED,
        "peft_version": PEFT_VERSION,
        "base_model_name_or_path": base_name or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha or float(adapter.rank),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "target_modules": list(target_modules),
        "inference_mode": True,
    }


def adapter_from_peft(document: Mapping[str, Any]) -> AdapterConfig:
    """The options of PEFT's adapter_config.json. Raises ConfigError for a field that means something else."""
    wrong = [
        f"{name}={document[name]!r}"
        for name, value in UNCHANGED.items()
        if document.get(name, value) not in (value, None)
    ]
    further = ("target_parameters", "layer_replication", "trainable_token_indices", "lora_bias", "layers_to_transform")
    wrong += [f"{name}={document[name]!r}" for name in further if document.get(name)]
    if wrong:
        raise ConfigError(f"{PEFT_CONFIG}: not read: {', '.join(wrong)}")
    return AdapterConfig(
        rank=document["r"],
        alpha=float(document["lora_alpha"]),
        rslora=bool(document.get("use_rslora", False)),
        dropout=float(document.get("lora_dropout", 0.0)),
    )
