"""From the response to an argument-less GET to a `FeedInfo`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FeedError, LineageError, NegotiationError, ProtocolError
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


def one(**fields: Any) -> Partition:
    return discover({"partitions": [{"id": "7", **fields}]}).partitions[7]


class TestR01:
    def test_r01_partitions_without_token_are_the_draft(self) -> None:
        assert discover({"partitions": [{"id": "0"}]}) == FeedInfo("v2-draft", {0: Partition(0)})

    def test_r01_a_token_is_the_published_dialect(self) -> None:
        assert discover({"token": "t", "partitions": []}) == FeedInfo("v2-token", {}, token="t")

    def test_r01_a_null_token_is_the_draft(self) -> None:
        assert discover({"token": None, "partitions": []}).dialect == "v2-draft"

    def test_r01_400_is_v1_with_the_number_of_partitions_given(self) -> None:
        found = negotiate(
            400, b"handshake error: partition count missing", feed=FEED, v1_partitions=3
        )
        assert found == FeedInfo("v1", {0: Partition(0), 1: Partition(1), 2: Partition(2)})

    def test_r01_400_without_the_number_says_how_to_give_it(self) -> None:
        with pytest.raises(
            NegotiationError, match=rf"^feed {FEED}: .*v1_partitions=4.*handshake error"
        ):
            negotiate(400, b"handshake error: partition count missing", feed=FEED)

    def test_r01_v2_does_not_need_the_number(self) -> None:
        assert (
            negotiate(200, b'{"partitions":[]}', feed=FEED, v1_partitions=3).dialect == "v2-draft"
        )

    @pytest.mark.parametrize("status", [404, 204, 206, 301, 304, 405, 410, 418])
    def test_r01_another_status_is_an_error_that_quotes_the_body(self, status: int) -> None:
        with pytest.raises(NegotiationError, match=f"status {status}: 'no such page'"):
            negotiate(status, b"no such page", feed=FEED, v1_partitions=3)

    @pytest.mark.parametrize("token", ["", '"token":"t",'])
    def test_r07_null_is_a_list_without_partitions(self, token: str) -> None:
        info = negotiate(200, b'{%s"partitions":null}' % token.encode(), feed=FEED)
        assert (info.partitions, info.token) == ({}, "t" if token else None)

    @pytest.mark.parametrize(
        "body",
        [
            *(b"<html>login</html>", b"", b"[]", b"null", b"7", b'{"a":1}', b'{"partitions":{}}'),
            *(b'{"token":7}', b'{"filters":{"a":1},"partitions":{}}'),
            *(b'{"stream":"y","partitions":[{}}', b"\xff"),
        ],
    )
    def test_r01_200_that_is_no_discovery_is_an_error(self, body: bytes) -> None:
        with pytest.raises(NegotiationError, match="no feed answers here: status 200 with"):
            negotiate(200, body, feed=FEED, v1_partitions=3)

    def test_r01_the_quote_is_200_characters_on_one_line(self) -> None:
        with pytest.raises(NegotiationError) as caught:
            negotiate(
                404,
                "é\n\x1b[31m\u202e\xff".encode("latin-1", "ignore") + "ü".encode() * 1000,
                feed=FEED,
            )
        assert "\n" not in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert 150 < str(caught.value).count("ü") <= 200

    @pytest.mark.parametrize("number", [0, -1, 32769, True, "4", 4.0])
    def test_an_impossible_number_of_v1_partitions_is_a_value_error(self, number: Any) -> None:
        with pytest.raises(ValueError, match="v1_partitions must be a number from 1 to 32768"):
            negotiate(400, b"", feed=FEED, v1_partitions=number)

    def test_v1_may_have_as_many_partitions_as_there_are_ids(self) -> None:
        assert max(negotiate(400, b"", feed=FEED, v1_partitions=32768).partitions) == 32767


class TestFields:
    def test_all_fields_of_the_specification(self) -> None:
        found = discover(
            {
                "partitions": [
                    {"id": "0", "lastCursor": "abc", "closed": True},
                    {"id": "16232", "startsAfterPartition": "0"},
                    {"id": "24223", "cursorFromPartitions": ["24001", "24100"]},
                ],
                "stream": True,
                "exactlyOnce": True,
                "filters": ["subject"],
            }
        )
        assert found == FeedInfo(
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
        ],
    )
    def test_fields_of_a_partition(self, fields: dict[str, Any], partition: Partition) -> None:
        assert one(**fields) == partition

    @pytest.mark.parametrize(
        ("fields", "info"),
        [
            ({"stream": None, "exactlyOnce": None, "filters": None}, FeedInfo("v2-draft", {})),
            (
                {"stream": {"max": 5}, "exactlyOnce": {}, "more": 1},
                FeedInfo("v2-draft", {}, stream=True, exactly_once=True),
            ),
        ],
    )
    def test_fields_of_a_feed(self, fields: dict[str, Any], info: FeedInfo) -> None:
        assert discover({"partitions": [], **fields}) == info

    def test_r12_both_spellings_must_not_differ(self) -> None:
        for fields in (
            {"startsAfterParent": "3", "startsAfterPartition": "4"},
            {"splitFromAncestors": ["3"], "cursorFromPartitions": ["4"]},
        ):
            with pytest.raises(LineageError, match=r"partition 7: .*in the older spelling too"):
                one(**fields)

    @pytest.mark.parametrize("id", ["0", 0, "32767", 32767, "007"])
    def test_an_id_is_a_string_or_an_integer(self, id: Any) -> None:
        assert list(discover({"partitions": [{"id": id}]}).partitions) == [int(id)]

    def test_r08_zero_means_no_parent_where_partition_0_starts_after_itself(self) -> None:
        parents = {0: 0, 1: 0, 2: 1, 3: 2}
        listed = [{"id": id, "startsAfterPartition": parent} for id, parent in parents.items()]
        found = discover({"partitions": listed}).partitions
        assert [found[id].starts_after for id in parents] == [None, None, 1, 2]

    def test_all_32768_partitions_are_read(self) -> None:
        assert len(negotiate(200, discovery_of(32768), feed=FEED).partitions) == 32768

    def test_ancestors_are_bounded_as_partitions_are(self) -> None:
        names = [str(id) for id in range(2000)]
        listed = [{"id": id, "cursorFromPartitions": names} for id in names]
        with pytest.raises(LineageError, match="lists more than 262144 ancestors"):
            discover({"partitions": listed})
        deepest = [{"id": 20_000 + id, "splitFromAncestors": names[:15]} for id in range(12_000)]
        assert len(discover({"partitions": deepest}).partitions) == 12_000

    def test_the_work_grows_with_the_number_of_partitions_and_no_faster(self) -> None:
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


class TestR12:
    @pytest.mark.parametrize(
        "id",
        [
            *("32768", 32768, -1, "-1", "+1", " 1", "1_0", "٣", "", "a", 1.0, True, None, [], {}),
            *("9" * 5000, 2**63),
        ],
    )
    def test_r12_an_id_out_of_range_or_of_another_type_is_an_error(self, id: Any) -> None:
        with pytest.raises(
            LineageError,
            match=rf"^feed {FEED}: partitions\[1\] in the discovery: .*; "
            r"an id is an integer from 0 to 32767$",
        ):
            discover({"partitions": [{"id": 1}, {"id": id}]})

    def test_r12_a_partition_without_id_is_an_error(self) -> None:
        with pytest.raises(
            LineageError, match=r"partitions\[0\] in the discovery: .*missing required field `id`"
        ):
            discover({"partitions": [{}]})

    @pytest.mark.parametrize("entry", [7, "7", None, [7]])
    def test_r12_a_partition_that_is_no_object_is_an_error(self, entry: Any) -> None:
        with pytest.raises(
            LineageError, match=r"partitions\[0\] in the discovery: Expected `object`"
        ):
            discover({"partitions": [entry]})

    def test_r12_more_partitions_than_there_can_be_are_an_error(self) -> None:
        with pytest.raises(LineageError, match="lists 32769 partitions, of 32768 that there can"):
            discover({"partitions": [{"id": id} for id in (*range(32768), 0)]})

    @pytest.mark.parametrize("second", ["7", 7, "007"])
    def test_r12_a_duplicate_id_is_an_error(self, second: Any) -> None:
        with pytest.raises(
            LineageError, match="partition 7: the discovery lists partition 7 twice"
        ):
            discover({"partitions": [{"id": "7"}, {"id": second}]})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("closed", value) for value in ("true", 1)),
            *(("lastCursor", value) for value in (7, ["a"])),
            *(("startsAfterPartition", value) for value in (True, 1.5, 40000, ["1"], "")),
            *(("splitFromAncestors", value) for value in ("1", 1, [None], [True], [["1"]])),
            *(("cursorFromPartitions", value) for value in ("1", [None], ["-1"])),
        ],
    )
    def test_r12_a_field_of_another_type_is_an_error_that_names_the_partition(
        self, field: str, value: Any
    ) -> None:
        with pytest.raises(
            ProtocolError, match=f"^feed {FEED}, partition 7: {field} in the discovery"
        ):
            one(**{field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stream", "yes"),
            ("exactlyOnce", 1),
            ("filters", "subject"),
            ("filters", [1]),
            ("token", 7),
        ],
    )
    def test_r12_a_flag_of_another_type_is_an_error(self, field: str, value: Any) -> None:
        with pytest.raises(ProtocolError, match=f"^feed {FEED}: {field} in the discovery: "):
            discover({"partitions": [], field: value})


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


def test_r21_a_quoted_body_is_escaped_once_and_cut() -> None:
    with pytest.raises(NegotiationError) as caught:
        negotiate(200, b"<html>\n\x1b[31m\\ " + b"x" * 1000, feed="http://feed")
    assert "'<html>\\n\\x1b[31m\\ xxx" in str(caught.value)
    assert len(str(caught.value)) < 350
