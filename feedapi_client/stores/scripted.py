"""Cursors, leases and a journal in a SQL database: scripts get transactions, time and attempts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio

from feedapi_client.causes import store_problem
from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Answering,
    check_storable,
    held_elsewhere,
    stored_key,
)
from feedapi_client.stores.done import Claim, DoneEvent, already_done
from feedapi_client.stores.journal import Journal, microseconds
from feedapi_client.stores.leases import Lease, LeaseScripts, View
from feedapi_client.stores.moving import Administered, Edit, Stored
from feedapi_client.stores.positions import HeldError, PositionScripts
from feedapi_client.stores.scripts import (
    Script,
    is_conflict,
    is_integrity_error,
    is_lock_timeout,
    is_missing_table,
)
from feedapi_client.stores.tables import CURSORS, QUARANTINE, check_formats, create_missing

T = TypeVar("T")

_WHAT = "the cursor database"
_SAVE_ATTEMPTS = 3
_ADMIN_ATTEMPTS = 100
"""How often an operator's work is tried while consumers interfere."""
_CREATE_ATTEMPTS = 8
"""As many as there are tables, and one for their formats."""
_LEASE_ATTEMPTS = 10
_LOCK_PAUSE = 0.02
"""Seconds between two looks at a row that another transaction holds."""
_LOCK_PART = 20
"""A part of a lease: the longest wait of a statement for another's row lock."""
_RENEWAL_PART = 2
"""A part of a lease: the longest time that a renewal may take."""


class Database(Answering):
    """`dialect` is SQLAlchemy's name; `hint` says how tables that are missing are made."""

    dialect: str
    hint = "has create_tables() been called?"

    @property
    def place(self) -> object:
        """What is equal for all databases whose tables one transaction can change."""
        return self

    def quoted(self, table: str) -> str:
        return table

    def need(self, tables: Mapping[str, str]) -> None:
        """Take note of tables to make at the first use, where no operator creates them."""

    async def transact(self, script: Script[T]) -> T:
        raise NotImplementedError

    async def read(self, script: Script[T]) -> T:
        """Run a script that only reads, and takes no lock that others could wait for."""
        return await self.transact(script)

    async def within(self, transaction: Any, script: Script[T]) -> T:
        """In the thread that the transaction belongs to. Raise `StoreError` for one elsewhere."""
        raise NotImplementedError

    async def repeat(self, script: Callable[[], Script[T]], attempts: int) -> T:
        for left in reversed(range(attempts)):
            try:
                return await self.transact(script())
            except Exception as error:
                if not (left and is_conflict(error)):
                    raise
        raise AssertionError("unreachable")

    async def check_alone(self) -> None:
        """Check that the caller has no transaction open, where that can be known."""

    async def create(self, tables: Mapping[str, str]) -> None:
        """Several processes may do so at once."""
        for left in reversed(range(_CREATE_ATTEMPTS)):
            try:
                await self.transact(create_missing(tables, self.dialect, self.quoted))
            except Exception:
                # Another process may have created a table between the look and the creation. The
                # next look sees that one at least.
                if not left:
                    raise
            else:
                return

    async def check(self, tables: Mapping[str, str]) -> None:
        await self.read(check_formats(tables, self.dialect, self.quoted))

    def reason(self, error: Exception) -> str:
        text = self.text_of(error) or type(error).__name__
        if is_missing_table(error):
            return f"{text} ({self.hint})"
        problem = store_problem(error)
        return text if problem is None else f"{problem} ({text})"

    def text_of(self, error: Exception) -> str:
        """Return what the database said, its first line; nothing where it may quote a cursor."""
        raise NotImplementedError


class Along(NamedTuple):
    """A `transaction` that is one of the store's own, in which another script follows."""

    script: Callable[[], Script[None]]


