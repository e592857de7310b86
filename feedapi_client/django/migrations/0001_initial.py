"""The tables of cursors, their journal, leases, and quarantined events.

A table that another store of this library has created stays as it is, with what it holds.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from feedapi_client.django.models import FeedIdField


class CreateMissing(migrations.CreateModel):
    """Create a table, unless it is there."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """See Django's `Operation`."""
        table, connection = self.options["db_table"], schema_editor.connection
        with connection.cursor() as cursor:
            if table in connection.introspection.table_names(cursor):
                return
        super().database_forwards(app_label, schema_editor, from_state, to_state)
        if connection.vendor == "mysql" and self.allow_migrate_model(
            connection.alias, to_state.apps.get_model(app_label, self.name)
        ):
            # Names that differ in case are different names, whatever the database's default.
            schema_editor.execute(
                f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
            )


class Migration(migrations.Migration):
    """The first one."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        CreateMissing(
            name="Cursor",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "feed_id",
                        "partition_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("feed_id", FeedIdField()),
                ("partition_id", models.IntegerField()),
                ("feed_cursor", models.TextField()),
                ("status", models.CharField(max_length=16)),
                ("revision", models.BigIntegerField()),
                ("saved_at", models.BigIntegerField(help_text="Microseconds since 1970 UTC.")),
                ("feed_url", models.TextField()),
                ("consumer", models.TextField()),
                ("filters", models.TextField(help_text="JSON.")),
            ],
            options={"db_table": "feedapi_cursors"},
        ),
        CreateMissing(
            name="ReplacedCursor",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "feed_id",
                        "replaced_at",
                        "partition_id",
                        "revision",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("feed_id", FeedIdField()),
                ("replaced_at", models.BigIntegerField()),
                ("partition_id", models.IntegerField()),
                ("revision", models.BigIntegerField()),
                ("feed_cursor", models.TextField()),
                ("status", models.CharField(max_length=16)),
                ("saved_at", models.BigIntegerField()),
            ],
            options={"db_table": "feedapi_cursors_journal"},
        ),
        CreateMissing(
            name="EventDoneAhead",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "feed_id",
                        "partition_id",
                        "event_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("feed_id", FeedIdField()),
                ("partition_id", models.IntegerField()),
                ("event_id", models.CharField(max_length=64)),
                ("claim", models.BigIntegerField()),
            ],
            options={"db_table": "feedapi_cursors_done"},
        ),
        CreateMissing(
            name="SharingInstance",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "feed_id",
                        "instance",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("feed_id", FeedIdField()),
                ("instance", models.CharField(max_length=200)),
                ("joined_at", models.BigIntegerField()),
                ("expires_at", models.BigIntegerField()),
                ("changes", models.BigIntegerField()),
                ("options", models.CharField(max_length=200)),
            ],
            options={"db_table": "feedapi_cursors_instances"},
        ),
        CreateMissing(
            name="PartitionLease",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "feed_id",
                        "partition_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("feed_id", FeedIdField()),
                ("partition_id", models.IntegerField()),
                ("owner", models.CharField(max_length=200, null=True)),
                ("epoch", models.BigIntegerField()),
                ("ended", models.IntegerField()),
                ("changed_at", models.BigIntegerField()),
            ],
            options={"db_table": "feedapi_cursors_leases"},
        ),
        CreateMissing(
            name="EventInQuarantine",
            fields=[
                ("id", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("feed_id", FeedIdField()),
                ("feed_url", models.TextField()),
                ("consumer", models.TextField()),
                ("filters", models.TextField()),
                ("partition_id", models.IntegerField()),
                ("feed_cursor", models.TextField()),
                ("event_index", models.IntegerField()),
                ("payload", models.BinaryField()),
                ("headers", models.TextField()),
                ("error_type", models.TextField()),
                ("error", models.TextField()),
                ("quarantined_at", models.BigIntegerField()),
            ],
            options={
                "db_table": "feedapi_quarantine",
                "ordering": ("id",),
                "verbose_name": "quarantined event",
            },
        ),
    ]
