"""When a fault strikes. The faults themselves are in `feedapi_client.testing.faults`."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from feedapi_client.testing.exchange import Request, Response

FaultTarget = Literal["fetch", "discovery", "any"]


class Fault(Protocol):
    """Changes the response to a request. Called with the publisher's lock held; `publisher` is the `Publisher`."""

    def __call__(self, response: Response, request: Request, publisher: Any, /) -> Response:
        """The response to send."""


class FaultRule:
    """A fault and when it strikes, as `Publisher.fail` returns it. `hits` counts how often it did."""

    def __init__(
        self, fault: Fault, *, on: FaultTarget, partition: int | None, times: int | None, after: int
    ) -> None:
        if on not in ("fetch", "discovery", "any"):
            raise ValueError(f"on must be fetch, discovery or any, not {on!r}")
        self.fault = fault
        self.on = on
        self.partition = partition
        self.times = times
        self.after = after
        self.hits = 0

    @property
    def live(self) -> bool:
        """Whether it may still strike."""
        return self.times is None or self.hits < self.times

    def remove(self) -> None:
        """Let it strike no more."""
        self.times = self.hits

    def strikes(self, request: Request) -> bool:
        """Whether it strikes this request; counts it."""
        if not self.live or request.kind not in (
            ("fetch", "discovery") if self.on == "any" else (self.on,)
        ):
            return False
        if self.partition is not None and request.partition != self.partition:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.hits += 1
        return True

    def __repr__(self) -> str:
        return f"<FaultRule {self.fault} on {self.on}, partition {self.partition}, {self.hits} of {self.times}>"
