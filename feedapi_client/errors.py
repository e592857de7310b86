"""The exception tree.

Every error that this library raises on purpose is a `FeedError`. Errors of other libraries are
translated once, where they enter, and kept as ``__cause__``::

    FeedError
    ├── NegotiationError             no feed answers at this URL, or more has to be said about it
    ├── ProtocolError                the publisher breaks the protocol
    │   ├── LineageError             the partitions of a discovery make no valid graph
    │   │   ├── AmbiguousLineageError    several live ancestors stand at different cursors
    │   │   └── LostPartitionError       a partition with a position is gone without a successor
    │   ├── RequestRefusedError      a fetch was answered 400, 404, 409 or 410
    │   ├── CursorRejectedError      a listed partition refuses its cursor again and again
    │   ├── NoProgressError          responses that never move the cursor
    │   ├── LineTooLongError         a line over `Limits.max_line_bytes`
    │   └── BufferLimitError         no checkpoint within `Limits.max_buffered_bytes`
    ├── TransportError               the network, or the publisher's server
    │   ├── AuthenticationError      401 or 403
    │   ├── FeedUnavailableError     connection errors, timeouts, 408, 425, 429, 5xx
    │   │   └── HostError                the host is unknown, or its certificate is refused
    │   └── TornResponseError        a response that broke off, or holds a line of something else
    ├── StoreError                   the cursor store failed
    │   ├── FencedError              another consumer of the same name advanced the partition
    │   │   └── LeaseLostError           another instance reads the partition now (`share`)
    │   └── AlreadyDoneError         `Event.done` of an event that is done already
    └── CommitOrderError             a batch was committed out of order, or too late
"""

from __future__ import annotations

from typing import Any


class FeedError(Exception):
    """Root of all errors.

    Attributes:
        message: what happened, without saying where.
        feed: the feed's URL without credentials and query, or None. Part of ``str(error)``.
        partition: the partition, or None. Part of ``str(error)``.
    """

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
        # Exceptions with keyword-only arguments do not pickle by themselves, and Spark's executors
        # send theirs to the driver.
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(kind: type[FeedError], message: str, state: dict[str, Any]) -> FeedError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class NegotiationError(FeedError):
    """The answer to the argument-less GET is not one of a feed, or not enough to read it (R1)."""


class ProtocolError(FeedError):
    """The publisher broke the protocol in a way that a retry does not repair.

    Attributes:
        status: of a response whose status is to blame, otherwise None.
    """

    status: int | None = None


class LineageError(ProtocolError):
    """The partitions of a discovery make no valid graph (R12)."""


class AmbiguousLineageError(LineageError):
    """A partition has several live ancestors, and they stand at different cursors (R9)."""


class LostPartitionError(LineageError):
    """A partition that has a position, or needs one, is gone without a successor (R8, R9, R11).

    An operator has to decide where to go on.
    """


class RequestRefusedError(ProtocolError):
    """A fetch was answered with `status` 400, 404, 409 or 410 (R10).

    The topology, the token or the cursor is no longer valid. A new discovery tells which.
    """

    def __init__(
        self, message: str, *, status: int, feed: str | None = None, partition: int | None = None
    ) -> None:
        super().__init__(message, feed=feed, partition=partition)
        self.status = status


class CursorRejectedError(ProtocolError):
    """A partition that is still listed refused the same cursor again (R10)."""


class NoProgressError(ProtocolError):
    """Too many responses in a row did not move the cursor (R13)."""


class LineTooLongError(ProtocolError):
    """A line is longer than `Limits.max_line_bytes`."""


class BufferLimitError(ProtocolError):
    """Events that came without a checkpoint do not fit into `Limits.max_buffered_bytes` (R3)."""


class TransportError(FeedError):
    """The network, or the server in front of the publisher.

    Attributes:
        status: of a response whose status is to blame, otherwise None. 302 stands for every
            redirect whose URL httpx can't read: it does not say which one it was.
    """

    status: int | None = None


class AuthenticationError(TransportError):
    """The publisher answered 401 or 403. A running consumer asks again for a while first (R10)."""


class FeedUnavailableError(TransportError):
    """A connection error, a timeout, or a status that means "later" (408, 425, 429, 5xx).

    Attributes:
        status: of the response; None when there was no response.
        retry_after: how many seconds the server asks to wait; None when it does not say.
        final_on_entry: the first discovery of a client raises it at once: most likely the URL, the
            trusted certificates or code of the http client are wrong.
    """

    final_on_entry = False

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


class HostError(FeedUnavailableError):
    """The host of the feed's URL is unknown, or its TLS certificate can't be verified.

    A running consumer retries it like any outage. The first discovery of a client, and so the entry
    into a consumer, raises it at once: most likely the URL or the trusted certificates are wrong.
    """

    final_on_entry = True


class TornResponseError(TransportError):
    """A response broke off, or held a line that is not a message of the protocol.

    What a checkpoint closed before that is kept.
    """


class StoreError(FeedError):
    """The cursor store failed. What it raised is the cause."""


class FencedError(StoreError):
    """Another consumer of the same feed and name advanced the partition (R17).

    The stored revision is not the one before the revision to be saved.
    """


class LeaseLostError(FencedError):
    """Another instance reads the partition now, or may do so (see `FeedConsumer`, ``share``).

    What was not committed is delivered again, by the instance that has the lease.
    """


class AlreadyDoneError(StoreError):
    """`Event.done` was called for an event that is done already: roll the transaction back.

    An earlier attempt has committed it, whose end nobody saw; or it was called before in the same
    transaction. A handler lets it through: `run_by_key` looks which of both it was.
    """


class CommitOrderError(FeedError):
    """A batch was committed after a later one of its partition, or after the iteration (R5).

    The application's order is wrong, and the store was not asked: to commit it again never helps.
    """
