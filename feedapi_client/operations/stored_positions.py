"""List, set, reset, move and rename stored positions, and list leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from feedapi_client.errors import StoreError
from feedapi_client.model import LAST, FeedKey, Position
from feedapi_client.operations.feed_lag import PartitionLag
from feedapi_client.protocol.text import MAX_CURSOR, are_valid, counted
from feedapi_client.quarantine.quarantine_store import QuarantineStore, quarantine_beside
from feedapi_client.stores.base import AdministrableStore, CursorStore
from feedapi_client.stores.done import DoneStore
from feedapi_client.stores.leases import Instance, Lease, LeaseStore
from feedapi_client.stores.moving import check_key_format

_NAMED = 10

Chooses = Callable[[FeedKey], bool]
"""Whether a key of a store is meant."""


class OperationError(StoreError):
    """An operation was refused, and nothing was changed."""


@dataclass(frozen=True, slots=True)
class FeedPositions:
    """The positions of one feed and consumer.

    Attributes:
        key: the feed and consumer.
        positions: the position of each partition that has one.
        lag: of each partition that is stored or listed; None when the feed was not asked.
    """

    key: FeedKey
    positions: Mapping[int, Position]
    lag: Mapping[int, PartitionLag] | None = None

    def partitions(self) -> list[int]:
        """Return the ids of all partitions that are stored or listed, sorted."""
        return sorted(self.positions.keys() | (self.lag or {}).keys())


@dataclass(frozen=True, slots=True)
class FeedLeases:
    """The instances of one feed and consumer, and who reads which partition."""

    key: FeedKey
    instances: tuple[Instance, ...]
    leases: tuple[Lease, ...]

    def of(self, instance: str) -> list[Lease]:
        """Return the leases of an instance."""
        return [lease for lease in self.leases if lease.owner == instance]


async def list_positions(
    store: AdministrableStore, chooses: Chooses | None = None
) -> list[FeedPositions]:
    """Return the positions of all feeds and consumers, or of those that `chooses` accepts.

    Raises:
        StoreError: those of a key are in a format of another version.
    """
    found = []
    for key in await store.feeds():
        if chooses is None or chooses(key):
            if not (positions := await store.load(key)):
                await check_key_format(store, key)
            found.append(FeedPositions(key, positions))
    return found


async def list_leases(
    store: AdministrableStore, chooses: Chooses | None = None
) -> list[FeedLeases]:
    """Return instances and leases of all feeds and consumers, or of those that are chosen.

    Raises:
        OperationError: this kind of store keeps no leases.
    """
    if not isinstance(store, LeaseStore):
        raise OperationError("the store keeps no leases")
    found = []
    for key in await store.feeds():
        if chooses is None or chooses(key):
            instances, leases = await store.look(key)
            own = tuple(lease for lease in leases.values() if lease.partition >= 0)
            found.append(FeedLeases(key, tuple(instances), own))
    return found


async def check_unused(store: CursorStore, keys: Iterable[FeedKey]) -> None:
    """Check that no instance that shares one of these feeds is alive.

    Raises:
        OperationError: one is.
    """
    if not isinstance(store, LeaseStore):
        return
    for key in keys:
        alive = [each.name for each in (await store.look(key)).instances if each.alive]
        if alive:
            raise OperationError(
                f"{key}: shared by {counted(len(alive), 'living instance')} "
                f"({', '.join(alive[:_NAMED])}{', …' if len(alive) > _NAMED else ''}), to be "
                "stopped first; or give --force (force=True). 'feedapi leases ls' lists them"
            )


async def set_position(
    store: AdministrableStore,
    key: FeedKey,
    partition: int,
    position: Position,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Position:
    """Make `position` the current one of the partition, whatever is stored.

    Its revision does not count. With `dry_run` nothing is saved. Returns the position as saved.

    Raises:
        ValueError: no consumer may go on from this cursor.
    """
    check_cursor(position.cursor)
    if not force:
        await check_unused(store, [key])
    if dry_run:
        return position
    return (await store.replace(key, {partition: position}))[partition]


def check_cursor(cursor: str) -> None:
    """Raise ValueError for a cursor that must not be stored."""
    if not are_valid(cursor):
        raise ValueError(f"a cursor is printable ASCII of at most {MAX_CURSOR} characters")
    if cursor == LAST:
        raise ValueError(
            "_last would be another place at each start, and is never stored: 'feedapi cursors "
            "skip' goes to the end"
        )


async def reset(
    store: AdministrableStore,
    key: FeedKey,
    partitions: Collection[int] | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> FeedPositions:
    """Delete the positions of a feed and consumer, or of these partitions.

    Without any the consumer starts anew. With `dry_run` nothing is deleted.

    Returns what was deleted.

    Raises:
        OperationError: nothing is stored for any of `partitions`.
    """
    if not force:
        await check_unused(store, [key])
    stored = await store.load(key)
    chosen = stored.keys() if partitions is None else stored.keys() & set(partitions)
    if partitions is not None and not chosen:
        raise OperationError(
            f"{key}: nothing is stored for partition {', '.join(map(str, partitions))}"
        )
    if not dry_run:
        await store.delete(key, None if partitions is None else chosen)
    return FeedPositions(key, {id: stored[id] for id in sorted(chosen)})


async def move(
    store: AdministrableStore,
    old: str,
    new: str,
    *,
    name: str | None = None,
    selection: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
    partitions: Collection[int] | None = None,
    overwrite: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> list[FeedPositions]:
    """Move the positions of a feed's consumers to another URL, all of them or none.

    Their quarantined events in the same database are moved with them, and what is done ahead. With
    `dry_run` nothing is moved.

    Arguments:
        old: the former URL, or ``feed:NAME`` for a feed with a `feed_name`.
        new: the URL from now on, or ``feed:NAME``.
        name: only of this consumer.
        selection: only those of the first of these selections of events, which become those of the
            second one; as `FetchOptions.selection` returns them. The URLs may be the same then.
        partitions: only those of these partitions. They are saved under `new`, then deleted under
            `old`: in two steps, so that an interruption leaves them under both. Refused where
            events of them are in quarantine, or any are done ahead of the cursor.
        overwrite: delete what is stored under `new`.

    Returns the positions as saved.

    Raises:
        OperationError: nothing is stored under `old`, or something under `new`.
        ValueError: both URLs have the same positions.
        NegotiationError: no feed can be at one of them.
    """
    before, after = (
        (None, None)
        if selection is None
        else (FeedKey(new, filters=each).filters for each in selection)
    )
    if FeedKey(old).url == FeedKey(new).url and before == after:
        raise ValueError("OLD_URL and NEW_URL have the same cursors")
    stored = await store.feeds()
    # As it is given, or as messages show it: with a digest of its query.
    found = {old, FeedKey(old).url}
    keys = {
        key: FeedKey(new, key.name, key.filters if after is None else after)
        for key in stored
        if key.url in found and name in (None, key.name) and before in (None, key.filters)
    }
    if not keys:
        raise OperationError(
            f"the store holds no cursors of {FeedKey(old).url}: see 'feedapi cursors ls'"
        )
    return await _move(
        store, keys, stored, partitions, overwrite=overwrite, force=force, dry_run=dry_run
    )


async def rename(
    store: AdministrableStore,
    old: str,
    new: str,
    *,
    feed: str | None = None,
    partitions: Collection[int] | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> list[FeedPositions]:
    """Give the positions of the consumer `old` to the name `new`, all of them or none.

    With `dry_run` nothing is renamed.

    Arguments:
        feed: only of the feeds whose URL holds this text.
        partitions: only those of these partitions, as in `move`.

    Returns the positions as saved.

    Raises:
        OperationError: nothing is stored under `old`, or something under `new`.
        ValueError: `new` is empty, or the same name.
    """
    if not new or old == new:
        raise ValueError("NEW must be another name, and not empty")
    stored = await store.feeds()
    keys = {
        key: FeedKey(key.url, new, key.filters)
        for key in stored
        if key.name == old and (feed is None or feed in key.url)
    }
    if not keys:
        of = "" if feed is None else f" of {feed}"
        raise OperationError(
            f"the store holds no cursors{of} of a consumer {old}: see 'feedapi cursors ls'"
        )
    return await _move(
        store, keys, stored, partitions, overwrite=False, force=force, dry_run=dry_run
    )


async def _move(
    store: AdministrableStore,
    keys: Mapping[FeedKey, FeedKey],
    stored: list[FeedKey],
    partitions: Collection[int] | None,
    *,
    overwrite: bool,
    force: bool,
    dry_run: bool,
) -> list[FeedPositions]:
    if not force:
        await check_unused(store, [*keys, *keys.values()])
    chosen = {old: _some(await store.load(old), partitions) for old in keys}
    if partitions is not None:
        keys = {old: new for old, new in keys.items() if chosen[old]}
        if not keys:
            raise OperationError(
                f"nothing is stored there for partition {', '.join(map(str, partitions))}"
            )
    taken = [
        new
        for new in keys.values()
        if new in stored and (partitions is None or _some(await store.load(new), partitions))
    ]
    if taken and not overwrite:
        raise OperationError(
            f"{taken[0]}: there are cursors already, nothing was moved: --overwrite of 'cursors "
            "move' deletes them, and so does 'cursors reset'"
        )
    if partitions is not None:
        for old in keys:
            await _check_cursors_alone(store, old, chosen[old], claims=not dry_run)
    if dry_run:
        return [FeedPositions(new, chosen[old]) for old, new in keys.items()]
    if partitions is None:
        moved = await store.move(keys, overwrite=overwrite)  # checks again in its transaction
        return [FeedPositions(key, positions) for key, positions in moved.items()]
    found = []
    for old, new in keys.items():
        found.append(FeedPositions(new, await store.replace(new, chosen[old])))
        await store.delete(old, chosen[old].keys())
    return found


async def _check_cursors_alone(
    store: AdministrableStore, key: FeedKey, chosen: Collection[int], *, claims: bool
) -> None:
    """Check that cursors are all that there is of these partitions: else only all can be moved.

    Arguments:
        claims: look also at what is done ahead, which nobody can do without a claim.
    """
    quarantine = await _quarantine_of(store)
    for partition in chosen:
        if quarantine is not None and await quarantine.page(key, partition=partition, limit=1):
            raise _moved_as_a_whole(key, f"partition {partition} has quarantined events")
    if claims and isinstance(store, DoneStore):
        # Of ancestors, too: what is done there counts for their successors. Other partitions keep
        # their claims, which a consumer may have.
        for partition, position in (await store.load(key)).items():
            if partition not in chosen and position.status != "superseded":
                continue
            if (await store.take_over(key, [partition], position.revision)).done:
                raise _moved_as_a_whole(key, "events are done ahead of the cursor")


async def _quarantine_of(store: AdministrableStore) -> QuarantineStore | None:
    try:
        quarantine = quarantine_beside(store)
        await quarantine.prepare()
    except StoreError:
        return None  # of this kind of store, or no table: nothing is in it
    return quarantine


def _moved_as_a_whole(key: FeedKey, why: str) -> OperationError:
    return OperationError(
        f"{key}: {why}, nothing was moved: only a move of all partitions takes that along"
    )


def _some(
    positions: Mapping[int, Position], partitions: Collection[int] | None
) -> Mapping[int, Position]:
    if partitions is None:
        return positions
    return {id: positions[id] for id in sorted(positions.keys() & set(partitions))}
