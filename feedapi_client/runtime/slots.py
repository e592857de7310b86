"""How long a request keeps its slot while other partitions wait for one (R14).

A request that hangs, a body that trickles and a stream without an end look alike from here: they
hold a slot. Whoever has held one for `Limits.slot_timeout` gives it back when others wait.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from feedapi_client.runtime.loop_clock import Clock, loop_clock
from feedapi_client.runtime.scheduler import Waiting
from feedapi_client.runtime.wakeup import Wakeup

HELD_OPEN_SECONDS = 1.0
"""A streamed response that took longer was held open by the publisher: no gateway answered it."""
MAX_DOUBLINGS = 6
"""A partition may hold a slot for at most `slot_timeout` times two to the power of this."""
_TICKS = 4
"""Looks at all slots within the shortest time that counts."""
_SHORTEST = 20
"""No request is ended after less than `slot_timeout` divided by this."""
_ANSWERS = 8
"""No request is ended before others of late took so many times as long."""
_FORGET = 0.99
"""How much of the longest time to an answer is still remembered after the next answer."""


class Slot:
    """A slot that one request holds.

    Arguments:
        doublings: how often the time that it may be held is doubled.
        failing: whether it is one of those that failing partitions share.
        clock: the clock of the event loop.
    """

    __slots__ = (
        "_clock",
        "answering",
        "began",
        "brought",
        "doublings",
        "failing",
        "given_back",
        "held",
        "restarted",
        "scope",
        "seen",
        "silence",
        "stopped",
        "waits_for_room",
    )

    def __init__(
        self, doublings: int = 0, *, failing: bool = False, clock: Clock | None = None
    ) -> None:
        self.doublings = doublings
        self.failing = failing
        self.scope = anyio.CancelScope()
        """To be entered by the request. It is cancelled when others need the slot, and when the
        partition is stopped. One scope for both takes less time than two."""
        self.held = 0.0
        """Seconds, not counting those in which the event loop did not run."""
        self.answering = False
        """The response has begun."""
        self.brought = False
        """The request has brought a checkpoint."""
        self.waits_for_room = False
        """The request waits for the application, not for the publisher."""
        self.given_back = False
        self.stopped = False
        """The request's partition was stopped: its result is not to be looked at."""
        self.restarted = False
        """The watchdog has ended the request: it showed no sign of life."""
        self._clock = clock or loop_clock()
        self.began = self.seen = self._clock()
        """When the request began, and when it showed the last sign of life."""
        self.silence = 0.0
        """For how many seconds the response may be silent: a stream ends itself after them."""

    @property
    def sound(self) -> bool:
        """Whether the response has brought a checkpoint, or is held open until there is news."""
        return self.brought or (self.answering and self.silence > 0)

    def answered(self, now: float, silence: float) -> None:
        """The response has begun."""
        self.answering = True
        self.seen = now
        self.silence = silence

    @property
    def age(self) -> float:
        """Seconds since the request began."""
        return self._clock() - self.began

    def give_back(self) -> None:
        """End the request."""
        self.given_back = True
        self.scope.cancel()


class SlotWatch:
    """Looks at the slots that are held, and takes some back while others wait.

    Time is counted in looks, not by deadlines: a handler that blocks the event loop for seconds
    must not end requests whose answers wait in the sockets.

    Arguments:
        timeout: `Limits.slot_timeout`.
        slots: how many there are.
        waiting: who waits at the moment.
    """

    def __init__(self, timeout: float, slots: int, waiting: Callable[[], Waiting]) -> None:
        self._timeout = timeout
        self._slots = slots
        self._waiting = waiting
        self._held: dict[Slot, None] = {}  # the oldest first
        self._quiet = 0.0
        self._slowest = 0.0

    def __repr__(self) -> str:
        return f"<SlotWatch of {len(self._held)} slots held, quiet for {self._quiet:.1f} s>"

    @property
    def answering(self) -> int:
        """How many requests under way are being answered."""
        return sum(slot.answering for slot in self._held)

    def hold(self, slot: Slot) -> None:
        """Note that a request has begun."""
        self._held[slot] = None

    def release(self, slot: Slot) -> None:
        """Note that the request has ended."""
        del self._held[slot]
        if not slot.given_back:
            self._quiet = 0.0

    def brought(self, slot: Slot) -> None:
        """The request has brought a checkpoint."""
        self._quiet = 0.0
        if not slot.brought:
            slot.brought = True
            self._slowest = max(slot.age, self._slowest * _FORGET)

    async def run(self) -> None:
        """Look at the slots until cancelled."""
        ticks = Wakeup()
        while True:
            pause = self._shortest() / _TICKS
            await ticks.wait(pause)
            self.look(pause)

    def look(self, seconds: float) -> None:
        """Count the seconds since the last look, and take back slots if others need them."""
        self._quiet += seconds
        for slot in self._held:
            slot.held += seconds
        if not self._held:
            return
        some, failing = self._waiting()
        if not some and not failing:
            return
        shortest = self._shortest()
        for slot in list(self._held):
            if not slot.given_back and not self._over(slot, shortest):
                continue
            if some:
                some -= 1
            elif failing and slot.failing:
                failing -= 1
            else:
                continue
            if not slot.given_back:
                slot.give_back()

    def _over(self, slot: Slot, shortest: float) -> bool:
        """Whether a slot was held for long enough."""
        if slot.held >= self._timeout * 2**slot.doublings:
            return True
        silent = not slot.brought and not slot.waits_for_room and not slot.doublings
        return silent and self._quiet >= shortest and slot.held >= shortest

    def _shortest(self) -> float:
        """How long a first request may be silent while all others are silent too.

        The more wait the shorter: a round through all of them takes a few times `timeout`, and
        only with the logarithm of their number more.
        """
        waiting = self._waiting().any
        fair = self._timeout * self._slots / (self._slots + waiting)
        return min(self._timeout, max(fair, self._timeout / _SHORTEST, _ANSWERS * self._slowest))
