"""`SlotWatch`: who gives a slot back, and when (R14)."""

from __future__ import annotations

import pytest
from feedapi_client.runtime.scheduler import Waiting
from feedapi_client.runtime.slots import Slot, SlotWatch

pytestmark = pytest.mark.anyio

TIMEOUT = 8.0


class Slots:
    """A watch of some slots, and how many wait for one."""

    def __init__(self, count: int) -> None:
        self.waiting = Waiting(0, 0)
        self.watch = SlotWatch(TIMEOUT, count, lambda: self.waiting)
        self.slots: list[Slot] = []

    def hold(self, doublings: int = 0, *, failing: bool = False) -> Slot:
        slot = Slot(doublings, failing=failing)
        self.watch.hold(slot)
        self.slots.append(slot)
        return slot

    def given_back(self) -> list[bool]:
        return [slot.given_back for slot in self.slots]


async def test_r14_nobody_gives_a_slot_back_while_nobody_waits() -> None:
    slots = Slots(1)
    slots.hold()
    slots.watch.look(1000.0)
    assert slots.given_back() == [False]


async def test_r14_as_many_as_wait_give_their_slot_back_the_oldest_first() -> None:
    slots = Slots(3)
    for _ in range(3):
        slots.hold()
    slots.waiting = Waiting(2, 0)
    slots.watch.look(TIMEOUT)
    assert slots.given_back() == [True, True, False]
    slots.watch.look(TIMEOUT)
    assert slots.given_back() == [True, True, False], "two are about to be free already"


async def test_r14_one_that_was_too_slow_before_has_twice_the_time() -> None:
    slots = Slots(2)
    slots.hold(doublings=1)
    slots.waiting = Waiting(1, 0)
    slots.watch.look(1.9 * TIMEOUT)
    assert slots.given_back() == [False]
    slots.watch.look(0.1 * TIMEOUT)
    assert slots.given_back() == [True]


async def test_r14_the_failing_ones_make_room_for_each_other() -> None:
    slots = Slots(2)
    slots.hold()
    slots.hold(failing=True)
    slots.waiting = Waiting(0, 5)
    slots.watch.look(TIMEOUT)
    assert slots.given_back() == [False, True]


async def test_r14_the_more_wait_the_shorter_all_may_be_silent() -> None:
    slots = Slots(2)
    slots.hold()
    slots.hold()
    slots.waiting = Waiting(14, 0)
    slots.watch.look(TIMEOUT * 2 / 16)
    assert slots.given_back() == [True, True]


async def test_r14_but_not_while_others_are_answered() -> None:
    slots = Slots(2)
    slots.hold()
    other = slots.hold()
    slots.waiting = Waiting(94, 0)
    for _ in range(8):
        slots.watch.brought(other)
        slots.watch.look(TIMEOUT / 32)
    assert slots.given_back() == [False, False]


async def test_r14_and_not_those_that_wait_for_the_application() -> None:
    slots = Slots(1)
    slots.hold().waits_for_room = True
    slots.waiting = Waiting(99, 0)
    slots.watch.look(TIMEOUT / 2)
    assert slots.given_back() == [False]
    slots.watch.look(TIMEOUT / 2)
    assert slots.given_back() == [True], "they have the whole time"
