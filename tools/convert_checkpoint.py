"""Converts checkpoints on one CPU, one tensor at a time.

Hugging Face's become native ones and back, Megatron-LM's become native ones, native ones become torch's, and dense ones
become mixtures of experts. Before the result gets its name, its logits are compared in fp32 with those of transformers,
of the dense model or, on request, of Megatron-Core. The largest difference goes to parity.json. Adapters are merged
into their base, and become PEFT's files and back.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from megapar_models.convert import adapters, averages, dcp, megatron, megatron_core, upcycle
from megapar_models.convert.by_name import HF_CONFIG, TOKENIZER_FILES, open_description, open_weights
from megapar_models.convert.chat_files import GENERATION, write_chat_files
from megapar_models.convert.config_json import from_hugging_face, names_of, warnings_of
from megapar_models.convert.copied_files import copy_files, files_inside
from megapar_models.convert.export_config import hf_config, unlike, with_dtype
from megapar_models.convert.exported import buffer_shapes, dtypes_of, found_in_fp32, hf_infos, hf_recipes, native_shapes
from megapar_models.convert.formats.command import AnyToNative, from_native, require_read, to_native
from megapar_models.convert.formats.detect import is_hugging_face, is_native
from megapar_models.convert.huggingface import native_tensor, their_tensor, write_model
from megapar_models.convert.other_parts import listed, open_text, source_of_parts, with_stored_layers
from megapar_models.convert.parity import (
    check_transformers,
    megatron_reference,
    native_reference,
    transformers_reference,
    verify,
)
from megapar_models.convert.progress import progress
from megapar_models.convert.recipes import places
from megapar_models.convert.saved import saved_config, text_record, whole_config
from megapar_models.convert.stream import ACCEPTED, SHARD_BYTES, TensorInfo, new_folder, write_weights
from megapar_models.convert.tokenizer_files import compare_with_transformers, read_as_it_is, write_missing
from megapar_models.convert.typed_fields import NAMES, read_object
from megapar_models.counts import WholeModel
from megapar_models.registry import validate, weight_options
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, DataError
from megapar.checkpoint.format import BUFFER, MANIFEST, read_manifest
from megapar.checkpoint.load import differences
from megapar.checkpoint.origin import origin_of
from megapar.config.data_spec import DataSource
from megapar.config.files import part_toml
from megapar.config.messages import first_few
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, DataConfig, TrainConfig
from megapar.config.plugins import package_of
from megapar.data.prepared import CHAT, START, read_sidecar
from megapar.data.tokenizer import Tokenizer, fetch_tokenizer, load_tokenizer, tokenizer_file
from megapar.declare.params import MAIN
from megapar.declare.sharding import model_dtype
from megapar.launch.reporting import reported

CONFIG = "config.toml"
ANY = "any"  # `megapar convert SRC DST` means `megapar convert any SRC DST`
PARITY = "parity.json"
TOKENIZERS = {"hf": "tokenizer.json", "spm": "tokenizer.model"}
PRECISION: dict[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class HfToNative:
    """Convert a Hugging Face model to a native checkpoint of weights without optimizer state.

    DST also gets config.toml with the [model] section, and config.json and tokenizer files for the way back.
    """

    src: Annotated[str | Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|ORG/MODEL[@REVISION]")]
    """Folder with config.json and model.safetensors, or its shards and their index; or if there is none of this name, a
    model at Hugging Face, whose files are downloaded into its cache. REVISION is a branch, a tag or a commit."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    family: str = ""
    """The family to read config.json by, such as MODULE:NAME of your own; by default the one with its model_type."""
    accept_fields: tuple[str, ...] = ()
    """Names of fields of config.json to accept though they are unknown here: they do not change what the model
    computes."""
    mtp: bool = True
    """Read layers of multi-token prediction, if the files have any; --no-mtp leaves them out."""
    verify: bool = True
    """Compare logits with transformers, which loads the whole model twice; --no-verify needs memory for a tensor."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToHf:
    """Convert a native checkpoint of any layout to a Hugging Face folder."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder for config.json and safetensors; must not exist."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    like: Annotated[str | Path | None, tyro.conf.arg(metavar="FOLDER|ORG/MODEL[@REVISION]")] = None
    """Folder with the config.json and tokenizer files to take, of the same model; by default SRC, if it has them. If it
    has weights of more than the language model, such as a tower of images, they are put back. Or a model at Hugging
    Face, of which these files are downloaded, without weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the weights; auto is that of the training."""
    tokenizer: str = ""
    """The tokenizer that made the data, as data.tokenizer names it; by default data.tokenizer of the training."""
    verify: bool = True
    """Compare logits with transformers, which loads the whole model twice; --no-verify needs memory for a tensor."""
    verify_tokenizer: bool = True
    """Compare the ids of some dozens of texts, and the end token, with those of AutoTokenizer on DST."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class MegatronToNative:
    """Convert the weights of Megatron-LM's checkpoint (--ckpt-format torch) of a GPT or Llama to a native checkpoint.

    The folder also gets config.toml with the [model] section. No code in the files is run when they are unpickled.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder with latest_checkpointed_iteration.txt, or one of its iter_XXXXXXX."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    vocab_size: int = 0
    """The tokenizer's size: rows beyond it are padding; 0 takes Megatron's --vocab-size."""
    accept_args: tuple[str, ...] = ()
    """Names of Megatron's args to accept though they are unknown here: they do not change what the model computes."""
    verify: bool = False
    """Compare logits with Megatron-Core (pip install megatron-core), which loads the whole model twice, on the CPU."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToDcp:
    """Convert a native checkpoint's weights to torch.distributed.checkpoint, keyed by logical names, for DTensors."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder that dcp.load(state_dict, checkpoint_id=DST) reads; must not exist."""


