"""Checks of the lines of a page, and of where cursors lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence, Visit
from feedapi_client.cli.doctor.probe_messages import ProbeProblem, ProbeResponse
from feedapi_client.cli.doctor.wire_page import WirePage
from feedapi_client.model import FIRST, LAST

_LONG_LINE = 64 * 1024
_EMPTY_PAGES = 3
_OWN_CHECKS = (ProbeProblem.BROKEN, ProbeProblem.CODING, ProbeProblem.NOT_ASKED)
_FIELD = "publishers in the field"
_FETCH = "specification, Fetch call, request"
_RESPONSE = "specification, Fetch call, response"
_CHECKPOINT = "specification, Fetch call, checkpoint command"

SECTION = CheckSection("Pages and cursors")


def _refused(answer: ProbeResponse) -> bool:
    return not answer.ok and answer.problem not in _OWN_CHECKS


@SECTION.check(
    "fetch-first",
    Level.MUST,
    requirement="Each listed partition can be fetched from `_first`.",
    cost="A consumer can't start on this partition.",
    source=_FETCH,
    rules=("R7", "R10"),
    needs=(needs.VISITS,),
)
def _answers_first(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        if _refused(visit.pages[0].answer):
            yield Finding.about(visit.pages[0].answer)


@SECTION.check(
    "fetch-last",
    Level.MUST,
    requirement="Each listed partition can be fetched from `_last`.",
    cost="A consumer can't start at the end.",
    source=_FETCH,
    rules=("R7", "R10"),
    needs=(needs.LAST,),
)
def _answers_last(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        if visit.last is not None and _refused(visit.last.answer):
            yield Finding.about(visit.last.answer)


@SECTION.check(
    "cursor-accepted",
    Level.MUST,
    requirement="Each cursor that the publisher gives can be sent back, percent-encoded.",
    cost="A consumer can't go on: after `RetryPolicy.refused_for` it ends with "
    "`CursorRejectedError`.",
    source=_FETCH,
    rules=("R10",),
    needs=(needs.PAGES,),
)
def _answers_cursors(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if page.asked not in (FIRST, LAST) and _refused(page.answer):
            yield Finding.about(page.answer)


def _line_fault(kind: str) -> Callable[[FeedEvidence], Iterator[Finding]]:
    """Return the check that reports one kind of fault of a line."""

    def find(evidence: FeedEvidence) -> Iterator[Finding]:
        for _, page in evidence.pages():
            faults = [fault for fault in page.faults if fault.kind == kind]
            if faults:
                first = faults[0]
                more = f", and {len(faults) - 1} more lines" if len(faults) > 1 else ""
                yield Finding.about(page.answer, f"line {first.line} {first.text}{more}")

    return find


SECTION.check(
    "line-json",
    Level.MUST,
    requirement=r"A page is NDJSON: each line, up to `\n`, is a JSON object.",
    cost="What follows the last checkpoint before the line is thrown away and fetched again.",
    source=_RESPONSE,
    rules=("R3", "R14"),
    needs=(needs.PAGES,),
)(_line_fault("line-json"))


SECTION.check(
    "payload-type",
    Level.MUST,
    requirement="The payload of an event is a JSON object or a string.",
    cost="A consumer stops at this event: `ProtocolError`.",
    source="specification, Fetch call, event command",
    rules=("R3", "R18"),
    needs=(needs.EVENTS,),
)(_line_fault("payload-type"))


SECTION.check(
    "payload-key",
    Level.MUST,
    requirement="Events are under `event` in a draft feed, and under `data` in the others.",
    cost="This library reads both keys. Other clients skip the events as unknown commands: "
    "they are lost without an error.",
    source=_RESPONSE,
    rules=("R3",),
    needs=(needs.PAGES,),
)(_line_fault("payload-key"))


SECTION.check(
    "key-case",
    Level.MUST,
    requirement="The keys of a line are in lower case.",
    cost="This library and clients in Go read them. Others skip the line: events are lost "
    "without an error.",
    source=_RESPONSE,
    rules=("R3",),
    needs=(needs.PAGES,),
)(_line_fault("key-case"))


SECTION.check(
    "line-partition",
    Level.MUST,
    requirement="In dialect v1 each line names the partition that was asked for.",
    cost="A consumer stops: the events may belong elsewhere.",
    source="ZeroEventHub, version 1",
    rules=("R3",),
    needs=(needs.dialects("v1"), needs.PAGES),
)(_line_fault("line-partition"))


SECTION.check(
    "cursor-text",
    Level.MUST,
    requirement="A cursor is a string of printable ASCII, not empty, of at most 16 KiB.",
    cost="A consumer stops before it: it could neither store the cursor nor send it.",
    source=_CHECKPOINT,
    rules=("R18",),
    needs=(needs.PAGES,),
)(_line_fault("cursor-text"))


SECTION.check(
    "cursor-special",
    Level.MUST,
    requirement="A response has cursors of its own, never `_first` or `_last`.",
    cost="`_first` reads all events again. `_last` loses what was published since.",
    source=_FETCH,
    rules=("R13",),
    needs=(needs.PAGES,),
)(_line_fault("cursor-special"))


def _closed_end(evidence: FeedEvidence, visit: Visit, page: WirePage) -> bool:
    return evidence.was_closed(visit.partition.id) and not page.payloads


@SECTION.check(
    "page-cursor",
    Level.MUST,
    requirement="Every response has at least one cursor, also without an event.",
    cost="Its events come again: `NoProgressError` after a few attempts.",
    source=_CHECKPOINT,
    rules=("R3", "R13"),
    needs=(needs.PAGES,),
)
def _has_checkpoint(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        for page in visit.all_pages():
            if page is not visit.last and page.whole and not page.checkpoints:
                if page.payloads:
                    yield Finding.about(page.answer, f"{len(page.payloads)} events and no cursor")
                elif not _closed_end(evidence, visit, page) and not page.echoes:
                    yield Finding.about(page.answer, "no event and no cursor")


@SECTION.check(
    "cursor-progress",
    Level.MUST,
    requirement="Behind events comes a cursor that leads on.",
    cost="The same events come again: `NoProgressError` after a few attempts.",
    source=_CHECKPOINT,
    rules=("R13",),
    needs=(needs.EVENTS,),
)
def _progress(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        asked: list[str] = []
        for page in visit.pages:
            asked.append(page.asked)
            if page.answer.ok and page.payloads and page.cursor in asked:
                back = "the cursor asked with" if page.cursor == page.asked else "an earlier cursor"
                yield Finding.about(page.answer, f"{len(page.payloads)} events, then {back}")
                break


def _leads_back(pages: list[WirePage], seen: set[bytes]) -> WirePage | None:
    """Return an empty page whose cursor leads to events that came before.

    Arguments:
        pages: each from the last cursor of the one before.
        seen: events that came before these pages.
    """
    for page, behind in pairwise(pages):
        seen.update(page.events()[: page.checkpoints[-1].events_before] if page.checkpoints else ())
        if page.moved_to and not page.payloads and not seen.isdisjoint(behind.events()):
            return page
    return None


@SECTION.check(
    "cursor-onwards",
    Level.MUST,
    requirement="An empty page leads to no place before the one that was asked for.",
    cost="Events are delivered twice. Usually it is a replica that lags, and answers with its "
    "own older end.",
    source=_CHECKPOINT,
    rules=("R13",),
    needs=(needs.PAGES,),
)
def _leads_onwards(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        known = visit.known()
        back = next((page for page in visit.all_pages() if known.before(page)), None)
        if back is None:
            back = _leads_back(visit.pages, set())
        if back is None:
            back = _leads_back(visit.polls, set(known.events))
        if back is not None:
            yield Finding.about(
                back.answer, "no event, and a cursor behind which events come again"
            )


SECTION.check(
    "page-discovery",
    Level.MUST,
    requirement="A fetch is not answered with the discovery document.",
    cost="A consumer reads nothing and ends with an error. Usually it is a redirect or a "
    "gateway that drops the path or the query.",
    source=_FIELD,
    rules=("R3",),
    needs=(needs.PAGES,),
)(_line_fault("page-discovery"))


@SECTION.check(
    "page-meaning",
    Level.MUST,
    requirement="A page that has lines has an event or a cursor.",
    cost="It is no evidence of an end: a consumer asks again, and reports it. Usually it is a "
    "gateway or a maintenance page.",
    source=_FIELD,
    rules=("R3", "R6"),
    needs=(needs.PAGES,),
)
def _has_meaning(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if page.meaningless and not page.payloads and not page.checkpoints:
            text = page.answer.body[:80].decode("ascii", "replace").strip()
            yield Finding.about(
                page.answer,
                f"{page.meaningless} lines, none of them an event or a cursor: {text!r}",
            )


@SECTION.check(
    "closed-end",
    Level.MUST,
    requirement="Nothing comes behind the end of a closed partition.",
    cost="A consumer is done there: these events are never read.",
    source="specification, Partitions, starting and closing partitions",
    rules=("R6",),
    needs=(needs.CLOSED, needs.PAGES),
)
def _nothing_behind_last_cursor(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        page = visit.at_last_cursor
        if page is not None and page.payloads:
            yield Finding.about(
                page.answer,
                f"{len(page.payloads)} events behind its lastCursor, and it is closed",
            )
        elif visit.partition.closed and any(poll.payloads for poll in visit.polls):
            yield Finding("it is closed, and events come behind its end", visit.partition.id)


@SECTION.check(
    "closed-end-reached",
    Level.MUST,
    requirement="Reading a closed partition ends at its `lastCursor`.",
    cost="The partition is never drained and its children wait: `NoProgressError` after "
    "`RetryPolicy.give_up_after`.",
    source="specification, Discovery call, partitions",
    rules=("R6",),
    needs=(needs.CLOSED_READ,),
)
def _last_cursor_is_reached(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        end = visit.pages[-1]
        wanted = visit.partition.last_cursor
        if visit.at_last_cursor is None or not end.at_end or end.asked in (FIRST, wanted):
            continue
        yield Finding("reading it ends at another cursor than its lastCursor", visit.partition.id)


def _closed_events(page: WirePage) -> list[tuple[Any, bytes]]:
    """The events that do not come again: those before a checkpoint that leads on."""
    if page.cursor == page.asked or not page.checkpoints:
        return []
    events = list(zip(page.payloads, page.events(), strict=True))
    return events[: page.checkpoints[-1].events_before]


@SECTION.check(
    "exactly-once",
    Level.MUST,
    requirement="Where discovery has `exactlyOnce`, no event comes twice.",
    cost="Consumers that rely on it apply the event twice.",
    source="specification, Discovery call, flags",
    needs=(needs.EXACTLY_ONCE, needs.EVENTS),
)
def _exactly_once(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        seen: set[bytes] = set()  # of this partition: the next one may have its history, too
        for page in visit.pages:
            for payload, content in _closed_events(page):
                if not isinstance(payload, dict) or "id" not in payload:
                    continue
                if content in seen:
                    yield Finding.about(
                        page.answer,
                        "an event with an id that came before, with the same content",
                    )
                    return
                seen.add(content)


@SECTION.check(
    "last-cursor-given",
    Level.DEVIATION,
    requirement="The answer to `_last` has a cursor.",
    cost="A consumer can't start at the end: `feedapi cursors skip` has to read all events.",
    source=_FIELD,
    rules=("R7",),
    needs=(needs.LAST,),
)
def _last_has_cursor(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        if visit.last is not None and visit.last.whole and not visit.last.checkpoints:
            yield Finding.about(visit.last.answer, "no cursor")


@SECTION.check(
    "cursor-echo",
    Level.DEVIATION,
    requirement="An empty page has a cursor of its own, not the `_first` or `_last` that was "
    "asked with.",
    cost='It counts as no cursor. With `start="last"` a consumer can\'t start: `feedapi '
    "cursors skip` has to read all events.",
    source=_FIELD,
    rules=("R3", "R7"),
    needs=(needs.PAGES,),
)
def _no_echo(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if page.echoes:
            yield Finding.about(page.answer, f"no event, and {page.asked} as the cursor")


@SECTION.check(
    "closed-end-cursor",
    Level.DEVIATION,
    requirement="The end of a closed partition is answered with a cursor.",
    cost="It can't be told from a fault on the way: a consumer asks again, for "
    "`Limits.settle_time`.",
    source=_FIELD,
    rules=("R6",),
    needs=(needs.CLOSED, needs.PAGES),
)
def _closed_end_has_cursor(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        for page in visit.all_pages():
            empty = page.whole and page is not visit.last and not page.checkpoints
            if empty and _closed_end(evidence, visit, page) and not page.echoes:
                yield Finding.about(page.answer, "no event and no cursor")
                break


@SECTION.check(
    "final-newline",
    Level.DEVIATION,
    requirement=r"The last line ends in `\n` too.",
    cost="It can't be told from a line that was cut. Other clients drop it.",
    source=_FIELD,
    rules=("R3",),
    needs=(needs.PAGES,),
)
def _final_newline(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if not page.final_newline and page.whole:
            yield Finding.about(page.answer, "the last line has no newline")


@SECTION.check(
    "line-length",
    Level.DEVIATION,
    requirement="No line is longer than 64 KiB.",
    cost="This library reads lines of 16 MiB. Old clients give up at 64 KiB, silently.",
    source=_FIELD,
    rules=("R3",),
    needs=(needs.PAGES,),
)
def _line_length(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if page.longest_line > _LONG_LINE:
            yield Finding.about(page.answer, f"a line of {page.longest_line} bytes or more")


@SECTION.check(
    "cursor-distance",
    Level.DEVIATION,
    requirement="A cursor comes within the megabyte that is read of a page.",
    cost="A consumer keeps all of it in memory: `BufferLimitError` at `Limits.max_buffered_bytes`.",
    source=_FIELD,
    rules=("R16",),
    needs=(needs.PAGES,),
)
def _checkpoint_distance(evidence: FeedEvidence) -> Iterator[Finding]:
    for _, page in evidence.pages():
        if page.answer.cut and not page.checkpoints and page.answer.status == 200:
            yield Finding.about(page.answer, f"no cursor within {len(page.answer.body)} bytes")


@SECTION.check(
    "empty-pages",
    Level.DEVIATION,
    requirement="Pages that move the cursor without an event are rare.",
    cost="Many requests for nothing. The specification allows it, for events that are internal "
    "to the publisher.",
    source=_FIELD,
    rules=("R6", "R15"),
    needs=(needs.FOLLOWED,),
)
def _empty_progress(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        empty = [page for page in visit.pages if page.moved_to and not page.payloads]
        if len(empty) >= _EMPTY_PAGES and len(empty) == len(visit.pages):
            yield Finding(
                f"{len(empty)} pages from _first on move the cursor and hold no event",
                visit.partition.id,
            )


@SECTION.check(
    "end-stable",
    Level.DEVIATION,
    requirement="A poll at the end of a partition gets the cursor back that it asked with.",
    cost="Each poll is a save in the consumer's database, and the end is hard to tell.",
    source=_FIELD,
    rules=("R13", "R15"),
    needs=(needs.POLLED,),
)
def _end_is_stable(evidence: FeedEvidence) -> Iterator[Finding]:
    for visit in evidence.visits.values():
        polls = visit.polls
        if len(polls) > 1 and all(poll.moved_to and not poll.payloads for poll in polls):
            yield Finding(
                f"{len(polls)} polls at the end held no event and moved the cursor each time",
                visit.partition.id,
            )
