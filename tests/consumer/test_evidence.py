"""R3, R6, R13: what publishers, replicas and gateways of the field say, and what is believed."""

from __future__ import annotations

import functools
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
    cursor,
    lags,
    of_fetches,
    split,
)

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
each_echo = pytest.mark.parametrize("echo", [True, False], ids=["echoing", "silent"])
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
alone_and_shared = pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])

IMPATIENT = RetryPolicy(give_up_after=20.0)
PATIENT = RetryPolicy(decide=lambda error: "retry")
OFTEN = Limits(max_poll_interval=0.5)
EACH_SECOND = Limits(discovery_interval=1.0)
ELSEWHERE = "https://login.invalid/?session=s3cret"
ANSWERS: dict[str, Callable[[], httpx.Response]] = {
    "maintenance": lambda: httpx.Response(200, content=MAINTENANCE),
    "empty 200": lambda: httpx.Response(200),
    "204": lambda: httpx.Response(204),
    "discovery": lambda: Scripted(split(1, 300)).discovery(),
}


def status(code: int) -> httpx.Response:
    return httpx.Response(code, headers={"Location": ELSEWHERE} if code == 302 else {})


def once(answer: Callable[[], httpx.Response]) -> Answer:
    odd = iter([answer()])
    return of_fetches(lambda _: next(odd, None))


def failing(code: int, begin: float, end: float, *, discoveries: bool) -> Answer:
    """Discoveries or fetches are refused between two moments."""

    def answer(_: Scripted, ask: Ask) -> httpx.Response | None:
        concerned = (ask.partition is None) is discoveries
        return status(code) if concerned and begin < ask.at < end else None

    return answer


def refuses(code: int, until: float, *, discoveries: bool = False) -> Answer:
    """A gateway that refuses access from the second fetch on."""

    def answer(feed: Scripted, ask: Ask) -> httpx.Response | None:
        late = len(feed.fetches) > 1 and ask.at < until
        return status(code) if late and (ask.partition is not None or discoveries) else None

    return answer


