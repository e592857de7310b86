"""One instance: the planner, the partitions and the planning of the product, and its leases.

What is done with the planner's actions, and the partitions at run time, are the product's
own code. The coordinator is modelled: it takes one step at a time, so that the others' steps come
between any two of its reads and writes.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Save
from feedapi_client.model import Position
from feedapi_client.notifications import Listeners
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from tests.exploration.feeds import Event

Positions = dict[int, Position]
Leases = dict[int, tuple[int | None, int]]
"""The owner and the epoch of each."""
_LIMITS, _RETRY = Limits(), RetryPolicy()


class BrokenInvariantError(AssertionError):
    """Something happened that must not."""


class _Nothing:
    """Stands for the parts of a session that only wait, log or count."""

    max_concurrent_fetches = 1
    on_error = "raise"
    limits = _LIMITS
    retry = _RETRY

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ignore

    def _ignore(self, *args: Any, **options: Any) -> None:
        return None

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


class InFlight(NamedTuple):
    """A batch of one event, or of none."""

    event: Event | None
    cursor: str


class ModelPlanning(Planning):
    """`Planning` without an event loop. Its store answers at once."""

    def __init__(self, planner: Planner, *, shared: bool) -> None:
        nothing: Any = NOTHING
        self.planner = planner
        self.positions = self.timer = self.agenda = self._budget = nothing
        self.iteration: Any = ModelIteration()
        self.partitions: dict[int, RuntimePartition] = {}
        self.sharing = nothing if shared else None
        self.losses = 0
        self.overlaps = self.watches = False
        self._paused: Any = ()
        self._ready: deque[RuntimePartition] = deque()
        self._drained: list[int] = []
        self._todo: deque[Action] = deque()
        self._busy = False
        self._save_wanted = nothing

    def advance(self, p: RuntimePartition) -> None:
        pass

    def carry_out_all(self, actions: list[Action]) -> None:
        """Do what `perform` and `carry_out` do."""
        self.perform(actions)
        while self._todo:
            action = self._todo[0]
            if isinstance(action, Save):
                _run(self._save(action))
            self._do_some()
        self.take_drained()  # evidence that is looked at later
        if self.iteration.failure is not None:
            raise BrokenInvariantError(f"the consumer ends: {self.iteration.failure}")


class ModelIteration:
    """`Iteration` without an event loop. A defect that is reported is raised."""

    feed = "model"
    limits = _LIMITS
    iterating = False
    failure = None
    listeners = Listeners()
    settings = decisions = NOTHING

    def report(self, partition: int | None, text: str) -> None:
        if text.startswith("internal error"):
            raise BrokenInvariantError(f"partition {partition} {text}")

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error

    def wake(self) -> None:
        pass

    def clock(self) -> float:
        return 0.0


def _run(coroutine: Any) -> None:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class View(NamedTuple):
    """What one look at the leases has read, before anything is done with it."""

    leases: Leases
    positions: Positions
    began: int

    def key(self, place: dict[int | None, int | None], now: Leases) -> Any:
        """Return what its behaviour depends on."""
        leases = frozenset(
            (p, place[owner], epoch - now[p][1]) for p, (owner, epoch) in self.leases.items()
        )
        return leases, _items(self.positions)


class Instance:
    """One process.

    Attributes:
        number: its place, 0 or 1.
        version: of the topology that it knows; -1 before the first discovery.
        wanted: whether something has asked for a discovery.
        owned: the epochs of the leases that it believes to hold.
        leaving: those of them that it gives away once no batch is in flight.
        view: of a look that was begun.
        claimed: leases whose positions have to be loaded.
        loaded: those positions, if they are loaded.
        loaded_after: the moment at which `loaded` was loaded.
        at_claim: the revisions that were stored when the leases were claimed.
        in_flight: what the application has.
        owed: how many events were published when it began: all are to be read before it may end.
    """

    def __init__(self, number: int, planner: Planner, *, shared: bool, owed: int) -> None:
        self.number = number
        self.planning = ModelPlanning(planner, shared=shared)
        self.planner = planner
        self.shared = shared
        self.version = -1
        self.wanted = False
        self.owned: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.view: View | None = None
        self.claimed: dict[int, int] | None = None
        self.loaded: Positions | None = None
        self.at_claim: dict[int, int] = {}
        self.loaded_after = 0
        self.in_flight: dict[int, InFlight] = {}
        self.owed = owed

    def readable(self) -> list[int]:
        """Return the partitions that may be fetched now."""
        return [
            id
            for id, partition in self.planning.partitions.items()
            if partition.started and not partition.in_flight and not partition.trouble.refused
        ]

    def deliver(self, partition: RuntimePartition, event: Event | None, cursor: str) -> None:
        """Buffer a page of one event and hand it to the application."""
        partition.received(CheckpointedEvents([], cursor, 1))
        partition.announced = bool(partition.pending)
        partition.take(1)
        self.planner.progressed(partition.id)
        self.planner.delivered(partition.id)
        self.in_flight[partition.id] = InFlight(event, cursor)

    def lose(self, partitions: set[int]) -> None:
        """Do what the coordinator does with lost leases."""
        self.planning.carry_out_all(self.planner.revoke(partitions))
        for id in partitions:
            if id in self.planning.partitions:
                self.planning.partitions[id].lose()
            self.owned.pop(id, None)
            self.leaving.discard(id)

    def key(self, place: dict[int | None, int | None], leases: Leases) -> tuple[Any, ...]:
        """Return all that its behaviour depends on, with other numbers for the instances."""
        planner = self.planner
        return (
            self.version,
            self.wanted,
            _since(self.owned, leases),
            frozenset(self.leaving),
            self.view and self.view.key(place, leases),
            self.claimed and _since(self.claimed, leases),
            self.loaded and _items(self.loaded),
            _items(self.at_claim),
            _items(self.in_flight),
            self.owed,
            tuple(
                (
                    *(e.id, e.state, e.position, e.waits_for, e.end),
                    *(e.gone, e.caught_up, e.stored, e.reopened, e.finished),
                    e.loaded_at < planner._listed,
                )
                for e in planner.entries.values()
            ),
            frozenset(planner._known),
            frozenset(planner._listed_again),
            frozenset(planner._in_flight),
            frozenset(planner._parents.items()),
            frozenset((a, frozenset(s)) for a, s in planner._successors.items() if s),
            frozenset(planner._owned),
            None if planner._others is None else frozenset(planner._others),
            frozenset(planner._unsure),
            self.view and self._known_since(self.view.began),
            self.loaded is not None and self._known_since(self.loaded_after),
            frozenset((p, frozenset(w)) for p, w in planner._waiters.items() if w),
            tuple(_partition_key(p) for _, p in sorted(self.planning.partitions.items())),
        )

    def _known_since(self, began: int) -> Any:
        """Return what has become known since a load that is not taken yet."""
        planner, entries = self.planner, self.planner.entries.values()
        return (
            planner._loaded > began,
            frozenset(p for p, moment in planner._unsure.items() if moment > began),
            frozenset(e.id for e in entries if e.saved_at > began),
        )


def _since(epochs: dict[int, int], leases: Leases) -> frozenset[Any]:
    return frozenset((p, epoch - leases[p][1]) for p, epoch in epochs.items())


def _items(mapping: dict[Any, Any]) -> frozenset[Any]:
    return frozenset(mapping.items())


def _partition_key(p: RuntimePartition) -> tuple[Any, ...]:
    return (
        p.id,
        p.started,
        p.read_cursor,
        p.delivered_cursor,
        p.in_flight,
        p.batches == p._lost,
        p.batches == p.committed,
        p._base,
        p.trouble.refused,
    )
