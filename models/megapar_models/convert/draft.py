"""Writes a sketch as a Python file outside of this repository: a family of one's own, to be named MODULE:FAMILY."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from megapar_models.convert.field_words import ACTIVATIONS, ROTARY_PART
from megapar_models.convert.sketch import Sketch
from megapar_models.convert.sketched_experts import SketchedExperts
from megapar_models.families.llama import LLAMA

NOT_TOLD = (
    "Rotary pairs: ours are half of the rotated dimensions apart. Where theirs are neighbors, `pairs` of HuggingFace",
    "says so (megapar_models.tensor_layouts.Pairs; family cohere).",
    "Norms: whether the weight is added to 1 (NormRule.offset; family gemma), and whether a norm of queries and keys",
    "stands behind the rotation (LayerKind.qk_norm_after_rotary).",
    "Constants that the code has and config.json has not: factors of embeddings, scores or logits (family gemma).",
    "Experts: whether scores are softmax or sigmoid and are divided by their sum, where no field says so (`always`).",
    "Values that transformers takes for absent fields: without others in `defaults` they are those of Llama.",
)
# What a draft may need, in the order of its imports. An empty line is between packages.
IMPORTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dataclasses", ("dataclass", "field", "replace")),
    ("typing", ("Any",)),
    ("", ()),
    ("megapar_models.codecs", ("Dropouts", "Written", "ZeroAsNull")),
    ("megapar_models.families.llama", ("LLAMA",)),
    ("megapar_models.families.qwen3_moe", ("Qwen3MoeExperts",)),
    ("megapar_models.family", ("Family", "ModelType", "Raw", "like", "overlaid")),
    ("megapar_models.layer_kind", ("Ends", "LayerKind")),
    ("megapar_models.listed_experts", ("ListedExperts",)),
    ("megapar_models.moe", ("router_rule",)),
    ("megapar_models.norms", ("NormRule",)),
    ("megapar_models.rotary", ("PartialRotaryModel", "Rotary", "RotaryModel")),
    ("megapar_models.rotary_fields", ("PartialRope", "Rope")),
    ("megapar_models.stage", ("Stage",)),
    ("megapar_models.tensor_layouts", ("Packing",)),
    ("megapar_models.windows", ("WindowModel", "Windows", "window_of")),
    ("", ()),
    ("megapar.config.model_options", ("OF_FUNCTION", "MixtureModel", "ModelConfig")),
    ("megapar.tensor_parallel.cross_entropy", ("LogitRule",)),
)
_INDENT = "    "


def module_name(model_type: str) -> str:
    """Return the name of the draft's module."""
    return re.sub(r"\W", "_", model_type)


def draft(found: Sketch, folder: str) -> str:
    """Return the file. Each decision of a person is a line with TODO."""
    parts = ("\n".join(part) for part in (_options(found), _stage(found), _rope(found), _family(found)))
    body = "\n\n\n".join(part for part in parts if part)
    return "\n".join([*_head(found, folder), *_imports(body)]).rstrip() + f"\n\n\n{body}\n"


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
    bases = ["MixtureModel"] if found.experts else []
    if not found.rotary:
        return bases or ["ModelConfig"]
    if found.rotary_part:
        bases.append("PartialRotaryModel")
    if found.windows:
        bases.append("WindowModel")
    return bases if found.rotary_part or found.windows else [*bases, "RotaryModel"]


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
    if found.experts:
        yield ""
        yield "    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)"
        yield '    """Mixture of experts."""'
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
        yield "            rotary=Rotary.of(model),"
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


def _other_part(found: Sketch) -> str:
    """Return their other name of partial_rotary_factor, "" if they have none."""
    return next((name for name in found.reads(ROTARY_PART) if name != "partial_rotary_factor"), "")


def _rope(found: Sketch) -> Iterator[str]:
    """Yield the codec of rotary positions, if its fields have other names."""
    if other := _other_part(found):
        yield "class _Rope(PartialRope):"
        yield "    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:"
        yield f'        return super().read(overlaid(raw, {{"partial_rotary_factor": raw["{other}"]}}), model_type)'


