"""What the consumer has to tell its operator, and when (R9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from feedapi_client.model import FIRST, Position
from feedapi_client.testing.simulator.oracle import Oracle
from feedapi_client.testing.simulator.transport import SimulatedTransport
from feedapi_client.testing.simulator.world import World


class Reports:
    """The reports that one process owes.

    A successor of unknown ancestors begins at its first event. If anything was read before, that
    may bring it again: no such position may be saved without a report of that partition.

    Arguments:
        world: what the publisher has.
        transport: knows which partitions the process has seen.
        oracle: gets the violations.
        shown: returns the reports of the session that is open.
    """

    def __init__(
        self,
        world: World,
        transport: SimulatedTransport,
        oracle: Oracle,
        shown: Callable[[], Sequence[str]],
    ) -> None:
        self._world = world
        self._transport = transport
        self._oracle = oracle
        self._shown = shown
        self._owed: set[int] = set()

    def saving(self, positions: Mapping[int, Position], stored: Mapping[int, Position]) -> None:
        """Positions are about to be saved."""
        for id, position in positions.items():
            if stored and position == Position(FIRST) and self._is_unknown(id, stored):
                self._owed.add(id)
        if self._owed:
            self._pay()  # what is left is a report of a session that is being opened

    def check(self) -> None:
        """A session is open: every report that is owed must be shown."""
        if not self._owed:
            return
        self._pay()
        for id in sorted(self._owed):
            self._oracle.violated(
                "report", f"partition {id} begins at its first event, and no report says so"
            )
        self._owed.clear()

    def forget(self) -> None:
        """The session was left: its reports are gone."""
        self._owed.clear()

    def _pay(self) -> None:
        shown = self._shown()
        self._owed = {id for id in self._owed if not any(_is_about(id, line) for line in shown)}

    def _is_unknown(self, id: int, stored: Mapping[int, Position]) -> bool:
        ancestors = self._world.partitions[id].cursor_from
        if self._oracle.chosen is not None or not ancestors:
            return False
        return all(a not in stored and a not in self._transport.listed for a in ancestors)


def _is_about(id: int, report: str) -> bool:
    return f"partition {id}: begins at its first event" in report
