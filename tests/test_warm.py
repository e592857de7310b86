"""A program that is a fork of the process with the imports is as one that is started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs are started"),
]
PROGRAMS = {
    "input": "print(sys.stdin.read().upper(), file=sys.stderr)",
    "exit code": "sys.exit(7)",
    "reason": "sys.exit('bad')",
    "killed": "os.kill(os.getpid(), 9)",
    "interrupted": "signal.raise_signal(2)",
    "exit handler": "import atexit; atexit.register(print, 'at the end'); print('first')",
    "thread": "import threading; threading.Timer(0.05, print, ['late']).start(); print('first')",
    "annotations": "def f(x: 1): ...\nprint(f.__annotations__)",
    "child": "print(os.getppid())",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_shows_what_it_shows_when_it_is_started(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os, signal, sys\n{program}"]
    assert shown_by(warm.Popen, command, tmp_path) == shown_by(subprocess.Popen, command, tmp_path)


@pytest.mark.parametrize("way", ["-c", "-m module", "-m package", "file.py"])
def test_a_program_has_its_own_names_arguments_and_surroundings(way: str, tmp_path: Path) -> None:
    program = (
        "import os, sys; print(__name__, globals().get('__file__'), __package__, sys.argv, "
        "sys.path, os.getcwd(), sorted(os.environ.items()))"
    )
    (tmp_path / "package").mkdir()
    for name in ("module.py", "file.py", "package/__init__.py", "package/__main__.py"):
        (tmp_path / name).write_text(program if name != "package/__init__.py" else "")
    given = way.split() if way != "-c" else ["-c", program]
    command = [sys.executable, *given, "an argument"]
    assert shown_by(warm.Popen, command, tmp_path) == shown_by(subprocess.Popen, command, tmp_path)


def shown_by(start: Any, command: list[str], folder: Path) -> tuple[int, str, list[str]]:
    """Return exit code, stdout, and the last line of stderr."""
    with start(
        command,
        cwd=folder,
        env={"A": "b", "LANG": "C.UTF-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, errors = process.communicate("input", timeout=60)
    return process.returncode, out, errors.splitlines()[-1:]


@pytest.mark.parametrize("name", ["PYTHONIOENCODING=latin-1:replace", "PYTHONUNBUFFERED=1", "A=b"])
def test_streams_are_as_the_environment_says(name: str) -> None:
    program = (
        "import os, sys; print('\u00e4 \u6f22'); sys.stderr.write('\u00e4 \u6f22'); "
        "print([(s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__) "
        "for s in (sys.stdin, sys.stdout, sys.stderr)]); os._exit(3)"
    )
    shown = []
    for run in (warm.run, subprocess.run):
        done = run(
            [sys.executable, "-c", program],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict([name.split("=")], LANG="C.UTF-8"),
        )
        shown.append((done.returncode, done.stdout, done.stderr))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("option", ["-W error", "-W error::ResourceWarning", "-W ignore", ""])
def test_options_about_warnings_count(option: str) -> None:
    program = "import warnings; warnings.warn('seen'); open('/dev/null'); print('to the end')"
    command = [sys.executable, *option.split(), "-c", program]
    warmed = warm.run(command, capture_output=True, text=True, timeout=60)
    started = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (warmed.returncode, warmed.stdout) == (started.returncode, started.stdout)
    for words in ("UserWarning: seen", "ResourceWarning: unclosed"):
        assert (words in warmed.stderr) == (words in started.stderr)


def test_a_program_can_be_stopped_and_killed_while_it_runs() -> None:
    command = [sys.executable, "-c", "print('here', flush=True); input()"]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_the_imports_are_there_already() -> None:
    program = "import sys; print('feedapi_client.cli.app' in sys.modules)"
    assert warm.run([sys.executable, "-c", program], capture_output=True).stdout == b"True\n"
