from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from feedapi_client.testing import Publisher, faults
from tests.testing.served_feed import TIMEOUT, ServedFeed, parse


class Lines:
    """The lines of a streamed response as they arrive."""

    def __init__(self, response: httpx.Response) -> None:
        self._pieces = response.iter_bytes()
        self._rest = b""

    def next(self) -> dict[str, Any] | None:
        while b"\n" not in self._rest:
            try:
                self._rest += next(self._pieces)
            except StopIteration:
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


@contextmanager
def streaming(publisher: Publisher, **arguments: Any) -> Iterator[Lines]:
    query = {"partition": 0, "cursor": "_first", "stream": "y", **arguments}
    with (
        publisher.serve() as url,
        httpx.Client(verify=False, timeout=TIMEOUT) as http,
        http.stream("GET", url, params=query) as response,
    ):
        assert response.status_code == 200
        yield Lines(response)


def draft(**settings: Any) -> Publisher:
    return Publisher(dialect="v2-draft", stream=True, **settings)


def test_a_streamed_response_begins_with_what_there_is() -> None:
    publisher = draft(page_size=2, checkpoint_every=2)
    publisher.extend(0, [{"n": n} for n in range(5)])
    with streaming(publisher) as lines:
        found = [lines.next() for _ in range(8)]
    assert [line["event"]["n"] for line in found if line and "event" in line] == list(range(5))


def test_events_are_delivered_as_they_are_appended() -> None:
    publisher = draft()
    with streaming(publisher) as lines:
        assert list(lines.next() or ()) == ["cursor"]
        for n in range(3):
            cursor = publisher.append(0, {"n": n})
            assert lines.next() == {"event": {"n": n}}
            assert lines.next() == {"cursor": cursor}


def test_a_stream_ends_with_its_time() -> None:
    with streaming(draft(), stream="100") as lines:
        assert list(lines.next() or ()) == ["cursor"]
        assert lines.next() is None


def test_a_stream_ends_when_its_partition_is_closed() -> None:
    publisher = draft()
    with streaming(publisher) as lines:
        lines.next()
        publisher.append(0, {"n": 1})
        publisher.close(0)
        assert lines.next() == {"event": {"n": 1}}
        assert lines.next() == {"cursor": publisher.end_cursor(0)}
        assert lines.next() is None


def test_a_stream_ends_when_its_partition_is_removed() -> None:
    publisher = draft()
    with streaming(publisher) as lines:
        lines.next()
        publisher.split(0, method="cursor-from")
        assert lines.next() is None


def test_a_stream_continues_when_another_partition_changes() -> None:
    publisher = Publisher(2, dialect="v2-draft", stream=True)
    with streaming(publisher) as lines:
        lines.next()
        publisher.split(1)
        publisher.append(0, {"n": 1})
        assert lines.next() == {"event": {"n": 1}}


def test_a_varied_stream_checkpoints_every_event_once() -> None:
    publisher = draft(seed=4, page_size=20, checkpoint_every=3)
    publisher.extend(0, [{"entity": n % 9, "n": n} for n in range(300)])
    publisher.close(0)
    with streaming(publisher) as lines:
        text = ""
        while (line := lines.next()) is not None:
            text += json.dumps(line) + "\n"
    batches = parse(text)
    assert batches[-1][1] == publisher.end_cursor(0)
    assert sorted(event["n"] for events, _ in batches for event in events) == list(range(300))


def test_faults_apply_to_streams_too() -> None:
    publisher = draft()
    publisher.append(0, {"n": 1})
    publisher.fail(faults.UnknownCommands(({"what": 1},)))
    with streaming(publisher) as lines:
        assert [lines.next() for _ in range(2)] == [{"what": 1}, {"event": {"n": 1}}]
        lines.next()
        lines.next()
        publisher.append(0, {"n": 2})
        assert [lines.next() for _ in range(2)] == [{"what": 1}, {"event": {"n": 2}}]


def test_a_fault_of_the_body_ends_a_stream_after_its_first_lines() -> None:
    publisher = draft()
    publisher.append(0, {"n": 1})
    publisher.fail(faults.Gzip())
    with streaming(publisher) as lines:
        assert lines.next() == {"event": {"n": 1}}
        assert lines.next() == {"cursor": publisher.end_cursor(0)}
        assert lines.next() is None


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"stream": False}, {"stream": "y"}),
        ({"stream": True}, {"stream": "soon"}),
        ({"stream": True}, {"stream": "y", "pageSizeHint": "5"}),
    ],
)
def test_a_stream_that_the_draft_does_not_allow_is_a_400(
    make_feed: Callable[..., ServedFeed], settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert make_feed(dialect="v2-draft", **settings).fetch(**arguments).status_code == 400


def test_discovery_offers_streams(make_feed: Callable[..., ServedFeed]) -> None:
    assert make_feed(dialect="v2-draft", stream=True).discover()["stream"] is True
