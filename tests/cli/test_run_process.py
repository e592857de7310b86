"""``feedapi run`` as a process: signals, the monitor beside it, other instances, log records."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import TIMEOUT, Spawn

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")]

Process = subprocess.Popen[bytes]
Run = Callable[..., Process]

APPLICATION = """
import anyio, logging, warnings

text = "a payload"

async def handle(batch):
    for event in batch.events:
        print("MARK", event.json()["n"], flush=True)

async def hang(batch):
    if batch.events:
        print("in flight", flush=True)
        await anyio.sleep_forever()

async def slow(batch):
    if batch.events:
        print("in flight", flush=True)
        await anyio.sleep(0.3)

async def fails(batch):
    raise ValueError(text)

async def logs(batch):
    logging.getLogger("shop").info("x %s", len(batch.events))
    warnings.warn("old")
    if batch.events:
        raise ValueError
"""


@pytest.fixture
def run(spawn: Spawn, tmp_path: Path, feedapi_publisher: Publisher) -> Run:
    """Start the command with a handler of the module."""
    (tmp_path / "app.py").write_text(APPLICATION)
    feedapi_publisher.append(0, {"n": 0})

    def start(handler: str, *options: object) -> Process:
        words = ("run", feedapi_publisher.url, "--handler", f"app:{handler}", "--store", "c.db")
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        return spawn(*words, *options, cwd=tmp_path, env=path)

    return start


def cursor(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "c.db")) as connection:
        (found,) = connection.execute("SELECT feed_cursor FROM feedapi_cursors").fetchone()
    return str(found)


def line(*processes: Process) -> str:
    """Return the next line that one of the processes prints."""
    streams = [process.stdout for process in processes if process.stdout is not None]
    ready, _, _ = select.select(streams, [], [], TIMEOUT)
    return str(ready[0].readline().decode().strip())


def await_stderr(process: Process, text: str) -> str:
    assert process.stderr is not None
    while text not in (found := process.stderr.readline().decode()):
        assert found, f"ended without {text!r}"
    return found


def end(process: Process, number: signal.Signals | None = signal.SIGTERM) -> tuple[int, str]:
    """Send the signal. Return the exit code and what else is on stderr."""
    if number is not None:
        process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, errors.decode()


SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@SIGNALS
def test_r05_a_signal_ends_it_with_code_0_when_all_in_flight_is_committed(
    run: Run, feedapi_publisher: Publisher, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """What is not finished within the grace period is cancelled, and not committed."""
    hung = run("hang", "--grace", 0.1)
    assert line(hung) == "in flight"
    ended, errors = end(hung, number)
    assert (ended, "the grace period of 0.1 s is over" in errors) == (code, True), errors
    assert cursor(tmp_path) == "_first"
    slow = run("slow", "--grace", 60)
    assert line(slow) == "in flight"
    assert end(slow, number)[0] == 0
    assert cursor(tmp_path) == feedapi_publisher.end_cursor(0)


def test_a_second_signal_does_not_wait_for_the_grace_period(run: Run) -> None:
    process = run("hang", "--grace", 1000)
    assert line(process) == "in flight"
    process.send_signal(signal.SIGTERM)
    await_stderr(process, "SIGTERM: ends after what is in flight, in at most 1000 s")
    assert end(process)[0] == 143


def test_a_signal_ends_it_while_the_feed_does_not_answer(
    run: Run, feedapi_publisher: Publisher
) -> None:
    hung = feedapi_publisher.fail(faults.Hang(), on="discovery", times=None)
    process = run("handle")
    while not hung.hits:
        assert process.poll() is None
        time.sleep(0.02)
    code, errors = end(process)
    assert code == 0, errors


def test_r19_a_handler_that_fails_is_shown_with_its_own_lines_and_without_its_text(
    run: Run, tmp_path: Path
) -> None:
    code, errors = end(run("fails"), None)
    where = APPLICATION.splitlines().index("    raise ValueError(text)") + 1
    said = f"feedapi: the handler failed with ValueError (app.py, line {where})"
    assert (code, errors.splitlines()[-1]) == (3, said)
    assert f'app.py", line {where}, in fails' in errors
    assert "feedapi_client/" not in errors  # a frame of the library
    assert "a payload" not in errors
    assert cursor(tmp_path) == "_first"


def test_a_monitor_beside_it(run: Run, spawn: Spawn, feedapi_publisher: Publisher) -> None:
    process = run("handle", "--monitor", "127.0.0.1:0")
    url = re.findall(r"http://\S+", await_stderr(process, "monitor at "))[0]
    deadline = time.monotonic() + TIMEOUT
    while (ready := httpx.get(f"{url}readyz")).status_code != 200:
        assert time.monotonic() < deadline, ready.text
        time.sleep(0.05)
    assert httpx.get(f"{url}healthz").json()["live"] is True
    assert httpx.get(f"{url}status").json()["consumers"][0]["feed"] == feedapi_publisher.url
    assert end(process)[0] == 0
    cat = spawn("cat", feedapi_publisher.url, "--follow", "--monitor", "127.0.0.1:0")
    url = re.findall(r"http://\S+", await_stderr(cat, "monitor at "))[0]
    assert httpx.get(f"{url}status").status_code == 200
    assert end(cat)[0] == 143


def test_two_processes_share_a_feed(run: Run, feedapi_publisher: Publisher, tmp_path: Path) -> None:
    """And the second one takes all over when the first one ends."""
    first, second = run("handle", "--share"), run("handle", "--share")
    assert line(first, second) == "MARK 0"
    assert end(first)[0] == 0
    last = feedapi_publisher.append(0, {"n": 2})
    deadline = time.monotonic() + TIMEOUT
    while cursor(tmp_path) != last:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert end(second)[0] == 0


def test_nothing_but_json_is_written_where_log_records_are_json(run: Run) -> None:
    """Not by the command, by Python or by the server of the monitor, whose words have colours."""
    code, errors = end(run("logs", "--log-format", "json", "--monitor", "127.0.0.1:0"), None)
    records = [json.loads(line) for line in errors.splitlines()]
    assert code == 3
    loggers = {record["logger"] for record in records}
    assert {"feedapi", "py.warnings", "uvicorn.error"} <= loggers
    assert not any("\x1b" in str(value) for record in records for value in record.values())
    last = [record for record in records if record["logger"] == "feedapi"][-1]
    where = APPLICATION.splitlines().index("        raise ValueError") + 1
    message = f"the handler failed with ValueError (app.py, line {where})"
    assert (last["level"], last["message"]) == ("ERROR", message)
    own = [record for record in records if record["logger"] == "shop"]
    assert ("INFO", "x 1") in [(record["level"], record["message"]) for record in own]
    for wrong in (["--nonsense"], ["--attempts=x"], ["--key=x"], ["--journal"]):
        code, errors = end(run("logs", "--log-format=json", *wrong), None)
        (record,) = map(json.loads, errors.splitlines())
        assert (code, record["level"], record["logger"]) == (2, "ERROR", "feedapi")
