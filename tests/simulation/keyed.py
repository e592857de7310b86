"""Histories in which the application handles events by key, and what is remembered of them.

A seed stands for the same publisher, faults and incidents as without keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from random import Random
from typing import Any

from feedapi_client.model import Event
from feedapi_client.notifications import BatchDelivered, BatchReleased
from feedapi_client.options import Limits
from feedapi_client.status import Health, ProblemName
from tests.simulation.scenario import Scenario

HANG_SECONDS = 1.5 * Limits().stall_timeout
"""So long that health has to say what it holds back."""
_NAMED_AFTER = 1.3 * Limits().stall_timeout
_LEFT_OUT = ("fail_over", "operate")
"""What changes positions without what is remembered of events, as no store of ours does."""


def keyed(scenario: Scenario) -> Scenario:
    """Return the scenario with an application that handles events by key."""
    random = Random(f"keys {scenario.seed}")
    settings = scenario.settings
    transactional = random.random() < 0.75
    retries = random.random() < 0.5
    settings = replace(
        settings,
        way="keys",
        transactional=transactional,
        impatience=0.0,
        stubborn=False,
        commit_every=1,
        careless=False,
        rollbacks=0.3 if transactional and random.random() < 0.3 else 0.0,
        # A quarantined event is durable with its cursor: without an order among its key's effects.
        on_failure="retry" if retries else "raise",
        flaky=random.choice((0.0, 0.05, 0.3)) if retries else 0.0,
        poison=False,
        in_flight=random.choice((1, 7, 40, 10_000)),
        hangs=HANG_SECONDS if random.random() < 0.2 else 0.0,
    )
    steps = tuple(step for step in scenario.steps if step.do not in _LEFT_OUT)
    return replace(scenario, settings=settings, steps=steps)


class Keys:
    """What one process handles by key at present, and what it must not do.

    Arguments:
        violated: records a violation of a rule.
        now: gives the virtual time.
    """

    def __init__(self, violated: Callable[[str, str], None], now: Callable[[], float]) -> None:
        self._violated = violated
        self._now = now
        self._running: dict[int, tuple[int, float]] = {}

    def begin(self, entity: int, partition: int) -> None:
        """An event of a key begins: no other of it is being handled."""
        if entity in self._running:
            self._violated("one at a time", f"two events of entity {entity} are handled at once")
        self._running[entity] = partition, self._now()

    def end(self, entity: int) -> None:
        """It is over, whatever it came to."""
        self._running.pop(entity, None)

    def hanging(self) -> int | None:
        """Return the partition of an event that hangs for long enough to be named."""
        late = self._now() - _NAMED_AFTER
        return next((p for p, since in self._running.values() if since < late), None)

    def named(self, partition: int, health: Health) -> None:
        """Check that health names what holds the cursor of a partition back."""
        named = {p.partition for p in health.problems if p.name is ProblemName.HANDLER_STUCK}
        if partition not in named:
            self._violated(
                "health", f"an event of partition {partition} hangs, and health says nothing"
            )


class InFlight:
    """Counts what a process holds that can't be committed yet, as an `InnerListener`."""

    def __init__(self, violated: Callable[[str, str], None], most: int) -> None:
        self._violated = violated
        self._most = most
        self._sizes: dict[int, deque[int]] = {}

    def told(self, happened: object, cause: BaseException | None, /) -> None:
        """See `InnerListener`."""
        match happened:
            case BatchDelivered(partition, events):
                self._sizes.setdefault(partition, deque()).append(events)
                sizes = [size for of_one in self._sizes.values() for size in of_one]
                if sum(sizes) > self._most and len([size for size in sizes if size]) > 1:
                    text = f"{sum(sizes)} events are in flight, of {self._most}"
                    self._violated("in flight", text)
            case BatchReleased(partition):
                self._sizes[partition].popleft()
            case _:
                pass

    def handling(self, partition: int, /) -> AbstractContextManager[object]:
        """See `InnerListener`."""
        return nullcontext()


def entity_of(event: Event) -> int:
    """Return the key of an event."""
    entity: int = event.json()["entity"]
    return entity


def identity_of(event: Event) -> str:
    """Return the identity of an event."""
    payload: Any = event.json()
    return f"{payload['entity']} {payload['n']}"
