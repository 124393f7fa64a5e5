"""Jobs of GPT-NeoX: keys of its YAML become flags of Megatron-LM, which it came from, and keys of DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from megapar_tools.migrate.carry import Line, Moved, Option
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import plain
from megapar_tools.migrate.sources import options_of_table, set_in, words_of

MEGATRON, DEEPSPEED = "Megatron-LM", "DeepSpeed"
_KEYS = read_flags("neox")
_DEFAULTS: dict[str, str] = _KEYS["defaults"]


def is_neox(table: Mapping[str, Any]) -> bool:
    """Whether a file of arguments is GPT-NeoX's."""
    return len({*_KEYS["signs"]} & {plain(key) for key in table}) > 1


def options_of(table: Mapping[str, Any], world: int) -> list[Option]:
    """The options of a file of GPT-NeoX, for `world` ranks, and its defaults where they are not Megatron-LM's."""
    given = {plain(key): value for key, value in set_in(table).items()}
    if isinstance(given.get("fp16"), dict):  # its own switch is `enabled` once more
        given["fp16"] = {key: value for key, value in given["fp16"].items() if key != "fp16"}
    options = options_of_table({key: given[key] for key in _KEYS["of_deepspeed"] if key in given}, DEEPSPEED)
    for key, value in given.items():
        if key not in _KEYS["of_deepspeed"] and key not in ("gpt_j_residual", "gpt_j_tied"):
            options.append(_option(key, value, given, world))
    return [*options, *(_flag(key, (value,)) for key, value in _DEFAULTS.items() if key not in given)]


def _flag(key: str, words: tuple[str, ...], name: str = "") -> Option:
    """A flag of Megatron-LM, spelled as in the file."""
    return Option(MEGATRON, name or _KEYS["names"].get(key, key.replace("_", "-")), words, spelled=key)


def _size(given: Mapping[str, Any], key: str) -> int:
    """A size of the file, 1 if it has none."""
    size = given.get(key)
    return max(size, 1) if isinstance(size, int) else 1


def _option(key: str, value: Any, given: Mapping[str, Any], world: int) -> Option:
    words = words_of(value)
    if key == "gradient_accumulation_steps" and isinstance(value, int):
        ranks = _size(given, "model_parallel_size") * _size(given, "pipe_parallel_size")
        batch = _size(given, "train_micro_batch_size_per_gpu") * value * max(world // ranks, 1)
        words = (str(given.get("train_batch_size", batch)),)
        return Option(MEGATRON, "global-batch-size", words, spelled=f"{key} {value}, in samples of a step")
    if key == "vocab_file" and given.get("tokenizer_type") in ("HFTokenizer", "SPMTokenizer"):
        return _flag(key, words, "tokenizer-model")
    if key == "attention_config" and {w for w in words if not w.isdecimal()} <= {"flash", "global"}:
        return _flag(key, (), "use-flash-attn")
    if key == "activation" and words == ("swiglu",) and "intermediate_size" not in given:
        return Option(MEGATRON, key, words, "its width follows from mlp_multiple_of; give intermediate_size")
    named = _KEYS["values"].get(key, {}).get(" ".join(words))
    if named:
        return _flag(key, tuple(named[1:]), named[0])
    return _flag(key, words)


def settle_neox(moved: Moved, table: Mapping[str, Any]) -> None:
    """Set what no flag of Megatron-LM says, and count GPT-NeoX's own defaults as such."""
    given = {plain(key): value for key, value in set_in(table).items()}
    residual = "no"
    if given.get("gpt_j_residual"):
        residual = "one_norm" if given.get("gpt_j_tied") else "two_norms"
    for key in [key for key in ("gpt_j_residual", "gpt_j_tied") if key in given]:
        moved.options += 1
        value = str(given[key]).lower()
        moved.carried.append(Line(key, value, f"model.parallel_residual = {residual}"))
        moved.sources["model.parallel_residual"] = f"{key} {value}"
    if "model.parallel_residual" in moved.ours or residual != "no":
        moved.ours["model.parallel_residual"] = (residual,)
        moved.sources.setdefault("model.parallel_residual", "GPT-NeoX's default")
    moved.defaults = [line for line in moved.defaults if "model.parallel_residual" not in line.here]
    own = [line for line in moved.carried if line.theirs in _DEFAULTS.keys() - given.keys()]
    moved.options -= len(_DEFAULTS.keys() - given.keys())
    moved.carried = [line for line in moved.carried if line not in own]
    moved.defaults += [Line(line.theirs, line.value, line.here, is_default=True) for line in own]
