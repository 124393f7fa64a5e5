"""megapar beside PyTorch's own ways to train and beside other packages, in one run.

All train the same Llama from the same weights on the same batches, in fp32, on one thread each. In the layouts moe and
moe_ep2 it is a Mixtral: its MLPs are mixtures of experts without a balancing loss. Each package has another such loss,
and all contenders must compute the same. In the layout cp2 each rank has a part of every sample's positions: megapar's
three forms of attention are there, and its tensor with sequence parallelism beside them. Measured are:

- Time: in each layout all contenders live in the same processes and take turns step by step. Every round reverses the
  order, so noise of the machine hits neighbors alike. A ratio is taken within a round; the table has the median over
  rounds and the range. CPU time is beside it: it does not count waiting, nor other programs.
- Limit: the time of the step's matrix products and attention alone (products.py), and each contender's share of this
  speed.
- Memory: each contender alone in fresh processes, the highest resident size above that of the process with torch, the
  contender's package, the process group and the weights to load.
- Bytes: what megapar sent in a step by axis, beside the formulas of `expected_traffic`. Those of experts follow from
  the experts chosen for the tokens of the step.
- Agreement: losses and gradient norms of every step against plain PyTorch in one process. If a contender computes
  something else, or bytes differ from the formulas, the run ends with exit code 70.

Peers without their packages are left out, with a line on how to install them.

Models of billions of weights in bf16 on one GPU, with MFU: gpu.py.
Kernels: kernels/run.py.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from megapar_models.build import stage_layers
from megapar_models.registry import find, validate
from torch import Tensor

from benchmarks.contenders import LAYOUTS, WITHOUT_ZERO, Layout, Megapar, Variant
from benchmarks.counting import memory, ratio
from benchmarks.harness import Case, Contender, Found, Output, Turns, on_ranks, progress, table
from benchmarks.peers import Llama, Peer, Plain, Result, Weights
from benchmarks.products import Products
from benchmarks.ranks import run_ranks
from benchmarks.traffic import expected_traffic
from megapar.base.errors import ConfigError
from megapar.config.derive import num_microbatches
from megapar.config.model_options import MoEConfig
from megapar.config.options import Config, KernelsConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.system import device

LayoutName = Literal["single", "dp2", "tp2", "tp2+sp", "pp2", "cp2", "compiled", "offload", "moe", "moe_ep2"]
WARMUP = 1  # steps: DTensor fills its caches, megapar learns when buckets are full, pipelining asks for shapes
# Relative, loose for the norm's sake: torch sums squares in fp32, which errs by 6e-4 in a matrix of 2 million elements
# on a CPU, and by as much changes the update after clipping.
TOLERANCES = {"loss": 1e-4, "grad_norm": 1e-2}


@dataclass(frozen=True)
class Options(Output):
    """Measure megapar against other ways to train, on this machine."""

    hidden: tuple[int, ...] = (256, 512)
    """Widths of the model; the MLP is 11/4 as wide."""
    layouts: tuple[LayoutName, ...] = ("single", "dp2", "tp2", "tp2+sp", "pp2")
    """single, compiled, offload and moe are one process; the others are two: data, tensor (with sequence), pipeline,
    context and expert parallel. compiled has kernels.compile beside torch's ops, offload has shares of optimizer state
    that are copied. moe and moe_ep2 train a mixture of experts."""
    peers: tuple[str, ...] = ()
    """Names of contenders, as the table spells them; empty: all that are installed. megapar itself always runs."""
    steps: int = 5
    """Timed steps of each contender, after one that warms up."""
    num_hidden_layers: int = 4
    """Transformer layers."""
    num_attention_heads: int = 0
    """Query heads; 0: one for each 64 of the width."""
    num_key_value_heads: int = 0
    """Key and value heads, an even number; 0: half as many as query heads."""
    vocab_size: int = 4096
    """Token ids."""
    seq_length: int = 256
    """Tokens of a sample."""
    num_experts: int = 8
    """Layouts moe and moe_ep2: experts of a layer, an even number."""
    num_experts_per_tok: int = 2
    """Layouts moe and moe_ep2: experts that each token is sent to."""
    moe_intermediate_size: int = 0
    """Layouts moe and moe_ep2: width of an expert; 0: the experts of a token together are as wide as the dense MLP."""
    global_batch_size: int = 8
    """Samples of a step over all processes."""
    micro_batch_size: int = 1
    """Samples of one forward pass."""


def first_table(hidden: int, layers: int) -> Options:
    """Return the shape of the first table of docs/performance.md, at another width and depth."""
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "global_batch_size": 16}
    return Options(hidden=(hidden,), num_hidden_layers=layers, micro_batch_size=2, **sizes)


def chosen_contenders(options: Options, layout: Layout, *, installed: bool = True) -> list[str]:
    """Names of the contenders to run in a layout, `Layout.base` first; or of those that lack their packages."""
    chosen = [name for name in layout.contenders if not options.peers or name in (layout.base, *options.peers)]
    return [name for name in chosen if layout.contenders[name][0].is_installed() == installed]


def missing_packages(options: Options) -> dict[str, list[str]]:
    """Names of the chosen contenders without their package, by package."""
    missing: dict[str, list[str]] = {}
    for layout in map(LAYOUTS.__getitem__, options.layouts):
        for name in chosen_contenders(options, layout, installed=False):
            missing.setdefault(layout.contenders[name][0].package, []).append(name)
    return missing


def make_config(options: Options, hidden: int, layout: Layout, variant: Variant) -> Config:
    """What is trained, derived values filled in, with megapar's balance of stages written out, for the peer as well.

    Raises ConfigError for a shape beyond some contender.
    """
    heads = options.num_attention_heads or hidden // 64
    kv_heads = options.num_key_value_heads or heads // 2
    if hidden % 256 and not (options.num_attention_heads and options.num_key_value_heads):
        raise ConfigError(
            f"--hidden {hidden} must be a multiple of 256, so that heads are 64 wide and DTensor can cut the "
            "key/value heads; or give --num_attention_heads and --num_key_value_heads"
        )
    if kv_heads % 2:
        raise ConfigError(
            f"--num_key_value_heads {kv_heads} must be even: DTensor cannot share key/value heads over tp"
        )
    if layout.experts and options.num_experts % 2:
        raise ConfigError(f"--num_experts {options.num_experts} must be even: two ranks hold as many experts each")
    mlp = hidden * 11 // 4
    options_of_model: dict[str, Any] = {"family": "llama"}
    if layout.experts:
        # Nothing balances their load: each package has a balancing loss of its own, and all must train the same.
        top_k = options.num_experts_per_tok
        width = options.moe_intermediate_size or mlp // top_k
        moe = MoEConfig(options.num_experts, top_k, width, balance="none")
        options_of_model = {"family": "mixtral", "moe": moe}
    # At higher rates routers without a balance learn within a few steps to send most tokens to the same experts, which
    # a loss prevents in practice. Then the layouts would measure little but that.
    lr = 1e-5 if layout.experts else 1e-3
    left = dict(variant)
    given: dict[type, dict[str, Any]] = {}
    for kind in (ParallelConfig, OptimizerConfig, KernelsConfig):  # in this order: two of them have a schedule
        given[kind] = {field.name: left.pop(field.name) for field in fields(kind) if field.name in left}
    config = Config(
        model=find(options_of_model["family"]).options(
            **options_of_model,
            hidden_size=hidden,
            num_hidden_layers=options.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            vocab_size=options.vocab_size,
        ),
        parallel=replace(layout.parallel, **given[ParallelConfig]),
        train=TrainConfig(
            global_batch_size=options.global_batch_size,
            micro_batch_size=options.micro_batch_size,
            seq_length=options.seq_length,
        ),
        optimizer=OptimizerConfig(lr=lr, schedule="constant", **given[OptimizerConfig]),
        kernels=KernelsConfig(**given[KernelsConfig]),
    )
    stages = tuple(len(layers) for layers in stage_layers(validate(config, layout.world)))
    return validate(replace(config, parallel=replace(config.parallel, partition=stages)), layout.world)


def make_weights(config: Config) -> Weights:
    """Logical tensors: matrices N(0, 0.02), norms near 1 but not 1, so a norm left out shows."""
    with torch.device("meta"):
        shapes = Llama(config.model, 1, range(config.model.num_hidden_layers)).state_dict()
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(x.shape, generator=generator) * 0.02 + (x.ndim == 1) for name, x in shapes.items()}


def make_batches(config: Config, count: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) [samples, s] of each step; low ids are likelier, so there is something to learn."""
    generator = torch.Generator().manual_seed(2)
    shape = config.train.global_batch_size, config.train.seq_length + 1
    samples = [(config.model.vocab_size * torch.rand(shape, generator=generator) ** 3).long() for _ in range(count)]
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in samples]


