"""The code blocks of the README and of the documentation, and by which test each of them is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES_FOLDER = ROOT / "docs" / "pages"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in PAGES_FOLDER.rglob("*.md")),
]

PYTHON_RUN_BY = {
    "docs/pages/guides/credentials.md": ("tests/docs/test_guides.py", "needs a token endpoint"),
    "docs/pages/guides/django.md": ("tests/docs/test_guides.py", "needs a project of Django"),
    "docs/pages/guides/fastapi.md": ("tests/docs/test_guides.py", "is no program but an app"),
    "docs/pages/guides/your-transaction.md": (
        "tests/docs/test_your_transaction.py",
        "needs PostgreSQL",
    ),
    "docs/pages/guides/websocket.md": ("tests/docs/test_guides.py", "is no program but an app"),
    "docs/pages/quarantine.md": ("tests/quarantine/test_documentation.py", "checks a database"),
    "docs/pages/spark.md": ("tests/spark/test_examples.py", "needs a JVM"),
    "docs/pages/kubernetes.md": ("tests/docs/test_deployment.py", "is a module of a handler"),
    "docs/pages/lakehouse.md": ("tests/spark/delta_tables.py", "needs Delta tables"),
    "docs/pages/liftbridge.md": ("tests/liftbridge/test_documentation.py", "needs a broker"),
}
"""Pages whose Python blocks are run by another test file, and why."""

PARSED = dict.fromkeys(("dockerfile", "ini", "yaml"), "tests/docs/test_deployment.py") | {
    "nginx": "tests/docs/test_behind_a_proxy.py"
}
"""Languages of blocks that nothing here can run, and the test file that reads them."""

SHELL_RUN_BY = {
    "python3 -m venv .venv": (".ci/run", "sets up an environment"),
    ".venv/bin/pip install": (".ci/full", "installs into that environment"),
    "python3 -m venv build/released": ("CONTRIBUTING.md", "needs a version that is released"),
    "feedapi relay https://service/": (
        "tests/liftbridge/test_documentation.py",
        "needs a broker",
    ),
    "feedapi cursors ls --store liftbridge:": (
        "tests/liftbridge/test_documentation.py",
        "needs a broker",
    ),
    "module=github.com/liftbridge-io": ("tests/liftbridge/test_documentation.py", "needs Go"),
    "nats-server --addr": ("tests/liftbridge/test_documentation.py", "starts servers"),
}
"""Shell blocks, by how they begin, that are run by something else than the tests, and why."""

_BLOCK = re.compile(
    r"^## (?P<heading>[^\n]+)$|^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced code block. `number` counts the blocks under its heading, from 1."""

    page: str
    heading: str
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        page = self.page.removeprefix("docs/pages/").removesuffix(".md")
        return f"{page}-{self.heading.lower().replace(' ', '-')}-{self.number}"


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, which is named by its path in the repository."""
    heading, number = "", 0
    for match in _BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if match["heading"]:
            heading, number = match["heading"], 0
        else:
            number += 1
            yield Block(page, heading, match["language"], match["text"], number)


def python_blocks(page: str) -> list[str]:
    """Return the Python code of a page, block by block."""
    found = [block.text for block in blocks(page) if block.language == "python"]
    assert found, f"{page} has no Python block"
    return found
