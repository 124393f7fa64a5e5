"""Real ranks of the local launcher hang, die, disagree or are interrupted: the exit code, the one line with the cause,
error.json, and no process is left."""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.base.errors import CommunicationError
from megapar.checkpoint import save
from megapar.comm import collectives
from megapar.launch import rank_process
from megapar.launch.signals import Signals
from megapar.step.state import TrainState
from megapar.train import trainer
from tests.support import program
from tests.support.faults import FOUR, LONG, TWO, children, error, gone, on_rank
from tests.support.program import Ended, Program
from tests.support.sweeps import slow_but

HANGS = (*LONG, "--launch.timeout_seconds", "5")  # long enough for a busy machine's steps
IN_STEPS = " 2/100000 | loss"


def act_on(
    folder: Path,
    act: Callable[[Program, list[int]], None],
    *flags: str,
    hangs: tuple[str, ...] = HANGS,
    ranks: int = 2,
    until: str = IN_STEPS,
) -> Ended:
    """A long run, with `act` done to it once it says `until`; asserts its end without ranks left."""
    running = program.start(*hangs, *(FOUR if ranks == 4 else TWO), *flags, cwd=folder)
    pids = children(running, ranks)
    running.until(until)
    act(running, pids)
    ended = running.wait(60)
    assert gone(pids), "ranks are left"
    return ended


# A rank that hangs


@pytest.mark.parametrize("ranks", slow_but([0], [2, 4]))
def test_a_stopped_rank_is_named(tmp_path: Path, ranks: int) -> None:
    """Fault hung-rank: not the ranks waiting for it."""
    last = ranks - 1
    ended = act_on(tmp_path, lambda _, pids: os.kill(pids[last], signal.SIGSTOP), ranks=ranks)
    assert ended.code == 6
    assert ended.err.startswith(f"CommunicationError: rank {last} (process ")
    assert "did not arrive: its process is stopped" in ended.err
    assert "its last operation: " in ended.err
    assert ended.err.count("\n") == 1
    facts = error(tmp_path)
    assert (facts["rank"], facts["exit_code"]) == (last, 6)
    assert facts["step"] >= 1
    assert facts["phase"] in ended.err
    assert facts["message"] in ended.err
    assert [row["state"] == "stopped" for row in facts["ranks"]] == [False] * last + [True]
    left = [name for name in os.listdir("/dev/shm") if any(f"-{row['pid']}-" in name for row in facts["ranks"])]
    assert not left


EXPERTS = ("--model.family", "mixtral", "--model.moe.num_experts", "4", "--model.moe.moe_intermediate_size", "32")


