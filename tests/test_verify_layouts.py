"""tools/verify_layouts.py: it reads what people write, passes what is right, and sees every fault that it plants.

The comparison is the tool's own, so these tests plant faults in the code that ranks run (tests.support.plants).
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.registry import named_configs
from megapar_tools.verify import layout_words
from megapar_tools.verify.compare import NOISES, ROUNDINGS, compare
from megapar_tools.verify.logical import Assembled, Held, assembled
from megapar_tools.verify.run import Shown, VerifiedStep, products_in_parts

from megapar.base.errors import ConfigError
from megapar.config.options import Config, ParallelConfig, flatten
from megapar.declare.params import Box, Piece
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from tests.support import plants
from tests.support.options import load
from tests.support.program import ROOT, TINY, Ended, Program
from tests.support.sweeps import slow_but
from tools import verify_layouts
from tools.verify_layouts import cases_of, own_layouts, planted_case

TOOL = ROOT / "tools/verify_layouts.py"
CONFIG = TINY[:2]
FAULTS = [plant.name for plant in plants.PLANTS]


def run(*words: str, folder: Path) -> Ended:
    return Program(TOOL, words, folder, {}).wait()


# Words


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("tp2", {"parallel.tp": 2}),
        ("tp=2,PP2", {"parallel.tp": 2, "parallel.pp": 2}),
        ("tp2xpp2", {"parallel.tp": 2, "parallel.pp": 2}),
        ("tp2-pp2+dp3", {"parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 3}),
        ("parallel.tp=2", {"parallel.tp": 2}),
        ("tp2,sequence_parallel", {"parallel.tp": 2, "parallel.sequence_parallel": True}),
        ("dp2,fsdp", {"parallel.dp": 2, "optimizer.zero_stage": 3}),
        ("dp2,zero-1,shard1", {"parallel.dp": 2, "optimizer.zero_stage": 1, "optimizer.shard_ranks": 1}),
        ("cp4,ring", {"parallel.cp": 4, "parallel.cp_attention": "ring"}),
        ("pp2,zb-h1", {"parallel.pp": 2, "parallel.schedule": "zb-h1"}),
        ("pp2,a.b:MINE", {"parallel.pp": 2, "parallel.schedule": "a.b:MINE"}),
        ("pp2,orders.txt", {"parallel.pp": 2, "parallel.schedule": "orders.txt"}),
        ("ep2", {"parallel.ep": 2, "parallel.dp": 2}),
        ("tp2,recompute,mb3", {"parallel.tp": 2, "train.recompute": "full", "train.micro_batch_size": 3}),
        ("dp2,ep2,epchunks4", {"parallel.dp": 2, "parallel.ep": 2, "parallel.ep_overlap_chunks": 4}),
    ],
)
def test_words_of_a_layout(text: str, options: dict[str, object]) -> None:
    assert dict(layout_words.read(text).options) == options


@pytest.mark.parametrize(
    ("text", "works"),
    [
        ("", "such as tp2,pp2"),
        ("tp", "such as tp2"),
        ("tp2,tp3", "is 2 and 3"),
        ("pp2,zb-h", "did you mean zb-h1 or zb-v?"),
        ("dp2,zero5", "use zero0 zero1 zero2 zero3"),
        ("sp", "add tp2"),
        ("zb-v", "add pp2"),
        ("ring", "add cp2"),
        ("bf16", "--train.precision bf16"),
        ("nonsense", "use tpN ppN dpN"),
    ],
)
def test_an_unknown_word_is_refused_with_one_that_works(text: str, works: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layout_words.read(text)
    assert works in str(refused.value)
    assert "\n" not in str(refused.value)


def test_options_without_effect_in_a_layout_do_not_keep_it_from_running() -> None:
    config = replace(
        Config(), parallel=ParallelConfig(tp=2, pp=2, sequence_parallel=True, schedule="zb-v", partition=(2, 2))
    )
    laid_out = layout_words.read("dp2").of(config).parallel
    assert laid_out == ParallelConfig(dp=2)
    assert layout_words.read("pp4").of(config).parallel.schedule == "zb-v"
    assert layout_words.read("pp2,vpp3").of(config).parallel.schedule == "interleaved"


CONFIGS_AND_PRESETS = list(named_configs(verify_layouts.CONFIGS))


@pytest.mark.parametrize("name", slow_but(range(0, len(CONFIGS_AND_PRESETS), 8), CONFIGS_AND_PRESETS))
def test_every_preset_has_a_small_model_for_its_layouts(name: str) -> None:
    """Without ranks: `cases_of` validates the small models too."""
    config = load(["--config", name], named_configs(verify_layouts.CONFIGS)).config
    layouts = own_layouts(config)
    assert len(layouts) >= 4
    reference, cases = cases_of(config, layouts, whole=False)
    assert reference.model.hidden_size < 200
    assert {case.config.model for case in cases} == {reference.model}
    assert reference.model.family == config.model.family
    assert reference.train.precision == config.train.precision


@pytest.mark.parametrize(
    ("name", "layouts", "kept"),
    [
        ("gpt-oss-20b", ["dp2,ep2"], {"sliding_window": 7, "moe.num_experts": 7, "rope_scaling.original_max": 8}),
        ("gemma-3-1b", ["cp2,ulysses"], {"sliding_window": 7}),
        ("ministral-3-8b", ["dp2"], {"rope_scaling.original_max": 8}),
        ("mixtral-8x7b", ["dp2,ep2", "dp4,ep4"], {"moe.num_experts": 7}),
        ("mixtral-8x7b", ["dp2,ep2,epchunks4"], {"moe.num_experts": 8}),
        ("deepseek-v3", ["dp2,ep2"], {"moe.num_experts": 15, "moe.n_group": 5}),
        ("laguna-xs-2.1", ["tp2"], {"num_attention_heads_per_layer": (8, 10, 10, 10), "sliding_window": 7}),
        ("mimo-v2-flash", ["tp2"], {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}),
    ],
)
def test_a_small_model_has_what_makes_layouts_differ(name: str, layouts: list[str], kept: dict[str, Any]) -> None:
    """A sample goes beyond its windows and its original length, and ranks hold unequal numbers of experts."""
    config = load(["--config", name], named_configs(verify_layouts.CONFIGS)).config
    reference, _ = cases_of(config, [layout_words.read(layout) for layout in layouts], whole=False)
    found = flatten(reference.model)
    assert {key: next(value for path, value in found.items() if path.startswith(key)) for key in kept} == kept
    assert reference.train.seq_length >= 24
    kinds = set(getattr(config.model, "layer_types", ()))
    assert set(getattr(reference.model, "layer_types", ())) == kinds


@pytest.mark.parametrize("model", plants.MODELS)
def test_a_plant_brings_what_a_config_lacks(model: str) -> None:
    for plant in plants.PLANTS:
        config, layouts = planted_case(plant, replace(Config(), model=plants.MODELS[model]), ["dp2"])
        cases_of(config, layouts, whole=False)
        assert {layout.name for layout in layouts} == {"dp2", *plant.layouts}


def test_fp8_is_compared_with_whole_models_alone() -> None:
    """A small model's sizes are no multiples of 128."""
    config = load(["--config", "tiny", "--train.fp8", "blocks"], named_configs(verify_layouts.CONFIGS)).config
    with pytest.raises(ConfigError, match=r"train\.fp8=blocks: 128 divides no size of a small model, .*; use --whole"):
        cases_of(config, own_layouts(config), whole=False)


