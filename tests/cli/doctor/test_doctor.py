"""``feedapi doctor``: sound publishers, at rest and in motion, and with each thing wrong."""

from __future__ import annotations

import re
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson
import pytest

from feedapi_client.cli.doctor import prober
from feedapi_client.cli.doctor.command import sections
from feedapi_client.testing import Publisher, Quirks, faults
from tests.cli.conftest import Feedapi
from tests.cli.doctor import cases
from tests.cli.doctor.cases import ALL, ROWS, V2, Change, Row, every, page_of, where

Make = Callable[..., Publisher]
CHECKS = {check.id: check for section in sections() for check in section}
LONG = ("endless run", "rate limit")
NO_FAULTS = {"Fault", "FaultRule", "Edit", "Rewrite"}


@pytest.fixture
def make(feedapi_publisher_factory: Make) -> Make:
    """Return a function that makes a sound publisher of a dialect, with everything it offers."""

    def make(dialect: str, partitions: int = 2, *, events: int = 250, **settings: Any) -> Publisher:
        offers = {"stream": dialect != "v1", "filters": ["entity"] if dialect == "v2-draft" else ()}
        plain = {"page_size": 100, "checkpoint_every": 25, "quirks": Quirks(last_cursor="closed")}
        settings = {**plain, **offers, **settings}
        publisher = feedapi_publisher_factory(partitions, dialect=dialect, **settings)
        fill(publisher, range(events))
        if dialect != "v1" and partitions == 2:
            publisher.split(0)
            publisher.split(1, method="cursor-from")
            fill(publisher, range(events, 2 * events))
        return publisher

    return make


def fill(publisher: Publisher, numbers: range) -> None:
    for number in numbers:
        publisher.publish(number % 7, {"entity": number % 7, "id": number})


def arguments(publisher: Publisher, *options: object) -> tuple[object, ...]:
    count = len(publisher.partitions)
    return (
        "doctor",
        publisher.url,
        *(("--v1-partitions", count) if publisher.dialect == "v1" else ()),
        *options,
    )


def examine(feedapi: Feedapi, publisher: Publisher, *options: object) -> tuple[int, dict[str, Any]]:
    result = feedapi(*arguments(publisher, "--json", *options))
    assert result.stderr == ""
    return result.exit_code, orjson.loads(result.stdout)


def found(report: dict[str, Any]) -> dict[str, list[str]]:
    texts = {each["id"]: [f["text"] for f in each["findings"]] for each in report["checks"]}
    return {id: findings for id, findings in texts.items() if findings}


# ------------------------------------------------------------------ what is sound, and what is not


def fails(fault: Any, on: Any = "any") -> Change:
    return lambda publisher: publisher.fail(fault, on=on, times=None)


def cases_of_rows() -> Iterator[Any]:
    for row in ROWS:
        for dialect in row.dialects:
            # The quick answer tries each fault in one dialect, unless that takes long.
            long = row.options or row.name in LONG or dialect != row.dialects[-1]
            marks = pytest.mark.slow if long else ()
            yield pytest.param(row, dialect, id=f"{row.finds}-{row.name}-{dialect}", marks=marks)


@pytest.mark.parametrize(("row", "dialect"), [*cases_of_rows()])
def test_a_fault_is_found(
    feedapi: Feedapi, make: Make, row: Row, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "Bounds", row.bounds)
    monkeypatch.setenv("WHO", "Bearer me")
    publisher = make(dialect)
    row.change(publisher)
    code, report = examine(feedapi, publisher, *row.options)
    assert row.finds in found(report)
    level = next(each["level"] for each in report["checks"] if each["id"] == row.finds)
    assert code == 1 or level != "MUST"
    assert len(publisher.requests) <= report["requests"] <= prober.Bounds().max_requests


def test_every_check_has_its_row_and_its_texts() -> None:
    assert {row.finds for row in ROWS} == CHECKS.keys()
    for check in CHECKS.values():
        assert check.requirement.endswith(".")
        assert check.cost.endswith(".")


def test_every_fault_of_the_publisher_is_tried() -> None:
    source = "".join(Path(each).read_text("utf-8") for each in (cases.__file__, __file__))
    classes = {name for name, each in vars(faults).items() if isinstance(each, type)}
    own = {name for name in classes if vars(faults)[name].__module__ == faults.__name__}
    tried = {name for name in own if not name.startswith("_")} - NO_FAULTS
    assert len(tried) >= 24
    for name in tried:
        assert f"faults.{name}(" in source, name


# ------------------------------------------------------------------ in motion


