"""R5 commit, R6 drained, R7 bootstrap, R17 fencing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    CommitOrderError,
    FencedError,
    FetchOptions,
    LineageError,
    NoProgressError,
    Position,
    RequestRefusedError,
    RetryPolicy,
    StoreError,
)
from feedapi_client.testing import Publisher, Quirks, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    BrokenStore,
    LocalFeed,
    Reader,
    Transaction,
    limits,
    n_of,
    rediscovered,
    wait_until,
)
from tests.consumer.script import Step, do, play
from tests.positions import stand

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

SMALL = {"max_batch_bytes": 1}
"""Deliver each checkpoint, or each page, as a batch of its own."""
UNREAD = {0: "_first"}


def in_pairs(*values: int) -> LocalFeed:
    """A feed whose batches hold two events each."""
    feed = LocalFeed(page_size=2, checkpoint_every=2)
    feed.numbers(0, *values)
    return feed


# ---------------------------------------------------------------------- R5


PAIRS = do.begin_with(page_size=2, checkpoint_every=2), do.numbers(0, 0, 1), do.numbers(0, 2, 3)
SMALL_BATCHES = do.open(limit=SMALL)
OUT_OF_ORDER = CommitOrderError, "partition 0"
ROLLED_BACK = CommitOrderError, "Commit again before you ask, or begin"
CHILD = do.split(0, 1), do.numbers(1, 2)
COMMITS: dict[str, list[Step]] = {
    "async for commits a batch when the loop asks for the event after it": [
        *(*PAIRS, SMALL_BATCHES, do.takes(0, 1), do.saved(1), do.takes(2), do.saved(2)),
    ],
    "an event loop left in the middle of a batch repeats it": [
        *(do.numbers(0, *range(5)), do.open(), do.takes(*range(4)), do.leave(), do.unread()),
        do.reads(*range(5)),
    ],
    "batches commits nothing by itself": [
        *(*PAIRS, SMALL_BATCHES, do.delivers("a", 0, 1), do.delivers("b", 2, 3), do.leave()),
        do.unread(),
    ],
    "who asks for the next batch after a rollback is told what to do": [
        *(*PAIRS, SMALL_BATCHES, do.delivers("a", 0, 1), do.rolls_back("a")),
        *(do.delivers("b", 2, 3), do.raises(*ROLLED_BACK, do.commits("a")), do.again()),
        *(do.delivers("a", 0, 1), do.commits("a"), do.delivers("b", 2, 3), do.commits("b")),
        do.at_end_cursor(),
    ],
    "lineage advances when the application asks for the next batch": [
        *(do.numbers(0, 0, 1), *CHILD, do.open(), do.delivers("a", 0, 1), do.rolls_back("a")),
        *(do.rediscovered(), do.waits(1, 0), do.commits("a"), do.delivers("child", 2)),
    ],
    "committing out of order is an error and saves nothing": [
        *(*PAIRS, SMALL_BATCHES, do.delivers("a", 0, 1), do.delivers("b", 2, 3), do.commits("b")),
        *(do.raises(*OUT_OF_ORDER, do.commits("a")), do.at_end_cursor(), do.saved(2)),
    ],
    "committing twice is harmless": [
        *(do.numbers(0, 0, 1), do.open(), do.delivers("a", 0, 1)),
        *(do.commits("a"), do.commits("a"), do.at_end_cursor(), do.saved(2)),
    ],
    "a batch of an iteration that ended is not committed": [
        *(do.numbers(0, 0, 1), do.open(), do.delivers("a", 0, 1), do.again(), do.takes(0)),
        *(do.raises(CommitOrderError, "iteration", do.commits("a")), do.leave()),
        *(do.raises(CommitOrderError, "iteration", do.commits("a")), do.unread()),
    ],
}


@pytest.mark.parametrize("steps", COMMITS.values(), ids=COMMITS)
async def test_r05_what_is_committed_and_when(steps: list[Step]) -> None:
    await play(*steps)


@pytest.mark.parametrize("commits", [False, True], ids=["run commits", "the handler commits"])
async def test_r05_run_commits_when_the_handler_returns_unless_it_did_so(commits: bool) -> None:
    feed, before = LocalFeed(), []
    end = feed.numbers(0, 0, 1, 2)

    async def handle(batch: Batch) -> None:
        before.append(await feed.store.cursors())
        if commits:
            await batch.commit()

    await feed.run(handle)
    assert before[0] == UNREAD
    assert await feed.store.cursors() == {0: end}
    assert len(feed.store.saves) == 2


@pytest.mark.parametrize("how", ["break", "exception", "cancellation", "leaving the block"])
async def test_r05_leaving_the_loop_in_any_way_commits_nothing_more(how: str) -> None:
    feed = in_pairs(*range(6))

    async def work() -> None:
        async with feed.consume(limit=SMALL) as consumer:
            async for event in consumer:
                if event.json()["n"] != 3:  # the last event of the second batch
                    continue
                if how == "break":
                    break
                if how == "exception":
                    raise ZeroDivisionError
                if how == "cancellation":
                    scope.cancel()
                    await anyio.sleep(0.001)
                return

    raises: Any = pytest.raises(ZeroDivisionError) if how == "exception" else nullcontext()
    with anyio.CancelScope() as scope, raises:
        await work()
    assert await feed.read() == [2, 3, 4, 5]


async def test_r05_a_cancelled_commit_is_finished_first() -> None:
    feed = LocalFeed()
    end = feed.numbers(0, *range(5))
    async with feed.open() as reader:
        batch, gate = await reader.batch(), feed.store.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batch.commit)
            await gate.reached.wait()
            tasks.cancel_scope.cancel()
            gate.opened.set()
    assert await feed.store.cursors() == {0: end}


async def test_r05_a_save_that_hangs_is_given_up_in_time() -> None:
    feed = in_pairs(0, 1)
    async with feed.open(limit={"commit_timeout": 0.05}) as reader:
        batch, _ = await reader.batch(), feed.store.hold()
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(StoreError, match="commit_timeout"):
            await batch.commit()


async def test_r05_a_rolled_back_batch_is_committed_again_against_the_same_predecessor() -> None:
    feed = in_pairs(0, 1)
    end = feed.numbers(0, 2, 3)
    async with feed.open(limit=SMALL) as reader:
        batch = await reader.batch()
        rolled_back = [Transaction(), Transaction()]
        for transaction in rolled_back:
            await batch.commit(transaction)
        first = (await feed.store.positions())[0].revision
        assert {change[0].replaces for t in rolled_back for _, change in t.changes} == {first}
        assert len({change[0].revision for t in rolled_back for _, change in t.changes}) == 1
        transaction = Transaction()
        await batch.commit(transaction)
        await feed.store.commit(transaction)
        await reader.commit()
    assert await feed.store.cursors() == {0: end}


async def test_r05_a_store_that_fails_is_a_store_error_without_the_drivers_text() -> None:
    feed = LocalFeed(store=(store := BrokenStore()))
    with pytest.raises(StoreError):
        await feed.enter()
    store.broken = False
    feed.numbers(0, 0, 1)
    async with feed.open() as reader:
        batch = await reader.batch()
        store.broken = True
        with pytest.raises(StoreError, match="saving cursors failed: ConnectionError") as caught:
            await batch.commit()
        assert "hunter2" not in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectionError)
        store.broken = False
        await batch.commit()
        feed.numbers(0, 4)
        assert await reader.commit() == [4]


async def test_r05_errors_of_a_store_that_cause_each_other_are_raised_like_any_other() -> None:
    feed = LocalFeed()
    first, second = StoreError("one"), StoreError("two")
    first.__cause__, second.__cause__ = second, first

    async def fail(_: object) -> None:
        raise first

    feed.store.before_save = fail
    with pytest.raises(StoreError, match="one"):
        await feed.enter()


async def test_r17_status_shows_no_cursor_that_the_store_has_not() -> None:
    """Also not where a second save, which compares the first one's, waits behind it."""
    feed = LocalFeed(quirks=Quirks(last_cursor="always"))
    feed.numbers(0, 1)
    async with feed.running() as reader:
        status = reader.consumer.status
        await wait_until(lambda: status()[0].caught_up)
        [child] = feed.split(0, into=1, method="starts-after")
        children = feed.split(child, into=2, method="cursor-from")
        gate = feed.store.hold()
        await gate.reached.wait()
        assert [status()[id].cursor for id in children] == [None, None]
        gate.opened.set()
        await wait_until(lambda: all(status()[id].cursor is not None for id in children))


