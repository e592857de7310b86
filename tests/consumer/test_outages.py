"""How long an outage is waited for (R14). On virtual time."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from feedapi_client import (
    FeedConsumer,
    FeedUnavailableError,
    Health,
    NoProgressError,
    RetryPolicy,
)
from feedapi_client.testing import Publisher, faults
from tests.consumer.test_drained import lag
from tests.testing.virtual_time import HOUR, asgi_client, run_in_virtual_time

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
REFUSALS = pytest.mark.parametrize(
    "fault",
    [faults.Status(503), faults.Status(429), faults.Status(503, headers={"retry-after": "1"})],
    ids=["503", "429", "503 with Retry-After"],
)


class Outage:
    """A feed of two events that goes down, and a consumer of it."""

    def __init__(self, fault: Any, **options: Any) -> None:
        self.publisher = Publisher()
        self.publisher.extend(0, [{"n": 0}, {"n": 1}])
        self._fault = fault
        self.http = asgi_client(self.publisher)
        self.consumer = FeedConsumer("http://feed/feed", http=self.http, **options)
        self.numbers: list[int] = []
        self.all_handled = anyio.Event()

    def begin(self) -> None:
        self.publisher.fail(self._fault, on="any", times=None)

    async def handle(self, batch: Any) -> None:
        self.numbers += [event.json()["n"] for event in batch.events]
        if self.numbers[-1:] == [2]:
            self.all_handled.set()

    async def run(self) -> float:
        """Consume until that ends, with the outage from the first event on. Return the seconds."""
        began = anyio.current_time()
        async with self.http, self.consumer as consumer:
            self.begin()
            await consumer.run(self.handle)
        return anyio.current_time() - began


@BACKENDS
@REFUSALS
def test_r14_a_following_consumer_that_has_been_running_outlives_an_outage(
    fault: Any, backend: str
) -> None:
    async def repair(outage: Outage) -> None:
        await anyio.sleep(2 * HOUR)
        assert not outage.consumer.health().ready
        assert outage.consumer.health().live
        outage.publisher.heal()
        outage.publisher.append(0, {"n": 2})
        with anyio.fail_after(HOUR):
            await outage.all_handled.wait()
        await anyio.sleep(600)  # a discovery has come, too
        assert outage.consumer.health() == Health(live=True, ready=True)
        outage.consumer.stop()

    async def test() -> None:
        outage = Outage(fault)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repair, outage)
            await outage.run()
        assert outage.numbers == [0, 1, 2]

    run_in_virtual_time(test, backend)


@BACKENDS
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
def test_r14_who_gives_up_an_outage_and_when(
    fault: Any, options: dict[str, Any], seconds: float, backend: str
) -> None:
    async def test() -> None:
        outage, began = Outage(fault, **options), anyio.current_time()
        with pytest.raises(FeedUnavailableError):
            await outage.run()
        assert seconds <= anyio.current_time() - began < seconds + 60

    run_in_virtual_time(test, backend)


@BACKENDS
@pytest.mark.parametrize(
    ("fault", "on", "seconds"),
    [
        (faults.Status(503), "discovery", 300),
        (faults.Status(429), "discovery", 300),
        (faults.Status(503), "fetch", 300),
        # First because the feed is asked too often, then as any other failure.
        (faults.Status(429), "fetch", 600),
    ],
    ids=["503 for the discovery", "429 for the discovery", "503 for an end", "429 for an end"],
)
def test_r14_an_entry_gives_up(fault: Any, on: Any, seconds: float, backend: str) -> None:
    async def test() -> None:
        publisher, began = Publisher(), anyio.current_time()
        publisher.fail(fault, on=on, times=None)
        http = asgi_client(publisher)
        async with http:
            with pytest.raises(FeedUnavailableError):
                async with FeedConsumer("http://feed/feed", http=http, start="last"):
                    pass
        assert seconds <= anyio.current_time() - began < seconds + 60

    run_in_virtual_time(test, backend)


@BACKENDS
@pytest.mark.parametrize(
    ("options", "ends"),
    [({}, False), ({"retry": RetryPolicy(give_up_after=100)}, True), ({"follow": False}, True)],
    ids=["following", "set", "without follow"],
)
def test_r06_a_replica_that_stays_behind_an_end_is_given_up_only_by_who_gives_up(
    options: dict[str, Any], ends: bool, backend: str
) -> None:
    publisher = Publisher(dialect="v2-draft", page_size=5)
    publisher.extend(0, [{"n": n} for n in range(5)])
    lag(publisher, 5)

    async def test() -> None:
        http = asgi_client(publisher)
        found = None
        async with http, FeedConsumer("http://feed/feed", http=http, **options) as consumer:
            with anyio.move_on_after(2 * HOUR):
                try:
                    async for _ in consumer:
                        pass
                except NoProgressError as error:
                    found = error
            assert (found is not None) == ends

    run_in_virtual_time(test, backend)


def test_r14_what_counts_is_derived_from_the_policy() -> None:
    def of(**options: Any) -> float | None:
        return FeedConsumer("http://feed/feed", **options).retry.give_up_after

    assert of() == math.inf
    assert of(follow=False) == 300
    for seconds in (0.0, 5.0, math.inf):
        assert of(retry=RetryPolicy(give_up_after=seconds)) == seconds
        assert of(retry=RetryPolicy(give_up_after=seconds), follow=False) == seconds
