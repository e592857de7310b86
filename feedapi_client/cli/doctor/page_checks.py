"""Checks of the lines of a page, of where cursors lead, and of cursors that are asked for again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from feedapi_client.cli.doctor.examination import HINT, Examination, Resume, Visit
from feedapi_client.cli.doctor.feed_checks import (
    CLOSED,
    CLOSING,
    DEVIATION,
    FIELD,
    MUST,
    SHOULD,
    Finding,
    Findings,
    Section,
    about,
    need,
)
from feedapi_client.cli.doctor.prober import Problem
from feedapi_client.cli.doctor.wire import Page
from feedapi_client.model import FIRST, LAST
from feedapi_client.protocol.text import counted

PAGES = Section("Pages and cursors")
AGAIN = Section("Cursors asked for again")

FETCH = "specification, Fetch call, request"
_RESPONSE = "specification, Fetch call, response"
_CHECKPOINT = "specification, Fetch call, checkpoint command"
_FLAGS = "specification, Discovery call, flags"
_LONG_LINE = 64 * 1024

READ = need("no partition was read", lambda e: any(page.answer.ok for page in e.pages()))
EVENTS = need("no event was read", lambda e: any(page.payloads for page in e.pages()))
VISITS = need("no partition was asked", lambda e: e.visits)
RESUMED = need("no event came behind a cursor", lambda e: any(v.resumes for v in e.visits.values()))
EXACTLY_ONCE = need("the feed does not say exactlyOnce", lambda e: e.info and e.info.exactly_once)


@PAGES.check(MUST, FETCH, "R7 R10", VISITS)
def fetch_accepted(e: Examination) -> Findings:
    """Each listed partition can be fetched from `_first`, from `_last`, and from each cursor that
    the publisher gives, percent-encoded.
    A consumer can't start there, or not go on: after `RetryPolicy.refused_for` it ends with
    `CursorRejectedError`."""
    others = (Problem.BROKEN, Problem.CODING, Problem.NOT_ASKED)
    for answer in [page.answer for page in e.pages()]:
        if not answer.ok and answer.problem not in others:
            yield about(answer)


def _faults(e: Examination, check: str) -> Findings:
    for page in e.pages():
        if found := [fault for fault in page.faults if fault[0] == check]:
            _, text, said = found[0]
            times = f"{len(found)} times, first: " if found[1:] else ""
            yield about(page.answer, f"{times}{text}", said)


@PAGES.check(MUST, _RESPONSE, "R3 R13 R14 R18", READ)
def line_sound(e: Examination) -> Findings:
    r"""A page is NDJSON: each line, up to `\n`, is a JSON object. The payload of an event is an
    object or a string. A cursor is a string of printable ASCII, not empty, of at most 16 KiB, and
    never `_first` or `_last`. In dialect v1 each line names the partition that was asked for.
    A consumer stops there with `ProtocolError`, or throws away and fetches again what follows the
    last checkpoint before the line. `_first` reads all events again; `_last` loses what was
    published since."""
    return _faults(e, "line-sound")


@PAGES.check(MUST, _RESPONSE, "R3", READ)
def payload_key(e: Examination) -> Findings:
    """Events are under `event` in a draft feed, and under `data` in the others. The keys of a line
    are in lower case.
    This library reads them all. Other clients skip the events as unknown commands: they are lost
    without an error."""
    return _faults(e, "payload-key")


@PAGES.check(MUST, _CHECKPOINT, "R3 R6 R7 R13 R16", READ)
def page_cursor(e: Examination) -> Findings:
    """Every response has at least one cursor, also without an event (a deviation: none in the
    answer to `_last`, at the end of a closed partition, or within the megabyte that is read of a
    page; on an empty page, one that is only the `_first` or `_last` asked with).
    Its events come again: `NoProgressError` after a few attempts. A consumer can't start at such an
    end (`feedapi cursors skip` reads up to it), or asks again for `Limits.settle_time`."""
    closed = {p.id for info in e.infos for p in info.partitions.values() if p.closed}
    for page in [page for page in e.pages() if not page.checkpoints]:
        answer, count = page.answer, len(page.payloads)
        if page.echoes:
            yield about(answer, f"no event, and {page.asked} as the cursor", level=DEVIATION)
        elif answer.cut and answer.status == 200:
            yield about(answer, f"no cursor within {len(answer.body)} bytes", level=DEVIATION)
        elif page.whole:
            at_end = page.asked == LAST or (not count and answer.question.partition in closed)
            text = f"{counted(count, 'event') if count else 'no event'} and no cursor"
            yield about(answer, text, level=DEVIATION if at_end else "")


def _back(visit: Visit) -> Iterator[Page]:
    """Yield empty pages that lead to a place before their own, or to events that came before."""
    events, places = visit.known()
    for page in visit.all_pages():
        now = places.get(page.cursor or "", len(events))
        if not page.payloads and now < places.get(page.asked, 0):
            yield page
    for pages, before in ((visit.pages, set[bytes]()), (visit.polls, set(events))):
        for page, behind in pairwise(pages):
            before.update(page.closed_events)
            if page.moved_to and not page.payloads and not before.isdisjoint(behind.events):
                yield page


@PAGES.check(MUST, _CHECKPOINT, "R13", READ)
def cursor_progress(e: Examination) -> Findings:
    """Behind events comes a cursor that leads on, and an empty page leads to no place before the
    one that was asked for.
    The same events come again: `NoProgressError` after a few attempts, or they are delivered twice.
    Usually it is a replica that lags, and answers with its own older end."""
    for visit in e.visits.values():
        for index, page in enumerate(visit.pages, start=1):
            asked = [each.asked for each in visit.pages[:index]]
            if page.answer.ok and page.payloads and page.cursor in asked:
                back = "the cursor asked with" if page.cursor == page.asked else "an earlier cursor"
                yield about(page.answer, f"{counted(len(page.payloads), 'event')}, then {back}")
                break
        for page in list(_back(visit))[:1]:
            yield about(page.answer, "no event, and a cursor behind which events come again")


@PAGES.check(MUST, FIELD, "R3 R6", READ)
def page_meaning(e: Examination) -> Findings:
    """A page that has lines has an event or a cursor, and is not the discovery document.
    It is no evidence of an end: a consumer asks again, and reports it. Usually it is a gateway, a
    maintenance page, or a redirect that drops the path or the query."""
    yield from _faults(e, "page-meaning")
    for page in e.pages():
        body = page.answer.body.strip()
        if body and page.whole and not page.payloads and not page.checkpoints and not page.echoes:
            shown = body[:80].decode("ascii", "replace")
            yield about(page.answer, "lines without an event or a cursor: ", repr(shown))


@PAGES.check(MUST, CLOSING, "R6", CLOSED, READ)
def closed_end(e: Examination) -> Findings:
    """Reading a closed partition ends at its `lastCursor`, and nothing comes behind it.
    Events behind it are never read. Where it is not reached, the partition is never drained and its
    children wait: `NoProgressError` after `RetryPolicy.give_up_after`."""
    for id, visit in e.visits.items():
        page, end = visit.at_last_cursor, visit.pages[-1]
        if page is not None and page.payloads:
            yield about(
                page.answer, f"{counted(len(page.payloads), 'event')} behind the lastCursor"
            )
        elif visit.partition.closed and any(poll.payloads for poll in visit.polls):
            yield Finding("it is closed, and events come behind its end", id)
        if page is not None and end.at_end and end.asked not in (FIRST, page.asked):
            yield Finding("reading it ends at another cursor than its lastCursor", id)


@PAGES.check(MUST, _FLAGS, "", EXACTLY_ONCE, EVENTS)
def exactly_once(e: Examination) -> Findings:
    """Where discovery has `exactlyOnce`, no event comes twice.
    Consumers that rely on it apply the event twice."""
    for visit in e.visits.values():
        seen: set[bytes] = set()  # of this partition: the next one may have its history, too
        for page in visit.pages:
            closed = page.closed_events if page.cursor != page.asked else []
            for payload, content in zip(page.payloads, closed, strict=False):
                if content in seen:
                    yield about(page.answer, "an event with an id that came before")
                    return
                if isinstance(payload, dict) and "id" in payload:
                    seen.add(content)


@PAGES.check(DEVIATION, FIELD, "R3", READ)
def final_newline(e: Examination) -> Findings:
    r"""The last line ends in `\n` too.
    It can't be told from a line that was cut. Other clients drop it."""
    for page in e.pages():
        if page.whole and page.answer.body and not page.answer.body.endswith(b"\n"):
            yield about(page.answer, "the last line has no newline")


