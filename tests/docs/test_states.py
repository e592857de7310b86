"""The page of a partition's states shows the planner's own table."""

from __future__ import annotations

from feedapi_client.lineage.states import MEANINGS, TRANSITIONS, State
from tests.docs.hooks import hooks
from tests.docs.snippets import PAGES_FOLDER

PAGE = hooks.on_page_markdown((PAGES_FOLDER / "states.md").read_text(encoding="utf-8"))


def test_every_state_is_explained() -> None:
    for state in State:
        assert f"| `{state.value}` | {MEANINGS[state]} |" in PAGE


def test_every_transition_is_listed_with_links_to_its_rules() -> None:
    for transition in TRANSITIONS:
        rules = ", ".join(f"[{rule}](rules.md#{rule.lower()})" for rule in transition.rules)
        row = f"| `{transition.source}` | `{transition.target}` | {transition.cause} | {rules} |"
        assert row in PAGE


def test_the_matrix_marks_each_transition_once() -> None:
    assert PAGE.count("●") == len({(each.source, each.target) for each in TRANSITIONS})
