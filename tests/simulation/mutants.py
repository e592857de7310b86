"""``python -m tests.simulation.mutants``: plant bugs, and see whether they are found.

::

    python -m tests.simulation.mutants                        # all of them
    python -m tests.simulation.mutants --seeds 200 fencing_is_swallowed
    python -m tests.simulation.mutants --jobs 4

It prints the first seed that finds each of them, and what the oracle said. Equivalent mutants are
left out, unless they are named. It ends with 1 if a mutant was not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import pytest
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from feedapi_client.testing.simulator.simulation import silenced
from tests.simulation import (
    histories,
    planted_ends,
    planted_keys,
    planted_planner,
    planted_runtime,
    planted_sharing,
    planted_stores,
)
from tests.simulation.clock import Backend
from tests.simulation.many import Histories
from tests.simulation.named import named
from tests.simulation.planted import Plant
from tests.simulation.scenario import Scenario, generate
from tests.simulation.simulation import run
from tests.testing.applications import in_memory, in_sqlite

SEEDS = 2000
"""Within so many seeds a mutant has to be found."""
_WIDTH = 160
"""Columns of the table, when it goes into a file."""
_TEXT = 100
"""Characters that are shown of what the oracle said."""

Trial = Callable[[int], tuple[str, str] | None]
"""Runs a seed, and returns the rule that it violates and what happened."""


def of(history: Callable[[int], Scenario], backend: Backend = "asyncio") -> Trial:
    """Return the trial that runs the scenario of a seed."""

    def trial(seed: int) -> tuple[str, str] | None:
        outcome = run(replace(history(seed), backend=backend))
        return None if outcome.failure is None else (outcome.failure, outcome.text)

    return trial


def by_name(name: str) -> Trial:
    """Return the trial that runs a named history."""
    return of(lambda seed: named(name, seed))


def within(seconds: float, history: Callable[[int], Scenario]) -> Trial:
    """Return the trial of a history without faults that has to be over after so much time."""

    def trial(seed: int) -> tuple[str, str] | None:
        outcome = run(history(seed))
        if outcome.failure is not None:
            return outcome.failure, outcome.text
        if outcome.seconds > seconds:
            return "late", f"the history took {outcome.seconds:.0f} s, {seconds:.0f} s are enough"
        return None

    return trial


def of_unknown_ancestors(seed: int) -> tuple[str, str] | None:
    """No consumer can read this history exactly once. The error that says so is no failure."""
    found = by_name("ancestors_unknown")(seed)
    return None if found is not None and found[0] == "error" else found


def beside_a_failing_parent(seed: int) -> tuple[str, str] | None:
    """With ``ordered=False`` a child is read while its parent can't be."""
    outcome = run(histories.child_of_a_failing_parent(seed))
    if outcome.failure is not None:
        return outcome.failure, outcome.text
    texts = outcome.record.texts()
    before = texts[: texts.index("all faults have ended")]
    if any(text.startswith("saved 1: Position(cursor='f1") for text in before):
        return None
    return "late", "the child was not read before its parent was"


usual = of(generate)
_shared = Histories(instances=(2, 3, 4))
shared = of(_shared.of)
"""The histories of the command with ``--instances 2..4``, and no others."""
by_key = of(Histories(by_key=True).of)
"""Those of the command with ``--by-key``."""
shared_by_key = of(Histories(instances=(2, 3, 4), by_key=True).of)
"""Those with both."""


def of_instances(seed: int) -> tuple[str, str] | None:
    """Run a usual history, and others in which instances come and go all the time."""
    return shared(seed) or of(histories.hand_overs)(seed) or handled_once(seed)


def handled_once(seed: int) -> tuple[str, str] | None:
    """Run hand-overs in good order. No event may be handled twice, even without transactions."""
    outcome = run(histories.orderly_hand_overs(seed))
    if outcome.failure is not None:
        return outcome.failure, outcome.text
    if outcome.effects > outcome.published:
        return "twice", f"{outcome.effects - outcome.published} events were handled twice"
    return None


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and the histories that have to find it."""

    plant: Plant
    trial: Trial = usual
    equivalent: bool = False
    """No history can tell it from the right code. The bug's docstring says why."""

    @property
    def name(self) -> str:
        """The name of the bug."""
        return self.plant.__name__

    @property
    def text(self) -> str:
        """What it does, in a line."""
        return " ".join((self.plant.__doc__ or "").split("\n\n")[0].split())


@dataclass(frozen=True)
class Found:
    """What came of a mutant: the seed that finds it, and the rule that the seed violates."""

    name: str
    seeds: int
    seconds: float
    seed: int | None = None
    rule: str = ""
    text: str = ""


_P, _R, _S = planted_planner, planted_runtime, planted_stores
_E, _I, _K = planted_ends, planted_sharing, planted_keys

