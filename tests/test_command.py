"""An installation: what wheel and sdist hold, and the command `megapar`, run from the wheel in an empty folder."""

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import tyro
from markdown import markdown
from megapar_models.registry import named_configs

from megapar import __main__ as command
from megapar import __version__
from megapar.base.errors import ConfigError, DataError
from tests.support.options import load
from tests.support.source_tree import LIBRARY, ROOT, project, relative
from tools import completion, plan, presets, simulate

CONFIGS = ROOT / "pretrain_scripts/configs"
TOOLS = ROOT / "tools/megapar_tools"
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
USE = """from typing import assert_type

from megapar.config.options import Config
from megapar_kernels.backend import FusedAttention, Kernels
from megapar_models.build import stage_layers
from megapar_tools.plan.search import Row, nearest

assert_type(Config().train.steps, int)
assert_type(Kernels().attention, FusedAttention)
assert_type(stage_layers(Config()), list[range])


def first(rows: list[Row]) -> None:
    assert_type(nearest(rows[0], rows), Row | None)
"""
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def copied_by_dockerfile() -> list[str]:
    """The files and folders of the image."""
    return [word for words in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in words.split()]


def build(kind: str, source: Path, folder: Path) -> Path:
    """Make the wheel or the sdist of `source`, with setuptools as pip calls it; returns the file."""
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of an installation's sources, so nothing is built in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in copied_by_dockerfile():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("wheel", source, source.parent / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages, and the command in bin. Its dependencies are those of the suite."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


def run(installed: Path, line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in folder `cwd`, with the `megapar` of the installation."""
    path = os.pathsep.join([str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        shlex.split(line), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def succeed(installed: Path, line: str, cwd: Path) -> str:
    """`run`; returns what it printed."""
    ended = run(installed, line, cwd)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def metadata_of(files: dict[str, bytes]) -> Message:
    """Return the metadata in the contents of a wheel."""
    return email.message_from_bytes(files[f"megapar-{__version__}.dist-info/METADATA"])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# What is distributed


def test_the_wheel_has_every_module_program_preset_and_config(wheel: Path) -> None:
    files = contents(wheel)
    programs = [*(ROOT / "tools").glob("*.py"), *(ROOT / "pretrain_scripts").glob("**/*.py"), *CONFIGS.glob("*.toml")]
    needed = {relative(path) for path in (*LIBRARY, *(ROOT / "models").rglob("*.toml"))}
    needed = {name.removeprefix("models/").removeprefix("kernels/").removeprefix("tools/") for name in needed}
    needed |= {f"megapar_programs/{relative(path)}" for path in programs}
    data = [path for kind in ("migrate/flags", "plan/machines", "dashboard") for path in (TOOLS / kind).glob("*.*")]
    assert len(data) > 20
    needed |= {relative(path).removeprefix("tools/") for path in data if path.suffix != ".py"}
    assert needed - {*files} == set()
    packages = ("megapar", "megapar_models", "megapar_kernels", "megapar_tools")
    assert {f"{package}/py.typed" for package in packages} <= {*files}
    assert "megapar_tools/dashboard/LICENSE-uPlot" in files, "uPlot.min.js is MIT's, which asks for its license"
    assert not [name for name in files if "benchmarks" in name or name.startswith("tests")]


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    files = contents(wheel)
    metadata = metadata_of(files)
    assert (metadata["Name"], metadata["Version"]) == ("megapar", __version__)
    assert metadata["Summary"] == project()["description"]
    assert {*re.findall(r"\w+", metadata["Summary"])} >= {"data", "tensor", "pipeline", "context", "expert"}
    assert metadata["Keywords"].split(",") == project()["keywords"]
    assert metadata.get_all("Classifier") == project()["classifiers"]
    assert {*metadata["Requires-Python"].split(",")} == {*project()["requires-python"].split(",")}
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[<>]", line)[0] for line in required] == [
        re.split(r"[<>]", line)[0] for line in project()["dependencies"]
    ]
    assert {*metadata.get_all("Provides-Extra")} == {*project()["optional-dependencies"]}
    folder = f"megapar-{__version__}.dist-info"
    assert files[f"{folder}/entry_points.txt"].decode().split() == [
        *("[console_scripts]", "megapar", "=", "megapar.__main__:main")
    ]


def test_the_wheel_has_the_license_of_each_file_in_it(wheel: Path) -> None:
    """uPlot's was left out once."""
    files = contents(wheel)
    metadata = metadata_of(files)
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata.get_all("License-File") == ["LICENSE", "tools/megapar_tools/dashboard/LICENSE-uPlot"]
    for name in metadata.get_all("License-File"):
        assert files[f"megapar-{__version__}.dist-info/licenses/{name}"] == (ROOT / name).read_bytes()


def test_the_page_of_an_index_has_no_link_into_the_repository(wheel: Path) -> None:
    """It has all words of the README. Links and pictures work only with an address, and headings get no anchors."""
    metadata = metadata_of(contents(wheel))
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload())
    page = markdown(description, extensions=["fenced_code", "tables"])
    assert (
        page.count("<h2>") == markdown((ROOT / "README.md").read_text(), extensions=["fenced_code"]).count("<h2>") > 4
    )
    targets = re.findall(r'(?:href|src(?:set)?)="([^"]*)"', page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "](" not in re.sub(r"\]\(https://", "", description)


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked")  # ours: Python before 3.11.4 has no filters
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "LICENSE").is_file()
    assert contents(build("wheel", unpacked, tmp_path / "wheel")) == contents(wheel)


