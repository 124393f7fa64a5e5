"""Flags of other frameworks: the table of them, its page, and what a person is told who types one."""

import ast
import importlib.util
import json
import re
from inspect import signature
from pathlib import Path

import pytest
from megapar_models.registry import FAMILIES, FOR_OPTIONS
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.rows import row_of
from megapar_tools.migrate.table import SOURCES, TABLE

from megapar.base.errors import ConfigError
from megapar.config.options import option_types
from tests.support.options import load
from tests.support.source_tree import ROOT
from tools import compare_flags

ROWS = [(framework, row) for framework, rows in TABLE.items() for row in rows]
EXAMPLES = json.loads((ROOT / "tests/data/megatron_examples.json").read_text())


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    return str(caught.value)


def refusal_of_toml(folder: Path, text: str) -> str:
    """What is said of a file with this text, without the number of its line."""
    file = folder / "options.toml"
    file.write_text(text)
    return re.sub(r"^.*?:\d+: ", "", refusal("--config", str(file)))


# The table


def test_every_row_names_an_option_of_ours_and_values_that_it_takes():
    types = FOR_OPTIONS.types()
    wrong = []
    values: dict[str, set[str]] = {}  # by option
    for framework, row in ROWS:
        where = f"{framework} {row.name}"
        if row.relation in ("always", "lacking"):
            wrong += [f"{where}: has an option"] * bool(row.option) + [f"{where}: has no note"] * (not row.note)
            continue
        if row.option not in types:
            wrong.append(f"{where}: no option {row.option!r}")
            continue
        ours = {"choice": [*row.choices.values()], "sets": [row.ours]}.get(row.relation, [])
        wrong += [f"{where}: has no value"] * (row.relation in ("choice", "sets") and not (ours and all(ours)))
        values.setdefault(row.option, set()).update(ours)
    assert not wrong, "\n".join(wrong)
    # A command gives an option one value, so the second values are in a second command.
    unread = set(values)
    for family in FAMILIES:
        # Options of several families are read with the first of them.
        read = [option for option in unread if option in option_types(FAMILIES[family].options)]
        unread -= set(read)
        for number in range(max((len(values[option]) for option in read), default=0)):
            given = {option: sorted(values[option])[number] for option in read if number < len(values[option])}
            given["model.family"] = family
            load([word for option, value in given.items() for word in words(option, value)])
    assert not unread


def test_every_row_has_known_words_and_a_conversion_that_converts():
    """A misspelled word, note or conversion in a file of rows is an error, not a row without it."""
    for framework, row in ROWS:
        assert row.convert is None or [*signature(row.convert).parameters] == ["job", "words"], (
            f"{framework} {row.name}"
        )
        assert "{" not in row.note, f"{framework} {row.name}"
    for wrong in (
        {"same": "run_dir", "convert": "no_such_conversion"},
        {"same": "run_dir", "convert": ["times", "run_dir"]},
        {"same": "run_dir", "note": "{NO_SUCH_NOTE}"},
        {"same": "run_dir", "defualt": "1"},
        {"smae": "run_dir"},
    ):
        with pytest.raises((KeyError, TypeError, StopIteration)):
            row_of("x", {**wrong}, {})


def words(option: str, value: str) -> list[str]:
    """An option with a value, as on a command line."""
    if FOR_OPTIONS.types()[option] is not bool:
        return [f"--{option}", value]
    section, _, key = option.rpartition(".")
    return [f"--{option}" if value == "true" else f"--{section}.no_{key}"]


def test_options_that_notes_name_exist():
    """Notes say train.steps, and stand in hints and on the page."""
    options = {*FOR_OPTIONS.types()}
    sections = {path.partition(".")[0] for path in options if "." in path}
    wrong = []
    for framework, row in ROWS:
        for section, key in re.findall(r"\b([a-z]+)\.([a-z0-9_]+(?:\.[a-z0-9_]+)*)", row.note):
            if section in sections and f"{section}.{key.replace('no_', '', 1)}" not in options:
                wrong.append(f"{framework} {row.name}: {section}.{key}")
    assert not wrong, "\n".join(wrong)


def test_no_framework_has_a_flag_twice():
    for framework, rows in TABLE.items():
        names = [row.name.replace("-", "_") for row in rows]
        assert len(names) == len(set(names)), [f"{framework} {name}" for name in names if names.count(name) > 1]
    assert {*TABLE} == {*SOURCES}
    assert len(ROWS) >= 500


@pytest.mark.parametrize(("script", "flags"), EXAMPLES["scripts"].items(), ids=lambda value: str(value)[:20])
def test_the_table_has_every_flag_of_megatrons_own_launch_scripts(script, flags):
    names = {row.name.replace("-", "_") for framework in ("Megatron-LM", "torchrun") for row in TABLE[framework]}
    assert len(flags) == {"gpt3": 38, "llama": 82, "mixtral": 64}[script.split("/")[1]]
    missing = [flag for flag in flags if flag.replace("-", "_") not in names]
    assert not missing, f"{script}: {missing}"
    assert EXAMPLES["commit"] == SOURCES["Megatron-LM"].state


