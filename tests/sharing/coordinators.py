"""Coordinators without any fetch, and a store that counts its calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from feedapi_client import FeedInfo, FeedKey, MemoryCursorStore, Share
from feedapi_client.lineage.planner import Planner
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.driver import ConsumerSettings, Driver
from feedapi_client.runtime.positions import Positions
from feedapi_client.sharing.coordinator import Coordinator

KEY = FeedKey("https://service.test/feed")
_SHARE = Share(lease_seconds=3600)
_OPERATIONS = (
    "join",
    "renew",
    "leave",
    "instances",
    "leases",
    "claim",
    "release",
    "end",
    "load",
    "save",
)


class CountingStore(MemoryCursorStore):
    """Counts its calls. Each is one statement, or one transaction of a few (claims, releases)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        for name in _OPERATIONS:
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, operation: Any) -> Any:
        async def counted(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return await operation(*args, **options)

        return counted

    def taken(self) -> Counter[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, Counter()
        return calls


async def instance(store: MemoryCursorStore, number: int, info: FeedInfo) -> Coordinator:
    """Return an instance that has discovered and joined."""
    settings = ConsumerSettings(
        key=KEY,
        start="first",
        ordered=True,
        follow=True,
        partitions=None,
        on_error="raise",
        stream=False,
        limits=Limits(),
        retry=RetryPolicy(),
    )
    planner = Planner(feed=KEY.url, shared=True)
    driver = Driver(settings, planner, Positions(store, KEY, timeout=60))
    coordinator = Coordinator(_SHARE, store, KEY, driver, name=f"instance {number}")
    driver.sharing = coordinator
    planner.load(await store.load(KEY))
    planner.discover(info)
    await coordinator._membership.join()
    return coordinator
