"""Positions loaded from and saved to the cursor store, with a deadline and our own errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import anyio

from feedapi_client.causes import causes, is_dead_connection
from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.runtime.loop import finish, hurried
from feedapi_client.runtime.waiting import Waits
from feedapi_client.status import ProblemName
from feedapi_client.stores.base import CursorStore, PatientStore, translated
from feedapi_client.stores.done import Claim, DoneEvent, DoneStore
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.moving import adopt, check_key_format, stored_keys
from feedapi_client.stores.scripted import Along
from feedapi_client.stores.sqlite import MemoryCursorStore

log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 128
"""Of a save on connections that turn out to be dead, as all of a pool are after a quiet night. Each
attempt that fails so takes one of them off the pool, until it makes a new one."""
Passed = Mapping[int, Collection[str]]
"""What is done and passed by a cursor, by the partition that it was done in."""


class Positions:
    """The stored positions of one consumer's feed.

    `timeout` is how many seconds a save may go on after the task around it was cancelled.
    """

    def __init__(self, store: CursorStore, key: FeedKey, waits: Waits, *, timeout: float) -> None:
        self._store = store
        self._key = key
        self._waits = waits
        self._timeout = timeout
        self.at_once = type(store) is MemoryCursorStore
        """Whether a save never suspends, so that no cancellation can interrupt it."""
        self._done_store = store if isinstance(store, DoneStore) else None
        self._patient = isinstance(store, PatientStore)
        self._scopes: set[anyio.CancelScope] = set()

    async def load(self) -> Mapping[int, Position]:
        return await self._call("loading cursors", self._store.load(self._key))

    def noted(self, doing: str, partitions: Collection[int] = ()) -> AbstractContextManager[object]:
        partition = next(iter(partitions)) if len(partitions) == 1 else None
        return self._waits.on(ProblemName.STORE_STUCK, doing, partition)

    async def _call(self, doing: str, call: Awaitable[T], partitions: Collection[int] = ()) -> T:
        with self.noted(doing, partitions):
            return await translated(call, doing, self._key.url)

    async def adopt(self, old: FeedKey, leases: LeaseStore | None) -> int | None:
        moving = adopt(self._store, old, self._key, leases)
        return await self._call("adopting cursors", moving)

    async def keys(self) -> list[FeedKey]:
        """Return all keys that the store lists; none if it can't, which is no reason not to start.

        To be called when nothing was loaded.

        Raises:
            StoreError: this very key is stored, in a format of another version.
        """
        doing = "listing keys"
        try:
            stored = await translated(stored_keys(self._store), doing, self._key.url)
        except StoreError as error:
            log.info("cursors of the same feed under another key are not looked for: %s", error)
            return []
        if self._key in stored:
            await translated(check_key_format(self._store, self._key), doing, self._key.url)
        return stored

    async def save(
        self,
        positions: Mapping[int, Position],
        transaction: Any = None,
        passed: Passed | None = None,
    ) -> None:
        """Save the positions in one atomic save. Raises `StoreError`, `FencedError`.

        What they have `passed` is forgotten with it. The error names the partition when the store
        refuses its cursor as a value, which is no failure of the store. A cancel scope waits until
        it is finished; see also `finish`.
        """
        save = partial(self._store.save, self._key, positions, transaction=transaction)
        if passed:
            save = partial(
                self._remembering().save_passing,
                self._key,
                positions,
                passed,
                transaction=transaction,
            )
        own = transaction is None or isinstance(transaction, Along)
        attempts = _ATTEMPTS if own else 1
        try:
            for attempt in range(1, attempts + 1):
                try:
                    await self._bounded("saving cursors", positions, save, transaction)
                    return
                except FencedError:
                    # Perhaps the attempt before was through, and only its reply was lost.
                    if attempt > 1 and await self.holds(positions):
                        return
                    raise
                except StoreError as error:
                    if attempt == attempts or not is_dead_connection(error.__cause__):
                        raise
        except StoreError as error:
            if len(positions) == 1 and _is_data_error(error.__cause__):
                raise self._unstorable(*positions) from error.__cause__
            raise

    async def holds(self, positions: Mapping[int, Position]) -> bool:
        """Return whether the store holds these very positions: they are saved. Or it fails."""
        try:
            with anyio.fail_after(self._timeout):
                stored = await self.load()
        except (StoreError, TimeoutError):
            return False
        return all(stored.get(id) == position for id, position in positions.items())

    async def claim(self, partitions: Sequence[int], revision: int) -> Claim:
        call = self._remembering().take_over(self._key, partitions, revision)
        return await self._call("claiming a partition", call, partitions[:1])

    async def done(self, event: DoneEvent, transaction: Any) -> None:
        """Remember that an event is done, see `DoneStore.done`, and raise the same.

        Cancellation: as for a save. In the caller's transaction it ends with that.
        """
        call = partial(self._remembering().done, self._key, event, transaction=transaction)
        bounded = self._bounded("remembering an event", [event.partition], call, transaction)
        # In the caller's task: others must not run while a synchronous transaction is open.
        await (bounded if transaction is not None or self.at_once else finish(bounded))

    async def is_done(self, event: DoneEvent) -> bool:
        call = self._remembering().is_done(self._key, event)
        return await self._call("looking for an event", call, [event.partition])

    def _remembering(self) -> DoneStore:
        assert self._done_store is not None, "which was looked at before anything was read"
        return self._done_store

    async def _bounded(
        self,
        doing: str,
        partitions: Collection[int],
        call: Callable[[], Awaitable[None]],
        transaction: Any,
    ) -> None:
        """Await what changes the store to its end, for as long as that may take."""
        with self.noted(doing, partitions):
            limit = math.inf if self._patient else self._timeout
            scope = anyio.move_on_after(limit, shield=True)
            self._scopes.add(scope)
            save = self._within(scope, doing, call)
            try:
                if self._patient and transaction is not None:
                    # In the task of the caller, whose scope may be cancelled.
                    await hurried(save, lambda: self._limit(scope))
                else:
                    await save
            finally:
                self._scopes.discard(scope)

    async def _within(
        self, scope: anyio.CancelScope, doing: str, call: Callable[[], Awaitable[None]]
    ) -> None:
        with scope:
            await translated(call(), doing, self._key.url)
        if scope.cancelled_caught:
            raise StoreError(
                f"{doing} took longer than Limits.commit_timeout, {self._timeout} s",
                feed=self._key.url,
            )

    @property
    def hurry_saves(self) -> Callable[[], None] | None:
        """What `finish` calls when a save's caller is cancelled; None where saves are bounded."""
        return self._hurry if self._patient else None

    def _hurry(self) -> None:
        """Give the saves that are under way `timeout` seconds, because a caller was cancelled.

        A `PatientStore` limits its saves itself, and may be waiting for a server that is away.
        """
        for scope in self._scopes:
            self._limit(scope)

    def _limit(self, scope: anyio.CancelScope) -> None:
        scope.deadline = min(scope.deadline, anyio.current_time() + self._timeout)

    def _unstorable(self, partition: int) -> StoreError:
        return StoreError(
            "saving the cursor failed: the store refuses the value",
            feed=self._key.url,
            partition=partition,
        )


def _is_data_error(error: BaseException | None) -> bool:
    """Whether a database driver refuses a value, and not the connection or the statement.

    PEP 249 calls that error DataError in every driver. SQLAlchemy has one of the same name, or
    chains the driver's.
    """
    return any(
        isinstance(each, UnicodeError)
        or any(kind.__name__ == "DataError" for kind in type(each).__mro__)
        for each in causes(error)
    )
