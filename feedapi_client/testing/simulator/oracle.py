"""What must hold in every history: of the events, of what took effect, and of the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, cast

from feedapi_client import Batch, CursorStore, FeedKey, FencedError, Position

Delivery = Literal["exactly-once", "at-least-once"]
Found = Iterable[tuple[int, int]] | Mapping[int, int]
"""Events that took effect, as pairs of entity and number in their order; or the count of those of
each entity."""
Positions = Mapping[int, Position]


class Trace:
    """Lines of text with their virtual time. Two runs of one seed write the same lines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.lines: list[str] = []

    def add(self, text: str, *values: object) -> None:
        """Record `text.format(*values)` at the present time."""
        self.lines.append(f"{self.now():10.4f}  {text.format(*values)}")


class ViolationError(AssertionError):
    """A history in which something happened that must not.

    Attributes:
        rule: the name of what was violated; the same for all histories with the same defect.
        trace: everything that happened up to then.
    """

    def __init__(self, rule: str, text: str, trace: Trace) -> None:
        super().__init__(text)
        self.rule = rule
        self.trace = trace.lines.copy()


class Call:
    """One call of the handler: what the library delivered, and which events that is."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.events = [(found["entity"], found["n"]) for found in (e.json() for e in batch.events)]
        self.handled = False


class Oracle:
    """Checks what the handler is done with, and what took effect.

    Violations are kept rather than raised at once: an exception would become a failure of the
    consumer's store or handler. `check` raises the first one.

    Arguments:
        published: how many events each entity has.
        delivery: whether an event may take effect again after a restart.
        trace: gets a line for each violation.

    Attributes:
        calls: the last call of the handler for each partition, over all lives of the process.
    """

    def __init__(self, published: Mapping[int, int], delivery: Delivery, trace: Trace) -> None:
        self.violations: list[ViolationError] = []
        self.calls: dict[int, Call] = {}
        self._published = published
        self._delivery = delivery
        self._trace = trace
        self._done: dict[int, int] = {}
        """How many events of each entity the handler is done with."""
        self._last: dict[int, int] = {}
        """The last event of each entity that the present process was done with."""

    def violated(self, rule: str, text: str, error: BaseException | None = None) -> None:
        """Record a violation, with the error that a process ended with, where that is it."""
        self._trace.add("violated: {}: {}", rule, text)
        failure = ViolationError(rule, f"{rule}: {text}", self._trace)
        failure.__cause__ = error
        self.violations.append(failure)

    def check(self) -> None:
        """Raise the first violation."""
        if self.violations:
            raise self.violations[0]

    # ------------------------------------------------------------------ what is handled

    def began(self) -> None:
        """A process starts: it is given again what was not committed."""
        self._last.clear()

    def delivered(self, partition: int, parent: int | None, stored: Positions) -> None:
        """A batch came: the parent of its partition must be drained before."""
        if parent is not None and (parent not in stored or stored[parent].status == "open"):
            self.violated(
                "parent-first", f"partition {partition} is delivered before {parent} is drained"
            )

    def handled(self, call: Call) -> None:
        """The handler is done with events: it returned, or it committed them."""
        if not call.handled:
            call.handled = True
            for entity, n in call.events:
                self._handle(entity, n)

    def saved(self, partition: int, position: Position) -> None:
        """A position is durable, and with it the batch that it belongs to."""
        self._trace.add("saved {}: {}", partition, position)
        call = self.calls.get(partition)
        if call is not None and call.batch.cursor == position.cursor:
            self.handled(call)

    def _handle(self, entity: int, n: int) -> None:
        """An event is handled: in order, and in each process once."""
        done, last = self._done.get(entity, 0), self._last.get(entity)
        if not (n <= done + 1 if last is None else n == last + 1):
            known = "handled already" if n <= done else f"expected {done + 1}"
            rule = "exactly-once" if n <= done else "order"
            self.violated(rule, f"event {n} of entity {entity}: {known}")
        self._last[entity] = n
        self._done[entity] = max(done, n)

    def left(self) -> int:
        """Return how many events the handler is not done with."""
        return sum(self._published.values()) - sum(self._done.values())

    # ------------------------------------------------------------------ what took effect

    def effects(self, found: Found) -> None:
        """Check what took effect so far: in order, as often as allowed, nothing left out."""
        numbers = _numbers_by_entity(found)
        for entity, of_entity in numbers.items():
            self._check_entity(entity, of_entity)
        for entity, handled in self._done.items():
            reached = max(numbers.get(entity, ()), default=0)
            if reached < handled:
                self.violated(
                    "lost",
                    f"event {reached + 1} of entity {entity} took no effect, although the handler "
                    "returned from it or its cursor is stored",
                )

    def _check_entity(self, entity: int, numbers: list[int]) -> None:
        published, done = self._published.get(entity, 0), 0
        for n in numbers:
            if n > published:
                how = "more often than it has events" if done >= published else f"as event {n}"
                self.violated("exactly-once", f"entity {entity} took effect {how}")
                return
            if n <= done and self._delivery == "exactly-once":
                self.violated("exactly-once", f"event {n} of entity {entity} took effect again")
                return
            if n > done + 1:
                text = f"event {n} of entity {entity} took effect before event {done + 1}"
                self.violated("order", text)
                return
            done = max(done, n)


def _numbers_by_entity(found: Found) -> dict[int, list[int]]:
    """Return the numbers of each entity's events that took effect, in their order."""
    if isinstance(found, Mapping):
        counts = cast("Mapping[int, int]", found)
        return {entity: list(range(1, count + 1)) for entity, count in counts.items()}
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for entity, n in found:
        numbers[entity].append(n)
    return numbers


