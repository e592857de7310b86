"""Which attempts at writing a batch count. No broker."""

from __future__ import annotations

from feedapi_client.liftbridge import Message
from feedapi_client.liftbridge.stream_format import SettledAttempts


def message(offset: int, attempt: str, index: int = 0, count: int = 1) -> Message:
    return Message(
        offset=offset,
        headers={
            "feedapi-attempt": attempt.encode(),
            "feedapi-index": b"%d" % index,
            "feedapi-count": b"%d" % count,
        },
    )


def settled(*messages: Message) -> list[tuple[str, list[int]]]:
    """Return the ids and the offsets of the attempts that count."""
    attempts = SettledAttempts()
    found = [attempts.feed(each) for each in messages] + [attempts.settle()]
    return [(a.id, [m.offset for m in a.messages]) for a in found if a is not None]


def test_a_complete_attempt_counts_once_the_next_message_is_there() -> None:
    attempts = SettledAttempts()
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
