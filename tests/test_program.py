"""pretrain.py and the launch scripts as a person starts them: processes of their own, exit codes, what stands on stderr
and in the run folder."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from megapar_models.registry import presets, validate

from tests.support import program
from tests.support.options import load
from tests.support.processes import TINY, finish, free_port, slurm, start
from tests.support.program import Ended

SCRIPTS = Path(__file__).parent.parent / "pretrain_scripts"
FIELDS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "consumed_samples", "step_seconds", "data_seconds"),
    *("tokens_per_second", "tflops_per_device", "mfu", "peak_memory_bytes", "comm_bytes"),
]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of five steps in one process, evaluated."""
    folder = tmp_path_factory.mktemp("alone")
    code, _, err = finish(start("--data.validation", "synthetic", cwd=folder))
    assert code == 0, err
    return folder


def test_a_run_folder_has_what_was_promised(alone: Path) -> None:
    lines = metrics(alone)
    assert [list(line) for line in lines] == [FIELDS] * 5 + [["step", "validation_loss"]]
    assert [(line["step"], line["consumed_samples"], line["tokens"]) for line in lines[:5]] == [
        (step, 24 * step, 24 * 30) for step in (1, 2, 3, 4, 5)
    ]
    assert lines[0]["mfu"] is None
    asked = load([*TINY, "--run_dir", "run", "--data.validation", "synthetic"]).config
    assert load(["--config", str(alone / "run/config.toml")]).config == asked
    assert sorted(path.name for path in (alone / "run").iterdir()) == [
        *(".lock", "checkpoints", "config.toml", "environment.json", "events.jsonl", "metrics.jsonl"),
        *("ranks.json", "report.html", "tensorboard"),
    ]