@pytest.mark.parametrize(
    ("number", "sizes", "words"),
    [
        pytest.param(signal.SIGSTOP, ("--parallel.ep", "4"), "its process is stopped", id="stopped, ep"),
        pytest.param(
            signal.SIGSTOP,
            ("--parallel.ep", "2", "--parallel.etp", "2"),
            "stopped",
            id="stopped, ep x etp",
            marks=pytest.mark.slow,
        ),
        pytest.param(signal.SIGKILL, ("--parallel.ep", "4"), "ended by SIGKILL", id="killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_mixture_is_named(
    tmp_path: Path, number: signal.Signals, sizes: tuple[str, ...], words: str
) -> None:
    """Fault uneven-exchanges: ranks send each other other numbers of rows, and this is no sign of disagreement."""
    running = program.start(*HANGS, "--launch.nproc", "4", *EXPERTS, *sizes, cwd=tmp_path)
    pids = children(running, 4)
    running.until(IN_STEPS)
    os.kill(pids[3], number)
    ended = running.wait(60)
    assert ended.code == 6
    assert ended.err.startswith(f"CommunicationError: rank 3 (process {pids[3]} on ")
    assert words in ended.err
    assert ended.err.count("\n") == 1
    assert error(tmp_path)["rank"] == 3
    assert gone(pids)


def test_rows_that_nobody_expects_are_told(tmp_path: Path) -> None:
    """Fault mismatched-operations: rank 1 sends two rows, and rank 0 expects one."""

    def plant() -> None:
        for rank, sent_rows in enumerate(([1, 2], [2, 1])):
            on_rank(
                rank, 2, lambda ctx, rows=sent_rows: collectives.all_to_all(torch.zeros(3, 2), rows, [1, 1], ctx.grad)
            )()

    ended = program.run(*HANGS, *TWO, cwd=tmp_path, plant=plant)
    assert ended.code == 6
    assert "sent 16 bytes where this rank expects 8: the ranks run different operations" in ended.err
    assert ended.err.count("\n") == 1


def test_a_rank_that_sleeps_in_its_data_is_named_with_the_phase(tmp_path: Path) -> None:
    """Fault hung-rank."""

    def plant() -> None:
        real = trainer.train

        def train(run: Any) -> Any:
            next_step = run.train_data.next_step

            def sleepy() -> Any:
                if run.state.ctx.world.rank == 1 and run.state.step == 2:
                    time.sleep(60)
                return next_step()

            run.train_data.next_step = sleepy
            return real(run)

        trainer.train = train

    ended = program.run(*HANGS, *TWO, cwd=tmp_path, plant=plant)
    assert ended.code == 6
    assert ended.err.startswith("CommunicationError: rank 1 (process ")
    assert "it was in step 3, data, for " in ended.err
    assert (error(tmp_path)["rank"], error(tmp_path)["phase"]) == (1, "data")


def test_operations_that_do_not_match_are_named_for_both_ranks(tmp_path: Path) -> None:
    """Fault mismatched-operations."""
    plant = on_rank(1, 2, lambda ctx: collectives.all_gather(torch.zeros(300), ctx.grad))
    ended = program.run(*HANGS, *TWO, cwd=tmp_path, plant=plant)
    assert ended.code == 6
    message = error(tmp_path)["message"]
    assert message.startswith("ranks did different things: all_reduce ")
    assert "on grad (4 bytes float32, megapar/step/divisors.py:" in message
    assert ", step 3) on rank 0 (process " in message
    assert "but all_gather " in message
    assert "on grad (1,200 bytes float32, " in message
    assert "tests/test_faults_local.py:" in message
    assert "on rank 1 (process " in message


# A rank that dies


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path, number: signal.Signals) -> None:
    ended = act_on(tmp_path, lambda _, pids: os.kill(pids[1], number))
    assert ended.code == 6
    (line,) = [line for line in ended.err.splitlines() if line.startswith("CommunicationError")]
    assert "rank 1 (process " in line
    assert f"was ended by {number.name} in step " in line
    assert (error(tmp_path)["rank"], error(tmp_path)["exit_code"]) == (1, 6)


@pytest.mark.slow
def test_a_rank_killed_at_the_start_is_named(tmp_path: Path) -> None:
    def plant() -> None:
        real = rank_process.join

        def join(config: Any, env: Any, process: Any) -> Any:
            if env.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(config, env, process)

        rank_process.join = join

    ended = program.run(*LONG, *TWO, cwd=tmp_path, plant=plant)
    assert ended.code == 6
    assert "rank 1 (process " in ended.err
    assert "was ended by SIGKILL in start" in ended.err


def test_a_rank_killed_in_a_save_costs_only_that_save(tmp_path: Path) -> None:
    def plant() -> None:
        real = save.write_part

        def write_part(folder: Path, rank: int, mine: Any) -> Any:
            if rank == 1 and folder.name.startswith(".tmp-step_00000004"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(folder, rank, mine)

        save.write_part = write_part

    ended = program.run(*LONG, *TWO, "--checkpoint.every", "2", cwd=tmp_path, plant=plant)
    assert ended.code == 6
    assert "was ended by SIGKILL in step 4, save" in ended.err
    ended = program.run(*TWO, "--train.steps", "3", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "resumed step 2 from" in ended.out
    assert not (tmp_path / "run/error.json").exists(), "a later run that succeeds removes it"


def test_a_rank_that_ends_early_with_0_is_no_success(tmp_path: Path) -> None:
    """Fault rank-that-ends-early."""
    ended = program.run(*LONG, *TWO, cwd=tmp_path, plant=on_rank(1, 2, lambda ctx: os._exit(0)))
    assert ended.code == 6
    assert ended.err.startswith("CommunicationError: rank 1 (process ")
    assert "ended with exit code 0 before its run was complete in step 3" in ended.err


def test_ranks_that_all_fail_alike_are_a_failure(tmp_path: Path) -> None:
    """All are gone before the launcher has waited for a cause."""

    def fail(*args: Any, **impl: Any) -> None:
        raise CommunicationError("planted")

    def plant() -> None:
        trainer.train = fail

    ended = program.run(*LONG, *TWO, cwd=tmp_path, plant=plant)
    assert ended.code == 6
    assert "CommunicationError: " in ended.err
    assert ended.err.endswith("planted\n")
    assert error(tmp_path)["message"] == "planted"


def test_a_bug_on_one_rank_is_told_by_its_traceback_alone(tmp_path: Path) -> None:
    def bug(ctx: Any) -> None:
        raise KeyError("planted")

    ended = program.run(*LONG, *TWO, cwd=tmp_path, plant=on_rank(1, 2, bug))
    assert ended.code == 70
    assert ended.err.startswith("Traceback")
    assert "CommunicationError" not in ended.err
    assert (error(tmp_path)["class"], error(tmp_path)["rank"], error(tmp_path)["step"]) == ("KeyError", 1, 3)


def test_the_ranks_of_a_killed_launcher_end(tmp_path: Path) -> None:
    """Fault orphaned-ranks: a stopped one as well, and a stopped worker of one; the folder is free at once."""
    workers: list[int] = []

    def kill(running: Program, pids: list[int]) -> None:
        workers.extend(int(word) for word in Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split())
        for pid in (pids[1], *workers):
            os.kill(pid, signal.SIGSTOP)
        running.send(signal.SIGKILL)

    assert act_on(tmp_path, kill, "--data.workers", "1").code == -signal.SIGKILL
    assert len(workers) == 1
    assert gone(workers)
    assert program.run(*TWO, "--train.steps", "2", cwd=tmp_path).code == 0


def test_more_threads_than_cores_can_use_are_refused(tmp_path: Path) -> None:
    ended = program.run("--launch.threads", "20000", *TWO, cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.startswith("ConfigError: launch.threads=20000: ")
    assert not (tmp_path / "run").exists()


# Interruptions


INTERRUPTED: dict[str, Callable[[Program, list[int]], None]] = {
    "launcher": lambda running, pids: running.send(signal.SIGINT),
    "all": lambda running, pids: running.send_to_all(signal.SIGINT),
    "a rank": lambda running, pids: os.kill(pids[1], signal.SIGINT),
}


@pytest.mark.parametrize("who", [pytest.param("launcher", marks=pytest.mark.slow), "all", "a rank"])
def test_ctrl_c_says_where_the_run_stood(tmp_path: Path, who: str) -> None:
    """Fault rank-that-ends-early: exit code 130, whoever got the signal."""
    ended = act_on(tmp_path, INTERRUPTED[who], "--checkpoint.every", "2", until="step_00000002")
    assert ended.code == 130
    assert ended.err.startswith("interrupted at step ")
    assert ", last checkpoint step " in ended.err
    assert ended.err.count("\n") == 1
    assert ("rank 1 (process " in ended.err) == (who == "a rank")
    assert not (tmp_path / "run/error.json").exists()


@pytest.mark.slow
def test_ctrl_c_in_one_process_is_one_line(tmp_path: Path) -> None:
    running = program.start(*LONG, cwd=tmp_path)
    running.until(IN_STEPS)
    running.send(signal.SIGINT)
    ended = running.wait(60)
    assert ended.code == 130
    assert ended.err.startswith("interrupted at step ")
    assert ended.err.endswith(", no checkpoint (SIGINT)\n")
    assert ended.err.count("\n") == 1


def test_ctrl_c_ends_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    """The main thread of rank 0 is held in a collective, and no Python code answers a signal there; rank 1 is
    stopped."""

    def stop_then_interrupt(running: Program, pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGINT)

    ended = act_on(tmp_path, stop_then_interrupt, hangs=LONG)
    assert ended.code == 130
    assert "rank 0 (process " in ended.err


@pytest.mark.slow
def test_a_lost_terminal_ends_the_run(tmp_path: Path) -> None:
    ended = act_on(tmp_path, lambda running, _: running.send_to_all(signal.SIGHUP))
    assert ended.code == 129
    assert "(SIGHUP)" in ended.err


@pytest.mark.slow
def test_nohup_is_respected(tmp_path: Path) -> None:
    def plant() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    running = program.start("--train.steps", "6", *TWO, cwd=tmp_path, plant=plant)
    running.until(" 2/6 | loss")
    running.send_to_all(signal.SIGHUP)
    assert running.wait(60).code == 0


def test_sigterm_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    def plant() -> None:
        def slow(*args: Any, **impl: Any) -> Any:
            print("starting", flush=True)
            time.sleep(60)

        trainer.start = slow

    running = program.start(*LONG, *TWO, cwd=tmp_path, plant=plant)
    pids = children(running, 2)
    running.until("starting")
    running.send(signal.SIGTERM)
    ended = running.wait(60)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.err == "interrupted before the first step, no checkpoint (SIGTERM)\n"
    assert gone(pids)


# Requests to stop


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def weights(folder: Path, at: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / f"run/checkpoints/step_{at:08d}").glob("rank_*"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of six steps on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert program.run("--train.steps", "6", *TWO, cwd=folder).code == 0
    return folder


REQUESTS: dict[str, tuple[Callable[[Program, list[int]], None], tuple[str, ...]]] = {
    "SIGTERM to the launcher": (lambda running, pids: running.send(signal.SIGTERM), ()),
    "SIGTERM to all": (lambda running, pids: running.send_to_all(signal.SIGTERM), ("--checkpoint.async_save",)),
    "SIGUSR1 to a rank": (lambda running, pids: os.kill(pids[1], signal.SIGUSR1), ("--optimizer.zero_stage", "0")),
}


def wait_for_the_request() -> None:
    """Let each rank wait before its fourth step until one rank knows that the run is asked to stop.

    Else the six steps may end before the signal arrives.
    """
    judge, queue_step, asked = Signals._judge_request, trainer.queue_step, Path("asked")
    is_rank = False

    def judge_and_tell(signals: Signals, number: int) -> None:
        judge(signals, number)
        if is_rank and signals.request:  # the launcher knows of its request before its ranks do
            asked.touch()

    def wait_and_queue(state: TrainState, *args: Any, **named: Any) -> Any:
        nonlocal is_rank
        is_rank = True
        while state.step >= 3 and not asked.exists():
            time.sleep(0.01)
        return queue_step(state, *args, **named)

    Signals._judge_request, trainer.queue_step = judge_and_tell, wait_and_queue


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("launcher" in name)) for name in REQUESTS]
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bitwise(undisturbed: Path, tmp_path: Path, name: str) -> None:
    """Fault request-to-stop: exit code 75, no error.json, and nothing lost or done twice."""
    act, flags = REQUESTS[name]
    running = program.start("--train.steps", "6", *TWO, *flags, cwd=tmp_path, plant=wait_for_the_request)
    pids = children(running, 2)
    running.until(" 2/6 | loss")
    act(running, pids)
    ended = running.wait(60)
    assert ended.code == 75, ended.err
    assert ended.err.startswith(f"Preempted: stopped by {name.split()[0]} after step ")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run/error.json").exists()
    assert len(losses(tmp_path)) < 6
    ended = program.run("--train.steps", "6", *TWO, *flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "resumed step " in ended.out
    assert losses(tmp_path) == losses(undisturbed)
    if "--optimizer.zero_stage" not in flags:  # else the ranks' files hold other shares
        assert weights(tmp_path, 6) == weights(undisturbed, 6)


def test_a_time_limit_saves_and_ends_with_75(tmp_path: Path) -> None:
    """Fault request-to-stop. A tensor pair as well: the request of any rank reaches all over tp and pp."""
    ended = program.run("--train.steps", "100000", "--launch.time_limit", "0.02", *FOUR, cwd=tmp_path)
    assert ended.code == 75
    assert ended.err.startswith("Preempted: stopped by launch.time_limit after step ")
    done = losses(tmp_path)[-1][0]
    assert (tmp_path / f"run/checkpoints/step_{done:08d}/manifest.json").exists()


@pytest.mark.slow
def test_one_process_is_asked_too(tmp_path: Path) -> None:
    running = program.start(*LONG, cwd=tmp_path)
    running.until(IN_STEPS)
    running.send(signal.SIGTERM)
    assert running.wait(60).code == 75


def test_a_second_request_ends_at_once(tmp_path: Path) -> None:
    """Fault orphaned-ranks: with a stopped rank no step ends, and nothing could be saved."""

    def ask_twice(running: Program, pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGSTOP)
        running.send(signal.SIGTERM)
        time.sleep(1.5)
        running.send(signal.SIGTERM)

    ended = act_on(tmp_path, ask_twice, hangs=LONG)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.err.endswith("(SIGTERM)\n")


# A live run, and two jobs


def test_sigusr2_prints_where_each_rank_stands(tmp_path: Path) -> None:
    """Whichever process gets it; ranks.json has their places."""

    def ask(running: Program, pids: list[int]) -> None:
        running.send(signal.SIGUSR2)
        running.until("newest operation of each axis")
        os.kill(pids[1], signal.SIGUSR2)
        for _ in range(500):
            if running.err.count("newest operation of each axis") == 2:
                break
            time.sleep(0.02)
        listed = json.loads((tmp_path / "run/ranks.json").read_text())["ranks"]
        assert [member["pid"] for member in listed] == pids
        running.send(signal.SIGINT)

    ended = act_on(tmp_path, ask)
    assert ended.err.count("newest operation of each axis") == 2
    assert "megapar/step/" in ended.err
    assert " on grad (" in ended.err


def test_a_refused_second_job_leaves_the_first_ones_folder_alone(tmp_path: Path) -> None:
    """Fault stale-error-json."""
    running = program.start(*LONG, cwd=tmp_path)
    running.until(IN_STEPS)
    for flags in ((), TWO):
        refused = program.run(*flags, cwd=tmp_path)
        assert refused.code == 7
        assert "is held by another job" in refused.err
    assert not (tmp_path / "run/error.json").exists()
    running.send(signal.SIGINT)
    running.wait(60)


def test_of_jobs_that_start_at_once_one_trains(tmp_path: Path) -> None:
    """The others end with a line, whichever comes first to the new folder, and the folder is that of an undisturbed
    run."""
    words = ("--train.steps", "4", "--checkpoint.every", "2")
    alone = tmp_path / "alone"
    for folder in (alone, tmp_path):
        folder.mkdir(exist_ok=True)
    jobs = [program.start(*words, *TWO, cwd=tmp_path) for _ in range(3)]
    ends = [job.wait() for job in jobs]
    assert sorted(end.code for end in ends) == [0, 7, 7], "".join(end.err for end in ends)
    assert all("is held by another job" in end.err for end in ends if end.code)
    assert not (tmp_path / "run/error.json").exists()
    assert program.run(*words, *TWO, cwd=alone).code == 0
    losses = [
        [json.loads(line).get("loss") for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path, alone)
    ]
    assert losses[0] == losses[1]
    assert len(os.listdir(tmp_path / "run/checkpoints")) == len(os.listdir(alone / "run/checkpoints")) == 3


# Terminals and disks


def replace_stdout(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def broken_pipe() -> None:
    reader, writer = os.pipe()
    replace_stdout(writer)
    os.close(reader)


def closed() -> None:
    os.close(1)
    sys.stdout = None  # as Python does at its start


def full() -> None:
    replace_stdout(os.open("/dev/full", os.O_WRONLY))


LOST = [
    pytest.param(broken_pipe, (), id="broken pipe"),
    pytest.param(full, TWO, id="full disk, two ranks"),
    pytest.param(closed, (), id="closed"),
    pytest.param(broken_pipe, TWO, id="broken pipe, two ranks", marks=pytest.mark.slow),
    pytest.param(closed, TWO, id="closed, two ranks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plant", "flags"), LOST)
def test_a_lost_stdout_does_not_end_the_run(tmp_path: Path, plant: Callable[[], None], flags: tuple[str, ...]) -> None:
    """Fault unwritable-stdout: `| head` after it has read enough, `>&-`, a full disk."""
    ended = program.run("--train.steps", "3", *flags, cwd=tmp_path, plant=plant)
    assert ended.code == 0, ended.err
    assert len(losses(tmp_path)) == 3
    assert ended.err.count("log lines are dropped") == (plant is not closed)


def test_letters_that_stdout_does_not_have_are_escaped(tmp_path: Path) -> None:
    """Fault unwritable-stdout."""

    def plant() -> None:
        sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115

    ended = program.run("--train.steps", "2", "--run_dir", "l\u00e4uft", cwd=tmp_path, plant=plant)
    assert ended.code == 0, ended.err
    assert "run folder l\\xe4uft" in ended.out


def test_a_full_disk_costs_lines_and_ends_with_7_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    """Fault save-on-full-disk: nothing hides this class, not the metrics, TensorBoard or error.json, although they fail
    as well."""
    reader, writer = os.pipe()  # the limit would hold for the harness's files as well

    def plant() -> None:
        os.dup2(writer, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        replace_stdout(os.dup(writer))
        real = trainer.queue_step

        def queue_step(*args: Any, **impl: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
            return real(*args, **impl)

        trainer.queue_step = queue_step

    ended = program.run("--train.steps", "2", cwd=tmp_path, plant=plant)
    os.close(writer)
    with open(reader) as file:
        told = [line for line in file.read().splitlines() if "step 1/2" not in line and "step 2/2" not in line][3:]
    assert ended.code == 7
    # A thread each writes the metrics and TensorBoard's files.
    tensorboard, metrics, checkpoint, record, report = [*sorted(told[:2], reverse=True), *told[2:]]
    assert metrics == "run/metrics.jsonl: step 1 not written (File too large); the run goes on"
    assert tensorboard.startswith("run/tensorboard: nothing more is written (File too large); ")
    assert checkpoint.startswith("StorageError: checkpoint of step 2 not saved: ")
    assert record == "run/error.json not written: File too large"
    assert report == "run/report.html not written: File too large"
