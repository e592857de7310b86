"""Every fault, over real sockets: what the rules name comes out, with a bounded number of requests.

A row of the table is run on asyncio and on trio, with each operation that the fault can spoil: the
first discovery, a later one, a fetch, and a fetch from ``_last``. All cells of a row run at once.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from tests.faults.discoveries import DISCOVERIES
from tests.faults.drive import MAX_REQUESTS, Ended, call, call_sync, check_error, consume
from tests.faults.feed import OPERATIONS, FaultyFeed, Operation, Spoil
from tests.faults.matrix import FAULTS
from tests.faults.outcomes import DELIVERED, EMPTY, PAGE, Fault
from tests.faults.responses import whole
from tests.faults.server import RawServer

pytestmark = pytest.mark.anyio

_QUICK = ("connection", "content")
ROWS = [
    pytest.param(
        fault,
        marks=() if fault.group in _QUICK else pytest.mark.slow,
        id=f"{fault.group}: {fault.name[:40]}",
    )
    for fault in FAULTS
]


def _feed(operation: Operation, spoil: Spoil, outcome: str) -> FaultyFeed:
    return FaultyFeed(operation, spoil, 2 if outcome in (DELIVERED, PAGE) else None)


async def _consumer(
    server: RawServer, operation: Operation, spoil: Spoil, expected: str, follow: bool = False
) -> None:
    feed = _feed(operation, spoil, expected)
    site = server.add(feed.reply)
    ended = await consume(site.url, operation, follow=follow or operation == "running")
    assert ended.outcome == expected, _told(operation, expected, ended)
    assert feed.spoiled, f"{operation}: the fault did not happen"
    check_error(ended, site.url)
    if operation != "running":
        assert len(site.requests) <= MAX_REQUESTS, f"{operation}: {len(site.requests)} requests"


def _told(operation: str, expected: str, ended: Ended) -> str:
    return f"{operation}: {expected} expected, {ended.outcome} found ({ended.error})"


@pytest.mark.parametrize("fault", ROWS)
async def test_r10_r14_a_consumer_outlives_a_fault_or_names_it(
    server: RawServer, fault: Fault
) -> None:
    async with anyio.create_task_group() as cells:
        for operation in OPERATIONS:
            expected = fault.outcomes.of(operation)
            # An empty page is the end of the feed for a consumer that doesn't follow.
            follow = fault.outcomes is EMPTY and operation == "fetch"
            cells.start_soon(_consumer, server, operation, fault.spoil, expected, follow)


@pytest.mark.parametrize("fault", ROWS)
async def test_r14_one_call_of_a_client_names_the_fault(server: RawServer, fault: Fault) -> None:
    expected = fault.outcomes.call

    async def cell(operation: Operation) -> None:
        site = server.add(_feed(operation, fault.spoil, expected).reply)
        ended = await call(site.url, operation)
        assert ended.outcome == expected, _told(operation, expected, ended)
        check_error(ended, site.url)
        assert len(site.requests) <= MAX_REQUESTS

    async with anyio.create_task_group() as cells:
        for operation in ("fetch", "last"):
            cells.start_soon(cell, operation)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("fault", ROWS)
async def test_r14_one_call_of_the_sync_client_names_the_fault(
    server: RawServer, fault: Fault
) -> None:
    expected = fault.outcomes.call

    async def cell(operation: Operation) -> None:
        site = server.add(_feed(operation, fault.spoil, expected).reply)
        with anyio.fail_after(20):
            ended = await anyio.to_thread.run_sync(
                call_sync, site.url, operation, abandon_on_cancel=True
            )
        assert ended.outcome == expected, _told(operation, expected, ended)
        check_error(ended, site.url)
        assert len(site.requests) <= MAX_REQUESTS

    async with anyio.create_task_group() as cells:
        for operation in ("fetch", "last"):
            cells.start_soon(cell, operation)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISCOVERIES)
async def test_r12_a_hostile_discovery_is_an_error_on_entry_and_passes_later(
    server: RawServer, name: str
) -> None:
    body, expected = DISCOVERIES[name]
    async with anyio.create_task_group() as cells:
        cells.start_soon(_consumer, server, "entry", lambda _: whole(body), expected)
        cells.start_soon(_consumer, server, "running", lambda _: whole(body), DELIVERED)
