"""Events and positions that are larger than a broker takes, on both brokers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import orjson
import pytest

from feedapi_client import FeedConsumer, FetchOptions, MemoryCursorStore
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgeGrpcPublisher,
    LiftbridgePublisher,
    MessageTooLargeError,
    OutgoingBatch,
    Relay,
    RelayReader,
    StreamCursorStore,
)
from feedapi_client.model import Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import warm
from tests.liftbridge.clusters import SETTINGS, Cluster, require_liftbridge
from tests.liftbridge.contract.reading import KEY, relayed
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MODES = ["at least once", "batch", "events"]
LARGE = "x" * 1_200_000


@pytest.fixture
def large_feed(feedapi_publisher: Publisher) -> Publisher:
    """Twenty events, of which number 7 is over the limit of every broker."""
    events = [{"n": n, "text": LARGE if n == 7 else ""} for n in range(20)]
    feedapi_publisher.extend(0, events)
    return feedapi_publisher


def store_for(
    mode: str, publisher: LiftbridgePublisher, api: LiftbridgeApi, name: str
) -> CursorStore:
    if mode == "at least once":
        return MemoryCursorStore()
    return StreamCursorStore(publisher, api, name, format=mode)


def consumer_of(feed: Publisher, store: CursorStore) -> FeedConsumer:
    limits = Limits(max_batch_bytes=500_000)
    return FeedConsumer(feed.url or "", store=store, follow=False, limits=limits)


async def numbers(api: LiftbridgeApi, name: str, mode: str) -> list[int]:
    """The numbers of the events in a stream."""
    newest = (await api.partition_metadata(name)).newest_offset
    if mode == "at least once":
        messages = api.subscribe(name, until=newest)
        return [orjson.loads(message.value)["n"] async for message in messages]
    batches = RelayReader(api, name, until=newest)
    return [event.json()["n"] async for batch in batches for event in batch.events]


@pytest.mark.parametrize("mode", MODES)
async def test_an_event_over_the_limit_ends_the_relay_with_its_place_and_freezes_nothing(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    mode: str,
    large_feed: Publisher,
) -> None:
    await api.create_stream(name, concurrency_control=mode != "at least once")
    with anyio.fail_after(SAFETY_NET):
        for _ in range(2):
            async with consumer_of(large_feed, store_for(mode, publisher, api, name)) as consumer:
                with pytest.raises(MessageTooLargeError, match=r"partition 0: event number \d+"):
                    await Relay(consumer, publisher, name).run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["skip", "quarantine"])
async def test_an_event_over_the_limit_is_put_aside_with_a_report(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    mode: str,
    policy: str,
    large_feed: Publisher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await api.create_stream(name, concurrency_control=mode != "at least once")
    quarantine = MemoryQuarantineStore()
    with caplog.at_level(logging.WARNING):
        async with consumer_of(large_feed, store_for(mode, publisher, api, name)) as consumer:
            done = await Relay(
                consumer,
                publisher,
                name,
                on_oversized="skip" if policy == "skip" else quarantine,
            ).run()
    assert await numbers(api, name, mode) == [n for n in range(20) if n != 7]
    assert (done.events, done.put_aside) == (19, 1)
    assert "event number" in caplog.text
    assert "too large" in caplog.text
    kept = await quarantine.page()
    assert [event.raw.startswith(b'{"n":7,') for event in kept] == [True] * (policy != "skip")


class Limited(NamedTuple):
    """NATS and a broker of which one takes larger messages than the other."""

    server: LiftbridgeServer
    nats: NatsServer


@contextmanager
def limited(folder: Path, max_payload: str, **settings: int) -> Iterator[Limited]:
    require_liftbridge()
    configuration = folder / "nats.conf"
    configuration.write_text(f"max_payload: {max_payload}\n")
    with (
        NatsServer("-c", str(configuration)) as nats,
        LiftbridgeServer(nats.url, settings={**SETTINGS, **settings}) as server,
    ):
        yield Limited(server, nats)


@pytest.fixture(scope="module")
def large_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    with limited(tmp_path_factory.mktemp("nats"), "8MB") as made:
        yield made


@pytest.fixture(scope="module")
def large_limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    replicated = {"clustering.replication.max.bytes": 2**25}
    with limited(tmp_path_factory.mktemp("nats"), "32MB", **replicated) as made:
        yield made


@pytest.fixture(scope="module")
def small_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    with limited(tmp_path_factory.mktemp("nats"), "65536") as made:
        yield made


@pytest.fixture(scope="module")
def small_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    replicated = {"clustering.replication.max.bytes": 65536}
    with limited(tmp_path_factory.mktemp("nats"), "1MB", **replicated) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
async def test_an_event_that_only_the_broker_finds_too_large_is_put_aside_too(
    large_nats: Limited, name: str, mode: str, large_feed: Publisher
) -> None:
    async with (
        LiftbridgeApi(large_nats.server.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(large_nats.nats.url, max_message_bytes=None) as publisher,
    ):
        await api.create_stream(name, concurrency_control=mode != "at least once")
        async with FeedConsumer(
            large_feed.url or "",
            store=store_for(mode, publisher, api, name),
            follow=False,
            # A batch for each event.
            limits=Limits(max_batch_bytes=1) if mode == "batch" else None,
            fetch=FetchOptions(page_size_hint=1) if mode == "batch" else None,
            retry=RetryPolicy(give_up_after=SAFETY_NET),
        ) as consumer:
            await Relay(consumer, publisher, name, on_oversized="skip").run()
        found = await numbers(api, name, mode)
        assert [n for n in range(20) if n not in found] == [7]
        # The ones behind it were stored before the broker refused it, and come again.
        assert list(dict.fromkeys(reversed(found))) == [n for n in reversed(range(20)) if n != 7]


@pytest.mark.parametrize("mode", MODES)
async def test_the_command_relays_what_fits_where_all_limits_are_raised(
    large_limits: Limited, name: str, tmp_path: Path, large_feed: Publisher, mode: str
) -> None:
    once = ["--exactly-once", mode, "--max-batch-bytes", "1000000"]
    command = [sys.executable, "-m", "feedapi_client.cli", "relay", large_feed.url or ""]
    command += ["--nats", large_limits.nats.url, "--api", large_limits.server.address, "--create"]
    command += ["--stream", name, "--max-message-bytes", "2000000"]
    command += ["--store", str(tmp_path / "r.db")] if mode == "at least once" else once
    done = await anyio.to_thread.run_sync(lambda: warm.run(command, capture_output=True))
    assert done.returncode == 0, done.stderr.decode()
    async with LiftbridgeApi(large_limits.server.address, timeout=SAFETY_NET) as api:
        assert await numbers(api, name, mode) == list(range(20))


@pytest.mark.parametrize("format", ["batch", "events"])
async def test_a_message_of_many_megabytes_is_read_back(
    large_limits: Limited, name: str, feedapi_publisher: Publisher, format: str
) -> None:
    feedapi_publisher.extend(0, [{"n": 0, "text": "x" * 20_000_000}])
    limits = Limits(max_line_bytes=2**25, max_batch_bytes=2**24)
    async with (
        LiftbridgeApi(large_limits.server.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(large_limits.nats.url, max_message_bytes=2**25) as publisher,
    ):
        await api.create_stream(name, concurrency_control=True)
        for _ in range(2):  # the second one reads the stream
            store = StreamCursorStore(publisher, api, name, format=format)
            async with FeedConsumer(
                feedapi_publisher.url or "", store=store, follow=False, limits=limits
            ) as consumer:
                await Relay(consumer, publisher).run()
        assert await numbers(api, name, format) == [0]


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_below_nats_gets_a_batch_once_more_and_no_oftener(
    small_broker: Limited, name: str, mode: str, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.extend(0, [{"n": n, "x": "x" * 70_000 * (n % 4 == 0)} for n in range(100)])
    async with (
        LiftbridgeApi(small_broker.server.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(small_broker.nats.url) as publisher,
    ):
        await api.create_stream(name, concurrency_control=mode != "at least once")
        store = store_for(mode, publisher, api, name)
        async with consumer_of(feedapi_publisher, store) as consumer:
            done = await Relay(consumer, publisher, name, on_oversized="skip").run()
        assert (done.events, done.put_aside) == (75, 25)
        found = await numbers(api, name, mode)
        assert sorted(set(found)) == [n for n in range(100) if n % 4]
        stored = (await api.partition_metadata(name)).newest_offset + 1
        assert stored <= 2 * 75 + 10


@pytest.mark.parametrize("way", ["nats", "grpc"])
async def test_positions_are_divided_by_the_limit_that_nats_has(
    small_nats: Limited, name: str, way: str
) -> None:
    async with (
        LiftbridgeApi(small_nats.server.address, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(small_nats.nats.url)
        if way == "nats"
        else LiftbridgeGrpcPublisher(small_nats.server.address) as publisher,
    ):
        await api.create_stream(name, concurrency_control=True)
        store = StreamCursorStore(publisher, api, name, snapshot_every=1)
        await store.load(KEY)
        positions = {partition: Position("c" * 1100) for partition in range(400)}
        await store.save(KEY, positions)
        for revision in range(2, 500, 100):
            positions[7] = positions[7].advance(f"d{revision}")
            await store.save(KEY, {7: positions[7]})
        assert await StreamCursorStore(publisher, api, name).load(KEY) == positions


async def test_a_snapshot_of_long_cursors_fits_into_messages(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = StreamCursorStore(publisher, api, name)
    await store.load(KEY)
    positions = {partition: Position(f"{partition:04}" * 275) for partition in range(1300)}
    await store.save(KEY, positions)
    assert await StreamCursorStore(publisher, api, name).load(KEY) == positions
    assert await relayed_nothing(api, name)


async def relayed_nothing(api: LiftbridgeApi, name: str) -> bool:
    newest = (await api.partition_metadata(name)).newest_offset
    return await relayed(api, name, 1, until=newest) == []


async def test_an_event_that_fits_only_without_its_position_is_followed_by_it(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = StreamCursorStore(publisher, api, name, format="events")
    await store.load(KEY)
    event = b'"' + b"x" * (publisher.message_limit - 2_000) + b'"'
    position = Position("c" * 1500)
    await store.save(KEY, {0: position}, transaction=OutgoingBatch(0, "c", [b'"y"', event]))
    assert await StreamCursorStore(publisher, api, name).load(KEY) == {0: position}
    newest = (await api.partition_metadata(name)).newest_offset
    [batch] = [batch async for batch in RelayReader(api, name, until=newest)]
    assert [relayed.raw for relayed in batch.events] == [b'"y"', event]
