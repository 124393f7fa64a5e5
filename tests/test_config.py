"""Options: the source of each value, the message for a wrong one, and the soundness of every shipped config."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path

import megapar_models
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megapar_models.families.gpt import GPTModel
from megapar_models.families.llama import LlamaModel
from megapar_models.families.mixtral import MixtralModel
from megapar_models.family import Codec
from megapar_models.registry import FAMILIES, FOR_OPTIONS, presets, validate, weight_options
from megapar_models.rotary import RopeScaling

import megapar.config.model_options
import megapar.config.options
from megapar.base.errors import ConfigError
from megapar.config import compatible
from megapar.config.compatible import changes
from megapar.config.derive import num_microbatches, with_vocabulary
from megapar.config.files import Resolved, to_toml
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import (
    Config,
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    flatten,
    option_types,
    unflatten,
)
from megapar.observe.report import length_of_run, warnings
from tests.support.options import load
from tests.support.sweeps import slow_but

CONFIGS = Path(__file__).parents[1] / "pretrain_scripts" / "configs"
WORLD_SIZES = {
    "tiny": 1,
    "laptop": 8,
    "quickstart": 8,
    "gpt_125m": 1,
    "llama_7b": 8,
    "llama3_8b_1gpu": 1,
    "llama3_8b_adapter": 1,
    "llama_70b": 64,
    "moe_laptop": 8,
    "mixtral_8x7b": 8,
    "qwen3_30b_a3b": 64,
    "qwen3_30b_a3b_chat": 64,
}


def problems(config: Config, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(config, world_size)
    return str(caught.value).split("\n")


def refusal(config: Config, world_size: int = 1) -> str:
    lines = problems(config, world_size)
    assert len(lines) == 1, lines
    return lines[0]


def load_refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


# What cannot run, and what is said about it: the faults under Options in docs/faults.md


def test_heads_that_do_not_divide_by_tp_are_refused_with_the_tps_that_do():
    """Fault heads-divide-by-tp."""
    config = Config(ModelConfig(hidden_size=96, num_attention_heads=12), ParallelConfig(tp=8))
    message = refusal(config, 8)
    assert message == ("model.num_attention_heads=12, parallel.tp=8: heads must divide by tp; tp may be 1, 2 or 4")
    assert ConfigError.exit_code == 2


def test_kv_heads_may_be_fewer_than_tp_but_must_divide_the_heads():
    """Fault kv-heads-need-not-divide."""
    model = ModelConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=2)
    assert validate(Config(model, ParallelConfig(tp=4)), 4).model.num_key_value_heads == 2
    message = refusal(Config(replace(model, num_key_value_heads=5)))
    assert "model.num_key_value_heads=5" in message
    assert "num_key_value_heads may be 1, 2, 3, 4, 6 or 12" in message


def test_layers_need_not_divide_by_pp():
    """Fault layers-need-not-divide."""
    validate(Config(ModelConfig(num_hidden_layers=13), ParallelConfig(pp=4)), 4)
    validate(Config(ModelConfig(num_hidden_layers=13), ParallelConfig(pp=4, partition=(3, 4, 4, 2))), 4)


@pytest.mark.parametrize(
    ("layers", "partition"), [(13, (3, 4, 4)), (13, (3, 4, 4, 1)), (13, (6, 0, 6, 1)), (2, (0, 0, 2, 0))]
)
def test_a_partition_that_does_not_fit_is_refused_with_one_that_does(layers, partition):
    """Fault layers-need-not-divide."""
    config = Config(ModelConfig(num_hidden_layers=layers), ParallelConfig(pp=4, partition=partition))
    message = refusal(config, 4)
    assert f"parallel.partition={' '.join(map(str, partition))}" in message
    assert f"model.num_hidden_layers={layers}" in message
    fits = tuple(map(int, re.search(r"need one; use ([\d ]+),", message)[1].split()))
    validate(replace(config, parallel=replace(config.parallel, partition=fits)), 4)


@pytest.mark.parametrize("family", slow_but(range(0, len(FAMILIES), 3), FAMILIES))
def test_an_option_of_other_families_is_refused(family):
    """No list says what a family ignores, so nobody can forget a new option in it."""
    read = option_types(FAMILIES[family].options)
    others = FOR_OPTIONS.types().keys() - read.keys()
    assert others
    for path in others:
        with pytest.raises(ConfigError, match=f"--{path}: family {family} does not read it; "):
            load(["--model.family", family, f"--{path}", "1"])


def test_too_few_layers_for_the_stages_names_all_three_options():
    """Fault more-stages-than-layers."""
    parallel = ParallelConfig(pp=4, vpp=3, schedule="interleaved")
    message = refusal(Config(ModelConfig(num_hidden_layers=8), parallel), 4)
    assert message.startswith("model.num_hidden_layers=8, parallel.pp=4, parallel.vpp=3: 12 stages")
    assert message.endswith("vpp may be at most 2")
    validate(Config(ModelConfig(num_hidden_layers=8), replace(parallel, vpp=2)), 4)
    validate(Config(ModelConfig(num_hidden_layers=10), parallel), 4)  # the first and last stage may be empty
    assert "num_hidden_layers=9" in refusal(Config(ModelConfig(num_hidden_layers=9), parallel), 4)


def test_vpp_needs_a_schedule_that_holds_several_stages_on_a_rank():
    """Fault more-stages-than-layers."""
    assert "parallel.schedule=1f1b" in refusal(Config(parallel=ParallelConfig(pp=2, vpp=2)), 2)
    for schedule in ("interleaved", "gpipe"):
        validate(Config(parallel=ParallelConfig(pp=2, vpp=2, schedule=schedule)), 2)
    validate(Config(parallel=ParallelConfig(pp=2, schedule="interleaved")), 2)


def test_a_schedule_decides_how_many_stages_a_rank_has():
    """Given or derived. Fault more-stages-than-layers."""
    stages = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-2p": 1, "zb-v": 2, "dualpipe-v": 2}
    stages |= {"interleaved": 2, "zb-interleaved": 2}
    for schedule, vpp in stages.items():
        for number in (0, vpp):
            derived = validate(Config(parallel=ParallelConfig(pp=2, vpp=number, schedule=schedule)), 2)
            assert derived.parallel.vpp == vpp
    own = "tests.support.schedules:BACK_AND_FORTH"  # it says itself that a rank has two
    assert validate(Config(parallel=ParallelConfig(pp=2, schedule=own)), 2).parallel.vpp == 2
    assert "runs two stages on each rank" in refusal(Config(parallel=ParallelConfig(pp=2, vpp=3, schedule=own)), 2)
    message = refusal(Config(parallel=ParallelConfig(pp=2, vpp=1, schedule="v-half")), 2)
    assert message == (
        "parallel.vpp=1, parallel.schedule=v-half: v-half runs two stages on each rank; set parallel.vpp 2, or "
        "set parallel.schedule 1f1b or zb-h1"
    )
    assert "set parallel.vpp 1, or set parallel.schedule interleaved, zb-interleaved or gpipe" in refusal(
        Config(parallel=ParallelConfig(pp=2, vpp=3, schedule="zb-h1")), 2
    )
    validate(Config(parallel=ParallelConfig(schedule_costs=(1.0, 2.0, 0.0))), 1)  # what auto may have measured
    assert "must be three times" in refusal(Config(parallel=ParallelConfig(schedule_costs=(1.0, 2.0))), 1)


def test_a_grid_that_is_not_the_world_is_refused():
    """Fault grid-is-the-world."""
    message = refusal(Config(parallel=ParallelConfig(tp=2, pp=2)), 6)
    assert "tp(2)*pp(2)=4 does not divide world size 6" in message
    assert "tp*pp may be 1, 2, 3 or 6" in message
    assert "4 or 8 ranks" in message
    message = refusal(Config(parallel=ParallelConfig(tp=2, pp=2, dp=3)), 8)
    assert "tp(2)*pp(2)*dp(3)=12 is not world size 8; use 2" in message


def test_validation_needs_no_torch_and_so_precedes_every_process_group():
    """Fault grid-is-the-world."""
    code = """
