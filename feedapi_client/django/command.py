"""A management command that consumes a feed: derive from `ConsumeCommand`."""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections, connections, transaction

from feedapi_client.django.store import DjangoCursorStore
from feedapi_client.errors import FeedError
from feedapi_client.quarantine.policy import OnFailure, Retry
from feedapi_client.sync import SyncBatch, SyncFeedConsumer

__all__ = ["ConsumeCommand"]

atomic: Any = transaction.atomic  # its type is too wide for a type checker


class ConsumeCommand(BaseCommand):
    """Consumes a feed until it is stopped, each batch in one transaction with its cursor.

    A command derives from it, in ``management/commands``::

        class Command(ConsumeCommand):
            help = "Apply the events of the feed to the orders."
            url = "https://service/myfeed"

            def apply(self, batch):
                for event in batch:
                    Order.objects.create(**event.json())

    `apply` is called within ``transaction.atomic(using=self.using)``, and the cursor is saved at
    the end of the block: exactly once. A batch whose `apply` raises is rolled back and comes again
    (`on_failure`). Connections are treated as around a request (``CONN_MAX_AGE``).

    Options: ``--once``, ``--threads``, ``--grace``. SIGTERM ends the command after the batches in
    flight, SIGINT at once.

    Attributes:
        url: the feed.
        using: the alias of the database of effects and cursors.
        options: further arguments for `SyncFeedConsumer`, such as ``{"name": "orders"}``.
        on_failure: what follows when `apply` raises. By default it is retried until it works.
    """

    url: str = ""
    using: str = "default"
    options: ClassVar[dict[str, Any]] = {}
    on_failure: OnFailure = Retry(attempts=None)

    def apply(self, batch: SyncBatch[Any]) -> None:
        """Write the effects of a batch. To be defined."""
        raise NotImplementedError(f"{type(self).__module__} must define apply(self, batch)")

    def handle_batch(self, batch: SyncBatch[Any]) -> None:
        """Call `apply` in a transaction and commit there. Override it for another way."""
        with atomic(using=self.using):
            self.apply(batch)
            batch.commit(transaction=connections[self.using])

    def make_consumer(self, *, follow: bool) -> SyncFeedConsumer[Any]:
        """Return the consumer. Override it for another store, or for an URL from the settings."""
        if not self.url:
            raise CommandError(f"{type(self).__module__} must set url, the URL of the feed")
        store = DjangoCursorStore(self.using)
        return SyncFeedConsumer(self.url, store=store, follow=follow, **self.options)

    def add_arguments(self, parser: Any) -> None:
        """See Django's `BaseCommand`."""
        parser.add_argument("--once", action="store_true", help="end at the end of the feed")
        threads = "partitions to handle at once (default: 1)"
        parser.add_argument("--threads", type=int, default=1, help=threads)
        grace = "after SIGTERM, for batches in flight (default: 20)"
        parser.add_argument("--grace", type=float, default=20.0, metavar="SECONDS", help=grace)

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002
        """See Django's `BaseCommand`."""
        if options["threads"] < 1:
            raise CommandError("--threads takes 1 or more")
        consumer = self.make_consumer(follow=not options["once"])
        before: Any = None
        if threading.current_thread() is threading.main_thread():
            stop = partial(consumer.stop, grace=options["grace"])
            before = signal.signal(signal.SIGTERM, lambda *_: stop())
        try:
            with consumer:
                consumer.run(
                    self._handle_batch, threads=options["threads"], on_failure=self.on_failure
                )
        except FeedError as error:
            raise CommandError(f"{type(error).__name__}: {error}") from error
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        if consumer.cut_short:
            raise CommandError("the grace period was over before all in flight was committed")

    def _handle_batch(self, batch: SyncBatch[Any]) -> None:
        close_old_connections()  # a broken one would never be replaced
        try:
            self.handle_batch(batch)
        finally:
            close_old_connections()
