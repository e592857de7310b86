"""The protocols of cursor stores, and what the shipped stores share."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import anyio
import anyio.lowlevel
import orjson

from feedapi_client.causes import failure_of, store_problem
from feedapi_client.errors import FeedError, FencedError, StoreError
from feedapi_client.model import FeedKey, Position

T = TypeVar("T")

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_STATUSES = ("open", "drained", "superseded")


@runtime_checkable
class CursorStore(Protocol):
    """Keeps one `Position` for each partition of each `FeedKey`.

    A cursor resumes *after* the last event that was handled: a consumer that loads it gets the
    next one.

    Concurrency: all methods may be called concurrently, by several tasks and processes.

    Raises: every method raises `StoreError` when the store fails.

    `feedapi_client.testing.CursorStoreContract` is the test suite that every store passes.
    """

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """Return all positions of the feed by partition, superseded and drained ones included."""
        ...

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """Save all the positions, or none of them.

        With `transaction` the save is part of the caller's transaction and takes effect when the
        caller commits it. After an error the caller can still roll the transaction back.

        Cancellation: all positions are saved or none, and the store stays usable.

        Raises:
            FencedError: for one of the positions, which its `partition` names, another revision is
                stored than the one that it `replaces`; for None, any. Nothing is saved. A store
                may accept the very position that it holds: its driver has repeated a save whose
                reply was lost.
            StoreError: the store failed; it can't take part in a transaction, or not in this one;
                or it can't keep a cursor, of the `partition` that the error names. Nothing is
                saved.
        """
        ...


@runtime_checkable
class PatientStore(CursorStore, Protocol):
    """Limits by itself how long a save waits for a server that is away, not `commit_timeout`."""

    def wait_for_server(self, seconds: float | None) -> None:
        """See `RetryPolicy.give_up_after`. Called before positions are loaded, and when it runs."""
        ...


@runtime_checkable
class AdministrableStore(CursorStore, Protocol):
    """A store whose contents an operator can inspect and repair. All shipped stores are.

    The operations may run beside a consumer. A consumer whose positions were changed this way ends
    with `FencedError` at its next save of them.
    """

    async def feeds(self) -> list[FeedKey]:
        """Return the keys of all feeds with positions, sorted.

        A consumer whose own key has no position calls this at its start, to find cursors of the
        same feed under another key (R7).
        """
        ...

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """Delete the positions of the partitions, or of all; skip those without a position.

        Stop the feed's consumer first: it would go on to its next save.
        """
        ...

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """Replace the positions of these partitions, whatever is stored: all or none.

        The other partitions stay as they are. The revisions given are ignored: each position
        replaces the stored one. Returns the positions as saved.
        """
        ...

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """Move all positions of each key to another key: all of them or none.

        With what is done ahead of them, and with quarantined events in the same database. The old
        keys have no position afterwards; each moved one gets a revision above those of both keys.

        Arguments:
            keys: the new key of each old one. No key is in it twice (ValueError).
            overwrite: delete what is stored under the new keys. Otherwise StoreError, if anything.

        Returns the positions as saved, by new key. Old keys without a position are left out.
        """
        ...


@runtime_checkable
class JournalledStore(AdministrableStore, Protocol):
    """A store that can keep a history of its positions, see `feedapi_client.stores.Journal`."""

    async def positions_at(self, feed: FeedKey, when: datetime) -> dict[int, Position]:
        """Return the positions that were stored at `when`, by partition.

        Raises:
            StoreError: there is no journal, or it does not reach back that far.
            ValueError: `when` has no time zone.
        """
        ...

    async def rewind(self, feed: FeedKey, to: datetime) -> dict[int, Position]:
        """Make the positions of that time the current ones, each with a revision of its own.

        Returns the positions as saved. Raises what `positions_at` does, and `StoreError` if the
        feed had no position at all at that time.
        """
        ...


class Closable:
    """``async with store:`` for stores that hold resources; leaving the block calls `aclose`."""

    async def aclose(self) -> None:
        """Close connections. May be called again; a later use of the store opens new ones."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class Answering(Closable):
    """Each call is bounded in time (`timeout`), and its errors are translated."""

    name: str
    timeout: float | None = None

    def reason(self, error: Exception) -> str:
        """Return why a call failed, without what it may quote: cursors, payloads, passwords."""
        raise NotImplementedError

    async def answer(
        self,
        what: str,
        feed: FeedKey | None,
        call: Callable[[], Awaitable[T]],
        *,
        seconds: float | None = None,
        shield: bool = True,
        chained: bool = True,
    ) -> T:
        """Make the call, unless its task is cancelled. `shield` finishes one that began."""
        url = None if feed is None else feed.url
        await anyio.lowlevel.checkpoint_if_cancelled()
        limit = self.timeout if seconds is None else min(self.timeout or seconds, seconds)
        try:
            if limit is None:
                return await call()
            with anyio.fail_after(limit, shield=shield):
                return await call()
        except FeedError as error:
            error.feed = error.feed or url
            raise
        except TimeoutError as error:
            text = f"{what} {self.name}".rstrip()
            raise StoreError(f"{text} did not answer within {limit:g} s", feed=url) from error
        except Exception as error:  # noqa: BLE001
            # Any: drivers raise also ValueError, TypeError and RuntimeError of their own.
            raise self.failure(what, feed, error) from (error if chained else None)

    def failure(self, what: str, feed: FeedKey | None, error: Exception) -> StoreError:
        return StoreError(
            f"{what} {self.name}".rstrip() + f" failed: {self.reason(error)}",
            feed=None if feed is None else feed.url,
        )