# The rule


def shown(value: float, problem: str = "") -> Shown:
    """One step with one gradient of norm 1, and `value` added to it."""
    tensor = torch.tensor([1.0 + value, 0.0], dtype=torch.float64)
    gradients = Assembled({"a": tensor}, {"a": problem} if problem else {})
    return Shown(Assembled({}, {}), [VerifiedStep([{"loss": 1.0}], gradients, Assembled({}, {}))])


@pytest.mark.parametrize(
    ("difference", "noise", "unit", "passes"),
    [
        (0.9 * NOISES * 1e-3, 1e-3, 1e-9, True),
        (1.1 * NOISES * 1e-3, 1e-3, 1e-9, False),
        (0.9 * ROUNDINGS * 1e-3, 1e-9, 1e-3, True),
        (1.1 * ROUNDINGS * 1e-3, 1e-9, 1e-3, False),
        (float("nan"), 1e-3, 1e-3, False),
        (float("inf"), 1e-3, 1e-3, False),
    ],
)
def test_a_difference_may_be_as_large_as_rounding_explains(
    difference: float, noise: float, unit: float, passes: bool
) -> None:
    found = compare(shown(difference), shown(0.0), [shown(noise), shown(-noise / 2)], unit)
    assert {each.name: each.passed for each in found} == {"loss": True, "a": passes}