@pytest.mark.parametrize("why", ["fails", "refuses"])
async def test_r05_r17_a_transfer_in_the_background_that_is_not_saved_ends_the_iteration(
    why: str,
) -> None:
    feed = LocalFeed(store=(store := BrokenStore()))
    store.broken = False
    feed.numbers(0, 0)
    async with feed.open() as reader:
        await reader.commit()
        await reader.at_end()
        store.broken = why == "fails"
        if why == "refuses":
            await store.replace(reader.consumer.key, {0: Position("_first")})
        feed.split(0, method="cursor-from")
        error = StoreError if store.broken else FencedError
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(error):
            await anext(reader.batches)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])  # the order of a real network
async def test_r05_an_iteration_begun_during_a_save_of_the_one_before_is_not_fenced() -> None:
    feed = LocalFeed()
    feed.fill(0, 10)
    with feed.serve():
        async with feed.open() as reader, anyio.create_task_group() as tasks:
            await reader.commit()
            await reader.at_end()
            gate = feed.store.hold()
            feed.split(0, method="cursor-from")
            await gate.reached.wait()  # the transfer of the cursor
            feed.fill(10, 20)
            tasks.start_soon(gate.open_when_all_wait)
            assert sorted(await reader.take(10)) == [*range(10, 20)]


