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
    """Return `start`, copied when it is a mapping.

    Raises TypeError or ValueError for an unknown word, an impossible partition, and a cursor that
    is no text.
    """
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
    """Return the position of every partition of the first discovery.

    Left out are partitions that take over the cursor of an ancestor: one that `start` gives, or
    one that is stored although it is not selected.

    Arguments:
        graph: the partitions that are listed and selected.
        start: as in `FeedConsumer`.
        ends: the present ends, listed or asked for.
        selection: the partitions that the consumer reads.
        feed: for messages.

    Raises:
        LineageError: `start` names a partition that is neither listed nor an ancestor of one, or
            gives ``_last`` for one that is not listed.
        NoProgressError: the present end of a partition is not among `ends`.
    """
    given = start if isinstance(start, Mapping) else {}
    _check_given(given, graph, ends, selection, feed)
    step = model.draw_step()
    first, passed_over = (
        position_after(None, FIRST, status, step=step) for status in ("open", "superseded")
    )

    def at_end(cursor: str, status: Status = "open") -> Position:
        return position_after(None, cursor, status, step=step)

    positions = {p: at_end(ends[p] if at == LAST else at) for p, at in given.items()}
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
        if listed.id in given:
            continue
        if listed.id in graph.successors:
            positions[listed.id] = passed_over
        elif start == "last":
            if listed.id not in ends:
                text = "its present end is not known, so that nothing can start there"
                raise NoProgressError(text, feed=feed, partition=listed.id)
            status: Status = "drained" if listed.closed else "open"
            positions[listed.id] = at_end(ends[listed.id], status)
        else:
            positions[listed.id] = first
    return positions


def _check_given(
    given: Mapping[int, str],
    graph: Graph,
    ends: Mapping[int, str],
    selection: Selection,
    feed: str,
) -> None:
    for partition, cursor in given.items():
        if partition not in selection:
            problem = "which is not selected"
        elif partition not in graph and partition not in graph.successors:
            problem = "but the feed lists neither it nor a successor of it"
        elif cursor == LAST and partition not in ends:
            problem = "at _last, and only of a listed partition the present end can be asked for"
        else:
            continue
        raise LineageError(f"start names this partition, {problem}", feed=feed, partition=partition)
