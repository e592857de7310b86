"""Finds an event loop that does not run, from a thread, and logs where it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

import anyio

from feedapi_client.runtime.stacks import stack_of_thread

log = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two signs of life, at most."""
_SHORTEST, _LONGEST = 1.0, 5.0
"""Seconds after which an event loop that does not run is reported. Between them, a tenth of
`Limits.stall_timeout`."""
_PAUSE = 60.0
"""Seconds between two warnings, where a program blocks again and again."""


class Heartbeat:
    """Signs of life of the event loop that a session runs in.

    As a context manager, entered in that event loop, it is watched by a thread: the only place from
    which a blocked event loop can be seen while it is blocked. The thread logs where the event loop
    is, as a warning, and once more as an error when that has lasted for `limit`.

    Arguments:
        feed: the URL, for the log.
        clock: the clock of the event loop.
        limit: `Limits.stall_timeout`.
    """

    def __init__(self, feed: str, clock: Callable[[], float], limit: float) -> None:
        self.threshold = min(_LONGEST, max(_SHORTEST, limit / 10))
        """Seconds after which the event loop counts as blocked."""
        self.where: str | None = None
        """Where the event loop was when it was last found to be blocked, the innermost first."""
        self._feed = feed
        self._clock = clock
        self._limit = limit
        self._interval = min(_INTERVAL, limit / 10)
        self._seen = time.monotonic()
        self._thread = threading.get_ident()
        self._logged = 0
        self._warned = -_PAUSE

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self.beat()
        watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        watch.remove(self)

    @property
    def late(self) -> float:
        """How much later than planned the next sign of life is, in seconds; negative before."""
        return time.monotonic() - self._seen - self._interval

    def beat(self) -> None:
        """Give a sign of life."""
        self._seen, self._logged = time.monotonic(), 0

    async def sleep_until(self, moment: float) -> None:
        """Sleep, with signs of life meanwhile. Return early when the event loop was blocked."""
        while True:
            self.beat()
            wake_up = min(moment, self._clock() + self._interval)
            await anyio.sleep_until(wake_up)
            if wake_up >= moment or self.late >= self.threshold:
                return

    def look(self) -> None:
        """Log where the event loop is, if it is blocked. To be called in another thread."""
        late = self.late
        due = (late >= self.threshold) + (late >= self._limit)
        if due <= self._logged:
            return
        seen, (place, frames) = self._seen, stack_of_thread(self._thread)
        if seen != self._seen:
            return  # it ran again meanwhile
        self._logged, self.where = due, place
        if due == 1 and time.monotonic() < self._warned + _PAUSE:
            return
        self._warned = time.monotonic()
        log.log(
            logging.ERROR if late >= self._limit else logging.WARNING,
            "feed %s: the event loop has not run for %.1f s, nothing is fetched, handled or "
            "committed. It is at %s\n%s",
            self._feed,
            late,
            place,
            frames,
            extra={"feed": self._feed, "problem": "event-loop-blocked"},
        )


class _Watch:
    """The thread that looks at all heartbeats of this process, while there are any.

    Attributes:
        starts_threads: whether it does; not where the clock of event loops is a simulated one.
    """

    def __init__(self) -> None:
        self.starts_threads = True
        self._changed = threading.Condition()
        self._watched: list[Heartbeat] = []
        self._thread: threading.Thread | None = None

    def add(self, heartbeat: Heartbeat) -> None:
        with self._changed:
            self._watched.append(heartbeat)
            alive = self._thread is not None and self._thread.is_alive()  # none after a fork
            if self.starts_threads and not alive:
                self._thread = threading.Thread(
                    target=self._run, name="feedapi event loops", daemon=True
                )
                self._thread.start()

    def remove(self, heartbeat: Heartbeat) -> None:
        with self._changed:
            self._watched.remove(heartbeat)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._watched:
                self._changed.wait(_SHORTEST / 4)
                for heartbeat in self._watched:
                    heartbeat.look()
            self._thread = None


watch = _Watch()
