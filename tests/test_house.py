"""The rules of the house, as CONTRIBUTING.md states them: who may import whom, what stands in one place only, sizes,
declared dependencies, and the faults guarded against by tests. tests/test_docs.py has the rules of documents."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

from megapar.comm.store import StoreUser
from megapar.config.options import option_types
from tests.support.source_tree import LIBRARY, ROOT, SOURCES, TESTS, dotted, imports, project, relative, tree

# Who may import whom. A module is in the room of the longest name here that it starts with; each room may import itself
# and the rooms behind it. `main` are the programs that a person starts: they alone name a model family.
KERNELS, MODELS, TOOLS = "megapar_kernels", "megapar_models", "megapar_tools"
DOORS = "megapar.train.doors"
DOORS_OF_MODELS = f"{MODELS}.doors"
CONVERT, JUDGING = f"{MODELS}.convert", f"{MODELS}.judging"
PROGRAMS = ("tools", "benchmarks", "pretrain_scripts", "tests")  # tools/benchmarks is imported as benchmarks
BASE, SYSTEM, COMM, CONFIG = (f"megapar.{name}" for name in ("base", "system", "comm", "config"))
# What each room above stands on: a run's options and collectives, what a rank declares, linear layers, recomputation.
GROUND = {BASE, SYSTEM, COMM, CONFIG, *(f"megapar.{name}" for name in ("linear", "declare", "activations"))}
ENGINES = {f"megapar.{name}" for name in ("pipeline", "data_parallel", "optimizer", "data", "checkpoint")}
LAYERS = {f"megapar.{name}" for name in ("tensor_parallel", "context_parallel", "expert_parallel")}
RUN = {f"megapar.{name}" for name in ("launch", "step", "observe")}
MAY_IMPORT: dict[str, set[str]] = {
    KERNELS: set(),
    BASE: {KERNELS},
    SYSTEM: {BASE, KERNELS},
    COMM: {BASE, SYSTEM},
    CONFIG: {BASE, SYSTEM},
    "megapar.linear": {BASE, SYSTEM, COMM, CONFIG, "megapar.activations", KERNELS},
    "megapar.declare": {BASE, SYSTEM, COMM, "megapar.linear", KERNELS},
    "megapar.activations": {BASE, SYSTEM, CONFIG, KERNELS},
    "megapar.tensor_parallel": {*GROUND, KERNELS},
    "megapar.expert_parallel": {*GROUND, KERNELS},
    "megapar.context_parallel": {*GROUND, "megapar.expert_parallel", KERNELS},
    "megapar.pipeline": GROUND,
    "megapar.data_parallel": {*GROUND, KERNELS},
    "megapar.optimizer": {*GROUND, "megapar.data_parallel", KERNELS},  # they work on the flat buffers
    "megapar.data": GROUND,
    "megapar.checkpoint": GROUND,
    MODELS: {*GROUND, *LAYERS, KERNELS},
    CONVERT: {*GROUND, "megapar.checkpoint", "megapar.data", MODELS, f"{TOOLS}.prepare"},  # only for programs
    # Only programs import it.
    JUDGING: {*GROUND, *LAYERS, *ENGINES, "megapar.step", "megapar.train", MODELS, CONVERT, f"{TOOLS}.prepare"},
    # The schedule and the optimizers decide which ranks are connected (grid.py).
    "megapar.launch": {*GROUND, "megapar.pipeline", "megapar.data_parallel", "megapar.optimizer"},
    "megapar.step": {*GROUND, *ENGINES},
    "megapar.observe": {*GROUND, "megapar.step", "megapar.context_parallel", *ENGINES},
    "megapar.train": {*GROUND, "megapar.context_parallel", *RUN, *ENGINES},
    # Next door: what people run beside training. Training imports none of it but through DOORS.
    f"{TOOLS}.migrate": {BASE, SYSTEM, CONFIG},  # commands of other frameworks, read for programs
    f"{TOOLS}.prepare": {BASE, SYSTEM, CONFIG, "megapar.data"},  # texts and conversations as tokens
    f"{TOOLS}.trace": {*GROUND, "megapar.launch", "megapar.pipeline"},
    f"{TOOLS}.plan": {*GROUND, *RUN, "megapar.train", f"{TOOLS}.trace", *ENGINES},
    f"{TOOLS}.dashboard": {*GROUND, *RUN, f"{TOOLS}.trace", *ENGINES},  # reads the folders of runs, and shows them
    f"{TOOLS}.verify": {*GROUND, *LAYERS, *ENGINES, *RUN, "megapar.train"},  # runs all of them, and compares
    "main": {
        *(*GROUND, KERNELS, MODELS, CONVERT, JUDGING, *LAYERS, *ENGINES, *RUN, "megapar.train"),
        *(f"{TOOLS}.{name}" for name in ("migrate", "prepare", "trace", "plan", "dashboard", "verify")),
    },
}
# Single modules that reach further: how many stages there are, which layers each holds and where it lives is the
# pipeline's to say.
ALSO = {
    ("megapar_models.build", "megapar.pipeline.partition"),
    ("megapar_models.build", "megapar.pipeline.schedules"),
    ("megapar_models.registry", "megapar.pipeline.schedules"),
    # An exported optimizer has the rate of its next step.
    (f"{CONVERT}.formats.torch_export", "megapar.optimizer.schedule"),
    # The doors, which a run opens for an option, an unknown flag or an error.
    *((DOORS_OF_MODELS, f"{CONVERT}.{module}") for module in ("config_json", "saved", "typed_fields")),
    *((DOORS_OF_MODELS, module) for module in (f"{CONVERT}.formats.detect", "megapar.checkpoint.format")),
    *((DOORS, f"{TOOLS}.{module}") for module in ("migrate.hints", "dashboard.page", "dashboard.status", "plan")),
    *(
        (DOORS, f"{TOOLS}.plan.{module}")
        for module in ("parts", "choose", "choose_schedule", "measure", "memory", "fits", "verdict")
    ),
}

ONLY_CALLERS_OF_DISTRIBUTED = {
    "megapar/declare/context.py",
    *(
        f"megapar/comm/{name}.py"
        for name in ("collectives", "process_groups", "store", "transports", "transport_symmetric", "transport_torch")
    ),
}
# The export to torch's checkpoints is written by torch's own; the benchmark's contenders are its own ways to train.
DISTRIBUTED_SUBMODULES: dict[str, tuple[str, ...]] = {
    "models/megapar_models/convert/formats/dcp_target.py": ("torch.distributed.checkpoint",),
    "megapar/launch/torchrun.py": ("torch.distributed.run", "torch.distributed.elastic"),
    "tools/benchmarks/checkpoint.py": ("torch.distributed.checkpoint",),
    "tools/benchmarks/frameworks.py": ("torch.distributed.checkpoint",),
}
PYTORCH_CONTENDERS = {
    "tools/benchmarks/ranks.py",
    *(f"tools/benchmarks/{name}.py" for name in ("peers", "peers_context", "peers_deepspeed")),
    *(f"tools/benchmarks/{name}.py" for name in ("finetuning", "handoff", "peers_shared_memory")),
}

# Kernels import nothing of ours, and must know how many multiprocessors there are.
KNOW_MACHINE = {"megapar/system/device.py", "megapar/system/environment.py", "kernels/megapar_kernels/dispatch.py"}

# Never required: imported where somebody asks for them. (apex on PyPI is another package: see kernels' apex.py.)
OPTIONAL = (
    *("apex", "amp_C", "fused_weight_gradient_mlp_cuda", "liger_kernel", "fla", "transformers", "deepspeed"),
    *("tokenizers", "tiktoken", "zstandard", "pyarrow", "datasets", "lm_eval", "megatron", "mkdocs", "yaml"),
    *("wandb", "mlflow", "huggingface_hub", "torchtitan"),
)

# Distributions whose import is not their name.
IMPORTED_AS = {
    "tensorboard": "torch.utils.tensorboard",
    "typing-extensions": "typing_extensions",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "tree-sitter": "tree_sitter",
    "tree-sitter-bash": "tree_sitter_bash",
}

# [x] keeps this file from matching itself.
FORBIDDEN = re.compile(
    r"/wor[k]/|/opt/de[v]|/roo[t]/|/hom[e]/|/User[s]/|\.\./share[d]/|localhost:80[0-9]|<<<<<[<]|>>>>>[>]"
)


def module_name(path: Path) -> str:
    """megapar.data.loader, megapar_models.build, tools.plot: as an import, or for a program as its path, spells it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if len(parts) > 2 and parts[1] in (MODELS, KERNELS, TOOLS):
        parts = parts[1:]
    return ".".join(part for part in parts if part != "__init__")


