"""A driver, partitions and batches without a feed: what the tests of the runtime's parts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from feedapi_client.runtime.buffer import BufferBudget
from feedapi_client.runtime.driver import ConsumerSettings, Driver

from feedapi_client import CursorStore, FeedInfo, FeedKey, Limits, Partition, RetryPolicy
from feedapi_client.lineage.planner import Entry, Planner
from feedapi_client.model import Event
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.positions import Positions

URL = "http://127.0.0.1:9/feed"
KEY = FeedKey(URL, "default")
LIMITS = Limits()
RETRY = RetryPolicy(base_delay=0.001, max_delay=0.001)
SAFETY_LIMIT = 60.0
"""Seconds after which a test that waits for a condition fails. No test depends on it."""


def batch(cursor: str, *, events: int = 1, size: int = 100) -> CheckpointedEvents:
    """Events that a checkpoint closed."""
    return CheckpointedEvents([Event() for _ in range(events)], cursor, size)


def runtime_partition(buffer: BufferBudget | None = None, **limits: Any) -> RuntimePartition:
    """Partition 0, never read and without a position."""
    return RuntimePartition(
        Entry(0),
        buffer=buffer or BufferBudget(LIMITS.max_buffered_bytes),
        limits=Limits(**limits),
        retry=RETRY,
    )


def listing(*partitions: Partition | int) -> FeedInfo:
    """A discovery that lists these partitions."""
    listed = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return FeedInfo("v2-draft", {p.id: p for p in listed})


def driver_of(
    store: CursorStore, info: FeedInfo | None = None, *, shared: bool = False, **settings: Any
) -> Driver:
    """A driver after a first discovery. What the planner decided then is not carried out yet."""
    chosen: dict[str, Any] = {
        "key": KEY,
        "start": "first",
        "ordered": True,
        "follow": True,
        "partitions": None,
        "on_error": "raise",
        "stream": False,
        "limits": LIMITS,
        "retry": RETRY,
    }
    planner = Planner(feed=URL, shared=shared)
    planner.load({})
    driver = Driver(
        ConsumerSettings(**{**chosen, **settings}),
        planner,
        Positions(store, KEY, timeout=SAFETY_LIMIT),
    )
    info = info or listing(0)
    driver.update_info(info)
    driver.planner.discover(info)
    return driver


@contextmanager
def safety_limit() -> Iterator[None]:
    """Fail a test that would wait for ever."""
    with anyio.fail_after(SAFETY_LIMIT):
        yield
