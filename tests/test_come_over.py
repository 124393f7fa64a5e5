"""Jobs of other frameworks become configurations of megapar, and nothing of them is lost on the way."""

import json
import math
import pickle
import subprocess
import sys
import tomllib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_models.families.llama import LlamaModel
from megapar_models.registry import FOR_OPTIONS, named_configs, presets, validate
from megapar_tools.migrate import carry, sources
from megapar_tools.migrate.account import Account, account_of, report
from megapar_tools.migrate.carry import Option, move
from megapar_tools.migrate.job import plain
from megapar_tools.migrate.shell import Launch, launch_of, read_launch
from megapar_tools.migrate.table import TABLE

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.options import flatten
from megapar.optimizer.schedule import learning_rate
from tests.support.megatron_folders import args_of
from tests.support.options import load
from tests.support.sweeps import one_of_each, slow_but
from tools import coming_over, from_deepspeed, from_megatron, from_torchtitan, migrate

JOBS = {job["name"]: job for job in coming_over.jobs()}
JOB_IDS = {"argvalues": JOBS.values(), "ids": list(JOBS)}
# One of each program. The page of them all is written again below.
FEW_JOBS = slow_but(one_of_each(job["tool"] for job in JOBS.values()), JOBS.values())
CONFIGS = Path(__file__).parents[1] / "pretrain_scripts/configs"

# A llama of which every flag has a counterpart.
LLAMA = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --seq-length 64 --lr 1e-3
--max-position-embeddings 64 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 10"""


def moved(framework: str, flags: str, world: int = 0, samples: int = 0) -> Account:
    """The account of a command line."""
    options = sources.options_of_words(flags.split(), (framework,))
    found = move(options, FOR_OPTIONS, world=world, samples=samples, dashes=lambda _: "--")
    return account_of(found, FOR_OPTIONS, named_configs(CONFIGS), validate, world)


def left(account: Account) -> dict[str, str]:
    """Why each option was left, by name, without those that are defaults."""
    return {line.theirs.lstrip("-"): line.here for line in account.moved.left if not line.is_default}


def script(text: str, **variables: str) -> Launch:
    return launch_of(text, "job.sh", variables)


# Public jobs


@pytest.mark.parametrize("job", FEW_JOBS, ids=list(JOBS))
def test_every_option_of_a_public_job_is_accounted_for_and_the_result_can_run(job, tmp_path):
    account = coming_over.account(job)
    lines = account.moved.carried + [line for line in account.moved.left if not line.is_default]
    assert len(lines) == account.moved.options > 30
    assert account.refusal == ""
    assert account.percent >= 80
    file = tmp_path / "job.toml"
    file.write_text(account.toml)
    resolved = load(["--config", str(file)], named_configs(CONFIGS))
    assert flatten(resolved.config) == flatten(account.config)
    validate(resolved.config, job["world_size"])
    text = report(account).replace(":", " ")
    assert all(f"\n  {line.theirs.replace(':', ' ')} " in text for line in lines)


def test_the_page_has_the_figures_of_the_public_jobs():
    assert coming_over.PAGE.read_text() == coming_over.page(), "run python tools/coming_over.py"
    assert len(JOBS) == 14


GPT_3 = {
    "model.family": "gpt",
    "model.hidden_size": 12288,
    "model.num_hidden_layers": 96,
    "model.tie_word_embeddings": True,
    "model.hidden_dropout": 0.1,
    "parallel.tp": 8,
    "parallel.pp": 16,
    "train.global_batch_size": 1536,
    "train.steps": 500_000,
    "train.precision": "fp16",
    "optimizer.lr": 6e-5,
    "optimizer.min_lr": 6e-6,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 430,
    "optimizer.decay_steps": 429_570,
    "optimizer.betas": (0.9, 0.95),
    "data.split": (949.0, 50.0, 1.0),
}
BLOOM = {
    "model.family": "gpt",
    "train.batch_ramp": (192, 16, 9_765_625),
    # Megatron-DeepSpeed's own rule, walked through by hand: a ramp of 116 increments, then whole batches.
    "train.steps": 115_311,
    "optimizer.eps": 1e-8,
    "train.recompute": "full",
    "train.seed": 42,
}
ALPACA = {
    "train.global_batch_size": 128,  # 4 x 8 x 4 ranks
    "train.steps": 3 * 407,  # ceil(ceil(52002 / 16) / 8)
    "optimizer.warmup_steps": 37,
    "optimizer.zero_stage": 3,
    "optimizer.offload": 1.0,
    "optimizer.schedule": "linear",
    "optimizer.betas": (0.9, 0.999),
    "train.seed": 42,
    "model.hidden_size": 4096,
}
DEEPSEEK = {
    "model.family": "deepseek",
    "train.global_batch_size": 4 * 512,
    "optimizer.schedule": "cosine",  # 2,000 steps of warm-up and a decay over 0.8 x 10,000 leave no stable phase
    "optimizer.decay_steps": 0,
    "optimizer.min_lr": 2.2e-5,
    "optimizer.zero_stage": 3,
    "checkpoint.save_last": False,
    "train.precision": "bf16",
}
EXPECTED = {"GPT-3 175B": GPT_3, "BLOOM 176B": BLOOM, "Alpaca 7B": ALPACA, "DeepSeek-V3 671B": DEEPSEEK}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_of_public_jobs_are_those_read_by_hand(name):
    values = flatten(coming_over.account(JOBS[name]).config)
    assert {option: values[option] for option in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize(
    ("flag", "change"),
    [("lr", {"option": "optimizer.min_lr"}), ("train-iters", {"default": "7", "option": "log.every"})],
)
def test_a_planted_wrong_row_is_seen(monkeypatch, flag, change):
    wrong = [replace(row, **change) if row.name == flag else row for row in TABLE["Megatron-LM"]]
    monkeypatch.setitem(carry.TABLE, "Megatron-LM", tuple(wrong))
    values = flatten(coming_over.account(JOBS["GPT-3 175B"]).config)
    assert {option: values[option] for option in GPT_3} != GPT_3


# The account


LATENT_LAYERS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --train-iters 5 --lr 1e-3 --vocab-size 131 --mock-data --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --num-experts 8 --moe-ffn-hidden-size 32"""


def test_a_latent_mixture_has_the_widths_positions_and_weights_that_megatron_computes():
    """As NVIDIA's script of DeepSeek-V3 spells them."""
    flags = f"""{LATENT_LAYERS} --multi-latent-attention --kv-channels 32 --qk-pos-emb-head-dim 16 --qk-head-dim 16
    --v-head-dim 16 --kv-lora-rank 24 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --moe-router-score-function sigmoid --moe-router-pre-softmax --norm-epsilon 1e-6"""
    account = moved("Megatron-LM", flags, 1)
    assert account.is_whole, report(account)
    model = account.config.model
    assert (model.head_dim, model.qk_nope_head_dim, model.kv_lora_rank) == (16, 16, 24)
    assert model.moe.norm_topk_prob
    rope = model.rope_scaling
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 40.0, 4096)
    # Without the flag Megatron-LM has no norms of the latents, which is told.
    bare = moved("Megatron-LM", f"{LATENT_LAYERS} --multi-latent-attention", 1)
    assert [line.theirs for line in bare.moved.left] == ["--qk-layernorm"]
    assert (bare.config.model.head_dim, bare.config.model.kv_lora_rank) == (64, 32)


def test_a_split_stays_where_the_data_are_not_known():
    """Whoever names the data later must not train on those held out."""
    launch = script(f"python pretrain_gpt.py {' '.join(LLAMA.split())} --data-path $DATA --split 949,50,1")
    options = sources.options_of_words(launch.words, ("Megatron-LM",), launch)
    found = move(options, FOR_OPTIONS, dashes=lambda _: "--")
    account = account_of(found, FOR_OPTIONS, named_configs(CONFIGS), validate, 1)
    assert account.config.data.split == (949.0, 50.0, 1.0)
    assert account.config.data.train == ("PREFIX",)
    assert not account.refusal
    assert "cannot be resolved" in left(account)["data-path"]


