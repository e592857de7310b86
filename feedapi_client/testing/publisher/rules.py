"""What a fault is, and when it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from feedapi_client.testing.publisher.messages import Request, Response

FaultTarget = Literal["fetch", "discovery", "any"]


class Fault(Protocol):
    """Changes the response to a request. Called with the publisher's lock held."""

    def __call__(self, response: Response, request: Request, publisher: Any, /) -> Response:
        """Return the response to send: the given one, changed or not, or another one.

        `publisher` is the `Publisher`.
        """
        ...


@dataclass(eq=False)
class FaultRule:
    """A fault and when it applies, as `Publisher.fail` returns it.

    `hits` counts how often it applied.
    """

    fault: Fault
    on: FaultTarget
    partition: int | None
    times: int | None
    after: int
    until: float
    share: float
    draw: Callable[[], float] = field(repr=False)
    hits: int = 0

    def __post_init__(self) -> None:
        if self.on not in ("fetch", "discovery", "any"):
            raise ValueError(f"on must be fetch, discovery or any, not {self.on!r}")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share is a part of the requests, above 0 and up to 1: {self.share}")

    def is_live(self, now: float) -> bool:
        """Return whether it may still apply."""
        return (self.times is None or self.hits < self.times) and now < self.until

    def remove(self) -> None:
        """Let it apply no more."""
        self.times = self.hits

    def applies_to(self, request: Request) -> bool:
        """Return whether it applies to this request, and count the request."""
        matches = self.on == request.kind or (self.on == "any" and request.kind != "other")
        here = self.partition in (None, request.partition)
        if not (matches and here and self.is_live(request.time)):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        applies = self.share == 1.0 or self.draw() < self.share
        self.hits += applies
        return applies