@dataclass(frozen=True)
class Upcycle:
    """Make a mixture of experts of a dense native checkpoint: each expert is a copy of its MLP (arXiv 2212.05055).

    The mixture computes what the dense model computes, until it is trained. The folder also gets config.toml.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint with the layers of Llama, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint of the mixture; must not exist."""
    experts: int = 8
    """Experts of a layer."""
    experts_per_token: int = 2
    """Experts that each token is sent to."""
    family: Literal["mixtral", "qwen3_moe"] = "mixtral"
    """qwen3_moe has norms of queries and keys; a model with model.qk_norm needs it."""
    source_family: str = ""
    """The family of the dense model, if it is MODULE:NAME of your own: a file's name of a module is not imported."""
    seed: int = TrainConfig.seed
    """Decides the weights of the routers, which start at random, as train.seed does."""
    verify: bool = True
    """Compare logits with the dense model, which loads both; --no-verify needs memory for a tensor."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


def hf_to_native(options: HfToNative) -> None:
    """Convert a Hugging Face folder.

    Raises ConfigError for an unsupported config.json, and CheckpointError if the tensors do not match it. Both are
    raised before anything is written.
    """
    check_transformers(options.verify)
    source = open_weights(options.src)
    src = source.folder
    copied = files_inside(src, (HF_CONFIG, *TOKENIZER_FILES))
    raw = read_object(src / HF_CONFIG)
    stated = from_hugging_face(raw, options.family, options.accept_fields)
    stated, lines = with_stored_layers(src, raw, stated, mtp=options.mtp)
    config = whole_config(stated)
    for line in (*warnings_of(raw, options.family), *lines):
        print(f"warning: {line}", file=sys.stderr)
    buffers = buffer_shapes(config.model)
    shapes = native_shapes(config.model) | buffers
    wanted = hf_recipes(config.model)
    weights = open_text(src, raw, config.model, wanted)
    for line in listed(src, raw, config.model):
        print(line, file=sys.stderr)
    dtype, found_fp32 = dtypes_of(weights, wanted, config.model)
    config = replace(
        config,
        train=replace(config.train, precision=PRECISION[dtype]),
        data=DataConfig(tokenizer=copied_tokenizer(src, options.dst) or "bytes"),
    )
    sources = places(wanted)
    needed = sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())
    with new_folder(options.dst, needed) as folder:
        with progress(len(shapes)) as advance:
            write_weights(
                folder,
                config,
                shapes,
                lambda name: advance(native_tensor(weights, sources[name])),
                shard_bytes=options.shard_bytes,
                buffers=buffers,
                accepted=options.accept_fields,
                found_fp32=found_fp32,
                origin=source.origin,
            )
        copy_files(copied, folder)
        write_options(folder, config, src)
        if options.verify:
            compared = verify(folder, transformers_reference(src), dtype, options.family, found_fp32)
            write_json(folder / PARITY, compared)
    if source.snapshot is not None:
        print(f"{source.snapshot.pinned}: read")
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


def native_to_hf(options: NativeToHf) -> None:
    """Convert a native checkpoint to a Hugging Face folder.

    Raises ConfigError if Hugging Face has no such model, and CheckpointError for a damaged checkpoint. Both are raised
    before anything is written, or for damage inside a chunk before DST exists.
    """
    check_transformers(options.verify)
    if options.like is not None:
        options = replace(options, like=open_description(options.like).folder)
    manifest = read_manifest(options.src)
    config = saved_config(manifest, options.family)
    training = training_tokenizer(config, options)
    origin = described_by(config, options)
    copied = exported_files(training, origin, options)
    raw = hf_config(config, origin, training.tokenizer)
    shapes = native_shapes(config.model)
    buffers = buffer_shapes(config.model)
    expected = {f"{MAIN}.{name}": ("float32", shape) for name, shape in shapes.items()}
    expected |= {f"{BUFFER}.{name}": ("float32", shape) for name, shape in buffers.items()}
    wrong = differences(manifest, expected, weight_options(config), weights_alone=True)
    if wrong:
        raise CheckpointError(f"{options.src}: tensors are not those of its model: {first_few(wrong, separator='; ')}")
    dtype = model_dtype(config.train.precision) if options.dtype == "auto" else getattr(torch, options.dtype)
    wanted = hf_recipes(config.model)
    parts = source_of_parts(options.like, config.model, wanted)
    found_fp32 = parts.found_fp32 if parts else found_in_fp32((options.src, origin))
    infos = hf_infos(config.model, dtype, found_fp32)
    plan = parts.plan(infos) if parts else infos
    copies = names_of(config.model).mtp_copies(config.model)
    plan |= {copy: infos[original] for copy, original in copies.items()}
    raw = with_dtype(parts.raw if parts else {**raw, "torch_dtype": ""}, dtype)

    def make(name: str) -> Tensor:
        return their_tensor(options.src, manifest, wanted[name], infos[name].dtype)

    def tensor(name: str) -> Tensor:
        return parts.tensor(name, make) if parts else make(name)

    with new_folder(options.dst, sum(info.nbytes for info in plan.values())) as folder:
        with progress(len(plan)) as advance:
            write_model(
                folder,
                plan,
                lambda name: advance(tensor(copies.get(name, name))),
                shard_bytes=options.shard_bytes,
            )
        write_json(folder / HF_CONFIG, raw)
        copy_files(copied, folder)
        compared = {"tokenizer": verify_tokenizer(folder, training, config.model, options)}
        for line in write_chat_files(folder, text_record(options.src), training.spec, training.tokenizer):
            print(line, file=sys.stderr)
        logits: dict[str, Any] = {"prompts": []}
        if options.verify:
            logits = verify(options.src, transformers_reference(folder), dtype, options.family, found_fp32)
        write_json(folder / PARITY, {**logits, **compared})
    words = f"{raw['model_type']}, {str(dtype).removeprefix('torch.')}"
    print(f"{options.dst}: {words}, step {manifest.step} of {options.src}")


def megatron_to_native(options: MegatronToNative) -> None:
    """Convert Megatron-LM's checkpoint.

    Raises CheckpointError for damaged or unsafe files and for an unsupported model, and ConfigError if --verify is
    given and Megatron-Core is not installed. Both are raised before anything is written.
    """
    if options.verify and not megatron_core.is_installed():
        raise ConfigError(
            "--verify compares with Megatron-Core, which is not installed: pip install megatron-core, or do not verify"
        )
    source = megatron.read(options.src, options.vocab_size, options.accept_args)
    dtypes = {part.dtype for parts in source.parts.values() for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    precision = PRECISION[dtype]
    length = min(TrainConfig.seq_length, source.model.max_position_embeddings)
    config = validate(
        Config(model=source.model, train=TrainConfig(precision=precision, seq_length=length)), 1, trains=False
    )
    shapes = native_shapes(config.model)
    source.check(shapes)
    needed = sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())
    with new_folder(options.dst, needed) as folder:
        with progress(len(shapes)) as advance:
            write_weights(
                folder, config, shapes, lambda name: advance(source.tensor(name)), shard_bytes=options.shard_bytes
            )
        (folder / CONFIG).write_text(part_toml(config, ("model",)))
        if options.verify:
            write_json(folder / PARITY, verify(folder, megatron_reference(source, dtype), dtype))
    print(f"{source.folder}, iteration {source.iteration}, read")
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


def native_to_dcp(options: NativeToDcp) -> None:
    """Convert a native checkpoint to torch's. Raises CheckpointError if it is damaged; DST then does not exist."""
    total = sum(name.partition(".")[0] in dcp.STATES for name in read_manifest(options.src).tensors)
    with progress(total) as advance:
        keys = dcp.export(options.src, options.dst, advance)
    print(f"{options.dst}: {len(keys)} tensors, fp32; load with torch.distributed.checkpoint.load")