def test_fields_of_training_arguments_are_those_of_the_pinned_release():
    """Read from the source of transformers, because importing it takes seconds."""
    package = Path(importlib.util.find_spec("transformers").origin).parent
    tree = ast.parse((package / "training_args.py").read_text())
    fields = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    names = {line.target.id for line in fields.body if isinstance(line, ast.AnnAssign)}
    assert not read_flags("hugging_face")["rows"]["training_arguments"].keys() - names
    pinned = SOURCES["Hugging Face"].state.removeprefix("v")
    assert f"transformers=={pinned}\n" in (ROOT / "constraints.txt").read_text()


def test_the_table_has_every_model_type_with_its_family():
    (row,) = (row for row in TABLE["Hugging Face"] if row.name == "model_type")
    expected = {
        model_type: name
        for name, family in FAMILIES.items()
        if family.hugging_face is not None
        for model_type in family.hugging_face.model_types
    }
    assert row.choices == expected


def test_the_page_has_the_table_and_its_sources():
    text = compare_flags.PAGE.read_text()
    assert text == compare_flags.page(), "run python tools/compare_flags.py"
    for framework, row in ROWS:
        assert f"{row.name}`" in text, f"{framework} {row.name}"
    for framework in ("Megatron-LM", "torchtitan", "DeepSpeed"):
        above_the_tables = text.partition(compare_flags.BEGIN)[0]
        assert SOURCES[framework].state in above_the_tables, f"{framework}: the page names another commit"