import sys
from megapar.config.files import load
from megapar.base.errors import ConfigError
from megapar.config.model_rules import ModelRules
from megapar.config.validate import validate
from megapar.config.virtual_stages import ONE
try:
    validate(load(["--parallel.tp", "2"]).config, 3, ModelRules(name="llama", activations=("silu",)), ONE)
except ConfigError as error:
    print(error)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not divide world size 3" in done.stdout


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    """Fault global-batch-divides."""
    train = TrainConfig(global_batch_size=10, micro_batch_size=4)
    message = refusal(Config(train=train), 2)
    assert message.startswith("train.global_batch_size=10, train.micro_batch_size=4: ")
    assert message.endswith("use 8 or 12")
    for works in (8, 12):
        validate(Config(train=replace(train, global_batch_size=works)), 2)
    assert refusal(Config(train=replace(train, global_batch_size=1)), 2).endswith("use 4")


def test_replicas_that_have_fewer_micro_batches_are_told():
    config = validate(Config(train=TrainConfig(global_batch_size=20, micro_batch_size=4)), 3)
    assert num_microbatches(config) == 2
    assert warnings(config) == ["parallel.dp=3: 2 replicas run 2 micro-batches a step, the others 1 and wait"]
    config = validate(Config(train=TrainConfig(global_batch_size=28, micro_batch_size=4)), 3)
    assert warnings(config) == ["parallel.dp=3: 1 replica runs 3 micro-batches a step, the others 2 and wait"]
    config = validate(Config(train=TrainConfig(global_batch_size=8, micro_batch_size=4)), 3)
    assert warnings(config) == ["parallel.dp=3: 2 replicas run 1 micro-batch a step, the others 0 and wait"]


def test_few_or_ragged_micro_batches_run_with_a_warning_that_names_the_bubble():
    """Fault idle-pipeline."""
    config = validate(Config(parallel=ParallelConfig(pp=4), train=TrainConfig(global_batch_size=2)), 4)
    assert num_microbatches(config) == 2
    (line,) = warnings(config)
    assert "2 micro-batches" in line
    assert "about 60%" in line  # 3 / (2 + 3)
    assert "train.global_batch_size=16 would make it 16%" in line  # 3 / (16 + 3)
    model, parallel = ModelConfig(num_hidden_layers=8), ParallelConfig(pp=4, vpp=2, schedule="interleaved")
    (line,) = warnings(validate(Config(model, parallel, TrainConfig(global_batch_size=6)), 4))
    # The last two micro-batches of 6 go round alone: 3 / (2 * 6 + 3) = 20% would hold for a multiple of pp.
    assert "about 27%" in line
    assert "train.global_batch_size=8 would make it 16%" in line  # 3 / (2 * 8 + 3)
    assert warnings(validate(Config(model, parallel, TrainConfig(global_batch_size=8)), 4)) == []
    assert warnings(validate(Config(train=TrainConfig(global_batch_size=1)), 1)) == []


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches", "idle"), [(8, 5, 4, 53), (4, 3, 5, 32), (2, 5, 1, 50), (4, 2, 6, 27), (4, 1, 2, 60)]
)
def test_the_idle_share_is_that_of_the_plans_that_run(pp, vpp, microbatches, idle):
    """Fault idle-pipeline. The formula (p - 1) / (v m + p - 1) would say 26, 17, 17, 20 and 60."""
    parallel = ParallelConfig(pp=pp, vpp=vpp, schedule="interleaved" if vpp > 1 else "1f1b")
    config = Config(ModelConfig(num_hidden_layers=40), parallel, TrainConfig(global_batch_size=microbatches))
    (line,) = warnings(validate(config, pp))
    assert f"idle about {idle}% of the time" in line


def test_the_tokens_of_a_run_are_those_of_its_growing_batches():
    train = TrainConfig(steps=10, global_batch_size=40, batch_ramp=(10, 10, 100), seq_length=12)
    assert length_of_run(Config(train=train)) == f"10 steps of 120 to 480 tokens = {12 * train.samples():,} tokens"
    consumed = 0
    for _ in range(10):
        consumed += train.batch_size(consumed)
    assert train.samples() == consumed < 400
    assert length_of_run(Config(train=replace(train, batch_ramp=()))) == "10 steps of 480 tokens = 4,800 tokens"


