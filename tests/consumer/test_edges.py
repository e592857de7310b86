"""What people have reported of other consumers: stray cancellations, idle streams, busy ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import (
    Batch,
    Event,
    FeedConsumer,
    FeedError,
    FetchOptions,
    MemoryCursorStore,
    Quarantine,
    Retry,
    RetryPolicy,
    Share,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.causes import StrayCancellationError
from feedapi_client.lineage.planner import Planner
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.testing import Publisher, Quirks
from tests.consumer.helpers import RETRY, SAFETY_LIMIT, SHORT, consume, limits

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
STREAM = FetchOptions(stream=True)
GIVES_UP_AT_ONCE = RetryPolicy(base_delay=0.001, give_up_after=0)
Chunks = Callable[[dict[str, str]], AsyncIterator[bytes]]


def event(n: int) -> bytes:
    return b'{"data":{"n":%d}}\n' % n


def checkpoint(cursor: object) -> bytes:
    return f'{{"cursor":"{cursor}"}}\n'.encode()


def numbers(batch: Batch) -> list[int]:
    return [each.json()["n"] for each in batch.events]


class Body(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk


def feed_of(page: Chunks, partitions: int = 1, auth: Any = None) -> httpx.AsyncClient:
    """A client of a feed of dialect v2-token whose fetches `page` answers, chunk by chunk."""
    listed = [{"id": str(id)} for id in range(partitions)]
    found = {"token": "t", "stream": True, "partitions": listed}

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return httpx.Response(200, content=json.dumps(found).encode())
        return httpx.Response(200, stream=Body(page(dict(request.url.params))))

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), auth=auth)


async def five_events(query: dict[str, str]) -> AsyncIterator[bytes]:
    n = int(query["cursor"]) if query["cursor"].isdigit() else 0
    yield event(n + 1) + checkpoint(n + 1) if n < 5 else checkpoint(n)


def consumer_of(http: httpx.AsyncClient, **options: Any) -> FeedConsumer:
    return FeedConsumer(
        "http://feed/feed", http=http, **{"limits": limits(), "retry": RETRY, **options}
    )


async def nothing(_: Batch) -> None:
    """Handle a batch."""


async def run(
    handle: Callable[[Batch], Awaitable[None]],
    page: Chunks = five_events,
    partitions: int = 1,
    *,
    auth: Any = None,
    on_failure: Any = "raise",
    **options: Any,
) -> FeedConsumer:
    """Run the handler until that ends. It may use `running` to stop."""
    consumer = consumer_of(feed_of(page, partitions, auth), **options)
    running.append(consumer)
    async with consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle, on_failure=on_failure)
    return consumer


running: list[FeedConsumer] = []


def stop() -> None:
    running[-1].stop()


def stops_at(n: int) -> Callable[[Batch], Awaitable[None]]:
    async def handle(batch: Batch) -> None:
        if batch.cursor == str(n):
            stop()

    return handle


# ---------------------------------------------------------------- cancellations (R20)


async def awaits_what_others_cancelled() -> None:
    if asyncio.current_task() is None:
        raise asyncio.CancelledError
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    await shared


async def raises_it() -> None:
    raise asyncio.CancelledError


async def cancels_its_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


STRAYS = [awaits_what_others_cancelled, cancels_its_own_task]


async def run_either_way(
    handle: Callable[[], Awaitable[None]], by_key: bool, *, partitions: int = 1, **more: Any
) -> None:
    async def of_batch(_: Batch) -> None:
        await handle()

    async def of_event(_: Event) -> None:
        await handle()

    async with consumer_of(feed_of(five_events, partitions), follow="on_failure" not in more) as it:
        with anyio.fail_after(SAFETY_LIMIT):
            if by_key:
                await it.run_by_key(of_event, key=lambda each: each.json()["n"], **more)
            else:
                await it.run(of_batch, **more)


each_way = pytest.mark.parametrize("by_key", [False, True], ids=["run", "run_by_key"])
each_stray = pytest.mark.parametrize("stray", STRAYS)
on_each_loop = [("asyncio", stray) for stray in STRAYS] + [
    (loop, raises_it) for loop in ("asyncio", "trio")
]


@pytest.mark.parametrize(("anyio_backend", "stray"), on_each_loop)
@each_way
async def test_r20_a_cancellation_that_a_handler_lets_out_is_its_failure(
    stray: Callable[[], Awaitable[None]], by_key: bool
) -> None:
    with pytest.raises(StrayCancellationError, match="the handler let a CancelledError out"):
        await run_either_way(stray, by_key)


@each_way
async def test_r20_so_it_is_while_the_failure_of_another_handler_ends_them_all(
    by_key: bool,
) -> None:
    async def fails() -> None:
        try:
            await anyio.sleep(0.05)
        finally:
            raise asyncio.CancelledError

    with pytest.raises(StrayCancellationError):
        await run_either_way(fails, by_key, partitions=4)


@on_asyncio
@each_stray
@each_way
async def test_r20_such_a_failure_goes_by_on_failure(
    stray: Callable[[], Awaitable[None]], by_key: bool
) -> None:
    calls = 0

    async def handle() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await stray()

    await run_either_way(handle, by_key, on_failure="retry")
    assert calls > 1


@on_asyncio
@each_way
async def test_r20_a_native_cancellation_of_run_is_one(by_key: bool) -> None:
    called = anyio.Event()

    async def handle() -> None:
        called.set()
        await anyio.sleep_forever()

    task = asyncio.ensure_future(run_either_way(handle, by_key))
    await called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@on_asyncio
@pytest.mark.parametrize(
    "name", ["Session.run", "Discovery.run", "Watchdog.run", "Agenda.run", "Planning.run_saver"]
)
async def test_r20_a_task_of_a_session_that_others_cancel_ends_the_iteration(name: str) -> None:
    def is_it(task: asyncio.Task[Any]) -> bool:
        frame = (task.get_stack() or [None])[-1]
        coroutine: Any = task.get_coro()
        while coroutine is not None:
            if getattr(coroutine, "__qualname__", "").endswith(name):
                return frame is not None
            coroutine = getattr(coroutine, "cr_await", None)
        return False

    async def handle(batch: Batch) -> None:
        if numbers(batch)[-1:] == [5]:
            for task in [each for each in asyncio.all_tasks() if is_it(each)]:
                task.cancel()

    with pytest.raises(FeedError, match=r"the consumer's task .* nobody asked for|by itself"):
        await run(handle)


class SharedRefresh(httpx.Auth):
    """Its requests share a task, which is cancelled at times."""

    def __init__(self) -> None:
        self.asked = 0

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        self.asked += 1
        if self.asked % 2 == 0:
            await awaits_what_others_cancelled()
        yield request


@on_asyncio
async def test_r20_a_stray_cancellation_of_a_request_is_retried() -> None:
    seen: list[int] = []

    async def handle(batch: Batch) -> None:
        seen.extend(numbers(batch))

    auth = SharedRefresh()
    await run(handle, auth=auth, follow=False)
    assert seen == [1, 2, 3, 4, 5]
    assert auth.asked > 6


@on_asyncio
async def test_r20_a_stray_cancellation_of_on_assigned_ends_the_iteration() -> None:
    async def on_assigned(_: Any) -> None:
        await awaits_what_others_cancelled()

    with pytest.raises(StrayCancellationError, match="on_assigned"):
        await run(nothing, store=MemoryCursorStore(), share=Share(on_assigned=on_assigned))


# ---------------------------------------------------------------- idle streams (R15)


@pytest.mark.parametrize("begins", [b"", b"\n", checkpoint(5)])
async def test_r15_an_answered_stream_that_is_cut_while_idle_is_no_failure(begins: bytes) -> None:
    streams = 0

    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        nonlocal streams
        streams += "stream" in query
        if query["cursor"] == "_first":
            yield event(streams) + checkpoint(5)
            return
        if "stream" not in query:
            yield checkpoint(5)
            return
        if streams == 9:
            yield event(9) + checkpoint(9)
        if begins:
            yield begins
        raise httpx.RemoteProtocolError("peer closed connection")

    async def handle(batch: Batch) -> None:
        assert running[-1].status().partitions[0].error is None
        await stops_at(9)(batch)

    await run(handle, page, fetch=STREAM, retry=GIVES_UP_AT_ONCE)


async def test_r15_a_cursor_that_a_stream_begins_with_is_saved_while_it_is_open() -> None:
    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        yield checkpoint(5)
        await anyio.sleep_forever()

    class Store(MemoryCursorStore):
        async def save(self, feed: Any, positions: Any, *, transaction: Any = None) -> None:
            await super().save(feed, positions, transaction=transaction)
            if positions[0].cursor == "5":
                stop()

    async def handle(batch: Batch) -> None:
        assert not batch.events

    await run(handle, page, fetch=STREAM, store=Store())


async def test_r14_a_gateway_that_does_not_wait_for_a_quiet_streams_first_byte() -> None:
    given_up = 0

    class Gateway(httpx.Auth):
        def auth_flow(self, request: httpx.Request) -> Any:
            nonlocal given_up
            if "stream" in request.url.params and request.url.params["cursor"] == "5":
                given_up += 1
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            yield request

    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        if query["cursor"] == "_first":
            yield event(5)
        yield checkpoint(5 if given_up < 50 else 6)

    await run(stops_at(6), page, auth=Gateway(), fetch=STREAM, retry=SHORT)


async def test_r14_a_stream_that_is_cut_within_a_line_is_torn() -> None:
    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        yield event(1) + checkpoint(1) if query["cursor"] == "_first" else b'{"da'
        if query["cursor"] != "_first":
            raise httpx.RemoteProtocolError("peer closed connection")

    with pytest.raises(FeedError, match="the response broke off"):
        await run(nothing, page, fetch=STREAM, retry=GIVES_UP_AT_ONCE)


HEARTBEATS = [b"\n", b'{"ping":true}\n', checkpoint(1)]


@pytest.mark.parametrize("heartbeat", HEARTBEATS)
async def test_r15_heartbeats_don_t_fill_the_buffer(heartbeat: bytes) -> None:
    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        if query["cursor"] == "_first":
            yield event(1) + checkpoint(1)
            return
        for _ in range(200):
            yield heartbeat * 100
        yield event(2) + checkpoint(2)

    await run(stops_at(2), page, fetch=STREAM, limits=limits(max_buffered_bytes=64 * 1024))


async def test_r16_streams_that_were_silent_share_the_room_that_is_left() -> None:
    """Each had room when it began to wait for its next bytes. All bring some at once."""
    size, most, got = 64 * 1024, 0, 0
    handled, sent = set[int](), set[str]()
    all_handled, all_sent = anyio.Event(), anyio.Event()

    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        if query["cursor"] == "_first":
            yield event(1) + checkpoint(1)
            return
        if query["cursor"] == "1":
            await all_handled.wait()
            sent.add(query["partition"])
            if len(sent) == 5:
                all_sent.set()
            yield event(2) * 100 + checkpoint(2)
        await anyio.sleep_forever()

    async def handle(batch: Batch) -> None:
        nonlocal most, got
        handled.add(batch.partition)
        if len(handled) == 5:
            all_handled.set()
        await all_sent.wait()
        await anyio.sleep(0.02)
        most = max(most, running[-1].status().buffered_bytes)
        got += len(batch.events)
        if got == 5 * 101:
            stop()

    await run(handle, page, 5, fetch=STREAM, limits=limits(max_buffered_bytes=size))
    assert size / 2 < most <= size


@pytest.mark.parametrize("heartbeat", HEARTBEATS)
async def test_r14_idle_streams_that_give_their_slots_back_do_not_fail(heartbeat: bytes) -> None:
    asked = {0: 0, 1: 0, 2: 0}

    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        if query["cursor"] == "_first":
            yield event(1) + checkpoint(1)
            return
        assert "stream" in query
        asked[int(query["partition"])] += 1
        while True:
            yield heartbeat
            await anyio.sleep(0.001)
            if min(asked.values()) >= 3:
                stop()

    async def handle(_: Batch) -> None:
        assert not running[-1].health().problems

    shared = limits(max_concurrent_fetches=1, slot_timeout=0.02)
    consumer = await run(handle, page, 3, fetch=STREAM, limits=shared)
    assert [p.fetch_failures for p in consumer.status().partitions.values()] == [0, 0, 0]


# ---------------------------------------------------------------- ends that are busy (R7)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        # They came after the question: a cursor behind them would skip them.
        (
            [event(11) + checkpoint(11), event(12) + checkpoint(12), checkpoint(12)],
            ["_last", "_last", "_last", "12"],
        ),
        ([checkpoint(12) + event(13) + checkpoint(13)], ["_last", "12"]),
    ],
    ids=["behind events", "before an event"],
)
async def test_r07_last_begins_behind_no_event_that_nobody_gets(
    answers: list[bytes], asked: list[str]
) -> None:
    answers, cursors = [*answers], list[str]()

    async def page(query: dict[str, str]) -> AsyncIterator[bytes]:
        cursors.append(query["cursor"])
        yield answers.pop(0) if query["cursor"] == "_last" else event(13) + checkpoint(13)

    async with consumer_of(feed_of(page), start="last") as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async for batch in consumer.batches():
                assert numbers(batch) == [13]
                break
    assert cursors[: len(asked)] == asked


# ---------------------------------------------------------------- saves (R5)


class FailingSaves(MemoryCursorStore):
    """Its first saves of a handled batch fail."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    async def save(self, feed: Any, positions: Any, *, transaction: Any = None) -> None:
        if self.left and any(position.replaces is not None for position in positions.values()):
            self.left -= 1
            raise StoreError("the cursor database failed")
        await super().save(feed, positions, transaction=transaction)