def changes_its_token() -> Answer:
    """The topology changes every 4 s, and the next request has a stale token."""
    refused = [0]

    def answer(_: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition is None or ask.at < 4 * len(refused):
            return None
        refused.append(ask.partition)
        return httpx.Response(409)

    return answer


CLOSED = {0: Listed(10, closed=True)}
GATEWAYS: dict[str, Callable[[], Answer]] = {
    **{
        f"{name} for {seconds} s": lambda name=name, seconds=seconds: answers_for(
            seconds, ANSWERS[name]
        )
        for name, seconds in [
            *(("maintenance", 0.6), ("maintenance", 30.0), ("empty 200", 0.6), ("empty 200", 5.0)),
            *(("204", 2.0), ("discovery", 1.0)),
        ]
    },
    "replica 1.5 s behind": lambda: lags(1.5, 60),
    "replica 9 s behind": lambda: lags(9.0, 60),
}


@each_echo
@pytest.mark.parametrize("name", GATEWAYS)
async def test_r06_a_moments_answer_does_not_end_a_closed_partition(name: str, echo: bool) -> None:
    feed, store = Scripted(split(1, 300), GATEWAYS[name](), echo=echo), MemoryCursorStore()
    consumer = feed.consumer(store=store)
    assert await feed.read(store=store) == feed.everything
    position = (await store.load(consumer.key))[0]
    assert (position.status, position.cursor) == ("drained", "300")


@on_asyncio
@each_echo
@pytest.mark.parametrize("name", ANSWERS)
async def test_r06_one_odd_answer_does_not_end_an_open_partition_without_follow(
    name: str, echo: bool
) -> None:
    feed = Scripted({0: Listed(500)}, once(ANSWERS[name]), echo=echo)
    assert await feed.read() == feed.everything


OUTAGE = functools.partial(failing, 503, 0.1, 60, discoveries=True)


@on_asyncio
@pytest.mark.parametrize(
    ("partitions", "answers", "least", "most", "refused"),
    [
        pytest.param(split(5, 100), (), 10, 15, 0, id="generations cost one wait"),
        pytest.param(CLOSED, (changes_its_token,), 10, 15, 2, id="a refusal now and then"),
        pytest.param(CLOSED, (OUTAGE,), 60, 99, 2, id="discoveries fail"),
    ],
)
@each_echo
async def test_r06_evidence_is_awaited_for_settle_time_since_the_feed_failed_last(
    partitions: Any, answers: Any, least: float, most: float, refused: int, echo: bool
) -> None:
    feed = Scripted(partitions, *(make() for make in answers), echo=echo)
    began = anyio.current_time()
    assert await feed.read() == feed.everything
    assert least <= anyio.current_time() - began < most
    assert feed.refused >= refused
    assert refused or len(feed.asks) < 80


async def test_r06_a_discovery_between_the_answers_still_lists_the_partition_as_closed() -> None:
    feed = Scripted({0: Listed(10, closed=True)})
    assert await feed.read(limits=Limits(discovery_interval=1000.0)) == feed.everything
    at_end = [at for at, ask in enumerate(feed.asks) if ask.cursor == "10"]
    between = [at for at, ask in enumerate(feed.asks) if ask.partition is None]
    assert len(at_end) >= 3
    assert any(at_end[0] < at < at_end[-1] for at in between)


def many(*answers: Answer) -> Scripted:
    """A closed partition with a child, and 29 open ones that are polled often."""
    partitions = {0: Listed(10, closed=True), 1: Listed(10, starts_after=0)}
    return Scripted(partitions | {id: Listed(10) for id in range(2, 31)}, *answers)


async def test_r06_a_failure_elsewhere_now_and_then_does_not_put_an_end_off() -> None:
    """There is always one: 31 partitions, and one answer in forty is a 503."""
    feed = many(lambda feed, _: None if len(feed.asks) % 40 else httpx.Response(503))
    async with feed.following(limits=OFTEN):
        await anyio.sleep(60)
        assert [each for each in feed.seen if each[0] == 1] == [(1, n) for n in range(10)]


@on_asyncio
async def test_r06_while_half_of_the_answers_fail_nothing_is_drained() -> None:
    feed = many(
        of_fetches(lambda a: status(503) if a.partition > 1 and 1 < a.at < 60 else None)  # type: ignore[operator]
    )
    async with feed.following(limits=OFTEN, retry=RetryPolicy(max_delay=0.5)):
        await anyio.sleep(120)
        began = feed.first_fetch(1, "_first")
        assert began is not None
        assert 60 + 5 < began < 60 + 15


async def test_r06_one_partition_that_always_fails_does_not_keep_others_from_their_end() -> None:
    broken = of_fetches(lambda ask: httpx.Response(500) if ask.partition == 1 else None)
    feed = Scripted({0: Listed(10, closed=True), 1: Listed(10)}, broken)
    async with feed.following() as consumer:
        await anyio.sleep(25)
        assert consumer.status()[0].state == "drained"
        assert consumer.status()[1].state == "retrying"


@on_asyncio
async def test_r06_health_is_told_while_an_answer_that_may_be_evidence_is_under_way() -> None:
    feed, waits = many(), []
    async with feed.following(limits=OFTEN) as consumer:

        def look(_: Scripted, ask: Ask) -> httpx.Response | None:
            if ask.partition == 0:
                assert consumer.health().live
                waits.append(consumer.status().partitions[0].wait)
            return None

        feed.answers.append(look)
        await anyio.sleep(30)
    assert PartitionWait.EVIDENCE in waits


@on_asyncio
@pytest.mark.parametrize("what", ["its own requests", "discoveries"])
async def test_r06_evidence_that_is_overdue_is_a_problem_with_a_name(what: str) -> None:
    """The partition is read, and fails each 5 s: its end is never shown, its child never begins."""
    told: list[Any] = []
    failed = [0.0]

    def fails(_: Scripted, ask: Ask) -> httpx.Response | None:
        concerned = ask.partition == (0 if what == "its own requests" else None)
        if not concerned or not 5 + failed[0] < ask.at < 200:
            return None
        failed[0] = ask.at
        return httpx.Response(503)

    def unproven() -> list[Any]:
        return [p for p in consumer.health().problems if p.name is ProblemName.END_UNPROVEN]

    feed = many(fails)
    async with feed.following(limits=EACH_SECOND) as consumer:
        consumer.subscribe(told.append)
        await anyio.sleep(60)
        assert unproven() == []
        await anyio.sleep(60)
        (problem,) = unproven()
        assert problem.partition == 0
        assert "evidence of its end has been awaited for" in problem.text
        if what != "discoveries":  # one that fails just now concerns all
            assert consumer.health().ready
        await anyio.sleep(180)
        assert feed.first_fetch(1, "_first") is not None
        assert unproven() == []
    ours = [each for each in told if getattr(each, "name", None) is ProblemName.END_UNPROVEN]
    assert [type(each) for each in ours] == [ProblemFound, ProblemGone]


def evidence_records(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if "waits for evidence" in record.message]
    assert all(record.levelno == logging.INFO for record in found)
    return [record.message for record in found]


@on_asyncio
async def test_r06_status_and_one_record_say_that_evidence_is_awaited_and_how_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For each generation that closes. Not one for each partition, or each answer."""
    caplog.set_level(logging.INFO, "feedapi_client")
    feed = Scripted({0: Listed(10), 1: Listed(10)})
    async with feed.following(limits=EACH_SECOND) as consumer:
        await anyio.sleep(5)
        assert evidence_records(caplog) == []
        assert consumer.status()[0].evidence_since is None
        for generation in (0, 1):
            first = 2 * generation
            for id in (first, first + 1):
                feed.partitions[id].closed = True
                feed.partitions[id + 2] = Listed(10, starts_after=id)
            await anyio.sleep(7)
            status = consumer.status()[first]
            assert (status.state, status.wait) == ("reading", PartitionWait.EVIDENCE)
            assert str(status.wait) == "evidence of its end"
            assert status.evidence_seconds is not None
            await anyio.sleep(13)
            assert consumer.status()[first].state == "drained"
            assert consumer.status()[first].evidence_since is None
            assert len(evidence_records(caplog)) == generation + 1
            said = f"the end of partitions {first}, {first + 1}, for at least "
            assert said in evidence_records(caplog)[-1]


async def test_r06_a_history_of_generations_is_told_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "feedapi_client")
    await Scripted(split(5, 100)).read()
    (said,) = evidence_records(caplog)
    assert "of the end of partitions 0, 1, 2, 3, 4, for at least 10.0 s" in said


@pytest.mark.parametrize("code", [404, 503])
async def test_r06_an_end_that_was_seen_is_not_undone_by_refusals_afterwards(code: int) -> None:
    ends: list[float] = []

    def refuse(ask: Ask) -> httpx.Response | None:
        if (ask.partition, ask.cursor) != (0, "10"):
            return None
        ends.append(ask.at)
        return status(code) if len(ends) > 2 else None

    feed = Scripted({0: Listed(10), 1: Listed(100)}, of_fetches(refuse), page=10)
    async with feed.consumer(limits=Limits(max_batch_bytes=1)) as consumer:
        async for batch in consumer.batches():
            feed.seen.extend((e.partition, e.json()["n"]) for e in batch.events)
            await anyio.sleep(20)
            await batch.commit()
    assert sorted(feed.seen) == feed.everything


@pytest.mark.parametrize("on_error", ["raise", "park"])
@pytest.mark.parametrize("code", [404, 503])
async def test_r06_instances_that_are_at_their_ends_do_not_wait_for_each_other(
    code: int, on_error: Any
) -> None:
    """A third one joins before they have said so, and their partitions are refused from then on."""
    feed, store = Scripted({id: Listed(10) for id in range(6)}), MemoryCursorStore()
    began, gate, ended = anyio.current_time(), anyio.Event(), []

    async def handle(batch: Batch) -> None:
        await gate.wait()
        feed.seen.extend((e.partition, e.json()["n"]) for e in batch.events)

    async def run(name: str, delay: float) -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            late = anyio.current_time() >= began + 8
            refused = name != "third" and request.url.query and late
            return httpx.Response(code) if refused else await feed(request)

        await anyio.sleep(delay)
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        consumer = feed.consumer(share=Share(), store=store, http=http, on_error=on_error)
        async with consumer:
            await consumer.run(handle)
        ended.append(name)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for name, delay in (("first", 0.0), ("second", 0.0), ("third", 8.0)):
                tasks.start_soon(run, name, delay)
            await anyio.sleep(20)
            gate.set()
    assert sorted(ended) == ["first", "second", "third"]
    assert sorted(feed.seen) == feed.everything


@alone_and_shared
async def test_r18_without_follow_nobody_waits_for_a_parked_partition(share: Any) -> None:
    feed, store = Scripted({0: Listed(10), 1: Listed(10)}), MemoryCursorStore()
    feed.answers.append(of_fetches(lambda ask: status(503) if ask.cursor == "10" else None))

    async def run() -> None:
        await feed.read(share=share, store=store, on_error="park", retry=IMPATIENT)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(1 if share is None else 2):
                tasks.start_soon(run)


STAYS_BEHIND = of_fetches(lambda ask: cursor(300) if ask.cursor == "400" else None)
FOR_EVER = {name: of_fetches(lambda _, name=name: ANSWERS[name]()) for name in ANSWERS}


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (FOR_EVER["discovery"], TornResponseError, ""),
        (FOR_EVER["maintenance"], TornResponseError, ""),
        (STAYS_BEHIND, NoProgressError, "an older place"),
    ],
    ids=["discovery", "maintenance", "a replica that stays behind"],
)
async def test_r06_answers_that_say_nothing_for_too_long_are_an_error_without_follow(
    answer: Answer, error: type[Exception], text: str
) -> None:
    feed = Scripted({0: Listed(400)}, answer, echo=True)
    with pytest.raises(error) as caught:
        await feed.read(retry=IMPATIENT)
    assert text in str(caught.value)


@on_asyncio
@pytest.mark.parametrize("name", ["discovery", "maintenance"])
async def test_r06_a_gateway_that_answers_in_place_of_the_publisher_is_never_the_end(
    name: str,
) -> None:
    feed = Scripted({0: Listed(50)}, FOR_EVER[name])
    async with feed.following() as consumer:
        await anyio.sleep(60)
        status = consumer.status()
        assert (status[0].state, status[0].caught_up) == ("retrying", None)
        assert [each.name for each in consumer.health().problems] == ["fetch-failing"]
        if name == "maintenance":
            assert status[0].unknown_commands > 1
            assert any("neither an event nor a checkpoint" in text for text in status.reports)
        feed.answers.clear()
        await anyio.sleep(60)
        assert feed.seen == feed.everything


# ---------------------------------------------------------------------- R13


@on_asyncio
async def test_r13_a_replica_with_an_older_end_brings_nothing_twice_and_is_reported() -> None:
    turn = iter(range(1_000_000))

    def lagging(ask: Ask) -> httpx.Response | None:
        if next(turn) % 2 == 0:
            return None
        if ask.cursor == "_first" or int(ask.cursor) < 300:
            return feed.fetch(ask, visible=300)
        return cursor(300)

    feed = Scripted({0: Listed(400)}, of_fetches(lagging), echo=True)
    async with feed.following() as consumer:
        await anyio.sleep(600)
        assert feed.seen == feed.everything
        assert any("an older place" in text for text in consumer.status().reports)
        feed.partitions[0].events = 450
        await anyio.sleep(600)
        assert feed.seen == feed.everything


@on_asyncio
@pytest.mark.parametrize("seed", range(5))
async def test_r13_an_older_end_that_was_never_a_checkpoint_brings_nothing_twice(seed: int) -> None:
    """Of two responses each cuts the same events at places of its own."""
    random = Random(seed)

    def cut_elsewhere(ask: Ask) -> httpx.Response | None:
        feed.page, feed.every = random.randrange(20, 60), random.randrange(3, 20)
        end = 151 if len(feed.fetches) > 15 and len(feed.fetches) % 2 else 400
        at_end = ask.cursor != "_first" and int(ask.cursor) >= end
        return cursor(end) if at_end else feed.fetch(ask, visible=end)

    feed = Scripted({0: Listed(400)}, of_fetches(cut_elsewhere), echo=True)
    async with feed.following():
        await anyio.sleep(100)
        feed.partitions[0].events = 410  # what is new still comes, and once
        feed.answers.clear()
        await anyio.sleep(100)
    assert feed.seen == feed.everything


async def test_r13_cursors_that_move_without_events_are_doubted_once() -> None:
    def ticking(ask: Ask) -> httpx.Response | None:
        place = int(ask.cursor.removeprefix("_first") or "0")
        return cursor(place + 1000) if place >= 10 else None

    feed = Scripted({0: Listed(10)}, of_fetches(ticking))
    async with feed.following():
        await anyio.sleep(30)
    assert feed.seen == feed.everything
    asked = [ask.cursor for ask in feed.fetches]
    doubted = [ask.at for ask in feed.fetches if ask.cursor == "10"]
    assert len(doubted) >= MOVES_BELIEVED
    assert 10 <= doubted[-1] - doubted[0] < 13
    assert all(asked.count(each) == 1 for each in asked if each != "10")


@pytest.mark.parametrize(
    ("end", "older", "turns", "seconds"),
    [(400, 150, 2, 1000), (20, 4, 1, 8)],
    ids=["of each second answer", "for a moment, of the one that the load balancer keeps to"],
)
async def test_r13_after_a_restart_a_replica_with_an_older_end_brings_nothing_twice(
    end: int, older: int, turns: int, seconds: float
) -> None:
    feed = Scripted({0: Listed(end)}, page=end // 8 * 4, every=1)
    store = MemoryCursorStore()
    async with feed.following(store=store):
        await anyio.sleep(5)
    restarted = feed.asks[-1].at

    def answer(ask: Ask) -> httpx.Response | None:
        lags = ask.at < restarted + seconds and ask.cursor == str(end)
        return cursor(older) if lags and not len(feed.fetches) % turns else None

    feed.answers.append(of_fetches(answer))
    async with feed.following(store=store) as consumer:
        await anyio.sleep(60)
    assert feed.seen == feed.everything
    assert (await store.load(consumer.key))[0].cursor == str(end)


async def test_r13_a_cursor_that_moves_without_events_after_a_restart_is_followed() -> None:
    """As that of a publisher which leaves out events, a bounded number at a time."""
    store = MemoryCursorStore()
    leaves_out = {"10": "20", "20": "30"}
    feed = Scripted(
        {0: Listed(30)},
        of_fetches(
            lambda ask: cursor(leaves_out[ask.cursor]) if ask.cursor in leaves_out else None
        ),
        page=10,
    )
    consumer = feed.consumer(store=store)
    await store.save(consumer.key, {0: Position("10")})
    assert await feed.read(store=store) == []
    assert (await store.load(consumer.key))[0].cursor == "30"
    asked = [ask.cursor for ask in feed.fetches]
    assert asked.count("10") >= MOVES_BELIEVED
    assert asked[asked.count("10") :][:2] == ["20", "30"]


# ---------------------------------------------------------------------- late events, later runs


def behind_the_end(reports: tuple[str, ...]) -> list[str]:
    found = [line for line in reports if "behind the end" in line]
    for line in found:
        assert "partition 0: there is an event behind the end that is stored" in line
        assert "'feedapi cursors set 0 CURSOR'" in line
    return found


async def test_r06_an_event_that_comes_late_is_delivered_and_reported() -> None:
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()
    async with feed.following(store=store) as consumer:
        await anyio.sleep(30)
        assert consumer.status()[0].state == "drained"
        assert feed.seen == feed.everything
        feed.partitions[0].events = 110  # the replica is there at last
        await anyio.sleep(120)
        assert feed.seen[200:] == [(0, n) for n in range(100, 110)]
        assert consumer.status()[0].state == "drained"
        position = (await store.load(consumer.key))[0]
        assert (position.cursor, position.status) == ("110", "drained")
        assert any("it is delivered late" in text for text in consumer.status().reports)


@on_asyncio
@alone_and_shared
async def test_r06_an_event_that_comes_late_after_a_restart_is_reported(share: Any) -> None:
    """Not delivered: an operator may have drained the partition, to leave out the rest."""
    feed, store = Scripted(split(1, 100)), MemoryCursorStore()
    published = feed.everything
    for seconds in (30, 200):
        async with feed.following(store=store, share=share) as consumer:
            await anyio.sleep(seconds)
            found = behind_the_end(consumer.status().reports)
            feed.partitions[0].events = 110  # while no process runs
            consumer.stop()
    assert feed.seen == published
    assert len(found) == 1


@on_asyncio
@pytest.mark.parametrize("before", [0, 50], ids=["never read", "read in part"])
@alone_and_shared
async def test_r06_a_run_without_follow_looks_behind_the_ends_of_earlier_runs(
    before: int, share: Any
) -> None:
    """Each run is shorter than the pause before a look: one look at least is waited for."""
    feed, store = Scripted(split(1, 100), lags(40, before)), MemoryCursorStore()

    async def run(*expected: tuple[int, int]) -> list[str]:
        async with feed.consumer(store=store, share=share) as consumer:
            with anyio.fail_after(1000):
                assert [(e.partition, e.json()["n"]) async for e in consumer] == [*expected]
            return behind_the_end(consumer.status().reports)

    last = [(1, n) for n in range(100)]
    assert await run(*[(0, n) for n in range(before)], *last) == []
    await anyio.sleep(40)
    refused = iter([status(503), status(404)])  # a look that fails is made again
    feed.answers.append(of_fetches(lambda ask: next(refused, None) if ask.partition == 0 else None))
    (report,) = await run()
    assert report.endswith(f": '{before or FIRST}'")
    (key,) = await store.feeds()
    drained = (await store.load(key))[0]
    await store.save(key, {0: drained.advance(status="open")})
    assert await run(*[(0, n) for n in range(before, 100)]) == []
    fetches = len(feed.fetches)
    assert await run() == []
    assert len(feed.fetches) <= fetches + 3  # one look, and the end of the open partition


@on_asyncio
@pytest.mark.parametrize("restarts", [1, 2])
async def test_r07_what_was_closed_from_the_outset_is_only_asked_behind_its_end(
    restarts: int,
) -> None:
    ends = of_fetches(lambda ask: cursor(100) if ask.cursor == "_last" else None)
    feed, store = Scripted(split(1, 100), ends), MemoryCursorStore()
    for _ in range(restarts):
        async with feed.following(store=store, start="last") as consumer:
            await anyio.sleep(300)
            assert behind_the_end(consumer.status().reports) == []
    assert {ask.cursor for ask in feed.fetches if ask.partition == 0} == {"_last", "100"}


async def test_r06_a_child_by_a_declared_edge_was_not_closed_from_the_outset() -> None:
    """It was drained unread, long after the start at the end of its parent."""
    feed = Scripted({0: Listed(closed=True), 1: Listed(10, closed=True), 2: Listed()})
    store = MemoryCursorStore()
    consumer = feed.consumer(store=store, start="last", lineage={1: 0, 2: 1})
    drained = {0: Position("0", "drained", 2, 1), 1: Position(FIRST, "drained"), 2: Position("0")}
    await store.save(consumer.key, {0: Position("0")})
    await store.save(consumer.key, drained)
    async with consumer:
        with anyio.fail_after(1000):
            assert [event async for event in consumer] == []
        (report,) = [line for line in consumer.status().reports if "behind the end" in line]
    assert "partition 1: there is an event behind the end that is stored" in report


@pytest.mark.parametrize("listed", [[], None], ids=["empty", "null"])
@alone_and_shared
async def test_r07_a_publisher_that_starts_is_waited_for_whatever_is_stored(
    listed: Any, share: Any
) -> None:
    feed, store = Scripted({0: Listed(10)}), MemoryCursorStore()
    assert await feed.read(store=store) == feed.everything
    feed.partitions[0].events = 20
    discoveries = iter([httpx.Response(200, json={"token": "t", "partitions": listed})])
    feed.answers.append(lambda _, ask: next(discoveries, None) if not ask.params else None)
    assert await feed.read(store=store, share=share) == feed.everything[10:]


async def test_r07_a_feed_that_lists_nothing_any_more_is_reported_and_at_its_end() -> None:
    feed, store = Scripted({0: Listed(10)}), MemoryCursorStore()
    await feed.read(store=store)
    feed.partitions.clear()
    began = anyio.current_time()
    async with feed.consumer(store=store) as consumer:
        with anyio.fail_after(60):
            assert [event async for event in consumer] == []
        assert any("partition 0: is no longer listed" in r for r in consumer.status().reports)
    assert anyio.current_time() - began >= 10.0
    assert (await store.load(consumer.key))[0].cursor == "10"


@on_asyncio
async def test_r06_after_ten_minutes_a_drained_partition_is_left_alone() -> None:
    feed = Scripted(split(3, 10))
    async with feed.following():
        await anyio.sleep(20)
        asked = len([ask for ask in feed.fetches if ask.partition != 3])
        await anyio.sleep(1800)
        again = [ask for ask in feed.fetches if ask.partition != 3][asked:]
        assert {ask.partition for ask in again} == {0, 1, 2}
        assert max(ask.at for ask in again) < 700
        assert len(again) <= 3 * 6


# ---------------------------------------------------------------------- refusals (R10, R14, R18)


@on_asyncio
@pytest.mark.parametrize("code", [401, 403, 405, 421, 404, 302, 304, 402, 407, 451])
@pytest.mark.parametrize("discoveries", [False, True])
async def test_r10_a_running_consumer_waits_until_refusals_pass(
    code: int, discoveries: bool
) -> None:
    feed = Scripted({0: Listed(300)}, refuses(code, 40.0, discoveries=discoveries), echo=True)
    assert await feed.read() == feed.everything


@on_asyncio
@pytest.mark.parametrize(
    ("code", "error"),
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
async def test_r10_refusals_that_last_are_an_error_or_park_and_the_consumer_is_not_ready(
    code: int, error: type[Exception], on_error: Any
) -> None:
    refuse = of_fetches(lambda a: status(code) if (a.partition, a.cursor) == (0, "100") else None)
    feed = Scripted({0: Listed(300), 1: Listed(10)}, refuse, echo=True)
    raised: list[Exception] = []
    consumer = feed.consumer(follow=True, on_error=on_error)
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
            assert str(code) in str(raised[0])
            assert "s3cret" not in str(raised[0])
        else:
            assert [consumer.status()[id].state for id in (0, 1)] == ["parked", "caught up"]
        tasks.cancel_scope.cancel()


@on_asyncio
@pytest.mark.parametrize("code", [302, 401, 402, 405])
async def test_r10_an_application_may_decide_that_a_gateway_is_asked_for_longer(code: int) -> None:
    """It is discovered again meanwhile: a token may be what is refused."""
    feed = Scripted({0: Listed(300)}, refuses(code, 200.0), echo=True)
    assert await feed.read(retry=PATIENT) == feed.everything
    assert [ask.at for ask in feed.asks if ask.partition is None][1] < 10


@on_asyncio
@pytest.mark.parametrize("code", [302, 401, 402, 405])
async def test_r14_such_a_decision_does_not_outlast_give_up_after(code: int) -> None:
    feed, began = Scripted({0: Listed(300)}, refuses(code, 500.0), echo=True), anyio.current_time()
    patient = RetryPolicy(decide=lambda error: "retry", give_up_after=20.0, max_delay=5.0)
    with pytest.raises(FeedError):
        await feed.read(retry=patient)
    assert 20 <= anyio.current_time() - began < 40


@on_asyncio
async def test_r18_a_feed_of_which_everything_is_parked_is_not_ready() -> None:
    broken: set[int | None] = set()
    feed = Scripted(
        {0: Listed(10), 1: Listed(10)},
        of_fetches(lambda ask: httpx.Response(500) if ask.partition in broken else None),
    )
    async with feed.following(on_error="park", retry=IMPATIENT) as consumer:
        await anyio.sleep(5)
        for partition, ready in ((0, True), (1, False)):
            broken.add(partition)
            await anyio.sleep(120)
            assert consumer.status()[partition].state == "parked"
            assert consumer.health().ready is ready
