"""``feedapi run`` as a process: signals, exit codes, the handler's life, the monitor beside it."""

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
from typing import Any

import httpx
import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]

Run = Callable[..., subprocess.Popen[bytes]]

PRINT = """
import sys
async def handle(batch):
    for event in batch.events:
        print("MARK", event.json()["n"], flush=True)
"""
HANG = """
import anyio
async def handle(batch):
    if batch.events:
        print("in flight", flush=True)
        await anyio.sleep_forever()
"""
SLOW = """
import anyio
async def handle(batch):
    if batch.events:
        print("in flight", flush=True)
        await anyio.sleep(0.3)
"""


@pytest.fixture
def app(tmp_path: Path) -> Callable[[str], None]:
    """Write the application's module."""

    def write(text: str) -> None:
        (tmp_path / "app.py").write_text(text)

    return write


@pytest.fixture
def run(spawn: Spawn, tmp_path: Path, feedapi_publisher: Publisher) -> Run:
    """Start the command with the handler of the module."""

    def start(*options: object, handler: str = "app:handle") -> subprocess.Popen[bytes]:
        return spawn(
            "run",
            feedapi_publisher.url,
            "--handler",
            handler,
            "--store",
            "cursors.db",
            *options,
            cwd=tmp_path,
            env={"PYTHONPATH": os.pathsep.join(["/".join(__file__.split("/")[:-3])])},
        )

    return start


def _cursor(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "cursors.db")) as connection:
        (found,) = connection.execute("SELECT feed_cursor FROM feedapi_cursors").fetchone()
    return str(found)


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, errors.decode()


