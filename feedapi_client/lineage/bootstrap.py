"""The first start of a consumer: where each partition begins when nothing is stored (R7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from feedapi_client import model
from feedapi_client.arguments import check_partitions, check_plain
from feedapi_client.errors import LineageError, NoProgressError
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.selection import Selection
from feedapi_client.model import (
    FIRST,
    LAST,
    MAX_PARTITION,
    Partition,
    Position,
    Status,
    position_after,
)

StartAt = Literal["first", "last"] | Mapping[int, str]


def checked_start(start: StartAt) -> StartAt:
    """Return `start`, copied when it is a mapping. Raises TypeError or ValueError for all else."""
    if isinstance(start, Mapping):
        check_partitions("start", start, most=MAX_PARTITION, empty=True)
        for partition, cursor in start.items():
            check_plain(f"start: the cursor of partition {partition}", cursor, "str")
            if not cursor:
                raise ValueError(f"start: the cursor of partition {partition} is empty")
        return dict(start)
    wanted = "start must be 'first', 'last' or a mapping of partition to cursor, not "
    if not isinstance(start, str):
        raise TypeError(f"{wanted}a {type(start).__name__}")
    if start not in ("first", "last"):
        raise ValueError(f"{wanted}{start!r}")
    return start


def asks_for_end(partition: Partition, start: StartAt, *, selects_events: bool) -> bool:
    """Return whether the present end of a listed partition has to be asked for at a first start.

    Also of a closed one: whoever reads it later, after all, begins there.
    """
    if isinstance(start, Mapping):
        return start.get(partition.id) == LAST
    return start == "last" and (selects_events or partition.last_cursor is None)


def first_positions(
    graph: Graph, start: StartAt, ends: Mapping[int, str], selection: Selection, *, feed: str
) -> dict[int, Position]:
    """Return the position of every partition of the first discovery, narrowed to a selection.

    Left out are partitions that take over the cursor of an ancestor: one that `start` gives, or
    one that is stored although it is not selected.

    Raises:
        LineageError: `start` names a partition that is neither listed nor an ancestor of one.
        NoProgressError: the present end of a partition is not among `ends`, listed or asked for.
    """
    given = start if isinstance(start, Mapping) else {}
    step = model.draw_step()

    def at(cursor: str, status: Status = "open") -> Position:
        return position_after(None, cursor, status, step=step)

    def at_end(partition: int, status: Status = "open") -> Position:
        if partition not in ends:
            text = "its present end is not known, so that nothing can start there"
            raise NoProgressError(text, feed=feed, partition=partition)
        return at(ends[partition], status)

    first, passed_over = at(FIRST), at(FIRST, "superseded")
    for id in given:
        if id not in selection or not (id in graph or id in graph.successors):
            text = "start names this partition, which is not selected, or not listed at all"
            raise LineageError(text, feed=feed, partition=id)
    positions = {id: at_end(id) if cursor == LAST else at(cursor) for id, cursor in given.items()}
    holders = given.keys() | selection.others.keys()
    for listed in graph:
        if holders and not holders.isdisjoint(listed.cursor_from):
            continue
        for ancestor in listed.cursor_from:
            # The successors hold the whole history: to read an ancestor too would bring it twice.
            # One that is gone may be listed again by a discovery that lags (R9), or be read by a
            # consumer of the same name that started a moment earlier (R17).
            if ancestor in selection:
                positions.setdefault(ancestor, passed_over)
        if listed.id in graph.successors:
            positions.setdefault(listed.id, passed_over)
        elif start == "last":
            positions[listed.id] = at_end(listed.id, "drained" if listed.closed else "open")
        else:
            positions.setdefault(listed.id, first)
    return positions
