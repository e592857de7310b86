"""Events and positions that are larger than a broker takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from feedapi_client import FeedConsumer, FetchOptions
from feedapi_client.liftbridge import (
    MessageTooLargeError,
    OutgoingBatch,
    Relay,
    StreamCursorStore,
)
from feedapi_client.liftbridge.ledger_url import open_ledger as open_ledger_url
from feedapi_client.model import Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import warm
from tests.liftbridge.broker import SETTINGS, Broker, open_broker, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.ledgers import (
    FORMATS,
    KEY,
    MODES,
    batches,
    open_ledger,
    relayed,
    store_for,
    store_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LARGE = "x" * 1_200_000


@pytest.fixture
def large_feed(feedapi_publisher: Publisher) -> Publisher:
    """Twenty events, of which number 7 is over the limit of every broker."""
    events = [{"n": n, "text": LARGE if n == 7 else ""} for n in range(20)]
    feedapi_publisher.extend(0, events)
    return feedapi_publisher


def consumer_of(feed: Publisher, store: CursorStore) -> FeedConsumer:
    limits = Limits(max_batch_bytes=500_000)
    return FeedConsumer(feed.url or "", store=store, follow=False, limits=limits)


async def numbers(broker: Broker, mode: str) -> list[int]:
    """The numbers of the events in a stream."""
    return await (broker.numbers() if mode == MODES[0] else relayed(broker))


@pytest.mark.parametrize("mode", MODES)
async def test_an_event_over_the_limit_ends_the_relay_with_its_place_and_freezes_nothing(
    broker: Broker, mode: str, large_feed: Publisher
) -> None:
    await broker.create(once=mode != MODES[0])
    with anyio.fail_after(SAFETY_NET):
        for _ in range(2):
            async with consumer_of(large_feed, store_for(mode, broker)) as consumer:
                with pytest.raises(MessageTooLargeError, match=r"partition 0: event number \d+"):
                    await Relay(consumer, broker.publisher, broker.name).run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["skip", "quarantine"])
async def test_an_event_over_the_limit_is_put_aside_with_a_report(
    broker: Broker, mode: str, policy: str, large_feed: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create(once=mode != MODES[0])
    quarantine = MemoryQuarantineStore()
    with caplog.at_level(logging.WARNING):
        async with consumer_of(large_feed, store_for(mode, broker)) as consumer:
            done = await Relay(
                consumer,
                broker.publisher,
                broker.name,
                on_oversized="skip" if policy == "skip" else quarantine,
            ).run()
    assert await numbers(broker, mode) == [n for n in range(20) if n != 7]
    assert (done.events, done.put_aside) == (19, 1)
    assert "event number" in caplog.text
    assert "too large" in caplog.text
    kept = await quarantine.page()
    assert [event.raw.startswith(b'{"n":7,') for event in kept] == [True] * (policy != "skip")


# NATS and a broker of which one takes larger messages than the other


LARGE_NATS = ("8MB", 2**20)
LARGE_BOTH = ("32MB", 2**25)
SMALL_NATS = ("65536", 2**20)
SMALL_BROKER = ("1MB", 65536)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LiftbridgeServer]]:
    """Brokers by the limits of NATS and their own. Each is started once."""
    require_liftbridge()
    with ExitStack() as stack:

        @cache
        def start(max_payload: str, replicated: int) -> LiftbridgeServer:
            configuration = tmp_path_factory.mktemp("nats") / "nats.conf"
            configuration.write_text(f"max_payload: {max_payload}\n")
            nats = stack.enter_context(NatsServer("-c", str(configuration)))
            settings = {**SETTINGS, "clustering.replication.max.bytes": replicated}
            return stack.enter_context(LiftbridgeServer(nats.url, settings=settings))

        yield start


@pytest.mark.parametrize("mode", MODES)
async def test_an_event_that_only_the_broker_finds_too_large_is_put_aside_too(
    limited: Any, name: str, mode: str, large_feed: Publisher
) -> None:
    async with open_broker(limited(*LARGE_NATS), name, max_message_bytes=None) as broker:
        await broker.create(once=mode != MODES[0])
        async with FeedConsumer(
            large_feed.url or "",
            store=store_for(mode, broker),
            follow=False,
            # A batch for each event.
            limits=Limits(max_batch_bytes=1) if mode == "batch" else None,
            fetch=FetchOptions(page_size_hint=1) if mode == "batch" else None,
            retry=RetryPolicy(give_up_after=SAFETY_NET),
        ) as consumer:
            await Relay(consumer, broker.publisher, name, on_oversized="skip").run()
        found = await numbers(broker, mode)
        assert [n for n in range(20) if n not in found] == [7]
        # The ones behind it were stored before the broker refused it, and come again.
        assert list(dict.fromkeys(reversed(found))) == [n for n in reversed(range(20)) if n != 7]


async def run_command(feed: Publisher, broker: Broker, *arguments: str) -> tuple[int, str]:
    """Run ``feedapi relay``; return its exit code, and what it said."""
    command = [sys.executable, "-m", "feedapi_client.cli", "relay", feed.url or "", "--create"]
    command += ["--nats", broker.nats_url, "--api", broker.address, "--stream", broker.name]
    run = partial(warm.run, [*command, "--quiet", *arguments], capture_output=True, text=True)
    done = await anyio.to_thread.run_sync(run)
    return done.returncode, done.stderr


@pytest.mark.parametrize("mode", MODES)
async def test_the_command_relays_what_fits_where_all_limits_are_raised(
    limited: Any, name: str, tmp_path: Path, large_feed: Publisher, mode: str
) -> None:
    once = ["--exactly-once", mode, "--max-batch-bytes", "1000000"]
    kept = ["--store", str(tmp_path / "r.db")] if mode == MODES[0] else once
    async with open_broker(limited(*LARGE_BOTH), name) as broker:
        done = await run_command(large_feed, broker, *kept, "--max-message-bytes", "2000000")
        assert done == (0, "")
        assert await numbers(broker, mode) == list(range(20))


async def test_batches_that_do_not_fit_are_made_smaller_as_the_error_of_the_command_says(
    limited: Any, name: str, feedapi_publisher_factory: Any
) -> None:
    async with open_broker(limited(*SMALL_BROKER), name) as broker:
        for page_size, expected, more in ((100, 1, []), (10, 0, ["--max-batch-bytes", "30000"])):
            feed = feedapi_publisher_factory(1, page_size=page_size)
            feed.extend(0, [{"n": n, "x": "x" * 1500} for n in range(100)])
            code, said = await run_command(feed, broker, "--exactly-once", "batch", *more)
            assert (code, "or --max-batch-bytes" in said) == (expected, expected == 1), said
            broker.name += "-smaller"
        broker.name = f"{name}-smaller"
        assert await relayed(broker) == list(range(100))


@pytest.mark.parametrize("format", FORMATS)
async def test_a_message_of_many_megabytes_is_read_back(
    limited: Any, name: str, feedapi_publisher: Publisher, format: str
) -> None:
    feedapi_publisher.extend(0, [{"n": 0, "text": "x" * 20_000_000}])
    limits = Limits(max_line_bytes=2**25, max_batch_bytes=2**24)
    async with open_broker(limited(*LARGE_BOTH), name, max_message_bytes=2**25) as broker:
        await broker.create(once=True)
        for _ in range(2):  # the second one reads the stream
            async with FeedConsumer(
                feedapi_publisher.url or "",
                store=store_of(broker, format),
                follow=False,
                limits=limits,
            ) as consumer:
                await Relay(consumer, broker.publisher).run()
        assert await relayed(broker) == [0]


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_below_nats_gets_a_batch_once_more_and_no_oftener(
    limited: Any, name: str, mode: str, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.extend(0, [{"n": n, "x": "x" * 70_000 * (n % 4 == 0)} for n in range(100)])
    async with open_broker(limited(*SMALL_BROKER), name) as broker:
        await broker.create(once=mode != MODES[0])
        async with consumer_of(feedapi_publisher, store_for(mode, broker)) as consumer:
            done = await Relay(consumer, broker.publisher, name, on_oversized="skip").run()
        assert (done.events, done.put_aside) == (75, 25)
        assert sorted(set(await numbers(broker, mode))) == [n for n in range(100) if n % 4]
        assert await broker.newest() < 2 * 75 + 10


@pytest.mark.parametrize("small", [SMALL_NATS, SMALL_BROKER], ids=["NATS", "broker"])
async def test_positions_are_divided_by_the_limit_that_is_smaller(
    limited: Any, name: str, small: tuple[str, int]
) -> None:
    async with open_broker(limited(*small), name) as broker:
        await broker.create(once=True)
        store = StreamCursorStore(broker.publisher, broker.api, name, snapshot_every=1)
        await store.load(KEY)
        positions = {partition: Position("c" * 1100) for partition in range(400)}
        await store.save(KEY, positions)
        for revision in range(2, 500, 100):
            positions[7] = positions[7].advance(f"d{revision}")
            await store.save(KEY, {7: positions[7]})
        assert await store_of(broker).load(KEY) == positions
        # A command, which does not ask NATS for its limit.
        async with open_ledger_url(f"liftbridge://{broker.address}/{name}") as ledger:
            replaced = await ledger.replace(KEY, positions)
        assert await store_of(broker).load(KEY) == positions | replaced


async def test_an_event_that_fits_only_without_its_position_is_followed_by_it(
    broker: Broker,
) -> None:
    store = await open_ledger(broker, "events")
    event = b'"' + b"x" * (broker.publisher.message_limit - 2_000) + b'"'
    position = Position("c" * 1500)
    await store.save(KEY, {0: position}, transaction=OutgoingBatch(0, "c", [b'"y"', event]))
    assert await store_of(broker).load(KEY) == {0: position}
    [batch] = await batches(broker)
    assert [relayed.raw for relayed in batch.events] == [b'"y"', event]
