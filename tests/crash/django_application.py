"""The application of a crash test on Django: effects by the ORM, on PostgreSQL or MySQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import anyio.to_thread
import psycopg
import pymysql
from django.db import close_old_connections, connection, connections, models, transaction

from tests.crash.application import (
    _MISPLACED,
    _QUARANTINED,
    _ROWS,
    _TABLE,
    DJANGO,
    Row,
    _event,
)
from tests.django import databases
from tests.servers import MariaDB, Postgres

databases.set_up()

from feedapi_client.django import DjangoCursorStore  # noqa: E402 - Django has its settings


class Effect(models.Model):
    at = models.BigAutoField(primary_key=True)
    partition_id = models.IntegerField()
    entity = models.TextField()
    n = models.IntegerField()
    writer = models.IntegerField()

    class Meta:
        app_label = "crash"
        db_table = "effects"
        managed = False

    def __str__(self) -> str:
        return f"{self.entity} {self.n}"


def use(database: str) -> None:
    """Let Django's default database be this one."""
    where = database.removeprefix(DJANGO)
    if where.startswith("mysql:"):
        settings = databases.settings_of(MariaDB(where.removeprefix("mysql://")))
    else:
        settings = databases.settings_of(Postgres(where.partition("?host=")[2]))
    connection.close()  # this thread's, which has the settings of before
    del connections["default"]
    connections.settings = connections.configure_settings(
        {**connections.settings, "default": {**settings, "CONN_MAX_AGE": 600}}
    )


class DjangoWriter:
    """What `tests.crash.sync_consumer` writes to."""

    def __init__(self, database: str) -> None:
        use(database)
        self.store = DjangoCursorStore()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        close_old_connections()
        with transaction.atomic():
            yield connection

    def write(self, transaction: Any, rows: list[Row]) -> None:
        Effect.objects.bulk_create(
            Effect(partition_id=row.partition, entity=row.entity, n=row.n, writer=row.writer)
            for row in rows
        )


class DjangoApplication:
    """What the effects are compared by, with the driver alone."""

    def __init__(self, database: str) -> None:
        self._where = database.removeprefix(DJANGO)

    @classmethod
    async def create(cls, database: str) -> None:
        """Create the tables, empty."""

        def create() -> None:
            from django.core.management import call_command

            use(database)
            tables = (*databases.TABLES, "django_migrations")
            databases.execute("default", *(f"DROP TABLE IF EXISTS {name}" for name in tables))
            call_command("migrate", "feedapi", verbosity=0)
            at = "BIGSERIAL PRIMARY KEY"
            if connection.vendor == "mysql":
                at = "BIGINT AUTO_INCREMENT PRIMARY KEY"
            databases.execute("default", _TABLE.format(at=at))
            connection.close()

        await anyio.to_thread.run_sync(create)

    def rows(self) -> list[Row]:
        return [Row(*row) for row in self._query(_ROWS)]

    def misplaced(self) -> int:
        return int(self._query(_MISPLACED)[0][0])

    def quarantined(self) -> list[tuple[str, int]]:
        return [_event(payload) for (payload,) in self._query(_QUARANTINED)]

    async def aclose(self) -> None:
        """Nothing stays open."""

    def _query(self, sql: str) -> list[Any]:
        if self._where.startswith("postgresql:"):
            with psycopg.connect(self._where) as server:
                return server.execute(sql).fetchall()  # type: ignore[arg-type]
        socket = self._where.removeprefix("mysql://")
        mysql = pymysql.connect(unix_socket=socket, user="root", database="test")
        with closing(mysql), mysql.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())
