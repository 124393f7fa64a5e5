"""Checkpoints of Hugging Face to native ones and back, of Megatron-LM to native ones, of native ones to torch's, on one
CPU, a tensor at a time.

What is written is compared with transformers first, on request with Megatron-Core: the largest difference of logits, in
fp32, goes to parity.json.
"""

import importlib.metadata
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from megapar_models.build import logical_tensors
from megapar_models.convert import dcp, megatron, megatron_core
from megapar_models.convert.config_json import canonical_name, from_hugging_face, names_of, to_hugging_face, told
from megapar_models.convert.huggingface import (
    Recipe,
    Weights,
    hugging_face_tensor,
    native_tensor,
    places,
    recipes,
    write_model,
)
from megapar_models.convert.saved import load_model, saved_config
from megapar_models.convert.stream import SHARD_BYTES, TensorInfo, new_folder, write_weights
from megapar_models.convert.tokenizer_files import CODE, compare_with_transformers, read_as_it_is, write_missing
from megapar_models.registry import validate, weight_options
from megapar_models.stage import Stage
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from megapar.batch import MicroBatch
from megapar.checkpoint.format import MAIN, Sizes, read_manifest
from megapar.checkpoint.load import differences
from megapar.config import (
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
)
from megapar.config_io import part_toml
from megapar.data.prepared import read_sidecar
from megapar.data.spec import Entry
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import CheckpointError, ConfigError, DataError, reported
from megapar.messages import first_few
from megapar.precision import model_dtype

