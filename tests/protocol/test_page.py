"""The rules of one response, on `PageReader` alone: no HTTP, no runtime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feedapi_client.errors import (
    BufferLimitError,
    FeedError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
    TornResponseError,
)
from feedapi_client.protocol import decoder as module
from feedapi_client.protocol.decoder import PageDecoder
from feedapi_client.protocol.dialects import DIALECTS
from feedapi_client.protocol.page import (
    MIN_EMPTY_ANSWERS,
    CheckpointedEvents,
    EndEvidence,
    FeedAnswers,
    Outcome,
    PageReader,
    Progress,
    outcome_error,
    passed_limit,
)

FEED = "https://service/feed"
ASKED = "asked"


def reader(
    *,
    asked: str = ASKED,
    closed: bool = False,
    last_cursor: str | None = None,
    progress: Progress | None = None,
    max_unclosed_bytes: int = 1 << 20,
    max_line_bytes: int = 1 << 16,
) -> PageReader:
    decoder = PageDecoder(
        DIALECTS["v2-token"], feed=FEED, partition=2, max_line_bytes=max_line_bytes
    )
    return PageReader(
        decoder,
        feed=FEED,
        partition=2,
        asked=asked,
        closed=closed,
        last_cursor=last_cursor,
        progress=progress,
        max_unclosed_bytes=max_unclosed_bytes,
    )


def event(number: int) -> bytes:
    return b'{"data":{"n":%d}}\n' % number


def checkpoint(cursor: str) -> bytes:
    return b'{"cursor":"%s"}\n' % cursor.encode()


def shown(batches: Sequence[CheckpointedEvents]) -> list[tuple[list[int], str]]:
    return [([event.json()["n"] for event in batch.events], batch.cursor) for batch in batches]


LISTED: dict[str, Any] = {"closed": True, "last_cursor": "z"}
AT_END: dict[str, Any] = {"closed": True, "last_cursor": ASKED}
CLOSED: dict[str, Any] = {"closed": True}


def encoded_line(text: str) -> bytes:
    """A number is an event, ``?`` an unknown command, ``-`` a blank line, all else a cursor."""
    others = {"?": b'{"status":"maintenance"}\n', "-": b"\n"}
    return others.get(text) or (event(int(text)) if text.isdigit() else checkpoint(text))


@pytest.mark.parametrize(
    ("how", "response", "outcome", "batch", "held"),
    [
        # R3: batches end at the last checkpoint; what is behind it is never given.
        ({}, "1 a 2 b", "PROGRESS", ([1, 2], "b"), None),
        ({}, "1 a 2", "PROGRESS", ([1], "a"), None),
        ({}, "1 a a", "PROGRESS", ([1], "a"), None),
        ({}, "a", "PROGRESS", ([], "a"), None),
        (CLOSED, "b", "PROGRESS", ([], "b"), None),
        # R3: an echo of the cursor asked with is passed over before the first event.
        ({}, "asked 1 a", "PROGRESS", ([1], "a"), None),
        ({"asked": "_first"}, "_first 1 a", "PROGRESS", ([1], "a"), None),
        ({"asked": "_first"}, "_first", "SILENT", None, None),
        ({"asked": "_last"}, "_last", "SILENT", None, None),
        ({"asked": "_first"}, "1 _first", "NO_PROGRESS", None, ([1], "_first")),
        # R6: what an empty response shows.
        ({}, "", "SILENT", None, None),
        ({}, "asked", "END", None, None),
        (CLOSED, "", "EMPTY", None, None),
        (CLOSED, "-", "EMPTY", None, None),
        (CLOSED, "asked", "EMPTY", None, None),
        (AT_END, "", "END", None, None),
        (AT_END, "asked", "END", None, None),
        (LISTED, "", "LAGGING", None, None),
        (LISTED, "asked", "LAGGING", None, None),
        ({"last_cursor": "z"}, "", "SILENT", None, None),
        # R6: lines that are neither event nor checkpoint are no evidence.
        ({}, "?", "UNRECOGNIZED", None, None),
        (CLOSED, "?", "UNRECOGNIZED", None, None),
        ({}, "? asked", "END", None, None),
        ({"asked": "_first"}, "? _first", "SILENT", None, None),
        ({"asked": "_first", **CLOSED}, "? _first", "EMPTY", None, None),
        # R13: events with the cursor asked with would come again, so they are held.
        ({}, "1", "NO_PROGRESS", None, None),
        ({}, "1 asked", "NO_PROGRESS", None, ([1], ASKED)),
        ({}, "1 asked 2", "NO_PROGRESS", None, ([1], ASKED)),
        ({}, "1 asked 2 b", "PROGRESS", ([1, 2], "b"), None),
        ({}, "1 b asked 2 asked", "PROGRESS", ([1], "b"), ([2], ASKED)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("together", [True, False])
def test_what_a_response_comes_to(
    how: dict[str, Any], response: str, outcome: str, batch: Any, held: Any, together: bool
) -> None:
    page = reader(progress=Progress(9), **how)
    lines = [encoded_line(text) for text in response.split()]
    chunks = [b"".join(lines)] if together else lines
    batches = shown([batch for chunk in chunks for batch in page.feed(chunk)])
    assert page.finish() == ([], Outcome[outcome])
    events = [number for numbers, _ in batches for number in numbers]
    assert ((events, batches[-1][1]) if batches else None) == batch
    assert page.rest() == []
    assert (shown([page.held])[0] if page.held else None) == held
    assert page.cursor == (batches[-1][1] if batches else page.asked)


class TestBatches:
    def test_r03_a_last_line_without_newline_counts_when_the_response_is_complete(self) -> None:
        page = reader()
        assert page.feed(event(1) + checkpoint("a")[:-1]) == []
        finished = page.finish()
        assert (shown(finished.batches), finished.outcome) == ([([1], "a")], Outcome.PROGRESS)

    def test_the_size_of_a_batch_is_what_its_events_took_in_the_response(self) -> None:
        page, sizes = reader(), []
        for fill in (b"", b"\n{}\n", event(0) * 100 + checkpoint("c")):
            chunk = event(1) + checkpoint(f"a{len(sizes)}") + fill + event(2)
            chunk += checkpoint(f"b{len(sizes)}") + event(3)
            (batch,) = page.feed(chunk)
            sizes.append(batch.size)
            assert page.kept_bytes == len(event(3))
        assert sizes == [2 * len(event(1)), 3 * len(event(1)), 103 * len(event(1))]

    @pytest.mark.parametrize("asked", ["_first", ASKED])
    @pytest.mark.parametrize("events", [0, 1, 300])
    def test_r03_a_special_cursor_anywhere_else_is_an_error_and_closes_nothing(
        self, asked: str, events: int
    ) -> None:
        page = reader(asked=asked)
        lines = [event(n) for n in range(events)]
        assert page.feed(b"".join([*lines, checkpoint("_last"), checkpoint("b")])) == []
        with pytest.raises(ProtocolError, match="cursor _last, which only a request may use"):
            page.finish()

    def test_r06_r13_the_error_of_a_lagging_replica_names_its_cursors(self) -> None:
        behind = outcome_error(Outcome.BEHIND, "a", None, feed=FEED, partition=2)
        assert "fetch from 'a' names an older place" in str(behind)
        assert str(outcome_error(Outcome.LAGGING, "a", "z", feed=FEED, partition=2)) == (
            f"feed {FEED}, partition 2: the partition is closed and ends at lastCursor 'z', but "
            "nothing comes behind 'a': the replica that answers may lag behind. If nothing is "
            "missing, 'feedapi cursors drain 2' ends it here"
        )


def respond(progress: Progress, *lines: bytes, asked: str = ASKED, closed: bool = False) -> Outcome:
    page = reader(asked=asked, progress=progress, closed=closed)
    page.feed(b"".join(lines))
    return page.finish().outcome


class TestProgress:
    def test_r13_the_limit_of_responses_without_progress_is_an_error(self) -> None:
        progress = Progress(3)
        for stuck in (1, 2):
            assert respond(progress, event(1), checkpoint(ASKED)) is Outcome.NO_PROGRESS
            assert progress.stuck == stuck
        with pytest.raises(NoProgressError) as caught:
            respond(progress, event(1), checkpoint(ASKED))
        assert str(caught.value) == (
            f"feed {FEED}, partition 2: 3 responses in a row brought events and no new cursor. "
            "Asked with 'asked'"
        )

    @pytest.mark.parametrize(
        "lines",
        [[event(1), checkpoint("b")], [checkpoint("b")], [checkpoint(ASKED)], []],
        ids=["events", "moved", "end", "nothing"],
    )
    def test_r13_progress_or_an_end_resets_the_count(self, lines: list[bytes]) -> None:
        progress = Progress(2)
        for _ in range(3):
            assert respond(progress, event(1)) is Outcome.NO_PROGRESS
            respond(progress, *lines)
            assert progress.stuck == 0

    def test_empty_responses_that_move_the_cursor_are_counted_in_a_row(self) -> None:
        progress = Progress(2)
        for empty in (1, 2, 3):
            respond(progress, checkpoint(f"c{empty}"))
            assert progress.empty == empty
        respond(progress, checkpoint(ASKED))
        assert progress.empty == 3
        respond(progress, event(1), checkpoint("d"))
        assert progress.empty == 0


class TestCycles:
    """R13: cursors that return would bring the same events again, for ever."""

    @pytest.mark.parametrize("length", range(2, 9))
    @pytest.mark.parametrize("closed", [True, False])
    def test_r13_a_cycle_of_up_to_8_cursors_ends_after_one_round(
        self, length: int, closed: bool
    ) -> None:
        progress, delivered, asked = Progress(3), 0, "0"
        outcomes: list[Outcome] = []
        while outcomes[-2:] != [Outcome.NO_PROGRESS] * 2:
            page = reader(asked=asked, progress=progress, closed=closed)
            following = str((int(asked) + 1) % length)
            delivered += sum(len(b.events) for b in page.feed(event(1) + checkpoint(following)))
            outcomes.append(page.finish().outcome)
            asked = page.cursor
        page = reader(asked=asked, progress=progress, closed=closed)
        page.feed(event(1) + checkpoint("0"))
        with pytest.raises(NoProgressError, match="3 responses in a row returned to a cursor"):
            page.finish()
        assert delivered == length - 1

    def test_r13_a_cycle_within_one_endless_response_delivers_nothing_twice(self) -> None:
        page = reader()
        round_trip = event(1) + checkpoint("a") + event(2) + checkpoint("b")
        assert shown(page.feed(round_trip)) == [([1, 2], "b")]
        assert page.feed(round_trip * 3) == []
        assert page.cursor == "b"
        assert page.kept_bytes == 6 * len(event(1))

    @pytest.mark.parametrize("length", [9, 100, 2000])
    @pytest.mark.parametrize("fast", [True, False])
    def test_r13_a_cursor_that_returns_after_thousands_of_others_is_found(
        self, length: int, fast: bool
    ) -> None:
        progress, asked = Progress(1), "0"
        for number in range(1, length + 1):
            assert respond(progress, event(1), checkpoint(str(number)), asked=asked) is (
                Outcome.PROGRESS
            )
            asked = str(number)
        for earlier in ("0", "1", str(length - 9)):
            assert respond(progress, checkpoint(earlier), asked=asked) is Outcome.BEHIND
        with pytest.raises(NoProgressError, match="returned to a cursor"):
            respond(
                progress, *[event(n) for n in range(200 * fast + 1)], checkpoint("0"), asked=asked
            )

    def test_r13_no_more_passed_cursors_are_kept_than_the_bound(self) -> None:
        progress = Progress(1, passed=20)
        for number in range(1000):
            respond(progress, event(1), checkpoint(str(number + 1)), asked=str(number))
        assert respond(progress, checkpoint("985"), asked="1000") is Outcome.BEHIND
        assert respond(progress, checkpoint("900"), asked="1000") is Outcome.PROGRESS

    @pytest.mark.parametrize("fast", [True, False])
    def test_r13_every_checkpoint_of_a_page_was_passed(self, fast: bool) -> None:
        progress, count = Progress(1), 400 if fast else 12
        lines = [event(n) + checkpoint(str(n + 1)) for n in range(count)]
        assert respond(progress, *lines, asked="0") is Outcome.PROGRESS
        assert respond(progress, checkpoint("3"), asked=str(count)) is Outcome.BEHIND
        more = [*lines[3:], event(count), checkpoint(str(count + 1))]
        page = reader(asked=str(count), progress=progress)
        assert shown(page.feed(b"".join(more)))[-1][1] == str(count + 1)

    def test_r13_many_partitions_remember_fewer_cursors_each(self) -> None:
        assert [passed_limit(n) for n in (0, 1, 64, 128, 32768)] == [4096, 4096, 4096, 2048, 8]

    def test_r13_what_came_after_a_restart_is_no_cycle(self) -> None:
        progress, asked = Progress(1), "0"
        for number in range(1, 41):
            respond(progress, event(1), checkpoint(str(number)), asked=asked)
            asked = str(number)
        for restart in (30, 5, 39):
            for number in range(restart, 40):
                answer = respond(progress, event(1), checkpoint(str(number + 1)), asked=str(number))
                assert answer is Outcome.PROGRESS
        assert respond(progress, checkpoint("5"), asked="40") is Outcome.BEHIND

    def test_r13_after_an_empty_way_back_the_events_that_were_read_are_dropped(self) -> None:
        progress = Progress(3)
        assert respond(progress, event(1), event(2), checkpoint("400")) is Outcome.PROGRESS
        # A replica that lags names its own end.
        assert respond(progress, checkpoint("337"), asked="400") is Outcome.PROGRESS
        page = reader(asked="337", progress=progress)
        assert page.feed(event(2) + checkpoint("400")) == []
        assert page.finish() == ([CheckpointedEvents([], "400", 0)], Outcome.BEHIND)
        assert page.cursor == "400"
        assert respond(progress, checkpoint("337"), asked="400") is Outcome.BEHIND
        assert respond(progress, event(3), checkpoint("401"), asked="400") is Outcome.PROGRESS

    def test_r13_the_way_back_may_take_two_lagging_answers(self) -> None:
        progress = Progress(3)
        assert respond(progress, event(1), event(2), checkpoint("400")) is Outcome.PROGRESS
        assert respond(progress, checkpoint("300"), asked="400") is Outcome.PROGRESS
        assert respond(progress, event(1), checkpoint("350"), asked="300") is Outcome.PROGRESS
        assert respond(progress, checkpoint("320"), asked="350") is Outcome.PROGRESS
        page = reader(asked="320", progress=progress)
        assert page.feed(event(2) + checkpoint("400")) == []
        assert page.finish() == ([CheckpointedEvents([], "400", 0)], Outcome.BEHIND)

    def test_r13_two_names_of_the_end_of_an_open_partition_are_no_cycle(self) -> None:
        progress = Progress(1)
        assert respond(progress, event(1), checkpoint("a"), asked="0") is Outcome.PROGRESS
        assert respond(progress, checkpoint("b"), asked="a") is Outcome.PROGRESS
        for _ in range(3):
            assert respond(progress, checkpoint("a"), asked="b") is Outcome.END
        assert respond(progress, event(2), checkpoint("c"), asked="b") is Outcome.PROGRESS

    def test_r06_to_return_to_last_cursor_is_progress(self) -> None:
        progress = Progress(1)
        for asked, cursor in [("0", "end"), ("end", "same place"), ("same place", "end")]:
            page = reader(asked=asked, closed=True, last_cursor="end", progress=progress)
            page.feed(checkpoint(cursor))
            assert page.finish().outcome is Outcome.PROGRESS
        page = reader(asked="end", closed=True, last_cursor="end", progress=progress)
        assert page.finish().outcome is Outcome.END


class TestEndEvidence:
    """R6: when empty answers of a closed partition show its end."""

    def ask(
        self, evidence: EndEvidence, *, since: float = 0.0, discover: bool = True, until: float = 99
    ) -> list[float]:
        """Ask until the end is shown. Return when each answer came."""
        now, times, info = 0.0, [], object()
        while now < until:
            times.append(now)
            pause = evidence.add(info, now=now, since=since)
            if pause is None:
                return times
            assert pause > 0
            now += pause
            info = object() if discover else info
        return []

    def test_r06_empty_answers_have_to_repeat_over_the_settle_time(self) -> None:
        times = self.ask(EndEvidence(10.0, 0.2))
        assert times[-1] == pytest.approx(10.0)
        assert len(times) < 12

    def test_r06_the_time_counts_from_when_the_partition_was_first_seen_closed(self) -> None:
        times = self.ask(EndEvidence(10.0, 0.2), since=-60.0)
        assert len(times) == MIN_EMPTY_ANSWERS
        assert times[-1] == pytest.approx(0.6)

    def test_r06_without_a_discovery_in_between_nothing_is_an_end(self) -> None:
        assert self.ask(EndEvidence(1.0, 0.2), discover=False) == []

    def test_r06_other_answers_let_the_count_begin_anew(self) -> None:
        evidence = EndEvidence(1.0, 0.2)
        infos = [object() for _ in range(6)]
        for n in range(2):
            assert evidence.add(infos[n], now=50.0 + 0.3 * n, since=0.0) is not None
        evidence.reset()
        assert evidence.answers == 0
        assert evidence.lacks_discovery(infos[0])
        found = [evidence.add(info, now=50.7 + n / 2, since=0.0) for n, info in enumerate(infos)]
        assert [each is None for each in found] == [False, False, True, True, True, True]


class TestFeedAnswers:
    """R6: half of a feed's answers, within a time."""

    @pytest.mark.parametrize(("every", "failed_at"), [(2, 59.5), (3, -math.inf), (40, -math.inf)])
    def test_r06_half_of_the_answers_is_what_counts(self, every: int, failed_at: float) -> None:
        answers = FeedAnswers(10.0)
        for n in range(120):
            answers.add(n / 2, failed=n % every == every - 1)
        assert answers.failed_at == failed_at

    def test_r06_only_those_of_that_time_count(self) -> None:
        answers = FeedAnswers(10.0)
        for _ in range(100):
            answers.add(0.0, failed=False)
        for n in range(30):
            answers.add(float(n), failed=True)
            answers.add(float(n), failed=False)
        assert answers.failed_at == 29.0
        answers.add(100.0, failed=False)
        answers.add(100.0, failed=False)
        answers.add(100.0, failed=True)
        assert answers.failed_at == 29.0


