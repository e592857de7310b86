"""Write the checks into the page of ``feedapi doctor``: python -m tests.docs.doctor_page."""

from __future__ import annotations

from collections.abc import Iterator

from feedapi_client.cli.doctor.checks import DEVIATION, FIELD
from feedapi_client.cli.doctor.command import sections
from tests.docs.snippets import PAGES_FOLDER

PAGE = PAGES_FOLDER / "doctor.md"
MARKER = "<!-- checks: written by python -m tests.docs.doctor_page -->"


def rendered() -> str:
    """Return the page with the checks as the command has them."""
    before, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker, "docs/pages/doctor.md has no place for the checks"
    return f"{before}{marker}\n\n" + "\n".join(_lines())


def _lines() -> Iterator[str]:
    for section in sections():
        yield from (f"### {section.heading}", "")
        yield "| check | level | required | what it costs a consumer | where it stands |"
        yield "| --- | --- | --- | --- | --- |"
        for check in section:
            anchors = "".join(f'<a id="{id}"></a>' for id in (check.id, *check.was))
            rules = ", ".join(f"[{rule}](rules.md#{rule.lower()})" for rule in check.rules)
            said = (check.level, check.source) == (DEVIATION, FIELD)  # by the word "deviation"
            source = "; ".join(filter(None, ("" if said else check.source, rules)))
            cells = (f"{anchors}`{check.id}`", check.level, check.requirement, check.cost, source)
            yield f"| {' | '.join(cells)} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
