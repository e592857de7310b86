"""The frozen option objects: what to fetch, how much to use, how to retry.

Sizes are in bytes and times in seconds, unless a field says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from feedapi_client.arguments import (
    check_fields,
    check_function,
    check_instance,
    check_plain,
    check_texts,
    check_word,
)
from feedapi_client.errors import FeedError, FeedUnavailableError, TornResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What a fetch asks the publisher for.

    `filters`, `event_types` and `skip_event_types` select events. A cursor is valid only for the
    selection that it was received with. A feed whose dialect can't carry the selection is an error.

    Raises ValueError for combinations that the protocol forbids.
    """

    page_size_hint: int | None = None
    """Events that a response should hold, at least 1; None leaves it to the publisher. Excludes
    `stream`."""
    stream: bool | int | Literal["y"] = False
    """Whether to hold responses open where the feed offers it: True or "y" without an end, or for
    a number of milliseconds."""
    filters: Mapping[str, str] = field(default_factory=dict)
    """Values of the feed's filters by name (dialect v2-draft)."""
    event_types: Sequence[str] = ()
    """The only event types to send (dialect v2-token). Excludes `skip_event_types`."""
    skip_event_types: Sequence[str] = ()
    """The event types to leave out (dialect v2-token)."""
    v1_headers: Sequence[str] = ()
    """Event headers to include, ``["_all"]`` for all (dialect v1)."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_texts("FetchOptions.filters", self.filters)
        for name in ("event_types", "skip_event_types", "v1_headers"):
            self._check_names(name, getattr(self, name))
        if self.page_size_hint is not None and self.stream is not False:
            raise ValueError("FetchOptions: page_size_hint and stream exclude each other: give one")
        if self.page_size_hint is not None and self.page_size_hint < 1:
            raise ValueError(
                f"FetchOptions.page_size_hint must be at least 1, not {self.page_size_hint}"
            )
        if not isinstance(self.streaming, int) or (
            self.streaming is not False and self.streaming < 1
        ):
            raise ValueError(
                "FetchOptions.stream must be True, False or a positive number of milliseconds, "
                f"not {self.stream!r}"
            )
        if self.event_types and self.skip_event_types:
            raise ValueError(
                "FetchOptions: event_types and skip_event_types exclude each other: give one"
            )

    @staticmethod
    def _check_names(field: str, names: object) -> None:
        if isinstance(names, str):
            raise ValueError(f"FetchOptions.{field} takes a sequence of names, not one string")
        check_instance(f"FetchOptions.{field}", names, Collection, "a sequence of names")
        assert isinstance(names, Collection)
        for name in names:
            check_plain(f"FetchOptions.{field}: each name", name, "str")

    @property
    def streaming(self) -> bool | int:
        """`stream` as True, False or milliseconds."""
        return True if self.stream == "y" else self.stream

    def selection(self) -> dict[str, str]:
        """Return the options that select events, as the pairs of a `FeedKey`."""
        chosen = {f"filter-{name}": value for name, value in self.filters.items()}
        if self.event_types:
            chosen["event-types"] = ";".join(sorted(self.event_types))
        if self.skip_event_types:
            chosen["skip-event-types"] = ";".join(sorted(self.skip_event_types))
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one consumer uses. All must be positive.

    The defaults suit a process that also runs an application.
    """

    max_concurrent_fetches: int = 64
    """Requests at the same time."""
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Bytes of memory for what was received and not yet delivered, over all partitions: what came
    and what its objects take. Also the bound of what a partition may send without a checkpoint."""
    max_batch_bytes: int = 1024 * 1024
    """Bytes of a batch from which on no more events are added to it."""
    max_batch_events: int | None = None
    """Events that batches are made up to; None: only `max_batch_bytes` counts. A batch has more
    where checkpoints are further apart."""
    max_line_bytes: int = 16 * 1024 * 1024
    """Bytes of one line of a response."""
    max_discovery_bytes: int = 32 * 1024 * 1024
    """Bytes of a discovery response."""
    poll_interval: float = 0.2
    """Seconds of the first pause at the end of an open partition. The pause doubles up to
    `max_poll_interval` and falls back to this at the first event."""
    max_poll_interval: float = 10.0
    """Seconds of the longest pause between two polls; `poll_interval` if that is longer."""
    settle_time: float = 10.0
    """Seconds for which the answers of a closed partition have to be empty before they show its
    end, where no `lastCursor` does (R6). They count from when it was first seen closed, or last saw
    a request of it, a discovery or half of the feed's answers fail, so that a history of many
    closed partitions takes this time once."""
    discovery_interval: float = 60.0
    """Seconds between two discoveries when nothing else asks for one."""
    stream_idle_timeout: float = 60.0
    """Seconds after which a streamed response that brings nothing is opened again."""
    request_timeout: float = 30.0
    """Seconds to connect, of the longest silence within a response that is not streamed, and of a
    whole exchange but for the body of a page: headers, discoveries and errors (R14)."""
    slot_timeout: float = 5.0
    """Seconds that a request keeps its slot while other partitions wait for one. If it brought no
    checkpoint in that time, it is repeated after a pause and may then take twice as long."""
    commit_timeout: float = 30.0
    """Seconds that a save may still take after the task around it was cancelled."""
    max_attempts_without_progress: int = 5
    """Duplicates or empty responses in a row that become an error (R13)."""
    stall_timeout: float = 300.0
    """Seconds after which something that shows no sign of life is a problem of
    `FeedConsumer.health`: a request, a discovery, a save, or a handler with one batch. Longer than
    the longest time that a handler may take."""
    report_interval: float = 60.0
    """Seconds in which at most one log record is written about the failures of one partition, and
    only a few about those of all partitions. The next record says how many were left out."""

    @property
    def silent_pause(self) -> float:
        """Seconds between the two silent answers that are the end of an open partition (R6)."""
        return max(self.poll_interval, self.settle_time / 10)

    @property
    def read_bytes(self) -> int:
        """Bytes that one read of a connection of our own brings at most: 256 KiB by default.

        Large reads are faster. Many partitions must not fill a small buffer with a read each.
        """
        return min(max(self.max_buffered_bytes // 256, 64 * 1024), 256 * 1024)

    def __post_init__(self) -> None:
        check_fields(self)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise ValueError(f"Limits.{limit.name} must be positive, not {value}")


Decision = Literal["retry", "fatal"]
_DECISIONS = ("retry", "fatal")


def default_decision(error: FeedError) -> Decision:
    """Return "retry" for what may pass by itself, and "fatal" for all else (R14).

    Retried are connection errors, timeouts, statuses 408, 425, 429 and 5xx, and torn responses.
    """
    return "retry" if isinstance(error, (FeedUnavailableError, TornResponseError)) else "fatal"


def entry_decision(error: FeedError) -> Decision:
    """Return what `default_decision` does, but "fatal" for what is `final_on_entry` (R14).

    It decides at the first discovery of a client, where the policy has no function of its own.
    """
    at_once = isinstance(error, FeedUnavailableError) and error.final_on_entry
    return "fatal" if at_once else default_decision(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When and how often to try again: exponential backoff with full jitter (R14).

    The pause before attempt n+1 is random, from 0 to ``min(max_delay, base_delay * 2**n)`` seconds.
    What a Retry-After of the server asks for, up to `max_retry_after`, comes on top: 0, a negative
    number or a date in the past leave the pause as it is. Progress starts the count anew.
    """

    base_delay: float = 0.2
    """Seconds; the first pause is at most twice as long. Positive."""
    max_delay: float = 20.0
    """Seconds of any pause, at most; not less than `base_delay`."""
    max_retry_after: float = 300.0
    """Seconds that a server's Retry-After may ask for; a longer one is cut to this."""
    give_up_after: float | None = None
    """Seconds without progress after which the last error is raised; `math.inf` never gives up.
    None: 300 on entry and without `follow`; a consumer that follows the feed and has been running
    never gives up: it reports, and is not ready."""
    refused_for: float = 60.0
    """Seconds for which the fetches of a partition that discovery lists may be refused before that
    is an error (R10): by any status that says neither "here it is" nor "later", or by a redirect
    to another origin. A rolling deployment should take no longer."""
    decide: Callable[[FeedError], Decision] = default_decision
    """Decides which errors are retried; a function of your own may replace it. Without one, a
    `HostError` ends the first discovery at once; a function of your own decides there too."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_function("RetryPolicy.decide", self.decide)
        if self.base_delay <= 0 or self.max_delay < self.base_delay:
            raise ValueError(
                f"RetryPolicy.base_delay ({self.base_delay}) must be positive, and max_delay "
                f"({self.max_delay}) not smaller"
            )
        if self.max_retry_after < 0 or (self.give_up_after is not None and self.give_up_after < 0):
            raise ValueError("RetryPolicy: max_retry_after and give_up_after must not be negative")
        if self.refused_for < 0:
            raise ValueError("RetryPolicy.refused_for must not be negative")

    def retries(self, error: FeedError) -> bool:
        """Return whether `decide` says that an error is retried.

        Raises ValueError if it says neither "retry" nor "fatal".
        """
        decision = self.decide(error)
        check_word("what RetryPolicy.decide returns", decision, _DECISIONS)
        return decision == "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How several instances of one consumer divide the partitions of a feed.

    All instances need the same store, name and options. Their clocks may differ.

    Raises ValueError unless ``rebalance_seconds`` fits into ``lease_seconds`` three times.
    """

    instance: str | None = None
    """A name for people, the host's by default. A random part for each process is added to it."""
    lease_seconds: float = 30.0
    """Seconds after which the partitions of an instance that died are read by others."""
    rebalance_seconds: float = 5.0
    """Seconds between two looks at the other instances."""
    handover_seconds: float = 30.0
    """Seconds that a batch in flight, and then `on_release`, may take before a partition is given
    away regardless. A commit then raises `LeaseLostError`."""
    leases: object | None = None
    """A `LeaseStore`, where leases are not to be kept beside the cursors. They decide who works,
    never what is right: a store of another kind will do, the same one for all instances."""
    on_assigned: Callable[[frozenset[int]], Awaitable[object]] | None = None
    """Awaited with the partitions that were claimed, before one of them is read. What it raises
    ends the iteration."""
    on_release: Callable[[frozenset[int]], Awaitable[object]] | None = None
    """Awaited with partitions, after their last batch, before they are given away, and at the end
    of the iteration. For those whose lease was lost, once that is known: others may read them
    already. What it raises is reported."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("lease_seconds", "rebalance_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Share.{name} must be positive, not {getattr(self, name)}")
        if self.handover_seconds < 0:
            raise ValueError(
                f"Share.handover_seconds must not be negative, not {self.handover_seconds}"
            )
        if self.lease_seconds < 3 * self.rebalance_seconds:
            raise ValueError(
                f"Share.lease_seconds ({self.lease_seconds}) must be at least three times "
                f"Share.rebalance_seconds ({self.rebalance_seconds}): one late heartbeat must not "
                "cost all leases"
            )
        if self.instance is not None and not (
            0 < len(self.instance) <= 100 and self.instance.isprintable()
        ):
            raise ValueError("Share.instance must be 1 to 100 printable characters")
        for name in ("on_assigned", "on_release"):
            function = getattr(self, name)
            plain = inspect.isfunction(function) and not inspect.iscoroutinefunction(function)
            if function is not None and (plain or not callable(function)):
                raise TypeError(f"Share.{name} must be an async function of the partitions")