# The command


def test_help_lists_every_command_without_importing_torch() -> None:
    code = "import sys; from megapar.__main__ import main; sys.argv[1:] = ['--help']; main(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, modules = ended.stdout.splitlines()
    listed = dict(re.findall(r"^  (\w+) +(\S.*\.)$", "\n".join(lines), re.MULTILINE))
    assert listed == {name: entry.sentence for name, entry in command.COMMANDS.items()}
    assert not {"torch", "tyro", "rich", "numpy"} & {*modules.split()}


def test_every_program_is_a_command_or_is_for_work_on_the_repository() -> None:
    programs = {path.stem for path in (*(ROOT / "tools").glob("*.py"), *(ROOT / "pretrain_scripts").glob("*.py"))}
    commands = {entry.module.rpartition(".")[2] for entry in command.COMMANDS.values()}
    others = {
        *("benchmark", "calibrate", "code_figures", "compare_flags", "docs_hooks", "draw_architecture", "gpu_facts"),
        *("coming_over", "own_loop", "grpo", "plan_accuracy", "strategy_tables"),
    }
    assert programs - others == commands
    for name in others:
        assert f"{name}.py" in Path(command.__file__).read_text(), (
            f"{name}: megapar/__main__.py says why it is left out"
        )


def test_an_unknown_command_is_refused_in_a_line_with_near_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["pretran"], "pretran: no such command; did you mean pretrain? megapar --help lists them"),
        (["xyz"], "xyz: no such command; megapar --help lists them"),
    ):
        monkeypatch.setattr(sys, "argv", ["megapar", *words])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == ConfigError.exit_code
        assert capsys.readouterr().err == f"ConfigError: {said}\n"
    monkeypatch.setattr(command, "PROGRAMS", "not_installed")
    with pytest.raises(ConfigError, match=r"this checkout is not installed.*pip install"):
        command.module_of("plot_schedule", "megapar")


def test_the_installed_command_trains_a_config_by_name(installed: Path, tmp_path: Path) -> None:
    printed = succeed(installed, "megapar pretrain --config tiny --launch.nproc 2 --run_dir run", tmp_path)
    assert "step 5/5 | loss " in printed
    written = (tmp_path / "run/config.toml").read_text()
    assert f"{installed}/megapar_programs/pretrain_scripts/configs/tiny.toml" in written
    assert "dp = 0  # default, here 2" in written


def test_an_installation_says_its_version(installed: Path, tmp_path: Path) -> None:
    assert succeed(installed, "megapar --version", tmp_path) == f"megapar {__version__}\n"


@pytest.mark.slow
def test_an_installation_plans_with_the_machines_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = succeed(installed, "megapar pretrain --config tiny --dry_run --gpu h100-80g", tmp_path)
    assert "fits on h100-80g of " in printed
    assert "layouts can run" in succeed(installed, "megapar plan --config tiny --gpus 1 --gpu h100-80g", tmp_path)