@PAGES.check(DEVIATION, FIELD, "R3", READ)
def line_length(e: Examination) -> Findings:
    """No line is longer than 64 KiB.
    This library reads lines of 16 MiB. Old clients give up at 64 KiB, silently."""
    for page in e.pages():
        longest = max(map(len, page.answer.body.split(b"\n")))
        if longest > _LONG_LINE:
            yield about(page.answer, f"a line of {longest} bytes or more")


# Only the order of an entity's events is fixed: a publisher may interleave entities anew each time,
# and go on to write meanwhile. So an event counts as lost only where all that is behind the cursor
# was read, where everything else came in the same order as before, or where none of them came.


def _lost(resume: Resume, missing: Counter[bytes]) -> int:
    if resume.complete or not missing:
        return missing.total()
    common = [event for event in resume.expected if event not in missing]
    known = set(common)
    if not common and resume.repeatable:
        return missing.total()
    if not common or [event for event in resume.events if event in known] != common:
        return 0  # interleaved anew: they may come later
    behind = resume.expected[::-1].index(common[-1])
    return sum(event in missing for event in resume.expected[: len(resume.expected) - behind])


def _differences(resume: Resume) -> Iterator[tuple[str, str, str]]:
    """Yield how what came behind a cursor differs from what came there before.

    That is the check, a text, and the level where it is not the check's.
    """
    expected, got = resume.expected, resume.events
    length = min(len(expected), len(got))
    asked, came = Counter(expected[:length]), Counter(got)
    if expected[:length] == got[:length]:
        lost, again = (len(expected) - length if resume.complete else 0), 0
    else:
        once = {event for event, count in Counter(resume.before).items() if count == 1}
        fresh = came - Counter(expected)
        again = sum(count for event, count in fresh.items() if event in once)
        changed = sum(one != other for one, other in zip(expected, got, strict=False))
        if not again and fresh and changed == (asked - came).total():  # each event is in its place
            text = f"{counted(changed, 'event')} with another content than before"
            yield "cursor-resumes", text, DEVIATION
            return
        lost = _lost(resume, Counter(expected) - came)
        if not lost and not again and resume.repeatable and asked == Counter(got[:length]):
            yield "event-order", "the same events as before, in another order", ""
    if lost:
        some = f"without {counted(lost, 'event')} that came there before"
        nothing = "nothing, although events came behind this cursor before"
        yield "cursor-resumes", nothing if lost == len(expected) else some, ""
    if again:
        yield "cursor-repeats", f"{counted(again, 'event')} that came before this cursor", ""


