"""Feeds with consumers that do something worth looking at, and a monitor beside them.

The consumer runs in a thread, because the tests of the page drive a browser, which blocks.
``python -m tests.monitor.scenes FOLDER [NAME]...`` saves the pictures that the documentation shows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel

from feedapi_client import Batch, FeedConsumer, Limits, Quarantine, Retry, RetryPolicy, Share
from feedapi_client.monitor import serve
from feedapi_client.stores import MemoryCursorStore
from feedapi_client.testing import Publisher, faults
from tests.monitor.browser import Browser, browser

Handler = Callable[[Batch], Awaitable[object]]
QUICK = Limits(poll_interval=0.05, max_poll_interval=0.2, discovery_interval=0.3)
RETRY = RetryPolicy(base_delay=0.5, max_delay=2.0)


class Running:
    """A consumer and its monitor, in a thread."""

    def __init__(self, consumers: dict[FeedConsumer, Handler], **options: Any) -> None:
        self.url = ""
        self._consumers = consumers
        self._options = options
        self._ready = threading.Event()
        self._stop = anyio.Event
        self._token: Any = None
        self._thread = threading.Thread(target=anyio.run, args=(self._run,))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        anyio.from_thread.run_sync(self._scope.cancel, token=self._token)
        self._thread.join()

    async def _run(self) -> None:
        self._token = anyio.lowlevel.current_token()
        async with serve(*self._consumers, port=0) as server:
            self.url = server.url
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as tasks:
                    for consumer, handle in self._consumers.items():
                        tasks.start_soon(self._consume, consumer, handle)
                    self._ready.set()

    async def _consume(self, consumer: FeedConsumer, handle: Handler) -> None:
        async with consumer:
            await consumer.run(handle, max_concurrency=256, **self._options)


@contextmanager
def running(consumers: dict[FeedConsumer, Handler], **options: Any) -> Iterator[str]:
    """Run consumers beside a monitor, and give its URL."""
    scene = Running(consumers, **options)
    scene.start()
    try:
        yield scene.url
    finally:
        scene.stop()


def consume(publisher: Publisher, **options: Any) -> FeedConsumer:
    assert publisher.url is not None
    return FeedConsumer(publisher.url, **{"limits": QUICK, "retry": RETRY, **options})


async def handle_at_once(batch: Batch) -> None:
    """Do nothing."""


@contextmanager
def traffic(publisher: Publisher, rate: int) -> Iterator[None]:
    """Publish events to all open partitions, until the end of the block."""
    over = threading.Event()

    def publish() -> None:
        n = 0
        while not over.wait(0.02):
            for _ in range(max(1, rate // 50)):
                publisher.publish(f"customer {n * 7919 % 100_003}", {"n": n})
                n += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------- the scenes


@contextmanager
def split() -> Iterator[str]:
    """Three partitions in mid-split: the children wait for what is in flight of their parent."""
    publisher = Publisher(1, checkpoint_every=50, page_size=50)
    publisher.extend(0, [{"n": n} for n in range(400)])
    handled = 0

    async def handle(batch: Batch) -> None:
        nonlocal handled
        handled += len(batch)
        if handled >= 400:
            await anyio.sleep_forever()

    with publisher.serve():
        limits = Limits(poll_interval=0.05, max_batch_bytes=1, discovery_interval=0.3)
        with running({consume(publisher, limits=limits, name="shop"): handle}) as url:
            _wait(lambda: handled >= 400)
            publisher.split(0)
            yield url


@contextmanager
def many(roots: int, splits: int, rate: int, interval: float) -> Iterator[str]:
    """Many partitions, some of them split, by both methods, all at work.

    The publisher is a process of its own, as it is in life: two of such a size do not fit into one.
    """
    command = [sys.executable, "-m", __spec__.name, "--serve", *map(str, (roots, splits, rate))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        feed = publisher.stdout.readline().strip()
        limits = Limits(poll_interval=interval, max_poll_interval=interval, slot_timeout=60)
        try:
            consumer = FeedConsumer(feed, limits=limits, retry=RETRY, name="shop")
            with running({consumer: handle_at_once}) as url:
                yield url
        finally:
            publisher.terminate()


def serve_many(roots: int, splits: int, rate: int) -> None:
    """Serve the feed of `many` and print its URL, until this process is ended."""
    publisher = Publisher(roots)
    for partition in range(0, 2 * splits, 2):
        publisher.extend(partition, [{"n": n} for n in range(3)])
        publisher.split(partition, method="cursor-from" if partition % 3 == 0 else "starts-after")
    with publisher.serve() as url, traffic(publisher, rate):
        print(url, flush=True)
        threading.Event().wait()


@contextmanager
def stuck() -> Iterator[str]:
    """A handler that hangs, one that fails, a partition whose requests fail, and a quarantine."""
    publisher = Publisher(8)
    for partition in range(8):
        publisher.extend(partition, [{"n": n} for n in range(5)])
    publisher.split(1)
    publisher.split(6, 3)

    async def handle(batch: Batch) -> None:
        if batch.events and batch.partition == 3:
            await anyio.sleep_forever()
        if batch.events and batch.partition == 5:
            raise ValueError("no such customer")
        if batch.partition == 7 and any(event.json()["n"] == 2 for event in batch.events):
            raise KeyError("price")

    on_failure = Retry(
        attempts=None, base_delay=2, max_delay=5, errors=(ValueError,), then=Quarantine()
    )
    with publisher.serve(), traffic(publisher, 100):
        publisher.fail(faults.Status(503), on="fetch", partition=2, times=None)
        limits = Limits(
            poll_interval=0.05, max_poll_interval=0.2, discovery_interval=2, stall_timeout=4
        )
        consumer = consume(publisher, name="shop", limits=limits)
        with running({consumer: handle}, on_failure=on_failure) as url:
            yield url


@contextmanager
def shared() -> Iterator[str]:
    """Two instances that share eight partitions."""
    publisher = Publisher(8)
    store = MemoryCursorStore()
    with publisher.serve(), traffic(publisher, 100):
        consumers = {
            consume(
                publisher,
                store=store,
                name="shop",
                share=Share(instance=instance, lease_seconds=3, rebalance_seconds=0.2),
            ): handle_at_once
            for instance in ("oslo", "bergen")
        }
        with running(consumers) as url:
            yield url


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- pictures


def take_picture(page: Browser, url: str, path: Path, seen: str) -> None:
    """Save a picture of the page when something is to be seen, and was live for some seconds."""
    page.open(url)
    page.wait_for(seen)
    time.sleep(25)
    page.screenshot(path)


PICTURES: dict[str, tuple[Callable[[], Any], int, bool, str]] = {
    "monitor-split": (split, 660, False, "document.querySelector('.node.waiting')"),
    "monitor-stuck": (stuck, 1000, True, "document.querySelector('.node.trouble')"),
    "monitor-300": (
        lambda: many(240, 30, 60, 2),
        900,
        False,
        "parseInt(document.getElementById('caught-up').textContent) > 80",
    ),
    "monitor-3000": (
        lambda: many(2400, 300, 50, 20),
        1000,
        True,
        "parseInt(document.getElementById('caught-up').textContent) > 60",
    ),
}
"""Scene, height of the window, dark or light, and what has to be seen."""


def main(folder: Path, names: Sequence[str]) -> None:
    """Save the pictures of the documentation, or those that are named."""
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory())
        page = stack.enter_context(browser(Path(profile)))
        for name in names or PICTURES:
            scene, height, dark, seen = PICTURES[name]
            with scene() as url:
                page.resize(1280, height, dark=dark)
                take_picture(page, url, folder / f"{name}.png", seen)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve_many(*map(int, sys.argv[2:]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