def test_an_unknown_key_or_flag_is_refused_with_what_was_meant(tmp_path):
    """Fault unknown-option."""
    file = write(tmp_path, "c.toml", "# a comment\n[train]\nsteps = 5\n\n[modle]\nhidden_siz = 3\n")
    assert load_refusal(["--config", file]) == (
        f"{file}:6: modle.hidden_siz: no such option; did you mean model.hidden_size?"
    )
    assert load_refusal(["--modle.vocab", "3"]) == "--modle.vocab: no such flag; did you mean model.vocab_size?"
    assert load_refusal(["--train.lr=3"]) == "--train.lr: no such flag; did you mean optimizer.lr?"
    assert load_refusal(["--quux.wibble", "3"]) == "--quux.wibble: no such flag"
    assert load_refusal(["train.steps", "3"]).startswith("'train.steps' follows no flag")


def test_an_option_that_two_flags_set_is_refused_with_both():
    """Fault option-set-twice."""
    said = load_refusal(["--train.steps", "3", "--train.seed", "1", "--train.steps=4"])
    assert said == "--train.steps is given twice: --train.steps 3 and --train.steps=4; give it once"
    said = load_refusal(["--launch.nproc", "2", "--log.tensorboard", "--log.no_tensorboard"])
    assert said == "--log.tensorboard is given twice: --log.tensorboard and --log.no_tensorboard; give it once"


def test_a_source_under_two_spellings_is_refused_with_both():
    """Fault option-set-twice."""

    def train_on(*entries):
        return Config(data=DataConfig(train=entries))

    said = refusal(train_on("1:a/b", "1:a/./x/../b"))
    assert said == "data.train=a/b: named twice, also as a/./x/../b; give it one weight, the sum"
    assert "also as" in refusal(train_on("1:a", f"1:{os.getcwd()}/a"))
    assert "also as" in refusal(train_on("1:hf:json:data/x.jsonl", "1:hf:json:./data/x.jsonl"))
    assert refusal(train_on("1:a", "2:a")) == "data.train=a: named twice; give it one weight, the sum"
    validate(train_on("1:a", "1:b", "1:hf:json:a"), 1)


A_LENGTH = "a whole number of steps, or a text such as '2000 samples'"


