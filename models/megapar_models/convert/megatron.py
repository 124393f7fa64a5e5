"""Reading of Megatron-LM's classic checkpoints (`--ckpt-format torch`): weights only, one tensor at a time.

    root/latest_checkpointed_iteration.txt        an iteration, or `release`
    root/iter_0001200/mp_rank_01_002/model_optim_rng.pt     tensor rank 1, pipeline rank 2 (mp_rank_01 if there is one)

Each file is a pickle of nested dicts: `args` (an argparse.Namespace), `iteration`, and `model` (`model0`, `model1` ...
if a pipeline rank holds several chunks). Optimizer and random states are not read. Layers are numbered from 0 in each
chunk. Both of Megatron's model classes are read: the legacy one, and Megatron Core's with local or Transformer Engine
layers.

No code in a file is run. Storages are mapped: a tensor's bytes are read only when it is converted.
"""

import json
import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import Sizes, dtype_name
from megapar.checkpoint.load import flatten
from megapar.config.messages import counted, first_few
from megapar.config.model_options import ModelConfig
from megapar.system.regular_files import read_regular
from megapar_models.convert.formats.pickles import Left
from megapar_models.convert.formats.torch_files import load_mapped
from megapar_models.convert.megatron_args import unsupported
from megapar_models.convert.stream import CODES, check_finite
from megapar_models.family import Megatron
from megapar_models.registry import FAMILIES
from megapar_models.rotary import RopeScaling

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"

