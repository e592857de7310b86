"""A cursor store in a SQL database, whose work in a transaction is written as scripts.

A store of this kind knows its connections and transactions, and nothing of statements.
"""

from __future__ import annotations

import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    check_storable,
    consumer_interferes,
    held_elsewhere,
    stored_key,
)
from feedapi_client.stores.done import Claim, DoneEvent, already_done
from feedapi_client.stores.journal import microseconds
from feedapi_client.stores.moving import check_moves
from feedapi_client.stores.positions import HeldError, PositionScripts
from feedapi_client.stores.scripts import Script
from feedapi_client.stores.sql_dialects import is_conflict, is_integrity_error, is_lock_timeout

_SAVE_ATTEMPTS = 3
_ADMIN_ATTEMPTS = 100
"""How often an operator's work is tried while consumers interfere."""
_LOCK_PAUSE = 0.02
"""Seconds between two looks at a row that another transaction holds."""

T = TypeVar("T")

Run = Callable[[Script[Any]], Awaitable[Any]]
"""Runs a script on a connection, within its transaction."""


class Along(NamedTuple):
    """What to pass as `transaction` for one of the store's own in which another script follows.

    Attributes:
        script: makes it, for each attempt.
    """

    script: Callable[[], Script[None]]


class ScriptedStore(Closable):
    """Implements `AdministrableStore` and `DoneStore`.

    A subclass sets `_scripts`, and defines `_run_alone`, `_runner` and `_operation`.
    """

    _scripts: PositionScripts

    async def _run_alone(self, script: Script[T]) -> T:
        """Run a script in a transaction of the store's own."""
        raise NotImplementedError

    async def _read(self, script: Script[T]) -> T:
        """Run a script that only reads, and takes no lock that others could wait for."""
        return await self._run_alone(script)

    async def _runner(self, feed: FeedKey, transaction: Any) -> Run | None:
        """Return what runs a script in the caller's transaction; None if none is given.

        Raises:
            StoreError: the save can't be part of that transaction.
        """
        raise NotImplementedError

    def _operation(
        self, feed: FeedKey | None, *, shield: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Bound the block in time, finish it although it is cancelled, and translate errors."""
        raise NotImplementedError

    def _within(
        self,
        feed: FeedKey,
        transaction: Any,  # noqa: ARG002
    ) -> AbstractAsyncContextManager[None]:
        """Do as `_operation`, for a save in the caller's transaction."""
        return self._operation(feed)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._operation(feed, shield=False):
            return await self._read(self._scripts.load(feed))

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. What `transaction` may be is said by the class."""
        await self.save_passing(feed, positions, {}, transaction=transaction)

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`. `transaction` as in `save`."""
        check_storable(feed, positions)
        along = transaction if isinstance(transaction, Along) else None
        transaction = None if along else transaction
        async with self._within(feed, transaction):
            run = await self._runner(feed, transaction)
            if positions:
                await self._save(feed, positions, passed, run, along)
            elif run is not None:
                await run(_nothing())

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
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
        async with self._operation(feed, shield=False):
            return Claim(number, await self._run_alone(done.load(feed, partitions, revision)))

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """See `DoneStore.done`. `transaction` as in `save`."""
        async with self._within(feed, transaction):
            run = await self._runner(feed, transaction)
            await self._done(feed, event, run)

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        async with self._operation(feed, shield=False):
            return await self._read(self._scripts.done.is_done(feed, event))

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        async with self._operation(None):
            rows = await self._read(self._scripts.feeds())
            return sorted((stored_key(*row) for row in rows), key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        wanted = None if partitions is None else set(partitions)
        await self._administer(feed, lambda: self._scripts.delete(feed, wanted))

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        check_storable(feed, positions)
        return await self._administer(feed, lambda: self._scripts.replace(feed, positions))

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`."""
        check_moves(keys)
        return await self._administer(None, lambda: self._scripts.move(keys, overwrite=overwrite))

    async def _done(self, feed: FeedKey, event: DoneEvent, within: Run | None) -> None:
        """Remember in the caller's transaction, or in one of the store's own."""
        run = self._run_alone if within is None else within
        try:
            await run(self._scripts.done.done(feed, event))
        except Exception as error:
            if is_integrity_error(error):
                raise already_done(feed, event.partition) from error
            raise

    async def _save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        within: Run | None,
        along: Along | None,
    ) -> None:
        """Save in the caller's transaction, or in one of the store's own.

        A few times after a conflict with another consumer; while another transaction holds a row,
        for the time that the save may wait for it.
        """
        run = self._run_alone if within is None else within
        bound = self._scripts.lock_waits.get(feed)
        deadline = math.inf if bound is None else anyio.current_time() + bound
        left = _SAVE_ATTEMPTS
        while True:
            save = self._scripts.save(feed, positions, passed, within=within is not None)
            try:
                await run(save if along is None else _one_after_the_other(save, along.script()))
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
                if not (left and within is None and is_conflict(error)):
                    raise
            else:
                return

    async def _administer(self, feed: FeedKey | None, script: Callable[[], Script[T]]) -> T:
        """Do an operator's work in a transaction; again while consumers interfere."""
        async with self._operation(feed):
            for _ in range(_ADMIN_ATTEMPTS):
                try:
                    return await self._run_alone(script())
                except Exception as error:
                    if not is_conflict(error):
                        raise
            raise consumer_interferes(feed)


class JournalledScripts(ScriptedStore):
    """Implements `JournalledStore`, too."""

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        async with self._operation(feed):
            return await self._run_alone(self._scripts.positions_at(feed, when))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)
        return await self._administer(feed, lambda: self._scripts.rewind(feed, to))


def _nothing() -> Script[None]:
    yield from ()


def _one_after_the_other(*scripts: Script[None]) -> Script[None]:
    for script in scripts:
        yield from script
