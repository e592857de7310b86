"""How long an outage is waited for (R14). On virtual time."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedUnavailableError,
    Health,
    NoProgressError,
    RetryPolicy,
)
from feedapi_client.testing import Publisher, faults
from tests.consumer.test_drained import lag
from tests.testing.virtual_time import HOUR, asgi_client

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
REFUSALS = pytest.mark.parametrize(
    "fault",
    [faults.Status(503), faults.Status(429), faults.Status(503, headers={"retry-after": "1"})],
    ids=["503", "429", "503 with Retry-After"],
)


def two_events() -> Publisher:
    publisher = Publisher()
    publisher.extend(0, [{"n": 0}, {"n": 1}])
    return publisher


def consumer_of(publisher: Publisher, **options: Any) -> FeedConsumer:
    """A consumer with the defaults of the library."""
    return FeedConsumer("http://feed/feed", http=asgi_client(publisher), **options)


@REFUSALS
async def test_r14_a_following_consumer_that_has_been_running_outlives_an_outage(
    fault: Any,
) -> None:
    publisher, handled, all_handled = two_events(), [], anyio.Event()

    async def handle(batch: Batch) -> None:
        handled.extend(event.json()["n"] for event in batch.events)
        if handled[-1:] == [2]:
            all_handled.set()

    async with consumer_of(publisher) as consumer, anyio.create_task_group() as tasks:
        publisher.fail(fault, on="any", times=None)
        tasks.start_soon(consumer.run, handle)
        await anyio.sleep(2 * HOUR)
        assert consumer.health().live
        assert not consumer.health().ready
        publisher.heal()
        publisher.append(0, {"n": 2})
        with anyio.fail_after(HOUR):
            await all_handled.wait()
        await anyio.sleep(600)  # a discovery has come, too
        assert consumer.health() == Health(live=True, ready=True)
        consumer.stop()
    assert handled == [0, 1, 2]


@REFUSALS
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"retry": RetryPolicy(give_up_after=700)}, 700),
        ({"follow": False}, 300),
        ({"follow": False, "retry": RetryPolicy(give_up_after=20)}, 20),
    ],
    ids=["set", "without follow", "set, without follow"],
)
async def test_r14_who_gives_up_an_outage_and_when(
    fault: Any, options: dict[str, Any], seconds: float
) -> None:
    publisher, began = two_events(), anyio.current_time()
    async with consumer_of(publisher, **options) as consumer:
        publisher.fail(fault, on="any", times=None)
        with pytest.raises(FeedUnavailableError):
            await consumer.run(lambda batch: batch.commit())
    assert seconds <= anyio.current_time() - began < seconds + 60


@pytest.mark.parametrize(
    ("status", "on", "seconds"),
    [
        (503, "discovery", 300),
        (429, "discovery", 300),
        (503, "fetch", 300),
        # First because the feed is asked too often, then as any other failure.
        (429, "fetch", 600),
    ],
)
async def test_r14_an_entry_gives_up(status: int, on: Any, seconds: float) -> None:
    publisher, began = Publisher(), anyio.current_time()
    publisher.fail(status, on=on, times=None)
    with pytest.raises(FeedUnavailableError):
        await consumer_of(publisher, start="last").__aenter__()
    assert seconds <= anyio.current_time() - began < seconds + 60


@pytest.mark.parametrize(
    ("options", "ends"),
    [({}, False), ({"retry": RetryPolicy(give_up_after=100)}, True), ({"follow": False}, True)],
    ids=["following", "set", "without follow"],
)
async def test_r06_a_replica_that_stays_behind_an_end_is_given_up_only_by_who_gives_up(
    options: dict[str, Any], ends: bool
) -> None:
    publisher = Publisher(dialect="v2-draft", page_size=5)
    publisher.extend(0, [{"n": n} for n in range(5)])
    lag(publisher, 5)
    found = None
    async with consumer_of(publisher, **options) as consumer:
        with anyio.move_on_after(2 * HOUR):
            try:
                async for _ in consumer:
                    pass
            except NoProgressError as error:
                found = error
    assert (found is not None) == ends


def test_r14_what_counts_is_derived_from_the_policy() -> None:
    def of(**options: Any) -> float | None:
        return FeedConsumer("http://feed/feed", **options).retry.give_up_after

    assert of() == math.inf
    assert of(follow=False) == 300
    for seconds in (0.0, 5.0, math.inf):
        assert of(retry=RetryPolicy(give_up_after=seconds)) == seconds
        assert of(retry=RetryPolicy(give_up_after=seconds), follow=False) == seconds
