"""Partitions whose fetches fail or are refused (R10, R14). Imports no Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from feedapi_client.errors import (
    AuthenticationError,
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    ProtocolError,
)
from feedapi_client.model import FIRST, LAST, FeedInfo
from feedapi_client.options import RetryPolicy
from feedapi_client.protocol.text import shown
from feedapi_client.retry import Backoff
from feedapi_client.runtime.failures import CURSOR_REFUSALS, refusal_backoff
from feedapi_client.spark.fetch import CONFLICT, DENIED, FetchResult

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failing:
    backoff: Backoff
    retry_at: float = 0.0


@dataclass(slots=True)
class _Refused(_Failing):
    cursor: str = ""
    status: int = 0
    said: str = ""
    final: bool = False
    """It was refused for longer than `RetryPolicy.refused_for`."""


class FailingPartitions:
    """When a failing partition may be asked again, and when it has failed for too long."""

    def __init__(self, feed: str, policy: RetryPolicy) -> None:
        self._feed = feed
        self._policy = policy
        self._failing: dict[int, _Failing] = {}
        self._refused: dict[int, _Refused] = {}

    def partitions(self) -> set[int]:
        """Return the partitions whose last request failed or was refused."""
        return self._failing.keys() | self._refused.keys()

    def failed(self, partition: int, text: str) -> None:
        """Record a failed fetch: it is asked later, the others go on (R14). Raises `FeedError`."""
        failing = self._failing.setdefault(partition, _Failing(Backoff.of(self._policy)))
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
        self._refused.pop(partition, None)

    def may_ask(self, partition: int) -> bool:
        """Whether the partition does not fail, or its next attempt is due."""
        return self.pause(partition) <= 0.0

    def pause(self, partition: int) -> float:
        """Return the seconds until the next attempt of the partition is due."""
        found = (self._failing.get(partition), self._refused.get(partition))
        now = time.monotonic()
        return max((one.retry_at - now for one in found if one is not None), default=0.0)

    def refused(self, result: FetchResult) -> None:
        """Record that the publisher refused a fetch: it is asked again, after a discovery (R10)."""
        partition, policy = result.partition, self._policy
        refused = self._refused.get(partition)
        if refused is None or refused.cursor != result.cursor:
            backoff = refusal_backoff(policy, give_up_after=policy.refused_for)
            refused = self._refused[partition] = _Refused(backoff, cursor=result.cursor)
        refused.status, refused.said = result.refused or 0, result.refusal
        try:
            pause = refused.backoff.pause(self._error(refused, partition))
        except FeedError:
            refused.final, pause = True, 0.0
        if refused.backoff.failures == 1:
            pause = 0.0  # so a publisher says that its topology changed
        else:
            _log.warning(
                "feed %s, partition %d: %s; a new discovery and the next attempt in %.1f s",
                self._feed,
                partition,
                refused.said or "not listed any more",
                pause,
            )
        refused.retry_at = time.monotonic() + pause

    def final_refusals(
        self, info: FeedInfo, cursors: Mapping[int, str], *, discovered: bool = True
    ) -> Iterator[FeedError]:
        """Check the refusals after a discovery; `cursors` are those to read from now.

        Arguments:
            discovered: False after one that failed. Only credentials that the feed does not take
                are then a reason to give up.

        Yields:
            the errors of partitions that are still listed, and have been refused for longer than
            `RetryPolicy.refused_for`.
        """
        for partition, refused in list(self._refused.items()):
            if partition not in info.partitions or cursors.get(partition) != refused.cursor:
                del self._refused[partition]
            elif refused.final and (discovered or refused.status == DENIED):
                del self._refused[partition]  # where data may be lost, it is read from elsewhere
                yield self._error(refused, partition)

    def _error(self, refused: _Refused, partition: int) -> FeedError:
        kind: type[FeedError] = CursorRejectedError
        why = f"the cursor is {shown(refused.cursor)}"
        if refused.status == DENIED:
            kind, why = AuthenticationError, "an earlier discovery was answered all the same"
        elif refused.status == CONFLICT:
            kind, why = ProtocolError, "with a fresh token each time"
        elif refused.status and refused.status not in CURSOR_REFUSALS:
            kind, why = ProtocolError, "its discovery is answered all the same"
        elif refused.cursor in (FIRST, LAST):
            kind, why = ProtocolError, f"the cursor {refused.cursor} can't be at fault"
        return kind(
            f"{refused.said or 'is refused'}. It has been so for {refused.backoff.elapsed:.0f} s, "
            f"while discovery lists the partition; {why}",
            feed=self._feed,
            partition=partition,
        )