# Our names of a layer's tensors, and Megatron's names: legacy (in two spellings), Megatron Core's, and Transformer
# Engine's, which fuses a norm with the matrix after it. `weight` or `bias` follows.
_LAYER = {
    "attention_norm.": ("input_layernorm.", "input_norm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv.": (
        "self_attention.query_key_value.",
        "attention.query_key_value.",
        "self_attention.linear_qkv.",
    ),
    "attention.q_norm.": ("self_attention.q_layernorm.",),
    "attention.k_norm.": ("self_attention.k_layernorm.",),
    "attention.o.": ("self_attention.dense.", "attention.dense.", "self_attention.linear_proj."),
    "mlp_norm.": (
        "post_attention_layernorm.",
        "post_attention_norm.",
        "pre_mlp_layernorm.",
        "mlp.linear_fc1.layer_norm_",
    ),
    "mlp.up.": ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    "mlp.down.": ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
}
_OUTSIDE = {
    "embedding.": ("embedding.word_embeddings.",),
    "positions.": ("embedding.position_embeddings.",),
    "norm.": ("final_norm.", "final_layernorm."),
    "head.": ("output_layer.", "word_embeddings_for_head."),
}
_OURS = {
    f"{theirs}{kind}": f"{ours}{kind}"
    for ours, spellings in (_LAYER | _OUTSIDE).items()
    for theirs in spellings
    for kind in ("weight", "bias")
}
_KEY = re.compile(r"(?:language_model\.)?(?:(?:encoder|transformer|decoder)\.)?(?:layers\.(\d+)\.)?(.+)")
_COMPUTED = ("_extra_state", "inv_freq")  # fp8 scales and rotary tables: stored, but no weights

# Endings of the tensors that tensor parallelism splits by columns, by rows, and by rows while fused. All ranks hold the
# others whole.
_COLUMNS = ("attention.o.weight", "mlp.down.weight")
_ROWS = (
    *("embedding.weight", "head.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.up.bias"),
    *(f"attention.{letter}.{kind}" for letter in "qkv" for kind in ("weight", "bias")),
)
_FUSED_ROWS = ("attention.qkv.weight", "attention.qkv.bias")


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint of Megatron-LM with its files mapped into memory.

    `parts` holds every tensor rank's part of each tensor, in the order of the ranks. Its names are ours, but q/k/v and
    gate/up are fused, as Megatron stores them. Pages are read when a tensor is made, and the system may drop them
    again. `args` are Megatron's, without objects of its own classes.
    """

    folder: Path
    iteration: int
    model: ModelConfig
    parts: Mapping[str, tuple[Tensor, ...]]
    args: Mapping[str, Any]

    def tensor(self, name: str) -> Tensor:
        """The logical tensor `name`, fp32."""
        return self._joined(name, self.parts[_fused(name)]).float()

    def gathered(self, name: str) -> Tensor:
        """A tensor of `parts` as a single tensor rank of Megatron would hold it, with the padding rows."""
        parts = self.parts[name]
        if name.endswith(_COLUMNS):
            return torch.cat(parts, 1)
        if not name.endswith((*_ROWS, *_FUSED_ROWS)):
            return parts[0]
        if self.args.get("swiglu") and ".mlp." in name:
            # Each rank holds its rows of the gate above its rows of the up projection. One rank has all of both.
            halves = [part.chunk(2) for part in parts]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return torch.cat(parts)

    def check(self, shapes: Mapping[str, Sizes]) -> None:
        """Raise CheckpointError unless the parts make exactly the tensors of `shapes`.

        Tensors held by several ranks must be equal on all: norms, row biases, positions, tied embeddings. No other
        weight is read.
        """
        sources = {_fused(name) for name in shapes}
        tied = {"head.weight"} if self.model.tie_word_embeddings else set()
        problems = []
        missing = sources - self.parts.keys()
        if missing:
            problems.append(f"missing {first_few(sorted(missing))}")
        unknown = self.parts.keys() - sources - tied
        if unknown:
            problems.append(f"unexpected {first_few(sorted(unknown))}")
        for name, shape in shapes.items():
            if _fused(name) in self.parts:
                problems += self._problem(name, shape)
        if tied and not self._copies_are_equal():
            problems.append("tied, but the last stage's embedding differs from the first's")
        if problems:
            raise CheckpointError(f"{self.folder}: not the model of its args: {first_few(problems, separator='; ')}")

    def _copies_are_equal(self) -> bool:
        """Whether the last stage's copy of a tied embedding, if there is one, equals the first stage's.

        Raises CheckpointError if values are not finite: NaN would differ from itself.
        """
        copies = zip(self.parts.get("embedding.weight", ()), self.parts.get("head.weight", ()), strict=False)
        return all(
            torch.equal(check_finite("embedding.weight", first), check_finite("head.weight", last))
            for first, last in copies
        )

    def _problem(self, name: str, shape: Sizes) -> list[str]:
        """What is wrong with the parts of the logical tensor `name`: one line or none."""
        parts = self.parts[_fused(name)]
        try:
            # Meta tensors have shapes alone, so that no weight is read.
            joined_shape = list(self._joined(name, tuple(part.to("meta") for part in parts)).shape)
        except RuntimeError:  # they cannot be joined
            joined_shape = []
        if joined_shape != list(shape):
            return [f"{name} of shape {list(shape)} does not come of parts {[list(part.shape) for part in parts]}"]
        if name.endswith(_ROWS + _COLUMNS):
            return []
        for part in parts:
            check_finite(name, part)  # NaN would differ from itself
        if not all(torch.equal(part, parts[0]) for part in parts):
            return [f"tensor ranks hold different values of {name}"]
        return []

    def _joined(self, name: str, parts: tuple[Tensor, ...]) -> Tensor:
        """Join all tensor ranks' parts to the logical tensor `name`, in their dtype, without padding rows."""
        model = self.model
        if name.endswith(_COLUMNS):
            return torch.cat(parts, 1)
        if not name.endswith(_ROWS):
            return parts[0]
        if self.args.get("swiglu") and ".mlp." in name:
            # Each rank holds its rows of the gate, then its rows of the up projection.
            half = 1 if ".up." in name else 0
            return torch.cat([part.chunk(2)[half] for part in parts])
        rows = torch.cat(parts)
        if name in ("embedding.weight", "head.weight"):
            return rows[: model.vocab_size]
        if ".attention." not in name:
            return rows
        # Megatron stores, for each key/value head, its query heads, then its key head, then its value head.
        groups = model.num_key_value_heads
        heads = rows.view(groups, model.num_attention_heads // groups + 2, model.head_dim, *rows.shape[1:])
        wanted = {"q": slice(None, -2), "k": slice(-2, -1), "v": slice(-1, None)}[name.split(".")[-2]]
        return heads[:, wanted].flatten(0, 2)


def _fused(name: str) -> str:
    """The name in `parts` for the logical tensor `name`: its fused tensor's, if it is part of one."""
    return re.sub(r"\.attention\.[qkv]\.", ".attention.qkv.", name).replace(".mlp.gate.", ".mlp.up.")


def read(source: Path, vocab_size: int = 0, accepted: Collection[str] = ()) -> MegatronCheckpoint:
    """Open the checkpoint in `source`. No weight is read yet.

    `source` is an iteration's folder, or the folder above it: the tracker file there then names the iteration.
    `vocab_size` is the true number of token ids. Megatron's file does not always state it; 0 takes what it states.
    `accepted` are names of args. The user knows that they do not change what the model computes.
    Raises CheckpointError if files are missing, damaged or not safe to unpickle, or if no model of ours computes the
    same.
    """
    folder = find(source)
    files = find_files(folder)
    loaded = {ranks: load_file(path) for ranks, path in files.items()}
    first = loaded[0, 0]
    if len({state.get("iteration") for state in loaded.values()}) > 1:
        raise CheckpointError(f"{folder}: its files are of different iterations")
    version = first.get("checkpoint_version", 0)
    args = vars(first["args"])
    if version not in (2.0, 3.0):
        raise CheckpointError(f"{folder}: checkpoint_version is {version}: 2.0 and 3.0 are read")
    tp = 1 + max(tensor_rank for tensor_rank, _ in files)
    pp = 1 + max(pipeline_rank for _, pipeline_rank in files)
    for field, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if args.get(field, size) != size:
            raise CheckpointError(f"{folder}: has files of {counted(size, 'rank')}, args.{field} is {args[field]}")
    try:
        model = model_of(args, vocab_size, folder, accepted)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder}: args describe no model ({error})") from None
    parts = collect({ranks: chunks(state) for ranks, state in loaded.items()}, tp, pp, folder)
    layers = {name.split(".")[1] for name in parts if name.startswith("layers.")}
    if len(layers) != model.num_hidden_layers:
        raise CheckpointError(
            f"{folder}: holds {counted(len(layers), 'layer')}, args.num_layers is {model.num_hidden_layers}"
        )
    plain = {name: value for name, value in args.items() if not isinstance(value, Left)}
    return MegatronCheckpoint(folder, first.get("iteration") or 0, model, parts, plain)


def find(source: Path) -> Path:
    """The parent of the ranks' folders: `source`, or the iteration's folder by its tracker.

    Raises CheckpointError if there is none.
    """
    if any(source.glob("mp_rank_*")):
        return source
    if (source / METADATA).is_file():
        raise CheckpointError(_no_ranks(source))
    try:
        word = read_regular(source / TRACKER).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source}: neither mp_rank_* folders nor a readable {TRACKER} ({error})") from None
    # The word becomes a part of a path, so nothing else may stand there.
    if word != "release" and not re.fullmatch(r"\d{1,9}", word):
        raise CheckpointError(f"{source / TRACKER}: {word[:40]!r} is neither an iteration nor `release`")
    folder_name = word if word == "release" else f"iter_{int(word):07d}"
    folder = source / folder_name
    if not any(folder.glob("mp_rank_*")):
        raise CheckpointError(_no_ranks(folder))
    return folder


