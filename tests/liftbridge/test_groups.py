"""Consumer groups."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from feedapi_client.liftbridge import (
    GroupConsumer,
    LiftbridgeError,
    Stream,
    StreamError,
)
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import eventually, eventually_is

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
async def stream(broker: Broker) -> Stream:
    return await broker.create(partitions=PARTITIONS)


async def crash(broker: Broker, stream: Stream) -> None:
    await broker.crash()
    for partition in range(stream.partitions):
        await broker.api.partition_metadata(stream.name, partition)


async def publish(broker: Broker, stream: Stream, count: int) -> None:
    """Publish so many messages to each partition."""
    for partition in range(stream.partitions):
        await broker.publisher.publish_many(stream, [b"x"] * count, partition=partition)


def all_of(first: int, last: int) -> set[tuple[int, int]]:
    return {(p, n) for p in range(PARTITIONS) for n in range(first, last)}


async def test_members_divide_the_partitions_and_go_on_where_others_stopped(
    broker: Broker, stream: Stream
) -> None:
    await publish(broker, stream, 5)
    one, two = (Member(broker.api.group_consumer(stream.name, [stream.name])) for _ in range(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        await eventually(lambda: len(one.handled) == 5 * PARTITIONS)
        assert one.partitions() == (0, 1, 2, 3)
        await one.consumer.checkpoint()
        tasks.start_soon(two.run)
        await eventually(lambda: len(one.partitions()) == len(two.partitions()) == 2)
        await publish(broker, stream, 5)
        await eventually(lambda: len({*one.handled, *two.handled}) == 10 * PARTITIONS)
        # Every message so far went to one of them. One leaves, and the other has all.
        assert len(one.handled) + len(two.handled) == 10 * PARTITIONS
        one.scope.cancel()
        await eventually(lambda: two.partitions() == (0, 1, 2, 3))
        await publish(broker, stream, 5)
        await eventually(lambda: {*one.handled, *two.handled} == all_of(0, 15))
        two.scope.cancel()


async def test_a_partition_that_was_read_only_for_a_moment_is_read_on(
    broker: Broker, stream: Stream
) -> None:
    await publish(broker, stream, 5)
    member = Member(broker.api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await eventually(lambda: len(member.handled) == 5 * PARTITIONS)
        await broker.api.set_readonly(stream.name)
        await anyio.sleep(2)
        await broker.api.set_readonly(stream.name, False)
        await publish(broker, stream, 5)
        await eventually(lambda: len(member.handled) == 10 * PARTITIONS)
        assert set(member.handled) == all_of(0, 10)
        member.scope.cancel()


async def test_the_partitions_of_a_member_that_died_go_to_the_others(
    broker: Broker, stream: Stream
) -> None:
    await publish(broker, stream, 5)
    dead = broker.api.group_consumer(stream.name, [stream.name])
    await dead.__aenter__()
    await eventually(lambda: dead.assignments)
    for task in [*dead._tasks]:
        task.cancel()
    heir = Member(broker.api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heir.run)
        await eventually(lambda: set(heir.handled) == all_of(0, 5))
        heir.scope.cancel()


async def test_a_member_that_was_thrown_out_joins_again(broker: Broker, stream: Stream) -> None:
    member = Member(broker.api.group_consumer(stream.name, [stream.name], name="billing-"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await eventually(lambda: len(member.partitions()) == PARTITIONS)
        before = member.consumer.consumer_id
        await member.consumer._membership.leave()
        await eventually(lambda: member.consumer.consumer_id != before)
        await publish(broker, stream, 5)
        await eventually(lambda: set(member.handled) == all_of(0, 5))
        member.scope.cancel()
    assert member.consumer.consumer_id.startswith("billing-")


async def test_a_group_goes_on_after_a_crash_of_the_broker(broker: Broker, stream: Stream) -> None:
    await publish(broker, stream, 5)
    running = Member(broker.api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await eventually(lambda: len(running.handled) == 5 * PARTITIONS)
        await crash(broker, stream)
        await publish(broker, stream, 5)
        await eventually(lambda: set(running.handled) == all_of(0, 10))
        running.scope.cancel()
    assert len(running.handled) == 10 * PARTITIONS


async def test_checkpoints_outlive_a_crash_of_the_broker(broker: Broker, stream: Stream) -> None:
    await publish(broker, stream, 5)
    first = Member(broker.api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await eventually(lambda: len(first.handled) == 5 * PARTITIONS)
        first.scope.cancel()
    await crash(broker, stream)
    await publish(broker, stream, 1)
    second = Member(broker.api.group_consumer(stream.name, [stream.name]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.run)
        await eventually(lambda: set(second.handled) >= all_of(5, 6))
        second.scope.cancel()
    # The last message of each partition had not been followed by a request for another one.
    assert set(second.handled) <= all_of(4, 6)


async def test_a_new_group_may_start_with_new_messages(broker: Broker, stream: Stream) -> None:
    await publish(broker, stream, 5)
    member = Member(broker.api.group_consumer(stream.name, [stream.name], start="new"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await eventually(lambda: len(member.partitions()) == PARTITIONS)
        for partition in range(PARTITIONS):
            ask = partial(
                broker.api.fetch_cursor,
                stream.name,
                f"__group:{stream.name}",
                partition=partition,
            )
            await eventually_is(ask, lambda offset: offset == 4)
        await publish(broker, stream, 2)
        await eventually(lambda: len(member.handled) == 2 * PARTITIONS)
        member.scope.cancel()
    assert set(member.handled) == all_of(5, 7)


async def test_a_missing_stream_is_named_when_a_member_joins(broker: Broker) -> None:
    with pytest.raises(StreamError, match=f"{broker.name}.*no such stream"):
        async with broker.api.group_consumer("g", [broker.name]):
            pass


async def test_a_checkpoint_beyond_the_end_of_a_stream_is_an_error(
    broker: Broker, stream: Stream
) -> None:
    await publish(broker, stream, 5)
    await broker.api.set_cursor(stream.name, f"__group:{stream.name}", 99, partition=1)
    async with broker.api.group_consumer(stream.name, [stream.name]) as consumer:
        for _ in range(2):
            with pytest.raises(StreamError, match=r"offset 99.*newest message of partition 1 is 4"):
                async for _ in consumer:
                    pass


async def test_a_consumer_needs_a_group_and_streams(broker: Broker) -> None:
    for group, streams in (("", ["s"]), ("g", [])):
        with pytest.raises(ValueError, match="name of its group"):
            broker.api.group_consumer(group, list[str](streams))
    assert issubclass(StreamError, LiftbridgeError)