def upcycle_dense(options: Upcycle) -> None:
    """Make a mixture of a dense checkpoint.

    Raises ConfigError if the options do not fit the model, and CheckpointError if it is damaged or not dense. Both are
    raised before DST exists.
    """
    copied = files_inside(options.src, TOKENIZER_FILES)
    manifest = read_manifest(options.src)
    experts = (options.experts, options.experts_per_token)
    dense = saved_config(manifest, options.source_family, flag="--source_family")
    config = upcycle.mixture_of(dense, options.family, *experts, options.seed)
    tokenizer = copied_tokenizer(options.src, options.dst) or config.data.tokenizer
    config = replace(config, data=replace(config.data, tokenizer=tokenizer))
    make = upcycle.tensor_of(options.src, manifest, config)
    shapes = native_shapes(config.model)
    with new_folder(options.dst, sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())) as folder:
        with progress(len(shapes)) as advance:
            write_weights(
                folder,
                config,
                shapes,
                lambda name: advance(make(name)),
                shard_bytes=options.shard_bytes,
                texts=text_record(options.src),
                origin=origin_of(manifest.trainer),
            )
        copy_files(copied, folder)
        write_options(folder, config, options.src)
        if options.verify:
            reference = native_reference(options.src, options.source_family)
            write_json(folder / PARITY, verify(folder, reference, torch.float32))
    counts = WholeModel(config.model).size_in_words()
    print(f"{options.dst}: {options.family}, {counts}, of step {manifest.step} of {options.src}")
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


