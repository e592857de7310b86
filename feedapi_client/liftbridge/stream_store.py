"""A cursor store that is the Liftbridge stream: events and their cursor are written together.

The stream needs optimistic concurrency control. All that a relay writes is in one partition of the
stream: that gives one order, and one place to recover from. See `ledger` for how it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from feedapi_client.errors import StoreError
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.ledger import Ledger, SnapshotPolicy
from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    LiftbridgeError,
    MessageTooLargeError,
    PublishError,
    StreamError,
    StreamGapError,
)
from feedapi_client.liftbridge.message_publisher import LedgerPublisher
from feedapi_client.liftbridge.stream_format import MessageFormat, OutgoingBatch, batch_rows
from feedapi_client.liftbridge.stream_model import (
    SNAPSHOT_BYTES,
    SNAPSHOT_MESSAGES,
    SNAPSHOT_SECONDS,
    Stream,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_replaces, in_place_of
from feedapi_client.stores.moving import check_moves, moved_positions

logger = logging.getLogger(__name__)

_DEFAULT_PATIENCE = 300.0


class StreamCursorStore:
    """Keeps positions in a stream with optimistic concurrency control, beside their events.

    One store serves one feed key. `save` takes an `OutgoingBatch` as its transaction. A batch whose
    acks are lost is looked up in the stream, and written again when it is not there. Operators can
    work on it as on any other store: see `AdministrableStore`.

    Arguments:
        publisher: an open publisher.
        api: an open connection to the broker's gRPC API.
        stream: the stream.
        partition: the stream's partition that holds everything.
        format: what one message holds. ``"batch"``: a whole batch, which any reader sees exactly
            once. ``"events"``: one event, which `RelayReader` returns exactly once, and which any
            other reader may see again after a crash.
        snapshot_every, snapshot_bytes, snapshot_seconds: messages, bytes and seconds after which
            all positions are written again, also while nothing else is written. The retention of
            the stream has to keep more than that, by each of its limits.
        give_up_after: seconds for which a broker that is away is waited for; by default those of
            the consumer, `RetryPolicy.give_up_after`.
        look_only: whether `load` appends nothing, for operators who only look. A relay has to know
            what its broker hides after a crash.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        publisher: LedgerPublisher,
        api: LiftbridgeApi,
        stream: Stream | str,
        *,
        partition: int = 0,
        format: str = "batch",
        snapshot_every: int = SNAPSHOT_MESSAGES,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
        give_up_after: float | None = None,
        look_only: bool = False,
    ) -> None:
        if format not in (MessageFormat.BATCH, MessageFormat.EVENTS):
            raise ValueError(f"format is 'batch' or 'events', not {format!r}")
        if snapshot_every < 1 or snapshot_bytes < 1 or snapshot_seconds <= 0:
            raise ValueError("snapshot_every, snapshot_bytes and snapshot_seconds must be positive")
        if give_up_after is not None and give_up_after < 0:
            raise ValueError("give_up_after must not be negative")
        self.stream = Stream(stream) if isinstance(stream, str) else stream
        self.format = MessageFormat(format)
        snapshots = SnapshotPolicy(
            every=snapshot_every, bytes=snapshot_bytes, seconds=snapshot_seconds
        )
        self._ledger = Ledger(publisher, api, self.stream, partition, snapshots)
        self._look_only = look_only
        self._own_patience = give_up_after
        self._ledger.give_up_after = _DEFAULT_PATIENCE if give_up_after is None else give_up_after
        self._loaded_feed: FeedKey | None = None
        self._lock = asyncio.Lock()
        self._saved_at = time.monotonic()

    def wait_for_server(self, seconds: float | None) -> None:
        if self._own_patience is None:
            self._ledger.give_up_after = seconds

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """Return all positions in the stream.

        Raises:
            StreamError: the stream can't keep them: it has no concurrency control, it belongs to
                another feed, it has only messages of others, or it is missing.
            StreamGapError: retention or compaction removed some.
            StreamReadonlyError: the partition takes no messages. A paused one is woken.
            BrokerUnavailableError: no broker answered in time.
            PublishError: the broker acked nothing.
        """
        async with self._lock:
            self._loaded_feed = None
            await self._ledger.read(look_only=self._look_only)
            state = self._ledger.state
            if state.positions and state.owner != feed.id:
                raise self._of_another_feed(feed)
            state.owner, state.key = feed.id, feed
            self._loaded_feed = feed
            return dict(state.positions)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Write the positions, and the events of an `OutgoingBatch`, as one complete attempt.

        Raises:
            RelayFencedError: another relay wrote to the stream.
            FencedError: a position replaces another one than the stored one.
            MessageTooLargeError: an event, or the batch, does not fit into a message. Nothing is
                saved, and the store can be used on. `index` is the place of the event.
            StoreError: the attempt could not be completed. It may be complete or not, so the store
                has to be loaded again. Also raised when the store was not loaded for `feed`.
            StreamGapError: the broker lost messages that it had acked. A store that is loaded again
                knows the positions before them, so that their events are written again.

        Cancellation: as a `StoreError`.
        """
        if transaction is not None and not isinstance(transaction, OutgoingBatch):
            raise StoreError(
                "the stream is the store: it takes no transaction except an OutgoingBatch",
                feed=feed.url,
            )
        async with self._lock:
            self._check_loaded(feed)
            if not positions and transaction is None:
                return
            for partition, position in positions.items():
                stored = self._ledger.state.positions.get(partition)
                check_replaces(feed, partition, position.replaces, stored)
            # Nothing else may be written before the result of this write is known. After a failure
            # the store stays closed until it is loaded again.
            self._loaded_feed = None
            try:
                await self._ledger.write_snapshot_if_due(feed)
                await self._write(feed, positions, transaction)
            except MessageTooLargeError:
                self._loaded_feed = feed
                raise
            except (PublishError, BrokerUnavailableError) as error:
                self._ledger.state.raise_if_lost(self.stream.name)
                raise StoreError(
                    f"the batch could not be written: {error}", feed=feed.url
                ) from error
            self._ledger.state.positions.update(positions)
            self._loaded_feed = feed
            self._saved_at = time.monotonic()

    async def _write(
        self, feed: FeedKey, positions: Mapping[int, Position], batch: OutgoingBatch | None
    ) -> None:
        if batch is None or not batch.values:
            await self._ledger.write_positions(feed, positions)
        else:
            named = not self._ledger.state.named
            limit = self._ledger.limit
            rows = batch_rows(feed, positions, batch, self.format, limit, named=named)
            await self._ledger.write(rows)
        self._ledger.state.named = True

    async def keep(self, *, idle_seconds: float = 4.0) -> bool:
        """Do what a stream needs to which nothing was saved for so many seconds.

        A snapshot is written when it is due, so that retention can't remove the last one. After a
        crash of the broker a message without content lets readers see the newest messages. A broker
        that does not answer at once is left alone. Does nothing while the store is not loaded.

        Returns whether something was written.

        Raises:
            RelayFencedError: another relay wrote to the stream. The store has to be loaded again.
            LiftbridgeError: it was not written. The store can be used on.
        """
        idle = time.monotonic() - self._saved_at >= idle_seconds
        if not idle or self._lock.locked() or (feed := self._loaded_feed) is None:
            return False
        # Outside the lock: while the gRPC API is away, the relay goes on over NATS.
        hides = await self._ledger.hides_messages()
        if self._lock.locked() or self._loaded_feed != feed:
            return False
        async with self._lock:
            if hides:
                return await self._ledger.reveal()
            return await self._ledger.write_snapshot_if_due(feed)

    async def takes(self, size: int) -> bool:
        """Whether the broker takes a message with a value of so many bytes. Nothing is stored."""
        async with self._lock:
            return await self._ledger.takes(size)

    def _check_loaded(self, feed: FeedKey) -> None:
        if self._loaded_feed != feed:
            raise StoreError(
                "one StreamCursorStore serves one feed, name and set of filters, "
                "and has to be loaded first",
                feed=feed.url,
            )

    def _of_another_feed(self, feed: FeedKey) -> StreamError:
        whose = self._ledger.state.key or "another feed, name or set of filters"
        return StreamError(
            f"it holds the positions of {whose}, not of {feed}. If that is the same feed, give its "
            "name (feed_name=, --feed-name), or stop the relay and run 'feedapi cursors move "
            "OLD_URL NEW_URL --store liftbridge://HOST:PORT/STREAM'. Otherwise give each relay a "
            "stream of its own",
            stream=self.stream.name,
        )

    # ------------------------------------------------------------------ for operators

    async def feeds(self) -> list[FeedKey]:
        """Return the key of the positions; none for a stream without positions."""
        async with self._lock:
            if self._loaded_feed is None:
                await self._ledger.read(look_only=self._look_only)
            state = self._ledger.state
            return [state.key] if state.positions and state.key is not None else []

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """Delete the positions of the partitions, or of all."""
        async with self._lock:
            await self._read_for_operator(feed)
            left = dict(self._ledger.state.positions)
            for partition in list(left) if partitions is None else partitions:
                left.pop(partition, None)
            await self._replace_all(feed, left)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """Replace the positions of these partitions, or give a new stream its positions.

        Of a stream that retention has cut, the positions that are left are replaced as a whole.

        Raises:
            StreamError: the stream holds the positions of another key.
        """
        async with self._lock:
            try:
                await self._read_for_operator(feed)
            except StreamGapError as gap:
                logger.warning(
                    "%s. Now only these partitions have a position: %s. Any other one that the "
                    "feed lists is relayed from its first event again, unless you set its "
                    "position, too, before the relay starts",
                    gap,
                    ", ".join(map(str, sorted(positions))),
                )
                await self._ledger.skip_to_end()
            stored = self._ledger.state.positions
            replaced = in_place_of(stored, positions)
            await self._replace_all(feed, {**stored, **replaced})
            return replaced

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """Move all positions to another key. `overwrite` makes no difference: there is one key."""
        check_moves(keys)
        async with self._lock:
            await self._read_for_operator()
            state = self._ledger.state
            for old, new in keys.items():
                if state.owner == old.id and state.positions:
                    moved = moved_positions(new, state.positions, {}, overwrite=overwrite)
                    await self._replace_all(new, moved)
                    return {new: moved}
            return {}

    async def _read_for_operator(self, feed: FeedKey | None = None) -> None:
        """Read the stream. What was loaded has to be loaded again, because it may change."""
        self._loaded_feed = None
        await self._ledger.read()
        state = self._ledger.state
        if feed is not None and state.positions and state.owner != feed.id:
            raise self._of_another_feed(feed)

    async def _replace_all(self, feed: FeedKey, positions: Mapping[int, Position]) -> None:
        try:
            await self._ledger.write_positions(feed, positions, is_snapshot=True)
        except LiftbridgeError as error:
            if isinstance(error, StreamError):
                raise
            raise StoreError(
                f"the positions could not be written: {error}", feed=feed.url
            ) from error
        state = self._ledger.state
        state.owner, state.key, state.positions = feed.id, feed, dict(positions)
