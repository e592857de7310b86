"""Cursors in a database of Django. Needs the extra ``django``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from feedapi_client.django.django_database import DjangoDatabase
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import asyncio_operation, check_predecessor, check_storable
from feedapi_client.stores.done import DoneEvent
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.postgres_statements import PositionTables, PostgresScripts
from feedapi_client.stores.scripted import ScriptedStore, Scripts
from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.sqlite_statements import CursorScripts

if TYPE_CHECKING:
    from feedapi_client.django.quarantined_events import DjangoQuarantineStore

T = TypeVar("T")

_SAVEPOINT = Query("SAVEPOINT feedapi_save")
_UNDO = Query("ROLLBACK TO SAVEPOINT feedapi_save")
_KEEP = Query("RELEASE SAVEPOINT feedapi_save")
_MYSQL_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


class DjangoCursorStore(ScriptedStore):
    """Keeps positions in a database of Django: PostgreSQL, MySQL, MariaDB or SQLite.

    The tables are those of the other SQL stores, created by ``manage.py migrate`` with
    ``"feedapi_client.django"`` in ``INSTALLED_APPS``. `PostgresCursorStore`,
    `SQLAlchemyCursorStore` and the command line read the same.

    Exactly once: write the effects within ``transaction.atomic()`` and pass the connection::

        with transaction.atomic():
            Order.objects.create(...)
            batch.commit(transaction=connection)

    The save is then part of that block, in the thread that opened it, with everything that Django
    does at its end: ``on_commit`` functions run when effects and cursor are both there. It may be
    nested, and durable. ``True`` and the alias stand for the connection of the calling thread. A
    save that is refused leaves nothing of itself in the transaction. After an error of the database
    the block can only be rolled back.

    Use it with `SyncFeedConsumer`; or with `FeedConsumer` and handlers in `sync_to_async`, which
    commit by ``async_to_sync(batch.commit)(transaction=connection)``. A commit without
    ``transaction=`` in an open block of the same thread is refused: it would survive a rollback.

    Saves that the consumer makes on its own, and all other operations, are transactions of the
    store's own, on one connection beside those of the application's threads. It has the
    application's settings, but ``CONN_MAX_AGE``: it stays open, and is checked before each use.

    Runs on asyncio only, as Django does.

    Arguments:
        using: the alias of the database.
        journal: keep a history of positions.
        timeout: maximum time for one operation, in seconds. A statement in the caller's thread is
            waited for all the same.

    Raises:
        ConnectionDoesNotExist: Django has no database of that alias.
        ValueError: that kind of database is not supported.

    Cancellation: a save that has begun is finished.
    """

    def __init__(
        self, using: str = "default", *, journal: Journal | None = None, timeout: float = 30.0
    ) -> None:
        self.database = DjangoDatabase(using)
        self._scripts: Scripts
        if self.database.vendor == "postgresql":
            tables = PositionTables("feedapi_cursors", None, journal=journal is not None)
            self._scripts = PostgresScripts(tables, journal)
        else:
            self._scripts = _PortableScripts(journal, self.database.vendor)
        self._timeout = timeout

    @property
    def using(self) -> str:
        """The alias of the database."""
        return self.database.using

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`.

        `transaction` is a connection of Django with an open ``atomic()``, or its alias.
        """
        check_storable(feed, positions)
        async with self._operation(feed):
            if transaction is None:
                await self.database.check_no_transaction()
                if positions:
                    await self._save(feed, positions, passed)
                return
            within = partial(self.database.run_within, transaction)
            if positions:
                await self._save(feed, positions, passed, within)
            else:
                await within(_nothing())

    def check_thread(self) -> None:
        """See `ThreadBoundStore.check_thread`: no ``atomic()`` may be open in this thread."""
        self.database.check_thread()

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`. `transaction` as `save_passing` takes it."""
        async with self._operation(feed):
            if transaction is None:
                await self.database.check_no_transaction()
                await self._done(feed, event)
            else:
                await self._done(feed, event, partial(self.database.run_within, transaction))

    def quarantine(self) -> DjangoQuarantineStore:
        """Return the quarantine in the same database. Closing this store closes it."""
        from feedapi_client.django.quarantined_events import DjangoQuarantineStore

        return DjangoQuarantineStore(self.database)

    async def aclose(self) -> None:
        """See `Closable.aclose`. Leaves the application's connections open."""
        await self.database.aclose()

    async def _run_alone(self, script: Script[T]) -> T:
        return await self.database.transact(script)

    @asynccontextmanager
    async def _operation(self, feed: FeedKey | None, *, shield: bool = True) -> AsyncIterator[None]:
        url = None if feed is None else feed.url
        try:
            async with asyncio_operation(
                "DjangoCursorStore", "the cursor database", feed, self._timeout, shield=shield
            ):
                yield
        except FeedError as error:
            error.feed = error.feed or url
            raise
        except Exception as error:
            raise StoreError(
                f"the cursor database {self.database} failed: {self.database.reason(error)}",
                feed=url,
            ) from error

    def __repr__(self) -> str:
        return f"<DjangoCursorStore {self.database}>"


class _PortableScripts(CursorScripts):
    """The scripts for MySQL, MariaDB and SQLite, as a `ScriptedStore` takes them."""

    def __init__(self, journal: Journal | None, vendor: str) -> None:
        if vendor == "mysql":
            super().__init__(
                journal, lock="FOR UPDATE", share="LOCK IN SHARE MODE", clock=_MYSQL_CLOCK
            )
        else:
            super().__init__(journal)
        self.lock_waits: dict[FeedKey, float] = {}

    def bound_waits(self, feed: FeedKey) -> Script[None]:  # noqa: ARG002
        """See `Scripts.bound_waits`: the settings of the database hold."""
        return _nothing()

    def save_alone(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """See `Scripts.save_alone`."""
        return self.save(feed, positions)

    def save_within(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """See `Scripts.save_within`."""
        if len(positions) == 1 and self._journal is None:
            yield from self.save(feed, positions)  # its last statement changes one row
            return
        yield _SAVEPOINT
        try:
            yield from self.save(feed, positions)
        except Exception:
            with suppress(Exception):  # a deadlock or a full disk has rolled back everything
                yield _UNDO
                yield _KEEP
            raise
        yield _KEEP

    def find_conflict(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[int | None]:
        """See `Scripts.find_conflict`."""
        stored = yield from self._revisions(feed, positions)
        for partition, position in sorted(positions.items()):
            check_predecessor(feed, partition, position, stored.get(partition))
        return None


def _nothing() -> Script[None]:
    yield from ()