def _no_ranks(folder: Path) -> str:
    """Return why a folder without mp_rank_* is not read. In Megatron's distributed formats, metadata.json names it."""
    try:
        metadata = json.loads(read_regular(folder / METADATA))
        backend = metadata["sharded_backend"]
    except (OSError, ValueError, TypeError, KeyError):
        return f"{folder}: has no mp_rank_* folders; of Megatron's formats `--ckpt-format torch` is read"
    way = "`megapar convert SRC DST` reads it, moments included"
    if backend != "torch_dist":
        way = "run Megatron-LM on it with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
    return f"{folder}: is in Megatron's format {backend} (metadata.json), not in its classic one: {way}"


def find_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of each (tensor rank, pipeline rank). Raises CheckpointError unless they fill a grid."""
    files = {}
    for path in sorted(folder.glob("mp_rank_*")):
        ranks = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name)
        if not ranks:
            raise CheckpointError(f"{path}: not a tensor and pipeline rank; experts are not supported")
        files[int(ranks[1]), int(ranks[2] or 0)] = path / FILE
    tp = 1 + max(tensor_rank for tensor_rank, _ in files)
    pp = 1 + max(pipeline_rank for _, pipeline_rank in files)
    for t in range(tp):
        for p in range(pp):
            if (t, p) not in files or not files[t, p].is_file():
                raise CheckpointError(f"{folder}: tensor rank {t} of pipeline rank {p} has no {FILE}")
    return files


def load_file(path: Path) -> dict[str, Any]:
    """A rank's dict, with its storages mapped from the file.

    It has tensors, containers, plain values and `args`. Other objects are replaced by `Left`.
    Raises CheckpointError if the pickle names anything not stored by Megatron. No code is run.
    """
    state = load_mapped(path)
    if not isinstance(state, dict) or not isinstance(state.get("args"), Namespace):
        raise CheckpointError(f"{path}: no checkpoint of Megatron-LM: has no `args`")
    return state


def load_arguments(source: Path) -> dict[str, Any]:
    """Return the arguments in model_optim_rng.pt, or in that of the first rank in a checkpoint's folder."""
    if source.is_dir():
        source = next(iter(sorted(find(source).glob(f"mp_rank_*/{FILE}"))), source)
    return vars(load_file(source)["args"])


