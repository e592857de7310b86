"""MkDocs hooks: fill pages with what the tests and the planner say, so that they cannot go stale.

Two markers are replaced, each on a line of its own:

- ``<!-- tests: R5 -->`` becomes the list of tests whose names carry the rule's number (``r05`` or
  ``r5``). Words behind the number add tests by their names: ``<!-- tests: R20, cancel -->``.
- ``<!-- transitions -->`` becomes the planner's state table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RULES = range(1, 22)
_FOLDERS = ("tests", "feedapi_client/testing")
_ROW = re.compile(r"^r\d\d_\w+$", re.MULTILINE)  # of a table of histories
_NUMBER = re.compile(r"_r(\d{1,2})(?=_)")
_TESTS_MARKER = re.compile(r"^<!-- tests: R(?P<rule>\d+)(?P<words>(?:, \w+)*) -->$", re.MULTILINE)
_RULE = re.compile(r"\bR(\d{1,2})\b")
_TRANSITIONS_MARKER = re.compile(r"^<!-- transitions -->$", re.MULTILINE)
MEANINGS: dict[str, str] = {
    "waiting": "known but not started: another partition comes first, "
    "or no discovery has listed it yet",
    "reading": "being fetched, or due to be fetched",
    "caught up": "open, and read to its present end",
    "drained": "closed, read to its end, and the end is committed",
    "superseded": "its cursor was transferred to its successors",
    "vanished": "no longer listed",
    "parked": "stopped by an error of its own, or of a partition that it descends from",
    "elsewhere": "could be read, but this instance has no lease of it (`share`)",
}
"""What each state of a partition means."""


@dataclass(frozen=True)
class RuleTest:
    """A test function or a row of a table, and the rules whose numbers its name carries."""

    path: str
    name: str

    @property
    def rules(self) -> tuple[int, ...]:
        """Return the numbers in the name, legal or not."""
        return tuple(int(number) for number in _NUMBER.findall(self.name))

    @property
    def behaviour(self) -> str:
        """Return the name as a sentence, without the number."""
        return _NUMBER.sub("", self.name).removeprefix("test_").replace("_", " ")


@cache
def all_tests() -> tuple[RuleTest, ...]:
    """Return every test function of the repository and of the shipped contract suites."""
    return tuple(_find_tests())


def _find_tests() -> Iterator[RuleTest]:
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
            yield from (RuleTest(name, f"test_{row}") for row in _ROW.findall(source))
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    node.name.startswith("test_")
                ):
                    yield RuleTest(name, node.name)


def proofs_of(rule: int, words: tuple[str, ...]) -> list[RuleTest]:
    """Return the tests that carry the rule's number or one of the words in their names."""
    return [
        test
        for test in all_tests()
        if rule in test.rules or any(word in test.name for word in words)
    ]


def markers(text: str) -> dict[int, tuple[str, ...]]:
    """Return the rules that have a marker in the text, each with its additional words."""
    return {
        int(match["rule"]): tuple(match["words"].split(", ")[1:])
        for match in _TESTS_MARKER.finditer(text)
    }


def render_tests(rule: int, words: tuple[str, ...]) -> str:
    """Return the tests of a rule as a collapsed Markdown list, by file."""
    tests = proofs_of(rule, words)
    if not tests:
        raise ValueError(f"docs: no test carries the number of R{rule}")
    lines = [f'??? note "{len(tests)} tests prove R{rule}"', ""]
    path = ""
    for test in tests:
        if test.path != path:
            path = test.path
            lines.append(f"    - `{path}`")
        lines.append(f"        - {test.behaviour}")
    return "\n".join(lines)


def render_transitions() -> str:
    """Return the planner's states, its transitions, and a matrix of them, as Markdown."""
    from feedapi_client.lineage.states import TRANSITIONS, State

    legal = {(source, target) for source, target, _, _ in TRANSITIONS}
    states = [(f"`{state}`", MEANINGS[state]) for state in State]
    moves = [(f"`{a}`", f"`{b}`", cause, ", ".join(r.split())) for a, b, cause, r in TRANSITIONS]
    matrix = [
        (f"`{source}`", *("●" if (source, target) in legal else "" for target in State))
        for source in State
    ]
    tables = [
        _table(("State", "Means"), states),
        _table(("From", "To", "When", "Rules"), moves),
        _table(("from \\ to", *(f"`{state}`" for state in State)), matrix, ":-:"),
    ]
    return _RULE.sub(r"[R\1](rules.md#r\1)", "\n".join(tables))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], rule: str = "---") -> str:
    lines = [header, ("---", *(rule for _ in header[1:])), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page."""
    markdown = _TESTS_MARKER.sub(
        lambda match: render_tests(int(match["rule"]), tuple(match["words"].split(", ")[1:])),
        markdown,
    )
    return _TRANSITIONS_MARKER.sub(lambda _: render_transitions(), markdown)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the dashboard and the alert rules, for readers who have no checkout."""
    from mkdocs.structure.files import File

    for name in ("dashboards/feedapi.json", "alerts/feedapi.rules.yml"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / "docs" / name)))
    return files


_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table its heading, which narrow screens show in front of it."""
    return _TABLE.sub(lambda table: _with_labels(table[0]), html)


def _with_labels(table: str) -> str:
    headings = [_TAG.sub("", heading).strip() for heading in _HEADING.findall(table)]

    def label(row: re.Match[str]) -> str:
        cells = row[0].split("<td")
        labelled = (
            f' data-label="{headings[number]}"{cell}' for number, cell in enumerate(cells[1:])
        )
        return "<td".join([cells[0], *labelled])

    return _ROW.sub(label, table)