async def test_r05_a_late_commit_and_a_transfer_of_its_partition_do_not_fence_each_other() -> None:
    feed = LocalFeed(2)
    feed.numbers(0, 0)
    async with feed.open() as reader:
        late = await reader.batch(0)
        feed.numbers(1, 1)
        await reader.commit(1)
        gate = feed.store.hold(lambda saved: 0 in saved and saved[0].cursor == late.cursor)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.commit)
            await gate.reached.wait()
            feed.split(0, 1, method="cursor-from")
            await rediscovered(feed)
            gate.opened.set()
        feed.numbers(2, 2)
        assert await reader.commit() == [2]
    assert (await feed.store.statuses())[0] == "superseded"


async def test_r05_a_late_commit_wakes_an_iteration_that_waits_for_it() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    feed.split(0, 1)
    feed.numbers(1, 1)
    async with feed.open() as reader, anyio.create_task_group() as tasks:
        parent = await reader.batch()

        async def commit() -> None:
            await wait_until(reader.reports)
            await parent.commit()

        tasks.start_soon(commit)
        assert await reader.commit() == [1]


async def test_r05_two_commits_of_one_partition_at_once_are_out_of_order() -> None:
    feed = in_pairs(0, 1)
    async with feed.open(limit=SMALL) as reader:
        batch, gate = await reader.batch(), feed.store.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batch.commit)
            await gate.reached.wait()
            with pytest.raises(CommitOrderError, match="another commit of this partition") as error:
                await batch.commit()
            assert error.value.partition == 0
            gate.opened.set()
        await batch.commit()  # that the other one has done
    assert await feed.store.cursors() == {0: batch.cursor}


# ---------------------------------------------------------------------- R6


@pytest.mark.parametrize("events", [5, 0])
@pytest.mark.parametrize("last_cursor", ["closed", "never"])
@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
async def test_r06_a_closed_partition_is_drained_at_its_end_and_is_not_read_again(
    dialect: Any, last_cursor: Any, events: int
) -> None:
    """Without a `lastCursor` a run without `follow` looks once whether more has come."""
    feed = LocalFeed(dialect=dialect, quirks=Quirks(last_cursor=last_cursor))
    feed.numbers(0, *range(events))
    feed.close(0)
    async with feed.open(follow=False) as reader:
        assert [event.json()["n"] async for event in reader.events] == [*range(events)]
        assert reader.state() == "drained"
    assert stand(await feed.store.positions()) == {0: (feed.end_cursor(0), "drained")}
    feed.clear_requests()
    assert await feed.read() == []
    assert feed.counters["fetch"] == (1 if last_cursor == "never" else 0)


