"""The page of the rules has every rule, and every rule has tests that carry its number."""

from __future__ import annotations

import re

import pytest

from tests.docs.hooks import hooks
from tests.docs.snippets import PAGES_FOLDER

PAGE = (PAGES_FOLDER / "rules.md").read_text(encoding="utf-8")
MARKERS = hooks.markers(PAGE)


def test_every_rule_has_a_chapter_and_its_tests_in_order() -> None:
    chapters = re.findall(r"^## R(\d+) [^\n]+ \{ #r(\d+) \}$", PAGE, re.MULTILINE)
    expected = [str(rule) for rule in hooks.RULES]
    assert [number for number, _ in chapters] == expected
    assert [anchor for _, anchor in chapters] == expected
    assert [str(rule) for rule in MARKERS] == expected


@pytest.mark.parametrize("rule", hooks.RULES, ids=lambda rule: f"R{rule}")
def test_a_rule_has_tests_and_the_page_lists_them(rule: int) -> None:
    rendered = hooks.render_tests(rule, MARKERS[rule])
    proofs = hooks.proofs_of(rule, MARKERS[rule])
    assert f'"{len(proofs)} tests prove R{rule}"' in rendered
    assert all(proof.behaviour in rendered and proof.path in rendered for proof in proofs)


def test_no_test_carries_the_number_of_a_rule_that_does_not_exist() -> None:
    assert [test for test in hooks.all_tests() if not set(test.rules) <= set(hooks.RULES)] == []


def test_a_marker_becomes_the_list_of_tests() -> None:
    page = hooks.on_page_markdown("before\n<!-- tests: R17 -->\nafter")
    assert page.startswith('before\n??? note "')
    assert page.endswith("\nafter")
