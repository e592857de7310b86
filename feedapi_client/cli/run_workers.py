"""``feedapi run --workers N``: several processes on one machine share the feed.

Each is this command again, with a number in its environment. One that fails ends the others, after
what they have in flight, and its exit code is that of the command: whatever watches the command
starts all of them anew.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import anyio
from anyio.abc import Process, TaskStatus

from feedapi_client.cli.exit_codes import SIGNALLED
from feedapi_client.cli.reporting import say

_NUMBER = "FEEDAPI_RUN_WORKER"


def worker_number() -> int | None:
    """Return the number of this worker, from 0; None in a command of its own."""
    number = os.environ.get(_NUMBER, "")
    return int(number) if number.isdecimal() else None


def monitor_of(address: str | None, worker: int) -> str | None:
    """Return where a worker serves its monitor: at the next ports, in the order of the workers."""
    host, colon, port = (address or "").rpartition(":")
    if not port.isdecimal() or not int(port):
        return address
    return f"{host}{colon}{int(port) + worker}"


def end_with_parent() -> None:
    """Let this worker end when the command that started it is gone, however that ended."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # a buffered read would hold a lock at the exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="feedapi run: the parent", daemon=True).start()


async def run_workers(count: int) -> int:
    """Run so many workers until the last has ended. Returns the first exit code that is not 0.

    SIGTERM, SIGINT and SIGHUP are passed on to each. Not for Windows, which has no such signals.
    """
    return await _Workers(count).run()


class _Workers:
    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: dict[int, Process] = {}
        self._ended_by: set[signal.Signals] = set()
        self._code = 0

    async def run(self) -> int:
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._pass_signals_on)
                async with anyio.create_task_group() as workers:
                    for number in range(self._count):
                        workers.start_soon(self._work, number)
                tasks.cancel_scope.cancel()
        finally:
            self._send(signal.SIGKILL)  # only what an error of this program has left
        return self._code

    async def _work(self, number: int) -> None:
        process = await anyio.open_process(
            [sys.executable, "-m", "feedapi_client.cli", *sys.argv[1:]],
            env={**os.environ, _NUMBER: str(number)},
            stdout=None,
            stderr=None,
            # Ctrl-C in a terminal would reach it twice, and twice means at once.
            start_new_session=True,
        )
        async with process:
            self._processes[number] = process
            for early in self._ended_by:  # it was just being started
                process.send_signal(early)
            code = await process.wait()
            del self._processes[number]
        if -code in self._ended_by:
            return  # before it had its signal handlers, so that nothing was in flight
        if code and not self._code:
            self._code = code if code > 0 else SIGNALLED - code
            say(f"worker {number} ended with exit code {self._code}: the others end, too")
            self._send(signal.SIGTERM)

    async def _pass_signals_on(self, *, task_status: TaskStatus[None]) -> None:
        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with anyio.open_signal_receiver(*watched) as signals:
            task_status.started()
            async for number in signals:
                self._send(number)

    def _send(self, number: signal.Signals) -> None:
        if number is not signal.SIGHUP:
            self._ended_by.add(number)
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)
