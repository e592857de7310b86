"""The lines of a response: events, checkpoints, errors. With the fast way and without."""

from __future__ import annotations

import json
import pickle
import re
import sys
import tracemalloc
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from typing import Any, ClassVar

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FeedError, LineTooLongError, ProtocolError, TornResponseError
from feedapi_client.model import DialectName, Event, make_event, without_lone_surrogates
from feedapi_client.protocol import decoder as module
from feedapi_client.protocol.decoder import Decoded, PageDecoder
from feedapi_client.protocol.dialects import DIALECTS
from feedapi_client.protocol.text import MAX_CURSOR
from tests.protocol.calls import calls_of

FEED = "https://service/feed"
EVENT: dict[DialectName, bytes] = {
    "v1": b'{"partition":2,"data":%s}\n',
    "v2-draft": b'{"event":%s}\n',
    "v2-token": b'{"data":%s}\n',
}


@pytest.fixture(scope="module", autouse=True, params=["many lines at once", "line by line"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How complete lines are decoded; small blocks, as most here are, go line by line otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        many = request.param == "many lines at once"
        patch.setattr(module, "_SMALL", 0 if many else sys.maxsize)
        patch.setattr(module, "_LARGE", 200)
        yield request.param


DEEP = b"[" * 500 + b"]" * 500
TOO_DEEP = b'{"a":' * 3_000 + rb'"\"]}\\"' + b"}" * 3_000
"""More deeply than a parser reads."""


class Page:
    """A decoder, and what it says of a response."""

    def __init__(
        self, dialect: DialectName = "v2-draft", *, limit: int = 1 << 20, decode: Any = orjson.loads
    ) -> None:
        self.decoder = PageDecoder(
            DIALECTS[dialect], feed=FEED, partition=2, decoder=decode, max_line_bytes=limit
        )
        self.events: list[Event] = []
        self.cursors: list[str] = []
        self.said: list[Any] = []
        """Payloads and cursors, in order."""
        self.error: FeedError | None = None

    def receive(self, decoded: Decoded) -> None:
        cursors = iter(decoded.cursors)
        for at, record in enumerate(decoded.records):
            if at in decoded.checkpoints:
                self.said.append(next(cursors))
            else:
                self.events.append(record)
                self.said.append(record.raw)
        self.cursors += decoded.cursors

    def read(self, *chunks: bytes) -> Page:
        try:
            for chunk in chunks:
                self.decoder.feed(chunk, self.receive)
            self.decoder.finish(self.receive)
        except FeedError as error:
            self.error = error
        return self

    @property
    def raws(self) -> list[bytes]:
        assert self.error is None
        return [event.raw for event in self.events]


class TestRecords:
    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize(
        "payload",
        [
            b'{"a": 1.0,  "b":"\\u00e9"}',
            b'"text"',
            b"{}",
            b'""',
            '{"é":"\u2028\u0085\x7f"}'.encode(),
            b'{"a":"\xff"}',
            TOO_DEEP,
            b'{"\xff":%b, "b":"\\ud800"}' % TOO_DEEP,
        ],
    )
    def test_a_payload_is_kept_byte_for_byte(self, dialect: DialectName, payload: bytes) -> None:
        assert Page(dialect).read(EVENT[dialect] % payload * 20).raws == [payload] * 20

    @pytest.mark.parametrize("others", [0, 40])
    def test_event_that_no_parser_reads_is_delivered_and_stops_no_other(self, others: int) -> None:
        deep, other = (b'"%d":%b' % (n, TOO_DEEP) for n in range(2))
        line = b'{"headers":{%b},"data":{%b},"x":{%b},"partition":2}\n' % (other, deep, other)
        page = Page("v1").read(EVENT["v1"] % b"{}" * others, line, b'{"partition":2,"cursor":"1"}')
        assert (page.raws, page.cursors) == ([b"{}"] * others + [b"{%b}" % deep], ["1"])
        for read in (page.events[-1].json, lambda: page.events[-1].headers):
            with pytest.raises(ValueError, match="depth"):
                read()

    def test_v1_events_have_headers(self) -> None:
        page = Page("v1").read(
            b'{"partition":2,"headers":{"a":"1"},"data":{}}\n{"partition":2,"data":{}}\n'
        )
        assert [event.headers for event in page.events] == [{"a": "1"}, {}]

    @pytest.mark.parametrize(
        "line",
        [
            b'{"partition":2,"headers":{"a":[%b1]},"data":{}}\n' % (b"[]," * 100_000),
            b'{"partition":2,"headers":{%b"a":1},"data":{}}\n' % (b'"\\ud800":[],' * 30_000),
            b'{%b"DATA":{},"partition":2}\n' % b"".join(b'"%x":0,' % n for n in range(50_000)),
            b'{"x":%b,"data":{},"partition":2}\n' % (b"[" * 30_000 + b"]" * 30_000),
        ],
        ids=["headers", "surrogates", "keys", "levels"],
    )
    def test_r16_a_line_takes_no_more_memory_than_its_bytes(self, line: bytes) -> None:
        """As objects each of its values takes many times as much, and the time to make them."""
        tracemalloc.start()
        try:
            (event,) = Page("v1").read(line).events
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert event.raw == b"{}"
        assert peak < 10 * len(line)

    def test_v1_headers_are_decoded_once(self) -> None:
        (event,) = Page("v1").read(b'{"partition":2,"headers":{"a":%b},"data":{}}\n' % DEEP).events
        assert event.headers.keys() == {"a"}
        assert event.headers is event.headers

    def test_a_v2_line_sets_no_headers(self) -> None:
        (event,) = Page().read(b'{"event":{},"headers":{"a":"1"}}\n').events
        assert event.headers == {}

    @pytest.mark.parametrize("events", [1, 100])
    def test_events_know_their_partition_and_decoder_and_survive_pickling(
        self, events: int
    ) -> None:
        page = Page(decode=bytes.upper).read(b'{"event":"a"}\n' * events)
        for event in page.events:
            assert (event.partition, event.json()) == (2, b'"A"')
            copy = pickle.loads(pickle.dumps(event))
            assert (copy.raw, copy.partition) == (b'"a"', 2)

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (b'{"id":7,"event":{},"x":[1]}\n{"cursor":"c","more":null}\n', [b"{}", "c"]),
            (b'\n{"event":{}}\r\n\r\n{"cursor":"c"}\n \n', [b"{}", "c"]),
            (b'{"cursor":"y","event":{}}\n{"event":"a"}\n', [b"{}", "y", b'"a"']),
            (b'{"event":{},"cursor":null}\n{"event":{},"cursor":""}\n', [b"{}", b"{}"]),
            (b'{"event":null,"cursor":"c"}\n', ["c"]),
            (b'{"event":{}}', [b"{}"]),
            (b'{"data":{}}\n{"Data":""}\n{"Cursor":"c"}\n', [b"{}", b'""', "c"]),
            (b'{"cursor":"c","EVENT":{"l":"long"}}\n', [b'{"l":"long"}', "c"]),
            (b'{"\\u0065vent":{}}\n{"\xff":1,"event":{}}\n{"\xff":1,"data":{}}\n', [b"{}"] * 3),
        ],
    )  # fmt: skip
    def test_r03_nothing_recognisable_is_skipped(self, body: bytes, said: list[Any]) -> None:
        page = Page().read(body)
        assert (page.said, page.error, page.decoder.unknown_commands) == (said, None, 0)

    @pytest.mark.parametrize("times", [1, 100])
    def test_unknown_commands_are_counted_and_skipped(self, times: int) -> None:
        page = Page().read(b'{"resync":"\\u00e9"}\n{"event":{}}\n{}\n{"n":{}}\n' * times)
        assert page.raws == [b"{}"] * times
        assert page.decoder.unknown_commands == 3 * times

    def test_a_cursor_may_hold_any_printable_ascii(self) -> None:
        cursor = bytes(range(32, 127)).decode() + "x" * (MAX_CURSOR - 95)
        assert Page().read(orjson.dumps({"cursor": cursor}) + b"\n").cursors == [cursor]

    @pytest.mark.parametrize("fast", [True, False])
    def test_a_byte_order_mark_at_the_start_of_a_response_is_skipped(self, fast: bool) -> None:
        body = b"\xef\xbb\xbf" + b'{"event":"a"}\n{"cursor":"1"}\n' * (200 if fast else 1)
        for size in (1, 2, 3, 7, len(body)):
            page = Page().read(*[body[at : at + size] for at in range(0, len(body), size)])
            assert (page.error, page.cursors[-1]) == (None, "1")

    def test_r03_empty_lines_are_passed_over_in_any_chunking(self) -> None:
        lines = b"\n" * 3 + b"\r\n" + b" \n"
        response = lines + b'{"data":{"n":1}}\n' + lines + b'{"cursor":"1"}\n' + lines
        for size in range(1, len(response) + 1):
            page = Page().read(*[response[at : at + size] for at in range(0, len(response), size)])
            assert page.said == [b'{"n":1}', "1"]


