"""The programs of the README pass mypy's strict checks, as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, blocks

PROGRAMS = [block for block in blocks("README.md") if block.language == "python"]


@pytest.mark.slow
def test_the_programs_of_the_readme_pass_mypy(tmp_path: Path) -> None:
    assert PROGRAMS
    for number, block in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            f"--cache-dir={ROOT}/.mypy_cache",
            str(tmp_path),
        ],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