def _codecs(found: Sketch) -> Iterator[str]:
    if found.rotary:
        yield "_Rope()" if _other_part(found) else "PartialRope()" if found.rotary_part else "Rope()"
    if found.rotary and found.windows:
        yield 'Windows(switch="use_sliding_window")' if "use_sliding_window" in found.raw else "Windows()"
    if found.dropouts:
        yield f"Dropouts({_literal(tuple(found.dropouts))})"
    if found.experts:
        yield "_EXPERTS"
    if caps := tuple(_caps(found)):
        yield f"ZeroAsNull({_literal(caps)})"
    if found.fixed:
        yield "Written(_FIXED)"


def _expert_arguments(experts: SketchedExperts) -> Iterator[str]:
    """Yield the arguments of `ListedExperts` that are no defaults."""
    for name in ("names", "always", "shared", "dense"):
        if value := getattr(experts, name):
            yield f"{name}={json.dumps(value) if isinstance(value, str) else _literal(value)}"


def _caps(found: Sketch) -> list[str]:
    """Return the options for which null means none."""
    return [name for name, knob in found.options.items() if knob.neutral == 0.0]


def _arguments(found: Sketch) -> Iterator[tuple[str, str]]:
    """Yield what is unlike Llama, as names and code of arguments of `like`."""
    llama = LLAMA.hugging_face
    assert llama is not None
    classes = found.raw.get("architectures")
    architecture = str(classes[0]) if isinstance(classes, list) and classes else f"{_title(found)}ForCausalLM"
    model_type = f"ModelType({json.dumps(architecture)}, fixed=_FIXED)"
    yield "model_types", f"{{{json.dumps(found.raw['model_type'])}: {model_type}}}"
    yield "codecs", "\n".join(["(", *(f"{_INDENT}{codec}," for codec in _codecs(found)), ")"])
    if found.layouts:
        yield "layouts", f"{{{', '.join(f'{json.dumps(name)}: {code}' for name, code in found.layouts.items())}}}"
    fields = found.sizes | {name: name for name in found.options}
    tied = {f"{found.modules['head']}.weight": f"{found.modules.get('embedding', '')}.weight"}
    given: dict[str, Any] = {
        "modules": {ours: theirs for ours, theirs in found.modules.items() if llama.modules.get(ours) != theirs},
        "fields": {name: None for name in llama.fields if name not in fields}
        | {name: ours for name, ours in fields.items() if llama.fields.get(name) != ours},
        "defaults": dict.fromkeys([*(name for name in found.sizes if found.raw[name] is None), *_caps(found)]),
        "activations": _activations(found),
        "tied": tied if tied != llama.tied else {},
        "without_effect": tuple(found.without_effect),
    }
    yield from ((name, _literal(value)) for name, value in given.items() if value)


def _activations(found: Sketch) -> dict[str, str]:
    names = [found.raw[name] for name, ours in found.sizes.items() if ours == "hidden_act"]
    return {name: ACTIVATIONS[name] for name in names}


def _family(found: Sketch) -> Iterator[str]:
    yield f"_FIXED: dict[str, Any] = {_literal(found.fixed)}"
    if found.experts:
        yield "_EXPERTS = ListedExperts("
        yield from (textwrap.indent(f"{argument},", _INDENT) for argument in _expert_arguments(found.experts))
        yield ")"
    yield ""
    yield "FAMILY = Family("
    yield f"    name={json.dumps(found.raw['model_type'])},"
    yield f"    stage={_title(found)}Stage,"
    yield f"    activations={_literal(tuple(_activations(found).values()) or ('auto',))},"
    yield f"    options={_title(found)}Model,"
    yield f"    even_head_dim={found.rotary},"
    yield "    hugging_face=like("
    yield "        LLAMA,"
    for name, code in _arguments(found):
        yield textwrap.indent(f"{name}={code},", _INDENT * 2)
    yield "    ),"
    yield ")"
