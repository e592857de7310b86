"""Checks of responses as HTTP, and of arguments: accepted, or refused as they should be."""

from __future__ import annotations

import re

from feedapi_client.cli.doctor.examination import HINT, Examination
from feedapi_client.cli.doctor.feed_checks import (
    DEVIATION,
    DRAFT,
    FIELD,
    MUST,
    SHOULD,
    TOKEN,
    Finding,
    Findings,
    Need,
    Section,
    about,
    need,
)
from feedapi_client.cli.doctor.page_checks import EVENTS, FETCH, READ, VISITS
from feedapi_client.cli.doctor.prober import Answer, Problem
from feedapi_client.protocol.text import counted

RESPONSES = Section("Responses")
ARGUMENTS = Section("Arguments")

_AUTHORIZATION = "specification, Authorization"
_HTTP = "RFC 9110 and 9112"
_PUBLISHED = "FeedAPI as published"
_MAX_AGE = re.compile(r"(?:s-maxage|max-age)\s*=\s*\"?([0-9]+)", re.IGNORECASE)


def probe(name: str, reason: str = "not asked, because no partition could be read") -> Need:
    """Return the need of a single request."""
    return need(reason, lambda e: name in e.probes and e.probes[name].answer.asked)


ANONYMOUS = probe("anonymous", "no credentials were given")
STREAM = probe("stream", "no streamed response is offered, or no partition is open")


def _one(answers: list[Answer], text: str = "") -> Findings:
    """Yield one finding for all of these answers, which quotes the first."""
    if answers:
        more = f", and {counted(len(answers) - 1, 'more request')}" if answers[1:] else ""
        yield about(answers[0], f"{text or answers[0]}{more}")


@RESPONSES.check(MUST, _HTTP, "R3 R14 R16")
def http_complete(e: Examination) -> Findings:
    """A response is complete: its framing and its content coding are intact.
    What no checkpoint closed is thrown away and fetched again."""
    broken = (Problem.BROKEN, Problem.CODING)
    return _one([answer for answer in e.answers() if answer.problem in broken])


@RESPONSES.check(MUST, f"{_PUBLISHED}, token", "R10", TOKEN, VISITS)
def token_current(e: Examination) -> Findings:
    """A fetch with the token of the newest discovery is not refused with 409.
    A fetch is refused again and again; after `RetryPolicy.refused_for` the partition stops."""
    if count := e.current_token_refused:
        same = "the discovery behind them has the same token"
        yield Finding(f"{counted(count, 'fetch', 'fetches')} refused with 409, and {same}")


@RESPONSES.check(SHOULD, _AUTHORIZATION, "R1", ANONYMOUS)
def auth_status(e: Examination) -> Findings:
    """A request without credentials gets status 401 or 403.
    A consumer with wrong credentials retries, or reports that there is no feed here."""
    answer = e.probes["anonymous"].answer
    needless = answer.problem is None and answer.status == e.discoveries[0].answer.status
    if answer.status not in (401, 403) and not needless:
        yield about(answer)


@RESPONSES.check(SHOULD, FIELD, "R14")
def http_stable(e: Examination) -> Findings:
    """A request is answered at the first attempt, and not limited to fewer than a consumer of all
    partitions makes.
    Each failure is a pause, and what no checkpoint closed is fetched again. At a limit the consumer
    slows down as a whole, to the rate that is granted."""
    good = {id(answer.question) for answer in e.answers() if answer.ok}
    for limited in (False, True):
        failed = [each for each in e.prober.failures if each.limited is limited]
        if limited and failed:
            beside = f"{counted(len(failed), 'time')} beside {counted(len(good), 'answer')}"
            yield about(failed[0], f"{failed[0]}, {beside}")
        elif passed := [each for each in failed if id(each.question) in good]:
            yield from _one(passed, f"{passed[0]}, and success when repeated")


@RESPONSES.check(DEVIATION, FIELD, "R3", READ)
def http_status(e: Examination) -> Findings:
    """A page has status 200, an empty one too.
    This library takes any 2xx for a page. Others end with an error."""
    answers = [page.answer for page in e.pages() if page.answer.ok]
    return _one([answer for answer in answers if answer.status != 200])


@RESPONSES.check(DEVIATION, FIELD, "R10")
def http_cache(e: Examination) -> Findings:
    """No response comes from a cache, or may be stored in one.
    Consumers see partitions and events late, and lists of partitions that contradict the
    fetches."""
    for answer in [answer for answer in e.answers() if answer.ok]:
        age = answer.headers.get("age", "0").strip()
        control = answer.headers.get("cache-control", "")
        fresh = any(map(int, _MAX_AGE.findall(control)))
        if age.isdigit() and int(age):
            yield about(answer, f"Age: {age}")
            return
        if fresh and "no-store" not in control and "no-cache" not in control:
            yield about(answer, "Cache-Control: ", control[:60])
            return


