"""The delta rule in chunks, forward and backward, beside transformers and flash-linear-attention, in one process of one
thread; and over context-parallel ranks by passing states, beside exchanging positions for heads.

All contenders take turns on the same tensors. Each is compared with the rule in fp64. transformers and
flash-linear-attention are those of a CPU: their chunked references in torch. Rows of ranks have the bytes that a rank
sends and keeps; all ranks share this machine's cores and memory. CPU time counts no waiting.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megapar_kernels.delta_rule import delta_rule
from torch import Tensor

from benchmarks.counting import ratio, spread
from benchmarks.harness import Case, Found, Output, on_ranks
from benchmarks.ranks import BenchmarkError
from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.context_parallel import deal
from megapar.context_parallel.delta_rule import DeltaRule
from megapar.declare import context
from megapar.declare.batch import MicroBatch

HEADS, WIDTH = 16, 128
# How far outputs and gradients may be from the rule in fp64, relative to their norms.
TOLERANCE = 1e-5

Rule = Callable[..., Tensor]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Options(Output):
    """Measure the delta rule beside its peers."""

    lengths: tuple[int, ...] = (1_024, 4_096)
    """Tokens of the sample in one process."""
    ranks: tuple[int, ...] = (2, 4)
    """Context-parallel ranks."""
    lengths_over_ranks: tuple[int, ...] = (1_024, 8_192)
    """Tokens of the sample that ranks share."""
    decays: tuple[Literal["head", "channel"], ...] = ("head", "channel")
    """A decay for each head, as Qwen3.5 has them, or for each channel of a key, as Kimi Linear has them."""
    flash_linear_attention: Path | None = None
    """A folder with the sources of flash-linear-attention, whose references need no Triton."""
    rounds: int = 5
    """Rounds that count, after one that warms up."""


def inputs(length: int, decays: str, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return q, k, v [s, 1, n, d], g [s, 1, n, 1 or d] and beta [s, 1, n], q and k of length 1."""
    torch.manual_seed(length)
    size = (length, 1, HEADS)
    q, k = (F.normalize(torch.randn(*size, WIDTH, dtype=torch.float64), dim=-1) for _ in range(2))
    g = -0.1 * F.softplus(torch.randn(*size, WIDTH if decays == "channel" else 1, dtype=torch.float64))
    given = (q, k, torch.randn(*size, WIDTH).double(), g, torch.rand(size, dtype=torch.float64))
    return tuple(x.to(dtype).requires_grad_() for x in given)


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the rule, [s, 1, n, e]."""
    return delta_rule(q, k, v, g, beta)[0]


def of_transformers(decays: str) -> Rule:
    """Return the chunked reference of transformers for such decays."""
    name, function = {
        "head": ("qwen3_5.modeling_qwen3_5", "torch_chunk_gated_delta_rule"),
        "channel": ("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    }[decays]
    theirs = getattr(importlib.import_module(f"transformers.models.{name}"), function)
    return _batch_first(lambda q, *others, **options: theirs(WIDTH**0.5 * q, *others, **options)[0], decays)


def of_flash_linear_attention(folder: Path, decays: str) -> Rule:
    """Return the chunked reference in torch of flash-linear-attention. `folder` has its sources."""
    name, function = {
        "head": ("gated_delta_rule", "naive_chunk_gated_delta_rule"),
        "channel": ("kda", "naive_chunk_kda"),
    }[decays]
    # Its own file alone: the package compiles kernels for a GPU when it is imported.
    spec = importlib.util.spec_from_file_location(f"fla_{name}", folder / "fla" / "ops" / name / "naive.py")
    if spec is None or spec.loader is None:
        raise BenchmarkError(f"--flash_linear_attention {folder}: has no fla/ops/{name}/naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = getattr(module, function)
    return _batch_first(lambda *given, **options: theirs(*given, scale=1.0, **options)[0], decays)


def _batch_first(theirs: Rule, decays: str) -> Rule:
    """Return a function of tensors [b, s, ...] with a decay [b, s, n] for each head as one like `ours`."""

    def rule(*given: Tensor) -> Tensor:
        q, k, v, g, beta = (x.transpose(0, 1) for x in given)
        return theirs(q, k, v, g=g.squeeze(-1) if decays == "head" else g, beta=beta).transpose(0, 1)

    return rule


def with_gradients(rule: Rule, given: Tensors) -> Tensors:
    """Return the outputs, and the gradients of all inputs for a gradient of 1."""
    o = rule(*given)
    return (o.detach(), *torch.autograd.grad(o, given, torch.ones_like(o)))


def distance(found: Tensors, expected: Tensors) -> float:
    """Return the largest distance of a tensor from its fp64 counterpart, relative to its norm."""
    pairs = zip(found, expected, strict=True)
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)


def kept_bytes(rule: Rule, given: Tensors) -> int:
    """Return the bytes that autograd keeps for backward, inputs among them."""
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        o = rule(*given)
    del o
    return sum(kept.values())


def in_one_process(options: Options) -> list[dict[str, Any]]:
    """Return a row for each peer: its time over megapar's, kept bytes, and both distances from fp64."""
    rows = []
    for decays in options.decays:
        rules: dict[str, Rule] = {"megapar": ours, "transformers": of_transformers(decays)}
        if options.flash_linear_attention:
            rules["flash-linear-attention"] = of_flash_linear_attention(options.flash_linear_attention, decays)
        for length in options.lengths:
            given = inputs(length, decays)
            exact = with_gradients(ours, tuple(x.detach().double().requires_grad_() for x in given))
            errors = {name: distance(with_gradients(rule, given), exact) for name, rule in rules.items()}
            for name, error in errors.items():
                if not error < TOLERANCE:
                    raise BenchmarkError(f"{name}: {error:.1e} from the rule in fp64, {length} tokens")
            contenders = {name: partial(with_gradients, rule, given) for name, rule in rules.items()}
            turns = Case(contenders, options.rounds, note=lambda name, result: None).measure()
            for name, rule in list(rules.items())[1:]:
                mine, theirs = turns["megapar"], turns[name]
                figures = {"speed": ratio(theirs.wall, mine.wall), "cpu": ratio(theirs.cpu, mine.cpu)}
                seconds = {"seconds": spread(mine.wall), "their_seconds": spread(theirs.wall)}
                kept = {"kept_bytes": kept_bytes(ours, given), "their_kept_bytes": kept_bytes(rule, given)}
                far = {"from_fp64": errors["megapar"], "theirs_from_fp64": errors[name]}
                facts = {"a decay for each": decays, "tokens": length, "beside": name}
                rows.append({**facts, **figures, **seconds, **kept, **far})
    return rows


