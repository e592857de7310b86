"""Positions loaded from and saved to the cursor store, with a deadline and our own errors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.runtime.clock import loop_clock
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.foreign_errors import translated
from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.stores.moving import keys_elsewhere

log = logging.getLogger(__name__)


class StoreCall(NamedTuple):
    """An operation of the store that is under way.

    Attributes:
        doing: what it does, for people.
        partitions: whose positions.
        began: when, on the clock of the event loop.
    """

    doing: str
    partitions: tuple[int, ...]
    began: float


class Positions:
    """The stored positions of one consumer's feed.

    `timeout` is how many seconds a save may go on after the task around it was cancelled.
    """

    def __init__(self, store: CursorStore, key: FeedKey, *, timeout: float) -> None:
        self._store = store
        self._key = key
        self._timeout = timeout
        self._clock = loop_clock()
        self._calls: dict[int, StoreCall] = {}
        self._numbers = count()
        self.at_once = type(store) is MemoryCursorStore
        """Whether a save never suspends, so that no cancellation can interrupt it."""

    async def load(self) -> Mapping[int, Position]:
        """Load all positions. Raises `StoreError`."""
        doing = "loading cursors"
        with self.noted(doing):
            return await translated(self._store.load(self._key), doing, self._key.url)

    @property
    def calls(self) -> list[StoreCall]:
        """The operations that are under way, the oldest first."""
        return list(self._calls.values())

    @contextmanager
    def noted(self, doing: str, partitions: Iterable[int] = ()) -> Iterator[None]:
        """Count the block among the operations that are under way."""
        number = next(self._numbers)
        self._calls[number] = StoreCall(doing, tuple(partitions), self._clock())
        try:
            yield
        finally:
            del self._calls[number]

    async def keys_elsewhere(self) -> list[FeedKey]:
        """Return the stored keys of this consumer under another origin; none if the store can't.

        A store that fails at this is no reason not to start: the keys are only reported.
        """
        try:
            listing = keys_elsewhere(self._store, self._key)
            return await translated(listing, "listing keys", self._key.url)
        except StoreError as error:
            log.info("cursors under another origin are not looked for: %s", error)
            return []

    async def save(self, positions: Mapping[int, Position], transaction: Any = None) -> None:
        """Save the positions in one atomic save. Raises `StoreError`, `FencedError`.

        The error names the partition when the store refuses its cursor as a value, which is no
        failure of the store. A cancel scope waits until it is finished; see also `finish`.
        """
        # Without `noted`: to enter a generator takes longer than to note the call.
        number = next(self._numbers)
        self._calls[number] = StoreCall("saving cursors", tuple(positions), self._clock())
        try:
            with anyio.move_on_after(self._timeout, shield=True) as scope:
                save = self._store.save(self._key, positions, transaction=transaction)
                try:
                    await translated(save, "saving cursors", self._key.url)
                except StoreError as error:
                    if len(positions) == 1 and _is_data_error(error.__cause__):
                        raise self._unstorable(*positions) from error.__cause__
                    raise
        finally:
            del self._calls[number]
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
