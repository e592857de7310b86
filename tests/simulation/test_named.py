"""Histories that once led to lost, repeated or stuck events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import planted, planted_planner, planted_runtime
from tests.simulation.backends import BACKENDS
from tests.simulation.named import NAMED, named
from tests.simulation.simulation import run

SEEDS = 3
LARGE = {"crowded_out_after_a_failure", "chosen_partition_is_gone"}
"""Histories that take longer than the others. The second one starts a thousand processes."""
REFUSED = "ancestors_unknown"
"""The only history that no consumer can read exactly once: it ends with an error."""
NOTHING_READ = {"chosen_partition_is_gone_at_the_first_list"}
"""Histories in which a consumer rightly reads nothing, and ends with an error."""
USUAL = sorted(set(NAMED) - {REFUSED, *LARGE})
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(LARGE)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*USUAL, *SLOW])
def test_a_named_history_is_applied_exactly_once(name: str, backend: Any) -> None:
    for seed in range(1 if name in LARGE else SEEDS):
        outcome = run(named(name, seed, backend))
        assert outcome.failure is None, f"seed {seed}: {outcome.text}"
        assert outcome.effects >= (0 if name in NOTHING_READ else outcome.published / 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_r09_a_successor_of_unknown_ancestors_is_an_error_and_not_read_again(backend: Any) -> None:
    outcome = run(named(REFUSED, 0, backend))
    assert outcome.failure == "error"
    assert "LostPartitionError" in outcome.text
    assert outcome.effects == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (planted_runtime.actions_are_lost, "cancelled_while_the_planner_acts"),
        (planted_planner.last_cursor_is_used_with_a_selection, "selection_with_cursors_of_its_own"),
        (planted_planner.an_empty_page_is_the_end, "closed_partition_at_a_lagging_replica"),
        (planted_planner.children_at_once, "split_of_a_waiting_partition"),
        (planted_planner.unknown_ancestors_are_not_reported, "begun_and_split_while_down"),
        (planted_planner.unread_ancestors_are_not_superseded, "second_consumer_after_a_split"),
        (planted_planner.unread_ancestors_are_not_superseded, "first_commit_after_a_split"),
    ],
)
def test_a_named_history_finds_its_bug(
    plant: planted.Plant, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(run(named(name, seed)).failure for seed in range(20))


def test_r09_the_error_of_unknown_ancestors_stands_for_a_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted_planner.unknown_ancestors_are_ignored(monkeypatch)
    outcome = run(named(REFUSED))
    assert outcome.failure == "exactly-once"
