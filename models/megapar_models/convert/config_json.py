"""Conversion of Hugging Face's config.json to our model options and back.

Each family declares the names of its options at Hugging Face (`Family.hugging_face`). A field is
refused by name if it would change the result and our models do not have it.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar_models.convert.config_fields import wrong_kinds
from megapar_models.convert.multimodal import MULTIMODAL, OTHER_PARTS, language_model
from megapar_models.convert.quantized import BLOCK
from megapar_models.family import HuggingFace, ModelType, typed, wrong_types
from megapar_models.registry import FAMILIES, find
from megapar_models.rotary_fields import contradictory_ropes

# Tensors that old versions of transformers stored among the weights: causal masks and rotary wavelengths.
_DERIVED = re.compile(r"\.attn\.(attention\.)?(masked_)?bias$|\.rotary_emb\.inv_freq$")


def names_of(model: ModelConfig) -> HuggingFace:
    """Hugging Face's names of the model's family. Raises ConfigError if the family declares none."""
    names = find(model.family).hugging_face
    if names is None:
        raise ConfigError(f"model.family={model.family}: has no names at Hugging Face (Family.hugging_face)")
    return names


def is_derived(name: str) -> bool:
    """Whether a stored tensor follows from the options, and is no weight."""
    return _DERIVED.search(name) is not None


def canonical_name(
    name: str, names: HuggingFace, ignored: tuple[str, ...] = (), prefixes: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """The tables' name of a stored tensor, or None if the tensor holds no weights of the language model.

    `ignored` are beginnings of the names of other tensors (`left_out`), and `prefixes` those of multimodal files.
    """
    if is_derived(name) or name.startswith(ignored):
        return None
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            name = f"{ours}{name.removeprefix(theirs)}"
            break
    for theirs, ours in names.renamed.items():
        name = name.replace(theirs, ours)
    # GPT-2's own files lack the prefix that models with a head give to the names of the model below it.
    prefix = names.base_prefix
    if name.startswith((prefix, "lm_head.")):
        return name
    return f"{prefix}{name}"


# Fields of config.json for generation, training, storage and inspection: none changes the logits.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("name_or_path", "model_name", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id", "decoder_start_token_id"),
        *("begin_suppress_tokens", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("tokenizer_class", "prefix"),
        *("tie_encoder_decoder", "chunk_size_feed_forward", "task_specific_params"),
        *("problem_type", "finetuning_task", "id2label", "label2id", "num_labels", "return_dict"),
        *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_past"),
        *("torchscript", "use_bfloat16", "tf_legacy_loss", "bad_words_ids", "max_length"),
        *("min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
        *("exponential_decay_length_penalty", "remove_invalid_values", "gradient_checkpointing"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "pretraining_tp"),
        # Written by other programs: of where a file comes from, and of JavaScript.
        *("_commit_hash", "unsloth_fixed", "unsloth_version", "transformers.js_config"),
    )
)


# Fields with one value in every causal language model.
FIXED: Mapping[str, Any] = {
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "add_cross_attention"), False),
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}


class _Read(Mapping[str, Any]):
    """A config.json that notes the fields that were read."""

    def __init__(self, raw: Mapping[str, Any]):
        self._raw = raw
        self.fields: set[str] = set()

    def __getitem__(self, field: str) -> Any:
        self.fields.add(field)
        return self._raw[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def from_hugging_face(file: Mapping[str, Any], family: str = "", accepted: Collection[str] = ()) -> ModelConfig:
    """The model of a config.json, read by `family`: a name, or MODULE:NAME. Without it the model_type decides.

    Raises ConfigError with every field of a wrong type, with every unsupported one, and with every one that nobody
    reads, unless it is listed as without effect, or `accepted` by the user.
    """
    if isinstance(file.get("model_type"), str) and not is_multimodal(file):
        _of_type(file, family)  # before the kinds of fields, which are those of model types that we have
    file = understood(file)
    family, names = _of_type(file, family)
    values, problems, unread = _examined(file, family, names)
    if not problems:
        known = [name for name in accepted if name not in unread]
        problems = [f"--accept_fields {name}: the file has no such field, or it is known" for name in known]
    unknown = [name for name in unread if name not in accepted]
    if problems or unknown:
        raise ConfigError("\n".join(f"config.json: {problem}" for problem in problems or _lines(file, unknown)))
    options = find(family).options
    return options(family=family, **typed(values, options))


def differences(file: Mapping[str, Any], family: str, model_type: str) -> list[str]:
    """What keeps a config.json from being one of this model_type of `family`; its own model_type is no matter."""
    names = find(family).hugging_face
    assert names is not None
    # Families read fields of the right kinds alone.
    wrong = {name: [*wrong_kinds({name: value})] for name, value in file.items()}
    file = {**{name: value for name, value in file.items() if not wrong[name]}, "model_type": model_type}
    _, problems, unread = _examined(file, family, names)
    return [*chain(*wrong.values()), *problems, *_lines(file, unread)]


def distance(lines: list[str]) -> tuple[bool, int]:
    """How far a config.json with these differences is from a model_type.

    Reading ends at a field that is missing, so a model_type that misses one has too few differences: it comes last.
    """
    return any(line.endswith(" is missing") for line in lines), len(lines)


def _nearest(file: Mapping[str, Any]) -> str:
    """The model_type of ours from which a config.json differs in the fewest fields."""
    known = (
        (family, model_type)
        for family, description in FAMILIES.items()
        for model_type in (description.hugging_face.model_types if description.hugging_face else ())
    )
    return min(known, key=lambda names: distance(differences(file, *names)))[1]


def _lines(file: Mapping[str, Any], unread: Iterable[str]) -> list[str]:
    return [
        f"{field}={file[field]!r} is not known, and may change the model; hf-to-native takes it with --accept_fields "
        f"{field}"
        for field in unread
    ]


def understood(file: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model in a file. Raises ConfigError with every field of a wrong type."""
    wrong = [*wrong_kinds(file)]
    if not wrong:
        file = language_model(file)
        wrong = [*wrong_kinds(file)]
    if wrong:
        raise ConfigError("\n".join(f"config.json: {line}" for line in wrong))
    return file


