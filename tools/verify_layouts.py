"""Compares layouts with one process: every gradient and every updated weight, beside the noise of rounding.

    megapar verify_layouts --config C.toml --layouts tp2 pp2,dp2 cp2,ep2 [--section.key value ...]

It takes pretrain.py's own flags and files. It runs each layout on CPU ranks of this machine, with a small model of the
same kind. Exit code 0: all layouts compute what one process computes; 5: some does not.
"""

import importlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from megapar_models.build import build_stages
from megapar_models.registry import FOR_OPTIONS, kinds_of, named_configs, num_targets, validate
from megapar_tools.migrate.hints import hint
from megapar_tools.verify import layout_words, small
from megapar_tools.verify.compare import Difference, compare, rounding
from megapar_tools.verify.layout_words import NamedLayout
from megapar_tools.verify.run import Order, RankError, Shown, on_ranks
from megapar_tools.verify.table import as_table, failures
from rich.console import Console
from rich.progress import Progress

from megapar.base.errors import ConfigError, NumericError
from megapar.config.derive import smallest_world, with_vocabulary
from megapar.config.files import load
from megapar.config.messages import counted, listed
from megapar.config.options import Config, ParallelConfig, TrainConfig, flatten, unflatten
from megapar.data.tokenizer import fetch_tokenizer, load_tokenizer
from megapar.launch.reporting import open_streams, reported
from megapar.system import limits
from megapar.system.atomic_files import write_json

if TYPE_CHECKING:
    from tests.support.plants import Plant

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "pretrain_scripts/configs"
STEPS = 2

NO_PLANT = "none"
"""The word that plants nothing."""
LIST = "list"
"""The word that asks for the names of faults."""


@dataclass
class Arguments:
    """Compare layouts with one process. All other flags are those of pretrain.py, such as --config."""

    layouts: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--layout"])] = ()
    """Each is words with commas between them, such as tp2,sp pp2,zb-v dp2,zero3 cp2,ring. `config` is the layout of
    --config. Without any: that of --config, and each kind of parallelism by itself."""
    sample: int = 0
    """Draw so many layouts at random in place of naming them."""
    seed: int = 1
    """Seed of drawn layouts: one seed always draws the same layouts."""
    ranks: int = 4
    """The largest number of ranks of a drawn layout."""
    whole: bool = False
    """Take the model, the batch and the sequence length as they are, not a small model of the same kind."""
    plant: str = NO_PLANT
    """Plant a fault in the running code, to see that it is found: exit code 5. `list` prints the names of all."""
    json: Path | None = None
    """Write all differences to this file."""


@dataclass(frozen=True)
class Case:
    """A layout, and its configuration."""

    layout: NamedLayout
    config: Config


@dataclass(frozen=True)
class Outcome:
    """What came of a case. `error` is why it did not run to its end, and `exit_code` how its ranks ended."""

    case: Case
    differences: Sequence[Difference]
    seconds: float
    error: str = ""
    exit_code: int = 0

    @property
    def passed(self) -> bool:
        return not self.error and all(difference.passed for difference in self.differences)


def own_layouts(config: Config) -> list[NamedLayout]:
    """The layout of the configuration, and each axis by itself as far as the model allows it."""
    # With a window the ranks of cp need whole samples, and so ulysses.
    usual = ["tp2,sp", "pp2", "dp2,zero1", "dp2,zero3", "cp2", "cp2,ulysses"]
    if config.model.num_experts:
        usual.append("dp2,ep2")
    found = []
    if smallest_world(config.parallel) > 1:
        found.append(named(layout_words.OWN_LAYOUT, config))
    for layout in map(layout_words.read, usual):
        if layout.name == "cp2,ulysses" and "cp2" in (each.name for each in found):
            continue
        if runs(config, layout):
            found.append(layout)
    return found