class TestFaults:
    @pytest.mark.parametrize(
        ("line", "kind"),
        [
            (b"oops\n", TornResponseError),
            (b'{"data":7}\n', ProtocolError),
            (b'{"cursor":""}\n', TornResponseError),
            (b'{"data":"' + b"x" * 200 + b'"}\n', LineTooLongError),
        ],
    )
    def test_a_fault_takes_no_batch_before_it_along(
        self, line: bytes, kind: type[FeedError]
    ) -> None:
        page = reader(max_line_bytes=100)
        page.check()
        chunk = event(1) + checkpoint("a") + event(2) + line + event(3) + checkpoint("c")
        assert shown(page.feed(chunk)) == [([1], "a")]
        for _ in range(2):
            with pytest.raises(kind):
                page.check()
            with pytest.raises(kind):
                page.finish()
            assert page.feed(event(4) + checkpoint("d")) == []
        assert page.rest() == []
        assert page.cursor == "a"


class TestBound:
    def test_r03_the_bytes_without_a_checkpoint_are_bounded(self) -> None:
        limit = 3 * len(event(1))
        page = reader(max_unclosed_bytes=limit)
        for number in (1, 2, 3):
            assert page.feed(event(number)) == []
            page.check()
        assert page.kept_bytes == limit
        page.feed(b"{")
        with pytest.raises(BufferLimitError) as caught:
            page.check()
        assert f"{limit + 1} bytes came without a checkpoint" in str(caught.value)
        assert f"Limits.max_buffered_bytes is {limit}" in str(caught.value)
        assert str(caught.value).startswith(f"feed {FEED}, partition 2: ")

    def test_r03_batches_before_the_bound_count(self) -> None:
        page = reader(max_unclosed_bytes=10)
        assert shown(page.feed(event(1) + checkpoint("a") + event(2))) == [([1], "a")]
        with pytest.raises(BufferLimitError):
            page.finish()


