"""The decoder of one response. Every test runs with the fast path and without."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import orjson
import pytest
from feedapi_client.protocol.fast_lines import Block, BlockDecoder
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FeedError, LineTooLongError, ProtocolError, TornResponseError
from feedapi_client.model import DialectName, make_event, without_lone_surrogates
from feedapi_client.protocol import fast_lines
from feedapi_client.protocol.decoder import PageDecoder
from feedapi_client.protocol.dialects import DIALECTS
from tests.protocol.calls import calls_of

FEED = "https://service/feed"


@pytest.fixture(scope="module", autouse=True, params=["many lines at once", "line by line"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How complete lines are decoded; small blocks, as most here are, go line by line otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        smallest = 0 if request.param == "many lines at once" else sys.maxsize
        patch.setattr(fast_lines, "_SMALL", smallest)
        yield request.param


def decoder(
    dialect: DialectName = "v2-draft",
    *,
    partition: int = 2,
    max_line_bytes: int = 1 << 20,
    decode: Any = orjson.loads,
) -> PageDecoder:
    return PageDecoder(
        DIALECTS[dialect],
        feed=FEED,
        partition=partition,
        decoder=decode,
        max_line_bytes=max_line_bytes,
    )


def read(
    page: PageDecoder, *chunks: bytes
) -> tuple[list[tuple[bytes, dict[str, Any]]], list[str], FeedError | None]:
    """All events, the checkpoints seen, and the error that ended it."""
    events: list[tuple[bytes, dict[str, Any]]] = []
    cursors: list[str] = []
    error: FeedError | None = None

    def take() -> None:
        batch = page.take()
        if batch is not None:
            events.extend((event.raw, event.headers) for event in batch.events)
            cursors.append(batch.cursor)

    try:
        for chunk in chunks:
            page.feed(chunk)
            take()
        page.finish()
    except FeedError as raised:
        error = raised
    take()
    return events, cursors, error


def raws(page: PageDecoder, *chunks: bytes) -> list[bytes]:
    events, _, error = read(page, *chunks)
    assert error is None
    return [raw for raw, _ in events]


class TestRecords:
    @pytest.mark.parametrize(
        ("dialect", "line"),
        [
            ("v1", b'{"partition":2,"data":%s}\n'),
            ("v2-draft", b'{"event":%s}\n'),
            ("v2-token", b'{"data":%s}\n'),
        ],
    )
    @pytest.mark.parametrize(
        "payload",
        [
            b'{"a": 1.0,  "b":"\\u00e9"}',
            b'"text"',
            b"{}",
            b'""',
            '{"é":"\u2028\u0085\x7f"}'.encode(),
            b'{"a":"\xff"}',
        ],
    )
    def test_a_payload_is_kept_byte_for_byte(
        self, dialect: DialectName, line: bytes, payload: bytes
    ) -> None:
        assert raws(decoder(dialect), line % payload + b'{"cursor":"c"}\n') == [payload]

    def test_v1_events_have_headers(self) -> None:
        events, _, _ = read(
            decoder("v1"),
            b'{"partition":2,"headers":{"a":"1"},"data":{}}\n'
            b'{"partition":2,"data":{}}\n'
            b'{"partition":2,"cursor":"c"}\n',
        )
        assert [headers for _, headers in events] == [{"a": "1"}, {}]

    def test_a_v2_line_sets_no_headers(self) -> None:
        events, _, _ = read(decoder(), b'{"event":{},"headers":{"a":"1"}}\n{"cursor":"c"}\n')
        assert events == [(b"{}", {})]

    def test_events_know_their_partition_and_decoder(self) -> None:
        page = decoder(decode=lambda raw: raw.upper())
        page.feed(b'{"event":"a"}\n{"cursor":"c"}\n')
        batch = page.take()
        assert batch is not None
        assert (batch.events[0].partition, batch.events[0].json()) == (2, b'"A"')

    def test_an_event_survives_pickling(self) -> None:
        page = decoder()
        page.feed(b'{"event":{"a":1}}\n{"cursor":"c"}\n')
        batch = page.take()
        assert batch is not None
        copy = pickle.loads(pickle.dumps(batch.events[0]))
        assert (copy.raw, copy.partition) == (b'{"a":1}', 2)

    def test_unknown_fields_are_ignored(self) -> None:
        assert raws(decoder(), b'{"id":7,"event":{},"x":[1]}\n{"cursor":"c","more":null}\n') == [
            b"{}"
        ]

    def test_unknown_commands_are_counted_and_skipped(self) -> None:
        page = decoder()
        assert raws(page, b'{"resync":true}\n{"event":{}}\n{}\n{"cursor":"c"}\n') == [b"{}"]
        assert page.unknown_commands == 2

    def test_blank_lines_are_skipped(self) -> None:
        page = decoder()
        assert raws(page, b'\n{"event":{}}\r\n\r\n{"cursor":"c"}\n \n') == [b"{}"]
        assert page.unknown_commands == 0

    def test_a_line_with_event_and_cursor_is_the_event_then_the_checkpoint(self) -> None:
        page = decoder()
        page.feed(
            b'{"event":1234567,"cursor":"x"}\n'.replace(b"1234567", b"{}")
            + b'{"cursor":"y","event":{"b":2}}\n{"event":"open"}\n'
        )
        batch = page.take()
        assert batch is not None
        assert ([event.raw for event in batch.events], batch.cursor) == ([b"{}", b'{"b":2}'], "y")

    def test_lines_end_in_newline_and_nothing_else(self) -> None:
        payload = '{"a":"\u2028\u2029\u0085\x0c"}'.replace("\x0c", "").encode()
        assert raws(decoder(), b'{"event":' + payload + b'}\n{"cursor":"c"}') == [payload]

    def test_a_null_cursor_is_no_cursor(self) -> None:
        events, cursors, error = read(decoder(), b'{"event":{},"cursor":null}\n{"cursor":"c"}\n')
        assert (len(events), cursors, error) == (1, ["c"], None)

    def test_a_cursor_may_hold_any_printable_ascii(self) -> None:
        cursor = bytes(range(32, 127)).decode() + "x" * (16 * 1024 - 95)
        _, cursors, _ = read(decoder(), orjson.dumps({"cursor": cursor}) + b"\n")
        assert cursors == [cursor]

    @pytest.mark.parametrize(
        ("cursor", "problem"),
        [
            ("a\x00b", "not printable ASCII: 'a\\\\x00b'"),
            ("a\nb", "not printable ASCII"),
            ("é", "not printable ASCII: '\\\\xe9'"),
            ("\x7f", "not printable ASCII"),
            ("\u2028" * 100, "not printable ASCII"),
            ("x" * (16 * 1024 + 1), "16385 characters long: at most 16384 are accepted"),
        ],
        ids=["NUL", "newline", "accent", "DEL", "separators", "long"],
    )
    def test_r18_any_other_cursor_is_refused_behind_what_was_closed_before(
        self, cursor: str, problem: str
    ) -> None:
        page = decoder()
        body = b'{"event":"a"}\n{"cursor":"1"}\n{"event":"b"}\n'
        with pytest.raises(ProtocolError, match=f"a cursor that is {problem}") as caught:
            page.feed(body + orjson.dumps({"cursor": cursor}) + b"\n" + b'{"event":"c"}\n' * 100)
        assert len(str(caught.value)) < 300
        batch = page.take()
        assert batch is not None
        assert (len(batch.events), batch.cursor) == (1, "1")


class TestBatches:
    def test_r03_a_batch_ends_at_the_last_checkpoint_received(self) -> None:
        page = decoder()
        page.feed(b'{"event":"a"}\n{"cursor":"1"}\n{"event":"b"}\n{"cursor":"2"}\n{"event":"c"}\n')
        batch = page.take()
        assert batch is not None
        assert ([event.raw for event in batch.events], batch.cursor) == ([b'"a"', b'"b"'], "2")
        assert page.take() is None

    def test_r03_events_behind_the_last_checkpoint_are_dropped(self) -> None:
        events, cursors, error = read(decoder(), b'{"event":"a"}\n{"cursor":"1"}\n{"event":"b"}\n')
        assert (events, cursors, error) == ([(b'"a"', {})], ["1"], None)

    def test_r03_a_batch_may_hold_no_event(self) -> None:
        assert read(decoder(), b'{"cursor":"1"}\n')[:2] == ([], ["1"])

    def test_r03_a_last_line_without_newline_counts(self) -> None:
        assert read(decoder(), b'{"event":"a"}\n{"cursor":"1"}') == ([(b'"a"', {})], ["1"], None)

    def test_r03_events_wait_for_a_checkpoint_over_takes(self) -> None:
        page = decoder()
        page.feed(b'{"event":"a"}\n')
        assert page.take() is None
        page.feed(b'{"event":"b"}\n{"cursor":"1"}\n')
        batch = page.take()
        assert batch is not None
        assert len(batch.events) == 2

    def test_sizes_add_up_to_what_was_fed(self) -> None:
        page = decoder()
        body = b'{"event":"a"}\n{"cursor":"1"}\n\n{"event":"b"}\n{"event":"c"}\n{"eve'
        page.feed(body)
        assert (page.ready_bytes, page.tail_bytes) == (29, len(body) - 29)
        batch = page.take()
        assert batch is not None
        assert (batch.size, page.ready_bytes, page.tail_bytes) == (29, 0, len(body) - 29)
        page.feed(b'nt":"d"}\n{"cursor":"2"}\n')
        assert page.tail_bytes == 0
        assert page.ready_bytes + batch.size == len(body) + len(b'nt":"d"}\n{"cursor":"2"}\n')

    def test_it_says_what_came_so_far(self) -> None:
        page = decoder()
        assert (page.cursor, page.saw_events) == (None, False)
        page.feed(b'{"cursor":"1"}\n')
        assert (page.cursor, page.saw_events) == ("1", False)
        page.feed(b'{"event":"a"}\n')
        assert (page.cursor, page.saw_events) == ("1", True)


class TestErrors:
    @pytest.mark.parametrize(
        ("payload", "kind"),
        [
            (b"[1]", "a list"),
            (b"12", "a number"),
            (b"-1", "a number"),
            (b"true", "a boolean"),
            (b"false", "a boolean"),
            (b"null", "null"),
        ],
    )
    @pytest.mark.parametrize("others", [0, 40])
    def test_a_payload_is_an_object_or_a_string(
        self, payload: bytes, kind: str, others: int
    ) -> None:
        good = b'{"event":{"a":1}}\n' * others
        events, cursors, error = read(
            decoder(),
            good + b'{"cursor":"1"}\n{"event":"b"}\n{"event":' + payload + b'}\n{"cursor":"2"}\n',
        )
        assert type(error) is ProtocolError
        assert str(error) == (
            f"feed {FEED}, partition 2: an event's payload is {kind}: "
            "the protocol allows a JSON object or a string"
        )
        assert (len(events), cursors) == (others, ["1"])

    @pytest.mark.parametrize(
        "line",
        [
            b"Internal server error",
            b'{"event":{"secret":"sesame"',
            b'\xef\xbb\xbf{"event":{"secret":"sesame"}}',
            b'{"event":{"secret":"sesame"}}x',
            b'{"event":{}}{"event":"sesame"}',
            b'["sesame"]',
            b'"sesame"',
            b"7",
            b'{"cursor":7}',
            b'{"cursor":""}',
            b'{"cursor":{"a":"sesame"}}',
            b'{"event":"sesame\x01"}',
            b'{"a":' + b"[" * 100_000,
        ],
    )
    @pytest.mark.parametrize("newline", [b"\n", b""])
    def test_a_line_that_is_no_message_tears_the_response(
        self, line: bytes, newline: bytes
    ) -> None:
        events, cursors, error = read(
            decoder(), b'{"event":"a"}\n{"cursor":"1"}\n{"event":"b"}\n' + line + newline
        )
        assert type(error) is TornResponseError
        assert (events, cursors) == ([(b'"a"', {})], ["1"])
        assert str(error).startswith(f"feed {FEED}, partition 2: the response ")
        assert "sesame" not in str(error)
        assert "sesame" not in str(error.__cause__)

    def test_an_error_text_is_quoted(self) -> None:
        _, _, error = read(decoder(), b'{"cursor":"1"}\nInternal server error\n')
        assert (
            "holds a line that is no protocol message (21 bytes): 'Internal server error'"
            in str(error)
        )

    def test_a_long_error_text_is_cut(self) -> None:
        _, _, error = read(decoder(), b"<html>" + b"x" * 10_000)
        assert len(str(error)) < 400

    def test_r19_an_error_text_is_quoted_up_to_where_a_payload_may_begin(self) -> None:
        _, _, error = read(decoder(), b'handler failed: {"name":"sesame"}\n')
        assert "handler failed: " in str(error)
        assert "sesame" not in str(error)

    def test_pretty_printed_json_is_torn(self) -> None:
        _, _, error = read(decoder(), b'{\n  "cursor": "1"\n}\n')
        assert type(error) is TornResponseError

    def test_a_torn_tail_is_dropped(self) -> None:
        events, cursors, error = read(decoder(), b'{"event":"a"}\n{"cursor":"1"}\n{"event":{"b"')
        assert (len(events), cursors) == (1, ["1"])
        assert "ended in the middle of a line" in str(error)

    def test_an_error_stays(self) -> None:
        page = decoder()
        for _ in range(2):
            with pytest.raises(TornResponseError):
                page.feed(b"oops\n")
        with pytest.raises(TornResponseError):
            page.finish()

    @pytest.mark.parametrize("number", [b"3", b'"3"'])
    def test_v1_lines_of_another_partition_are_an_error(self, number: bytes) -> None:
        _, cursors, error = read(
            decoder("v1"),
            b'{"partition":2,"cursor":"1"}\n{"partition":' + number + b',"data":{}}\n',
        )
        assert type(error) is ProtocolError
        assert "a line of partition 3" in str(error)
        assert cursors == ["1"]

    @pytest.mark.parametrize(
        "line",
        [
            b'{"data":{}}',
            b'{"partition":2,"data":{}}',
            b'{"partition":"2","data":{}}',
            b'{"partition": 2, "data": {}}',
        ],
    )
    def test_v1_lines_may_leave_the_partition_out(self, line: bytes) -> None:
        assert raws(decoder("v1"), line + b"\n" + b'{"cursor":"1"}\n') == [b"{}"]


class TestLongLines:
    @pytest.mark.parametrize("size", [1, 7, 1 << 20])
    @pytest.mark.parametrize("newline", [b"\n", b""])
    def test_a_line_over_the_limit_is_an_error(self, size: int, newline: bytes) -> None:
        body = b'{"event":"a"}\n{"cursor":"1"}\n{"event":"' + b"x" * 100 + b'"}' + newline
        events, cursors, error = read(
            decoder(max_line_bytes=64), *[body[at : at + size] for at in range(0, len(body), size)]
        )
        assert type(error) is LineTooLongError
        assert "longer than 64 bytes: raise Limits.max_line_bytes" in str(error)
        assert (len(events), cursors) == (1, ["1"])

    def test_a_line_of_just_the_limit_is_read(self) -> None:
        assert (
            len(
                raws(
                    decoder(max_line_bytes=64), b'{"event":"' + b"x" * 52 + b'"}\n{"cursor":"1"}\n'
                )
            )
            == 1
        )

    def test_a_line_over_64_kib_is_read(self) -> None:
        payload = b'"' + b"x" * 300_000 + b'"'
        body = b'{"event":' + payload + b'}\n{"cursor":"1"}\n'
        assert raws(decoder(), *[body[at : at + 4096] for at in range(0, len(body), 4096)]) == [
            payload
        ]

    def test_an_endless_line_costs_linear_time(self) -> None:
        searched = 0

        class Chunk(bytes):
            """Counts the bytes that are searched for the end of a line."""

            def rfind(self, *args: Any) -> int:
                nonlocal searched
                searched += len(self)
                return super().rfind(*args)

        class Tail(bytearray):
            """What is kept of the line: it may grow, but must not be searched or copied."""

            def refuse(self, *_: Any) -> Any:
                pytest.fail("the kept part of the line is looked at again")

            find = rfind = index = rindex = count = refuse
            __contains__ = __add__ = __getitem__ = copy = refuse

        page, chunk = decoder(max_line_bytes=1 << 28), Chunk(b"x" * 512)
        tail = page._tail = Tail()
        for _ in range(1000):
            page.feed(chunk)
        assert page._tail is tail
        assert searched == page.tail_bytes == 512_000


class TestSpeed:
    @pytest.mark.parametrize("payload", [b'{"a":%d}', b'"%d"'])
    @pytest.mark.parametrize(
        ("dialect", "line"),
        [
            ("v1", b'{"partition":2,"data":%s}'),
            ("v1", b'{"partition": 2, "headers": null, "data": %s}'),
            ("v2-draft", b'{"event":%s}'),
            ("v2-draft", b'{"event": %s}'),
            ("v2-token", b'{"id":1,"data":%s}'),
        ],
    )
    def test_the_usual_page_is_decoded_at_once(
        self,
        dialect: DialectName,
        line: bytes,
        payload: bytes,
        way: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        blocks: list[Block | None] = []
        decode = BlockDecoder.decode

        def recorded(self: BlockDecoder, data: bytes, *, max_line_bytes: int) -> Block | None:
            blocks.append(decode(self, data, max_line_bytes=max_line_bytes))
            return blocks[-1]

        monkeypatch.setattr(BlockDecoder, "decode", recorded)
        body = (
            b'{"cursor":"0"}\n'
            + b"".join(line % (payload % number) + b"\n" for number in range(100))
            + b'{"cursor":"1"}\n'
        )
        again = body.replace(b'cursor":"', b'cursor":"next ')
        assert len(raws(decoder(dialect), body, again)) == 200
        assert [block is not None for block in blocks] == [way == "many lines at once"] * 2


payloads = st.one_of(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(st.text(max_size=20), st.integers(-(2**53), 2**53), st.none()),
        max_size=3,
    ).map(orjson.dumps),
    st.text(max_size=20).map(orjson.dumps),
    st.sampled_from([b"[1]", b"null", b"1", b"true", b'{"data":{}}', b'{"a":"}\\n{"}']),
)
lines = st.one_of(
    payloads.map(lambda payload: b'{"data":' + payload + b"}"),
    payloads.map(
        lambda payload: b'{"partition": 2, "headers": {"a": "b"}, "data": ' + payload + b"}"
    ),
    st.text(min_size=1, max_size=8).map(lambda cursor: orjson.dumps({"cursor": cursor})),
    st.tuples(payloads, st.text(max_size=3)).map(
        lambda both: b'{"cursor":' + orjson.dumps(both[1]) + b',"data":' + both[0] + b"}"
    ),
    st.sampled_from(
        [
            b"",
            b" \r",
            b'{"resync":1}',
            b'{"data":{}}\r',
            b"oops",
            b'{"data":\n{}}',
            b'{"data":{}}{"data":{}}',
            b'{"cursor":"c"}{"cursor":"d"}',
            b'{"data":{}}{"cursor":"c"}',
            b'{"cursor":\n"c"}',
            b'{"cursor":null}',
            b'{"partition":3}',
        ]
    ),
    st.binary(max_size=10),
)


def chunked(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(places)]


def outcome(dialect: DialectName, limit: int, *chunks: bytes) -> tuple[Any, ...]:
    page = decoder(dialect, max_line_bytes=limit)
    events, cursors, error = read(page, *chunks)
    return (
        events,
        cursors[-1:],
        type(error),
        str(error),
        page.unknown_commands,
        page.cursor,
        page.saw_events,
    )


@given(
    st.sampled_from(["v1", "v2-token"]),
    st.lists(lines, max_size=12),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
    st.sampled_from([40, 10_000]),
)
def test_any_chunking_decodes_the_same(
    dialect: DialectName, parts: list[bytes], cuts: list[int], ended: bool, limit: int
) -> None:
    body = b"\n".join(parts) + (b"\n" if ended else b"")
    expected = outcome(dialect, limit, body)
    assert outcome(dialect, limit, *chunked(body, cuts)) == expected
    assert outcome(dialect, limit, *[body[at : at + 1] for at in range(len(body))]) == expected


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_arbitrary_bytes_give_events_or_feed_errors(chunks: list[bytes]) -> None:
    read(decoder("v2-token", max_line_bytes=100), *chunks)


@given(st.lists(st.text(max_size=10), min_size=1, max_size=6), st.data())
def test_a_torn_tail_never_loses_or_invents_a_checkpointed_event(
    texts: list[str], data: st.DataObject
) -> None:
    whole = [
        (b'{"event":' + orjson.dumps(text) + b'}\n{"cursor":"%d"}\n' % number, orjson.dumps(text))
        for number, text in enumerate(texts)
    ]
    body = b"".join(line for line, _ in whole)
    cut = data.draw(st.integers(0, len(body)))
    events, cursors, _ = read(decoder(max_line_bytes=1000), body[:cut])
    assert [raw for raw, _ in events] == [raw for _, raw in whole][: len(events)]
    assert cursors[-1:] == ([str(len(events) - 1)] if events else [])


class TestText:
    """Bytes that are not text: delivered as sent, or refused, the same for every driver."""

    LONE: ClassVar = [
        rb'{"a":"\ud800"}',
        rb'"\uDC00 \\ud800 \ud83d\ude00 \ud83d"',
        rb'{"\udfff":"\uD800\uD800"}',
    ]

    @pytest.mark.parametrize("payload", LONE)
    @pytest.mark.parametrize("around", [0, 100])
    def test_a_lone_surrogate_escape_is_delivered_as_it_was_sent(
        self, payload: bytes, around: int
    ) -> None:
        others = [b'{"n":%d}' % n for n in range(around)]
        body = b"".join(b'{"event":%b}\n' % raw for raw in [*others, payload, *others])
        assert raws(decoder(), body + b'{"cursor":"a"}\n') == [*others, payload, *others]

    def test_the_payload_is_found_whatever_else_the_line_holds(self) -> None:
        line = rb'{"x":{"a":"\ufffd"},"event":{"a":"\ud800"},"event":{"a":"\udc00"},"y":"\ud800"}'
        assert raws(decoder(), line + b'\n{"cursor":"a"}\n') == [rb'{"a":"\udc00"}']

    def test_a_lone_surrogate_in_a_header_is_the_replacement_character(self) -> None:
        page = decoder("v1")
        page.feed(b'{"partition":2,"headers":{"a":"\\ud800"},"data":{}}\n')
        page.feed(b'{"partition":2,"cursor":"c"}\n')
        batch = page.take()
        assert batch is not None
        assert batch.events[0].headers == {"a": "\ufffd"}

    @pytest.mark.parametrize("payload", [b'"\xff"', b'{"\xc3":1}', b'{"a":"\xed\xa0\x80"}'])
    @pytest.mark.parametrize("around", [0, 100])
    def test_a_payload_that_is_not_utf8_is_delivered_as_it_was_sent(
        self, payload: bytes, around: int
    ) -> None:
        others = [b'{"n":%d}' % n for n in range(around)]
        body = b"".join(b'{"event":%b}\n' % raw for raw in [*others, payload])
        assert raws(decoder(), body + b'{"cursor":"a"}\n') == [*others, payload]
        with pytest.raises(ValueError, match="UTF-8"):
            make_event(0, payload).json()

    @pytest.mark.parametrize(
        ("dialect", "line"),
        [
            ("v2-draft", b'{"cursor":"\xff"}'),
            ("v2-draft", rb'{"cursor":"\ud800"}'),
            ("v1", b'{"partition":2,"headers":{"a":"\xff"},"data":{}}'),
            ("v1", b'{"partition":2,"headers":{"a":"\xff\\ud800"},"data":{}}'),
        ],
    )
    def test_r18_a_cursor_or_header_that_is_not_text_is_refused(
        self, dialect: DialectName, line: bytes
    ) -> None:
        for around in (b"", b'{"%s":{}}\n' % (b"data" if dialect == "v1" else b"event") * 200):
            with pytest.raises(ProtocolError, match=r"not valid UTF-8|not printable ASCII"):
                decoder(dialect).feed(around + line + b"\n")

    @pytest.mark.parametrize(
        "line", [b"Erreur \xe9", b'{"cursor":"\xff', b'{"event":{"a":tru}}', rb'{"event":"\x"}']
    )
    def test_a_line_that_is_not_json_is_torn_whatever_its_bytes(self, line: bytes) -> None:
        with pytest.raises(TornResponseError):
            decoder().feed(line + b"\n")

    @pytest.mark.parametrize(
        ("payload", "expected"),
        [
            (LONE[0], {"a": "\ufffd"}),
            (LONE[1], "\ufffd \\ud800 \U0001f600 \ufffd"),
            (LONE[2], {"\ufffd": "\ufffd\ufffd"}),
        ],
    )
    def test_json_reads_lone_surrogates_as_go_does(self, payload: bytes, expected: object) -> None:
        event = make_event(0, payload)
        assert event.json() == expected
        assert event.decode(type(expected)) == expected
        assert event.raw == payload

    def test_a_decoder_of_ones_own_gets_the_bytes_as_sent(self) -> None:
        event = make_event(0, self.LONE[0], decoder=json.loads)
        assert event.json() == {"a": "\ud800"}


@given(st.binary(max_size=60))
def test_mending_escapes_keeps_the_length_and_everything_else(data: bytes) -> None:
    mended = without_lone_surrogates(data)
    assert len(mended) == len(data)
    assert without_lone_surrogates(mended) == mended
    if b"\\u" not in data:
        assert mended == data


@pytest.mark.parametrize("fast", [True, False])
def test_a_byte_order_mark_at_the_start_of_a_response_is_skipped(fast: bool) -> None:
    body = b"\xef\xbb\xbf" + b'{"event":"a"}\n{"cursor":"1"}\n' * (200 if fast else 1)
    for size in (1, 2, 3, 7, len(body)):
        page = decoder()
        for start in range(0, len(body), size):
            page.feed(body[start : start + size])
        batch = page.take()
        assert batch is not None
        assert batch.cursor == "1"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"cursor":1}', r"Expected `str.*got `int` - at `\$\.cursor`"),
        (b"{not json}", "JSON is malformed: .*byte 1"),
        (b'\xef\xbb\xbf{"cursor":"1"}', "JSON is malformed"),
    ],
)
def test_a_line_that_can_not_be_read_says_what_is_wrong_with_it(line: bytes, reason: str) -> None:
    page = decoder()
    page.feed(b"\n")
    with pytest.raises(TornResponseError, match=reason):
        page.feed(line + b"\n")


def test_r03_empty_lines_are_passed_over_together_in_any_chunking() -> None:
    lines = b"\n" * 3 + b"\r\n" + b" \n"
    response = lines + b'{"data":{"n":1}}\n' + lines + b'{"cursor":"1"}\n' + lines
    for size in range(1, len(response) + 1):
        page = decoder()
        for at in range(0, len(response), size):
            page.feed(response[at : at + size])
        page.finish()
        taken = page.take()
        assert taken is not None
        assert [event.json() for event in taken.events] == [{"n": 1}]
        assert page.tail_bytes == len(lines)


@pytest.mark.parametrize("line", [b"\n", b"\r\n", b" \n"])
def test_r03_a_flood_of_empty_lines_takes_no_look_at_each(line: bytes) -> None:
    page, flood = decoder(), line * 1_000_000
    assert calls_of(lambda: page.feed(flood)) < 100
    assert page.tail_bytes == len(flood)
