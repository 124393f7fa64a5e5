"""Plans put together from parts say what ranks hold that were built whole, and take little time however deep a model.

tests/test_dry_run.py compares plans with the bytes of real ranks.
"""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from megapar_models.build import StageBuilder
from megapar_models.registry import validate
from megapar_tools.plan.memory import fullest_rank, report_rank, reports
from megapar_tools.plan.moments import WINDOW, without_repeats
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.verdict import Capacity, judge

from megapar.activations.recompute import Mode
from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import (
    AdapterConfig,
    Config,
    KernelsConfig,
    LaunchConfig,
    ParallelConfig,
    TrainConfig,
    flatten,
    unflatten,
)
from megapar.declare.batch import PipelineStage
from megapar.declare.context import ParallelContext
from megapar.pipeline.schedules import SCHEDULES, make
from megapar.train.levers import ALL_LAYERS, LEVERS, MODES, advise, changes_of_options
from tests.support import gemma4, handing, tiny_models
from tests.support.built_plan import built_report
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    MODELS,
    ONE_KV_HEAD,
    SHARED,
    SIGMOID,
    STRADDLING,
    Layout,
    name,
)
from tests.support.multi_token import MODEL as MTP
from tests.support.plans import PARTS
from tests.support.source_tree import ROOT
from tests.support.streamed import MODELS as STREAMED
from tests.support.sweeps import slow_but

DEEP = replace(ONE_KV_HEAD, num_hidden_layers=21)
WIDE = tiny_models.small("llama", 256, 2, 256, num_key_value_heads=4, head_dim=64, num_hidden_layers=4)
WIDE_EXPERTS = tiny_models.small(
    *("mixtral", 128, 2, 128),
    num_key_value_heads=4,
    head_dim=32,
    moe=MoEConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
)
FOUR_KINDS = replace(LLAMA, family="tests.test_width_layers:FOUR_KINDS", attention_bias=False, num_hidden_layers=9)
DELTA = replace(LLAMA, family="tests.support.hybrids:HEADS_FAMILY", attention_bias=False)
DEPTH = replace(DELTA, family="tests.test_depth:FAMILY", num_hidden_layers=5, qk_norm=False)
OTHERS = [
    DEEP,
    FOUR_KINDS,
    replace(GPT, num_hidden_layers=9),
    *(
        replace(LLAMA, family=f"tests.{family}", attention_bias=False, qk_norm=False)
        for family in (
            "toy_family:FAMILY",
            "test_width_layers:WINDOWS",
            "test_width_layers:LORA",
            "test_width_optimizers:MOMENTUM",
            "test_context_parallel_training:OWN_LOSS",
            "support.hybrids:HEADS_FAMILY",
        )
    ),
    handing.MODEL,
]


def same_as_built(layout: Layout, precision: str = "bf16", device: str = "cuda") -> None:
    config = layout.config(precision)
    backend = "torch" if layout.backend == "auto" else layout.backend
    config = replace(config, kernels=replace(config.kernels, backend=backend))
    config = replace(config, launch=replace(config.launch, device=device))
    for report, (first, *_) in reports(config, PARTS).items():
        built = built_report(config, first)
        # A plan shortens the titles of fine stages.
        assert replace(report, stages="") == replace(built, stages=""), (name(layout), first)
        if layout.zero_stage < 2:
            assert report.stages == built.stages