@pytest.mark.slow
def test_a_typed_script_of_a_user_finds_the_types_of_an_installation(wheel: Path, tmp_path: Path) -> None:
    """mypy complains of a package without py.typed. The Python that it asks has no torch, whose types it would read."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (tmp_path / "use.py").write_text(USE)
    line = f"{sys.executable} -m mypy --strict --cache-dir cache --python-executable {python} use.py"
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    checked = subprocess.run(shlex.split(line), cwd=tmp_path, env=without, capture_output=True, text=True, check=False)
    assert checked.stdout.startswith("Success: no issues found"), checked.stdout + checked.stderr


def test_exit_codes_and_names_of_commands_reach_the_user(installed: Path, tmp_path: Path) -> None:
    """A program's own exit code, and in its messages the name it was called by."""
    ended = run(installed, f"{sys.executable} -m megapar entropy", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "python -m megapar entropy --help" in ended.stderr
    ended = run(installed, "megapar plot missing", tmp_path)
    assert ended.returncode == DataError.exit_code
    assert ended.stderr.startswith("DataError: missing/metrics.jsonl is not there")
    assert succeed(installed, "megapar plot-schedule --help", tmp_path).startswith("usage: megapar plot_schedule [-h] ")


@pytest.mark.slow
def test_an_installation_serves_from_text_to_an_exported_model(installed: Path, tmp_path: Path) -> None:
    """In an empty folder, without the checkout."""
    succeed(installed, "megapar build_corpus --output data --max_mb 0.5 --validation_percent 20", tmp_path)
    for part in ("train", "validation"):
        line = f"megapar preprocess --input data/{part}.jsonl --output data/{part} --tokenizer bytes --workers 2"
        assert "documents" in succeed(installed, line, tmp_path)
    succeed(
        installed,
        "megapar pretrain --config tiny --model.vocab_size 257 --data.train data/train"
        " --data.validation data/validation --launch.nproc 2 --parallel.tp 2 --log.profile 1-1 --run_dir run",
        tmp_path,
    )
    checkpoint = "run/checkpoints/step_00000005"
    assert "step 5, 120 samples" in succeed(installed, f"megapar inspect {checkpoint} --verify crc", tmp_path)
    assert succeed(installed, f"megapar generate {checkpoint} --prompt def --tokens 3", tmp_path).startswith("def")
    succeed(installed, f"megapar convert native-to-hf {checkpoint} exported", tmp_path)
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "llama"
    assert "run/loss.png" in succeed(installed, "megapar plot run", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["-m megapar", "{installed}/bin/megapar"], ids=["module", "file"])
def test_torchrun_starts_the_installed_command(program: str, installed: Path, tmp_path: Path) -> None:
    started = f"torchrun --standalone --nproc-per-node 2 {program.format(installed=installed)}"
    printed = succeed(installed, f"{started} pretrain --config tiny --parallel.tp 2 --run_dir run", tmp_path)
    assert "step 5/5 | loss " in printed


# Names of presets


def test_every_preset_and_config_is_found_by_its_name(tmp_path: Path) -> None:
    files = named_configs(CONFIGS)
    assert {"llama3-8b", "qwen3-30b-a3b", "gpt2-124m", "tiny", "llama_7b"} <= {*files}
    for name, path in [*files.items()][::8]:  # each is read by tests of presets and of shipped layouts
        assert str(path) in {*load(["--config", name], files).sources.values()}
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "llama3-8b"\n')
    assert load(["--config", str(mine)], files).config == load(["--config", "llama3-8b"], files).config


def test_a_file_wins_over_a_preset_of_its_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = named_configs(CONFIGS)
    Path("tiny").mkdir()
    assert load(["--config", "tiny"], files).config.train.steps == 5
    Path("llama3-8b").write_text("[train]\nsteps = 77\n")
    assert load(["--config", "llama3-8b"], files).config.train.steps == 77
    Path("mine.toml").write_text('base = "llama3-8b"\n')
    assert load(["--config", "mine.toml"], files).config.train.steps == 77


def test_a_name_that_is_no_preset_is_refused_with_near_ones(tmp_path: Path) -> None:
    files = named_configs(CONFIGS)
    for name, said in (
        (
            "llama3-8",
            "llama3-8: no such file or preset (--config names a TOML file or a preset); did you mean llama3-8b",
        ),
        ("zzz", "zzz: no such file or preset (--config names a TOML file or a preset); `megapar presets` lists"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(["--config", name], files)
        assert str(refused.value).startswith(said)
    mine = tmp_path / "mine.toml"
    mine.write_text('\nbase = "mixtral_8x22b"\n')
    with pytest.raises(
        ConfigError, match=r"mine.toml:2: base = 'mixtral_8x22b': no such file .*; did you mean mixtral"
    ):
        load(["--config", str(mine)], files)


def test_presets_are_listed_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["megapar presets"])
    presets.main()
    listed = capsys.readouterr().out
    assert re.search(r"^  llama3-8b +llama +8,030,261,248  Llama 3 8B \(arXiv 2407.21783\)$", listed, re.MULTILINE)
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == {*named_configs(CONFIGS)}
    monkeypatch.setattr(sys, "argv", ["megapar presets", "tiny"])
    presets.main()
    assert capsys.readouterr().out == (CONFIGS / "tiny.toml").read_text()
    monkeypatch.setattr(sys, "argv", ["megapar presets", "tiy"])
    with pytest.raises(SystemExit, match="2"):
        presets.main()
    assert "did you mean tiny?" in capsys.readouterr().err


# Completion


ASK = """
source {script}
complete -p megapar
while read -ra COMP_WORDS; do
    [ "${{COMP_WORDS[-1]}}" != END ] || COMP_WORDS[-1]=''
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _megapar
    echo "${{COMPREPLY[@]}}"
done
"""


@pytest.mark.slow
def test_bash_completes_commands_flags_and_choices(installed: Path, tmp_path: Path) -> None:
    """The script asks every command of the installation for its flags, so each of them is imported here."""
    script = tmp_path / "completion"
    script.write_text(succeed(installed, "megapar completion bash", tmp_path))
    asked = {
        "megapar gen": "generate",
        "megapar pretrain --parallel.vp": "--parallel.vpp",
        "megapar pretrain --parallel.sequ": "--parallel.sequence_parallel",
        "megapar pretrain --parallel.cp_attention END": "gather ring ulysses",
        "megapar pretrain --config llama3-": "llama3-70b llama3-8b",
        "megapar pretrain --config laptop --run": "--run_dir",
        "megapar presets tin": "tiny",
        "megapar convert hf": "hf-to-native",
        "megapar completion z": "",
    }
    ended = subprocess.run(
        ["bash", "-c", ASK.format(script=script)],
        input="\n".join(asked) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    registered, *answers = ended.stdout.splitlines()
    assert registered == "complete -o default -F _megapar megapar"
    assert ended.stderr == ""
    assert dict(zip(asked, answers, strict=True)) == asked
    for name in command.COMMANDS:
        assert re.search(rf"^ +{name}\) words=.*--help", script.read_text(), re.MULTILINE), name


def test_completion_for_zsh_reads_the_functions_of_bash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "bash_script", lambda: "the script\n")
    for shell, lines in (("bash", 1), ("zsh", 3)):
        monkeypatch.setattr(sys, "argv", ["megapar completion", shell])
        completion.main()
        printed = capsys.readouterr().out.splitlines()
        assert (len(printed), printed[-1]) == (lines, "the script")


# The image


def test_the_dockerfile_copies_what_is_there_and_pins_what_setup_pins() -> None:
    """It cannot be built in a test. The fixtures above build the wheel from the files copied by it, no others."""
    assert all((ROOT / name).exists() for name in copied_by_dockerfile())
    instructions = re.findall(r"^([A-Z]+) ", re.sub(r"\\\n", " ", DOCKERFILE), re.MULTILINE)
    assert instructions[0] == "FROM"
    assert {*instructions} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    pins = r"\b(torch|triton)==([\d.]+)"
    assert {*re.findall(pins, DOCKERFILE)} == {*re.findall(pins, (ROOT / "pretrain_scripts/setup.sh").read_text())}
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert extras
    assert {*extras[1].split(",")} <= {*project()["optional-dependencies"]}
    assert 'ENTRYPOINT ["megapar"]' in DOCKERFILE
    assert re.search(r"^USER [1-9]", DOCKERFILE, re.MULTILINE), "not root"


@pytest.mark.parametrize("word", ["--world", "--world_size", "--gpus"])
def test_tools_take_each_others_word_for_the_number_of_ranks(word: str) -> None:
    """from_megatron.py says world_size, simulate.py world, plan.py gpus."""
    own, others = plan.split([word, "4", "--parallel.tp", "2"])
    assert tyro.cli(plan.Arguments, args=own, use_underscores=True).gpus == 4
    assert others == ["--parallel.tp", "2"]
    assert tyro.cli(simulate.Arguments, args=[word, "4"], use_underscores=True).world == 4