def test_a_number_beyond_64_bits_is_refused_in_flags_as_in_files(tmp_path):
    """Fault wrong-value."""
    file = write(tmp_path, "c.toml", "[train]\nsteps = 99999999999999999999999\n")
    assert load_refusal(["--config", file]).endswith("steps = 99999999999999999999999: expected a whole number")
    said = load_refusal(["--train.seed", "7", "--train.steps", "99999999999999999999999"])
    assert said == "--train.steps 99999999999999999999999: expected a whole number"
    said = load_refusal(["--parallel.partition", "1", "99999999999999999999999"])
    assert said == "--parallel.partition 1 99999999999999999999999: expected whole numbers"


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ('lr = "3e-4x"', "--optimizer.lr 3e-4x", "a number"),
        ("warmup_steps = 1.5", "--optimizer.warmup_steps 1.5", A_LENGTH),
        ("warmup_steps = true", "--optimizer.warmup_steps true", A_LENGTH),
        ('warmup_steps = "9 samples more"', "--optimizer.warmup_steps 9 samples more", A_LENGTH),
        ('decay_steps = "0 samples"', "--optimizer.decay_steps=0 samples", A_LENGTH),
        ("betas = [0.9]", "--optimizer.betas 0.9", "2 numbers"),
        ("betas = 0.9", "--optimizer.betas 0.9 0.9 0.9", "2 numbers"),
        ('moments = "fp8"', "--optimizer.moments fp8", "one of fp32, bf16"),
        ("zero_stage = true", "--optimizer.zero_stage 4", "one of 0, 1, 2, 3"),
        ("overlap_grad_reduce = 1", "--optimizer.overlap_grad_reduce 1", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place_and_the_type(tmp_path, capsys, line, flags, expected):
    """Fault wrong-value."""
    file = write(tmp_path, "c.toml", f"[optimizer]\n\n{line}\n")
    assert load_refusal(["--config", file]) == f"{file}:3: optimizer.{line}: expected {expected}"
    from_flag = load_refusal(["--train.steps", "5", *flags.split()])
    assert from_flag.startswith(f"{flags}: expected ")
    assert expected in from_flag or "--optimizer.no_overlap_grad_reduce is no" in from_flag
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (OptimizerConfig(lr=-1.0), "optimizer.lr=-1.0: must be at least 0"),
        (OptimizerConfig(lr=float("nan")), "optimizer.lr=nan: must be a finite number"),
        (OptimizerConfig(betas=(0.9, 1.0)), "optimizer.betas=0.9 1.0: must be at least 0 and below 1"),
        (OptimizerConfig(eps=0.0), "optimizer.eps=0.0: must be above 0"),
        (OptimizerConfig(warmup_steps=101), "optimizer.warmup_steps=101, train.steps=100: "),
        (OptimizerConfig(min_lr=1.0), "optimizer.min_lr=1.0, optimizer.lr=0.0003: "),
        (
            OptimizerConfig(schedule="cos"),
            "optimizer.schedule=cos: unknown; there are cosine, linear, constant, inverse_sqrt, wsd, and MODULE:NAME",
        ),
        (
            OptimizerConfig(schedule="tests.toy_rates:LENGTH"),
            "is int, not a megapar.config.rate",
        ),
        (OptimizerConfig(decay_steps=5, schedule="constant"), "optimizer.decay_steps=5, optimizer.schedule=constant: "),
        (OptimizerConfig(schedule="constant", min_lr=1e-5), "optimizer.min_lr=1e-05, optimizer.schedule=constant: "),
        (OptimizerConfig(schedule="wsd", warmup_steps=60, decay_steps=50), "decay_steps may be at most 40"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(optimizer, said):
    """Fault wrong-value."""
    assert said in refusal(Config(optimizer=optimizer))


def test_the_mlp_must_divide_by_tp_and_the_vocabulary_need_not():
    """Fault mlp-divides-by-tp."""
    model = ModelConfig(intermediate_size=129, vocab_size=50257)
    message = refusal(Config(model, ParallelConfig(tp=2)), 2)
    assert message.startswith("model.intermediate_size=129, parallel.tp=2: ")
    assert message.endswith("use 128 or 130, or set parallel.tp 1")
    assert validate(Config(replace(model, intermediate_size=128), ParallelConfig(tp=2)), 2).model.vocab_size == 50257


def test_sequence_parallel_needs_sequences_that_divide_by_tp():
    """Fault sequence-divides-by-tp."""
    config = Config(parallel=ParallelConfig(tp=4, sequence_parallel=True), train=TrainConfig(seq_length=126))
    message = refusal(config, 4)
    assert "train.seq_length=126, parallel.tp=4" in message
    assert "use 124 or 128" in message
    validate(replace(config, parallel=ParallelConfig(tp=4)), 4)
    validate(replace(config, parallel=ParallelConfig(sequence_parallel=True)), 1)


def test_what_decides_the_weights_is_told_from_what_may_change_on_resume():
    """Fault options-fixed-on-resumption."""
    saved = validate(Config(), 2)
    now = validate(Config(parallel=ParallelConfig(tp=2), optimizer=OptimizerConfig(lr=1e-4, betas=(0.9, 0.99))), 2)
    assert weight_options(saved) == weight_options(now)
    assert changes(json.loads(json.dumps(flatten(saved))), saved) == []
    assert changes(json.loads(json.dumps(flatten(saved))), now) == [
        "parallel.tp: 1 -> 2",
        "parallel.dp: 2 -> 1",
        "optimizer.lr: 0.0003 -> 0.0001",
        "optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]",
    ]
    other = replace(saved, model=replace(saved.model, hidden_size=128))
    assert set(weight_options(saved).items()) - set(weight_options(other).items()) == {("hidden_size", 256)}


def test_each_option_of_the_model_is_classified():
    """Fault options-fixed-on-resumption: a new option decides the weights, unless its field says otherwise."""
    of_model = {path for path in FOR_OPTIONS.types() if path.startswith("model.")}
    function: set[str] = set()
    training: set[str] = set()
    for rules in FAMILIES.values():
        function |= compatible.decided_by("function", rules.options())
        training |= compatible.decided_by("training", rules.options())
    assert not function & training
    named = {path.removeprefix("model.") for path in of_model - function - training}
    assert named == {
        *("family", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "vocab_size", "hidden_act", "attention_bias", "qk_norm", "tie_word_embeddings", "head"),
        *("attention_out_bias", "mlp_bias", "use_bias", "output_norms", "norms", "head_bias", "parallel_residual"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe.first_k_dense_replace"),
        *("moe.num_experts", "moe.moe_intermediate_size", "moe.mlp_only_layers", "moe.balance"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe.first_k_dense_replace"),
        *("moe.shared_expert_intermediate_size", "moe.shared_expert_gate", "moe.interleave_moe_layer_step"),
        *("conv_width", "conv_bias", "use_attention_gate", "use_sandwich_norm"),
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
        *("mamba_proj_bias", "attn_layer_indices", "hybrid_override_pattern", "moe_latent_size", "projectors_bias"),
        *("do_layer_norm_before", "word_embed_proj_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_head_dim", "linear_conv_kernel_dim", "mamba_rms_norm"),
        *("num_attention_heads_per_layer", "gating", "swa_num_key_value_heads", "num_sliding_attention_heads"),
        *("use_post_norm", "num_nextn_predict_layers"),
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers"),
        *("use_double_wide_mlp", "hidden_size_per_layer_input"),
    }
    assert {path.removeprefix("model.") for path in training} == {
        *("max_position_embeddings", "hidden_dropout", "attention_dropout", "initializer_range", "mrope_section"),
        *("moe.router_aux_loss_coef", "moe.router_bias_update_rate", "moe.router_z_loss_coef"),
        *("mtp_loss_weight", "mtp_detach"),
    }


def test_what_makes_another_function_of_the_weights_is_named():
    """Fault options-fixed-on-resumption: an option missing in a checkpoint had its default."""
    moe = MoEConfig(num_experts=8, num_experts_per_tok=3, scoring_func="sigmoid", router_z_loss_coef=0.1)
    model = MixtralModel(family="mixtral", moe=moe, rope_scaling=RopeScaling("linear", 2.0), initializer_range=0.1)
    config = Config(model)
    saved = json.loads(json.dumps(flatten(Config(MixtralModel()))))
    del saved["model.moe.scoring_func"]
    assert compatible.function_changes(saved, config) == [
        "model.rope_scaling.rope_type (default | linear)",
        "model.rope_scaling.factor (1.0 | 2.0)",
        "model.moe.num_experts_per_tok (2 | 3)",
        "model.moe.scoring_func (softmax | sigmoid)",
    ]
    assert compatible.function_changes(json.loads(json.dumps(flatten(config))), config) == []


def test_lists_of_a_checkpoint_are_those_of_the_run():
    """A checkpoint has lists for tuples."""
    config = Config(LlamaModel(sliding_window=4, layer_types=("sliding_attention", "full_attention")))
    saved = json.loads(json.dumps(flatten(config)))
    assert compatible.function_changes(saved, config) == []
    saved["model.layer_types"] = []
    assert compatible.function_changes(saved, config) == [
        "model.layer_types ((empty) | sliding_attention full_attention)"
    ]


def test_positions_are_weights_for_gpt_alone():
    """Fault options-fixed-on-resumption."""
    for family, are_weights in (("gpt", True), ("llama", False)):
        short, long = (Config(ModelConfig(family=family, max_position_embeddings=n)) for n in (2048, 4096))
        assert (weight_options(short) != weight_options(long)) == are_weights
    stretched = Config(LlamaModel(rope_scaling=RopeScaling("linear", 2.0), rope_theta=5e5))
    assert weight_options(stretched) == weight_options(Config(LlamaModel()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nsteps = 1\nsteps = 2\n", ":3: not valid TOML: "),
        ("[train]\nsteps = 1\n[train]\nseed = 2\n", ":3: not valid TOML: "),
        ("[train]\nsteps = \t\n", ":2: not valid TOML: "),
        ("x = [\n\n", ":3: not valid TOML: "),
        (b"[data]\ntrain = ['\xff']\n", ":2: not valid TOML: byte 0xff is not UTF-8"),
        ("", ":1: sets nothing"),
        ("# nothing but a comment\n", ":1: sets nothing"),
        ("[train]\n\nseed = 99999999999999999999\n", ":3: train.seed = 99999999999999999999: expected a whole number"),
        ("train = 3\n", ":1: train: is a section"),
        ("\nbase = 3\n", ":2: base = 3: expected the path"),
        ("\nbase = 'none.toml'\n", ":2: base = 'none.toml': no such file"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_with_the_line(tmp_path, text, said):
    """Fault bad-config-file."""
    file = write(tmp_path, "c.toml", text)
    assert load_refusal(["--config", file]).startswith(file + said)


@pytest.mark.parametrize("text", ["train: {steps: 3}\n", "train:\n  steps: 3\n", "# a job\n---\ntrain:\n"])
def test_who_has_yaml_is_shown_toml(tmp_path, text):
    said = load_refusal(["--config", write(tmp_path, "c.yaml", text)])
    assert "not valid TOML: " in said
    assert "[train] and below it steps = 3, for `train: {steps: 3}`; `megapar migrate` makes one" in said
    assert "migrate" not in load_refusal(["--config", write(tmp_path, "c.toml", text)])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--config", "a.toml", "optimizer.lr=1e-3"], "expected one TOML file; options are flags: --optimizer.lr 1e-3"),
        (
            ["optimizer.lr=1e-3", "+train.steps=3"],
            "follows no flag; options are flags: --optimizer.lr 1e-3 --train.steps 3",
        ),
        (["--config", "a=b.toml", "c.toml"], "--config a=b.toml c.toml: expected one TOML file"),
    ],
)
def test_assignments_as_in_hydra_are_shown_as_flags(argv, said):
    assert load_refusal(argv).endswith(said)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    """Fault bad-config-file."""
    assert load_refusal(["--config", str(tmp_path)]).startswith(f"{tmp_path}: is a folder")
    assert load_refusal(["--config", str(tmp_path / "no.toml")]).startswith(f"{tmp_path}/no.toml: no such file")
    assert load_refusal(["--config"]) == "--config: expected one TOML file"
    assert "given twice" in load_refusal(["--config", "a.toml", "--config=b.toml"])


# Validation as a whole


def test_all_problems_are_reported_at_once():
    config = Config(
        ModelConfig(hidden_size=96, num_attention_heads=12),
        ParallelConfig(tp=8, order="tp-dp"),
        TrainConfig(global_batch_size=3, micro_batch_size=2),
        OptimizerConfig(lr=-1.0, bucket_mb=-1.0),
    )
    said = problems(config, 8)
    named = ["optimizer.lr", "optimizer.bucket_mb", "model.num_attention_heads", "parallel.order"]
    assert [line.split("=")[0] for line in said] == [*named, "train.global_batch_size"]
    sizes = Config(ModelConfig(num_attention_heads=0), ParallelConfig(tp=-1, partition=(1, -1)))
    assert problems(sizes) == [
        "model.num_attention_heads=0: must be at least 1",
        "parallel.tp=-1: must be at least 1",
        "parallel.partition=1 -1: must be at least 0",
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LlamaModel(rope_scaling=RopeScaling(factor=8.0)), "model.rope_scaling.factor=8.0: rope_type default"),
        (LlamaModel(rope_scaling=RopeScaling("linear", low_freq_factor=2.0)), "rope_type linear does not use it"),
        (LlamaModel(rope_scaling=RopeScaling("llama3", 8.0, 5.0, 4.0)), "low must not be above high"),
        (LlamaModel(rope_scaling=RopeScaling("llama3", 8.0, beta_fast=8.0)), "rope_type llama3 does not use it"),
        (LlamaModel(rope_scaling=RopeScaling("linear", truncate=False)), "rope_type linear does not use it"),
        (LlamaModel(rope_scaling=RopeScaling("yarn", 8.0, low_freq_factor=2.0)), "rope_type yarn does not use it"),
        (LlamaModel(rope_scaling=RopeScaling("yarn", 8.0, beta_fast=0.5)), "slow must not be above fast"),
        (LlamaModel(rope_scaling=RopeScaling("yarn", 8.0, mscale=1.0)), "one of them alone has no effect"),
        (
            LlamaModel(rope_scaling=RopeScaling("yarn", 8.0, attention_factor=2.0, mscale=1.0, mscale_all_dim=1.0)),
            "attention_factor takes the place of mscale",
        ),
        (ModelConfig(head_dim=5), "model.head_dim=5: rotary"),
        (ModelConfig(hidden_size=100, num_attention_heads=12), "use hidden_size 96 or 120, or set model.head_dim 8"),
        (ModelConfig(hidden_size=60, num_attention_heads=12), "must be even; 5 is odd"),
        (ModelConfig(max_position_embeddings=100), "train.seq_length=128, model.max_position_embeddings=100: "),
    ],
)
def test_a_model_option_is_obeyed_or_refused(model, said):
    assert said in refusal(Config(model))


def test_groups_of_shards_must_fit_the_replicas():
    four = Config(optimizer=OptimizerConfig(shard_ranks=4))
    assert refusal(four, 6).endswith("must divide the 6 ranks of dp x cp; use 1, 2, 3 or 6, or 0 for all")
    validate(replace(four, train=TrainConfig(global_batch_size=8)), 8)
    experts = MoEConfig(num_experts=6, moe_intermediate_size=8)
    mixture = MixtralModel("mixtral", moe=experts)
    train = TrainConfig(global_batch_size=12)
    two = Config(mixture, ParallelConfig(ep=2), train, OptimizerConfig(shard_ranks=2))
    said = refusal(two, 6)
    assert said.startswith("optimizer.shard_ranks=2, parallel.ep=2, parallel.etp=1: must divide the 3 ranks that hold")
    assert said.endswith("use 1, 3 or 6, or 0 for all")
    validate(replace(two, optimizer=OptimizerConfig(shard_ranks=3)), 6)


def test_gpt_takes_dropout_and_odd_heads():
    validate(Config(GPTModel("gpt", hidden_size=60, num_attention_heads=12, hidden_dropout=0.1)), 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(train=TrainConfig(recompute_layers=("::2",))), "train.recompute_layers=::2, train.recompute=none: "),
        (Config(train=TrainConfig(recompute_layers=("0",))), "train.recompute_layers=0, train.recompute=none: "),
        (
            Config(train=TrainConfig(recompute="full", recompute_layers=("::2", "5"))),
            "train.recompute_layers=::2 5: ::2 is neither a layer nor A-B, nor alone ::N",
        ),
        (
            Config(train=TrainConfig(recompute="full", recompute_layers=("0-1", "1"))),
            "train.recompute_layers=0-1 1: 1 is not behind the layers before it; name layers in order, such as 0-9",
        ),
        (
            Config(train=TrainConfig(recompute="full", recompute_layers=("0:2",))),
            "train.recompute_layers=0:2: 0:2 is neither a layer nor A-B",
        ),
        (
            Config(train=TrainConfig(recompute="full", recompute_layers=("0-99",))),
            "train.recompute_layers=0-99, model.num_hidden_layers=",
        ),
        (
            Config(parallel=ParallelConfig(tp_overlap_chunks=2)),
            "parallel.tp_overlap_chunks=2, parallel.tp=1: without tensor parallelism no product waits for other ranks",
        ),
        (
            Config(optimizer=OptimizerConfig(overlap_param_gather=True, zero_stage=0)),
            "optimizer.overlap_param_gather=true, optimizer.zero_stage=0: without ZeRO every rank updates all weights",
        ),
        (
            Config(optimizer=OptimizerConfig(grad_reduce_dtype="bf16", zero_stage=0)),
            "optimizer.grad_reduce_dtype=bf16, optimizer.zero_stage=0: without ZeRO every rank needs the whole sum",
        ),
        (
            Config(optimizer=OptimizerConfig(overlap_param_gather=True, zero_stage=3)),
            "optimizer.overlap_param_gather=true, optimizer.zero_stage=3: stage 3 gathers the weights of each layer",
        ),
        (
            Config(optimizer=OptimizerConfig(shard_ranks=2, zero_stage=0)),
            "optimizer.shard_ranks=2, optimizer.zero_stage=0: without ZeRO nothing is sharded; use zero_stage 1, 2 or",
        ),
        (
            Config(optimizer=OptimizerConfig(bucket_mb=16.0, zero_stage=2)),
            "optimizer.bucket_mb=16.0, optimizer.zero_stage=2: stages 2 and 3 reduce the gradients of one layer",
        ),
        (Config(train=TrainConfig(eval_every=10)), "train.eval_every=10, data.validation=(empty): "),
        (Config(train=TrainConfig(eval_samples=10)), "train.eval_samples=10, data.validation=(empty): "),
        (Config(data=DataConfig(train=("a", "b"))), "data.train=a b: a blend needs a weight for each source"),
        (Config(data=DataConfig(train=())), "data.train=(empty): 0 entries"),
        (Config(data=DataConfig(validation=("a/x", "b/x"))), "data.validation=a/x b/x: two sets of one name"),
        (
            Config(data=DataConfig(split=(9.0, 1.0))),
            "data.split=9.0 1.0, data.train=synthetic: synthetic has no documents to split",
        ),
        (Config(data=DataConfig(train=("a",), split=(0.0, 1.0))), "data.split=0.0 1.0: give two or three shares"),
        (Config(data=DataConfig(tokenizer="spm:")), "data.tokenizer=spm:: must be bytes, spm:FILE"),
        (Config(data=DataConfig(tokenizer="bpe:x.json")), "data.tokenizer=bpe:x.json: must be bytes, spm:FILE"),
        (Config(parallel=ParallelConfig(order="tp-cp-dp-dp")), "parallel.order=tp-cp-dp-dp: must name"),
        (Config(run_dir=""), "run_dir='': must be printable text, not empty"),
        (Config(run_dir="a\nb"), "run_dir='a\\nb': must be printable text, not empty"),
        (Config(launch=LaunchConfig(nproc=8)), "launch.nproc=8: 1 rank is running already"),
        (
            Config(launch=LaunchConfig(timeout_seconds=1e300)),
            "launch.timeout_seconds=1e+300: must be from 1 to",
        ),
        (Config(launch=LaunchConfig(timeout_seconds=0.5)), "launch.timeout_seconds=0.5: must be from 1 to 604,800"),
        (Config(launch=LaunchConfig(time_limit=-1.0)), "launch.time_limit=-1.0: must be at least 0"),
    ],
)
def test_an_option_that_could_not_be_obeyed_is_refused(config, said):
    assert refusal(config).startswith(said)


def test_zeros_that_mean_derived_are_filled_in():
    config = validate(Config(ModelConfig(hidden_size=96, num_attention_heads=6), ParallelConfig(tp=2)), 8)
    model = config.model
    assert (model.num_key_value_heads, model.head_dim, model.intermediate_size) == (6, 16, 384)
    assert config.parallel.dp == 4
    assert validate(config, 8) == config
    assert with_vocabulary(config, 300).model.vocab_size == 300
    assert config.optimizer.bucket_mb == 64.0
    assert validate(Config(train=TrainConfig(global_batch_size=512)), 512).optimizer.bucket_mb == 2048.0, "4 a replica"
    assert validate(Config(optimizer=OptimizerConfig(bucket_mb=3.0)), 8).optimizer.bucket_mb == 3.0
    padded = Config(ModelConfig(vocab_size=512))
    assert with_vocabulary(padded, 300) == padded
    with pytest.raises(ConfigError, match=r"model\.vocab_size=512, data\.tokenizer=bytes: .* at least 513"):
        with_vocabulary(padded, 513)


# Loading and writing


def test_flags_win_over_files_over_bases_over_defaults_and_each_value_knows_its_source(tmp_path):
    base = write(tmp_path, "base.toml", "[train]\nsteps = 1\nseed = 2\n[model]\nhidden_size = 64\n")
    (tmp_path / "sub").mkdir()
    file = write(tmp_path / "sub", "c.toml", "base = '../base.toml'\n[train]\nseed = 3\nmicro_batch_size = 4\n")
    resolved = load(["--config", file, "--train.micro-batch-size=5", "--train.steps", "7"])
    config, sources = resolved.config, resolved.sources
    assert (config.train.steps, config.train.seed, config.train.micro_batch_size) == (7, 3, 5)
    assert config.model.hidden_size == 64
    assert sources["train.steps"] == sources["train.micro_batch_size"] == "flag"
    assert sources["train.seed"] == file
    assert sources["model.hidden_size"] == base
    assert sources["run_dir"] == "default"
    assert list(sources) == list(option_types(LlamaModel))


def test_bases_that_lead_in_a_circle_are_refused(tmp_path):
    first = write(tmp_path, "a.toml", "base = 'b.toml'\n")
    second = write(tmp_path, "b.toml", "base = 'a.toml'\n")
    assert load_refusal(["--config", first]) == f"{second}: base leads back to itself: {first} -> {second} -> {first}"


def test_flags_take_lists_booleans_and_either_spelling():
    flags = "--data.train A B --parallel.partition 3 4 4 2 --optimizer.betas 0.8 0.9 --model.qk-norm --dry_run"
    resolved = load([*flags.split(), "--checkpoint.no-save_last", "--model.rope_scaling.factor", "8"])
    config = resolved.config
    assert config.data.train == ("A", "B")
    assert config.parallel.partition == (3, 4, 4, 2)
    assert config.optimizer.betas == (0.8, 0.9)
    assert (config.model.qk_norm, config.dry_run, config.checkpoint.save_last) == (True, True, False)
    assert config.model.rope_scaling.factor == 8.0
    flagged = [path for path, source in resolved.sources.items() if source == "flag"]
    assert flagged == [
        *("model.rope_scaling.factor", "model.qk_norm", "parallel.partition", "optimizer.betas", "data.train"),
        *("checkpoint.save_last", "dry_run"),
    ]


def test_a_resolved_config_shows_sources_and_derived_values(tmp_path):
    file = write(tmp_path, "c.toml", "[train]\nseed = 3\n")
    resolved = load(["--config", file, "--parallel.tp", "2"])
    lines = to_toml(resolved, validate(resolved.config, 8)).split("\n")
    assert 'run_dir = "runs/default"  # default' in lines
    assert f"seed = 3  # {file}" in lines
    assert "tp = 2  # flag" in lines
    assert "dp = 0  # default, here 4" in lines
    assert "head_dim = 0  # default, here 64" in lines
    assert "sequence_parallel = false  # default" in lines


floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
configs = st.builds(
    Config,
    model=st.builds(
        LlamaModel,
        hidden_size=st.integers(-(2**63), 2**63 - 1),
        rope_theta=floats,
        qk_norm=st.booleans(),
        rope_scaling=st.builds(RopeScaling, factor=floats),
    ),
    parallel=st.builds(ParallelConfig, partition=st.lists(st.integers(0, 99)).map(tuple)),
    optimizer=st.builds(OptimizerConfig, betas=st.tuples(floats, floats), zero_stage=st.sampled_from([0, 1, 2, 3])),
    data=st.builds(DataConfig, train=st.lists(texts).map(tuple), tokenizer=texts),
    run_dir=texts,
    dry_run=st.booleans(),
)


odd_config = example(config=Config(LlamaModel(), run_dir='\x7f \x00 " \\ \U0001f600 \u2028'))


@settings(max_examples=4, deadline=None)
@given(config=configs)
@odd_config
def test_a_written_config_loads_as_the_same(tmp_path_factory, config):
    loads_as_the_same(tmp_path_factory, config)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(config=configs)
@odd_config
def test_many_written_configs_load_as_the_same(tmp_path_factory, config):
    loads_as_the_same(tmp_path_factory, config)


def loads_as_the_same(tmp_path_factory, config):
    resolved = Resolved(config, dict.fromkeys(flatten(config), "default"))
    file = write(tmp_path_factory.mktemp("toml"), "config.toml", to_toml(resolved))
    loaded = load(["--config", file])
    assert loaded.config == config
    assert repr(loaded.config) == repr(config)  # -0.0 equals 0.0 and 1 equals True
    assert set(loaded.sources.values()) == {file}


# The surface: options, help and shipped files

OPTIONS = """
model: family hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
    vocab_size max_position_embeddings hidden_act rms_norm_eps tie_word_embeddings head initializer_range
    num_nextn_predict_layers mtp_loss_weight mtp_detach
parallel: tp pp dp cp cp_attention ep etp vpp schedule schedule_memory_gb schedule_costs sequence_parallel
    tp_overlap_chunks tp_symmetric_memory ep_overlap_chunks partition balance order
train: steps global_batch_size batch_ramp micro_batch_size seq_length seed precision fp8 fp8_skip
    recompute
    recompute_layers offload eval_every eval_samples eval_weights objective beta references label_smoothing loss_mean
    z_loss trainable memory_gb memory_report deterministic
optimizer: name lr min_lr schedule warmup_steps decay_steps betas eps momentum nesterov muon_scale muon_per_head
    weight_decay groups clip_grad qk_clip zero_stage shard_ranks bucket_mb grad_reduce_dtype overlap_grad_reduce
    overlap_param_gather offload ema moments main_weights
data: train stages split validation documents fim_rate fim_tokens workers tokenizer accept_changed
checkpoint: every save_last resume init_from strict async_save on_failure keep_last keep_every
memory_every local_dir local_every mtbf_hours
log: every view tensorboard wandb mlflow prometheus_port straggler_every fp8_every
    alert_command profile observers peak_tflops
guard: check_replicas_every on_spike
kernels: backend loss_chunk compile products linear_attention
launch: nproc device timeout_seconds time_limit threads cpu_exchange max_restarts min_dp preflight gradient_ctas numa
adapter: rank alpha targets rslora dropout dora init_from
top: run_dir dry_run gpu
"""


def frozen_options() -> list[str]:
    paths = []
    for word in OPTIONS.split():
        if word.endswith(":"):
            section = "" if word == "top:" else word[:-1] + "."
        else:
            paths.append(section + word)
    return paths


OLD_SPELLINGS = {
    "--train.recompute_every 2": ("::2",),
    "--train.recompute-every=3": ("::3",),
    "--train.recompute_every 1": (),
}


@pytest.mark.parametrize("words", OLD_SPELLINGS)
def test_every_nth_layer_has_an_old_spelling(words: str) -> None:
    assert load(["--train.recompute", "full", *words.split()]).config.train.recompute_layers == OLD_SPELLINGS[words]


@pytest.mark.parametrize(
    ("lines", "layers"),
    [
        ("recompute_every = 2\nrecompute_layers = []", ("::2",)),
        ("recompute_layers = []\nrecompute_every = 2", ("::2",)),
        ('recompute_every = 1\nrecompute_layers = ["0-1"]', ("0-1",)),
        ("recompute_every = 1", ()),
    ],
)
def test_the_config_of_an_older_run_has_both_spellings(lines: str, layers: tuple[str, ...], tmp_path: Path) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "config.toml"
    base.write_text('[train]\nrecompute_layers = ["::4"]\n')
    file.write_text(f'base = "base.toml"\n[train]\nrecompute = "full"\n{lines}\n')
    assert load(["--config", str(file)]).config.train.recompute_layers == layers


def test_two_spellings_that_differ_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[train]\nrecompute_every = 2\nrecompute_layers = ["0-1"]\n')
    with pytest.raises(ConfigError, match=r"config\.toml:2: train\.recompute_every: is the old spelling of"):
        load(["--config", str(file)])
    with pytest.raises(ConfigError, match=r"--train\.recompute_layers is given twice: --train\.recompute_every 2 and"):
        load(["--train.recompute_every", "2", "--train.recompute_layers", "0-1"])
    with pytest.raises(ConfigError, match=r"train\.recompute_layers=two: two is neither a layer"):
        validate(load(["--train.recompute", "full", "--train.recompute_every", "two"]).config, 1)


def test_the_set_of_options_is_this_and_at_most_133():
    """An option is added or renamed here too, on purpose. Those of single families are named above."""
    assert sorted(option_types()) == sorted(frozen_options())
    of_runs = [path for path in option_types() if not path.startswith("model.")]
    assert len(of_runs) + len(["config"]) <= 133


def subclasses(kind: type) -> Iterator[type]:
    """Yield all classes that derive from a class."""
    for derived in kind.__subclasses__():
        yield derived
        yield from subclasses(derived)


def sentences() -> dict[str, str]:
    """The string under each option's field. Sections of Config are described by their class."""
    assert [*FAMILIES.values()]  # imported, with their codecs: these are frozen dataclasses too, and no options
    no_options = {codec.__name__ for codec in subclasses(Codec)} | {"Rotary"}
    sections = {f.name for f in fields(Config) if is_dataclass(f.type)}
    found = {}
    models = Path(megapar_models.__file__).parent
    shared = [models / f"{name}.py" for name in ("rotary", "windows")]
    files = [
        Path(megapar.config.options.__file__),
        Path(megapar.config.model_options.__file__),
        *shared,
        *models.glob("families/*.py"),
    ]
    for node in chain.from_iterable(ast.parse(file.read_text()).body for file in files):
        if not isinstance(node, ast.ClassDef) or node.name in no_options:
            continue
        if "dataclass" in ast.unparse(node.decorator_list[:1]):
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign) and statement.target.id not in sections:
                    text = following.value.value if isinstance(following, ast.Expr) else ""
                    found[f"{node.name}.{statement.target.id}"] = text
    return found


