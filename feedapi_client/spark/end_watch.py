"""`EndWatch`: follows a read to its fixed end, and searches for an end that it passed.

What ends a read is in `feedapi_client.spark.fixed_end`. Here is when it is asked for: which looks
behind the end a read makes, the search in small pages, and the next end. Imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from feedapi_client.errors import ProtocolError
from feedapi_client.protocol.cursors import shown
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.fixed_end import MAX_FOLLOWING, MIN_IN_A_ROW, EndRounds, FixedEnd
from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.target import Target

if TYPE_CHECKING:
    from feedapi_client.spark.fetch import Looks


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
        self._end: FixedEnd | None = None
        if target.end is not None:
            self._end = FixedEnd(target.end, exact=not target.resumable)
        self._rounds = EndRounds()
        self._responses = 0
        self.reached = target.end == target.cursor
        """Whether the read is at its end, or behind it."""

    def may_be_in(self, chunk: bytes) -> bool:
        """Whether the chunk of a response, or the one before it and this one, may hold the end."""
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
        if guess is not None and self._rounds.searches:
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
        if end is None or number & (number - 1) or number < self._rounds.first_look:
            return
        if end.exact and end.knows_following:
            return
        if not end.knows_following:
            upcoming = self._looks.fingerprints(cursor, MIN_IN_A_ROW)
            following = self._looks.fingerprints(end.cursor, MAX_FOLLOWING) if upcoming else []
            passed = end.set_following(following, upcoming)
            if not end.exact:
                self.reached = passed
            elif passed:
                self._fix_later_end()
        elif end.later_end is None:
            end.later_end = self._looks.present_end()
        elif end.wants_unordered:
            following = self._looks.fingerprints(end.later_end, MAX_FOLLOWING)
            self.reached = end.set_unordered(following)

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
            if not end.is_before(page):
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

        Raises:
            OptionError: this end was asked for.
            ProtocolError: too many were passed.
        """
        if self._required is not None:
            raise OptionError(
                f"feedapi source: option endingCursors: partition {self._partition} of feed "
                f"{self._feed} has no checkpoint {shown(self._required)} on the way of this read, "
                "which is past that place now: name a cursor of a checkpoint, as column cursor has"
            )
        if not self._rounds.may_go_on(self._responses):
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
