"""The proof of the demo: compares what was published with what the application handled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

Step = tuple[str, int]
"""An entity, and the number of one of its events."""

_EXAMPLES = 3
_DISTURBANCES = "stale tokens, failing and torn responses"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many events of how many entities were published, and which ones went wrong, and how."""

    entities: int
    events: int
    lost: list[Step]
    repeated: list[Step]
    disordered: list[Step]
    unknown: list[Step]

    @property
    def proved(self) -> bool:
        """Whether every event was handled once, and each entity's events in order."""
        return not (self.lost or self.repeated or self.disordered or self.unknown)

    def faults(self) -> list[str]:
        """Return a line for each kind of fault that was found."""
        kinds = {
            "lost": self.lost,
            "came again": self.repeated,
            "came out of order": self.disordered,
            "was never published": self.unknown,
        }
        return [
            f"{len(steps):,} {kind}, such as {_examples(steps)}"
            for kind, steps in kinds.items()
            if steps
        ]


def prove(published: Iterable[Step], effects: Iterable[Step]) -> Verdict:
    """Compare the events as they were published with the effects, in the order they were made."""
    wanted, made = _by_entity(published), _by_entity(effects)
    lost: list[Step] = []
    repeated: list[Step] = []
    disordered: list[Step] = []
    unknown: list[Step] = []
    for entity in wanted.keys() | made.keys():
        order = {n: place for place, n in enumerate(wanted[entity])}
        counts = Counter(made[entity])
        lost += [(entity, n) for n in order if n not in counts]
        repeated += [(entity, n) for n, count in counts.items() if count > 1]
        unknown += [(entity, n) for n in counts if n not in order]
        known = [n for n in dict.fromkeys(made[entity]) if n in order]
        disordered += [(entity, n) for before, n in pairwise(known) if order[n] < order[before]]
    events = sum(len(numbers) for numbers in wanted.values())
    return Verdict(
        sum(1 for numbers in wanted.values() if numbers),
        events,
        sorted(lost),
        sorted(repeated),
        sorted(disordered),
        sorted(unknown),
    )


def conclusion(verdict: Verdict, crashes: int, instances: int = 1) -> list[str]:
    """Return the result of the demo in words, one or more lines."""
    what_died = ("crash", "crashes") if instances == 1 else ("kill", "kills")
    died = f"{crashes} {what_died[crashes != 1]}"
    if instances > 1:
        died += f" of {instances} instances"
    return _in_words(verdict, f"3 splits of 2 kinds, {died}, {_DISTURBANCES}")


def conclusion_of_spark(verdict: Verdict) -> list[str]:
    """Return the same for what Spark read."""
    return _in_words(verdict, f"3 splits of 2 kinds, {_DISTURBANCES}")


def _in_words(verdict: Verdict, what_happened: str) -> list[str]:
    through = f"through {what_happened}"
    what = f"{verdict.events:,} events of {verdict.entities:,} entities"
    if verdict.proved:
        return [f"PROVED: {what} arrived, each entity's in order and each one once, {through}"]
    return [f"FAILED: of {what}, {through}:", *(f"  {fault}" for fault in verdict.faults())]


def _by_entity(steps: Iterable[Step]) -> defaultdict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for entity, n in steps:
        found[entity].append(n)
    return found


def _examples(steps: list[Step]) -> str:
    shown = ", ".join(f"event {n} of {entity}" for entity, n in steps[:_EXAMPLES])
    return f"{shown} …" if len(steps) > _EXAMPLES else shown
