"""Positions loaded from and saved to the cursor store, with a deadline and our own errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import anyio

from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.stores.moving import keys_elsewhere

log = logging.getLogger("feedapi_client")

T = TypeVar("T")


class Positions:
    """The stored positions of one consumer's feed.

    `timeout` is how many seconds a save may go on after the task around it was cancelled.
    """

    def __init__(self, store: CursorStore, key: FeedKey, *, timeout: float) -> None:
        self._store = store
        self._key = key
        self._timeout = timeout
        self.at_once = type(store) is MemoryCursorStore
        """Whether a save never suspends, so that no cancellation can interrupt it."""

    async def load(self) -> Mapping[int, Position]:
        """Load all positions. Raises `StoreError`."""
        return await self._translated(self._store.load(self._key), "loading cursors")

    async def keys_elsewhere(self) -> list[FeedKey]:
        """Return the stored keys of this consumer under another origin; none if the store can't.

        A store that fails at this is no reason not to start: the keys are only reported.
        """
        try:
            return await self._translated(keys_elsewhere(self._store, self._key), "listing keys")
        except StoreError as error:
            log.info("cursors under another origin are not looked for: %s", error)
            return []

    async def save(self, positions: Mapping[int, Position], transaction: Any = None) -> None:
        """Save the positions in one atomic save. Raises `StoreError`, `FencedError`.

        The error names the partition when the store refuses its cursor as a value, which is no
        failure of the store. A cancel scope waits until it is finished; see also `finish`.
        """
        with anyio.move_on_after(self._timeout, shield=True) as scope:
            save = self._store.save(self._key, positions, transaction=transaction)
            try:
                await self._translated(save, "saving cursors")
            except StoreError as error:
                if len(positions) == 1 and _is_data_error(error.__cause__):
                    raise self._unstorable(*positions) from error.__cause__
                raise
        if scope.cancelled_caught:
            raise StoreError(
                f"saving cursors took longer than Limits.commit_timeout, {self._timeout} s",
                feed=self._key.url,
            )

    def _unstorable(self, partition: int) -> StoreError:
        return StoreError(
            "saving the cursor failed: the store refuses the value",
            feed=self._key.url,
            partition=partition,
        )

    async def _translated(self, call: Awaitable[T], doing: str) -> T:
        try:
            return await call
        except FeedError:
            raise
        except Exception as error:
            name = type(error).__name__
            raise StoreError(f"{doing} failed: {name}", feed=self._key.url) from error


def _is_data_error(error: BaseException | None) -> bool:
    """Whether a database driver refuses a value, and not the connection or the statement.

    PEP 249 calls that error DataError in every driver. SQLAlchemy has one of the same name, or
    chains the driver's.
    """
    while error is not None:
        if isinstance(error, UnicodeError) or any(
            kind.__name__ == "DataError" for kind in type(error).__mro__
        ):
            return True
        error = error.__cause__
    return False
