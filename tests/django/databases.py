"""Databases of Django for tests: each a new alias, and the tables by the app's migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import django
import pymysql
import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections, transaction

from tests.servers import MariaDB, Postgres

APP_TABLES = (
    "feedapi_cursors",
    "feedapi_cursors_journal",
    "feedapi_cursors_instances",
    "feedapi_cursors_leases",
    "feedapi_cursors_done",
    "feedapi_quarantine",
)
TABLES = ("effects", *APP_TABLES)
SERVERS = ("sqlite", "postgres", "mariadb")
DATABASES: dict[str, dict[str, Any]] = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "/nonexistent/default.db"}
}
_numbers = count(1)


@dataclass(frozen=True)
class File:
    """The place of a SQLite file, as the servers have one."""

    path: Path


def set_up(**others: Any) -> None:
    """Configure Django once in this process."""
    if settings.configured:
        return
    pymysql.install_as_MySQLdb()
    settings.configure(
        SECRET_KEY="of a test",
        USE_TZ=True,
        DATABASES=DATABASES,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        ROOT_URLCONF="tests.django.urls",
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "feedapi_client.django",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        **others,
    )
    django.setup()


def settings_of(place: Any) -> dict[str, Any]:
    """Return what goes into ``DATABASES`` for a server, or for a file, which has a `path`."""
    if isinstance(place, Postgres):
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "postgres",
            "HOST": place.directory,
        }
    if isinstance(place, MariaDB):
        return {
            "ENGINE": "django.db.backends.mysql",
            "NAME": "test",
            "USER": "root",
            "HOST": place.socket,
        }
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(place.path),
        # It need not survive the end of the machine.
        "OPTIONS": {"init_command": "PRAGMA synchronous=OFF"},
    }


@contextmanager
def registered(database: dict[str, Any], alias: str | None = None) -> Iterator[str]:
    """Add a database to Django's settings; give its alias."""
    set_up()
    alias = alias or f"database{next(_numbers)}"
    before = connections.settings.get(alias)
    if before is not None:
        connections[alias].close()
        del connections[alias]
    connections.settings = connections.configure_settings({**connections.settings, alias: database})
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        if before is None:
            del connections.settings[alias]
        else:
            connections.settings[alias] = before


def execute(using: str, *statements: str) -> list[Any]:
    """Execute statements on the connection of this thread; return the rows of the last one."""
    with connections[using].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def begin(using: str) -> Any:
    """Open an atomic block, and give what a commit takes."""
    transaction.atomic(using=using).__enter__()
    return connections[using]


def end(using: str, *, commit: bool) -> None:
    """Leave the atomic block."""
    transaction.atomic(using=using).__exit__(None if commit else RuntimeError, None, None)


def drop(using: str) -> None:
    execute(using, *(f"DROP TABLE IF EXISTS {table}" for table in (*TABLES, "django_migrations")))


def migrate(using: str) -> None:
    """Make the app's tables anew."""
    drop(using)
    call_command("migrate", "feedapi", database=using, verbosity=0)


def place_of(server: str, request: pytest.FixtureRequest, folder: Path) -> Any:
    return request.getfixturevalue(server) if server != "sqlite" else File(folder / "app.db")


def created(server: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Give the alias of a database with the app's tables, which are empty.

    They are those of the test before, or else made by a migration, which takes a tenth of a second.
    """
    place = place_of(server, request, folder)
    if server == "sqlite":
        place.path.write_bytes(migrated_file())
    with registered(settings_of(place)) as using:
        if {*APP_TABLES} <= {*connections[using].introspection.table_names()}:
            emptied = (f"DELETE FROM {table}" for table in APP_TABLES)
            execute(using, "DROP TABLE IF EXISTS effects", *emptied)
        else:
            migrate(using)
        yield using


@cache
def migrated_file() -> bytes:
    """Return a file of SQLite with the app's tables."""
    with TemporaryDirectory() as folder:
        place = File(Path(folder, "app.db"))
        with registered(settings_of(place)) as using:
            migrate(using)
        return place.path.read_bytes()