class TestErrors:
    @pytest.mark.parametrize("payload", [b"[1]", b"12", b"-1", b"true", b"false", b"null"])
    @pytest.mark.parametrize("others", [0, 40])
    def test_a_payload_is_an_object_or_a_string(self, payload: bytes, others: int) -> None:
        page = Page().read(
            b'{"event":{"a":1}}\n' * others
            + b'{"cursor":"1"}\n{"event":"b"}\n{"event":' + payload + b'}\n{"cursor":"2"}\n'
        )  # fmt: skip
        assert type(page.error) is ProtocolError
        assert "partition 2: an event's payload is neither a JSON object" in str(page.error)
        assert (len(page.events), page.cursors) == (others + 1, ["1"])

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"Internal server error", r"\(21 bytes\): 'Internal server error'"),
            (b"Erreur \xe9", "'Erreur"),
            (b'handler failed: {"name":"sesame"}', "'handler failed: '"),
            (b"{not json: sesame}", "JSON is malformed: .*byte 1"),
            (b'{"event":{"secret":"sesame"', "truncated"),
            (b'\xef\xbb\xbf{"event":{"secret":"sesame"}}', "malformed"),
            (b'{"event":{"secret":"sesame"}}x', "trailing"),
            (b'{"event":{}}{"event":"sesame"}', "trailing"),
            (b'["sesame"]', "Expected `object`, got `array`"),
            (b'"sesame"', "Expected `object`"),
            (b"7", "Expected `object`"),
            (b'{"cursor":7}', r"Expected `str.*got `int` - at `\$\.cursor`"),
            (b'{"cursor":""}', "empty cursor"),
            (b'{"cursor":{"a":"sesame"}}', "Expected `str"),
            (b'{"event":"sesame\x01"}', "invalid character"),
            (rb'{"event":"\x"}', "escaped character"),
            (b'{"a":' + b"[" * 100_000, "nested too deeply"),
            (b'{"token":"t","partitions":[{"id":"2"}]}', "answered with a discovery: a redirect"),
            (b'{"Partitions":null}', "answered with a discovery"),
            (b'{\n  "cursor": "1"\n}', "truncated"),  # pretty-printed
            (b"<html>" + b"x" * 10_000, "<html>x"),
        ],
    )
    @pytest.mark.parametrize("newline", [b"\n", b""])
    def test_r19_a_line_that_is_no_message_tears_the_response_and_says_why(
        self, line: bytes, reason: str, newline: bytes
    ) -> None:
        page = Page().read(b'{"event":"a"}\n{"cursor":"1"}\n{"event":"b"}\n' + line + newline)
        assert type(page.error) is TornResponseError
        assert page.said == [b'"a"', "1", b'"b"']
        assert str(page.error).startswith(f"feed {FEED}, partition 2: ")
        assert re.search(reason, str(page.error))
        assert len(str(page.error)) < 400
        assert "sesame" not in str(page.error) + str(page.error.__cause__)

    def test_r03_a_torn_tail_says_so(self) -> None:
        assert "ended in the middle of a line" in str(Page().read(b'{"event":{"b"').error)

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            (b'{"partition":3,"data":{}}', "3"),
            (b'{"partition":"3","cursor":"a"}', "3"),
            (b'{"partition":"\\u001b[2J"}', r"\\x1b\[2J"),
        ],
    )
    @pytest.mark.parametrize("others", [0, 40])
    def test_v1_lines_of_another_partition_are_an_error(
        self, line: bytes, named: str, others: int
    ) -> None:
        page = Page("v1").read(EVENT["v1"] % b"{}" * others + line + b"\n")
        assert type(page.error) is ProtocolError
        assert re.search(f"a line of partition {named}$", str(page.error))

    @pytest.mark.parametrize(
        "line", [b'{"data":{}}', b'{"partition":"2","data":{}}', b'{"partition": 2, "data": {}}']
    )
    def test_v1_lines_may_leave_the_partition_out(self, line: bytes) -> None:
        assert Page("v1").read((line + b"\n") * 40).raws == [b"{}"] * 40

    @pytest.mark.parametrize(
        ("cursor", "problem"),
        [
            ("a\x00b", "not printable ASCII: 'a\\\\x00b'"),
            ("a\nb", "not printable ASCII"),
            ("é", "not printable ASCII: '\\\\xe9'"),
            ("\x7f", "not printable ASCII"),
            ("\u2028" * 100, "not printable ASCII"),
            ("x" * (MAX_CURSOR + 1), "16385 characters long: at most 16384 are accepted"),
            ("x" * (6 * MAX_CURSOR + 1), "98305 characters long: at most 16384 are accepted"),
        ],
    )
    def test_r18_any_other_cursor_is_refused(self, cursor: str, problem: str) -> None:
        page = Page().read(orjson.dumps({"cursor": cursor}) + b"\n" + b'{"event":"c"}\n' * 100)
        assert type(page.error) is ProtocolError
        assert re.search(f"a cursor that is {problem}", str(page.error))
        assert len(str(page.error)) < 300
        assert page.said == []

    @pytest.mark.parametrize("key", ["cursor", "partition"])
    def test_r18_what_no_cursor_can_be_is_refused_before_it_is_read(self, key: str) -> None:
        """To mend the surrogates of 16 MiB takes a second."""
        error = Page("v1").read(b'{"%s":"%s"}\n' % (key.encode(), rb"\ud800" * 50_000)).error
        assert type(error) is ProtocolError
        assert f"a {key} of 300002 bytes, which is too long" in str(error)

    @pytest.mark.parametrize(
        ("dialect", "line"),
        [
            ("v2-draft", b'{"cursor":"\xff"}'),
            ("v2-draft", b'{"Cursor":"\xff"}'),
            ("v2-draft", rb'{"cursor":"\ud800"}'),
            ("v1", b'{"partition":2,"headers":{"a":"\xff"},"data":{}}'),
            ("v1", b'{"partition":2,"headers":{"a":"\xff\\ud800"},"data":{}}'),
        ],
    )
    @pytest.mark.parametrize("around", [0, 200])
    def test_r18_a_cursor_or_header_that_is_not_text_is_refused(
        self, dialect: DialectName, line: bytes, around: int
    ) -> None:
        error = Page(dialect).read(EVENT[dialect] % b"{}" * around + line + b"\n").error
        assert type(error) is ProtocolError
        assert "not valid UTF-8" in str(error) or "not printable ASCII" in str(error)