class ScriptedStore(Administered):
    def __init__(
        self, database: Database, table: str = CURSORS, journal: Journal | None = None
    ) -> None:
        self.database = database
        self._named = lambda suffix: database.quoted(f"{table}{suffix}")
        self._scripts = PositionScripts(
            database.dialect, self._named, journal, database.quoted(QUARANTINE)
        )
        suffixes = ["", "_done", *["_journal"] * (journal is not None)]
        self._tables = {f"{CURSORS}{suffix}": f"{table}{suffix}" for suffix in suffixes}
        database.need(self._tables)

    async def _answer(
        self, feed: FeedKey | None, call: Callable[[], Awaitable[T]], **how: Any
    ) -> T:
        return await self.database.answer(_WHAT, feed, call, **how)

    async def aclose(self) -> None:
        await self.database.aclose()

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        load = self._scripts.load(feed)
        return await self._answer(feed, lambda: self.database.read(load), shield=False)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        await self.save_passing(feed, positions, {}, transaction=transaction)

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        check_storable(feed, positions)
        await self._answer(feed, lambda: self._save(feed, positions, passed, transaction))

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        done = self._scripts.done

        def claim() -> Script[int]:
            yield from self._scripts.bound_waits(feed)
            return (yield from done.claim(feed, partitions, revision))

        try:
            number = await self._administer(feed, claim)
        except StoreError as error:
            cause, bound = error.__cause__, self._scripts.lock_waits.get(feed)
            if bound is not None and isinstance(cause, Exception) and is_lock_timeout(cause):
                raise held_elsewhere(feed, partitions[0], bound) from cause
            raise
        load = done.load(feed, partitions, revision)
        found = await self._answer(feed, lambda: self.database.transact(load), shield=False)
        return Claim(number, found)

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        async def remember() -> None:
            run = await self._runner(transaction)
            try:
                await run(self._scripts.done.done(feed, event))
            except Exception as error:
                if is_integrity_error(error):
                    raise already_done(feed, event.partition) from error
                raise

        await self._answer(feed, remember)

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        look = self._scripts.done.is_done(feed, event)
        return await self._answer(feed, lambda: self.database.read(look), shield=False)

    async def feeds(self) -> list[FeedKey]:
        async def look() -> list[FeedKey]:
            rows = await self.database.read(self._scripts.feeds())
            return sorted((stored_key(*row) for row in rows), key=str)

        return await self._answer(None, look)

    async def _change(self, feeds: Collection[FeedKey], edit: Edit, **how: Any) -> Stored:
        feed = next(iter(feeds)) if len(feeds) == 1 else None
        return await self._administer(feed, lambda: self._scripts.change(feeds, edit, **how))

    async def _runner(self, transaction: Any) -> Callable[[Script[Any]], Awaitable[Any]]:
        if not _is_own(transaction):
            return partial(self.database.within, transaction)
        await self.database.check_alone()
        return self.database.transact

    async def _save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        transaction: Any,
    ) -> None:
        """Try again after a conflict, and while another transaction holds a row."""
        run, own = await self._runner(transaction), _is_own(transaction)
        if not positions:
            return
        bound = self._scripts.lock_waits.get(feed)
        deadline = math.inf if bound is None else anyio.current_time() + bound
        left = _SAVE_ATTEMPTS
        while True:
            save = self._scripts.save(feed, positions, passed, within=not own)
            if isinstance(transaction, Along):
                save = _one_after_the_other(save, transaction.script())
            try:
                await run(save)
            except HeldError as error:
                if anyio.current_time() >= deadline:
                    raise held_elsewhere(feed, error.partition, bound or 0) from None
                await anyio.sleep(_LOCK_PAUSE)
            except Exception as error:
                if bound is not None and is_lock_timeout(error):
                    only = next(iter(positions)) if len(positions) == 1 else None
                    raise held_elsewhere(feed, only, bound) from error
                left -= 1
                # After a deadlock the caller's transaction is lost.
                if not (left and own and is_conflict(error)):
                    raise
            else:
                return

    async def _administer(self, feed: FeedKey | None, script: Callable[[], Script[T]]) -> T:
        return await self._answer(feed, lambda: self.database.repeat(script, _ADMIN_ATTEMPTS))


