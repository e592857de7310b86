"""Write the checks into the page of ``feedapi doctor``: python -m tests.docs.doctor_page."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.cli.doctor.check import Check
from feedapi_client.cli.doctor.report import SECTIONS
from tests.docs.snippets import PAGES_FOLDER

PAGE = PAGES_FOLDER / "doctor.md"
MARKER = "<!-- checks: written by python -m tests.docs.doctor_page -->"


def rendered() -> str:
    """Return the page with the table as the command has it."""
    before, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker, "docs/pages/doctor.md has no place for the checks"
    return f"{before}{marker}\n\n{_table()}"


def _table() -> str:
    """Return all checks as Markdown, by section. Each has an anchor with its id."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for section in SECTIONS:
        yield from (f"### {section.heading}", "")
        yield "| check | level | required | what it costs a consumer | where it stands |"
        yield "| --- | --- | --- | --- | --- |"
        for check in section.checks:
            yield f"| {' | '.join(_cells(check))} |"
        yield ""


def _cells(check: Check) -> tuple[str, ...]:
    rules = [f"[{rule}](rules.md#{rule.lower()})" for rule in check.rules]
    return (
        f'<a id="{check.id}"></a>`{check.id}`',
        check.level.value,
        check.requirement,
        check.cost,
        "; ".join((check.source, ", ".join(rules))) if rules else check.source,
    )


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
