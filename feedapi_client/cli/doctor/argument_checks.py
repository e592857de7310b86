"""Checks of single requests with arguments: accepted, or refused as they should be."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Find, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence
from feedapi_client.cli.doctor.examination import HINT
from feedapi_client.cli.doctor.wire_page import WirePage, read_page

_REFUSALS = (400, 404, 409, 410)
_FIELD = "publishers in the field"
_FETCH = "specification, Fetch call, request"
_PUBLISHED = "FeedAPI as published"
_NOT_ASKED = "not asked, because no partition could be read"
_DRAFT = needs.dialects("v2-draft")
_TOKEN = needs.dialects("v2-token")
_V1 = needs.dialects("v1")

SECTION = CheckSection("Arguments")


def _accepted(name: str) -> Find:
    """Return the check that a request succeeds."""

    def find(evidence: FeedEvidence) -> Iterator[Finding]:
        answer = evidence.probes[name]
        if not answer.ok:
            yield Finding.about(answer)

    return find


SECTION.check(
    "page-size",
    Level.MUST,
    requirement="`pageSizeHint` is accepted (`pagesizehint` in the dialects v1 and v2-token).",
    cost="A consumer with `FetchOptions(page_size_hint=...)` reads nothing.",
    source=_FETCH,
    needs=(needs.probe("page-size", _NOT_ASKED),),
)(_accepted("page-size"))


def _refused(name: str, *statuses: int) -> Find:
    """Return the check that a request is refused with one of these statuses."""

    def find(evidence: FeedEvidence) -> Iterator[Finding]:
        answer = evidence.probes[name]
        if answer.problem is not None or answer.status not in (statuses or _REFUSALS):
            yield Finding.about(answer)

    return find


SECTION.check(
    "filter-unknown",
    Level.MUST,
    requirement="A filter that is not supported is refused with status 400, not ignored.",
    cost="A consumer gets events that it did not select.",
    source=_FETCH,
    needs=(_DRAFT, needs.probe("unknown-filter", _NOT_ASKED)),
)(_refused("unknown-filter", 400))


@SECTION.check(
    "filter-listed",
    Level.MUST,
    requirement="A filter that discovery lists is accepted.",
    cost="A consumer with this filter reads nothing.",
    source="specification, Discovery call, partitions",
    needs=(_DRAFT, needs.FILTERS),
)
def _filters_listed(evidence: FeedEvidence) -> Iterator[Finding]:
    for name, answer in evidence.probes.items():
        # 400 may mean that the value is none of this filter.
        if name.startswith("filter ") and answer.asked and not answer.ok and answer.status != 400:
            yield Finding.about(answer)


SECTION.check(
    "event-types",
    Level.MUST,
    requirement="`event-types` is accepted. It may be ignored.",
    cost="A consumer that selects event types reads nothing.",
    source=_PUBLISHED,
    needs=(_TOKEN, needs.probe("event-types", _NOT_ASKED)),
)(_accepted("event-types"))


SECTION.check(
    "token-stale",
    Level.MUST,
    requirement="A fetch with a token that is not current is refused with status 409.",
    cost="Consumers hear of a split only at their next discovery, up to a minute late.",
    source=_PUBLISHED,
    rules=("R10",),
    needs=(_TOKEN, needs.probe("stale-token", _NOT_ASKED)),
)(_refused("stale-token", 409))


SECTION.check(
    "stream-accepted",
    Level.MUST,
    requirement="Where discovery has `stream`, a fetch with `stream=MILLISECONDS` succeeds.",
    cost="A consumer with `FetchOptions(stream=True)` reads nothing.",
    source=_FETCH,
    rules=("R15",),
    needs=(needs.STREAM,),
)(_accepted("stream"))


def _page(evidence: FeedEvidence, name: str) -> WirePage:
    assert evidence.dialect is not None
    return read_page(evidence.probes[name], evidence.dialect)


@SECTION.check(
    "stream-cursor",
    Level.MUST,
    requirement="A streamed response has a cursor, also without an event.",
    cost="A consumer that starts at the end learns its position only with the first event.",
    source="specification, Fetch call, checkpoint command",
    rules=("R3", "R15"),
    needs=(needs.STREAM,),
)
def _stream_has_checkpoint(evidence: FeedEvidence) -> Iterator[Finding]:
    page = _page(evidence, "stream")
    if page.answer.ok and not page.checkpoints:
        yield Finding.about(page.answer, "no cursor")


@SECTION.check(
    "stream-ends",
    Level.MUST,
    requirement="A response with `stream=MILLISECONDS` ends when that time is over.",
    cost="Each response ends by the consumer's idle timeout, and its connection with it.",
    source=_FETCH,
    rules=("R15",),
    needs=(needs.STREAM,),
)
def _stream_ends(evidence: FeedEvidence) -> Iterator[Finding]:
    answer = evidence.probes["stream"]
    if answer.ok and answer.cut and not answer.ended:
        yield Finding.about(answer, f"not ended after {answer.seconds:.1f} s")


SECTION.check(
    "v1-headers",
    Level.MUST,
    requirement="In dialect v1 `headers=_all` is accepted.",
    cost="A consumer that asks for event headers reads nothing.",
    source="ZeroEventHub, version 1",
    needs=(_V1, needs.probe("v1-headers", _NOT_ASKED)),
)(_accepted("v1-headers"))


@SECTION.check(
    "page-size-honoured",
    Level.SHOULD,
    requirement="A page has about as many events as `pageSizeHint` says.",
    cost="Consumers can't choose between latency and throughput.",
    source=_FETCH,
    needs=(needs.probe("page-size", _NOT_ASKED), needs.EVENTS),
)
def _page_size_honoured(evidence: FeedEvidence) -> Iterator[Finding]:
    page = _page(evidence, "page-size")
    first = evidence.visits[page.answer.question.partition or 0].pages[0]
    usual = len(first.payloads)
    if len(page.payloads) > HINT and len(page.payloads) >= usual:
        yield Finding.about(
            page.answer, f"{len(page.payloads)} events, where {HINT} were asked for"
        )


@SECTION.check(
    "stream-held",
    Level.SHOULD,
    requirement="A streamed response of an open partition stays open for the time asked for.",
    cost="Streaming comes to polling, without pauses.",
    source=_FETCH,
    rules=("R15",),
    needs=(needs.STREAM,),
)
def _stream_is_held(evidence: FeedEvidence) -> Iterator[Finding]:
    answer = evidence.probes["stream"]
    wanted = dict(answer.question.params).get("stream", "0")
    if answer.ok and answer.ended and answer.seconds < int(wanted) / 2000:
        yield Finding.about(answer, f"ended after {answer.seconds * 1000:.0f} ms")


@SECTION.check(
    "stream-buffered",
    Level.DEVIATION,
    requirement="A streamed response sends each event when it is there.",
    cost="A consumer gets events only when the response ends; it reports that and polls. "
    "Usually a proxy buffers: nginx needs `proxy_buffering off`.",
    source=_FIELD,
    rules=("R14", "R15"),
    needs=(needs.STREAM_BEHIND,),
)
def _stream_is_sent_on(evidence: FeedEvidence) -> Iterator[Finding]:
    answer = evidence.probes["stream-behind"]
    wanted = int(dict(answer.question.params).get("stream", "0")) / 1000
    if answer.ok and (answer.first_byte or 0) > wanted / 2:
        yield Finding.about(answer, f"the first byte came after {answer.first_byte:.1f} s")


SECTION.check(
    "partition-unknown",
    Level.DEVIATION,
    requirement="A fetch of a partition that is not listed gets status 400, 404, 409 or 410.",
    cost="A consumer can't tell a partition that is gone from one that is empty, or from an "
    "outage.",
    source=_FIELD,
    rules=("R10",),
    needs=(needs.probe("unknown-partition", "not asked: no partition was read, or no id is free"),),
)(_refused("unknown-partition"))


@SECTION.check(
    "cursor-refused",
    Level.DEVIATION,
    requirement="A cursor that means no place gets status 400, 404, 409 or 410.",
    cost="A consumer takes it for an outage and retries, for `RetryPolicy.give_up_after`.",
    source=_FIELD,
    rules=("R10",),
    needs=(needs.probe("bad-cursor", _NOT_ASKED),),
)
def _cursor_refused(evidence: FeedEvidence) -> Iterator[Finding]:
    answer = evidence.probes["bad-cursor"]
    page = _page(evidence, "bad-cursor")
    sound = page.whole and page.checkpoints
    if answer.status not in _REFUSALS and not sound:
        yield Finding.about(answer, "a page that breaks the protocol" if answer.ok else "")


SECTION.check(
    "v1-count",
    Level.DEVIATION,
    requirement="In dialect v1 a wrong number of partitions `n` gets status 400.",
    cost="A consumer with a wrong `v1_partitions` leaves partitions out, silently.",
    source=_FIELD,
    rules=("R10",),
    needs=(_V1, needs.probe("wrong-count", _NOT_ASKED)),
)(_refused("wrong-count", 400))
