"""The databases that instances share, and what happens to a server."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from tests.servers import MariaDB, Postgres, run_mariadb, run_postgres, run_redis
from tests.sharing.sql_application import SQLApplication

DATABASES = ("postgresql", "asyncpg", "mariadb", "sqlite", "redis", "memory")


@dataclass(frozen=True)
class Database:
    """Where instances keep effects and cursors.

    Attributes:
        where: a file or a URL.
        terminate: ends the session of any one client; None: there is no server.
        failover: lets the server crash and start again.
    """

    where: str
    terminate: Callable[[], None] | None = None
    failover: Callable[[], None] | None = None


@contextmanager
def database(kind: str, lease: float) -> Iterator[Database]:
    """Start a server, or make a directory for a SQLite file.

    Servers end a transaction that is idle for a lease, as the page on database settings says.
    """
    if kind in ("postgresql", "asyncpg"):
        with run_postgres(on_disk=False) as server:
            _psql(server, f"ALTER SYSTEM SET idle_in_transaction_session_timeout = '{lease}s'")
            _psql(server, "SELECT pg_reload_conf()")
            driver = "psycopg" if kind == "postgresql" else kind
            yield Database(
                server.url(driver), lambda: _terminate(server), lambda: _crash_postgres(server)
            )
    elif kind == "mariadb":
        idle = f"--idle-transaction-timeout={max(1, round(lease))}"
        with run_mariadb(on_disk=False, options=(idle,)) as maria:
            yield Database(maria.url(), lambda: _kill(maria), maria.restart)
    elif kind == "redis":
        with run_redis() as redis:
            yield Database(redis.url)
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield Database(os.path.join(directory, "app.db"))


def _psql(server: Postgres, statement: str) -> Any:
    import psycopg

    with psycopg.connect(server.dsn, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone() if cursor.description else None


def _terminate(server: Postgres) -> None:
    _psql(
        server,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND backend_type = 'client backend' ORDER BY random() LIMIT 1",
    )


def _crash_postgres(server: Postgres) -> None:
    """Kill a process of the server: all the others end, and it recovers from its log."""
    import psycopg

    with psycopg.connect(server.dsn, autocommit=True) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        os.kill(row[0], signal.SIGKILL)


def _kill(server: MariaDB) -> None:
    client = ["mariadb", "--no-defaults", f"--socket={server.socket}", "-uroot", "-N", "-e"]
    query = (
        "SELECT id FROM information_schema.processlist WHERE command <> 'Daemon' "
        "AND id <> connection_id() ORDER BY RAND() LIMIT 1"
    )
    found = subprocess.run([*client, query], check=False, capture_output=True, text=True).stdout
    if found.strip():
        subprocess.run([*client, f"KILL {int(found)}"], check=False, capture_output=True)


def sql_effects(url: str) -> list[tuple[str, int]]:
    """Return the effects, from whatever thread. Raises while the server is down."""

    async def read() -> list[tuple[str, int]]:
        application = SQLApplication(url)
        try:
            return await application.effects()
        finally:
            await application.aclose()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(anyio.run, read).result()