async def test_r06_drained_by_last_cursor_is_saved_with_the_position_itself() -> None:
    feed = LocalFeed(dialect="v2-draft")
    end = feed.numbers(0, *range(5))
    feed.close(0)
    async with feed.open() as reader:
        await reader.commit()
    assert stand(feed.store.saves[-1]) == {0: (end, "drained")}


@pytest.mark.parametrize(
    "quirks", [Quirks(), Quirks(keep_token=True), Quirks(last_cursor="closed")], ids=repr
)
async def test_r06_a_partition_that_closes_while_caught_up_is_asked_once_more(
    quirks: Quirks,
) -> None:
    feed, seen = LocalFeed(quirks=quirks), []
    feed.numbers(0, 0)

    async def handle(batch: Batch) -> None:
        seen.extend(n_of(batch.events))

    async with feed.running(handle) as reader:
        await reader.until("caught up")
        feed.numbers(0, 1)
        feed.close(0)
        await reader.until("drained")
    assert seen == [0, 1]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("empty", ["pages", "stretches of internal events"])
async def test_r06_empty_pages_whose_cursor_moves_are_progress_and_not_the_end(
    empty: str, closed: bool
) -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    if empty == "pages":
        feed.fail(faults.EmptyPage(), times=12)
    else:
        feed.append_internal(0, 30_000)
    feed.numbers(0, 1)
    if closed:
        feed.close(0)
    assert await feed.read(limit={"poll_interval": 0.001}) == [0, 1]


# ---------------------------------------------------------------------- R7


async def test_r07_bootstrap_saves_every_position_in_one_save() -> None:
    feed = LocalFeed(20)
    await feed.enter()
    (saved,) = feed.store.saves
    assert stand(saved) == dict.fromkeys(range(20), ("_first", "open"))


def splits_now(method: Any) -> Any:
    """A fault: the publisher splits when it is asked, and refuses."""

    def split(response: Response, request: Request, publisher: Publisher) -> Response:
        publisher.split(0, method=method)
        return Response(409)

    return split


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *[(status, 5) for status in (400, 404, 409, 410, 503)],
        (faults.Empty(), 1),
        (splits_now("starts-after"), 1),
        (splits_now("cursor-from"), 1),
    ],
)
async def test_r07_r10_a_request_for_the_end_that_fails_for_a_while_is_no_error(
    fault: Any, times: int
) -> None:
    feed = LocalFeed()
    feed.fill(0, 10)
    feed.fail(fault, times=times, on="fetch")
    async with feed.open(start="last") as reader:
        feed.fill(10, 20)
        assert sorted(await reader.take(10)) == [*range(10, 20)]


async def test_r07_r10_partitions_whose_ends_are_refused_together_share_a_discovery() -> None:
    feed = LocalFeed(32)

    def rotate(response: Response, request: Request, publisher: Publisher) -> Response:
        publisher.rotate_token()
        return Response(409)

    feed.fail(rotate, times=1, on="fetch")
    async with feed.open(start="last", limit={"discovery_interval": 3600}):
        assert feed.counters["fetch"] > 32
        assert feed.counters["discovery"] == 2


ECHO = faults.Replace(b'{"cursor":"_last"}\n')


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (404, RequestRefusedError, "404"),
        (faults.Empty(), NoProgressError, "'feedapi cursors skip'"),
        (ECHO, NoProgressError, "'feedapi cursors skip'"),
    ],
)
async def test_r07_where_the_end_is_not_known_the_entry_ends_and_nothing_is_stored(
    fault: Any, error: type[Exception], text: str
) -> None:
    feed = LocalFeed()
    feed.fill(0, 10)
    feed.fail(fault, times=None, on="fetch")
    retry = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)
    with anyio.fail_after(SAFETY_LIMIT), pytest.raises(error, match=text):
        await feed.enter(start="last", retry=retry)
    assert feed.store.saves == []
    if error is NoProgressError:
        assert feed.counters["fetch"] == limits().max_attempts_without_progress


