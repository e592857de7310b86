"""Write the checks into the page of ``feedapi doctor``: python -m tests.docs.doctor_page."""

from __future__ import annotations

from feedapi_client.cli.doctor.page import markdown
from tests.docs.snippets import PAGES_FOLDER

PAGE = PAGES_FOLDER / "doctor.md"
MARKER = "<!-- checks: written by python -m tests.docs.doctor_page -->"


def rendered() -> str:
    """Return the page with the table as the command has it."""
    before, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker, "docs/pages/doctor.md has no place for the checks"
    return f"{before}{marker}\n\n{markdown()}"


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
