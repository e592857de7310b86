"""R3, R6, R13: what publishers, replicas and gateways of the field say, and what is believed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import (
    AuthenticationError,
    Batch,
    CursorRejectedError,
    FeedConsumer,
    FeedError,
    Limits,
    MemoryCursorStore,
    NoProgressError,
    PartitionWait,
    Position,
    ProblemName,
    ProtocolError,
    RetryPolicy,
    Share,
    TornResponseError,
    TransportError,
)
from feedapi_client.model import FIRST
from feedapi_client.notifications import ProblemFound, ProblemGone
from feedapi_client.protocol.page import MOVES_BELIEVED
from tests.consumer.scripted import (
    MAINTENANCE,
    Answer,
    Ask,
    Listed,
    Scripted,
    answers_for,
    in_time,
    lags,
    read_all,
    split,
)

BACKENDS = ["asyncio", "trio"]
IMPATIENT = RetryPolicy(give_up_after=20.0)


def everything(feed: Scripted) -> list[tuple[int, int]]:
    return [(id, n) for id, each in feed.partitions.items() for n in range(each.events)]


async def follow(consumer: FeedConsumer, seen: list[tuple[int, int]]) -> None:
    """Read until cancelled."""
    async for event in consumer:
        seen.extend([(event.partition, event.json()["n"])])


def maintenance() -> httpx.Response:
    return httpx.Response(200, content=MAINTENANCE)


def nothing() -> httpx.Response:
    return httpx.Response(200)


def no_content() -> httpx.Response:
    return httpx.Response(204)


def discovery() -> httpx.Response:
    return Scripted(split(1, 300)).discovery()


GATEWAYS: dict[str, Callable[[], Answer]] = {
    "maintenance for 0.6 s": lambda: answers_for(0.6, maintenance),
    "empty 200 for 0.6 s": lambda: answers_for(0.6, nothing),
    "empty 200 for 5 s": lambda: answers_for(5.0, nothing),
    "204 for 2 s": lambda: answers_for(2.0, no_content),
    "discovery for 1 s": lambda: answers_for(1.0, discovery),
    "maintenance for 30 s": lambda: answers_for(30.0, maintenance),
    "replica 1.5 s behind": lambda: lags(1.5, 60),
    "replica 9 s behind": lambda: lags(9.0, 60),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("echo", [True, False], ids=["echoing", "silent"])
@pytest.mark.parametrize("name", GATEWAYS)
def test_r06_a_moments_answer_does_not_end_a_closed_partition(
    name: str, echo: bool, backend: str
) -> None:
    feed, store = Scripted(split(1, 300), echo=echo), MemoryCursorStore()
    feed.answers.append(GATEWAYS[name]())

    async def body() -> None:
        consumer = feed.consumer(store=store)
        assert await read_all(consumer) == everything(feed)
        positions = await store.load(consumer.key)
        assert (positions[0].status, positions[0].cursor) == ("drained", "300")

    in_time(body, backend)


@pytest.mark.parametrize("echo", [True, False], ids=["echoing", "silent"])
def test_r06_a_history_of_closed_generations_costs_one_wait(echo: bool) -> None:
    feed = Scripted(split(5, 100), echo=echo)

    async def body() -> None:
        began = anyio.current_time()
        assert await read_all(feed.consumer()) == everything(feed)
        assert 10.0 <= anyio.current_time() - began < 15.0
        assert len(feed.asks) < 80

    in_time(body, "asyncio")


def many() -> Scripted:
    """A closed partition with a child, and 29 open ones that are polled often."""
    partitions = {0: Listed(10, closed=True), 1: Listed(10, starts_after=0)}
    return Scripted(partitions | {id: Listed(10) for id in range(2, 31)})


OFTEN = Limits(max_poll_interval=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_r06_a_failure_elsewhere_now_and_then_does_not_put_an_end_off(backend: str) -> None:
    """There is always one: 31 partitions, and one answer in forty is a 503."""
    feed = many()
    feed.answers.append(lambda feed, _: None if len(feed.asks) % 40 else httpx.Response(503))
    seen: list[tuple[int, int]] = []

    async def body() -> None:
        consumer = feed.consumer(follow=True, limits=OFTEN)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(60)
            assert [each for each in seen if each[0] == 1] == [(1, n) for n in range(10)]
            tasks.cancel_scope.cancel()

    in_time(body, backend)


def test_r06_health_is_told_while_an_answer_that_may_be_evidence_is_under_way() -> None:
    feed, waits = many(), []

    async def body() -> None:
        consumer = feed.consumer(follow=True, limits=OFTEN)

        def look(_: Scripted, ask: Ask) -> httpx.Response | None:
            if ask.partition == 0:
                assert consumer.health().live
                waits.append(consumer.status().partitions[0].wait)
            return None

        feed.answers.append(look)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(30)
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")
    assert PartitionWait.EVIDENCE in waits


def test_r06_while_half_of_the_answers_fail_nothing_is_drained() -> None:
    feed = many()

    def outage(feed: Scripted, ask: Ask) -> httpx.Response | None:
        others = ask.partition is not None and ask.partition > 1
        return httpx.Response(503) if others and 1 < ask.at < 60 else None

    feed.answers.append(outage)

    async def body() -> None:
        retry = RetryPolicy(max_delay=0.5)
        consumer = feed.consumer(follow=True, limits=OFTEN, retry=retry)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(120)
            began = feed.first_fetch(1, "_first")
            assert began is not None
            assert 60 + 5 < began < 60 + 15
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


@pytest.mark.parametrize("what", ["its own requests", "discoveries"])
def test_r06_evidence_that_is_overdue_is_a_problem_with_a_name(what: str) -> None:
    """The partition is read, and fails each 5 s: its end is never shown, its child never begins."""
    feed, failed = many(), [0.0]

    def fails(_: Scripted, ask: Ask) -> httpx.Response | None:
        concerned = ask.partition == (0 if what == "its own requests" else None)
        if not concerned or not 5 + failed[0] < ask.at < 200:
            return None
        failed[0] = ask.at
        return httpx.Response(503)

    feed.answers.append(fails)
    told: list[object] = []

    async def body() -> None:
        limits = Limits(discovery_interval=1.0)
        consumer = feed.consumer(follow=True, limits=limits)
        async with consumer, anyio.create_task_group() as tasks:
            consumer.subscribe(told.append)
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(60)
            names = {problem.name for problem in consumer.health().problems}
            assert ProblemName.END_UNPROVEN not in names
            await anyio.sleep(60)
            (problem,) = [p for p in consumer.health().problems if p.name == "end-unproven"]
            assert problem.partition == 0
            assert "evidence of its end has been awaited for" in problem.text
            if what != "discoveries":  # one that fails just now concerns all
                assert consumer.health().ready
            await anyio.sleep(180)
            assert feed.first_fetch(1, "_first") is not None
            names = {problem.name for problem in consumer.health().problems}
            assert ProblemName.END_UNPROVEN not in names
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")
    ours = [each for each in told if getattr(each, "name", None) is ProblemName.END_UNPROVEN]
    assert [type(each) for each in ours] == [ProblemFound, ProblemGone]


def test_r06_status_and_one_record_say_that_evidence_is_awaited_and_how_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For each generation that closes. Not one for each partition, or each answer."""
    caplog.set_level(logging.INFO, "feedapi_client")
    feed = Scripted({0: Listed(10), 1: Listed(10)})

    def records() -> list[str]:
        found = [record for record in caplog.records if "waits for evidence" in record.message]
        assert all(record.levelno == logging.INFO for record in found)
        return [record.message for record in found]

    async def body() -> None:
        consumer = feed.consumer(follow=True, limits=Limits(discovery_interval=1.0))
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(5)
            assert records() == []
            assert consumer.status()[0].evidence_since is None
            for generation in (0, 1):
                first = 2 * generation
                for id in (first, first + 1):
                    feed.partitions[id].closed = True
                    feed.partitions[id + 2] = Listed(10, starts_after=id)
                await anyio.sleep(7)
                status = consumer.status()[first]
                assert status.state == "reading"
                assert status.wait is PartitionWait.EVIDENCE
                assert str(status.wait) == "evidence of its end"
                assert status.evidence_seconds is not None
                await anyio.sleep(13)
                assert consumer.status()[first].state == "drained"
                assert consumer.status()[first].evidence_since is None
                said = f"the end of partitions {first}, {first + 1}, for at least "
                assert len(records()) == generation + 1
                assert said in records()[-1]
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