async def translated(call: Awaitable[T], doing: str, feed: str) -> T:
    """Return what `call` returns: a store of one's own may let errors of its driver through."""
    try:
        return await call
    except FeedError:
        raise
    except BaseException as failed:  # noqa: BLE001 - a stray cancellation is one, too
        error = failure_of(failed, doing)
        problem = store_problem(error)
        why = type(error).__name__ + ("" if problem is None else f": {problem}")
        raise StoreError(f"{doing} failed: {why}", feed=feed) from error


def check_replaces(
    feed: FeedKey, partition: int, replaces: int | None, stored: Position | int | None
) -> None:
    """Raise `FencedError` unless this revision (None: nothing) is stored."""
    found = stored.revision if isinstance(stored, Position) else stored
    if found != replaces:
        raise fenced(feed, partition, replaces, found)


def fenced(feed: FeedKey, partition: int, replaces: int | None, stored: int | None) -> FencedError:
    """What is stored is newer if another consumer has saved, and older if the store went back."""
    expected = "nothing" if replaces is None else f"revision {replaces}"
    found = "nothing is stored" if stored is None else f"revision {stored} is stored"
    if (stored or 0) < (replaces or 0):
        return FencedError(
            f"the store went back: {expected} can't be replaced because {found}. A failover "
            "or a restored backup has lost what was saved before, somebody deleted it, or the "
            "application went on although it had rolled back the transaction of a commit. Check "
            "'feedapi cursors ls' before you start again: without any position the next start "
            "begins as the first one, with start='last' at the present end",
            feed=feed.url,
            partition=partition,
        )
    return FencedError(
        f"another consumer named {feed.name!r} advanced this partition: {found}, and {expected} "
        "was expected. Run one consumer of a name at a time",
        feed=feed.url,
        partition=partition,
    )


def held_elsewhere(feed: FeedKey, partition: int | None, seconds: float) -> FencedError:
    return FencedError(
        f"another transaction holds this position and has not ended within {seconds:g} s: another "
        f"consumer named {feed.name!r} commits it, or is paused within a commit. That transaction "
        "decides; what was not committed is read again",
        feed=feed.url,
        partition=partition,
    )


def check_storable(feed: FeedKey, positions: Mapping[int, Position]) -> None:
    """Refuse what not every database can keep, for its partition: U+0000 and lone surrogates."""
    for partition, position in positions.items():
        if _UNSTORABLE.search(position.cursor):
            raise StoreError(
                "saving the cursor failed: it holds a NUL or is no valid Unicode",
                feed=feed.url,
                partition=partition,
            )


def key_columns(feed: FeedKey) -> tuple[str, str, str]:
    return feed.url, feed.name, orjson.dumps(feed.filters).decode()


def stored_key(url: str, name: str, filters: str) -> FeedKey:
    try:
        return FeedKey(url, name, orjson.loads(filters))
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"a stored feed key can't be read: {type(error).__name__}: was it saved by another "
            "program?"
        ) from error


def stored_position(
    feed: FeedKey, partition: int, cursor: str, status: str, revision: int
) -> Position:
    if status not in _STATUSES:
        raise StoreError(
            f"the stored position has the unknown status {status!r}: "
            "was it saved by a newer version?",
            feed=feed.url,
            partition=partition,
        )
    return Position(cursor, status, revision)  # type: ignore[arg-type]


def in_place_of(
    stored: Mapping[int, Position], positions: Mapping[int, Position]
) -> dict[int, Position]:
    return {
        partition: Position.after(stored.get(partition), new.cursor, new.status)
        for partition, new in positions.items()
    }


def consumer_interferes(feed: FeedKey | None) -> StoreError:
    return StoreError(
        "a running consumer keeps changing the positions: stop it and try again",
        feed=None if feed is None else feed.url,
    )
