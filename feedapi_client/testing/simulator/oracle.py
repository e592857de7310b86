"""What must hold in every history, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from feedapi_client.model import FeedKey, Position
from feedapi_client.status import ConsumerStatus, PartitionState, PartitionStatus
from feedapi_client.testing.simulator.store import Database, Effect
from feedapi_client.testing.simulator.trace import Trace
from feedapi_client.testing.simulator.transport import Fetched, SimulatedTransport
from feedapi_client.testing.simulator.world import World, is_selected

SAME_REQUESTS_A_SECOND = 25
"""How often a process may send the very same request within one second."""

LONGEST_LAG = 15.0
"""How many seconds old a discovery may be."""

STOP_SECONDS = 2.0
"""Within this time an iteration ends whose grace period is over: its last save may take a while."""

IDLE_REQUESTS = 8
"""How often a process may ask for each partition, and discover, while it is watched idle."""
_FAILING = (PartitionState.RETRYING, PartitionState.PARKED)


class ViolationError(AssertionError):
    """A history in which something happened that must not.

    Attributes:
        rule: the name of what was violated; the same for all histories with the same defect.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass(slots=True)
class Seen:
    """How far the last two pages that were read of a partition could see it."""

    end: int = 0
    before: int = 0


class Oracle:
    """Checks each effect, each status and the end of a run.

    Violations are kept rather than raised at once: an exception would become a failure of the
    consumer's store or handler. `check` raises the first one.

    Arguments:
        world: what was published.
        transactional: whether the application keeps cursors and effects in one transaction.
        selected: whether the consumer selects events.
        ordered: whether it keeps children behind their parents. Otherwise the events of an entity
            are in order only among those of one family of partitions.
        shared: whether several instances share the feed: what comes after what one of them did may
            be done by another one.
        trace: gets a line for each violation.
    """

    def __init__(
        self,
        world: World,
        *,
        transactional: bool,
        selected: bool = False,
        ordered: bool = True,
        shared: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.violations: list[ViolationError] = []
        self.applied: dict[Any, int] = {}
        """The highest number of an event of each entity whose effect is durable.

        With ``ordered=False`` of each entity in each family of partitions, counted from 1.
        """
        self.done = 0
        """Events whose effects are durable, each counted once."""
        self.effects = 0
        self._world = world
        self._transactional = transactional
        self._selected = selected
        self._ordered = ordered
        self._shared = shared
        self.chosen: set[int] | None = None
        """The partitions that the consumer reads; None for all."""
        self._trace = trace
        self.calm = False
        """Whether all faults have ended: what the application does must succeed from now on."""
        self._last: dict[tuple[int, Any], int] = {}
        self._floating: set[int] = set()
        self._seen: dict[int, Seen] = {}

    def violated(self, rule: str, text: str) -> None:
        """Record a violation."""
        self.violations.append(ViolationError(rule, text))
        if self._trace is not None:
            self._trace.add("violated: {}: {}", rule, text)

    def check(self) -> None:
        """Raise the first violation."""
        if self.violations:
            raise self.violations[0]

    # ------------------------------------------------------------------ effects

    def began(self, process: int = 0) -> None:
        """A new iteration of a process reads what was not committed again."""
        for key in [key for key in self._last if key[0] == process]:
            del self._last[key]

    def effect(self, effect: Effect) -> None:
        """An effect became durable: in order, and exactly once (at least once without one
        transaction of cursors and effects).
        """
        self.effects += 1
        if self.chosen is not None and effect.partition not in self.chosen:
            self.violated("partitions", f"partition {effect.partition} is not to be read")
        if effect.entity in self._floating:
            self._start_at(effect)
        lane, n = self._lane(effect)
        key = effect.process, lane
        done = self.applied.get(lane, 0)
        last = done if self._transactional else self._last.get(key)
        if self._shared and not self._transactional:
            last = None
        in_order = n <= done + 1 if last is None else n == last + 1
        if not in_order:
            known = "applied already" if n <= done else f"expected {effect.n - n + done + 1}"
            rule = "exactly-once" if n <= done else "order"
            self.violated(rule, f"event {effect.n} of entity {effect.entity}: {known}")
        self._last[key] = n
        if n > done:
            self.applied[lane] = n
            self.done += n - done

    def _lane(self, effect: Effect) -> tuple[Any, int]:
        """Return among which events an event has an order, and its number among them."""
        if self._ordered:
            return effect.entity, effect.n
        entity, family, n = self._world.lane(effect.entity, effect.n)
        return (entity, family), n

    def delivered(self, partition: int, positions: Mapping[int, Position]) -> None:
        """A batch came: the parent of its partition must be drained before (R4, R8)."""
        parent = self._world.partitions[partition].starts_after
        if parent is None or not self._ordered:
            return
        if self.chosen is not None and parent not in self.chosen:
            return
        position = positions.get(parent)
        if position is not None and position.status != "open":
            return
        self.violated(
            "parent-first", f"partition {partition} is delivered before {parent} is drained"
        )

    # ------------------------------------------------------------------ requests

    def fetched(self, fetched: Fetched) -> None:
        """A page was read to its end."""
        seen, end = self._seen.get(fetched.partition), fetched.end
        if seen is None:
            self._seen[fetched.partition] = Seen(end, min(0, end))
        else:
            seen.before, seen.end = min(seen.end, end), end

    def traffic(self, transport: SimulatedTransport) -> None:
        """Check the requests of one process that ended: their rate, and that none is left open."""
        if transport.open:
            self.violated("leak", f"{transport.open} responses were never closed")
        self.rate(transport)

    def rate(self, transport: SimulatedTransport) -> None:
        """Check how often the same request was sent."""
        times, request = transport.busiest
        if times > SAME_REQUESTS_A_SECOND:
            self.violated("busy", f"{times} times within a second: {request}")

    def ends(self, ends_by: float, now: float) -> None:
        """Check that an iteration has ended that was stopped with a grace period."""
        if now > ends_by + STOP_SECONDS:
            self.violated("stop", f"it should have ended at {ends_by:.3f} s")

    def idled(self, requests: int) -> None:
        """Check the requests of a consumer at the end of a feed in which nothing happens."""
        allowed = IDLE_REQUESTS * (1 + len(self._world.partitions))
        if requests > allowed:
            self.violated("idle", f"{requests} requests within seconds, and nothing to read")

    # ------------------------------------------------------------------ status

    def status(
        self,
        status: ConsumerStatus,
        positions: Mapping[int, Position],
        limit: int,
        *,
        alone: bool = True,
    ) -> None:
        """Check that a status claims nothing that is not so.

        `alone`: no other process of the same name has run beside this one.
        """
        self.buffered(status.buffered_bytes, limit)
        for id, found in status.partitions.items():
            stored = positions.get(id)
            self._check_error(found)
            if stored is not None and stored.cursor == "_last":
                continue  # closed from the outset, by a publisher that does not say where it ends
            if not self._selected:
                self._check_state(found, stored, alone=alone)
            if alone:
                self._check_cursor(found, stored)

    def buffered(self, used: int, limit: int) -> None:
        """Check how many bytes are buffered."""
        if used > limit:
            self.violated("buffer", f"{used} bytes are buffered of {limit}")

    def _check_error(self, found: PartitionStatus) -> None:
        if found.state in _FAILING and not found.error:
            self.violated(
                "status", f"partition {found.partition} is {found.state}: no error says why"
            )

    def _check_state(self, found: PartitionStatus, stored: Position | None, *, alone: bool) -> None:
        id = found.partition
        if found.state is PartitionState.DRAINED:
            self._check_drained(id, stored)
        elif found.state is PartitionState.SUPERSEDED:
            if stored is None or stored.status != "superseded":
                self.violated("status", f"partition {id} is shown superseded: {stored}")
        elif found.caught_up and id in self._seen and alone:
            self._check_caught_up(id, stored)

    def _check_cursor(self, found: PartitionStatus, stored: Position | None) -> None:
        """The cursor of a status is a committed one."""
        id, partition = found.partition, self._world.partitions[found.partition]
        if found.cursor is None:
            return
        shown = partition.sequence_of(found.cursor)
        if stored is None or stored.cursor == found.cursor:
            saved = None if stored is None else shown
        else:
            saved = partition.sequence_of(stored.cursor)
        if saved is None or (shown or 0) > saved:
            self.violated("status", f"partition {id} is shown at {found.cursor}, stored: {stored}")

    def _check_drained(self, id: int, stored: Position | None) -> None:
        partition = self._world.partitions[id]
        end = partition.cursor(partition.closed_sequence)
        if stored is None or partition.closed == float("inf") or stored.cursor != end:
            self.violated("status", f"partition {id} is shown drained, and stored as {stored}")

    def _check_caught_up(self, id: int, stored: Position | None) -> None:
        partition = self._world.partitions[id]
        sequence = None if stored is None else partition.sequence_of(stored.cursor)
        # The consumer may still be at work on the last page: it is done with the one before.
        known = self._seen[id].before
        if known <= (sequence or 0):
            return
        unread = [e for e in partition.events if (sequence or 0) < e.sequence <= known]
        if unread:
            self.violated(
                "status",
                f"partition {id} is shown caught up, and {len(unread)} events are not committed",
            )

    def is_ambiguous(self, positions: Mapping[int, Position]) -> bool:
        """Return whether some partition was merged of ancestors that stand at different cursors.

        Of an ancestor and its own successor only one may be open: the save of the successor has to
        supersede the ancestor.
        """
        partitions = self._world.partitions
        for partition in partitions.values():
            stored = [id for id in partition.cursor_from if id in positions]
            replaced = {ancestor for id in stored for ancestor in partitions[id].cursor_from}
            live = (positions[id] for id in stored if id not in replaced)
            if len({position.cursor for position in live if position.status == "open"}) > 1:
                return True
        return False

    # ------------------------------------------------------------------ the end

    def complete(self) -> bool:
        """Return whether every event was applied.

        Of the chosen partitions, where not all are read. One that was split by cursor transfer is
        not listed any more: its events are those of its successors.
        """
        if self.chosen is None:
            return self.done == self._world.total(selected=self._selected)
        chosen = (self._world.partitions[id] for id in self.chosen)
        return all(
            self.applied.get(event.entity, 0) >= event.n
            for partition in chosen
            if partition.retired == float("inf")
            for event in partition.events
            if not self._selected or is_selected(event.entity)
        )

    def is_gone(self, partitions: Collection[int], known: Collection[int]) -> bool:
        """Return whether no discovery will list one of the partitions, which is not `known`."""
        missing = [self._world.partitions[id] for id in partitions if id not in known]
        return any(p.retired < float("inf") for p in missing)

    def is_unlisted(self, partitions: Collection[int], known: Collection[int], now: float) -> bool:
        """Return whether a discovery may lack one of the partitions, which is not `known` either.

        It was split before the consumer saw it, or a replica that lags doesn't list it yet.
        """
        missing = [self._world.partitions[id] for id in partitions if id not in known]
        return any(p.retired <= now or now - p.created < LONGEST_LAG for p in missing)

    def started_at_the_end(self) -> None:
        """The consumer begins behind everything that was published so far."""
        for entity, count in self._world.published.items():
            if self._selected and not is_selected(entity):
                continue
            self.done += count - self.applied.get(entity, 0)
            self.applied[entity] = count
            self._floating.add(entity)

    def _start_at(self, effect: Effect) -> None:
        """The first effect of an entity shows where the end was when the consumer asked for it.

        That was before it saved its positions: what was published meanwhile is to be delivered.
        """
        self._floating.discard(effect.entity)
        assumed = self.applied[effect.entity]
        if effect.n <= assumed:
            self.done -= assumed - (effect.n - 1)
            self.applied[effect.entity] = effect.n - 1

    def finished(self, database: Database, key: FeedKey, stray: list[str]) -> None:
        """Check a finished run."""
        for request in stray:
            self.violated("cursor", f"a cursor of other partitions was sent: {request}")
        for id, position in database.positions.get(key, {}).items():
            partition = self._world.partitions[id]
            if position.status == "drained" and partition.closed == float("inf"):
                self.violated("drained", f"open partition {id} is stored as drained")
        self.progressed()

    def progressed(self) -> None:
        """Check that every event was applied by now."""
        if not self.complete():
            total = self._world.total(selected=self._selected)
            left = total - self.done
            self.violated("progress", f"{left} of {total} events were never applied")
