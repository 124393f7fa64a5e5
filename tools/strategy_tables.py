"""Computes the tables of docs/choosing.md, which says which strategy to use when. They are predictions of the planner.

    python tools/strategy_tables.py [NAME ...] [--write]

Each table answers one question for one model. Rows differ in the strategy alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from megapar_models.build import StageBuilder, build_stages
from megapar_models.counts import WholeModel
from megapar_models.registry import FOR_OPTIONS, presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.choose import best, with_chunks
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import RankReport, fullest_rank
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.questions import axes_across_nodes
from megapar_tools.plan.simulate import simulate
from megapar_tools.plan.step_time import StepTime, step_time

from megapar.base.errors import ConfigError
from megapar.config.files import load
from megapar.config.options import Config
from megapar.launch.reporting import reported

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/choosing.md"
_GPU = "h100-80g"
_GIB = 2**30

Table = list[list[str]]
"""Rows of cells. The first has the names of the columns."""


@dataclass
class Arguments:
    """Print the tables of docs/choosing.md, or write them there."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Tables to compute; none means all of them."""
    write: bool = False
    """Write them into the page. Then read the sentences above those that have changed."""


class Planner:
    """Plans layouts of presets in bf16 with the kernels of a GPU. What layouts share is built once."""

    def __init__(self) -> None:
        self.parts = Parts(StageBuilder())

    def config(self, preset: str, gpus: int, flags: str) -> Config:
        """The validated config of a preset with pretrain.py's flags."""
        fixed = ["--config", preset, "--launch.device", "cuda", "--kernels.backend", "triton"]
        given = load([*fixed, "--train.precision", "bf16", *flags.split()], presets(), FOR_OPTIONS)
        return validate(given.config, gpus)

    def memory(self, config: Config) -> RankReport:
        return fullest_rank(config, self.parts)

    def in_chunks(self, config: Config) -> Config:
        """`config` with the number of chunks that parallel.ep_overlap_chunks 0 takes."""
        machine = hardware.load(_GPU)
        return best(with_chunks(config, "ep_overlap_chunks", 0), lambda of: step_time(of, self.parts, machine).seconds)

    def time(self, config: Config, machine: Hardware | None = None) -> StepTime:
        """The simulated step, by default on nodes of 8 H100s."""
        return step_time(config, self.parts, machine or hardware.load(_GPU), timeline=True)


# The tables


def states(planner: Planner) -> Table:
    """Bytes of weights, gradients and optimizer state on a GPU by ZeRO stage: the textbook's and ours."""
    rows = [["model", "GPUs", *(f"ZeRO-{stage}" for stage in range(4))]]
    for preset, name in (("llama2-7b", "7B"), ("llama3-70b", "70B"), ("llama3.1-405b", "405B")):
        for gpus in (8, 64):
            cells = []
            for stage in range(4):
                config = planner.config(preset, gpus, f"{_batch(gpus)} --parallel.dp {gpus} {_zero(stage)}")
                report = planner.memory(config)
                ours = report.weights + report.gradients + report.optimizer
                book = textbook_bytes(WholeModel(config.model).parameters(), stage, gpus)
                cells.append(f"{book / 1e9:,.1f} / {ours / 1e9:,.1f}")
            rows.append([name, str(gpus), *cells])
    return rows


def textbook_bytes(parameters: int, stage: int, ranks: int) -> float:
    """Bytes of a rank by Rajbhandari et al. (arXiv 1910.02054, section 5): gradients in 16 bits, Adam's state in 12."""
    weights = gradients = 2.0
    state = 12.0
    if stage >= 1:
        state /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    return parameters * (weights + gradients + state)


def needs(planner: Planner) -> Table:
    """What the fullest GPU holds in typical layouts, and the smallest GPU that has room for it."""
    rows = [["model", "GPUs", "layout", "weights", "gradients", "states", "activations", "all, GiB", "smallest GPU"]]
    for preset, name, gpus, layouts in _TYPICAL:
        for layout, flags in layouts:
            full = f"{_batch(1024)} --train.recompute full --parallel.dp 0 {flags}"
            report = planner.memory(planner.config(preset, gpus, full))
            parts = (report.weights, report.gradients, report.optimizer, report.activations, report.total)
            rows.append([name, f"{gpus:,}", layout, *map(_gib, parts), _smallest_gpu(report.total)])
    return rows


