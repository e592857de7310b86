"""Bugs of the planner: which partition is read from where, and what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Entry, Save, State
from feedapi_client.model import LAST, Partition, Position, Status
from feedapi_client.protocol.page import Outcome, PageReader
from feedapi_client.runtime.positions import Positions

Decided = dict[int, tuple[str, Status]]


def children_at_once(patch: pytest.MonkeyPatch) -> None:
    """Children are read before their parent is drained."""
    patch.setattr(Planner, "_blockers", lambda *args: ())


def drained_when_delivered(patch: pytest.MonkeyPatch) -> None:
    """A parent is drained once its last batch is delivered, and not once it is committed."""
    ended = Planner.ended

    def drained(
        self: Planner, partition: int, cursor: str, *, asked_closed: bool, shown: bool = False
    ) -> list[Action]:
        self._in_flight.discard(partition)
        entry = self.entries[partition]
        early: list[Action] = []
        if entry.running and self.is_closed(partition) and asked_closed:
            entry.position = self.checkpoint(partition, cursor)
            early = [Save({partition: entry.position})]
        return early + ended(self, partition, cursor, asked_closed=asked_closed)

    patch.setattr(Planner, "ended", drained)


def children_do_not_wait_for_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A child starts once its parent was read to its end, whatever is committed of it."""
    undrained, ended = Planner._is_undrained, Planner.ended

    def unread(self: Planner, partition: int) -> bool:
        known = self.entries.get(partition)
        return undrained(self, partition) and (known is None or known.end is None)

    def at_the_end(self: Planner, partition: int, cursor: str, **how: Any) -> list[Action]:
        actions = ended(self, partition, cursor, **how)
        return actions + self._told(self.graph.children.get(partition, ()))

    patch.setattr(Planner, "_is_undrained", unread)
    patch.setattr(Planner, "ended", at_the_end)


def successor_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """A successor begins at the first event, not at its ancestor's cursor."""
    _inherit(patch, lambda self, successor, saved: {**saved, successor.id: ("_first", "open")})


def _inherit(
    patch: pytest.MonkeyPatch,
    change: Callable[[Planner, Partition, Decided], Decided],
) -> None:
    """Change what a transfer saves."""
    inherited = Planner._inherited

    def changed(self: Planner, successor: Partition, *args: Any) -> Decided:
        saved = inherited(self, successor, *args)
        return change(self, successor, saved) if saved else saved

    patch.setattr(Planner, "_inherited", changed)


def unread_ancestors_are_not_superseded(patch: pytest.MonkeyPatch) -> None:
    """A successor that begins at the first event leaves its ancestors as they are."""

    def alone(self: Planner, successor: Partition, saved: Decided) -> Decided:
        own = saved[successor.id]
        return {successor.id: own} if own[0] == "_first" else saved

    _inherit(patch, alone)


def ancestors_of_an_ambiguous_successor_are_taken(patch: pytest.MonkeyPatch) -> None:
    """Another successor takes the cursor of one of them, and the next start skips events."""
    check = Planner._check_unambiguous

    def careless(self: Planner, successor: Partition, live: Any, disputed: Any) -> None:
        check(self, successor, live, {id: to for id, to in disputed.items() if to == successor.id})

    patch.setattr(Planner, "_check_unambiguous", careless)


def child_from_its_parents_cursor(patch: pytest.MonkeyPatch) -> None:
    """A child begins at its parent's last cursor, not at its own first event."""

    def at_the_parents(self: Planner, entry: Entry) -> None:
        parent = self.entries.get(self.graph.partitions[entry.id].starts_after or 0)
        if parent is not None and parent.state is State.DRAINED and entry.position is None:
            entry.position = Position(parent.cursor, revision=0)

    _before_a_start(patch, at_the_parents)


def _before_a_start(patch: pytest.MonkeyPatch, change: Callable[[Planner, Entry], None]) -> None:
    """Change what is known of a partition before it is started."""
    enter = Planner._enter

    def changed(self: Planner, entry: Entry, because: Any) -> None:
        if entry.state is State.READING:
            change(self, entry)
        enter(self, entry, because)

    patch.setattr(Planner, "_enter", changed)


def superseded_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """What a transfer saves leaves out that the ancestors are superseded."""
    save = Positions.save

    async def saving(self: Positions, positions: Any, transaction: Any = None, *_: Any) -> None:
        kept = {id: p for id, p in positions.items() if p.status != "superseded"}
        await save(self, kept, transaction)

    patch.setattr(Positions, "save", saving)


def transfer_is_not_atomic(patch: pytest.MonkeyPatch) -> None:
    """A transfer saves the superseded ancestors first, and then each successor by itself.

    Equivalent: whoever finds such a half of a transfer makes the other half. A successor without a
    position takes the cursor of a superseded ancestor, which nobody moves any more, and so do its
    siblings. The other order, `ancestors_are_superseded_later`, is not equivalent.
    """
    save = Positions.save

    async def saving(self: Positions, positions: Any, transaction: Any = None, *_: Any) -> None:
        for id, position in sorted(positions.items(), key=lambda p: p[1].status != "superseded"):
            await save(self, {id: position}, transaction)

    patch.setattr(Positions, "save", saving)