@pytest.mark.parametrize("on_failure", ["retry", "quarantine"])
async def test_r05_a_handler_that_returned_is_not_called_again_for_its_save(
    on_failure: Any,
) -> None:
    seen: list[int] = []

    async def handle(batch: Batch) -> None:
        seen.extend(numbers(batch))

    store, policy = FailingSaves(2), on_failure
    if on_failure == "quarantine":
        policy = Retry(base_delay=0.001, then=Quarantine(to=MemoryQuarantineStore()))
    await run(handle, on_failure=policy, store=store, follow=False)
    assert seen == [1, 2, 3, 4, 5]
    assert store.left == 0


class DeadPool(MemoryCursorStore):
    """Connections that are dead at saves of a batch, perhaps once the save was through."""

    def __init__(self, left: int, *, saved: bool) -> None:
        super().__init__()
        self.left, self.saved = left, saved

    async def save(self, feed: Any, positions: Any, *, transaction: Any = None) -> None:
        dies = self.left and any(each.replaces is not None for each in positions.values())
        if not dies or self.saved:
            await super().save(feed, positions, transaction=transaction)
        if dies:
            self.left -= 1
            raise ConnectionResetError("the database has ended the connection")


@pytest.mark.parametrize(("dead", "saved"), [(1, False), (1, True), (100, False)])
async def test_r05_a_save_of_our_own_is_tried_again_while_connections_are_dead(
    dead: int, saved: bool
) -> None:
    """A large pool may be dead as a whole."""
    seen: list[int] = []

    async def handle(batch: Batch) -> None:
        seen.extend(numbers(batch))

    store = DeadPool(dead, saved=saved)
    consumer = await run(handle, store=store, follow=False)
    assert (await store.load(consumer.key))[0].cursor == "5"
    assert seen == [1, 2, 3, 4, 5]
    assert store.left == 0