async def test_r07_an_empty_first_discovery_is_waited_out_and_does_not_use_up_the_start() -> None:
    feed = LocalFeed(2)
    end = feed.numbers(0, *range(5))
    feed.fail(faults.Replace(b'{"token":"t","partitions":null}'), times=3, on="discovery")
    async with feed.open(start="last") as reader:
        await reader.nothing_until(lambda: feed.store.saves)
        assert (await feed.store.cursors())[0] == end
        feed.numbers(0, 5)
        assert await reader.commit() == [5]
        assert reader.reports("lists no partition so far")


async def test_r07_a_start_mapping_gives_cursors_of_the_first_start_and_of_no_other() -> None:
    """`_last` in it is asked for, and never stored."""
    feed = LocalFeed(3)
    middle = feed.numbers(0, 0, 1)
    feed.numbers(0, 2)
    feed.numbers(1, 10)
    end = feed.numbers(2, 20)
    start = {0: middle, 2: "_last"}
    async with feed.open(follow=False, start=start) as reader:
        assert [stand(each) for each in feed.store.saves] == [
            {0: (middle, "open"), 1: ("_first", "open"), 2: (end, "open")}
        ]
        feed.numbers(2, 21)
        assert sorted([event.json()["n"] async for event in reader.events]) == [2, 10, 21]
    assert await feed.read(start={0: "_first"}) == []


TEN = do.fill(0, 10)
AT_END = do.open(start="last")
ENDS: dict[str, list[Step]] = {
    "r06 a reopened partition is read on": [
        *(do.numbers(0, 0), do.close(0), do.reads(0), do.reopen(0), do.numbers(0, 1), do.reads(1)),
    ],
    "start=last delivers only events published after the start": [
        *(do.begin_with(2), TEN, AT_END, do.numbers(0, 100), do.takes(100)),
    ],
    **{
        f"a crash before the first event skips nothing: {last_cursor}, {restart_at}": [
            *(do.begin_with(2, quirks=Quirks(last_cursor=last_cursor)), TEN),
            *(do.enter(start="last"), do.no_cursor_is("_last"), do.numbers(1, 100)),
            # Also of a partition that appeared meanwhile.
            *(do.add(5), do.numbers(5, 101), do.reads_all(100, 101, start=restart_at)),
        ]
        for last_cursor in ("closed", "always")
        for restart_at in ("first", "last")
    },
    **{
        f"a partition that appears later is read from its first event: {start}": [
            *(do.open(start=start), do.add(5), do.numbers(5, 1, 2, 3), do.takes(1, 2, 3)),
        ]
        for start in ("first", "last")
    },
    **{
        f"after start=last the children of a later split are read whole: {method}": [
            *(TEN, AT_END, do.fill(10, 15), do.split(0, method=method), do.fill(15, 25)),
            do.takes_all(*range(10, 25)),
        ]
        for method in ("starts-after", "cursor-from")
    },
    "start=last drains closed partitions from the outset": [
        *(TEN, do.split(0), do.fill(10, 20), AT_END),
        *(do.stored({0: "drained", 1: "open", 2: "open"}), do.state(0, "drained")),
        *(do.numbers(1, 100), do.numbers(2, 101), do.takes_all(100, 101), do.at_end_cursor()),
    ],
    "where ends are not known after an empty list the iteration ends": [
        do.fail(faults.Replace(b'{"token":"t","partitions":[]}'), times=2, on="discovery"),
        *(do.fail(ECHO, times=None, on="fetch"), AT_END),
        do.raises(NoProgressError, "'feedapi cursors skip'", do.takes(0)),
    ],
    "a start mapping may name the ancestor of a split": [
        *(TEN, do.reads(*range(10), name="other"), do.split(0, method="cursor-from")),
        *(do.fill(10, 20), do.reads_from_end_of(0, *range(10, 20))),
    ],
    "a start mapping that names an unknown partition is an error": [
        do.raises(LineageError, "partition 7", do.enter(start={7: "_first"})),
        do.saved(0),
    ],
}