class TestLongLines:
    @pytest.mark.parametrize("size", [1, 7, 1 << 20])
    @pytest.mark.parametrize("newline", [b"\n", b""])
    def test_a_line_over_the_limit_is_an_error(self, size: int, newline: bytes) -> None:
        body = b'{"event":"a"}\n{"cursor":"1"}\n{"event":"' + b"x" * 100 + b'"}' + newline
        page = Page(limit=64).read(*[body[at : at + size] for at in range(0, len(body), size)])
        assert type(page.error) is LineTooLongError
        assert "longer than 64 bytes: raise Limits.max_line_bytes" in str(page.error)
        assert page.said == [b'"a"', "1"]

    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
    @pytest.mark.parametrize("size", [1, 66, 67, 68])
    def test_a_line_of_just_the_limit_is_read(self, mark: bytes, size: int) -> None:
        body = mark + b'{"event":"' + b"x" * 52 + b'"}\n'
        page = Page(limit=64).read(*[body[at : at + size] for at in range(0, len(body), size)])
        assert len(page.raws) == 1

    def test_a_line_over_64_kib_is_read(self) -> None:
        payload = b'"' + b"x" * 300_000 + b'"'
        body = b'{"event":' + payload + b"}\n"
        page = Page().read(*[body[at : at + 4096] for at in range(0, len(body), 4096)])
        assert page.raws == [payload]

    def test_an_endless_line_costs_linear_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        searched = 0

        def search(data: bytes) -> BytesIO:
            nonlocal searched
            searched += len(data)
            return BytesIO(data)

        class Tail(bytearray):
            """What is kept of the line: it may grow, but must not be searched or copied."""

            def refuse(self, *_: Any) -> Any:
                pytest.fail("the kept part of the line is looked at again")

            find = rfind = index = rindex = count = refuse
            __contains__ = __add__ = __getitem__ = copy = refuse

        monkeypatch.setattr(module, "BytesIO", search)
        page = Page(limit=1 << 28).decoder
        tail = page._tail = Tail()
        for _ in range(1000):
            page.feed(b"x" * 512, print)
        assert page._tail is tail
        assert searched == page.tail_bytes == 512_000