LAYOUTS = [
    Layout(LLAMA, tp=2, pp=2, sequence_parallel=True, dp=2),
    Layout(GPT, pp=4, schedule="gpipe", recompute="selective"),
    Layout(DEEP, dp=4, zero_stage=2, micro_batch_size=3),
    Layout(DEEP, dp=2, zero_stage=3, recompute="full", every=3),
    Layout(DEEP, pp=2, dp=2, zero_stage=2, recompute="all_but_attention", layers=("0", "2-3")),
    Layout(DEEP, pp=2, dp=2, zero_stage=3, schedule="breadth"),
    Layout(DEEP, dp=2, zero_stage=3, schedule="breadth"),
    Layout(DEEP, pp=3, dp=4, shard_ranks=2, vpp=2, schedule="interleaved", zero_stage=2),
    Layout(ONE_KV_HEAD, pp=2, schedule="zb-h1", recompute="full", micro_batch_size=2),
    Layout(ONE_KV_HEAD, pp=2, vpp=2, schedule="zb-v", zero_stage=2, dp=2, loss_chunk=8),
    Layout(GPT, pp=2, vpp=2, schedule="dualpipe-v", zero_stage=3, dp=2),
    Layout(STRADDLING, tp=4, cp=2, cp_attention="ring", backend="triton"),
    Layout(LLAMA, cp=2, cp_attention="ulysses", tp_overlap_chunks=2, tp=2, sequence_parallel=True),
    Layout(MIXTRAL, dp=4, ep=4, etp=1, pp=2),
    Layout(SHARED, tp=2, dp=2, ep=2, etp=2, recompute="full"),
    Layout(SIGMOID, dp=2, ep=2, zero_stage=2),
    Layout(DENSE_BETWEEN, pp=3, schedule="zb-h1"),
    Layout(LLAMA, pp=2, schedule="zb-h1", recompute="light", dp=2),
    Layout(FOUR_KINDS, cp=2, cp_attention="ulysses", recompute="all_but_attention", every=2),
    Layout(FOUR_KINDS, pp=2, dp=2, recompute="full", every=2, schedule="zb-h1"),
    Layout(FOUR_KINDS, tp=2, zero_stage=3, dp=2),
    Layout(LLAMA, pp=2, trainable=("layers.[12].*",), zero_stage=2, dp=2),
    Layout(LLAMA, pp=2, trainable=("head*", "layers.3.mlp.*"), recompute="full"),
    Layout(GPT, pp=2, trainable=("*norm*",), schedule="zb-h1"),
    Layout(MIXTRAL, pp=2, dp=2, ep=2, zero_stage=3, adapter=AdapterConfig(rank=4, targets=("q", "up"))),
    Layout(LLAMA, tp=2, tp_overlap_chunks=2, pp=2, schedule="zb-h1", adapter=AdapterConfig(rank=4)),
    Layout(LLAMA, tp=2, sequence_parallel=True, dp=2, adapter=AdapterConfig(rank=4, dora=True)),
    Layout(WIDE, tp=2, pp=2, sequence_parallel=True, fp8="blocks"),
    Layout(WIDE, dp=2, zero_stage=3, fp8="blocks", fp8_skip=("0",)),
    Layout(WIDE, pp=2, schedule="zb-h1", recompute="light", fp8="blocks", backend="triton"),
    Layout(WIDE, pp=2, dp=2, zero_stage=3, schedule="breadth", recompute="full", fp8="blocks"),
    Layout(WIDE, tp=2, zero_stage=3, dp=2, adapter=AdapterConfig(rank=4), fp8="blocks"),
    Layout(WIDE_EXPERTS, dp=2, ep=2, etp=1, zero_stage=2, fp8="blocks"),
    Layout(DELTA, cp=2, pp=2, recompute="all_but_attention"),
    Layout(DELTA, tp=2, zero_stage=3, dp=2, sequence_parallel=True),
    Layout(handing.MODEL, tp=2, pp=3, sequence_parallel=True),
    Layout(handing.MODEL, pp=2, schedule="zb-h1", recompute="full", every=2, micro_batch_size=2),
    Layout(handing.MODEL, pp=2, vpp=3, schedule="interleaved", dp=2, zero_stage=2, recompute="full"),
    *(Layout(model, pp=2, dp=2, zero_stage=1 + number % 3) for number, model in enumerate(OTHERS[2:])),
    Layout(STREAMED["glm"], pp=2, dp=2),
    Layout(STREAMED["v4"], tp=2, sequence_parallel=True, dp=2, recompute="light"),
    Layout(STREAMED["hy4"], pp=2, vpp=2, schedule="zb-v", dp=2, zero_stage=3),
    Layout(STREAMED["v4"], dp=2, ep=2, recompute="full"),
    Layout(DEPTH, pp=2, dp=2),
    Layout(DEPTH, pp=2, vpp=2, schedule="zb-v", dp=2, zero_stage=3),
    Layout(DEPTH, tp=2, sequence_parallel=True, recompute="all_but_attention", every=2),
    Layout(gemma4.MIXTURE, tp=2, sequence_parallel=True, pp=2, recompute="light"),
    Layout(gemma4.MODEL, pp=3, vpp=2, schedule="interleaved", recompute="full"),
    Layout(gemma4.MIXTURE, pp=2, schedule="zb-h1", recompute="all_but_attention", dp=2, zero_stage=2),
    Layout(MTP, pp=2, tp=2, sequence_parallel=True),
    Layout(MTP, pp=2, dp=2, zero_stage=3, recompute="full"),
    Layout(MTP, cp=2, pp=2, schedule="zb-h1", recompute="selective"),
    Layout(MTP, dp=2, zero_stage=2, recompute="all_but_attention", layers=("1", "3")),
]


