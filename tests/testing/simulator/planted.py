"""Bugs that are planted to see whether the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.lineage import planner, transfer
from feedapi_client.lineage.actions import Save
from feedapi_client.model import Batch, Position
from feedapi_client.protocol.page import Outcome, PageReader
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.scheduler import Scheduler
from feedapi_client.testing.simulator.__main__ import replay_command
from feedapi_client.testing.simulator.life import Process
from feedapi_client.testing.simulator.scenario import generate
from feedapi_client.testing.simulator.simulation import run
from feedapi_client.testing.simulator.store import Database, Effect

Plant = Callable[[pytest.MonkeyPatch], None]


def found_by(seeds: range, backend: Any = "asyncio") -> tuple[int, str] | None:
    """The first seed that fails, and the rule that it violates."""
    for seed in seeds:
        outcome = run(generate(seed, backend))
        if outcome.failure is not None:
            return seed, outcome.failure
    return None


def commit_before_effects(patch: pytest.MonkeyPatch) -> None:
    """The application commits the cursor in a transaction of its own, before its effects."""

    async def handle(self: Process, batch: Batch) -> None:
        await batch.commit()
        await self._work()
        effects = [Effect(e.json()["entity"], e.json()["n"], batch.partition) for e in batch.events]
        self.session.apply_at_once(effects)

    patch.setattr(Process, "_handle", handle)


def store_loses_a_position(patch: pytest.MonkeyPatch) -> None:
    """The database keeps the effects and loses some cursors without a word."""
    apply = Database.apply

    def losing(self: Database, changes: Any, effects: list[Effect]) -> None:
        lost = self._random.random() < 0.1 and bool(effects)
        apply(self, {} if lost else changes, effects)

    patch.setattr(Database, "apply", losing)


def batch_loses_an_event(patch: pytest.MonkeyPatch) -> None:
    """A batch that is joined from several checkpoints loses its first event."""
    take = Delivery._take

    async def losing(self: Delivery, partition: Any) -> Batch:
        batch = await take(self, partition)
        if len(batch.events) < 3:
            return batch
        return Batch(batch.partition, batch.events[1:], batch.cursor, batch._commit)

    patch.setattr(Delivery, "_take", losing)


def successor_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """A successor begins at the first event, not at its ancestor's cursor."""
    transferred = planner.transferred_positions

    def from_the_start(successor: Any, *args: Any, **options: Any) -> dict[int, Position]:
        saved = transferred(successor, *args, **options)
        return {**saved, successor.id: Position("_first")} if saved else saved

    patch.setattr(planner, "transferred_positions", from_the_start)


def children_at_once(patch: pytest.MonkeyPatch) -> None:
    """Children are read before their parent is drained."""
    patch.setattr(planner, "blockers", lambda *args: ())


def a_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """The iterating task is not woken when something is ready for it."""

    def enqueue(self: Driver, partition: Any) -> None:
        if partition.deliverable and not partition.queued:
            partition.queue()
            self._ready.append(partition)

    patch.setattr(Driver, "enqueue", enqueue)


def transfer_with_a_batch_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A cursor is transferred while its partition has a batch in flight."""
    patch.setattr(planner, "unreleased_ancestors", lambda *args: set())


def failing_jobs_come_last(patch: pytest.MonkeyPatch) -> None:
    """A partition that failed waits until no healthy one is due."""

    def take(self: Scheduler[Any]) -> tuple[int, Any] | None:
        for queue in (0, 1):
            if self._drop_moved(queue) and (queue == 0 or self._failing_running < self._share):
                _, job = self._due[queue].popleft()
                self.forget(job)
                return queue, job
        return None

    patch.setattr(Scheduler, "_take", take)


def command(seed: int, backend: str) -> str:
    """The command that repeats a seed."""
    return replay_command(seed, backend)


# ---------------------------------------------------------------------- for the named histories


def actions_are_lost(patch: pytest.MonkeyPatch) -> None:
    """An action of the planner that is interrupted is not carried out by the next caller."""

    async def apply(self: Driver, actions: Any = ()) -> None:
        self._actions.extend(actions)
        async with self._lock:
            while self._actions:
                action = self._actions.popleft()
                if isinstance(action, Save):
                    await self.positions.save(action.positions)
                else:
                    self._carry_out(action)

    patch.setattr(Driver, "apply", apply)


def last_cursor_is_used_with_a_selection(patch: pytest.MonkeyPatch) -> None:
    """A cursor of a selection that equals `lastCursor` counts as the end."""
    create = planner.Planner.__init__

    def ignoring(self: planner.Planner, **options: Any) -> None:
        create(self, **{**options, "selects_events": False})

    patch.setattr(planner.Planner, "__init__", ignoring)


def an_empty_page_is_the_end(patch: pytest.MonkeyPatch) -> None:
    """A closed partition is drained at the first empty page, whatever `lastCursor` says."""
    patch.setattr(PageReader, "_end", lambda self: Outcome.END)
    patch.setattr(planner.Planner, "_is_end", lambda self, entry, cursor: self.is_closed(entry.id))


def unknown_ancestors_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A successor whose ancestors are unknown reads everything again without a word."""
    patch.setattr(transfer, "_check_nothing_lost", lambda *args: None)
