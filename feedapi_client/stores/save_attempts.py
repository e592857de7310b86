"""When the save of a cursor in a database is tried again, and when it is refused.

Knows no driver: errors are told apart by the codes of the databases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import held_elsewhere

ADMIN_ATTEMPTS = 100
"""How often an operator's work is tried while consumers interfere."""
IDLE_PARTS = 10
"""A transaction of the store's own may be idle so many times as long as one may wait for it."""
_SAVE_ATTEMPTS = 3
_LOCK_PAUSE = 0.02
"""Seconds between two looks at a row that another transaction holds."""
# Serialization failures and deadlocks: SQLSTATEs of PostgreSQL, numbers of MySQL and MariaDB.
_CONFLICTS = ("40001", "40P01", 1213, 1020)
# The time to wait for a row lock is over.
_LOCK_TIMEOUTS = ("55P03", 1205)


class RefusedError(Exception):
    """A stored revision is not the expected one; the statements so far have to be rolled back."""


class SaveAttempts:
    """How often a save is tried.

    A few times after a conflict with another consumer. While another transaction holds a row, for
    the time that the save may wait for it.

    Arguments:
        feed, positions: what is saved.
        seconds: that time; None: the database waits.
    """

    def __init__(
        self, feed: FeedKey, positions: Mapping[int, Position], seconds: float | None
    ) -> None:
        self._feed = feed
        self._only = next(iter(positions)) if len(positions) == 1 else None
        self._seconds = seconds
        self._deadline = anyio.current_time() + (seconds or 0)
        self._left = _SAVE_ATTEMPTS

    @property
    def bounded(self) -> bool:
        """Whether the save may wait for a row for a time of its own."""
        return self._seconds is not None

    def stop_at(self, error: Exception) -> None:
        """Raise the error of a save that another transaction has kept waiting long enough."""
        if self._seconds is not None and is_lock_timeout(error):
            raise held_elsewhere(self._feed, self._only, self._seconds) from error

    async def pause(self, error: Exception, held: int | None) -> None:
        """Wait before the next attempt, or raise. `held`: a partition whose row is locked."""
        if held is not None and self._seconds is not None:
            if anyio.current_time() >= self._deadline:
                raise held_elsewhere(self._feed, held, self._seconds) from None
            await anyio.sleep(_LOCK_PAUSE)
            return
        self._left -= 1
        if not self._left:
            give_up(self._feed, error)


def is_conflict(error: Exception) -> bool:
    """Return whether another transaction caused the error."""
    return is_integrity_error(error) or any(code in _CONFLICTS for code in _codes(error))


def is_integrity_error(error: Exception) -> bool:
    """Return whether a constraint refused a row, such as an equal key."""
    return any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)


def is_lock_timeout(error: Exception) -> bool:
    """Return whether a statement has waited for another's row lock as long as it may."""
    return any(code in _LOCK_TIMEOUTS for code in _codes(error))


def raise_held(feed: FeedKey, partition: int, seconds: float | None, error: StoreError) -> None:
    """Raise `held_elsewhere` if the cause of an error is a row that was waited for so long."""
    cause = error.__cause__
    if seconds is not None and isinstance(cause, Exception) and is_lock_timeout(cause):
        raise held_elsewhere(feed, partition, seconds) from cause


def is_worth_another_attempt(error: Exception) -> bool:
    """Return whether the same save may succeed, or be refused for a reason, when repeated."""
    return isinstance(error, RefusedError) or is_conflict(error)


def give_up(feed: FeedKey, error: Exception) -> NoReturn:
    """Raise the error of a refused save that no stored revision explains."""
    if isinstance(error, RefusedError):
        raise error.__cause__ or StoreError(
            "the positions changed while they were being saved: load them and try again",
            feed=feed.url,
        ) from None
    raise error


def _codes(error: Exception) -> tuple[object, ...]:
    # SQLAlchemy has the driver's error as `orig`, Django as the cause.
    cause = getattr(error, "orig", None) or error
    states = (getattr(each, "sqlstate", None) for each in (cause, cause.__cause__))
    return (*states, *getattr(cause, "args", ())[:1])