def narrow(planner: Planner) -> Table:
    """What a GPU holds with the optimizer's state in fewer bytes, and the smallest GPU that has room for it."""
    rows = [["model", "GPUs", "layout", "state", "bytes", "states", "all, GiB", "smallest GPU", "tokens/s/GPU"]]
    for preset, name, gpus, layout, flags in _NARROWED:
        for title, per_parameter, options in _STATES:
            config = planner.config(preset, gpus, f"{_batch(64, 8192)} {flags} {options}")
            report = planner.memory(config)
            cells = [_gib(report.optimizer), _gib(report.total), _smallest_gpu(report.total)]
            speed = f"{planner.time(config).tokens_per_second_per_gpu:,.0f}"
            rows.append([name, str(gpus), layout, title, per_parameter, *cells, speed])
    return rows


def sent(planner: Planner) -> Table:
    """GB that a GPU sends in a step by operation, and the time of the step on two networks."""
    operations = ("all_reduce", "reduce_scatter", "all_gather", "send", "all_to_all")
    titles = ["all-reduce", "reduce-scatter", "all-gather", "point to point", "all-to-all"]
    rows = [["strategy on 8 GPUs", *titles, "step in a node", "step across nodes"]]
    for preset, name, flags in _STRATEGIES:
        config = planner.config(preset, 8, f"{_batch(16)} {flags}")
        # The second rank has two neighbors in a pipeline.
        traffic = simulate(config, build_stages, planner.parts, 1, ranks_per_node=8).traffic.values()
        amounts = [sum(axis.sent.get(operation, 0) for axis in traffic) for operation in operations]
        seconds = [planner.time(config, hardware.load(_GPU, per_node)).seconds for per_node in (8, 1)]
        rows.append([name, *map(_gb, amounts), *(f"{value:.2f} s" for value in seconds)])
    return rows


def tensor_or_pipeline(planner: Planner) -> Table:
    """Tokens a second and GPU of 70B on 64 GPUs, a replica's 16 GPUs divided between tp and pp."""
    batches = (16, 64, 256, 1024)
    rows = [["tp x pp", "tp is", *(f"{batch // 4} micro-batches" for batch in batches), "GiB"]]
    columns = []
    fullest = []
    for tp, pp in _GRIDS:
        flags = f"--train.recompute full --parallel.dp 4 --parallel.tp {tp} --parallel.pp {pp}{_sequence(tp)}"
        configs = [planner.config("llama3-70b", 64, f"{_batch(batch)} {flags}") for batch in batches]
        columns.append([planner.time(config).tokens_per_second_per_gpu for config in configs])
        fullest.append(_gib(planner.memory(configs[-1]).total))
    bold = [_with_bold_best(column) for column in zip(*columns, strict=True)]
    for (tp, pp), cells, total in zip(_GRIDS, zip(*bold, strict=True), fullest, strict=True):
        span = "across nodes" if tp > 8 else "in a node"
        rows.append([f"{tp} x {pp}", span if tp > 1 else "-", *cells, total])
    return rows


def network(planner: Planner) -> Table:
    """Tokens a second and GPU of 70B on 64 GPUs, and the share of the step not computing, on three networks."""
    speeds = (400, 100, 25)
    rows = [["layout", "between nodes", *(f"{gbit} Gb/s a GPU" for gbit in speeds), "GiB"]]
    machine = hardware.load(_GPU)
    for name, flags in _NETWORKED:
        config = planner.config("llama3-70b", 64, f"{_batch(256)} --parallel.dp 0 {flags}")
        cells = []
        for gbit in speeds:
            # As in the files of machines, 90% of a link is reached.
            link = replace(machine.network, gb_per_second=0.9 * gbit / 8)
            time = planner.time(config, replace(machine, network=link))
            lost = 1 - sum(time.busy.values()) / time.seconds
            cells.append(f"{time.tokens_per_second_per_gpu:,.0f}, {lost:.0%}")
        crossing = ", ".join(axes_across_nodes(config, machine))
        rows.append([name, crossing, *cells, _gib_on_h100(planner.memory(config).total)])
    return rows


def recompute(planner: Planner) -> Table:
    """Memory and speed of each recomputation: 7B with dp 8, and 70B with tp, pp and dp."""
    rows = [["model", "train.recompute", "activations, GiB", "all, GiB", "tokens/s/GPU", "step"]]
    for preset, name, gpus, flags in _RECOMPUTED:
        for title, option in _RECOMPUTES:
            config = planner.config(preset, gpus, f"{_batch(64)} {flags} --train.recompute {option}")
            report = planner.memory(config)
            time = planner.time(config)
            speed = f"{time.tokens_per_second_per_gpu:,.0f}"
            rows.append([name, title, _gib(report.activations), _gib(report.total), speed, f"{time.seconds:.2f} s"])
    return rows


