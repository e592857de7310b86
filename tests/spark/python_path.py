"""Where the processes of Spark find this repository."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path(*more: Path) -> str:
    """Return the variable PYTHONPATH: `more`, this repository, and what was there before."""
    own = [*more, ROOT, ROOT / "tests" / "spark" / "workers"]
    return os.pathsep.join([*map(str, own), os.environ.get("PYTHONPATH", "")])
