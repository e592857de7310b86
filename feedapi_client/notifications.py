"""What happens in a consumer, told once: one frozen dataclass for each kind.

``consumer.subscribe(listener)`` calls ``listener(notification)`` for each of them, in the event
loop and in the order in which they happen. None holds a payload, a cursor or a secret: `error` is a
text of this library, or the name of another exception's type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from feedapi_client.errors import FeedError
from feedapi_client.status import ProblemName

__all__ = [
    "BatchCommitted",
    "BatchDelivered",
    "DiscoveryEnded",
    "EventQuarantined",
    "EventsPassedOver",
    "FetchEnded",
    "HandlerFailed",
    "IterationEnded",
    "PartitionAssigned",
    "PartitionDrained",
    "PartitionReleased",
    "PartitionStarted",
    "PartitionSuperseded",
    "PartitionVanished",
    "ProblemFound",
    "ProblemGone",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartitionStarted:
    """A partition is read from now on."""

    partition: int


@dataclass(frozen=True, slots=True)
class PartitionDrained:
    """A closed partition was committed to its end."""

    partition: int


@dataclass(frozen=True, slots=True)
class PartitionSuperseded:
    """The cursor of a partition was transferred to its successors, and that is saved."""

    partition: int


@dataclass(frozen=True, slots=True)
class PartitionVanished:
    """A partition that was read is not listed any more, and is read no more."""

    partition: int


@dataclass(frozen=True, slots=True)
class PartitionAssigned:
    """This instance has got the lease of a partition (`Share`)."""

    partition: int


@dataclass(frozen=True, slots=True)
class PartitionReleased:
    """This instance has given the lease of a partition away; `lost`: or has lost it."""

    partition: int
    lost: bool


@dataclass(frozen=True, slots=True)
class BatchDelivered:
    """A batch was delivered to the application."""

    partition: int
    events: int


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """A cursor was saved, after so many seconds.

    In the application's own transaction that counts once the application commits it.
    """

    partition: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HandlerFailed:
    """The handler of `FeedConsumer.run` or `FeedConsumer.run_by_key` raised."""

    partition: int
    error: str


@dataclass(frozen=True, slots=True)
class EventQuarantined:
    """An event is in quarantine, because the handler raised such an error."""

    partition: int
    error: str


@dataclass(frozen=True, slots=True)
class EventsPassedOver:
    """Events were not handled, because one with their `event_id` is done already."""

    partition: int
    events: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A request has ended, up to the end of its response; `error` is None if it succeeded."""

    partition: int
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class DiscoveryEnded:
    """A discovery has ended; `error` is None if it succeeded."""

    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class ProblemFound:
    """`FeedConsumer.health` shows a problem that it did not show before."""

    name: ProblemName
    partition: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ProblemGone:
    """A problem is gone. Those that an iteration ends with are over without such a word."""

    name: ProblemName
    partition: int | None


@dataclass(frozen=True, slots=True)
class IterationEnded:
    """An iteration has ended, with an error if that is not None."""

    error: str | None


Notification = (
    PartitionStarted
    | PartitionDrained
    | PartitionSuperseded
    | PartitionVanished
    | PartitionAssigned
    | PartitionReleased
    | BatchDelivered
    | BatchCommitted
    | HandlerFailed
    | EventQuarantined
    | EventsPassedOver
    | FetchEnded
    | DiscoveryEnded
    | ProblemFound
    | ProblemGone
    | IterationEnded
)
Listener = Callable[[Notification], object]


def error_text(error: BaseException | None) -> str | None:
    """Return the text of an error of this library, and only the type's name of any other."""
    if error is None:
        return None
    return str(error) if isinstance(error, FeedError) else type(error).__qualname__


class Listeners:
    """Who is told what happens in one consumer. False while nobody is."""

    def __init__(self) -> None:
        self._all: tuple[Subscription, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, listener: Listener) -> Subscription:
        """Tell a listener of everything from now on."""
        subscription = Subscription(self, listener)
        self._all = (*self._all, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Tell it no more."""
        self._all = tuple(each for each in self._all if each is not subscription)

    def tell(self, notification: Notification) -> None:
        """Call each listener. What one raises is reported, and goes no further."""
        for subscription in self._all:
            subscription.tell(notification)


class Subscription:
    """One listener of a consumer, until `close` or the end of its ``with`` block."""

    def __init__(self, listeners: Listeners, listener: Listener) -> None:
        self._listeners = listeners
        self._listener = listener
        self._failures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Tell the listener no more. May be called again."""
        self._listeners.remove(self)

    def tell(self, notification: Notification) -> None:
        """Call the listener. What it raises is logged: the 1st, 2nd, 4th, 8th ... time."""
        try:
            self._listener(notification)
        except Exception:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:
                log.exception(
                    "a listener of FeedConsumer.subscribe raised when it was told of %s, for the "
                    "%d. time; the consumer goes on",
                    type(notification).__name__,
                    self._failures,
                )