def test_the_learning_rate_of_a_growing_batch_is_that_of_its_samples():
    """Warm-up and decay of such a job are in samples there, and stay so. Fault rates-of-a-growing-batch."""
    job = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 64
    --rampup-batch-size 8 8 4000 --train-samples 12000 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-samples 2000 --lr-decay-samples 12000 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --data-path data/x --vocab-size 131 --hidden-dropout 0 --attention-dropout 0"""
    account, _ = from_megatron.account(from_megatron.Arguments(), job.split())
    assert account.is_whole, report(account)
    config = account.config
    assert config.optimizer.warmup_steps == "2000 samples"
    assert config.train.samples() == 12_000  # the decay ends with the run
    consumed = 0
    for step in range(config.train.steps):
        rate = learning_rate(step, consumed, config.optimizer, config.train)
        share = 0.5 * (math.cos(math.pi * (consumed - 2000) / 10_000) + 1)
        assert rate == pytest.approx(1e-3 * consumed / 2000 if consumed <= 2000 else 1e-4 + 9e-4 * share), step
        consumed += config.train.batch_size(consumed)
    assert config.train.batch_ramp == (8, 8, 4000)
    # With a stable phase Megatron-LM decays exponentially unless it is told.
    held = moved("Megatron-LM", f"{LLAMA} --lr-decay-style WSD --lr-wsd-decay-iters 2", 1)
    (line,) = (line for line in held.moved.left if line.theirs == "--lr-wsd-decay-style")
    assert line.is_default
    assert "exponential" in line.here


def test_a_job_without_counterparts_missing_is_whole_and_unknown_flags_are_listed():
    whole = moved("Megatron-LM", f"{LLAMA} --untie-embeddings-and-output-weights", 2)
    assert whole.is_whole, report(whole)
    account = moved("Megatron-LM", f"{LLAMA} --quux 3 --moe-token-drop-policy probs --lr-decay-style exponential", 2)
    assert not account.is_whole
    assert left(account) == {
        "quux": "megapar's table does not know it",
        "moe-token-drop-policy": "no token is dropped here, because an expert computes every token that chose it",
        "lr-decay-style": "cosine and linear and constant and inverse-square-root and WSD have a counterpart",
    }
    assert "[train]\nsteps = 10  # --train-iters 10" in account.toml


def test_defaults_that_decide_what_is_computed_are_written_down_and_others_are_named():
    account = moved("Megatron-LM", LLAMA, 2)
    lines = {line.theirs: line.here for line in account.moved.defaults}
    assert account.config.optimizer.weight_decay == 0.01
    assert account.config.optimizer.betas == (0.9, 0.999)
    assert account.config.optimizer.schedule == "linear"
    assert account.config.model.tie_word_embeddings
    assert "written down" in lines["--weight-decay"]
    assert lines["--log-interval"] == "log.every stays 1, the default here (theirs: 100)"
    assert account.config.log.every == 1
    # With dropout, which is Megatron-LM's default, llama has no counterpart.
    text = LLAMA.replace("--attention-dropout 0 ", "")
    defaults = [line.theirs for line in moved("Megatron-LM", text, 2).moved.left if line.is_default]
    assert defaults == ["--attention-dropout"]


def test_two_options_that_contradict_each_other_are_told():
    account = moved("Megatron-LM", f"{LLAMA} --bf16 --fp16", 2)
    assert left(account)["fp16"] == "train.precision is bf16 by --bf16 already"


def test_the_arithmetic_of_ranks_is_shown_and_a_layout_that_does_not_fit_is_told():
    account = moved("Megatron-LM", f"{LLAMA} --tensor-model-parallel-size 2 --global-batch-size 24", 6)
    ranks, batch, run, vocabulary = account.arithmetic
    assert vocabulary.startswith("the vocabulary is not known")
    assert ranks == "6 ranks = tp 2 x cp 1 x pp 1 x dp 3"
    assert batch == "global batch 24 = micro-batch 2 x dp 3 x 4 micro-batches of a replica (gradient accumulation)"
    assert run.startswith("1,536 tokens a step x 10 steps")
    account = moved("Megatron-LM", f"{LLAMA} --tensor-model-parallel-size 4", 6)
    assert account.arithmetic[0] == "6 ranks are no multiple of tp 4 x cp 1 x pp 1"
    assert "does not divide world size 6" in account.refusal
    assert "give --world_size" in moved("Megatron-LM", LLAMA).arithmetic[0]


def test_what_megapar_would_refuse_is_settled_as_the_job_computes_it_and_named():
    flags = f"{LLAMA} --lr-warmup-iters 40 --min-lr 1e-4 --eval-interval 5 --train-data-path a --micro-batch-size 16"
    account = moved("Megatron-LM", f"{flags} --use-torch-fsdp2 --overlap-param-gather --save-retain-interval 4", 1)
    assert not account.refusal
    optimizer, train = account.config.optimizer, account.config.train
    # Ten steps of a warm-up of 40 steps have the rates of a whole one to a quarter of the peak.
    rates = [learning_rate(step, 0, optimizer, train) for step in range(10)]
    assert rates == pytest.approx([1e-3 * n / 40 for n in range(1, 11)])
    assert (train.micro_batch_size, train.eval_every) == (8, 0)
    assert not optimizer.overlap_param_gather
    said = report(account)
    assert "optimizer.warmup_steps = 10 in place of 40: the run ends at step 10 of 40 of warm-up" in said
    assert "train.micro_batch_size = 8 in place of 16: a step has 8 samples" in said
    assert "no data are known that would be evaluated" in left(account)["eval-interval"]


@pytest.mark.parametrize("flags", ["--var A=2 --var B=64", "--var A=2 B=64", "--var=A=2 --var B=64"])
def test_variables_are_given_one_by_one_or_together(tmp_path, monkeypatch, capsys, flags):
    file = tmp_path / "v.sh"
    file.write_text("python pretrain_gpt.py --num-layers $A --hidden-size $B --num-attention-heads 4 --lr 1\n")
    monkeypatch.setattr(sys, "argv", ["x", *flags.split(), str(file), "--gpus", "2"])
    from_megatron.main()
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["model"]["hidden_size"] == 64
    assert "2 ranks" in printed.err
    assert "cannot be resolved" not in printed.err


# Conversions: options of ours for flags of a job, beside others that they depend on.

LAYERS = "--num-layers 12 --hidden-size 64 --num-attention-heads 4"
MIX = "--num-experts 8 --swiglu"
LATENT = "--multi-latent-attention --swiglu"
GPT_OSS = "--num-experts 8 --quick-geglu"
NEMOTRON = "--squared-relu --position-embedding-type rope"
YARN = {f"model.rope_scaling.{name}": value for name, value in (
    ("rope_type", "yarn"), ("factor", "40"), ("original_max_position_embeddings", "4096"), ("mscale", "1.0"),
    ("mscale_all_dim", "1.0"))}  # fmt: skip
CONVERSIONS = [
    ("Megatron-LM", f"--num-layers-per-virtual-pipeline-stage 2 {LAYERS} --pipeline-model-parallel-size 2", 2,
     {"parallel.vpp": "3", "parallel.schedule": "interleaved"}),
    ("Megatron-LM", f"--num-layers-per-virtual-pipeline-stage 5 {LAYERS} --pipeline-model-parallel-size 2", 2, None),
    ("Megatron-LM", "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4", 4,
     {"parallel.vpp": "2", "parallel.schedule": "interleaved"}),
    ("Megatron-LM", "--num-virtual-stages-per-pipeline-rank 1", 4, {}),
    ("Megatron-LM", f"--decoder-first-pipeline-num-layers 2 {LAYERS} --pipeline-model-parallel-size 3", 3,
     {"parallel.partition": "2 5 5"}),
    ("Megatron-LM", f"--decoder-last-pipeline-num-layers 3 {LAYERS} --pipeline-model-parallel-size 3", 3, None),
    ("Megatron-LM", "--tp-comm-overlap --tensor-model-parallel-size 2", 2, {"parallel.tp_overlap_chunks": "2"}),
    ("Megatron-LM", "--tp-comm-overlap", 2, {}),
    ("Megatron-LM", "--use-distributed-optimizer", 2, {"optimizer.zero_stage": "1"}),
    ("Megatron-LM", "--use-megatron-fsdp", 2, {"optimizer.zero_stage": "3"}),
    ("Megatron-LM", "--use-megatron-fsdp --data-parallel-sharding-strategy optim", 2, {}),
    ("Megatron-LM", "--num-distributed-optimizer-instances 2", 8, {"optimizer.shard_ranks": "4"}),
    ("Megatron-LM", "--num-distributed-optimizer-instances 2", 0, None),
    ("Megatron-LM", "--qk-clip", 0, {"optimizer.qk_clip": "100"}),
    ("Megatron-LM", "--qk-clip --qk-clip-threshold 30", 0, {"optimizer.qk_clip": "30"}),
    ("Megatron-LM", "--qk-clip-threshold 30", 0, {}),
    ("Megatron-LM", "--ddp-bucket-size 40000000", 8, {"optimizer.bucket_mb": "152.587890625"}),
    ("Megatron-LM", "--global-batch-size 16", 8, {"train.global_batch_size": "16"}),
    ("Megatron-LM", "--train-samples 1000 --global-batch-size 16", 8, {"train.steps": "62"}),
    # Steps of 4, 4, 8 and 12 samples are beyond the ramp's 24. Of the other 972 there are 60 whole steps.
    ("Megatron-LM", "--train-samples 1000 --global-batch-size 16 --rampup-batch-size 4 4 24", 8, {"train.steps": "64"}),
    ("Megatron-LM", "--ffn-hidden-size 160", 8, {"model.intermediate_size": "160"}),
    ("Megatron-LM", "--num-query-groups 2 --group-query-attention", 8, {"model.num_key_value_heads": "2"}),
    ("Megatron-LM", "--num-query-groups 1", 8, {}),
    ("Megatron-LM", "--position-embedding-type rope --swiglu", 8, {"model.family": "llama"}),
    ("Megatron-LM", "--position-embedding-type alibi", 8, None),
    ("Megatron-LM", "--use-rotary-position-embeddings --swiglu", 8, {"model.family": "llama"}),
    ("Megatron-LM", f"--normalization RMSNorm {MIX}", 8, {"model.family": "mixtral"}),
    ("Megatron-LM", f"--normalization RMSNorm {MIX} --qk-layernorm", 8, {"model.family": "qwen3_moe"}),
    ("Megatron-LM", "--normalization RMSNorm", 8, None),
    ("Megatron-LM", "--swiglu", 8, {"model.family": "llama"}),
    ("Megatron-LM", "--multi-latent-attention", 8, {"model.family": "deepseek"}),
    ("Megatron-LM", "--disable-bias-linear --swiglu", 8, {"model.family": "llama"}),
    ("Megatron-LM", "--disable-bias-linear", 8, None),
    ("Megatron-LM", "--attention-dropout 0.2", 8, {"model.attention_dropout": "0.2"}),
    ("Megatron-LM", "--attention-dropout 0.2 --swiglu", 8, None),
    ("Megatron-LM", "--hidden-dropout 0 --swiglu", 8, {}),
    ("Megatron-LM", "--dropout 0.1", 8, {"model.hidden_dropout": "0.1"}),
    ("Megatron-LM", f"--moe-router-load-balancing-type aux_loss {MIX}", 8, {"model.moe.balance": "none"}),
    ("Megatron-LM", f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 {MIX}", 8, None),
    ("Megatron-LM", f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 {MIX}", 8,
     {"model.moe.balance": "sequence"}),
    # Without a weight Megatron-LM computes no loss.
    ("Megatron-LM", f"--moe-router-load-balancing-type seq_aux_loss {MIX}", 8, {"model.moe.balance": "none"}),
    ("Megatron-LM", f"--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none {MIX}", 8, {}),
    # Sigmoid scores are divided by their sum whatever the flag says, but for a single expert.
    ("Megatron-LM", f"--moe-router-pre-softmax --moe-router-score-function sigmoid {MIX}", 8,
     {"model.moe.norm_topk_prob": "true"}),
    ("Megatron-LM", f"--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-topk 1 {MIX}", 8,
     {"model.moe.norm_topk_prob": "false"}),
    ("Megatron-LM", f"--moe-router-pre-softmax {MIX}", 8, {"model.moe.norm_topk_prob": "false"}),
    ("Megatron-LM", f"--moe-router-enable-expert-bias {MIX}", 8, {"model.moe.balance": "bias"}),
    ("Megatron-LM", f"--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
     f"--moe-aux-loss-coeff 1e-4 {MIX}", 8, {"model.moe.balance": "bias+sequence",
     "model.moe.router_aux_loss_coef": "1e-4"}),
    ("Megatron-LM", f"--moe-router-load-balancing-type global_aux_loss --moe-router-enable-expert-bias "
     f"--moe-aux-loss-coeff 1e-4 {MIX}", 8, None),
    ("Megatron-LM", "--overlap-param-gather --use-megatron-fsdp", 8, {}),
    ("Megatron-LM", "--overlap-param-gather --use-distributed-optimizer", 8,
     {"optimizer.overlap_param_gather": "true"}),
    ("Megatron-LM", "--save-retain-interval 50", 8, {"checkpoint.keep_every": "50", "checkpoint.keep_last": "1"}),
    ("Megatron-LM", f"--kv-channels 32 --qk-pos-emb-head-dim 16 {LATENT}", 8, {"model.head_dim": "16"}),
    ("Megatron-LM", f"--qk-pos-emb-head-dim 16 --kv-channels 32 {LATENT}", 8, {"model.head_dim": "16"}),
    ("Megatron-LM", "--kv-channels 32", 8, {"model.head_dim": "32"}),
    ("Megatron-LM", f"--q-lora-rank 24 {LATENT}", 8,
     {"model.q_lora_rank": "24", "model.kv_lora_rank": "32", "model.head_dim": "64"}),
    ("Megatron-LM", "--q-lora-rank 24", 8, {}),
    ("Megatron-LM", f"--qk-layernorm {LATENT}", 8, {}),
    ("Megatron-LM", f"--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 {LATENT}", 8, YARN),
    ("Megatron-LM", f"--mscale-all-dim 1.0 --rotary-scaling-factor 40 {LATENT}", 8, YARN),
    ("Megatron-LM", f"--rope-type rope --rotary-scaling-factor 40 {LATENT}", 8, {}),
    ("Megatron-LM", f"--rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1 {LATENT}", 8, None),
    ("Megatron-LM", "--position-embedding-type yarn --rotary-scaling-factor 4 --swiglu", 8,
     {"model.family": "llama", "model.rope_scaling.rope_type": "yarn", "model.rope_scaling.factor": "4"}),
    ("Megatron-LM", "--rotary-percent 0.5 --swiglu", 8, None),
    ("Megatron-LM", "--rotary-percent 0.5 --position-embedding-type rope", 8, {"model.partial_rotary_factor": "0.5"}),
    ("Megatron-LM", "--use-rope-scaling --swiglu", 8,
     {"model.rope_scaling.rope_type": "llama3", "model.rope_scaling.factor": "8"}),
    ("Megatron-LM", "--rotary-seq-len-interpolation-factor 2 --swiglu", 8,
     {"model.rope_scaling.rope_type": "linear", "model.rope_scaling.factor": "2"}),
    ("Megatron-LM", f"--quick-geglu {GPT_OSS}", 8, {"model.family": "gpt_oss"}),
    ("Megatron-LM", f"--softmax-type learnable {GPT_OSS}", 8, {"model.family": "gpt_oss"}),
    ("Megatron-LM", "--softmax-type vanilla --swiglu", 8, {}),
    ("Megatron-LM", "--softmax-type learnable --swiglu", 8, None),
    ("Megatron-LM", f"--activation-func-clamp-value 7.0 {GPT_OSS}", 8, {"model.swiglu_limit": "7.0"}),
    ("Megatron-LM", f"--window-attn-skip-freq 2 --window-size 127,0 {GPT_OSS}", 8, {"model.sliding_window": "128"}),
    ("Megatron-LM", f"--normalization LayerNorm {NEMOTRON}", 8, {"model.family": "nemotron"}),
    ("Megatron-LM", f"--position-embedding-type rope {NEMOTRON}", 8, {"model.family": "nemotron"}),
    ("Megatron-LM", f"--disable-bias-linear {NEMOTRON}", 8, {"model.family": "nemotron"}),
    ("Megatron-LM", "--squared-relu --normalization RMSNorm", 8, {"model.family": "arcee"}),
    ("Megatron-LM", "--position-embedding-type rope --disable-bias-linear", 8,
     {"model.family": "gpt_neox", "model.parallel_residual": "no", "model.mlp_bias": "false"}),
    ("Megatron-LM", "--moe-layer-freq ([0]*3+[1]*58) --multi-latent-attention", 8,
     {"model.moe.first_k_dense_replace": "3"}),
    ("Megatron-LM", f"--moe-layer-freq 2 {MIX}", 8, None),
    ("Megatron-LM", "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2", 8,
     {"parallel.ep_overlap_chunks": "2"}),
    ("Megatron-LM", "--window-size (4095, 0)", 8, {"model.sliding_window": "4096"}),
    ("Megatron-LM", "--window-size 127,0 --window-attn-skip-freq 2 --num-layers 3", 8,
     {"model.sliding_window": "128", "model.layer_types": "sliding_attention full_attention sliding_attention"}),
    ("Megatron-LM", "--window-size (16,16)", 8, None),
    ("Megatron-LM", "--window-attn-skip-freq [1,0] --num-layers 2", 8, None),
    ("Megatron-LM", "--window-attn-skip-freq 2", 8, None),
    ("Megatron-LM", "--lr-warmup-fraction .1 --lr-decay-iters 50 --train-iters 100", 8,
     {"optimizer.warmup_steps": "5"}),
    ("Megatron-LM", "--lr-warmup-samples 160 --global-batch-size 16", 8,
     {"optimizer.warmup_steps": "160 samples"}),
    ("Megatron-LM", "--lr-warmup-fraction .1 --lr-decay-samples 500 --train-samples 1600 --global-batch-size 16", 8,
     {"optimizer.warmup_steps": "50 samples"}),
    # The last whole batch ends at 1600, so the decay is given a length of its own.
    ("Megatron-LM", "--train-samples 1605 --lr-warmup-samples 160 --global-batch-size 16", 8,
     {"train.steps": "100", "optimizer.decay_steps": "1445 samples"}),
    ("Megatron-LM", "--lr-decay-style constant --lr-decay-iters 50 --train-iters 100", 8,
     {"optimizer.schedule": "constant"}),
    ("Megatron-LM", "--lr-decay-iters 50 --train-iters 100 --lr-decay-style constant", 8, {}),
    ("Megatron-LM", "--lr-decay-iters 50 --train-iters 100 --lr-decay-style inverse-square-root", 8, None),
    ("Megatron-LM", "--lr-wsd-decay-style linear --lr-decay-style WSD", 8, {}),
    ("Megatron-LM", "--lr-wsd-decay-style cosine --lr-decay-style WSD", 8, None),
    ("Megatron-LM", "--lr-decay-iters 50 --train-iters 100 --lr-warmup-iters 10", 8, {"optimizer.decay_steps": "40"}),
    ("Megatron-LM", "--lr-decay-iters 100 --train-iters 100 --lr-warmup-iters 10", 8, {}),
    ("Megatron-LM", "--lr-decay-samples 800 --global-batch-size 16 --train-samples 1600", 8,
     {"optimizer.decay_steps": "800 samples"}),
    ("Megatron-LM", "--lr-decay-iters 50 --train-iters 100 --lr-decay-style WSD", 8, None),
    ("Megatron-LM", "--lr-wsd-decay-samples 320 --global-batch-size 16 --train-samples 1600", 8,
     {"optimizer.decay_steps": "320 samples"}),
    ("Megatron-LM", "--adam-beta2 0.95", 8, {"optimizer.betas": "0.9 0.95"}),
    ("Megatron-LM", "--recompute-granularity full", 8, {"train.recompute": "full"}),
    ("Megatron-LM", "--recompute-granularity selective --recompute-modules layernorm", 8,
     {"train.recompute": "light"}),
    ("Megatron-LM", "--recompute-modules core_attn", 8, {"train.recompute": "selective"}),
    ("Megatron-LM", "--recompute-modules mlp", 8, None),
    ("Megatron-LM", "--data-path 0.3 a 0.7 b", 8, {"data.train": "0.3:a 0.7:b"}),
    ("Megatron-LM", "--data-path a", 8, {"data.train": "a"}),
    ("Megatron-LM", "--data-path a b c", 8, None),
    ("Megatron-LM", "--train-data-path a", 8, {"data.train": "a"}),
    ("Megatron-LM", "--valid-data-path a", 8, {"data.validation": "a"}),
    ("Megatron-LM", "--test-data-path a", 8, {"data.validation": "test=a"}),
    ("Megatron-LM", "--valid-data-path a --test-data-path b", 8, {"data.validation": "a test=b"}),
    ("Megatron-LM", "--train-data-path a b", 8, None),
    # A split is written where the data are not known, beside a name that cannot be opened.
    ("Megatron-LM", "--split 99,1,0", 8, {"data.split": "99 1 0", "data.train": "PREFIX"}),
    ("Megatron-LM", "--split 99,1,0 --train-data-path a", 8, {}),
    ("Megatron-LM", "--split '99,1,0' --data-path a", 8, {"data.split": "99 1 0"}),
    ("Megatron-LM", "--split 99,1,0 --data-path 1 a 2 b", 8, {"data.split": "99 1 0"}),
    ("Megatron-LM", "--num-workers 4", 8, {}),
    ("Megatron-LM", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model llama/", 8,
     {"data.tokenizer": "hf:llama/tokenizer.json"}),
    ("Megatron-LM", "--tokenizer-model t.model --tokenizer-type Llama2Tokenizer", 8,
     {"data.tokenizer": "spm:t.model"}),
    ("Megatron-LM", "--tokenizer-type GPT2BPETokenizer", 8, None),
    ("Megatron-LM", "--save a", 8, {"run_dir": "a"}),
    ("Megatron-LM", "--load a --save a", 8, {}),
    ("Megatron-LM", "--load b --save a", 8, None),
    ("Megatron-LM", "--eval-iters 2 --global-batch-size 8 --data-path a", 8, {"train.eval_samples": "16"}),
    ("Megatron-LM", "--eval-interval 5 --data-path a", 8, {"train.eval_every": "5"}),
    ("Megatron-LM", "--eval-interval 5 --mock-data", 8, {}),
    ("Megatron-LM", "--profile-step-start 4 --profile-step-end 6 --profile", 8, {"log.profile": "5-6"}),
    ("Megatron-LM", "--distributed-timeout-minutes 2", 8, {"launch.timeout_seconds": "120"}),
    ("DeepSpeed", "--train_micro_batch_size_per_gpu 4", 8, {"train.micro_batch_size": "4"}),
    ("DeepSpeed", "--gradient_accumulation_steps 2 --train_micro_batch_size_per_gpu 4", 8,
     {"train.global_batch_size": "64"}),
    ("DeepSpeed", "--gradient_accumulation_steps 2 --train_batch_size 64", 8, {"train.global_batch_size": "64"}),
    ("DeepSpeed", "--scheduler.params.total_num_steps 50 --scheduler.params.warmup_num_steps 10", 8,
     {"optimizer.decay_steps": "40"}),
    ("DeepSpeed", "--scheduler.params.cos_min_ratio 0.1 --optimizer.params.lr 0.01", 8, {"optimizer.min_lr": "0.001"}),
    ("DeepSpeed", "--zero_optimization.reduce_bucket_size 2e8 --zero_optimization.stage 1", 8,
     {"optimizer.bucket_mb": "762.939453125"}),
    ("DeepSpeed", "--zero_optimization.reduce_bucket_size 2e8 --zero_optimization.stage 2", 8, {}),
    ("DeepSpeed", '--zero_optimization.offload_optimizer {"device":"cpu","ratio":0.5}', 8,
     {"optimizer.offload": "0.5"}),
    ("DeepSpeed", '--zero_optimization.offload_optimizer {"device":"nvme"}', 8, None),
    ("DeepSpeed", '--zero_optimization.offload_param {"device":"cpu"}', 8, None),
    ("DeepSpeed", '--zero_optimization.offload_param {"device":"none"}', 8, {}),
    ("DeepSpeed", "--fp16.hysteresis 2", 8, {}),
    ("DeepSpeed", "--fp16.hysteresis 2 --fp16.enabled true", 8, None),
    ("DeepSpeed", "--steps_per_print 5", 8, {"log.every": "5"}),
    ("DeepSpeed", "--wall_clock_breakdown true", 8, None),
    ("DeepSpeed", "--memory_breakdown true", 8, {"train.memory_report": "true"}),
    ("Hugging Face", "--gradient_accumulation_steps 2 --per_device_train_batch_size 4", 8,
     {"train.global_batch_size": "64"}),
    ("Hugging Face", "--max_steps 5", 8, {"train.steps": "5"}),
    ("Hugging Face", "--max_steps -1", 8, {}),
    ("Hugging Face", "--num_train_epochs 2 --per_device_train_batch_size 1", 8, {"train.steps": "126"}),
    ("Hugging Face", "--warmup_steps 0.1 --max_steps 50", 8, {"optimizer.warmup_steps": "5"}),
    ("Hugging Face", "--warmup_ratio 0.1 --max_steps 55", 8, {"optimizer.warmup_steps": "6"}),
    ("Hugging Face", '--lr_scheduler_kwargs {"min_lr_rate":0.1} --learning_rate 1e-4', 8,
     {"optimizer.min_lr": "1e-05"}),
    ("Hugging Face", '--lr_scheduler_kwargs {"num_cycles":2}', 8, None),
    ("Hugging Face", '--gradient_checkpointing_kwargs {"use_reentrant":false}', 8, {}),
    ("Hugging Face", "--adam_beta2 0.95", 8, {"optimizer.betas": "0.9 0.95"}),
    ("Hugging Face", "--save_strategy no", 8, {"checkpoint.every": "0"}),
    ("Hugging Face", "--save_strategy epoch --per_device_train_batch_size 1", 8, {"checkpoint.every": "63"}),
    ("Hugging Face", "--save_strategy best", 8, None),
    ("Hugging Face", "--eval_strategy epoch --per_device_train_batch_size 1", 8, {"train.eval_every": "63"}),
    ("Hugging Face", "--saves_per_epoch 2 --max_steps 60 --num_train_epochs 3", 8, {"checkpoint.every": "10"}),
    ("Hugging Face", "--lora_target_modules q_proj,down_proj gate_proj", 8, {"adapter.targets": "q down gate"}),
    ("Hugging Face", "--lora_target_modules all-linear", 8, {}),
    ("Hugging Face", "--lora_target_modules c_attn", 8, None),
    ("Hugging Face", "--lora_module_name layers. --only_optimize_lora", 8, {"adapter.alpha": "1"}),
    ("Hugging Face", "--lora_module_name layers.0.", 8, None),
    ("Hugging Face", "--beta 0.2", 8, {"train.objective": "dpo", "train.beta": "0.2"}),
    ("Hugging Face", "--beta 0.2 --loss_type ipo", 8, {"train.objective": "ipo", "train.beta": "0.2"}),
    ("Hugging Face", "--beta 0.2 --loss_type hinge", 8, None),
    ("Hugging Face", "--beta 0.04 --num_generations 8", 8, None),
    ("Hugging Face", "--loss_type sigmoid_norm", 8, {"train.objective": "dpo_norm"}),
    ("Hugging Face", "--label_smoothing 0.1 --loss_type robust", 8, {"train.label_smoothing": "0.1"}),
    ("Hugging Face", "--label_smoothing 0.1", 8, None),
    ("Megatron-LM", "--step-batch-size-schedule 0:8 64K:16 128K:24 --seq-length 64", 8,
     {"train.batch_ramp": "8 8 2000", "train.global_batch_size": "24"}),
    ("Megatron-LM", "--step-batch-size-schedule 0:8 64K:16 192K:24 --seq-length 64", 8, None),
    ("Megatron-LM", "--step-batch-size-schedule 0:8 --seq-length 64", 8, {"train.global_batch_size": "8"}),
    ("Hugging Face", "--save_steps 0.1 --max_steps 50", 8, {"checkpoint.every": "5"}),
    ("Hugging Face", "--eval_strategy no", 8, {}),
    ("Hugging Face", "--fsdp full_shard auto_wrap", 8, {"optimizer.zero_stage": "3"}),
    ("Hugging Face", "--fsdp hybrid_shard", 8, None),
    ("Hugging Face", "--ddp_bucket_cap_mb 25", 8, {"optimizer.bucket_mb": "25"}),
    ("Hugging Face", "--resume_from_checkpoint out/checkpoint-5", 8, None),
    ("Hugging Face", "--data_path a.json", 8, None),
    ("Hugging Face", "--per_device_train_batch_size 4", 8, {"train.micro_batch_size": "4"}),
    ("torchtitan", "--training.num_tokens_per_microbatch_per_dp_rank 8192 --training.max_context_length 4096", 8,
     {"train.micro_batch_size": "2", "train.global_batch_size": "16"}),
    ("torchtitan", "--training.num_tokens_per_microbatch_per_dp_rank 100 --training.max_context_length 64", 8, None),
    ("torchtitan", "--training.num_tokens_per_train_step 65536 --training.max_context_length 4096", 8,
     {"train.global_batch_size": "16"}),
    ("torchtitan", "--training.local_batch_size 2", 8,
     {"train.micro_batch_size": "2", "train.global_batch_size": "16"}),
    ("torchtitan", "--training.local_batch_size 8 --parallelism.pipeline_parallel_degree 2", 8,
     {"train.micro_batch_size": "1", "train.global_batch_size": "32"}),
    ("torchtitan", "--training.global_batch_size 64", 8, {"train.global_batch_size": "64"}),
    ("torchtitan", "--training.enable_cpu_offload true", 8, {"optimizer.offload": "1"}),
    ("torchtitan", "--parallelism.tensor_parallel_degree 2", 8,
     {"parallel.tp": "2", "parallel.sequence_parallel": "true"}),
    ("torchtitan", "--parallelism.data_parallel_shard_degree 2 --parallelism.data_parallel_replicate_degree 4", 8,
     {"optimizer.zero_stage": "3", "optimizer.shard_ranks": "2"}),
    ("torchtitan", "--parallelism.data_parallel_replicate_degree 4", 8, {"optimizer.shard_ranks": "2"}),
    ("torchtitan", "--parallelism.fsdp_reshard_after_forward never", 8, {}),
    ("torchtitan", "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.pipeline_parallel_degree 2", 8,
     {"parallel.schedule": "zb-v"}),
    ("torchtitan", "--parallelism.pipeline_parallel_schedule Interleaved1F1B", 8, {}),
    ("torchtitan", "--lr_scheduler.decay_type linear --lr_scheduler.decay_ratio 0.1 --training.steps 1000", 8,
     {"optimizer.schedule": "wsd", "optimizer.decay_steps": "100"}),
    ("torchtitan", "--lr_scheduler.decay_type sqrt", 8, None),
    ("torchtitan", "--lr_scheduler.decay_ratio 0.1 --lr_scheduler.decay_type cosine --training.steps 1000", 8, None),
    ("torchtitan", "--metrics.enable_wandb true", 8, {"log.wandb": "torchtitan"}),
    ("torchtitan", "--metrics.enable_wandb false", 8, {}),
    ("Hugging Face", "--report_to wandb tensorboard", 8, {"log.wandb": "huggingface", "log.tensorboard": "true"}),
    ("Hugging Face", "--report_to none", 8, {"log.tensorboard": "false"}),
    ("Hugging Face", "--report_to clearml", 8, None),
    ("DeepSpeed", "--wandb.project x --wandb.enabled true", 8, {"log.wandb": "x"}),
    ("DeepSpeed", "--wandb.project x", 8, {}),
    ("torchtitan", "--lr_scheduler.min_lr_factor 0.1 --optimizer.lr 1e-3", 8, {"optimizer.min_lr": "0.0001"}),
    ("torchtitan", "--optimizer.beta2 0.99", 8, {"optimizer.betas": "0.9 0.99"}),
    ("torchtitan", "--checkpoint.enable false", 8, {"checkpoint.save_last": "false"}),
    ("torchtitan", "--checkpoint.interval 50 --checkpoint.enable true", 8, {"checkpoint.every": "50"}),
    ("torchtitan", "--checkpoint.last_save_model_only true", 8, {}),
    ("torchtitan", "--checkpoint.last_save_model_only true --checkpoint.enable true", 8, None),
    ("torchtitan", "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 2", 8,
     {"train.recompute": "full", "train.recompute_layers": "::2"}),
    ("torchtitan", "--activation_checkpoint.mode memory_budget", 8, None),
    ("torchtitan", "--float8.recipe_name rowwise", 8, {}),
    ("torchtitan", "--float8.recipe_name rowwise --model.converters float8", 8, {}),
    ("torchtitan", "--model.converters quantize.linear.float8,quantize.grouped_mm.float8", 8, {"train.fp8": "blocks"}),
    ("torchtitan", "--model.converters float8,quant", 8, None),
    ("torchtitan", "--float8.filter_fqns output,attention.wk,feed_forward.w2,layers.0. --model.converters float8", 8,
     {"train.fp8_skip": "*.attention.k *.mlp.down 0"}),
    ("torchtitan", "--quantize.linear.mx.filter_fqns output,router.gate --model.converters mx", 8, {}),
    ("torchtitan", "--float8.filter_fqns attention.wq", 8, {}),
    ("torchtitan", "--float8.filter_fqns auto_filter_small_kn --model.converters float8", 8, None),
    ("Megatron-LM", "--fp8-format hybrid", 8, {"train.fp8": "blocks"}),
    ("Megatron-LM", "--fp8-recipe delayed --fp8-format e4m3", 8, {"train.fp8": "blocks"}),
    ("Megatron-LM", "--fp8-recipe tensorwise", 8, {}),
    ("Megatron-LM", "--fp8-recipe custom --fp8-format e4m3", 8, None),
    ("Megatron-LM", "--fp8-margin 1 --fp8-format e4m3", 8, {}),
    ("Megatron-LM", "--fp8-param-gather --fp8-format e4m3 --use-megatron-fsdp", 8, {}),
    ("Megatron-LM", "--fp8-param-gather --fp8-format e4m3 --use-distributed-optimizer", 8, None),
    ("Megatron-LM", "--first-last-layers-bf16 --fp8-format e4m3 --num-layers-at-end-in-bf16 2", 8,
     {"train.fp8_skip": "0 -1 -2"}),
    ("Megatron-LM", "--num-layers-at-start-in-bf16 3 --fp8-format e4m3 --first-last-layers-bf16", 8,
     {"train.fp8_skip": "0 1 2 -1"}),
    ("Megatron-LM", "--num-layers-at-start-in-bf16 3 --fp8-format e4m3", 8, {}),
    ("Megatron-LM", "--first-last-layers-bf16", 8, {}),
    ("Megatron-LM", "--fp4-format e2m1", 8, None),
    ("Megatron-LM", "--fp4-recipe nvfp4 --fp4-format e2m1", 8, None),
    ("Megatron-LM", "--fp4-recipe nvfp4", 8, {}),
    ("Hugging Face", "--fp8 true", 8, {"train.fp8": "blocks"}),
    ("Hugging Face", "--mixed_precision fp8", 8, {"train.precision": "bf16", "train.fp8": "blocks"}),
    ("Hugging Face", "--mixed_precision fp16", 8, {"train.precision": "fp16"}),
    ("Hugging Face", "--mixed_precision int8", 8, None),
    ("torchtitan", "--profiling.profile_freq 10", 8, {}),
    ("torchtitan", "--validation.steps 10", 8, {}),
    ("torchtitan", "--validation.steps 10 --validation.enable true", 8, None),
    ("torchtitan", "--model.tokenizer_path a/tokenizer.model", 8, {"data.tokenizer": "tiktoken:a/tokenizer.model"}),
    ("torchtitan", "--model.flavor 8B --model.name llama3", 8, {"base": "llama3-8b"}),
    ("torchtitan", "--model.flavor 70B --model.name llama3", 8,
     {"base": "llama3-70b", "model.rope_scaling.rope_type": "llama3", "model.rope_scaling.factor": "8"}),
    ("torchtitan", "--model.flavor 32B --model.name qwen3", 8,
     {"base": "qwen3-8b", "model.num_hidden_layers": "64", "model.intermediate_size": "25600"}),
    ("torchtitan", "--model.flavor 16B --model.name deepseek_v3 --training.seq_len 4096", 8,
     {"base": "deepseek-v2-lite", "model.moe.balance": "bias", "model.rope_scaling.rope_type": "default"}),
    ("torchtitan", "--model.flavor 671B --model.name deepseek_v3 --training.seq_len 8192", 8,
     {"base": "deepseek-v3", "model.moe.balance": "bias"}),
    ("torchtitan", "--model.flavor debugmodel --model.name llama3", 8, None),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "flags", "world", "expected"), CONVERSIONS, ids=lambda value: str(value)[:60])
def test_a_value_becomes_ours_as_its_row_says(framework, flags, world, expected):
    """The first flag's line; None means that it has no counterpart."""
    options = sources.options_of_words(flags.split(), (framework,))
    found = move(options, FOR_OPTIONS, world=world, samples=500)
    name = options[0].name
    reasons = {line.theirs: line.here for line in found.left if not line.is_default}
    if expected is None:
        assert name in reasons
        return
    assert name not in reasons, reasons
    own = f"{name} {' '.join(options[0].words)}".rstrip()
    # A later flag of a pair, such as both betas, sets the same values again.
    assert {path: " ".join(found.ours[path]) for path in expected} == expected
    if not expected:
        assert own not in found.sources.values()