HF_CONFIG = "config.json"
CONFIG = "config.toml"
PARITY = "parity.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", GENERATION, CODE),
)
TOKENIZERS = {"hf": "tokenizer.json", "spm": "tokenizer.model"}
PRECISION: dict[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
TOLERANCE = 1e-4  # of the largest logit: a wrong conversion is off by much more, deep models' rounding by less


@dataclass(frozen=True)
class HfToNative:
    """A Hugging Face folder to a native checkpoint of weights without optimizer state.

    Beside it: config.toml with the [model] section, config.json and tokenizer files for the way back.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder with config.json and model.safetensors, or its shards and their index."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    verify: bool = True
    """Compare logits with transformers, which loads the whole model twice; --no-verify needs memory for a tensor."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToHf:
    """A native checkpoint, of any layout, to a Hugging Face folder."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder for config.json and safetensors; must not exist."""
    like: Path | None = None
    """Folder with the config.json and tokenizer files to take, of the same model; by default SRC, if it has them."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto is that of the training."""
    tokenizer: str = ""
    """What made the data, as data.tokenizer names it; by default data.tokenizer of the training."""
    verify: bool = True
    """Compare logits with transformers, which loads the whole model twice; --no-verify needs memory for a tensor."""
    verify_tokenizer: bool = True
    """Compare ids of some dozens of texts, and the end token, with those of AutoTokenizer on DST."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class MegatronToNative:
    """Megatron-LM's checkpoint (--ckpt-format torch) of a GPT or Llama to a native one, weights alone.

    Beside it: config.toml with the [model] section. Files are unpickled without running anything that they hold.
    """

    src: Annotated[Path, tyro.conf.Positional]
    """Folder with latest_checkpointed_iteration.txt, or one of its iter_XXXXXXX."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint; must not exist."""
    vocab_size: int = 0
    """The tokenizer's size, beyond which rows are padding; 0 takes what Megatron's --vocab-size was."""
    accept_args: tuple[str, ...] = ()
    """Names of Megatron's args that do not change what the model computes, though we do not know them."""
    verify: bool = False
    """Compare logits with Megatron-Core (pip install megatron-core), which loads the whole model twice, on the CPU."""
    shard_bytes: int = SHARD_BYTES
    """Largest file, unless one tensor is larger."""


@dataclass(frozen=True)
class NativeToDcp:
    """A native checkpoint's weights to torch.distributed.checkpoint, keyed by our logical names, for DTensors."""

    src: Annotated[Path, tyro.conf.Positional]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    dst: Annotated[Path, tyro.conf.Positional]
    """Folder that dcp.load(state_dict, checkpoint_id=DST) reads; must not exist."""


def hf_to_native(options: HfToNative) -> None:
    """Raises ConfigError for an unsupported config.json, CheckpointError for other tensors than it says, before
    anything is written."""
    check_transformers(options.verify)
    raw = read_json(options.src / HF_CONFIG)
    config = whole_config(from_hugging_face(raw))
    for line in told(raw):
        print(f"warning: {line}", file=sys.stderr)
    names = names_of(config.model)
    shapes = native_shapes(config.model)
    wanted = hf_recipes(config.model)
    weights = Weights(options.src, lambda name: canonical_name(name, names))
    weights.check(wanted, names.tied if config.model.tie_word_embeddings else {})
    kinds = [f"{kind}:{options.dst / name}" for kind, name in TOKENIZERS.items() if (options.src / name).is_file()]
    config = replace(
        config,
        train=replace(config.train, precision=PRECISION[weights.dtype]),
        data=DataConfig(tokenizer=kinds[0] if kinds else "bytes"),
    )
    where = places(wanted)
    needed = sum(TensorInfo(shape, torch.float32).nbytes for shape in shapes.values())
    with new_folder(options.dst, needed) as folder:
        with progress(len(shapes)) as advance:
            write_weights(
                folder,
                config,
                shapes,
                lambda name: advance(native_tensor(weights, where[name])),
                shard_bytes=options.shard_bytes,
            )
        copy_files(options.src, folder, (HF_CONFIG, *TOKENIZER_FILES))
        # A folder without a tokenizer says nothing of it: `bytes`, the default, would name a wrong one.
        named_options = ("model", "data.tokenizer") if kinds else ("model",)
        (folder / CONFIG).write_text(part_toml(config, named_options))
        if options.verify:
            write_json(folder / PARITY, verify(folder, transformers_reference(options.src), weights.dtype))
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


def native_to_hf(options: NativeToHf) -> None:
    """Raises ConfigError if Hugging Face has no such model, CheckpointError for a damaged checkpoint, before anything
    is written (damage inside a chunk: before DST exists)."""
    check_transformers(options.verify)
    manifest = read_manifest(options.src)
    config = saved_config(manifest)
    shapes = native_shapes(config.model)
    kinds = {f"{MAIN}.{name}": ("float32", shape) for name, shape in shapes.items()}
    wrong = differences(manifest, kinds, weight_options(config), weights_alone=True)
    if wrong:
        raise CheckpointError(f"{options.src}: tensors are not those of its model: {first_few(wrong, separator='; ')}")
    dtype = model_dtype(config.train.precision) if options.dtype == "auto" else getattr(torch, options.dtype)
    training = training_tokenizer(config, options)
    origin = described_by(config, options)
    raw = hf_config(config, origin, training.tokenizer)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    wanted = hf_recipes(config.model)
    infos = {name: TensorInfo(recipe.shape, dtype) for name, recipe in wanted.items()}
    with new_folder(options.dst, sum(info.nbytes for info in infos.values())) as folder:
        with progress(len(infos)) as advance:
            write_model(
                folder,
                infos,
                lambda name: advance(hugging_face_tensor(options.src, manifest, wanted[name], dtype)),
                shard_bytes=options.shard_bytes,
            )
        write_json(folder / HF_CONFIG, raw)
        copy_files(options.like or options.src, folder, TOKENIZER_FILES)
        copy_own_tokenizer(training, folder)
        if origin is not None and not (folder / GENERATION).exists():
            copy_files(origin, folder, (GENERATION,))
        compared = {"tokenizer": verify_tokenizer(folder, training, config.model, options)}
        reference = transformers_reference(folder) if options.verify else None
        logits = verify(options.src, reference, dtype) if reference else {"prompts": []}
        write_json(folder / PARITY, {**logits, **compared})
    print(f"{options.dst}: {raw['model_type']}, {raw['torch_dtype']}, step {manifest.step} of {options.src}")


def megatron_to_native(options: MegatronToNative) -> None:
    """Raises CheckpointError for files that are damaged, unsafe or of an unsupported model, before anything is
    written; ConfigError if the comparison is wanted and Megatron-Core is not installed."""
    if options.verify and not megatron_core.is_installed():
        raise ConfigError(
            "--verify compares with Megatron-Core, which is not installed: pip install megatron-core, or do not verify"
        )
    source = megatron.read(options.src, options.vocab_size, options.accept_args)
    dtypes = {part.dtype for parts in source.parts.values() for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    precision = PRECISION[dtype]
    length = min(TrainConfig.seq_length, source.model.max_position_embeddings)
    config = validate(Config(model=source.model, train=TrainConfig(precision=precision, seq_length=length)), 1)
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
    """Raises CheckpointError for a damaged checkpoint; DST then does not exist."""
    total = sum(name.startswith(f"{MAIN}.") for name in read_manifest(options.src).tensors)
    with progress(total) as advance:
        keys = dcp.export(options.src, options.dst, advance)
    print(f"{options.dst}: {len(keys)} tensors, fp32; load with torch.distributed.checkpoint.load")


# Configurations


def read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return raw


def whole_config(model: ModelConfig) -> Config:
    """Options of a run with this model, derived values filled in. Raises ConfigError if there is no such model."""
    return validate(Config(model=model, train=TrainConfig(seq_length=min(2048, model.max_position_embeddings))), 1)


def described_by(config: Config, options: NativeToHf) -> Path | None:
    """The folder whose config.json and generation settings go with the export, or None if the export has its own.

    It is --like, else SRC, both refused if they describe another model; else the folder of the weights or of the
    tokenizer that the training began with, if it describes this model.
    """
    for folder in (options.like, options.src):
        if folder is not None and (folder == options.like or (folder / HF_CONFIG).is_file()):
            theirs = whole_config(from_hugging_face(read_json(folder / HF_CONFIG))).model
            if _computed(theirs) != _computed(config.model):
                raise ConfigError(f"{folder / HF_CONFIG}: describes another model than the checkpoint's: {theirs}")
            return folder
    began = (Path(config.checkpoint.init_from), Path(config.data.tokenizer.partition(":")[2]).parent)
    return next((folder for folder in began if _describes(folder / HF_CONFIG, config.model)), None)


def _describes(path: Path, model: ModelConfig) -> bool:
    """Whether `path` is a config.json of this model; another one stands there by chance."""
    if not path.is_file():
        return False
    try:
        theirs = whole_config(from_hugging_face(read_json(path))).model
    except ConfigError:
        return False
    return _computed(theirs) == _computed(model)


def hf_config(config: Config, origin: Path | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json: that of the folder `origin`, else our own, whose end token is that of the training's tokenizer."""
    if origin is not None:
        raw = read_json(origin / HF_CONFIG)
        raw.pop("dtype", None)  # transformers 5's name of torch_dtype
        return raw
    known = tokenizer is not None and tokenizer.eod < config.model.vocab_size
    eod = tokenizer.eod if tokenizer is not None and known else None
    return {**to_hugging_face(config.model), "bos_token_id": None, "eos_token_id": eod}


def _computed(model: ModelConfig) -> ModelConfig:
    """Without what matters in training alone."""
    return replace(model, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.0)


def native_shapes(model: ModelConfig) -> dict[str, Sizes]:
    return {name: piece.shape for name, piece in logical_tensors(model).items()}


def hf_recipes(model: ModelConfig) -> dict[str, Recipe]:
    names = names_of(model)
    return recipes(native_shapes(model), names.modules, names.transposed)


# Files


@contextmanager
def progress(total: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """A bar; the function moves it by one and returns its argument."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting tensors", total=total)

        def advance(values: Tensor) -> Tensor:
            bar.advance(task)
            return values

        yield advance


def copy_files(src: Path, dst: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (src / name).is_file():
            shutil.copyfile(src / name, dst / name)


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n")


# Tokenizer


class Training(NamedTuple):
    """The tokenizer that made the data of a training and its file, or in `why` the reason that it is not known."""

    tokenizer: Tokenizer | None
    spec: str
    file: Path | None = None
    why: str = ""


def training_tokenizer(config: Config, options: NativeToHf) -> Training:
    """Raises DataError or ConfigError if its file cannot be read, unless the user wants no verification."""
    spec = options.tokenizer or config.data.tokenizer
    if spec == "bytes" and not options.tokenizer and not made_of_bytes(config):
        why = "data.tokenizer was left at bytes, and no description of the data (PREFIX.json) says that bytes made it"
        return Training(None, spec, None, f"{why}; name the tokenizer with --tokenizer")
    kind, _, name = spec.partition(":")
    file = Path(name) if name else None
    beside = options.src / TOKENIZERS.get(kind, "")
    if file is not None and not options.tokenizer and not file.is_file():
        if not beside.is_file():
            return Training(None, spec, None, f"data.tokenizer {spec} is not there; name its file with --tokenizer")
        file = beside  # a converted folder that was moved
    try:
        return Training(load_tokenizer(f"{kind}:{file}" if file else kind), spec, file)
    except (DataError, ConfigError) as error:
        if options.verify_tokenizer:
            raise type(error)(f"{error}; or give --no-verify_tokenizer") from None
        return Training(None, spec, file, str(error))


def made_of_bytes(config: Config) -> bool:
    """Whether the data says that bytes made it, or was encoded while it was read, as Hugging Face datasets are."""
    for entry in map(Entry.parse, config.data.train):
        facts = read_sidecar(entry.source)
        if entry.source.startswith("hf:") or (facts and facts["tokenizer"]["sha256"] == "bytes"):
            return True
    return False


def copy_own_tokenizer(training: Training, folder: Path) -> None:
    """The files of the tokenizer that a run was trained with, unless the folder has one already."""
    kind = training.spec.partition(":")[0]
    file = training.file
    if kind not in TOKENIZERS or file is None or any((folder / name).exists() for name in TOKENIZERS.values()):
        return
    copy_files(file.parent, folder, TOKENIZER_FILES if file.name == TOKENIZERS[kind] else ())
    shutil.copyfile(file, folder / TOKENIZERS[kind])


def verify_tokenizer(folder: Path, training: Training, model: ModelConfig, options: NativeToHf) -> dict[str, Any]:
    """Write what the tokenizer's files in `folder` lack, and compare AutoTokenizer with that of the training.

    Returns what parity.json says of it. Raises CheckpointError if a text or the end token differs.
    """
    lacks = ""
    if training.tokenizer is not None:
        lacks = write_missing(folder, training.tokenizer, training.file, model.max_position_embeddings)
    readable = any((folder / name).exists() for name in TOKENIZERS.values())
    why = training.why or ("" if readable else lacks)
    if not options.verify_tokenizer:
        why = "--no-verify_tokenizer"
    elif importlib.util.find_spec("transformers") is None:
        why = why or "transformers is not installed"
    if why or training.tokenizer is None:
        print(f"the tokenizer is not verified: {why}", file=sys.stderr)
        return {"verified": False, "why": why}
    facts, problems = compare_with_transformers(folder, training.tokenizer, model.vocab_size)
    if problems and (folder / TOKENIZERS["hf"]).exists():
        # The model_type's class may rebuild the tokenizer. An auto_map would be a burden where it does not.
        read_as_it_is(folder)
        facts, still = compare_with_transformers(folder, training.tokenizer, model.vocab_size)
        problems = problems if still else []
    if problems:
        told = "; ".join([*problems, lacks] if lacks else problems)
        raise CheckpointError(
            f"{options.dst}: the exported tokenizer is not that of the training, {training.spec}: {told}; nothing was "
            "written; --no-verify_tokenizer writes the folder"
        )
    return {"verified": True, "trained_with": training.spec, **facts}


# Parity


class Reference(NamedTuple):
    """Another implementation with the same weights. `logits` takes tokens [s] and the first position that is wanted;
    returns [s - first, v]. `misread` says which options of ours are not the reference's, if it can."""

    name: str
    logits: Callable[[Tensor, int], Tensor]
    misread: Callable[[ModelConfig], list[str]] = lambda model: []


def check_transformers(wanted: bool) -> None:
    if wanted and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--verify compares with transformers, which is not installed: pip install 'megapar[convert]' or --no-verify"
        )


def transformers_reference(folder: Path) -> Reference:
    """The model in a Hugging Face folder, in fp32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def logits(tokens_s: Tensor, first: int) -> Tensor:
        return model(tokens_s[None], logits_to_keep=len(tokens_s) - first).logits[0]

    return Reference(f"transformers {importlib.metadata.version('transformers')}", logits)


def megatron_reference(source: megatron.MegatronCheckpoint, dtype: torch.dtype) -> Reference:
    """Megatron-Core's model of a classic checkpoint, in fp32 from weights rounded to `dtype`."""
    model = megatron_core.MegatronModel(source, dtype)
    return Reference(megatron_core.version(), lambda tokens_s, first: model.logits(tokens_s)[first:], model.misread)


def verify(native: Path, reference: Reference, dtype: torch.dtype) -> dict[str, Any]:
    """Print how far logits are apart; returns it for parity.json. Raises CheckpointError beyond the tolerance."""
    config, rows = parity(native, reference, dtype)
    table = Table("prompt", "tokens", "compared from", "largest logit", "largest difference", "relative")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    worst = max(row["relative"] for row in rows)
    if not math.isfinite(sum(row["relative"] for row in rows)):
        raise CheckpointError(f"{native}: logits are not finite, though the weights are: this model overflows")
    if not worst <= TOLERANCE:
        misread = "; ".join(reference.misread(config.model))
        raise CheckpointError(
            f"logits differ from those of {reference.name} by {worst:.3g} of the largest, more than {TOLERANCE}; "
            "nothing was written: the conversion is wrong for this model" + (f": {misread}" if misread else "")
        )
    facts = {"reference": reference.name, "computed_in": "float32", "weights": str(dtype).removeprefix("torch.")}
    return {**facts, "tolerance": TOLERANCE, "prompts": rows}


@torch.no_grad()
def parity(native: Path, reference: Reference, dtype: torch.dtype) -> tuple[Config, list[dict[str, Any]]]:
    """The options of `native`, and the largest logit difference on each prompt, both models in fp32 from weights in
    `dtype`."""
    config, stage = load_fp32(native, dtype)
    rows = []
    for name, tokens_s, first in prompts(config.model):
        ours_sv = native_logits(stage, tokens_s, first)[:, : config.model.vocab_size]
        theirs_sv = reference.logits(tokens_s, first)[:, : config.model.vocab_size]
        largest = float(theirs_sv.abs().max())
        difference = float((ours_sv - theirs_sv).abs().max())
        rows.append(
            {
                "prompt": name,
                "tokens": len(tokens_s),
                "first_position": first,
                "largest_logit": largest,
                "largest_difference": difference,
                "relative": difference / largest,
            }
        )
    return config, rows


def prompts(model: ModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """(name, tokens [s], first position to compare): a fixed text, random ones, and where there are that many positions
    one whose last tokens lie beyond 2,048."""
    generator = torch.Generator().manual_seed(0)
    short = min(64, model.max_position_embeddings)
    most = min(2048 + 64, model.max_position_embeddings)
    yield "fixed", (7919 * torch.arange(short) + 13) % model.vocab_size, 0
    yield "random", torch.randint(model.vocab_size, (short,), generator=generator), 0
    yield "random, last positions", torch.randint(model.vocab_size, (most,), generator=generator), most - short


def load_fp32(checkpoint: Path, dtype: torch.dtype) -> tuple[Config, Stage]:
    """The whole model in one stage, in fp32 from weights rounded to `dtype`."""
    config, stage = load_model(checkpoint, precision="fp32")
    for param in stage.parameters():
        param.copy_(param.to(dtype))
    return config, stage


def native_logits(stage: Stage, tokens_s: Tensor, first: int) -> Tensor:
    """[s - first, v] of the positions from `first` on."""
    tokens_bs = tokens_s[None]
    batch = MicroBatch(tokens_bs, tokens_bs, torch.zeros(tokens_bs.shape), torch.zeros(1, dtype=torch.int64))
    return stage.logits(stage.hidden(None, batch)[first:])[:, 0]


COMMANDS: Mapping[str, tuple[type, Callable[[Any], None]]] = {
    "hf-to-native": (HfToNative, hf_to_native),
    "native-to-hf": (NativeToHf, native_to_hf),
    "megatron-to-native": (MegatronToNative, megatron_to_native),
    "native-to-dcp": (NativeToDcp, native_to_dcp),
}


def main() -> None:
    options = tyro.extras.subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in COMMANDS.items()}, description=__doc__, use_underscores=True
    )
    with reported():
        next(run for kind, run in COMMANDS.values() if isinstance(options, kind))(options)


if __name__ == "__main__":
    main()
