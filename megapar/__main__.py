"""The one command of an installation: megapar COMMAND [flags], or python -m megapar COMMAND [flags].

It starts the programs in pretrain_scripts and tools; an installation has them as the package megapar_programs. It
imports nothing but the wanted program, so --help takes no time.
"""

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from megapar import __version__
from megapar.base.errors import ConfigError
from megapar.launch.reporting import open_streams, reported

PROGRAMS = "megapar_programs"  # setup.py maps the folders of the programs into it


class Command(NamedTuple):
    """A program: its module in PROGRAMS, whose `main` reads sys.argv, and what it does."""

    module: str
    sentence: str


# Programs that are for work on this repository are not here: benchmark.py measures the checkout beside other packages,
# code_figures.py, docs_hooks.py and draw_architecture.py read its sources, compare_flags.py writes a page of its
# documentation, gpu_facts.py is a part of gpu_check.sh. calibrate.py measures with the benchmarks.
# plan_accuracy.py, coming_over.py and strategy_tables.py write pages of the documentation. own_loop.py and grpo.py are
# examples to copy.
COMMANDS = {
    "pretrain": Command("pretrain_scripts.pretrain", "Train a model, on this machine or as a rank of a job."),
    "presets": Command("tools.presets", "List the models that --config knows by name, or print one."),
    "plan": Command("tools.plan", "Rank the layouts of a model on a number of GPUs, before renting them."),
    "build_corpus": Command("tools.build_corpus", "Make a corpus of Python's own sources, without a download."),
    "docstrings": Command("tools.docstrings", "Make conversations of the docstrings of Python's library."),
    "train_tokenizer": Command("tools.train_tokenizer", "Train a sentencepiece tokenizer on documents."),
    "preprocess": Command("tools.preprocess_data", "Turn text into tokens; merge, split and verify the results."),
    "inspect": Command("tools.inspect_checkpoint", "Show what a checkpoint holds, check it, compare it with another."),
    "inspect_gradients": Command(
        "tools.inspect_gradients", "Show the gradients of replicas before and after their sum."
    ),
    "convert": Command("tools.convert_checkpoint", "Convert from and to Hugging Face, from Megatron-LM, to torch."),
    "migrate": Command("tools.migrate", "Turn a job of another framework into a configuration of megapar."),
    "from_megatron": Command("tools.from_megatron", "Turn a job of Megatron-LM into a configuration of megapar."),
    "from_deepspeed": Command("tools.from_deepspeed", "Turn a job of Hugging Face's Trainer or DeepSpeed into one."),
    "from_torchtitan": Command("tools.from_torchtitan", "Turn a job of torchtitan into a configuration of megapar."),
    "new_family": Command("tools.new_family", "Show what a model without a family here needs, and draft a family."),
    "score": Command("tools.score", "Write the log-probabilities of texts, or those beside prepared tokens."),
    "judge": Command("tools.judge", "Measure a model: perplexity of texts, and tasks of lm-evaluation-harness."),
    "generate": Command("tools.generate", "Continue a text with a trained model."),
    "verify_layouts": Command("tools.verify_layouts", "Compare layouts with one process, parameter by parameter."),
    "status": Command("tools.status", "Say how runs are, from the files of their folders alone."),
    "report": Command("tools.report", "Write report.html into run folders: a run on one page, without a network."),
    "dashboard": Command("tools.dashboard", "Show runs in a browser while they train."),
    "plot": Command("tools.plot", "Draw the loss, the load of experts and the timeline of a run."),
    "profile": Command("tools.profile", "Show where the time of recorded steps went, on every rank."),
    "simulate": Command("tools.simulate", "Run one rank's training step of a world of any size, on this machine."),
    "plot_schedule": Command("tools.plot_schedule", "Print, simulate and draw a pipeline schedule."),
    "entropy": Command("tools.entropy", "Compute entropies of held-out tokens, which a model should get below."),
    "completion": Command("tools.completion", "Print a script that completes commands and flags in bash or zsh."),
}


def main() -> int:
    """Run the command of sys.argv; returns its exit code."""
    open_streams()
    with reported():
        called = "megapar"
        if Path(sys.argv[0]).name == "__main__.py":
            called = "python -m megapar"
        words = sys.argv[1:]
        if not words or words[0] in ("-h", "--help"):
            print(overview(called))
            if words:
                return 0
            return ConfigError.exit_code
        if words[0] == "--version":
            print(f"megapar {__version__}")
            return 0
        name = words[0].replace("-", "_")
        module = module_of(name, called)
        # Programs take their name in usage lines from here.
        sys.argv = [f"{called} {name}", *words[1:]]
        program = importlib.import_module(module)
    # Outside of `reported`, because a program reports its own errors.
    return program.main() or 0


def overview(called: str) -> str:
    """The text of --help: each command with its sentence."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.sentence}" for name, command in COMMANDS.items()]
    head = [f"usage: {called} COMMAND [flags]", "", *lines, ""]
    return "\n".join([*head, f"{called} COMMAND --help explains a command and its flags."])


def module_of(name: str, called: str) -> str:
    """The module of a command. Raises ConfigError if there is no such command, or if its package is not installed."""
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{name}: no such command; {hint}{called} --help lists them")
    if importlib.util.find_spec(PROGRAMS) is None:
        raise ConfigError(
            f"{called} {name}: this checkout is not installed, or was before it had this command: "
            "pip install -c constraints.txt -e ."
        )
    return f"{PROGRAMS}.{COMMANDS[name].module}"


if __name__ == "__main__":
    sys.exit(main())
