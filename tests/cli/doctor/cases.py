"""Publishers with one thing wrong, and the check that finds it: a row each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from feedapi_client.cli.doctor.prober import Bounds
from feedapi_client.testing import Publisher, Quirks, Request, Response, faults
from feedapi_client.testing.publisher import answer

Change = Callable[[Publisher], object]
Fault = Callable[[Response, Request, Any], Response]

# Of a doctor that waits no longer than it has to, and of one to whom no answer is late.
HURRIED = partial(Bounds, pauses=0.02, stream_milliseconds=50)
PATIENT = partial(Bounds, stream_milliseconds=20_000)
V1, DRAFT, TOKEN = ("v1",), ("v2-draft",), ("v2-token",)
V2, ALL = (*DRAFT, *TOKEN), (*V1, *DRAFT, *TOKEN)
FAST = ("--timeout", "0.3")
CURSOR = rb'"cursor":"[^"]*"'
ELSEWHERE = faults.Redirect("https://elsewhere.example/feed")


class Row(NamedTuple):
    finds: str
    name: str
    change: Change
    dialects: tuple[str, ...] = ALL
    options: tuple[str, ...] = ()
    bounds: Callable[..., Bounds] = HURRIED


# ------------------------------------------------------------------ how it is made wrong


def fetch(fault: Any) -> Change:
    return lambda publisher: publisher.fail(fault, times=None)


def discovery(fault: Any, after: int = 0) -> Change:
    return lambda publisher: publisher.fail(fault, on="discovery", times=None, after=after)


def edited(change: Callable[[Any], Any], after: int = 0) -> Change:
    return discovery(faults.Edit(change), after)


def partitions(listed: list[Any] | None, after: int = 0) -> Change:
    return edited(lambda found: {**found, "partitions": listed}, after)


def buffered(response: Response, request: Request, publisher: Publisher) -> Response:
    """A proxy keeps a stream back until it ends."""
    if response.stream is not None and response.stream.seconds is not None:
        response.delay = response.stream.seconds
        response.whole()
    return response


def query_dropped(publisher: Publisher) -> None:
    publisher.fail(faults.Replace(publisher.discovery()), times=None)


def listed(index: int, after: int = 0, **fields: Any) -> Change:
    """Change fields of one partition in the discovery."""
    return edited(lambda found: found["partitions"][index].update(fields), after)


def quirk(**quirks: Any) -> Change:
    return lambda p: setattr(p, "quirks", Quirks(**{"last_cursor": "closed", **quirks}))


def added(**fields: Any) -> Change:
    return lambda publisher: publisher.add(9, **fields)


def where(applies: Callable[[Request], object], fault: Any) -> Change:
    """Apply a fault to some of the fetches."""
    apply = faults.Status(fault) if isinstance(fault, int) else fault
    return fetch(lambda response, r, p: apply(response, r, p) if applies(r) else response)


def has_cursor(request: Request) -> bool:
    return request.cursor not in ("_first", "_last")


def from_last(request: Request) -> bool:
    return request.cursor == "_last" and request.stream is None


def has(name: str) -> Callable[[Request], bool]:
    return lambda request: any(name in key.lower() for key in request.query)


def rewritten(pattern: bytes, replacement: bytes) -> Change:
    return fetch(faults.Rewrite(lambda body: re.sub(pattern, replacement, body)))


def asked_with(request: Request, **changes: str | None) -> Request:
    """The request with other arguments, and without filters."""
    query = {k: v for k, v in {**request.query, **changes}.items() if v is not None}
    query = {k: v for k, v in query.items() if not k.startswith("filter-")}
    return replace(request, query=query, cursor=query.get("cursor", request.cursor))


def handle(publisher: Publisher, request: Request) -> Response:
    """Answer as the publisher does when no fault applies."""
    return answer(publisher, request, publisher.clock())


def page_of(**changes: str | None) -> Fault:
    """Answer as the publisher does to the same request with other arguments."""
    return lambda _, request, publisher: handle(publisher, asked_with(request, **changes))


def header(name: str, value: str) -> Change:
    def apply(response: Response, request: Request, publisher: Any) -> Response:
        return replace(response, headers={**response.headers, name: value})

    return fetch(apply)


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Change:
    """Change the lines of a page with events, as they come from a cursor of the publisher."""

    def apply(response: Response, request: Request, publisher: Any) -> Response:
        if has_cursor(request) and b'"entity"' in response.body:
            response.body = b"".join(change(response.body.splitlines(keepends=True)))
        return response

    return fetch(apply)


def stream(**changes: Any) -> Change:
    def apply(response: Response, request: Request, publisher: Any) -> Response:
        if response.stream is not None and "seconds" in changes:
            response.stream.seconds = changes["seconds"]
        elif response.stream is not None:
            response.stream, response.body = None, changes["body"]
        return response

    return fetch(apply)


def status_206(response: Response, request: Request, publisher: Any) -> Response:
    return replace(response, status=206) if response.status == 200 else response


def silent_end(response: Response, request: Request, publisher: Any) -> Response:
    if response.status == 200 and response.stream is None and b"entity" not in response.body:
        response.body = b""
    return response


def last_one_again(response: Response, request: Request, publisher: Any) -> Response:
    """Put the event before the cursor in front of those behind it."""
    if has_cursor(request) and b'"entity"' in response.body:
        whole = handle(publisher, asked_with(request, cursor="_first")).body
        before = whole.partition(str(request.cursor).encode())[0].splitlines(keepends=True)
        events = [line for line in before if b'"entity"' in line]
        response.body = b"".join(events[-1:]) + response.body
    return response


def each_page(
    change: Callable[[list[bytes], list[bytes]], list[bytes]], size: int = 20, *, hint: bool = True
) -> Change:
    """Change the lines of each page with events, which has one cursor, at its end.

    The change gets the event in front of the page first: none at `_first`. Without `hint` no page
    size is heeded.
    """

    def events(request: Request, publisher: Any, **changes: str | None) -> list[bytes]:
        all_of_them = {"pageSizeHint": "9999", "pagesizehint": "9999", "stream": None}
        body = handle(publisher, asked_with(request, **all_of_them, **changes)).body
        return [line for line in body.splitlines(keepends=True) if b'"entity"' in line]

    def apply(response: Response, request: Request, publisher: Any) -> Response:
        if not hint:
            plain = asked_with(request, pageSizeHint=None, pagesizehint=None)
            response = handle(publisher, plain)
        if b'"entity"' in response.body:
            whole = events(request, publisher, cursor="_first")
            count = len(whole) - len(events(request, publisher))
            before = whole[count - 1 : count] if count else []
            response.body = b"".join(change(before, response.body.splitlines(keepends=True)))
        return response

    def changed(publisher: Publisher) -> None:
        publisher.page_size = publisher.checkpoint_every = size
        fetch(apply)(publisher)

    return changed


def one_late(before: list[bytes], page: list[bytes]) -> list[bytes]:
    return page[len(before) :]


def one_early(before: list[bytes], page: list[bytes]) -> list[bytes]:
    return [*before, *page]


def cursor_first(before: list[bytes], page: list[bytes]) -> list[bytes]:
    return [page[-1], *page[:-1]]


def counted(response: Response, request: Request, publisher: Any) -> Response:
    """Write how often the publisher was asked into each event."""
    count = len(publisher.requests)
    response.body = response.body.replace(b'"entity":', b'"asked":%d,"entity":' % count)
    return response


def older_end(response: Response, request: Request, publisher: Any) -> Response:
    """Answer a poll at the end as a replica that lags does: with an older cursor, no event."""
    if has_cursor(request) and b'"entity"' not in response.body and response.status == 200:
        first = handle(publisher, asked_with(request, cursor="_first"))
        response.body = re.sub(CURSOR, re.findall(CURSOR, first.body)[0], response.body)
    return response


def every(count: int, fault: Any) -> Fault:
    """Apply a fault to each so many requests."""
    requests = cycle(range(count))
    apply = faults.Status(fault) if isinstance(fault, int) else fault

    def faulty(response: Response, request: Request, publisher: Any) -> Response:
        return response if next(requests) < count - 1 else apply(response, request, publisher)

    return faulty


def needs_bearer(status: int) -> Change:
    def apply(response: Response, request: Request, publisher: Any) -> Response:
        known = "authorization" in request.headers
        return response if known else Response(status, {}, b"who are you?")

    return lambda publisher: publisher.fail(apply, on="any", times=None)


def closed_too_early(publisher: Publisher) -> None:
    """List an open partition as closed, with an end before its last events."""
    id = publisher.open_partitions()[0]
    end = publisher.end_cursor(id)
    publisher.append(id, {"entity": "late"})
    index = [p["id"] for p in publisher.discovery()["partitions"]].index(str(id))
    listed(index, closed=True, lastCursor=end)(publisher)


def appended(*payloads: dict[str, Any]) -> Change:
    return lambda publisher: publisher.extend(publisher.open_partitions()[0], payloads)


def rolls_back(publisher: Publisher) -> None:
    """A split with new ids is rolled back while the publisher is examined."""

    def apply(response: Response, request: Request, publisher: Any) -> Response:
        publisher.roll_back(1)
        return response

    publisher.fail(apply, on="discovery", after=2)


def refused_at_times(status: int) -> Change:
    """Refuse two requests, the second one twice, as a rate limit does."""

    def apply(publisher: Publisher) -> None:
        refusal = faults.Status(status, "too many", {"retry-after": "1"})
        publisher.fail(refusal, on="any", after=3)
        publisher.fail(refusal, on="any", after=20, times=2)

    return apply


# ------------------------------------------------------------------ the rows

ROWS = [
    Row("discovery-answers", "html", discovery(faults.Html()), V2),
    Row("discovery-answers", "a list", discovery(faults.Replace([1])), V2),
    Row("discovery-answers", "404", discovery(404), V2),
    Row("discovery-answers", "html later", discovery(faults.Html(), after=1), V2),
    Row("discovery-answers", "cut", discovery(faults.Replace(b'{"part')), V2),
    Row("discovery-answers", "redirected away", discovery(ELSEWHERE), V2),
    Row("discovery-usable", "id out of range", listed(0, id="70000"), V2),
    Row("discovery-usable", "twice", edited(lambda f: f["partitions"].append({"id": "0"})), V2),
    Row("discovery-usable", "flag as text", edited(lambda f: f.update(exactlyOnce="yes")), V2),
    Row("discovery-usable", "closed as text", listed(0, closed="yes"), V2),
    Row("discovery-usable", "lastCursor not ASCII", listed(0, lastCursor="ü"), V2),
    Row("discovery-usable", "both methods", listed(-1, startsAfterPartition="0"), V2),
    Row("discovery-usable", "lineage of letters", listed(-1, cursorFromPartitions=["x"]), V2),
    Row("discovery-usable", "own parent", listed(-1, cursorFromPartitions=["5"]), V2),
    Row("discovery-usable", "two spellings", listed(-1, splitFromAncestors=["3"]), V2),
    Row("id-text", "integers", quirk(integer_ids=True), V2),
    Row("id-text", "padded", listed(0, id="00"), V2),
    Row("id-text", "integer lineage", quirk(integer_lineage=True), V2),
    Row("last-cursor-listed", "none", quirk(last_cursor="never"), DRAFT),
    Row("last-cursor-useful", "none", quirk(last_cursor=None), TOKEN),
    Row("partitions-listed", "null", partitions(None), V2),
    Row("partitions-listed", "none later", partitions([], after=1), V2),
    Row("partition-stays", "rolled back", rolls_back, V2),
    Row("closed-final", "reopened", listed(0, after=2, closed=False), V2),
    Row(
        "discovery-stable",
        "two versions",
        discovery(every(2, faults.Edit(lambda found: found.update(token="other")))),
        TOKEN,
    ),
    Row("parent-closed", "open", lambda p: p.add(9, starts_after=p.open_partitions()[0]), V2),
    Row("parent-listed", "lost", added(starts_after=77), V2),
    Row("ancestor-gone", "listed", added(cursor_from=[0]), V2),
    Row("lineage-names", "old names", quirk(old_lineage_names=True), V2),
    Row(
        "lineage-edge",
        "zero for no parent",
        edited(lambda f: [p.setdefault("startsAfterPartition", 0) for p in f["partitions"]] and f),
        V2,
    ),
    Row("lineage-edge", "of 0 left out", quirk(omit_parent_zero=True), V2),
    Row("lineage-edge", "all left out", quirk(omit_starts_after=True), V2),
    # Responses
    Row("http-complete", "truncated", fetch(faults.Truncate())),
    Row("http-complete", "truncated chunks", fetch(faults.Truncate(chunked=True))),
    Row("http-complete", "reset within a page", fetch(faults.Reset(after_lines=1))),
    Row("http-complete", "broken chunk", fetch(faults.BrokenChunk())),
    Row("http-complete", "gzip that is none", header("content-encoding", "gzip")),
    Row("token-current", "refused", fetch(409), TOKEN),
    Row("auth-status", "404 for strangers", needs_bearer(404), V2, ("--auth-env", "WHO")),
    # Each takes seconds, and no dialect has a part in it.
    Row("http-time", "hang", fetch(faults.Hang()), V1, FAST),
    Row("http-time", "hang within a page", fetch(faults.Hang(after_lines=1)), DRAFT, FAST),
    Row("http-time", "delay", fetch(faults.Delay(5)), TOKEN, FAST),
    Row("http-time", "trickle", fetch(faults.Trickle(1, 0.1)), TOKEN, FAST),
    Row("http-stable", "503 once", lambda publisher: publisher.fail(503)),
    Row("http-stable", "reset once", lambda publisher: publisher.fail(faults.Reset())),
    Row("http-stable", "429 at times", refused_at_times(429)),
    Row("http-stable", "503 with Retry-After at times", refused_at_times(503)),
    Row("http-redirect", "away", fetch(ELSEWHERE)),
    Row("http-coding", "gzip unasked", fetch(faults.Gzip())),
    Row("http-status", "206", fetch(status_206)),
    Row("http-status", "204", where(has_cursor, 204)),
    Row("http-status", "204 at the end", quirk(empty_page="204")),
    Row("http-cache", "cached", header("age", "17")),
    Row("http-cache", "storable", header("cache-control", "max-age=60")),
    # Pages and cursors
    Row("fetch-accepted", "500", fetch(500)),
    Row(
        "fetch-accepted", "500 and delay", fetch(faults.Both((faults.Delay(0), faults.Status(500))))
    ),
    Row("fetch-accepted", "reset", fetch(faults.Reset())),
    Row("fetch-accepted", "_last refused", where(from_last, 400)),
    Row("fetch-accepted", "cursors refused", where(has_cursor, 400)),
    Row("line-sound", "error text", fetch(faults.ErrorText())),
    Row("line-sound", "cut line", fetch(faults.CutLine())),
    Row("line-sound", "html", fetch(faults.Html())),
    Row("line-sound", "list as page", fetch(faults.Replace([1, 2]))),
    Row("line-sound", "list as payload", rewritten(rb'"(event|data)":\{[^}]*\}', rb'"\1":[1]')),
    Row("line-sound", "another partition", rewritten(rb'"partition":.', rb'"partition":9'), V1),
    Row("line-sound", "empty cursor", rewritten(CURSOR, rb'"cursor":""')),
    Row("line-sound", "numeric cursor", rewritten(CURSOR, rb'"cursor":7')),
    Row("line-sound", "_last as cursor", rewritten(CURSOR, rb'"cursor":"_last"')),
    Row("payload-key", "another key", rewritten(rb'"event":', rb'"data":'), DRAFT),
    Row("payload-key", "another key", rewritten(rb'"data":', rb'"event":'), TOKEN),
    Row("payload-key", "swapped", quirk(swapped_payload_key=True), V2),
    Row("payload-key", "Pascal case", quirk(pascal_case=True)),
    Row("page-cursor", "no checkpoint", fetch(faults.NoCheckpoint())),
    Row("page-cursor", "nothing", fetch(faults.Empty())),
    Row("page-cursor", "silent end", quirk(empty_page="silent")),
    Row("cursor-progress", "same checkpoint", fetch(faults.SameCheckpoint())),
    Row("cursor-progress", "same one later", where(has_cursor, faults.SameCheckpoint())),
    Row("cursor-progress", "older end", fetch(older_end)),
    Row("page-meaning", "query dropped", query_dropped, V2),
    Row("page-meaning", "maintenance", fetch(faults.Replace({"status": "maintenance"}))),
    Row("closed-end", "events behind it", closed_too_early, DRAFT),
    Row(
        "closed-end",
        "another one",
        lambda p: listed(0, lastCursor=p.another_cursor(0, p.end_cursor(0)))(p),
        DRAFT,
    ),
    Row("exactly-once", "twice", appended(*[{"id": "order-1", "entity": "again"}] * 2), V2),
    Row("last-cursor-given", "nothing", where(from_last, faults.Empty())),
    Row("cursor-echo", "echo", quirk(empty_page="echo")),
    Row("cursor-echo", "_first is the end", fetch(faults.EmptyPage(moving=False))),
    Row("closed-end-cursor", "silent end", fetch(silent_end), V2),
    Row("final-newline", "none", fetch(faults.NoFinalNewline())),
    Row("line-length", "long", appended({"entity": "x" * 70_000})),
    Row("line-length", "endless", fetch(faults.EndlessLine())),
    Row("cursor-distance", "endless run", fetch(faults.EndlessRun())),
    Row("empty-pages", "empty", fetch(faults.EmptyPage())),
    Row("end-stable", "moving", fetch(faults.EmptyPage())),
    # Cursors asked for again
    Row("cursor-resumes", "nothing", where(has_cursor, faults.EmptyPage(moving=False))),
    Row("cursor-resumes", "off by one", lines(lambda found: found[1:])),
    Row("cursor-resumes", "one left out", lines(lambda found: [*found[:3], *found[4:]])),
    Row("cursor-resumes", "each page one late", each_page(one_late)),
    Row("cursor-resumes", "cursor first", each_page(cursor_first)),
    Row("cursor-resumes", "cursor first, own size", each_page(cursor_first, hint=False)),
    Row("cursor-resumes", "cursor first, one page", each_page(cursor_first, 999, hint=False)),
    Row("cursor-repeats", "off by one", fetch(last_one_again)),
    Row("cursor-repeats", "each page one early", each_page(one_early)),
    Row("cursor-repeats", "each page one early, own size", each_page(one_early, hint=False)),
    Row("event-order", "two exchanged", lines(lambda found: [found[1], found[0], *found[2:]])),
    Row("event-stable", "a counter", fetch(counted)),
    # Arguments
    Row("argument-accepted", "page size", where(has("pagesizehint"), 400)),
    Row("argument-accepted", "filter", where(has("filter-entity"), 404), DRAFT),
    Row("argument-accepted", "event types", where(has("event-types"), 400), TOKEN),
    Row("argument-accepted", "stream", where(has("stream"), 400), V2),
    Row("argument-accepted", "headers", where(has("headers"), 400), V1),
    Row("filter-unknown", "ignored", where(has("filter-"), page_of()), DRAFT),
    Row(
        "token-stale",
        "ignored",
        lambda p: where(lambda r: r.token != p.token, page_of(token=p.token))(p),
        TOKEN,
    ),
    Row("stream-sound", "no cursor", stream(body=b""), V2),
    Row("stream-sound", "no end", stream(seconds=None), V2, ("--timeout", "1")),
    Row(
        "page-size-honoured",
        "ignored",
        where(has("pagesizehint"), page_of(pageSizeHint=None, pagesizehint=None)),
    ),
    Row("stream-live", "not held", stream(body=b'{"cursor":"x"}\n'), V2, bounds=PATIENT),
    Row("stream-live", "buffered", lambda publisher: publisher.fail(buffered, times=None), V2),
    Row("refusal-status", "500 for a partition", quirk(unknown_partition=500)),
    Row("refusal-status", "500 for a cursor", where(lambda r: " " in str(r.cursor), 500)),
    Row(
        "refusal-status", "n ignored", where(lambda r: r.query.get("n") == "3", page_of(n="2")), V1
    ),
]
