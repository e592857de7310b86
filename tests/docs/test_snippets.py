"""Every code block of the README and of the documentation is run, here or by a test named here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests import components, warm
from tests.docs.snippets import PAGES, PARSED, PYTHON_RUN_BY, ROOT, SHELL_RUN_BY, Block, blocks

FEED = "https://service/myfeed"
EVENTS = [{"entity": "a", "n": n, "type": "OrderPlaced"} for n in range(3)]
SCRIPTS = sysconfig.get_path("scripts")
# The tests of the repository that blocks call are run shorter: each takes minutes as it stands.
SHORTER = {
    r"--kills \d+": "--kills 2",
    r"--seeds (1000|500|300)\b": "--seeds 3",
    r"(tests\.exploration .+)": r"\1 --states 100",
}

# What a block needs that no wheel brings, by a part of its text.
NEEDS = {"kill_real": "liftbridge"}

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [
    block for block in BLOCKS if block.language == "python" and block.page not in PYTHON_RUN_BY
]
SHELL = [
    block
    for block in BLOCKS
    if block.language == "sh" and not block.text.startswith(tuple(SHELL_RUN_BY))
]
TESTS = [
    block
    for block in PYTHON
    if re.search(r"^(class Test|(async )?def test_)", block.text, re.MULTILINE)
]
PROGRAMS = [block for block in PYTHON if block not in TESTS]


def test_every_block_says_its_language() -> None:
    known = {"python", "sh", "text", *PARSED}
    assert {block.language for block in BLOCKS} <= known


@pytest.mark.parametrize("language", PARSED)
def test_a_language_that_another_test_reads_is_named_in_that_test(language: str) -> None:
    assert f'"{language}"' in (ROOT / PARSED[language]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PYTHON_RUN_BY)
def test_a_page_that_another_test_runs_is_named_in_that_test(page: str) -> None:
    test, reason = PYTHON_RUN_BY[page]
    assert f'"{page}"' in (ROOT / test).read_text(encoding="utf-8"), reason
    assert any(block.page == page and block.language == "python" for block in BLOCKS)


@pytest.mark.parametrize("beginning", SHELL_RUN_BY)
def test_a_command_that_a_script_runs_is_named_in_that_script(beginning: str) -> None:
    script, reason = SHELL_RUN_BY[beginning]
    assert beginning.removesuffix(" .venv") in (ROOT / script).read_text(encoding="utf-8"), reason


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_prints_every_event(
    block: Block, tmp_path: Path, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.extend(0, EVENTS)
    assert feedapi_publisher.url is not None
    program = tmp_path / "program.py"
    # Ports that tests beside this one may use.
    text = block.text.replace("port=9464", "port=0")
    program.write_text(text.replace(FEED, feedapi_publisher.url))
    endless = "FeedConsumer(" in block.text and "follow=False" not in block.text
    graceful = "signal" in block.text
    after = len(EVENTS) if endless else None
    printed = run_program(program, interrupt_after=after, graceful=graceful)
    assert re.findall(r"'n': (\d+)", printed) == [str(event["n"]) for event in EVENTS]


def run_program(program: Path, *, interrupt_after: int | None, graceful: bool = False) -> str:
    """Run a program and return what it printed.

    One that does not end by itself is interrupted when it has printed `interrupt_after` lines. A
    `graceful` one is terminated then, and ends as if it had come to its end.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error"}
    with warm.Popen(
        [sys.executable, program],
        cwd=program.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = ""
        if interrupt_after is not None:
            printed = "".join(process.stdout.readline() for _ in range(interrupt_after))
            process.send_signal(signal.SIGTERM if graceful else signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    ends_by_itself = interrupt_after is None or graceful
    expected = (0,) if ends_by_itself else (-signal.SIGINT, 130)
    assert process.returncode in expected, errors
    return printed + rest


@pytest.mark.slow
@pytest.mark.parametrize("block", TESTS, ids=str)
def test_a_test_passes(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_snippet.py").write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_snippet.py"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_the_commands_of_a_shell_block_succeed(block: Block, tmp_path: Path) -> None:
    for part, component in NEEDS.items():
        if part in block.text:
            components.require(component)
    environment = os.environ | {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    text = block.text
    for long, short in SHORTER.items():
        text = re.sub(long, short, text)
    # After the last command, so that bash stays its parent: completion is for the shell in use.
    command = ["bash", "-euc", f"{text}\ntrue"]
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
