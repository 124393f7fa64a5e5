"""Writes a sketch as a Python file outside of this repository: a family of one's own, to be named MODULE:FAMILY."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from megapar_models.convert.field_words import ACTIVATIONS, ROTARY_PART
from megapar_models.convert.sketch import Sketch

NOT_TOLD = (
    "Rotary pairs: ours are half of the rotated dimensions apart. Where theirs are neighbors, `pairs` of HuggingFace",
    "says so (megapar_models.tensor_layouts.Pairs; family cohere).",
    "Norms: whether the weight is added to 1 (NormRule.offset; family gemma), and whether a norm of queries and keys",
    "stands behind the rotation (LayerKind.qk_norm_after_rotary).",
    "Constants that the code has and config.json has not: factors of embeddings, scores or logits (family gemma).",
    "Values that transformers takes for absent fields (ModelType.defaults).",
)
# What a draft may need, in the order of its imports. An empty line is between packages.
IMPORTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("collections.abc", ("Iterator", "Mapping")),
    ("dataclasses", ("dataclass", "field")),
    ("typing", ("Any",)),
    ("", ()),
    ("megapar_models.family", ("Family", "HuggingFace", "ModelType", "dropout_warnings", "overlaid")),
    ("megapar_models.layer_kind", ("Ends", "LayerKind")),
    ("megapar_models.norms", ("NormRule",)),
    (
        "megapar_models.partial_rotary",
        ("PartialRotaryModel", "partial_problems", "partial_rotary", "read_partial_rope", "write_partial_rope"),
    ),
    ("megapar_models.rope", ("read_rope", "scaling_problems", "write_rope")),
    ("megapar_models.rotary", ("Rotary",)),
    ("megapar_models.rotary_options", ("RotaryModel",)),
    ("megapar_models.stage", ("Stage",)),
    ("megapar_models.tensor_layouts", ("Packing",)),
    (
        "megapar_models.windows",
        ("FULL", "SLIDING", "WindowModel", "read_windows", "window_of", "window_problems", "write_windows"),
    ),
    ("", ()),
    ("megapar.config.model_options", ("OF_FUNCTION", "ModelConfig")),
    ("megapar.config.options", ("Config",)),
    ("megapar.tensor_parallel.cross_entropy", ("LogitRule",)),
)
_INDENT = "    "


def module_name(model_type: str) -> str:
    """The name of the draft's module."""
    return re.sub(r"\W", "_", model_type)


def draft(found: Sketch, folder: str) -> str:
    """The file. Each decision of a person is a line with TODO."""
    parts = (_options(found), _stage(found), _names(found), _family(found))
    body = "\n\n\n".join("\n".join(part) for part in parts)
    return "\n".join([*_head(found, folder), *_imports(body)]) + f"\n\n\n{body}\n"


def _title(found: Sketch) -> str:
    return "".join(word.capitalize() for word in re.split(r"[\W_]+", str(found.raw["model_type"])))


def _head(found: Sketch, folder: str) -> Iterator[str]:
    yield f'"""The family of model_type {found.raw["model_type"]}: a draft of `megapar new-family` from {folder}.'
    yield ""
    yield "What neither config.json nor the names of tensors say, to be looked up in the code of the model:"
    yield ""
    yield from NOT_TOLD
    yield ""
    yield "`megapar convert hf-to-native` compares logits with transformers, and writes nothing if they differ."
    yield '"""'
    yield ""
    kinds = {"decide": found.decide, "no rule of ours": found.missing, "unknown field": found.unknown}
    for what, lines in kinds.items():
        for line in lines:
            yield from textwrap.wrap(f"TODO {what}: {line}", 118, initial_indent="# ", subsequent_indent="#   ")
    if not found.complete:
        yield ""


def _base(found: Sketch) -> list[str]:
    """The classes of options that ours derives from."""
    if not found.rotary:
        return ["ModelConfig"]
    bases = ["PartialRotaryModel"] if found.rotary_part else []
    if found.windows:
        bases.append("WindowModel")
    return bases or ["RotaryModel"]


