"""Bugs of stores, and of applications that use them wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from feedapi_client import model
from feedapi_client.model import Batch
from feedapi_client.stores import sqlite
from tests.simulation.process import Process
from tests.simulation.store import Effect, SimulatedDatabase


def commit_before_effects(patch: pytest.MonkeyPatch) -> None:
    """The application commits the cursor in a transaction of its own, before its effects."""

    async def handle(self: Process, batch: Batch) -> None:
        await batch.commit()
        await self._work()
        effects = [self._effect(batch.partition, event) for event in batch.events]
        self.session.apply_at_once(effects)

    patch.setattr(Process, "_handle", handle)


def effects_before_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """The application makes its effects durable before it saves the cursor in a transaction."""

    async def handle(self: Process, batch: Batch) -> None:
        effects = [self._effect(batch.partition, event) for event in batch.events]
        self.session.apply_at_once(effects)
        await self._work()
        await batch.commit()

    patch.setattr(Process, "_handle", handle)


def store_loses_a_position(patch: pytest.MonkeyPatch) -> None:
    """The database keeps the effects and loses some cursors without a word."""
    apply = SimulatedDatabase.apply

    def losing(self: SimulatedDatabase, changes: Any, effects: list[Effect]) -> None:
        lost = self._random.random() < 0.1 and bool(effects)
        apply(self, {} if lost else changes, effects)

    patch.setattr(SimulatedDatabase, "apply", losing)


def store_saves_a_part(patch: pytest.MonkeyPatch) -> None:
    """Of several positions the store saves the first one only."""
    apply = SimulatedDatabase.apply

    def first(self: SimulatedDatabase, changes: Any, effects: list[Effect]) -> None:
        apply(self, dict(list(changes.items())[:1]), effects)

    patch.setattr(SimulatedDatabase, "apply", first)


def store_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    """The store saves a position whatever revision it holds."""
    patch.setattr(SimulatedDatabase, "check", lambda *args: None)


def revisions_are_counted(patch: pytest.MonkeyPatch) -> None:
    """Each save of a position has the next revision, also after the database went back."""
    patch.setattr(model, "draw_step", lambda: 1)


def store_forgets_the_status(patch: pytest.MonkeyPatch) -> None:
    """The store saves each position as an open one."""
    apply = SimulatedDatabase.apply

    def as_open(self: SimulatedDatabase, changes: Any, effects: list[Effect]) -> None:
        changes = {key: replace(position, status="open") for key, position in changes.items()}
        apply(self, changes, effects)

    patch.setattr(SimulatedDatabase, "apply", as_open)


# ---------------------------------------------------------------------- the shipped stores


def sqlite_store_saves_beside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """SQLiteCursorStore ignores the caller's transaction, and saves on a connection of its own."""
    save = sqlite.SQLiteCursorStore.save

    async def beside(self: Any, feed: Any, positions: Any, *, transaction: Any = None) -> None:
        if transaction is not None:
            transaction.commit()
        await save(self, feed, positions)

    patch.setattr(sqlite.SQLiteCursorStore, "save", beside)
