"""Checks of single requests with arguments: accepted, or refused as they should be."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.cli.doctor.answers import Answer
from feedapi_client.cli.doctor.checks.base import Find, Finding
from feedapi_client.cli.doctor.evidence import Evidence
from feedapi_client.cli.doctor.examination import HINT
from feedapi_client.cli.doctor.wire_page import WirePage, read_page

_REFUSALS = (400, 404, 409, 410)


def _finding(answer: Answer, text: str = "") -> Finding:
    return Finding(f"{answer.question.what}: {text or answer}", answer.question.partition)


def _page(evidence: Evidence, name: str) -> WirePage:
    assert evidence.dialect is not None
    return read_page(evidence.probes[name], evidence.dialect)


def accepted(name: str) -> Find:
    """Return the check that a request succeeds."""

    def find(evidence: Evidence) -> Iterator[Finding]:
        answer = evidence.probes[name]
        if not answer.ok:
            yield _finding(answer)

    return find


def refused(name: str, *statuses: int) -> Find:
    """Return the check that a request is refused with one of these statuses."""

    def find(evidence: Evidence) -> Iterator[Finding]:
        answer = evidence.probes[name]
        if answer.problem is not None or answer.status not in (statuses or _REFUSALS):
            yield _finding(answer)

    return find


def cursor_refused(evidence: Evidence) -> Iterator[Finding]:
    """A cursor of nobody is refused, or means a place."""
    answer = evidence.probes["bad-cursor"]
    page = _page(evidence, "bad-cursor")
    sound = page.whole and page.checkpoints
    if answer.status not in _REFUSALS and not sound:
        yield _finding(answer, "" if not answer.ok else "a page that breaks the protocol")


def page_size_honoured(evidence: Evidence) -> Iterator[Finding]:
    """A page has about as many events as the request asks for."""
    page = _page(evidence, "page-size")
    first = evidence.visits[page.answer.question.partition or 0].pages[0]
    usual = len(first.payloads)
    if len(page.payloads) > HINT and len(page.payloads) >= usual:
        yield _finding(page.answer, f"{len(page.payloads)} events, where {HINT} were asked for")


def stream_has_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """A streamed response has a cursor."""
    page = _page(evidence, "stream")
    if page.answer.ok and not page.checkpoints:
        yield _finding(page.answer, "no cursor")


def stream_ends(evidence: Evidence) -> Iterator[Finding]:
    """A streamed response ends when its time is over."""
    answer = evidence.probes["stream"]
    if answer.ok and answer.cut and not answer.ended:
        yield _finding(answer, f"not ended after {answer.seconds:.1f} s")


def stream_is_held(evidence: Evidence) -> Iterator[Finding]:
    """A streamed response of an open partition is held open."""
    answer = evidence.probes["stream"]
    wanted = dict(answer.question.params).get("stream", "0")
    if answer.ok and answer.ended and answer.seconds < int(wanted) / 2000:
        yield _finding(answer, f"ended after {answer.seconds * 1000:.0f} ms")


def filters_listed(evidence: Evidence) -> Iterator[Finding]:
    """A listed filter is known."""
    for name, answer in evidence.probes.items():
        # 400 may mean that the value is none of this filter.
        if name.startswith("filter ") and answer.asked and not answer.ok and answer.status != 400:
            yield _finding(answer)