def moving(count: int, move: Change, on: Any = "fetch") -> Change:
    """Let the publisher move at each so many requests, before the answer to that one."""

    def apply(publisher: Publisher) -> None:
        requests = cycle(range(count))

        def answer(response: Any, request: Any, _: Any) -> Any:
            if next(requests) == count - 1:
                move(publisher)
            return response

        publisher.fail(answer, on=on, times=None)

    return apply


def publish(publisher: Publisher) -> None:
    for n in range(9):
        publisher.publish(n % 7, {"entity": n % 7, "id": len(publisher.requests), "n": n})


def split(method: Any) -> Change:
    def move(publisher: Publisher) -> None:
        publisher.split(publisher.open_partitions()[0], method=method)
        publish(publisher)

    return move


def merge(publisher: Publisher) -> None:
    if len(publisher.open_partitions()) > 1:
        publisher.merge(publisher.open_partitions()[:2])
        publish(publisher)
    else:
        split("cursor-from")(publisher)


def close_last(publisher: Publisher) -> None:
    if len(publisher.open_partitions()) > 1:
        publisher.close(publisher.open_partitions()[-1])


def resize(publisher: Publisher) -> None:
    publisher.page_size = 40 + (publisher.page_size * 7) % 100
    publish(publisher)


def publish_equal(publisher: Publisher) -> None:
    for n in range(300):
        publisher.publish(n % 7, {"entity": "the same"})


ONE_CURSOR = {"page_size": 20, "checkpoint_every": 20}
ECHO = Quirks(empty_page="echo", last_cursor="closed")
SOUND: dict[str, tuple[tuple[str, ...], Change, dict[str, Any], set[str]]] = {
    "at rest": (ALL, lambda publisher: None, {}, set()),
    "without events": (ALL, lambda publisher: None, {"events": 0}, set()),
    "pages are divided anew": (ALL, lambda publisher: None, {"vary": True, "seed": 1}, set()),
    "once more": (ALL, lambda publisher: None, {"vary": True, "seed": 2}, set()),
    "while events come": (V2, moving(1, publish), {"vary": True, "seed": 4}, set()),
    "a cursor a page": (ALL, lambda publisher: None, ONE_CURSOR, set()),
    "a cursor a page, events come": (ALL, moving(1, publish), ONE_CURSOR, set()),
    "a cursor a page, divided anew": (
        *(ALL, moving(3, publish), {**ONE_CURSOR, "vary": True, "seed": 3}, set()),
    ),
    "payloads are equal": (ALL, publish_equal, {**ONE_CURSOR, "events": 0}, set()),
    "unknown commands": (ALL, fails(faults.UnknownCommands(), on="fetch"), {}, set()),
    "extra fields": (ALL, fails(faults.ExtraFields()), {}, set()),
    "503 now and then": (ALL, fails(every(9, 503)), {}, {"http-stable"}),
    "events come": (ALL, moving(1, publish), {}, set()),
    "it splits by start after": (V2, moving(6, split("starts-after")), {}, set()),
    "it splits by cursors": (V2, moving(6, split("cursor-from")), {}, set()),
    "at each discovery": (V2, moving(3, split("cursor-from"), "discovery"), {}, set()),
    "it merges and splits": (V2, moving(6, merge), {}, set()),
    "partitions close": (V2, moving(9, close_last), {}, set()),
    "tokens change": (("v2-token",), moving(5, Publisher.rotate_token), {}, {"discovery-stable"}),
    "pages have other sizes": (ALL, moving(2, resize), {}, {"page-size-honoured"}),
    "no end has a cursor": (
        *(V2, moving(6, split("starts-after")), {"quirks": ECHO}),
        {"cursor-echo", "closed-end-cursor"},
    ),
}


@pytest.mark.parametrize(
    ("name", "dialect"), [(name, dialect) for name, row in SOUND.items() for dialect in row[0]]
)
def test_a_sound_publisher_is_not_blamed(
    feedapi: Feedapi, make: Make, name: str, dialect: str
) -> None:
    """At rest, and while it moves."""
    _, move, settings, allowed = SOUND[name]
    publisher = make(dialect, **settings)
    move(publisher)
    code, report = examine(feedapi, publisher)
    blamed = {id: texts for id, texts in found(report).items() if id not in allowed}
    # Where this machine is busy a first byte is late, whoever sent it: the next test looks at that.
    late = [text for text in blamed.get("stream-live", ()) if "the first byte came" in text]
    assert blamed == ({"stream-live": late} if late else {})
    assert (code, report["sound"], report["dialect"]) == (0, True, dialect)
    assert report["partitions_read"]


