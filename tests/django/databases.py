"""Databases of Django for tests: each a new alias, and the tables by the app's migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import django
import pymysql
import pytest
from django.conf import settings
from django.db import connections

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


def settings_of(server: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Return what goes into ``DATABASES``."""
    if server == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "app.db")}
    running: Postgres | MariaDB = request.getfixturevalue(server)
    return server_settings(running)


def server_settings(running: Postgres | MariaDB) -> dict[str, Any]:
    if isinstance(running, Postgres):
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "postgres",
            "HOST": running.directory,
        }
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "test",
        "USER": "root",
        "HOST": running.socket,
    }


@contextmanager
def registered(database: dict[str, Any], alias: str | None = None) -> Iterator[str]:
    """Add a database to Django's settings; give its alias."""
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