def test_r06_a_history_of_generations_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "feedapi_client")
    feed = Scripted(split(5, 100))

    async def body() -> None:
        await read_all(feed.consumer())

    in_time(body, "asyncio")
    (said,) = [r.message for r in caplog.records if "waits for evidence" in r.message]
    assert "of the end of partitions 0, 1, 2, 3, 4, for at least 10.0 s" in said


@pytest.mark.parametrize("status", [404, 503])
def test_r06_an_end_that_was_seen_is_not_undone_by_refusals_afterwards(status: int) -> None:
    feed = Scripted({0: Listed(10), 1: Listed(100)}, page=10)
    ends: list[float] = []

    def refuses(_: Scripted, ask: Ask) -> httpx.Response | None:
        if (ask.partition, ask.cursor) != (0, "10"):
            return None
        ends.append(ask.at)
        return httpx.Response(status) if len(ends) > 2 else None

    feed.answers.append(refuses)

    async def body() -> None:
        seen: list[tuple[int, int]] = []
        async with feed.consumer(limits=Limits(max_batch_bytes=1)) as consumer:
            async for batch in consumer.batches():
                seen.extend((e.partition, e.json()["n"]) for e in batch.events)
                await anyio.sleep(20)
                await batch.commit()
        assert sorted(seen) == everything(feed)

    in_time(body, "asyncio")