def test_every_option_has_a_sentence_and_help_shows_it_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    flags = ("--optimizer.lr", "0.125", "--help", "--config", str(CONFIGS / "tiny.toml"))
    for family in FAMILIES:
        with pytest.raises(SystemExit) as exited:
            load([*flags, "--model.family", family])
        assert exited.value.code == 0
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for path, annotation in FOR_OPTIONS.types().items():
        section, dot, key = path.rpartition(".")
        switch = f"--{path}, --{section}{dot}no_{key} "
        assert (switch if annotation is bool else f"--{path} ") in shown
    for name, sentence in sentences().items():
        assert sentence.endswith("."), name
        assert " ".join(sentence.split()) in shown, name
    assert "(default: 66)" in shown  # the file's hidden_size


def test_a_base_is_found_from_a_folder_that_is_a_link(tmp_path):
    """`..` is the folder above the real one, as everywhere in a file system."""
    (tmp_path / "real/configs").mkdir(parents=True)
    write(tmp_path / "real", "base.toml", "[train]\nsteps = 7\n")
    write(tmp_path / "real/configs", "run.toml", 'base = "../base.toml"\n')
    (tmp_path / "link").symlink_to(tmp_path / "real/configs")
    assert load(["--config", str(tmp_path / "link/run.toml")]).config.train.steps == 7