def held(first: int, size: int, value: float = 1.0, owned: bool = True, replica: int = 0) -> Held:
    """A rank's part of a tensor `a` of six numbers."""
    box = Box((first,), (size,))
    return Held(Piece("a", (6,), box, box if owned else None), torch.full((size,), value), False, replica)


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([held(0, 6)], ""),
        ([held(0, 3), held(3, 3, 2.0)], ""),
        ([held(0, 4), held(2, 4, owned=False), held(4, 2)], ""),
        ([held(0, 6), held(0, 6, 2.0, owned=False)], "copies differ"),
        ([held(0, 4), held(3, 3, 2.0, owned=False), held(4, 2, 2.0)], "copies differ"),
        ([held(0, 4), held(3, 3)], "owned ranges overlap or leave gaps"),
        ([held(0, 6, owned=False)], "owned ranges overlap or leave gaps"),
        ([held(0, 3), held(4, 2)], "some elements are held by no rank"),
        ([held(0, 6), held(0, 6, replica=1)], ""),
        ([held(0, 6), held(0, 6, 2.0, replica=1)], "replica 1 differs from the first"),
    ],
)
def test_parts_that_contradict_each_other_are_told(ranks: list[Held], problem: str) -> None:
    found = assembled([[part] for part in ranks])
    assert found.problems == ({"a": problem} if problem else {})
    assert found.tensors["a"][:2].tolist() == [1, 1]


def test_copies_that_differ_and_tensors_that_lack_never_pass() -> None:
    copies = compare(shown(0.0, "copies differ"), shown(0.0), [shown(0.0)], 1.0)
    assert [each.sentence() for each in copies if not each.passed] == ["a: gradient of step 1: copies differ"]
    none = replace(shown(0.0), steps=[replace(shown(0.0).steps[0], gradients=Assembled({}, {}))])
    for layout, reference in ((none, shown(0.0)), (shown(0.0), none)):
        assert [each.name for each in compare(layout, reference, [reference], 1.0) if not each.passed] == ["a"]


# Runs


def test_right_layouts_pass_also_those_of_a_family_and_a_schedule_of_ones_own(tmp_path: Path) -> None:
    layouts = ("pp2,vpp2,tests.support.schedules:BACK_AND_FORTH", "dp2,zero3")
    words = ("--model.family", "tests.toy_family:FAMILY", "--json", "report.json", "--layouts", *layouts)
    ended = run(*CONFIG, *words, folder=tmp_path)
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    assert "2 layouts compute what one process computes" in ended.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [layout["layout"] for layout in report["layouts"]] == list(layouts)
    for layout in report["layouts"]:
        assert layout["passed"]
        gradients = [each for each in layout["differences"] if each["kind"] == "gradient"]
        assert len(gradients) == 2 * 35
        # Different orders round differently. Noise of 0 would mean that nothing was tried.
        assert all(0 < each["noise"] < 1e-4 * each["norm"] for each in gradients)


def test_plants_are_listed_by_bare_names_and_unknown_ones_refused(tmp_path: Path) -> None:
    listed = run("--plant", "list", folder=tmp_path)
    assert (listed.code, listed.out.split("\n")) == (0, [*FAULTS, ""])
    assert len(set(FAULTS)) >= 20
    unknown = run("--plant", "tied-embedding", folder=tmp_path)
    said = "ConfigError: --plant tied-embedding: no such fault; did you mean tied-embedding-sum-missing?\n"
    assert (unknown.code, unknown.err) == (2, said)