# ---------------------------------------------------------------------- any response

Line = int | str | None  # an event's number, a checkpoint's cursor, an unknown command

lines_of_a_response = st.lists(
    st.one_of(st.integers(0, 99), st.sampled_from([ASKED, "a", "b", "c"]), st.none()), max_size=14
)
cuts = st.lists(st.integers(0, 10_000), max_size=8)


def encoded(lines: list[Line]) -> bytes:
    return b"".join(
        b'{"resync":true}\n'
        if line is None
        else event(line)
        if isinstance(line, int)
        else checkpoint(line)
        for line in lines
    )


class Reading(NamedTuple):
    """Everything that must not depend on the chunks."""

    events: list[int]
    cursor: str
    outcome: Outcome | type[FeedError]
    held: list[tuple[list[int], str]]
    kept_bytes: int
    last_checkpoint: str | None
    unknown_commands: int


def read(page: PageReader, chunks: list[bytes]) -> Reading:
    batches: list[CheckpointedEvents] = []
    outcome: Outcome | type[FeedError]
    for chunk in chunks:
        batches += page.feed(chunk)
    try:
        finished = page.finish()
    except FeedError as error:
        outcome = type(error)
    else:
        batches += finished.batches
        outcome = finished.outcome
    batches += page.rest()
    assert page.cursor == (batches[-1].cursor if batches else page.asked)
    assert all(batch.cursor != page.asked for batch in batches)
    return Reading(
        [number for numbers, _ in shown(batches) for number in numbers],
        page.cursor,
        outcome,
        shown([page.held]) if page.held else [],
        page.kept_bytes,
        page.last_checkpoint,
        page.unknown_commands,
    )


