"""Plain words for what metrics.jsonl and events.jsonl call by keys: one place for pages, pictures and the terminal."""

from collections.abc import Callable, Mapping
from typing import Any

_METRICS = {
    "loss": "training loss",
    "validation_loss": "held-out loss",
    "test_loss": "test loss",
    "validation_accuracy": "held-out accuracy",
    "test_accuracy": "test accuracy",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens": "target tokens of a step",
    "consumed_samples": "samples so far",
    "step_seconds": "whole step",
    "data_seconds": "waiting for data",
    "tokens_per_second": "tokens a second",
    "tflops_per_device": "TFLOP/s of a device",
    "mfu": "MFU",
    "peak_memory_bytes": "peak memory",
    "comm_bytes": "all axes",
    "expert_load_max": "fullest expert",
    "loss_scale": "scale of the loss",
    "attention_load_max": "fullest cp rank",
    "attention_logit_max": "largest attention logit",
    "fp8_decibels_min": "noisiest product in FP8, dB",
    "predicted_step_seconds": "predicted time of a step",
    "measured_step_seconds": "measured time of a step",
    "predicted_idle_share": "predicted idle share",
}
_PARTS = {  # of keys such as comm_bytes/tp
    "comm_bytes": "over {}",
    "losses": "{} loss",
    "expert_load": "fullest expert of layer {}",
    "fp8_flushed_max": "{} flushed to zero in FP8, largest share",
}


def name_metric(name: str) -> str:
    """Return the name of a curve in words, such as "over tp" for comm_bytes/tp."""
    if name in _METRICS:
        return _METRICS[name]
    first, slash, rest = name.partition("/")
    if slash and first in _PARTS:
        return _PARTS[first].format(rest)
    if slash and first in _METRICS:
        return f"{_METRICS[first]}, {rest}"
    return name.replace("_", " ").replace("/", ", ")


def list_sizes(layout: Mapping[str, Any]) -> str:
    """Return the axes of a layout that are larger than 1, such as "tp 2 x pp 2"."""
    return " x ".join(f"{name} {size}" for name, size in layout.items() if type(size) is int and size > 1)


def count_ranks(world: object) -> str:
    """Return a number of ranks in words, "" if the number is not known."""
    return f"{world} rank{'' if world == 1 else 's'}" if type(world) is int else ""


def tell_event(found: Mapping[str, Any]) -> str:
    """Return an event of events.jsonl as a sentence. An event of a name that is not ours is listed key by key."""
    write = _SENTENCES.get(found["event"])
    if write is None:
        known = {name: value for name, value in found.items() if name not in ("time", "event")}
        return ", ".join([found["event"], *(f"{name} {value}" for name, value in known.items())])
    return write(found)


def tell_fault(found: Mapping[str, Any]) -> str:
    """Return where an error came from, and what it says."""
    places = [f"rank {found['rank']}"] if "rank" in found else []
    places += [f"on {found['host']}"] if found.get("host") else []
    where = " ".join(places)
    step = f"step {found['step']}" if "step" in found else ""
    during = f"in {found['phase']}" if found.get("phase") else ""
    begin = ", ".join(part for part in (where, " ".join(filter(None, (step, during)))) if part)
    return ": ".join(str(part) for part in (begin, found.get("class"), found.get("message")) if part)


def _start(found: Mapping[str, Any]) -> str:
    layout = found.get("layout") or {}
    who = count_ranks(found.get("world"))
    if who and list_sizes(layout):
        who += f" ({list_sizes(layout)})"
    step = found.get("step", 0)
    source = {
        "none": "from initial weights",
        "weights": "from weights of another checkpoint",
        "memory": f"from the snapshot of step {step} in memory",
        "local": f"from the checkpoint of step {step} on the local disks",
        "shared": f"from the checkpoint of step {step}",
    }.get(found.get("tier", ""), f"at step {step}")
    attempt, lost = found.get("attempt", 0), found.get("steps_lost", 0)
    begin = f"{'Start' if not attempt else f'Start number {attempt + 1}'} {source}"
    again = f"; {_steps(lost)} computed again" if lost else ""
    return f"{begin}{', with ' + who if who else ''}{again}."


