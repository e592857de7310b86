"""Reading streams together with the other members of a consumer group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from types import TracebackType
from typing import Literal

import anyio

from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.liftbridge.cluster_cursors import ClusterCursors
from feedapi_client.liftbridge.group_membership import Assignments, GroupMembership
from feedapi_client.liftbridge.liftbridge_errors import (
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
_AHEAD = 64
"""Number of messages of a partition that are read before they are asked for."""
_CLOSE_SECONDS = 10.0
_READONLY_AGAIN = 1.0
"""Seconds after which a read-only partition is looked at again."""

_Queue = asyncio.Queue["tuple[_Reader, Message] | Exception"]


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
        *,
        name: str,
        start: GroupStart,
        checkpoint_seconds: float | None,
    ) -> None:
        if not group or not streams:
            raise ValueError("a consumer needs the name of its group, and streams")
        self._brokers = brokers
        self._cursors = ClusterCursors(brokers)
        self._membership = GroupMembership(brokers, group, name, streams)
        self._start: GroupStart = start
        self._checkpoint_seconds = checkpoint_seconds
        self._readers: dict[tuple[str, int], _Reader] = {}
        self._queue: _Queue = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving = asyncio.Lock()

    async def __aenter__(self) -> GroupConsumer:
        require_asyncio()
        await self._membership.join()
        self._run(self._follow_assignments())
        if self._checkpoint_seconds is not None:
            self._run(self._save_often(self._checkpoint_seconds))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            if self._readers.get(reader.key) is reader:
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
                await reader.save()

    async def _save_often(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.checkpoint()

    async def _follow_assignments(self) -> None:
        while True:
            self._assign(await self._membership.assignments())
            await asyncio.sleep(self._membership.heartbeat)

    def _assign(self, assigned: Assignments) -> None:
        # Without an await: no subscription may begin with the new epoch for an old assignment.
        revoked = [self._readers.pop(key) for key in set(self._readers) - assigned]
        for reader in revoked:
            reader.task.cancel()
        if revoked:
            logger.info(
                "partitions went to other members of the group",
                extra={"group": self._membership.group, "partitions": [r.key for r in revoked]},
            )
            self._run(self._save(revoked))
        for key in sorted(assigned - set(self._readers)):
            reader = _Reader(key, self._brokers, self._cursors, self._membership)
            self._readers[key] = reader
            reader.task = self._run(reader.run(self._start, self._queue))

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


class _Reader:
    """One assigned partition.

    Attributes:
        handled: the offset of the newest message that the application has handled.
    """

    task: asyncio.Task[None]

    def __init__(
        self,
        key: tuple[str, int],
        brokers: Brokers,
        cursors: ClusterCursors,
        membership: GroupMembership,
    ) -> None:
        self.key = key
        self.handled: int | None = None
        self.room = asyncio.Semaphore(_AHEAD)
        self._saved: int | None = None
        self._brokers = brokers
        self._cursors = cursors
        self._membership = membership
        self._cursor_id = f"__group:{membership.group}"

    async def run(self, start: GroupStart, queue: _Queue) -> None:
        """Read on from the checkpoint, without end. A read-only partition may become writable."""
        stream, partition = self.key
        following = await self._first(start)
        while True:
            subscription = StreamSubscription(
                stream, partition, following, resume=True, member=self._membership
            )
            try:
                async with aclosing(Subscriber(self._brokers, subscription).messages()) as messages:
                    async for message in messages:
                        await self.room.acquire()
                        queue.put_nowait((self, message))
                        following = message.offset + 1
            except StreamReadonlyError:
                await asyncio.sleep(_READONLY_AGAIN)

    async def _first(self, start: GroupStart) -> GroupStart | int:
        stream, partition = self.key
        checkpoint = await self._cursors.fetch(stream, self._cursor_id, partition)
        if checkpoint is None and start != "new":
            return start
        newest = await self._newest_offset()
        if checkpoint is None:
            # Another member that goes on before the first checkpoint must not skip anything.
            checkpoint = self.handled = newest
            await self.save()
        if checkpoint > newest:
            raise StreamError(
                f"the checkpoint of the group {self._membership.group} is offset {checkpoint}, and "
                f"the newest message of partition {partition} is {newest}: the stream was created "
                "again, or lost messages. Read it with another group",
                stream=stream,
            )
        return checkpoint + 1

    async def _newest_offset(self) -> int:
        found = await self._brokers.retry(
            lambda: partition_metadata(self._brokers, *self.key, resume=True)
        )
        return found.newest_offset

    async def save(self) -> None:
        """Write the checkpoint down if it is another one than before."""
        stream, partition = self.key
        offset = self.handled
        if offset is not None and offset >= 0 and offset != self._saved:
            await self._cursors.set(stream, self._cursor_id, offset, partition)
            self._saved = offset