def named(word: str, config: Config) -> NamedLayout:
    """The layout named by a word of --layouts."""
    if word == layout_words.OWN_LAYOUT:
        world = config.launch.nproc or smallest_world(config.parallel)
        return layout_words.of_config(validated(config, NamedLayout(word), world))
    return layout_words.read(word)


def validated(config: Config, layout: NamedLayout, world: int) -> Config:
    """`config` with derived values. Raises ConfigError with the name of the layout in front."""
    try:
        return validate(config, world)
    except ConfigError as error:
        name = f"layout {layout.name}: " if layout.name else ""
        raise ConfigError("\n".join(f"{name}{line}" for line in str(error).splitlines())) from None


def runs(config: Config, layout: NamedLayout) -> bool:
    """Whether the layout can run."""
    try:
        config = small.tested(config)
        validate(layout.of(small.with_small_batch(config, [layout.of(config)])), layout.world)
    except ConfigError:
        return False
    return True


def drawn_layouts(args: Arguments, config: Config) -> list[NamedLayout]:
    """Random layouts for this model. Raises ConfigError if there are too few."""
    candidates = islice(layout_words.drawn(args.seed, args.ranks, config.model.num_experts > 0), 200 * args.sample)
    found: dict[str, NamedLayout] = {}
    for layout in candidates:
        if len(found) < args.sample and layout.name not in found and runs(config, layout):
            found[layout.name] = layout
    if len(found) < args.sample:
        raise ConfigError(f"--sample {args.sample}: the model has {len(found)} such layouts; draw fewer, or --ranks 8")
    return list(found.values())


def cases_of(config: Config, layouts: Sequence[NamedLayout], *, whole: bool) -> tuple[Config, list[Case]]:
    """The configuration of one process, and the case of each layout. Raises ConfigError if a layout cannot run."""
    config = small.tested(config)
    if not whole and config.train.fp8 != "none":
        text = "128 divides no size of a small model, so none of its matrices would be in FP8"
        raise ConfigError(f"train.fp8={config.train.fp8}: {text}; use --whole with a model that is small itself")
    if whole and config.model.vocab_size == 0:
        config = with_vocabulary(config, load_tokenizer(fetch_tokenizer(config.data.tokenizer)).vocab_size)
    if not whole:
        config = small.with_small_batch(config, [layout.of(config) for layout in layouts])
    alone = {"optimizer.zero_stage": 0, "train.recompute": "none", "kernels.loss_chunk": 0}
    all_layouts = [NamedLayout("one process", alone), *layouts]
    configs = [validated(layout.of(config), layout, layout.world) for layout in all_layouts]
    for made, layout in zip(configs, all_layouts, strict=True):
        if made.parallel.schedule == "auto":
            raise ConfigError(f"layout {layout.name}: parallel.schedule=auto: name one, such as {layout.name},zb-h1")
    if not whole:
        configs = small.with_small_model(config, configs)
        # The small model is ours, so a refusal of it is no error of the user.
        configs = [
            validated(made, NamedLayout(f"{layout.name} with a small model (--whole takes yours)"), layout.world)
            for made, layout in zip(configs, all_layouts, strict=True)
        ]
    cases = [Case(layout, made) for layout, made in zip(all_layouts, configs, strict=True)]
    return cases[0].config, cases[1:]


def faults_to_plant(name: str) -> Any:
    """Import `tests.support.plants`. Raises ConfigError in an installation, which has no tests."""
    if not (ROOT / "tests/support/plants.py").is_file():
        raise ConfigError(
            f"--plant {name}: the faults to plant are in tests/support/plants.py of the repository, which an "
            "installation does not have; run megapar verify_layouts in a clone"
        )
    sys.path.insert(0, str(ROOT))  # first: packages of others may have a folder `tests` too
    return importlib.import_module("tests.support.plants")