def _imports(body: str) -> list[str]:
    """The lines for those of IMPORTS that the file uses."""
    code = re.sub(r'""".*?"""', "", re.sub(r"#.*", "", body), flags=re.DOTALL)
    lines = []
    for module, names in IMPORTS:
        used = [name for name in names if re.search(rf"\b{name}\b", code)]
        line = f"from {module} import {', '.join(used)}"
        if module == "":
            lines.append("")
        elif len(line) > 120:
            lines += [f"from {module} import (", *(f"{_INDENT}{name}," for name in used), ")"]
        elif used:
            lines.append(line)
    return lines


def _options(found: Sketch) -> Iterator[str]:
    yield "@dataclass(frozen=True)"
    yield f"class {_title(found)}Model({', '.join(_base(found))}):"
    yield f'    """The options of {found.raw["model_type"]}."""'
    for name, knob in found.options.items():
        yield ""
        default = float(found.raw[name])
        yield f"    {name}: float = field(default={default!r}, metadata=OF_FUNCTION)"
        yield f'    """{knob.words[0].upper()}{knob.words[1:]}."""'


def _stage(found: Sketch) -> Iterator[str]:
    model = f"{_title(found)}Model"
    yield f"class {_title(found)}Stage(Stage[{model}]):"
    yield f'    """Consecutive layers of {found.raw["model_type"]}."""'
    yield ""
    yield "    @classmethod"
    yield f"    def layer_kind(cls, model: {model}, number: int) -> LayerKind:"
    yield "        return LayerKind("
    norm = [f"{name}={code}" for name, code in found.norm.items()]
    yield f"            norm=NormRule({', '.join(['model.rms_norm_eps', *norm])}),"
    if found.rotary:
        yield f"            rotary={'partial_rotary(model)' if found.rotary_part else 'Rotary.of(model)'},"
    if found.windows and found.rotary:
        yield "            window=window_of(model, number),"
    yield from (f"            {name}={code}," for name, code in found.kind.items())
    yield "        )"
    ends = dict(found.ends)
    if found.logits:
        ends["logits"] = f"LogitRule({', '.join(f'{name}={code}' for name, code in found.logits.items())})"
    if ends:
        yield ""
        yield "    @classmethod"
        yield f"    def ends_of(cls, model: {model}) -> Ends:"
        yield "        return Ends("
        yield from (f"            {name}={code}," for name, code in ends.items())
        yield "        )"


def _literal(value: Any) -> str:
    """A dict or a tuple as formatted code, one entry on a line if it is long."""
    if isinstance(value, dict):
        entries = [f"{_literal(name)}: {_literal(item)}" for name, item in value.items()]
        ends = "{}"
    elif isinstance(value, tuple):
        entries = [_literal(item) for item in value]
        ends = "()"
        if len(entries) == 1:
            return f"({entries[0]},)"
    else:
        return re.sub(r"'([^'\"\\]*)'", r'"\1"', repr(value))
    line = f"{ends[0]}{', '.join(entries)}{ends[1]}"
    if len(line) <= 80:
        return line
    return "\n".join([ends[0], *(f"{_INDENT}{entry}," for entry in entries), ends[1]])


def _modules(found: Sketch) -> dict[str, str]:
    """Our modules in the order in which a model runs them."""
    places = ("embedding", "layers.*.attention", "layers.*.mlp", "norm", "head")

    def order_of(name: str) -> int:
        return next(number for number, start in enumerate(places) if name.startswith(start))

    return {name: found.modules[name] for name in sorted(found.modules, key=lambda name: (order_of(name), name))}


def _names(found: Sketch) -> Iterator[str]:
    yield "# Hugging Face"
    yield ""
    yield f"_MODULES = {_literal(_modules(found))}"
    yield "_LAYOUTS: dict[str, Packing] = {}"
    yield from (f"_LAYOUTS[{json.dumps(module)}] = {code}" for module, code in found.layouts.items())
    fields = found.sizes | {name: name for name in found.options}
    yield f"_FIELDS = {_literal(fields)}"
    yield "# transformers takes these for absent fields. Without a value here a field must be in the file."
    yield '_DEFAULTS: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None, "initializer_range": 0.02}'
    if _nulls(found):
        yield f"_DEFAULTS |= {_literal(_nulls(found))}"
    yield f"_FIXED: dict[str, Any] = {_literal(found.fixed)}"
    yield f"_DROPOUTS: tuple[str, ...] = {_literal(tuple(found.dropouts))}"
    yield f"_ACTIVATIONS = {_literal(_activations(found))}"
    yield from ("", "")
    yield "def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:"
    yield '    """Rotary embedding and windows from a config.json; returns option values and problems."""'
    yield from (f"{_INDENT}{line}" for line in _reading(found))
    yield from ("", "")
    yield f"def _write(model: {_title(found)}Model, fields: dict[str, Any]) -> dict[str, Any]:"
    yield '    """The config.json of `model`."""'
    yield from (f"{_INDENT}{line}" for line in _writing(found))


