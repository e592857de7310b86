"""The table of checks: arguments of requests."""

from __future__ import annotations

from feedapi_client.cli.doctor.checks import needs, requests
from feedapi_client.cli.doctor.checks.base import Check, Level

_FETCH = "specification, Fetch call, request"
_PUBLISHED = "FeedAPI as published"
_FIELD = "publishers in the field"
_NOT_ASKED = "not asked, because no partition could be read"
_DRAFT = needs.dialects("v2-draft")
_TOKEN = needs.dialects("v2-token")
_V1 = needs.dialects("v1")

REQUESTS: tuple[Check, ...] = (
    Check(
        id="page-size",
        level=Level.MUST,
        requirement="`pageSizeHint` is accepted (`pagesizehint` in the dialects v1 and v2-token).",
        cost="A consumer with `FetchOptions(page_size_hint=...)` reads nothing.",
        source=_FETCH,
        rules=(),
        needs=(needs.probe("page-size", _NOT_ASKED),),
        find=requests.accepted("page-size"),
    ),
    Check(
        id="filter-unknown",
        level=Level.MUST,
        requirement="A filter that is not supported is refused with status 400, not ignored.",
        cost="A consumer gets events that it did not select.",
        source=_FETCH,
        rules=(),
        needs=(_DRAFT, needs.probe("unknown-filter", _NOT_ASKED)),
        find=requests.refused("unknown-filter", 400),
    ),
    Check(
        id="filter-listed",
        level=Level.MUST,
        requirement="A filter that discovery lists is accepted.",
        cost="A consumer with this filter reads nothing.",
        source="specification, Discovery call, partitions",
        rules=(),
        needs=(_DRAFT, needs.FILTERS),
        find=requests.filters_listed,
    ),
    Check(
        id="event-types",
        level=Level.MUST,
        requirement="`event-types` is accepted. It may be ignored.",
        cost="A consumer that selects event types reads nothing.",
        source=_PUBLISHED,
        rules=(),
        needs=(_TOKEN, needs.probe("event-types", _NOT_ASKED)),
        find=requests.accepted("event-types"),
    ),
    Check(
        id="token-stale",
        level=Level.MUST,
        requirement="A fetch with a token that is not current is refused with status 409.",
        cost="Consumers hear of a split only at their next discovery, up to a minute late.",
        source=_PUBLISHED,
        rules=("R10",),
        needs=(_TOKEN, needs.probe("stale-token", _NOT_ASKED)),
        find=requests.refused("stale-token", 409),
    ),
    Check(
        id="stream-accepted",
        level=Level.MUST,
        requirement="Where discovery has `stream`, a fetch with `stream=MILLISECONDS` succeeds.",
        cost="A consumer with `FetchOptions(stream=True)` reads nothing.",
        source=_FETCH,
        rules=("R15",),
        needs=(needs.STREAM,),
        find=requests.accepted("stream"),
    ),
    Check(
        id="stream-cursor",
        level=Level.MUST,
        requirement="A streamed response has a cursor, also without an event.",
        cost="A consumer that starts at the end learns its position only with the first event.",
        source="specification, Fetch call, checkpoint command",
        rules=("R3", "R15"),
        needs=(needs.STREAM,),
        find=requests.stream_has_checkpoint,
    ),
    Check(
        id="stream-ends",
        level=Level.MUST,
        requirement="A response with `stream=MILLISECONDS` ends when that time is over.",
        cost="Each response ends by the consumer's idle timeout, and its connection with it.",
        source=_FETCH,
        rules=("R15",),
        needs=(needs.STREAM,),
        find=requests.stream_ends,
    ),
    Check(
        id="v1-headers",
        level=Level.MUST,
        requirement="In dialect v1 `headers=_all` is accepted.",
        cost="A consumer that asks for event headers reads nothing.",
        source="ZeroEventHub, version 1",
        rules=(),
        needs=(_V1, needs.probe("v1-headers", _NOT_ASKED)),
        find=requests.accepted("v1-headers"),
    ),
    Check(
        id="page-size-honoured",
        level=Level.SHOULD,
        requirement="A page has about as many events as `pageSizeHint` says.",
        cost="Consumers can't choose between latency and throughput.",
        source=_FETCH,
        rules=(),
        needs=(needs.probe("page-size", _NOT_ASKED), needs.EVENTS),
        find=requests.page_size_honoured,
    ),
    Check(
        id="stream-held",
        level=Level.SHOULD,
        requirement="A streamed response of an open partition stays open for the time asked for.",
        cost="Streaming comes to polling, without pauses.",
        source=_FETCH,
        rules=("R15",),
        needs=(needs.STREAM,),
        find=requests.stream_is_held,
    ),
    Check(
        id="partition-unknown",
        level=Level.DEVIATION,
        requirement="A fetch of a partition that is not listed gets status 400, 404, 409 or 410.",
        cost="A consumer can't tell a partition that is gone from one that is empty, or from an "
        "outage.",
        source=_FIELD,
        rules=("R10",),
        needs=(
            needs.probe("unknown-partition", "not asked: no partition was read, or no id is free"),
        ),
        find=requests.refused("unknown-partition"),
    ),
    Check(
        id="cursor-refused",
        level=Level.DEVIATION,
        requirement="A cursor that means no place gets status 400, 404, 409 or 410.",
        cost="A consumer takes it for an outage and retries, for `RetryPolicy.give_up_after`.",
        source=_FIELD,
        rules=("R10",),
        needs=(needs.probe("bad-cursor", _NOT_ASKED),),
        find=requests.cursor_refused,
    ),
    Check(
        id="v1-count",
        level=Level.DEVIATION,
        requirement="In dialect v1 a wrong number of partitions `n` gets status 400.",
        cost="A consumer with a wrong `v1_partitions` leaves partitions out, silently.",
        source=_FIELD,
        rules=("R10",),
        needs=(_V1, needs.probe("wrong-count", _NOT_ASKED)),
        find=requests.refused("wrong-count", 400),
    ),
)