def build_contender(options: Options, hidden: int, layout: Layout, name: str, target: torch.device) -> Peer:
    kind, variant = layout.contenders[name]
    config = make_config(options, hidden, layout, variant)
    kind.load()
    return kind(config, make_weights(config), target)


def make_case(options: Options, hidden: int, layout: Layout, names: Sequence[str], target: torch.device) -> Case:
    """Make the contenders of a rank. A turn is a step."""
    peers = {name: build_contender(options, hidden, layout, name, target) for name in names}
    batches = make_batches(make_config(options, hidden, layout, WITHOUT_ZERO), WARMUP + options.steps)
    works = {name: steps_of(peer, batches) for name, peer in peers.items()}
    return Case(works, options.steps, WARMUP, lambda name, result: noted(peers[name], result), world=layout.world)


def steps_of(peer: Peer, batches: Sequence[tuple[Tensor, Tensor]]) -> Contender:
    """Return a function that trains on the next of the batches."""
    todo = iter(batches)
    return lambda: peer.step(*next(todo))


def noted(peer: Peer, result: Result) -> dict[str, Any]:
    """What the newest step computed. Of megapar also the bytes sent until now, by axis, and counts of experts."""
    if not isinstance(peer, Megapar):
        return {"result": result}
    return {"result": result, "sent": peer.ctx.traffic(), "expert_counts": peer.expert_counts()}


