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
from feedapi_client.stores.scripts import CountedChange, Script, Step, run_steps
from feedapi_client.stores.threads import in_thread

T = TypeVar("T")

_ANSWER_SECONDS = 1.0
_SQLITE_TIMEOUT = 30
"""Seconds that a store's own transaction waits for another writer."""


class DjangoDatabase:
    """A database of ``settings.DATABASES``.

    Scripts run in a transaction of the application, in its thread, or in one of the store's own.
    For the latter there is one connection, used in worker threads, one at a time. Django's request
    handling does not know it: it is checked before each use, and replaced when the server has
    closed it.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.vendor: str = connections[using].vendor
        if self.vendor not in ("postgresql", "mysql", "sqlite"):
            raise ValueError(
                f"the database {using!r} is on {self.vendor}: cursors are kept in PostgreSQL, "
                "MySQL, MariaDB and SQLite"
            )
        self._lock = threading.Lock()
        self._connection: Any = None

    # In the application's transaction

    async def run_within(self, transaction: Any, script: Script[T]) -> T:
        """Run a script in the open transaction of the calling thread."""
        here = partial(self._run_here, transaction, script)
        return await in_callers_thread(here, otherwise=lambda call: sync_to_async(call)())

    async def check_no_transaction(self) -> None:
        """Check that the caller's thread, if one waits, has no open ``atomic()``."""
        if is_thread_lent():
            await in_callers_thread(self.check_thread)
        elif getattr(AsyncToSync.executors, "current", None) is not None:
            # A thread that waits in `async_to_sync` for this save answers at once. One that does
            # not, because it runs other code, waits for the event loop as a whole.
            with anyio.move_on_after(_ANSWER_SECONDS):
                await sync_to_async(self.check_thread)()

    def check_thread(self) -> None:
        """Check that this thread has no open ``atomic()``."""
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
            return _run(connection, script)
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
        """Run a script in a transaction of the store's own."""

        def work() -> T:
            with self._lock:
                connection = self._begin()
                try:
                    result = _run(connection, script)
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
        immediately = "BEGIN IMMEDIATE" if self.vendor == "sqlite" else "BEGIN"
        _execute(self._connection, immediately)
        return self._connection

    def reason(self, error: BaseException) -> str:
        """Return the first line of the database's message, or of Django's; else only a name."""
        known = (Error, ImproperlyConfigured, SynchronousOnlyOperation)
        text = str(error) if isinstance(error, known) else ""  # any other may quote a cursor
        line = next(iter(text.strip().splitlines()), "") or type(error).__name__
        if "feedapi_" in line:
            return f"{line} (has `manage.py migrate` been run on this database?)"
        return line

    def __repr__(self) -> str:
        return f"{self.using!r} ({self.vendor})"


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


def _run(connection: Any, script: Script[T]) -> T:
    def rows(step: Step) -> Any:
        sql = step.sql.replace("?", "%s")
        with connection.cursor() as cursor:
            # Without parameters a % is not doubled.
            cursor.execute(sql, tuple(step.parameters) or None)
            if isinstance(step, CountedChange):
                return cursor.rowcount
            return list(cursor.fetchall()) if cursor.description else []

    return run_steps(script, rows)