def test_slurm_ranks_train_as_one_process_does_and_go_on_as_two_others(alone: Path, tmp_path: Path) -> None:
    """dp 2 under Slurm's variables; then the third to fifth step as tp 2, from the checkpoint after the second."""
    port = free_port()
    flags = ("--parallel.dp", "2", "--checkpoint.every", "2", "--data.validation", "synthetic", *program.FOUR_LAYERS)
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ended = [rank.wait() for rank in ranks]
    assert [rank.code for rank in ended] == [0, 0], ended
    assert (ended[1].out, ended[1].err) == ("", ""), "only the first rank speaks"
    expected = [line["loss"] for line in metrics(alone)[:5]]
    assert [line["loss"] for line in metrics(tmp_path)[:5]] == pytest.approx(expected, rel=1e-5)
    assert metrics(tmp_path)[0]["comm_bytes"]["grad"] > 0
    moved = ("--launch.nproc", "2", "--parallel.tp", "2", "--checkpoint.resume", "run/checkpoints/step_00000002")
    moved += program.FOUR_LAYERS
    resumed = program.run(*moved, cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed step 2 from run/checkpoints/step_00000002" in resumed.out
    assert "changed since: " in resumed.out
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5], "the curve of the steps done again is replaced"
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_context_parallel_ranks_train_as_one_process_does_and_one_goes_on(alone: Path, tmp_path: Path) -> None:
    """cp 3 in a ring, evaluated; then the third to fifth step in one process, from the checkpoint after the second."""
    flags = ("--checkpoint.every", "2", "--data.validation", "synthetic")
    ring = ("--launch.nproc", "3", "--parallel.cp", "3", "--parallel.cp_attention", "ring")
    first = program.run(*ring, *flags, cwd=tmp_path)
    assert first.code == 0, first.err
    assert "3 ranks = tp 1 x cp 3 x pp 1 x dp 1" in first.out
    *expected, evaluation = metrics(alone)
    losses = [line["loss"] for line in expected]
    assert [line["loss"] for line in metrics(tmp_path)[:5]] == pytest.approx(losses, rel=1e-5)
    assert metrics(tmp_path)[5]["validation_loss"] == pytest.approx(evaluation["validation_loss"], rel=1e-5)
    assert metrics(tmp_path)[0]["comm_bytes"]["cp"] > 0
    resumed = program.run("--checkpoint.resume", "run/checkpoints/step_00000002", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert [line["loss"] for line in metrics(tmp_path)[:5]] == pytest.approx(losses, rel=1e-5)


REFUSED = [
    # fault heads-divide-by-tp
    (("--parallel.tp", "4", "--model.intermediate_size", "160"), 4, "model.num_attention_heads"),
    # fault grid-is-the-world
    (("--parallel.tp", "2", "--parallel.pp", "3"), 2, "world size"),
    # fault unknown-option
    (("--modle.hidden_size", "4"), 2, "model.hidden_size"),
    # fault wrong-value
    (("--optimizer.lr", "3e-4x"), 2, "optimizer.lr"),
]


@pytest.mark.parametrize(("flags", "world", "names"), REFUSED, ids=["heads", "world", "unknown", "type"])
def test_options_that_cannot_run_end_every_rank_before_any_collective(
    flags: tuple[str, ...], world: int, names: str, tmp_path: Path
) -> None:
    """Each rank alone, its peers never started: a collective would wait for them. Only the first rank speaks."""
    port = free_port()
    first, last = (program.run(*flags, cwd=tmp_path, env=slurm(rank, world, port)) for rank in (0, world - 1))
    assert (first.code, first.out) == (2, "")
    assert first.err.startswith("ConfigError: ")
    assert first.err.count("\n") == 1
    assert names in first.err
    assert last == Ended(2, "", "")
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_data_that_is_not_there_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    flags = ("--data.train", "nowhere/tokens", "--model.vocab_size", "0", "--launch.nproc", "2")
    ended = program.run(*flags, cwd=tmp_path)
    assert (ended.code, ended.out) == (3, "")
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("DataError: ")
    assert "nowhere/tokens" in lines[0]


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """Fault tokens-of-another-tokenizer: the description beside the tokens says what made them."""
    (tmp_path / "text.txt").write_text("a few words, again and again. " * 200)
    preprocess(["text.txt"], tmp_path)
    flags = ("--data.train", "text", "--model.vocab_size", "300")
    assert program.run(*flags, cwd=tmp_path).code == 0
    facts = json.loads((tmp_path / "text.json").read_text())
    facts["tokenizer"] |= {"spec": "spm:other.model", "sha256": "0"}
    (tmp_path / "text.json").write_text(json.dumps(facts))
    ended = program.run(*flags, "--launch.nproc", "2", "--run_dir", "other", cwd=tmp_path)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == (
        "DataError: data not opened (rank 0 and 1 more): text.json: the tokens were made by spm:other.model, and "
        "data.tokenizer=bytes is another: name the one that made them\n"
    )


def preprocess(texts: list[str], folder: Path) -> None:
    tool = Path(__file__).parents[1] / "tools/preprocess_data.py"
    flags = ("--input", *texts, "--output", "text", "--tokenizer", "bytes")
    ended = program.Program(tool, flags, folder, {}).wait()
    assert ended.code == 0, ended.err


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line_and_error_json(tmp_path: Path) -> None:
    ended = program.run("--optimizer.lr", "1e38", "--optimizer.warmup_steps", "0", cwd=tmp_path)
    assert ended.code == 5
    assert ended.err.startswith("NumericError: step 2: loss ")
    assert ended.err.count("\n") == 1
    assert "loss nan" in ended.out or "loss inf" in ended.out
    error = json.loads((tmp_path / "run/error.json").read_text())
    assert (error["class"], error["exit_code"], error["rank"]) == ("NumericError", 5, 0)
    assert error["message"] in ended.err


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through Linux's /proc")
@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """The other half of fault killed-saves: the run does not hang, and goes on from its newest checkpoint when it is
    started again."""
    flags = ("--launch.nproc", "4", "--parallel.tp", "2", "--parallel.pp", "2")
    long = start(*flags, "--train.steps", "100000", "--checkpoint.every", "2", cwd=tmp_path)
    checkpoint = tmp_path / "run/checkpoints/step_00000002"
    for _ in range(600):
        if checkpoint.exists() or long.poll() is not None:
            break
        time.sleep(0.1)
    os.kill(children(long.pid)[3], signal.SIGKILL)
    code, _, err = finish(long)
    assert code == 6, err
    assert "rank 3 (process " in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    done = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "run/checkpoints").glob("step_*[0-9]"))
    again = program.run(*flags, "--train.steps", str(done + 1), cwd=tmp_path)
    assert again.code == 0, again.err
    assert f"resumed step {done} from" in again.out


