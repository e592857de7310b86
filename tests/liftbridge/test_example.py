"""The example runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.liftbridge.broker import require_liftbridge

EXAMPLE = Path(__file__).parents[2] / "examples" / "relay_to_liftbridge.py"


@pytest.mark.slow
def test_the_example_relays_and_reads_back(tmp_path: Path) -> None:
    require_liftbridge()
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "1000 events relayed at least once" in lines
    assert "1000 events relayed exactly once" in lines
    assert sum(int(line.split()[1]) for line in lines if line.startswith("orders.")) == 1000
    assert sum(int(line.split()[3]) for line in lines if line.startswith("a batch of")) == 1000