@pytest.mark.parametrize("dialect", V2)
def test_a_stream_that_nobody_holds_back_is_not_taken_for_one(
    feedapi: Feedapi, make: Make, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first byte has ten seconds, so that no machine is too busy. It ends before that."""
    monkeypatch.setattr(prober, "Bounds", cases.PATIENT)
    publisher = make(dialect)

    def shorter(response: Any, request: Any, _: Any) -> Any:
        if response.stream is not None:
            response.stream.seconds = 0.05
        return response

    publisher.fail(shorter, times=None)
    code, report = examine(feedapi, publisher)
    assert code == 0
    assert found(report).keys() == {"stream-live"}
    [text] = found(report)["stream-live"]
    assert "ended after" in text


@pytest.mark.slow
@pytest.mark.parametrize("dialect", V2)
def test_a_replica_that_answers_with_its_older_end_is_found_out(
    feedapi: Feedapi, make: Make, dialect: str
) -> None:
    publisher = make(dialect, 3)
    time.sleep(0.3)
    lag = every(2, faults.Lag(0.3, ahead="tail"))

    def answer(response: Any, request: Any, _: Any) -> Any:
        publish(publisher)
        return lag(response, request, publisher)

    publisher.fail(answer, times=None)
    code, report = examine(feedapi, publisher)
    assert code == 1
    assert {"cursor-progress", "cursor-repeats"} & found(report).keys()


@pytest.mark.parametrize("given", [1, 2, 4, 7])
def test_a_wrong_number_of_partitions_is_the_callers_mistake(
    feedapi: Feedapi, make: Make, given: int
) -> None:
    result = feedapi("doctor", make("v1", 3).url, "--v1-partitions", given)
    assert result.exit_code == 2, result.output
    assert "--v1-partitions" in result.stderr
    assert "n=3" in result.stderr


def test_so_it_is_where_the_publisher_ignores_the_number(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v1", 3)
    where(lambda request: request.query.get("n") != "3", page_of(n="3"))(publisher)
    result = feedapi("doctor", publisher.url, "--v1-partitions", 5)
    assert result.exit_code == 2, result.output
    assert "partition 3" in result.stderr


# ------------------------------------------------------------------ the command


def test_findings_are_shown_with_what_they_cost_and_where_it_stands(
    feedapi: Feedapi, make: Make
) -> None:
    publisher = make("v2-draft")
    publisher.fail(faults.NoCheckpoint(), times=None)
    result = feedapi(*arguments(publisher))
    assert result.exit_code == 1
    for words in (
        "100 events and no cursor",
        f"costs: {CHECKS['page-cursor'].cost.replace('`', '')}",
        "specification, Fetch call, checkpoint command; rules R3, R13",
        "doctor.md#page-cursor",
        "2 violated",
    ):
        assert words in result.stdout


@pytest.mark.parametrize("change", [faults.NoCheckpoint(), faults.Status(500), faults.Html()])
def test_no_two_rows_of_the_table_say_the_same(feedapi: Feedapi, make: Make, change: Any) -> None:
    publisher = make("v2-token")
    publisher.fail(change, times=None)
    lines = feedapi(*arguments(publisher)).stdout.splitlines()
    rows = [[cell.strip() for cell in re.split("[│\t]", line) if cell.strip()] for line in lines]
    texts = [(row[0], row[-1]) for row in rows if len(row) > 2]
    assert texts
    assert len(texts) == len(set(texts))


def test_a_sound_feed_has_a_short_report(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-token", stream=False)
    result = feedapi(*arguments(publisher))
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 3)
    assert "sound: " in result.stdout


def test_a_deviation_is_an_error_only_if_strict(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-draft", stream=False)
    publisher.quirks = Quirks(integer_lineage=True)
    code, report = examine(feedapi, publisher)
    level = next(each["level"] for each in report["checks"] if each["id"] == "id-text")
    assert (code, report["sound"], level) == (0, True, "deviation")
    assert examine(feedapi, publisher, "--strict")[0] == 1
    code, report = examine(feedapi, publisher, "--strict", "--ignore", "id-text")
    assert (code, found(report)) == (0, {})


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_feed_that_cannot_be_examined_has_its_own_exit_code(
    feedapi: Feedapi, make: Make, status: int
) -> None:
    publisher = make("v2-draft")
    publisher.fail(status, on="any", times=None)
    result = feedapi(*arguments(publisher, "--json"))
    assert (result.exit_code, result.stdout) == (69, "")
    assert f"status {status}" in result.stderr


def test_so_has_nobody_and_a_v1_feed_without_its_number(feedapi: Feedapi, make: Make) -> None:
    with socket.socket() as bound:  # to a port on which nobody listens, and nobody else can
        bound.bind(("127.0.0.1", 0))
        result = feedapi("doctor", f"http://127.0.0.1:{bound.getsockname()[1]}/feed")
    assert result.exit_code == 69
    assert "no answer" in result.stderr
    result = feedapi("doctor", make("v1").url)
    assert result.exit_code == 69
    assert "--v1-partitions" in result.stderr


@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_the_bound_on_requests_holds(feedapi: Feedapi, make: Make, limit: int) -> None:
    publisher = make("v2-token", stream=False)
    _, report = examine(feedapi, publisher, "--max-requests", limit)
    assert report["requests"] == len(publisher.requests) == limit
    assert found(report) == {}


@pytest.mark.parametrize("dialect", ALL)
def test_what_was_not_asked_is_nobodys_fault(feedapi: Feedapi, make: Make, dialect: str) -> None:
    publisher = make(dialect, 1, events=60, stream=False)
    for limit in range(8, examine(feedapi, publisher)[1]["requests"]):
        code, report = examine(feedapi, publisher, "--max-requests", limit)
        assert (code, report["requests"], found(report)) == (0, limit, {})


def test_a_feed_that_fails_after_it_limited_requests_is_not_asked_for_ever(
    feedapi: Feedapi, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "Bounds", partial(prober.Bounds, pauses=0))
    publisher = make("v2-token")
    publisher.fail(500, on="discovery", times=None, after=3)
    publisher.fail(429, on="discovery", times=3)
    result = feedapi(*arguments(publisher))
    assert (result.exit_code, "status 500" in result.stderr) == (69, True)
    assert len(publisher.requests) == 6


def test_the_bound_on_bytes_holds(
    feedapi: Feedapi, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "Bounds", partial(prober.Bounds, max_bytes=100_000))
    publisher = make("v2-token")
    publisher.fail(faults.EndlessRun(), times=None)
    # A chunk may come on top, and a page of one megabyte is the most that any request brings.
    assert examine(feedapi, publisher)[1]["bytes"] <= 100_000 + 1024 * 1024


@pytest.mark.parametrize("scheme", ["Bearer", "Basic"])
def test_credentials_are_sent_and_never_shown(
    feedapi: Feedapi, make: Make, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    password = "hunter2secret"
    sent = b64encode(f"me:{password}".encode()).decode() if scheme == "Basic" else password
    monkeypatch.setenv("WHO", f"{scheme} {sent}")
    bearer = password if scheme == "Bearer" else None
    publisher = make("v2-draft", bearer=bearer, stream=False)
    code, report = examine(feedapi, publisher, "--auth-env", "WHO", "--strict")
    assert (code, found(report)) == (0, {})
    outcome = {check["id"]: check["outcome"] for check in report["checks"]}
    assert outcome["auth-status"] == "passed"
    assert sum("authorization" not in r.headers for r in publisher.requests) == 1

    def echo(response: Any, request: Any, _: Any) -> Any:
        text = f"{request.headers.get('authorization', '')} {password}"
        return faults.Status(500, text)(response, request, publisher)

    publisher.fail(echo, times=None)
    result = feedapi(*arguments(publisher, "--auth-env", "WHO"))
    assert "status 500" in result.stdout
    assert password not in result.output
    assert sent not in result.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (faults.NoCheckpoint(), "a fetch from _first: 100 events and no cursor"),
        (
            faults.Replace({"status": "maintenance"}),
            "a fetch from _first: lines without an event or a cursor: ",
        ),
        (
            faults.Replace(b'{"cursor":"\\u00fcfetch"}\n'),
            "a cursor that can't be sent back: '\\xfc***'",
        ),
        (faults.Status(500, "a fetch of events"), "a fetch from _first: status 500: a *** of ***"),
    ],
)
def test_words_of_its_own_are_no_secrets(
    feedapi: Feedapi, make: Make, change: Any, says: str
) -> None:
    """Although a secret is the same word: only in what the publisher said it is masked."""
    publisher = make("v2-draft")
    publisher.fail(change, times=None)
    asked = arguments(publisher)
    result = feedapi(asked[0], f"{asked[1]}?a=fetch&b=events&c=lines", *asked[2:])
    assert says in result.stdout, result.output


def test_text_of_a_publisher_is_escaped(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-draft")
    publisher.fail(faults.Status(400, "\x1b[31mred"), times=None)
    for options in ((), ("--json",)):
        result = feedapi(*arguments(publisher, *options))
        assert "red" in result.stdout
        assert "\x1b" not in result.stdout


def test_help_states_the_bounds(feedapi: Feedapi) -> None:
    text = " ".join(feedapi("doctor", "--help").stdout.split())
    assert "120 requests" in text
    assert "32 MiB" in text
    assert "Examples:" in text