def test_every_conversion_of_the_table_has_such_a_case():
    tried = {(framework, plain(flags.split()[0][2:])) for framework, flags, _, _ in CONVERSIONS}
    rows = {framework: {plain(row.name): row for row in rows} for framework, rows in TABLE.items()}
    tested = set()
    for framework, name in tried:
        while name not in rows[framework]:
            name = name.rpartition(".")[0]
        tested.add(getattr(rows[framework][name].convert, "__qualname__", ""))
    used = {row.convert.__qualname__ for table in TABLE.values() for row in table if row.convert is not None}
    assert not used - tested


def test_every_default_of_the_table_is_a_value_of_an_option_here():
    for framework, rows in TABLE.items():
        given = [row for row in rows if row.default and row.relation == "same" and row.convert is None]
        for row in given:
            assert carry.typed(tuple(row.default.split()), FOR_OPTIONS.types()[row.option]) is not None, row.name
        fields = {row.name for row in TABLE["Hugging Face"]}
        assert not {row.auto for row in rows if row.auto} - fields, framework


# Launch scripts

SCRIPT = r"""#!/bin/bash
export A=1 # a comment
TP=${TP:-4}; NODES=${SLURM_NNODES:-2}
WORLD=$((8 * NODES / (1 + 1)))
DATA=$5
ARGS=(
    --num-layers 8   # comments stand in arrays
    "--normalization RMSNorm"
    --lr 6.0e-5
)
if [[ "$MODE" == "fp8" ]] || [ -z "$TP" ]; then
    ARGS+=(--fp8-format hybrid)
elif [ "$TP" -ge 4 ]; then
    ARGS+=(--bf16)
else
    ARGS+=(--fp16)
fi
[ -f data.idx ] && ARGS+=(--mock-data)
case $TP in
    2|3) SIZE=64 ;;
    *) SIZE=128 ;;
esac
OPTS=" \
    --train-iters $WORLD \
    --hidden-size $SIZE \
    "
cat <<EOT > ds.json
{ "train_batch_size": $((1 + 1)), 'unclosed
EOT
echo python pretrain_gpt.py $OPTS --one --two --three --four --five --six --seven --eight --nine --ten --eleven
srun bash -c "torchrun --nproc_per_node 8 --nnodes $NODES --node_rank \$SLURM_PROCID pretrain_gpt.py ${ARGS[*]} $OPTS \
    --tensor-model-parallel-size=$TP --data-path $DATA --split '99,1,0'" 2>&1 | tee $(hostname).log
"""