# Configurations


def described_by(config: Config, options: NativeToHf) -> Path | None:
    """The folder to take the config.json and generation settings of the export from; None if the export makes its own.

    It is --like, else SRC if it has a config.json. Raises ConfigError if this config.json describes another model. Else
    it is the training's first folder of weights or tokenizer, if it describes this model.
    """
    for folder in (Path(options.like) if options.like else None, options.src):
        if folder is not None and (options.like or (folder / HF_CONFIG).is_file()):
            theirs = described_model(folder / HF_CONFIG, config.model)
            if wrong := list(unlike(theirs, config.model)):
                text = f"describes another model than the checkpoint's: {first_few(wrong, separator='; ')}"
                raise ConfigError(f"{folder / HF_CONFIG}: {text}")
            return folder
    began = (Path(config.checkpoint.init_from), (tokenizer_file(config.data.tokenizer) or Path()).parent)
    return next((folder for folder in began if _describes(folder / HF_CONFIG, config.model)), None)


def _describes(path: Path, model: ModelConfig) -> bool:
    """Whether `path` is a config.json of this model. Another model's may be in the folder by chance."""
    if not path.is_file():
        return False
    try:
        theirs = described_model(path, model)
    except ConfigError:
        return False
    return not list(unlike(theirs, model))


def described_model(path: Path, model: ModelConfig) -> ModelConfig:
    """The model of a config.json, read by the family of `model` if that is outside of this repository."""
    family = model.family if package_of(model.family) else ""
    raw, accepted = read_object(path), accepted_fields(path.parent)
    return whole_config(from_hugging_face(raw, family, [name for name in accepted if name in raw])).model


