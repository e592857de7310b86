"""Scripts on Django's connections: the application's, and one of a store's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
from asgiref.sync import AsyncToSync, sync_to_async
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionProxy

from feedapi_client.errors import StoreError
from feedapi_client.stores.scripted import Database
from feedapi_client.stores.scripts import Script, run_on_cursors
from feedapi_client.stores.threads import in_callers_thread, is_thread_lent, transact_in_thread

T = TypeVar("T")

_ANSWER_SECONDS = 1.0
_MOST_CONNECTIONS = 4
"""Of a store's own transactions at once: the server's are counted, and the application's too."""
_SQLITE_TIMEOUT = 30
"""Seconds that a store's own transaction waits for another writer."""


class DjangoDatabase(Database):
    """Each transaction of a store's own has a connection, as Django has one for each request."""

    hint = "has `manage.py migrate` been run on this database?"

    def __init__(self, using: str, timeout: float = 30.0) -> None:
        self.using = using
        self.timeout = timeout
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        self.dialect: str = connections[using].vendor
        self.name = f"{using!r} ({self.dialect})"
        if self.dialect not in ("postgresql", "mysql", "sqlite"):
            raise ValueError(
                f"the database {using!r} is on {self.dialect}: cursors are kept in PostgreSQL, "
                "MySQL, MariaDB and SQLite"
            )

    @property
    def place(self) -> object:
        return self.using

    async def check(self, tables: object) -> None:
        """Migrations know the version of their tables."""

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
        if not isinstance(transaction, (ConnectionProxy, BaseDatabaseWrapper)):
            raise StoreError(
                "transaction must be a connection of Django, such as django.db.connection, "
                f"not a {type(transaction).__name__}"
            )
        connection: Any = transaction
        if connection.alias != self.using:
            raise StoreError(
                f"the transaction is on the database {connection.alias!r}, but the cursors are on "
                f"{self.using!r}: DjangoCursorStore(using={connection.alias!r}) keeps them there"
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

    # In a transaction of the store's own

    async def transact(self, script: Script[T]) -> T:
        return await transact_in_thread(
            self._begun, lambda connection: run_on_cursors(script, connection.cursor, "%s")
        )

    @contextmanager
    def _begun(self) -> Iterator[Any]:
        with self._room, closing(connections.create_connection(self.using)) as connection:
            settings, begin = connection.settings_dict, "BEGIN"
            options = settings["OPTIONS"]
            if self.dialect == "sqlite":
                options = {"timeout": _SQLITE_TIMEOUT, **options}
                # A transaction that has read fails at once when it writes beside another writer.
                begin = "BEGIN IMMEDIATE"
            connection.settings_dict = {**settings, "OPTIONS": options, "AUTOCOMMIT": True}
            # One statement less than Django's set_autocommit needs.
            with connection.cursor() as cursor:
                cursor.execute(begin)
                yield connection
                cursor.execute("COMMIT")  # without one the server rolls back

    def text_of(self, error: Exception) -> str:
        known = (Error, ImproperlyConfigured, SynchronousOnlyOperation)
        text = str(error) if isinstance(error, known) else ""  # any other may quote a cursor
        return next(iter(text.strip().splitlines()), "")
