"""Publishing at least once to a broker that may lose what it acked.

When leaders die, a follower that shortened its log may become the leader (see `subscription`). It
gives the offsets of the lost messages to the next ones. So one offset that is acked twice shows a
loss, and so does a partition that ends before an offset that was acked. What was acked lately is
then published again, in the order of each partition of the feed: more than what was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.ledger import readonly, writable
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    NoStreamError,
    PublishError,
    StreamError,
)
from feedapi_client.liftbridge.message_publisher import LiftbridgePublisher, publish_until_acked
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream_format import OutgoingBatch
from feedapi_client.liftbridge.stream_model import Stream
from feedapi_client.retry import OnRetry

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0
_LOOKED_FOR = 10.0
"""Seconds for which a stream is looked for that never acked anything. A broker that starts needs a
few; with the gRPC API it is known whether the stream is there."""
_CHECKS_AT_ONCE = 32
_KEPT_SECONDS = 30.0
"""How long what was acked is remembered. A follower loses what is above its high watermark, which
is written down every 5 s."""
_KEPT_BYTES = 32 * 1024 * 1024
_OVERHEAD = 150
"""Bytes that a message takes beside its value and key, about."""


@dataclass(slots=True, eq=False)
class _Acked:
    """Messages of a batch of the feed, and their offsets by partition of the stream.

    One record serves a batch: an object for each message took a third of the time of a relay.
    """

    batch: OutgoingBatch
    shared: Mapping[str, bytes]
    by_key: bool
    offsets: Mapping[int, Sequence[int]]
    at: float
    size: int


class AcknowledgedPublishing:
    """Publishes batches until they are acked, and again what the broker loses soon after.

    Concurrency: batches of different partitions of the feed may be published at once.
    """

    def __init__(
        self,
        publisher: LiftbridgePublisher,
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
        # Where each partition of the stream has to end, at least.
        self._ends: dict[int, int] = {}
        # The newest batches that were acked, the newest one always; the bytes and offsets of them.
        self._recent: deque[_Acked] = deque()
        self._bytes = 0
        self._offsets: defaultdict[int, set[int]] = defaultdict(set)
        # Partitions of the stream of which what was lost could not be published again.
        self._lost: set[int] = set()
        self._in_order: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def publish(
        self, batch: OutgoingBatch, shared: Mapping[str, bytes], *, by_key: bool
    ) -> None:
        """Publish the events of a batch, and return when no broker is known to have lost any.

        A `MessageTooLargeError` names the event by its index; those before it are published.
        """
        began = time.monotonic()
        retried = False

        def on_retry(error: Exception, attempt: int, pause: float) -> None:
            nonlocal retried
            retried = True
            missing = isinstance(error, NoStreamError) and self._api is None and not self._ends
            if missing and time.monotonic() - began >= _LOOKED_FOR:
                raise error  # likelier than that its broker is away for a moment
            self._on_retry(error, attempt, pause)

        failure: PublishError | None = None
        async with self._in_order[batch.partition]:
            try:
                lost = await self._until_acked(batch, shared, by_key, on_retry)
            except PublishError as error:
                failure = error
                lost = self._remember(batch, shared, by_key, error.acks)
        await self._recover(lost)
        if lost or (retried and failure is None):
            # The leader may be another one.
            await self.look_for_losses()
        if failure is not None:
            raise failure

    async def _until_acked(
        self, batch: OutgoingBatch, shared: Mapping[str, bytes], by_key: bool, on_retry: OnRetry
    ) -> set[int]:
        """Publish a batch, and return the partitions of the stream that lost messages before."""
        acks = await publish_until_acked(
            self._publisher,
            self._stream,
            batch.values,
            batch.keys or None,
            batch.headers or None,
            headers=shared,
            partition=None if by_key else batch.partition % self._stream.partitions,
            ack_policy=self._ack_policy,
            give_up_after=self._give_up_after,
            on_retry=on_retry,
            before_retry=self._wake,
        )
        return self._remember(batch, shared, by_key, acks)

    def _remember(
        self,
        batch: OutgoingBatch,
        shared: Mapping[str, bytes],
        by_key: bool,
        acks: Sequence[Ack | None],
    ) -> set[int]:
        """Remember the messages that were acked, which are the first ones of a batch."""
        found = [ack.offset for ack in acks if ack is not None]
        if not found:
            return set()
        offsets: defaultdict[int, list[int]] = defaultdict(list)
        if by_key:
            for key, offset in zip(batch.keys, found, strict=False):
                offsets[self._stream.partition_of(key)].append(offset)
        else:
            offsets[batch.partition % self._stream.partitions] = found
        if len(found) < len(batch.values):
            batch = batch.without(range(len(found), len(batch.values)))
        lost = set()
        for place, given in offsets.items():
            if not self._offsets[place].isdisjoint(given):
                lost.add(place)
            self._offsets[place].update(given)
            self._ends[place] = max(max(given) + 1, self._ends.get(place, 0))
        size = sum(map(len, batch.values)) + sum(len(key or b"") for key in batch.keys)
        size += _OVERHEAD * len(batch.values)
        now = time.monotonic()
        self._recent.append(_Acked(batch, shared, by_key, offsets, now, size))
        self._bytes += size
        while len(self._recent) > 1 and (
            self._bytes > _KEPT_BYTES or self._recent[0].at < now - _KEPT_SECONDS
        ):
            self._forget(self._recent.popleft())
        return lost

    def _forget(self, acked: _Acked) -> None:
        self._bytes -= acked.size
        for place, offsets in acked.offsets.items():
            self._offsets[place].difference_update(offsets)

    # ------------------------------------------------------------------ losses

    async def look_for_losses(self) -> None:
        """Compare the ends of partitions with what was acked, where the API is known."""
        if self._api is None:
            return
        ends = dict(self._ends)  # what is acked meanwhile is behind what a broker tells
        found = await asyncio.gather(
            *(self._api.glance(self._stream.name, partition) for partition in ends)
        )
        # A broker that starts may think that it still leads a partition, and have fewer messages.
        # Messages are then published once more than needed.
        await self._recover(
            {
                each.id
                for each in found
                if each is not None and each.newest_offset + 1 < ends.get(each.id, 0)
            }
        )

    async def _recover(self, lost: set[int]) -> None:
        """Publish again what was acked lately, until the broker loses nothing meanwhile."""
        lost, self._lost = lost | self._lost, set()
        try:
            while lost:
                # A stream that was created again has lost all, too.
                await self._wake()
                logger.warning(
                    "stream %s: the broker lost messages that it had acked, in the partitions %s. "
                    "Those of the last %d seconds are published again",
                    self._stream.name,
                    ", ".join(map(str, sorted(lost))),
                    _KEPT_SECONDS,
                    extra={"stream": self._stream.name},
                )
                again = await self._publish_again()
                for place in lost:  # ends where what was published again ends
                    found = [
                        max(each.offsets[place]) for each in self._recent if place in each.offsets
                    ]
                    self._ends[place] = max(found, default=-1) + 1
                lost = again
        except BaseException:
            self._lost |= lost
            raise

    async def _publish_again(self) -> set[int]:
        """Return the partitions of the stream that lost messages meanwhile."""
        lost: set[int] = set()
        # Not among the recent ones, which are forgotten after a while: this may take longer.
        left = dict.fromkeys(self._recent)
        self._recent.clear()
        self._offsets.clear()
        self._bytes = 0
        try:
            for source in {each.batch.partition for each in left}:
                async with self._in_order[source]:
                    for each in [each for each in left if each.batch.partition == source]:
                        lost |= await self._until_acked(
                            each.batch, each.shared, each.by_key, self._on_retry
                        )
                        del left[each]
                        self._on_recovered(len(each.batch.values))
        finally:
            for each in left:  # for the next time
                each.offsets, each.at = {}, time.monotonic()
            self._recent.extend(left)
            self._bytes += sum(each.size for each in left)
        return lost

    # ------------------------------------------------------------------ the stream

    async def check_stream(self) -> None:
        """Look at the stream where the API is known, and wake paused partitions."""
        if self._api is None:
            return
        name = self._stream.name
        found = await self._api.metadata(name)
        _check_same(self._stream, found.stream)
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


def _check_same(wanted: Stream, found: Stream) -> None:
    """Raise `StreamError` when the broker knows the stream otherwise than a publisher does.

    Messages would go to subjects that nobody stores, or all to one partition.
    """
    if (wanted.partitions, wanted.subject) != (found.partitions, found.subject):
        raise StreamError(
            f"it has {found.partitions} partitions and the subject {found.subject}, and the "
            f"publisher was told {wanted.partitions} and {wanted.subject}: Stream({found.name!r}, "
            f"{found.subject!r}, {found.partitions}), or --partitions {found.partitions} --subject "
            f"{found.subject}",
            stream=found.name,
        )