class StoreModel:
    """What a store must hold, by what it was told, over all lives of the process.

    Whether a save took effect is open when it failed, was cancelled, or was a part of a transaction
    whose end was not seen. The next `loaded` decides.

    Arguments:
        oracle: gets the violations, and each position that became durable.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.stored: dict[int, Position] = {}
        """The positions that the store must hold, without the open ones."""
        self._oracle = oracle
        self._open: list[Positions] = []

    def began(self, positions: Positions) -> None:
        """Record a save whose outcome is open."""
        self._open.append(positions)

    def succeeded(self, positions: Positions) -> None:
        """Record that a save is durable."""
        undecided = self._overlapping(positions)
        self._open = [group for group in self._open if group not in undecided]
        if undecided in ([], [positions]) and (stale := self._stale(positions)) is not None:
            self._violated(
                f"a save of partition {stale} was accepted that has to be refused: another "
                "revision is stored than the one that it replaces"
            )
        self._apply(positions)

    def refused(self, positions: Positions, error: FencedError) -> None:
        """Record that the store refused a save."""
        self._open.remove(positions)
        if not self._overlapping(positions) and self._stale(positions) is None:
            self._violated(f"a save was refused that has to be accepted: {error}")

    def loaded(self, found: Positions) -> None:
        """Check what the store returned, and decide what was open."""
        for group in self._open:
            self._decide(group, found)
        self._open.clear()
        for partition in sorted(self.stored.keys() | found.keys()):
            expected, loaded = self.stored.get(partition), found.get(partition)
            if expected != loaded:
                self._violated(
                    f"partition {partition} was saved as {expected}, and loaded as {loaded}. If "
                    "the handler saves it in a transaction: was that committed before the handler "
                    "returned?"
                )

    async def probe(self, store: CursorStore, feed: FeedKey, found: Positions) -> None:
        """Try to save a position that is out of date, beside one that is not."""
        if not found:
            return
        *others, last = sorted(found)
        stale = Position.after(None, found[last].cursor, found[last].status)
        try:
            await store.save(feed, {p: found[p].advance() for p in others[:1]} | {last: stale})
        except FencedError:
            if others and await store.load(feed) != found:
                self._violated("a save was refused, and a part of it took effect")
        else:
            self._violated(
                f"a save of partition {last} was accepted as its first one, although revision "
                f"{found[last].revision} is stored: two consumers would not be noticed"
            )

    def _apply(self, positions: Positions) -> None:
        self.stored.update(positions)
        for partition, position in positions.items():
            self._oracle.saved(partition, position)

    def _stale(self, positions: Positions) -> int | None:
        """Return a partition of which another revision is stored than the one to be replaced."""
        for partition, position in positions.items():
            stored = self.stored.get(partition)
            if position.replaces != (None if stored is None else stored.revision):
                return partition
        return None

    def _overlapping(self, positions: Positions) -> list[Positions]:
        """Return the open saves of these partitions."""
        return [group for group in self._open if positions.keys() & group.keys()]

    def _decide(self, group: Positions, found: Positions) -> None:
        through = {p: new for p, new in group.items() if found.get(p) == new != self.stored.get(p)}
        if through and len(through) < len(group):
            self._violated(
                f"only a part of a save took effect, of the partitions {sorted(through)}"
            )
        self._apply(through)

    def _violated(self, text: str) -> None:
        self._oracle.violated("store", text)
