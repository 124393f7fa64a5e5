"""Templates for Kubernetes and SkyPilot (pretrain_scripts/*.yaml), and torchrun with exit codes.

tests/data/job_schemas.json has the projects' own definitions (tests/support/job_schemas.py).
"""

import copy
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from megapar_models.registry import named_configs, validate
from torch.distributed.run import get_args_parser

from megapar.base import errors
from megapar.config.elastic import fitted
from megapar.config.options import Config
from megapar.launch import torchrun
from tests.support.job_schemas import wrong_fields
from tests.support.options import load

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "pretrain_scripts"
CODES = {error.exit_code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "exit_code")}
COME_AGAIN = CODES - {*torchrun.MAY_PASS}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SCRIPTS / f"llama_70b_{name}.yaml").read_text()))


def template(name: str) -> dict[str, Any]:
    (found,) = documents(name)
    return found


TEMPLATES = {
    job.get("kind", "SkyPilot"): job for name in ("trainjob", "jobset", "pytorchjob", "sky") for job in documents(name)
}
FREE = {"metadata", "limits", "labels", "pytorchReplicaSpecs", "volumes", "envs"}
"""Fields that hold names of the user's own, or, under metadata, what Kubernetes itself defines."""


# Fields


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_has_the_fields_of_its_definition(kind: str) -> None:
    assert wrong_fields(kind, TEMPLATES[kind]) == []


