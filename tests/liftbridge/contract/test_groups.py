"""Consumer groups, against the stand-in and against the real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import pytest

from feedapi_client.liftbridge import (
    GroupConsumer,
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgePublisher,
    Stream,
    StreamError,
)
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PARTITIONS = 4


class Member:
    """A member that notes what it handles, until it is stopped."""

    def __init__(self, consumer: GroupConsumer) -> None:
        self.consumer = consumer
        self.handled: list[tuple[int, int]] = []
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            async with self.consumer:
                async for message in self.consumer:
                    self.handled.append((message.partition, message.offset))

    def partitions(self) -> tuple[int, ...]:
        return next(iter(self.consumer.assignments.values()), ())


@pytest.fixture
async def stream(api: LiftbridgeApi, name: str) -> Stream:
    stream = Stream(name, partitions=PARTITIONS)
    await api.create_stream(stream)
    return stream


@pytest.fixture
async def other_api(cluster: Cluster) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api:
        yield api


async def crash(cluster: Cluster, api: LiftbridgeApi, stream: Stream) -> None:
    await cluster.crash()
    for partition in range(stream.partitions):
        await api.partition_metadata(stream.name, partition)


async def publish(publisher: LiftbridgePublisher, stream: Stream, count: int) -> None:
    """Publish so many messages to each partition."""
    for partition in range(stream.partitions):
        await publisher.publish_many(stream, [b"x"] * count, partition=partition)


async def until(condition: object) -> None:
    with anyio.fail_after(SAFETY_NET):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110
            await anyio.sleep(0.02)


def all_of(first: int, last: int) -> set[tuple[int, int]]:
    return {(p, n) for p in range(PARTITIONS) for n in range(first, last)}


async def test_members_divide_the_partitions_and_go_on_where_others_stopped(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    one, two = (Member(api.group_consumer(stream.name, [stream.name])) for _ in range(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        await until(lambda: len(one.handled) == 5 * PARTITIONS)
        assert one.partitions() == (0, 1, 2, 3)
        await one.consumer.checkpoint()
        tasks.start_soon(two.run)
        await until(lambda: len(one.partitions()) == len(two.partitions()) == 2)
        await publish(publisher, stream, 5)
        await until(lambda: len({*one.handled, *two.handled}) == 10 * PARTITIONS)
        # Every message so far went to one of them. One leaves, and the other has all.
        assert len(one.handled) + len(two.handled) == 10 * PARTITIONS
        one.scope.cancel()
        await until(lambda: two.partitions() == (0, 1, 2, 3))
        await publish(publisher, stream, 5)
        await until(lambda: {*one.handled, *two.handled} == all_of(0, 15))
        two.scope.cancel()


async def test_a_partition_that_was_read_only_for_a_moment_is_read_on(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    member = Member(api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await until(lambda: len(member.handled) == 5 * PARTITIONS)
        await api.set_readonly(stream.name)
        await anyio.sleep(2)
        await api.set_readonly(stream.name, False)
        await publish(publisher, stream, 5)
        await until(lambda: len(member.handled) == 10 * PARTITIONS)
        assert set(member.handled) == all_of(0, 10)
        member.scope.cancel()


async def test_the_partitions_of_a_member_that_died_go_to_the_others(
    cluster: Cluster,
    api: LiftbridgeApi,
    other_api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    stream: Stream,
) -> None:
    await publish(publisher, stream, 5)
    dead = other_api.group_consumer(stream.name, [stream.name])
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(dead)
        await until(lambda: dead.assignments)
        stack.pop_all()
    for task in [*dead._tasks]:
        task.cancel()
    heir = Member(api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heir.run)
        await until(lambda: set(heir.handled) == all_of(0, 5))
        heir.scope.cancel()


async def test_a_member_that_was_thrown_out_joins_again(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    member = Member(api.group_consumer(stream.name, [stream.name], name="billing-"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await until(lambda: len(member.partitions()) == PARTITIONS)
        before = member.consumer.consumer_id
        await member.consumer._membership.leave()
        await until(lambda: member.consumer.consumer_id != before)
        await publish(publisher, stream, 5)
        await until(lambda: set(member.handled) == all_of(0, 5))
        member.scope.cancel()
    assert member.consumer.consumer_id.startswith("billing-")


async def test_a_group_goes_on_after_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    running = Member(api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await until(lambda: len(running.handled) == 5 * PARTITIONS)
        await crash(cluster, api, stream)
        await publish(publisher, stream, 5)
        await until(lambda: set(running.handled) == all_of(0, 10))
        running.scope.cancel()
    assert len(running.handled) == 10 * PARTITIONS


async def test_checkpoints_outlive_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    first = Member(api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await until(lambda: len(first.handled) == 5 * PARTITIONS)
        first.scope.cancel()
    await crash(cluster, api, stream)
    await publish(publisher, stream, 1)
    second = Member(api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.run)
        await until(lambda: set(second.handled) >= all_of(5, 6))
        second.scope.cancel()
    # The last message of each partition had not been followed by a request for another one.
    assert set(second.handled) <= all_of(4, 6)


async def test_a_new_group_may_start_with_new_messages(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    member = Member(api.group_consumer(stream.name, [stream.name], start="new"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await until(lambda: len(member.partitions()) == PARTITIONS)
        for partition in range(PARTITIONS):
            cursor_id = f"__group:{stream.name}"
            with anyio.fail_after(SAFETY_NET):
                while await api.fetch_cursor(stream.name, cursor_id, partition=partition) != 4:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
        await publish(publisher, stream, 2)
        await until(lambda: len(member.handled) == 2 * PARTITIONS)
        member.scope.cancel()
    assert set(member.handled) == all_of(5, 7)


async def test_a_missing_stream_is_named_when_a_member_joins(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    with pytest.raises(StreamError, match=f"{name}.*no such stream"):
        async with api.group_consumer("g", [name]):
            pass


async def test_a_checkpoint_beyond_the_end_of_a_stream_is_an_error(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, stream: Stream
) -> None:
    await publish(publisher, stream, 5)
    await api.set_cursor(stream.name, f"__group:{stream.name}", 99, partition=1)
    async with api.group_consumer(stream.name, [stream.name]) as consumer:
        for _ in range(2):
            with pytest.raises(StreamError, match=r"offset 99.*newest message of partition 1 is 4"):
                async for _ in consumer:
                    pass


async def test_a_consumer_needs_a_group_and_streams(api: LiftbridgeApi) -> None:
    for group, streams in (("", ["s"]), ("g", [])):
        with pytest.raises(ValueError, match="name of its group"):
            api.group_consumer(group, list[str](streams))
    assert issubclass(StreamError, LiftbridgeError)