def context(planner: Planner) -> Table:
    """8B on samples of three lengths, each of a million tokens a step: tokens a second and GPU, and memory."""
    lengths = (8192, 32768, 131072)
    rows = [["8 GPUs", *(f"{length // 1024}k tokens" for length in lengths), "GiB at 128k"]]
    for name, per_node, flags in _CONTEXTS:
        cells = []
        total = 0
        for length in lengths:
            positions = f"--model.max_position_embeddings {lengths[-1]} --train.recompute full"
            config = planner.config("llama3-8b", 8, f"{_batch(2**20 // length, length)} {positions} {flags}")
            total = planner.memory(config).total
            time = planner.time(config, hardware.load(_GPU, per_node))
            cells.append(f"{time.tokens_per_second_per_gpu:,.0f}")
        rows.append([name, *cells, _gib_on_h100(total)])
    return rows


def experts(planner: Planner) -> Table:
    """A mixture of 128 experts on 64 GPUs, with its experts on more and more of them, without and with chunks."""
    columns = ["ep", "its ranks are", "GiB", "tokens/s/GPU", "waits for ep", "waits for gradients and weights"]
    rows = [[*columns, "best chunks", "tokens/s/GPU with them", "waits for ep"]]
    cases = [("1, ZeRO-3", "-", 1, 3)]
    cases += [(str(ep), "in a node" if ep <= 8 else "across nodes", ep, 1) for ep in (2, 4, 8, 16, 64)]
    for name, span, ep, stage in cases:
        flags = f"{_batch(512)} --train.recompute full --parallel.dp 64 --parallel.ep {ep} {_zero(stage)}"
        config = planner.config("qwen3-30b-a3b", 64, flags)
        time = planner.time(config)
        gradients = time.exposed.get("grad", 0.0) + time.exposed.get("expert_grad", 0.0)
        shares = [f"{waited / time.seconds:.0%}" for waited in (time.exposed.get("ep", 0.0), gradients)]
        total = _gib_on_h100(planner.memory(config).total)
        cells = [name, span, total, f"{time.tokens_per_second_per_gpu:,.0f}", *shares, "-", "-", "-"]
        if ep > 1:
            chunked = planner.in_chunks(config)
            time = planner.time(chunked)
            waited = f"{time.exposed['ep'] / time.seconds:.0%}"
            number = str(chunked.parallel.ep_overlap_chunks)
            cells[-3:] = [number, f"{time.tokens_per_second_per_gpu:,.0f}", waited]
        rows.append(cells)
    return rows


def schedules(planner: Planner) -> Table:
    """Idle share and tokens a second and GPU of 70B, tp 8 x pp 8, by schedule and micro-batches; memory of the most."""
    batches = (8, 16, 64)
    rows = [["schedule", "stages on a rank", *(f"{batch} micro-batches" for batch in batches), "GiB"]]
    for schedule, vpp in _SCHEDULES:
        cells = []
        total = 0
        for batch in batches:
            flags = f"--parallel.dp 1 --parallel.tp 8 --parallel.pp 8 --parallel.vpp {vpp}{_sequence(8)}"
            config = planner.config("llama3-70b", 64, f"{_batch(batch)} {flags} --parallel.schedule {schedule}")
            time = planner.time(config)
            total = planner.memory(config).total
            cells.append(f"{time.idle_share:.0%}, {time.tokens_per_second_per_gpu:,.0f}")
        rows.append([f"`{schedule}`", str(vpp), *cells, _gib_on_h100(total)])
    return rows


TABLES: dict[str, Callable[[Planner], Table]] = {
    "states": states,
    "needs": needs,
    "narrow": narrow,
    "sent": sent,
    "tensor_or_pipeline": tensor_or_pipeline,
    "network": network,
    "recompute": recompute,
    "context": context,
    "experts": experts,
    "schedules": schedules,
}


# The layouts in the rows

