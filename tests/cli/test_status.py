"""``feedapi status``: what a monitor says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from feedapi_client.cli.status_view import Rates, age, view
from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn

START = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "\x1b[31mred\u202e"


def consumer(at: float = 0.0, **partition: Any) -> dict[str, Any]:
    return {
        "feed": "https://service/myfeed",
        "name": "shop",
        "time": (START + timedelta(seconds=at)).isoformat(),
        "health": {"live": True, "ready": True, "problem_count": 0, "problems": []},
        "states": {"reading": 1},
        "partitions": [{"id": 0, "state": "reading", **partition}],
        "reports": [],
    }


def shown(*looks: dict[str, Any], rows: int | None = None, **options: Any) -> str:
    rates = Rates()
    for look in looks:
        rates.add(look)
    screen = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    screen.print(view(looks[-1], rates, rows=rows, **options))
    screen.file.close()
    return screen.export_text()


def status(*consumers: dict[str, Any]) -> dict[str, Any]:
    return {"consumers": list(consumers), "blocked": None}


def test_the_rate_is_that_between_two_looks() -> None:
    text = shown(status(consumer(0, events=10)), status(consumer(2, events=30)))
    assert "10.0 events/s" in text
    assert re.search(r"0 +reading +10\.0", text)


def test_what_needs_attention_comes_first_and_the_rest_is_counted() -> None:
    partitions = [{"id": id, "state": "caught up", "caught_up": True} for id in range(50)]
    partitions[40] = {"id": 40, "state": "retrying", "error": "status 503", "fetch_failures": 3}
    many = consumer() | {"partitions": partitions}
    lines = [line.strip() for line in shown(status(many), rows=20).splitlines()]
    assert lines[3].startswith("40")
    assert "status 503" in lines[3]
    assert len(lines) <= 20
    assert "38 more" in lines[-1]


def test_problems_and_a_blocked_event_loop_are_shown() -> None:
    problem = {"name": "handler-stuck", "partition": 3, "text": "it hangs", "since": None}
    health = {"live": False, "ready": False, "problem_count": 296, "problems": [problem] * 100}
    sick = consumer() | {"health": health}
    text = shown(status(sick) | {"blocked": {"text": "the event loop is blocked"}})
    assert "not live" in text
    assert "handler-stuck partition 3: it hangs" in text
    assert "and 291 more problems" in text
    assert "the event loop is blocked" in text


def test_r21_text_from_elsewhere_is_escaped() -> None:
    text = shown(status(consumer(error=HOSTILE, wait=HOSTILE)), failure=HOSTILE)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[31mred" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (3, "3 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_counts_of_states_are_apart() -> None:
    shop = {**consumer(), "states": {"caught up": 10, "behind": 7}}
    assert "10 caught up   7 behind" in shown(status(shop))


def test_nobody_answers(feedapi: Feedapi) -> None:
    done = feedapi("status", "127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.startswith("feedapi: no monitor answers at 127.0.0.1:1: ")


def test_a_feed_is_no_monitor(feedapi: Feedapi, feedapi_publisher: Publisher) -> None:
    done = feedapi("status", feedapi_publisher.url)
    assert done.exit_code == 1
    assert "is no monitor. Of a feed, 'cursors ls URL --lag --store STORE'" in done.stderr


@pytest.fixture
def monitored(spawn: Spawn, feedapi_publisher: Publisher) -> Callable[[], str]:
    """Start a consumer with a monitor, and return its address."""

    def start() -> str:
        feedapi_publisher.append(0, {"n": 1})
        process = spawn("cat", feedapi_publisher.url, "--follow", "--monitor", "127.0.0.1:0")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        return process.stderr.readline().decode().rpartition("//")[2].strip().rstrip("/")

    return start


@pytest.mark.slow
def test_from_a_monitor(feedapi: Feedapi, monitored: Callable[[], str]) -> None:
    address = monitored()
    done = feedapi("status", address)
    assert done.exit_code == 0, done.stderr
    assert "default @ http://" in done.stdout
    assert feedapi("status", f"http://{address}/", "--once").exit_code == 0
    assert json.loads(feedapi("status", address, "--json").stdout)["process"]["pid"] > 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_on_a_terminal_it_is_live_until_ctrl_c(spawn: Spawn, monitored: Callable[[], str]) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = spawn(
        "status",
        monitored(),
        "--interval",
        0.1,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={"TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )
    os.close(theirs)
    text = b""
    with suppress(OSError):
        while text.count(b"events/s") < 3:
            text += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while os.read(ours, 65536):
            pass
    os.close(ours)
    assert process.wait(TIMEOUT) == 0


def test_the_source_of_a_monitor_may_be_any_path_of_it() -> None:
    from feedapi_client.cli.command import CommandError
    from feedapi_client.cli.options import Connection
    from feedapi_client.cli.status import RunningMonitor

    with pytest.raises(CommandError, match="no monitor answers"):
        asyncio.run(RunningMonitor("http://127.0.0.1:1/app/feed", Connection()).load())