def _examined(file: Mapping[str, Any], family: str, names: HuggingFace) -> tuple[dict[str, Any], list[str], list[str]]:
    """The values of our options in a config.json, its problems, and the fields that nobody read."""
    type_name = str(file["model_type"])
    model_type = names.model_types[type_name]
    defaults = {**names.defaults, **model_type.defaults}
    raw = _Read(file)
    problems = [*contradictory_ropes(file), *_unsupported(raw, model_type.fixed)]
    values: dict[str, Any] = {}
    for theirs, ours in names.fields.items():
        value = raw.get(theirs, defaults.get(theirs))
        if value is None and theirs not in defaults:
            problems.append(f"{theirs} is missing")
        elif ours == "hidden_act" and value not in names.activations:
            problems.append(f"{theirs}={value!r} is not supported; {', '.join(names.activations)} are")
        elif value is not None:
            values[ours] = names.activations[value] if ours == "hidden_act" else value
    if problems:
        return values, problems, []
    more, wrong = names.read(raw, type_name)
    values |= more
    if is_of_sequences(file):
        values |= {"head": "score", "tie_word_embeddings": False}
        problems += _sequence_problems(file, names)
    problems += [*wrong, *wrong_types(values, find(family).options)]
    if not problems:  # `judge` may rely on fields that are there and have the right types
        problems += names.judge(raw, type_name)
        names.warnings(raw)
        names.ignored(raw)
    known = {*raw.fields, *WITHOUT_EFFECT, "model_type", *names.without_effect}
    return values, problems, sorted(file.keys() - known)