def _nulls(found: Sketch) -> dict[str, None]:
    """Fields that may be null or absent: those of caps, with which none is meant, and sizes that follow from others."""
    sizes = {name: None for name, ours in found.sizes.items() if found.raw[name] is None}
    return sizes | {name: None for name, knob in found.options.items() if knob.neutral == 0.0}


def _activations(found: Sketch) -> dict[str, str]:
    names = [name for name, ours in found.sizes.items() if ours == "hidden_act"]
    return {found.raw[name]: ACTIVATIONS[found.raw[name]] for name in names}


def _reading(found: Sketch) -> Iterator[str]:
    if not found.rotary:
        yield "return {}, []"
        return
    reader = "read_partial_rope(raw, 10000.0, 1.0)" if found.rotary_part else "read_rope(raw, default_theta=10000.0)"
    (other,) = [name for name in found.reads(ROTARY_PART) if name != "partial_rotary_factor"] or [""]
    if other:
        yield f'raw = overlaid(raw, {{"partial_rotary_factor": raw["{other}"]}})'
    yield f"values, problems = {reader}"
    if found.windows:
        yield 'window = raw.get("sliding_window")'
        if "use_sliding_window" in found.raw:
            yield 'window = window if raw["use_sliding_window"] else None'
        yield 'types = raw.get("layer_types") or [SLIDING if window else FULL] * raw.get("num_hidden_layers", 0)'
        yield "windows, wrong = read_windows(raw, window, types)"
        yield "return values | windows, [*problems, *wrong]"
    else:
        yield "return values, problems"


def _writing(found: Sketch) -> Iterator[str]:
    if found.rotary:
        yield f"fields |= {'write_partial_rope' if found.rotary_part else 'write_rope'}(model)"
    if found.rotary and found.windows:
        # Where not all layers have the window, `use_sliding_window` would contradict the list of layers.
        yield "fields |= write_windows(model)"
        if "use_sliding_window" in found.raw:
            yield 'fields |= {"use_sliding_window": bool(model.sliding_window)}'
    yield from (f'fields["{name}"] = fields["{name}"] or None' for name in _nulls(found) if name in found.options)
    said = f'"model_type": {_literal(found.raw["model_type"])}, "architectures": {found.raw.get("architectures")!r}'
    yield f"return {{{said}, **fields, **_FIXED}}".replace("'", '"')


def _family(found: Sketch) -> Iterator[str]:
    yield "def _problems(config: Config, model: Any) -> Iterator[str]:"
    if not found.rotary:
        yield "    return iter(())"
    else:
        yield f"    yield from {'partial_problems' if found.rotary_part else 'scaling_problems'}(config, model)"
        if found.windows:
            yield "    yield from window_problems(config, model)"
    yield from ("", "", "FAMILY = Family(")
    yield f'    name="{found.raw["model_type"]}",'
    yield f"    stage={_title(found)}Stage,"
    yield f"    activations={_literal(tuple(_activations(found).values()) or ('auto',))},"
    yield f"    options={_title(found)}Model,"
    yield f"    even_head_dim={found.rotary},"
    yield "    problems=_problems,"
    yield "    hugging_face=HuggingFace("
    yield f'        model_types={{"{found.raw["model_type"]}": ModelType(_DEFAULTS, _FIXED)}},'
    yield "        modules=_MODULES,"
    yield "        layouts=_LAYOUTS,"
    yield "        fields=_FIELDS,"
    yield "        activations=_ACTIVATIONS,"
    head, embedding = found.modules["head"], found.modules.get("embedding", "")
    yield f'        tied={{"{head}.weight": "{embedding}.weight"}},'
    yield f"        without_effect={_literal(tuple(found.without_effect))},"
    yield "        read=_read,"
    yield "        write=_write,"
    yield f'        warnings=lambda raw: dropout_warnings(raw, "{found.raw["model_type"]}", *_DROPOUTS),'
    yield "    ),"
    yield ")"
