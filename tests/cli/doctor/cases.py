"""Publishers with one thing wrong, and the check that finds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from feedapi_client.cli.doctor import Bounds
from feedapi_client.testing import Publisher, Quirks, RateLimit, Request, Response, faults
from feedapi_client.testing.publisher.handler import handle

Change = Callable[[Publisher], object]


# A doctor that waits no longer than it has to, for publishers that are found unsound anyway.
HURRIED = partial(
    Bounds, pauses=0.02, stream_milliseconds=50
)
# One to whom no answer is late, however slow the machine is.
PATIENT = partial(Bounds, stream_milliseconds=20_000)


@dataclass(frozen=True)
class Case:
    """One thing that is wrong.

    `finds` is a check that must find it. Without `dialects` it is tried in all of them.
    """

    name: str
    finds: str
    change: Change
    dialects: tuple[str, ...] = ("v1", "v2-draft", "v2-token")
    settings: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    bounds: Callable[..., Bounds] = HURRIED


V2 = ("v2-draft", "v2-token")
DRAFT = ("v2-draft",)
TOKEN = ("v2-token",)
V1 = ("v1",)
FAST = ("--timeout", "0.3")


def on_fetch(fault: Any) -> Change:
    return lambda publisher: publisher.fail(fault, times=None)


def on_discovery(fault: Any, after: int = 0) -> Change:
    return lambda publisher: publisher.fail(fault, on="discovery", times=None, after=after)


def edited(change: Callable[[Any], Any], after: int = 0) -> Change:
    return on_discovery(faults.Edit(change), after)


def with_field(index: int, **fields: Any) -> Change:
    """Change fields of one partition in the discovery."""
    return edited(lambda found: found["partitions"][index].update(fields))


def where(applies: Callable[[Request], bool], fault: Any) -> Change:
    """Apply a fault to some of the fetches."""

    def some(response: Response, request: Request, publisher: Any) -> Response:
        if not applies(request):
            return response
        answer: Response = faults.as_fault(fault)(response, request, publisher)
        return answer

    return on_fetch(some)


def rewritten(pattern: bytes, replacement: bytes) -> Change:
    return on_fetch(faults.Rewrite(lambda body: re.sub(pattern, replacement, body)))


def page_of(**changes: Any) -> Any:
    """Answer as the publisher does to the same request with other arguments."""

    def answer(response: Response, request: Request, publisher: Any) -> Response:
        query = {k: v for k, v in {**request.query, **changes}.items() if v is not None}
        query = {k: v for k, v in query.items() if not k.startswith("filter-")}
        return handle(publisher, replace(request, query=query))

    return answer


def has_cursor(request: Request) -> bool:
    return request.cursor not in ("_first", "_last")


def from_last(request: Request) -> bool:
    return request.cursor == "_last" and request.stream is None


def empty(response: Response, request: Request, publisher: Any) -> Response:
    return Response(200, {}, b"")


def empty_without_events(response: Response, request: Request, publisher: Any) -> Response:
    if response.status == 200 and response.stream is None and b"entity" not in response.body:
        response.body = b""
    return response


def with_header(name: str, value: str) -> Any:
    def header(response: Response, request: Request, publisher: Any) -> Response:
        response.headers = {**response.headers, name: value}
        return response

    return header


def status_206(response: Response, request: Request, publisher: Any) -> Response:
    if response.status == 200:
        response.status = 206
    return response


def two_versions(publisher: Publisher) -> None:
    """Answer every second discovery with another token."""
    other = faults.Edit(lambda found: found.update(token="other"))
    count = 0

    def second(response: Response, request: Request, publisher: Any) -> Response:
        nonlocal count
        count += 1
        return response if count % 2 else other(response, request, publisher)

    publisher.fail(second, on="discovery", times=None)


def needs_bearer(status: int) -> Change:
    def apply(publisher: Publisher) -> None:
        def strange(response: Response, request: Request, publisher: Any) -> Response:
            known = "authorization" in request.headers
            return response if known else Response(status, {}, b"who are you?")

        publisher.fail(strange, on="any", times=None)

    return apply


def stream(**changes: Any) -> Change:
    def changed(response: Response, request: Request, publisher: Any) -> Response:
        if response.stream is not None:
            if "seconds" in changes:
                response.stream.seconds = changes["seconds"]
            else:
                response.stream, response.body = None, changes["body"]
        return response

    return on_fetch(changed)


def closed_too_early(publisher: Publisher) -> None:
    """List an open partition as closed, with an end before its last events."""
    id = publisher.open_partitions()[0]
    end = publisher.end_cursor(id)
    publisher.append(id, {"entity": "late"})
    fields = {"closed": True, "lastCursor": end}

    def change(found: Any) -> None:
        next(p for p in found["partitions"] if p["id"] == str(id)).update(fields)

    edited(change)(publisher)


def another_end(publisher: Publisher) -> None:
    cursor = publisher.another_cursor(0, publisher.end_cursor(0))
    with_field(0, lastCursor=cursor)(publisher)


def twice(publisher: Publisher) -> None:
    for _ in range(2):
        publisher.append(publisher.open_partitions()[0], {"id": "order-1", "entity": "again"})


def long_line(publisher: Publisher) -> None:
    publisher.append(publisher.open_partitions()[0], {"entity": "x" * 70_000})


def quirk(**quirks: Any) -> Change:
    def apply(publisher: Publisher) -> None:
        publisher.quirks = Quirks(**{"last_cursor": "closed", **quirks})

    return apply


def payload_lines(change: Callable[[list[bytes]], list[bytes]]) -> Any:
    """Change the lines of a page with events, as they come from a cursor of the publisher."""

    def changed(response: Response, request: Request, publisher: Any) -> Response:
        lines = response.body.splitlines(keepends=True)
        if has_cursor(request) and any(b'"entity"' in line for line in lines):
            response.body = b"".join(change(lines))
        return response

    return changed


def from_first(request: Request) -> Request:
    return replace(request, cursor="_first", query={**request.query, "cursor": "_first"})


def last_one_again(response: Response, request: Request, publisher: Any) -> Response:
    """Put the event before the cursor in front of those behind it."""
    cursor, partition = request.cursor, request.partition
    if not has_cursor(request) or b'"entity"' not in response.body:
        return response
    whole = handle(publisher, from_first(request))
    lines = whole.body.splitlines(keepends=True)
    marks = [i for i, line in enumerate(lines) if str(cursor).encode() in line]
    events = [line for line in lines[: marks[0]] if b'"entity"' in line] if marks else []
    if events and partition is not None:
        response.body = events[-1] + response.body
    return response


def counted(response: Response, request: Request, publisher: Any) -> Response:
    """Write how often the publisher was asked into each event."""
    count = len(publisher.requests)
    response.body = response.body.replace(b'"entity":', b'"asked":%d,"entity":' % count)
    return response


def older_end(response: Response, request: Request, publisher: Any) -> Response:
    """Answer a poll at the end as a replica that lags does: with an older cursor, no event."""
    if has_cursor(request) and b'"entity"' not in response.body and response.status == 200:
        first = handle(publisher, from_first(request))
        cursor = re.findall(rb'"cursor":"([^"]+)"', first.body)[0]
        response.body = re.sub(rb'"cursor":"[^"]+"', b'"cursor":"%s"' % cursor, response.body)
    return response


def rolls_back(after: int) -> Change:
    """A split with new ids is rolled back while the publisher is examined."""

    def apply(publisher: Publisher) -> None:
        def roll_back(response: Response, request: Request, _: Any) -> Response:
            publisher.roll_back(1)
            return response

        publisher.fail(roll_back, on="discovery", after=after)

    return apply


def limited(publisher: Publisher) -> None:
    """Grant a few requests a second, more of them after a pause."""
    publisher.rate_limit = RateLimit(5, burst=12, retry_after=1)


def refused_at_times(status: int) -> Change:
    """Refuse two requests, the second one twice, as a rate limit does."""
    refusal = faults.Status(status, "too many", {"retry-after": "1"})

    def apply(publisher: Publisher) -> None:
        publisher.fail(refusal, on="any", after=3)
        publisher.fail(refusal, on="any", after=20, times=2)

    return apply


CASES = [
    # Discovery
    Case("html discovery", "discovery-answers", on_discovery(faults.Html()), V2),
    Case("list as discovery", "discovery-answers", on_discovery(faults.Replace([1])), V2),
    Case("discovery 404", "discovery-answers", on_discovery(404), V2),
    Case("html later", "discovery-answers", on_discovery(faults.Html(), after=1), V2),
    Case("cut discovery", "discovery-answers", on_discovery(faults.Replace(b'{"part')), V2),
    Case(
        "discovery redirected away",
        "discovery-answers",
        on_discovery(faults.Redirect("https://elsewhere.example/")),
        V2,
    ),
    Case("id out of range", "partition-id", with_field(0, id="70000"), V2),
    Case("integer ids", "partition-id-string", quirk(integer_ids=True), V2),
    Case("padded id", "partition-id-string", with_field(0, id="00"), V2),
    Case(
        "listed twice",
        "partition-unique",
        edited(lambda found: found["partitions"].append({"id": "0"})),
        V2,
    ),
    Case(
        "flag as text",
        "discovery-types",
        edited(lambda found: found.update(exactlyOnce="yes")),
        V2,
    ),
    Case("closed as text", "discovery-types", with_field(0, closed="yes"), V2),
    Case("no lastCursor", "last-cursor-listed", quirk(last_cursor="never"), DRAFT),
    Case("no lastCursor", "last-cursor-useful", quirk(last_cursor=None), TOKEN),
    Case("partitions: null", "partitions-listed", on_discovery(faults.NoPartitions()), V2),
    Case(
        "no partition at first",
        "partitions-listed",
        lambda p: p.fail(faults.NoPartitions(null=False), on="discovery", after=1),
        V2,
    ),
    Case("rolled back", "partition-stays", rolls_back(2), V2),
    Case("lastCursor not ASCII", "last-cursor-text", with_field(0, lastCursor="ü"), V2),
    Case("both methods", "one-split-method", with_field(-1, startsAfterPartition="0"), V2),
    Case("lineage of letters", "lineage-types", with_field(-1, cursorFromPartitions=["x"]), V2),
    Case("own parent", "no-cycle", with_field(-1, cursorFromPartitions=["5"]), V2),
    Case(
        "open parent",
        "parent-closed",
        lambda publisher: publisher.add(9, starts_after=publisher.open_partitions()[0]),
        V2,
    ),
    Case("lost parent", "parent-listed", lambda p: p.add(9, starts_after=77), V2),
    Case("listed ancestor", "ancestor-gone", lambda p: p.add(9, cursor_from=[0]), V2),
    Case(
        "two spellings",
        "discovery-usable",
        with_field(-1, splitFromAncestors=["3"]),
        V2,
    ),
    Case(
        "reopened",
        "closed-final",
        edited(lambda found: found["partitions"][0].update(closed=False), after=2),
        V2,
    ),
    Case("integer lineage", "lineage-string", quirk(integer_lineage=True), V2),
    Case("old names", "lineage-names", quirk(old_lineage_names=True), V2),
    Case(
        "zero for no parent",
        "lineage-zero",
        edited(lambda f: [p.setdefault("startsAfterPartition", 0) for p in f["partitions"]] and f),
        V2,
    ),
    Case("edge of 0 left out", "lineage-edge", quirk(omit_parent_zero=True), V2),
    Case("all edges left out", "lineage-edge", quirk(omit_starts_after=True), V2),
    Case("two versions", "discovery-stable", two_versions, TOKEN),
    # HTTP
    Case("truncated", "http-complete", on_fetch(faults.Truncate())),
    Case("truncated chunks", "http-complete", on_fetch(faults.Truncate(chunked=True))),
    Case("reset within a page", "http-complete", on_fetch(faults.Reset(after_lines=1))),
    Case("broken chunk", "http-complete", on_fetch(faults.BrokenChunk())),
    Case("reset", "fetch-first", on_fetch(faults.Reset())),
    Case("409 for a current token", "token-current", on_fetch(409), TOKEN),
    Case("200 for strangers", "auth-status", needs_bearer(404), V2, options=("--auth-env", "WHO")),
    # Each takes seconds, and no dialect has a part in it.
    Case("hang", "http-time", on_fetch(faults.Hang()), V1, options=FAST),
    Case(
        "hang within a page", "http-time", on_fetch(faults.Hang(after_lines=1)), DRAFT, options=FAST
    ),
    Case("delay", "http-time", on_fetch(faults.Delay(5)), TOKEN, options=FAST),
    Case("trickle", "http-time", on_fetch(faults.Trickle(1, 0.1)), TOKEN, options=FAST),
    Case("503 once", "http-stable", lambda publisher: publisher.fail(503)),
    Case("reset once", "http-stable", lambda publisher: publisher.fail(faults.Reset())),
    Case("rate limit", "http-rate", limited, TOKEN, bounds=Bounds),
    Case("429 at times", "http-rate", refused_at_times(429)),
    Case("503 with Retry-After at times", "http-rate", refused_at_times(503)),
    Case(
        "redirected away",
        "http-redirect",
        on_fetch(faults.Redirect("https://elsewhere.example/feed")),
    ),
    Case("gzip unasked", "http-coding", on_fetch(faults.Gzip())),
    Case("gzip that is none", "http-complete", on_fetch(with_header("content-encoding", "gzip"))),
    Case("status 206", "http-status", on_fetch(status_206)),
    Case("204", "http-status", where(has_cursor, 204)),
    Case("cached", "http-cache", on_fetch(with_header("age", "17"))),
    Case("storable", "http-cache", on_fetch(with_header("cache-control", "max-age=60"))),
    # Pages
    Case("500", "fetch-first", on_fetch(500)),
    Case(
        "500 and delay", "fetch-first", on_fetch(faults.Both((faults.Delay(0), faults.Status(500))))
    ),
    Case("_last refused", "fetch-last", where(from_last, 400)),
    Case("cursors refused", "cursor-accepted", where(has_cursor, 400)),
    Case("error text", "line-json", on_fetch(faults.ErrorText())),
    Case("cut line", "line-json", on_fetch(faults.CutLine())),
    Case("html page", "line-json", on_fetch(faults.Html())),
    Case("list as page", "line-json", on_fetch(faults.Replace([1, 2]))),
    Case("list as payload", "payload-type", rewritten(rb'"(event|data)":\{[^}]*\}', rb'"\1":[1]')),
    Case("other payload key", "payload-key", rewritten(rb'"event":', rb'"data":'), DRAFT),
    Case("other payload key", "payload-key", rewritten(rb'"data":', rb'"event":'), TOKEN),
    Case(
        "wrong partition",
        "line-partition",
        rewritten(rb'"partition":.', rb'"partition":9'),
        V1,
    ),
    Case("empty cursor", "cursor-text", rewritten(rb'"cursor":"[^"]*"', rb'"cursor":""')),
    Case("numeric cursor", "cursor-text", rewritten(rb'"cursor":"[^"]*"', rb'"cursor":7')),
    Case(
        "_last as cursor", "cursor-special", rewritten(rb'"cursor":"[^"]*"', rb'"cursor":"_last"')
    ),
    Case("no checkpoint", "page-cursor", on_fetch(faults.NoCheckpoint())),
    Case("same checkpoint", "cursor-progress", on_fetch(faults.SameCheckpoint())),
    Case("same checkpoint later", "cursor-progress", where(has_cursor, faults.SameCheckpoint())),
    Case(
        "nothing behind cursors",
        "cursor-resumes",
        where(has_cursor, faults.EmptyPage(moving=False)),
    ),
    Case(
        "off by one",
        "cursor-resumes",
        on_fetch(payload_lines(lambda lines: lines[1:])),
    ),
    Case(
        "an event left out",
        "cursor-resumes",
        on_fetch(payload_lines(lambda lines: [*lines[:3], *lines[4:]])),
    ),
    Case("off by one, the other way", "cursor-repeats", on_fetch(last_one_again)),
    Case(
        "two events exchanged",
        "event-order",
        on_fetch(payload_lines(lambda lines: [lines[1], lines[0], *lines[2:]])),
    ),
    Case("events with a counter", "event-stable", on_fetch(counted)),
    Case("older end", "cursor-onwards", on_fetch(older_end)),
    Case("query dropped", "page-discovery", on_fetch(faults.DroppedQuery()), V2),
    Case("maintenance", "page-meaning", on_fetch(faults.Maintenance())),
    Case("nothing", "page-cursor", on_fetch(faults.Empty())),
    Case("echo", "cursor-echo", quirk(empty_page="echo")),
    Case("silent end", "page-cursor", quirk(empty_page="silent")),
    Case("204 at the end", "http-status", quirk(empty_page="204")),
    Case("swapped key", "payload-key", quirk(swapped_payload_key=True), V2),
    Case("Pascal case", "key-case", quirk(pascal_case=True)),
    Case("_first is the end", "cursor-echo", on_fetch(faults.EmptyPage(moving=False))),
    Case("events behind the end", "closed-end", closed_too_early, DRAFT),
    Case("another end", "closed-end-reached", another_end, DRAFT),
    Case("event twice", "exactly-once", twice, V2),
    Case("_last without cursor", "last-cursor-given", where(from_last, empty)),
    Case("silent end", "closed-end-cursor", on_fetch(empty_without_events), V2),
    Case("no final newline", "final-newline", on_fetch(faults.NoFinalNewline())),
    Case("long line", "line-length", long_line),
    Case("endless line", "line-length", on_fetch(faults.EndlessLine())),
    Case("endless run", "cursor-distance", on_fetch(faults.EndlessRun())),
    Case("empty pages", "empty-pages", on_fetch(faults.EmptyPage())),
    Case("moving end", "end-stable", on_fetch(faults.EmptyPage())),
    # Arguments
    Case("no page size", "page-size", where(lambda r: "pagesizehint" in str(r.query).lower(), 400)),
    Case(
        "page size ignored",
        "page-size-honoured",
        where(
            lambda r: "pagesizehint" in str(r.query).lower(),
            page_of(pageSizeHint=None, pagesizehint=None),
        ),
    ),
    Case(
        "filter ignored",
        "filter-unknown",
        where(lambda r: "filter-" in str(r.query), page_of()),
        DRAFT,
    ),
    Case(
        "filter unknown", "filter-listed", where(lambda r: "filter-entity" in r.query, 404), DRAFT
    ),
    Case("no event types", "event-types", where(lambda r: "event-types" in r.query, 400), TOKEN),
    Case(
        "token ignored",
        "token-stale",
        lambda p: where(lambda r: r.token != p.token, page_of(token=p.token))(p),
        TOKEN,
    ),
    Case("no stream", "stream-accepted", where(lambda r: r.stream is not None, 400), V2),
    Case("stream without cursor", "stream-cursor", stream(body=b""), V2),
    Case("stream without end", "stream-ends", stream(seconds=None), V2, options=("--timeout", "1")),
    Case("stream not held", "stream-held", stream(body=b'{"cursor":"x"}\n'), V2, bounds=PATIENT),
    Case("buffered stream", "stream-buffered", quirk(stream_buffer=1 << 20), V2),
    Case("no headers", "v1-headers", where(lambda r: "headers" in r.query, 400), V1),
    Case("500 for a partition", "partition-unknown", quirk(unknown_partition=500)),
    Case(
        "500 for a cursor",
        "cursor-refused",
        where(lambda r: str(r.cursor).startswith("feedapi-doctor"), 500),
    ),
    Case("n ignored", "v1-count", where(lambda r: r.query.get("n") == "3", page_of(n="2")), V1),
]

HARMLESS = {
    "unknown commands": faults.UnknownCommands(),
    "extra fields": faults.ExtraFields(),
}
"""What the specification allows."""
