"""Checks of the lines of a page, and of where cursors lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from feedapi_client.cli.doctor.answers import Answer, Problem
from feedapi_client.cli.doctor.checks.base import Finding
from feedapi_client.cli.doctor.evidence import Evidence, Visit
from feedapi_client.cli.doctor.wire_page import WirePage
from feedapi_client.model import FIRST, LAST

_LONG_LINE = 64 * 1024
_EMPTY_PAGES = 3
_OWN_CHECKS = (Problem.BROKEN, Problem.CODING, Problem.NOT_ASKED)


def _refused(answer: Answer) -> bool:
    return not answer.ok and answer.problem not in _OWN_CHECKS


def _in(page: WirePage, text: str) -> Finding:
    question = page.answer.question
    return Finding(f"{question.what}: {text}", question.partition)


def answers_first(evidence: Evidence) -> Iterator[Finding]:
    """`_first` is answered."""
    for visit in evidence.visits.values():
        if _refused(visit.pages[0].answer):
            yield _in(visit.pages[0], str(visit.pages[0].answer))


def answers_last(evidence: Evidence) -> Iterator[Finding]:
    """`_last` is answered."""
    for visit in evidence.visits.values():
        if visit.last is not None and _refused(visit.last.answer):
            yield _in(visit.last, str(visit.last.answer))


def answers_cursors(evidence: Evidence) -> Iterator[Finding]:
    """A cursor that the publisher gave is answered."""
    for _, page in evidence.pages():
        if page.asked not in (FIRST, LAST) and _refused(page.answer):
            yield _in(page, str(page.answer))


def line_fault(kind: str) -> Callable[[Evidence], Iterator[Finding]]:
    """Return the check that reports one kind of fault of a line."""

    def find(evidence: Evidence) -> Iterator[Finding]:
        for _, page in evidence.pages():
            faults = [fault for fault in page.faults if fault.kind == kind]
            if faults:
                first = faults[0]
                more = f", and {len(faults) - 1} more lines" if len(faults) > 1 else ""
                yield _in(page, f"line {first.line} {first.text}{more}")

    return find


def _closed_end(visit: Visit, page: WirePage) -> bool:
    return visit.partition.closed and not page.payloads


def has_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """A response has a cursor. The end of a closed partition and `_last` have their own checks."""
    for visit in evidence.visits.values():
        for page in visit.all_pages():
            if page is not visit.last and page.whole and not page.checkpoints:
                if page.payloads:
                    yield _in(page, f"{len(page.payloads)} events and no cursor")
                elif not _closed_end(visit, page):
                    yield _in(page, "no event and no cursor")


def last_has_cursor(evidence: Evidence) -> Iterator[Finding]:
    """The answer to `_last` has a cursor."""
    for visit in evidence.visits.values():
        if visit.last is not None and visit.last.whole and not visit.last.checkpoints:
            yield _in(visit.last, "no cursor")


def closed_end_has_cursor(evidence: Evidence) -> Iterator[Finding]:
    """The end of a closed partition is answered with a cursor."""
    for visit in evidence.visits.values():
        for page in visit.all_pages():
            empty = page.whole and page is not visit.last and not page.checkpoints
            if empty and _closed_end(visit, page):
                yield _in(page, "no event and no cursor")
                break


def final_newline(evidence: Evidence) -> Iterator[Finding]:
    """The last line ends in a newline."""
    for _, page in evidence.pages():
        if not page.final_newline and page.whole:
            yield _in(page, "the last line has no newline")


def line_length(evidence: Evidence) -> Iterator[Finding]:
    """Lines are short enough for other clients."""
    for _, page in evidence.pages():
        if page.longest_line > _LONG_LINE:
            yield _in(page, f"a line of {page.longest_line} bytes or more")


def checkpoint_distance(evidence: Evidence) -> Iterator[Finding]:
    """A checkpoint comes within a megabyte."""
    for _, page in evidence.pages():
        if page.answer.cut and not page.checkpoints and page.answer.status == 200:
            yield _in(page, f"no cursor within {len(page.answer.body)} bytes")


def progress(evidence: Evidence) -> Iterator[Finding]:
    """A response with events has a cursor that leads on."""
    for visit in evidence.visits.values():
        asked: list[str] = []
        for page in visit.pages:
            asked.append(page.asked)
            if page.answer.ok and page.payloads and page.cursor in asked:
                back = "the cursor asked with" if page.cursor == page.asked else "an earlier cursor"
                yield _in(page, f"{len(page.payloads)} events, then {back}")
                break


def resumes(evidence: Evidence) -> Iterator[Finding]:
    """The events behind a checkpoint come again when it is asked for."""
    for visit in evidence.visits.values():
        if visit.resumed is not None and visit.resumed.at_end:
            yield _in(visit.resumed, "nothing, although events came behind this cursor before")


def empty_progress(evidence: Evidence) -> Iterator[Finding]:
    """Pages hold events, until the end."""
    for visit in evidence.visits.values():
        empty = [page for page in visit.pages if page.moved_to and not page.payloads]
        if len(empty) >= _EMPTY_PAGES and len(empty) == len(visit.pages):
            yield Finding(
                f"{len(empty)} pages from _first on move the cursor and hold no event",
                visit.partition.id,
            )


def end_is_stable(evidence: Evidence) -> Iterator[Finding]:
    """A poll at the end gets the cursor that it asked with."""
    for visit in evidence.visits.values():
        polls = visit.polls
        if len(polls) > 1 and all(poll.moved_to and not poll.payloads for poll in polls):
            yield Finding(
                f"{len(polls)} polls at the end held no event and moved the cursor each time",
                visit.partition.id,
            )


def nothing_behind_last_cursor(evidence: Evidence) -> Iterator[Finding]:
    """Nothing comes behind the end of a closed partition."""
    for visit in evidence.visits.values():
        page = visit.at_last_cursor
        if page is not None and page.payloads:
            yield _in(page, f"{len(page.payloads)} events behind its lastCursor, and it is closed")
        elif visit.partition.closed and any(poll.payloads for poll in visit.polls):
            yield Finding("it is closed, and events come behind its end", visit.partition.id)


def last_cursor_is_reached(evidence: Evidence) -> Iterator[Finding]:
    """Reading a closed partition ends at its `lastCursor`."""
    for visit in evidence.visits.values():
        end = visit.pages[-1]
        wanted = visit.partition.last_cursor
        if visit.at_last_cursor is None or not end.at_end or end.asked in (FIRST, wanted):
            continue
        yield Finding("reading it ends at another cursor than its lastCursor", visit.partition.id)


def exactly_once(evidence: Evidence) -> Iterator[Finding]:
    """No event with an id comes twice, where the feed says exactlyOnce."""
    seen: set[bytes] = set()
    for visit in evidence.visits.values():
        for page in visit.pages:
            for payload in _closed_events(page):
                if not isinstance(payload, dict) or "id" not in payload:
                    continue
                encoded = _encoded(payload)
                if encoded in seen:
                    yield _in(page, "an event with an id that came before, with the same content")
                    return
                seen.add(encoded)


def _closed_events(page: WirePage) -> list[Any]:
    """The events that do not come again: those before a checkpoint that leads on."""
    if page.cursor == page.asked or not page.checkpoints:
        return []
    return page.payloads[: page.checkpoints[-1].events_before]


def _encoded(payload: dict[str, Any]) -> bytes:
    return orjson.dumps(payload, option=orjson.OPT_SORT_KEYS)


def current_token(evidence: Evidence) -> Iterator[Finding]:
    """The token of the newest discovery is accepted."""
    if evidence.current_token_refused:
        yield Finding(
            f"{evidence.current_token_refused} fetches were refused with 409, and the discovery "
            "behind them has the same token"
        )
