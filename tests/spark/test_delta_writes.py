"""As `test_delta`, at the same time in another process."""

from __future__ import annotations

import pytest

from tests.spark.conftest import needs_jvm
from tests.spark.test_delta import LONG, run

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_jvm]


@pytest.mark.timeout(LONG + 60)
def test_writes_to_delta_tables_are_exact_and_so_are_killed_drivers() -> None:
    run("delta_writes.py", "delta_crashes.py", "delta_kills.py")