def test_plans_for_cpus_and_gpus_share_no_recording() -> None:
    """The ranks of one host keep no order of rows: the exchange sorts them."""
    layout = Layout(SHARED, dp=2, ep=2, micro_batch_size=3)
    for planned in ("cpu", "cuda", "cpu"):
        same_as_built(layout, "fp32", planned)


@pytest.mark.parametrize("layout", slow_but(range(0, len(LAYOUTS), 4), LAYOUTS), ids=name)
def test_a_plan_from_parts_is_that_of_the_whole_rank(layout: Layout) -> None:
    same_as_built(layout)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_from_parts_is_that_of_the_whole_rank_in_random_layouts(seed: int) -> None:
    """Whatever was planned before with the same parts."""
    generator = random.Random(seed)
    planned = 0
    while planned < 40:
        options = random_options(generator)
        model = generator.choice([*MODELS, *OTHERS])
        if model.num_experts:
            options |= {"ep": generator.choice([1, 2, 4]), "etp": generator.choice([0, 1])}
        if model.family.endswith("OWN_LOSS"):
            options["sequence_parallel"] = False  # its loss multiplies whole positions
        layout = Layout(model, **options)
        try:
            layout.config()
        except ConfigError:
            continue  # this layout cannot run
        try:
            same_as_built(layout, generator.choice(["fp32", "bf16"]), generator.choice(["cpu", "cuda"]))
        except ConfigError as error:
            if "matches no parameter of the model" not in str(error):
                raise
            continue  # train.trainable names parameters of another model
        planned += 1


def random_options(generator: random.Random) -> dict[str, Any]:
    among = {
        "tp": [1, 1, 2, 4],
        "pp": [1, 1, 2, 3],
        "dp": [1, 2, 3, 4],
        "cp": [1, 1, 1, 2],
        "cp_attention": ["gather", "ring", "ulysses"],
        "vpp": [1, 1, 2],
        "schedule": list(SCHEDULES),
        "sequence_parallel": [False, True],
        "recompute": ["none", "selective", "light", "all_but_attention", "full"],
        "zero_stage": [0, 1, 2, 3],
        "shard_ranks": [0, 0, 2],
        "micro_batch_size": [1, 1, 2, 3],
        "loss_chunk": [0, 0, 8],
        "backend": ["torch", "triton"],
        "trainable": [(), (), (), ("layers.[12].*",), ("*norm*",), ("embedding*",), ("head*", "layers.3.mlp.*")],
    }
    options: dict[str, Any] = {option: generator.choice(values) for option, values in among.items()}
    options["every"] = generator.choice([1, 2, 3]) if options["recompute"] == "full" else 1
    return options


# How much is built


