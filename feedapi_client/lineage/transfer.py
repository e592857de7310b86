"""Cursor transfer: which cursor the successors of a split or a merge start with (R9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from feedapi_client.errors import AmbiguousLineageError, LostPartitionError
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.partition_names import names
from feedapi_client.lineage.selection import Selection
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, Partition, Position
from feedapi_client.protocol.cursors import shown

_SHOWN = 8


def unreleased_ancestors(
    successors: Iterable[Partition], entries: Mapping[int, Entry], in_flight: set[int]
) -> set[int]:
    """Return the ancestors whose cursors can't be transferred yet.

    These are ancestors with a batch in flight, whose cursor may still move, and every live ancestor
    that shares a successor with one of them: all of a merge are transferred in the same save.
    """
    blocked = {a for s in successors for a in s.cursor_from if a in in_flight}
    found = blocked
    while found:
        waiting = [s for s in successors if not found.isdisjoint(s.cursor_from)]
        related = {a for s in waiting for a in s.cursor_from if a in entries and entries[a].live}
        found = related - blocked
        blocked |= found
    return blocked


def disputed_ancestors(
    successors: Iterable[Partition], entries: Mapping[int, Entry]
) -> dict[int, int]:
    """Return the live ancestors of successors that are ambiguous, and the successor of each.

    No other successor may take their cursors. A superseded ancestor is not looked at any more: the
    next start would find the other one alone, and skip what this one has unread.
    """
    disputed: dict[int, int] = {}
    for successor in successors:
        live = _live_ancestors(successor, entries)
        if len({entry.cursor for entry in live}) > 1:
            disputed.update((entry.id, successor.id) for entry in live)
    return disputed


def _live_ancestors(successor: Partition, entries: Mapping[int, Entry]) -> list[Entry]:
    return [entries[a] for a in successor.cursor_from if a in entries and entries[a].live]


def transferred_positions(
    successor: Partition,
    entries: Mapping[int, Entry],
    graph: Graph,
    selection: Selection,
    disputed: Mapping[int, int],
    *,
    feed: str,
) -> dict[int, Position]:
    """Return what has to be saved for the successor and its ancestors, in one save.

    That includes every ancestor named before the one whose cursor is taken, known or not: it was
    split before the consumer saw it, and a discovery that lags must not start it.

    When no ancestor has a position, the successor starts at its first event.

    Raises:
        AmbiguousLineageError: several live ancestors stand at different cursors, or one of them is
            `disputed`.
        LostPartitionError: no ancestor has a position, or only a superseded one, while a stored
            partition disappeared.
        LineageError: an ancestor that is not selected still holds its cursor.
    """
    selection.check_ancestors(successor, feed=feed)
    live = _live_ancestors(successor, entries)
    if len({entry.cursor for entry in live}) > 1:
        stand = ", ".join(f"{entry.id} at {shown(entry.cursor)}" for entry in live[:_SHOWN])
        raise AmbiguousLineageError(
            "may take its cursor from several ancestors that stand at different ones: "
            f"{stand}. Set its cursor by hand",
            feed=feed,
            partition=successor.id,
        )
    other = next((disputed[entry.id] for entry in live if entry.id in disputed), None)
    if other is not None:
        raise AmbiguousLineageError(
            f"may take the same cursor as partition {other}, which may take it from several "
            f"ancestors that stand at different ones. Set the cursor of partition {other} by hand",
            feed=feed,
            partition=successor.id,
        )
    if live:
        begins = _begins(successor, live[0].cursor, entries)
        superseded = {e.id: e.position.advance(status="superseded") for e in live if e.position}
        before = _skipped_before(successor, live[0].id, live[0].cursor, entries, selection)
        return {successor.id: begins, **superseded, **before}
    # A successor that is listed late finds its ancestors superseded by others. Their cursors are as
    # valid here.
    for ancestor in successor.cursor_from:
        entry = entries.get(ancestor)
        position = entry.position if entry else selection.others.get(ancestor)
        if position is not None:
            # Unless those others are gone, and with them how far they were read: a publisher that
            # was rolled back and has split again, under other numbers (R11).
            _check_nothing_lost(
                successor,
                f"only finds the cursor that {ancestor} had",
                entries,
                graph,
                selection,
                feed,
            )
            before = _skipped_before(successor, ancestor, position.cursor, entries, selection)
            return {successor.id: Position(position.cursor), **before}
    _check_nothing_lost(
        successor, "has no ancestor with a position", entries, graph, selection, feed
    )
    return _from_the_start(successor, selection)


def _begins(successor: Partition, cursor: str, entries: Mapping[int, Entry]) -> Position:
    """Return the position of a successor; of one whose cursor was moved back, the next one."""
    entry = entries.get(successor.id)
    if entry is None or entry.position is None:
        return Position(cursor)
    return entry.position.advance(cursor, "open")


def _from_the_start(successor: Partition, selection: Selection) -> dict[int, Position]:
    """Return the positions of a successor whose ancestors have none.

    The ancestors are superseded although nothing of them is committed: the application, or another
    consumer of this name (R17), may hold a batch of one of them, and could still commit it.
    """
    superseded = {a: Position(FIRST, "superseded") for a in successor.cursor_from if a in selection}
    return {successor.id: Position(FIRST), **superseded}


def _skipped_before(
    successor: Partition,
    ancestor: int,
    cursor: str,
    entries: Mapping[int, Entry],
    selection: Selection,
) -> dict[int, Position]:
    """Return superseded positions for the ancestors without one that are named before `ancestor`.

    Those that are not selected stay as they are: nothing of theirs is ever saved or started.
    """
    before = successor.cursor_from[: successor.cursor_from.index(ancestor)]
    return {
        skipped: Position(cursor, "superseded")
        for skipped in before
        if skipped in selection and (skipped not in entries or entries[skipped].position is None)
    }


def _check_nothing_lost(
    successor: Partition,
    what: str,
    entries: Mapping[int, Entry],
    graph: Graph,
    selection: Selection,
    feed: str,
) -> None:
    lost = [
        entry.id
        for entry in entries.values()
        if entry.state is State.VANISHED
        and entry.id not in graph  # else it is listed again, and read on
        and entry.position is not None
        and entry.id not in graph.successors
        and not selection.successors_left_out(entry.id)
    ]
    lost += selection.lost
    if lost:
        raise LostPartitionError(
            f"{what}, while {names(lost)} had one and vanished without a successor: its "
            "history may hold what was read before. Set its cursor by hand",
            feed=feed,
            partition=successor.id,
        )