@cache
def names_used(path: Path) -> set[str]:
    """Everything imported by a file or reached through attributes, as dotted names."""
    return {*imports(path), *(name for node in ast.walk(tree(path)) if (name := dotted(node)))}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@cache
def room(module: str) -> str:
    """Raises KeyError for a module of megapar outside all rooms: a new room needs a line in MAY_IMPORT."""
    if module.partition(".")[0] in PROGRAMS or within(module, "megapar.__main__", "megapar.__version__"):
        return "main"
    found = [name for name in MAY_IMPORT if within(module, name)]
    if not found:
        raise KeyError(f"{module} is in no room of MAY_IMPORT")
    return max(found, key=len)


def ours(name: str) -> bool:
    return within(name, "megapar", MODELS, KERNELS, TOOLS, *PROGRAMS)


# Who may import whom


def test_each_room_imports_only_the_rooms_below_it() -> None:
    wrong, used = [], set()
    for path in SOURCES:
        module = module_name(path)
        for name in filter(ours, imports(path)):
            if (module, name.rpartition(".")[0]) in ALSO:
                used.add((module, name.rpartition(".")[0]))
            elif room(name) != room(module) and room(name) not in MAY_IMPORT[room(module)]:
                wrong.append(f"{relative(path)}: {room(module)} may not import {name}")
    assert not wrong, "\n".join(wrong)
    assert used == ALSO, f"exceptions that nobody needs: {ALSO - used}"


