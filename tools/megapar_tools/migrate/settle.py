"""Settles what megapar would refuse in a job carried over, where one setting computes the same, and names it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megapar_tools.migrate.carry import Line, Moved
from megapar_tools.migrate.job import shown

Values = dict[str, Any]
Settle = Callable[[Moved, Values], None]


def settle(moved: Moved, values: Values) -> None:
    """Change `values`, the options by dotted path, and what `moved` says of them."""
    for one in (_evaluation, _warmup, _micro_batch, _gathers, _rounds, _preferences):
        one(moved, values)


def _set(moved: Moved, values: Values, option: str, value: Any, why: str) -> None:
    """Set an option to `value` in place of what the job's flag became, and say why in the flag's line."""
    was = values[option]
    values[option] = value
    words = str(value).lower() if isinstance(value, bool) else shown(value) if isinstance(value, float) else str(value)
    moved.ours[option] = (words,)
    source = moved.sources.get(option, "")
    moved.sources[option] = f"{source}; {why}".lstrip("; ")
    here = f"{option} = {words} in place of {was}: {why}"
    for number, line in enumerate(moved.carried):
        if f"{line.theirs} {line.value}".rstrip() == source:
            moved.carried[number] = replace(line, here=here)
            return
    moved.defaults.append(Line(source.partition("'s default ")[2] or option, "", here, is_default=True))


def _drop(moved: Moved, values: Values, option: str, value: Any, why: str) -> None:
    """Leave an option at `value`, its default, and move the flag that became it to the list of what was left."""
    values[option] = value
    moved.ours.pop(option, None)
    source = moved.sources.pop(option, "")
    lines = [line for line in moved.carried if f"{line.theirs} {line.value}".rstrip() == source]
    moved.carried = [line for line in moved.carried if line not in lines]
    moved.left += [replace(line, here=why, todo=f"set {option}") for line in lines]


def _evaluation(moved: Moved, values: Values) -> None:
    if values["train.eval_every"] and not values["data.validation"] and not values["data.split"]:
        _drop(moved, values, "train.eval_every", 0, "no data are known that would be evaluated; name data.validation")


def _warmup(moved: Moved, values: Values) -> None:
    """A run that ends inside its warm-up has the rates of a shorter one with a lower peak."""
    warmup, steps, peak = (values[f"{o}"] for o in ("optimizer.warmup_steps", "train.steps", "optimizer.lr"))
    if not isinstance(warmup, int) or warmup <= steps:
        return
    why = f"the run ends at step {steps:,} of {warmup:,} of warm-up, with these rates"
    _set(moved, values, "optimizer.lr", float(f"{peak * steps / warmup:.12g}"), why)
    _set(moved, values, "optimizer.warmup_steps", steps, why)
    if values["optimizer.min_lr"]:
        _set(moved, values, "optimizer.min_lr", 0.0, why)
    if values["optimizer.decay_steps"]:
        _set(moved, values, "optimizer.decay_steps", 0, why)


def _micro_batch(moved: Moved, values: Values) -> None:
    micro, batch = values["train.micro_batch_size"], values["train.global_batch_size"]
    if micro > batch > 0:
        _set(moved, values, "train.micro_batch_size", batch, f"a step has {batch} samples")


def _gathers(moved: Moved, values: Values) -> None:
    if values["optimizer.overlap_param_gather"] and values["optimizer.zero_stage"] in (0, 3):
        why = "stage 3 overlaps by itself" if values["optimizer.zero_stage"] else "without ZeRO nothing is gathered"
        _set(moved, values, "optimizer.overlap_param_gather", False, why)


def _rounds(moved: Moved, values: Values) -> None:
    if values["checkpoint.keep_every"] and not values["checkpoint.keep_last"]:
        values["checkpoint.keep_last"] = 1
        moved.ours["checkpoint.keep_last"] = ("1",)
        moved.sources["checkpoint.keep_last"] = "beside checkpoint.keep_every"


def _preferences(moved: Moved, values: Values) -> None:
    """A sample of trl's DPO is one answer of a pair, and ours are both, each apart."""
    if values["train.objective"] not in ("dpo", "dpo_norm", "ipo"):
        return
    if values["data.documents"] != "apart":
        _set(moved, values, "data.documents", "apart", "the two answers of a pair do not see each other")
    if "train.seq_length" in moved.ours:
        length = 2 * values["train.seq_length"]
        _set(moved, values, "train.seq_length", length, "a sample holds both answers of a pair")
    if values["adapter.rank"]:
        _set(moved, values, "train.references", "adapters_off", "trl's reference is the base")
