"""A server of a benchmark: a process of its own, so that only the client is measured."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any


@contextmanager
def serving(
    serve: Callable[..., None], *arguments: object, in_thread: bool = False
) -> Iterator[Any]:
    """Run ``serve(connection, *arguments)``, and give what it sends when it is ready.

    With `in_thread` it runs in a thread until this process ends. That starts quickly, and is for
    runs whose figures don't count.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    if in_thread:
        Thread(target=serve, args=(send, *arguments), daemon=True).start()
        yield receive.recv()
        return
    process = context.Process(target=serve, args=(send, *arguments), daemon=True)
    process.start()
    try:
        yield receive.recv()
    finally:
        process.terminate()
        process.join()