def test_a_script_is_read_as_bash_would_run_it():
    launch = script(SCRIPT)
    options = {o.name: o for o in sources.options_of_words(launch.words, ("Megatron-LM",), launch)}
    assert launch.program == "pretrain_gpt.py"
    assert sources.world_of(launch.launcher) == 16
    assert {name: option.words for name, option in options.items() if not option.unresolved} == {
        "num-layers": ("8",),
        "normalization": ("RMSNorm",),
        "lr": ("6.0e-5",),
        "bf16": (),
        "train-iters": ("8",),
        "hidden-size": ("128",),
        "tensor-model-parallel-size": ("4",),
        "split": ("99,1,0",),
    }
    assert {name: option.unresolved for name, option in options.items() if option.unresolved} == {
        "mock-data": "ARGS is set under a condition that only a run decides: [ -f data.idx ], line 18",
        "data-path": "argument 5 of the script, line 5",
    }
    known = script(SCRIPT, **{"5": "text", "TP": "2", "MODE": "fp8"})
    words = " ".join(known.words)
    assert "--fp8-format hybrid" in words
    assert "--hidden-size 64" in words
    assert "--data-path text" in words


def test_what_cannot_be_resolved_is_listed_unless_its_value_does_not_matter(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(f"torchrun pretrain_gpt.py {' '.join(LLAMA.split())} --seed $(date +%s) --wandb-entity $USER_NAME "
                    "--tensorboard-dir $OUT/tb\n")  # fmt: skip
    account, notes = from_megatron.account(from_megatron.Arguments(file), [])
    assert left(account) == {
        "seed": "cannot be resolved: $(date +%s), line 1",
        "wandb-entity": "Weights & Biases reads WANDB_ENTITY",
    }
    assert "line 1 starts pretrain_gpt.py" in notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$(curl http://x/train.sh)", "holds no command with a program"),
        ("touch ran; `touch ran`; eval \"$(touch ran)\"", "holds no command with a program"),
        ("torchrun train.py $(cat flags)", "cannot be read: $(cat flags), line 1"),
        ("A=x\n" + "A=$A$A\n" * 64 + "python t.py --a $A", "grows beyond"),
        ("A=(x)\n" + 'A+=("${A[@]}")\n' * 64 + "python t.py --a ${A[@]}", "grows beyond"),
        ("A='x\npython t.py --a 1", "line 1 is not bash: A='x"),
        ("A=( --a 1", "line 1 lacks a )"),
        ("bash -c " * 3 + "x", "holds no command"),
        ("eval eval eval eval eval eval python t.py --a 1", "too deeply"),
        ("\0", "is no text"),
        ("elif true", "holds no command"),
        ("", "holds no command"),
        ("if " * 50_000, "line 1 is not bash: if if if"),
        ("! " * 200_000 + "A=1 " * 100_000, "holds no command"),
        ("( " * 100_000 + "$((" * 1000, "line 1 is not bash: ( ( ("),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_hostile_script_is_refused_in_one_line_and_nothing_of_it_runs(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.sh"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_launch(file)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]


def test_sums_that_bash_would_not_finish_are_not_computed():
    for text in ("9**9**9", "1/0", "a[b[c]]", "9" * 30, "1" + "0" * 17 + " * 1000", "-" * 150 + "1" * 100):
        launch = script(f"python t.py --a $(({text}))")
        assert launch.notes or launch.unresolved(launch.words[1]), text
    assert script("N=7; python t.py --a $((-N * 2 / 3 % 3 + ${N}))").words == ("--a", "6")


BATCH = """TRAIN="
cd /x;
export PYTHONPATH=/x:${PYTHONPATH};
${PROFILE} python /x/pretrain_gpt.py ${ARGS[@]}"
mkdir -p logs || {
    echo "no folder"
    exit 1
}
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
srun --mpi=pmix -l \\
    bash -x -c "${TRAIN}" 2>&1 | tee logs/\\${SLURM_JOB_ID}.log
EOF
"""


def test_a_job_in_a_here_document_is_read():
    """Megatron-LM's script of its FSDP gives the job to sbatch as a text. Quoted, the shell of the job expands it."""
    known = 'ARGS=(--num-layers 61 "--lr 1e-5")\nPROFILE=""\n'
    launch = script(known + BATCH)
    assert launch.program == "/x/pretrain_gpt.py"
    assert launch.words == ("--num-layers", "61", "--lr", "1e-5")
    quoted = script("export A=3\nsbatch <<'EOF'\nB=$A\npython t.py --a $B --b \\$A\nEOF\n")
    assert quoted.words == ("--a", "3", "--b", "$A")
    assert script("bash <<< 'python t.py --a 1'").words == ("--a", "1")


def test_a_ds_config_that_the_script_writes_is_read(tmp_path):
    """As scripts of SuperOffload and of BLOOM do."""
    file = tmp_path / "job.sh"
    file.write_text("""OUT=$(pwd)/run; CONFIG="${OUT}/ds.$SLURM_JOBID.json"; ZERO=2
cat <<EOT > $CONFIG
{"train_batch_size": 16, "zero_optimization": {"stage": $ZERO}, "gradient_clipping": $CLIP,
 "optimizer": {"params": {"lr": 1e-4}}}
EOT
deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config $CONFIG --max_steps 5 --learning_rate 1e-4
""")
    found, notes = from_deepspeed.account(from_deepspeed.Arguments(file, model="llama-3m"), [])
    assert (found.config.optimizer.zero_stage, found.config.train.global_batch_size) == (2, 16)
    assert left(found) == {"gradient_clipping": "cannot be resolved: $CLIP, set nowhere in the script, line 3"}
    assert "ds_config: /run/ds..json, which the script writes" in notes
    file.write_text(file.read_text().replace("> $CONFIG", "> other.json"))
    with pytest.raises(ConfigError, match="no such file"):
        from_deepspeed.account(from_deepspeed.Arguments(file), [])


ZENFLOW = """CONFIG=./zf.json
if [ -f "$CONFIG" ]; then
    CMD="deepspeed train.py --lr 1e-4 \\
        --max_steps 5"
else
    exit 1
fi
eval $CMD
"""


def test_a_command_under_a_condition_names_the_line_of_the_condition():
    """Where the other branch ends the script, the condition held for whatever follows."""
    launch = script(ZENFLOW)
    assert launch.words == ("--lr", "1e-4", "--max_steps", "5")
    assert launch.notes == ('read as the branch that does not end the script: if [ -f "${CONFIG}" ], line 2',)
    launch = script(ZENFLOW.replace("exit 1", "CMD='deepspeed train.py --lr 2e-4'"))
    assert launch.program.startswith("train.py")
    assert [launch.unresolved(word) for word in launch.words[-2:]] == [
        'CMD is set under a condition that only a run decides: [ -f "${CONFIG}" ], line 2'
    ] * 2
    (note,) = script("if [ -f a ]; then\n python t.py --a 1\nfi").notes
    assert note == "line 2 stands under a condition that only a run decides: [ -f a ], line 1"
    (note,) = script("A=1\npython ${A{ t.py --a 1").notes
    assert note == "line 2 is not bash: ${A{"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("read A\npython t.py --a $A", "A is set by A=, line 1"),
        ("let A=B+1\npython t.py --a $A", "A is set by A=B+1, line 1"),
        ("((A=2))\npython t.py --a $A", "A is set by ((A=2)), line 1"),
        ("for A in 1 2; do\npython t.py --a $A; done", "A of a loop: for A in 1 2, line 1"),
        ("A[3]=1\npython t.py --a $A", "A is set by A=, line 1"),
        ("python t.py \\\n --a ${A%x}", "${A%x}, line 2"),
        ("A=$(date)\npython t.py --a ${A:-b}", "$(date), line 1"),
        ("f() { python t.py --a $1; }", "argument 1 of the script, line 1"),
        ("python t.py --a ${!A}", "${!A}, line 1"),
        ("while read A; do :; done < x\npython t.py --a $A", "A is set by A=, line 1"),
    ],
)
def test_what_only_a_run_knows_is_told_with_its_line(text, why):
    launch = script(text)
    assert launch.unresolved(launch.words[1]) == why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f() { python t.py --a $1 \"${@}\"; }\nf 3 '4 5'", ("--a", "3", "3", "4 5")),
        ("set -- 7; python t.py --a $1", ("--a", "7")),
        ('G=(1 2 3); python t.py --a ${#G[@]} ${G[1]} "${G[*]}"', ("--a", "3", "2", "1 2 3")),
        (
            "A=/x B=y\nif [[ $B == y* ]]; then C=1\nelif true; then C=2; fi\npython t.py --a $A/$B.c-$C",
            ("--a", "/x/y.c-1"),
        ),
        ("A=1; (( A > 0 )) && B=--b; python t.py --a $A $B", ("--a", "1", "--b")),
        ("case x.py in a|*.sh) A=1;; ?.py) A=2;; *) A=3;; esac; python t.py --a $A", ("--a", "2")),
        ("A=$'a\\tb'; python t.py --a \"$A\" --b \\$A 'it'\"'\"'s'", ("--a", "a\tb", "--b", "$A", "it's")),
        ("D=<PATH_OF_DATA>\npython t.py --d $D --a 1", ("--d", "<PATH_OF_DATA>", "--a", "1")),
        ("env A=1 bash run.sh -- bash -c 'python t.py --a 1'", ("--a", "1")),
    ],
)
def test_the_expansion_knows_what_bash_knows(text, words):
    assert script(text).words == words