STAND_IN = """#!/bin/sh
printf '%s\\n' "${0##*/}" "MASTER_ADDR=$MASTER_ADDR" "MASTER_PORT=$MASTER_PORT" \\
    "CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS" "$@"
"""
"""Stands in for python, torchrun and srun: prints its name, three variables and its arguments, a line each."""
SLURM_JOB = {"SLURM_JOB_ID": "7123456", "SLURM_JOB_NODELIST": "node[7-8]"}


def with_stand_ins(folder: Path) -> dict[str, str]:
    """The environment with stand-ins in `folder` for the programs of launch scripts."""
    for name in ("python", "torchrun", "srun", "scontrol"):
        (folder / name).write_text(STAND_IN if name != "scontrol" else "#!/bin/sh\necho node7\nsleep 0.1\necho node8\n")
        (folder / name).chmod(0o755)
    # As in an active environment: a .venv of this checkout would hide the stand-in for python.
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}


def started_by(script: Path, folder: Path, *flags: str) -> tuple[str, list[str], list[str]]:
    """The program started by a launch script, the program's own flags, and those of pretrain.py."""
    environment = with_stand_ins(folder) | SLURM_JOB
    if "torchrun" in script.stem:
        environment |= {"MASTER_ADDR": "node7", "NODE_RANK": "3"}
    command = ["bash", str(script), *flags]
    run = subprocess.run(command, cwd=SCRIPTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    name, address, port, connections, *words = run.stdout.splitlines()
    if name != "python":
        assert address == "MASTER_ADDR=node7"
    if name == "srun":
        assert port == "MASTER_PORT=13456"  # two jobs on one node have ports of their own
    assert connections == "CUDA_DEVICE_MAX_CONNECTIONS="  # each rank sets the variable by its layout
    at = words.index("pretrain_scripts/pretrain.py")
    return name, words[:at], words[at + 1 :]


def run_slurm_script(folder: Path, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / "llama_70b_slurm.sh"), *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_slurm_script_outside_of_a_job_says_so_in_a_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in with_stand_ins(tmp_path).items() if not name.startswith("SLURM_")}
    for variables in ({}, {"SLURM_JOB_ID": "7"}):
        run = run_slurm_script(tmp_path, environment | variables)
        assert run.returncode == 2
        assert run.stdout == ""
        assert run.stderr == (
            "llama_70b_slurm.sh: this is no Slurm job; submit it with sbatch, or plan the run here with --dry_run\n"
        )