def _found(e: Examination, check: str) -> Findings:
    for resume in [resume for visit in e.visits.values() for resume in visit.resumes]:
        if all(page.whole for page in resume.pages):
            for id, text, level in _differences(resume):
                if id == check:
                    yield about(resume.pages[0].answer, text, level=level)


@AGAIN.check(MUST, _CHECKPOINT, "R5", RESUMED)
def cursor_resumes(e: Examination) -> Findings:
    """Events that came behind a cursor come again when it is asked for (with another content, it is
    a deviation).
    A consumer that is restarted there loses them, or handles other data than the one before it."""
    return _found(e, "cursor-resumes")


@AGAIN.check(MUST, _CHECKPOINT, "R5", RESUMED)
def cursor_repeats(e: Examination) -> Findings:
    """No event that came before a cursor comes again behind it.
    A consumer that is restarted there handles it twice."""
    yield from _found(e, "cursor-repeats")
    visits = [[page for page in v.pages if page.events] for v in e.visits.values()]
    seams = [seam for pages in visits for seam in pairwise(pages)]
    # Payloads may be equal: but not in no page, and at each place where one page follows another.
    if all(_distinct(page) and _overlaps(page, behind) for page, behind in seams):
        for _, behind in seams:
            yield about(behind.answer, "it begins with the events that came before this cursor")


def _distinct(page: Page) -> bool:
    return HINT < len(page.events) == len(set(page.events))


def _overlaps(page: Page, behind: Page) -> bool:
    before, events = page.closed_events, behind.events
    again = before[before.index(events[0]) :] if events[0] in before else []
    return bool(again) and events[: len(again)] == again


@AGAIN.check(SHOULD, _CHECKPOINT, "R4 R5", RESUMED)
def event_order(e: Examination) -> Findings:
    """The events behind a cursor come in the same order each time.
    Where they are of one entity, they are handled out of order. Entities may be interleaved anew,
    but who does that does it each time."""
    resumes = [resume for visit in e.visits.values() for resume in visit.resumes]
    anew = any(resume.repeatable is False for resume in resumes)
    return iter(()) if anew else _found(e, "event-order")
