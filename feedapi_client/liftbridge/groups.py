"""Reading streams together with the other members of a consumer group, and cluster cursors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import anyio
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.brokers import Brokers, StreamMissingError
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    LiftbridgeError,
    StreamError,
    StreamReadonlyError,
    require_asyncio,
)
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.subscription import (
    StreamSubscription,
    Subscriber,
    partition_metadata,
)

logger = logging.getLogger(__name__)

GroupStart = Literal["earliest", "new"] | datetime
_CURSORS = "__cursors"
_AHEAD = 64
"""Number of messages of a partition that are read before they are asked for."""
_CLOSE_SECONDS = 10.0
_READONLY_AGAIN = 1.0
"""Seconds after which a read-only partition is looked at again."""
_NANOSECONDS = 1e9
_HEARTBEATS = 3
"""How often a member asks for its assignments within the time after which it is thrown out."""
_LONGEST_HEARTBEAT = 3.0
# What a coordinator says to somebody whom it has thrown out.
_EXPELLED = ("not a member", "group does not exist")


async def set_cursor(
    brokers: Brokers, stream: str, cursor_id: str, offset: int, partition: int
) -> None:
    """Keep a cursor in the stream that the cluster has for them, which has partitions."""

    async def once() -> None:
        kept_in = _kept_in(cursor_id, stream, partition, await _partitions(brokers))
        await _set(brokers, kept_in, stream, cursor_id, offset, partition)

    await brokers.retry(once)


async def fetch_cursor(brokers: Brokers, stream: str, cursor_id: str, partition: int) -> int | None:
    """Return the offset stored under a name; None when there is none.

    A broker that starts answers with a cursor from before its newest ones, or with none, until
    something is appended to its stream of cursors, and remembers that answer. So that is looked at
    first, and a cursor is stored that nobody uses.
    """
    request = api_pb2.FetchCursorRequest(stream=stream, partition=partition, cursorId=cursor_id)

    async def once() -> int | None:
        count = await _partitions(brokers)
        kept_in = _kept_in(cursor_id, stream, partition, count)
        found = await partition_metadata(brokers, _CURSORS, kept_in, resume=True)
        if found.high_watermark < found.newest_offset:
            names = (f"feedapi-no-op-{n}" for n in itertools.count())
            unused = next(each for each in names if _kept_in(each, _CURSORS, 0, count) == kept_in)
            await _set(brokers, kept_in, _CURSORS, unused, 0, 0)
        leader = await brokers.leader(_CURSORS, kept_in)
        response = await brokers.call(stream, "FetchCursor", request, [leader])
        return int(response.offset) if response.offset >= 0 else None

    return await brokers.retry(once)


async def _partitions(brokers: Brokers) -> int:
    try:
        cluster = await brokers.metadata([_CURSORS])
    except StreamMissingError as error:
        if _CURSORS in brokers.seen:
            raise
        raise LiftbridgeError(
            "the broker keeps no cursors: it needs the setting cursors.stream.partitions"
        ) from error
    return cluster.streams[_CURSORS].stream.partitions


async def _set(
    brokers: Brokers, kept_in: int, stream: str, cursor_id: str, offset: int, partition: int
) -> None:
    request = api_pb2.SetCursorRequest(
        stream=stream, partition=partition, cursorId=cursor_id, offset=offset
    )
    leader = await brokers.leader(_CURSORS, kept_in)
    await brokers.call(stream, "SetCursor", request, [leader])


def _kept_in(cursor_id: str, stream: str, partition: int, count: int) -> int:
    # As the broker computes it.
    return zlib.crc32(f"{cursor_id},{stream},{partition}".encode()) % count


class GroupMembership:
    """One member of a consumer group, as the brokers see it.

    The broker lets the member with the newest `epoch` of assignments read a partition.
    """

    def __init__(self, brokers: Brokers, group: str, name: str, streams: Sequence[str]) -> None:
        self.group = group
        self.consumer_id = ""
        self.epoch = 0
        self.heartbeat = _LONGEST_HEARTBEAT
        self._brokers = brokers
        self._name = name
        self._streams = list(streams)
        self._coordinator = ""
        self._coordinator_timeout = 0.0
        self._answered_at = 0.0

    async def join(self) -> None:
        await self._brokers.retry(self._join)

    async def leave(self) -> None:
        """Leave the group, if a broker answers. Otherwise the group notices it after a while."""
        request = api_pb2.LeaveConsumerGroupRequest(groupId=self.group, consumerId=self.consumer_id)
        with suppress(LiftbridgeError):
            await self._brokers.call(self.group, "LeaveConsumerGroup", request)

    async def assignments(self) -> set[tuple[str, int]]:
        """Return what to read. Who does not ask often is thrown out, and joins again."""
        return await self._brokers.retry(self._ask)

    async def _join(self) -> None:
        # A missing stream is not named by the answer to a request to join.
        await self._brokers.metadata(self._streams)
        # Another id each time: one that is still known, after a lost answer, would be refused.
        self.consumer_id = f"{self._name}{secrets.token_hex(8)}"
        request = api_pb2.JoinConsumerGroupRequest(
            groupId=self.group, consumerId=self.consumer_id, streams=self._streams
        )
        response = await self._brokers.call(self.group, "JoinConsumerGroup", request)
        self._coordinator, self.epoch = response.coordinator, int(response.epoch)
        timeout = int(response.consumerTimeout) / _NANOSECONDS
        self.heartbeat = min(timeout / _HEARTBEATS, _LONGEST_HEARTBEAT)
        self._coordinator_timeout = int(response.coordinatorTimeout) / _NANOSECONDS
        self._answered_at = time.monotonic()

    async def _ask(self) -> set[tuple[str, int]]:
        request = api_pb2.FetchConsumerGroupAssignmentsRequest(
            groupId=self.group, consumerId=self.consumer_id, epoch=self.epoch
        )
        try:
            brokers = (await self._brokers.metadata(self._streams)).brokers
            if self._coordinator not in brokers:
                raise BrokerUnavailableError(f"its coordinator {self._coordinator} is gone")
            address = brokers[self._coordinator].address
            response = await self._brokers.call(
                self.group, "FetchConsumerGroupAssignments", request, [address]
            )
        except LiftbridgeError as error:
            await self._recover(error)
            raise BrokerUnavailableError(f"consumer group {self.group}: {error}") from error
        self.epoch = int(response.epoch)
        self._answered_at = time.monotonic()
        return {
            (assigned.stream, partition)
            for assigned in response.assignments
            for partition in assigned.partitions
        }

    async def _recover(self, error: LiftbridgeError) -> None:
        if any(text in str(error) for text in _EXPELLED):
            await self._join()
            return
        if time.monotonic() - self._answered_at > self._coordinator_timeout:
            # When most members say that it does not answer, there is another one.
            request = api_pb2.ReportConsumerGroupCoordinatorRequest(
                groupId=self.group,
                consumerId=self.consumer_id,
                coordinator=self._coordinator,
                epoch=self.epoch,
            )
            with suppress(LiftbridgeError):
                await self._brokers.call(self.group, "ReportConsumerGroupCoordinator", request)
        cluster = await self._brokers.metadata(self._streams, [self.group])
        if (found := cluster.groups.get(self.group)) is None:
            await self._join()
        else:
            self._coordinator, self.epoch = found.coordinator, found.epoch


@dataclass(eq=False)
class _Reader:
    """One assigned partition. `handled` is the newest offset that the application has handled."""

    stream: str
    partition: int
    handled: int | None = None
    saved: int | None = None
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AHEAD))
    task: asyncio.Task[None] = field(init=False)


class GroupConsumer:
    """Reads what the group assigns to this member. Use it in `async with`, and iterate over it.

    A partition is assigned to one member at a time. When members come and go, the partitions are
    divided again, and each is continued after its newest checkpoint: **at least once**. A message
    counts as handled when the next one is asked for. Checkpoints are cursors of the cluster, under
    the name that go-liftbridge gives them.

    Made by `LiftbridgeApi.group_consumer`, which says what the arguments are.

    Raises, from the iteration:
        StreamError: a stream is missing, or a checkpoint is beyond its end.
        LiftbridgeError: the cluster keeps no cursors.
        BrokerUnavailableError: no broker answered in time.

    Cancellation: what was handled may be without a checkpoint; then it comes again.

    Concurrency: one iteration at a time.
    """

    def __init__(
        self,
        brokers: Brokers,
        group: str,
        streams: Sequence[str],
        name: str,
        start: GroupStart,
        checkpoint_seconds: float | None,
    ) -> None:
        if not group or not streams:
            raise ValueError("a consumer needs the name of its group, and streams")
        self._brokers = brokers
        self._membership = GroupMembership(brokers, group, name, streams)
        self._cursor_id = f"__group:{group}"
        self._start: GroupStart = start
        self._checkpoint_seconds = checkpoint_seconds
        self._readers: dict[tuple[str, int], _Reader] = {}
        self._queue: asyncio.Queue[tuple[_Reader, Message] | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving = asyncio.Lock()

    async def __aenter__(self) -> GroupConsumer:
        require_asyncio()
        await self._membership.join()
        self._run(self._follow_assignments())
        if self._checkpoint_seconds is not None:
            self._run(self._save_often(self._checkpoint_seconds))
        return self

    async def __aexit__(self, *exc: object) -> None:
        readers, self._readers = self._readers, {}
        tasks = [*self._tasks, *(reader.task for reader in readers.values())]
        for task in tasks:
            task.cancel()
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            if tasks:
                await asyncio.wait(tasks)
            try:
                with suppress(LiftbridgeError):
                    await self._save(readers.values())
            finally:
                await self._membership.leave()

    @property
    def consumer_id(self) -> str:
        """The id of this member."""
        return self._membership.consumer_id

    @property
    def assignments(self) -> dict[str, tuple[int, ...]]:
        """The partitions that this member reads, by stream."""
        found: dict[str, tuple[int, ...]] = {}
        for stream, partition in sorted(self._readers):
            found[stream] = (*found.get(stream, ()), partition)
        return found

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.messages()

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Return the messages of all assigned partitions, those of a partition in order."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                # A later iteration is told again: it would wait for a partition that nobody reads.
                self._queue.put_nowait(item)
                raise item
            reader, message = item
            reader.room.release()
            # What was read of a partition that another member has now is left to that member.
            if self._readers.get((reader.stream, reader.partition)) is reader:
                yield message
                reader.handled = message.offset

    async def checkpoint(self) -> None:
        """Write down now what was handled.

        Raises:
            LiftbridgeError: it could not be written.
        """
        await self._save(list(self._readers.values()))

    async def _save(self, readers: Iterable[_Reader]) -> None:
        async with self._saving:
            for reader in readers:
                offset = reader.handled
                if offset is not None and offset >= 0 and offset != reader.saved:
                    await set_cursor(
                        self._brokers, reader.stream, self._cursor_id, offset, reader.partition
                    )
                    reader.saved = offset

    async def _save_often(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.checkpoint()

    async def _follow_assignments(self) -> None:
        while True:
            self._assign(await self._membership.assignments())
            await asyncio.sleep(self._membership.heartbeat)

    def _assign(self, assigned: set[tuple[str, int]]) -> None:
        # Without an await: no subscription may begin with the new epoch for an old assignment.
        gone = set(self._readers) - assigned
        if revoked := [self._readers.pop(key) for key in gone]:
            for reader in revoked:
                reader.task.cancel()
            logger.info(
                "partitions went to other members of the group",
                extra={"group": self._membership.group, "partitions": sorted(gone)},
            )
            self._run(self._save(revoked))
        for key in sorted(assigned - set(self._readers)):
            reader = self._readers[key] = _Reader(*key)
            reader.task = self._run(self._read(reader))

    async def _read(self, reader: _Reader) -> None:
        following = await self._first(reader)
        while True:
            subscription = StreamSubscription(
                reader.stream, reader.partition, following, resume=True, member=self._membership
            )
            try:
                async with aclosing(Subscriber(self._brokers, subscription).messages()) as messages:
                    async for message in messages:
                        await reader.room.acquire()
                        self._queue.put_nowait((reader, message))
                        following = message.offset + 1
            except StreamReadonlyError:
                await asyncio.sleep(_READONLY_AGAIN)

    async def _first(self, reader: _Reader) -> GroupStart | int:
        stream, partition = reader.stream, reader.partition
        checkpoint = await fetch_cursor(self._brokers, stream, self._cursor_id, partition)
        if checkpoint is None and self._start != "new":
            return self._start
        found = await self._brokers.retry(
            lambda: partition_metadata(self._brokers, stream, partition, resume=True)
        )
        newest = found.newest_offset
        if checkpoint is None:
            # Another member that goes on before the first checkpoint must not skip anything.
            checkpoint = reader.handled = newest
            await self._save([reader])
        if checkpoint > newest:
            raise StreamError(
                f"the checkpoint of the group {self._membership.group} is offset {checkpoint}, and "
                f"the newest message of partition {partition} is {newest}: the stream was created "
                "again, or lost messages. Read it with another group",
                stream=stream,
            )
        return checkpoint + 1

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            self._queue.put_nowait(error)
