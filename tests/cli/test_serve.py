"""``feedapi serve``."""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import Any

import orjson
import pytest

from feedapi_client import SyncFeedClient
from feedapi_client.cli.serve import ExampleFeed
from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn


def _url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
def test_it_serves_a_feed_and_prints_its_url(spawn: Spawn, dialect: str) -> None:
    process = spawn("serve", "--dialect", dialect, "--partitions", 3, "--history", 30, "--rate", 0)
    with SyncFeedClient(_url(process), v1_partitions=3) as client:
        info = client.discover()
        pages = [client.fetch(partition, "_first").read() for partition in info.partitions]
    assert info.dialect == dialect
    events = [event.json() for page in pages for event in page.events]
    assert len(events) == 30
    assert events[0].keys() == {"entity", "n", "type"}


def test_new_events_are_published_while_it_runs(spawn: Spawn) -> None:
    process = spawn("serve", "--partitions", 1, "--history", 0, "--rate", 200)
    url = _url(process)
    reader = spawn("cat", url, "--follow", "--raw")
    assert reader.stdout is not None
    assert reader.stdout.readline().startswith(b'{"entity":"order-0","n":1')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_exit_code_0(spawn: Spawn, number: signal.Signals) -> None:
    process = spawn("serve")
    url = _url(process)
    process.send_signal(number)
    _, hints = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert f"feedapi discover {url}".encode() in hints
    assert b"Traceback" not in hints


def test_a_port_in_use_is_reported_on_one_line(feedapi: Feedapi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = feedapi("serve", "--port", port)
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1 can't be used" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_bearer_token_comes_from_the_environment(
    spawn: Spawn, feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEED_AUTH", "Bearer token-of-the-day")
    url = _url(spawn("serve", "--bearer-env", "FEED_AUTH"))
    assert feedapi("discover", url).exit_code == 1
    assert feedapi("discover", url, "--auth-env", "FEED_AUTH").exit_code == 0


def test_closed_partitions_say_where_they_end(spawn: Spawn, feedapi: Feedapi) -> None:
    """R6: a consumer goes on with the children at once."""
    url = _url(spawn("serve", "--split-every", 0.2, "--history", 20, "--rate", 0))
    closed: list[Any] = []
    while not closed:
        found = orjson.loads(feedapi("discover", url, "--json").stdout)["partitions"]
        closed = [each for each in found if each["closed"]]
    assert all(each["last_cursor"] for each in closed)


def test_splits_use_both_methods_and_lose_no_event() -> None:
    publisher = Publisher(2)
    feed = ExampleFeed(publisher)
    for _ in range(4):
        feed.publish(20)
        feed.split()
    assert len(publisher.payloads()) == 80
    lineage = publisher.partitions.values()
    assert any(p.starts_after is not None for p in lineage)
    assert any(p.cursor_from for p in lineage)


def test_no_more_than_64_partitions_are_open() -> None:
    publisher = Publisher(1)
    feed = ExampleFeed(publisher)
    for _ in range(100):
        feed.split()
    assert len(publisher.open_partitions()) == 64
