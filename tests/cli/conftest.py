"""Run commands in the process of the tests, as processes of their own, and on a terminal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from feedapi_client import SQLiteCursorStore
from feedapi_client.stores import Journal
from tests import warm
from tests.cli.invoke import Invoked, invoke

Feedapi = Callable[..., Any]
Spawn = Callable[..., subprocess.Popen[bytes]]
OnTerminal = Callable[..., tuple[int, str]]

TIMEOUT = 100.0
"""Seconds after which a process that does not end is an error: a safety net, not an expectation."""


@pytest.fixture
def feedapi(monkeypatch: pytest.MonkeyPatch) -> Iterator[Feedapi]:
    """Return a function that runs a command in this process.

    The result has exit_code, stdout and stderr. What a command changed of logging, which is for the
    rest of its process, is as before after the test.
    """
    monkeypatch.setenv("COLUMNS", "200")
    for variable in ("FEEDAPI_STORE", "FEEDAPI_DEBUG"):
        monkeypatch.delenv(variable, raising=False)

    def run(*args: object, input: str | None = None) -> Invoked:
        return invoke([str(arg) for arg in args], input=input)

    loggers = [logging.getLogger(), *map(logging.getLogger, ("httpx", "httpcore"))]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    yield run
    for each, level, handlers in before:
        each.setLevel(level)
        each.handlers[:] = handlers


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Return a function that starts a command as a process.

    A process that still runs at the end of the test is killed. One with a `preexec_fn` starts anew,
    any other is a fork of what has the command's imports.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(
        *args: object, env: dict[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "feedapi_client.cli", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        popen = subprocess.Popen if "preexec_fn" in settings else warm.Popen
        running.append(popen(command, env={**os.environ, **(env or {})}, **pipes))
        return running[-1]

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def on_terminal(spawn: Spawn) -> OnTerminal:
    """Return a function that runs a command with stdout or stderr on a terminal.

    It returns the exit code and what the terminal got. The other stream is thrown away.
    """

    def run(stream: str, *args: object) -> tuple[int, str]:
        import pty

        ours, theirs = pty.openpty()
        streams: dict[str, int] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        streams[stream] = theirs
        process = spawn(*args, **streams, env={"TERM": "xterm", "COLUMNS": "120", "LINES": "50"})
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # raised when the process closed its end of the terminal
            while chunk := os.read(ours, 65536):
                shown += chunk
        os.close(ours)
        return process.wait(TIMEOUT), shown.decode()

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cursors.db"


@pytest.fixture
def journalled_store(store: Path) -> Path:
    """Return an SQLite file whose cursors have a journal, which every command keeps up."""

    async def create() -> None:
        async with SQLiteCursorStore(store, journal=Journal()) as cursors:
            await cursors.feeds()

    anyio.run(create)
    return store
