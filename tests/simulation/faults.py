"""What can go wrong between a publisher and its consumers, each for a span of virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

FaultKind = Literal[
    "500",
    "503",
    "429",
    "404",
    "409",
    "html",
    "connect",
    "stall",
    "slow",
    "torn",
    "error-text",
    "reset",
    "204",
    "silent",
    "stall-body",
    "lag",
    "maintenance",
    "discovery",
]
Target = Literal["discovery", "fetch", "both"]

FETCH_ONLY: frozenset[FaultKind] = frozenset(
    {"torn", "error-text", "409", "204", "silent", "stall-body", "discovery"}
)
"""Faults that only a fetch has."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault for some time.

    Attributes:
        kind: what goes wrong. "silent" is a response without any line, "lag" an answer of a replica
            that is `behind` seconds old, "slow" one that comes in pieces over some seconds,
            "stall-body" one that falls silent. A "429" asks to wait now and then. "maintenance" is
            a JSON object that is neither a page nor a discovery, "discovery" the discovery document
            in answer to a fetch.
        on: which requests it hits.
        share: the part of these requests that it hits, from 0 to 1.
        until: the virtual time at which it ends.
        behind: see "lag".
        parity: the fault hits only fetches of even (0) or odd (1) partitions; None: all.
    """

    kind: FaultKind
    on: Target
    share: float
    until: float
    behind: float = 0.0
    parity: int | None = None

    def hits(self, partition: int | None, now: float, random: Random) -> bool:
        """Return whether it hits a fetch of a partition, or a discovery (None)."""
        fetch = partition is not None
        wanted = self.on == "both" or self.on == ("fetch" if fetch else "discovery")
        if now >= self.until or not wanted or (self.kind in FETCH_ONLY and not fetch):
            return False
        if self.parity is not None and (partition is None or partition % 2 != self.parity):
            return False
        return random.random() < self.share


_STEADY: tuple[FaultKind, ...] = ("500", "503", "connect")


class Faults:
    """The faults at one publisher. Each request is hit by at most one, and by a lag besides.

    Arguments:
        random: decides which requests are hit.
        failing: the part of all requests that fails all the time, whatever else goes wrong.
        steady: decides which these are.
    """

    def __init__(self, random: Random, *, failing: float, steady: Random) -> None:
        self._random = random
        self._failing = failing
        self._steady = steady
        self._active: list[InjectedFault] = []

    def add(self, fault: InjectedFault) -> None:
        """Begin a fault."""
        self._active.append(fault)

    def clear(self) -> None:
        """End all faults but those that come all the time."""
        self._active.clear()

    def lag(self, *, partition: int | None, now: float) -> float:
        """Return how many seconds old the replica is that answers a request."""
        if not self._active:
            return 0.0
        lags = [f for f in self._active if f.kind == "lag" and f.hits(partition, now, self._random)]
        return max((fault.behind for fault in lags), default=0.0)

    def pick(self, *, partition: int | None, now: float) -> FaultKind | None:
        """Return what goes wrong with a request."""
        if self._failing and self._steady.random() < self._failing:
            return self._steady.choice(_STEADY)
        if not self._active:
            return None
        self._active = [fault for fault in self._active if fault.until > now]
        for fault in self._active:
            if fault.kind != "lag" and fault.hits(partition, now, self._random):
                return fault.kind
        return None
