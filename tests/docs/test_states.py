"""The page of a partition's states shows the planner's own table."""

from __future__ import annotations

from feedapi_client.lineage.states import TRANSITIONS, State
from tests.docs.hooks import hooks
from tests.docs.snippets import PAGES_FOLDER

PAGE = hooks.on_page_markdown((PAGES_FOLDER / "states.md").read_text(encoding="utf-8"))


def test_every_state_is_explained() -> None:
    assert hooks.MEANINGS.keys() == set(State)
    for state in State:
        assert f"| `{state.value}` | {hooks.MEANINGS[state]} |" in PAGE


def test_every_transition_is_listed_with_links_to_its_rules() -> None:
    for source, target, cause, rules in TRANSITIONS:
        links = ", ".join(f"[{rule}](rules.md#{rule.lower()})" for rule in rules.split())
        assert f"| `{source}` | `{target}` | {cause} | {links} |" in PAGE


def test_the_matrix_marks_each_transition_once() -> None:
    assert PAGE.count("●") == len({(source, target) for source, target, _, _ in TRANSITIONS})
