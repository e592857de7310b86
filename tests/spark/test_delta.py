"""Runs the tests of Delta tables, which need another release of Spark than the other tests."""

from __future__ import annotations

import pytest

from tests import components
from tests.spark import delta_environment
from tests.spark.conftest import needs_jvm
from tests.spark.killed_query import KILLS, TIMEOUT

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_jvm]

# Downloads Spark and Delta at first.
LONG = 1800 + KILLS * TIMEOUT


@pytest.mark.timeout(LONG + 60)
def test_delta_tables_are_exact_or_refused(pytestconfig: pytest.Config) -> None:
    """Only the first micro-batch where nothing but a touch was asked for."""
    touch = pytestconfig.option.markexpr == "touch"
    run("delta_tables.py", *(["-k", "test_first_batch"] if touch else []))


def run(*arguments: str) -> None:
    """Run pytest with files of this folder, in the environment of Delta."""
    components.require("delta")
    command = ["-m", "pytest", "-n", "0", "-q", "-o", "faulthandler_timeout=0"]
    command += [f"tests/spark/{one}" if one.endswith(".py") else one for one in arguments]
    done = delta_environment.run(command, timeout=LONG)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
