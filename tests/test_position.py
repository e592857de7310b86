"""R17: revisions are drawn."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from feedapi_client import Position


def test_r17_a_position_replaces_the_stored_one_and_is_larger_by_a_drawn_step() -> None:
    first = [Position.after(None, "a") for _ in range(1000)]
    assert {each.replaces for each in first} == {None}
    later = [Position.after(first[0], "b", "drained") for _ in range(1000)]
    assert {(each.cursor, each.status, each.replaces) for each in later} == {
        ("b", "drained", first[0].revision)
    }
    for steps in (
        [each.revision for each in first],
        [each.revision - first[0].revision for each in later],
    ):
        assert 1 <= min(steps) <= max(steps) <= 2**20
        assert len(set(steps)) > 990


def test_r17_what_is_replaced_is_not_stored_and_not_compared() -> None:
    assert Position("a", revision=5, replaces=3) == Position("a", revision=5)


def test_r17_an_application_that_seeds_random_draws_the_same_revisions_no_more_often() -> None:
    drawn = []
    for _ in range(2):
        random.seed(1)
        drawn.append([Position.after(None, "a").revision for _ in range(5)])
    assert drawn[0] != drawn[1]


_FORKS = """
import os
from feedapi_client import Position
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str([Position.after(None, "a").revision for _ in range(5)]).encode())
    os._exit(0)
os.wait()
mine = str([Position.after(None, "a").revision for _ in range(5)]).encode()
assert os.read(read, 1000) != mine
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_r17_a_process_that_was_forked_draws_others() -> None:
    subprocess.run([sys.executable, "-c", _FORKS], check=True)