def accepted_fields(folder: Path) -> list[str]:
    """The fields of the config.json in `folder` that its conversion was told to accept."""
    if not (folder / MANIFEST).is_file():
        return []
    names = read_manifest(folder).trainer.get(ACCEPTED, [])
    return names if NAMES.fits(names) else []


# Files


def copied_tokenizer(src: Path, dst: Path) -> str:
    """The tokenizer in `src`, as data.tokenizer names its copy in `dst`; "" if there is none."""
    # Its name in DST: SRC may be gone when the model is trained.
    found = [f"{kind}:{dst / name}" for kind, name in TOKENIZERS.items() if (src / name).is_file()]
    if found:
        return found[0]
    return ""


def write_options(folder: Path, config: Config, src: Path) -> None:
    """Write config.toml with the model, and with the tokenizer if its files were copied from `src`."""
    # Without tokenizer files it names no tokenizer: the default, `bytes`, would be a wrong one.
    named_options = ("model", "data.tokenizer") if copied_tokenizer(src, folder) else ("model",)
    (folder / CONFIG).write_text(part_toml(config, named_options))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# Tokenizer


class Training(NamedTuple):
    """The tokenizer of a training's data, and its file. If it is not known, `why` has the reason."""

    tokenizer: Tokenizer | None
    spec: str
    file: Path | None = None
    why: str = ""


def training_tokenizer(config: Config, options: NativeToHf) -> Training:
    """Load the tokenizer. Raises DataError or ConfigError if it cannot be read, unless verification is off."""
    spec = fetch_tokenizer(options.tokenizer) or config.data.tokenizer
    if spec == "bytes" and not options.tokenizer and not made_of_bytes(config):
        why = "data.tokenizer was left at bytes, and no description of the data (PREFIX.json) says that bytes made it"
        return Training(None, spec, None, f"{why}; name the tokenizer with --tokenizer")
    kind = spec.partition(":")[0]
    file = tokenizer_file(spec)
    beside = options.src / TOKENIZERS.get(kind, "")
    if file is not None and not options.tokenizer and not file.is_file():
        if not beside.is_file():
            return Training(None, spec, None, f"data.tokenizer {spec} is not there; name its file with --tokenizer")
        file = beside  # the folder was converted and then moved
    try:
        name_of_tokenizer = f"{kind}:{file}" if file else kind
        return Training(load_tokenizer(name_of_tokenizer), spec, file)
    except (DataError, ConfigError) as error:
        if options.verify_tokenizer:
            raise type(error)(f"{error}; or give --no-verify_tokenizer") from None
        if options.tokenizer:
            return Training(None, spec, file, str(error))
        # A manifest may name any file of the user's. If it is no tokenizer, the export gets no copy, and parity.json
        # has nothing of what the error quotes.
        print(error, file=sys.stderr)
        return Training(None, spec, None, f"data.tokenizer {spec} cannot be read; --tokenizer {spec} copies it unread")


def made_of_bytes(config: Config) -> bool:
    """Whether the data was made with `bytes` by its own description, or encoded while it was read, like Hugging Face
    datasets."""
    for entry in map(DataSource.parse, config.data.train):
        sidecar = read_sidecar(entry.source)
        if entry.source.startswith("hf:") or (sidecar and sidecar["tokenizer"]["sha256"] == "bytes"):
            return True
    return False


def exported_files(training: Training, origin: Path | None, options: NativeToHf) -> dict[str, Path]:
    """The files to copy into an export, by their names there: of a tokenizer, and settings of generation.

    The tokenizer is that of --like or SRC, else the training's. Raises CheckpointError for links out of these folders.
    """
    copied = files_inside(Path(options.like or options.src), TOKENIZER_FILES)
    kind = training.spec.partition(":")[0]
    file = training.file
    if kind in TOKENIZERS and file is not None and not copied.keys() & set(TOKENIZERS.values()):
        # A file with another name lies in a folder of other things, so only the file itself is taken.
        if file.name == TOKENIZERS[kind]:
            copied |= files_inside(file.parent, [name for name in TOKENIZER_FILES if name != file.name])
        copied[TOKENIZERS[kind]] = file.resolve()
    settings = files_inside(origin, (GENERATION, HF_CONFIG)) if origin else {}
    settings.pop(HF_CONFIG, None)  # `hf_config` writes it
    return settings | copied


