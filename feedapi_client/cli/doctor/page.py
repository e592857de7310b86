"""The table of checks as Markdown, for the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.cli.doctor.checks.base import Check
from feedapi_client.cli.doctor.checks.table import SECTIONS


def markdown() -> str:
    """Return all checks as Markdown, by section. Each has an anchor with its id."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for heading, checks in SECTIONS.items():
        yield from (f"### {heading}", "")
        yield "| check | level | required | what it costs a consumer | where it stands |"
        yield "| --- | --- | --- | --- | --- |"
        for check in checks:
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
