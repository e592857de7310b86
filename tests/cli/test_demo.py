"""``feedapi demo``: it proves exactly-once delivery, and its proof can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from feedapi_client.cli.demo import Step, find_faults
from tests import components
from tests.cli.conftest import Feedapi

pytestmark = pytest.mark.slow

_QUICK = ("--events", 3000, "--seconds", 1.5)
_PUBLISHED: list[Step] = [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)]


@pytest.mark.parametrize("dialect", ["v2-token", "v2-draft"])
def test_the_demo_proves_order_and_exactly_once(feedapi: Feedapi, dialect: str) -> None:
    result = feedapi("demo", *_QUICK, "--dialect", dialect)
    assert result.exit_code == 0, result.output
    for part in (
        "partition 0 was split",
        "partition 1 was split",
        "token was rotated",
        "crash 4",
        "PROVED: 3,000 events of 200 entities",
    ):
        assert part in result.stdout


def test_instances_come_go_and_are_killed_and_the_proof_holds(feedapi: Feedapi) -> None:
    result = feedapi("demo", *_QUICK, "--instances", 3, "--crashes", 2)
    assert result.exit_code == 0, result.output
    for part in (
        "instance-3 starts",
        "died in the middle of a batch",
        "stops and gives its partitions away",
        "PROVED: 3,000 events of 200 entities",
        "1 crash of 3 instances",
    ):
        assert part in result.stdout


def test_sabotage_is_for_one_instance(feedapi: Feedapi) -> None:
    result = feedapi("demo", "--instances", 2, "--sabotage", "cursor-last")
    assert result.exit_code == 2
    assert "one instance" in result.output


@pytest.mark.parametrize(
    ("sabotage", "fault"), [("cursor-first", "lost"), ("cursor-last", "came again")]
)
def test_a_cursor_outside_the_transaction_fails_the_proof(
    feedapi: Feedapi, sabotage: str, fault: str
) -> None:
    result = feedapi("demo", *_QUICK, "--sabotage", sabotage)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert fault in result.stdout


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_reads_the_feed_of_the_demo_and_the_proof_holds() -> None:
    components.require("java")
    command = [sys.executable, "-m", "feedapi_client.cli", "demo", "--spark", "--events", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|partition|depth|sequence|data" in done.stdout
    assert "PROVED: 2,000 events of 200 entities" in done.stdout


def test_the_proof_holds_for_another_interleaving_of_entities() -> None:
    assert find_faults(_PUBLISHED, [("b", 1), ("b", 2), ("a", 1), ("a", 2), ("a", 3)]) == []


@pytest.mark.parametrize(
    ("effects", "fault"),
    [
        ([*_PUBLISHED, ("a", 3)], "1 came again, such as event 3 of a"),
        (_PUBLISHED[:-1], "1 lost, such as event 3 of a"),
        (
            [("a", 2), ("b", 1), ("a", 1), ("b", 2), ("a", 3)],
            "1 came out of order, such as event 1 of a",
        ),
        ([*_PUBLISHED, ("c", 1)], "1 was never published, such as event 1 of c"),
        ([], "5 lost, such as event 1 of a, event 2 of a, event 3 of a …"),
    ],
)
def test_the_proof_fails(effects: list[Step], fault: str) -> None:
    assert find_faults(_PUBLISHED, effects) == [fault]
