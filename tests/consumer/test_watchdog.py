"""The watchdog: what hangs is found, told, and restarted where that is sound.

On virtual time, so that "within `Limits.stall_timeout`" can be said exactly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedKey,
    Health,
    Limits,
    MemoryCursorStore,
    Position,
    ProblemName,
    RetryPolicy,
    Share,
)
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import consume, wait_until
from tests.testing.virtual_time import HOUR, asgi_client, run_in_virtual_time

STALL = 100.0
LIMITS = Limits(
    stall_timeout=STALL,
    request_timeout=HOUR,
    commit_timeout=HOUR,
    slot_timeout=HOUR,
    discovery_interval=10.0,
)
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class HangingTransport(httpx.AsyncBaseTransport):
    """Hangs in the requests for which `hangs` is true, whatever time limit they carry."""

    def __init__(self, publisher: Publisher) -> None:
        self.inner = httpx.ASGITransport(publisher.asgi)
        self.hangs: Callable[[httpx.Request], bool] = lambda _: False
        self.shielded = False
        self.hung = 0
        self.hung_at = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.hangs(request):
            await self.hang_on_purpose()
        return await self.inner.handle_async_request(request)

    async def hang_on_purpose(self) -> None:
        self.hung += 1
        self.hung_at = anyio.current_time()
        with anyio.CancelScope(shield=self.shielded):
            await anyio.sleep(50 * HOUR if self.shielded else float("inf"))


class Setting:
    """A consumer of a publisher, both in this process."""

    def __init__(self, partitions: int = 1, **options: Any) -> None:
        self.publisher = Publisher(partitions)
        for partition in range(partitions):
            self.publisher.extend(partition, [{"n": n} for n in range(3)])
        self.transport = HangingTransport(self.publisher)
        self.http = httpx.AsyncClient(
            transport=self.transport, base_url="http://feed", timeout=None
        )
        retry = RetryPolicy(give_up_after=None)
        self.consumer = FeedConsumer(
            "http://feed/feed",
            http=self.http,
            **{"limits": LIMITS, "retry": retry, **options},
        )

    async def run(
        self,
        handle: Callable[[Batch], Awaitable[object]],
        body: Callable[[], Awaitable[None]],
        **options: Any,
    ) -> None:
        """Run the handler beside `body`, and stop when that is done."""
        async with self.http, self.consumer, anyio.create_task_group() as tasks:

            async def consume() -> None:
                await self.consumer.run(handle, **options)

            tasks.start_soon(consume)
            await body()
            tasks.cancel_scope.cancel()

    async def until(self, condition: Callable[[Health], object]) -> Health:
        """Wait until the health satisfies a condition."""
        with anyio.fail_after(HOUR):
            while not condition(health := self.consumer.health()):  # noqa: ASYNC110
                await anyio.sleep(0.5)
        return health


async def nothing(_: Batch) -> None:
    """Handle a batch."""


def names(health: Health) -> list[str]:
    return [problem.name for problem in health.problems]


def is_fetch(request: httpx.Request) -> bool:
    return bool(request.url.query)


def records(caplog: pytest.LogCaptureFixture, name: ProblemName) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "problem", None) == name]


async def stuck_since(setting: Setting, name: ProblemName, began: float) -> Health:
    """Check that a hang is no problem before `stall_timeout`, and is one after exactly that."""
    await anyio.sleep_until(began + STALL - 1)
    assert name not in names(setting.consumer.health())
    await anyio.sleep_until(began + STALL + 0.01)
    health = setting.consumer.health()
    assert name in names(health)
    return health


# ---------------------------------------------------------------------- what hangs is found


@BACKENDS
def test_a_request_that_hangs_is_found_and_made_again(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        setting = Setting()
        setting.transport.hangs = lambda request: is_fetch(request) and not setting.transport.hung
        seen: list[int] = []

        async def handle(batch: Batch) -> None:
            seen.extend(event.json()["n"] for event in batch.events)

        async def body() -> None:
            await setting.until(lambda _: setting.transport.hung)
            await anyio.sleep_until(setting.transport.hung_at + STALL - 1)
            assert setting.consumer.health() == Health(live=True, ready=True)
            await setting.until(lambda _: seen == [0, 1, 2])
            assert setting.consumer.health().problems == ()
            assert anyio.current_time() < setting.transport.hung_at + STALL + 5

        await setting.run(handle, body)

    run_in_virtual_time(test, backend)
    (record,) = records(caplog, ProblemName.FETCH_STUCK)
    assert (record.partition, record.feed) == (0, "http://feed/feed")  # type: ignore[attr-defined]
    assert "hang_on_purpose" in record.getMessage(), "the stack of its task"


@BACKENDS
def test_a_request_that_not_even_a_restart_ends_needs_a_new_process(backend: str) -> None:
    async def test() -> None:
        setting = Setting()
        setting.transport.shielded = True
        setting.transport.hangs = is_fetch

        async def body() -> None:
            await setting.until(lambda health: not health.live)
            waited = anyio.current_time() - setting.transport.hung_at
            assert waited >= 2 * STALL
            assert names(setting.consumer.health())[0] == "fetch-stuck"
            assert setting.transport.hung == 1

        await setting.run(nothing, body)

    run_in_virtual_time(test, backend)


@BACKENDS
def test_a_handler_that_hangs_is_found_and_left_alone(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        setting = Setting()
        began: list[float] = []
        release = anyio.Event()

        async def hang_in_handler(batch: Batch) -> None:
            began.append(anyio.current_time())
            await release.wait()

        async def body() -> None:
            await setting.until(lambda _: began)
            assert setting.consumer.status()[0].wait == "application"
            health = await stuck_since(setting, ProblemName.HANDLER_STUCK, began[0])
            assert not health.live
            assert not health.ready
            assert health.problems[0].partition == 0
            status = setting.consumer.status()[0]
            assert "has had a batch" in (status.error or "")
            assert status.state == "reading"
            assert status.caught_up is False
            assert status.since == status.in_flight_since
            await anyio.sleep(3 * STALL)
            assert len(began) == 1
            release.set()
            await setting.until(lambda health: health == Health(live=True, ready=True))
            assert setting.consumer.status()[0].error is None

        await setting.run(hang_in_handler, body)

    run_in_virtual_time(test, backend)
    (record,) = records(caplog, ProblemName.HANDLER_STUCK)
    assert record.levelno == logging.ERROR
    assert "hang_in_handler" in record.getMessage()


@BACKENDS
def test_a_loop_over_batches_that_hangs_is_found(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        setting = Setting()
        began: list[float] = []

        async def hang_in_loop() -> None:
            async for _ in setting.consumer.batches():
                began.append(anyio.current_time())
                await anyio.sleep_forever()

        async with setting.http, setting.consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(hang_in_loop)
            await setting.until(lambda _: began)
            await stuck_since(setting, ProblemName.HANDLER_STUCK, began[0])
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)
    (record,) = records(caplog, ProblemName.HANDLER_STUCK)
    assert "hang_in_loop" in record.getMessage()


@BACKENDS
def test_a_loop_over_events_may_take_long_for_a_batch_and_not_for_an_event(backend: str) -> None:
    async def test() -> None:
        setting = Setting()
        taken = 0

        async def slow_loop() -> None:
            nonlocal taken
            async for _ in setting.consumer:
                taken += 1
                await anyio.sleep(STALL * 0.8 if taken < 3 else float("inf"))

        async with setting.http, setting.consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(slow_loop)
            await setting.until(lambda _: taken)
            while taken < 3:
                assert setting.consumer.health() == Health(live=True, ready=True)
                await anyio.sleep(STALL / 20)
            health = await setting.until(lambda health: health.problems)
            assert names(health) == ["handler-stuck"]
            assert "has had an event for" in health.problems[0].text
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)


class HangingStore(MemoryCursorStore):
    """Hangs in `load` or `save`."""

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self.hangs = hangs
        self.hung_at: float | None = None

    async def hang_in_store(self) -> None:
        self.hung_at = anyio.current_time()
        await anyio.sleep_forever()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        if self.hangs == "load":
            await self.hang_in_store()
        return await super().load(feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        if self.hangs == "save" and any(each.replaces is not None for each in positions.values()):
            await self.hang_in_store()
        await super().save(feed, positions)


@BACKENDS
def test_a_save_that_hangs_is_found(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        store = HangingStore("save")
        setting = Setting(store=store)

        async def body() -> None:
            await setting.until(lambda _: store.hung_at is not None)
            assert setting.consumer.status()[0].wait == "save"
            health = await stuck_since(setting, ProblemName.STORE_STUCK, store.hung_at or 0.0)
            assert not health.live
            assert health.problems[0].partition == 0
            assert "handler-stuck" not in names(health), "the handler has returned"

        await setting.run(nothing, body)  # the save is shielded until Limits.commit_timeout

    run_in_virtual_time(test, backend)
    (record,) = records(caplog, ProblemName.STORE_STUCK)
    assert "hang_in_store" in record.getMessage()


@BACKENDS
def test_a_store_that_hangs_on_entry_is_found(backend: str) -> None:
    async def test() -> None:
        store = HangingStore("load")
        setting = Setting(store=store)

        async def enter() -> None:
            async with setting.consumer:
                raise AssertionError("entered")

        async with setting.http, anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
            await setting.until(lambda _: store.hung_at is not None)
            assert names(setting.consumer.health()) == ["not-open"]
            assert "loading cursors" in setting.consumer.health().problems[0].text
            health = await stuck_since(setting, ProblemName.STORE_STUCK, store.hung_at or 0.0)
            assert not health.live
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)


@BACKENDS
def test_a_discovery_that_hangs_is_found_and_made_again(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        setting = Setting()
        discoveries = 0

        def hangs(request: httpx.Request) -> bool:
            nonlocal discoveries
            discoveries += not is_fetch(request)
            return not is_fetch(request) and discoveries == 2

        setting.transport.hangs = hangs

        async def body() -> None:
            await setting.until(lambda _: setting.transport.hung)
            await anyio.sleep_until(setting.transport.hung_at + STALL - 1)
            assert setting.consumer.health().problems == ()
            failed = await setting.until(names)
            assert not failed.ready
            assert failed.live
            await setting.until(lambda health: health == Health(live=True, ready=True))
            assert discoveries > 2

        await setting.run(nothing, body)

    run_in_virtual_time(test, backend)
    (record,) = records(caplog, ProblemName.DISCOVERY_STUCK)
    assert "hang_on_purpose" in record.getMessage()


@BACKENDS
def test_a_partition_that_nobody_will_read_again_is_found_and_read(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No known fault does this. Here the scheduler is made to forget a partition."""

    async def test() -> None:
        setting = Setting()
        seen: list[int] = []

        async def handle(batch: Batch) -> None:
            seen.extend(event.json()["n"] for event in batch.events)

        async def body() -> None:
            await setting.until(lambda _: setting.consumer.status()[0].wait == "pause")
            session = setting.consumer._session
            assert session is not None
            session.driver.scheduler.forget(session.driver.partitions[0])
            assert setting.consumer.status()[0].wait is None
            setting.publisher.append(0, {"n": 3})
            await anyio.sleep(STALL / 2)
            assert seen == [0, 1, 2]
            await setting.until(lambda _: seen == [0, 1, 2, 3])

        await setting.run(handle, body)

    run_in_virtual_time(test, backend)
    assert len(records(caplog, ProblemName.STALLED)) == 1


