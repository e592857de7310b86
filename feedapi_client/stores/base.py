"""What a cursor store is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from feedapi_client.errors import FencedError
from feedapi_client.model import FeedKey, Position


@runtime_checkable
class CursorStore(Protocol):
    """Keeps one `Position` for each partition of each `FeedKey`.

    A cursor resumes *after* the last event that was handled: a consumer that loads it gets the next one. All methods may be called concurrently, by
    several tasks and several processes. `feedapi_client.testing.CursorStoreContract` is the test suite that every store passes.
    """

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """All positions of the feed, superseded and drained ones included; empty for a feed never saved. Raises `StoreError`."""

    async def save(self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None) -> None:
        """Save all the positions, or none of them.

        Raises `FencedError`, and saves nothing, when for one of them the stored revision is not the predecessor (``revision - 1``; nothing stored for a
        revision of 1), and `StoreError` when the store failed. With `transaction` the save is part of the caller's transaction and takes effect when
        the caller commits it; a store that can't take part in one raises `StoreError`.
        """


def check_predecessor(feed: FeedKey, partition: int, position: Position, stored: int | None) -> None:
    """Raise `FencedError` unless the `stored` revision (None: nothing stored) is the one before `position`'s."""
    if (stored or 0) != position.revision - 1:
        raise fenced(feed, partition, position.revision, stored)


def fenced(feed: FeedKey, partition: int, revision: int, stored: int | None) -> FencedError:
    """The error of a refused save."""
    found = "nothing is stored" if stored is None else f"revision {stored} is stored"
    return FencedError(
        f"another consumer named {feed.name!r} advanced this partition: revision {revision} can't be saved because {found}. "
        "Run one consumer of a name at a time",
        feed=feed.url,
        partition=partition,
    )
