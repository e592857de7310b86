"""What a bare httpx client sees of each fault, and which requests a fault applies to.

The feed has ten events, and a checkpoint after every second one. A body is drawn with a character
for each of its lines: events are digits, checkpoints are letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx
import pytest

from feedapi_client.testing import Publisher, Request, Response, faults
from tests.testing.conftest import Clock
from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]
WHOLE = "01a23b45c67d89e"
COMMANDS = '<{"command":"partitions-changed"}><{"resync":true,"partition":0}><{}>'


@dataclass
class Received:
    """The part of a response that arrived, and the name of the error that ended it."""

    status: int | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    body: bytes = b""
    error: str = ""

    def drawn(self, whole: bytes) -> str:
        """Return status, body and error on one line.

        `whole` is the body without a fault. ``=`` is a checkpoint with the cursor asked with, ``+``
        follows a line that has unknown fields, ``<>`` hold any other line, and ``~`` is half a line
        with what follows it.
        """
        if "ndjson" in self.headers.get("content-type", ""):
            body = _drawn_lines(self.body, dict(zip(whole.splitlines(), WHOLE, strict=True)))
        else:
            body = self.body.decode()
        return " ".join(str(part) for part in (self.status, body, self.error) if part)


def _drawn_lines(body: bytes, symbols: dict[bytes, str]) -> str:
    *lines, rest = body.split(b"\n")
    drawn = "".join(symbols.get(line) or _drawn_line(line, symbols) for line in lines)
    if not rest:
        return drawn
    begun = next(islice(symbols, len(lines), None), b"")
    kept = max(at for at in range(len(begun) + 1) if begun.startswith(rest[:at]))
    return drawn + (symbols[begun] if rest == begun else "") + "~" + rest[kept:].decode()


def _drawn_line(line: bytes, symbols: dict[bytes, str]) -> str:
    command = json.loads(line)
    if command.get("cursor") == "_first":
        return "="
    known = {name: value for name, value in command.items() if not name.startswith("x-")}
    symbol = symbols.get(json.dumps(known, separators=(",", ":")).encode())
    return f"{symbol}+" if symbol else f"<{line.decode()}>"


def receive(feed: ServedFeed, enough: Callable[[bytes], bool] = lambda body: False) -> Received:
    """Fetch from the beginning of the feed, and leave when the body is `enough`."""
    got = Received()
    url, query = feed.request()
    try:
        with feed.http.stream("GET", url, params=query) as response:
            got.status, got.headers = response.status_code, response.headers
            for piece in response.iter_bytes():
                got.body += piece
                if enough(got.body):
                    break
    except httpx.HTTPError as error:
        got.error = type(error).__name__
    return got


@pytest.fixture(params=["v1", "v2-draft", "v2-token"])
def feed(request: pytest.FixtureRequest, make_feed: MakeFeed) -> ServedFeed:
    return filled(make_feed(dialect=request.param, checkpoint_every=2))


@pytest.fixture
def token_feed(make_feed: MakeFeed) -> ServedFeed:
    return filled(make_feed(3, checkpoint_every=2))


def filled(feed: ServedFeed) -> ServedFeed:
    feed.publisher.extend(0, [{"n": n} for n in range(10)])
    return feed


def teapot(response: Response, request: Request, publisher: Publisher) -> Response:
    return Response(418, {"x-partition": str(request.partition)}, b"short and stout")


SEEN: list[tuple[Any, ...]] = [
    (faults.Status(429, "slow down", {"retry-after": "3"}), "429 slow down", "retry-after: 3"),
    (faults.Redirect("https://else.example"), "302", "location: https://else.example"),
    (faults.Html("<p>login"), "200 <p>login", "content-type: text/html; charset=utf-8"),
    (faults.Replace({"message": "soon"}), '200 {"message":"soon"}'),
    (faults.Empty(), "200"),
    (teapot, "418 short and stout", "x-partition: 0"),
    (faults.Reset(), "ReadError"),
    (faults.Reset(after_lines=4), "200 01a2~ ReadError"),
    (faults.Truncate(after_lines=4), "200 01a2~ RemoteProtocolError"),
    (faults.Truncate(after_lines=4, chunked=True), "200 01a2~ RemoteProtocolError"),
    (faults.BrokenChunk(), f"200 {WHOLE} RemoteProtocolError"),
    (faults.CutLine(after_lines=1), "200 0~"),
    (faults.ErrorText(), "200 01a23b45c67d89~Internal server error"),
    (faults.NoFinalNewline(), f"200 {WHOLE}~"),
    (faults.NoCheckpoint(), "200 0123456789"),
    (faults.NoCheckpoint(keep=2), "200 01a23b456789"),
    (faults.SameCheckpoint(), "200 01=23=45=67=89="),
    (faults.UnknownCommands(), "200 " + "".join(COMMANDS + line for line in WHOLE)),
    (faults.ExtraFields(), "200 " + "".join(line + "+" for line in WHOLE)),
    (faults.Trickle(), f"200 {WHOLE}"),
    (faults.Gzip(), f"200 {WHOLE}", "content-encoding: gzip"),
    (
        faults.Both((faults.NoCheckpoint(), faults.Gzip())),
        "200 0123456789",
        "content-encoding: gzip",
    ),
]


@pytest.mark.parametrize(
    "row", SEEN, ids=lambda row: getattr(row[0], "__name__", type(row[0]).__name__)
)
def test_what_a_client_sees(feed: ServedFeed, row: Any) -> None:
    fault, seen, *headers = row
    healthy = receive(feed)
    feed.publisher.fail(fault)
    got, later = receive(feed), receive(feed)
    for each, expected in ((healthy, f"200 {WHOLE}"), (got, seen), (later, f"200 {WHOLE}")):
        assert each.drawn(healthy.body) == expected
    assert {*headers} <= {f"{name}: {value}" for name, value in got.headers.items()}


@pytest.mark.parametrize("fault", [faults.Reset, faults.Truncate])
def test_a_body_ends_after_so_many_bytes(feed: ServedFeed, fault: Any) -> None:
    feed.publisher.fail(fault(after_bytes=11))
    assert len(receive(feed).body) == 11


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (faults.EndlessLine(), f"200 {WHOLE}~"),
        (faults.EndlessRun(), "200 " + "0123456789" * 2000),
    ],
    ids=["line", "run"],
)
def test_a_body_has_no_end(feed: ServedFeed, fault: Any, seen: str) -> None:
    healthy = receive(feed)
    feed.publisher.fail(fault)
    got = receive(feed, enough=lambda body: len(body) >= 1_000_000)
    assert len(got.body) >= 1_000_000
    assert got.drawn(healthy.body).startswith(seen)


def test_a_response_hangs_in_the_middle_of_its_body(feed: ServedFeed) -> None:
    healthy = receive(feed)
    feed.publisher.fail(faults.Hang(after_lines=2))
    in_flight: list[int] = []

    def enough(body: bytes) -> bool:
        in_flight.append(feed.publisher.in_flight)
        return body.count(b"\n") == 2 and not body.endswith(b"\n")

    assert receive(feed, enough).drawn(healthy.body) == "200 01~"
    assert in_flight[-1] == 1


def test_empty_pages_whose_cursor_moves(feed: ServedFeed) -> None:
    feed.publisher.fail(faults.EmptyPage(), times=3)
    cursors = ["_first"]
    for _ in range(3):
        events, cursor = feed.read(0, cursors[-1])
        assert events == []
        cursors.append(cursor)
    assert len(set(cursors)) == 4
    assert len(feed.read_all(0, cursors[-1])) == 10


def test_payloads_survive_extra_fields_byte_for_byte(token_feed: ServedFeed) -> None:
    raw = b'{ "big": 123456789012345678901234567890 }'
    token_feed.publisher.append(1, raw)
    token_feed.publisher.fail(faults.ExtraFields())
    assert raw in token_feed.fetch(1).content


PARTITIONS = [{"id": "0"}, {"id": "1"}, {"id": "2"}]
EXTENDED = [{"x-rack": [1, {"a": None}], **each, "weight": 0.5} for each in PARTITIONS]


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        (faults.Replace([]), []),
        (faults.Replace(None), None),
        (faults.Replace("text"), "text"),
        (faults.Replace({"partitions": {}}), {"partitions": {}}),
        (
            faults.Edit(lambda found: found["partitions"].append(1)),
            {"partitions": [*PARTITIONS, 1]},
        ),
        (faults.ExtraFields(), {"x-build": {"n": 1}, "maxLag": None, "partitions": EXTENDED}),
    ],
)
def test_what_a_client_sees_of_discovery(token_feed: ServedFeed, fault: Any, changed: Any) -> None:
    healthy = token_feed.discover()
    token_feed.publisher.fail(fault, on="discovery")
    replaced = isinstance(fault, faults.Replace)
    assert token_feed.discover() == (changed if replaced else {**healthy, **changed})
    assert token_feed.discover() == healthy


# When faults apply


def statuses(feed: ServedFeed, asked: str) -> list[int]:
    """Ask for the discovery where it says D, and fetch a partition where it says its id."""
    return [
        (feed.http.get(feed.url) if each == "D" else feed.fetch(int(each))).status_code
        for each in asked
    ]


ERRORS = [400, 401, 403, 404, 408, 409, 410, 425, 429, 500, 502, 503, 504]


@pytest.mark.parametrize(
    ("rules", "asked", "answered"),
    [
        *[([(status, {})], "00", [status, 200]) for status in ERRORS],
        ([(503, {"times": 2})], "000", [503, 503, 200]),
        ([(503, {"after": 2})], "0000", [200, 200, 503, 200]),
        ([(503, {"partition": 1})], "012", [200, 503, 200]),
        ([(503, {"times": None})], "0D00", [503, 200, 503, 503]),
        ([(503, {"times": None, "on": "discovery"})], "D0D", [503, 200, 503]),
        ([(503, {"times": None, "on": "any"})], "D0", [503, 503]),
        ([(500, {}), (429, {}), (404, {})], "0000", [500, 429, 404, 200]),
    ],
)
def test_which_requests_a_fault_applies_to(
    token_feed: ServedFeed, rules: Any, asked: str, answered: list[int]
) -> None:
    made = [token_feed.publisher.fail(fault, **when) for fault, when in rules]
    assert statuses(token_feed, asked) == answered
    assert sum(rule.hits for rule in made) == len(answered) - answered.count(200)
    endless = [rule for rule in made if rule.times is None]
    assert token_feed.publisher.faults == endless
    for rule in endless:
        rule.remove()
    assert statuses(token_feed, "D0") == [200, 200]


def test_heal_removes_all_faults(token_feed: ServedFeed) -> None:
    token_feed.publisher.fail(503, times=None)
    token_feed.publisher.heal()
    assert token_feed.fetch().status_code == 200


def test_a_fault_lasts_for_some_seconds(token_feed: ServedFeed) -> None:
    token_feed.publisher.clock = clock = Clock()
    token_feed.publisher.fail(503, seconds=60.0)
    for seconds, status in ((0.0, 503), (59.0, 503), (2.0, 200)):
        clock.now += seconds
        assert token_feed.fetch().status_code == status
    assert token_feed.publisher.faults == []


def test_a_fault_hits_a_share_of_the_requests(make_feed: MakeFeed) -> None:
    feed = make_feed(seed=7)
    feed.publisher.fail(503, times=None, share=0.5)
    assert 5 < statuses(feed, "0" * 40).count(503) < 35
    with pytest.raises(ValueError, match="share"):
        feed.publisher.fail(503, share=0.0)
