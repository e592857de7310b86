"""What telemetry is told of a running consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from feedapi_client.model import Batch

_NO_CONTEXT = nullcontext()


class Observer(Protocol):
    """Notified of what happens, from the event loop. Its methods must not raise or block.

    Times are in seconds. An `error` is for its type only: its text may hold a payload.
    """

    def fetched(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """A request has ended, up to the end of its response."""
        ...

    def delivered(self, batch: Batch, requested_seconds_ago: float) -> None:
        """A batch is delivered; the request that brought its last events began so long ago."""
        ...

    def handling(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the context in which the handler of `FeedConsumer.run` handles the batch."""
        ...

    def released(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """The application is done with the batch in flight, after so many seconds."""
        ...

    def committed(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """A cursor of the partition was saved, or could not be."""
        ...

    def handler_failed(self, partition: int, error: BaseException) -> None:
        """The handler raised."""
        ...

    def handler_retried(self, partition: int) -> None:
        """The handler gets its batch again."""
        ...

    def fetch_retried(self, partition: int, error: BaseException) -> None:
        """A request is repeated because it failed."""
        ...

    def quarantined(self, partition: int, error_type: str) -> None:
        """An event was put into quarantine."""
        ...

    def passed_over(self, partition: int, count: int) -> None:
        """Events were not handled, because one with their identity is done already."""
        ...

    def discovered(self, seconds: float, error: BaseException | None) -> None:
        """A discovery has ended."""
        ...


class Observers:
    """Any number of observers of one consumer, also across its sessions."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        """Tell an observer of everything from now on."""
        self._all = (*self._all, observer)

    def remove(self, observer: Observer) -> None:
        """Tell it no more."""
        self._all = tuple(each for each in self._all if each is not observer)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._all)

    def handling(self, batch: Batch) -> AbstractContextManager[object]:
        """Return the context in which a handler handles the batch: those of all observers."""
        if not self._all:
            return _NO_CONTEXT
        if len(self._all) == 1:
            return self._all[0].handling(batch)
        return self._all_contexts(batch)

    @contextmanager
    def _all_contexts(self, batch: Batch) -> Iterator[None]:
        with ExitStack() as contexts:
            for observer in self._all:
                contexts.enter_context(observer.handling(batch))
            yield
