"""Which attempts at writing a batch count. No broker."""

from __future__ import annotations

import pytest

from feedapi_client.liftbridge import Message, StreamError
from feedapi_client.liftbridge.stream_format import Attempt, AttemptAssembler, row_id


def message(offset: int, attempt: str, index: int = 0, count: int = 1) -> Message:
    return Message(
        offset=offset,
        headers={
            "feedapi-attempt": attempt.encode(),
            "feedapi-index": b"%d" % index,
            "feedapi-count": b"%d" % count,
            "feedapi-format": b"events",
            "feedapi-snapshot": b"0",
        },
    )


def settled(*messages: Message) -> list[tuple[str, list[int]]]:
    """Return the ids and the offsets of the attempts that count."""
    attempts = AttemptAssembler()
    found = [attempts.feed(each) for each in messages] + [attempts.settle()]
    return [(a.id, [m.offset for m in a.messages]) for a in found if a is not None]


def test_a_complete_attempt_counts_once_the_next_message_is_there() -> None:
    attempts = AttemptAssembler()
    assert attempts.feed(message(0, "a")) is None
    assert attempts.holds_one
    settled_attempt = attempts.feed(message(1, "b"))
    assert settled_attempt is not None
    assert settled_attempt.id == "a"


def test_a_message_with_the_same_offset_takes_an_attempt_back() -> None:
    assert settled(message(0, "a"), message(1, "b"), message(1, "c"), message(2, "d")) == [
        ("a", [0]),
        ("c", [1]),
        ("d", [2]),
    ]


def test_an_attempt_of_which_a_part_is_taken_back_does_not_count() -> None:
    first = [message(0, "a", 0, 2), message(1, "a", 1, 2)]
    again = [message(1, "b", 0, 2), message(2, "b", 1, 2)]
    assert settled(*first, *again) == [("b", [1, 2])]


def test_several_messages_that_are_taken_back_leave_what_follows() -> None:
    lost = [message(n, "a", n, 3) for n in range(3)]
    kept = [message(n, "b", n, 3) for n in range(3)]
    assert settled(*lost, *kept) == [("b", [0, 1, 2])]


def test_an_attempt_that_is_written_again_under_its_id_counts_once() -> None:
    assert settled(message(0, "a"), message(1, "a"), message(2, "b")) == [("a", [0]), ("b", [2])]
    assert settled(message(0, "a"), message(0, "a"), message(1, "b")) == [("a", [0]), ("b", [1])]


def test_an_incomplete_attempt_that_is_written_again_under_its_id_counts_once() -> None:
    part = [message(n, "a", n, 3) for n in range(2)]
    whole = [message(n + 2, "a", n, 3) for n in range(3)]
    assert settled(*part, *whole) == [("a", [2, 3, 4])]


def hostile(**headers: bytes) -> Message:
    valid = {"attempt": b"a", "index": b"0", "count": b"1", "format": b"batch", "snapshot": b"0"}
    return Message(
        headers={f"feedapi-{name}": value for name, value in (valid | headers).items()},
    )


NO_NUMBERS = [b"9" * 5000, b"9" * 20, b"9" * 19, b"%d" % 2**63, b"-1", b"", "\u0663".encode()]


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_headers_that_are_no_numbers_are_those_of_a_foreign_message(number: bytes) -> None:
    assert row_id(hostile(query=b"q", batch=number, row=b"1")) is None
    assert row_id(hostile(query=b"q", batch=b"1", row=number)) is None
    for name in ("index", "count", "snapshot"):
        assert not settled(hostile(**{name: number}))


@pytest.mark.parametrize("name", ["attempt", "index", "count", "format", "snapshot"])
def test_a_message_that_lacks_a_header_is_foreign(name: str) -> None:
    message = hostile()
    assert settled(message)
    del message.headers[f"feedapi-{name}"]
    assert not settled(message)


@pytest.mark.parametrize(("value", "count"), [(b"x" * 2000, 5), (b"", 12)])
def test_an_attempt_of_more_bytes_than_a_relay_writes_is_not_kept(
    value: bytes, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.stream_format.MOST_BYTES", 10_000)

    def attempt(id: str, count: int) -> list[Message]:
        messages = [message(n, id, n, count) for n in range(count)]
        for each in messages:
            each.value = value
        return messages

    kept, dropped = attempt("a", count // 2), attempt("b", count)
    assert settled(*kept) == [("a", list(range(count // 2)))]
    assert settled(*dropped, message(count, "c")) == [("c", [count])]


@pytest.mark.parametrize("partition", [b"x", b"9" * 5000, b""])
def test_positions_of_no_partition_are_an_error_of_the_stream(partition: bytes) -> None:
    positions = b'{"feed":"f","positions":{"%s":["c","open",1]}}' % partition
    attempt = Attempt("a", (hostile(positions=positions),), 0)
    with pytest.raises(StreamError, match="can't be decoded"):
        attempt.saved_positions("stream")


@pytest.mark.parametrize("position", ['["c","nonsense",1]', '["c","open","1"]', '["c"]', "1"])
def test_positions_that_are_none_are_an_error_of_the_stream(position: str) -> None:
    positions = f'{{"feed":"f","positions":{{"0":{position}}}}}'.encode()
    attempt = Attempt("a", (hostile(positions=positions),), 0)
    with pytest.raises(StreamError, match="can't be decoded"):
        attempt.saved_positions("stream")