@pytest.mark.parametrize("on_error", ["raise", "park"])
@pytest.mark.parametrize("status", [404, 503])
@pytest.mark.parametrize("backend", BACKENDS)
def test_r06_instances_that_are_at_their_ends_do_not_wait_for_each_other(
    status: int, on_error: Any, backend: str
) -> None:
    """A third one joins before they have said so, and their partitions are refused from then on."""
    feed, store = Scripted({id: Listed(10) for id in range(6)}), MemoryCursorStore()
    ended: list[str] = []
    seen: list[tuple[int, int]] = []
    began = 0.0

    def client(name: str) -> httpx.AsyncClient:
        async def answer(request: httpx.Request) -> httpx.Response:
            if name != "third" and request.url.query and anyio.current_time() >= began + 8:
                return httpx.Response(status)
            return await feed(request)

        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    async def run(name: str, delay: float, gate: anyio.Event) -> None:
        async def handle(batch: Batch) -> None:
            await gate.wait()
            seen.extend((e.partition, e.json()["n"]) for e in batch.events)

        await anyio.sleep(delay)
        consumer = feed.consumer(share=Share(), store=store, http=client(name), on_error=on_error)
        async with consumer:
            await consumer.run(handle)
        ended.append(name)

    async def body() -> None:
        nonlocal began
        began, gate = anyio.current_time(), anyio.Event()
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "first", 0.0, gate)
                tasks.start_soon(run, "second", 0.0, gate)
                tasks.start_soon(run, "third", 8.0, gate)
                await anyio.sleep(20)
                gate.set()
        assert sorted(ended) == ["first", "second", "third"]
        assert sorted(seen) == everything(feed)

    in_time(body, backend)


@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
def test_r18_without_follow_nobody_waits_for_a_parked_partition(share: Share | None) -> None:
    feed, store = Scripted({id: Listed(10) for id in range(2)}), MemoryCursorStore()
    feed.answers.append(lambda _, ask: httpx.Response(503) if ask.cursor == "10" else None)

    async def run() -> None:
        consumer = feed.consumer(share=share, store=store, on_error="park", retry=IMPATIENT)
        async with consumer:
            async for _ in consumer:
                pass

    async def body() -> None:
        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for _ in range(1 if share is None else 2):
                    tasks.start_soon(run)

    in_time(body, "asyncio")


def test_r06_a_discovery_between_the_answers_still_lists_the_partition_as_closed() -> None:
    feed = Scripted({0: Listed(10, closed=True)})

    async def body() -> None:
        assert await read_all(
            feed.consumer(limits=Limits(discovery_interval=1000.0))
        ) == everything(feed)
        at_end = [at for at, ask in enumerate(feed.asks) if ask.cursor == "10"]
        between = [at for at, ask in enumerate(feed.asks) if ask.partition is None]
        assert len(at_end) >= 3
        assert any(at_end[0] < at < at_end[-1] for at in between)

    in_time(body, "asyncio")


