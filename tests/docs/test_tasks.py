"""The list of everyday tasks leads to pages whose programs the tests named beside them run."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import PAGES_FOLDER, PARSED, PYTHON_RUN_BY, ROOT, Block, blocks

SNIPPETS = "tests/docs/test_snippets.py"
INDEX = (PAGES_FOLDER / "index.md").read_text(encoding="utf-8")
SECTION = INDEX.partition("\n## Everyday tasks\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([^|-]+) \| (\[.*?) \|$", SECTION, re.MULTILINE)


def test_tasks_are_listed_once() -> None:
    assert len(ROWS) >= 12
    assert len({task for task, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("pages", [row[1] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_a_task_leads_to_is_run_by_tests(pages: str) -> None:
    links = re.findall(r"\]\(([\w/-]+\.md)(?:#([\w-]+))?\)", pages)
    assert links
    found = {test for page, anchor in links for test in run_by(page, anchor)}
    assert found
    assert all((ROOT / test).is_file() for test in found)


def run_by(page: str, anchor: str) -> set[str]:
    """Return the tests that run or read what stands below a heading; below any without one."""
    path = f"docs/pages/{page}"
    there = [block for block in blocks(path) if anchor in ("", slug(block))]
    tests = {test for block in there if (test := named_test(block))}
    text = (PAGES_FOLDER / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading(text, anchor)}\n")[2].partition("\n## ")[0]
    if "docs/dashboards/" in section and "docs/alerts/" in section:
        tests.add("tests/telemetry/test_dashboards.py")
    return tests


def named_test(block: Block) -> str | None:
    if block.language == "python":
        return PYTHON_RUN_BY.get(block.page, (SNIPPETS, ""))[0]
    return SNIPPETS if block.language == "sh" else PARSED.get(block.language)


def heading(text: str, anchor: str) -> str:
    return next(
        (h for h in re.findall(r"^## (.+)$", text, re.MULTILINE) if slugged(h) == anchor), "?"
    )


def slug(block: Block) -> str:
    return slugged(block.heading)


def slugged(text: str) -> str:
    return re.sub(r"[^\w]+", "-", text.lower()).strip("-")