async def test_r05_a_commit_whose_reply_was_lost_is_our_own_success(tmp_path: Path) -> None:
    path, calls, effects = tmp_path / "cursors.db", 0, 0

    async def handle(batch: Batch) -> None:
        nonlocal calls, effects
        calls += 1
        with contextlib.closing(sqlite3.connect(path)) as connection:
            with connection:
                await batch.commit(transaction=connection)
            effects += len(batch)
        if calls == 1:
            raise ConnectionError("the COMMIT went through, its reply did not arrive")

    store = SQLiteCursorStore(path)
    consumer = await run(handle, on_failure="retry", store=store, follow=False)
    assert (await store.load(consumer.key))[0].cursor == "5"
    assert effects == 5
    assert calls > 1


# ---------------------------------------------------------------- forks


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    other = os.getpid() + 1
    return lambda: monkeypatch.setattr(os, "getpid", lambda: other)


async def test_an_instance_is_named_in_the_process_that_enters_it(
    another_process: Callable[[], None],
) -> None:
    consumer = consumer_of(feed_of(five_events), share=Share(instance="web"))
    name = consumer.instance
    assert name is not None
    assert name == consumer.instance
    assert name.startswith("web-")
    another_process()
    assert consumer.instance != name
    async with consumer:
        assert consumer.instance != name


