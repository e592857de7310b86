"""Cut the log of a partition into pages: which events a request gets, and where checkpoints are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from feedapi_client.testing.publisher.log_position import LogPosition
from feedapi_client.testing.publisher.partition_log import PartitionLog

EventFilter = Callable[[bytes], bool]
"""A function from a raw payload to whether the consumer asked for such events."""


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Events of a page up to a checkpoint: their indices in the log, and the checkpoint.

    No checkpoint follows the events when `checkpoint` is None.
    """

    indices: Sequence[int]
    checkpoint: LogPosition | None


@dataclass(frozen=True, slots=True)
class LogPage:
    """What one response holds."""

    groups: list[EventGroup]
    end: LogPosition
    """Where the next request continues."""
    at_end_of_log: bool
    """Whether the log has nothing after `end`."""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How pages are cut."""

    events: int
    """Maximum number of events in a page."""
    checkpoint_every: int
    """Number of events between two checkpoints."""
    scanned: int
    """Maximum number of log entries that are looked at for one page."""
    continues: bool = False
    """Whether the response goes on after the page, so that all of it must be checkpointed."""


def ordered_page(log: PartitionLog, start: LogPosition, limits: PageLimits) -> LogPage:
    """Return the next events in the order of the log.

    Only for a position without sub-logs that are ahead, and a log without internal events.
    """
    first = bisect_left(log.seqs, start.base)
    stop = min(first + limits.events, len(log.seqs))
    groups = []
    end = start
    for at in range(first, stop, limits.checkpoint_every):
        group_stop = min(at + limits.checkpoint_every, stop)
        end = LogPosition(log.id, log.seqs[group_stop - 1] + 1, {})
        groups.append(EventGroup(range(at, group_stop), end))
    return LogPage(groups, end, stop == len(log.seqs))


def varied_page(
    log: PartitionLog,
    start: LogPosition,
    limits: PageLimits,
    *,
    wanted: EventFilter | None = None,
    random: Random | None = None,
) -> LogPage:
    """Return the next page of any log: undelivered events, without those that are not shown.

    With `random` the order, the size and the checkpoints of the page differ each time. The order
    within each sub-log is kept.
    """
    window = _Window(log, start, limits.scanned)
    order = window.pending if random is None else _interleave(log, window.pending, random)
    left = limits.events if random is None else random.randint(1, limits.events)
    groups = [EventGroup((), start)] if random is not None and random.random() < 0.1 else []
    group: list[int] = []
    group_size = _group_size(limits, random)
    for index in order:
        window.deliver(index)
        payload = log.payloads[index]
        if payload is None or (wanted is not None and not wanted(payload)):
            continue
        group.append(index)
        left -= 1
        if len(group) == group_size:
            groups.append(EventGroup(group, window.position()))
            group, group_size = [], _group_size(limits, random)
        if not left:
            break
    return _finish(window, groups, group, None if limits.continues else random)


def _group_size(limits: PageLimits, random: Random | None) -> int:
    every = limits.checkpoint_every
    return every if random is None else random.randint(1, 2 * every)


def _finish(
    window: _Window, groups: list[EventGroup], rest: list[int], random: Random | None
) -> LogPage:
    """Return the page of `groups` and the events after their last checkpoint."""
    last = groups[-1].checkpoint if groups else None
    advanced = last not in (None, window.start)
    if rest and random is not None and advanced and random.random() < 0.3:
        # Legal, and easily got wrong: events after the last checkpoint, which the consumer drops
        # and gets again.
        assert last is not None
        return LogPage([*groups, EventGroup(rest, None)], last, False)
    end = window.position() if window.moved else window.start
    if rest or last != end:
        groups.append(EventGroup(rest, end))
    return LogPage(groups, end, window.at_end_of_log)


def _interleave(log: PartitionLog, pending: list[int], random: Random) -> Iterable[int]:
    """Give the indices in a random order that keeps the order within each sub-log."""
    sub_logs: dict[int, list[int]] = {}
    for index in pending:
        sub_logs.setdefault(log.sub_log(index), []).append(index)
    remaining = [iter(indices) for indices in sub_logs.values()]
    while remaining:
        chosen = random.randrange(len(remaining))
        for _ in range(random.randint(1, 6)):
            index = next(remaining[chosen], -1)
            if index < 0:
                remaining.pop(chosen)
                break
            yield index


class _Window:
    """The undelivered events next to a position, and the position as they are delivered."""

    def __init__(self, log: PartitionLog, start: LogPosition, size: int) -> None:
        self.log = log
        self.start = start
        self.moved = False
        self.ahead = ahead = dict(start.ahead)
        self.low = bisect_left(log.seqs, start.base)
        self.high = min(self.low + size, len(log.seqs))
        window = range(self.low, self.high)
        if ahead:
            self.pending = [i for i in window if log.seqs[i] >= ahead.get(log.sub_log(i), 0)]
            self.delivered = set(window).difference(self.pending)
        else:
            self.pending = list(window)
            self.delivered = set()

    def deliver(self, index: int) -> None:
        self.moved = True
        self.delivered.add(index)
        self.ahead[self.log.sub_log(index)] = self.log.seqs[index] + 1

    @property
    def at_end_of_log(self) -> bool:
        self._advance()
        return self.low == len(self.log.seqs)

    def position(self) -> LogPosition:
        self._advance()
        seqs = self.log.seqs
        base = seqs[self.low] if self.low < len(seqs) else self.log.end
        ahead = {sub_log: seq for sub_log, seq in self.ahead.items() if seq > base}
        return LogPosition(self.log.id, base, ahead)

    def _advance(self) -> None:
        while self.low < self.high and self.low in self.delivered:
            self.delivered.discard(self.low)
            self.low += 1
