"""When a fault applies. The faults themselves are in `feedapi_client.testing.faults`."""

from __future__ import annotations

from math import inf
from random import Random
from time import monotonic
from typing import Any, Literal, Protocol

from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import Response

FaultTarget = Literal["fetch", "discovery", "any"]


class Fault(Protocol):
    """Changes the response to a request. Called with the publisher's lock held."""

    def __call__(self, response: Response, request: Request, publisher: Any, /) -> Response:
        """Return the response to send: the given one, changed or not, or another one.

        `publisher` is the `Publisher`.
        """
        ...


class FaultRule:
    """A fault and when it applies, as `Publisher.fail` returns it.

    `hits` counts how often it applied.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        on: FaultTarget,
        partition: int | None,
        times: int | None,
        after: int,
        until: float = inf,
        share: float = 1.0,
        random: Random | None = None,
    ) -> None:
        if on not in ("fetch", "discovery", "any"):
            raise ValueError(f"on must be fetch, discovery or any, not {on!r}")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share is a part of the requests, above 0 and up to 1, not {share!r}")
        self.fault = fault
        self.on = on
        self.partition = partition
        self.times = times
        self.after = after
        self.until = until
        self.share = share
        self.hits = 0
        self._random = random or Random()

    @property
    def live(self) -> bool:
        """Whether it may still apply."""
        return (self.times is None or self.hits < self.times) and monotonic() < self.until

    def remove(self) -> None:
        """Let it apply no more."""
        self.times = self.hits

    def applies_to(self, request: Request) -> bool:
        """Return whether it applies to this request, and count the request."""
        kinds = ("fetch", "discovery") if self.on == "any" else (self.on,)
        if not self.live or request.kind not in kinds:
            return False
        if self.partition is not None and request.partition != self.partition:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.share < 1.0 and self._random.random() >= self.share:
            return False
        self.hits += 1
        return True

    def __repr__(self) -> str:
        return (
            f"<FaultRule {self.fault} on {self.on}, partition {self.partition},"
            f" {self.hits} of {self.times}>"
        )