# Hints


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--tensor-model-parallel-size 8", "it is Megatron-LM's; here: --parallel.tp 8"),
        ("--tensor_model_parallel_size=8", "it is Megatron-LM's; here: --parallel.tp 8"),
        ("--lr=3", "it is Megatron-LM's; here: --optimizer.lr 3"),
        ("--lr-decay-style WSD", "it is Megatron-LM's; here: --optimizer.schedule wsd"),
        (
            "--cp-comm-type a2a+p2p",
            "it is Megatron-LM's; here: --parallel.cp_attention: gather for all_gather, ring for p2p, ulysses for a2a",
        ),
        ("--use-distributed-optimizer", "it is Megatron-LM's; here: --optimizer.zero_stage 1"),
        ("--add-qkv-bias", "it is Megatron-LM's; here: --model.attention_bias"),
        (
            "--untie-embeddings-and-output-weights",
            "it is Megatron-LM's; here: --model.no_tie_word_embeddings (the default)",
        ),
        (
            "--adam-beta1 0.9",
            "it is Megatron-LM's and Hugging Face's; here: --optimizer.betas: its first number",
        ),
        ("--use-mcore-models", "it is Megatron-LM's; leave it out: layers are megapar's own"),
        (
            "--optimizer adam",
            "it is Megatron-LM's; leave it out: AdamW; optimizer.name has others, whose defaults differ "
            "from those there",
        ),
        (
            "--optimizer sgd",
            "it is Megatron-LM's; megapar has only adam: AdamW; optimizer.name has others, whose defaults differ "
            "from those there",
        ),
        ("--bf16 True", "it is Megatron-LM's and Hugging Face's; here: --train.precision bf16"),
        ("--fp8-format hybrid", "it is Megatron-LM's; here: --train.fp8 blocks (gradients are e4m3 too)"),
        (
            "--fp4-format e2m1",
            "it is Megatron-LM's; megapar has none: numbers of 4 bits are not built; train.fp8 blocks is the smallest "
            "format",
        ),
        ("--bf16 False", "it is Megatron-LM's and Hugging Face's; here: --train.precision"),
        ("--nproc_per_node 8", "it is torchrun's; here: --launch.nproc 8 (or give it to torchrun, as before)"),
        ("--zero_optimization.stage 2", "it is DeepSpeed's; here: --optimizer.zero_stage 2"),
        (
            "--gradient_accumulation_steps 4",
            "it is DeepSpeed's and Hugging Face's; here: --train.global_batch_size: "
            "train.micro_batch_size x this number x dp",
        ),
        (
            "--training.num_tokens_per_train_step 4096",
            "it is torchtitan's; here: --train.global_batch_size: tokens / train.seq_length",
        ),
        # These were answered with a wrong option once.
        ("--parallelism.tensor_parallel_degree 4", "it is torchtitan's; here: --parallel.tp 4"),
        (
            "--data-path A",
            "it is Megatron-LM's and Hugging Face's; here: --data.train: PREFIX, or a blend such as 0.7:A 0.3:B",
        ),
        (
            "--compile.enable",
            "it is torchtitan's; here: --kernels.compile (norms, activations and rotations are compiled, by inductor; "
            "products and communication stay outside)",
        ),
        (
            "--offload_optimizer",
            "zero_optimization.offload_optimizer is DeepSpeed's; here: --optimizer.offload: its ratio, or 1; of main "
            "weights and moments",
        ),
        ("--rampup-batch-size 16 8 300000", "it is Megatron-LM's; here: --train.batch_ramp 16 8 300000"),
        ("--optimizer.learning_rate 1e-4", "learning_rate is Hugging Face's; here: --optimizer.lr 1e-4"),
        ("--autotp_size 8", "tensor_parallel.autotp_size is DeepSpeed's; here: --parallel.tp 8"),
        # Frameworks that agree are answered once.
        (
            "--deepspeed ds.json",
            "it is Megatron-LM's, DeepSpeed's and Hugging Face's; leave it out: megapar from_deepspeed turns the "
            "ds_config into options",
        ),
        # A key of a section, which has a row as a whole.
        (
            "--wandb.team x",
            "wandb is DeepSpeed's; megapar has none: Weights & Biases reads its own variables, such as WANDB_ENTITY",
        ),
    ],
)
def test_a_flag_of_another_framework_is_answered_with_ours(typed, said):
    """Fault flag-of-another-framework."""
    flag = re.split("[ =]", typed)[0]
    assert refusal(*typed.split()) == f"{flag}: no such flag; {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[zero_optimization]\nstage = 2",
            "zero_optimization.stage: no such option; it is DeepSpeed's; here: optimizer.zero_stage = 2",
        ),
        (
            "[optimizer.params]\nbetas = [0.9, 0.95]",
            "optimizer.params.betas: no such option; it is DeepSpeed's; here: optimizer.betas = [0.9, 0.95]",
        ),
        ("[training]\nsteps = 5", "training.steps: no such option; it is torchtitan's; here: train.steps = 5"),
        (
            'output_dir = "runs/a"',
            'output_dir: no such option; it is Hugging Face\'s; here: run_dir = "runs/a"',
        ),
        (
            "[bf16]\nenabled = true",
            'bf16.enabled: no such option; it is DeepSpeed\'s; here: train.precision = "bf16"',
        ),
        ("[bf16]\nenabled = false", "bf16.enabled: no such option; it is DeepSpeed's; here: train.precision"),
        (
            '[fp8]\nformat = "hybrid"',
            "fp8.format: no such option; train.fp8 blocks multiplies matrices of layers in FP8, and train.fp8_skip "
            "names those that it leaves out",
        ),
    ],
)
def test_a_key_of_another_framework_is_answered_in_toml(tmp_path, text, said):
    """Fault flag-of-another-framework."""
    assert refusal_of_toml(tmp_path, text) == said


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.moe.capacity_factor", "no token is dropped here"),
        ("--moe-expert-capacity-factor", "it is Megatron-LM's; megapar has none: no token is dropped here"),
        ("--model.moe.token_drop", "no token is dropped here"),
        ("--model.moe.router_jitter", "routers add no noise here"),
        ("--train.epochs", "megapar has no epochs: runs are counted in steps"),
    ],
)
def test_what_megapar_lacks_is_answered_under_any_name(flag, said):
    """Fault unknown-option."""
    assert refusal(flag, "1").startswith(f"{flag}: no such flag; {said}")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.moe.intermediate_size", "did you mean model.moe.moe_intermediate_size"),
        ("--moe_intermediate_size", "did you mean model.moe.moe_intermediate_size?"),
        ("--train.stps", "did you mean train.steps?"),
        ("--train.sequence_length", "did you mean train.seq_length?"),
        ("--hiddensize", "did you mean model.hidden_size?"),
        ("--batch_size", "did you mean train.micro_batch_size or train.global_batch_size?"),
        ("--every", "did you mean log.every or checkpoint.every?"),
        ("--train.sed", "did you mean train.seed?"),
        ("--linear-num-key-heads", "did you mean model.linear_num_key_heads?"),
    ],
)
def test_a_near_name_is_suggested(flag, said):
    """Fault unknown-option."""
    assert refusal(flag, "1").startswith(f"{flag}: no such flag; {said}")


@pytest.mark.parametrize(
    "flag",
    [
        # One word more is another name: each of these once got, or would get, an option that means something else.
        *("--fim-spm-rate", "--full-validation", "--qk-l2-norm"),
        *("--muon-num-ns-steps", "--lion-beta1", "--grpo-kl-beta", "--pipeline.seed_layers", "--dataloader-fast-load"),
        # DeepSpeed and Hugging Face mean different things by it.
        "--trainer.activation_checkpointing",
        *("--size", "--quux.wibble", "--", "--_", "--a.b.c.d"),
    ],
)
def test_nothing_is_suggested_where_nothing_is_near(flag):
    assert refusal(flag, "1") == f"{flag}: no such flag"


def test_all_unknown_flags_are_named_at_once_each_on_one_line():
    """Whatever a value holds. Fault flag-of-another-framework."""
    lines = refusal("--num-layers", "2", "--data.train", "A", "--quux", "--lr", "1\n2", "--wandb-project").split("\n")
    assert [line.partition(":")[0] for line in lines] == ["--num-layers", "--quux", "--lr", "--wandb-project"]
    assert lines[2] == "--lr: no such flag; it is Megatron-LM's; here: --optimizer.lr"


def test_a_very_long_name_is_refused_soon():
    assert refusal("--" + "ab." * 20_000, "1").endswith("no such flag")