def test_it_handles_the_feed_to_its_end(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    end = feedapi_publisher.extend(0, [{"n": n} for n in range(3)])
    app(PRINT)
    process = run("--no-follow")
    printed, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, printed) == (0, b"MARK 0\nMARK 1\nMARK 2\n"), errors
    assert _cursor(tmp_path) == end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_code_0_when_all_in_flight_is_committed(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path, number: signal.Signals
) -> None:
    end = feedapi_publisher.append(0, {"n": 1})
    app(SLOW)
    process = run("--grace", 60)
    assert _line(process) == "in flight"
    process.send_signal(number)
    code, errors = _end(process)
    assert code == 0, errors
    assert _cursor(tmp_path) == end


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_r05_what_is_not_finished_within_the_grace_period_is_cancelled_and_not_committed(
    run: Run,
    app: Any,
    feedapi_publisher: Publisher,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    app(HANG)
    process = run("--grace", 0.1)
    assert _line(process) == "in flight"
    process.send_signal(number)
    ended, errors = _end(process)
    assert ended == code
    assert "the grace period of 0.1 s is over" in errors
    assert _cursor(tmp_path) == "_first"


def test_a_second_signal_does_not_wait_for_the_grace_period(
    run: Run, app: Any, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    app(HANG)
    process = run("--grace", 1000)
    assert _line(process) == "in flight"
    process.send_signal(signal.SIGTERM)
    _await_stderr(process, "SIGTERM: ends after what is in flight, in at most 1000 s")
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == 143


def test_a_signal_ends_it_while_the_feed_does_not_answer(
    run: Run, app: Any, feedapi_publisher: Publisher
) -> None:
    hung = feedapi_publisher.fail(faults.Hang(), on="discovery", times=None)
    app(PRINT)
    process = run()
    while not hung.hits:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, errors = _end(process)
    assert code == 0, errors


def test_a_handler_that_fails_is_code_3_without_the_text_of_the_error(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.append(0, {"n": "payload"})
    app("async def handle(batch):\n    for e in batch.events: raise ValueError(e.json()['n'])\n")
    code, errors = _end(run())
    assert code == 3
    assert errors.splitlines()[-1] == "feedapi: the handler failed with ValueError (app.py, line 2)"
    assert 'app.py", line 2, in handle' in errors
    assert "feedapi_client/" not in errors  # a frame of the library
    assert "payload" not in errors
    assert _cursor(tmp_path) == "_first"


def test_a_failing_event_goes_into_quarantine(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    end = feedapi_publisher.extend(0, [{"n": n} for n in range(3)])
    app("async def handle(batch):\n    assert all(e.json()['n'] != 1 for e in batch.events)\n")
    code, errors = _end(run("--no-follow", "--on-failure", "quarantine", "--attempts", 1))
    assert code == 0, errors
    assert _cursor(tmp_path) == end
    with closing(sqlite3.connect(tmp_path / "cursors.db")) as connection:
        (found,) = connection.execute("SELECT error_type FROM feedapi_quarantine").fetchone()
    assert found == "AssertionError"


def test_another_consumer_of_the_name_is_code_4(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    app(
        "import sqlite3\n"
        "async def handle(batch):\n"
        "    with sqlite3.connect('cursors.db') as c:\n"
        "        c.execute('UPDATE feedapi_cursors SET revision = revision + 7')\n"
    )
    code, errors = _end(run())
    assert code == 4, errors


def test_a_feed_that_is_none_is_code_1(run: Run, app: Any, feedapi_publisher: Publisher) -> None:
    feedapi_publisher.fail(faults.Status(404), on="discovery", times=None)
    app(PRINT)
    assert _end(run())[0] == 1


@pytest.mark.parametrize(
    ("text", "handler", "says"),
    [
        (PRINT, "app:nothing", "can't be imported"),
        (PRINT, "nothing:handle", "can't be imported"),
        (PRINT, "app", "MODULE:FUNCTION"),
        ("raise KeyError('secret')", "app:handle", "KeyError in the module"),
        ("def handle(batch): pass", "app:handle", "must be a function with async"),
        ("handle = 3", "app:handle", "is no function"),
    ],
)
def test_a_handler_that_can_not_be_used_is_code_2(
    run: Run, app: Any, text: str, handler: str, says: str
) -> None:
    app(text)
    code, errors = _end(run(handler=handler))
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert says in errors
    assert "secret" not in errors


def test_what_is_opened_has_to_be_a_handler_with_async(run: Run, app: Any) -> None:
    app(
        "import contextlib\n"
        "def handle(batch): ...\n"
        "def opened(): return contextlib.nullcontext(handle)\n"
    )
    code, errors = _end(run(handler="app:opened"))
    assert code == 2
    assert "must be a function with async" in errors


def test_a_handler_may_open_what_it_needs(run: Run, app: Any, feedapi_publisher: Publisher) -> None:
    feedapi_publisher.append(0, {"n": 1})
    app(
        "from contextlib import asynccontextmanager\n"
        "@asynccontextmanager\n"
        "async def opened():\n"
        "    print('open', flush=True)\n"
        "    async def handle(batch):\n"
        "        if batch.events: print('handled', flush=True)\n"
        "    yield handle\n"
        "    print('closed', flush=True)\n"
    )
    process = run("--no-follow", handler="app:opened")
    printed, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, printed.split()) == (0, [b"open", b"handled", b"closed"]), errors


def _await_stderr(process: subprocess.Popen[bytes], text: str) -> str:
    assert process.stderr is not None
    while text not in (line := process.stderr.readline().decode()):
        assert line, f"ended without {text!r}"
    return line


def test_a_monitor_beside_it(run: Run, app: Any, feedapi_publisher: Publisher) -> None:
    app(HANG)
    process = run("--monitor", "127.0.0.1:0")
    line = _await_stderr(process, "monitor at ")
    url = re.findall(r"http://\S+", line)[0]
    deadline = time.monotonic() + TIMEOUT
    while (ready := httpx.get(f"{url}readyz")).status_code != 200:
        assert time.monotonic() < deadline, ready.text
        time.sleep(0.05)
    assert httpx.get(f"{url}healthz").json()["live"] is True
    assert httpx.get(f"{url}status").json()["consumers"][0]["feed"] == feedapi_publisher.url
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == 0


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:70000", "::1:80", "127.0.0.1:-1"])
def test_an_impossible_address_of_the_monitor_is_code_2(run: Run, app: Any, address: str) -> None:
    app(PRINT)
    code, errors = _end(run(f"--monitor={address}"))
    assert code == 2
    assert "takes HOST:PORT" in errors


def test_two_processes_share_a_feed(
    run: Run, app: Any, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    """And the second one takes all over when the first one ends."""
    app(PRINT)
    first, second = run("--share"), run("--share")
    for n in range(2):
        feedapi_publisher.append(0, {"n": n})
    first_seen = _any_line(first, second)
    assert first_seen == "MARK 0"
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIMEOUT) == 0
    end = feedapi_publisher.append(0, {"n": 2})
    deadline = time.monotonic() + TIMEOUT
    while _cursor(tmp_path) != end:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.send_signal(signal.SIGTERM)
    assert _end(second)[0] == 0


def _any_line(*processes: subprocess.Popen[bytes]) -> str:
    """The next line that one of the processes prints."""
    streams = [process.stdout for process in processes if process.stdout is not None]
    ready, _, _ = select.select(streams, [], [], TIMEOUT)
    return str(ready[0].readline().decode().strip())


def test_nothing_but_json_is_written_where_log_records_are_json(
    run: Run, app: Any, feedapi_publisher: Publisher
) -> None:
    """Not by the command, by Python or by the server of the monitor, whose words have colours."""
    app(
        "import warnings\n"
        "async def handle(batch):\n"
        "    warnings.warn('old')\n"
        "    for event in batch.events: raise ValueError\n"
    )
    feedapi_publisher.append(0, {"n": 1})
    code, errors = _end(run("--log-format", "json", "--monitor", "127.0.0.1:0"))
    records = [json.loads(line) for line in errors.splitlines()]
    assert code == 3
    loggers = {record["logger"] for record in records}
    assert {"feedapi", "py.warnings", "uvicorn.error"} <= loggers
    assert not any("\x1b" in str(value) for record in records for value in record.values())
    last = "the handler failed with ValueError (app.py, line 4)"
    own = [record for record in records if record["logger"] == "feedapi"]
    assert (own[-1]["level"], own[-1]["message"]) == ("ERROR", last)


def test_log_records_as_json(run: Run, app: Any, feedapi_publisher: Publisher) -> None:
    app(
        "import logging\n"
        + PRINT.replace("print(", "logging.getLogger('shop').info('x %s',")
        .replace(", flush=True", "")
        .replace('"MARK", ', "")
    )
    feedapi_publisher.append(0, {"n": 1})
    code, errors = _end(run("--no-follow", "--log-format", "json"))
    assert code == 0, errors
    records = [json.loads(line) for line in errors.splitlines()]
    (own,) = [record for record in records if record["logger"] == "shop"]
    assert (own["level"], own["message"]) == ("INFO", "x 1")


def test_cat_has_a_monitor_too(spawn: Spawn, feedapi_publisher: Publisher) -> None:
    process = spawn("cat", feedapi_publisher.url, "--follow", "--monitor", "127.0.0.1:0")
    url = re.findall(r"http://\S+", _await_stderr(process, "monitor at "))[0]
    assert httpx.get(f"{url}status").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == 143


def test_its_help_says_the_exit_codes(feedapi: Feedapi) -> None:
    shown = " ".join(feedapi("run", "--help").stdout.split())
    assert "3 when the handler failed" in shown