def model_of(args: Mapping[str, Any], vocab_size: int, folder: Path, accepted: Collection[str] = ()) -> ModelConfig:
    """The model of Megatron's `args`.

    `folder` is the checkpoint's folder, for messages. Dropout is 0, because it is an option of training, and llama
    lacks it. Raises CheckpointError for refused or missing args, and for other types.
    """
    for problem in unsupported(args, accepted):
        raise CheckpointError(f"{folder}: {problem}")
    family, act = _family(args, folder)
    heads = _stated(args, folder, int, "num_attention_heads")
    grouped = args.get("group_query_attention")
    size = vocab_size
    # Null tokenizers have an end token beyond args.vocab_size, so that number is not taken. For most other tokenizers
    # the args do not state it.
    if not size and "Null" not in str(args.get("tokenizer_type")):
        size = args.get("vocab_size", 0)
    if not isinstance(size, int) or not size:
        rows = args.get("padded_vocab_size")
        raise CheckpointError(f"{folder}: args do not say how many of {rows} token ids are true: give --vocab_size N")
    hidden = _stated(args, folder, int, "hidden_size")
    key_value_heads = _stated(args, folder, int, "num_query_groups") if grouped else heads
    head_dim = _stated(args, folder, int, "kv_channels") if args.get("kv_channels") else hidden // heads
    options = FAMILIES[family].options
    of_some: dict[str, Any] = {
        "rope_theta": float(args.get("rotary_base") or 10000.0),
        "rope_scaling": _rope_scaling(args, folder),
        "attention_bias": bool(args.get("add_qkv_bias")),
        "qk_norm": bool(args.get("qk_layernorm")),
    }
    return options(
        family=family,
        hidden_size=hidden,
        num_hidden_layers=_stated(args, folder, int, "num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate_size=_stated(args, folder, int, "ffn_hidden_size"),
        vocab_size=size,
        max_position_embeddings=_stated(args, folder, int, "max_position_embeddings"),
        hidden_act=act,  # type: ignore[arg-type]
        rms_norm_eps=_stated(args, folder, float, "norm_epsilon", "layernorm_epsilon"),
        tie_word_embeddings=not args.get("untie_embeddings_and_output_weights"),
        initializer_range=args.get("init_method_std") or ModelConfig.initializer_range,
        **{name: value for name, value in of_some.items() if name in _names(family)},
    )


def _names(family: str) -> set[str]:
    """The options of a family, without those of sections."""
    return {f.name for f in fields(FAMILIES[family].options)}


def _stated(args: Mapping[str, Any], folder: Path, kind: type, *fields: str) -> Any:
    """The first stated one of `fields`, as `kind`, int or float. Raises CheckpointError if it is none.

    A whole number is taken for a float too.
    """
    field = next((field for field in fields if args.get(field) is not None), fields[0])
    value = args.get(field)
    allowed = (int, float) if kind is float else (int,)
    if type(value) not in allowed:  # `type`, because True is an instance of int
        raise CheckpointError(f"{folder}: args.{field} is {value!r}: must be a number")
    return kind(value)


def megatron_families() -> Iterator[tuple[str, Megatron]]:
    """Yield (name, args of Megatron-LM) of each family within Megatron's GPT model."""
    for name, family in FAMILIES.items():
        if family.megatron is not None:
            yield name, family.megatron


def _family(args: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """(family, hidden_act). Raises CheckpointError about an option of no family, or of the other one."""
    swiglu = bool(args.get("swiglu"))
    family, needs = next((name, megatron) for name, megatron in megatron_families() if megatron.swiglu == swiglu)
    rotary = "rope" if args.get("use_rotary_position_embeddings") else "learned_absolute"
    norms_of_heads = bool(args.get("qk_layernorm"))
    wanted = {
        "normalization": (needs.normalization, args.get("normalization") or "LayerNorm"),
        "position_embedding_type": (needs.position_embedding_type, args.get("position_embedding_type") or rotary),
        "add_bias_linear": (needs.add_bias_linear, args.get("add_bias_linear", True)),
        "qk_layernorm": (norms_of_heads and "qk_norm" in _names(family), norms_of_heads),
    }
    for field, (needed, stated) in wanted.items():
        if stated != needed:
            also = "with" if swiglu else "without"
            raise CheckpointError(
                f"{folder}: args.{field} is {stated!r}: {also} args.swiglu only {needed!r} is supported"
            )
    if swiglu:
        return family, "silu"
    if args.get("squared_relu"):
        return family, "relu2"
    if not (args.get("bias_gelu_fusion", True) or args.get("openai_gelu")):
        raise CheckpointError(
            f"{folder}: args.bias_gelu_fusion is False: only GELU by tanh is supported (openai_gelu too)"
        )
    return family, "gelu_pytorch_tanh"


def _rope_scaling(args: Mapping[str, Any], folder: Path) -> RopeScaling:
    """Return interpolation of positions, Llama 3.1's scaling, or no scaling.

    Of Llama 3.1's numbers, Megatron lets the user choose only the factor.
    """
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if not args.get("use_rope_scaling"):
        if interpolation:
            return RopeScaling("linear", float(interpolation))
        return RopeScaling()
    if interpolation:
        both = "args.rotary_seq_len_interpolation_factor with use_rope_scaling"
        raise CheckpointError(f"{folder}: {both}: not supported")
    return RopeScaling("llama3", float(args.get("rope_scaling_factor") or 8.0), 1.0, 4.0, 8192)


def chunks(state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The tensors of each model chunk of a rank, by Megatron's dotted names. Nested dicts are flattened."""
    names = ("model", *(f"model{number}" for number in range(len(state))))
    models = [state[name] for name in names if isinstance(state.get(name), Mapping)]
    return [flatten(model) for model in models]


def collect(
    ranks: Mapping[tuple[int, int], list[dict[str, Tensor]]], tp: int, pp: int, folder: Path
) -> dict[str, tuple[Tensor, ...]]:
    """Every tensor rank's part of each tensor, by our names with global layer numbers.

    Chunk c of pipeline rank p is stage c * pp + p. Its layers follow those of the stage before.
    Raises CheckpointError for unknown names, names stored twice, or missing on some tensor rank.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    first_layer = 0
    for chunk in range(max(map(len, ranks.values()))):
        for stage in range(pp):
            held = [ranks[rank, stage][chunk] for rank in range(tp) if chunk < len(ranks[rank, stage])]
            named = [dict(_renamed(tensors, first_layer, folder)) for tensors in held]
            if len(named) != tp or any(names.keys() != named[0].keys() for names in named):
                raise CheckpointError(f"{folder}: tensor ranks of pipeline rank {stage} hold different names")
            for name in named[0]:
                if name in parts:
                    raise CheckpointError(f"{folder}: {name} is held by two pipeline stages")
                parts[name] = tuple(names[name] for names in named)
            layers = [int(name.split(".")[1]) for name in named[0] if name.startswith("layers.")]
            first_layer = max(layers, default=first_layer - 1) + 1
    return parts


def _renamed(tensors: Mapping[str, Any], first_layer: int, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) for each tensor of a chunk. Its layer 0 is `first_layer` of the model.

    Raises CheckpointError for unknown names and other dtypes.
    """
    for key, tensor in tensors.items():
        if key.endswith(_COMPUTED):
            continue
        match = _KEY.fullmatch(key)
        name = _OURS.get(match[2]) if match else None
        if not match or name is None or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{folder}: holds {key}, which no GPT or Llama of ours has")
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{folder}: {key} is {dtype_name(tensor.dtype)}: only fp32, bf16 and fp16 are read")
        if match[1]:
            name = f"layers.{first_layer + int(match[1])}.{name}"
        yield name, tensor