def ancestors_are_superseded_later(patch: pytest.MonkeyPatch) -> None:
    """A transfer saves the successors first, and the superseded ancestors in a second save."""
    save = Positions.save

    async def saving(self: Positions, positions: Any, transaction: Any = None, *_: Any) -> None:
        superseded = {id: p for id, p in positions.items() if p.status == "superseded"}
        others = {id: p for id, p in positions.items() if p.status != "superseded"}
        for part in (others, superseded):
            if part:
                await save(self, part, transaction)

    patch.setattr(Positions, "save", saving)


def transfer_with_a_batch_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A cursor is transferred while its partition has a batch in flight."""
    patch.setattr(Planner, "_with_siblings", lambda *args: set())


def skipped_ancestors_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The ancestors that a transfer skips are not superseded: a late discovery revives them."""

    def known(self: Planner, successor: Partition, saved: Decided) -> Decided:
        if not any(self._position_of(a) for a in successor.cursor_from):
            return saved
        return {id: p for id, p in saved.items() if id == successor.id or self._position_of(id)}

    _inherit(patch, known)
    patch.setattr(Planner, "_is_outlived", lambda *args: False)


def unknown_ancestors_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A successor whose ancestors are unknown reads everything again without a word."""
    patch.setattr(Planner, "_vanished", lambda *args: {})


def unknown_ancestors_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    """A successor of unknown ancestors begins at its first event without a word."""
    patch.setattr(Planner, "_report_unknown_ancestors", lambda self, successor: None)


def revision_is_not_advanced(patch: pytest.MonkeyPatch) -> None:
    """A commit saves the revision that is stored already."""
    checkpoint = Planner.checkpoint

    def same(self: Planner, *args: Any, **how: Any) -> Position:
        position = checkpoint(self, *args, **how)
        return Position(position.cursor, position.status, max(1, position.revision - 1))

    patch.setattr(Planner, "checkpoint", same)


def an_empty_page_is_the_end(patch: pytest.MonkeyPatch) -> None:
    """A closed partition is drained at the first empty page, whatever `lastCursor` says."""
    patch.setattr(PageReader, "_end", lambda self: Outcome.END)
    patch.setattr(Planner, "_last_cursor", lambda self, partition: None)


def an_answer_from_before_the_close_is_the_end(patch: pytest.MonkeyPatch) -> None:
    """A partition is drained by an empty answer that was asked for before it was closed."""
    ended = Planner.ended

    def always(
        self: Planner, partition: int, cursor: str, *, asked_closed: bool, shown: bool = False
    ) -> list[Action]:
        return ended(self, partition, cursor, asked_closed=True)

    patch.setattr(Planner, "ended", always)


def last_cursor_is_used_with_a_selection(patch: pytest.MonkeyPatch) -> None:
    """A cursor of a selection that equals `lastCursor` counts as the end."""
    _create_planner_with(patch, selects_events=False)


def lineage_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The edges that the application names are not added to what is discovered."""
    _create_planner_with(patch, lineage=None)


def all_partitions_are_read(patch: pytest.MonkeyPatch) -> None:
    """`partitions` is ignored."""
    _create_planner_with(patch, partitions=None)


def children_wait_without_order(patch: pytest.MonkeyPatch) -> None:
    """With ``ordered=False`` children wait for their parents, too."""
    _create_planner_with(patch, ordered=True)


def _create_planner_with(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    create = Planner.__init__

    def creating(self: Planner, **options: Any) -> None:
        create(self, **{**options, **changed})

    patch.setattr(Planner, "__init__", creating)


def no_rediscovery_after_drained(patch: pytest.MonkeyPatch) -> None:
    """Nothing is discovered when a partition was drained: its children come with the interval."""
    enter = Planner._enter

    def quiet(self: Planner, entry: Entry, because: Any) -> None:
        before = self._rediscover
        enter(self, entry, because)
        self._rediscover = before

    patch.setattr(Planner, "_enter", quiet)


def new_partitions_from_the_last_event(patch: pytest.MonkeyPatch) -> None:
    """With ``start="last"`` a partition that appears later is begun at its end, too."""

    def at_the_end(self: Planner, entry: Entry) -> None:
        inherits = self.graph.partitions[entry.id].cursor_from
        if self.start == "last" and entry.position is None and not inherits:
            entry.position = Position(LAST, revision=0)

    _before_a_start(patch, at_the_end)


def first_discovery_again_and_again(patch: pytest.MonkeyPatch) -> None:
    """A partition that was listed again is read from its first event."""
    load = Planner.load

    def without_the_drained(self: Planner, positions: Any) -> None:
        load(self, {id: p for id, p in positions.items() if p.status != "drained"})

    patch.setattr(Planner, "load", without_the_drained)
