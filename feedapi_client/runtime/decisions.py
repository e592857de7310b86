"""Log records about decisions, at INFO: what a consumer reads, and why it changes that."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from feedapi_client.model import FeedInfo, Position

log = logging.getLogger(__name__)

_NAMED = 20
"""Partitions that one record names."""


class DecisionLog:
    """Writes the decisions about one feed to the log."""

    def __init__(self, feed: str) -> None:
        self._feed = feed

    def bootstrapped(self, info: FeedInfo, starts: Mapping[int, str]) -> None:
        """The first discovery was carried out; `starts` are the cursors of what is read now."""
        shown = ", ".join(f"{id} from {cursor!r}" for id, cursor in list(starts.items())[:_NAMED])
        more = len(starts) - _NAMED
        log.info(
            "feed %s: dialect %s, %d partitions listed, %d read: %s%s",
            self._feed,
            info.dialect,
            len(info.partitions),
            len(starts),
            shown or "none",
            f" and {more} more" if more > 0 else "",
            extra={"feed": self._feed, "dialect": info.dialect},
        )

    def started(self, partition: int, cursor: str) -> None:
        """A partition is read from now on, in a running consumer."""
        log.info(
            "feed %s, partition %d: read from cursor %r",
            self._feed,
            partition,
            cursor,
            extra={"feed": self._feed, "partition": partition},
        )

    def saved(self, positions: Mapping[int, Position]) -> None:
        """The planner's positions are in the store: cursors that successors have taken over."""
        superseded = [
            id
            for id, each in positions.items()
            # An ancestor that nothing was stored of is history of a first start.
            if each.status == "superseded" and each.replaces is not None
        ]
        if superseded:
            cursors = {positions[id].cursor for id in superseded}
            successors = [
                id
                for id, each in positions.items()
                if each.status == "open" and each.replaces is None and each.cursor in cursors
            ]
            log.info(
                "feed %s: the cursor of %s was transferred to %s",
                self._feed,
                _names(superseded),
                _names(successors) if successors else "its successors before",
                extra={"feed": self._feed, "partition": superseded[0]},
            )

    def drained(self, partition: int, cursor: str) -> None:
        """A closed partition was committed to its end."""
        log.info(
            "feed %s, partition %d: drained, committed up to %r",
            self._feed,
            partition,
            cursor,
            extra={"feed": self._feed, "partition": partition},
        )

    def awaits_evidence(self, partitions: Iterable[int], seconds: float) -> None:
        """Closed partitions whose end no discovery lists seem to be at it, or will."""
        log.info(
            "feed %s: waits for evidence of the end of %s, for at least %.1f s: no lastCursor says "
            "where it is, and a moment's empty answers prove nothing",
            self._feed,
            _names(partitions),
            max(0.0, seconds),
            extra={"feed": self._feed},
        )

    def rediscovers(self, reason: str, *, again: bool) -> None:
        """A discovery begins. `again`: for the same reason as the one before it."""
        log.log(
            logging.DEBUG if again else logging.INFO,
            "feed %s: discovers again, because %s",
            self._feed,
            reason,
            extra={"feed": self._feed, "reason": reason},
        )

    def rediscovered(self, before: FeedInfo, info: FeedInfo) -> None:
        """A discovery of a running consumer succeeded."""
        if info.dialect != before.dialect:
            log.info(
                "feed %s: its dialect is %s from now on, and was %s",
                self._feed,
                info.dialect,
                before.dialect,
                extra={"feed": self._feed, "dialect": info.dialect},
            )
        listed, earlier = info.partitions, before.partitions
        changes = {
            "new": [id for id in listed if id not in earlier],
            "gone": [id for id in earlier if id not in listed],
            "closed": [
                id for id in listed if id in earlier and listed[id].closed > earlier[id].closed
            ],
        }
        texts = [f"{what}: {_names(ids)}" for what, ids in changes.items() if ids]
        if texts:
            log.info(
                "feed %s: the topology has changed; %s",
                self._feed,
                "; ".join(texts),
                extra={"feed": self._feed},
            )


def _names(partitions: Iterable[int]) -> str:
    ids = sorted(partitions)
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    kind = "partition" if len(ids) == 1 else "partitions"
    return f"{kind} {', '.join(map(str, ids[:_NAMED]))}{more}"
