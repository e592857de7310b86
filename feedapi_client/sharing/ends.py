"""What was read to its end, without `follow`: which marks an instance believes, which it makes.

An instance is to end once all that was published before it started is read, by whichever instance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from feedapi_client.lineage.states import State
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.stores.leases import Lease, View


class Ends:
    def __init__(self, planning: Planning) -> None:
        self._planning, self._iteration = planning, planning.iteration
        self._members: set[str] = set()
        """Every instance that was ever seen."""
        self._last_joined = 0.0
        """When the last one was seen for the first time, on the clock of the event loop."""
        self._old: dict[int, Lease] | None = None
        """Those that were marked before this instance took part."""
        self._asked: dict[int, tuple[str, float]] = {}
        """The ends that are asked for again: their cursors, and since when."""

    def saw(self, view: View) -> None:
        names = {instance.name for instance in view.instances}
        if not names <= self._members:
            self._members |= names
            self._last_joined = self._iteration.clock()
        if self._old is None:
            self._old = {p: lease for p, lease in view.leases.items() if lease.ended}

    def of(self, leases: Mapping[int, Lease]) -> set[int]:
        """Return the partitions that were read to their end; none with `follow`.

        An old mark does not count, nor that of a closed partition, which has to be drained, nor
        that of one that is not listed any more: its cursor may have to be transferred.
        """
        planner = self._planning.planner
        if self._iteration.settings.follow:
            return set()
        new = [p for p, lease in leases.items() if lease.ended and not self._is_old(p, lease)]
        return {p for p in new if p in planner.graph and not planner.is_closed(p)}

    def _is_old(self, partition: int, lease: Lease) -> bool:
        """Whether it is the mark that was there before this instance took part.

        Its epoch alone does not say so: leases that went back count the same one again, for another
        owner. Whoever released it left the mark as it was.
        """
        old = (self._old or {}).get(partition)
        return old is not None and old.epoch == lease.epoch and lease.owner in (None, old.owner)

    def to_mark(self, owned: Collection[int], leases: Mapping[int, Lease]) -> list[int]:
        """Return the owned partitions that are at their end, or parked, and not marked.

        One whose last answer is older than the last instance that joined is asked again first. Its
        end was seen: requests that fail for `Limits.settle_time` do not undo that (R6).
        """
        if self._iteration.settings.follow:
            return []
        return [p for p in owned if not leases[p].ended and self._is_over(p)]

    def _is_over(self, partition: int) -> bool:
        planning = self._planning
        if planning.planner.entries[partition].state is State.PARKED:
            return True
        found = planning.partitions.get(partition)
        if found is None:
            return False
        if found.entry.state is State.READING and self._keeps_failing(found):
            planning.leave_at_end(found)
        elif _is_at_end(found):
            self._asked.pop(partition, None)
            if found.requested_at <= self._last_joined:
                self._asked[partition] = found.read_cursor, self._iteration.clock()
                planning.planner.progressed(partition)
                planning.ask(found)
        return _is_at_end(found)

    def _keeps_failing(self, found: RuntimePartition) -> bool:
        """Whether an end is asked for again, and nothing but failures came for a while."""
        cursor, since = self._asked.get(found.id, (None, 0.0))
        planning = self._planning
        fails = (
            found.trouble.error is not None and found.read_cursor == found.entry.cursor == cursor
        )
        if not fails or found.turn is not None or planning.planner.is_closed(found.id):
            return False
        return self._iteration.clock() >= since + self._iteration.limits.settle_time


def _is_at_end(found: RuntimePartition) -> bool:
    return found.entry.state is State.CAUGHT_UP and found.is_caught_up
