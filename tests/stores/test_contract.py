"""The contract suite itself: a broken store fails it, and so does an undeclared capability."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

BROKEN = {
    "TestAnyRevision": "test_r17_a_position_that_replaces_another_one_is_refused",
    "TestOneByOne": "test_r17_one_stale_position_refuses_all",
    "TestIgnoresTheTransaction": "test_what_is_no_transaction_is_refused",
    "TestMixesFeeds": "test_feeds_names_and_filters_are_apart",
    "TestLosesTheStatus": "test_every_status_is_kept",
    "TestStripsCursors": "test_special_characters_in_a_cursor",
    "TestEncodesCursors": "test_r18_a_cursor_is_kept_as_it_is_or_refused_for_its_partition",
    "TestChecksAndSavesSeparately": "test_r17_of_concurrent_consumers_one_advances",
    "TestCancelledHalfway": "test_a_save_cancelled_at_any_time_has_saved_all_or_nothing",
}
OPTIONAL_TESTS = 12


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[str]]:
    """Run the contract on good and broken stores in a process of its own.

    Returns the outcomes by class and test.
    """
    chosen = " or ".join(
        [
            "TestGood",
            "TestUndeclared",
            "TestWithoutHooks",
            *(f"({case} and {test})" for case, test in BROKEN.items()),
        ]
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).with_name("broken_stores.py")),
        "-vv",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
    ]
    output = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in output.splitlines():
        if line.startswith("tests/") and (words := line.split("::")[2].split()):
            found[line.split("::")[1], words[0].split("[")[0]].append(
                next(word for word in line.split() if word in ("PASSED", "FAILED", "SKIPPED"))
            )
    return found


@pytest.mark.slow
def test_a_good_store_passes_and_what_it_can_not_do_is_skipped(
    outcomes: dict[tuple[str, str], list[str]],
) -> None:
    good = [
        outcome
        for (case, _), results in outcomes.items()
        if case == "TestGood"
        for outcome in results
    ]
    assert set(good) == {"PASSED", "SKIPPED"}
    assert good.count("SKIPPED") == OPTIONAL_TESTS


@pytest.mark.parametrize("case", ["TestUndeclared", "TestWithoutHooks"])
def test_a_capability_that_is_undeclared_or_without_its_hook_fails(
    outcomes: dict[tuple[str, str], list[str]], case: str
) -> None:
    found = [
        outcome for (name, _), results in outcomes.items() if name == case for outcome in results
    ]
    assert set(found) == {"PASSED", "FAILED"}
    assert found.count("FAILED") == OPTIONAL_TESTS


@pytest.mark.parametrize(("case", "test"), BROKEN.items())
def test_a_broken_store_fails(
    outcomes: dict[tuple[str, str], list[str]], case: str, test: str
) -> None:
    assert set(outcomes["TestGood", test]) == {"PASSED"}
    assert "FAILED" in outcomes[case, test]


def test_the_stores_package_imports_no_extra() -> None:
    program = """
import sys
import feedapi_client.stores
drivers = {'sqlalchemy', 'redis', 'aiosqlite', 'psycopg', 'psycopg_pool', 'asyncpg'}
assert not drivers & set(sys.modules)
from feedapi_client import PostgresCursorStore
assert not drivers & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
