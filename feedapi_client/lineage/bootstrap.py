"""The first start of a consumer: where each partition begins when nothing is stored (R7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from feedapi_client.arguments import check_partitions, check_plain
from feedapi_client.errors import LineageError, NoProgressError
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.selection import Selection
from feedapi_client.model import FIRST, LAST, MAX_PARTITION, Partition, Position

StartAt = Literal["first", "last"] | Mapping[int, str]


def checked_start(start: StartAt) -> StartAt:
    """Return `start`, copied when it is a mapping.

    Raises TypeError or ValueError for an unknown word, an impossible partition, and a cursor that
    is no text.
    """
    if not isinstance(start, (str, Mapping)):
        raise TypeError(
            "start must be 'first', 'last' or a mapping of partition to cursor, "
            f"not a {type(start).__name__}"
        )
    if not isinstance(start, str):
        check_partitions("start", start, most=MAX_PARTITION, empty=True)
        for partition, cursor in start.items():
            check_plain(f"start: the cursor of partition {partition}", cursor, "str")
            if not cursor:
                raise ValueError(f"start: the cursor of partition {partition} is empty")
        return dict(start)
    if start not in ("first", "last"):
        raise ValueError(
            f"start must be 'first', 'last' or a mapping of partition to cursor, not {start!r}"
        )
    return start


def asks_for_end(partition: Partition, start: StartAt, *, selects_events: bool) -> bool:
    """Return whether the present end of a listed partition has to be asked for at a first start."""
    if isinstance(start, Mapping):
        return start.get(partition.id) == LAST
    if start != "last" or partition.closed:  # of a closed one nothing is read, wherever its end is
        return False
    return selects_events or partition.last_cursor is None


def first_positions(
    graph: Graph,
    start: StartAt,
    ends: Mapping[int, str],
    selection: Selection,
    *,
    selects_events: bool = False,
    feed: str,
) -> dict[int, Position]:
    """Return the position of every partition of the first discovery.

    Left out are partitions that take over the cursor of an ancestor: one that `start` gives, or
    one that is stored although it is not selected.

    Arguments:
        graph: the partitions that are listed and selected.
        start: as in `FeedConsumer`.
        ends: the present ends of the partitions that were asked for them.
        selection: the partitions that the consumer reads.
        selects_events: whether `Partition.last_cursor` means nothing, because events are selected.
        feed: for messages.

    Raises:
        LineageError: `start` names a partition that is neither listed nor an ancestor of one, or
            gives ``_last`` for one that is not listed.
        NoProgressError: the present end of an open partition is not among `ends`.
    """
    given = start if isinstance(start, Mapping) else {}
    _check_given(given, graph, selection, ends, feed)
    positions = {
        partition: Position(ends[partition] if cursor == LAST else cursor)
        for partition, cursor in given.items()
    }
    for listed in graph:
        inherits = any(a in given or a in selection.others for a in listed.cursor_from)
        if inherits:
            continue
        for ancestor in listed.cursor_from:
            # The successors hold the whole history: to read an ancestor too would bring it twice.
            # One that is gone may be listed again by a discovery that lags (R9), or be read by a
            # consumer of the same name that started a moment earlier (R17).
            if ancestor in selection:
                positions.setdefault(ancestor, Position(FIRST, "superseded"))
        if listed.id in given:
            continue
        if listed.id in graph.successors:
            positions[listed.id] = Position(FIRST, "superseded")
        elif start == "last":
            end = ends.get(listed.id) or (None if selects_events else listed.last_cursor)
            if end is None and not listed.closed:
                raise NoProgressError(
                    "its present end is not known, so that nothing can start there",
                    feed=feed,
                    partition=listed.id,
                )
            positions[listed.id] = Position(end or FIRST, "drained" if listed.closed else "open")
        else:
            positions[listed.id] = Position(FIRST)
    return positions


def _check_given(
    given: Mapping[int, str],
    graph: Graph,
    selection: Selection,
    ends: Mapping[int, str],
    feed: str,
) -> None:
    for partition in given:
        if partition not in selection:
            problem = "which is not selected"
        elif partition not in graph and partition not in graph.successors:
            problem = "but the feed lists neither it nor a successor of it"
        elif given[partition] == LAST and partition not in ends:
            problem = "at _last, and only of a listed partition the present end can be asked for"
        else:
            continue
        raise LineageError(f"start names this partition, {problem}", feed=feed, partition=partition)
