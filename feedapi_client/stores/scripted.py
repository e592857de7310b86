"""A cursor store whose work in a transaction is written as scripts.

`PostgresCursorStore` and `feedapi_client.django.DjangoCursorStore` are such stores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Protocol, TypeVar

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import Closable, check_storable, consumer_interferes, stored_key
from feedapi_client.stores.done import Claim, DoneEvent, already_done
from feedapi_client.stores.done_statements import DoneScripts
from feedapi_client.stores.journal import microseconds
from feedapi_client.stores.moving import check_moves
from feedapi_client.stores.save_attempts import (
    ADMIN_ATTEMPTS,
    RefusedError,
    SaveAttempts,
    give_up,
    is_conflict,
    is_integrity_error,
    is_worth_another_attempt,
    raise_held,
)
from feedapi_client.stores.scripts import Script

T = TypeVar("T")

Run = Callable[[Script[Any]], Awaitable[Any]]
"""Runs a script on a connection, within its transaction."""


class Scripts(Protocol):
    """Makes the scripts of a store. Each has to run within one transaction."""

    lock_waits: dict[FeedKey, float]
    """How long a save may wait for another's row lock, see `LockingStore`."""
    done: DoneScripts
    """On the table of what is done ahead of the cursor."""

    def load(self, feed: FeedKey) -> Script[dict[int, Position]]:
        """Return all positions."""
        ...

    def feeds(self) -> Script[list[Any]]:
        """Return URL, consumer's name and filters (JSON) of every feed."""
        ...

    def save_alone(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save in a transaction of the store's own.

        Raises:
            RefusedError, FencedError: a stored revision is not the expected one. Roll back.
        """
        ...

    def save_within(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
        """Save in the caller's transaction, which keeps nothing of it when it is refused.

        Raises:
            RefusedError, FencedError: a stored revision is not the expected one.
        """
        ...

    def bound_waits(self, feed: FeedKey) -> Script[None]:
        """Bound how long this transaction of the store's own waits for rows, and holds its own."""
        ...

    def find_conflict(self, feed: FeedKey, positions: Mapping[int, Position]) -> Script[int | None]:
        """Raise the `FencedError` of the first position that is refused, if one is found.

        Returns a partition whose row another transaction holds, if the save may not wait for it.
        """
        ...

    def delete(self, feed: FeedKey, partitions: set[int] | None) -> Script[None]:
        """Delete the positions of the partitions, or of all."""
        ...

    def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> Script[dict[int, Position]]:
        """Save the positions, whatever is stored; return them as saved."""
        ...

    def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool
    ) -> Script[dict[FeedKey, dict[int, Position]]]:
        """Move the positions of each key to another one; return them as saved."""
        ...

    def positions_at(self, feed: FeedKey, when: datetime) -> Script[dict[int, Position]]:
        """Return the positions of a time, see `JournalledStore.positions_at`."""
        ...

    def rewind(self, feed: FeedKey, to: datetime) -> Script[dict[int, Position]]:
        """Make the positions of a time the current ones; return them as saved."""
        ...


class ScriptedStore(Closable):
    """Implements `JournalledStore` and `DoneStore`, but for `save_passing` and `done`.

    A subclass sets `_scripts`, defines `_run_alone` and `_operation`, and calls `_save` and
    `_done`.
    """

    _scripts: Scripts

    async def _run_alone(self, script: Script[T]) -> T:
        """Run a script in a transaction of the store's own."""
        raise NotImplementedError

    def _operation(
        self, feed: FeedKey | None, *, shield: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Bound the block in time, finish it although it is cancelled, and translate errors."""
        raise NotImplementedError

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """See `DoneStore.save_passing`."""
        raise NotImplementedError

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. `transaction` as `save_passing` takes it."""
        await self.save_passing(feed, positions, {}, transaction=transaction)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._operation(feed, shield=False):
            return await self._run_alone(self._scripts.load(feed))

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """See `DoneStore.take_over`."""
        done = self._scripts.done

        def claim() -> Script[int]:
            yield from self._scripts.bound_waits(feed)
            return (yield from done.claim(feed, partitions, revision))

        try:
            number = await self._administer(feed, claim)
        except StoreError as error:
            raise_held(feed, partitions[0], self._scripts.lock_waits.get(feed), error)
            raise
        async with self._operation(feed):
            return Claim(number, await self._run_alone(done.load(feed, partitions, revision)))

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneStore.is_done`."""
        async with self._operation(feed):
            return await self._run_alone(self._scripts.done.is_done(feed, event))

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`."""
        async with self._operation(None):
            rows = await self._run_alone(self._scripts.feeds())
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

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """See `JournalledStore.positions_at`."""
        microseconds(when)
        async with self._operation(feed):
            return await self._run_alone(self._scripts.positions_at(feed, when))

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """See `JournalledStore.rewind`."""
        microseconds(to)
        return await self._administer(feed, lambda: self._scripts.rewind(feed, to))

    async def _done(self, feed: FeedKey, event: DoneEvent, within: Run | None = None) -> None:
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
        within: Run | None = None,
    ) -> None:
        """Save in the caller's transaction, or in one of the store's own."""
        save = self._scripts.save_alone if within is None else self._scripts.save_within

        def script(feed: FeedKey, positions: Mapping[int, Position]) -> Script[None]:
            yield from save(feed, positions)
            yield from self._scripts.done.forget(feed, passed)

        run = self._run_alone if within is None else within
        bound = self._scripts.lock_waits.get(feed)
        attempts = SaveAttempts(feed, positions, bound)
        while True:
            try:
                await run(script(feed, positions))
            except Exception as error:
                attempts.stop_at(error)
                repeatable = isinstance(error, RefusedError) or is_integrity_error(error)
                # After a deadlock the caller's transaction is lost.
                if not (repeatable or (is_conflict(error) and within is None)):
                    raise
                held = await self._find_conflict(feed, positions, within)
                if within is not None and not attempts.bounded:
                    give_up(feed, error)
                await attempts.pause(error, held)
            else:
                return

    async def _find_conflict(
        self, feed: FeedKey, positions: Mapping[int, Position], within: Run | None
    ) -> int | None:
        """See `Scripts.find_conflict`."""
        run = self._run_alone if within is None else within
        held: int | None = await run(self._scripts.find_conflict(feed, positions))
        return held

    async def _administer(self, feed: FeedKey | None, script: Callable[[], Script[T]]) -> T:
        """Do an operator's work in a transaction; again while consumers interfere."""
        async with self._operation(feed):
            for _ in range(ADMIN_ATTEMPTS):
                try:
                    return await self._run_alone(script())
                except Exception as error:
                    if not is_worth_another_attempt(error):
                        raise
            raise consumer_interferes(feed)
