"""``feedapi status``: what a monitor says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn
from tests.cli.invoke import Row, play

START = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "\x1b[31mred\u202e"
Look = dict[str, Any]


def consumer(at: float = 0.0, **partition: Any) -> Look:
    return {
        "feed": "https://service/myfeed",
        "name": "shop",
        "time": (START + timedelta(seconds=at)).isoformat(),
        "health": {"live": True, "ready": True, "problem_count": 0, "problems": []},
        "states": {"caught up": 10, "reading": 7},
        "partitions": [{"id": 0, "state": "reading", **partition}],
        "reports": [],
    }


class Monitor(HTTPServer):
    """Answers with one look after the other, and again with the last one."""

    looks: list[Look]
    asked = ""
    """The path of the last request."""

    def show(self, *consumers: Look, **more: Any) -> str:
        self.looks.append({"process": {}, "consumers": [*consumers], "blocked": None, **more})
        return f"127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Monitor

    def do_GET(self) -> None:
        looks, self.server.asked = self.server.looks, self.path
        body = json.dumps(looks.pop(0) if len(looks) > 1 else looks[0]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor(("127.0.0.1", 0), _Answers) as server:
        server.looks = []
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_prints_states_and_what_needs_attention_first(
    feedapi: Feedapi, monitor: Monitor
) -> None:
    shop = consumer()
    shop["partitions"] = [{"id": id, "state": "caught up", "caught_up": True} for id in range(3)]
    shop["partitions"][2] = {"id": 2, "state": "retrying", "error": "status 503"}
    shop["partitions"][1] = {"id": 1, "state": "reading", "behind_seconds": 90, "waits_for": [0]}
    for id, seconds in ((3, 0), (4, 3), (5, 7200), (6, 200_000)):
        shop["partitions"].append({"id": id, "state": "drained", "behind_seconds": seconds})
    title, figures, head, *rows = feedapi("status", monitor.show(shop)).stdout.splitlines()
    assert (title, figures) == ("shop @ https://service/myfeed · ready", "10 caught up · 7 reading")
    assert head.split("\t")[:2] == ["partition", "state"]
    assert [row.split("\t") for row in rows] == [
        ["2", "retrying", "", "", "", "", "", "status 503"],
        ["1", "reading", "", "2 min", "", "", "partition 0", ""],
        ["0", "caught up", "", "caught up", "", "", "", ""],
        *(
            [id, "drained", "", age, "", "", "", ""]
            for id, age in (("6", "2 d"), ("5", "2 h"), ("4", "3 s"), ("3", "0 s"))
        ),
    ]


def test_problems_and_a_blocked_event_loop_are_shown(feedapi: Feedapi, monitor: Monitor) -> None:
    problem = {"name": "handler-stuck", "partition": 3, "text": "it hangs", "since": None}
    health = {"live": False, "ready": False, "problem_count": 296, "problems": [problem] * 100}
    where = monitor.show(
        consumer() | {"health": health}, blocked={"text": "the event loop is blocked"}
    )
    text = feedapi("status", where, "--once").stdout
    assert "not live" in text
    assert "handler-stuck partition 3: it hangs" in text
    assert "and 291 more problems" in text
    assert "the event loop is blocked" in text


def test_r21_text_from_elsewhere_is_escaped(feedapi: Feedapi, monitor: Monitor) -> None:
    shop = consumer(error=HOSTILE, wait=HOSTILE) | {"name": HOSTILE}
    text = feedapi("status", monitor.show(shop)).stdout
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count("\\x1b[31mred") == 3


def test_what_is_no_monitor_is_an_error(feedapi_publisher: Publisher, monitor: Monitor) -> None:
    monitor.looks.append({"answers": "but is something else"})
    said = "is no monitor. Of a feed, 'cursors ls URL --lag --store STORE'"
    rows = [
        Row("status 127.0.0.1:1", 1, "feedapi: no monitor answers at 127.0.0.1:1: "),
        Row("status http://127.0.0.1:1/app/feed", 1, "no monitor answers at 127.0.0.1:1"),
        Row("status FEED", 1, said),
        Row("status OTHER", 1, said),
    ]
    play(rows, FEED=feedapi_publisher.url, OTHER=f"127.0.0.1:{monitor.server_port}")


def test_a_monitor_without_consumers_shows_none(monitor: Monitor) -> None:
    play([Row(f"status {monitor.show()}", says="=")])


@pytest.mark.slow
def test_from_a_monitor(feedapi: Feedapi, spawn: Spawn, feedapi_publisher: Publisher) -> None:
    feedapi_publisher.append(0, {"n": 1})
    process = spawn("cat", feedapi_publisher.url, "--follow", "--monitor", "127.0.0.1:0")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    address = process.stderr.readline().decode().rpartition("//")[2].strip().rstrip("/")
    play([Row(f"status {address}", says="default @ http://")])
    assert json.loads(feedapi("status", address, "--json").stdout)["process"]["pid"] > 0


@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_on_a_terminal_it_is_live_until_ctrl_c(spawn: Spawn, monitor: Monitor) -> None:
    import pty

    many = [{"id": id, "state": "caught up"} for id in range(1, 50)]
    looks = [consumer(at=2 * at, events=20 * at) for at in range(2)]
    for look in looks:
        look["partitions"] += many
        where = monitor.show(look)
    ours, theirs = pty.openpty()
    process = spawn(
        *("status", where, "--interval", 0.1),
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={"TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )
    os.close(theirs)
    text = b""
    with suppress(OSError):
        while b"10.0 events/s" not in text:
            text += os.read(ours, 65536)
        monitor.looks[:] = [monitor.looks[0] | {"consumers": []}]
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while chunk := os.read(ours, 65536):
            text += chunk
    os.close(ours)
    assert process.wait(TIMEOUT) == 0
    shown = text.decode()
    first = shown[: shown.index("more")]
    assert re.search(r"(\d+) $", first)
    assert first.count("caught up") < 30


def test_a_monitor_may_be_below_any_path(monitor: Monitor) -> None:
    address = monitor.show(consumer())
    for target in (address, f"http://{address}/", f"http://{address}/app/feed"):
        play([Row(f"status {target} --once")])
        path = target.removeprefix("http://").removeprefix(address).rstrip("/")
        assert monitor.asked == f"{path}/status"
