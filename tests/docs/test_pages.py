"""What the pages say about the repository is true: about paths, commands, names, rules and checks.

That links lead somewhere and that documented names exist is checked by ``mkdocs build --strict``,
which `tests.docs.test_site` runs.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter

import pytest

from feedapi_client.cli.command import UNREACHABLE
from feedapi_client.cli.doctor.command import sections
from feedapi_client.cli.doctor.prober import Bounds
from feedapi_client.lineage.states import TRANSITIONS, State
from tests.cli.invoke import LEAVES
from tests.docs import doctor_page
from tests.docs.hooks import hooks
from tests.docs.snippets import PAGES_FOLDER, PARSED, PYTHON_RUN_BY, ROOT, Block, blocks


def page(name: str) -> str:
    return (PAGES_FOLDER / name).read_text(encoding="utf-8")


# Paths and commands

ARCHITECTURE = page("architecture.md")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CI = "".join((ROOT / ".ci" / name).read_text("utf-8") for name in ("run", "steps.sh"))
PATHS = {
    *re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]*(?:\.py)?)`", ARCHITECTURE),
    *re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING),
} - {"build/site"}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_path_exists(path: str) -> None:
    assert any((folder / path).exists() for folder in (ROOT, ROOT / "feedapi_client"))


def test_every_module_of_the_layers_exists() -> None:
    drawing = ARCHITECTURE.partition("```text\n")[2].partition("```")[0]
    folder = ROOT / "feedapi_client"
    for line in drawing.splitlines():
        if match := re.match(r"([a-z]+/)?\s+", line):
            folder = ROOT / "feedapi_client" / match[1] if match[1] else folder
            name = re.match(r"(?:[a-z]+/)?\s+([a-z]+)  ", line)
            if name is not None and folder.name == "runtime":  # one module a line
                assert (folder / f"{name[1]}.py").exists(), line
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (ROOT / "feedapi_client" / name).exists(), line


@pytest.mark.parametrize(
    "command", ["ruff format", "ruff check", "mypy", "pyright", "mkdocs build --strict"]
)
def test_ci_runs_the_commands_of_contributing(command: str) -> None:
    assert f"`{command}" in CONTRIBUTING
    assert f"$bin/{command}" in CI


def test_each_row_of_what_sharing_survives_names_its_test() -> None:
    chapter = page("sharing.md").partition("## What a paused process")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| **")]
    for word in ("Paused", "Failover", "Clock", "Rewind"):
        assert any(row.startswith(f"| **{word}**") for row in rows)
    for row in rows:
        tests = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", row)
        assert tests, row
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), row


# Everyday tasks, whose programs are run

SECTION = page("index.md").partition("\n## Everyday tasks\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([^|-]+) \| (\[.*?) \|$", SECTION, re.MULTILINE)
SNIPPETS = "tests/docs/test_snippets.py"


def test_tasks_are_listed_once() -> None:
    assert len(ROWS) >= 12
    assert len({task for task, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("cell", [row[1] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_a_task_leads_to_is_run_by_tests(cell: str) -> None:
    links = re.findall(r"\]\(([\w/-]+\.md)(?:#([\w-]+))?\)", cell)
    assert links
    found = {test for name, anchor in links for test in run_by(name, anchor)}
    assert found
    assert all((ROOT / test).is_file() for test in found)


def run_by(name: str, anchor: str) -> set[str]:
    """Return the tests that run or read what stands below a heading; below any without one."""
    there = [each for each in blocks(f"docs/pages/{name}") if anchor in ("", slug(each.heading))]
    tests = {test for block in there if (test := named_test(block))}
    chapters = {slug(text.partition("\n")[0]): text for text in page(name).split("\n## ")[1:]}
    if {"docs/dashboards", "docs/alerts"} <= {*re.findall(r"docs/\w+", chapters.get(anchor, ""))}:
        tests.add("tests/telemetry/test_dashboards.py")
    return tests


def named_test(block: Block) -> str | None:
    if block.language == "python":
        return PYTHON_RUN_BY.get(block.page, (SNIPPETS, ""))[0]
    return SNIPPETS if block.language == "sh" else PARSED.get(block.language)


def slug(text: str) -> str:
    return re.sub(r"[^\w]+", "-", text.lower()).strip("-")


# The reference

DOCUMENTED = Counter(
    name
    for path in (PAGES_FOLDER / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
)
MODULES = [
    "feedapi_client",
    "feedapi_client.stores",
    "feedapi_client.quarantine",
    "feedapi_client.operations",
    "feedapi_client.testing",
    "feedapi_client.monitor",
    "feedapi_client.django",
    "feedapi_client.liftbridge",
    "feedapi_client.spark",
]
# Described in the text: classes that protobuf generates have no docstrings.
IN_THE_TEXT = {"feedapi_client.liftbridge.Ack", "feedapi_client.liftbridge.Message"}


def test_no_name_is_documented_twice() -> None:
    assert [name for name, times in DOCUMENTED.items() if times > 1] == []


@pytest.fixture(scope="module")
def documented() -> set[int]:
    """What is documented. The modules are imported before a test: some set a level of logging."""
    return {id(resolved(name)) for name in DOCUMENTED}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(documented: set[int], module: str) -> None:
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    missing = names - IN_THE_TEXT - DOCUMENTED.keys()
    assert [name for name in missing if id(resolved(name)) not in documented] == []


def resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# The planner's table of states

STATES = hooks.on_page_markdown(page("states.md"))


def test_every_state_is_explained() -> None:
    assert hooks.MEANINGS.keys() == set(State)
    for state in State:
        assert f"| `{state.value}` | {hooks.MEANINGS[state]} |" in STATES


def test_every_transition_is_listed_with_links_to_its_rules() -> None:
    for source, target, cause, rules in TRANSITIONS:
        links = ", ".join(f"[{rule}](rules.md#{rule.lower()})" for rule in rules.split())
        assert f"| `{source}` | `{target}` | {cause} | {links} |" in STATES


def test_the_matrix_marks_each_transition_once() -> None:
    assert STATES.count("●") == len({(source, target) for source, target, _, _ in TRANSITIONS})


# Rules, and the tests that carry their numbers

RULES = page("rules.md")
MARKERS = hooks.markers(RULES)


def test_every_rule_has_a_chapter_and_its_tests_in_order() -> None:
    chapters = re.findall(r"^## R(\d+) [^\n]+ \{ #r(\d+) \}$", RULES, re.MULTILINE)
    assert chapters == [(str(rule), str(rule)) for rule in hooks.RULES]
    assert [*MARKERS] == [*hooks.RULES]


@pytest.mark.parametrize("rule", hooks.RULES, ids=lambda rule: f"R{rule}")
def test_a_rule_has_tests_and_the_page_lists_them(rule: int) -> None:
    rendered = hooks.render_tests(rule, MARKERS[rule])
    proofs = hooks.proofs_of(rule, MARKERS[rule])
    assert f'"{len(proofs)} tests prove R{rule}"' in rendered
    assert all(proof.behaviour in rendered and proof.path in rendered for proof in proofs)


def test_no_test_carries_the_number_of_a_rule_that_does_not_exist() -> None:
    assert [test for test in hooks.all_tests() if not set(test.rules) <= set(hooks.RULES)] == []


def test_a_marker_becomes_the_list_of_tests() -> None:
    rendered = hooks.on_page_markdown("before\n<!-- tests: R17 -->\nafter")
    assert rendered.startswith('before\n??? note "')
    assert rendered.endswith("\nafter")


# The checks of ``feedapi doctor``

DOCTOR = page("doctor.md")


def test_the_checks_are_those_of_the_command() -> None:
    assert doctor_page.rendered() == DOCTOR


def test_every_check_has_an_anchor_and_one_for_each_that_it_took_in() -> None:
    ids = [id for section in sections() for check in section for id in (check.id, *check.was)]
    assert re.findall(r'<a id="([\w-]+)">', DOCTOR) == ids
    assert len(ids) == len(set(ids))


def test_options_are_those_of_the_command() -> None:
    named = re.findall(r"`(--[\w-]+)", DOCTOR.partition("<!-- checks")[0])
    assert set(named) <= {flag for each in LEAVES["doctor"].params for flag in each.opts}


def test_bounds_and_exit_code_are_those_of_the_command() -> None:
    bounds = Bounds()
    for words in (
        f"{bounds.max_requests} requests",
        f"{bounds.max_bytes // 1024**2} MiB",
        f"{bounds.page_bytes // 1024**2} MiB of each page",
        f"{bounds.pages} pages of each of {bounds.partitions} partitions",
        f"{bounds.timeout:g} seconds for a request",
        f"; {UNREACHABLE} the feed could not be reached",
    ):
        assert words in DOCTOR
