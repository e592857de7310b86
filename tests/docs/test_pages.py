"""What the pages say about the repository is true: paths exist, CI runs the named commands."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import PAGES_FOLDER, ROOT

ARCHITECTURE = (PAGES_FOLDER / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CI = "".join((ROOT / ".ci" / name).read_text("utf-8") for name in ("run", "steps.sh"))


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]*(?:\.py)?)`", ARCHITECTURE)))
)
def test_a_path_of_the_architecture_exists(path: str) -> None:
    assert any((folder / path).exists() for folder in (ROOT, ROOT / "feedapi_client"))


def test_every_module_of_the_layers_exists() -> None:
    drawing = ARCHITECTURE.partition("```text\n")[2].partition("```")[0]
    folder = ROOT / "feedapi_client"
    for line in drawing.splitlines():
        if match := re.match(r"([a-z]+/)?\s+", line):
            folder = ROOT / "feedapi_client" / match[1] if match[1] else folder
            name = re.match(r"(?:[a-z]+/)?\s+([a-z]+)  ", line)
            if name is not None and folder.name == "runtime":  # one module a line
                assert (folder / f"{name[1]}.py").exists(), line
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (ROOT / "feedapi_client" / name).exists(), line


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING))))
def test_a_path_of_contributing_exists(path: str) -> None:
    created = {"build/site"}
    assert path in created or any(
        (folder / path).exists() for folder in (ROOT, ROOT / "feedapi_client")
    )


@pytest.mark.parametrize(
    "command", ["ruff format", "ruff check", "mypy", "pyright", "mkdocs build --strict"]
)
def test_ci_runs_the_commands_of_contributing(command: str) -> None:
    assert f"`{command}" in CONTRIBUTING
    assert f"$bin/{command}" in CI


def test_each_row_of_what_sharing_survives_names_its_test() -> None:
    page = (PAGES_FOLDER / "sharing.md").read_text(encoding="utf-8")
    chapter = page.partition("## What a paused process")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| **")]
    for word in ("Paused", "Failover", "Clock", "Rewind"):
        assert any(row.startswith(f"| **{word}**") for row in rows)
    for row in rows:
        tests = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", row)
        assert tests, row
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), row
