"""Notify the followers of a partition that it may have something new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock


class ChangeNotifier:
    """Callbacks by partition. All of its methods take `lock`."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._callbacks: dict[int, set[Callable[[], None]]] = {}

    @property
    def subscribed(self) -> set[int]:
        """The partitions that have followers."""
        with self._lock:
            return set(self._callbacks)

    @contextmanager
    def subscribe(self, partition: int, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` at each change that may have something new for a reader.

        It is called in the thread that makes the change, with the lock held.
        """
        with self._lock:
            self._callbacks.setdefault(partition, set()).add(callback)
        try:
            yield
        finally:
            with self._lock:
                callbacks = self._callbacks[partition]
                callbacks.discard(callback)
                if not callbacks:
                    del self._callbacks[partition]

    def notify(self, partition: int) -> None:
        """Call the followers of one partition."""
        if not self._callbacks:  # also the fast way of an append without followers
            return
        with self._lock:
            for callback in tuple(self._callbacks.get(partition, ())):
                callback()

    def notify_all(self) -> None:
        """Call the followers of any partition."""
        with self._lock:
            for partition in tuple(self._callbacks):
                self.notify(partition)
