"""`Share(leases=, on_assigned=, on_release=)`, and what instances tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, MemoryCursorStore, Share
from feedapi_client.sharing.membership import Callbacks
from feedapi_client.testing import Publisher
from tests.consumer.helpers import consume
from tests.sharing.helpers import QUICK, Numbers, group, until
from tests.sharing.test_outages import BRIEF, Cut

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
Serve = Callable[..., Publisher]


class Held:
    """What an application holds for its partitions."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.released: list[int] = []
        self.pause = anyio.Event()
        self.pause.set()

    async def on_assigned(self, partitions: frozenset[int]) -> None:
        await self.pause.wait()
        assert not self.held & partitions
        self.held |= partitions

    async def on_release(self, partitions: frozenset[int]) -> None:
        await self.pause.wait()
        assert self.held >= partitions
        self.held -= partitions
        self.released += partitions

    def share(self, share: Share = QUICK) -> Share:
        return replace(share, on_assigned=self.on_assigned, on_release=self.on_release)


async def test_partitions_are_held_while_they_are_read_and_no_longer(serve: Serve) -> None:
    publisher = serve(6, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(60)
    mine, theirs = Held(), Held()
    async with group(publisher, MemoryCursorStore()) as instances:

        async def before(batch: Batch) -> None:
            assert (batch.partition in mine.held) + (batch.partition in theirs.held) == 1

        instances.before = before
        mine.pause = anyio.Event()
        one = instances.start(share=mine.share())
        await until(lambda: one.open)
        await anyio.sleep(0.2)
        assert not instances.effects, "nothing is read before on_assigned has returned"
        mine.pause.set()
        await instances.balanced(one, partitions=6)
        await until(lambda: mine.held == set(range(6)))
        two = instances.start(share=theirs.share())
        numbers.publish(60)
        await instances.balanced(one, two, partitions=6)
        await until(lambda: len(theirs.held) == 3)
        assert mine.held == set(range(6)) - theirs.held
        assert sorted(mine.released) == sorted(theirs.held)
        await until(lambda: instances.handled.total() >= 120)
        await instances.stop(one)
        assert not mine.held, "released before its leases"
        await until(lambda: len(theirs.held) == 6)
        await instances.stop(two)
        assert not theirs.held
    assert instances.handled == numbers.expected


async def test_on_release_is_awaited_for_the_time_of_a_hand_over_and_no_longer(
    serve: Serve,
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    held = Held()
    store = MemoryCursorStore()
    share = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=0.3)
    async with group(publisher, store) as instances:
        one = instances.start(share=held.share(share))
        await until(lambda: len(held.held) == 2)
        held.pause = anyio.Event()
        two = instances.start(share=share)
        await instances.balanced(one, two, partitions=2)
        reports = one.consumer.status().reports
        assert any("on_release has not returned within 0.3 s" in text for text in reports)
        held.pause.set()


async def test_a_lost_lease_is_released_once_it_is_known(serve: Serve) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    held = Held()
    cut = Cut(MemoryCursorStore())
    async with (
        consume(publisher, store=cut, share=held.share(BRIEF)) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain, consumer)
        await until(lambda: len(held.held) == 2)
        cut.leases_fail = True
        await until(lambda: sorted(held.released) == [0, 1])
        cut.leases_fail = False
        await until(lambda: len(held.held) == 2)
        consumer.stop()
    assert not held.held


async def drain(consumer: Any) -> None:
    async for _ in consumer.batches():
        pass


async def test_what_on_assigned_raises_ends_the_iteration(serve: Serve) -> None:
    async def fails(partitions: frozenset[int]) -> None:
        raise LookupError("no place for them")

    share = replace(QUICK, on_assigned=fails)
    store = MemoryCursorStore()
    consumer = consume(serve(1), store=store, share=share)
    with pytest.raises(LookupError, match="no place"):
        async with consumer:
            await consumer.batches().__anext__()
    assert not (await store.look(consumer.key)).instances


async def test_what_on_release_raises_is_reported_and_stops_nothing(serve: Serve) -> None:
    async def fails(partitions: frozenset[int]) -> None:
        raise LookupError("a secret")

    publisher = serve(2)
    async with group(publisher, MemoryCursorStore()) as instances:
        one = instances.start(share=replace(QUICK, on_release=fails))
        await instances.balanced(one, partitions=2)
        two = instances.start()
        await instances.balanced(one, two, partitions=2)
        assert any(
            text.endswith("on_release failed with LookupError")
            for text in one.consumer.status().reports
        )


async def test_leases_may_have_a_store_of_their_own(serve: Serve) -> None:
    publisher = serve(4, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(40)
    cursors, leases = MemoryCursorStore(), MemoryCursorStore()
    async with group(publisher, cursors) as instances:
        share = replace(QUICK, leases=leases)
        one, two = instances.start(share=share), instances.start(share=share)
        await instances.balanced(one, two, partitions=4)
        await until(lambda: instances.handled.total() >= 40)
        assert not (await cursors.look(one.consumer.key)).leases
        assert len((await leases.look(one.consumer.key)).instances) == 2
        assert await leases.load(one.consumer.key) == {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"follow": False}, "(follow)"),
        ({"ordered": False}, "(ordered)"),
        ({"partitions": [0, 1]}, "(partitions)"),
        ({"lineage": {1: 0}}, "(lineage)"),
    ],
)
async def test_instances_that_differ_in_an_option_say_so_once(
    serve: Serve, options: dict[str, Any], named: str
) -> None:
    publisher = serve(2)
    publisher.close(0) if "lineage" in options else None
    async with group(publisher, MemoryCursorStore()) as instances:
        one = instances.start()
        await until(lambda: one.open)
        two = instances.start(**options)

        def told(reports: tuple[str, ...]) -> list[str]:
            return [text for text in reports if "has other options than this one" in text]

        await until(lambda: told(one.consumer.status().reports))
        (text,) = told(one.consumer.status().reports)
        assert named in text
        assert two.name in text


async def test_a_partition_that_is_claimed_again_waits_for_the_later_call_of_on_assigned() -> None:
    gates, calls = [anyio.Event(), anyio.Event()], []

    async def on_assigned(partitions: frozenset[int]) -> None:
        calls.append(partitions)
        await gates[len(calls) - 1].wait()

    iteration: Any = None
    callbacks = Callbacks(Share(on_assigned=on_assigned), iteration, lambda: None)
    async with anyio.create_task_group() as tasks:
        callbacks.use(tasks)
        callbacks.assign({3, 4})
        await anyio.wait_all_tasks_blocked()
        callbacks.forget({3})
        callbacks.assign({3})
        await anyio.wait_all_tasks_blocked()
        gates[0].set()
        await anyio.wait_all_tasks_blocked()
        assert callbacks.arriving == {3}
        assert not callbacks.is_over(3)
        gates[1].set()
        await anyio.wait_all_tasks_blocked()
        assert not callbacks.arriving
    assert calls == [{3, 4}, {3}]