def verify_tokenizer(folder: Path, training: Training, model: ModelConfig, options: NativeToHf) -> dict[str, Any]:
    """Complete the tokenizer's files in `folder`, and compare AutoTokenizer with the tokenizer of the training.

    Returns the fields of parity.json about it. Raises CheckpointError if the ids of a text or the end token differ.
    """
    lacks = ""
    record = text_record(options.src)
    if training.tokenizer is not None:
        start = None if CHAT in record else record.get(START, training.tokenizer.start)
        lacks = write_missing(folder, training.tokenizer, training.file, model.max_position_embeddings, start)
    readable = any((folder / name).exists() for name in TOKENIZERS.values())
    why = training.why
    if not why and not readable:
        why = lacks
    if not options.verify_tokenizer:
        why = "--no-verify_tokenizer" if readable else why
    elif importlib.util.find_spec("transformers") is None:
        why = why or "transformers is not installed"
    if why or training.tokenizer is None:
        said = "the tokenizer is not verified" if readable else "the folder has no tokenizer"
        print(f"{said}: {why}", file=sys.stderr)
        return {"verified": False, "why": why}
    content, problems = compare_with_transformers(folder, training.tokenizer, model.vocab_size)
    if problems and (folder / TOKENIZERS["hf"]).exists():
        # The class that transformers chooses by model_type may rebuild the tokenizer. Only then is an auto_map written:
        # it is a burden to users.
        read_as_it_is(folder)
        content, remaining = compare_with_transformers(folder, training.tokenizer, model.vocab_size)
        if not remaining:
            problems = []
    if problems:
        if lacks:
            problems = [*problems, lacks]
        raise CheckpointError(
            f"{options.dst}: the exported tokenizer is not that of the training, {training.spec}: "
            f"{'; '.join(problems)}; nothing was written; --no-verify_tokenizer writes the folder"
        )
    if record.get(START, content["added_to_each_text"]) != content["added_to_each_text"]:
        text = f"AutoTokenizer puts the ids {content['added_to_each_text']} in front of a text"
        print(f"{text}, and the texts of the training began with {record[START]}", file=sys.stderr)
    return {"verified": True, "trained_with": training.spec, **content}


def convert_any(options: AnyToNative) -> None:
    """Convert a folder as its kind asks for. Raises ConfigError and CheckpointError as what converts that kind."""
    if is_native(options.src):
        if options.to != "auto":
            return from_native(options)
        require_read(options, ("family",), "a native checkpoint that becomes Hugging Face's")
        return native_to_hf(NativeToHf(options.src, options.dst, options.family))
    if options.to != "auto":
        raise ConfigError(f"--to {options.to}: {options.src} is no native checkpoint: convert it to one first")
    if is_hugging_face(options.src):
        require_read(options, ("family", "accept"), "a folder of Hugging Face")
        return hf_to_native(HfToNative(options.src, options.dst, options.family, options.accept))
    return to_native(options)


COMMANDS: Mapping[str, tuple[type, Callable[[Any], None]]] = {
    ANY: (AnyToNative, convert_any),
    "hf-to-native": (HfToNative, hf_to_native),
    "native-to-hf": (NativeToHf, native_to_hf),
    "megatron-to-native": (MegatronToNative, megatron_to_native),
    "native-to-dcp": (NativeToDcp, native_to_dcp),
    "upcycle": (Upcycle, upcycle_dense),
    "average": (averages.AverageOfWeights, averages.average_of_weights),
    "merge": (adapters.Merge, adapters.merge),
    "native-to-peft": (adapters.NativeToPeft, adapters.native_to_peft),
    "peft-to-native": (adapters.PeftToNative, adapters.peft_to_native),
}


def main() -> None:
    words = sys.argv[1:]
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        words = [ANY, *words]  # a folder
    with reported():
        options = tyro.extras.subcommand_cli_from_dict(
            {name: options_class for name, (options_class, _) in COMMANDS.items()},
            args=words,
            description=__doc__,
            use_underscores=True,
        )
        for options_class, run in COMMANDS.values():
            if isinstance(options, options_class):
                run(options)


if __name__ == "__main__":
    main()
