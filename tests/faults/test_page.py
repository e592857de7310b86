"""The page of the documentation shows the table that the tests run."""

from __future__ import annotations

from feedapi_client import errors
from tests.faults.bombs import BOMBS
from tests.faults.discoveries import DISCOVERIES
from tests.faults.matrix import FAULTS, PAGE, markdown
from tests.faults.outcomes import DELIVERED
from tests.faults.statuses import STATUSES


def test_the_page_is_what_the_table_renders() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_a_running_consumer_goes_on_whatever_a_later_discovery_meets_as_the_page_says() -> None:
    assert {fault.outcomes.running for fault in (*FAULTS, *BOMBS)} == {DELIVERED}


def test_every_error_of_the_table_is_one_of_the_library() -> None:
    named = {kind for _, kind in DISCOVERIES.values()}
    for fault in (*FAULTS, *BOMBS):
        outcomes = fault.outcomes
        named |= {outcomes.entry, outcomes.running, outcomes.fetch, outcomes.last, outcomes.call}
    assert all(hasattr(errors, name) for name in named - {"delivered", "page"})


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(STATUSES) >= 30
    assert len(DISCOVERIES) >= 50
