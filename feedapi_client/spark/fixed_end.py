"""Where a read of an open partition ends, fixed when it begins. Imports no Spark.

`FixedEnd` recognizes the end. `EndWatch` says when it is asked for: which looks behind the end a
read makes, the search in small pages, and the next end.

A feed that grows faster than it is read has no present end that a reader arrives at. A batch read
and a run of ``availableNow`` therefore fix an end for each open partition, and stop there.

Two cursors can't be compared, and publishers set checkpoints where they like: the cursor of the end
may never come. A partition is at its fixed end when a checkpoint has that cursor.

Only that ends a batch read. Where a batch holds an event that comes behind the end, the end may lie
within the batch. Its events are then asked for again in smaller pages, which publishers close with
a checkpoint, until one ends at that cursor. Where none does, a later end is fixed: a batch read
needs an end, and not the earliest one.

A read that another one goes on from (``availableNow``) is also over when it brought the first
events behind the end, more than a page of them. These are recognized by their payloads, in any
order: a publisher may change the order between entities from request to request. Where it sends a
part of its events twice, that may be too early: the next run goes on there. A batch read would miss
the rest.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import orjson

from feedapi_client.errors import ProtocolError
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.protocol.text import shown
from feedapi_client.spark.source_options import OptionError

if TYPE_CHECKING:
    from feedapi_client.spark.fetch import Looks, Target

MIN_FOLLOWING = 8
"""Events behind the end that it takes to recognize them, at least."""
MAX_FOLLOWING = 2_000
"""Events behind the end that are looked at, at most."""
_WATCHED = 200
"""Of them, those that have to come: more than a page puts out of order."""
_MAX_SEARCHES = 2
"""Ends that are searched for in small pages. Where that failed before, it would again."""
_LATE_LOOK = 8
"""Responses before the first look behind a later end: looks are requests, and the feed grows."""


class FixedEnd:
    """Recognizes the end of a read in what the read brings.

    Arguments:
        cursor: the cursor of the end.
        exact: whether only that cursor ends the read.
    """

    def __init__(self, cursor: str, *, exact: bool = False) -> None:
        self.cursor = cursor
        self.exact = exact
        self._on_wire = orjson.dumps(cursor)[1:-1]
        # Other texts can be written in several ways in JSON: then each line is looked at.
        self._one_spelling = cursor.replace("-", "").replace("_", "").isalnum()
        self._tail = b""
        self.following: frozenset[int] = frozenset()
        """Fingerprints of the events behind the end; empty until they are known."""
        self._unseen: set[int] = set()

    def may_be_in(self, chunk: bytes) -> bool:
        """Whether the chunk of a response, or the one before it and this one, may hold the end."""
        if not self._one_spelling:
            return True
        found = self._on_wire in self._tail + chunk
        self._tail = chunk[-len(self._on_wire) :]
        return found

    def reached_by(self, batch: CheckpointedEvents) -> bool:
        """Whether the read is at the end, or behind it, after this batch."""
        if batch.cursor == self.cursor:
            return True
        if self.exact or not self.following:
            return False
        self._unseen.difference_update(fingerprints([batch]))
        return not self._unseen

    def events_before(self, batch: CheckpointedEvents) -> int | None:
        """Return how many events of the batch come before those behind the end; None: it has none.

        It is a guess where a publisher repeats events, or changes their order.
        """
        prints = fingerprints([batch]) if self.following else []
        return next((n for n, found in enumerate(prints) if found in self.following), None)

    def set_following(self, following: Sequence[int], next_of_read: Sequence[int]) -> bool:
        """Take the first events behind the end, and the next ones of the read.

        Returns:
            whether the read is behind the end already.
        """
        counts = Counter(following)
        # Payloads that repeat, such as heartbeats, say nothing about the place they stand at.
        watched = [one for one in following if counts[one] == 1][:_WATCHED]
        if len(watched) < MIN_FOLLOWING:
            return False
        self.following, self._unseen = frozenset(watched), set(watched)
        return len(next_of_read) >= MIN_FOLLOWING and all(counts[one] == 1 for one in next_of_read)


def finds_no_end(rounds: Sequence[int]) -> bool:
    """Whether a batch read comes no nearer to an end, by its responses from one end to the next.

    A read that is faster than its feed needs fewer each time, until a response is empty. One that
    is slower, or finds an event with each request, never comes there. Rounds with a search don't
    count.
    """
    counted = rounds[_MAX_SEARCHES - 1 :]
    return len(counted) > 2 and counted[-1] >= counted[-2] >= counted[-3]


class MayHoldEnd(Exception):  # noqa: N818 - not an error
    """The fixed end may lie within a batch, which is not to be delivered."""

    def __init__(self, guess: int, events: int) -> None:
        super().__init__()
        self.guess = guess
        self.events = events


class EndWatch:
    """Watches one read. Without a fixed end in `target`, nothing is ever reached.

    Arguments:
        target: what is read.
        looks: reads the same partition, at other cursors.
        feed: the feed's URL, for errors.
    """

    def __init__(self, target: Target, looks: Looks, *, feed: str) -> None:
        self._looks = looks
        self._feed = feed
        self._partition = target.partition
        self._required = target.end if target.required else None
        self._looked = False
        end = target.end
        self._end = None if end is None else FixedEnd(end, exact=not target.resumable)
        self._rounds: list[int] = []  # responses until each end that was passed
        self._responses = 0
        self.reached = target.end == target.cursor
        """Whether the read is at its end, or behind it."""

    @property
    def _searches(self) -> bool:
        return len(self._rounds) < _MAX_SEARCHES

    def may_be_in(self, chunk: bytes) -> bool:
        """As `FixedEnd.may_be_in`."""
        return self._end is not None and self._end.may_be_in(chunk)

    def check(self, batch: CheckpointedEvents) -> None:
        """Look at a batch before it is delivered.

        Raises:
            MayHoldEnd: the end may lie within it: it is to be read again by `pages_to_end`.
            FeedError: the end was passed, and no later one can be fixed.
            OptionError: the end was passed, and it was asked for.
        """
        end = self._end
        if end is None or not end.exact or batch.cursor == end.cursor:
            return
        if self._required is not None and not self._looked:  # it may lie in the first batch
            self._looked = True
            end.set_following(self._looks.fingerprints(end.cursor, MAX_FOLLOWING), ())
        guess = end.events_before(batch)
        if guess is not None and self._searches:
            raise MayHoldEnd(guess, len(batch.events))
        if guess is not None:
            self._fix_later_end()

    def delivered(self, batch: CheckpointedEvents) -> None:
        """Take a batch that is about to be delivered."""
        if self._end is not None and self._end.reached_by(batch):
            self.reached = True

    def response_over(self, cursor: str) -> None:
        """Find out which events come behind the fixed end, after 1, 2, 4 ... responses.

        Arguments:
            cursor: where the read is now.
        """
        self._responses += 1
        end, number = self._end, self._responses
        if end is None or number & (number - 1) or end.following:
            return
        if number < _LATE_LOOK and not self._searches:
            return
        upcoming = self._looks.fingerprints(cursor, MIN_FOLLOWING)
        following = self._looks.fingerprints(end.cursor, MAX_FOLLOWING) if upcoming else []
        if end.set_following(following, upcoming):
            self.reached = not end.exact
            if end.exact:
                self._fix_later_end()

    def pages_to_end(self, found: MayHoldEnd, cursor: str) -> Iterator[list[CheckpointedEvents]]:
        """Yield the events of a batch in smaller pages, up to the fixed end if it lies there.

        Else the end is passed with the next response: a later one is fixed.
        """
        end, size, left = self._end, max(1, found.guess), found.events
        assert end is not None
        self._end = None  # the pages are looked at here
        while size and left > 0:
            page = self._looks.page(cursor, size)
            if not page:
                break
            if not end.following.isdisjoint(fingerprints(page)):
                size //= 2
                continue
            left -= sum(len(batch.events) for batch in page)
            size = max(1, min(size, left))
            yield page
            cursor = page[-1].cursor
            if cursor == end.cursor:
                self.reached = True
                return
        self._fix_later_end()

    def _fix_later_end(self) -> None:
        """Replace the end, which was passed or can't be found, by the present one.

        Raises `OptionError` where this one was asked for, `ProtocolError` after too many.
        """
        if self._required is not None:
            raise OptionError(
                f"feedapi source: option endingCursors: partition {self._partition} of feed "
                f"{self._feed} has no checkpoint {shown(self._required)} on the way of this read, "
                "which is past that place now: name a cursor of a checkpoint, as column cursor has"
            )
        self._rounds.append(self._responses)
        if finds_no_end(self._rounds):
            raise ProtocolError(
                "grows while it is read, and no end of it can be found: no checkpoint lies at an "
                "end that was fixed, also when the events before it are asked for with a page "
                "size. Read it as a stream, with the trigger availableNow",
                feed=self._feed,
                partition=self._partition,
            )
        self._responses = 0
        later = self._looks.present_end()
        self._end = None if later is None else FixedEnd(later, exact=True)


def fingerprint(payload: msgspec.Raw) -> int:
    """Return a number that tells payloads apart."""
    return zlib.crc32(payload)


def fingerprints(batches: Iterable[CheckpointedEvents]) -> list[int]:
    """Return the fingerprints of all events."""
    return [fingerprint(event._payload) for batch in batches for event in batch.events]
