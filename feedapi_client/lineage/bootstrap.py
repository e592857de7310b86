"""The first start of a consumer: where each partition begins when nothing is stored (R7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.selection import Selection
from feedapi_client.model import FIRST, LAST, Position

StartAt = Literal["first", "last"] | Mapping[int, str]


def checked_start(start: StartAt) -> StartAt:
    """Return `start`, copied when it is a mapping. Raises ValueError for an unknown word."""
    if isinstance(start, Mapping):
        return dict(start)
    if start not in ("first", "last"):
        raise ValueError(
            f"start must be 'first', 'last' or a mapping of partition to cursor, not {start!r}"
        )
    return start


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
        LineageError: `start` names a partition that is neither listed nor an ancestor of one.
    """
    given = start if isinstance(start, Mapping) else {}
    _check_given(given, graph, selection, feed)
    positions = {partition: Position(cursor) for partition, cursor in given.items()}
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
            positions[listed.id] = Position(end or LAST, "drained" if listed.closed else "open")
        else:
            positions[listed.id] = Position(FIRST)
    return positions


def _check_given(given: Mapping[int, str], graph: Graph, selection: Selection, feed: str) -> None:
    for partition in given:
        if partition not in selection:
            problem = "which is not selected"
        elif partition not in graph and partition not in graph.successors:
            problem = "but the feed lists neither it nor a successor of it"
        else:
            continue
        raise LineageError(f"start names this partition, {problem}", feed=feed, partition=partition)
