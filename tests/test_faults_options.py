"""Sweep of what a run is started with: options, files of options, variables of launchers, disagreeing ranks.

Each is told in one line before anything is written, with the exit code of its class.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from megapar_models.registry import FOR_OPTIONS

from tests.support.faults import Scene
from tests.support.processes import free_port, slurm

# A value of the right kind that is out of range; options that may be anything of their kind have none.
OUT_OF_RANGE = {int: "-1", float: "nan", str: "", bool: "maybe"}
MOST_PROBLEMS = 3  # a wrong value may break several rules, each of which has a line
HUGE = "99999999999999999999"


def wrong_values(annotation: Any) -> list[str]:
    """Values refused by an option of this type, as words of a flag."""
    if get_origin(annotation) is Literal:
        return ["nope", ""]
    if annotation == int | str:  # a length of the learning rate's schedule
        return ["x", "1.5", "-1", "5 lightyears"]
    kind = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    if kind is int:
        return ["x", "1.5", HUGE, OUT_OF_RANGE[int]]
    if kind is float:
        return ["x", OUT_OF_RANGE[float], "inf", "-1"]
    return [OUT_OF_RANGE[kind]]


def refused(scene: Scene, *flags: str, env: Mapping[str, str] | None = None) -> str:
    """The refusal of options that cannot run: exit code 2, one line for each problem, and nothing written."""
    ended = scene.run(*flags, env=env)
    assert (ended.code, ended.out) == (2, ""), ended.out + ended.err
    assert ended.err.startswith("ConfigError: ")
    assert all(line and not line.startswith(" ") for line in ended.err.splitlines()), ended.err
    assert ended.err.count("\n") <= MOST_PROBLEMS, ended.err
    assert not (scene.work / "run").exists()
    return ended.err


# dry_run plans and ends, so it is asked with the others; `config` is a file, see FILES.
OPTIONS = {path: annotation for path, annotation in FOR_OPTIONS.types().items() if annotation is not bool}
SWITCHES = [path for path, annotation in FOR_OPTIONS.types().items() if annotation is bool]


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_sweep_of_wrong_values(option: str, tmp_path: Path) -> None:
    """Fault wrong-value."""
    scene = Scene(tmp_path)
    values = wrong_values(OPTIONS[option])
    for value in (values[0], values[-1]):
        assert option in refused(scene, f"--{option}", value), value


@pytest.mark.slow
@pytest.mark.parametrize("option", SWITCHES)
def test_sweep_of_switches_with_values(option: str, tmp_path: Path) -> None:
    """Fault wrong-value. Those of other families are refused as theirs, whatever their value is."""
    told = refused(Scene(tmp_path), f"--{option}", "maybe")
    assert "expected no value" in told or f"--{option}: family llama does not read it" in told


class Wrong(NamedTuple):
    """Flags in conflict, and words of the line about them."""

    name: str
    flags: str
    words: str

    def __str__(self) -> str:
        return self.name


TOGETHER = [
    Wrong("heads-by-tp", "--parallel.tp 4 --launch.nproc 4", "model.num_attention_heads"),
    Wrong("world-by-tp-pp", "--parallel.tp 2 --parallel.pp 2 --launch.nproc 2", "world size 2"),
    Wrong("dp-too-many", "--parallel.dp 3 --launch.nproc 2", "parallel.dp=3"),
    Wrong("batch-of-7", "--train.micro_batch_size 2 --train.global_batch_size 7", "train.global_batch_size=7"),
    Wrong("seq-by-tp", "--parallel.tp 2 --launch.nproc 2 --parallel.sequence_parallel --train.seq_length 31", "31"),
    Wrong("partition-sum", "--parallel.pp 2 --launch.nproc 2 --parallel.partition 1 2", "parallel.partition=1 2"),
    Wrong("stages-without-layers", "--parallel.pp 8 --launch.nproc 8", "model.num_hidden_layers=4"),
    Wrong("vpp-of-1f1b", "--parallel.vpp 2 --launch.nproc 2 --parallel.pp 2", "parallel.schedule"),
    Wrong("order-unknown", "--parallel.order tp-dp", "parallel.order=tp-dp"),
    Wrong("odd-head", "--model.head_dim 9", "9 is odd"),
    Wrong("kv-heads", "--model.num_key_value_heads 4", "model.num_key_value_heads=4"),
    Wrong("gpt-with-rope", "--model.family gpt --model.rope_theta 5", "model.rope_theta"),
    Wrong("llama-with-dropout", "--model.hidden_dropout 0.1", "model.hidden_dropout"),
    Wrong("positions", "--train.seq_length 65", "model.max_position_embeddings=64"),
    Wrong("vocabulary", "--model.vocab_size 10 --data.tokenizer bytes --data.train hf:json:a", "model.vocab_size=10"),
    Wrong("warmup", "--optimizer.warmup_steps 6", "optimizer.warmup_steps=6"),
    Wrong("decay-of-constant", "--optimizer.decay_steps 2 --optimizer.schedule constant", "optimizer.decay_steps=2"),
    Wrong("min-above-peak", "--optimizer.min_lr 1", "optimizer.min_lr=1.0"),
    Wrong("recompute-every", "--train.recompute_layers ::2", "train.recompute_layers=::2"),
    Wrong("eval-of-nothing", "--train.eval_every 2", "train.eval_every=2"),
    Wrong("keep-every-alone", "--checkpoint.keep_every 2", "checkpoint.keep_every=2"),
    Wrong("two-starts", "--checkpoint.init_from a --checkpoint.resume b", "checkpoint.init_from=a"),
    Wrong("strict-alone", "--checkpoint.no-strict", "checkpoint.strict=false"),
    Wrong("ramp-of-two", "--train.batch_ramp 1 2", "train.batch_ramp=1 2"),
    Wrong("blend-without-weights", "--data.train a b", "data.train=a b"),
    Wrong("blend-of-zero", "--data.train 0:a 0:b", "the weights sum to 0"),
    Wrong("source-twice", "--data.train 1:a 1:./a", "named twice"),
    Wrong("split-of-synthetic", "--data.split 1 1", "data.split=1.0 1.0"),
    Wrong("fim-without-tokens", "--data.fim_rate 0.5", "data.fim_rate=0.5"),
    Wrong("tokenizer-unknown", "--data.tokenizer gpt2", "data.tokenizer=gpt2"),
    Wrong("same-flag-twice", "--train.steps 3 --train.steps 4", "given twice"),
    Wrong("no-such-flag", "--train.stps 3", "did you mean train.steps?"),
    Wrong("word-without-flag", "--dry_run extra", "expected no value"),
    Wrong("value-missing", "--train.steps", "--train.steps: expected a whole number"),
    Wrong("cuda-without-gpu", "--launch.device cuda", "launch.device=cuda"),
    Wrong("timeout-of-a-century", "--launch.timeout_seconds 1e300", "launch.timeout_seconds"),
    Wrong("threads-of-thousands", "--launch.threads 4000", "launch.threads=4000"),
    Wrong("stage-beyond-64-bits", "--data.train 1:a 1:b --data.stages 99999999999999999999:1,1", "and below 2^60"),
    Wrong("size-beyond-32-bits", "--model.head_dim 4611686018427387904", "must be at most 2,147,483,647"),
    Wrong("bucket-of-nothing", "--optimizer.bucket_mb 1e-320", "must be from 1e-05 to 1e+09, or 0"),
    Wrong("bucket-of-everything", "--optimizer.bucket_mb 1e308", "must be from 1e-05 to 1e+09, or 0"),
    Wrong("workers-of-hundreds", "--data.workers 4000", "data.workers=4000"),
    Wrong("ranks-of-thousands", "--launch.nproc 200000", "launch.nproc=200000"),
    Wrong("apex-without-gpu", "--kernels.backend apex", "apex"),
]
FEW_TOGETHER = ("batch-of-7", "no-such-flag", "workers-of-hundreds")


@pytest.mark.parametrize("case", [case for case in TOGETHER if case.name in FEW_TOGETHER], ids=str)
def test_options_that_do_not_fit_are_named(case: Wrong, tmp_path: Path) -> None:
    """The faults of docs/faults.md under Options; tests/test_config.py cites each."""
    assert case.words in refused(Scene(tmp_path), *case.flags.split())


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TOGETHER if case.name not in FEW_TOGETHER], ids=str)
def test_sweep_of_options_that_do_not_fit(case: Wrong, tmp_path: Path) -> None:
    """The faults of docs/faults.md under Options; tests/test_config.py cites each."""
    assert case.words in refused(Scene(tmp_path), *case.flags.split())


FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "no such file"),
    "empty": (b"", "sets nothing"),
    "binary": (b"\xff\xfe\0", "is not UTF-8"),
    "no-toml": (b"[train\nsteps = 3", "options.toml:1: not valid TOML"),
    "cut": (b'run_dir = "ab', "options.toml:1: not valid TOML"),
    "key-twice": (b"[train]\nsteps = 3\nsteps = 4\n", "options.toml:3: not valid TOML"),
    "unknown-key": (b"[train]\nstepz = 3\n", "options.toml:2: train.stepz: no such option; did you mean train.steps?"),
    "unknown-section": (b"[trian]\nsteps = 3\n", "trian.steps"),
    "text-for-number": (b'[train]\nsteps = "3"\n', "options.toml:2: train.steps"),
    "number-for-list": (b"[data]\ntrain = 3\n", "options.toml:2: data.train"),
    "table-for-number": (b"[train.steps]\nx = 3\n", "train.steps.x"),
    "number-for-section": (b"train = 3\n", "options.toml:1: train: is a section"),
    "huge-number": (b"[train]\nsteps = 99999999999999999999\n", "options.toml:2: train.steps"),
    "date": (b"[train]\nsteps = 1979-05-27\n", "options.toml:2: train.steps"),
    "nan": (b"[optimizer]\nlr = nan\n", "optimizer.lr=nan"),
    "base-of-number": (b"base = 3\n", "options.toml:1: base"),
    "base-missing": (b'base = "nowhere.toml"\n', "no such file"),
    "base-itself": (b'base = "options.toml"\n', "leads back to itself"),
    "base-a-folder": (b'base = "."\n', "is a folder"),
    "nested-lists": (b"[data]\ntrain = " + b"[" * 100_000, "options.toml:"),
    "nested-tables": (b"x = " + b"{a=" * 100_000, "options.toml:"),
    "nested-names": (b"a" + b".a" * 2_000 + b" = 1", "options.toml:"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "nested-lists")) for n in FILES])
def test_files_of_options_are_refused_with_their_line(name: str, tmp_path: Path) -> None:
    """Fault bad-config-file."""
    scene = Scene(tmp_path)
    content, words = FILES[name]
    if content is not None:
        (scene.work / "options.toml").write_bytes(content)
    assert words in refused(scene, "--config", "options.toml")


# Variables of launchers

PORT = "29999"
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
SLURM = slurm(0, 2, int(PORT))
GONE = "(gone)"


def varied(base: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in {**base, **changes}.items() if value != GONE}


VARIABLES: dict[str, tuple[Mapping[str, str], dict[str, str], str]] = {
    "rank-missing": (TORCHRUN, {"RANK": GONE}, "RANK is not set"),
    "world-missing": (TORCHRUN, {"WORLD_SIZE": GONE}, "WORLD_SIZE is not set"),
    "rank-in-words": (TORCHRUN, {"RANK": "x"}, "RANK='x'"),
    "rank-empty": (TORCHRUN, {"RANK": ""}, "RANK=''"),
    "rank-negative": (TORCHRUN, {"RANK": "-1"}, "RANK='-1'"),
    "rank-beyond": (TORCHRUN, {"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
    "rank-far-beyond": (TORCHRUN, {"RANK": "9" * 30}, "RANK=999"),
    "world-of-a-billion": (TORCHRUN, {"WORLD_SIZE": "1000000000"}, "WORLD_SIZE=1000000000"),
    "world-zero": (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    "world-in-words": (TORCHRUN, {"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    "local-rank-in-words": (TORCHRUN, {"RANK": "1", "LOCAL_RANK": "q"}, "LOCAL_RANK='q'"),
    "address-missing": (TORCHRUN, {"MASTER_ADDR": GONE}, "MASTER_ADDR not set"),
    "address-empty": (TORCHRUN, {"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    "port-missing": (TORCHRUN, {"MASTER_PORT": GONE}, "MASTER_PORT not set"),
    "port-in-words": (TORCHRUN, {"MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
    "port-zero": (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    "port-beyond": (TORCHRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
    "address-of-no-host": (TORCHRUN, {"MASTER_ADDR": "a@b/c"}, "MASTER_ADDR='a@b/c'"),
    "slurm-rank-in-words": (SLURM, {"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
    "slurm-rank-beyond": (SLURM, {"SLURM_PROCID": "2"}, "SLURM_PROCID=2 of 2 tasks"),
    "slurm-tasks-in-words": (SLURM, {"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS='two'"),
    "slurm-tasks-missing": (SLURM, {"SLURM_STEP_NUM_TASKS": GONE}, "SLURM_NTASKS is not set"),
    "slurm-localid-missing": (SLURM, {"SLURM_LOCALID": GONE}, "SLURM_LOCALID is not set"),
    "slurm-localid-of-rank-1": (SLURM, {"SLURM_PROCID": "1", "SLURM_LOCALID": "q"}, "SLURM_LOCALID='q'"),
    "slurm-per-node-odd": (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "expected something like 8(x2),3"),
    "slurm-per-node-huge": (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"}, "2(x99999999999)"),
    "slurm-node-beyond": (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "1,1", "SLURM_NODEID": "5"}, "SLURM_NODEID=5"),
    "slurm-address-missing": (SLURM, {"MASTER_ADDR": GONE}, "MASTER_ADDR not set"),
    "slurm-cpus-in-words": (SLURM, {"SLURM_CPUS_PER_TASK": "x"}, "SLURM_CPUS_PER_TASK='x'"),
    "slurm-shell": (SLURM, {"SLURM_STEP_ID": GONE, "SLURM_NTASKS": "2"}, "srun did not start this"),
}
FEW_VARIABLES = ("rank-in-words", "local-rank-in-words")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW_VARIABLES)) for name in VARIABLES]
)
def test_variables_of_launchers_that_are_wrong_are_named(name: str, tmp_path: Path) -> None:
    """Fault wrong-launcher-variables: the process with them tells it, whichever rank it is."""
    base, changes, words = VARIABLES[name]
    assert words in refused(Scene(tmp_path), env=varied(base, changes))


MEETINGS: dict[str, tuple[dict[str, str], str]] = {
    "nobody-comes": ({}, "rank 1 of 2 did not come within 2 s"),
    "rank-0-is-not-there": ({"RANK": "1"}, "rank 1 did not reach rank 0 at tcp://127.0.0.1:"),
    "unknown-host": ({"RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}, "no-such-host.invalid"),
    "unknown-host-of-rank-0": ({"MASTER_ADDR": "no-such-host.invalid"}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEETINGS)
def test_sweep_of_ranks_that_do_not_meet(name: str, tmp_path: Path) -> None:
    changes, words = MEETINGS[name]
    scene = Scene(tmp_path)
    env = varied(TORCHRUN | {"MASTER_PORT": str(free_port())}, changes)
    ended = scene.run("--launch.timeout_seconds", "2", env=env)
    assert ended.code == 6, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("CommunicationError")]
    assert words in line
    assert not (scene.work / "run").exists()


# Ranks that disagree: one option of each class, and what is told

OTHER = {
    "model.rms_norm_eps": "1e-6",
    "model.initializer_range": "0.01",
    "model.tie_word_embeddings": None,
    "model.num_hidden_layers": "3",
    "parallel.schedule": "gpipe",
    "parallel.order": "dp-tp-cp-pp",
    "train.micro_batch_size": "1",
    "train.global_batch_size": "48",
    "train.seq_length": "20",
    "train.z_loss": "0.1",
    "train.recompute": "full",
    "optimizer.weight_decay": "0.3",
    "optimizer.clip_grad": "0.5",
    "optimizer.betas": "0.8 0.9",
    "optimizer.zero_stage": "0",
    "optimizer.schedule": "linear",
    "data.documents": "apart",
    "data.validation": "synthetic",
    "checkpoint.every": "2",
    "checkpoint.async_save": None,
    "checkpoint.resume": "none",
    "log.every": "2",
    "kernels.loss_chunk": "8",
    "launch.timeout_seconds": "77",
    "launch.time_limit": "5",
    "run_dir": "elsewhere",
}
FEW_OTHER = ("optimizer.betas", "checkpoint.every")


@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW_OTHER)) for name in OTHER]
)
def test_ranks_that_disagree_are_told_the_option(option: str, tmp_path: Path) -> None:
    """Both end with 2, the first speaks, and nothing is written."""
    scene = Scene(tmp_path)
    port = str(free_port())
    ranks = []
    # Programs of tests choose a micro-batch of their own where the batch is the default one.
    both = ("--train.micro_batch_size", "2") if option == "train.global_batch_size" else ()
    for rank in (0, 1):
        value = OTHER[option]
        flags = both if not rank else (*both, f"--{option}", *(value.split() if value is not None else ()))
        env = TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
        ranks.append(scene.start(*flags, env=env))
    first, second = (scene.finish(rank) for rank in ranks)
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert first.err.startswith(f"ConfigError: ranks disagree on {option}: ")
    assert first.err.count("\n") == 1
    assert (second.out, second.err) == ("", "")
    assert not (scene.work / "run").exists()


def test_every_option_is_swept() -> None:
    """A new option comes into the sweep by itself; its kind must be known there."""
    assert all(wrong_values(annotation) for annotation in OPTIONS.values())
    assert json.dumps(sorted([*OPTIONS, *SWITCHES])) == json.dumps(sorted(FOR_OPTIONS.types()))