MAKERS_OF_PAGES = ("tests.families_page", "tests.survey_page")


def test_no_test_imports_another_test() -> None:
    """What several tests use is in tests/support: a file of tests can then be moved, split or left out alone."""
    wrong = [
        f"{relative(path)}: {name}"
        for path in TESTS
        for name in imports(path)
        if name.startswith("tests.") and not name.startswith(("tests.support.", *MAKERS_OF_PAGES))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_public_class_has_a_name_of_its_own() -> None:
    """Whoever searches for a class finds one definition."""
    found: dict[str, list[str]] = {}
    for path in LIBRARY:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(relative(path))
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert len(found) > 500
    assert not several, several


VAGUE = {"most", "place", "own", "mine", "how", "facts", "where", "told", "placed", "added", "aliases"}


def test_functions_and_arguments_are_named_by_what_they_are() -> None:
    found = []
    for path in LIBRARY:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                names = {node.name, *(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))}
                found += [f"{relative(path)}:{node.lineno}: {name}" for name in sorted(names & VAGUE)]
    assert not found, found


def test_options_are_read_and_judged_without_torch() -> None:
    """So --help and a refusal take no time, and a plan needs no accelerator."""
    waiting, seen = ["megapar.config.files", "megapar.config.validate"], set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in imports(ROOT / f"{module.replace('.', '/')}.py"):
            assert not within(name, "torch"), f"{module} imports {name}"
            target = name if (ROOT / f"{name.replace('.', '/')}.py").is_file() else name.rpartition(".")[0]
            if ours(name) and target not in seen:
                waiting.append(target)
    assert "megapar.config.options" in seen


def test_only_comm_and_context_know_torch_distributed() -> None:
    wrong = []
    for path in SOURCES:
        allowed = DISTRIBUTED_SUBMODULES.get(relative(path), ())
        found = sorted(name for name in names_used(path) if within(name, "torch.distributed"))
        if relative(path) not in ONLY_CALLERS_OF_DISTRIBUTED | PYTORCH_CONTENDERS:
            wrong += [f"{relative(path)}: {name}" for name in found if not within(name, *allowed)]
    assert not wrong, "\n".join(wrong)


def test_each_user_of_the_store_has_keys_of_its_own() -> None:
    """A user is named once outside of its definition: there it gets its part. No other part is made."""
    texts = {relative(path): path.read_text() for path in LIBRARY}
    for user in StoreUser:
        named = [name for name, text in texts.items() for _ in range(text.count(f"StoreUser.{user.name}"))]
        assert len(named) == 1, f"{user.name}: {named}"
    assert [name for name, text in texts.items() if "PrefixStore(" in text] == ["megapar/comm/store.py"]


def test_only_device_knows_the_environment_and_cuda() -> None:
    environment = [
        (path, name) for path in SOURCES for name in names_used(path) if re.match(r"os\.(environ|getenv)", name)
    ]
    cuda = [(path, name) for path in LIBRARY for name in names_used(path) if within(name, "torch.cuda")]
    wrong = [f"{relative(path)}: {name}" for path, name in environment + cuda if relative(path) not in KNOW_MACHINE]
    assert not wrong, "\n".join(wrong)
    assert environment
    assert cuda


