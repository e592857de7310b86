"""The quarantined events as the admin shows them. Cursors have no model: stores write them."""

from __future__ import annotations

from django.db import models


class EventInQuarantine(models.Model):
    """An event in quarantine, elsewhere: in the dead-letter queue. Only the stores add rows."""

    id = models.CharField(primary_key=True, max_length=32)
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

    class Meta:
        managed = False  # the table is that of the stores, and theirs to create
        db_table = "feedapi_quarantine"
        ordering = ("id",)
        verbose_name = "quarantined event"

    def __str__(self) -> str:
        return str(self.id)
