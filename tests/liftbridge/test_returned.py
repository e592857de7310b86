"""How a subscription knows messages again that it returned, and finds out what the broker lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.liftbridge import Message, StreamGapError
from feedapi_client.liftbridge.returned import LookBackError, ReturnedMessages


def message(offset: int, timestamp: int = 0) -> Message:
    return Message(offset=offset, timestamp=timestamp or offset + 1)


def returned(*offsets: int) -> ReturnedMessages:
    found = ReturnedMessages("s")
    for offset in offsets:
        found.add(message(offset))
    found.begin_call()
    return found


def test_a_message_that_was_returned_is_known_again() -> None:
    found = returned(3, 4, 5)
    found.compare_newest()
    assert found.compare_from == 5
    assert found.includes(message(5))
    assert not found.includes(message(6))


def test_nothing_is_compared_before_the_first_message() -> None:
    found = returned()
    found.compare_newest()
    assert not found
    assert found.compare_from is None


def test_a_message_before_all_that_are_remembered_is_old() -> None:
    assert returned(3, 4).includes(message(1, timestamp=99))


def test_the_next_call_begins_with_a_message_that_can_be_read() -> None:
    found = returned(3, 4, 5)
    found.compare_newest()
    assert found.compare_up_to(4) == 4
    found.compare_newest()
    assert found.compare_up_to(9) == 5
    assert found.compare_up_to(-1) == 3


def test_another_message_at_the_newest_offset_asks_for_the_ones_before() -> None:
    found = returned(3, 4, 5)
    found.compare_newest()
    with pytest.raises(LookBackError):
        found.includes(message(5, timestamp=99))
    found.compare_all()
    assert found.compare_from == 3
    found.begin_call()
    assert found.includes(message(3))
    assert not found.includes(message(4, timestamp=98))
    assert not found.includes(message(5, timestamp=99))


def test_a_call_that_begins_lower_compares_in_order() -> None:
    found = returned(3, 4, 5)
    found.compare_newest()
    assert found.includes(message(4))
    assert not found.includes(message(5, timestamp=99))


def test_two_messages_with_one_offset_in_a_call_are_both_new_and_both_known_later() -> None:
    found = returned(3)
    for timestamp in (8, 9):
        assert not found or not found.includes(message(4, timestamp))
        found.add(message(4, timestamp))
    found.begin_call()
    assert found.includes(message(4, 8))
    assert found.includes(message(4, 9))


def test_all_that_is_remembered_and_lost_is_an_error_when_there_was_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.returned._REMEMBERED", 2)
    found = returned(1, 2, 3, 4, 5)
    found.compare_all()
    with pytest.raises(StreamGapError, match="stream s: the broker lost messages that were read"):
        found.includes(message(4, timestamp=99))


def test_all_that_was_returned_may_be_lost_when_all_is_remembered() -> None:
    found = returned(3, 4, 5)
    found.compare_all()
    assert not found.includes(message(3, timestamp=99))
    assert not found


@given(
    kept=st.integers(0, 30),
    lost=st.integers(1, 30),
    stored=st.integers(0, 60),
    readable=st.integers(-1, 90),
)
def test_each_message_that_is_stored_instead_of_lost_ones_is_returned_once_in_order(
    kept: int, lost: int, stored: int, readable: int
) -> None:
    found = returned(*range(kept + lost))
    log = [message(n) for n in range(kept)]
    log += [message(n, timestamp=1000 + n) for n in range(kept, kept + stored)]
    found.compare_newest()
    start = found.compare_up_to(min(readable, len(log) - 1))
    try:
        new = _read(found, log, start)
    except LookBackError:
        found.compare_all()
        new = _read(found, log, 0)
    assert new == log[kept:]


def _read(found: ReturnedMessages, log: list[Message], start: int) -> list[Message]:
    """Return the new messages of a call."""
    found.begin_call()
    new = []
    for stored in log[start:]:
        if not found or not found.includes(stored):
            found.add(stored)
            new.append(stored)
    return new
