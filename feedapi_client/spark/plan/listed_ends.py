"""`ListedEnds`: what discovery says of the ends of open partitions. No I/O; imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.lineage.planner import Planner, State
from feedapi_client.model import FeedInfo


class ListedEnds:
    """`lastCursor` of open partitions in the last discovery.

    They are ends only of a read without a selection of events.
    """

    def __init__(self) -> None:
        self._ends: dict[int, str] = {}

    def moved(self, info: FeedInfo, lineage: Planner) -> Iterator[int]:
        """Yield the caught up partitions whose listed end moved on to another cursor."""
        before, self._ends = self._ends, {}
        for listed in info.partitions.values():
            if listed.closed or listed.last_cursor is None:
                continue
            self._ends[listed.id] = listed.last_cursor
            entry = lineage.entries.get(listed.id)
            if entry is None or entry.state is not State.CAUGHT_UP:
                continue
            if listed.last_cursor not in (entry.cursor, before.get(listed.id)):
                yield listed.id
