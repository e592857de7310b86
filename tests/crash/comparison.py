"""Compare the effects of numbered events with what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Comparison:
    """What the effects show."""

    events: int = 0
    lost: int = 0
    repeated: int = 0
    disordered: int = 0

    @property
    def exactly_once(self) -> bool:
        """Whether each event is there once, in order within its entity."""
        return self.events > 0 and not (self.lost or self.repeated or self.disordered)

    def compare(
        self,
        published: Counter[str],
        rows: list[tuple[str, int]],
        elsewhere: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Count.

        Arguments:
            published: how many events each entity has, numbered from 0.
            rows: entity and number of each effect, in the order in which they came.
            elsewhere: those of events that are kept elsewhere, in quarantine, without an order.
        """
        found = Counter([*rows, *elsewhere])
        self.events = published.total()
        self.lost = sum(
            (entity, n) not in found for entity, count in published.items() for n in range(count)
        )
        self.repeated = sum(count - 1 for count in found.values())
        last: dict[str, int] = {}
        for entity, n in rows:
            self.disordered += n < last.get(entity, -1)
            last[entity] = n
