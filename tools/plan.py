"""Ranks the layouts of a model on a number of GPUs by predicted step time, before anything is rented.

    megapar plan --config llama3-70b --gpus 64 --gpu h100-80g [pretrain.py's flags] [the flags below]

The flags and files of pretrain.py describe the model, the batch and the given layout. Every other layout that can run
is tried too. Only --fix pins an option.
"""

import gc
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from megapar_models.build import StageBuilder
from megapar_models.counts import WholeModel
from megapar_models.layer_kind import HeadSizes
from megapar_models.registry import FOR_OPTIONS, find, kinds_of, named_configs, validate, validate_layout
from megapar_tools.migrate.hints import hint
from megapar_tools.plan import explain, hardware, memory
from megapar_tools.plan.choose import best, uncut, with_chunks
from megapar_tools.plan.choose_schedule import planned_schedule
from megapar_tools.plan.estimate import Estimator, Sizes
from megapar_tools.plan.memory import RankReport, fullest_rank
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.plan_report import (
    Budget,
    as_json,
    fp8_in_words,
    given_options,
    rejections,
    shown_rows,
    table,
    write,
)
from megapar_tools.plan.questions import Questions, gib, why_first
from megapar_tools.plan.search import Found, Row, search
from megapar_tools.plan.space import Candidate, Space, layout_of, searchable
from megapar_tools.plan.step_time import StepTime, step_time
from megapar_tools.plan.target import with_planned_vocabulary
from rich.console import Console
from rich.progress import track

from megapar.base.errors import ConfigError
from megapar.config.files import ASKS_FOR_COMPLETION, NEW, OLD, Resolved, load, to_toml
from megapar.config.messages import first_few, layout_in_words
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, flatten, option_types, unflatten
from megapar.launch.reporting import open_streams, reported
from megapar.system.atomic_files import write_json, write_text
from megapar.train.run_plan import check_schedule

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"
_OF_A_STEP = ("train.seq_length", "train.global_batch_size", "train.precision")
_SIZES = ("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads")

WORDS_FOR_GPUS = ("world", "world_size")  # as megapar simulate and the programs for jobs of other frameworks say


@dataclass
class Arguments:
    """Rank the layouts of a model. All other flags are those of pretrain.py, such as --config."""

    gpus: Annotated[int, tyro.conf.arg(aliases=[f"--{name}" for name in WORDS_FOR_GPUS])] = 8
    """Number of GPUs."""
    gpu: str = "h100-80g"
    """The machine: a name such as a100-80g, or a TOML file as tools/calibrate.py writes it."""
    gpus_per_node: int = 0
    """GPUs of a node; 0 means what the machine's file says."""
    fix: tuple[str, ...] = ()
    """Options that every layout must have, such as parallel.tp=4 train.recompute=full."""
    top: int = 10
    """Number of rows."""
    explain: int = 0
    """Number of a row to explain: the bytes of each rank, its timeline, and what each axis sends."""
    write: Path | None = None
    """TOML file to write, with the first row's layout, for pretrain.py's --config."""
    json: Path | None = None
    """JSON file to write, with all that is printed and more."""
    tokens: int = 0
    """Tokens to train for; 0 means those of train.steps."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for this tool, and those for pretrain.py."""
    own_names = {f.name for f in fields(Arguments)} | {*WORDS_FOR_GPUS}
    own: list[str] = []
    others: list[str] = []
    current = others
    for word in argv:
        if word.startswith("--") or word == "-h":
            name = word[2:].partition("=")[0].replace("-", "_")
            current = own if name in own_names or word in ("-h", "--help", ASKS_FOR_COMPLETION) else others
        current.append(word)
    return own, others


