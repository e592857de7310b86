"""Checks of responses as HTTP, whatever they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from feedapi_client.cli.doctor.answers import Answer, Problem
from feedapi_client.cli.doctor.checks.base import Finding
from feedapi_client.cli.doctor.evidence import Evidence

_MAX_AGE = re.compile(r"(?:s-maxage|max-age)\s*=\s*\"?([0-9]+)", re.IGNORECASE)


def _one(found: list[Answer], what: str = "") -> Iterator[Finding]:
    """Yield one finding for all of these answers, which quotes the first."""
    if found:
        first = found[0]
        more = f", and {len(found) - 1} more requests" if len(found) > 1 else ""
        yield Finding(f"{first.question.what}: {what or first}{more}", first.question.partition)


def complete(evidence: Evidence) -> Iterator[Finding]:
    """Responses are complete."""
    broken = (Problem.BROKEN, Problem.CODING)
    yield from _one([answer for answer in evidence.answers() if answer.problem in broken])


def in_time(evidence: Evidence) -> Iterator[Finding]:
    """Responses are complete in time."""
    slow = [each for each in evidence.failures if each.problem is Problem.SLOW]
    yield from _one(slow)


def stable(evidence: Evidence) -> Iterator[Finding]:
    """Requests are answered at the first attempt."""
    good = {id(answer.question) for answer in evidence.answers() if answer.ok}
    passed = [failure for failure in evidence.failures if id(failure.question) in good]
    yield from _one(passed, f"{passed[0]}, and success when repeated" if passed else "")


def no_redirects(evidence: Evidence) -> Iterator[Finding]:
    """Requests are answered at the feed's own URL."""
    away = [each for each in evidence.answers() if each.problem is Problem.REDIRECT]
    yield from _one(away)
    followed = [each for each in evidence.answers() if each.redirects]
    yield from _one(followed, "a redirect within the origin")


def coding_as_accepted(evidence: Evidence) -> Iterator[Finding]:
    """A response is compressed only where the request accepts that."""
    coded = [
        answer
        for answer in evidence.answers()
        if answer.question.identity
        and answer.headers.get("content-encoding", "identity").lower() != "identity"
    ]
    yield from _one(coded, "compressed although the request has Accept-Encoding: identity")


def status_200(evidence: Evidence) -> Iterator[Finding]:
    """Pages have status 200."""
    other = [page.answer for _, page in evidence.pages() if page.answer.ok]
    yield from _one([answer for answer in other if answer.status != 200])


def not_cached(evidence: Evidence) -> Iterator[Finding]:
    """Responses are not served from a cache, and not to be stored in one."""
    for answer in evidence.answers():
        age = answer.headers.get("age", "0").strip()
        control = answer.headers.get("cache-control", "")
        ages = [int(found) for found in _MAX_AGE.findall(control)]
        storable = any(ages) and "no-store" not in control and "no-cache" not in control
        if answer.ok and ((age.isdigit() and int(age)) or storable):
            header = f"Age: {age}" if age != "0" else f"Cache-Control: {control[:60]}"
            yield Finding(f"{answer.question.what}: {header}", answer.question.partition)
            return


def refuses_strangers(evidence: Evidence) -> Iterator[Finding]:
    """Without credentials the status is 401 or 403, or the feed is public."""
    answer = evidence.probes["anonymous"]
    first = evidence.first
    same = first is not None and answer.status == first.answer.status
    if answer.status not in (401, 403) and not (same and answer.problem is None):
        yield Finding(f"{answer.question.what}: {answer}")