def measure_memory(options: Options, hidden: int, layout: Layout, name: str, target: torch.device) -> Any:
    """Bytes: the peak after two steps, and how much of it was not held before the contender was built."""
    kind, variant = layout.contenders[name]
    config = make_config(options, hidden, layout, variant)
    weights = make_weights(config)
    kind.load()

    def train() -> None:
        contender = kind(config, weights, target)
        for tokens_bs, targets_bs in make_batches(config, 2):
            contender.step(tokens_bs.to(target), targets_bs.to(target))

    return memory(train)


def run_layout(options: Options, hidden: int, layout_name: str, reference: Sequence[Result]) -> dict[str, Any]:
    """Everything but memory about one layout at one width, as it goes into the JSON file."""
    layout = LAYOUTS[layout_name]
    names = chosen_contenders(options, layout)
    ranks = on_ranks(layout.world, partial(make_case, options, hidden, layout, names))
    found = ranks[0]  # ranks wait for each other around a step, so the clock of one of them speaks for all
    tokens = options.global_batch_size * options.seq_length
    cpu = {name: cpu_seconds(ranks, name) for name in names}
    contenders = []
    for name in names:
        kind, variant = layout.contenders[name]
        seconds = found[name].wall
        contender = {
            "name": name,
            "step_seconds": seconds,
            "tokens_per_second": tokens / statistics.median(seconds),
            "megapar_is_faster": ratio(seconds, found[layout.base].wall),
            "cpu_seconds": [rank[name].cpu for rank in ranks],
            "cpu_time_over_megapar": cpu[name] / cpu[layout.base],
            "errors": {},
        }
        if Products.name in names:
            contender["share_of_products"] = ratio(found[Products.name].wall, seconds)
        if kind is not Products:
            results = [note["result"] for note in found[name].notes]
            contender["errors"] = {what: largest_error(results, reference, what) for what in TOLERANCES}
        if kind is Megapar:
            config = make_config(options, hidden, layout, variant)
            contender |= exchanged(config, [rank[name].notes for rank in ranks])
        contenders.append(contender)
    return {"hidden": hidden, "layout": layout_name, "contenders": contenders}