@pytest.mark.parametrize("active", [True, False], ids=["active", "none-active"])
def test_the_slurm_script_takes_the_environment_of_the_checkout_if_none_is_active(active: bool, tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("echo activated\n")
    environment = with_stand_ins(tmp_path)
    if not active:
        del environment["VIRTUAL_ENV"]
    run = run_slurm_script(tmp_path, environment, "--dry_run")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("python\n" if active else "activated\npython\n")


def test_the_slurm_script_asks_for_a_signal_before_the_time_limit() -> None:
    """And to be queued again, with a log to be continued then."""
    text = (SCRIPTS / "llama_70b_slurm.sh").read_text()
    options = re.findall(r"^#SBATCH --(.*)", text, re.MULTILINE)
    assert {"signal=USR1@120", "requeue", "output=%x-%j.out", "open-mode=append"} <= {*options}
    assert any(option.startswith("time=") for option in options)


def test_the_slurm_script_hands_srun_the_cores_of_a_task(tmp_path: Path) -> None:
    """srun does not take sbatch's since Slurm 22.05. Who has asked for none (salloc) gets none."""
    text = (SCRIPTS / "llama_70b_slurm.sh").read_text()
    (cores,) = re.findall(r"^#SBATCH --cpus-per-task=(.*)", text, re.MULTILINE)
    environment = with_stand_ins(tmp_path) | SLURM_JOB
    environment.pop("SLURM_CPUS_PER_TASK", None)
    for variables, words in (({"SLURM_CPUS_PER_TASK": cores}, [f"--cpus-per-task={cores}"]), ({}, [])):
        of_srun = run_slurm_script(tmp_path, environment | variables).stdout.splitlines()
        assert of_srun[4 : of_srun.index("python")] == ["--kill-on-bad-exit=1", *words]


SRUN = """#!/bin/sh
exit "$CODE"
"""
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] && echo "$@" >> "$NOTES"
echo node7
"""


@pytest.mark.parametrize(
    ("code", "restarts", "queued"),
    [
        (0, "0", False),
        *((code, "0", False) for code in (2, 3, 5, 7, 8)),
        *((code, "0", True) for code in (4, 6, 70, 75, 137, 143)),
        (75, "20", False),  # as often as MAX_REQUEUES allows
    ],
)
def test_the_slurm_script_queues_its_job_again_if_another_start_may_end_better(
    code: int, restarts: str, queued: bool, tmp_path: Path
) -> None:
    environment = with_stand_ins(tmp_path) | SLURM_JOB
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text(SCONTROL)
    notes = tmp_path / "notes"
    environment |= {"CODE": str(code), "NOTES": str(notes), "SLURM_RESTART_COUNT": restarts}
    run = run_slurm_script(tmp_path, environment)
    assert run.returncode == code
    assert (notes.read_text() if notes.exists() else "") == ("requeue 7123456\n" if queued else "")


LAUNCHERS = {
    "gpt_125m_1gpu": "python",
    "laptop": "python",
    "llama3_8b_adapter_1gpu": "python",
    "llama_7b_8gpu": "python",
    "llama_70b_elastic_torchrun": "torchrun",
    "llama_70b_slurm": "srun",
    "llama_70b_torchrun": "torchrun",
    "mixtral_8x7b_8gpu": "python",
    "qwen3_30b_a3b_chat_torchrun": "torchrun",
    "qwen3_30b_a3b_torchrun": "torchrun",
}


@pytest.mark.parametrize("script", ["quickstart", "moe_laptop"])
def test_the_last_line_of_a_script_that_trains_names_what_to_open(script: str) -> None:
    last = (SCRIPTS / f"{script}.sh").read_text().splitlines()[-1]
    assert last.startswith('echo "== everything lies in $run: config.toml, metrics.jsonl, report.html, ')


def test_every_launch_script_is_known() -> None:
    others = {
        "quickstart",
        "quickstart_data",
        "finetune_laptop",
        "moe_laptop",
        "setup",
    }  # they install and train for minutes
    assert {path.stem for path in SCRIPTS.glob("*.sh")} - others == set(LAUNCHERS)


@pytest.mark.parametrize(("script", "launcher"), LAUNCHERS.items(), ids=list(LAUNCHERS))
def test_every_launch_script_starts_ranks_with_options_that_can_run(script: str, launcher: str, tmp_path: Path) -> None:
    """With --dry_run the plan is printed by one process (tests/test_dry_run.py prints every configuration's); without,
    the launcher starts as many ranks as the options need. More options reach pretrain.py."""
    text = (SCRIPTS / f"{script}.sh").read_text()
    more = ("--train.seed", "7")
    for flags in (more, ("--dry_run", *more)):
        name, of_launcher, words = started_by(SCRIPTS / f"{script}.sh", tmp_path, *flags)
        config = load(words, presets()).config
        assert config.train.seed == 7
        assert config.dry_run == ("--dry_run" in flags)
        parallel = config.parallel
        world = parallel.tp * parallel.cp * parallel.pp * max(parallel.dp, 1)
        validate(config, world)
        if config.dry_run:
            assert (name, of_launcher) == ("python", [])
        elif name == "torchrun":
            assert name == launcher
            options = dict(zip(of_launcher[::2], of_launcher[1::2], strict=True))
            fewest, _, most = options["--nnodes"].rpartition(":")
            ranks_of_node = int(options["--nproc-per-node"])
            assert int(most) * ranks_of_node == world
            if fewest:
                replica = parallel.tp * parallel.cp * parallel.pp
                assert int(fewest) * ranks_of_node == config.launch.min_dp * replica
                assert options["--rdzv-endpoint"] == "node7:29500"
            else:
                assert (options["--node-rank"], options["--master-addr"]) == ("3", "node7")
        elif name == "srun":
            text = (SCRIPTS / f"{script}.sh").read_text()
            nodes, tasks = (
                int(n) for n in re.findall(r"^#SBATCH --(?:nodes|ntasks-per-node)=(\d+)", text, re.MULTILINE)
            )
            assert (name, of_launcher) == (launcher, ["--kill-on-bad-exit=1", "python"])
            assert nodes * tasks == world
        else:
            assert (name, of_launcher) == (launcher, [])
            assert max(config.launch.nproc, 1) == world