NOTHING = [b"{}\n", b'{"":0}\n', b'{"ping":1}\r\n', b'{"a":"\\u00e9"}\n', b'{"partition":2}\n']


class TestNonsense:
    """What says nothing costs little, and ends."""

    @pytest.mark.parametrize("line", [b"\n", b"\r\n", b" \n"])
    def test_r03_a_flood_of_empty_lines_takes_no_look_at_each(self, line: bytes) -> None:
        page, flood = Page(), line * 1_000_000
        assert calls_of(lambda: page.read(flood)) < 100
        assert page.said == []

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("line", [*NOTHING, b'{"cursor":"_first"}\n'])
    def test_a_response_may_hold_so_many_of_them(
        self, dialect: DialectName, line: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_NOTHING", 1000)
        pages = []
        for lines in (1000, 1001):
            pages.append(Page(dialect))
            pages[-1].decoder.asked = "_first"
            pages[-1].read(line * lines)
        assert pages[0].error is None
        assert isinstance(pages[1].error, TornResponseError)
        assert "more than 1000 lines of the response" in str(pages[1].error)

    def test_each_line_that_says_something_pays_for_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_NOTHING", 100)
        assert Page().read((b'{"event":{}}\n' + b"{}\n" * 16) * 1000).error is None
        assert Page().read((b'{"event":{}}\n' + b"{}\n" * 17) * 1000).error is not None

    @pytest.mark.parametrize("line", [*NOTHING, b'{"cursor":"_first"}\n', b'{"Ping":"data"}\n'])
    def test_r15_heartbeats_that_come_one_by_one_are_never_too_many(
        self, line: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_NOTHING", 100)
        page = Page()
        page.decoder.asked = "_first"
        assert page.read(*[line * 16] * 1000).error is None
        assert isinstance(page.read(line * 200).error, TornResponseError)

    @pytest.mark.parametrize("line", [b"{}\n", b"x" * 999 + b"\n", b"x" * 99])
    @pytest.mark.parametrize(("slow", "most"), [(False, 1024), (True, 128)])
    def test_bytes_are_cut_into_what_takes_little_time(
        self, line: bytes, slow: bool, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_SMALL", 1)
        decoder, body = Page().decoder, line * 3000 + b"{}\n" * 3000
        decoder._slow = slow
        cut = list(decoder.parts(body))
        assert b"".join(b"".join(part) for part in cut) == body
        assert max(sum(map(len, part)) for part in cut) <= 64 * 1024
        assert max(map(len, cut)) <= most

    @pytest.mark.parametrize("line", [b"\n", b" \r\n", b"{}\n"])
    def test_r15_a_flood_of_short_lines_is_cut_into_few_parts(self, line: bytes) -> None:
        assert len(list(Page().decoder.parts(line * (64 * 1024 // len(line))))) <= 65

    def test_parts_are_smaller_while_each_line_is_looked_at(self) -> None:
        page = Page()
        for line, slow in ((b'{"Data":{}}\n', True), (b'{"event":{}}\n', False)):
            page.read(line * 1000)
            assert page.decoder._slow is slow or module._SMALL > 1000


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
        self, dialect: DialectName, line: bytes, payload: bytes, way: str
    ) -> None:
        events = b"".join(line % (payload % number) + b"\n" for number in range(100))
        body = b'{"cursor":"0"}\n' + events + b'{"cursor":"1"}\n'
        if way == "many lines at once":
            page = Page(dialect)
            assert calls_of(lambda: page.decoder.feed(body, list)) < 900
        assert len(Page(dialect).read(body, body.replace(b'"0"', b'"2"')).raws) == 200


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
        b'| \r|{}|{"resync":1}|{"data":{}}\r|oops|{"data":\n{}}|{"data":{}}{"data":{}}|'
        b'{"cursor":"c"}{"cursor":"d"}|{"data":{}}{"cursor":"c"}|{"cursor":\n"c"}|{"Data":{}}|'
        b'{"cursor":null}|{"partition":3}|{"Cursor":"d"}|{"event":"\\ud800"}|{"\xff":1,"data":{}}'
        .split(b"|")
    ),
    st.binary(max_size=10),
)  # fmt: skip


@given(
    st.sampled_from(["v1", "v2-token"]),
    st.lists(lines, max_size=12),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
    st.sampled_from([40, 10_000]),
)
def test_any_chunking_decodes_the_same(
    dialect: DialectName, given: list[bytes], cuts: list[int], ended: bool, limit: int
) -> None:
    body = b"\n".join(given) + (b"\n" if ended else b"")
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    chunkings = [[body], [body[start:end] for start, end in pairwise(places)]]
    chunkings.append([body[at : at + 1] for at in range(len(body))])
    pages = [Page(dialect, limit=limit).read(*chunks) for chunks in chunkings]
    outcomes = [
        (p.said, type(p.error), str(p.error), p.decoder.unknown_commands, p.decoder.saw_events)
        for p in pages
    ]
    assert outcomes == outcomes[:1] * 3


class TestText:
    """Bytes that are not text: delivered as sent, or refused, the same for every driver."""

    LONE: ClassVar = [
        rb'{"a":"\ud800"}',
        rb'"\uDC00 \\ud800 \ud83d\ude00 \ud83d"',
        rb'{"\udfff":"\uD800\uD800"}',
    ]

    @pytest.mark.parametrize(
        "payload", [*LONE, b'"\xff"', b'{"\xc3":1}', b'{"a":"\xed\xa0\x80"}', b'"\xff\\ud800"']
    )
    @pytest.mark.parametrize("around", [0, 100])
    def test_it_is_delivered_as_it_was_sent(self, payload: bytes, around: int) -> None:
        others = [b'{"n":%d}' % n for n in range(around)]
        body = b"".join(b'{"event":%b}\n' % raw for raw in [*others, payload, *others])
        assert Page().read(body).raws == [*others, payload, *others]

    def test_the_payload_is_found_whatever_else_the_line_holds(self) -> None:
        line = rb'{"x":{"a":"\ufffd"},"event":{"a":"\ud800"},"event":{"a":"\udc00"},"y":"\ud800"}'
        assert Page().read(line).raws == [rb'{"a":"\udc00"}']

    @pytest.mark.parametrize(
        "other", [r"\u1800", r"\uE800\uF800", r"\uD800", r"\\ud800", r"\\uE800"]
    )
    def test_the_payload_is_not_taken_for_another_text(self, other: str) -> None:
        given = other.replace("uE", "ud").replace("uF", "uD").replace("u1", "ud")
        for payload in (r'"\ud800"', f'"{given}"'):
            line = f'{{"x":"{other}","event":{payload},"y":"{other}","z":{{"event":"{other}"}}}}'
            assert Page().read(line.encode()).raws == [payload.encode()]

    @pytest.mark.parametrize("key", [rb"\ud800", b"\xff"])
    def test_a_line_with_every_escape_is_delivered(self, key: bytes) -> None:
        payload = b'{"a":"%b"}' % b"".join(rb"\u%c800" % digit for digit in b"AEFaef")
        assert Page().read(b'{"%b":0,"event":%b}\n' % (key, payload)).raws == [payload]

    @pytest.mark.parametrize("wrong", [b"{,}", b"[1 2]", b'"\x01"', b"nul"])
    def test_what_is_beside_a_value_that_no_parser_reads_is_still_checked(
        self, wrong: bytes
    ) -> None:
        for odd in (rb'"\ud800"', TOO_DEEP):
            page = Page().read(b'{"event":%b,"x":%b}' % (odd, wrong * 40))
            assert type(page.error) is TornResponseError

    def test_a_lone_surrogate_in_a_header_is_the_replacement_character(self) -> None:
        line = '{"partition":2,"headers":{"é":"\\ud800"},"data":{}}\n'.encode()
        (event,) = Page("v1").read(line).events
        assert event.headers == {"é": "\ufffd"}

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
        assert event.json() == event.decode(type(expected)) == expected
        assert event.raw == payload

    def test_a_decoder_of_ones_own_gets_the_bytes_as_sent(self) -> None:
        event = make_event(0, self.LONE[0], decoder=json.loads)
        assert event.json() == {"a": "\ud800"}
        with pytest.raises(ValueError, match="UTF-8"):
            make_event(0, b'"\xff"').json()


@given(st.binary(max_size=60))
def test_mending_escapes_keeps_the_length_and_everything_else(data: bytes) -> None:
    mended = without_lone_surrogates(data)
    assert len(mended) == len(data)
    assert without_lone_surrogates(mended) == mended
    assert b"\\u" in data or mended == data


ESCAPES = [
    rb"\ud83d",
    rb"\uDBFF",
    rb"\udE00",
    rb"\u0041",
    rb"\ud061",
    rb"\\",
    rb"\n",
    b"ud800",
    b"a",
]


@given(st.lists(st.sampled_from(ESCAPES), max_size=8).map(b"".join))
def test_just_the_surrogates_without_a_partner_are_mended(text: bytes) -> None:
    units = json.loads(b'"%b"' % text).encode("utf-16", "surrogatepass")
    assert json.loads(without_lone_surrogates(b'"%b"' % text)) == units.decode("utf-16", "replace")
