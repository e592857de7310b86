from __future__ import annotations

import gc
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.consumer.conftest import publisher, serve, store
from tests.sync.helpers import wait_until

__all__ = ["publisher", "serve", "store"]


@pytest.fixture
def wide(serve: Callable[..., Publisher]) -> Publisher:
    """Four partitions, pages of 10 events, a checkpoint behind each 5."""
    return serve(4, page_size=10, checkpoint_every=5)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A database with a table of effects."""
    file = str(tmp_path / "app.db")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE effects (n INTEGER)")
    return file


@pytest.fixture
def connection(path: str) -> Iterator[sqlite3.Connection]:
    """The application's connection, which no other thread than the test's may use."""
    with closing(sqlite3.connect(path)) as connection:
        yield connection


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Send Ctrl-C to the main thread when a condition holds."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    assert main == threading.get_ident()
    number = main

    def when(condition: Callable[[], object]) -> threading.Thread:
        def send() -> None:
            wait_until(condition)
            signal.pthread_kill(number, signal.SIGINT)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        return thread

    yield when
    signal.signal(signal.SIGINT, before)


class Left:
    """What of a process is left: threads, open sockets and event loops."""

    def __init__(self) -> None:
        self.threads, self.files = threads(), descriptors()

    def nothing(self) -> bool:
        """Whether nothing came since. Worker threads and closed sockets end shortly after."""
        gc.collect()
        return threads() <= self.threads and descriptors() <= self.files


def threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def descriptors() -> int:
    """Sockets of this process that are connected to elsewhere, or to itself as event loops' are."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        found += target.startswith(("socket:", "anon_inode:", "pipe:"))
    return found


@pytest.fixture
def nothing_is_left(publisher: Publisher, wide: Publisher) -> Iterator[None]:
    """The test leaves no thread, no socket and no event loop behind, but those of publishers."""
    left = Left()
    yield
    deadline = time.monotonic() + 10
    while not left.nothing() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= left.threads, threading.enumerate()
    assert descriptors() <= left.files