def chunked(body: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in pairwise(ends)]


def expected(lines: list[Line], *, closed: bool) -> Reading:
    """The rules once more, on whole lines. (No response has more than 8 different cursors.)"""
    cursors = [line for line in lines if isinstance(line, str)]
    moving = [
        at
        for at, line in enumerate(lines)
        if isinstance(line, str) and line not in (ASKED, *lines[:at])
    ]
    cut = moving[-1] + 1 if moving else 0
    repeated = [at for at, line in enumerate(lines) if isinstance(line, str) and at >= cut]
    held = [n for n in lines[cut : repeated[-1]] if isinstance(n, int)] if repeated else []
    if moving:
        outcome = Outcome.PROGRESS
    elif any(isinstance(line, int) for line in lines):
        outcome = Outcome.NO_PROGRESS
    elif None in lines and not cursors:
        outcome = Outcome.UNRECOGNIZED
    elif closed:
        outcome = Outcome.EMPTY
    elif not cursors:
        outcome = Outcome.SILENT
    else:
        outcome = Outcome.END
    return Reading(
        [line for line in lines[:cut] if isinstance(line, int)],
        str(lines[cut - 1]) if cut else ASKED,
        outcome,
        [(held, cursors[-1])] if held else [],
        len(encoded([line for line in lines[cut:] if isinstance(line, int)])),
        cursors[-1] if cursors else None,
        lines.count(None),
    )


