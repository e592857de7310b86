"""Scripts on Django's connections: the application's, and one of a store's own."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from asgiref.sync import AsyncToSync, sync_to_async
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionProxy

from feedapi_client.errors import StoreError
from feedapi_client.stores.caller_thread import in_callers_thread, is_thread_lent
from feedapi_client.stores.scripted import Database
from feedapi_client.stores.scripts import Script, run_on_cursors
from feedapi_client.stores.threads import in_thread

T = TypeVar("T")

_ANSWER_SECONDS = 1.0
_SQLITE_TIMEOUT = 30
"""Seconds that a store's own transaction waits for another writer."""


class DjangoDatabase(Database):
    """A database of ``settings.DATABASES``.

    Scripts run in a transaction of the application, in its thread, or in one of the store's own.
    For the latter there is one connection, used in worker threads, one at a time. Django's request
    handling does not know it: it is checked before each use, and replaced when the server has
    closed it.
    """

    hint = "has `manage.py migrate` been run on this database?"

    def __init__(self, using: str, timeout: float = 30.0) -> None:
        self.using = using
        self.timeout = timeout
        self.dialect: str = connections[using].vendor
        self.name = f"{using!r} ({self.dialect})"
        if self.dialect not in ("postgresql", "mysql", "sqlite"):
            raise ValueError(
                f"the database {using!r} is on {self.dialect}: cursors are kept in PostgreSQL, "
                "MySQL, MariaDB and SQLite"
            )
        self._lock = threading.Lock()
        self._connection: Any = None

    @property
    def place(self) -> object:
        return self.using

    async def check(self, tables: object) -> None:
        """See `Database.check`. Migrations know the version of their tables."""

    # In the application's transaction

    async def within(self, transaction: Any, script: Script[T]) -> T:
        here = partial(self._run_here, transaction, script)
        return await in_callers_thread(here, otherwise=lambda call: sync_to_async(call)())

    async def check_alone(self) -> None:
        if is_thread_lent():
            await in_callers_thread(self.check_thread)
        elif getattr(AsyncToSync.executors, "current", None) is not None:
            # A thread that waits in `async_to_sync` for this save answers at once. One that does
            # not, because it runs other code, waits for the event loop as a whole.
            with anyio.move_on_after(_ANSWER_SECONDS):
                await sync_to_async(self.check_thread)()

    def check_thread(self) -> None:
        if connections[self.using].in_atomic_block:
            raise StoreError(
                f"an atomic block is open on {self.using!r}, and the cursor would not be part of "
                "it: commit(transaction=connection), or commit after the block"
            )

    def _run_here(self, transaction: Any, script: Script[T]) -> T:
        connection = connections[self.using]
        if isinstance(transaction, (ConnectionProxy, BaseDatabaseWrapper)):
            self._check_alias(transaction.alias)
            connection = transaction
        elif isinstance(transaction, str):
            self._check_alias(transaction)
        elif transaction is not True:
            raise StoreError(
                "transaction must be a connection of Django, such as django.db.connection, "
                f"or its alias, not a {type(transaction).__name__}"
            )
        if not connection.in_atomic_block and connection.get_autocommit():
            argument = "" if self.using == "default" else f"using={self.using!r}"
            raise StoreError(
                f"no atomic block is open on {self.using!r} in this thread: commit within "
                f"`with transaction.atomic({argument}):`, in the thread that opened it"
            )
        try:
            return run_on_cursors(script, connection.cursor, "%s")
        except Error:
            # The server may have ended the transaction (a deadlock, or any error of PostgreSQL).
            # Django must not take it for one that can be committed.
            if connection.in_atomic_block:
                connection.set_rollback(True)
            raise

    def _check_alias(self, alias: str) -> None:
        if alias != self.using:
            raise StoreError(
                f"the transaction is on the database {alias!r}, but the cursors are on "
                f"{self.using!r}: DjangoCursorStore(using={alias!r}) keeps them there"
            )

    # In a transaction of the store's own

    async def transact(self, script: Script[T]) -> T:
        def work() -> T:
            with self._lock:
                connection = self._begin()
                try:
                    result = run_on_cursors(script, connection.cursor, "%s")
                    _execute(connection, "COMMIT")
                except BaseException:
                    _roll_back(connection)
                    raise
                return result

        # The thread ends the transaction also when nobody waits for it any more.
        return await in_thread(work, abandon=True)

    async def aclose(self) -> None:
        """Close the store's own connection. The next use opens another one."""

        def close() -> None:
            with self._lock:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None

        with anyio.CancelScope(shield=True):
            await in_thread(close)

    def _begin(self) -> Any:
        if self._connection is None:
            self._connection = connection = connections.create_connection(self.using)
            connection.settings_dict = _own_settings(connection)
            connection.inc_thread_sharing()
            # A store that is never closed must not end with a ResourceWarning.
            weakref.finalize(self, _close_quietly, connection)
        self._connection.close_if_unusable_or_obsolete()
        self._connection.ensure_connection()
        # One statement less than Django's set_autocommit needs. And a transaction of SQLite that
        # has read fails at once when it writes beside another writer.
        immediately = "BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN"
        _execute(self._connection, immediately)
        return self._connection

    def text_of(self, error: Exception) -> str:
        known = (Error, ImproperlyConfigured, SynchronousOnlyOperation)
        text = str(error) if isinstance(error, known) else ""  # any other may quote a cursor
        return next(iter(text.strip().splitlines()), "")


def _own_settings(connection: Any) -> dict[str, Any]:
    """Return settings for a connection that stays open, and is checked before each use."""
    settings = {**connection.settings_dict, "AUTOCOMMIT": True, "ATOMIC_REQUESTS": False}
    options = dict(settings["OPTIONS"])
    if connection.vendor == "sqlite":
        options.setdefault("timeout", _SQLITE_TIMEOUT)
    if not options.get("pool"):  # a pool checks by itself, and wants connections back
        settings |= {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
    return {**settings, "OPTIONS": options}


def _close_quietly(connection: Any) -> None:
    with suppress(Exception):
        if connection.connection is not None:
            connection.connection.close()


def _roll_back(connection: Any) -> None:
    try:
        _execute(connection, "ROLLBACK")
    except Exception:  # noqa: BLE001 - the server rolls back what it has lost
        connection.close()


def _execute(connection: Any, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)
