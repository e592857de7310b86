"""Faults over the transport of aiohttp in the caller's client.

Broken HTTP is left out: that transport reports it as a connection that failed.
"""

from __future__ import annotations

import anyio
import httpx
import pytest
from httpx_aiohttp import AiohttpTransport

from tests.faults.drive import Ended, check_error, consume
from tests.faults.feed import OPERATIONS, FaultyFeed, Operation
from tests.faults.matrix import FAULTS
from tests.faults.outcomes import DELIVERED, EMPTY, PAGE, Fault
from tests.faults.server import RawServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROWS = [fault for fault in FAULTS if fault.group in ("connection", "content")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # aiohttp knows no other


@pytest.mark.parametrize("fault", ROWS, ids=lambda fault: f"{fault.group}: {fault.name[:40]}")
async def test_r10_r14_a_fault_over_aiohttp_is_outlived_or_named(
    server: RawServer, fault: Fault
) -> None:
    async def cell(operation: Operation) -> None:
        expected = fault.outcomes.of(operation)
        feed = FaultyFeed(operation, fault.spoil, 2 if expected in (DELIVERED, PAGE) else None)
        site = server.add(feed.reply)
        follow = operation == "running" or (fault.outcomes is EMPTY and operation == "fetch")
        async with httpx.AsyncClient(transport=AiohttpTransport()) as http:
            ended: Ended = await consume(site.url, operation, follow=follow, http=http)
        assert ended.outcome == expected, f"{operation}: {ended.outcome} ({ended.error})"
        check_error(ended, site.url)

    async with anyio.create_task_group() as cells:
        for operation in OPERATIONS:
            cells.start_soon(cell, operation)
