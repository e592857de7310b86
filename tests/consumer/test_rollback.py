"""R11: a publisher is rolled back after a split, as an application and its operator see it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from feedapi_client import LineageError, Position, RetryPolicy
from feedapi_client.status import ProblemName
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    RecordingStore,
    consume,
    numbers,
    read_n,
    wait_until,
)

pytestmark = pytest.mark.anyio

IMPATIENT = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)


@pytest.fixture
def publisher(serve: Callable[..., Publisher]) -> Publisher:
    """Partition 0, split by its cursors into 10."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers(publisher, 0, range(6))
    return publisher


async def split_and_read(publisher: Publisher, store: RecordingStore) -> None:
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(6))
        publisher.split(0, into=(10,), method="cursor-from")
        numbers(publisher, 10, range(6, 8))
        assert await read_n(consumer) == [6, 7]


def roll_back(publisher: Publisher) -> None:
    publisher.remove(10)
    publisher.add(0)


def roll_forward(publisher: Publisher) -> None:
    publisher.remove(0)
    publisher.add(10, cursor_from=[0])


async def test_r11_a_rollback_is_a_problem_with_a_name_and_nobody_is_ready(
    publisher: Publisher, store: RecordingStore
) -> None:
    await split_and_read(publisher, store)
    async with consume(publisher, store=store, retry=IMPATIENT) as consumer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_n, consumer)
            await wait_until(lambda: consumer.health().ready)
            roll_back(publisher)
            await wait_until(lambda: not consumer.health().ready)
            problems = {p.name: p for p in consumer.health().problems}
            assert problems[ProblemName.ROLLED_BACK].partition == 0
            assert "feedapi cursors restore" in problems[ProblemName.ROLLED_BACK].text
            assert consumer.health().live
            await wait_until(lambda: any("as open again" in r for r in consumer.status().reports))
            roll_forward(publisher)
            await wait_until(lambda: consumer.health().ready)
            tasks.cancel_scope.cancel()
        assert (await store.positions())[0].status == "superseded"


async def test_r11_without_follow_a_rollback_is_an_error(
    publisher: Publisher, store: RecordingStore
) -> None:
    await split_and_read(publisher, store)
    roll_back(publisher)
    before = await store.positions()
    async with consume(publisher, store=store, follow=False, retry=IMPATIENT) as consumer:
        with pytest.raises(LineageError, match="listed as open again") as caught:
            await read_n(consumer)
    assert caught.value.partition == 0
    assert await store.positions() == before


async def test_r11_without_follow_a_discovery_that_lags_is_waited_out(
    publisher: Publisher, store: RecordingStore
) -> None:
    await split_and_read(publisher, store)
    numbers(publisher, 10, [8])
    roll_back(publisher)
    async with (
        consume(publisher, store=store, follow=False) as consumer,
        anyio.create_task_group() as tasks,
    ):

        async def forward() -> None:
            await wait_until(lambda: consumer.health().problems)
            roll_forward(publisher)

        tasks.start_soon(forward)
        assert await read_n(consumer) == [8]


async def test_r11_without_follow_a_partition_that_is_open_again_is_read_and_then_an_error(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.close(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(6))
    publisher.reopen(0)
    async with consume(publisher, store=store, follow=False, retry=IMPATIENT) as consumer:
        with pytest.raises(LineageError, match="after it was closed and drained"):
            await read_n(consumer)
    drained = (await store.positions())[0]
    await store.replace(consumer.key, {0: Position(drained.cursor)})
    async with consume(publisher, store=store, follow=False, retry=IMPATIENT) as consumer:
        assert await read_n(consumer) == []