def test_r06_while_discoveries_fail_nothing_is_drained() -> None:
    feed = Scripted({0: Listed(10, closed=True)})

    def outage(_: Scripted, ask: Ask) -> httpx.Response | None:
        return httpx.Response(503) if ask.partition is None and 0.1 < ask.at < 60 else None

    feed.answers.append(outage)

    async def body() -> None:
        began = anyio.current_time()
        assert await read_all(feed.consumer()) == everything(feed)
        assert anyio.current_time() - began >= 60.0

    in_time(body, "asyncio")


def test_r06_r10_a_single_refusal_does_not_put_the_end_off() -> None:
    feed, refused = Scripted({0: Listed(10, closed=True)}), [0]

    def stale(_: Scripted, ask: Ask) -> httpx.Response | None:
        """The topology changes every 4 s, and the next request has a stale token."""
        if ask.partition is None or ask.at < 4 * len(refused):
            return None
        refused.append(ask.partition)
        return httpx.Response(409)

    feed.answers.append(stale)

    async def body() -> None:
        began = anyio.current_time()
        assert await read_all(feed.consumer()) == everything(feed)
        assert 10.0 <= anyio.current_time() - began < 15.0
        assert len(refused) > 2

    in_time(body, "asyncio")


def test_r06_one_partition_that_always_fails_does_not_keep_others_from_their_end() -> None:
    feed = Scripted({0: Listed(10, closed=True), 1: Listed(10)})

    def broken(_: Scripted, ask: Ask) -> httpx.Response | None:
        return httpx.Response(500) if ask.partition == 1 else None

    feed.answers.append(broken)

    async def body() -> None:
        consumer = feed.consumer(follow=True)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(25)
            assert consumer.status()[0].state == "drained"
            assert consumer.status()[1].state == "retrying"
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


@pytest.mark.parametrize("response", [maintenance, nothing, no_content, discovery])
@pytest.mark.parametrize("echo", [True, False], ids=["echoing", "silent"])
def test_r06_one_odd_answer_does_not_end_an_open_partition_without_follow(
    response: Callable[[], httpx.Response], echo: bool
) -> None:
    feed = Scripted({0: Listed(500)}, echo=echo)
    odd = iter([response()])
    feed.answers.append(lambda _, ask: None if ask.partition is None else next(odd, None))

    async def body() -> None:
        assert await read_all(feed.consumer()) == everything(feed)

    in_time(body, "asyncio")


@pytest.mark.parametrize(
    ("response", "error"), [(discovery, TornResponseError), (maintenance, TornResponseError)]
)
def test_r06_answers_that_say_nothing_for_too_long_are_an_error_without_follow(
    response: Callable[[], httpx.Response], error: type[Exception]
) -> None:
    feed = Scripted({0: Listed(500)})
    feed.answers.append(lambda _, ask: None if ask.partition is None else response())

    async def body() -> None:
        with pytest.raises(error):
            await read_all(feed.consumer(retry=IMPATIENT))

    in_time(body, "asyncio")


@pytest.mark.parametrize("response", [discovery, maintenance])
def test_r06_a_gateway_that_answers_in_place_of_the_publisher_is_never_taken_for_the_end(
    response: Callable[[], httpx.Response],
) -> None:
    feed = Scripted({0: Listed(50)})
    feed.answers.append(lambda _, ask: None if ask.partition is None else response())

    async def body() -> None:
        consumer = feed.consumer(follow=True)
        seen: list[tuple[int, int]] = []
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(60)
            status = consumer.status()
            assert (status[0].state, status[0].caught_up) == ("retrying", None)
            assert [each.name for each in consumer.health().problems] == ["fetch-failing"]
            if response is maintenance:
                assert status[0].unknown_commands > 1
                assert any("neither an event nor a checkpoint" in text for text in status.reports)
            feed.answers.clear()
            await anyio.sleep(60)
            assert seen == everything(feed)
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


