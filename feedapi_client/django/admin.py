"""The quarantine in the admin: list, show, replay and drop.

Dropping is Django's own action *Delete selected*. To replay, name the handler in the settings::

    FEEDAPI_QUARANTINE_HANDLER = "orders.management.commands.consume.Command"

It is a `ConsumeCommand`, or a function that takes a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils.module_loading import import_string

from feedapi_client.django.models import EventInQuarantine
from feedapi_client.django.store import DjangoQuarantineStore
from feedapi_client.errors import StoreError
from feedapi_client.model import Batch
from feedapi_client.quarantine.operations import replay

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
atomic: Any = transaction.atomic  # its type is too wide for a type checker
_LONGEST_SHOWN = 1 << 18
_SETTING = "FEEDAPI_QUARANTINE_HANDLER"


class ReplayedBatch(Batch[Any]):
    """As a handler of `SyncFeedConsumer` takes it. Its commit removes the event."""

    def __init__(self, batch: Batch[Any], using: str) -> None:
        super().__init__(batch.partition, batch.events, batch.cursor)
        self.committed = False
        self._replayed, self._using = batch, using

    def commit(self, transaction: Any = None) -> None:  # type: ignore[override]
        if transaction is None and connections[self._using].in_atomic_block:
            transaction = connections[self._using]
        async_to_sync(self._replayed.commit)(transaction)
        self.committed = True


@admin.register(EventInQuarantine)
class QuarantineAdmin(admin.ModelAdmin):
    """Read-only, but for replaying and deleting."""

    list_display = ("time", "consumer", "feed_url", "partition_id", "error_type")
    list_filter = ("consumer", "error_type")
    search_fields = ("id", "feed_url", "payload")
    ordering = ("id",)
    actions = ("replay",)
    fields: tuple[str, ...] = (
        *("id", "time", "feed_url", "consumer", "filters", "partition_id", "feed_cursor"),
        *("event_index", "event", "event_headers", "error_type", "error"),
    )
    readonly_fields = fields

    @admin.display(ordering="quarantined_at", description="quarantined")
    def time(self, event: Any) -> datetime | str:
        try:
            return _EPOCH + timedelta(microseconds=event.quarantined_at)
        except OverflowError:  # of a row that no store wrote
            return f"{event.quarantined_at} µs"

    def get_queryset(self, request: Any) -> Any:
        """Leave in the database what only an event's own page shows."""
        return super().get_queryset(request).defer("payload", "headers", "error")

    @admin.display(description="payload")
    def event(self, event: Any) -> str:
        raw = bytes(event.payload)
        text = raw[:_LONGEST_SHOWN].decode(errors="backslashreplace")
        return text if len(raw) <= _LONGEST_SHOWN else f"{text}\n… of {len(raw):,} bytes"

    @admin.display(description="headers")
    def event_headers(self, event: Any) -> str:
        return str(event.headers)[:_LONGEST_SHOWN]

    def has_add_permission(self, request: Any) -> bool:  # noqa: ARG002
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:  # noqa: ARG002
        return False

    @admin.action(description="Replay selected quarantined events", permissions=["delete"])
    def replay(self, request: Any, queryset: Any) -> None:
        ids = list(queryset.order_by("id").values_list("id", flat=True))
        try:
            handled, failures = replay_here(queryset.db, _handler(), ids)
        except (ImproperlyConfigured, StoreError) as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        for id, failure in failures:
            kind = type(failure).__qualname__
            self.message_user(request, f"{id} failed again with {kind}, and stays", messages.ERROR)
        if handled:
            self.message_user(request, f"{handled} replayed", messages.SUCCESS)


def replay_here(
    using: str, handle: Callable[[Any], object], ids: list[str]
) -> tuple[int, list[tuple[str, Exception]]]:
    """What the handler does not commit is removed when it returns, in this thread."""
    failures: list[tuple[str, Exception]] = []

    def report(event: Any, error: Exception | None) -> None:
        if error is not None:
            failures.append((event.id, error))

    def call(batch: Batch) -> None:
        replayed = ReplayedBatch(batch, using)
        handle(replayed)
        if not replayed.committed:
            with atomic(using=using):
                replayed.commit()

    store = DjangoQuarantineStore(using)
    done = async_to_sync(replay)(store, sync_to_async(call), ids, report=report)
    return done.handled, failures


def _handler() -> Callable[[Any], object]:
    path = getattr(settings, _SETTING, None)
    try:
        found: Any = import_string(path or "")
    except ImportError as error:
        raise ImproperlyConfigured(
            f"no handler is known ({error}): set {_SETTING} to the dotted path of a "
            "ConsumeCommand, or of a function that takes a batch"
        ) from error
    handle: Callable[[Any], object] = found().handle_batch if isinstance(found, type) else found
    return handle