def _is_own(transaction: Any) -> bool:
    return transaction is None or isinstance(transaction, Along)


def _one_after_the_other(*scripts: Script[None]) -> Script[None]:
    for script in scripts:
        yield from script


class JournalledScripts(ScriptedStore):
    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        microseconds(when)
        look = self._scripts.positions_at(feed, when)
        return await self._answer(feed, lambda: self.database.transact(look))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        microseconds(to)
        return await self._administer(feed, lambda: self._scripts.rewind(feed, to))


class ScriptedLeases:
    _lease_scripts: LeaseScripts
    _beating: Database
    """For heartbeats, which wait for nothing else."""
    _leasing: Database
    """For all other operations."""

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        look = partial(self._lease_scripts.look, feed, last)
        return await self._lease(self._leasing, feed, look, reads=True)

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        scripts = self._lease_scripts
        beat = partial(scripts.beat, feed, instance, seconds, options)
        return await self._lease(self._beating, feed, beat, seconds=seconds / _RENEWAL_PART)

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        put = partial(self._lease_scripts.put, feed, instance, leases)
        return await self._lease(self._leasing, feed, put)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        leave = partial(self._lease_scripts.leave, feed, instance)
        await self._lease(self._leasing, feed, leave)

    async def _lease(
        self,
        where: Database,
        feed: FeedKey,
        script: Callable[[], Script[T]],
        *,
        reads: bool = False,
        seconds: float | None = None,
    ) -> T:
        async def work() -> T:
            return await (where.read(script()) if reads else where.repeat(script, _LEASE_ATTEMPTS))

        return await where.answer(_WHAT, feed, work, seconds=seconds, shield=not reads)


class ServerStore(ScriptedLeases, JournalledScripts):
    """An operator creates the tables. Leases keep connections while an instance has joined."""

    def __init__(
        self,
        database: Database,
        table: str,
        journal: Journal | None,
        beating: Database,
        leasing: Database,
    ) -> None:
        super().__init__(database, table, journal)
        for suffix in ("_instances", "_leases"):
            self._tables[f"{CURSORS}{suffix}"] = f"{table}{suffix}"
        self._lease_scripts = LeaseScripts(database.dialect, self._named)
        self._beating, self._leasing = beating, leasing
        self._joined: dict[tuple[FeedKey, str], float] = {}
        """The length of the lease of each instance that has joined, in seconds."""
        self._format_is_known = False

    async def aclose(self) -> None:
        """Close the connections of leases, and nothing of the caller's."""
        await self._close_leases()
        await self.database.aclose()

    async def create_tables(self) -> None:
        """Create the tables that do not exist yet. Several processes may do so at once."""
        await self._answer(None, lambda: self.database.create(self._tables), shield=False)

    def limit_lock_waits(self, feed: FeedKey, seconds: float) -> None:
        """Let no save of the feed wait any longer for a row that another transaction holds.

        That may be one of a process that is paused. `save` then raises `FencedError`. PostgreSQL
        ends the store's own transactions of the feed that are idle ten times as long.
        """
        self._scripts.lock_waits[feed] = seconds

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        if not self._format_is_known:
            await self._answer(feed, lambda: self.database.check(self._tables), shield=False)
            self._format_is_known = True
        return await super().load(feed)

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        self._joined[feed, instance] = seconds
        # The shortest lease of all that share the store.
        self._lease_scripts.lock_seconds = min(self._joined.values()) / _LOCK_PART
        return await super().beat(feed, instance, seconds, options)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        self._joined.pop((feed, instance), None)
        await super().leave(feed, instance)

    async def _lease(self, *args: Any, **how: Any) -> Any:
        try:
            return await super()._lease(*args, **how)
        finally:
            if not self._joined:
                await self._close_leases()

    async def _close_leases(self) -> None:
        with anyio.CancelScope(shield=True):
            for each in (self._beating, self._leasing):
                if each is not self.database:
                    await each.aclose()
