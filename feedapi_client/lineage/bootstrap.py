"""The first start of a consumer: where each partition begins when nothing is stored (R7)."""

from __future__ import annotations

from collections.abc import Mapping

from feedapi_client.errors import LineageError, NoProgressError
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.selection import Selection
from feedapi_client.model import FIRST, LAST, Partition, StartAt, Status

Begin = tuple[str, Status]


def asks_for_end(partition: Partition, start: StartAt, *, selects_events: bool) -> bool:
    """Return whether the present end of a listed partition has to be asked for at a first start,
    also of a closed one: whoever reads it later, after all, begins there.
    """
    if isinstance(start, Mapping):
        return start.get(partition.id) == LAST
    return start == "last" and (selects_events or partition.last_cursor is None)


def first_positions(
    graph: Graph, start: StartAt, ends: Mapping[int, str], selection: Selection, *, feed: str
) -> dict[int, Begin]:
    """Return where each begins, but for those that take the cursor of an ancestor: one of `start`,
    or one that is stored and not selected. Raises `LineageError` (`start` names what is not listed)
    and `NoProgressError` (an end that is not among `ends`).
    """
    given = start if isinstance(start, Mapping) else {}

    def at_end(partition: int, status: Status = "open") -> Begin:
        if partition not in ends:
            text = "its present end is not known, so that nothing can start there"
            raise NoProgressError(text, feed=feed, partition=partition)
        return ends[partition], status

    for id in given:
        if id not in selection or not (id in graph or id in graph.successors):
            text = "start names this partition, which is not selected, or not listed at all"
            raise LineageError(text, feed=feed, partition=id)
    begin: dict[int, Begin] = {
        id: at_end(id) if cursor == LAST else (cursor, "open") for id, cursor in given.items()
    }
    holders = given.keys() | selection.others.keys()
    for listed in graph:
        if holders and not holders.isdisjoint(listed.cursor_from):
            continue
        # The successors hold the whole history: to read an ancestor too would bring it twice. One
        # that is gone may be listed again by a discovery that lags (R9), or be read by a consumer
        # of the same name that started a moment earlier (R17).
        for ancestor in filter(selection.__contains__, listed.cursor_from):
            begin.setdefault(ancestor, (FIRST, "superseded"))
        if listed.id in graph.successors:
            begin.setdefault(listed.id, (FIRST, "superseded"))
        elif start == "last":
            begin[listed.id] = at_end(listed.id, "drained" if listed.closed else "open")
        else:
            begin.setdefault(listed.id, (FIRST, "open"))
    return begin