MUTANTS: tuple[Mutant, ...] = (
    # The planner.
    Mutant(_P.children_at_once),
    Mutant(_P.drained_when_delivered),
    Mutant(_P.children_do_not_wait_for_the_commit, of(histories.last_batch_of_a_parent)),
    Mutant(_P.successor_from_the_start),
    Mutant(_P.unread_ancestors_are_not_superseded, by_name("first_commit_after_a_split")),
    Mutant(
        _P.ancestors_of_an_ambiguous_successor_are_taken,
        of(histories.merge_of_a_partition_that_nobody_saw),
    ),
    Mutant(_P.child_from_its_parents_cursor),
    Mutant(_P.superseded_is_not_saved),
    Mutant(_P.transfer_is_not_atomic, of(histories.chain_of_transfers), equivalent=True),
    Mutant(_P.ancestors_are_superseded_later, of(histories.chain_of_transfers)),
    Mutant(_P.transfer_with_a_batch_in_flight),
    Mutant(_P.skipped_ancestors_are_forgotten, of(histories.lag_between_two_splits)),
    Mutant(_P.unknown_ancestors_are_ignored, of_unknown_ancestors),
    Mutant(_P.unknown_ancestors_are_not_reported, by_name("begun_and_split_while_down")),
    Mutant(_P.revision_is_not_advanced),
    Mutant(_P.an_empty_page_is_the_end),
    Mutant(
        _P.an_answer_from_before_the_close_is_the_end, of(histories.slow_answers_around_a_close)
    ),
    Mutant(_P.last_cursor_is_used_with_a_selection, by_name("selection_with_cursors_of_its_own")),
    Mutant(_P.lineage_is_ignored),
    Mutant(_P.all_partitions_are_read),
    Mutant(_P.children_wait_without_order, beside_a_failing_parent),
    Mutant(_P.no_rediscovery_after_drained, within(60.0, histories.children_that_are_listed_late)),
    Mutant(_P.new_partitions_from_the_last_event, of(histories.started_at_the_end)),
    Mutant(_P.first_discovery_again_and_again),
    # The runtime.
    Mutant(_R.rest_of_a_torn_page_is_delivered),
    Mutant(_R.the_buffer_limit_drops, of(histories.small_buffer)),
    Mutant(_R.the_buffer_is_never_freed, of(histories.small_buffer)),
    Mutant(_R.a_stopped_partition_keeps_its_batches, of(histories.listed_again)),
    Mutant(_R.a_cancelled_request_delivers, of(histories.listed_again, "trio"), equivalent=True),
    Mutant(_R.reading_goes_on_from_the_old_cursor, of(histories.listed_again)),
    Mutant(_R.a_response_is_never_closed),
    Mutant(_R.a_cancellation_is_lost_at_the_exit, of(histories.cancelled_while_it_is_left)),
    Mutant(_R.batch_loses_an_event),
    Mutant(_R.two_batches_in_flight),
    Mutant(_R.joined_batch_has_its_first_cursor),
    Mutant(_R.a_wake_up_is_lost, within(30.0, histories.events_on_an_open_stream)),
    Mutant(_R.actions_are_lost),
    Mutant(_R.a_commit_saves_what_was_read),
    Mutant(_R.a_failed_commit_counts_as_made, of(histories.commits_that_fail)),
    Mutant(_R.run_forgets_the_commit, in_memory),
    Mutant(_R.fencing_is_swallowed),
    Mutant(_R.a_save_is_cancelled_in_the_middle, of(histories.commits_that_are_cancelled)),
    Mutant(_R.an_iteration_does_not_wait_for_a_save, of(histories.left_while_the_store_is_slow)),
    Mutant(_R.a_failing_slot_is_never_returned),
    Mutant(_R.a_slot_is_never_returned),
    Mutant(_R.retries_without_a_pause),
    Mutant(_R.a_refusal_leads_to_no_discovery, within(30.0, histories.new_token)),
    Mutant(_R.pauses_by_the_time_of_day, of(histories.clock_that_is_set)),
    Mutant(_R.the_first_token_is_kept),
    Mutant(_R.caught_up_too_early),
    Mutant(_R.a_silent_page_is_the_end, of(histories.one_answer_without_a_line)),
    Mutant(_R.a_grace_period_never_ends, by_name("stopped_in_time_while_it_hangs")),
    Mutant(_R.a_stop_waits_for_the_feed, of(histories.stopped_while_it_begins_again)),
    # What is believed of a publisher.
    Mutant(_E.one_empty_answer_is_the_end),
    Mutant(_E.empty_answers_are_not_counted),
    Mutant(_E.the_time_of_an_end_does_not_count),
    Mutant(_E.a_failure_elsewhere_resets_the_evidence, of(histories.end_beside_failures)),
    Mutant(_E.a_failure_of_its_own_does_not_reset_the_evidence),
    Mutant(_E.what_a_gateway_says_is_an_empty_page, of(histories.end_behind_a_gateway)),
    Mutant(_E.nobody_looks_for_late_events, of(histories.end_behind_a_long_lag)),
    Mutant(
        _E.what_an_earlier_session_passed_over_is_not_reported,
        of(histories.end_behind_a_silent_gateway),
    ),
    Mutant(_E.a_rollback_is_no_problem, of(histories.rolled_back_while_down)),
    Mutant(_E.other_keys_are_skipped),
    Mutant(_E.an_older_place_is_read_on_from, of(histories.older_ends)),
    Mutant(_E.an_edge_to_partition_zero_is_not_presumed),
    Mutant(_E.a_superseded_partition_is_forgotten, of(histories.rolled_back_while_down)),
    Mutant(
        _E.an_empty_discovery_uses_up_the_start,
        of(histories.started_at_the_end_before_anything_is_listed),
    ),
    Mutant(_E.a_limited_feed_is_asked_on, of(histories.limited_feed)),
    # Several instances.
    Mutant(_I.an_old_load_overwrites_a_newer_position, shared),
    Mutant(_I.what_others_read_is_transferred, shared),
    Mutant(_I.events_are_delivered_after_a_stop, shared),
    Mutant(_I.refused_is_kept_after_a_stop, shared),
    Mutant(_I.leaving_partitions_are_still_owned, shared),
    Mutant(_I.epochs_are_not_compared, shared),
    Mutant(_I.no_reload_after_the_first_start, shared),
    Mutant(_I.a_release_loses_nothing, shared),
    Mutant(_I.positions_are_loaded_before_the_claim, shared),
    Mutant(_I.saves_are_not_fenced, of_instances),
    Mutant(_I.an_outdated_position_is_kept_after_a_claim, of_instances),
    Mutant(_I.the_dead_keep_their_leases, of_instances),
    Mutant(_I.a_hand_over_does_not_release, of_instances),
    Mutant(_I.a_refused_save_leaves_its_partition, of_instances),
    Mutant(_I.a_lost_batch_is_not_told, of_instances),
    # Events by key. The first five are known of other libraries.
    Mutant(_K.memory_grows_behind_a_slow_event, by_key),
    Mutant(_K.lost_work_is_still_counted, shared_by_key),
    Mutant(_K.an_occupied_place_drops_an_event, shared_by_key),
    Mutant(_K.an_event_holds_the_cursor_back_without_a_word, by_key),
    Mutant(_K.what_a_refused_save_had_done_counts, shared_by_key),
    Mutant(_K.the_cursor_passes_what_is_not_done, by_key),
    Mutant(_K.all_events_of_a_key_at_once, by_key),
    Mutant(_K.a_retried_event_lets_the_next_one_pass, by_key),
    Mutant(_K.ancestors_are_forgotten, by_key),
    Mutant(_K.an_older_claim_is_accepted, by_key),
    Mutant(_K.a_claim_waits_for_nobody, of(histories.frozen_before_a_commit)),
    Mutant(_K.everything_is_forgotten_with_a_save, shared_by_key),
    Mutant(_K.an_attempt_behind_a_commit, by_key),
    # Applications and stores.
    Mutant(_S.commit_before_effects),
    Mutant(_S.effects_before_the_transaction),
    Mutant(_S.store_loses_a_position),
    Mutant(_S.store_saves_a_part),
    Mutant(_S.store_does_not_fence),
    Mutant(_S.revisions_are_counted, of(histories.second_process_after_a_failover)),
    Mutant(_S.store_forgets_the_status),
    Mutant(_S.sqlite_store_saves_beside_the_transaction, in_sqlite),
)


