"""Positions that tests can name, although revisions are drawn."""

from __future__ import annotations

from collections.abc import Mapping

from feedapi_client.model import Position, Status


def counted(cursor: str, revision: int, status: Status = "open") -> Position:
    """Return a position whose revision is counted: the next one after the one before it."""
    return Position(cursor, status, revision, revision - 1 or None)


def stand(positions: Mapping[int, Position]) -> dict[int, tuple[str, Status]]:
    """Return cursors and statuses: where consumers stand, whatever the revisions are."""
    return {partition: (each.cursor, each.status) for partition, each in positions.items()}
