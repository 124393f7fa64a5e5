"""Checkpoints of Hugging Face to native ones and back, of Megatron-LM to native ones, of native ones to torch's, on one
CPU, a tensor at a time.

What is written is compared with transformers first: the largest difference of logits, in fp32, goes to parity.json.
"""

import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from megapar_models.build import build_stages, logical_tensors
from megapar_models.huggingface import CONV1D, MODULES, TIED, canonical_name, from_hugging_face, to_hugging_face
from megapar_models.stage import Stage
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from megapar import context
from megapar.batch import MicroBatch
from megapar.checkpoint import dcp, megatron
from megapar.checkpoint.format import WEIGHTS, Manifest, Sizes, read_manifest
from megapar.checkpoint.huggingface import (
    Recipe,
    Weights,
    hugging_face_tensor,
    native_tensor,
    places,
    recipes,
    write_model,
)
from megapar.checkpoint.load import differences, load_weights, weight_slices
from megapar.checkpoint.stream import SHARD_BYTES, TensorInfo, new_folder, write_weights
from megapar.config import (
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    flatten,
    unflatten,
)
from megapar.config_io import part_toml
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import CheckpointError, ConfigError, reported
from megapar.precision import model_dtype
from megapar.validate import validate, weight_options

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
TOKENIZERS = {"hf": "tokenizer.json", "spm": "tokenizer.model"}
HF_CONFIG, CONFIG, PARITY = "config.json", "config.toml", "parity.json"
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
    verify: bool = True
    """Compare logits with transformers, which loads the whole model twice; --no-verify needs memory for a tensor."""
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
    check_reference(options.verify)
    model = from_hugging_face(read_json(options.src / HF_CONFIG))
    config = whole_config(model)
    shapes, wanted = native_shapes(config.model), hf_recipes(config.model)
    weights = Weights(options.src, lambda name: canonical_name(name, model.family))
    weights.check(wanted, TIED[model.family] if model.tie_word_embeddings else {})
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
        (folder / CONFIG).write_text(part_toml(config, ("model", "data.tokenizer")))
        if options.verify:
            verify(folder, options.src, folder, weights.dtype)
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


def native_to_hf(options: NativeToHf) -> None:
    """Raises ConfigError if Hugging Face has no such model, CheckpointError for a damaged checkpoint, before anything
    is written (damage inside a chunk: before DST exists)."""
    check_reference(options.verify)
    manifest = read_manifest(options.src)
    config = saved_config(manifest)
    shapes = native_shapes(config.model)
    (state,) = WEIGHTS
    wrong = differences(
        manifest, {f"{state}.{name}": shape for name, shape in shapes.items()}, WEIGHTS, weight_options(config)
    )
    if wrong:
        raise CheckpointError(f"{options.src}: tensors are not those of its model: {'; '.join(wrong[:8])}")
    dtype = model_dtype(config.train.precision) if options.dtype == "auto" else getattr(torch, options.dtype)
    raw = hf_config(config, options.like or options.src, required=options.like is not None)
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
        (folder / HF_CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
        copy_files(options.like or options.src, folder, TOKENIZER_FILES)
        copy_own_tokenizer(config, folder)
        if options.verify:
            verify(options.src, folder, folder, dtype)
    print(f"{options.dst}: {raw['model_type']}, {raw['torch_dtype']}, step {manifest.step} of {options.src}")


def megatron_to_native(options: MegatronToNative) -> None:
    """Raises CheckpointError for files that are damaged, unsafe or of an unsupported model, before anything is
    written."""
    source = megatron.read(options.src, options.vocab_size, options.accept_args)
    dtypes = {part.dtype for parts in source.parts.values() for part in parts}
    precision = PRECISION[dtypes.pop() if len(dtypes) == 1 else torch.float32]
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
    print(f"{source.folder}, iteration {source.iteration}, read")
    print(f"train from {options.dst} with --config {options.dst / CONFIG} --checkpoint.init_from {options.dst}")


def native_to_dcp(options: NativeToDcp) -> None:
    """Raises CheckpointError for a damaged checkpoint; DST then does not exist."""
    (state,) = WEIGHTS
    total = sum(name.startswith(f"{state}.") for name in read_manifest(options.src).tensors)
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


def saved_config(manifest: Manifest, **train: Any) -> Config:
    """The options that a checkpoint was made with, for one process; `train` changes some of that section.

    Where its data lay is kept but not judged: no text will be read.
    """
    saved = {
        path: tuple(value) if isinstance(value, list) else value for path, value in manifest.trainer["config"].items()
    }
    config = unflatten(flatten(Config()) | saved)  # options that are newer than the checkpoint have their default
    train_section: TrainConfig = replace(config.train, **train)
    alone = replace(config, parallel=ParallelConfig(), launch=LaunchConfig(), train=train_section, data=DataConfig())
    return replace(validate(alone, 1), data=config.data)


def hf_config(config: Config, like: Path, *, required: bool) -> dict[str, Any]:
    """config.json: that of `like` if it describes this model (refused if it must and does not), else our own."""
    if required or (like / HF_CONFIG).is_file():
        raw = read_json(like / HF_CONFIG)
        theirs = whole_config(from_hugging_face(raw)).model
        if _computed(theirs) == _computed(config.model):
            raw.pop("dtype", None)  # transformers 5's name of torch_dtype
            return raw
        raise ConfigError(f"{like / HF_CONFIG}: describes another model than the checkpoint's: {theirs}")
    file = config.data.tokenizer.partition(":")[2]
    eod = load_tokenizer(config.data.tokenizer).eod if not file or Path(file).is_file() else None
    known = eod is not None and eod < config.model.vocab_size
    return {**to_hugging_face(config.model), "bos_token_id": None, "eos_token_id": eod if known else None}


def _computed(model: ModelConfig) -> ModelConfig:
    """Without what matters in training alone."""
    return replace(model, hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.0)


def native_shapes(model: ModelConfig) -> dict[str, Sizes]:
    return {name: piece.shape for name, piece in logical_tensors(model).items()}


def hf_recipes(model: ModelConfig) -> dict[str, Recipe]:
    return recipes(native_shapes(model), MODULES[model.family], CONV1D)


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


def copy_own_tokenizer(config: Config, folder: Path) -> None:
    """The tokenizer that a run was trained with, unless the folder has one already."""
    kind, _, name = config.data.tokenizer.partition(":")
    file = Path(name)
    if kind not in TOKENIZERS or any((folder / name).exists() for name in TOKENIZERS.values()):
        return
    if file.is_file():
        copy_files(file.parent, folder, TOKENIZER_FILES if file.name == TOKENIZERS[kind] else ())
        shutil.copyfile(file, folder / TOKENIZERS[kind])
    else:
        print(f"no tokenizer copied: data.tokenizer {config.data.tokenizer} is not there", file=sys.stderr)


# Parity


def check_reference(wanted: bool) -> None:
    if wanted and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--verify compares with transformers, which is not installed: pip install 'megapar[convert]' or --no-verify"
        )


