"""The frozen option objects: what to ask for, and how much of everything.

Sizes are bytes, times are seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from feedapi_client.errors import FeedError, FeedUnavailableError, TornResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What a fetch asks the publisher for.

    `page_size_hint` (events a response) and `stream` exclude each other. `stream` is True (or "y") for a response without end, or a number of
    milliseconds; it is used where the feed offers it. `filters`, `event_types` and `skip_event_types` select events: they are part of a cursor's identity, and
    a dialect that can't carry them is an error, never a silently wrong selection. `v1_headers` names event headers to include (``["_all"]`` for all).

    Raises ValueError for combinations that the protocol forbids.
    """

    page_size_hint: int | None = None
    stream: bool | int | Literal["y"] = False
    filters: Mapping[str, str] = field(default_factory=dict)
    event_types: Sequence[str] = ()
    skip_event_types: Sequence[str] = ()
    v1_headers: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("event_types", "skip_event_types", "v1_headers"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"FetchOptions.{name} takes a sequence of names, not one string")
        if self.page_size_hint is not None and self.stream is not False:
            raise ValueError(
                "FetchOptions: page_size_hint and stream exclude each other: give one of them"
            )
        if self.page_size_hint is not None and self.page_size_hint < 1:
            raise ValueError(
                f"FetchOptions.page_size_hint must be at least 1, not {self.page_size_hint}"
            )
        if not isinstance(self.streaming, int) or (
            self.streaming is not False and self.streaming < 1
        ):
            raise ValueError(
                f"FetchOptions.stream must be True, False or a positive number of milliseconds, not {self.stream!r}"
            )
        if self.event_types and self.skip_event_types:
            raise ValueError(
                "FetchOptions: event_types and skip_event_types exclude each other: give one of them"
            )

    @property
    def streaming(self) -> bool | int:
        """`stream` as True, False or milliseconds."""
        return True if self.stream == "y" else self.stream

    def selection(self) -> dict[str, str]:
        """What selects events, as the pairs that enter a `FeedKey`."""
        chosen = {f"filter-{name}": value for name, value in self.filters.items()}
        if self.event_types:
            chosen["event-types"] = ";".join(sorted(self.event_types))
        if self.skip_event_types:
            chosen["skip-event-types"] = ";".join(sorted(self.skip_event_types))
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one consumer uses. The defaults suit one process beside an application."""

    max_concurrent_fetches: int = 64
    """Requests under way at once."""
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Received bytes that the application has not taken yet, over all partitions; also the bound of a run without a checkpoint."""
    max_batch_bytes: int = 1024 * 1024
    """A batch is not coalesced any further once it is this large."""
    max_line_bytes: int = 16 * 1024 * 1024
    """Length of one line of a response."""
    max_discovery_bytes: int = 32 * 1024 * 1024
    """Length of a discovery response."""
    poll_interval: float = 0.2
    """Pause at the end of an open partition; doubles up to `max_poll_interval` (at least itself) and falls back at the first event."""
    max_poll_interval: float = 10.0
    discovery_interval: float = 60.0
    """Pause between two discoveries when nothing else asks for one."""
    stream_idle_timeout: float = 60.0
    """A streamed response that brings nothing for this long is opened anew."""
    request_timeout: float = 30.0
    """Connect, and the longest silence within a response that is not streamed."""
    commit_timeout: float = 30.0
    """How long a save may go on after the task around it was cancelled."""
    max_attempts_without_progress: int = 5
    """Refusals, duplicates and empty answers in a row before they become an error (R10, R13)."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits.{name} must be positive, not {getattr(self, name)}")


Decision = Literal["retry", "fatal"]


def default_decision(error: FeedError) -> Decision:
    """Connection errors, timeouts, 408, 425, 429, 5xx and torn responses are retried; all else is fatal (R14)."""
    return "retry" if isinstance(error, (FeedUnavailableError, TornResponseError)) else "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter: before attempt n+1 a random pause of 0 to ``min(max_delay, base_delay * 2**n)`` seconds, or what the
    server's Retry-After asks for, up to `max_retry_after`. Progress resets it. After `give_up_after` seconds without progress the last error is
    raised; None never gives up. `decide` is the one function that says which errors are retried."""

    base_delay: float = 0.2
    max_delay: float = 20.0
    max_retry_after: float = 300.0
    give_up_after: float | None = 300.0
    decide: Callable[[FeedError], Decision] = default_decision

    def __post_init__(self) -> None:
        if self.base_delay <= 0 or self.max_delay < self.base_delay:
            raise ValueError("RetryPolicy: base_delay must be positive and max_delay not smaller")
        if self.max_retry_after < 0 or (self.give_up_after is not None and self.give_up_after < 0):
            raise ValueError("RetryPolicy: max_retry_after and give_up_after must not be negative")