def exchanged(config: Config, ranks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What a contender of megapar sent in the last step, by rank, and the formulas. `ranks` has the notes of each.

    The bytes of experts follow from where tokens went in that step.
    """
    chosen = [notes[-1]["expert_counts"] for notes in ranks]
    sent = []
    for *_, before, last in ranks:
        sent.append({axis: total - before["sent"].get(axis, 0) for axis, total in last["sent"].items()})
    found: dict[str, Any] = {"sent": sent}
    stages = config.parallel.pp > 1
    found["formula"] = [expected_traffic(config, rank if stages else 0, chosen, rank) for rank in range(len(ranks))]
    if config.model.num_experts:
        found["expert_counts"] = chosen
    return found


def cpu_seconds(ranks: Sequence[dict[str, Turns]], name: str) -> float:
    """Median over steps of the CPU time of all ranks: what is left of a step when nobody waits."""
    return statistics.median(map(sum, zip(*(rank[name].cpu for rank in ranks), strict=True)))


def largest_error(results: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], field: str) -> float:
    """Return the largest relative error of `field`, loss or gradient norm, over all steps."""
    place = Result._fields.index(field)
    return max(abs(r[place] - e[place]) / abs(e[place]) for r, e in zip(results, reference, strict=True))


def measure_reference(options: Options, hidden: int, layout: Layout, target: torch.device) -> Any:
    """Results for every step of plain PyTorch in one process, with the model of `layout`."""
    config = make_config(options, hidden, replace(layout, parallel=ParallelConfig(dp=1)), WITHOUT_ZERO)
    plain = Plain(config, make_weights(config), target)
    batches = make_batches(config, WARMUP + options.steps)
    return [plain.step(tokens_bs.to(target), targets_bs.to(target)) for tokens_bs, targets_bs in batches]


def problems(run: dict[str, Any]) -> list[str]:
    """What makes a layout's numbers worthless: other results than plain PyTorch's, other bytes than the formulas'."""
    found = []
    for contender in run["contenders"]:
        name = f"hidden {run['hidden']}, {run['layout']}, {contender['name']}"
        for what, error in contender["errors"].items():
            if not error <= TOLERANCES[what]:
                found.append(f"{name}: {what} differs by {error:.1e}, above {TOLERANCES[what]}: another computation")
        if contender.get("sent") != contender.get("formula"):
            found.append(f"{name}: bytes by axis {contender['sent']} are not the formulas' {contender['formula']}")
    return found


def check_options(options: Options) -> None:
    """Raise ConfigError for what cannot be measured, before anything is."""
    for layout in map(LAYOUTS.__getitem__, options.layouts):
        for hidden in options.hidden:
            for name in chosen_contenders(options, layout):
                kind, variant = layout.contenders[name]
                config = make_config(options, hidden, layout, variant)
                if num_microbatches(config) < kind.least_micro_batches:
                    size = f"--global_batch_size {options.global_batch_size}"
                    raise ConfigError(f"{size}: {name} needs at least {kind.least_micro_batches} micro-batches")
    known = {name: kind for layout in options.layouts for name, (kind, _) in LAYOUTS[layout].contenders.items()}
    for peer in options.peers:
        if peer not in known:
            raise ConfigError(f"--peers {peer!r}: --layouts {' '.join(options.layouts)} have {', '.join(known)}")
    missing = missing_packages(options)
    if missing and options.peers:
        package, names = next(iter(missing.items()))
        raise ConfigError(f"--peers {names[0]!r} needs a package: pip install {package}")


def run_whole(
    options: Options, hidden: int, name: str, references: dict[tuple[int, bool], list[Result]]
) -> dict[str, Any]:
    """Everything about one layout at one width.

    `references` keeps what plain PyTorch computed, by width, for the dense model and for the mixture.
    """
    layout = LAYOUTS[name]
    key = (hidden, layout.experts)
    if key not in references:
        body = partial(measure_reference, options, hidden, layout)
        references[key] = [Result(*r) for r in run_ranks(1, "cpu", body)[0]]
    run = run_layout(options, hidden, name, references[key])
    for contender in run["contenders"]:
        body = partial(measure_memory, options, hidden, layout, contender["name"])
        memory = run_ranks(layout.world, "cpu", body)
        contender["peak_bytes"] = [peak for peak, _ in memory]
        contender["peak_bytes_above_start"] = [taken for _, taken in memory]
    return run


def rows_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every contender with the width and the layout of its run."""
    return [{"hidden": run["hidden"], "layout": run["layout"], **each} for run in runs for each in run["contenders"]]


def traffic_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bytes that rank 0 of megapar sends in a step, beside the formulas'."""
    rows = []
    for run in rows_of(runs):
        for axis, sent in run.get("sent", [{}])[0].items():
            of = {"hidden": run["hidden"], "layout": run["layout"], "name": run["name"], "axis": axis}
            rows.append({**of, "sent": sent, "formula": run["formula"][0].get(axis)})
    return rows


def measure(options: Options) -> Found:
    """Measure each layout at each width. Other computations and other bytes than the formulas' are problems."""
    check_options(options)
    device.prepare(torch.device("cpu"), threads=1, deterministic=False)  # ranks are forked from here
    for package, names in missing_packages(options).items():
        print(f"Left out: {', '.join(names)}. To measure them: pip install {package}", file=sys.stderr)
    references: dict[tuple[int, bool], list[Result]] = {}
    runs = [run_whole(options, *case, references) for case in progress(product(options.hidden, options.layouts))]
    found = [problem for run in runs for problem in problems(run)]
    shown = [{name: row[name] for name in row if name != "peak_bytes"} for row in rows_of(runs)]
    title = "megapar's speed over that of each contender, whose losses and norms differ from plain PyTorch's"
    return Found({"runs": runs}, [table(shown, title), table(traffic_of(runs))], found)
