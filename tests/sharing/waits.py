"""How long a process waits for its store, without the time in which it was paused itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

_TICK = 0.05
_OPERATIONS = ("load", "save", "look", "beat", "put")


class Waits:
    """Measures the operations of a store, and writes the longest of each to a file.

    Arguments:
        directory: where each process has its file; None: nothing is measured.
        store: whose operations are measured.
    """

    def __init__(self, directory: str | None, store: Any) -> None:
        self._path = None if directory is None else Path(directory, str(os.getpid()))
        self._longest: dict[str, float] = {}
        self._paused = 0.0
        """Seconds in which the event loop did not run: SIGSTOP, or a machine that is busy."""
        if directory is not None:
            for name in _OPERATIONS:
                if hasattr(store, name):
                    setattr(store, name, self._measured(name, getattr(store, name)))

    def _measured(self, name: str, operation: Callable[..., Any]) -> Any:
        async def measured(*args: Any, **options: Any) -> Any:
            began, paused = time.monotonic(), self._paused
            try:
                return await operation(*args, **options)
            finally:
                await anyio.lowlevel.cancel_shielded_checkpoint()
                waited = time.monotonic() - began - (self._paused - paused)
                self._longest[name] = max(self._longest.get(name, 0.0), waited)

        return measured

    async def run(self) -> None:
        """Watch the own pauses, and write what was measured, until cancelled."""
        if self._path is None:
            return
        last, written = time.monotonic(), 0.0
        while True:
            await anyio.sleep(_TICK)
            now = time.monotonic()
            self._paused += max(0.0, now - last - _TICK)
            last = now
            if now - written > 10 * _TICK:
                written = now
                text = "\n".join(f"{name} {seconds:.3f}" for name, seconds in self._longest.items())
                self._path.write_text(text)


def longest_waits(directory: str) -> dict[str, float]:
    """Return the longest wait of any process by operation."""
    longest: dict[str, float] = {}
    for path in Path(directory).iterdir():
        for line in path.read_text().splitlines():
            name, seconds = line.split()
            longest[name] = max(longest.get(name, 0.0), float(seconds))
    return longest
