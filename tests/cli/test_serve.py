"""``feedapi serve``."""

from __future__ import annotations

import signal
import socket
import subprocess

import orjson
import pytest

from feedapi_client import SyncFeedClient
from feedapi_client.cli.serve import ExampleFeed
from feedapi_client.testing import Publisher
from tests.cli.conftest import TIMEOUT, Feedapi, Spawn
from tests.cli.invoke import Row, play


def url_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


@pytest.mark.parametrize(
    ("dialect", "number"),
    [("v1", signal.SIGINT), ("v2-draft", signal.SIGTERM), ("v2-token", signal.SIGTERM)],
)
def test_it_serves_a_feed_until_a_signal(
    spawn: Spawn, dialect: str, number: signal.Signals
) -> None:
    process = spawn("serve", "--dialect", dialect, "--partitions", 3, "--history", 30, "--rate", 0)
    url = url_of(process)
    with SyncFeedClient(url, v1_partitions=3) as client:
        info = client.discover()
        pages = [client.fetch(partition, "_first").read() for partition in info.partitions]
    assert info.dialect == dialect
    events = [event.json() for page in pages for event in page.events]
    assert (len(events), events[0].keys()) == (30, {"entity", "n", "type"})
    process.send_signal(number)
    _, hints = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, b"Traceback" in hints) == (0, False)
    assert f"feedapi cat {url}".encode() in hints


def test_new_events_are_published_while_it_runs(spawn: Spawn) -> None:
    process = spawn("serve", "--partitions", 1, "--history", 0, "--rate", 200)
    reader = spawn("cat", url_of(process), "--follow", "--raw")
    assert reader.stdout is not None
    assert reader.stdout.readline().startswith(b'{"entity":"order-0","n":1')


def test_a_port_in_use_is_reported_on_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        play([Row(f"serve --port {port}", 1, f"port {port} of 127.0.0.1 can't be used")])


def test_r6_closed_partitions_have_ends(spawn: Spawn, feedapi: Feedapi) -> None:
    """A consumer goes on with the children at once."""
    url = url_of(spawn("serve", "--split-every", 0.2, "--history", 20, "--rate", 0))
    closed: list[str | None] = []
    while not closed:
        found = feedapi("discover", url, "--json").stdout
        partitions = orjson.loads(found)["partitions"]
        closed = [each["last_cursor"] for each in partitions if each["closed"]]
    assert all(closed)


def test_splits_use_both_methods_and_lose_no_event_up_to_64_partitions() -> None:
    publisher = Publisher(2)
    feed = ExampleFeed(publisher)
    for _ in range(4):
        feed.publish(20)
        feed.split()
    assert len(publisher.payloads()) == 80
    lineage = publisher.partitions.values()
    assert any(p.starts_after is not None for p in lineage)
    assert any(p.cursor_from for p in lineage)
    for _ in range(100):
        feed.split()
    assert len(publisher.open_partitions()) == 64
