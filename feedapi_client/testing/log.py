"""One partition's events inside the publisher, and the pages that a request gets of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from feedapi_client.testing.cursors import Place

SUB_LOGS = 16
"""The publisher emulates a partition from this many sub-logs; an entity lives in one of them, which keeps its order."""

Visible = Callable[[bytes], bool]


class PartitionLog:
    """Events in the order of their feed-wide numbers, plus what discovery says of the partition.

    `payloads` holds None for an internal event, which takes a place in the log and is never shown.
    """

    def __init__(
        self,
        id: int,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> None:
        self.id = id
        self.closed = closed
        self.starts_after = starts_after
        self.cursor_from = tuple(cursor_from)
        self.listed = True
        self.heirs: tuple[int, ...] = ()
        self.heir_key: Callable[[object], object] | None = None
        self.seqs: array[int] = array("Q")
        self.hashes: array[int] = array("I")
        self.payloads: list[bytes | None] = []
        self.internal = 0

    def add(self, seq: int, hash: int, payload: bytes | None) -> None:
        """Append one event."""
        self.seqs.append(seq)
        self.hashes.append(hash)
        self.payloads.append(payload)
        if payload is None:
            self.internal += 1

    @property
    def end(self) -> int:
        """The number that the end of this log stands at: one more than its last event's."""
        return self.seqs[-1] + 1 if self.seqs else 0

    def accepts(self, origin: int) -> bool:
        """Whether a cursor that was handed out for partition `origin` is valid here."""
        return origin == self.id or origin in self.cursor_from


@dataclass(frozen=True, slots=True)
class Run:
    """Indices of events into a log, and the place behind them; without a place there is no checkpoint after the run."""

    indices: Sequence[int]
    place: Place | None


@dataclass(frozen=True, slots=True)
class Page:
    """What one response holds. `place` is where the next request goes on, `at_end` whether the log has nothing behind it."""

    runs: list[Run]
    place: Place
    at_end: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """How pages are cut: events in a page, events between two checkpoints, log entries looked at for one page at most, and whether the response goes on
    behind the page (so that all of it must be checkpointed)."""

    size: int
    every: int
    scan: int
    goes_on: bool = False


def plain_page(log: PartitionLog, place: Place, cut: Cut) -> Page:
    """The next events in the order of the log. Only for a place without sub-logs that are ahead, and a log without hidden events."""
    start = bisect_left(log.seqs, place.base)
    stop = min(start + cut.size, len(log.seqs))
    runs = []
    for at in range(start, stop, cut.every):
        end = min(at + cut.every, stop)
        place = Place(log.id, log.seqs[end - 1] + 1, {})
        runs.append(Run(range(at, end), place))
    return Page(runs, place, stop == len(log.seqs))


def picked_page(
    log: PartitionLog, place: Place, cut: Cut, visible: Visible | None, rng: Random | None
) -> Page:
    """The general page: events that the place has not delivered yet, hidden ones left out, and with `rng` in another order, size and with other
    checkpoints each time, while the order within each sub-log is kept."""
    window = _Window(log, place, cut.scan)
    order = window.pending if rng is None else _interleave(log, window.pending, rng)
    left = cut.size if rng is None else rng.randint(1, cut.size)
    runs = [Run((), place)] if rng is not None and rng.random() < 0.1 else []
    shown: list[int] = []
    target = _run_length(cut, rng)
    for index in order:
        window.deliver(index)
        payload = log.payloads[index]
        if payload is None or (visible is not None and not visible(payload)):
            continue
        shown.append(index)
        left -= 1
        if len(shown) == target:
            runs.append(Run(shown, window.place()))
            shown, target = [], _run_length(cut, rng)
        if not left:
            break
    return _finish(window, runs, shown, None if cut.goes_on else rng)


def _run_length(cut: Cut, rng: Random | None) -> int:
    return cut.every if rng is None else rng.randint(1, 2 * cut.every)


def _finish(window: _Window, runs: list[Run], shown: list[int], rng: Random | None) -> Page:
    checkpointed = runs[-1].place if runs else None
    if (
        shown
        and rng is not None
        and checkpointed not in (None, window.origin)
        and rng.random() < 0.3
    ):
        # Legal, and a trap: events behind the last checkpoint, which the consumer drops and gets again.
        assert checkpointed is not None
        return Page([*runs, Run(shown, None)], checkpointed, False)
    last = window.place() if window.moved else window.origin
    if shown or checkpointed != last:
        runs.append(Run(shown, last))
    return Page(runs, last, window.at_end)


def _interleave(log: PartitionLog, pending: list[int], rng: Random) -> Iterable[int]:
    queues: dict[int, list[int]] = {}
    for index in pending:
        queues.setdefault(log.hashes[index] % SUB_LOGS, []).append(index)
    turns = [iter(queue) for queue in queues.values()]
    while turns:
        turn = rng.randrange(len(turns))
        for _ in range(rng.randint(1, 6)):
            index = next(turns[turn], -1)
            if index < 0:
                turns.pop(turn)
                break
            yield index


class _Window:
    """The undelivered events next to a place, and the place as they are delivered."""

    def __init__(self, log: PartitionLog, place: Place, scan: int) -> None:
        self.log = log
        self.origin = place
        self.moved = False
        self.ahead = dict(place.ahead)
        self.low = bisect_left(log.seqs, place.base)
        self.high = min(self.low + scan, len(log.seqs))
        ahead = self.ahead
        if ahead:
            self.pending = [
                i
                for i in range(self.low, self.high)
                if log.seqs[i] >= ahead.get(log.hashes[i] % SUB_LOGS, 0)
            ]
            self.delivered = set(range(self.low, self.high)).difference(self.pending)
        else:
            self.pending = list(range(self.low, self.high))
            self.delivered = set()

    def deliver(self, index: int) -> None:
        self.moved = True
        self.delivered.add(index)
        self.ahead[self.log.hashes[index] % SUB_LOGS] = self.log.seqs[index] + 1

    @property
    def at_end(self) -> bool:
        self._advance()
        return self.low == len(self.log.seqs)

    def place(self) -> Place:
        self._advance()
        seqs = self.log.seqs
        base = seqs[self.low] if self.low < len(seqs) else self.log.end
        return Place(self.log.id, base, {sub: seq for sub, seq in self.ahead.items() if seq > base})

    def _advance(self) -> None:
        while self.low < self.high and self.low in self.delivered:
            self.delivered.discard(self.low)
            self.low += 1
