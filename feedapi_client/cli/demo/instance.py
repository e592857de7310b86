"""One instance of the demo: ``python -m feedapi_client.cli.demo.instance URL DATABASE NAME``.

Ends with code 0 after SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import anyio
import anyio.abc

from feedapi_client.cli.demo.consumer import DemoConsumer
from feedapi_client.cli.demo.effects import Effects
from feedapi_client.cli.demo.event_log import EventLog
from feedapi_client.options import Share
from feedapi_client.stores.sqlite import SQLiteCursorStore


async def run(url: str, path: Path, name: str) -> None:
    """Consume until SIGTERM. Raises `FeedError` where the consumer does."""
    share = Share(instance=name, lease_seconds=1.5, rebalance_seconds=0.2)
    consumer = DemoConsumer(EventLog(), sabotage=None, share=share)

    async def stop(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                consumer.stop()

    effects = Effects(path)
    try:
        async with SQLiteCursorStore(path) as store, anyio.create_task_group() as tasks:
            await tasks.start(stop)
            await consumer.run(url, store, effects, follow=True)
            tasks.cancel_scope.cancel()
    finally:
        effects.close()


if __name__ == "__main__":
    logging.getLogger("feedapi_client").setLevel(logging.ERROR)  # what is lost is part of the demo
    anyio.run(run, sys.argv[1], Path(sys.argv[2]), sys.argv[3])