def _refused(e: Examination, name: str, *statuses: int) -> Findings:
    answer = e.probes[name].answer
    if answer.status not in statuses or answer.problem is not None:
        yield about(answer)


@ARGUMENTS.check(MUST, FETCH, "R15", probe("page-size"))
def argument_accepted(e: Examination) -> Findings:
    """`pageSizeHint` is accepted (`pagesizehint` in the dialects v1 and v2-token), `headers=_all`
    in v1, `event-types` in v2-token, a filter that discovery lists in v2-draft, and `stream` where
    discovery has it.
    A consumer that asks with `FetchOptions` for one of them reads nothing."""
    for name, page in e.probes.items():
        listed = name.startswith("filter-")  # 400 may mean that the value is none of this filter
        fine = page.answer.ok or not page.answer.asked or (listed and page.answer.status == 400)
        if not fine and (listed or name in ("page-size", "event-types", "v1-headers", "stream")):
            yield about(page.answer)


@ARGUMENTS.check(MUST, FETCH, "", DRAFT, probe("unknown-filter"))
def filter_unknown(e: Examination) -> Findings:
    """A filter that is not supported is refused with status 400, not ignored.
    A consumer gets events that it did not select."""
    return _refused(e, "unknown-filter", 400)


@ARGUMENTS.check(MUST, _PUBLISHED, "R10", TOKEN, probe("stale-token"))
def token_stale(e: Examination) -> Findings:
    """A fetch with a token that is not current is refused with status 409.
    Consumers hear of a split only at their next discovery, up to a minute late."""
    return _refused(e, "stale-token", 409)


@ARGUMENTS.check(MUST, FETCH, "R3 R15", STREAM)
def stream_sound(e: Examination) -> Findings:
    """A response with `stream=MILLISECONDS` has a cursor, also without an event, and ends when that
    time is over.
    A consumer that starts at the end learns its position only with the first event; each response
    ends by its idle timeout, and the connection with it."""
    page = e.probes["stream"]
    if page.answer.ok and not page.checkpoints:
        yield about(page.answer, "no cursor")
    if page.answer.ok and page.answer.cut:
        yield about(page.answer, f"not ended after {page.answer.seconds:.1f} s")


@ARGUMENTS.check(SHOULD, FETCH, "", probe("page-size"), EVENTS)
def page_size_honoured(e: Examination) -> Findings:
    """A page has about as many events as `pageSizeHint` says.
    Consumers can't choose between latency and throughput."""
    page = e.probes["page-size"]
    usual = e.visits[page.answer.question.partition or 0].pages[0]
    if len(page.payloads) > HINT and len(page.payloads) >= len(usual.payloads):
        yield about(
            page.answer, f"{counted(len(page.payloads), 'event')}, where {HINT} were asked for"
        )


@ARGUMENTS.check(SHOULD, FETCH, "R14 R15", STREAM)
def stream_live(e: Examination) -> Findings:
    """A streamed response of an open partition stays open for the time asked for, and sends each
    event when it is there.
    Streaming comes to polling, without pauses; or a consumer gets events only when the response
    ends, reports that and polls. Usually a proxy buffers: nginx needs `proxy_buffering off`."""
    half = e.prober.bounds.stream_milliseconds / 2000
    answer = e.probes["stream"].answer
    if answer.ok and answer.ended and answer.seconds < half:
        yield about(answer, f"ended after {answer.seconds * 1000:.0f} ms")
    for answer in [page.answer for name, page in e.probes.items() if name == "stream-behind"]:
        if answer.ok and answer.first_byte > half:
            yield about(answer, f"the first byte came after {answer.first_byte:.1f} s")


@ARGUMENTS.check(DEVIATION, FIELD, "R10", probe("bad-cursor"))
def refusal_status(e: Examination) -> Findings:
    """A partition that is not listed and a cursor that means no place get status 400, 404, 409 or
    410; in dialect v1 a wrong number of partitions `n` gets status 400.
    A consumer can't tell a partition that is gone from an empty one, and takes a refused cursor for
    an outage, for `RetryPolicy.give_up_after`. With a wrong `v1_partitions` it leaves partitions
    out, silently."""
    refusals = (400, 404, 409, 410)
    for name, statuses in (("unknown-partition", refusals), ("wrong-count", (400,))):
        if not probe(name)(e):
            yield from _refused(e, name, *statuses)
    page = e.probes["bad-cursor"]
    if page.answer.status not in refusals and not (page.whole and page.checkpoints):
        yield about(page.answer, "a page that breaks the protocol" if page.answer.ok else "")