# What a reader must never meet


def test_no_global_state_and_no_swallowed_errors() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                wrong.append(f"{where}: global {', '.join(node.names)}")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{where}: bare except")
            if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
                wrong.append(f"{where}: an error is swallowed")
        caches = {"functools.cache", "functools.lru_cache"} & names_used(path)
        wrong += [f"{relative(path)}: {name} is a cache of the module" for name in caches]
    assert not wrong, "\n".join(wrong)


def test_functions_files_and_project_stay_small() -> None:
    wrong = []
    for path in SOURCES:
        lines = path.read_text().count("\n")
        wrong += [f"{relative(path)}: {lines} lines"] * (lines > 600)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                wrong += [f"{relative(path)}:{node.lineno}: {node.name} has {length} lines"] * (length > 60)
    assert not wrong, "\n".join(wrong)
    assert (ROOT / "pretrain_scripts/pretrain.py").read_text().count("\n") <= 62


def test_classes_stay_small() -> None:
    """Private state shared by many methods is a long function: a class with two jobs becomes two classes."""
    long = {}
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 150:
                long[f"{relative(path)}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert not long


def closure(*modules: str) -> set[Path]:
    """Files of ours imported by these modules, directly or not, while no door is opened."""
    by_name = {module_name(path): path for path in SOURCES}
    waiting, seen = [by_name[module] for module in modules], set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = {part for name in imports(path) for part in (name, name.rpartition(".")[0])}
        if behind := {DOORS: TOOLS, DOORS_OF_MODELS: CONVERT}.get(module_name(path)):
            names = {name for name in names if not within(name, behind)}
        waiting += [by_name[name] for name in names if name in by_name and by_name[name] not in seen]
    return seen


def test_a_training_imports_nothing_that_people_run_beside_it() -> None:
    """tests/test_doors.py looks into a rank that trains."""
    files = closure("pretrain_scripts.pretrain")
    names = {relative(path) for path in files}
    assert "megapar/step/step.py" in names
    others = ("tools/", "models/megapar_models/convert/")
    assert not [name for name in names if name.startswith(others)]


def test_there_are_fewer_than_100_options() -> None:
    """Options of `model` describe models, and there are many kinds of them."""
    # Options of the model, of adapters and of single optimizers live with their owners.
    shared = [path for path in option_types() if not path.startswith(("model.", "adapter."))]
    assert len(shared) <= 130


def test_modules_classes_and_functions_say_what_they_are() -> None:
    """Every module with code; in the three packages every public class and public function of more than three lines.

    A class's docstring speaks for its methods.
    """
    wrong = [relative(path) for path in SOURCES if tree(path).body and not ast.get_docstring(tree(path))]
    for path in LIBRARY:
        for node in tree(path).body:
            is_class = isinstance(node, ast.ClassDef)
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            if (is_class or (node.end_lineno or 0) - node.lineno >= 3) and not ast.get_docstring(node):
                wrong.append(f"{relative(path)}:{node.lineno}: {node.name}")
    assert not wrong, "\n".join(wrong)


def project_files() -> list[Path]:
    """What git tracks or would track; skips the test outside a git checkout."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_file_speaks_of_a_machine() -> None:
    wrong = []
    for path in project_files():
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1):
            if found := FORBIDDEN.search(line):
                wrong.append(f"{relative(path)}:{number}: {found[0]}")
    assert not wrong, "\n".join(wrong)


def test_ruff_and_mypy_run_before_a_commit_and_before_the_tests_of_a_change() -> None:
    """They run over the whole tree there, and not again among the tests."""
    for tool in ("ruff check", "ruff format", "mypy"):
        for file in (".pre-commit-config.yaml", ".ci/run"):
            assert tool in (ROOT / file).read_text(), (file, tool)


# Dependencies


def requirements() -> tuple[list[str], list[str]]:
    """Return the dependencies and the dev extra of pyproject.toml."""
    return project()["dependencies"], project()["optional-dependencies"]["dev"]


def normal(requirement: str) -> str:
    """The distribution named by a requirement, as PyPI normalizes it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def third_party(paths: Iterable[Path]) -> set[str]:
    """Dotted names imported by files from neither Python nor this project."""
    siblings = {path.stem for path in SOURCES if within(module_name(path), *PROGRAMS)}
    known = sys.stdlib_module_names | siblings
    known |= {*OPTIONAL}
    return {n for path in paths for n in imports(path) if not (ours(n) or n.partition(".")[0] in known)}


def test_every_dependency_is_imported_and_every_import_declared() -> None:
    run_time, dev = ({normal(line) for line in lines} for lines in requirements())
    imported = third_party(SOURCES)
    unused = {name for name in run_time if not any(within(i, IMPORTED_AS.get(name, name)) for i in imported)}
    assert not unused, f"pyproject.toml: dependencies name what no file imports: {unused}"
    undeclared = {name for name in imported if normal(name.partition(".")[0]) not in run_time}
    assert not undeclared, f"pyproject.toml: dependencies lack {undeclared}"
    declared = {normal(IMPORTED_AS.get(name, name)) for name in run_time | dev} | run_time | dev
    undeclared = {name for name in third_party(TESTS) if normal(name.partition(".")[0]) not in declared}
    assert not undeclared, f"pyproject.toml: neither dependencies nor dev has {undeclared}"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_constraints_pin_every_dependency_and_a_torch_that_pyproject_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {normal(name): pin for name, pin in pins.items()}
    run_time, dev = requirements()
    scripts = (ROOT / "pretrain_scripts/setup.sh").read_text()
    missing = {normal(line) for line in (*run_time, *dev)} - set(pinned)
    assert missing == {"triton"}, f"constraints.txt pins no {missing - {'triton'}}"
    assert re.search(r"triton==\d", scripts)
    torch = next(line for line in run_time if normal(line) == "torch")
    low, high = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", torch).groups()  # type: ignore[union-attr]
    assert version(low) <= version(pinned["torch"]) < version(high)
    assert set(re.findall(r"torch==([\d.]+)", scripts)) <= {pinned["torch"]}


def requires_python(package: str) -> str:
    """Of the installed version: "" if it is not installed, or takes any Python."""
    try:
        return metadata(package)["Requires-Python"] or ""
    except PackageNotFoundError:
        return ""


def test_every_pinned_package_takes_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2, and pip there only says that versions conflict."""
    oldest = re.match(r">=([\d.]+)", project()["requires-python"])
    assert oldest is not None
    names = re.findall(r"^([^#\s]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    needed = {name: re.search(r">=\s*([\d.]+)", requires_python(name)) for name in names}
    too_new = {
        name: found[0] for name, found in needed.items() if found and version(found[1]) > (*version(oldest[1]), 0)
    }
    assert not too_new


def test_an_installation_has_every_module_and_preset(tmp_path: Path) -> None:
    """What setup.py copies into a wheel, without making one."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path), "egg_info", "--egg-base"]
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, check=True)
    built = {path.relative_to(tmp_path / "lib").as_posix() for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    needed = {relative(path) for path in (*LIBRARY, *(ROOT / "models").rglob("*.toml"))}
    missing = {name.removeprefix("models/").removeprefix("kernels/").removeprefix("tools/") for name in needed} - built
    assert not missing, f"setup.py leaves out {sorted(missing)}"
    assert sum(name.endswith(".toml") for name in built) > 14


# Faults


SLUG = r"[a-z0-9]+(?:-[a-z0-9]+)+"  # two words or more, so that "fault handling" cites nothing


def cited_faults(path: Path) -> set[str]:
    """The slugs cited by a file, as in "Fault hung-rank: ..." and "(faults flipped-bit, missing-file)"."""
    text = " ".join(path.read_text().replace("#", " ").split())  # a comment may break a line between two slugs
    lists = re.findall(rf"\b[Ff]aults? ({SLUG}(?:,? and {SLUG}|, {SLUG})*)", text)
    return {slug for slugs in lists for slug in re.findall(SLUG, slugs)}


def test_each_fault_is_guarded_by_a_test_that_cites_it() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    listed = re.findall(r"^- `(.*?)`: ", page, re.MULTILINE)
    assert len(listed) > 120
    assert len(listed) == len(set(listed)), "a slug stands twice"
    wrong = [slug for slug in listed if not re.fullmatch(SLUG, slug) or slug.count("-") > 4]
    assert not wrong, f"a slug has two to five words of lower case: {wrong}"
    cited = set().union(*(cited_faults(path) for path in set(TESTS) - {Path(__file__)}))
    assert set(listed) == cited, f"no test cites {set(listed) - cited}; not on the page: {cited - set(listed)}"
    elsewhere = set().union(*(cited_faults(path) for path in SOURCES))
    assert elsewhere <= set(listed), f"not on the page: {elsewhere - set(listed)}"