def is_of_sequences(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model with a class for each sequence in place of logits."""
    classes = raw.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith(_OF_SEQUENCES) for name in classes)


_OF_SEQUENCES = "ForSequenceClassification"


def _sequence_problems(raw: Mapping[str, Any], names: HuggingFace) -> Iterator[str]:
    """What keeps a model with classes from being a reward model of ours."""
    if raw["model_type"] not in names.sequence_classes:
        known = ", ".join(found for family in FAMILIES.values() for found in _sequence_classes(family.hugging_face))
        yield f"architectures={raw['architectures']!r}: of such classes {known} are converted"
    labels = raw.get("num_labels", len(raw.get("id2label") or (0, 1)))  # two by default, which no file then says
    if labels != 1:
        yield f"num_labels is {labels}, and a head of one number is converted (model.head=score)"


def _sequence_classes(names: HuggingFace | None) -> Iterable[str]:
    return () if names is None else names.sequence_classes.values()


def known_type(type_name: str) -> ModelType:
    """Return what families know of a model_type: for one of no family, nothing."""
    for family in FAMILIES.values():
        if family.hugging_face is not None and type_name in family.hugging_face.model_types:
            return family.hugging_face.model_types[type_name]
    return ModelType("")


def warnings_of(raw: Mapping[str, Any], family: str = "") -> list[str]:
    """Lines about fields of a supported config.json without an option of ours and without effect on the result."""
    raw = understood(raw)
    name, names = _of_type(raw, family)
    return names.warnings(raw, find(name).name)


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes other parts beside the language model."""
    return raw.get("model_type") in MULTIMODAL


def left_out(raw: Mapping[str, Any], family: str = "") -> tuple[str, ...]:
    """Beginnings of the names of tensors of other parts than the language model."""
    text = understood(raw)
    ignored = tuple(_of_type(text, family)[1].ignored(text))
    return (*ignored, *OTHER_PARTS) if is_multimodal(raw) else ignored


def _of_type(file: Mapping[str, Any], family: str) -> tuple[str, HuggingFace]:
    """The family of the model_type of a config.json, and its names: `family`, if it is not "".

    Raises ConfigError if no family has it, or not this one.
    """
    type_name = file.get("model_type")
    known = [] if family else [*MULTIMODAL]
    for name, description in {family: find(family)}.items() if family else FAMILIES.items():
        names = description.hugging_face
        if names is None:
            continue
        if type_name in names.model_types:
            return name, names
        known += names.model_types
    if family:
        has = f"it has {', '.join(known)}" if known else "it has no names at Hugging Face (Family.hugging_face)"
        raise ConfigError(f"config.json: model_type={type_name!r} is not one of family {family}; {has}")
    raise ConfigError(
        f"config.json: model_type={type_name!r} is not supported; `megapar new-family FOLDER` says what a family for "
        f"it needs, and drafts one with --write; of the {len(known)} types that are supported (docs/families.md), "
        f"{_nearest(file)} is the nearest by its fields"
    )


def _unsupported(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field with a value our models do not compute. A missing field is right."""
    for field, value in {**FIXED, **fixed}.items():
        if raw.get(field, value) != value:
            yield f"{field}={raw[field]!r} is not supported; {value!r} is"
    quantized = raw.get("quantization_config")
    if quantized is not None and _quantization(quantized) not in _QUANTIZATIONS:
        why = _OTHER_MODELS.get(_quantization(quantized)[0], "fp8 in blocks of 128 x 128 and mxfp4 are")
        yield f"quantization_config={quantized!r} is not supported; {why}"


# Methods by which a model is another one than its matrices say.
_OTHER_MODELS = {
    "bitnet": "its products round matrices to -1, 0 and 1, and none here does; without it the model is another one"
}
_QUANTIZATIONS = (("fp8", (BLOCK, BLOCK)), ("mxfp4", ()))


def _quantization(stated: Any) -> tuple[str, tuple[int, ...]]:
    """The method of a quantization_config, and the sizes of its blocks."""
    if not isinstance(stated, dict):
        return "", ()
    return str(stated.get("quant_method")), tuple(stated.get("weight_block_size") or ())


def to_hugging_face(model: ModelConfig) -> dict[str, Any]:
    """Return config.json of a validated model, as transformers 4 and 5 read it.

    Raises ConfigError if no model_type can describe the model.
    """
    names = names_of(model)
    raw = names.write(model)
    if model.head == "vocabulary":
        return raw
    if raw["model_type"] not in names.sequence_classes:
        known = ", ".join(found for family in FAMILIES.values() for found in _sequence_classes(family.hugging_face))
        text = f"no class of {raw['model_type']} is converted that scores sequences; {known} are"
        raise ConfigError(f"model.head={model.head}: {text}")
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**raw, "architectures": [names.sequence_classes[raw["model_type"]]], **one}
