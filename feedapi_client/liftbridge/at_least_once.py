"""Publishing at least once to a broker that may lose what it acked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    NoStreamError,
    PublishError,
    StreamError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.recently_acked import SECONDS, AckedBatch, RecentlyAcked
from feedapi_client.liftbridge.stream_end import check_same, readonly, writable
from feedapi_client.liftbridge.stream_name import Stream
from feedapi_client.liftbridge.stream_publisher import StreamPublisher
from feedapi_client.liftbridge.stream_rows import OutgoingBatch
from feedapi_client.liftbridge.until_acked import publish_until_acked
from feedapi_client.retry import OnRetry

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0
_LOOKED_FOR = 10.0
"""Seconds for which a stream is looked for that never acked anything. A broker that starts needs a
few; with the gRPC API it is known whether the stream is there."""
_CHECKS_AT_ONCE = 32


class AcknowledgedPublishing:
    """Publishes batches until they are acked, and again what the broker loses soon after.

    Arguments:
        publisher: an open publisher.
        stream: the stream.
        ack_policy: when the broker acks.
        give_up_after: seconds without progress after which an error is final; None: never.
        api: an open connection to the broker's gRPC API, to look at the stream.
        on_retry: called before each pause.
        on_recovered: called with the number of messages that were lost and published again.

    Concurrency: batches of different partitions of the feed may be published at once.
    """

    def __init__(
        self,
        publisher: StreamPublisher,
        stream: Stream,
        *,
        ack_policy: AckPolicy,
        give_up_after: float | None,
        api: LiftbridgeApi | None,
        on_retry: OnRetry,
        on_recovered: Callable[[int], None],
    ) -> None:
        self._publisher = publisher
        self._stream = stream
        self._ack_policy = ack_policy
        self._give_up_after = give_up_after
        self._api = api
        self._on_retry = on_retry
        self._on_recovered = on_recovered
        self._acked = False
        # The stream is another one than it was: deleted, and perhaps created again.
        self._replaced: StreamError | None = None
        self._recent = RecentlyAcked(time.monotonic)
        self._in_order: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def publish(
        self, batch: OutgoingBatch, shared: Mapping[str, bytes], *, by_key: bool
    ) -> None:
        """Publish the events of a batch, and return when no broker is known to have lost any.

        Arguments:
            shared: headers of all messages.
            by_key: whether the key chooses the partition of the stream; otherwise the feed's
                partition does.

        Raises:
            MessageTooLargeError: an event is too large; `index` says which. Those before it are
                published.
            PublishError: no success for `give_up_after` seconds.
            StreamError: the stream is missing or read-only.
        """
        if self._replaced is not None:
            raise self._replaced
        partitions = self._stream.partitions
        partition = None if by_key else batch.partition % partitions
        began = time.monotonic()
        retried = False

        def on_retry(error: Exception, attempt: int, pause: float) -> None:
            nonlocal retried
            retried = True
            if isinstance(error, NoStreamError) and self._may_be_missing(began):
                raise error
            self._on_retry(error, attempt, pause)

        failure: PublishError | None = None
        async with self._in_order[batch.partition]:
            try:
                acks = await self._until_acked(
                    batch.values,
                    batch.keys or None,
                    batch.headers or None,
                    shared=shared,
                    partition=partition,
                    on_retry=on_retry,
                )
            except PublishError as error:
                failure, acks = error, error.acks
            self._acked = self._acked or bool(acks)
            acked = self._acked_batch(batch, shared, partition, acks)
            lost = self._recent.add(acked)
        await self._recover(lost, acked.acked)
        if lost or (retried and failure is None):
            # The leader may be another one.
            await self.look_for_losses()
        if failure is not None:
            raise failure

    def _may_be_missing(self, began: float) -> bool:
        """Whether the stream is likelier to be missing than its broker to be away for a moment."""
        if self._api is not None or self._acked:
            return False
        return time.monotonic() - began >= _LOOKED_FOR

    def _acked_batch(
        self,
        batch: OutgoingBatch,
        shared: Mapping[str, bytes],
        partition: int | None,
        acks: Sequence[Ack | None],
    ) -> AckedBatch:
        """Return the messages of a batch that were acked, which are the first ones."""
        offsets = [ack.offset for ack in acks if ack is not None]
        count = len(offsets)
        keys = batch.keys[:count]
        return AckedBatch(
            batch.partition,
            batch.values[:count],
            keys,
            batch.headers[:count],
            shared,
            list(map(self._stream.partition_of, keys)) if partition is None else partition,
            offsets,
            time.monotonic(),
        )

    async def _until_acked(
        self,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Mapping[str, bytes]] | None,
        *,
        shared: Mapping[str, bytes] | None = None,
        partition: int | None,
        on_retry: OnRetry,
    ) -> list[Ack | None]:
        return await publish_until_acked(
            self._publisher,
            self._stream,
            values,
            keys,
            headers,
            headers=shared,
            partition=partition,
            ack_policy=self._ack_policy,
            give_up_after=self._give_up_after,
            on_retry=on_retry,
            before_retry=self._wake,
        )

    # ------------------------------------------------------------------ losses

    async def look_for_losses(self) -> None:
        """Compare the ends of partitions with what was acked, where the API is known.

        Raises:
            StreamError: the stream is missing, read-only, or has another subject or number of
                partitions. The next batch meets the same.
            LiftbridgeError: what was lost could not be published again.
        """
        self._replaced = None
        lost = await self._short()
        try:
            await self._recover(lost, time.monotonic())
        except StreamError as error:
            self._replaced = error
            raise

    async def _short(self) -> dict[int, int]:
        """Return the partitions that end before what was acked, and where they end.

        A broker that starts may think that it still leads a partition, and have fewer messages.
        Messages are then published once more than needed.
        """
        if self._api is None:
            return {}
        ends = self._recent.ends()
        found = await asyncio.gather(
            *(self._api.glance(self._stream.name, partition) for partition in ends)
        )
        return {
            each.id: each.newest_offset + 1
            for each in found
            if each is not None and each.newest_offset + 1 < ends[each.id]
        }

    async def _recover(self, lost: Mapping[int, int], before: float) -> None:
        """Publish again what the broker lost, and what followed it, until it loses nothing."""
        while lost:
            # A stream that was created again has lost all, too.
            await self._wake()
            for place, offset in lost.items():
                logger.warning(
                    "stream %s, partition %d: the broker lost messages that it had acked, from "
                    "offset %d on. Those of the last %d seconds are published again",
                    self._stream.name,
                    place,
                    offset,
                    SECONDS,
                    extra={"stream": self._stream.name, "partition": place, "offset": offset},
                )
            again: dict[int, int] = {}
            for source in self._recent.sources():
                _merge(again, await self._recover_source(source, lost, before))
            self._recent.shorten(lost)
            lost, before = again, time.monotonic()

    async def _recover_source(
        self, source: int, lost: Mapping[int, int], before: float
    ) -> dict[int, int]:
        """Publish again what is lost of one partition of the feed, in its order."""
        found: dict[int, int] = {}
        async with self._in_order[source]:
            for place, offset in lost.items():
                batches = self._recent.lost(source, place, offset, before)
                left = deque(batches)
                try:
                    while left:
                        _merge(found, await self._publish_again(left[0]))
                        left.popleft()
                except BaseException:
                    self._recent.put_back(left)
                    raise
                if batches:
                    self._on_recovered(sum(map(len, batches)))
        return found

    async def _publish_again(self, batch: AckedBatch) -> dict[int, int]:
        acks = await self._until_acked(
            batch.values,
            batch.keys or None,
            batch.headers or None,
            shared=batch.shared,
            # Otherwise the keys choose it again.
            partition=batch.places if isinstance(batch.places, int) else None,
            on_retry=self._on_retry,
        )
        offsets = [ack.offset for ack in acks if ack is not None]
        return self._recent.add(replace(batch, offsets=offsets, acked=time.monotonic()))

    # ------------------------------------------------------------------ the stream

    async def check_stream(self) -> None:
        """Look at the stream where the API is known, and wake paused partitions.

        Raises:
            StreamError: it is missing, read-only, or has another subject or number of partitions.
            BrokerUnavailableError: no broker answered in time.
        """
        if self._api is None:
            return
        name = self._stream.name
        found = await self._api.metadata(name)
        check_same(self._stream, found.stream)
        for partition in found.partitions.values():
            if partition.readonly:
                raise readonly(name, partition.id)
        at_once = asyncio.Semaphore(_CHECKS_AT_ONCE)

        async def wake(api: LiftbridgeApi, partition: int) -> None:
            async with at_once:
                await writable(api, name, partition)

        # Which ones were ever paused; the broker does not say whether they still are.
        await asyncio.gather(
            *(wake(self._api, each.id) for each in found.partitions.values() if each.paused)
        )

    async def _wake(self) -> None:
        """Look at the stream again, unless no broker answers at once: NATS may be there."""
        with suppress(BrokerUnavailableError, TimeoutError):
            async with asyncio.timeout(_CHECK_SECONDS):
                await self.check_stream()


def _merge(lost: dict[int, int], more: Mapping[int, int]) -> None:
    for place, offset in more.items():
        lost[place] = min(offset, lost.get(place, offset))