def test_options_flatten_and_back():
    config = load(["--model.rope_scaling.factor", "3", "--data.train", "a"]).config
    assert unflatten(flatten(config), LlamaModel) == config
    assert list(flatten(config)) == list(option_types(LlamaModel))


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_shipped_configs_run_at_their_world_size_without_a_warning(name):
    config = load(["--config", str(CONFIGS / f"{name}.toml")], presets()).config
    parallel = config.parallel
    assert WORLD_SIZES[name] == parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    assert warnings(validate(config, WORLD_SIZES[name])) == []


@pytest.mark.parametrize("path", slow_but(range(0, len(presets()), 8), presets().values()), ids=presets())
def test_shipped_models_are_sound_and_only_models(path):
    assert set(tomllib.loads(path.read_text())) == {"model"}
    validate(load(["--config", str(path)]).config, 1)


def test_tiny_runs_in_the_layouts_that_it_promises():
    config = load(["--config", str(CONFIGS / "tiny.toml")]).config
    for tp in (1, 2, 3, 6):
        for pp in range(1, 7):
            for dp in (1, 2, 3, 4, 6, 8):
                parallel = ParallelConfig(tp=tp, pp=pp, dp=dp, sequence_parallel=True)
                validate(replace(config, parallel=parallel), tp * pp * dp)


def test_the_quickstart_is_what_the_readme_promises():
    config = validate(load(["--config", str(CONFIGS / "quickstart.toml")]).config, 8)
    parallel, train = config.parallel, config.train
    assert (parallel.dp, parallel.tp, parallel.pp, parallel.schedule) == (2, 2, 2, "1f1b")
    assert parallel.sequence_parallel
    assert (train.recompute, config.optimizer.zero_stage) == ("selective", 1)
    assert num_microbatches(config) >= 4
    assert config.model.num_key_value_heads < config.model.num_attention_heads