def try_mutant(name: str, seeds: int) -> Found:
    """Plant a bug, and run seeds until one finds it."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch, silenced():
        mutant.plant(patch)
        for seed in range(seeds):
            failure = mutant.trial(seed)
            if failure is not None:
                took = time.perf_counter() - began
                found = None if _is_broken(failure[1]) else seed
                return Found(name, seed + 1, took, found, *failure)
    return Found(name, seeds, time.perf_counter() - began)


def _is_broken(text: str) -> bool:
    """Return whether the bug does not fit the library any more: what it uses has another name."""
    return any(error in text for error in ("AttributeError: ", "NameError: ", "TypeError: "))


def try_all(names: Sequence[str], seeds: int, jobs: int) -> Iterator[Found]:
    """Try mutants, several at a time, each in a process of its own."""
    with ProcessPoolExecutor(jobs, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(try_mutant, name, seeds) for name in names]):
            yield done.result()


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a mutant was not found, otherwise 0."""
    names = [mutant.name for mutant in MUTANTS]
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all without any")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each, at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = options.names or [mutant.name for mutant in MUTANTS if not mutant.equivalent]
    found = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("mutants", total=len(chosen))
        for one in try_all(chosen, options.seeds, options.jobs):
            found[one.name] = one
            progress.advance(task)
            if one.seed is None:
                why = f": {one.text}" if one.text else ""
                progress.console.print(f"{one.name}: not found in {one.seeds} seeds{why}")
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(table([found[name] for name in chosen]))
    missed = sum(one.seed is None for one in found.values())
    console.print(f"{len(found) - missed} of {len(found)} mutants found")
    return 1 if missed else 0


def table(results: Sequence[Found]) -> Table:
    """Return the results as a table."""
    name = Column("mutant", no_wrap=True)
    shown = Table(name, "found", "seed", "s", "what the oracle said", box=None)
    for one in results:
        shown.add_row(
            one.name,
            "no" if one.seed is None else "yes",
            "-" if one.seed is None else str(one.seed),
            f"{one.seconds:.1f}",
            escape(" ".join(one.text.split())[:_TEXT]),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
