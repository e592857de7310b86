"""A task that hangs is overtaken by a second attempt, on a cluster of Spark's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.spark.conftest import ROOT, needs_jvm

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_jvm]


@pytest.mark.timeout(900)
def test_every_event_is_there_once_when_a_second_attempt_wins() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.speculation", "--stalls", "1"],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "1 of them overtaken by a second attempt" in done.stdout
    assert "every event once, in order" in done.stdout
