"""What a cursor store is, and what the shipped ones can do beyond that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, Self, runtime_checkable

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position

_REPLACE_ATTEMPTS = 500
_STATUSES = ("open", "drained", "superseded")


@runtime_checkable
class CursorStore(Protocol):
    """Keeps one `Position` for each partition of each `FeedKey`.

    A cursor resumes *after* the last event that was handled: a consumer that loads it gets the next one. All methods may be called concurrently, by
    several tasks and several processes. `feedapi_client.testing.CursorStoreContract` is the test suite that every store passes.
    """

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """All positions of the feed, superseded and drained ones included; empty for a feed never saved. Raises `StoreError`."""

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Save all the positions, or none of them.

        Raises `FencedError`, and saves nothing, when for one of them the stored revision is not the predecessor (``revision - 1``; nothing stored for a
        revision of 1), and `StoreError` when the store failed. With `transaction` the save is part of the caller's transaction and takes effect when
        the caller commits it; a store that can't take part in one raises `StoreError`. After an error the caller can still roll the transaction back.
        Cancelled, a save has saved all or nothing, and the store stays usable.
        """


@runtime_checkable
class AdministrableStore(CursorStore, Protocol):
    """A store that an operator can look into and repair. All shipped stores are.

    The operations may run beside a consumer: one whose positions were changed under it ends with `FencedError` at its next save of them.
    """

    async def feeds(self) -> list[FeedKey]:
        """The keys of all feeds with positions, sorted. Raises `StoreError`."""

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """Forget the positions of the partitions, or of all; those without a position are skipped. Raises `StoreError`.

        Stop the feed's consumer first: revisions start again at 1, so that one that sleeps through it all could later meet the revision it expects.
        """

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """Make these the positions of their partitions, whatever is stored, all or none; the others stay as they are.

        The revisions given are ignored: each becomes the one after what is stored. Returns the positions as saved. Raises `StoreError`.
        """


@runtime_checkable
class JournalledStore(AdministrableStore, Protocol):
    """A store that can keep a history of its positions, see `feedapi_client.stores.Journal`."""

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """The positions that were stored at `when` (which must have a time zone), by partition.

        Raises `StoreError` without a journal, or when the journal does not reach back that far.
        """

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """Make the positions of that time the current ones, each with the next revision, and return them. See `feedapi_client.stores.journal`.

        Raises `StoreError` as `positions_at` does, or when the feed had no position at all then.
        """


class Closable:
    """`async with store:` for stores that hold on to something; leaving the block calls `aclose`."""

    async def aclose(self) -> None:
        """Let go of connections. May be called again; a later use of the store opens what it needs."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def check_predecessor(
    feed: FeedKey, partition: int, position: Position, stored: int | None
) -> None:
    """Raise `FencedError` unless the `stored` revision (None: nothing stored) is the one before `position`'s."""
    if stored != (position.revision - 1 if position.revision > 1 else None):
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


def stored_position(
    feed: FeedKey, partition: int, cursor: str, status: str, revision: int
) -> Position:
    """A position as a store holds it. Raises `StoreError` for a status that this version does not know."""
    if status not in _STATUSES:
        raise StoreError(
            f"the stored position has the unknown status {status!r}: was it saved by a newer version?",
            feed=feed.url,
            partition=partition,
        )
    return Position(cursor, status, revision)  # type: ignore[arg-type]


def following(
    positions: Mapping[int, Position], revisions: Mapping[int, int]
) -> dict[int, Position]:
    """The positions with the revisions that come after the stored ones."""
    return {
        partition: Position(new.cursor, new.status, revisions.get(partition, 0) + 1)
        for partition, new in positions.items()
    }


async def replace_positions(
    store: CursorStore, feed: FeedKey, positions: Mapping[int, Position]
) -> dict[int, Position]:
    """`AdministrableStore.replace` for any store: compare-and-set until no consumer comes in between."""
    for attempt in range(1, _REPLACE_ATTEMPTS + 1):
        replaced = following(
            positions,
            {partition: found.revision for partition, found in (await store.load(feed)).items()},
        )
        try:
            await store.save(feed, replaced)
        except FencedError as error:
            if attempt == _REPLACE_ATTEMPTS:
                raise StoreError(
                    "a running consumer keeps changing the positions: stop it and try again",
                    feed=feed.url,
                ) from error
        else:
            break
    return replaced