def verify(native: Path, hugging_face: Path, report: Path, dtype: torch.dtype) -> None:
    """Print how far logits are apart and write it to `report`. Raises CheckpointError beyond the tolerance."""
    rows = parity(native, hugging_face, dtype)
    table = Table("prompt", "tokens", "compared from", "largest logit", "largest difference", "relative")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    reference = f"transformers {importlib.metadata.version('transformers')}"
    facts = {"reference": reference, "computed_in": "float32", "weights": str(dtype).removeprefix("torch.")}
    (report / PARITY).write_text(json.dumps({**facts, "tolerance": TOLERANCE, "prompts": rows}, indent=1) + "\n")
    worst = max(row["relative"] for row in rows)
    if not worst <= TOLERANCE:
        raise CheckpointError(
            f"logits differ from those of {reference} by {worst:.3g} of the largest, more than {TOLERANCE}; "
            "nothing was written: the conversion is wrong for this model"
        )


@torch.no_grad()
def parity(native: Path, hugging_face: Path, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Largest logit difference on each prompt, both models in fp32 from weights in `dtype`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(hugging_face, dtype=torch.float32, local_files_only=True).eval()
    config, stage = load_fp32(native, dtype)
    rows = []
    for name, tokens_s, first in prompts(config.model):
        ours_sv = native_logits(stage, tokens_s, first)[:, : config.model.vocab_size]
        theirs_sv = theirs(tokens_s[None], logits_to_keep=len(tokens_s) - first).logits[0]
        largest, difference = float(theirs_sv.abs().max()), float((ours_sv - theirs_sv).abs().max())
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
    return rows


def prompts(model: ModelConfig) -> Iterator[tuple[str, Tensor, int]]:
    """(name, tokens [s], first position to compare): a fixed text, random ones, and where there are that many positions
    one whose last tokens lie beyond 2,048."""
    generator = torch.Generator().manual_seed(0)
    short, most = min(64, model.max_position_embeddings), min(2048 + 64, model.max_position_embeddings)
    yield "fixed", (7919 * torch.arange(short) + 13) % model.vocab_size, 0
    yield "random", torch.randint(model.vocab_size, (short,), generator=generator), 0
    yield "random, last positions", torch.randint(model.vocab_size, (most,), generator=generator), most - short


def load_fp32(checkpoint: Path, dtype: torch.dtype) -> tuple[Config, Stage]:
    """The whole model in one stage, in fp32 from weights rounded to `dtype`."""
    ctx = context.single()
    config = saved_config(read_manifest(checkpoint), precision="fp32")
    stage = build_stages(config, ctx)[0]
    load_weights(checkpoint, slices=weight_slices(stage.parameters()), ctx=ctx, model_config=weight_options(config))
    for param in stage.parameters():
        param.copy_(param.to(dtype))
    return config, stage.eval()


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
