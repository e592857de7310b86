"""The README is short, its set-up commands are found by ``.ci/run``, and its links lead to files.

Its code blocks are run by `tests.docs.test_snippets`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.snippets import blocks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_two_set_up_commands_come_first() -> None:
    demo, tests = (block.text.strip() for block in blocks("README.md") if not block.heading)
    assert demo.endswith("feedapi demo")
    assert tests.endswith("/pytest")


def test_ci_finds_the_two_set_up_commands_and_no_others() -> None:
    # The same as in .ci/run.
    found = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.startswith("python3 -m venv")
    ]
    assert found == [block.text.strip() for block in blocks("README.md") if not block.heading]


def test_it_can_be_read_at_one_sitting() -> None:
    assert len(README.splitlines()) <= 160


def test_its_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