_TYPICAL = (
    (
        *("llama2-7b", "7B", 8),
        (
            ("dp 8", "--optimizer.zero_stage 0"),
            ("dp 8, ZeRO-1", "--optimizer.zero_stage 1"),
            ("dp 8, ZeRO-2", "--optimizer.zero_stage 2"),
            ("dp 8, ZeRO-3", "--optimizer.zero_stage 3"),
        ),
    ),
    (
        *("llama3-70b", "70B", 64),
        (
            ("dp 64, ZeRO-1", "--optimizer.zero_stage 1"),
            ("dp 64, ZeRO-3", "--optimizer.zero_stage 3"),
            ("tp 8, dp 8, ZeRO-1", "--parallel.tp 8 --parallel.sequence_parallel"),
            ("tp 8, dp 8, ZeRO-3", "--parallel.tp 8 --parallel.sequence_parallel --optimizer.zero_stage 3"),
            ("tp 8, pp 2, dp 4, ZeRO-1", "--parallel.tp 8 --parallel.sequence_parallel --parallel.pp 2"),
        ),
    ),
    (
        *("llama3.1-405b", "405B", 1024),
        (
            ("dp 1024, ZeRO-3", "--optimizer.zero_stage 3"),
            ("tp 8, dp 128, ZeRO-3", "--parallel.tp 8 --parallel.sequence_parallel --optimizer.zero_stage 3"),
            ("tp 8, pp 8, dp 16, ZeRO-1", "--parallel.tp 8 --parallel.sequence_parallel --parallel.pp 8"),
            ("tp 8, pp 16, dp 8, ZeRO-1", "--parallel.tp 8 --parallel.sequence_parallel --parallel.pp 16"),
        ),
    ),
)
_NARROWED = (
    ("llama3-8b", "8B", 1, "one GPU", ""),
    ("llama3-8b", "8B", 8, "dp 8, ZeRO-2", "--parallel.dp 8 --optimizer.zero_stage 2"),
    (
        *("qwen3-30b-a3b", "Qwen3-30B-A3B", 8, "dp 8, ep 8, ZeRO-1, `all_but_attention`"),
        "--parallel.dp 8 --parallel.ep 8 --train.recompute all_but_attention",
    ),
)
_STATES = (
    ("fp32", "18", ""),
    ("`moments bf16`", "14", "--optimizer.moments bf16"),
    (
        *("`moments bf16`, `main_weights remainder`", "12"),
        "--optimizer.moments bf16 --optimizer.main_weights remainder",
    ),
    ("`moments bf16`, `offload 1`", "6", "--optimizer.moments bf16 --optimizer.offload 1"),
)
_STRATEGIES = (
    ("llama2-7b", "dp 8, ZeRO-0", "--parallel.dp 8 --optimizer.zero_stage 0"),
    ("llama2-7b", "dp 8, ZeRO-1", "--parallel.dp 8 --optimizer.zero_stage 1"),
    ("llama2-7b", "dp 8, ZeRO-2", "--parallel.dp 8 --optimizer.zero_stage 2"),
    ("llama2-7b", "dp 8, ZeRO-3", "--parallel.dp 8 --optimizer.zero_stage 3"),
    ("llama2-7b", "tp 8", "--parallel.dp 1 --parallel.tp 8"),
    ("llama2-7b", "tp 8, sequence parallel", "--parallel.dp 1 --parallel.tp 8 --parallel.sequence_parallel"),
    ("llama2-7b", "pp 8", "--parallel.dp 1 --parallel.pp 8"),
    ("llama2-7b", "cp 8, gather", "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention gather"),
    ("llama2-7b", "cp 8, ring", "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ring"),
    ("llama2-7b", "cp 8, ulysses", "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ulysses"),
    ("mixtral-8x7b", "dp 8, ep 8 (Mixtral 8x7B)", "--parallel.dp 8 --parallel.ep 8"),
)
_GRIDS = ((16, 1), (8, 2), (4, 4), (2, 8), (1, 16))
_NETWORKED = (
    ("dp 64, ZeRO-3", "--train.recompute full --optimizer.zero_stage 3"),
    ("tp 8, dp 8, ZeRO-3", "--parallel.tp 8 --parallel.sequence_parallel --optimizer.zero_stage 3"),
    ("tp 8, pp 2, dp 4", "--parallel.tp 8 --parallel.sequence_parallel --parallel.pp 2"),
    (
        "tp 2, pp 2, dp 16, ZeRO-3, `v-half`",
        "--parallel.tp 2 --parallel.sequence_parallel --parallel.pp 2 --parallel.schedule v-half "
        "--optimizer.zero_stage 3",
    ),
    (
        "tp 4, pp 8, dp 2, `interleaved` x10",
        "--parallel.tp 4 --parallel.sequence_parallel --parallel.pp 8 --parallel.schedule interleaved "
        "--parallel.vpp 10",
    ),
    ("tp 4, pp 8, dp 2", "--parallel.tp 4 --parallel.sequence_parallel --parallel.pp 8"),
)
_RECOMPUTED = (
    ("llama2-7b", "7B, dp 8", 8, "--parallel.dp 8"),
    ("llama3-70b", "70B, tp 8, pp 2, dp 4", 64, "--parallel.tp 8 --parallel.sequence_parallel --parallel.pp 2"),
)
_RECOMPUTES = (
    ("none", "none"),
    ("selective", "selective"),
    ("full, every 2nd layer", "full --train.recompute_layers ::2"),
    ("full", "full"),
)
_CONTEXTS = (
    ("dp 8, ZeRO-1", 8, "--parallel.dp 8"),
    ("tp 8, sequence parallel", 8, "--parallel.dp 1 --parallel.tp 8 --parallel.sequence_parallel"),
    ("cp 8, gather", 8, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention gather"),
    ("cp 8, ring", 8, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ring"),
    ("cp 8, ulysses", 8, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ulysses"),
    ("cp 8 across nodes, gather", 1, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention gather"),
    ("cp 8 across nodes, ring", 1, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ring"),
    ("cp 8 across nodes, ulysses", 1, "--parallel.dp 1 --parallel.cp 8 --parallel.cp_attention ulysses"),
)
_SCHEDULES = (
    ("1f1b", 1),
    ("interleaved", 5),
    ("zb-h1", 1),
    ("zb-2p", 1),
    ("zb-interleaved", 5),
    ("zb-v", 2),
    ("v-half", 2),
    ("v-min", 2),
)


def _batch(samples: int, length: int = 4096) -> str:
    return f"--train.seq_length {length} --train.global_batch_size {samples}"


def _zero(stage: int) -> str:
    return f"--optimizer.zero_stage {stage}"


def _sequence(tp: int) -> str:
    return " --parallel.sequence_parallel" if tp > 1 else ""


# Cells


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.1f}"


def _gib_on_h100(nbytes: int) -> str:
    """GiB, with a word if a plan has no room for them on the GPU of the tables."""
    if nbytes > hardware.load(_GPU).usable_bytes:
        return f"{_gib(nbytes)}, too large"
    return _gib(nbytes)


def _gb(nbytes: int) -> str:
    """10^9 bytes. Sums of few numbers, such as those of the norm, are left out."""
    if nbytes < 5e6:
        return "-"
    return f"{nbytes / 1e9:,.2f}"


def _with_bold_best(values: Sequence[float]) -> list[str]:
    return [f"**{value:,.0f}**" if value == max(values) else f"{value:,.0f}" for value in values]


def _smallest_gpu(nbytes: int) -> str:
    """The machine with the least memory that a plan of so many bytes fits into."""
    machines = [hardware.load(name) for name in hardware.names()]
    fitting = [machine for machine in machines if nbytes <= machine.usable_bytes]
    if not fitting:
        return "none"
    return min(fitting, key=lambda machine: (machine.memory_gib, machine.name)).name


# The page


def in_markdown(table: Table) -> str:
    """The table as the page has it."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def page_with(made: dict[str, Table], page: str) -> str:
    """The page with new tables, by name. Raises ConfigError for a table without a mark."""
    for name, table in made.items():
        mark = f"<!-- table {name}, made by tools/strategy_tables.py -->"
        if mark not in page:
            raise ConfigError(f"{PAGE}: has no line {mark}; put it where the table should stand")
        before, _, behind = page.partition(mark)
        lines = behind.strip("\n").split("\n")
        while lines and lines[0].startswith("|"):
            del lines[0]
        after = "\n".join(lines).lstrip("\n")
        page = f"{before}{mark}\n\n{in_markdown(table)}\n\n{after}\n"
    return page


def compute(names: Iterable[str], planner: Planner) -> dict[str, Table]:
    """The tables of these names. Raises ConfigError for an unknown one."""
    found = {}
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"{name}: no such table; there are {', '.join(TABLES)}")
        found[name] = TABLES[name](planner)
    return found


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        made = compute(args.names or TABLES, Planner())
        for name, table in made.items():
            print(f"{name}\n{in_markdown(table)}\n")
        if args.write:
            PAGE.write_text(page_with(made, PAGE.read_text()))


if __name__ == "__main__":
    main()
