"""``feedapi cursors`` on the stream of a relay that is exactly once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import orjson
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import Relay, StreamCursorStore
from feedapi_client.model import FeedKey
from feedapi_client.testing import Publisher
from tests import warm
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.ledgers import SMALL, relayed, store_of
from tests.positions import stand

pytestmark = pytest.mark.anyio


async def cursors(*arguments: str) -> tuple[int, str]:
    """Run ``feedapi cursors``; return its exit code and what it printed."""
    return await feedapi("cursors", *arguments)


async def feedapi(*arguments: str) -> tuple[int, str]:
    """Run a command in a process of its own; return its exit code and what it printed."""
    command = [sys.executable, "-m", "feedapi_client.cli", *arguments]
    done = await anyio.to_thread.run_sync(
        lambda: warm.run(
            command,
            capture_output=True,
            text=True,
            timeout=SAFETY_NET,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
        )
    )
    return done.returncode, done.stdout + done.stderr


async def relay(url: str, broker: Broker, feed_name: str | None = None) -> int:
    store = store_of(broker, "events")
    async with FeedConsumer(
        url, store=store, follow=False, limits=SMALL, feed_name=feed_name
    ) as consumer:
        return (await Relay(consumer, broker.publisher).run()).events


async def test_positions_are_listed_exported_and_seed_another_stream(
    broker: Broker,
    feedapi_publisher: Publisher,
    tmp_path: Path,
) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    await broker.create(once=True)
    assert await relay(url, broker) == 10
    place = f"liftbridge://{broker.address}/{broker.name}"
    code, text = await cursors("ls", "--store", place)
    assert (code, f"default @ {url}" in text) == (0, True), text
    code, text = await cursors("ls", "--store", place, "--json")
    [found] = orjson.loads(text)["feeds"]
    assert (found["url"], [row["partition"] for row in found["positions"]]) == (url, [0])
    code, text = await cursors("show", "--store", place, url, "--json")
    [shown] = orjson.loads(text)["feeds"]
    assert (code, shown) == (0, found)
    export = str(tmp_path / "cursors.json")
    code, text = await cursors("export", "--store", place)
    assert code == 0, text
    await anyio.Path(export).write_text(text)
    code, text = await cursors("import", export, "--store", f"{place}-new?replicas=1")
    assert (code, "1 position imported" in text) == (0, True), text
    new = StreamCursorStore(broker.publisher, broker.api, f"{broker.name}-new")
    seeded = await new.load(FeedKey(url))
    assert seeded[0].cursor == found["positions"][0]["cursor"]
    code, text = await cursors("set", "3", "abc", "--store", f"{place}-new")
    assert code == 0, text
    seeded = await new.load(FeedKey(url))
    assert stand(seeded)[3] == ("abc", "open")


async def test_a_feed_that_moved_is_continued_exactly_once(
    broker: Broker,
    feedapi_publisher: Publisher,
) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    await broker.create(once=True)
    moved = url.replace("127.0.0.1", "localhost")
    store = f"liftbridge://{broker.address}/{broker.name}"
    await relay(url, broker)
    code, text = await cursors("move", url, moved, "--store", store)
    assert (code, f"default @ {moved}: 1 position moved here" in text) == (0, True), text
    feedapi_publisher.append(0, {"n": 10})
    assert await relay(moved, broker) == 1
    # With a name it may move without a command.
    assert await relay(moved, broker, feed_name="payments") == 0
    feedapi_publisher.append(0, {"n": 11})
    assert await relay(url, broker, feed_name="payments") == 1
    assert await relayed(broker) == list(range(12))
    code, text = await cursors("ls", "--store", store)
    assert "default @ feed:payments" in text


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("leases", "the store keeps no leases"),
        ("quarantine", "a stream holds no quarantine: give what the relay's --quarantine names"),
    ],
)
async def test_what_a_ledger_does_not_hold_is_said_in_one_line(
    broker: Broker, command: str, says: str
) -> None:
    code, text = await feedapi(
        command, "ls", "--store", f"liftbridge://{broker.address}/{broker.name}"
    )
    assert (code, len(text.splitlines()), says in text) == (1, 1, True), text


@pytest.mark.parametrize("way", ["set", "import"])
async def test_positions_that_retention_removed_are_set_again(
    broker: Broker,
    feedapi_publisher: Publisher,
    tmp_path: Path,
    way: str,
) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(10)])
    url = feedapi_publisher.url or ""
    await broker.create(once=True)
    place = ("--store", f"liftbridge://{broker.address}/{broker.name}")
    await relay(url, broker)
    assert await relay(url, broker) == 0
    export = str(tmp_path / "cursors.json")
    code, text = await cursors("export", *place)
    assert code == 0, text
    await anyio.Path(export).write_text(text)
    [feed] = orjson.loads(text)["feeds"]
    cursor = feed["positions"][0]["cursor"]
    await broker.expire(5)
    code, text = await cursors("ls", *place)
    assert (code, "cursors set" in text) == (1, True), text
    feedapi_publisher.append(0, {"n": 10})
    arguments = ["import", export] if way == "import" else ["set", "0", cursor, url]
    code, text = await cursors(*arguments, *place)
    assert (code, "only these partitions have a position: 0. Any other" in text) == (0, True), text
    assert await relay(url, broker) == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("liftbridge://h:1", "HOST:PORT of a broker"),
        ("liftbridge:///s", "HOST:PORT of a broker"),
        ("liftbridge://h:1/a b", "name of a stream"),
        ("liftbridge://h:1/s?partition=x", "HOST:PORT of a broker"),
        ("liftbridge://h:1/s?nonsense=1", "'nonsense' is no option"),
        ("liftbridge://h:1/s?token_env=X", "need the scheme liftbridges"),
        ("liftbridges://h:1/s?token_env=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is not set"),
        ("liftbridges://h:1/s?ca=/no/such/file", "can't be read"),
        ("liftbridge://me:secret@h:1/s", "HOST:PORT of a broker"),
    ],
)
async def test_a_url_that_names_no_stream_is_a_usage_error(url: str, says: str) -> None:
    code, text = await cursors("ls", "--store", url)
    assert (code, says in text) == (2, True), text
    assert "secret" not in text
