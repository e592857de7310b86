"""Partitions whose fetches fail or are refused (R10, R14). Imports no Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from feedapi_client.errors import CursorRejectedError, FeedUnavailableError
from feedapi_client.model import FeedInfo
from feedapi_client.options import RetryPolicy
from feedapi_client.retry import Backoff

_log = logging.getLogger(__name__)

_MAX_REFUSALS = 2


@dataclass(slots=True)
class _Failing:
    backoff: Backoff
    retry_at: float


class Failures:
    """When a failing partition may be asked again, and when it has failed for too long."""

    def __init__(self, feed: str, policy: RetryPolicy) -> None:
        self._feed = feed
        self._policy = policy
        self._failing: dict[int, _Failing] = {}
        self._refusals: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self._failing)

    def __contains__(self, partition: int) -> bool:
        return partition in self._failing

    def failed(self, partition: int, text: str) -> None:
        """Record a failed fetch: the partition is asked later, the others go on (R14).

        Raises:
            FeedUnavailableError: it has failed for longer than `RetryPolicy.give_up_after`.
        """
        failing = self._failing.setdefault(partition, _Failing(Backoff.of(self._policy), 0.0))
        error = FeedUnavailableError(text, feed=self._feed, partition=partition)
        try:
            failing.retry_at = time.monotonic() + failing.backoff.pause(error)
        except FeedUnavailableError:
            raise FeedUnavailableError(
                f"failed for {failing.backoff.elapsed:.0f} s, the last time with {text}",
                feed=self._feed,
                partition=partition,
            ) from None
        _log.warning(
            "feed %s, partition %d: %s; the other partitions go on", self._feed, partition, text
        )

    def succeeded(self, partition: int) -> None:
        """Forget the failures of the partition."""
        self._failing.pop(partition, None)

    def may_ask(self, partition: int) -> bool:
        """Whether the partition does not fail, or its next attempt is due."""
        failing = self._failing.get(partition)
        return failing is None or failing.retry_at <= time.monotonic()

    def pause(self, partition: int) -> float:
        """Return the seconds until the next attempt of the partition is due."""
        failing = self._failing.get(partition)
        return 0.0 if failing is None else max(0.0, failing.retry_at - time.monotonic())

    def refused(self, partition: int, cursor: str) -> None:
        """Record that the publisher refused a fetch from the cursor."""
        self._refusals[partition, cursor] = self._refusals.get((partition, cursor), 0) + 1

    def accepted(self, partition: int, cursor: str) -> None:
        """Forget the refusals of the cursor."""
        self._refusals.pop((partition, cursor), None)

    def check_refusals(self, info: FeedInfo, cursors: Mapping[int, str]) -> None:
        """Check the refusals after a discovery; `cursors` are those to read from now.

        Raises:
            CursorRejectedError: a partition is still listed and refused its cursor repeatedly.
        """
        for (partition, cursor), count in list(self._refusals.items()):
            if partition not in info.partitions or cursors.get(partition) != cursor:
                del self._refusals[partition, cursor]
            elif count >= _MAX_REFUSALS:
                raise CursorRejectedError(
                    f"is listed, and refuses the cursor {cursor!r} again and again",
                    feed=self._feed,
                    partition=partition,
                )

    def any_of(self, partitions: Collection[int]) -> bool:
        """Whether one of the partitions fails."""
        return not self._failing.keys().isdisjoint(partitions)