def test_an_installation_says_that_it_has_no_faults_to_plant(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/verify_layouts.py", tmp_path / "tools")
    command = [sys.executable, "tools/verify_layouts.py", "--plant", "list"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ConfigError: --plant list: the faults to plant are in tests/support/plants.py of")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sample", "2", "--layouts", "tp2"], "leave one of them out"),
        (["--sample", "2", "--plant", "norms-decayed"], "leave out --sample or --plant"),
        (["--json", "nowhere/report.json"], "there is no folder nowhere"),
        (["--layouts", "tp4"], "layout tp4: model.num_attention_heads=6, parallel.tp=4"),
        (["--layouts", "pp2", "--parallel.schedule", "auto"], "name one, such as pp2,zb-h1"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["verify_layouts.py", *CONFIG, *words])
    with pytest.raises(SystemExit) as ended:
        verify_layouts.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_page_lists_the_faults_that_there_are() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| `(.+)` \|$", (ROOT / "docs/verify.md").read_text(), re.M)
    assert rows == [(plant.name, plant.sentence, plant.layouts[0]) for plant in plants.PLANTS]


IN_LANES = ("sp-norm-gradient-sum-missing", "average-of-one-rank", "adam-step-off-by-one")


@pytest.mark.parametrize("name", slow_but(map(FAULTS.index, IN_LANES), FAULTS))
def test_a_planted_fault_is_seen_and_named(name: str, tmp_path: Path) -> None:
    plant = plants.find(name)
    ended = run(*CONFIG, "--plant", name, "--json", "report.json", folder=tmp_path)
    assert ended.code == 5, ended.out + ended.err
    (layout,) = json.loads((tmp_path / "report.json").read_text())["layouts"]
    wrong = {each["name"] for each in layout["differences"] if not each["passed"]}
    assert not layout["error"]
    head = ended.out.splitlines().index(next(line for line in ended.out.splitlines() if line.endswith("DIFFERS")))
    assert ended.out.splitlines()[head].startswith(f"{plant.layouts[0]} | ")
    parameters = wrong - {"loss", "gradient norm"}
    assert ended.out.splitlines()[head + 1].strip().partition(":")[0] in parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", plants.MODELS)
def test_the_layouts_of_plants_pass_without_them(name: str, tmp_path: Path) -> None:
    """Otherwise the fault would not be what was seen."""
    layouts = dict.fromkeys(layout for plant in plants.PLANTS if plant.model == name for layout in plant.layouts)
    model = [word for path, value in flatten(plants.MODELS[name], "model.").items() for word in flags(path, value)]
    ended = run(*model, "--plant", "none", "--layouts", *layouts, folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize("products", [TORCH_PRODUCTS, MatrixProducts()], ids=["torch's", "a format's"])
def test_noise_is_measured_with_products_in_parts(products: MatrixProducts) -> None:
    """They round otherwise, so a difference that rounding explains is allowed, and none beyond it."""
    x, weight = torch.randn(64, 96), torch.randn(32, 96)
    plain = products.forward(x, weight, None), products.input_gradient(torch.ones(64, 32), weight)
    with products_in_parts(3):
        found = products.forward(x, weight, None), products.input_gradient(torch.ones(64, 32), weight)
    for y, other in zip(plain, found, strict=True):
        torch.testing.assert_close(y, other)
    assert not torch.equal(plain[0], found[0])


def flags(path: str, value: object) -> list[str]:
    """An option as flags."""
    if isinstance(value, bool):
        section, _, key = path.rpartition(".")
        return [f"--{path}" if value else f"--{section}.no_{key}"]
    if isinstance(value, tuple):
        return []
    return [f"--{path}", str(value)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "muon"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek", "gpt_oss"])
def test_unequal_numbers_of_experts_pass_with_every_optimizer(family: str, optimizer: str, tmp_path: Path) -> None:
    """Fault neighbor-layouts-taken-for-equal."""
    layouts = ("dp2,ep2", "cp2,ep2,ulysses", "dp4,ep4,zero2", "dp4,ep4,zero3", "dp4,ep2,shard2", "tp2,dp2,ep2,etp2")
    model = ("--model.family", family, "--model.moe.num_experts", "3", "--optimizer.name", optimizer)
    heads = ("--model.num_attention_heads", "8", "--model.num_key_value_heads", "0", "--model.hidden_size", "64")
    ended = run(*CONFIG, *model, *heads, "--optimizer.ema", "0.9", "--layouts", *layouts, folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", ["tiny", "gpt2-124m", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_drawn_layouts_pass_in_every_precision(config: str, precision: str, tmp_path: Path) -> None:
    words = ("--config", config, "--train.precision", precision, "--sample", "5", "--seed", "7")
    ended = run(*words, folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err