@example([1, "b", ASKED], [18], True, True)
@given(lines_of_a_response, cuts, st.booleans(), st.booleans())
def test_any_chunking_gives_the_same_events_and_outcome(
    lines: list[Line], places: list[int], closed: bool, fast: bool
) -> None:
    body = encoded(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SMALL", 0 if fast else 1 << 20)
        readings = [
            read(reader(closed=closed), chunks)
            for chunks in ([body], chunked(body, places), [bytes([byte]) for byte in body])
        ]
    assert readings == [expected(lines, closed=closed)] * 3


@given(lines_of_a_response, cuts, st.integers(0, 10_000))
def test_of_a_torn_response_a_prefix_closed_by_a_checkpoint_is_given(
    lines: list[Line], places: list[int], end: int
) -> None:
    whole = encoded(lines)
    body = whole[: end % (len(whole) + 1)]
    progress = Progress(1)
    progress.stuck = 1
    page = reader(progress=progress)
    batches = [batch for chunk in chunked(body, places) for batch in page.feed(chunk)]
    complete = lines[: body.count(b"\n")]
    given_up_to = expected(complete, closed=False)
    assert [n for numbers, _ in shown(batches) for n in numbers] == given_up_to.events
    assert page.cursor == given_up_to.cursor
    assert page.rest() == []
    assert progress.stuck == (0 if batches else 1)


@given(lines_of_a_response, cuts, st.integers(1, 80))
def test_never_more_is_kept_than_the_bound_and_one_chunk(
    lines: list[Line], places: list[int], limit: int
) -> None:
    page = reader(max_unclosed_bytes=limit)
    for chunk in chunked(encoded(lines), places):
        before = page.kept_bytes
        page.feed(chunk)
        assert page.kept_bytes <= before + len(chunk)
        try:
            page.check()
        except BufferLimitError:
            assert page.kept_bytes > limit
            return
        assert page.kept_bytes <= limit


@pytest.mark.parametrize("line", [b"\n", b'{"ping":1}\n', checkpoint(ASKED)])
@pytest.mark.parametrize("fast", [True, False])
def test_r15_what_keeps_a_stream_alive_counts_for_nothing_that_is_bounded(
    line: bytes, fast: bool
) -> None:
    page = reader(max_unclosed_bytes=200)
    for _ in range(100):
        assert page.feed(line * (100 if fast else 1)) == []
        page.check()
    assert page.kept_bytes == 0
    page.feed(event(1))
    for _ in range(100):
        page.feed(line * (100 if fast else 1))
        page.check()
    assert page.kept_bytes == len(event(1))
