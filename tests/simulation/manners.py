"""How unkind a simulated publisher is, and what stands in front of it: see PROTOCOL in the docs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Any, Literal

Empty = Literal["cursor", "echo", "silent", "204"]
Ahead = Literal["echo", "tail", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Manners:
    """What stays the same during a history. The defaults are those of a kind publisher.

    Attributes:
        empty: what answers a request behind which there is nothing: a cursor of the publisher's
            own, the cursor of the request (``_first`` and ``_last`` included), no line, or 204.
        ahead: how a replica that lags answers a cursor which is ahead of it: with that cursor, with
            the older one of its own end, or with no line.
        zero_edges: ``startsAfterPartition`` is left out where it is 0, as a Go publisher does.
        other_key: events are under the key of the other dialect of version 2.
        pascal_case: lines hold ``Data``, ``Event`` and ``Cursor``.
        rate: requests a second that are answered, of all consumers together; 0: any number.
        rate_status: of the requests beyond that: 429, or 503 with ``Retry-After``.
        unlisted: for so many seconds discovery lists no partition: null, or an empty list.
        null: which of the two it is.
        holds_streams: a proxy sends a streamed response at its end, or when it is large.
    """

    empty: Empty = "cursor"
    ahead: Ahead = "echo"
    zero_edges: bool = False
    other_key: bool = False
    pascal_case: bool = False
    rate: float = 0.0
    rate_status: int = 429
    unlisted: float = 0.0
    null: bool = False
    holds_streams: bool = False

    def keys(self, dialect: str) -> tuple[str, str]:
        """Return the keys of payloads and of cursors in a dialect."""
        event = (dialect == "v2-draft") is not self.other_key and dialect != "v1"
        keys = ("event" if event else "data"), "cursor"
        return (keys[0].capitalize(), "Cursor") if self.pascal_case else keys

    def __repr__(self) -> str:
        """Return what is not the default."""
        plain = Manners()
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return f"Manners({', '.join(given)})"


def drawn(random: Random, *, dialect: str, from_the_end: bool, streams: bool) -> Manners:
    """Return the manners of a history. Most of them are good: each is off in most histories.

    `from_the_end`: the consumer starts at ``_last``, whose answer has to hold a cursor.
    """
    given: dict[str, Any] = {"ahead": random.choice(("echo", "tail", "silent"))}
    if random.random() < 0.4 and not from_the_end:
        given["empty"] = random.choice(("echo", "silent", "204"))
    if random.random() < 0.25 and dialect == "v2-token":
        given["zero_edges"] = True
    if random.random() < 0.15 and dialect != "v1":
        given["other_key"] = True
    if random.random() < 0.1:
        given["pascal_case"] = True
    if random.random() < 0.15:
        given |= {"rate": random.choice((2.0, 5.0, 20.0)), "rate_status": random.choice((429, 503))}
    if random.random() < 0.15 and dialect != "v1":
        given |= {"unlisted": random.choice((0.5, 3.0)), "null": random.random() < 0.5}
    if random.random() < 0.3 and streams:
        given["holds_streams"] = True
    return Manners(**given)


class Rate:
    """So many requests a second are granted, with a burst of one second's."""

    def __init__(self, per_second: float) -> None:
        self.granted = 0
        self.refused = 0
        self._per_second = per_second
        self._left = self._burst = max(1.0, per_second)
        self._since = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._per_second > 0

    def grants(self, now: float) -> bool:
        """Count a request, and return whether it is answered."""
        grown = self._left + (now - self._since) * self._per_second
        self._left, self._since = min(grown, self._burst), now
        if self._left >= 1.0:
            self._left -= 1.0
            self.granted += 1
            return True
        self.refused += 1
        return False
