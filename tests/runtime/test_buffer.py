"""`BufferBudget`: room for received bytes, over all partitions (R16)."""

from __future__ import annotations

import pytest

from feedapi_client.runtime.buffer import BufferBudget

pytestmark = pytest.mark.anyio

READ = 64 * 1024
"""The bytes that a reservation sets aside."""


def test_r16_a_read_has_room_until_one_more_would_exceed_the_limit() -> None:
    buffer = BufferBudget(4 * READ)
    buffer.add(3 * READ)
    assert buffer.has_room
    buffer.add(1)
    assert not buffer.has_room


def test_r16_reserved_room_counts_as_used() -> None:
    buffer = BufferBudget(4 * READ)
    for _ in range(4):
        assert buffer.has_room
        buffer.reserve()
    assert not buffer.has_room
    buffer.unreserve()
    assert buffer.has_room


def test_r16_an_empty_buffer_of_any_size_has_room_for_a_read() -> None:
    buffer = BufferBudget(1)
    assert buffer.has_room
    buffer.add(10)
    assert not buffer.has_room


def test_r16_waiting_helps_while_the_application_can_take_something() -> None:
    buffer = BufferBudget(READ)
    buffer.add(READ, deliverable=True)
    assert not buffer.stuck
    buffer.free(READ, deliverable=True)
    buffer.add(READ)
    assert buffer.stuck


def test_r16_waiting_helps_while_a_read_may_bring_a_checkpoint() -> None:
    buffer = BufferBudget(4 * READ)
    buffer.reserve()
    buffer.add(4 * READ)
    assert not buffer.stuck
    buffer.unreserve()
    assert buffer.stuck


async def test_r16_a_waiting_task_is_woken_when_space_frees_up() -> None:
    buffer = BufferBudget(4 * READ)
    buffer.add(4 * READ, deliverable=True)
    changed = buffer.changed()
    buffer.free(10, deliverable=True)
    assert not changed.is_set(), "still no room"
    buffer.free(READ, deliverable=True)
    assert changed.is_set()


async def test_r16_a_waiting_task_is_woken_when_waiting_can_not_free_any_space() -> None:
    buffer = BufferBudget(4 * READ)
    buffer.add(3 * READ + 1)
    buffer.add(READ, deliverable=True)
    changed = buffer.changed()
    buffer.free(READ, deliverable=True)
    assert changed.is_set()
    assert buffer.stuck


async def test_waiting_tasks_share_one_event_and_later_ones_get_another() -> None:
    buffer = BufferBudget(READ)
    buffer.add(READ, deliverable=True)
    first = buffer.changed()
    assert buffer.changed() is first
    buffer.free(READ, deliverable=True)
    assert buffer.changed() is not first


def test_its_repr_shows_what_is_used() -> None:
    buffer = BufferBudget(100)
    buffer.add(30, deliverable=True)
    buffer.add(12)
    assert repr(buffer) == "<BufferBudget 42 of 100 bytes, 30 deliverable>"
