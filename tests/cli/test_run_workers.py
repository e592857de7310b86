"""``feedapi run --workers``: processes that share a feed, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Spawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]

PARTITIONS = 6
EVENTS = 5
HANDLER = """
import os, sys
import anyio
async def handle(batch):
    for event in batch.events:
        # One write: the lines of several processes do not mix.
        os.write(1, b"%d %d %d\\n" % (os.getpid(), batch.partition, event.json()["n"]))
"""

Run = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(partitions=PARTITIONS)


@pytest.fixture
def run(spawn: Spawn, tmp_path: Path, publisher: Publisher) -> Run:
    """Start two workers, whose handler prints process, partition and number of each event."""
    (tmp_path / "app.py").write_text(HANDLER)

    def start(url: str, *options: object) -> subprocess.Popen[bytes]:
        arguments = ("--handler", "app:handle", "--store", "cursors.db", "--workers", 2)
        root = str(Path(__file__).parents[2])
        return spawn("run", url, *arguments, *options, cwd=tmp_path, env={"PYTHONPATH": root})

    return start


def fill(publisher: Publisher, first: int = 0) -> None:
    for partition in range(PARTITIONS):
        publisher.extend(partition, [{"n": n} for n in range(first, first + EVENTS)])


def until_both_have_read(
    process: subprocess.Popen[bytes], publisher: Publisher
) -> tuple[set[int], list[tuple[int, int]]]:
    """Read until each worker has handled events. Return the workers, and what was handled."""
    assert process.stdout is not None
    workers: set[int] = set()
    handled: list[tuple[int, int]] = []
    rounds = 0
    while len(workers) < 2:
        fill(publisher, EVENTS * rounds)
        rounds += 1
        for _ in range(PARTITIONS * EVENTS):
            pid, partition, n = map(int, process.stdout.readline().split())
            workers.add(pid)
            handled.append((partition, n))
    return workers, handled


def rest(process: subprocess.Popen[bytes]) -> tuple[int, list[tuple[int, int]], str]:
    printed, errors = process.communicate(timeout=TIMEOUT)
    rows = [tuple(map(int, line.split()))[1:] for line in printed.splitlines()]
    return process.returncode, rows, errors.decode()  # type: ignore[return-value]


def everything(rounds: int) -> list[tuple[int, int]]:
    return [(p, n) for p in range(PARTITIONS) for n in range(rounds * EVENTS)]


def test_the_workers_divide_the_partitions_and_end_together_on_a_signal(
    run: Run, publisher: Publisher
) -> None:
    with publisher.serve() as url:
        process = run(url)
        _, handled = until_both_have_read(process, publisher)
        process.send_signal(signal.SIGTERM)
        code, more, errors = rest(process)
    assert code == 0, errors
    handled += more
    assert sorted(handled) == everything(len(handled) // (PARTITIONS * EVENTS))


def test_one_that_is_killed_ends_the_others_with_its_code(run: Run, publisher: Publisher) -> None:
    with publisher.serve() as url:
        process = run(url)
        workers, _ = until_both_have_read(process, publisher)
        killed, other = workers
        os.kill(killed, signal.SIGKILL)
        code, _, errors = rest(process)
    assert code == 128 + signal.SIGKILL, errors
    assert "ended with exit code 137" in errors
    assert not _lives(other)


def test_the_workers_end_when_the_command_is_killed(run: Run, publisher: Publisher) -> None:
    with publisher.serve() as url:
        process = run(url)
        workers, _ = until_both_have_read(process, publisher)
        process.kill()
        # The pipes end with the last process that has them, a moment before that process.
        process.communicate(timeout=TIMEOUT)
        while any(map(_lives, workers)):
            time.sleep(0.01)


def test_it_ends_with_the_feed_without_follow(run: Run, publisher: Publisher) -> None:
    fill(publisher)
    with publisher.serve() as url:
        code, handled, errors = rest(run(url, "--no-follow"))
    assert code == 0, errors
    assert sorted(handled) == everything(1)


def test_wrong_options_of_a_worker_are_the_commands_exit_code(
    run: Run, publisher: Publisher
) -> None:
    with publisher.serve() as url:
        code, _, errors = rest(run(url, "--handler", "nowhere:handle"))
    assert code == 2
    assert "nowhere" in errors


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False
