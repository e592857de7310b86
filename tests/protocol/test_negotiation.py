"""From the response to an argument-less GET to a `FeedInfo`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FeedError, LineageError, NegotiationError, ProtocolError
from feedapi_client.lineage.graph import Graph
from feedapi_client.model import FeedInfo, Partition
from feedapi_client.protocol.negotiation import negotiate
from tests.protocol.calls import calls_of

FEED = "https://service/feed"
FIELDS = [
    *("id", "closed", "lastCursor", "startsAfterPartition", "startsAfterParent"),
    *("cursorFromPartitions", "splitFromAncestors"),
]


def discover(document: Any) -> FeedInfo:
    return negotiate(200, orjson.dumps(document), feed=FEED)


V2 = b'{"partitions":[{"id":"0"}]}'
ALL_FIELDS = {
    "partitions": [
        {"id": "0", "lastCursor": "abc", "closed": True},
        {"id": "16232", "startsAfterPartition": "0"},
        {"id": "24223", "cursorFromPartitions": ["24001", "24100"]},
    ],
    "stream": True,
    "exactlyOnce": True,
    "filters": ["subject"],
}
ALL_READ = FeedInfo(
    "v2-draft",
    {
        0: Partition(0, closed=True, last_cursor="abc"),
        16232: Partition(16232, starts_after=0),
        24223: Partition(24223, cursor_from=(24001, 24100)),
    },
    exactly_once=True,
    stream=True,
    filters=("subject",),
)
ODD_FIELDS = {"partitions": [], "stream": {"max": 5}, "exactlyOnce": {}, "more": 1}
NULLS = dict.fromkeys(["token", "partitions", "stream", "exactlyOnce", "filters"])


@pytest.mark.parametrize(
    ("status", "body", "v1_partitions", "info"),
    [
        (200, V2, None, FeedInfo("v2-draft", {0: Partition(0)})),
        (200, V2, 3, FeedInfo("v2-draft", {0: Partition(0)})),
        (200, b'{"token":"t","partitions":[]}', None, FeedInfo("v2-token", {}, token="t")),
        (200, b'{"token":"t","partitions":null}', None, FeedInfo("v2-token", {}, token="t")),
        (200, orjson.dumps(NULLS), None, FeedInfo("v2-draft", {})),
        (200, orjson.dumps(ALL_FIELDS), None, ALL_READ),
        (
            200,
            orjson.dumps(ODD_FIELDS),
            None,
            FeedInfo("v2-draft", {}, stream=True, exactly_once=True),
        ),
        (400, b"count missing", 2, FeedInfo("v1", {0: Partition(0), 1: Partition(1)})),
    ],
)
def test_r01_r07_what_is_answered_is_a_feed(
    status: int, body: bytes, v1_partitions: int | None, info: FeedInfo
) -> None:
    assert negotiate(status, body, feed=FEED, v1_partitions=v1_partitions) == info


NO_FEED = "no feed answers here: status 200 with"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        *((status, b"no page", f"status {status}: 'no page'") for status in (404, 204, 206, 301)),
        *((status, b"no page", f"status {status}: 'no page'") for status in (304, 405, 410, 418)),
        *((200, body, NO_FEED) for body in (b"<html>", b"", b"[]", b"null", b"7", b"\xff")),
        *((200, body, NO_FEED) for body in (b'{"a":1}', b'{"partitions":{}}', b'{"token":7}')),
        (200, b'{"filters":{"a":1},"partitions":{}}', NO_FEED),
        (200, b'{"stream":"y","partitions":[{}}', NO_FEED),
        (400, b"handshake error", rf"^feed {FEED}: .*v1_partitions=4.*handshake error"),
    ],
)
def test_r01_any_other_answer_is_an_error_that_quotes_it(
    status: int, body: bytes, says: str
) -> None:
    with pytest.raises(NegotiationError, match=says):
        negotiate(status, body, feed=FEED, v1_partitions=None if status == 400 else 3)


def test_r21_the_quote_is_200_characters_on_one_line() -> None:
    body = b"\\ \n\x1b[31m\xff" + "\u202eü".encode() + "ü".encode() * 1000
    for status in (200, 404):
        with pytest.raises(NegotiationError) as caught:
            negotiate(status, body, feed=FEED)
        assert r"'\ \n\x1b[31m" in str(caught.value)
        assert str(caught.value).isprintable()
        assert 150 < str(caught.value).count("ü") <= 200


@pytest.mark.parametrize("number", [0, -1, 32769, True, "4", 4.0])
def test_an_impossible_number_of_v1_partitions_is_a_value_error(number: Any) -> None:
    with pytest.raises(ValueError, match="v1_partitions must be a number from 1 to 32768"):
        negotiate(400, b"", feed=FEED, v1_partitions=number)


def test_v1_may_have_as_many_partitions_as_there_are_ids() -> None:
    assert max(negotiate(400, b"", feed=FEED, v1_partitions=32768).partitions) == 32767


@pytest.mark.parametrize(
    ("fields", "partition"),
    [
        ({"startsAfterParent": "0"}, Partition(7, starts_after=0)),
        ({"startsAfterPartition": 0}, Partition(7, starts_after=0)),
        ({"startsAfterParent": "3", "startsAfterPartition": "3"}, Partition(7, starts_after=3)),
        ({"splitFromAncestors": ["3", "4"]}, Partition(7, cursor_from=(3, 4))),
        ({"cursorFromPartitions": [23423, "5"]}, Partition(7, cursor_from=(23423, 5))),
        ({"closed": True, "lastCursor": ""}, Partition(7, closed=True)),
        (dict.fromkeys(FIELDS[1:]), Partition(7)),
        ({"colour": {"a": [1]}}, Partition(7)),
        *(({"id": id}, Partition(int(id))) for id in ("0", 0, "32767", 32767, "007")),
    ],
)
def test_fields_of_a_partition(fields: dict[str, Any], partition: Partition) -> None:
    found = discover({"partitions": [{"id": "7", **fields}]})
    assert list(found.partitions.values()) == [partition]


def test_r08_zero_means_no_parent_where_partition_0_starts_after_itself() -> None:
    parents = {0: 0, 1: 0, 2: 1, 3: 2}
    listed = [{"id": id, "startsAfterPartition": parent} for id, parent in parents.items()]
    found = discover({"partitions": listed}).partitions
    assert [found[id].starts_after for id in parents] == [None, None, 1, 2]


def test_all_32768_partitions_are_read() -> None:
    assert len(negotiate(200, discovery_of(32768), feed=FEED).partitions) == 32768


def test_ancestors_are_bounded_as_partitions_are() -> None:
    names = [str(id) for id in range(2000)]
    listed = [{"id": id, "cursorFromPartitions": names} for id in names]
    with pytest.raises(LineageError, match="lists more than 262144 ancestors"):
        discover({"partitions": listed})
    deepest = [{"id": 20_000 + id, "splitFromAncestors": names[:15]} for id in range(12_000)]
    assert len(discover({"partitions": deepest}).partitions) == 12_000


def test_the_work_grows_with_the_number_of_partitions_and_no_faster() -> None:
    one, two, three = (calls_of_negotiate(discovery_of(size)) for size in (100, 200, 300))
    assert three - two == two - one > 0


def discovery_of(size: int) -> bytes:
    return orjson.dumps(
        {
            "partitions": [
                {
                    "id": str(id),
                    "closed": False,
                    "lastCursor": f"c{id}",
                    "startsAfterPartition": id and id - 1,
                }
                for id in range(size)
            ]
        }
    )


def calls_of_negotiate(body: bytes) -> int:
    return calls_of(lambda: negotiate(200, body, feed=FEED))


SPELLINGS = "partition 7: .*in the older spelling too"
NO_ID = r"partitions\[1\] in the discovery: .*; an id is an integer from 0 to 32767$"
NO_OBJECT = r"partitions\[1\] in the discovery: Expected `object`"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        *(({"id": id}, NO_ID) for id in ("32768", 32768, -1, "-1", "+1", " 1", "1_0", "٣", "")),
        *(({"id": id}, NO_ID) for id in ("a", 1.0, True, None, [], {}, "9" * 5000, 2**63)),
        ({}, r"partitions\[1\] in the discovery: .*missing required field `id`"),
        *((entry, NO_OBJECT) for entry in (7, "7", None, [7])),
        *(({"id": id}, "partition 1: the discovery lists partition 1 twice") for id in ("1", 1)),
        ({"id": "001"}, "partition 1: the discovery lists partition 1 twice"),
        ({"id": 7, "startsAfterParent": "3", "startsAfterPartition": "4"}, SPELLINGS),
        ({"id": 7, "splitFromAncestors": ["3"], "cursorFromPartitions": ["4"]}, SPELLINGS),
    ],
)
def test_r12_an_entry_that_is_no_partition_is_an_error(entry: Any, says: str) -> None:
    with pytest.raises(LineageError, match=says) as caught:
        discover({"partitions": [{"id": 1}, entry]})
    assert str(caught.value).startswith(f"feed {FEED}")


def test_r12_more_partitions_than_there_can_be_are_an_error() -> None:
    with pytest.raises(LineageError, match="lists 32769 partitions, of 32768 that there can"):
        discover({"partitions": [{"id": id} for id in (*range(32768), 0)]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("closed", value) for value in ("true", 1)),
        *(("lastCursor", value) for value in (7, ["a"])),
        *(("startsAfterPartition", value) for value in (True, 1.5, 40000, ["1"], "")),
        *(("splitFromAncestors", value) for value in ("1", 1, [None], [True], [["1"]])),
        *(("cursorFromPartitions", value) for value in ("1", [None], ["-1"])),
        *(("stream", "yes"), ("exactlyOnce", 1), ("filters", "subject"), ("filters", [1])),
        ("token", 7),
    ],
)
def test_r12_a_field_of_another_type_is_an_error_that_names_it(field: str, value: Any) -> None:
    of_feed = field not in FIELDS
    listed = [] if of_feed else [{"id": "7", field: value}]
    where = f"feed {FEED}" if of_feed else f"feed {FEED}, partition 7"
    with pytest.raises(ProtocolError, match=f"^{where}: {field} in the discovery"):
        discover({"partitions": listed, **({field: value} if of_feed else {})})


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 40000),
        st.floats(allow_nan=False),
        st.text(max_size=6),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=5,
)
partitions = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6)


@given(
    st.dictionaries(st.sampled_from(["token", "stream", "exactlyOnce", "filters"]), json_values),
    st.lists(st.one_of(partitions, json_values), max_size=3),
)
def test_any_document_is_a_feed_or_an_error(document: dict[str, Any], listed: list[Any]) -> None:
    with suppress(FeedError):
        found = discover({**document, "partitions": listed})
        assert all(id == partition.id for id, partition in found.partitions.items())
        Graph(found.partitions, feed=FEED)


@given(st.integers(100, 599), st.binary(max_size=50))
def test_any_response_is_a_feed_or_an_error(status: int, body: bytes) -> None:
    with pytest.raises(FeedError):
        negotiate(status, body, feed=FEED)


@pytest.mark.parametrize("text", ["a\x00", "é", "x" * (16 * 1024 + 1), "\x1b[2J"])
@pytest.mark.parametrize("field", ["token", "lastCursor"])
def test_r18_tokens_and_last_cursors_that_cannot_be_sent_are_refused(field: str, text: str) -> None:
    partition: dict[str, object] = {"id": "3", "closed": True}
    document: dict[str, object] = {"partitions": [partition]}
    (document if field == "token" else partition)[field] = text
    with pytest.raises(ProtocolError, match=f"{field} in the discovery is") as caught:
        negotiate(200, orjson.dumps(document), feed="http://feed")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()
    assert caught.value.partition == (3 if field == "lastCursor" else None)
