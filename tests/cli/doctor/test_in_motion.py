"""``feedapi doctor`` against publishers that change while they are examined.

A sound one is not blamed for that, and one that is wrong only in motion is found out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from feedapi_client.testing import Publisher, Quirks, faults
from tests.cli.conftest import Feedapi
from tests.cli.doctor.cases import page_of, where
from tests.cli.doctor.test_doctor import Make, examine, fill, found

pytestmark = pytest.mark.slow
Move = Callable[[Publisher], object]
V2 = ("v2-draft", "v2-token")


@pytest.fixture
def make(feedapi_publisher_factory: Make) -> Make:
    def make(dialect: str, **settings: Any) -> Publisher:
        publisher = feedapi_publisher_factory(
            3,
            dialect=dialect,
            **{
                "page_size": 100,
                "checkpoint_every": 25,
                "quirks": Quirks(last_cursor="closed"),
                **settings,
            },
        )
        fill(publisher, 0)
        return publisher

    return make


def each(count: int, move: Move, on: str = "fetch") -> Move:
    """Let the publisher move at each so many requests, before the answer to that one."""

    def apply(publisher: Publisher) -> None:
        requests = 0

        def moving(response: Any, request: Any, _: Any) -> Any:
            nonlocal requests
            requests += 1
            if requests % count == 0:
                move(publisher)
            return response

        publisher.fail(moving, on=on, times=None)

    return apply


def publish(publisher: Publisher) -> None:
    for number in range(9):
        publisher.publish(
            number % 7, {"entity": number % 7, "id": len(publisher.requests), "n": number}
        )


def split(method: str) -> Move:
    def move(publisher: Publisher) -> None:
        publisher.split(publisher.open_partitions()[0], method=method)  # type: ignore[arg-type]
        publish(publisher)

    return move


def merge(publisher: Publisher) -> None:
    if len(publisher.open_partitions()) > 1:
        publisher.merge(publisher.open_partitions()[:2])
    else:
        publisher.split(publisher.open_partitions()[0], 3, method="cursor-from")
    publish(publisher)


def close_last(publisher: Publisher) -> None:
    if len(publisher.open_partitions()) > 1:
        publisher.close(publisher.open_partitions()[-1])


def resize(publisher: Publisher) -> None:
    publisher.page_size = 40 + (publisher.page_size * 7) % 100
    publish(publisher)


def unavailable(publisher: Publisher, count: int) -> None:
    """Answer each so many requests with 503."""
    requests = 0

    def answer(response: Any, request: Any, _: Any) -> Any:
        nonlocal requests
        requests += 1
        fault = faults.Status(503)
        return response if requests % count else fault(response, request, publisher)

    publisher.fail(answer, on="any", times=None)


SOUND: dict[str, tuple[tuple[str, ...], dict[str, Any], Move, set[str]]] = {
    "events come": (("v1", *V2), {}, each(1, publish), set()),
    "it splits by start after": (V2, {}, each(6, split("starts-after")), set()),
    "it splits by transferred cursors": (V2, {}, each(6, split("cursor-from")), set()),
    "it splits at each discovery": (V2, {}, each(3, split("cursor-from"), "discovery"), set()),
    "it merges and splits": (V2, {}, each(6, merge), set()),
    "partitions close": (V2, {}, each(9, close_last), set()),
    "tokens change": (("v2-token",), {}, each(5, Publisher.rotate_token), {"discovery-stable"}),
    "pages are divided anew": (V2, {"vary": True, "seed": 4}, each(1, publish), set()),
    "pages have other sizes": (("v1", *V2), {}, each(2, resize), {"page-size-honoured"}),
    "no end has a cursor": (
        V2,
        {"quirks": Quirks(empty_page="echo", last_cursor="closed")},
        each(6, split("starts-after")),
        {"cursor-echo", "last-cursor-given", "closed-end-cursor"},
    ),
    "503 now and then": (
        ("v1", *V2),
        {},
        lambda p: unavailable(p, 9),
        {"http-stable"},
    ),
}


@pytest.mark.parametrize(
    ("name", "dialect"), [(name, dialect) for name in SOUND for dialect in SOUND[name][0]]
)
def test_a_sound_publisher_in_motion_is_not_blamed(
    feedapi: Feedapi, make: Make, name: str, dialect: str
) -> None:
    _, settings, move, allowed = SOUND[name]
    publisher = make(dialect, **settings)
    move(publisher)
    counted = ("--v1-partitions", "3") if dialect == "v1" else ()
    result = feedapi("doctor", publisher.url, "--json", *counted)
    code, report = result.exit_code, orjson.loads(result.stdout)
    assert {id: texts for id, texts in found(report).items() if id not in allowed} == {}
    assert (code, report["sound"]) == (0, True)
    assert report["partitions_read"]


def lagging(ahead: str) -> Move:
    """Every second answer is that of a replica that lags, while events come."""

    def apply(publisher: Publisher) -> None:
        lag = faults.Lag(0.3, ahead=ahead)  # type: ignore[arg-type]
        requests = 0

        def answer(response: Any, request: Any, _: Any) -> Any:
            nonlocal requests
            requests += 1
            publish(publisher)
            return response if requests % 2 else lag(response, request, publisher)

        publisher.fail(answer, times=None)

    return apply


@pytest.mark.parametrize("dialect", V2)
def test_a_replica_that_answers_with_its_older_end_is_found_out(
    feedapi: Feedapi, make: Make, dialect: str
) -> None:
    publisher = make(dialect)
    while not any(publisher.replica(0.3).payloads(id) for id in range(3)):
        time.sleep(0.01)
    lagging("tail")(publisher)
    code, report = examine(feedapi, publisher)
    assert code == 1
    assert {"cursor-progress", "cursor-repeats"} & found(report).keys()


def test_a_split_that_is_rolled_back_is_found_out(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-token")
    publisher.split(0, method="cursor-from")
    publisher.fail(_rolling_back, after=8)
    code, report = examine(feedapi, publisher)
    assert (code, "partition-stays" in found(report)) == (1, True)


def _rolling_back(response: Any, request: Any, publisher: Any) -> Any:
    publisher.roll_back(0)
    return response


@pytest.mark.parametrize("given", [1, 2, 4, 7])
def test_a_wrong_number_of_partitions_is_the_callers_mistake(
    feedapi: Feedapi, make: Make, given: int
) -> None:
    publisher = make("v1")
    result = feedapi("doctor", publisher.url, "--v1-partitions", given)
    assert result.exit_code == 2, result.output
    assert "--v1-partitions" in result.stderr
    assert "n=3" in result.stderr


def test_a_wrong_number_is_the_callers_mistake_where_the_publisher_ignores_it(
    feedapi: Feedapi, make: Make
) -> None:
    publisher = make("v1")
    where(lambda r: r.query.get("n") != "3", page_of(n="3"))(publisher)
    result = feedapi("doctor", publisher.url, "--v1-partitions", 5)
    assert result.exit_code == 2, result.output
    assert "partition 3" in result.stderr