async def test_what_a_fork_does_not_carry_over_says_so(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    store = SQLiteCursorStore(tmp_path / "cursors.db")
    async with store, consumer_of(feed_of(five_events), store=store) as consumer:
        client = consumer._client
        assert client is not None
        another_process()
        with pytest.raises(RuntimeError, match="the consumer was opened in another process"):
            await anext(consumer.batches())
        with pytest.raises(RuntimeError, match="the http client was opened in another"):
            await client.discover()
        with pytest.raises(StoreError, match="was opened in another process, before a fork"):
            await store.load(consumer.key)


async def test_r10_between_discoveries_is_as_much_time_as_it_takes_to_plan_one(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition that is drained leads to one. With 10,000 it takes 80 ms to plan it."""
    discover, planned, seconds = Planner.discover, list[float](), 0.1

    def slowly(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        planned.append(time.monotonic())
        return discover(*args, **more)

    monkeypatch.setattr(Planner, "discover", slowly)
    publisher.quirks = Quirks(last_cursor="closed")
    for partition in range(1, 25):
        publisher.add(partition)
        publisher.append(partition, {"n": partition})
        publisher.close(partition)
    async with consume(publisher) as consumer:
        with anyio.move_on_after(2):
            async for _ in consumer:
                pass
    asked = [request.time for request in publisher.requests if request.kind == "discovery"]
    pauses = [at - end for end, at in zip(planned[1:], asked[2:], strict=False)]
    assert len(pauses) > 2
    assert min(pauses) >= seconds
