"""`FeedConsumer(partitions=...)`: only these are read and saved, in order among them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from feedapi_client import RetryPolicy
from feedapi_client.errors import LineageError
from feedapi_client.model import Batch, FeedKey
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher import faults
from tests.consumer.helpers import SAFETY_LIMIT, RecordingStore, consume, wait_until

pytestmark = pytest.mark.anyio

Serve = Callable[..., Publisher]


def split(serve: Serve) -> Publisher:
    """Partitions 0 and 1; 0 is followed by 2 and 3. One event in each."""
    publisher = serve(2)
    publisher.extend(0, [{"p": 0}])
    publisher.extend(1, [{"p": 1}])
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.extend(2, [{"p": 2}])
    publisher.extend(3, [{"p": 3}])
    return publisher


async def read(publisher: Publisher, **options: object) -> list[int]:
    async with consume(publisher, follow=False, **options) as consumer:
        return [event.partition async for event in consumer]


async def test_only_the_chosen_partitions_are_read_and_saved(
    serve: Serve, store: RecordingStore
) -> None:
    publisher = split(serve)
    assert sorted(await read(publisher, store=store, partitions=[1, 2])) == [1, 2]
    assert {request.partition for request in publisher.requests if request.cursor} == {1, 2}
    assert publisher.url is not None
    assert sorted(await store.load(FeedKey(publisher.url))) == [1, 2]


async def test_r08_a_chosen_child_waits_for_its_chosen_parent(serve: Serve) -> None:
    assert await read(split(serve), partitions={2, 0}) == [0, 2]


async def test_the_partitions_left_out_are_read_by_a_later_run(
    serve: Serve, store: RecordingStore
) -> None:
    publisher = split(serve)
    assert await read(publisher, store=store, partitions=[1]) == [1]
    assert sorted(await read(publisher, store=store)) == [0, 2, 3]


async def test_a_partition_that_is_not_listed_is_an_error(serve: Serve) -> None:
    with pytest.raises(LineageError, match="does not list this partition, only 0, 1, 2, 3"):
        await read(split(serve), partitions=[9])


async def test_r12_one_that_the_first_list_lacks_is_an_error_though_a_list_was_empty_before(
    serve: Serve,
) -> None:
    publisher = split(serve)
    publisher.fail(faults.NoPartitions(), on="discovery", times=2)
    patience = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)
    async with consume(publisher, partitions=[1, 9], retry=patience) as consumer:
        with pytest.raises(LineageError, match="does not list this partition, only 0, 1, 2, 3"):
            with anyio.fail_after(SAFETY_LIMIT):
                await anext(aiter(consumer))


async def test_r12_one_that_a_starting_publisher_lists_later_is_awaited(serve: Serve) -> None:
    publisher = serve(1)
    publisher.extend(0, [{"p": 0}])
    publisher.fail(faults.NoPartitions(), on="discovery", times=2)
    read: list[int] = []

    async def handle(batch: Batch) -> None:
        read.extend(event.partition for event in batch.events)

    async with (
        consume(publisher, partitions=[0, 1]) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle)
        await wait_until(lambda: len(publisher.requests) > 3)
        assert not read
        publisher.split(0, into=(1,), method="starts-after")
        publisher.extend(1, [{"p": 1}])
        await wait_until(lambda: read == [0, 1])
        tasks.cancel_scope.cancel()
