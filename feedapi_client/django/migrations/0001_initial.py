"""The tables of cursors, their journal, leases, and quarantined events.

A table that another store of this library has created stays as it is, with what it holds.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from feedapi_client.stores.tables import FORMAT_TABLE, TABLES, create_table

_TABLES = [name for name in TABLES if name != FORMAT_TABLE]


def create_missing(_: Any, schema_editor: Any) -> None:
    """Create the tables that are not there."""
    connection = schema_editor.connection
    # A role that may not create tables is refused IF NOT EXISTS, too.
    for name in set(_TABLES) - set(connection.introspection.table_names()):
        schema_editor.execute(create_table(name, connection.vendor))


def drop(_: Any, schema_editor: Any) -> None:
    """Delete the tables, and what they hold."""
    for name in _TABLES:
        schema_editor.execute(f"DROP TABLE {name}")


class Migration(migrations.Migration):
    """The first one."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        # MySQL changes no tables in a transaction.
        migrations.RunPython(create_missing, drop, atomic=False),
        # What Django knows of one of them: nothing that it would change.
        migrations.CreateModel(
            name="EventInQuarantine",
            fields=[("id", models.CharField(max_length=32, primary_key=True, serialize=False))],
            options={
                "managed": False,
                "db_table": "feedapi_quarantine",
                "ordering": ("id",),
                "verbose_name": "quarantined event",
            },
        ),
    ]