def test_these_words_are_those_of_bash(tmp_path):
    """Bash itself, with a program that prints its words, is asked about harmless scripts."""
    for text in (
        r"""A="x  y" B=; C=(1 "2 3"); python t.py --a $A "$A" ${B:-d e} "${C[@]}" ${C[*]} $((7 / -2 * 3 % 5)) \$A""",
        r"""if [ -z "$Z" ] && ! [[ ab == a? && 3 -gt 10 ]]; then L="--l
            1"; fi; python t.py $L "a\"b\\c" 'd\e' f\ g ${Z:+no} ${L:+yes} {a,b}""".replace(" {a,b}", ""),
        "P=(--x 1 \\\n  --y 'a b' # c\n)\nP+=(--z)\nbash -c \"python t.py ${P[*]} \\$HOME_OF_NOBODY end\"",
    ):
        stub = tmp_path / "python"
        stub.write_text("#!/bin/sh\nshift\nfor word; do printf '%s\\n' \"$word\" | tr '\\n' '|'; echo; done\n")
        stub.chmod(0o755)
        ran = subprocess.run(["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True)
        words = script(text.replace("$HOME_OF_NOBODY", "")).words
        assert [word.rstrip("|") for word in ran.stdout.decode().splitlines()] == [*words], text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"case {'a' * 60} in {'*a' * 30}*b) X=1;; esac; python t.py --a 1", ""),
        (f"case {'a' * 2000} in *a*a*a*a*b) X=1;; esac; python t.py --a 1", ""),
        ("A=" + "x" * 50 + "; python t.py --a " + "$A" * 30_000, "grows beyond"),
        ("python t.py --a " + "${a:-" * 3000 + "}" * 3000, "expansions lie in expansions too deeply"),
        ("a=(" * 3000, "line 1 is not bash"),
        ("cat <<E\n" + "$a " * 60_000 + "\nE\n", "cannot be read as bash within 5 seconds"),
        ("[ " + "! " * 5000 + " a ]", "tests lie in tests too deeply"),
        ("".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(20)) + "f0", "runs 300,000 statements"),
        ("f() { f; }; f", "blocks lie in blocks too deeply"),
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_script_ends_soon(text, said):
    """Each ran for minutes once, or ended in a traceback of thousands of lines; the last have no end by themselves."""
    if said:
        with pytest.raises(ConfigError, match=said) as caught:
            script(text)
        assert "\n" not in str(caught.value)
    else:
        assert script(text).words == ("--a", "1")


