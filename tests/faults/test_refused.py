"""A port that refuses connections for a while, on entry and within a run; and Retry-After."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import anyio
import pytest

from feedapi_client import FeedClient, FeedConsumer, FeedUnavailableError, SyncFeedClient
from tests.faults.drive import LIMITS, RETRY, SAFETY_LIMIT, consume
from tests.faults.feed import EVENTS, FaultyFeed, Operation
from tests.faults.outcomes import DELIVERED, Fault
from tests.faults.responses import whole
from tests.faults.server import Gate, RawServer
from tests.faults.statuses import RETRY_AFTER

pytestmark = pytest.mark.anyio


@contextmanager
def on_warning(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` whenever the library logs a warning."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            act()

    handler = Handler(logging.WARNING)
    log = logging.getLogger("feedapi_client")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def healthy() -> FaultyFeed:
    return FaultyFeed("fetch", whole, 0)


async def test_r14_connections_refused_on_entry_are_retried(server: RawServer) -> None:
    site = server.add(healthy().reply)
    with Gate(server.port) as gate, on_warning(gate.open):
        ended = await consume(f"http://127.0.0.1:{gate.port}{site.path}", "entry", follow=False)
    assert ended.outcome == DELIVERED


async def test_r14_connections_refused_within_a_run_are_retried(server: RawServer) -> None:
    site = server.add(healthy().reply)
    delivered: Counter[int] = Counter()
    with Gate(server.port) as gate:
        gate.open()
        url = f"http://127.0.0.1:{gate.port}{site.path}"
        # A page of one event waits for the application, so that the others are still to be fetched.
        async with FeedConsumer(url, follow=False, retry=RETRY, limits=LIMITS) as consumer:
            gate.close()
            with on_warning(gate.open), anyio.fail_after(SAFETY_LIMIT):
                async for event in consumer:
                    delivered[event.json()["n"]] += 1
    assert delivered == Counter(EVENTS)


async def test_r14_a_refused_connection_is_an_error_of_one_call(server: RawServer) -> None:
    once = replace(RETRY, give_up_after=0.0)
    with Gate(server.port) as gate:
        url = f"http://127.0.0.1:{gate.port}/feed"
        async with FeedClient(url, retry=once) as client:
            with pytest.raises(FeedUnavailableError, match="no answer"):
                await client.fetch(0, "_first")
        with (
            SyncFeedClient(url, retry=once) as sync_client,
            pytest.raises(FeedUnavailableError, match="no answer"),
        ):
            sync_client.fetch(0, "_first").read()


async def test_r14_retry_after_is_no_way_around_the_backoff(server: RawServer) -> None:
    patient = replace(RETRY, base_delay=0.05, max_delay=0.1, give_up_after=0.2)

    async def cell(operation: Operation, fault: Fault) -> None:
        site = server.add(FaultyFeed(operation, fault.spoil, None).reply)
        ended = await consume(site.url, operation, follow=False, retry=patient)
        assert ended.outcome == "FeedUnavailableError", fault.name
        # Some eight with pauses as the policy says; hundreds without a pause.
        assert len(site.requests) <= 40, fault.name

    operations: tuple[Operation, ...] = ("entry", "fetch", "last")
    async with anyio.create_task_group() as cells:
        for operation in operations:
            for fault in RETRY_AFTER:
                cells.start_soon(cell, operation, fault)
