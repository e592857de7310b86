"""What the rules demand of each fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.faults.feed import Operation, Spoil

DELIVERED = "delivered"
"""The consumer goes on, and every event is delivered once."""
PAGE = "page"
"""A client's call returns."""


@dataclass(frozen=True)
class Outcomes:
    """The outcome by operation: `DELIVERED`, or the class of the error that ends the consumer.

    `call` is for one fetch of `FeedClient` and `SyncFeedClient`, which do not retry: `PAGE`, or the
    class of the error. `rules` are the numbers of the rules that say so.
    """

    entry: str
    fetch: str
    last: str
    call: str
    rules: tuple[int, ...]
    running: str = DELIVERED

    def of(self, operation: Operation) -> str:
        """Return the outcome of one operation."""
        return str(getattr(self, operation))


UNAVAILABLE = Outcomes(DELIVERED, DELIVERED, DELIVERED, "FeedUnavailableError", (14,))
TORN = Outcomes(DELIVERED, DELIVERED, DELIVERED, "TornResponseError", (3, 14))
REFUSED = Outcomes("NegotiationError", DELIVERED, DELIVERED, "RequestRefusedError", (1, 10))
UNAUTHORIZED = Outcomes(
    "AuthenticationError", DELIVERED, "AuthenticationError", "AuthenticationError", (1, 10)
)
OF_GATEWAY = Outcomes("NegotiationError", DELIVERED, "ProtocolError", "ProtocolError", (1, 10))
NO_FEED = Outcomes("NegotiationError", DELIVERED, DELIVERED, "TornResponseError", (1, 3, 10))
"""Content that is not a feed's: an error on entry, a torn response in a fetch."""
REDIRECTED = Outcomes("NegotiationError", DELIVERED, "TransportError", "TransportError", (10, 19))
UNREADABLE = Outcomes("ProtocolError", "ProtocolError", "ProtocolError", "ProtocolError", (16,))
HARMLESS = Outcomes(DELIVERED, DELIVERED, DELIVERED, PAGE, (3,))
MEANINGLESS = Outcomes("NegotiationError", DELIVERED, DELIVERED, PAGE, (1, 3, 6))
"""An object that is neither a discovery, an event nor a checkpoint."""
A_DISCOVERY = Outcomes(DELIVERED, DELIVERED, DELIVERED, "TornResponseError", (3, 7))
"""A list without partitions: waited out as a discovery, and no answer to a fetch."""
EMPTY = Outcomes("NegotiationError", DELIVERED, DELIVERED, PAGE, (1, 3))
"""A 2xx without a body: no discovery, but an empty page."""

Group = Literal[
    "connection", "timing", "framing", "content", "status", "redirect", "Retry-After", "bomb"
]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    group: Group
    name: str
    spoil: Spoil
    outcomes: Outcomes