def test_a_recipe_of_megatrons_own_tests_is_read(tmp_path):
    pytest.importorskip("yaml")
    flags = LLAMA.replace("\n", " ").split(" --")
    lines = [f"  --{flag.removeprefix('--').replace(' ', ': ') if ' ' in flag else flag + ': true'}" for flag in flags]
    file = tmp_path / "model_config.yaml"
    file.write_text(
        "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n" + "\n".join(lines) + "\n  --save: ${OUT}\n  --data-path: 1 $X 2 b\n"
    )
    found, notes = from_megatron.account(from_megatron.Arguments(file, world_size=2, var=("X=a",)), [])
    assert left(found) == {"save": "cannot be resolved: $OUT, set nowhere in the script, line 1"}
    assert found.config.data.train == ("1:a", "2:b")
    assert found.config.train.steps == 10
    assert "its MODEL_ARGS are read" in notes


def test_a_file_that_is_no_script_is_refused_in_one_line(tmp_path):
    (tmp_path / "huge.sh").write_bytes(b"#" * (1 << 20) + b"\n\n")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00python t.py --a 1")
    for name, said in (
        ("huge.sh", "at most"),
        ("binary.sh", "no text"),
        ("none.sh", "no such file"),
        (".", "director"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            read_launch(tmp_path / name)
        assert "\n" not in str(caught.value)


# Saved arguments


def test_arguments_of_a_checkpoint_are_read_without_running_it(tmp_path):
    model = LlamaModel(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    args = args_of(replace(model, head_dim=8, intermediate_size=48), 1, 1)
    # Objects of Megatron-LM's classes can be stored only where they are defined.
    values = {name: value for name, value in vars(args).items() if type(value).__module__ == "builtins"}
    args = Namespace(**values, lr=1e-4, train_iters=50, micro_batch_size=1, world_size=4)
    folder = tmp_path / "iter_0000012"
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save({"args": args, "checkpoint_version": 3.0}, folder / "mp_rank_00/model_optim_rng.pt")
    account, notes = from_megatron.account(from_megatron.Arguments(folder), [])
    assert account.config.optimizer.lr == 1e-4
    assert account.config.model.num_key_value_heads == 2
    assert account.config.train.steps == 50
    assert account.arithmetic[0].startswith("4 ranks")
    assert any("unset" in note for note in notes)

    class Hostile:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    file = tmp_path / "model_optim_rng.pt"
    torch.save({"args": Hostile()}, file, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="refused, not unpickled"):
        from_megatron.account(from_megatron.Arguments(file), [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_saved_arguments_are_read_as_the_flags_that_made_them(tmp_path, ending):
    pytest.importorskip("yaml")
    args = {"num_layers": 2, "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "fp16": False,
            "position_embedding_type": "rope", "masked_softmax_fusion": False, "seed": 7, "quux": 3, "save": None,
            "attention_dropout": 0.0, "hidden_dropout": 0.0, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp4": None,
            "fp4_recipe": "nvfp4", "fp8_wgrad": True, "bf16": True}  # fmt: skip
    lines = (f"{name}: {json.dumps(value)}" for name, value in args.items())
    file = tmp_path / f"args.{ending}"
    file.write_text(json.dumps(args) if ending == "json" else "\n".join(lines))
    account, _ = from_megatron.account(from_megatron.Arguments(file, world_size=2), [])
    assert {*left(account)} == {"quux"}
    assert account.config.train.seed == 7
    assert account.config.train.fp8 == "blocks"
    assert not account.config.model.mlp_bias
    assert {"--disable-bias-linear", "--no-masked-softmax-fusion"} <= {line.theirs for line in account.moved.carried}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[" * 100_000, "not readable as json"),
        ("a.json", "[1]", "holds no arguments by name"),
        ("a.json", "{", "not readable as json"),
        ("a.yaml", "a: &a [1]\nb: *a", "anchors or aliases"),
        ("a.yaml", "a: !!python/object/apply:os.system ['touch ran']", "not readable as yaml"),
        ("a.toml", "a = ", "not readable as toml"),
        ("a.yaml", "1: 2\nlr: 3", "key 1 is no name of an option"),
        ("a.yaml", "a: {1: 2}", "key 1 is no name of an option"),
        ("a.yaml", "seed: 1" + ":59" * 5_000, "holds a number of more than 1100 bits"),
        ("a.yaml", "seed: 1" + ":59" * 5_000 + ".5", "not readable as yaml"),
    ],
)
def test_a_damaged_or_hostile_file_of_arguments_is_refused_in_one_line(tmp_path, monkeypatch, name, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        sources.read_table(Path(name))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_key_without_a_value_is_unset(tmp_path, ending):
    pytest.importorskip("yaml")
    unset = {"wandb_project": None, "lora_r": None, "learning_rate": 1e-4, "max_steps": 5, "warmup_ratio": None}
    file = tmp_path / f"job.{ending}"
    lines = [f"{name}: {'' if value is None else value}\n" for name, value in unset.items()]
    file.write_text(json.dumps(unset) if ending == "json" else "".join(lines))
    account, _ = from_deepspeed.account(from_deepspeed.Arguments(file, model="llama-3m", world_size=1), [])
    assert account.is_whole, report(account)
    assert account.moved.options == 2
    assert account.config.log.wandb == "none"
    assert account.config.adapter.rank == 0


# DeepSpeed and torchtitan


def test_auto_is_what_the_trainer_puts_there(tmp_path):
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.05}},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "wandb": {"enabled": False, "project": "x"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "run.sh").write_text(
        "deepspeed --num_gpus 4 --num_nodes 2 train.py --deepspeed ds.json --learning_rate 3e-5 --bf16 --max_steps 9\n"
    )
    args = from_deepspeed.Arguments(tmp_path / "run.sh", model="llama3-8b")
    account, notes = from_deepspeed.account(args, [])
    values = flatten(account.config)
    assert account.toml.startswith('base = "llama3-8b"\n')
    assert values["optimizer.lr"] == 3e-5
    assert values["optimizer.weight_decay"] == 0.05
    assert values["train.precision"] == "bf16"
    assert values["optimizer.zero_stage"] == 2
    assert values["optimizer.offload"] == 1.0
    assert values["train.global_batch_size"] == 64  # 8 samples a device, the Trainer's default, on 8 ranks
    assert values["optimizer.clip_grad"] == 1.0
    assert account.arithmetic[0].startswith("8 ranks")
    assert set(left(account)) == set()
    assert any("ds.json" in note for note in notes)
    # By itself a ds_config has DeepSpeed's own defaults, and no model.
    (tmp_path / "alone.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 1}}))
    account, _ = from_deepspeed.account(from_deepspeed.Arguments(tmp_path / "alone.json", world_size=4), [])
    assert account.config.train.micro_batch_size == 4
    assert account.config.optimizer.clip_grad == 0.0
    assert [line.theirs for line in account.moved.left] == ["the model"]
    (tmp_path / "run.sh").write_text("deepspeed train.py --deepspeed missing.json --learning_rate 3e-5\n")
    with pytest.raises(ConfigError, match=r"missing.json: no such file"):
        from_deepspeed.account(args, [])


def test_a_default_of_somebody_else_does_not_replace_what_the_job_says(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4, "gradient_accumulation_steps": 1}))

    def values(flags: str, *, model: str = "llama-3m", **args):
        args = from_deepspeed.Arguments(ds_config=tmp_path / "ds.json", model=model, world_size=1, **args)
        account, _ = from_deepspeed.account(args, flags.split())
        assert not account.refusal, account.refusal
        return flatten(account.config), {line.theirs: line for line in account.moved.carried}, account.moved

    # The Trainer's micro-batch of 8 would not fit into the batch of 4.
    assert values("--learning_rate 1e-5 --max_steps 3")[0]["train.micro_batch_size"] == 4
    flags = "--lr 1e-5 --max_seq_len 64 --lora_dim 8 --num_warmup_steps 2 --max_steps 5"
    own, carried, moved_ = values(f"{flags} --batch_size 2")
    assert (own["optimizer.lr"], own["train.seq_length"], own["adapter.rank"]) == (1e-5, 64, 8)
    assert own["optimizer.warmup_steps"] == 2
    assert {"--lr", "--lora_dim", "--num_warmup_steps"} <= {*carried}
    assert "Hugging Face" not in " ".join(moved_.sources.values())
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (tmp_path / "a.yaml").write_text("base_model: x\nnum_epochs: 1\nmicro_batch_size: 2\nsequence_len: 64\n"
                                     "lr_scheduler: cosine\nlearning_rate: 2e-4\n")  # fmt: skip
    axolotl, _, moved_ = values("", source=tmp_path / "a.yaml", samples=100)
    assert (axolotl["train.micro_batch_size"], axolotl["train.steps"], axolotl["train.seq_length"]) == (2, 50, 64)
    assert axolotl["optimizer.schedule"] == "cosine"
    # Of torchtitan's later versions: tokens of a micro-batch, without a default of the earlier ones.
    flags = "--training.num_tokens_per_microbatch_per_dp_rank 8192 --training.max_context_length 8192"
    titan, _ = from_torchtitan.account(from_torchtitan.Arguments(model="llama3-8b", world_size=8), flags.split())
    assert (titan.config.train.micro_batch_size, titan.config.train.global_batch_size) == (1, 8)


def test_a_job_of_preferences_takes_its_objective_too(tmp_path):
    """A trl job of DPO has pairs for samples, each answer of max_length, and the base for its reference."""

    def account(program: str, flags: str):
        args = from_deepspeed.Arguments(model="llama-3m", samples=64, world_size=1)
        return from_deepspeed.account(args, ["accelerate", "launch", program, *flags.split()])[0]

    for program, flags in (("x/run_dpo.py", ""), ("train.py", "--beta 0.1"), ("dpo.py", "--loss_type sigmoid")):
        found = account(program, f"--learning_rate 1e-6 --max_length 512 --lora_r 8 {flags}")
        train = found.config.train
        assert (train.objective, train.references, train.seq_length) == ("dpo", "adapters_off", 1024)
        assert found.config.data.documents == "apart"
        assert found.is_whole, report(found)
    other = account("kto.py", "--learning_rate 1e-6 --beta 0.1")
    assert other.config.train.objective == "cross_entropy"
    assert left(other) == {"beta": "of trl's KTO, which has no objective here"}
    assert not account("dpo.py", "--loss_type hinge").config.train.objective.startswith("dpo")


def test_a_file_of_gpt_neox_becomes_its_model_and_batches(tmp_path):
    """Keys of GPT-NeoX's pythia 6.9B (configs/pythia/6-9B.yml), and the sizes of that preset."""
    pytest.importorskip("yaml")
    job = tmp_path / "6-9B.yml"
    job.write_text(json.dumps({
        "pipe_parallel_size": 1, "model_parallel_size": 2, "num_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "seq_length": 2048, "max_position_embeddings": 2048, "norm": "layernorm",
        "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True, "gpt_j_residual": True,
        "attention_config": [[["flash"], 32]], "min_lr": 1.2e-5, "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1.2e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "fp16": {"fp16": True, "enabled": True, "loss_scale": 0}, "train_iters": 143000, "lr_decay_iters": 143000,
        "lr_decay_style": "cosine", "warmup": 0.01, "checkpoint_factor": 1000, "log_interval": 10,
    }))  # fmt: skip
    found, _ = from_megatron.account(from_megatron.Arguments(job, world_size=64), [])
    assert found.is_whole, report(found)
    assert found.moved.options == 30
    ours, preset = flatten(found.config), flatten(load(["--config", str(presets()["pythia-6.9b"])]).config)
    assert {path: ours[path] for path in preset if path.startswith("model.")} == {
        path: value for path, value in preset.items() if path.startswith("model.")
    } | {
        "model.vocab_size": 0,
        "model.intermediate_size": 0,
        "model.initializer_range": ours["model.initializer_range"],
    }
    assert (ours["parallel.tp"], ours["train.global_batch_size"], ours["optimizer.warmup_steps"]) == (2, 512, 1430)
    assert (ours["optimizer.betas"], ours["optimizer.weight_decay"]) == ((0.9, 0.95), 0.1)
    job.write_text("model_parallel_size: 1\npos_emb: learned\nnum_layers: 2\nactivation: swiglu\n")
    found, _ = from_megatron.account(from_megatron.Arguments(job, world_size=1), [])
    assert left(found) == {
        "activation": "cannot be resolved: its width follows from mlp_multiple_of; give intermediate_size"
    }
    assert found.config.model.hidden_dropout == 0


def test_a_model_given_beside_the_job_answers_every_name_of_it():
    for name in ("model_name", "base_model", "model_name_or_path"):
        args = from_deepspeed.Arguments(model="llama-3m", samples=64, world_size=1)
        account, _ = from_deepspeed.account(args, ["--learning_rate", "1e-6", f"--{name}", "meta/x"])
        assert account.is_whole, report(account)


def test_flags_of_torchtitan_win_over_its_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 5\nbatch_size = 2\n[metrics]\n'
                    "enable_tensorboard = true\n")  # fmt: skip
    args = from_torchtitan.Arguments(file, world_size=4)
    words = ["--training.steps", "700", "--metrics.no_enable_tensorboard"]
    account, _ = from_torchtitan.account(args, words)
    assert account.config.train.steps == 700
    assert account.config.train.global_batch_size == 8
    assert not account.config.log.tensorboard
    assert account.config.model.num_hidden_layers == 32
    assert account.is_whole, report(account)


# The programs


@pytest.mark.parametrize("tool", [from_megatron, from_deepspeed, from_torchtitan], ids=lambda tool: tool.__name__)
def test_a_program_writes_toml_and_the_exit_code_says_whether_all_was_carried_over(tool, tmp_path, monkeypatch, capsys):
    flags = {
        from_megatron: f"-- {LLAMA} --untie-embeddings-and-output-weights",
        from_deepspeed: "--model llama-3m -- --max_steps 5 --learning_rate 1e-3",
        from_torchtitan: "--model llama-3m -- --training.steps 500 --training.seq_len 64",
    }[tool]
    monkeypatch.chdir(tmp_path)
    for extra, code in (("", 0), (" --wibble 3", 2)):
        monkeypatch.setattr(sys, "argv", ["x", "--output", "job.toml", "--world_size", "1", *f"{flags}{extra}".split()])
        assert tool.main() == code
        out = capsys.readouterr().out
        assert ("wibble 3: megapar's table does not know it" in out) == bool(extra)
        assert tomllib.loads((tmp_path / "job.toml").read_text())["train"]["steps"] in (5, 10, 500)
    monkeypatch.setattr(sys, "argv", ["x", "--world_size", "1", *flags.split()])
    assert tool.main() == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["train"]
    assert "carried over:" in printed.err
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == ConfigError.exit_code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", migrate.JOBS)
def test_the_one_program_does_what_the_program_of_a_framework_does(name, tmp_path, monkeypatch, capsys):
    tool = {"megatron": from_megatron, "deepspeed": from_deepspeed, "torchtitan": from_torchtitan}[name]
    flags = {"megatron": LLAMA, "deepspeed": "--max_steps 5 --quux 1", "torchtitan": "--training.steps 500"}[name]
    said = []
    for program, command in ((tool, []), (migrate, [name])):
        monkeypatch.setattr(sys, "argv", ["x", *command, "--world_size", "2", "--", *flags.split()])
        code = program.main()
        said.append((code, *capsys.readouterr()))
    assert said[0] == said[1]
    assert "carried over:" in said[0][2]


def test_values_and_names_of_a_job_cannot_break_the_toml_or_the_account():
    option = Option("Megatron-LM", "save", ('a"\n[evil]\nx=1',))
    found = move([option, Option("Megatron-LM", "x\ny", ("1\n2",))], FOR_OPTIONS)
    account = account_of(found, FOR_OPTIONS, {}, validate, 1)
    assert set(tomllib.loads(account.toml)) <= {"run_dir", "model", "train", "optimizer"}
    assert "save" in left(account)
    assert "\ny" not in report(account)


def test_sigmoids_of_one_expert_are_not_divided() -> None:
    """Megatron-Core divides the sigmoids of a token's experts by their sum only if there are several. A softmax of one
    is divided, and its router would never learn."""
    flags = f"{LLAMA} --num-experts 4 --moe-router-load-balancing-type none --moe-router-topk"
    option = "model.moe.norm_topk_prob"
    one = moved("Megatron-LM", f"{flags} 1 --moe-router-score-function sigmoid")
    assert one.moved.ours[option] == ("false",)
    assert not one.refusal
    assert option not in moved("Megatron-LM", f"{flags} 2 --moe-router-score-function sigmoid").moved.ours
    assert "use norm_topk_prob false" in moved("Megatron-LM", f"{flags} 1").refusal


def test_a_job_takes_its_model_from_a_configuration_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "ds.json", "--model", "tiny", "--world_size", "1", "--output", "job.toml"])
    from_deepspeed.main()
    assert "wrote job.toml" in capsys.readouterr().out
    resolved = load(["--config", str(tmp_path / "job.toml")], named_configs(CONFIGS)).config
    assert resolved.model == load(["--config", "tiny"], named_configs(CONFIGS)).config.model
    assert resolved.train.global_batch_size == 4
