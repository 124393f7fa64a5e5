"""Commands and Python of the documents run, and print what the documents show."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from megapar.__main__ import COMMANDS
from tests.support import grid
from tests.support.documents import DOCUMENTS, fenced, fenced_commands
from tests.support.program import Program
from tests.support.source_tree import ROOT, TESTS, tree
from tests.support.sweeps import slow_but
from tests.support.width import trains_as_one_process

WITH_PIP = ("pip install -c constraints.txt -e .", "uv venv --python 3.11", "uv pip install -c constraints.txt -e .")
INSTALLING = (
    *(f"bash pretrain_scripts/{name}.sh" for name in ("quickstart", "moe_laptop", "finetune_laptop")),
    "bash tests/run.sh",
)
ON_EIGHT_GPUS = (
    "megapar pretrain --config llama_7b --launch.nproc 8 --train.steps 20 --optimizer.warmup_steps 5 "
    "--data.train synthetic --data.validation synthetic --data.tokenizer bytes"
)


def assert_part_of_the_suite(command: str) -> None:
    """`python -m pytest FILE ...` names files of `tests/run.sh`, or tests in them."""
    for word in shlex.split(command)[3:]:
        file, _, test = word.partition("::")
        assert (ROOT / file) in TESTS, command
        names = {node.name for node in tree(ROOT / file).body if hasattr(node, "name")}
        assert not test or test in names, command


def words_of_program(command: str) -> list[str]:
    """Return the script that a command of the documents starts, and its flags."""
    called, *words = shlex.split(command)
    if called == "megapar":
        return [f"{COMMANDS[words[0]].module.replace('.', '/')}.py", *words[1:]]
    return words


def run_commands(document: Path, folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Run the document's commands, but those in `without`, in order in `folder` with the programs; returns what each
    printed.

    Installations are only parsed, parts of the suite are only looked up. Our own programs run in forks: the launchers
    of the documents, laptop.sh and torchrun, start them in interpreters of their own.
    """
    for name in ("pretrain_scripts", "tools", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    commands = [command for command in fenced_commands(document) if command not in without]
    printed = dict.fromkeys(commands, "")
    for command in commands:
        if command.startswith("python -m pytest "):
            assert_part_of_the_suite(command)
        elif command in WITH_PIP:
            assert (ROOT / "constraints.txt").is_file()
        elif command == ON_EIGHT_GPUS:
            script, *flags = words_of_program(f"{command} --dry_run --gpu h100-80g")
            ended = Program(folder / script, flags, folder, {}).wait()
            assert ended.code == 0, ended.err
            assert "fits on h100-80g" in ended.out
        elif command in INSTALLING:
            subprocess.run(["bash", "-n", command.split()[1]], cwd=ROOT, check=True)
        elif command.startswith(("megapar ", "python pretrain_scripts/", "python tools/")):
            script, *flags = words_of_program(command)
            # A plan for GPUs is of compiled kernels, as in the reader's shell.
            interpreted = {"TRITON_INTERPRET": "0"} if command.startswith("megapar plan ") else {}
            ended = Program(folder / script, flags, folder, interpreted).wait()
            assert ended.code == 0, f"{command}\n{ended.out}{ended.err}"
            printed[command] = ended.out
        else:
            run = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
            printed[command] = run.stdout
    return printed


def test_readme_commands(tmp_path: Path) -> None:
    """All run, and the losses in the README equal those of one process and of eight ranks."""
    printed = run_commands(ROOT / "README.md", tmp_path)
    assert len(printed) == 7
    text = (ROOT / "README.md").read_text()
    (costs,) = re.findall(r"^.* tokens take .*$", text, re.MULTILINE)
    assert costs in "".join(printed.values())
    promised = losses_in(text)
    assert len(promised) == 5
    for folder in ("one", "eight"):
        lines = (tmp_path / "runs" / folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses == pytest.approx(promised, abs=1e-3)


LIBRARY_PAGE, TUTORIAL, NEW_FAMILY = (ROOT / f"docs/{name}.md" for name in ("library", "tutorial", "new-family"))
WITH_TESTS_OF_THEIR_OWN = (ROOT / "README.md", LIBRARY_PAGE, TUTORIAL, NEW_FAMILY)
OTHERS_WITH_COMMANDS = [path for path in DOCUMENTS if path not in WITH_TESTS_OF_THEIR_OWN and fenced_commands(path)]


# Those of profile.md train with a profiler, as tests/test_profile.py does.
WITH_COMMANDS = slow_but(
    [number for number, path in enumerate(OTHERS_WITH_COMMANDS) if path.stem != "profile"], OTHERS_WITH_COMMANDS
)


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_of_the_other_documents(document: Path, tmp_path: Path) -> None:
    run_commands(document, tmp_path, without=fenced_commands(ROOT / "README.md"))


def losses_in(text: str) -> list[float]:
    """The losses in lines reporting a step."""
    return [float(loss) for loss in re.findall(r"^step +\d+(?:/\d+)? \| loss ([\d.]+)", text, re.MULTILINE)]


def test_a_loop_of_your_own_trains_as_the_program_does(tmp_path: Path) -> None:
    """The page shows the whole file of 40 lines. Its losses in another layout are those of pretrain.py."""
    loop = (ROOT / "pretrain_scripts/own_loop.py").read_text()
    assert fenced(LIBRARY_PAGE, "python")[0] == loop
    assert len([line for line in loop.splitlines() if line]) <= 40
    two_ranks, resumed = run_commands(LIBRARY_PAGE, tmp_path).values()
    promised = losses_in((ROOT / "README.md").read_text())
    assert len(promised) == 5
    assert losses_in(two_ranks) == pytest.approx(promised, abs=1e-3)
    assert len(losses_in(resumed)) == 2, "it goes on from step 5"


@pytest.mark.slow
def test_the_tutorial_ends_in_what_transformers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole walk, in fewer steps: transformers generates what generate.py generates."""
    pytest.importorskip("transformers")
    page = tmp_path / "tutorial.md"
    text = TUTORIAL.read_text()
    shorter = {"\nsteps = 300": "\nsteps = 6", "--train.steps 350": "--train.steps 8", "--max_mb 6": "--max_mb 3"}
    shorter |= {"warmup_steps = 20": "warmup_steps = 2"}
    for long, short in shorter.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    page.write_text(text.replace("00000300", "00000006").replace("00000350", "00000008"))
    (tmp_path / "mine.toml").write_text(fenced(page, "toml")[0])
    printed = run_commands(page, tmp_path)
    generated = next(out for command, out in printed.items() if "megapar generate" in command)
    assert "resumed step 6 from" in "".join(printed.values())
    assert len(generated) > len("def read(self, ") + 20, "24 tokens"
    monkeypatch.chdir(tmp_path)
    (loading,) = fenced(page, "python")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(loading, str(TUTORIAL), "exec"), {})
    assert out.getvalue() == generated


@pytest.mark.slow
def test_a_family_is_built_as_the_page_says(tmp_path: Path) -> None:
    """Its file lies outside of the repository. The draft does as well, and a wrong rule is refused as the page says."""
    pytest.importorskip("transformers")
    assert NEW_FAMILY.read_text().count("\n") <= 165
    script, rules, names, _ = fenced(NEW_FAMILY, "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "my_stablelm.py").write_text(f"{rules}\n\n{names}")
    printed = run_commands(NEW_FAMILY, tmp_path)
    (asked,) = fenced(NEW_FAMILY, "text")
    report = next(out for command, out in printed.items() if "megapar new_family" in command)
    assert {*asked.splitlines()} <= {*report.splitlines()}
    assert "nothing is missing" in report
    assert "5 layouts compute what one process computes" in "".join(printed.values())
    assert "started from the weights of native" in "".join(printed.values())
    # Other families in place of the page's.
    whole_heads = "Rotary(model.rope_theta, model.head_dim)"
    assert f"With `{whole_heads}`" in NEW_FAMILY.read_text()
    wrong = rules.replace("Rotary.of(model)", whole_heads)
    assert wrong.count(whole_heads) == 1
    (tmp_path / "drafts/wrong.py").write_text(f"{wrong}\n\n{names}")
    command = next(command for command in printed if "hf-to-native" in command).replace("PYTHONPATH=.", "")
    environment = {**os.environ, "PYTHONPATH": "drafts", "OMP_NUM_THREADS": "1"}
    for module, code, said in (("stablelm", 0, ""), ("wrong", 4, "logits differ from those of transformers")):
        words = command.replace("my_stablelm:", f"{module}:").replace(" native ", f" {module}_native ")
        run = subprocess.run(
            [sys.executable, *words_of_program(words)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == code, run.stderr
        assert said in run.stderr
        assert (tmp_path / f"{module}_native").exists() == (code == 0)
    assert "`logits differ from those of transformers`" in NEW_FAMILY.read_text()


def test_layers_hand_on_tensors_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline of two ranks as in one process: what the first layer hands on crosses the cut."""
    *_, handing = fenced(NEW_FAMILY, "python")
    imports = ["dataclasses:replace", "megapar_models.attention:Attention", "megapar_models.handed:Handed"]
    imports += ["megapar_models.families.llama:LLAMA, LlamaStage"]
    lines = ["from {} import {}".format(*line.split(":")) for line in imports]
    family = 'FAMILY = replace(LLAMA, name="my_handing", stage=HandingStage)'
    (tmp_path / "my_handing.py").write_text("\n".join([*lines, handing, family]))
    monkeypatch.syspath_prepend(tmp_path)
    model = replace(grid.LLAMA, family="my_handing:FAMILY", attention_bias=False)
    trains_as_one_process(model, {"pp": 2})


def test_python_of_the_documents_runs(tmp_path: Path) -> None:
    loop = (ROOT / "pretrain_scripts/own_loop.py").read_text()  # it has a test of its own, as two pages have
    pages = [path for path in DOCUMENTS if path not in (TUTORIAL, NEW_FAMILY)]
    blocks = [(path, block) for path in pages for block in fenced(path, "python") if block != loop]
    assert blocks
    for document, block in blocks:
        (tmp_path / "block.py").write_text(block)
        run = Program(tmp_path / "block.py", (), tmp_path, {}).wait()
        assert run.code == 0, f"{document.name}\n{block}{run.err}"
