"""The table of checks: responses as HTTP."""

from __future__ import annotations

from feedapi_client.cli.doctor.checks import needs, pages, responses
from feedapi_client.cli.doctor.checks.base import Check, Level

_FIELD = "publishers in the field"
_HTTP = "RFC 9110 and 9112"

HTTP: tuple[Check, ...] = (
    Check(
        id="http-complete",
        level=Level.MUST,
        requirement="A response is complete: its framing and its content coding are intact.",
        cost="What no checkpoint closed is thrown away and fetched again.",
        source=_HTTP,
        rules=("R3", "R14", "R16"),
        needs=(),
        find=responses.complete,
    ),
    Check(
        id="token-current",
        level=Level.MUST,
        requirement="A fetch with the token of the newest discovery is not refused with 409.",
        cost="A fetch is refused again and again; after `RetryPolicy.refused_for` the partition "
        "stops.",
        source="FeedAPI as published, token",
        rules=("R10",),
        needs=(needs.dialects("v2-token"), needs.VISITS),
        find=pages.current_token,
    ),
    Check(
        id="auth-status",
        level=Level.SHOULD,
        requirement="A request without credentials gets status 401 or 403.",
        cost="A consumer with wrong credentials retries, or reports that there is no feed here.",
        source="specification, Authorization",
        rules=("R1",),
        needs=(needs.probe("anonymous", "no credentials were given"),),
        find=responses.refuses_strangers,
    ),
    Check(
        id="http-time",
        level=Level.SHOULD,
        requirement="A response is complete within the time limit of this examination.",
        cost="The request takes one of the consumer's slots, and is repeated.",
        source=_FIELD,
        rules=("R14",),
        needs=(),
        find=responses.in_time,
    ),
    Check(
        id="http-stable",
        level=Level.SHOULD,
        requirement="A request is answered at the first attempt.",
        cost="Each failure is a pause, and what no checkpoint closed is fetched again.",
        source=_FIELD,
        rules=("R14",),
        needs=(),
        find=responses.stable,
    ),
    Check(
        id="http-redirect",
        level=Level.DEVIATION,
        requirement="Requests are answered at the feed's own URL.",
        cost="Within one origin, a second round trip for each request. To another one, nothing is "
        "read: credentials are not sent there.",
        source=_FIELD,
        rules=("R19",),
        needs=(),
        find=responses.no_redirects,
    ),
    Check(
        id="http-coding",
        level=Level.DEVIATION,
        requirement="A response is compressed only where the request accepts it.",
        cost="Clients that can't undo the coding read nothing.",
        source=_HTTP,
        rules=("R16",),
        needs=(),
        find=responses.coding_as_accepted,
    ),
    Check(
        id="http-status",
        level=Level.DEVIATION,
        requirement="A page has status 200, an empty one too.",
        cost="This library takes any 2xx for a page. Others end with an error.",
        source=_FIELD,
        rules=("R3",),
        needs=(needs.PAGES,),
        find=responses.status_200,
    ),
    Check(
        id="http-cache",
        level=Level.DEVIATION,
        requirement="No response comes from a cache, or may be stored in one.",
        cost="Consumers see partitions and events late, and lists of partitions that contradict "
        "the fetches.",
        source=_FIELD,
        rules=("R10",),
        needs=(),
        find=responses.not_cached,
    ),
)