def fixed_values(words: Iterable[str], model: ModelConfig) -> dict[str, Any]:
    """The values of --fix by dotted path. Raises ConfigError for an unknown option, or a value of another type."""
    types = option_types(type(model))
    paths: list[str] = []
    flags: list[str] = []
    for word in words:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--fix {word}: expected an option and a value, such as parallel.tp=4")
        section, _, name = path.rpartition(".")
        if types.get(path) is bool and value.lower() in ("true", "false"):
            flags.append(f"--{path}" if value.lower() == "true" else f"--{section}.no_{name}")
        else:
            flags += [f"--{path}", *value.replace(",", " ").split()]
        paths.append(NEW if path == OLD else path)
    try:
        values = flatten(load(["--model.family", model.family, *flags], families=FOR_OPTIONS, hint=hint).config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--", "--fix ")) from None
    return {path: values[path] for path in paths}


def with_sizes(resolved: Resolved) -> Config:
    """The config with a size of the vocabulary. Raises ConfigError if no file and no flag names the model's sizes."""
    if all(resolved.sources[path] == "default" for path in _SIZES):
        raise ConfigError(
            f"{first_few(_SIZES)}: not given, so there is no model to plan; name one by --config, such as llama3-8b "
            "(megapar presets lists them), or set them"
        )
    return with_planned_vocabulary(resolved.config)


class ModelPlanner:
    """Plans layouts of the models of megapar_models. What layouts share is built once."""

    def __init__(self, machine: hardware.Hardware):
        self._machine = machine
        self.parts = Parts(StageBuilder())

    def memory(self, config: Config) -> RankReport:
        return fullest_rank(self._with_chunks(config), self.parts)

    def kept_by_a_layer(self, config: Config) -> tuple[float, float]:
        return memory.kept_by_a_layer(uncut(config), self.parts)

    def time(self, config: Config) -> StepTime:
        return step_time(with_kernels(self._with_chunks(config)), self.parts, self._machine)

    def timeline(self, config: Config) -> StepTime:
        """The time of the step with its timeline, by simulation of all micro-batches."""
        return step_time(with_kernels(self._with_chunks(config)), self.parts, self._machine, timeline=True)

    def simulated(self, config: Config) -> StepTime:
        """The time of the step, from simulations of few micro-batches with the collectives of ZeRO-2 and 3."""
        return step_time(with_kernels(self._with_chunks(config)), self.parts, self._machine, simulated=True)

    def _with_chunks(self, config: Config) -> Config:
        """With the numbers that a run takes for parallel.tp_overlap_chunks and ep_overlap_chunks 0, which --fix may ask
        for."""
        return best(config, lambda of: step_time(with_kernels(of), self.parts, self._machine).seconds)


def with_kernels(config: Config) -> Config:
    """The kernels that `auto` means on a GPU."""
    if config.kernels.backend != "auto":
        return config
    return replace(config, kernels=replace(config.kernels, backend="triton"))


def sizes_of(config: Config) -> tuple[Sizes, str, float]:
    """What an estimate must know of a model; its size in words; the share of its parameters in experts."""
    model = config.model
    whole = WholeModel(model)
    layers = 0.0
    experts = 0.0
    token_share = 0.0
    for name, (piece, spec) in whole.declarations.items():
        if not name.startswith("layers.") or piece.grows:  # a table by token id is looked up, and multiplies nothing
            continue
        count = torch.Size(piece.shape).numel()
        if spec.token_share == 1:
            layers += count
        else:
            experts += count
            token_share = float(spec.token_share)
    number = model.num_hidden_layers
    all_layers = model.all_layers  # those of multi-token prediction are counted as others are
    end = float(model.vocab_size * model.hidden_size)
    of_model = HeadSizes(model.num_attention_heads, model.num_key_value_heads, model.key_width, model.value_width)
    stage = find(model.family).stage
    heads = [stage.layer_kind(model, layer).head_sizes or of_model for layer in range(number)]
    # On a GPU the narrower of keys and values are padded to the width of the others.
    padded = [2 * max(h.head_dim, h.value_dim) / (h.head_dim + h.value_dim) for h in heads]
    attention = sum(map(operator.mul, padded, whole.products_of_layers(config.train.seq_length))) / number
    sizes = Sizes(
        *(layers / all_layers, experts / all_layers, token_share, end, model.tie_word_embeddings, attention),
        queries=sum(h.query_heads * h.head_dim for h in heads) / number,
        keys_values=sum(h.kv_heads * (h.head_dim + h.value_dim) for h in heads) / number,
        outputs=sum(h.query_heads * h.value_dim for h in heads) / number,
        key_width=max(h.head_dim for h in heads),
    )
    return sizes, whole.size_in_words(), experts / whole.parameters()


def own_layout(config: Config, world_size: int, parts: Parts) -> tuple[tuple[Config, Config] | None, str]:
    """The given config for `world_size` ranks, and the same with derived values; or why it cannot run."""
    given = replace(config, launch=replace(config.launch, nproc=0, device="cuda"), dry_run=True)
    other_dp = replace(given, parallel=replace(given.parallel, dp=0))
    problem = ""
    # A config for another number of GPUs is taken with as many replicas as there are.
    for candidate in (given, other_dp):
        try:
            derived = validate(candidate, world_size)
            check_schedule(derived)
            checked = planned_schedule(candidate, derived, parts)
            # With the user's own value again, so that the row of an equal layout is seen to be equal.
            return (replace(candidate, dry_run=config.dry_run), replace(checked, dry_run=config.dry_run)), problem
        except ConfigError as error:
            problem = str(error).splitlines()[0]
    return None, problem


def check_without_layout(config: Config, fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError for problems that no layout mends. What a search validates are layouts alone."""
    of_layouts = {*layout_of(config).options(), *(path for path in fixed if path.startswith("parallel."))}
    others = {path: value for path, value in fixed.items() if path not in of_layouts}
    validate(searchable(config, others, "cuda"), 1)


def make_space(
    config: Config, args: Arguments, machine: hardware.Hardware, fixed: Mapping[str, Any], given: Candidate
) -> Space:
    """The layouts to search. Raises ConfigError if none can run."""
    base = searchable(config, fixed, "cuda")
    check = partial(validate_layout, kinds=kinds_of(config.model))
    space = Space(base, args.gpus, machine.gpus_per_node, check, fixed, given)
    if space.grids:
        return space
    problem = next(iter(space.first_problems.values()), f"{args.gpus} GPUs have no grid of ranks with these values")
    if fixed:
        free = Space(searchable(config, {}, "cuda"), args.gpus, machine.gpus_per_node, check, {}, given)
        problem += f"; {_what_works(fixed, free)}"
    raise ConfigError(f"--gpus {args.gpus}{_fix_in_words(args.fix)}: no layout can run: {problem}")


def _fix_in_words(fix: Sequence[str]) -> str:
    if not fix:
        return ""
    return f" --fix {' '.join(fix)}"


def _what_works(fixed: Mapping[str, Any], free: Space) -> str:
    """The values of the fixed options that some layout without them has."""
    legal: dict[str, set[Any]] = {path: set() for path in fixed}
    for grid in free.grids:
        for path, value in grid.mildest.options().items():
            if path in legal:
                legal[path].add(value)
    words = [f"{path} may be {first_few(map(str, sorted(values)))}" for path, values in legal.items() if values]
    return ", ".join(words) or "leave --fix out"


def nothing_fits(found: Found, args: Arguments, machine: hardware.Hardware) -> ConfigError:
    """The error if no layout fits."""
    smallest = ""
    if found.too_large:
        row = found.too_large[0]
        smallest = f"; the smallest that was planned, {layout_in_flags(row)}, needs {gib(row.memory_bytes)}"
    return ConfigError(
        f"--gpus {args.gpus} --gpu {args.gpu}{_fix_in_words(args.fix)}: no layout fits into the "
        f"{gib(machine.usable_bytes)} that a plan may use of a {machine.name}{smallest}; use more GPUs, a GPU with "
        "more memory, or a shorter train.seq_length"
    )


def layout_in_flags(row: Row) -> str:
    """The options of a row that differ from the defaults."""
    defaults = flatten(Config())
    changed = {path: value for path, value in row.layout.options().items() if value != defaults[path]}
    return " ".join(f"{path}={value}" for path, value in changed.items())


def write_config(resolved: Resolved, row: Row, config: Config, path: Path) -> None:
    """Write the layout of a row, with all other options as they were given."""
    options = given_options(row, resolved.config)
    given = flatten(resolved.config)
    values = given | options
    chosen = [option for option, value in options.items() if value != given[option]]
    sources = dict(resolved.sources) | dict.fromkeys(chosen, "tools/plan.py")
    write_text(path, to_toml(Resolved(unflatten(values, type(resolved.config.model)), sources), config))


def main() -> int:
    open_streams()
    with reported():
        own, others = split(sys.argv[1:])
        args = tyro.cli(Arguments, args=own, description=__doc__, use_underscores=True)
        resolved = load(others, named_configs(CONFIGS), FOR_OPTIONS, hint)
        plan(args, resolved)
    return 0


def plan(args: Arguments, resolved: Resolved) -> None:
    """Search, print and write what the flags ask for."""
    if args.gpus < 1 or args.top < 1:
        raise ConfigError(f"--gpus {args.gpus} --top {args.top}: must be at least 1")
    machine = hardware.load(args.gpu, args.gpus_per_node)
    fixed = fixed_values(args.fix, resolved.config.model)
    config = with_sizes(resolved)
    check_without_layout(config, fixed)
    planner = ModelPlanner(machine)
    given, given_problem = own_layout(config, args.gpus, planner.parts)
    space = make_space(config, args, machine, fixed, layout_of(given[1] if given else config))
    mildest = space.check(space.grids[0].mildest)
    sizes, in_words, expert_share = sizes_of(mildest)
    # Without ep it would be 1, whatever is fixed.
    estimated = with_chunks(mildest, "ep_overlap_chunks", space.base.parallel.ep_overlap_chunks)
    console = Console(width=200)  # a table with fewer columns is narrower
    quiet = not sys.stderr.isatty()
    progress = partial(_progress, console=Console(stderr=True), quiet=quiet)
    found = search(
        space,
        Estimator(estimated, sizes, machine, planner.kept_by_a_layer),
        planner,
        machine,
        given,
        args.top,
        progress,
    )
    found.given_problem = given_problem
    if not found.rows:
        raise nothing_fits(found, args, machine)
    rows = shown_rows(found, args.top)
    answers = Questions(space.base, args.gpus, machine, planner, validate_layout).answers(in_words, expert_share, rows)
    why = why_first(found.rows)
    run = Budget(args.tokens or config.train.samples() * config.train.seq_length, args.gpus, machine)
    report = as_json(found, rows, space, config, run, answers, why)
    with console.capture() as text:
        write(console, [f"{in_words} on {args.gpus:,} x {machine.name}, {machine.gpus_per_node} a node"])
        write(console, [*_defaults_in_words(resolved), ""])
        write(console, [f"{answer.question}: {answer.answer}." for answer in answers])
        console.print()
        console.print(table(rows, found))
        write(console, fp8_in_words(rows, machine))
        write(console, ["", why, run.in_words(found.rows[0]), *rejections(found, space, machine)])
        if given_problem:
            shown = "is left out" if given is None else "is shown with as many replicas as there are"
            write(console, [f"the given layout {shown}, because of {given_problem}"])
        if args.explain:
            report["explained"] = explained(args.explain, rows, planner, machine, console)
    print(text.get(), end="")
    if args.json:
        write_json(args.json, report)
    if args.write:
        write_config(resolved, found.rows[0], found.rows[0].config, args.write)
        print(f"{args.write}: the first row, for --config")


def _defaults_in_words(resolved: Resolved) -> Iterable[str]:
    """A line about what decides the time of a step and nobody has given. A preset has none of it."""
    values = flatten(resolved.config)
    defaults = [f"--{path} {values[path]}" for path in _OF_A_STEP if resolved.sources[path] == "default"]
    if defaults:
        yield f"planned for {' '.join(defaults)}, by default: give those of your run"


def explained(
    number: int, rows: Sequence[Row], planner: ModelPlanner, machine: hardware.Hardware, console: Console
) -> dict[str, Any]:
    """Print the explanation of a row, and write its timeline. Returns what --json writes of it."""
    if not 1 <= number <= len(rows):
        raise ConfigError(f"--explain {number}: there are rows 1 to {len(rows)}")
    row = rows[number - 1]
    config = with_kernels(row.config)
    time = planner.timeline(row.config)
    reports = memory.reports(row.config, planner.parts)
    traffic = explain.traffic(config, planner.parts, machine, time)
    layers = explain.layer_times(config, planner.parts, machine)
    title = f"row {number}: {layout_in_words(config.parallel)}, {config.parallel.schedule}"
    files = explain.draw(time, number, title, Path())
    write(console, ["", f"row {number}: {layout_in_flags(row)}"])
    write(console, explain.seconds_in_words(time))
    write(console, explain.mtp_in_words(config, planner.parts, machine, time.seconds))
    console.print(explain.layer_table(layers, time.seconds))
    console.print(explain.bytes_by_rank(reports))
    console.print(explain.traffic_table(traffic))
    write(console, [str(path) for path in files])
    return explain.as_json(reports, traffic, layers, files)


def _progress(
    layouts: Iterable[Candidate], count: int, text: str, *, console: Console, quiet: bool
) -> Iterable[Candidate]:
    return track(layouts, description=text, total=count, console=console, transient=True, disable=quiet)


if __name__ == "__main__":
    # A search makes millions of small objects and hardly a circle of them, and a fifth of its time goes to looking.
    gc.disable()
    sys.exit(main())
