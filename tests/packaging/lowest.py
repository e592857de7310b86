"""Run tests with the lowest allowed versions: ``python -m tests.packaging.lowest [PYTEST ...]``.

Makes a virtual environment with the lowest version of each core dependency that `pyproject.toml`
allows, and the newest of everything else. Without arguments it runs the tests of the core, of the
clients and of HTTP.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
_TESTS = (
    *("-q", "-m", "not slow", "tests/protocol", "tests/lineage", "tests/client", "tests/http"),
    # They need Spark, and a plugin of pytest that fits one version of httpx.
    *("--ignore=tests/http/test_urls.py", "--ignore=tests/client/test_client.py"),
)
_TOOLS = (
    "h2",
    "hypothesis",
    "pytest>=9",
    "pytest-timeout",
    "pytest-xdist",
    "trio",
    "trustme",
)


def lowest_versions(extra: str | None = None) -> list[str]:
    """Return what the core, or an extra, depends on as constraints: the lowest version of each.

    An extra that includes others has theirs, too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found = list[str]()
    for requirement in map(Requirement, listed):
        if requirement.name == project["name"]:
            found += chain.from_iterable(map(lowest_versions, sorted(requirement.extras)))
        elif requirement.specifier:
            found.append(f"{requirement.name}=={_lowest(requirement)}")
    return found


def _lowest(requirement: Requirement) -> str:
    bounds = (each.version for each in requirement.specifier if each.operator in (">=", "=="))
    return next(bounds)


def main(arguments: list[str]) -> int:
    """Make the environment, run pytest there, and return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        constraints = Path(folder, "lowest.txt")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        constraints.write_text("\n".join(lowest_versions()) + "\n")
        install = [python, "-m", "pip", "install", "-q", "-c", str(constraints)]
        subprocess.run([*install, f"{ROOT}[testing]", *_TOOLS], check=True)
        subprocess.run([python, "-m", "pip", "list"], check=True)
        tests = [python, "-m", "pytest", *(arguments or _TESTS)]
        return subprocess.run(tests, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
