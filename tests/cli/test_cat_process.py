"""``feedapi cat`` as a process: signals, pipes, and terminals."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import TIMEOUT, OnTerminal, Spawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX"),
]

_BIG = 300


def _cursor(store: Path) -> str:
    connection = sqlite3.connect(store)
    (found,) = connection.execute("SELECT feed_cursor FROM feedapi_cursors").fetchone()
    connection.close()
    return str(found)


def _fill(publisher: Publisher, count: int = 10) -> None:
    publisher.extend(0, [{"n": n} for n in range(count)])


def _fill_big(publisher: Publisher) -> None:
    """One batch of more than a pipe holds."""
    publisher.page_size = publisher.checkpoint_every = _BIG
    publisher.extend(0, [{"n": n, "text": "x" * 1000} for n in range(_BIG)])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_the_batch_in_flight(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path, number: signal.Signals, code: int
) -> None:
    _fill(feedapi_publisher)
    process = spawn("cat", feedapi_publisher.url, "--follow", "--store", store)
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(10)]
    process.send_signal(number)
    rest, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, rest, errors) == (code, b"", b"")
    assert len(printed) == 10
    assert _cursor(store) == feedapi_publisher.end_cursor(0)


@pytest.mark.parametrize("command", ["cat", "discover"])
def test_a_signal_ends_it_while_the_feed_does_not_answer(
    spawn: Spawn, feedapi_publisher: Publisher, command: str
) -> None:
    hung = feedapi_publisher.fail(faults.Hang(), on="discovery", times=None)
    process = spawn(command, feedapi_publisher.url)
    while not hung.hits:
        assert process.poll() is None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (130, b"")


def test_a_second_signal_ends_it_while_stdout_is_blocked(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path
) -> None:
    _fill_big(feedapi_publisher)
    process = spawn("cat", feedapi_publisher.url, "--store", store)
    assert process.stdout is not None
    process.stdout.read(1)  # it is writing now, and blocked once the pipe is full
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    assert process.returncode == 130
    assert _cursor(store) == "_first"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_r5_a_closed_pipe_is_a_clean_end_and_nothing_unwritten_is_committed(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path, unbuffered: str
) -> None:
    _fill_big(feedapi_publisher)
    process = spawn(
        "cat", feedapi_publisher.url, "--store", store, env={"PYTHONUNBUFFERED": unbuffered}
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, b"")
    assert _cursor(store) == "_first"


def test_a_pipe_closed_while_the_feed_is_idle_ends_it(
    spawn: Spawn, feedapi_publisher: Publisher
) -> None:
    _fill(feedapi_publisher, 1)
    process = spawn("cat", feedapi_publisher.url, "--follow")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (0, b"")


def test_all_of_a_batch_is_written_to_a_slow_reader(
    spawn: Spawn, feedapi_publisher: Publisher
) -> None:
    _fill_big(feedapi_publisher)
    process = spawn("cat", feedapi_publisher.url, env={"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert len(process.stdout.readlines()) == _BIG


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_on_one_line(
    spawn: Spawn, feedapi_publisher: Publisher, store: Path
) -> None:
    _fill(feedapi_publisher)
    with Path("/dev/full").open("wb") as full:
        process = spawn("cat", feedapi_publisher.url, "--store", store, stdout=full)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert errors == b"feedapi: writing to stdout failed: No space left on device\n"
    assert _cursor(store) == "_first"


def test_without_a_stdout_it_ends_at_once(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    command = [sys.executable, "-m", "feedapi_client.cli", "cat", str(feedapi_publisher.url)]
    result = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], check=False, capture_output=True, timeout=TIMEOUT
    )
    assert (result.returncode, result.stderr) == (1, b"feedapi: stdout is closed\n")


def test_without_a_stderr_it_works(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    _fill(feedapi_publisher)
    command = [sys.executable, "-m", "feedapi_client.cli", "cat", str(feedapi_publisher.url)]
    result = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *command], check=False, capture_output=True, timeout=TIMEOUT
    )
    assert result.returncode == 0
    assert result.stdout


def test_https_to_a_plain_port_is_named_at_once(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    url = str(feedapi_publisher.url).replace("http://", "https://")
    process = spawn("cat", url)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert b"does not speak TLS" in errors
    assert errors.count(b"\n") == 1


def test_follow_prints_what_comes_later(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    process = spawn("cat", feedapi_publisher.url, "--follow", "--raw")
    assert process.stdout is not None
    for n in range(3):
        feedapi_publisher.append(0, {"n": n})
        assert process.stdout.readline() == b'{"n":%d}\n' % n


def test_progress_is_shown_on_a_terminal(
    on_terminal: OnTerminal, feedapi_publisher: Publisher
) -> None:
    _fill(feedapi_publisher)
    code, shown = on_terminal("stderr", "cat", feedapi_publisher.url)
    assert code == 0
    assert re.search(r"10 events · [\d,]+/s · 1 \w+", shown)


def test_quiet_shows_no_progress(on_terminal: OnTerminal, feedapi_publisher: Publisher) -> None:
    _fill(feedapi_publisher)
    assert on_terminal("stderr", "cat", feedapi_publisher.url, "--quiet") == (0, "")
