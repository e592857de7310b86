"""Cursors, and quarantined events, in a database of Django. Needs the extra ``django``."""

from __future__ import annotations

from feedapi_client.django.database import DjangoDatabase
from feedapi_client.quarantine.quarantine_store import ScriptedQuarantine
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.scripted import JournalledScripts


class DjangoCursorStore(JournalledScripts):
    """Keeps positions in a database of Django: PostgreSQL, MySQL, MariaDB or SQLite.

    The tables are those of the other SQL stores, created by ``manage.py migrate`` with
    ``"feedapi_client.django"`` in ``INSTALLED_APPS``.

    Exactly once: write the effects within ``transaction.atomic()`` and pass the connection::

        with transaction.atomic():
            Order.objects.create(...)
            batch.commit(transaction=connection)

    The save is then part of that block, which may be nested, and durable. A save that is refused
    leaves nothing of itself in the transaction. After an error of the database the block can only
    be rolled back. A commit without ``transaction=`` in an open block of the same thread is
    refused: it would survive a rollback.

    Use it with `SyncFeedConsumer`; or with `FeedConsumer` and handlers in `sync_to_async`, which
    commit by ``async_to_sync(batch.commit)(transaction=connection)``. Other saves are transactions
    of the store's own, each on a connection of its own. Runs on asyncio only, as Django does.

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
        database = DjangoDatabase(using, timeout)
        super().__init__(database, journal=journal)
        self.database: DjangoDatabase = database
        self.using = using

    def check_thread(self) -> None:
        """Raise `StoreError` if an ``atomic()`` is open in this thread: it may roll back."""
        self.database.check_thread()

    def __repr__(self) -> str:
        return f"<DjangoCursorStore {self.database.name}>"


class DjangoQuarantineStore(ScriptedQuarantine):
    """Keeps events in a table of a database of Django, which ``manage.py migrate`` creates.

    The table is that of the other SQL stores. A `transaction` is what `DjangoCursorStore` takes.
    The admin has the events as a model. Runs on asyncio only.

    Arguments:
        using: the alias of the database.
    """

    def __init__(self, using: str = "default") -> None:
        super().__init__(DjangoDatabase(using))
