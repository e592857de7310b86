"""All states of small feeds hold what has to hold, and planted bugs are found.

The suite explores what takes seconds, and the quick answer what takes one.
``python -m tests.exploration`` goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.exploration import feeds
from tests.exploration.__main__ import main
from tests.exploration.explore import Exploration
from tests.exploration.planted import PLANTED
from tests.exploration.world import FAULTS, begin


@pytest.mark.parametrize(
    "feed", [feeds.NO_SPLIT, feeds.CHILD, feeds.SUCCESSOR, feeds.SILENT_END], ids=lambda f: f.name
)
def test_r17_one_instance_goes_through_every_state(feed: feeds.Feed) -> None:
    found = Exploration(begin(feed, instances=1, faults=FAULTS, left=1)).run()
    assert found.violation is None, found
    assert found.complete
    assert found.states > 10


def test_r17_two_instances_go_through_every_state_without_a_failure() -> None:
    found = Exploration(begin(feeds.NO_SPLIT, instances=2)).run()
    assert found.violation is None, found
    assert found.complete


@pytest.mark.slow
@pytest.mark.parametrize("feed", feeds.FEEDS, ids=lambda feed: feed.name)
def test_r17_two_instances_begin_well_whatever_fails(feed: feeds.Feed) -> None:
    world = begin(feed, instances=2, faults=FAULTS, left=1, fine=True)
    found = Exploration(world, most=150).run()
    assert found.violation is None, found
    assert found.states >= 150


SCENARIOS: dict[str, tuple[feeds.Feed, dict[str, Any]]] = {
    "refused_end_keeps_its_place": (feeds.CHILD, {"faults": ("back",)}),
    "nobody_checks_a_start": (feeds.CHILD, {"faults": ("back",)}),
    "waiting_counts_as_finished": (feeds.SUCCESSOR, {}),
    "old_load_overwrites": (feeds.NO_SPLIT, {"faults": ("give",), "fine": True}),
    "refusal_does_not_outdate_a_load": (feeds.NO_SPLIT, {"faults": ("expire",), "fine": True}),
    "read_by_others_is_not_asked": (feeds.NEW_THEN_SUCCESSOR, {}),
    "refused_is_kept_after_a_stop": (feeds.NO_SPLIT, {"faults": ("refuse", "give")}),
    "leaving_still_owned": (feeds.NO_SPLIT, {"faults": ("give",)}),
    "epoch_is_not_compared": (feeds.NO_SPLIT, {"faults": ("give",), "fine": True}),
    "no_lose_on_release": (feeds.NO_SPLIT, {"faults": ("give", "crash")}),
    "loaded_before_the_claim": (feeds.NO_SPLIT, {"faults": ("expire",), "fine": True}),
    "superseded_is_revived": (feeds.ROLLED_BACK, {"instances": 1}),
    "rollback_is_no_problem": (feeds.ROLLED_BACK, {"instances": 1}),
    "successors_keep_their_cursors": (feeds.ROLLED_BACK, {"instances": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    feed, chosen = SCENARIOS[bug]
    options = {"instances": 2, "left": len(chosen.get("faults", ())), **chosen}
    with PLANTED[bug]():
        found = Exploration(begin(feed, **options), most=6000).run()
    assert found.violation is not None
    assert found.history


@pytest.mark.slow
def test_without_the_bug_the_same_states_hold() -> None:
    for feed, chosen in SCENARIOS.values():
        options = {"instances": 2, "left": len(chosen.get("faults", ())), **chosen}
        assert Exploration(begin(feed, **options), most=100).run().violation is None


def test_the_command_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--feed", "no split", "--instances", "1"]) == 0
    assert "no split: all" in capsys.readouterr().out
