"""Log records: what a consumer decides, at INFO, and what fails again and again, at a bounded rate.

Their loggers keep the names under which applications know them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import anyio

from feedapi_client.model import FeedInfo, Position
from feedapi_client.protocol.text import names

decision_log = logging.getLogger("feedapi_client.runtime.decisions")
failure_log = logging.getLogger("feedapi_client.runtime.failure_log")

_NAMED = 20
"""Partitions that one record names."""
RECORDS = 10
"""Records about failures in each interval, of all partitions together."""


class DecisionLog:
    def __init__(self, feed: str) -> None:
        self._feed = feed

    def bootstrapped(self, info: FeedInfo, starts: Mapping[int, str]) -> None:
        shown = ", ".join(f"{id} from {cursor!r}" for id, cursor in list(starts.items())[:_NAMED])
        more = f" and {len(starts) - _NAMED} more" if len(starts) > _NAMED else ""
        text = f"{len(info.partitions)} partitions listed, {len(starts)} read"
        text = f"dialect {info.dialect}, {text}: {shown or 'none'}{more}"
        self._write(None, text, dialect=info.dialect)

    def started(self, partition: int, cursor: str) -> None:
        self._write(partition, f"read from cursor {cursor!r}")

    def saved(self, positions: Mapping[int, Position]) -> None:
        superseded = [
            id
            for id, each in positions.items()
            # An ancestor that nothing was stored of is history of a first start.
            if each.status == "superseded" and each.replaces is not None
        ]
        if superseded:
            text = f"the cursor of {names(superseded)} was transferred to its successors"
            self._write(None, text, partition=superseded[0])

    def drained(self, partition: int, cursor: str) -> None:
        self._write(partition, f"drained, committed up to {cursor!r}")

    def awaits_evidence(self, partitions: Iterable[int], seconds: float) -> None:
        self._write(
            None,
            f"waits for evidence of the end of {names(partitions)}, for at least "
            f"{max(0.0, seconds):.1f} s: no lastCursor says where it is, and a moment's empty "
            "answers prove nothing",
        )

    def rediscovered(self, before: FeedInfo, info: FeedInfo) -> None:
        if info.dialect != before.dialect:
            text = f"its dialect is {info.dialect} from now on, and was {before.dialect}"
            self._write(None, text, dialect=info.dialect)
        listed, earlier = info.partitions, before.partitions
        changes = {
            "new": [id for id in listed if id not in earlier],
            "gone": [id for id in earlier if id not in listed],
            "closed": [
                id for id in listed if id in earlier and listed[id].closed > earlier[id].closed
            ],
        }
        if texts := [f"{what}: {names(ids)}" for what, ids in changes.items() if ids]:
            self._write(None, f"the topology has changed; {'; '.join(texts)}")

    def _write(self, of: int | None, text: str, **extra: object) -> None:
        if of is not None:
            extra["partition"] = of
        where = "" if of is None else f", partition {of}"
        extra["feed"] = self._feed
        decision_log.info("feed %s%s: %s", self._feed, where, text, extra=extra)


class FailureLog:
    """Writes at most one record for each partition, and a few for all, in an interval (R14).

    An outage makes each of up to 32,768 partitions fail again and again. The log says that it goes
    on, not each time: the next record says how many were left out.

    Arguments:
        interval: seconds.
        feed: a field of each record.
    """

    def __init__(self, interval: float, feed: str | None = None) -> None:
        self._interval = interval
        self._feed = feed
        self._written_at: dict[int | None, float] = {}
        self._began = float("-inf")
        self._written = 0
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<FailureLog: {self._written} records written, {self._left_out} left out>"

    def warn(
        self, partition: int | None, text: str | Callable[[], str], *, attempt: int | None = None
    ) -> bool:
        """Write a record, or count it. `text` may be a function, called if it is written."""
        now = anyio.current_time()
        if now - self._began >= self._interval:
            self._began, self._written = now, 0
        recent = now - self._written_at.get(partition, float("-inf")) < self._interval
        # The feed's own failures are few, and say more than those of one partition.
        if recent or (self._written >= RECORDS and partition is not None):
            self._left_out += 1
            return False
        self._written_at[partition] = now
        self._written += partition is not None
        left_out, self._left_out = self._left_out, 0
        failures = "failure before it was" if left_out == 1 else "failures before it were"
        more = f" ({left_out} {failures} not logged)" if left_out else ""
        failure_log.warning(
            "%s%s",
            text if isinstance(text, str) else text(),
            more,
            extra={"feed": self._feed, "partition": partition, "attempt": attempt},
        )
        return True
