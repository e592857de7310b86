"""What an application's handler wrote, checked against what it was given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, cast

from feedapi_client.testing.simulator.oracle import Oracle
from feedapi_client.testing.simulator.world import World

Delivery = Literal["exactly-once", "at-least-once"]
Found = Iterable[tuple[int, int]] | Mapping[int, int]
"""Events that took effect, as pairs of entity and number in their order; or the count of those of
each entity."""


class Effects:
    """Checks what `applied` returns: after each life of the process, and at the end.

    Arguments:
        world: what was published.
        oracle: gets the violations. It has recorded which events the handler has finished with.
        delivery: whether an event may take effect again after a restart.
    """

    def __init__(self, world: World, oracle: Oracle, delivery: Delivery) -> None:
        self._world = world
        self._oracle = oracle
        self._delivery = delivery

    def check(self, found: Found) -> None:
        """Check what took effect so far: in order, as often as allowed, nothing left out."""
        numbers = numbers_by_entity(found)
        for entity, of_entity in numbers.items():
            self._check_entity(entity, of_entity)
        for entity, handled in self._oracle.applied.items():
            reached = max(numbers.get(entity, ()), default=0)
            if reached < handled:
                self._oracle.violated(
                    "lost",
                    f"event {reached + 1} of entity {entity} took no effect, although the handler "
                    "returned from it or its cursor is stored",
                )

    def _check_entity(self, entity: int, numbers: list[int]) -> None:
        published = self._world.published.get(entity, 0)
        done = 0
        for n in numbers:
            if n > published:
                times = "more often than it has events" if done >= published else "as event {n}"
                self._oracle.violated(
                    "exactly-once", f"entity {entity} took effect {times.format(n=n)}"
                )
                return
            if n <= done and self._delivery == "exactly-once":
                self._oracle.violated(
                    "exactly-once", f"event {n} of entity {entity} took effect again"
                )
                return
            if n > done + 1:
                self._oracle.violated(
                    "order", f"event {n} of entity {entity} took effect before event {done + 1}"
                )
                return
            done = max(done, n)


def numbers_by_entity(found: Found) -> dict[int, list[int]]:
    """Return the numbers of each entity's events that took effect, in their order."""
    if isinstance(found, Mapping):
        counts = cast("Mapping[int, int]", found)
        return {entity: list(range(1, count + 1)) for entity, count in counts.items()}
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for entity, n in found:
        numbers[entity].append(n)
    return numbers