@pytest.mark.parametrize("steps", ENDS.values(), ids=ENDS)
async def test_r07_where_a_consumer_starts(steps: list[Step]) -> None:
    await play(*steps)


async def test_r07_names_and_filters_have_positions_of_their_own() -> None:
    feed = LocalFeed(dialect="v2-draft", filters=["entity"])
    feed.numbers(0, 0, entity="a")
    feed.numbers(0, 1, entity="b")
    only_a, only_b = (FetchOptions(filters={"entity": entity}) for entity in "ab")
    for options, expected in [
        ({}, [0, 1]),
        ({"name": "other"}, [0, 1]),
        ({"fetch": only_a}, [0]),
        ({"fetch": only_b}, [1]),
        ({"fetch": only_a}, []),
        ({}, []),
    ]:
        assert await feed.read(start="first", **options) == expected


# ---------------------------------------------------------------------- R17


async def test_r17_the_second_save_is_refused_and_that_consumer_stops() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    async with feed.open() as one, feed.open() as two:
        winner, loser = await one.batch(), await two.batch()
        await winner.commit()
        with pytest.raises(FencedError, match="default"):
            await loser.commit()
        feed.numbers(0, 1)
        assert await one.commit() == [1]
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(FencedError):
            await anext(two.batches)


@pytest.mark.parametrize("way", ["run", "loop"])
async def test_r17_async_for_and_run_end_with_fenced_error(way: str) -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)

    async def rival(_: Any) -> None:
        await feed.read()

    async def loop(reader: Reader) -> None:
        async for event in reader.events:
            await rival(event)

    async with feed.open() as reader:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(FencedError):
            await (reader.consumer.run(rival) if way == "run" else loop(reader))


@pytest.mark.parametrize("child", ["stored", "listed later", "its cursor was given"])
async def test_r17_nothing_begins_behind_an_end_that_the_store_has_lost(child: str) -> None:
    # An end that is found later is saved with what begins behind it.
    feed = LocalFeed(quirks=Quirks(last_cursor="closed"))
    feed.numbers(0, 0, 1)
    rows: dict[int, Position] = {}
    if child == "listed later":
        await feed.enter()
        rows = await feed.store.positions()
    start = {0: "_first"}
    for successor in feed.split(0, method="starts-after"):
        start[successor] = feed.numbers(successor, 9)
        feed.numbers(successor, 2, 3)
    if child != "listed later":
        await feed.enter(start="first" if child == "stored" else start)
        rows = await feed.store.positions()

    async def fail_over(_: object) -> None:
        """Go back to the first rows, once the end of the parent is stored."""
        if (await feed.store.positions())[0].status == "drained":
            feed.store.before_save = None
            (key,) = await feed.store.feeds()
            await feed.store.delete(key)
            await feed.store.save(key, {p: replace(at, replaces=None) for p, at in rows.items()})

    feed.store.before_save = fail_over
    handled: list[int] = []

    async def handle(batch: Batch) -> None:
        handled.extend(n_of(batch.events))

    with pytest.raises(FencedError, match="the store went back"):
        await feed.run(handle)
    assert handled == [0, 1]
    rest = [2, 3] if child == "its cursor was given" else [9, 2, 3]
    assert await feed.read() == [0, 1, *rest, *rest]


async def test_r17_of_two_consumers_that_bootstrap_at_once_one_is_fenced() -> None:
    feed, outcomes = LocalFeed(), []

    async def bootstrap() -> None:
        try:
            await feed.enter()
            outcomes.append("open")
        except FencedError:
            outcomes.append("fenced")

    async def both_have_loaded(_: object) -> None:
        await wait_until(lambda: feed.store.loads >= 2)

    feed.store.before_save = both_have_loaded
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bootstrap)
        tasks.start_soon(bootstrap)
    assert sorted(outcomes) == ["fenced", "open"]
