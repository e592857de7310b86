"""Checks of responses as HTTP, whatever they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence
from feedapi_client.cli.doctor.probe_messages import ProbeProblem, ProbeResponse

_MAX_AGE = re.compile(r"(?:s-maxage|max-age)\s*=\s*\"?([0-9]+)", re.IGNORECASE)
_FIELD = "publishers in the field"
_HTTP = "RFC 9110 and 9112"

SECTION = CheckSection("Responses")


def _one(found: list[ProbeResponse], what: str = "") -> Iterator[Finding]:
    """Yield one finding for all of these answers, which quotes the first."""
    if found:
        first = found[0]
        more = f", and {len(found) - 1} more requests" if len(found) > 1 else ""
        yield Finding.about(first, f"{what or first}{more}")


@SECTION.check(
    "http-complete",
    Level.MUST,
    requirement="A response is complete: its framing and its content coding are intact.",
    cost="What no checkpoint closed is thrown away and fetched again.",
    source=_HTTP,
    rules=("R3", "R14", "R16"),
)
def _complete(evidence: FeedEvidence) -> Iterator[Finding]:
    broken = (ProbeProblem.BROKEN, ProbeProblem.CODING)
    yield from _one([answer for answer in evidence.answers() if answer.problem in broken])


@SECTION.check(
    "token-current",
    Level.MUST,
    requirement="A fetch with the token of the newest discovery is not refused with 409.",
    cost="A fetch is refused again and again; after `RetryPolicy.refused_for` the partition stops.",
    source="FeedAPI as published, token",
    rules=("R10",),
    needs=(needs.dialects("v2-token"), needs.VISITS),
)
def _current_token(evidence: FeedEvidence) -> Iterator[Finding]:
    if evidence.current_token_refused:
        yield Finding(
            f"{evidence.current_token_refused} fetches were refused with 409, and the discovery "
            "behind them has the same token"
        )


@SECTION.check(
    "auth-status",
    Level.SHOULD,
    requirement="A request without credentials gets status 401 or 403.",
    cost="A consumer with wrong credentials retries, or reports that there is no feed here.",
    source="specification, Authorization",
    rules=("R1",),
    needs=(needs.probe("anonymous", "no credentials were given"),),
)
def _refuses_strangers(evidence: FeedEvidence) -> Iterator[Finding]:
    answer = evidence.probes["anonymous"]
    first = evidence.first
    same = first is not None and answer.status == first.answer.status
    if answer.status not in (401, 403) and not (same and answer.problem is None):
        yield Finding.about(answer)


@SECTION.check(
    "http-time",
    Level.SHOULD,
    requirement="A response is complete within the time limit of this examination.",
    cost="The request takes one of the consumer's slots, and is repeated.",
    source=_FIELD,
    rules=("R14",),
)
def _in_time(evidence: FeedEvidence) -> Iterator[Finding]:
    slow = [each for each in evidence.failures if each.problem is ProbeProblem.SLOW]
    yield from _one(slow)


@SECTION.check(
    "http-stable",
    Level.SHOULD,
    requirement="A request is answered at the first attempt.",
    cost="Each failure is a pause, and what no checkpoint closed is fetched again.",
    source=_FIELD,
    rules=("R14",),
)
def _stable(evidence: FeedEvidence) -> Iterator[Finding]:
    good = {id(answer.question) for answer in evidence.answers() if answer.ok}
    passed = [
        failure
        for failure in evidence.failures
        if id(failure.question) in good and not failure.limited
    ]
    yield from _one(passed, f"{passed[0]}, and success when repeated" if passed else "")


@SECTION.check(
    "http-rate",
    Level.DEVIATION,
    requirement="Requests are not limited to fewer than a consumer of all partitions makes.",
    cost="The consumer slows down as a whole, to the rate that is granted: all partitions are "
    "read later.",
    source=_FIELD,
    rules=("R14",),
)
def _not_limited(evidence: FeedEvidence) -> Iterator[Finding]:
    limited = [failure for failure in evidence.failures if failure.limited]
    asked = [answer for answer in evidence.answers() if answer.ok]
    text = f"{limited[0]}, {len(limited)} times beside {len(asked)} answers" if limited else ""
    yield from _one(limited[:1], text)


@SECTION.check(
    "http-redirect",
    Level.DEVIATION,
    requirement="Requests are answered at the feed's own URL.",
    cost="Within one origin, a second round trip for each request. To another one, nothing is "
    "read: credentials are not sent there.",
    source=_FIELD,
    rules=("R19",),
)
def _no_redirects(evidence: FeedEvidence) -> Iterator[Finding]:
    away = [each for each in evidence.answers() if each.problem is ProbeProblem.REDIRECT]
    yield from _one(away)
    followed = [each for each in evidence.answers() if each.redirects]
    yield from _one(followed, "a redirect within the origin")


@SECTION.check(
    "http-coding",
    Level.DEVIATION,
    requirement="A response is compressed only where the request accepts it.",
    cost="Clients that can't undo the coding read nothing.",
    source=_HTTP,
    rules=("R16",),
)
def _coding_as_accepted(evidence: FeedEvidence) -> Iterator[Finding]:
    coded = [
        answer
        for answer in evidence.answers()
        if answer.question.identity
        and answer.headers.get("content-encoding", "identity").lower() != "identity"
    ]
    yield from _one(coded, "compressed although the request has Accept-Encoding: identity")


@SECTION.check(
    "http-status",
    Level.DEVIATION,
    requirement="A page has status 200, an empty one too.",
    cost="This library takes any 2xx for a page. Others end with an error.",
    source=_FIELD,
    rules=("R3",),
    needs=(needs.PAGES,),
)
def _status_200(evidence: FeedEvidence) -> Iterator[Finding]:
    other = [page.answer for _, page in evidence.pages() if page.answer.ok]
    yield from _one([answer for answer in other if answer.status != 200])


@SECTION.check(
    "http-cache",
    Level.DEVIATION,
    requirement="No response comes from a cache, or may be stored in one.",
    cost="Consumers see partitions and events late, and lists of partitions that contradict "
    "the fetches.",
    source=_FIELD,
    rules=("R10",),
)
def _not_cached(evidence: FeedEvidence) -> Iterator[Finding]:
    for answer in evidence.answers():
        age = answer.headers.get("age", "0").strip()
        control = answer.headers.get("cache-control", "")
        ages = [int(found) for found in _MAX_AGE.findall(control)]
        storable = any(ages) and "no-store" not in control and "no-cache" not in control
        if answer.ok and ((age.isdigit() and int(age)) or storable):
            header = f"Age: {age}" if age != "0" else f"Cache-Control: {control[:60]}"
            yield Finding.about(answer, header)
            return
