"""Compute by key in a pool of processes: the events of one key in order, different keys at once.

The consumer, its cursors and the effects stay in this process. A thread of `run_by_key` waits for
what a process computes, and then writes it. The pool is yours: its size, and how it starts.

python examples/by_key_in_processes.py [URL]
"""

import json
import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from feedapi_client import Event, SQLiteCursorStore, SyncFeedConsumer
from feedapi_client.testing import Publisher

PROCESSES = 2


def compute(payload: bytes) -> int:
    """Runs in a process of the pool, which gets bytes and not an event."""
    number: int = json.loads(payload)["n"]
    return sum(range(number * 1000))


def entity(event: Event) -> str:
    return str(event.json()["entity"])


def main(url: str) -> None:
    results: dict[str, list[int]] = {}
    lock = threading.Lock()
    # "spawn": a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:

        def handle(event: Event) -> None:
            computed = pool.submit(compute, event.raw).result()  # raises what `compute` raises
            with lock:
                results.setdefault(entity(event), []).append(computed)

        store = SQLiteCursorStore("by_key_in_processes.db")
        with SyncFeedConsumer(url, store=store, follow=False) as consumer:
            consumer.run_by_key(handle, key=entity, threads=2 * PROCESSES)
    for key, computed in sorted(results.items()):
        assert computed == sorted(computed)
        print(key, computed)


if __name__ == "__main__":
    publisher = Publisher(1, page_size=10, checkpoint_every=5)
    publisher.extend(0, [{"entity": f"e{n % 4}", "n": n} for n in range(12)])
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        main(url)
