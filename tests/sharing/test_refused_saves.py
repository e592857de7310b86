"""A save is refused because the store, or an operator, went back: what is read next is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio
import pytest

from feedapi_client.model import Position
from feedapi_client.testing import Publisher
from tests.sharing.fleet import Fleet, fleet, publish, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def failover(instances: Fleet, positions: dict[int, Position]) -> None:
    """The database comes back as a replica that lacks the last saves: revisions go back."""
    key = instances.members[0].consumer.key
    await instances.store.delete(key)
    first = {p: replace(position, replaces=None) for p, position in positions.items()}
    await instances.store.save(key, first)


async def rewind(instances: Fleet, positions: dict[int, Position]) -> None:
    """An operator takes a consumer back: revisions go on."""
    await instances.store.replace(instances.members[0].consumer.key, positions)


async def saved(instances: Fleet, publisher: Publisher) -> None:
    """Wait until all events of partition 0 are handled, and its position is saved."""
    key = instances.members[0].consumer.key
    while (await instances.store.load(key))[0].cursor != publisher.end_cursor(0):  # noqa: ASYNC110
        await anyio.sleep(0.1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("go_back", [failover, rewind])
async def test_r17_a_refused_end_is_read_again_and_the_children_start(
    go_back: Callable[..., object], count: int
) -> None:
    publisher = Publisher(1)
    publish(publisher, 0, *range(10))
    async with fleet(publisher) as instances:
        for _ in range(count):
            instances.start()
        key = instances.members[0].consumer.key
        await until(lambda: len(instances.handled) == 10)
        await saved(instances, publisher)
        before = await instances.store.load(key)
        publish(publisher, 0, *range(10, 20))
        await until(lambda: len(instances.handled) == 20)
        await saved(instances, publisher)
        await go_back(instances, before)  # type: ignore[misc]
        left, _ = publisher.split(0, method="starts-after")
        publish(publisher, left, 20, 21)
        await until(lambda: 21 in instances.handled)
        again = [*range(10, 20)]
        assert sorted(instances.handled) == sorted([*range(22), *again])
        assert (await instances.store.load(key))[0].status == "drained"


async def test_r17_an_idle_partition_takes_the_cursor_that_an_operator_has_set() -> None:
    publisher = Publisher(2)
    publish(publisher, 0, *range(10))
    async with fleet(publisher) as instances:
        members = [instances.start() for _ in range(2)]
        await instances.balanced(*members)
        key = members[0].consumer.key
        await until(lambda: len(instances.handled) == 10)
        await saved(instances, publisher)
        stored = (await instances.store.load(key))[0]
        await rewind(instances, {0: stored.advance("_first")})
        await until(lambda: len(instances.handled) == 20)
        assert instances.handled == [*range(10), *range(10)]
        reports = [line for m in members for line in m.consumer.status().reports]
        assert any("stored cursor of partition 0 was changed" in line for line in reports)