def test_r13_a_replica_with_an_older_end_of_its_own_brings_nothing_twice_and_is_reported() -> None:
    feed = Scripted({0: Listed(400)}, echo=True)
    turn = iter(range(1_000_000))

    def lagging(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None or next(turn) % 2 == 0:
            return None
        if ask.cursor == "_first" or int(ask.cursor) < 300:
            return feed.fetch(ask, visible=300)
        return httpx.Response(200, content=b'{"cursor":"300"}\n')

    feed.answers.append(lagging)

    async def body() -> None:
        consumer = feed.consumer(follow=True)
        seen: list[tuple[int, int]] = []
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(600)
            assert seen == everything(feed)
            assert any("an older place" in text for text in consumer.status().reports)
            feed.partitions[0].events = 450
            await anyio.sleep(600)
            assert seen == everything(feed)
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


@pytest.mark.parametrize("seed", range(5))
def test_r13_an_older_end_that_was_never_a_checkpoint_brings_nothing_twice(seed: int) -> None:
    """Of two responses each cuts the same events at places of its own."""
    feed, random = Scripted({0: Listed(400)}, echo=True), Random(seed)
    seen: list[tuple[int, int]] = []

    def cut_elsewhere(_: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None:
            return None
        feed.page, feed.every = random.randrange(20, 60), random.randrange(3, 20)
        end = 151 if len(feed.fetches) > 15 and len(feed.fetches) % 2 else 400
        if ask.cursor != "_first" and int(ask.cursor) >= end:
            return httpx.Response(200, content=b'{"cursor":"%d"}\n' % end)
        return feed.fetch(ask, visible=end)

    feed.answers.append(cut_elsewhere)

    async def body() -> None:
        async with feed.consumer(follow=True) as consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(100)
            feed.partitions[0].events = 410  # what is new still comes, and once
            feed.answers.clear()
            await anyio.sleep(100)
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")
    assert seen == [(0, n) for n in range(410)]


def test_r13_cursors_that_move_without_events_are_doubted_once() -> None:
    feed = Scripted({0: Listed(10)})
    seen: list[tuple[int, int]] = []

    def ticking(_: Scripted, ask: Ask) -> httpx.Response | None:
        place = ask.cursor.removeprefix("_first") or "0"
        if ask.partition is None or int(place) < feed.partitions[0].events:
            return None
        return httpx.Response(200, content=b'{"cursor":"%d"}\n' % (int(place) + 1000))

    feed.answers.append(ticking)

    async def body() -> None:
        async with feed.consumer(follow=True) as consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(30)
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")
    assert seen == [(0, n) for n in range(10)]
    asked = [ask.cursor for ask in feed.fetches]
    doubted = [ask.at for ask in feed.fetches if ask.cursor == "10"]
    assert len(doubted) >= MOVES_BELIEVED
    assert 10 <= doubted[-1] - doubted[0] < 13
    assert all(asked.count(cursor) == 1 for cursor in asked if cursor != "10")


async def followed(
    feed: Scripted, store: MemoryCursorStore, seen: list[tuple[int, int]], seconds: float
) -> FeedConsumer:
    """Follow the feed with a new consumer for these seconds."""
    consumer = feed.consumer(follow=True, store=store)
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(follow, consumer, seen)
        await anyio.sleep(seconds)
        tasks.cancel_scope.cancel()
    return consumer


def test_r13_after_a_restart_a_replica_with_an_older_end_brings_nothing_twice() -> None:
    feed, store, restarted = Scripted({0: Listed(400)}, page=50, every=1), MemoryCursorStore(), []
    seen: list[tuple[int, int]] = []

    def older(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if not restarted or ask.partition is None or len(feed.fetches) % 2:
            return None
        return httpx.Response(200, content=b'{"cursor":"150"}\n')

    feed.answers.append(older)

    async def body() -> None:
        consumer = await followed(feed, store, seen, 5)
        restarted.append(True)
        await followed(feed, store, seen, 60)
        assert seen == everything(feed)
        assert (await store.load(consumer.key))[0].cursor == "400"

    in_time(body, "asyncio")


def test_r13_a_moment_of_older_ends_after_a_restart_brings_nothing_twice() -> None:
    """The load balancer keeps the consumer on one replica, which catches up after some seconds."""
    feed, store, lags = Scripted({0: Listed(20)}, page=10, every=1), MemoryCursorStore(), []
    seen: list[tuple[int, int]] = []

    def older(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if not lags or ask.partition is None or ask.at > lags[0] + 8:
            return None
        return httpx.Response(200, content=b'{"cursor":"4"}\n') if ask.cursor == "20" else None

    feed.answers.append(older)

    async def body() -> None:
        await followed(feed, store, seen, 5)
        lags.append(feed.asks[-1].at)
        await followed(feed, store, seen, 60)
        assert seen == everything(feed)

    in_time(body, "asyncio")


def test_r13_a_cursor_that_moves_without_events_after_a_restart_is_followed() -> None:
    """As that of a publisher which leaves out events, a bounded number at a time."""
    feed, store = Scripted({0: Listed(30)}, page=10), MemoryCursorStore()

    def leaves_out(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None or ask.cursor not in ("10", "20"):
            return None
        return httpx.Response(200, content=b'{"cursor":"%d"}\n' % (int(ask.cursor) + 10))

    feed.answers.append(leaves_out)

    async def body() -> None:
        consumer = feed.consumer(store=store)
        await store.save(consumer.key, {0: Position("10")})
        assert await read_all(consumer) == []
        assert (await store.load(consumer.key))[0].cursor == "30"
        asked = [ask.cursor for ask in feed.fetches]
        assert asked.count("10") >= MOVES_BELIEVED
        assert asked[asked.count("10") :][:2] == ["20", "30"]

    in_time(body, "asyncio")


def test_r06_without_follow_a_replica_that_stays_behind_is_an_error() -> None:
    feed = Scripted({0: Listed(400)}, echo=True)

    def lagging(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None or ask.cursor != "400":
            return None
        return httpx.Response(200, content=b'{"cursor":"300"}\n')

    feed.answers.append(lagging)

    async def body() -> None:
        with pytest.raises(NoProgressError, match="an older place"):
            await read_all(feed.consumer(retry=IMPATIENT))

    in_time(body, "asyncio")


@pytest.mark.parametrize("backend", BACKENDS)
def test_r06_an_event_that_comes_late_is_delivered_and_reported(backend: str) -> None:
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()

    async def body() -> None:
        consumer = feed.consumer(follow=True, store=store)
        seen: list[tuple[int, int]] = []
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, seen)
            await anyio.sleep(30)
            assert consumer.status()[0].state == "drained"
            assert seen == everything(feed)
            feed.partitions[0].events = 110  # the replica is there at last
            await anyio.sleep(120)
            assert seen[200:] == [(0, n) for n in range(100, 110)]
            assert consumer.status()[0].state == "drained"
            position = (await store.load(consumer.key))[0]
            assert (position.cursor, position.status) == ("110", "drained")
            assert any("it is delivered late" in text for text in consumer.status().reports)
            tasks.cancel_scope.cancel()

    in_time(body, backend)


@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
def test_r06_an_event_that_comes_late_after_a_restart_is_reported(share: Share | None) -> None:
    """Not delivered: an operator may have drained the partition, to leave out the rest."""
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()
    seen: list[tuple[int, int]] = []

    async def body() -> None:
        for seconds in (30, 200):
            async with (
                feed.consumer(follow=True, store=store, share=share) as consumer,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(follow, consumer, seen)
                await anyio.sleep(seconds)
                found = [line for line in consumer.status().reports if "behind the end" in line]
                feed.partitions[0].events = 110  # while no process runs
                consumer.stop()
        assert seen == [(0, n) for n in range(100)] + [(1, n) for n in range(100)]
        (report,) = found
        assert "partition 0: there is an event behind the end that is stored" in report
        assert "'feedapi cursors set 0 CURSOR'" in report

    in_time(body, "asyncio")


@pytest.mark.parametrize("before", [0, 50], ids=["never read", "read in part"])
@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
def test_r06_a_run_without_follow_looks_behind_the_ends_of_earlier_runs(
    before: int, share: Share | None
) -> None:
    """Each run is shorter than the pause before a look: one look at least is waited for."""
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()
    feed.answers.append(lags(40, before))
    seen: list[tuple[int, int]] = []

    async def run() -> tuple[str, ...]:
        consumer = feed.consumer(store=store, share=share)
        async with consumer:
            with anyio.fail_after(1000):
                seen.extend([(e.partition, e.json()["n"]) async for e in consumer])
            return consumer.status().reports

    async def body() -> None:
        assert not any("behind the end" in line for line in await run())
        assert seen == [(0, n) for n in range(before)] + [(1, n) for n in range(100)]
        await anyio.sleep(40)
        (report,) = [line for line in await run() if "behind the end" in line]
        assert "partition 0: there is an event behind the end that is stored" in report
        assert "'feedapi cursors set 0 CURSOR'" in report
        assert report.endswith(f": '{before or FIRST}'")
        (key,) = await store.feeds()
        drained = (await store.load(key))[0]
        reopened = drained.advance(status="open")
        await store.save(key, {0: reopened})
        del seen[:]
        assert not any("behind the end" in line for line in await run())
        assert seen == [(0, n) for n in range(before, 100)]
        fetches = len(feed.fetches)
        assert not any("behind the end" in line for line in await run())
        assert len(feed.fetches) <= fetches + 3  # one look, and the end of the open partition

    in_time(body, "asyncio")


@pytest.mark.parametrize("restarts", [1, 2])
def test_r07_what_was_closed_from_the_outset_is_only_asked_behind_its_end(restarts: int) -> None:
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()
    end = httpx.Response(200, content=b'{"cursor":"100"}\n')
    feed.answers.append(lambda _, ask: end if ask.cursor == "_last" else None)

    async def body() -> None:
        for _ in range(restarts):
            consumer = feed.consumer(follow=True, store=store, start="last")
            async with consumer, anyio.create_task_group() as tasks:
                tasks.start_soon(follow, consumer, [])
                await anyio.sleep(300)
                assert not any("behind the end" in line for line in consumer.status().reports)
                tasks.cancel_scope.cancel()
        assert {ask.cursor for ask in feed.fetches if ask.partition == 0} == {"_last", "100"}

    in_time(body, "asyncio")


def test_r06_a_child_by_a_declared_edge_was_not_closed_from_the_outset() -> None:
    """It was drained unread, long after the start at the end of its parent."""
    feed = Scripted({0: Listed(closed=True), 1: Listed(10, closed=True), 2: Listed()})
    store = MemoryCursorStore()
    consumer = feed.consumer(store=store, start="last", lineage={1: 0, 2: 1})
    drained = {0: Position("0", "drained", 2, 1), 1: Position(FIRST, "drained"), 2: Position("0")}

    async def body() -> None:
        await store.save(consumer.key, {0: Position("0")})
        await store.save(consumer.key, drained)
        async with consumer:
            with anyio.fail_after(1000):
                assert [event async for event in consumer] == []
            (report,) = [line for line in consumer.status().reports if "behind the end" in line]
        assert "partition 1: there is an event behind the end that is stored" in report

    in_time(body, "asyncio")


@pytest.mark.parametrize("listed", [[], None], ids=["empty", "null"])
@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
def test_r07_a_publisher_that_starts_is_waited_for_whatever_is_stored(
    listed: list[object] | None, share: Share | None
) -> None:
    feed, store = Scripted({0: Listed(10)}), MemoryCursorStore()

    async def body() -> None:
        assert await read_all(feed.consumer(store=store)) == everything(feed)
        feed.partitions[0].events = 20
        discoveries = iter([httpx.Response(200, json={"token": "t", "partitions": listed})])
        feed.answers.append(lambda _, ask: next(discoveries, None) if not ask.params else None)
        assert await read_all(feed.consumer(store=store, share=share)) == everything(feed)[10:]

    in_time(body, "asyncio")


def test_r07_a_feed_that_lists_nothing_any_more_is_reported_and_at_its_end() -> None:
    feed, store = Scripted({0: Listed(10)}), MemoryCursorStore()

    async def body() -> None:
        await read_all(feed.consumer(store=store))
        feed.partitions.clear()
        began = anyio.current_time()
        async with feed.consumer(store=store) as consumer:
            with anyio.fail_after(60):
                assert [event async for event in consumer] == []
            assert any("partition 0: is no longer listed" in r for r in consumer.status().reports)
        assert anyio.current_time() - began >= 10.0
        assert (await store.load(consumer.key))[0].cursor == "10"

    in_time(body, "asyncio")


def test_r06_after_ten_minutes_a_drained_partition_is_left_alone() -> None:
    feed = Scripted(split(3, 10))

    async def body() -> None:
        consumer = feed.consumer(follow=True)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(20)
            asked = len([ask for ask in feed.fetches if ask.partition != 3])
            await anyio.sleep(1800)
            again = [ask for ask in feed.fetches if ask.partition != 3][asked:]
            assert {ask.partition for ask in again} == {0, 1, 2}
            assert max(ask.at for ask in again) < 700
            assert len(again) <= 3 * 6
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


ELSEWHERE = "https://login.invalid/?session=s3cret"


def refusal(status: int) -> httpx.Response:
    return httpx.Response(status, headers={"Location": ELSEWHERE} if status == 302 else {})


def refuses(status: int, until: float, *, discoveries: bool = False) -> Answer:
    """A gateway that refuses access from the second fetch on."""

    def answer(feed: Scripted, ask: Ask) -> httpx.Response | None:
        late = len(feed.fetches) > 1 and ask.at < until
        refused = late and (ask.partition is not None or discoveries)
        return refusal(status) if refused else None

    return answer


@pytest.mark.parametrize("status", [401, 403, 405, 421, 404, 302, 304, 402, 407, 451])
@pytest.mark.parametrize("discoveries", [False, True])
def test_r10_a_running_consumer_waits_until_refusals_pass(status: int, discoveries: bool) -> None:
    feed = Scripted({0: Listed(300)}, echo=True)
    feed.answers.append(refuses(status, 40.0, discoveries=discoveries))

    async def body() -> None:
        assert await read_all(feed.consumer()) == everything(feed)

    in_time(body, "asyncio")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AuthenticationError),
        (403, AuthenticationError),
        (405, CursorRejectedError),
        (421, CursorRejectedError),
        (402, ProtocolError),
        (302, TransportError),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "park"])
def test_r10_refusals_that_last_are_an_error_or_park_and_the_consumer_is_not_ready(
    status: int, error: type[Exception], on_error: Any
) -> None:
    feed = Scripted({0: Listed(300), 1: Listed(10)}, echo=True)

    def refuse(_: Scripted, ask: Ask) -> httpx.Response | None:
        return refusal(status) if (ask.partition, ask.cursor) == (0, "100") else None

    feed.answers.append(refuse)

    async def body() -> None:
        consumer = feed.consumer(follow=True, on_error=on_error)
        raised: list[Exception] = []
        async with consumer, anyio.create_task_group() as tasks:

            async def consume() -> None:
                try:
                    async for _ in consumer:
                        pass
                except error as failure:
                    raised.append(failure)

            tasks.start_soon(consume)
            await anyio.sleep(30)
            assert consumer.status()[0].state == "retrying"
            assert consumer.health().ready
            await anyio.sleep(200)
            if on_error == "raise":
                assert type(raised[0]) is error
                assert "It has done so for" in str(raised[0])
                assert str(status) in str(raised[0])
                assert "s3cret" not in str(raised[0])
            else:
                assert consumer.status()[0].state == "parked"
                assert not consumer.health().ready
                assert consumer.status()[1].state == "caught up"
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")


@pytest.mark.parametrize("status", [302, 401, 402, 405])
def test_r10_an_application_may_decide_that_a_gateway_is_asked_for_longer(status: int) -> None:
    """It is discovered again meanwhile: a token may be what is refused."""
    feed = Scripted({0: Listed(300)}, echo=True)
    feed.answers.append(refuses(status, 200.0))
    discovered: list[float] = []

    def seen(_: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None:
            discovered.append(ask.at)
        return None

    feed.answers.insert(0, seen)

    async def body() -> None:
        patient = RetryPolicy(decide=lambda error: "retry")
        assert await read_all(feed.consumer(retry=patient)) == everything(feed)

    in_time(body, "asyncio")
    assert discovered[1] < 10


@pytest.mark.parametrize("status", [302, 401, 402, 405])
def test_r14_such_a_decision_does_not_outlast_give_up_after(status: int) -> None:
    feed = Scripted({0: Listed(300)}, echo=True)
    feed.answers.append(refuses(status, 500.0))

    async def body() -> None:
        began = anyio.current_time()
        patient = RetryPolicy(decide=lambda error: "retry", give_up_after=20.0, max_delay=5.0)
        with pytest.raises(FeedError):
            await read_all(feed.consumer(retry=patient))
        assert 20 <= anyio.current_time() - began < 40

    in_time(body, "asyncio")


def test_r18_a_feed_of_which_everything_is_parked_is_not_ready() -> None:
    feed = Scripted({0: Listed(10), 1: Listed(10)})
    broken: set[int | None] = set()
    feed.answers.append(lambda _, ask: httpx.Response(500) if ask.partition in broken else None)

    async def body() -> None:
        consumer = feed.consumer(follow=True, on_error="park", retry=IMPATIENT)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow, consumer, [])
            await anyio.sleep(5)
            broken.add(0)
            await anyio.sleep(120)
            assert consumer.status()[0].state == "parked"
            assert consumer.health().ready
            broken.add(1)
            await anyio.sleep(120)
            assert consumer.status()[1].state == "parked"
            assert not consumer.health().ready
            tasks.cancel_scope.cancel()

    in_time(body, "asyncio")
