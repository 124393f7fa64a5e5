"""What programs do when standard output cannot be written: its reader has gone, as `head` goes, or the disk is full."""

import ast
import os
import signal
import subprocess
import sys

import pytest

from megapar.base.errors import StorageError
from tests.support.source_tree import SOURCES, dotted, relative, tree

READER_GONE = 128 + signal.SIGPIPE
FULL = "StorageError: cannot write to standard output: No space left on device\n"

PROGRAM = """
import os, socket, sys
from dataclasses import dataclass
import tyro
from rich.console import Console
from megapar.launch.reporting import reported

@dataclass
class Arguments:
    "Some arguments."
    word: str = ""

def over_a_socket():
    left, right = socket.socketpair()
    right.close()
    left.send(b"x")

with reported():
    {body}
"""
WAYS = {
    "few-words": "print('x')",  # written when the program ends
    "many-words": "print('x' * 1_000_000)",
    "help": "tyro.cli(Arguments, args=['--help'])",
    "rich": "Console(width=100).print('x')",
}


def start(body: str, stdout: int) -> tuple[int, str]:
    """The exit code and standard error of a program with `body` as its `main`."""
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("body", WAYS.values(), ids=WAYS)
def test_a_program_whose_reader_has_gone_ends_in_silence(body: str) -> None:
    """Fault reader-of-output-gone. The exit code is as if SIGPIPE had ended the program."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert start(body, writer) == (READER_GONE, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("body", WAYS.values(), ids=WAYS)
def test_a_full_disk_under_standard_output_is_a_line(body: str) -> None:
    """Fault output-on-full-disk."""
    with open("/dev/full", "w") as full:
        assert start(body, full.fileno()) == (StorageError.exit_code, FULL)


def test_another_broken_connection_is_still_a_bug() -> None:
    """A broken pipe to another process says nothing about standard output."""
    code, err = start("over_a_socket()", subprocess.DEVNULL)
    assert code == 70
    assert "BrokenPipeError" in err


READERS = ("megapar/config/files.py", "tools/megapar_tools/migrate/finish.py")


def test_every_program_reads_its_command_line_where_errors_are_reported() -> None:
    """--help is then answered as above. Programs call the other two files' readers there."""
    wrong = []
    seen = 0
    for path in SOURCES:
        if "tyro." not in path.read_text():
            continue
        reporting = [
            node
            for node in ast.walk(tree(path))
            if isinstance(node, ast.With)
            and any(
                isinstance(item.context_expr, ast.Call) and dotted(item.context_expr.func) == "reported"
                for item in node.items
            )
        ]
        inside = {id(node) for block in reporting for node in ast.walk(block)}
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or relative(path) in READERS:
                continue
            if dotted(node.func) in ("tyro.cli", "tyro.extras.subcommand_cli_from_dict"):
                seen += 1
                wrong += [f"{relative(path)}:{node.lineno}"] * (id(node) not in inside)
    assert not wrong, "\n".join(wrong)
    assert seen > 10
