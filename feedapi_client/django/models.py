"""The tables: those of `SQLAlchemyCursorStore` and `PostgresCursorStore`, with the same columns.

Read them as you like. Only the stores write them: a cursor that is changed by the ORM has no new
revision, and the consumer does not notice.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class FeedIdField(models.CharField):
    """`FeedKey.id`. As a VARCHAR the statements on PostgreSQL would find no index."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "max_length": 64})

    def db_type(self, connection: Any) -> str:  # noqa: ARG002
        """Return the type of the column."""
        return "char(64)"


class Cursor(models.Model):
    """The position of one partition of one `FeedKey`."""

    pk = models.CompositePrimaryKey("feed_id", "partition_id")
    feed_id = FeedIdField()
    partition_id = models.IntegerField()
    feed_cursor = models.TextField()
    status = models.CharField(max_length=16)
    revision = models.BigIntegerField()
    saved_at = models.BigIntegerField(help_text="Microseconds since 1970 UTC.")
    feed_url = models.TextField()
    consumer = models.TextField()
    filters = models.TextField(help_text="JSON.")

    class Meta:  # noqa: D106
        db_table = "feedapi_cursors"

    def __str__(self) -> str:
        return f"{self.consumer} of {self.feed_url}, partition {self.partition_id}"


class ReplacedCursor(models.Model):
    """An entry of the journal: see `feedapi_client.Journal`."""

    pk = models.CompositePrimaryKey("feed_id", "replaced_at", "partition_id", "revision")
    feed_id = FeedIdField()
    replaced_at = models.BigIntegerField()
    partition_id = models.IntegerField()
    revision = models.BigIntegerField()
    feed_cursor = models.TextField()
    status = models.CharField(max_length=16)
    saved_at = models.BigIntegerField()

    class Meta:  # noqa: D106
        db_table = "feedapi_cursors_journal"

    def __str__(self) -> str:
        return f"partition {self.partition_id}, revision {self.revision}"


class EventDoneAhead(models.Model):
    """An event that is done ahead of the cursor; without an event, the claim of a partition."""

    pk = models.CompositePrimaryKey("feed_id", "partition_id", "event_id")
    feed_id = FeedIdField()
    partition_id = models.IntegerField()
    event_id = models.CharField(max_length=64)
    claim = models.BigIntegerField()

    class Meta:  # noqa: D106
        db_table = "feedapi_cursors_done"

    def __str__(self) -> str:
        return f"partition {self.partition_id}, {self.event_id or 'claim'}"


class SharingInstance(models.Model):
    """A process that shares a feed. Of the other stores and the command line."""

    pk = models.CompositePrimaryKey("feed_id", "instance")
    feed_id = FeedIdField()
    instance = models.CharField(max_length=200)
    joined_at = models.BigIntegerField()
    expires_at = models.BigIntegerField()
    changes = models.BigIntegerField()
    options = models.CharField(max_length=200)

    class Meta:  # noqa: D106
        db_table = "feedapi_cursors_instances"

    def __str__(self) -> str:
        return str(self.instance)


class PartitionLease(models.Model):
    """Which instance reads a partition. Of the other stores and the command line."""

    pk = models.CompositePrimaryKey("feed_id", "partition_id")
    feed_id = FeedIdField()
    partition_id = models.IntegerField()
    owner = models.CharField(max_length=200, null=True)
    epoch = models.BigIntegerField()
    ended = models.IntegerField()
    changed_at = models.BigIntegerField()

    class Meta:  # noqa: D106
        db_table = "feedapi_cursors_leases"

    def __str__(self) -> str:
        return f"partition {self.partition_id} of {self.owner}"


class EventInQuarantine(models.Model):
    """An event in quarantine, elsewhere: in the dead-letter queue."""

    id = models.CharField(primary_key=True, max_length=32)
    feed_id = FeedIdField()
    feed_url = models.TextField()
    consumer = models.TextField()
    filters = models.TextField()
    partition_id = models.IntegerField()
    feed_cursor = models.TextField()
    event_index = models.IntegerField()
    payload = models.BinaryField()
    headers = models.TextField()
    error_type = models.TextField()
    error = models.TextField()
    quarantined_at = models.BigIntegerField()

    class Meta:  # noqa: D106
        db_table = "feedapi_quarantine"
        ordering = ("id",)
        verbose_name = "quarantined event"

    def __str__(self) -> str:
        return str(self.id)
