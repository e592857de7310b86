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


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 0, ("partition 0 was split", "partition 1 was split", "token was rotated", "crash 4")),
        (
            ("--instances", 3, "--crashes", 2),
            0,
            (*("instance-3 starts", "died in the middle of a batch"), "2 crashes of 3 instances"),
        ),
        (("--sabotage", "cursor-first"), 1, ("FAILED", "lost")),
        (("--sabotage", "cursor-last"), 1, ("FAILED", "came again")),
    ],
)
def test_the_demo_proves_order_and_exactly_once_and_its_proof_can_fail(
    feedapi: Feedapi,
    options: tuple[object, ...],
    code: int,
    says: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def send_signal(process: subprocess.Popen[bytes], _: int) -> None:
        raise AssertionError(f"this reaps {process.pid} if it has just died: its code is lost")

    monkeypatch.setattr(subprocess.Popen, "send_signal", send_signal)
    result = feedapi("demo", *_QUICK, *options)
    assert result.exit_code == code, result.output
    assert [text for text in says if text not in result.stdout] == []
    assert ("PROVED: 3,000 events of 200 entities" in result.stdout) is (code == 0)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_reads_the_feed_of_the_demo_and_the_proof_holds() -> None:
    components.require("java")
    command = [sys.executable, "-m", "feedapi_client.cli", "demo", "--spark", "--events", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|partition|depth|sequence|data" in done.stdout
    assert "PROVED: 2,000 events of 200 entities" in done.stdout


@pytest.mark.parametrize(
    ("effects", "faults"),
    [
        ([("b", 1), ("b", 2), ("a", 1), ("a", 2), ("a", 3)], []),  # entities may be interleaved
        ([*_PUBLISHED, ("a", 3)], ["1 came again, such as event 3 of a"]),
        (_PUBLISHED[:-1], ["1 lost, such as event 3 of a"]),
        (
            [("a", 2), ("b", 1), ("a", 1), ("b", 2), ("a", 3)],
            ["1 came out of order, such as event 1 of a"],
        ),
        ([*_PUBLISHED, ("c", 1)], ["1 was never published, such as event 1 of c"]),
        ([], ["5 lost, such as event 1 of a, event 2 of a, event 3 of a …"]),
    ],
)
def test_the_proof_finds_what_is_wrong_and_nothing_else(
    effects: list[Step], faults: list[str]
) -> None:
    assert find_faults(_PUBLISHED, effects) == faults