class CountingBuilder(StageBuilder):
    """Counts the layers and ends that it builds."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 0

    def maker(self, config: Config, ctx: ParallelContext) -> Callable[..., Any]:
        make_stage = super().maker(config, ctx)

        def counted(*args: Any, **kwargs: Any) -> PipelineStage:
            self.built += 1
            return make_stage(*args, **kwargs)

        return counted


def sized(layers: int, **options: Any) -> Config:
    model = ModelConfig(hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, vocab_size=512)
    parallel = ParallelConfig(**options)
    return validate(Config(model=model, parallel=parallel), parallel.tp * parallel.pp * parallel.dp)


def test_a_plan_builds_as_little_of_a_deep_model_as_of_a_shallow_one() -> None:
    built = []
    for layers in (2, 48):
        builder = CountingBuilder()
        fullest_rank(sized(layers, tp=2, pp=2, dp=4), Parts(builder))
        built.append(builder.built)
    assert built[0] == built[1] <= 12


def test_layouts_of_other_replicas_stages_and_schedules_have_the_same_parts() -> None:
    builder = CountingBuilder()
    parts = Parts(builder)
    first = fullest_rank(sized(8, tp=2, pp=2, dp=4), parts)
    before = builder.built
    others = [{"dp": 2}, {"pp": 4}, {"vpp": 2, "schedule": "interleaved"}, {"schedule": "gpipe"}]
    found = [fullest_rank(sized(8, **{"tp": 2, "pp": 2, "dp": 4, **other}), parts) for other in others]
    assert builder.built == before
    assert len({first, *found}) == 5, "and yet they need other memory"
    fullest_rank(sized(8, tp=4, pp=2, dp=2), parts)
    assert builder.built > before


def test_the_fullest_rank_is_one_of_the_reports() -> None:
    config = sized(9, pp=4, tp=2, dp=1)
    found = reports(config, PARTS)
    fullest = fullest_rank(config, PARTS)
    assert fullest.total == max(report.total for report in found)
    assert report_rank(config, PARTS, found[fullest][0]) == fullest


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
def test_shortened_orders_show_every_few_steps_that_the_whole_ones_have(schedule: str) -> None:
    pp = 4
    vpp = SCHEDULES[schedule].vpp.nearest_to(2)
    shortened = 0
    for order in make(schedule, pp, vpp, 64):
        steps = [(action.kind, action.stage) for action in order]
        short = without_repeats(steps, pp)
        assert windows(short) == windows(steps)
        shortened += len(short) < len(steps) / 2
    assert shortened or schedule.startswith("zb"), "searched orders may not repeat"


def windows(steps: list[Any]) -> set[tuple[Any, ...]]:
    return set(zip(*(itertools.islice(steps, start, None) for start in range(WINDOW)), strict=False))


# The verdict


def test_a_verdict_says_whether_a_layout_fits_and_what_would() -> None:
    given = Config(
        model=ModelConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=512),
        parallel=ParallelConfig(dp=8),
    )

    def validated(config: Config) -> Config:
        return validate(config, 8)

    total = fullest_rank(validated(given), PARTS).total
    enough = Capacity("a100", total + 1000, 1000)
    verdict = judge(given, validated, PARTS, enough)
    assert verdict.fits
    assert verdict.text.startswith("fits on a100 of ")
    small = replace(enough, capacity_bytes=total + 999)
    verdict = judge(given, validated, PARTS, small)
    assert not verdict.fits
    assert "; would fit: optimizer.zero_stage 2 (" in verdict.text
    tiny = judge(given, validated, PARTS, replace(enough, capacity_bytes=2000))
    assert tiny.text.endswith("nothing tried with as many ranks would: use more ranks, or a smaller model")
    # A quarter is less than any one change needs, and a fifth less than all options together.
    several = judge(given, validated, PARTS, replace(enough, capacity_bytes=total // 4))
    together = "optimizer.zero_stage 3, kernels.loss_chunk 1024, train.recompute full, optimizer.moments bf16"
    assert f"would fit: {together} (" in several.text
    more = judge(given, validated, PARTS, replace(enough, capacity_bytes=total // 5))
    assert f"would fit: {together}, parallel." in more.text


def test_levers_that_exclude_each_other_are_not_named_together() -> None:
    """Main weights as remainders stay on the device; of the two, the share in host memory saves more."""
    given = Config(
        model=ModelConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=512),
        train=TrainConfig(precision="bf16"),
        launch=LaunchConfig(device="cuda"),
    )
    levers = dict(changes_of_options(given))
    assert {"optimizer.main_weights", "optimizer.offload", "train.offload"} <= levers.keys()
    least = min(
        fullest_rank(validate(changed(given, levers, without), 1), PARTS).total
        for without in ("optimizer.main_weights", "optimizer.offload")
    )
    verdict = judge(given, lambda config: validate(config, 1), PARTS, Capacity("x", least, 0))
    assert "train.offload 1.0" in verdict.text
    assert "optimizer.offload 1.0" in verdict.text
    assert "main_weights" not in verdict.text


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_without_a_plan_runs_by_itself(device: str, recompute: Mode) -> None:
    """With everything else at its strongest, so that the dearer levers come to be named."""
    config = Config(
        model=ModelConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=512),
        train=TrainConfig(recompute=recompute, micro_batch_size=1, precision="bf16"),
        kernels=KernelsConfig(loss_chunk=1024),
        launch=LaunchConfig(device=device),
    )
    said = advise(config)
    named = re.findall(r"([a-z_]+\.[a-z_]+) ([\w.]+)(?: or ([\w.]+))? \(now", said.replace("larger parallel", ""))
    values = {(option, value) for option, *values in named for value in values if value}
    types = {option: type(value) for option, value in flatten(config).items()}
    assert values, said
    for option, value in values:
        own = flatten(config) | {option: types[option](value)}
        validate(unflatten(own, type(config.model)), 1)


def changed(config: Config, values: dict[str, Any], without: str) -> Config:
    """The config with these values, by dotted path."""
    taken = {path: value for path, value in values.items() if path != without}
    return unflatten({**flatten(config), **taken}, type(config.model))


def test_the_page_lists_the_levers_in_their_order() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \| (.+) \|$", (ROOT / "docs/questions.md").read_text(), re.M)
    assert rows == [(lever.option, lever.values, lever.costs) for lever in LEVERS]


@pytest.mark.parametrize(
    ("some", "words"),
    [({"recompute_layers": ("::4",)}, f"{ALL_LAYERS} ("), ({"recompute_layers": ("0-1",)}, f"{ALL_LAYERS} (")],
)
def test_where_some_layers_are_recomputed_all_may_be(some: dict[str, Any], words: str) -> None:
    given = Config(
        model=ModelConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=512),
        train=TrainConfig(recompute="full", **some),
        kernels=KernelsConfig(loss_chunk=1024),
    )
    total = fullest_rank(validate(given, 1), PARTS).total
    verdict = judge(given, lambda config: validate(config, 1), PARTS, Capacity("x", total - 1, 0))
    assert f"; would fit: train.{next(iter(some))} " in verdict.text
    assert words in verdict.text


def test_uneven_experts_are_held_in_reserve() -> None:
    config = Layout(MIXTRAL, dp=2, ep=2).config()
    total = fullest_rank(config, PARTS).total
    verdict = judge(config, lambda config: validate(config, 2), PARTS, Capacity("x", total + 10, 10))
    assert not verdict.fits
    assert "experts with 1.5 times their even share" in verdict.text
    # A rank with all experts keeps the rows of its own tokens, whichever experts they choose.
    alone = Layout(MIXTRAL, dp=2).config()
    assert judge(alone, lambda config: config, PARTS, Capacity("x", fullest_rank(alone, PARTS).total + 10, 10)).fits