def planted_case(plant: "Plant", config: Config, words: Sequence[str]) -> tuple[Config, list[NamedLayout]]:
    """The configuration and the layouts for a planted fault: the given ones if they show it, else its own."""
    layouts = [layout_words.read(word) for word in dict.fromkeys((*words, *plant.layouts))]
    # Options besides the model stay away: some of them keep the faulty line from being run.
    plain = Config(
        parallel=ParallelConfig(),
        train=TrainConfig(seq_length=24, global_batch_size=12),
        data=replace(Config().data, documents=config.data.documents),
    )
    own = replace(plain, model=config.model)
    if not plant.serves(config.model) or not config.model.vocab_size or not all(runs(own, each) for each in layouts):
        own = replace(plain, model=faults_to_plant(plant.name).MODELS[plant.model])
    return unflatten({**flatten(own), **plant.options}, type(own.model)), layouts


def orders_of(config: Config) -> list[Order]:
    """The orders of sums in one process: first the order of the reference, then others to measure the noise."""
    size = config.train.micro_batch_size
    batch = config.train.global_batch_size
    larger = max(n for n in range(size, max(batch // 2, size) + 1, size) if batch % n == 0)
    orders = [Order(size), Order(1, reverse=True), Order(larger, parts=2)]
    if config.model.num_experts:
        # Each rounding sends other tokens to other experts, so more of them are tried.
        orders += [Order(size, parts=parts) for parts in (3, 4, 5)]
    return orders


def outcomes(reference: Config, cases: Sequence[Case], plant: "Plant | None") -> Iterator[Outcome]:
    """Run one process and then each case, with a progress bar on a terminal."""
    console = Console(stderr=True)
    # Without a thread that draws: a rank forked while it holds a lock would wait for ever.
    bar = Progress(console=console, transient=True, disable=not console.is_terminal, auto_refresh=False)
    with bar as progress:
        task = progress.add_task("one process", total=1 + len(cases))
        progress.refresh()
        targets = num_targets(reference)
        first, *others = on_ranks(reference, build_stages, targets, STEPS, orders_of(reference))
        for case in cases:
            progress.update(task, advance=1, description=case.layout.name, refresh=True)
            yield outcome(case, plant, partial(compare, reference=first, others=others, unit=rounding(case.config)))


def outcome(case: Case, plant: "Plant | None", compared: "partial[list[Difference]]") -> Outcome:
    """Run a case and compare it."""
    begun = time.monotonic()
    order = Order(case.config.train.micro_batch_size)
    try:
        shown: list[Shown]
        if plant is None:
            shown = on_ranks(case.config, build_stages, num_targets(case.config), STEPS, [order])
        else:
            shown = on_ranks(case.config, build_stages, num_targets(case.config), STEPS, [order], plant.planted)
    except RankError as error:
        return Outcome(case, [], time.monotonic() - begun, str(error), error.exit_code)
    return Outcome(case, compared(shown[0]), time.monotonic() - begun)


def headline(config: Config, *, whole: bool) -> str:
    model = config.model
    size = "small; --whole takes it as it is"
    if whole:
        size = "as it is"
    experts = ""
    if model.num_experts:
        experts = f", {model.num_experts} experts"
    train = config.train
    sizes = [kind.heads_of(model) for kind in kinds_of(model)]
    queries = listed(sorted({heads.query_heads for heads in sizes}))
    keys = listed(sorted({heads.kv_heads for heads in sizes}))
    return (
        f"{model.family} ({size}): {counted(model.num_hidden_layers, 'layer')}, width {model.hidden_size}, "
        f"{queries} query and {keys} key/value heads{experts}; "
        f"{train.precision}; {STEPS} steps of {train.global_batch_size} samples of {train.seq_length} tokens"
    )


def line_of(outcome: Outcome) -> list[str]:
    """Lines about one layout: one if it passed, else also the parameters with differences."""
    ranks = counted(outcome.case.layout.world, "rank")
    head = f"{outcome.case.layout.name} | {ranks} | {outcome.seconds:.1f} s"
    if outcome.error:
        return [f"{head} | FAILED to run: {outcome.error}"]
    worst = max(outcome.differences, key=lambda difference: difference.excess)
    if worst.difference == 0.0:
        return [f"{head} | ok, every bit is the same"]
    if outcome.passed:
        return [f"{head} | ok, at most {worst.excess:.0%} of what is allowed: {worst.kind} of {worst.name}"]
    return [f"{head} | DIFFERS", *failures(outcome.differences)]


def as_json(difference: Difference) -> dict[str, object]:
    """A difference as JSON types. JSON has no infinity and no NaN: they become null."""
    values: dict[str, object] = {**vars(difference), "passed": difference.passed}
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values


def report(args: Arguments, reference: Config, found: Sequence[Outcome]) -> dict[str, object]:
    """All differences, as JSON types."""
    return {
        "passed": all(outcome.passed for outcome in found),
        "plant": args.plant,
        "model": flatten(reference.model),
        "precision": reference.train.precision,
        "layouts": [
            {
                "layout": outcome.case.layout.name,
                "options": dict(outcome.case.layout.options),
                "ranks": outcome.case.layout.world,
                "seconds": round(outcome.seconds, 3),
                "passed": outcome.passed,
                "error": outcome.error,
                "differences": [as_json(each) for each in outcome.differences],
            }
            for outcome in found
        ],
    }


def check(args: Arguments) -> None:
    """Raise ConfigError for contradicting flags, and for a file without a folder."""
    if args.sample and args.layouts:
        raise ConfigError(f"--sample {args.sample}: draws layouts, and --layouts names them; leave one of them out")
    if args.sample and args.plant != NO_PLANT:
        raise ConfigError(f"--sample {args.sample}: a fault shows in layouts of its own; leave out --sample or --plant")
    if args.sample < 0 or args.ranks < 2:
        raise ConfigError(f"--sample {args.sample} --ranks {args.ranks}: use --sample 20 --ranks 4")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}")


def verify(args: Arguments, config: Config) -> int:
    """Run all layouts and print what they show; returns the exit code."""
    check(args)
    plant = None if args.plant == NO_PLANT else faults_to_plant(args.plant).find(args.plant)
    if plant is not None:
        config, layouts = planted_case(plant, config, args.layouts)
        print(f"planted in the ranks of each layout: {plant.name}: {plant.sentence}")
    elif args.sample:
        layouts = drawn_layouts(args, config)
    elif args.layouts:
        layouts = [named(word, config) for word in dict.fromkeys(args.layouts)]
    else:
        layouts = own_layouts(config)
    reference, cases = cases_of(config, layouts, whole=args.whole)
    print(headline(reference, whole=args.whole), flush=True)
    found = []
    for each in outcomes(reference, cases, plant):
        found.append(each)
        print("\n".join(line_of(each)), flush=True)
    print(as_table({each.case.layout.name: each.differences for each in found}), end="")
    if args.json:
        write_json(args.json, report(args, reference, found))
    wrong = [each for each in found if not each.passed]
    if not wrong:
        print(f"{counted(len(found), 'layout computes', 'layouts compute')} what one process computes")
        return 0
    print(
        f"{len(wrong)} of {counted(len(found), 'layout')} differ: {' '.join(each.case.layout.name for each in wrong)}"
    )
    if all(each.error for each in wrong):
        return wrong[0].exit_code
    return NumericError.exit_code


def main() -> int:
    open_streams()
    limits.raise_open_files()
    with reported():
        args, rest = tyro.cli(Arguments, description=__doc__, use_underscores=True, return_unknown_args=True)
        if args.plant == LIST:
            print("\n".join(plant.name for plant in faults_to_plant(LIST).PLANTS))
            return 0
        return verify(args, load(rest, named_configs(CONFIGS), FOR_OPTIONS, hint).config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
