"""`Planning`: carries out what the planner decides, and derives what each partition does next.

Facts change, and `advance` derives what follows: nothing else moves a partition. Only saves wait,
and one task saves.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping

import anyio
import anyio.lowlevel

from feedapi_client.errors import FeedError, FencedError
from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import (
    Action,
    Drained,
    Fail,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import Position
from feedapi_client.notifications import (
    PartitionDrained,
    PartitionStarted,
    PartitionSuperseded,
    PartitionVanished,
)
from feedapi_client.protocol.page import passed_limit
from feedapi_client.protocol.text import names, shown
from feedapi_client.runtime.iteration import Iteration
from feedapi_client.runtime.loop import Wakeup, finish
from feedapi_client.runtime.partition import BufferBudget, Phase, RuntimePartition
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduling import Agenda
from feedapi_client.runtime.sharing import Sharing
from feedapi_client.runtime.topology import DiscoveryTimer

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Actions that are carried out before others get their turn. A first discovery may start 32,768
partitions."""
_ASKED = (Phase.DUE, Phase.LOOK)


class Planning:
    """The partitions of one session, and the planner's actions. For the tasks of its event loop."""

    def __init__(
        self,
        iteration: Iteration,
        planner: Planner,
        positions: Positions,
        agenda: Agenda,
        timer: DiscoveryTimer,
        budget: BufferBudget,
        share: Callable[[Planning], Sharing] | None = None,
    ) -> None:
        self.iteration = iteration
        self.planner = planner
        self.positions = positions
        self.agenda = agenda
        self.timer = timer
        self.partitions: dict[int, RuntimePartition] = {}
        self.losses = 0
        """How often a partition was stopped, or what was delivered of it given up."""
        self.overlaps = False
        """Whether batches of a partition are delivered while earlier ones of it are in flight."""
        self.watches = False
        """Whether partitions are only asked if they have an event, and are read by others."""
        self._budget = budget
        self._paused = iteration.settings.paused
        self._ready: deque[RuntimePartition] = deque()
        self._drained: list[int] = []
        self._todo: deque[Action] = deque()
        self._busy = False
        self._save_wanted = Wakeup()
        self._idle = anyio.Event()
        self.sharing = None if share is None else share(self)

    def __repr__(self) -> str:
        states = Counter(entry.state for entry in self.planner.entries.values())
        counts = ", ".join(f"{n} {state}" for state, n in states.items())
        return f"<Planning {counts}, {self.agenda!r} {self._budget!r}>"

    def partition(self, id: int) -> RuntimePartition:
        found = self.partitions.get(id)
        if found is None:
            iteration = self.iteration
            found = self.partitions[id] = RuntimePartition(
                self.planner.entries[id],
                budget=self._budget,
                limits=iteration.limits,
                retry=iteration.settings.retry,
                clock=iteration.clock,
                passed=passed_limit(len(self.planner.entries)),
            )
        return found

    # ------------------------------------------------------------------ what a partition does next

    def advance(self, p: RuntimePartition) -> None:
        """Derive what it does next, after each change of its facts. Again: nothing changes."""
        if p.end is not None and p.turn is None and p.entry.running:
            self._end(p)
        if self.phase(p) in _ASKED:
            self.agenda.put(p, p.until, p.place)
        else:
            self.agenda.drop(p)
        self.offer(p)

    def phase(self, p: RuntimePartition) -> Phase:
        iteration = self.iteration
        return p.phase(
            iteration.limits,
            paused=p.entry.id in self._paused,
            follow=iteration.settings.follow,
            watches=self.watches,
        )

    def _end(self, p: RuntimePartition) -> None:
        if (end := p.take_end()) is None:
            return
        self.perform(self.planner.ended(p.id, end.cursor, asked_closed=end.closed))
        p.note_caught_up()
        now, limits = self.iteration.clock(), self.iteration.limits
        if p.entry.state is State.CAUGHT_UP:
            p.ask_at(now + p.poll_delay)
            p.polled(limits)
        else:
            p.ask_at(now)  # one that was closed in the meantime is asked once more

    def ask(self, p: RuntimePartition, until: float = 0.0) -> None:
        p.ask_at(until)
        self.advance(p)

    def pauses_changed(self) -> None:
        """End the requests of what is paused now. What they brought is kept."""
        for p in self.partitions.values():
            if p.turn is not None and p.id in self._paused:
                p.turn.scope.cancel()
            self.advance(p)
        self._budget.look_again()
        self.iteration.wake()

    def drop_paused(self) -> bool:
        """Drop what paused partitions hold, whose room others need; whether they held anything."""
        if not self._paused.any:
            return False
        held = [p for p in self.partitions.values() if p.pending and p.id in self._paused]
        for p in held:
            p.drop_pending()
        return bool(held)

    # ------------------------------------------------------------------ what is ready

    def announce(self, p: RuntimePartition) -> None:
        p.announced = bool(p.pending)
        self.offer(p)

    def _is_deliverable(self, p: RuntimePartition) -> bool:
        """Whether the application may have a batch of the partition now.

        One that has successors by cursor transfer delivers one at a time: they wait until none is
        in flight (R9).
        """
        if not p.announced or p.id in self._paused:
            return False
        if not p.in_flight:
            return True
        return self.overlaps and not self.planner.graph.successors.get(p.id)

    def offer(self, p: RuntimePartition) -> None:
        if not p.queued and self._is_deliverable(p):
            p.queued = True
            self._ready.append(p)
            self.iteration.wake()

    def next_ready(
        self, fits: Callable[[RuntimePartition], bool | None] | None = None
    ) -> RuntimePartition | None:
        """Take the next partition that holds something for the application off the queue.

        None where it does not fit: it keeps its place. One that can't fit yet loses it.
        """
        while self._ready:
            p = self._ready[0]
            # The planner may have stopped it already, while the action waits for another's save.
            ready = self._is_deliverable(p) and p.started and p.entry.running
            fitting = fits(p) if ready and fits is not None else True
            if fitting is False:
                return None
            self._ready.popleft()
            p.queued = False
            if ready and fitting:
                return p
        return None

    # ------------------------------------------------------------------ the planner's actions

    @property
    def unsaved(self) -> dict[int, bool]:
        """The partitions whose saves are to come; True: the store has nothing of it yet."""
        unsaved: dict[int, bool] = {}
        for action in self._todo:
            if isinstance(action, Save):
                for id, position in action.positions.items():
                    unsaved[id] = unsaved.get(id, False) or position.replaces is None
        return unsaved

    @property
    def applying(self) -> bool:
        return bool(self._todo)

    def perform(self, actions: Iterable[Action]) -> None:
        self._todo.extend(actions)
        self.iteration.wake()  # also without actions: the planner may know more now
        if self._busy or not self._todo:
            return
        self._do_some()
        if self._todo:
            self._save_wanted.set()

    def _do_some(self) -> None:
        """Carry out the next actions that don't wait. Those that lead to others come here, too."""
        self._busy = True
        try:
            for _ in range(_AT_ONCE):
                if not self._todo or isinstance(self._todo[0], Save):
                    break
                self._do(self._todo.popleft())
        finally:
            self._busy = False

    async def carry_out(self) -> None:
        """Carry out what is left. For one task at a time; raises `StoreError`."""
        try:
            while self._todo:
                action = self._todo[0]
                if isinstance(action, Save):
                    await finish(self._save(action), hurry=self.positions.hurry_saves)
                else:
                    self._do_some()
                    await anyio.lowlevel.checkpoint()
        finally:
            self._idle.set()
            self._idle = anyio.Event()
            self.iteration.wake()

    async def run_saver(self) -> None:
        while True:
            await self.carry_out()
            await self._save_wanted.wait()

    async def carried_out(self) -> None:
        while self._todo:
            await self._idle.wait()

    async def _save(self, action: Save) -> None:
        try:
            await self.positions.save(action.positions)
        except FencedError as error:
            if self.sharing is None:
                raise
            log.info("%s: another instance was faster", error, extra={"feed": self.iteration.feed})
            self._todo.popleft()
            self._give_up(action.positions)
            self.sharing.suspect()
            return
        self._todo.popleft()
        self.planner.saved(action.positions)
        new = {id: p for id, p in action.positions.items() if id not in action.unchanged}
        self.iteration.decisions.saved(new)
        if self.iteration.listeners:
            for id, position in new.items():
                if position.status == "superseded":
                    self.iteration.listeners.tell(PartitionSuperseded(id))

    def _do(self, action: Action) -> None:
        match action:
            case Start(id, cursor):
                self._start(self.partition(id), cursor)
            case Stop(id):
                self._stop(id)
            case Drained(id, cursor):
                self._tell_drained(id, cursor)
            case Rediscover():
                self.timer.soon()
                if self.sharing is not None:
                    self.sharing.nudge()
            case Report(id, text):
                self.iteration.report(id, text)
            case Fail(id, error):
                self._park(self.partition(id), error)

    def _start(self, p: RuntimePartition, cursor: str) -> None:
        if not p.follows(cursor):
            if not p.began_without_position:  # else it was listed as a successor late (R9)
                self.iteration.report(
                    p.id,
                    "internal error: was to be read on from cursor "
                    f"{shown(p.read_cursor)}, which does not follow the stored cursor "
                    f"{shown(cursor)}. It begins again there: events may be repeated, none is "
                    "skipped. Please report it",
                )
            p.stop()
            self.lose_delivered(p.id)
        began = not p.started
        p.start(cursor)
        if began and self.iteration.listeners:
            self.iteration.listeners.tell(PartitionStarted(p.id))
        if began and self.iteration.iterating:
            self.iteration.decisions.started(p.id, cursor)
        self.advance(p)

    def _stop(self, id: int) -> None:
        self.losses += 1
        if (p := self.partitions.get(id)) is None:
            return
        if p.entry.state is State.VANISHED and self.iteration.listeners:
            self.iteration.listeners.tell(PartitionVanished(id))
        p.stop()
        self.advance(p)

    def _tell_drained(self, id: int, cursor: str) -> None:
        if self.planner.entries[id].state is not State.DRAINED:
            return  # its save was refused
        self.iteration.decisions.drained(id, cursor)
        self._drained.append(id)
        if self.iteration.listeners:
            self.iteration.listeners.tell(PartitionDrained(id))

    def take_drained(self) -> list[int]:
        drained, self._drained = self._drained, []
        return drained

    def _park(self, p: RuntimePartition, error: FeedError) -> None:
        p.trouble.show(error)
        if self.iteration.settings.on_error == "raise":
            self.iteration.fail(error)
        else:
            self.iteration.report(None, f"parked: {error}")

    def fail(self, p: RuntimePartition, error: FeedError) -> None:
        """Park a partition that can't go on and its descendants, or end the iteration (R18)."""
        p.trouble.show(error)
        self.perform([*self.planner.fail(p.id, error), Fail(p.id, error)])
        self.advance(p)

    # ------------------------------------------------------------------ what is lost to others

    def lose(self, p: RuntimePartition) -> None:
        """Stop a partition whose commit was refused: another instance reads it, or has done so."""
        assert self.sharing is not None
        self.lose_delivered(p.id)
        self.perform(self.planner.refused([p.id]))
        self.sharing.suspect()

    def lose_delivered(self, partition: int) -> None:
        if partition in self.partitions:
            self.partitions[partition].lose()
            self.losses += 1
            self.iteration.wake()

    def _give_up(self, partitions: Collection[int]) -> None:
        """Give up what is in memory: what is stored is loaded again, and may be older."""
        self.perform(self.planner.refused(partitions))
        for id in self.partitions.keys() & set(partitions):
            self.lose_delivered(id)

    def give_up_overtaken(self, stored: Mapping[int, Position], began: int) -> bool:
        """Give up partitions at rest whose stored positions somebody else has advanced.

        That is an operator, where their lease is held. `began` is the moment of the load. Return
        whether there are any: the positions have to be loaded again.
        """
        overtaken = {
            id
            for id in self.planner.overtaken(stored, began)
            if id not in self.partitions or self.partitions[id].is_settled
        }
        if overtaken and not self.applying:
            text = f"the stored cursor of {names(overtaken)} was changed: takes it"
            self.iteration.report(None, text)
            self._give_up(overtaken)
            return True
        return False

    def leave_at_end(self, p: RuntimePartition) -> None:
        """Ask an open partition no more whose end was seen, although its requests fail (R6)."""
        p.trouble.recovered()
        p.trouble.refused = False
        self.perform(self.planner.ended(p.id, p.read_cursor, asked_closed=False))
        self.advance(p)
