"""Bugs that are planted are found. Here some of them; the command of `mutants` takes all."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from feedapi_client.lineage.planner import Planner
from tests.simulation import (
    histories,
    mutants,
    planted_ends,
    planted_keys,
    planted_planner,
    planted_runtime,
    planted_sharing,
    planted_stores,
)
from tests.simulation.mutants import MUTANTS, SEEDS, Found, Mutant, main, table, try_mutant
from tests.simulation.scenario import Scenario
from tests.simulation.simulation import run

LATE = {
    "children_that_are_listed_late": 60.0,
    "events_on_an_open_stream": 30.0,
    "new_token": 30.0,
}
"""Histories that have to be over after so many seconds, and why `mutants.within` finds bugs."""

QUICK = [
    "children_at_once",
    "superseded_is_not_saved",
    "revision_is_not_advanced",
    "lineage_is_ignored",
    "pauses_by_the_time_of_day",
    "batch_loses_an_event",
    "a_refusal_leads_to_no_discovery",
    "store_saves_a_part",
    "one_empty_answer_is_the_end",
    "other_keys_are_skipped",
    "a_refused_save_leaves_its_partition",
]
"""Bugs that are found at once."""

_SEEDS_WITH_INSTANCES = 150
RARE = {
    "an_old_load_overwrites_a_newer_position",
    "epochs_are_not_compared",
    "an_occupied_place_drops_an_event",
    "everything_is_forgotten_with_a_save",
}
"""Bugs that take seconds to be found: the command looks for them."""

BY_KEY = [
    mutant.name for mutant in MUTANTS if mutant.trial in (mutants.by_key, mutants.shared_by_key)
]
"""Bugs by key that the command with ``--by-key`` has to find within some hundred seeds."""
WITH_INSTANCES = [mutant.name for mutant in MUTANTS if mutant.trial is mutants.shared]
"""Bugs of sharing that the command with ``--instances 2..4`` has to find within fifty seeds."""

SOON = [
    "all_partitions_are_read",
    "children_do_not_wait_for_the_commit",
    "child_from_its_parents_cursor",
    "drained_when_delivered",
    "ancestors_are_superseded_later",
    "a_save_is_cancelled_in_the_middle",
    "skipped_ancestors_are_forgotten",
    "unknown_ancestors_are_ignored",
    "unknown_ancestors_are_not_reported",
    "last_cursor_is_used_with_a_selection",
    "no_rediscovery_after_drained",
    "new_partitions_from_the_last_event",
    "two_batches_in_flight",
    "a_failed_commit_counts_as_made",
    "fencing_is_swallowed",
    "a_slot_is_never_returned",
    "a_silent_page_is_the_end",
    "the_buffer_limit_drops",
    "commit_before_effects",
    "unread_ancestors_are_not_superseded",
    "ancestors_of_an_ambiguous_successor_are_taken",
    "children_wait_without_order",
    "empty_answers_are_not_counted",
    "the_time_of_an_end_does_not_count",
    "an_edge_to_partition_zero_is_not_presumed",
    "saves_are_not_fenced",
    "an_outdated_position_is_kept_after_a_claim",
    "the_dead_keep_their_leases",
    "a_hand_over_does_not_release",
    "a_claim_waits_for_nobody",
]
"""Bugs that one of the first seeds finds."""


def planted(module: object) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__  # type: ignore[attr-defined]
        and not name.startswith("_")
    ]


def own_histories() -> list[Callable[[int], Scenario]]:
    return [
        value
        for value in vars(histories).values()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["seed"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SOON])
def test_a_planted_bug_is_found(name: str) -> None:
    assert try_mutant(name, 100).seed is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_INSTANCES if name not in RARE])
def test_some_seeds_of_shared_instances_find_a_planted_bug_of_sharing(name: str) -> None:
    found = try_mutant(name, _SEEDS_WITH_INSTANCES)
    assert found.seed is not None, found
    assert found.rule != "error", found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_KEY if name not in RARE])
def test_some_seeds_by_key_find_a_planted_bug_of_handling_by_key(name: str) -> None:
    found = try_mutant(name, 300)
    assert found.seed is not None, found


def test_nine_bugs_of_sharing_are_found_by_the_usual_histories_of_instances() -> None:
    assert len(WITH_INSTANCES) == 9


@pytest.mark.slow
@pytest.mark.parametrize("history", own_histories(), ids=lambda history: history.__name__)
def test_without_a_planted_bug_a_history_of_its_own_finds_nothing(
    history: Callable[[int], Scenario],
) -> None:
    for seed in range(2):
        outcome = run(history(seed))
        assert outcome.failure is None, f"seed {seed}: {outcome.text}"
        assert outcome.seconds <= LATE.get(history.__name__, float("inf"))


def test_a_bug_that_does_not_fit_the_library_any_more_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outdated(patch: pytest.MonkeyPatch) -> None:
        """Uses an attribute that was renamed."""
        patch.setattr(Planner, "checkpoint", lambda self, *args, **how: self.renamed)

    monkeypatch.setattr(mutants, "MUTANTS", (Mutant(outdated),))
    found = try_mutant("outdated", 3)
    assert found.seed is None
    assert "AttributeError" in found.text


def test_every_planted_bug_is_a_mutant() -> None:
    modules = (
        planted_planner,
        planted_runtime,
        planted_ends,
        planted_sharing,
        planted_keys,
        planted_stores,
    )
    everything = [name for module in modules for name in planted(module)]
    assert [mutant.name for mutant in MUTANTS] == everything
    assert set(everything) > RARE
    assert len([mutant for mutant in MUTANTS if not mutant.equivalent]) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_an_equivalent_mutant_says_why(mutant: Mutant) -> None:
    text = mutant.plant.__doc__ or ""
    assert mutant.text
    assert ("Equivalent" in text) == mutant.equivalent


@pytest.mark.slow
def test_the_command_prints_which_seed_finds_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["revision_is_not_advanced", "--seeds", "3"]) == 0
    shown = capsys.readouterr().out
    assert "revision_is_not_advanced" in shown
    assert "FencedError" in shown
    assert "1 of 1 mutants found" in shown


@pytest.mark.slow
def test_the_command_fails_for_a_bug_that_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer_is_not_atomic", "--seeds", "1"]) == 1
    assert "0 of 1 mutants found" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["no_such_mutant"])


def test_the_table_has_a_row_for_each_mutant() -> None:
    results = [Found("a", 5, 1.0, 4, "order", "event 1"), Found("b", SEEDS, 2.0)]
    assert table(results).row_count == 2
