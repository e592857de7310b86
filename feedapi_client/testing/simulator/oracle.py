"""What must hold in every history: of the events that are handled, and of what took effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, cast

from feedapi_client import Batch, Position

Delivery = Literal["exactly-once", "at-least-once"]
Found = Iterable[tuple[int, int]] | Mapping[int, int]
"""Events that took effect, as pairs of entity and number in their order; or the count of those of
each entity."""


class Trace:
    """Lines of text with their virtual time. Two runs of one seed write the same lines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.lines: list[str] = []

    def add(self, text: str, *values: object) -> None:
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

    Attributes:
        published: how many events each entity has.
        calls: the last call of the handler for each partition, over all lives of the process.
    """

    def __init__(self, delivery: Delivery, trace: Trace) -> None:
        self.violations: list[ViolationError] = []
        self.published: dict[int, int] = {}
        self.calls: dict[int, Call] = {}
        self._delivery = delivery
        self._trace = trace
        self._done: dict[int, int] = {}
        """How many events of each entity the handler is done with."""
        self._last: dict[int, int] = {}
        """The last event of each entity that the present process was done with."""

    def violated(self, rule: str, text: str, error: BaseException | None = None) -> None:
        self._trace.add("violated: {}: {}", rule, text)
        failure = ViolationError(rule, f"{rule}: {text}", self._trace)
        failure.__cause__ = error
        self.violations.append(failure)

    def check(self) -> None:
        if self.violations:
            raise self.violations[0]

    def began(self) -> None:
        """A process starts: it is given again what was not committed."""
        self._last.clear()

    def handled(self, call: Call) -> None:
        """The handler is done with events, in order: it returned, or it committed them."""
        if call.handled:
            return
        call.handled = True
        for entity, n in call.events:
            done, last = self._done.get(entity, 0), self._last.get(entity)
            if not (n <= done + 1 if last is None else n == last + 1):
                known = "handled already" if n <= done else f"expected {done + 1}"
                rule = "exactly-once" if n <= done else "order"
                self.violated(rule, f"event {n} of entity {entity}: {known}")
            self._last[entity] = n
            self._done[entity] = max(done, n)

    def stored(self, positions: Mapping[int, Position]) -> None:
        """Positions are durable, and with them the batches that they belong to."""
        for partition, position in positions.items():
            call = self.calls.get(partition)
            if call is not None and call.batch.cursor == position.cursor:
                self.handled(call)

    def left(self) -> int:
        return sum(self.published.values()) - sum(self._done.values())

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
        published, done = self.published.get(entity, 0), 0
        for n in numbers:
            if n > published:
                text = f"entity {entity} took effect as event {n} of {published}"
                self.violated("exactly-once", text)
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
    if isinstance(found, Mapping):
        counts = cast("Mapping[int, int]", found)
        return {entity: list(range(1, count + 1)) for entity, count in counts.items()}
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for entity, n in found:
        numbers[entity].append(n)
    return numbers
