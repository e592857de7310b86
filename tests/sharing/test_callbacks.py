"""`Share(leases=, on_assigned=, on_release=)`, and what instances tell each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, MemoryCursorStore, Share
from feedapi_client.sharing.membership import Callbacks
from feedapi_client.testing import Publisher
from tests.sharing.fleet import BRIEF, PAGES, fleet, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


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

    def share(self, share: Share = BRIEF) -> Share:
        return replace(share, on_assigned=self.on_assigned, on_release=self.on_release)


async def fails(_: frozenset[int]) -> None:
    raise LookupError("no place for a secret")


async def test_partitions_are_held_while_they_are_read_and_no_longer() -> None:
    mine, theirs = Held(), Held()

    async def before(batch: Batch) -> None:
        assert (batch.partition in mine.held) + (batch.partition in theirs.held) == 1

    async with fleet(Publisher(6, **PAGES)) as instances:
        instances.publish(60)
        instances.before = before
        mine.pause = anyio.Event()
        one = instances.start(share=mine.share())
        await until(lambda: one.open)
        await anyio.sleep(20)
        assert not instances.effects, "nothing is read before on_assigned has returned"
        mine.pause.set()
        await until(lambda: mine.held == set(range(6)))
        two = instances.start(share=theirs.share())
        instances.publish(60)
        await instances.balanced(one, two)
        await until(lambda: len(theirs.held) == 3)
        assert mine.held == set(range(6)) - theirs.held
        assert sorted(mine.released) == sorted(theirs.held)
        await instances.done()
        await instances.stop(one)
        assert not mine.held, "released before its leases"
        await until(lambda: len(theirs.held) == 6)
        await instances.stop(two)
        assert not theirs.held


async def test_on_release_is_awaited_for_the_time_of_a_hand_over_and_no_longer() -> None:
    held, share = Held(), replace(BRIEF, handover_seconds=3)
    async with fleet(Publisher(2)) as instances:
        one = instances.start(share=held.share(share))
        await until(lambda: len(held.held) == 2)
        held.pause = anyio.Event()
        await instances.balanced(one, instances.start(share=share))
        assert one.says("on_release has not returned within 3 s")
        held.pause.set()


async def test_a_lost_lease_is_released_once_it_is_known() -> None:
    held = Held()
    async with fleet(Publisher(2)) as instances:
        cut = instances.cut()
        one = instances.start(share=held.share(), store=cut)
        await until(lambda: len(held.held) == 2)
        cut.fail()
        await until(lambda: sorted(held.released) == [0, 1])
        cut.heal()
        await until(lambda: len(held.held) == 2)
        await instances.stop(one)
    assert not held.held


async def test_what_on_assigned_raises_ends_the_iteration() -> None:
    async with fleet(Publisher(1)) as instances:
        consumer = instances.consumer(share=Share(on_assigned=fails))
        with pytest.raises(LookupError, match="no place"):
            async with consumer:
                await anext(consumer.batches())
        assert not (await instances.store.look(consumer.key)).instances


async def test_what_on_release_raises_is_reported_and_stops_nothing() -> None:
    async with fleet(Publisher(2)) as instances:
        one = instances.start(share=Share(on_release=fails))
        await instances.balanced(one)
        await instances.balanced(one, instances.start())
        assert one.says("on_release failed with LookupError")
        assert not one.says("secret")


async def test_leases_may_have_a_store_of_their_own() -> None:
    leases = MemoryCursorStore()
    async with fleet(Publisher(4, **PAGES)) as instances:
        instances.publish(40)
        one, two = (instances.start(share=Share(leases=leases)) for _ in "ab")
        await instances.balanced(one, two)
        await instances.done()
        key = one.consumer.key
        assert not (await instances.store.look(key)).leases
        assert len((await leases.look(key)).instances) == 2
        assert await leases.load(key) == {}


@pytest.mark.parametrize(
    "options", [{"follow": False}, {"ordered": False}, {"partitions": [0, 1]}, {"lineage": {1: 0}}]
)
async def test_instances_that_differ_in_an_option_say_so_once(options: dict[str, Any]) -> None:
    publisher, told = Publisher(2), "has other options than this one"
    publisher.close(0) if "lineage" in options else None
    async with fleet(publisher) as instances:
        one = instances.start()
        await until(lambda: one.open)
        two = instances.start(**options)
        await until(lambda: one.says(told))
        await anyio.sleep(60)
        (text,) = one.says(told)
        assert f"({next(iter(options))})" in text
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
