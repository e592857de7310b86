"""The command line in this process, and as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from feedapi_client.cli.app import app
from tests.servers import redis_server  # noqa: F401

Feedapi = Callable[..., Any]
WAIT = 60.0


@pytest.fixture
def feedapi(monkeypatch: pytest.MonkeyPatch) -> Feedapi:
    """Runs a command in this process; the result has exit_code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    for variable in ("FEEDAPI_STORE", "FEEDAPI_DEBUG"):
        monkeypatch.delenv(variable, raising=False)

    def run(*args: object, input: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=input)

    return run


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command as a process of its own, killed at the end of the test if it still runs."""
    running: list[subprocess.Popen[bytes]] = []

    def start(
        *args: object, env: dict[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "feedapi_client.cli", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        running.append(subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes))
        return running[-1]

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cursors.db"
