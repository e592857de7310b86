"""One iteration over a feed: its parts put together, opened, run and closed.

A session starts from what the store holds and ends with its iteration; the next iteration gets a
new one. Leaving a loop therefore loses nothing: what was not committed is read again.
"""

from __future__ import annotations

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.lineage.planner import Planner
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.discovery import Discovery, first_error
from feedapi_client.runtime.driver import Driver, Settings
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.positions import Positions
from feedapi_client.status import ConsumerStatus
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.moving import cursors_elsewhere


class Session:
    """Drives one planner from its start to the end of one iteration."""

    def __init__(self, settings: Settings, client: FeedClient, store: CursorStore) -> None:
        planner = Planner(
            feed=settings.key.url,
            start=settings.start,
            ordered=settings.ordered,
            partitions=settings.partitions,
            lineage=settings.lineage,
            selects_events=bool(settings.key.filters),
        )
        positions = Positions(store, settings.key, timeout=settings.limits.commit_timeout)
        self._positions = positions
        self._driver = Driver(settings, planner, positions)
        self._fetching = Fetching(self._driver, client)
        self._discovery = Discovery(self._driver, client)
        self._scope = anyio.CancelScope()
        self._unwound = anyio.Event()
        self.delivery = Delivery(self._driver, self._fetching)

    def __repr__(self) -> str:
        return f"<Session {self._driver!r}>"

    async def open(self) -> None:
        """Load the positions, discover, and save the first positions of an empty store.

        Raises what these raise.
        """
        positions = await self._positions.load()
        if not positions:
            await self._report_cursors_elsewhere()
        self._driver.planner.load(positions)
        await self._discovery.first()
        if self._driver.failure is not None:
            raise self._driver.failure

    async def _report_cursors_elsewhere(self) -> None:
        """Report stored cursors of this feed under another origin: the feed may have moved there.

        Without them the consumer reads all again.
        """
        for key in await self._positions.keys_elsewhere():
            self._driver.report(None, cursors_elsewhere(key, self._driver.feed))

    async def run(self) -> None:
        """Fetch and discover until the iteration ends.

        Never raises: a failure is raised by the iterating task.
        """
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._driver.scheduler.run, self._fetching.work)
                    tasks.start_soon(self._fetching.slots.run)
                    tasks.start_soon(self._discovery.run)
        except* Exception as group:  # noqa: BLE001 - a cancellation beside it goes on
            self._driver.fail(first_error(group))
        finally:
            self._unwound.set()

    async def aclose(self) -> None:
        """End the session and wait until a save under way is through.

        Otherwise that save could fence the session that loads the positions next.
        """
        self.close()
        await self._unwound.wait()

    def close(self) -> None:
        """End the session: nothing is fetched or committed any more."""
        self._driver.close()
        self._scope.cancel()

    def stop(self) -> None:
        """End the iteration after the batches in flight."""
        self._driver.stop()

    def status(self) -> ConsumerStatus:
        """A snapshot. Costs time linear in the number of partitions."""
        return self._driver.status()
