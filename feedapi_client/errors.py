"""The exception tree.

Every error that this library raises on purpose is a `FeedError`. Errors of other libraries are translated once, at the edge, and kept as ``__cause__``::

    FeedError
    ├── NegotiationError             the endpoint does not speak FeedAPI, or not as it was asked to
    ├── ProtocolError                the publisher breaks the protocol
    │   ├── LineageError             the partitions of a discovery make no valid graph
    │   │   ├── AmbiguousLineageError    a merge: several live ancestors with different cursors
    │   │   └── LostPartitionError       a partition with a position is gone without an heir
    │   ├── RequestRefusedError      a fetch was answered 400, 404, 409 or 410: discover again
    │   ├── CursorRejectedError      a listed partition refuses its cursor again and again
    │   ├── NoProgressError          responses that never get past the cursor asked with
    │   ├── LineTooLongError         a line over `Limits.max_line_bytes`
    │   └── BufferLimitError         a run without a checkpoint over `Limits.max_buffered_bytes`
    ├── TransportError               the network, or the publisher's server
    │   ├── AuthenticationError      401 or 403
    │   ├── FeedUnavailableError     connection errors, timeouts, 408, 425, 429, 5xx
    │   └── TornResponseError        a response that broke off, or turned into something else midway
    └── StoreError                   the cursor store failed
        ├── FencedError              another consumer of the same name advanced the partition
        └── CommitOrderError         a batch was committed out of order, or after its iteration ended
"""

from __future__ import annotations

from typing import Any


class FeedError(Exception):
    """Root of all errors. `feed` is the feed's URL without credentials and query, `partition` its partition or None; both stand in the message."""

    def __init__(
        self, message: str, *, feed: str | None = None, partition: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.feed = feed
        self.partition = partition

    def __str__(self) -> str:
        where = [] if self.feed is None else [f"feed {self.feed}"]
        if self.partition is not None:
            where.append(f"partition {self.partition}")
        return f"{', '.join(where)}: {self.message}" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves, and executors send theirs to a driver.
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(kind: type[FeedError], message: str, state: dict[str, Any]) -> FeedError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class NegotiationError(FeedError):
    """The endpoint did not answer the argument-less GET as any known dialect does (R1)."""


class ProtocolError(FeedError):
    """The publisher broke the protocol in a way that a retry does not mend."""


class LineageError(ProtocolError):
    """The partitions of a discovery make no valid graph (R12)."""


class AmbiguousLineageError(LineageError):
    """A partition may take its cursor from several live ancestors that stand at different cursors (R9)."""


class LostPartitionError(LineageError):
    """A partition that has, or needs, a position is gone without an heir: an operator decides (R8, R9, R11)."""


class RequestRefusedError(ProtocolError):
    """A fetch was answered `status` 400, 404, 409 or 410: the topology, the token or the cursor is no longer good (R10)."""

    def __init__(
        self, message: str, *, status: int, feed: str | None = None, partition: int | None = None
    ) -> None:
        super().__init__(message, feed=feed, partition=partition)
        self.status = status


class CursorRejectedError(ProtocolError):
    """A partition that is still listed refused the same cursor again (R10)."""


class NoProgressError(ProtocolError):
    """Response after response brought events and no new cursor (R13)."""


class LineTooLongError(ProtocolError):
    """A line is longer than `Limits.max_line_bytes`."""


class BufferLimitError(ProtocolError):
    """A run of events without a checkpoint does not fit into `Limits.max_buffered_bytes` (R3)."""


class TransportError(FeedError):
    """The network, or the server in front of the publisher."""


class AuthenticationError(TransportError):
    """The publisher answered 401 or 403."""


class FeedUnavailableError(TransportError):
    """A connection error, a timeout or a status that means "later" (408, 425, 429, 5xx). `status` is None where there was no response;
    `retry_after` is the server's wish in seconds, None without one."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        feed: str | None = None,
        partition: int | None = None,
    ) -> None:
        super().__init__(message, feed=feed, partition=partition)
        self.status = status
        self.retry_after = retry_after


class TornResponseError(TransportError):
    """A 200 response broke off, or held a line that is not a protocol message. What was checkpointed before it is kept."""


class StoreError(FeedError):
    """The cursor store failed; the cause is chained."""


class FencedError(StoreError):
    """The stored revision is not the predecessor of the one to be saved: another consumer of the same feed and name advanced it (R17)."""


class CommitOrderError(StoreError):
    """A batch was committed after a later one of its partition, or after its iteration had ended (R5)."""