def fields(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of the fields in `value` whose names a definition has."""
    if isinstance(value, dict):
        for name, part in value.items():
            if not (path and path[-1] in FREE):
                yield (*path, name)
            yield from fields(part, (*path, name))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from fields(part, (*path, number))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_typing_error_in_any_field_is_found(kind: str) -> None:
    paths = list(fields(TEMPLATES[kind]))
    assert len(paths) > 10
    for *parents, name in paths:
        job = copy.deepcopy(TEMPLATES[kind])
        at: Any = job
        for parent in parents:
            at = at[parent]
        at[f"{name}s"] = at.pop(name)
        assert any(f"'{name}s' was unexpected" in found for found in wrong_fields(kind, job)), (*parents, name)


def test_a_wrong_value_is_found() -> None:
    job = template("pytorchjob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["replicas"] = "8"
    del worker["template"]["spec"]["containers"][0]["name"]
    at = "spec.pytorchReplicaSpecs.Worker"
    assert wrong_fields("PyTorchJob", job) == [
        f"{at}.replicas: '8' is not of type 'integer'",
        f"{at}.template.spec.containers[0]: 'name' is a required property",
    ]
    job = template("jobset")
    job["apiVersion"] = "jobset.x-k8s.io/v1"
    job["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    assert [found.partition(":")[0] for found in wrong_fields("JobSet", job)] == [
        "apiVersion",
        "spec.failurePolicy.rules[0].action",
    ]


def test_the_skypilot_task_by_its_package(tmp_path: Path) -> None:
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("SkyPilot pins other versions than ours: pip install skypilot in an environment of its own in PATH")
    code = f"import sky; task = sky.Task.from_yaml({str(SCRIPTS / 'llama_70b_sky.yaml')!r}); print(task.num_nodes)"
    # The interpreter of the environment, not the file that its link leads to.
    command = [str(Path(sky).parent / "python"), "-c", code]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["8"], run.stderr


# What they start


def options_of(words: list[str], world: int) -> Config:
    """The options after `-m megapar pretrain` or the program's path; they can run on `world` ranks."""
    at = words.index("pretrain") if "pretrain" in words else words.index("pretrain_scripts/pretrain.py")
    flags = [part for word in words[at + 1 :] for part in word.split("=", 1)]
    resolved = fitted(load(flags, named_configs(SCRIPTS / "configs")), world)
    return validate(resolved.config, world)


def check_pod(pod: dict[str, Any]) -> list[str]:
    """The words of the container's program, after a look at what both kinds of job need."""
    (container,) = pod["containers"]
    variables = {row["name"]: row["value"] for row in container["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert {row["name"] for row in container["volumeMounts"]} == {row["name"] for row in pod["volumes"]}
    words: list[str] = [*container["command"], *container.get("args", ())]
    assert words[:3] == ["python", "-m", "megapar.launch.torchrun"]
    return words[3:]


def test_the_pytorchjob_runs_on_six_to_eight_nodes() -> None:
    spec = template("pytorchjob")["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    words = check_pod(worker["template"]["spec"])
    assert worker["template"]["spec"]["containers"][0]["name"] == "pytorch", "the operator looks for this name"
    elastic = spec["elasticPolicy"]
    assert worker["replicas"] == elastic["maxReplicas"]
    ranks = int(spec["nprocPerNode"])
    assert [options_of(words, ranks * nodes).parallel.dp for nodes in (8, 7, 6)] == [16, 14, 12]
    with pytest.raises(errors.ConfigError):
        options_of(words, ranks * (elastic["minReplicas"] - 1))
    # ExitCode starts again what ends with 128 or more, and --kubeflow adds that to what may pass.
    assert (worker["restartPolicy"], words[0]) == ("ExitCode", "--kubeflow")


def test_the_jobset_starts_again_what_may_pass() -> None:
    job = template("jobset")
    spec = job["spec"]
    (node,) = spec["replicatedJobs"]
    inner = node["template"]["spec"]
    pod = inner["template"]["spec"]
    words = check_pod(pod)
    flags = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert inner["parallelism"] == inner["completions"] == int(flags["--nnodes"])
    options_of(words, int(flags["--nnodes"]) * int(flags["--nproc-per-node"]))
    first = f"{job['metadata']['name']}-{node['name']}-0-0.{spec['network']['subdomain']}"
    assert flags["--master-addr"] == first
    check_restarts(spec)


def check_restarts(spec: dict[str, Any]) -> None:
    """Fail unless a JobSet with `spec` starts again after each end but those that would come again."""
    (node,) = spec["replicatedJobs"]
    inner = node["template"]["spec"]
    pod = inner["template"]["spec"]
    assert inner["completionMode"] == "Indexed", "it sets JOB_COMPLETION_INDEX"
    assert inner["backoffLimit"] == 0, "one pod that starts again meets no other"
    # Kubernetes takes a podFailurePolicy with this restartPolicy alone.
    assert pod["restartPolicy"] == "Never"
    (rule,) = inner["podFailurePolicy"]["rules"]
    assert (rule["action"], {*rule["onExitCodes"]["values"]}) == ("FailJob", COME_AGAIN)
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    (of_set,) = spec["failurePolicy"]["rules"]
    assert (of_set["action"], of_set["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_trainjob_starts_a_runtime_that_starts_again_what_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, job = documents("trainjob")
    group = job["apiVersion"].partition("/")[0]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": group,
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    spec = runtime["spec"]["template"]["spec"]
    check_restarts(spec)
    (node,) = spec["replicatedJobs"]
    # Trainer gives the TrainJob's nodes and words to the container of these names, under this label.
    assert node["template"]["metadata"]["labels"] == {f"{group}/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node")
    assert check_pod(pod) == [], "the words are the TrainJob's"
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    options_of(trainer["args"], trainer["numNodes"] * trainer["numProcPerNode"])
    # What Trainer's torch policy sets in the container of pod 3.
    name = job["metadata"]["name"]
    variables = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": 3}
    for variable, value in {**variables, "MASTER_ADDR": f"{name}-node-0-0.{name}", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(f"PET_{variable}", str(value))
    read = get_args_parser().parse_args(trainer["args"])
    assert (read.nnodes, read.nproc_per_node, read.node_rank, read.rdzv_backend) == ("8", "8", 3, "static")
    assert (read.master_addr, read.module, read.training_script) == (f"{name}-node-0-0.{name}", True, "megapar")


STAND_IN = """#!/bin/sh
printf '%s\\n' "$@"
"""


def test_the_skypilot_task_starts_a_node(tmp_path: Path) -> None:
    task = template("sky")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    gpus = int(task["resources"]["accelerators"].rpartition(":")[2])
    variables = {
        "NUM_NODES": task["num_nodes"],
        "NUM_GPUS_PER_NODE": gpus,
        "NODE_RANK": 3,
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    environment = {f"SKYPILOT_{name}": str(value) for name, value in variables.items()}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euc", task["run"]]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words = run.stdout.splitlines()
    assert words[:2] == ["-m", "megapar.launch.torchrun"]
    at = words.index("pretrain_scripts/pretrain.py")
    flags = dict(zip(words[2:at:2], words[3:at:2], strict=True))
    assert (flags["--master-addr"], flags["--node-rank"]) == ("10.0.0.1", "3")
    options_of(words, int(flags["--nnodes"]) * int(flags["--nproc-per-node"]))
    codes = {*task["resources"]["job_recovery"]["recover_on_exit_codes"]}
    assert codes == {*torchrun.MAY_PASS, 128 + signal.SIGTERM}


# torchrun with exit codes


def test_every_error_is_started_again_or_not() -> None:
    assert {2, 3, 5, 7, 8} == COME_AGAIN
    assert {*torchrun.MAY_PASS} == {4, 6, 9, 70, 75}


SCRIPT = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]))
time.sleep(60 if sys.argv[1] != "0" else 0)
"""


@pytest.mark.parametrize(
    ("words", "ending", "code"),
    [
        ((), "75", 75),
        (("--kubeflow",), "kill", 134),
        pytest.param(("--kubeflow",), "75", 203, marks=pytest.mark.slow),
        pytest.param((), "0", 0, marks=pytest.mark.slow),
        pytest.param((), "kill", 6, marks=pytest.mark.slow),
        pytest.param((), "2", 2, marks=pytest.mark.slow),
        pytest.param(("--kubeflow",), "2", 2, marks=pytest.mark.slow),
    ],
)
def test_torchrun_ends_with_the_code_of_the_rank_that_failed(
    words: tuple[str, ...], ending: str, code: int, tmp_path: Path
) -> None:
    """Rank 1 ends so, and torchrun ends rank 0, which sleeps."""
    (tmp_path / "rank.py").write_text(SCRIPT)
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False)
    command = [sys.executable, "-m", "megapar.launch.torchrun", *words, "--standalone", "--nproc-per-node", "2"]
    ended = run([*command, "rank.py", ending], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert ended.returncode == code, ended.stderr


def test_torchrun_that_is_asked_to_stop_ends_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: list[str]) -> None:
        raise torchrun.SignalException("stop", signal.SIGTERM)

    monkeypatch.setattr(torchrun.run, "main", stopped)
    assert torchrun.main(["rank.py"]) == 143
    assert torchrun.main(["--kubeflow", "rank.py"]) == 143
