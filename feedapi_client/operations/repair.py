"""Drain, restore and rewind: repair the positions of one feed and consumer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from feedapi_client.errors import AmbiguousLineageError, LineageError, StoreError
from feedapi_client.model import FIRST, FeedInfo, FeedKey, Position
from feedapi_client.operations.feed_access import FeedAccess
from feedapi_client.operations.stored_positions import OperationError, check_cursor, check_unused
from feedapi_client.protocol.text import names, shown
from feedapi_client.stores.base import AdministrableStore, CursorStore, JournalledStore
from feedapi_client.stores.journal import check_rewind

Positions = Mapping[int, Position]
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A change of stored positions, planned or done.

    Attributes:
        key: the feed and consumer.
        before: all its positions.
        after: the positions that are other ones. Empty when there is nothing to do.
    """

    key: FeedKey
    before: Positions
    after: Positions


async def drain(
    store: CursorStore,
    feed: FeedAccess,
    partition: int,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Change:
    """Mark a closed partition as drained: what was not read of it is skipped, its children start.

    For a partition whose end the feed can't serve. With `dry_run` nothing is saved.

    Arguments:
        force: although the partition is open, or unknown to both feed and store.

    Raises:
        OperationError: the partition is open, unknown or superseded, or nothing is stored of the
            consumer.
        FeedError: the feed can't be discovered.
    """
    stored = await _stored(store, feed.key, force=force)
    found = stored.get(partition)
    listed = (await feed.discover()).partitions.get(partition)
    if found is not None and found.status == "drained":
        return Change(feed.key, stored, {})
    where = f"{feed.key}: partition {partition}"
    if found is not None and found.status == "superseded":
        raise OperationError(
            f"{where} is superseded: its successors took over its cursor, nobody waits for it"
        )
    if listed is not None and not listed.closed and not force:
        raise OperationError(
            f"{where} is open: the feed may add events to it, and its children would start before "
            "those. If the feed's answer lags behind and the partition is closed, give --force "
            "(force=True)"
        )
    if listed is None and found is None and not force:
        raise OperationError(
            f"{where} is neither listed by the feed nor stored. If a child waits for it all the "
            "same, give --force (force=True)"
        )
    if found is not None:
        drained = found.advance(status="drained")
    else:
        end = listed.last_cursor if listed is not None else None
        drained = Position.after(None, end or FIRST, "drained")
    change = Change(feed.key, stored, {partition: drained})
    if not dry_run:
        await store.save(feed.key, change.after)
    return change


async def restore(
    store: CursorStore,
    feed: FeedAccess,
    partitions: Collection[int],
    *,
    successors: Collection[int] | None = None,
    cursor: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Change:
    """Move cursors back to partitions after their publisher was rolled back behind a split (R11).

    The successors lose their cursor in the same step, and take it over again when the publisher
    goes forward: neither way repeats or skips events. With `dry_run` nothing is saved.

    Arguments:
        partitions: listed as open again. Those that were merged are restored together.
        successors: those that hold the cursor now; None to find them.
        cursor: where to go on, if the successors stand at different cursors.
        force: although the feed does not list a partition as open.

    Raises:
        OperationError: a partition was not rolled back, or nothing is stored of the consumer.
        LineageError: the successors can't be found, or stand at different cursors.
        FeedError: the feed can't be discovered.
        ValueError: the cursor can't be stored.
    """
    if cursor is not None:
        check_cursor(cursor)
    stored = await _stored(store, feed.key, force=force)
    info = await feed.discover()
    for partition in () if force else sorted(partitions):
        listed = info.partitions.get(partition)
        if listed is None or listed.closed:
            state = "does not list it" if listed is None else "lists it as closed"
            raise OperationError(
                f"{feed.key}: partition {partition} was not rolled back: the feed {state}. If its "
                "answer lags behind, give --force (force=True)"
            )
    url = feed.key.url
    _check_over(stored, partitions, url)
    if successors is None:
        # What is drained has children, which keep their cursors.
        drained = all(stored[id].status == "drained" for id in partitions)
        successors = [] if drained else presumed_successors(stored, info, partitions, feed=url)
    after = restored_positions(stored, partitions, set(successors), cursor, feed=url)
    change = Change(feed.key, stored, after)
    if not dry_run:
        await store.save(feed.key, change.after)
    return change


async def _stored(store: CursorStore, key: FeedKey, *, force: bool) -> dict[int, Position]:
    if not force:
        await check_unused(store, [key])
    stored = await store.load(key)
    if not stored:
        raise OperationError(
            f"{key}: no cursor is stored for this feed and consumer: see 'feedapi cursors ls'"
        )
    return stored


def presumed_successors(
    stored: Positions, info: FeedInfo, partitions: Collection[int], *, feed: str
) -> list[int]:
    """Return the partitions that were read and are not listed any more.

    They hold the cursors of those that were rolled back: the store does not keep whose successors
    they are. Raises `AmbiguousLineageError` where other partitions were rolled back, too.
    """
    gone = stored.keys() - info.partitions.keys()
    candidates = sorted(id for id in gone if stored[id].status == "open")
    listed = [id for id, partition in info.partitions.items() if not partition.closed]
    again = {id for id in listed if id in stored and stored[id].status == "superseded"}
    if candidates and (others := sorted(again.difference(partitions))):
        raise AmbiguousLineageError(
            f"{names(others)} {'is' if len(others) == 1 else 'are'} listed as open again, too, and "
            f"{names(candidates)} may be successors of each: name those of this partition",
            feed=feed,
            partition=min(partitions),
        )
    return candidates


def restored_positions(
    stored: Positions,
    partitions: Collection[int],
    successors: Collection[int],
    cursor: str | None = None,
    *,
    feed: str,
) -> dict[int, Position]:
    """Return what has to be saved, in one save, to move cursors back to partitions.

    Raises `LineageError`, or `AmbiguousLineageError` where the successors stand at different
    cursors and none is given.
    """
    _check_over(stored, partitions, feed)
    for successor in successors:
        at = stored.get(successor)
        if successor in partitions or at is None or at.status == "superseded":
            raise LineageError(
                "holds no cursor that could be moved back", feed=feed, partition=successor
            )
    ends = {stored[successor].cursor for successor in successors}
    if cursor is None and len(ends) > 1:
        stand = ", ".join(f"{s} at {shown(stored[s].cursor)}" for s in sorted(successors)[:_SHOWN])
        raise AmbiguousLineageError(
            f"its successors stand at different cursors: {stand}. Give the cursor to go on from: "
            "events between them are repeated from the earliest, and skipped from a later one",
            feed=feed,
            partition=min(partitions),
        )
    cursor = next(iter(ends), None) if cursor is None else cursor
    if cursor is None and any(stored[p].status == "superseded" for p in partitions):
        raise LineageError(
            "its successors are not known: name them, or give the cursor to go on from",
            feed=feed,
            partition=min(partitions),
        )
    restored = {
        p: stored[p].advance(stored[p].cursor if cursor is None else cursor, "open")
        for p in partitions
    }
    return restored | {s: stored[s].advance(status="superseded") for s in successors}


def _check_over(stored: Positions, partitions: Collection[int], feed: str) -> None:
    for partition in sorted(partitions):
        at = stored.get(partition)
        if at is None or at.status == "open":
            why = "has no stored position" if at is None else "is not superseded or drained"
            raise LineageError(f"{why}: nothing to restore", feed=feed, partition=partition)


async def rewind(
    store: AdministrableStore,
    key: FeedKey,
    to: datetime,
    partitions: Collection[int] | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Change:
    """Make the positions of an earlier time the current ones, by the journal of the store.

    Of all partitions in one step, or of these. With `dry_run` nothing is saved, and instances may
    be alive.

    Returns the change. Its `after` holds all positions of that time; a partition that had none is
    forgotten.

    Raises:
        OperationError: this kind of store keeps no journal.
        StoreError: the journal does not reach back so far. The message says where it begins.
        ValueError: `to` has no time zone.
    """
    if not isinstance(store, JournalledStore):
        raise OperationError("this kind of store keeps no journal")
    before, then = await store.load(key), await _positions_of_time(store, key, to)
    if partitions is not None:
        chosen = set(partitions)
        before, then = ({p: at[p] for p in at.keys() & chosen} for at in (before, then))
    if dry_run:
        return Change(key, before, then)
    if not force:
        await check_unused(store, [key])
    if partitions is None:
        return Change(key, before, await store.rewind(key, to))
    if forgotten := before.keys() - then.keys():
        await store.delete(key, forgotten)
    return Change(key, before, await store.replace(key, then) if then else {})


async def _positions_of_time(
    store: JournalledStore, key: FeedKey, when: datetime
) -> dict[int, Position]:
    try:
        then = await store.positions_at(key, when)
        check_rewind(key, when, then)  # what the rewind itself refuses
    except StoreError as error:
        if (begin := await _journal_begin(store, key, when)) is None:
            raise
        raise StoreError(
            f"{error}. The journal knows positions from {begin.isoformat()} on. 'feedapi cursors "
            "reset' begins anew, at the first event"
        ) from error
    return then


async def _journal_begin(store: JournalledStore, key: FeedKey, when: datetime) -> datetime | None:
    """Return the first whole second after `when` of which positions are known, None for none."""

    async def known(at: datetime) -> bool:
        try:
            return bool(await store.positions_at(key, at))
        except StoreError:
            return False

    begin = datetime.now(UTC)
    if begin <= when or not await known(begin):
        return None
    while begin - when > timedelta(seconds=1):
        middle = when + (begin - when) / 2
        when, begin = (when, middle) if await known(middle) else (middle, begin)
    return begin.replace(microsecond=0) + timedelta(seconds=1)