@BACKENDS
def test_an_end_that_the_application_never_commits_is_found(backend: str) -> None:
    async def test() -> None:
        setting = Setting()
        setting.publisher.split(0, 1, method="starts-after")

        async def forgets_to_commit() -> None:
            async for _ in setting.consumer.batches():
                pass

        async with setting.http, setting.consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(forgets_to_commit)
            await setting.until(lambda health: names(health) == ["uncommitted"])
            assert setting.consumer.status()[0].wait == "commit"
            assert setting.consumer.status()[1].wait == "parent"
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)


@BACKENDS
def test_a_partition_that_another_instance_reads_is_no_problem(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        store, share = MemoryCursorStore(), Share()
        first = Setting(2, store=store, share=share)

        async def body() -> None:
            other = FeedConsumer(
                "http://feed/feed", http=first.http, store=store, share=share, limits=LIMITS
            )
            async with other, anyio.create_task_group() as tasks:
                tasks.start_soon(other.run, nothing)
                await both_work(other)
                tasks.cancel_scope.cancel()

        async def both_work(other: FeedConsumer) -> None:
            statuses = first.consumer.status
            await first.until(lambda _: "lease" in [statuses()[0].wait, statuses()[1].wait])
            for _ in range(20):
                await anyio.sleep(STALL / 3)
                assert first.consumer.health() == Health(live=True, ready=True)
                assert other.health() == Health(live=True, ready=True)

        await first.run(nothing, body)

    run_in_virtual_time(test, backend)
    assert [record for record in caplog.records if hasattr(record, "problem")] == []


class HangingLeases(MemoryCursorStore):
    hung_at: float | None = None

    async def look(self, feed: FeedKey, last: Any = None) -> Any:
        if last is not None:  # which is none while it starts
            self.hung_at = self.hung_at or anyio.current_time()
            await anyio.sleep_forever()
        return await super().look(feed)


@BACKENDS
def test_leases_that_hang_are_found(backend: str) -> None:
    async def test() -> None:
        store = HangingLeases()
        setting = Setting(store=store, share=Share())

        async def body() -> None:
            await setting.until(lambda _: store.hung_at is not None)
            health = await stuck_since(setting, ProblemName.STORE_STUCK, store.hung_at or 0.0)
            assert "looking at the leases" in health.problems[0].text

        await setting.run(nothing, body)

    run_in_virtual_time(test, backend)


@BACKENDS
def test_nothing_is_reported_of_a_consumer_that_works(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither while events come, nor while none come for long, nor at a handler that is slow."""

    async def test() -> None:
        setting = Setting(3)

        async def handle(batch: Batch) -> None:
            await anyio.sleep(STALL * 0.9)

        async def body() -> None:
            for _ in range(20):
                await anyio.sleep(STALL / 3)
                assert setting.consumer.health() == Health(live=True, ready=True)
            setting.publisher.split(0, 2, method="starts-after")
            for _ in range(20):
                await anyio.sleep(STALL / 3)
                assert setting.consumer.health() == Health(live=True, ready=True)

        await setting.run(handle, body)

    run_in_virtual_time(test, backend)
    assert [record for record in caplog.records if hasattr(record, "problem")] == []


@pytest.mark.anyio
async def test_an_event_loop_that_is_blocked_is_found_by_another_thread() -> None:
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})
    async with asgi_client(publisher) as http:
        consumer = FeedConsumer("http://feed/feed", http=http, limits=Limits(stall_timeout=0.05))
        found = threading.Event()

        def watch() -> None:
            while "event-loop-blocked" not in names(consumer.health()):
                pass
            found.set()

        async def block(_: Batch) -> None:
            threading.Thread(target=watch, daemon=True).start()
            assert found.wait(60)
            consumer.stop()

        async with consumer:
            await consumer.run(block)


# ---------------------------------------------------------------------- health


@pytest.mark.anyio
async def test_the_health_of_a_consumer_from_its_making_to_its_end() -> None:
    publisher = Publisher(1)
    async with asgi_client(publisher) as http:
        consumer = FeedConsumer("http://feed/feed", http=http)
        seen = [consumer.health()]
        async with consumer:
            seen.append(consumer.health())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consumer.run, nothing)
                with anyio.fail_after(60):
                    while not consumer.health().ready:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                seen.append(consumer.health())
                consumer.stop()
            seen.append(consumer.health())
        seen.append(consumer.health())
    assert [names(health) for health in seen] == [
        ["not-open"],
        ["not-iterating"],
        [],
        ["not-iterating"],
        ["not-open"],
    ]
    assert [health.live for health in seen] == [True] * 5
    assert [health.ready for health in seen] == [False, False, True, False, False]


@pytest.mark.anyio
async def test_a_handler_that_ends_the_iteration_is_no_health() -> None:
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})

    async def fail(_: Batch) -> None:
        raise ValueError("no such customer")

    async with (
        asgi_client(publisher) as http,
        FeedConsumer("http://feed/feed", http=http) as consumer,
    ):
        with suppress(ValueError):
            await consumer.run(fail)
        health = consumer.health()
        assert not health.live
        assert names(health) == ["failed"]
        assert health.problems[0].partition == 0
        assert "the handler failed with ValueError" in health.problems[0].text
        assert "ValueError" in (consumer.status()[0].error or "")


def test_no_problem_of_many_is_left_out() -> None:
    async def test() -> None:
        setting = Setting(150)

        async def body() -> None:
            setting.transport.hangs = _refuse
            health = await setting.until(lambda health: len(health.problems) == 150)
            assert health.live
            assert {problem.partition for problem in health.problems} == set(range(150))

        await setting.run(nothing, body)

    def _refuse(request: httpx.Request) -> bool:
        if is_fetch(request):
            raise httpx.ConnectError("refused")
        return False

    run_in_virtual_time(test)


@pytest.mark.anyio
async def test_a_blocked_event_loop_is_named_and_no_request_is_blamed(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1)
    publisher.fail(faults.Hang(), times=None)
    async with (
        consume(publisher, limit={"stall_timeout": 0.6}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle_nothing)
        await wait_until(lambda: [r for r in publisher.requests if r.kind == "fetch"])
        time.sleep(1.7)  # noqa: ASYNC251 - what is tested

        def is_reported() -> bool:
            assert "fetch-stuck" not in [each.name for each in consumer.health().problems]
            reports = consumer.status().reports
            return any("event loop did not run" in each for each in reports)

        await wait_until(is_reported)
        tasks.cancel_scope.cancel()


async def handle_nothing(batch: Batch) -> None: ...
