"""Every command and snippet of the README runs. (Its two set-up commands are run by ``.ci/run``, the second one runs this.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher

README = Path(__file__).parent.parent / "README.md"
FEED = "https://service/myfeed"
SCRIPTS = sysconfig.get_path("scripts")


@dataclass(frozen=True)
class Block:
    heading: str
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.heading.lower().replace(' ', '-')}-{self.number}"


def blocks() -> Iterator[Block]:
    heading, number = "", 0
    for match in re.finditer(
        r"^## (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$",
        README.read_text(),
        re.MULTILINE | re.DOTALL,
    ):
        if match["heading"]:
            heading, number = match["heading"], 0
        else:
            number += 1
            yield Block(heading, match["language"], match["text"], number)


BLOCKS = list(blocks())
SETUP = [block for block in BLOCKS if not block.heading]
ELSEWHERE = {
    "A data pipeline on Spark",
    "Liftbridge",
    "Exactly once, with a database",
    "Poison events",
}
"""Chapters whose snippets need a server or a JVM: the tests of these parts run them."""
PYTHON = [
    block for block in BLOCKS if block.language == "python" and block.heading not in ELSEWHERE
]
SHELL = [
    block
    for block in BLOCKS
    if block.language == "sh" and block.heading and block.heading not in ELSEWHERE
]


def test_the_two_setup_commands_come_first() -> None:
    first, second = SETUP
    assert first.text.strip().endswith("feedapi demo")
    assert second.text.strip().endswith("pytest")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_snippet_runs(block: Block, tmp_path: Path, feedapi_publisher: Publisher) -> None:
    if "def test_" in block.text:
        (tmp_path / "test_snippet.py").write_text(
            "import pytest\n\npytestmark = pytest.mark.anyio\n" + block.text
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "test_snippet.py",
        ]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout
        assert "passed" in done.stdout
        return
    feedapi_publisher.extend(0, [{"entity": "a", "n": n} for n in range(3)])
    assert feedapi_publisher.url is not None
    program = tmp_path / "snippet.py"
    program.write_text(block.text.replace(FEED, feedapi_publisher.url))
    printed = run_until(program, tmp_path, lines=3)
    assert '"n": 2' in printed.replace("'", '"')


def run_until(program: Path, directory: Path, *, lines: int) -> str:
    """Run a program that does not end by itself, interrupt it when it has printed so many lines, and return them."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error"}
    with subprocess.Popen(
        [sys.executable, program],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(lines))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 130, 0), errors
    return printed + rest


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_the_commands_of_a_shell_snippet_run(block: Block, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euc", block.text]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=110)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a command left in the background
    assert process.returncode == 0, f"{printed}\n{errors}"
    assert printed