def _steps(number: object) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _saved(found: Mapping[str, Any]) -> str:
    place = " on the local disks" if found.get("tier") == "local" else ""
    waited = f"; training waited {found['seconds']:.3g} s" if "seconds" in found else ""
    return f"Step {found.get('step', '?')} is saved{place}{waited}."


def _fault(found: Mapping[str, Any]) -> str:
    code = f" (exit code {found['exit_code']})" if "exit_code" in found else ""
    return f"Fault: {tell_fault(found)}{code}"


def _restart(found: Mapping[str, Any]) -> str:
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"Restart {found.get('attempt', '')} with {count_ranks(found.get('world')) or 'the ranks'}{why}"


def _exit(found: Mapping[str, Any]) -> str:
    why = f": {found['reason']}" if found.get("reason") else ""
    if found.get("code") == 0:
        return f"Done after step {found.get('step', '?')}{why}."
    return f"Ended after step {found.get('step', '?')} with exit code {found.get('code', '?')}{why}."


def _spike(found: Mapping[str, Any]) -> str:
    numbers = [
        f"{word} {found[key]:.4g}" for key, word in (("loss", "loss"), ("grad_norm", "gradient norm")) if key in found
    ]
    actions = {
        "skipped": "the step is left out",
        "rewinds": "the run goes back to a checkpoint",
        "none": "nothing is done",
    }
    action = actions.get(found.get("action", ""), "")
    return f"Spike in step {found.get('step', '?')}: {', '.join(numbers)}{'; ' + action if action else ''}."


def _straggler(found: Mapping[str, Any]) -> str:
    ratio = f"{found['ratio']:.2f} times as long" if "ratio" in found else "longer"
    host = f" on {found['host']}" if found.get("host") else ""
    who = f"Rank {found.get('rank', '?')}{host}"
    return f"{who} computes {ratio} as the median of its stage, at step {found.get('step', '?')}."


def _stall(found: Mapping[str, Any]) -> str:
    phase = f"; rank 0 is in {found['phase']}" if found.get("phase") else ""
    return f"No step for {found.get('seconds', 0):.0f} s after step {found.get('step', '?')}{phase}."


def _tier(found: Mapping[str, Any]) -> str:
    again = "again takes" if found["event"] == "tier_back" else "takes no"
    why = f": {found['reason']}" if found.get("reason") else "."
    return (
        f"{str(found.get('tier', 'a tier')).capitalize()} {again} snapshots from step {found.get('step', '?')} on{why}"
    )


def _save_failed(found: Mapping[str, Any]) -> str:
    why = str(found.get("reason") or "a checkpoint was not saved")
    return f"{why[:1].upper()}{why[1:]}."


def _disk(found: Mapping[str, Any]) -> str:
    free, total = (found.get(key, 0) / 2**30 for key in ("free_bytes", "total_bytes"))
    return f"The disk is nearly full: {free:.1f} of {total:.0f} GiB are free."


def _fp8(found: Mapping[str, Any]) -> str:
    what = found.get("what", "?")
    form, tensor = ("{:.1f} dB", "") if what == "decibels" else ("{:.2%} flushed to zero", f"{what} of ")
    change = ""
    if "first" in found and "now" in found:
        change = f": {form.format(found['now'])}, and {form.format(found['first'])} at the first watch"
    others = len(found.get("others", ()))
    more = f"; and in {others} other product{'' if others == 1 else 's'}" if others else ""
    return f"FP8 loses more in {tensor}{found.get('matrix', '?')}{change}{more}, at step {found.get('step', '?')}."


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start": _start,
    "saved": _saved,
    "fault": _fault,
    "restart": _restart,
    "exit": _exit,
    "spike": _spike,
    "straggler": _straggler,
    "stall": _stall,
    "save_failed": _save_failed,
    "tier_lost": _tier,
    "tier_back": _tier,
    "disk": _disk,
    "fp8": _fp8,
}
