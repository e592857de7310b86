"""The consumer of the demo: applies events, and crashes on request."""

from __future__ import annotations

from feedapi_client.cli.demo.effects import Effects
from feedapi_client.cli.demo.event_log import EventLog
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import LeaseLostError
from feedapi_client.model import Batch
from feedapi_client.options import Limits, RetryPolicy, Share
from feedapi_client.status import ConsumerStatus
from feedapi_client.stores.sqlite import SQLiteCursorStore

# Small batches and short pauses, so that many batches come within a few seconds.
_LIMITS = Limits(
    poll_interval=0.02, max_poll_interval=0.1, discovery_interval=0.25, max_batch_bytes=8 * 1024
)
_RETRY = RetryPolicy(base_delay=0.02, max_delay=0.2)


class Crash(Exception):  # noqa: N818 - it stands for a crash, not for an error
    """The consumer crashes."""


class DemoConsumer:
    """A consumer that keeps its effects and its cursors in one transaction.

    With `sabotage` the cursor is saved outside of it: before the effects (``cursor-first``) or
    after them (``cursor-last``).
    """

    def __init__(self, log: EventLog, *, sabotage: str | None, share: Share | None = None) -> None:
        self.applied = 0
        self.crashes = 0
        self.status: ConsumerStatus | None = None
        """The latest snapshot, for a view that draws in a thread of its own."""
        self._log = log
        self._sabotage = sabotage
        self._share = share
        self._crashes_requested = 0
        self._consumer: FeedConsumer | None = None
        self._stopped = False

    def crash(self) -> None:
        """Crash at the next batch that has events."""
        self._crashes_requested += 1

    def stop(self) -> None:
        """End the run that follows the feed, after the batch in flight."""
        self._stopped = True
        if self._consumer is not None:
            self._consumer.stop()

    def take_status(self) -> None:
        """Take a snapshot of the consumer."""
        if self._consumer is not None:
            self.status = self._consumer.status()

    async def run(
        self, url: str, store: SQLiteCursorStore, effects: Effects, *, follow: bool
    ) -> bool:
        """Consume until the end, `stop` or a crash. Returns whether it was a crash.

        Raises `FeedError` where the consumer does.
        """
        try:
            async with FeedConsumer(
                url,
                store=store,
                name="demo",
                follow=follow,
                share=self._share,
                limits=_LIMITS,
                retry=_RETRY,
            ) as consumer:
                self._consumer = consumer
                if self._stopped and follow:
                    return False
                async for batch in consumer.batches():
                    try:
                        await self._handle(batch, effects)
                    except LeaseLostError:
                        continue  # rolled back: the instance that has the lease delivers it again
        except Crash:
            self.crashes += 1
            self._log.add(
                f"crash {self.crashes}: the consumer died in the middle of a batch, "
                "another one starts from the store"
            )
            return True
        finally:
            self.take_status()
            self._consumer = None
        return False

    async def _handle(self, batch: Batch, effects: Effects) -> None:
        crash = self._crashes_requested > 0 and len(batch.events) > 0
        if crash:
            self._crashes_requested -= 1
        if self._sabotage is None:
            await self._handle_in_transaction(batch, effects, crash)
        else:
            await self._handle_without_transaction(batch, effects, crash)
        self.applied += len(batch.events)

    async def _handle_in_transaction(self, batch: Batch, effects: Effects, crash: bool) -> None:
        connection = effects.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            effects.add(batch)
            if crash and self.crashes % 2 == 0:
                raise Crash
            await batch.commit(transaction=connection)
            if crash:
                raise Crash
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    async def _handle_without_transaction(
        self, batch: Batch, effects: Effects, crash: bool
    ) -> None:
        """How not to do it: a crash between effects and cursor loses or repeats events."""
        if self._sabotage == "cursor-first":
            await batch.commit()
        else:
            effects.add(batch)
        if crash:
            raise Crash
        if self._sabotage == "cursor-first":
            effects.add(batch)
        else:
            await batch.commit()
