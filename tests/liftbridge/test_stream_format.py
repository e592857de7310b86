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


def part(id: str, start: int, count: int, written: int | None = None) -> list[Message]:
    """The messages of an attempt from an offset on, of which only the first ones may be there."""
    shown = count if written is None else written
    return [message(start + n, id, n, count) for n in range(shown)]


@pytest.mark.parametrize(
    ("messages", "counts"),
    [
        # One with the same offset takes an attempt back, also where that is a part of it.
        ([message(0, "a"), message(1, "b"), message(1, "c")], [("a", [0]), ("c", [1])]),
        ([*part("a", 0, 2), *part("b", 1, 2)], [("b", [1, 2])]),
        ([*part("a", 0, 3), *part("b", 0, 3)], [("b", [0, 1, 2])]),
        # One that is written again under its id counts once.
        ([message(0, "a"), message(1, "a"), message(2, "b")], [("a", [0]), ("b", [2])]),
        ([message(0, "a"), message(0, "a"), message(1, "b")], [("a", [0]), ("b", [1])]),
        ([*part("a", 0, 3, 2), *part("a", 2, 3)], [("a", [2, 3, 4])]),
    ],
)
def test_which_attempts_count(messages: list[Message], counts: list[tuple[str, list[int]]]) -> None:
    assert settled(*messages) == counts


def test_a_complete_attempt_counts_once_the_next_message_is_there() -> None:
    attempts = AttemptAssembler()
    assert attempts.feed(message(0, "a")) is None
    assert attempts.holds_one
    settled_attempt = attempts.feed(message(1, "b"))
    assert settled_attempt is not None
    assert settled_attempt.id == "a"


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
        messages = part(id, 0, count)
        for each in messages:
            each.value = value
        return messages

    kept, dropped = attempt("a", count // 2), attempt("b", count)
    assert settled(*kept) == [("a", list(range(count // 2)))]
    assert settled(*dropped, message(count, "c")) == [("c", [count])]


@pytest.mark.parametrize(
    "positions",
    [
        *(f'{{"{partition}":["c","open",1]}}' for partition in ("x", "9" * 5000, "")),
        *(f'{{"0":{each}}}' for each in ('["c","no",1]', '["c","open","1"]', '["c"]', "1")),
    ],
)
def test_positions_that_are_none_are_an_error_of_the_stream(positions: str) -> None:
    header = f'{{"feed":"f","positions":{positions}}}'.encode()
    attempt = Attempt("a", (hostile(positions=header),), 0)
    with pytest.raises(StreamError, match="can't be decoded"):
        attempt.saved_positions("stream")
