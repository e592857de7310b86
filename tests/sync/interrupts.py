"""Ctrl-C at any moment: an interruption at the n-th place where CPython looks for signals."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from feedapi_client import sync
from feedapi_client.monitor.snapshots import frame_of_thread
from feedapi_client.runtime import loop_thread
from feedapi_client.stores import threads
from tests.consumer.helpers import SAFETY_LIMIT

_FILES = {module.__file__ for module in (sync, loop_thread, threads)}


class Interruptions:
    """Raises `KeyboardInterrupt` in the main thread at chosen places of the block.

    CPython runs signal handlers when a function of Python begins, and when one of C has returned:
    its result is lost then. A profiler is called there, and what it raises is raised there. The
    places are those in the files of the synchronous consumer.

    Arguments:
        first: the number of the first interruption's place.
        second: that of the second one's, counted from the first one; None for a single one.
    """

    def __init__(self, first: int, second: int | None = None) -> None:
        self._numbers = [first] if second is None else [first, second]
        self._count = 0
        self.places: list[str] = []
        """Where it was interrupted."""

    def __enter__(self) -> Interruptions:
        self._before = sys.gettrace(), sys.getprofile()
        if len(self._numbers) > 1:  # a tracer makes all threads slow
            sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[1])
        sys.settrace(self._before[0])

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename not in _FILES:
            return
        self._count += 1
        if self._numbers and self._count > self._numbers[0]:
            del self._numbers[0]
            self._count = 0
            self.places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} {event}")
            raise KeyboardInterrupt(*self.places)

    def _trace(self, _: FrameType, event: str, __: object) -> Any:
        # A profiler that has raised is gone. The traced frames that this passes bring it back.
        if event == "exception" and self._numbers and sys.getprofile() is None:
            sys.setprofile(self._profile)
        return self._trace


class Rescue:
    """Interrupts the main thread, again and again, when the block hangs.

    Attributes:
        stack: where it hung.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.stack: list[str] = []

    def __enter__(self) -> Rescue:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        if self._over.wait(SAFETY_LIMIT / 2):
            return
        frame = frame_of_thread(main)
        while frame is not None:
            self.stack.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            frame = frame.f_back
        while not self._over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)
