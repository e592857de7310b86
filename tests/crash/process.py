"""A consumer process: started, watched step by step, killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests import warm
from tests.crash.consumer import OPENED

_SILENCE_SECONDS = 300.0  # a safety net: no test depends on it
_IDLE_SECONDS = 0.2
_ROOT = Path(__file__).parents[2]


class StalledError(Exception):
    """The consumer made no step for a long time."""


class ConsumerProcess:
    """``with ConsumerProcess(...) as consumer``: killed at the latest when the block ends."""

    def __init__(self, url: str, database: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "tests.crash.consumer", url, database, *options]
        # A pipe that nobody reads would stall the process once it is full.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> ConsumerProcess:
        self.process = warm.Popen(
            self._command,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._errors.close()

    def wait_for_step(self, when_idle: Callable[[], object] = lambda: None) -> bytes:
        """Return the next step that the process reaches, or b"" when it has ended.

        The process waits there until `let_go`. `when_idle` is called again and again while the
        process reaches no step, for example to publish events.

        Raises:
            StalledError: the process is silent.
        """
        (ready,) = wait_for_any([self], when_idle)
        return ready.read_step()

    def read_step(self) -> bytes:
        """Return the step that the process has reached, or b"" when it has ended."""
        assert self.process.stdout is not None
        step = os.read(self.process.stdout.fileno(), 1)
        if not step:
            self.process.wait(_SILENCE_SECONDS)
        return step

    def let_go(self) -> None:
        """Let the process go on to its next step."""
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), b".")

    def finish(self) -> int:
        """Let the process go on until it ends; return its exit code."""
        while self.wait_for_step():
            self.let_go()
        return self.process.wait()

    def errors(self) -> str:
        """Return what the process wrote to stderr. To be called when it has ended."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait_until_open(self) -> None:
        """Wait until the consumer is open. It waits there until `let_go`."""
        assert self.wait_for_step() == OPENED, self.errors()


def wait_for_any(
    consumers: list[ConsumerProcess], when_idle: Callable[[], object] = lambda: None
) -> list[ConsumerProcess]:
    """Return those consumers that reach a step or end first; call `when_idle` until then.

    Raises:
        StalledError: all of them are silent.
    """
    deadline = time.monotonic() + _SILENCE_SECONDS
    by_pipe = {consumer.process.stdout: consumer for consumer in consumers}
    while not (ready := select.select(list(by_pipe), [], [], _IDLE_SECONDS)[0]):
        if time.monotonic() > deadline:
            raise StalledError(f"no step for {_SILENCE_SECONDS:.0f} s")
        when_idle()
    return [by_pipe[pipe] for pipe in ready]


def run_until_one_ends(
    consumers: list[ConsumerProcess], when_idle: Callable[[], object]
) -> list[ConsumerProcess]:
    """Let all consumers go on until one has ended, and return those that have."""
    ended: list[ConsumerProcess] = []
    while not ended:
        for consumer in wait_for_any(consumers, when_idle):
            if consumer.read_step():
                consumer.let_go()
            else:
                ended.append(consumer)
    return ended
