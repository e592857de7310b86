"""Run one cell of the matrix: a consumer or a client against a feed with one fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import anyio

from feedapi_client import (
    FeedClient,
    FeedConsumer,
    FeedError,
    Limits,
    RetryPolicy,
    SyncFeedClient,
)
from tests.faults.feed import EVENTS, LAST, NEW_EVENTS, Operation
from tests.faults.outcomes import DELIVERED, PAGE

SAFETY_LIMIT = 60.0
"""Seconds after which a cell fails. No outcome depends on it."""
LIMITS = Limits(
    poll_interval=0.005,
    max_poll_interval=0.02,
    discovery_interval=0.03,
    settle_time=0.03,
    request_timeout=0.4,
    stream_idle_timeout=SAFETY_LIMIT,
    max_line_bytes=64 * 1024,
    max_buffered_bytes=256 * 1024,
    max_discovery_bytes=1 << 20,
)
RETRY = RetryPolicy(base_delay=0.002, max_delay=0.01, give_up_after=SAFETY_LIMIT)
MAX_REQUESTS = 60
"""Requests that a cell may take, apart from the polls of a consumer that follows."""
EXPECTED: dict[Operation, Counter[int]] = {
    "entry": Counter(EVENTS),
    "fetch": Counter(EVENTS),
    "last": Counter(EVENTS[LAST:]),
    "running": Counter((*EVENTS, *NEW_EVENTS)),
}


@dataclass(frozen=True)
class Ended:
    """How a cell ended: `DELIVERED`, `PAGE` or the class of an error; and that error."""

    outcome: str
    error: FeedError | None = None


async def consume(url: str, operation: Operation, *, follow: bool, **options: Any) -> Ended:
    """Consume the feed up to its last event. With `follow`, leave when all have been delivered."""
    delivered: Counter[int] = Counter()
    settings: dict[str, Any] = {
        "limits": LIMITS,
        "retry": RETRY,
        "start": "last" if operation == "last" else "first",
        "follow": follow,
        **options,
    }
    try:
        with anyio.fail_after(SAFETY_LIMIT):
            async with FeedConsumer(url, **settings) as consumer:
                async for event in consumer:
                    delivered[event.json()["n"]] += 1
                    if follow and delivered == EXPECTED[operation]:
                        break
    except FeedError as error:
        return Ended(type(error).__name__, error)
    assert delivered == EXPECTED[operation], f"{operation}: {sorted(delivered.elements())}"
    return Ended(DELIVERED)


async def call(url: str, operation: Operation) -> Ended:
    """Fetch one page with `FeedClient`."""
    try:
        with anyio.fail_after(SAFETY_LIMIT):
            async with FeedClient(url, limits=LIMITS, retry=RETRY) as client:
                page = await client.fetch(0, cursor_of(operation))
    except FeedError as error:
        return Ended(type(error).__name__, error)
    assert page.cursor is None or page.cursor.startswith("c")
    return Ended(PAGE)


def call_sync(url: str, operation: Operation) -> Ended:
    """Fetch one page with `SyncFeedClient`."""
    try:
        with SyncFeedClient(url, limits=LIMITS, retry=RETRY) as client:
            page = client.fetch(0, cursor_of(operation)).read()
    except FeedError as error:
        return Ended(type(error).__name__, error)
    assert page.cursor is None or page.cursor.startswith("c")
    return Ended(PAGE)


def cursor_of(operation: Operation) -> str:
    """Return the cursor that makes a fetch of the operation."""
    return "_last" if operation == "last" else "_first"


def check_error(ended: Ended, url: str) -> None:
    """Check what every error promises: it names the feed, is short, and can be printed."""
    if ended.error is None:
        return
    text = str(ended.error)
    assert url in text
    assert text.isprintable()
    assert len(text) < 1000
