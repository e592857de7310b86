"""What happens in a consumer, told once: one frozen dataclass for each kind.

``consumer.subscribe(listener)`` calls ``listener(notification)`` for each of them, in the event
loop and in the order in which they happen. None holds a payload, a cursor or a secret: `error` is a
text of this library, or the name of another exception's type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

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


class InnerNotification:
    """What happens, and is none of the application's business: only parts of this library are told.

    Not to be told to a `Listener`.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BatchFetched(InnerNotification):
    """The request that brought the last events of the batch just delivered began so long ago."""

    partition: int
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class BatchReleased(InnerNotification):
    """The application is done with the oldest batch in flight, after so many seconds.

    Its cause is how the handler has ended the iteration, if it did.
    """

    partition: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitFailed(InnerNotification):
    """A cursor could not be saved, which took so many seconds."""

    partition: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchRetried(InnerNotification):
    """A request failed, and is made again."""

    partition: int


@dataclass(frozen=True, slots=True)
class HandlerRetried(InnerNotification):
    """The handler gets a batch, or an event, again after a pause."""

    partition: int


_NO_CONTEXT = nullcontext()


class InnerListener(Protocol):
    """A part of this library that is told what happens. It must not raise or block."""

    def told(
        self, happened: Notification | InnerNotification, cause: BaseException | None, /
    ) -> None:
        """Something has happened. `cause` is for its type only: its text may hold a payload."""
        ...

    def handling(self, partition: int, /) -> AbstractContextManager[object]:
        """Return the context in which the handler of `FeedConsumer.run` handles a batch."""
        ...


class Listeners:
    """Who is told what happens in one consumer. False while nobody is."""

    def __init__(self) -> None:
        self._all: tuple[Subscription, ...] = ()
        self._inner: tuple[InnerListener, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all or self._inner)

    @property
    def subscribed(self) -> bool:
        """Whether the application listens. Problems are looked for only then."""
        return bool(self._all)

    def add(self, listener: Listener) -> Subscription:
        """Tell a listener of everything from now on."""
        subscription = Subscription(self, listener)
        self._all = (*self._all, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Tell it no more."""
        self._all = tuple(each for each in self._all if each is not subscription)

    def attach(self, listener: InnerListener) -> None:
        """Tell a part of this library of everything from now on, inner notifications included."""
        self._inner = (*self._inner, listener)

    def detach(self, listener: InnerListener) -> None:
        """Tell it no more. May be called again."""
        self._inner = tuple(each for each in self._inner if each is not listener)

    def tell(
        self, happened: Notification | InnerNotification, cause: BaseException | None = None
    ) -> None:
        """Call each listener. What an application's raises is reported, and goes no further.

        Only parts of this library get the `cause`, which is the error behind it.
        """
        for listener in self._inner:
            listener.told(happened, cause)
        if self._all and not isinstance(happened, InnerNotification):
            for subscription in self._all:
                subscription.tell(happened)

    def handling(self, partition: int) -> AbstractContextManager[object]:
        """Return the context in which a handler handles a batch: those of all inner listeners."""
        return self._contexts(partition) if self._inner else _NO_CONTEXT

    @contextmanager
    def _contexts(self, partition: int) -> Iterator[None]:
        with ExitStack() as contexts:
            for listener in self._inner:
                contexts.enter_context(listener.handling(partition))
            yield


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