def _of_rank(axis: Axis, form: str, length: int, decays: str) -> Callable[[], tuple[int, int]]:
    """Return what a rank does in a turn: forward and backward; it returns the bytes sent, and those kept."""
    own = torch.tensor(deal.positions(length, axis.size, axis.rank))
    given = tuple(x.detach()[own].requires_grad_() for x in inputs(length, decays))
    rule = DeltaRule(axis, form, range(HEADS), WIDTH, WIDTH, torch.device("cpu"))
    tokens_bs = torch.zeros(1, length, dtype=torch.int64)
    whole = MicroBatch.of_samples(tokens_bs, tokens_bs, torch.ones(1, length), torch.zeros(1, dtype=torch.int64))
    batch = whole.columns(own)

    def outputs(*given: Tensor) -> Tensor:
        o: Tensor = rule(*given, batch)
        return o

    kept = kept_bytes(outputs, given)

    def work() -> tuple[int, int]:
        before = axis.traffic.total()
        with_gradients(outputs, given)
        return axis.traffic.total() - before, kept

    return work


def _case(cp: int, length: int, decays: str, rounds: int, device: torch.device) -> Case:
    axis = context.create(Grid(cp=cp), device=device).cp
    forms = {"states": "gather", "heads": "ulysses"}
    return Case({name: _of_rank(axis, form, length, decays) for name, form in forms.items()}, rounds, world=cp)


def over_ranks(options: Options) -> list[dict[str, Any]]:
    """Return a row for each number of ranks and length: the time of heads over that of states, and bytes of both."""
    rows = []
    for decays in options.decays:
        for cp in options.ranks:
            for length in options.lengths_over_ranks:
                first = on_ranks(cp, partial(_case, cp, length, decays, options.rounds))[0]
                states, heads = first["states"], first["heads"]
                facts = {"a decay for each": decays, "ranks": cp, "tokens": length}
                figures = {"speed": ratio(heads.wall, states.wall), "cpu": ratio(heads.cpu, states.cpu)}
                row = {**facts, **figures, "seconds": spread(states.wall)}
                for name, turns in (("", states), ("_by_heads", heads)):
                    row[f"sent_bytes{name}"], row[f"kept_bytes{name}"] = turns.notes[-1]
                rows.append(row)
    return rows


def measure(options: Options) -> Found:
    """Time the rule beside its peers, and over ranks."""
    torch.set_num_threads(1)
    tables: Mapping[str, Any] = {"rules": in_one_process(options), "over_ranks": over_ranks(options)}
    return Found(tables)
