"""A consumer process: started, watched, killed."""

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

_SILENCE_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]


class StalledError(Exception):
    """The consumer gave no sign of life."""


class ConsumerProcess:
    """``with ConsumerProcess(...) as consumer``: killed at the latest when the block ends."""

    def __init__(self, url: str, database: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "tests.crash.consumer", url, database, *options]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stall the process once it is full
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> ConsumerProcess:
        self.process = subprocess.Popen(
            self._command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
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
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def signs(self) -> bytes:
        """Signs of life since the last call, at least one; b"" when the process has ended. Raises StalledError after a minute of silence."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _SILENCE_SECONDS)
        if not ready:
            raise StalledError(f"no sign of life for {_SILENCE_SECONDS:.0f} s")
        return os.read(self.process.stdout.fileno(), 65536)

    def finish(self) -> int:
        """Read signs until the process ends; its exit code."""
        while self.signs():
            pass
        return self.process.wait(_SILENCE_SECONDS)

    def errors(self) -> str:
        """What it wrote to stderr. To be called when it has ended."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def kill(self, after: float = 0.0) -> None:
        """Pull the plug, `after` seconds from now."""
        time.sleep(after)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait_until_open(self) -> None:
        """Read the first sign of life."""
        assert self.signs().startswith(b"o"), self.errors()


def read_until_one_ends(
    consumers: list[ConsumerProcess],
    meanwhile: Callable[[], object],
    patience: float = _SILENCE_SECONDS,
) -> list[ConsumerProcess]:
    """Read signs of all until one has ended, and return those that have; `meanwhile` is called again and again."""
    ended: list[ConsumerProcess] = []
    deadline = time.monotonic() + patience
    while not ended:
        if time.monotonic() > deadline:
            raise StalledError(f"none of {len(consumers)} consumers ended in {patience:.0f} s")
        meanwhile()
        ready, _, _ = select.select(
            [consumer.process.stdout for consumer in consumers], [], [], 0.05
        )
        ended = [
            consumer
            for consumer in consumers
            if consumer.process.stdout in ready and not consumer.signs()
        ]
    for consumer in ended:
        consumer.process.wait(patience)
    return ended
