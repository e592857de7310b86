"""The dashboard, the alert rules and the page speak of metrics that are really exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from feedapi_client import PartitionState, ProblemName
from feedapi_client.telemetry import METRICS
from feedapi_client.telemetry.metrics import Kind
from tests.docs.snippets import PAGES_FOLDER, ROOT
from tests.telemetry.prometheus import exported

PAGE = (PAGES_FOLDER / "operating.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs" / "dashboards" / "feedapi.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load(
    (ROOT / "docs" / "alerts" / "feedapi.rules.yml").read_text(encoding="utf-8")
)["groups"][0]["rules"]
# Labels that do not come from the library: the bound of a bucket, and the target that was scraped.
OF_PROMETHEUS = {"le", "instance"}

_WORD = re.compile(r"[a-zA-Z_]\w*")
_SELECTOR = re.compile(r"\b((?:feedapi|messaging)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!=|=)\s*\"([^\"]*)\"")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of each series that is exported, by its name."""
    return exported()


def dashboard_expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"].removeprefix("label_values(")


def rule_expressions() -> Iterator[str]:
    return (rule["expr"] for rule in RULES)


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading."""
    below = PAGE.partition(f"{heading}\n")[2]
    assert below, heading
    lines = below[below.index("\n|") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *rule_expressions()])
def test_an_expression_asks_for_what_is_exported(
    expression: str, series: dict[str, set[str]]
) -> None:
    grouped = {
        label.strip() for group in _GROUPING.findall(expression) for label in group.split(",")
    }
    rest = _GROUPING.sub("", expression)
    asked = [found for found in _SELECTOR.findall(rest) if found[0] not in _labels(series)]
    assert asked, "it asks for a metric"
    for name, matchers in asked:
        assert name in series
        labels = series[name] | OF_PROMETHEUS
        for label, value in _MATCHER.findall(matchers):
            assert label in labels
            assert_known(label, value)
        assert grouped <= labels


def _labels(series: dict[str, set[str]]) -> set[str]:
    return set.union(*series.values())


def assert_known(label: str, value: str) -> None:
    known: dict[str, set[str]] = {
        "feedapi_problem": {name.value for name in ProblemName},
        "feedapi_partition_state": {state.value for state in PartitionState},
        "messaging_operation_name": {"fetch", "commit", "process"},
    }
    if label in known:
        assert set(value.split("|")) <= known[label]


@pytest.mark.parametrize("texts", [[rule["annotations"] for rule in RULES], DASHBOARD["panels"]])
def test_labels_in_texts_are_exported(texts: list[Any], series: dict[str, set[str]]) -> None:
    shown = re.findall(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}", str(texts))
    assert set(shown) <= _labels(series) | OF_PROMETHEUS
    assert shown


def test_every_rule_says_how_bad_it_is_and_what_happened() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_page_lists_every_alert() -> None:
    listed = [row[0].strip("`") for row in table("## Dashboard and alerts")]
    assert sorted(listed) == sorted(rule["alert"] for rule in RULES)


def test_the_page_lists_every_metric_as_it_is_exported(series: dict[str, set[str]]) -> None:
    rows = table("## Metrics and traces")
    assert [(row[0].strip("`"), row[2], row[3]) for row in rows] == [
        (metric.name, metric.kind.value, metric.description) for metric in METRICS
    ]
    for row, metric in zip(rows, METRICS, strict=True):
        name = row[1].strip("`")
        names = [f"{name}_bucket"] if metric.kind is Kind.HISTOGRAM else [name]
        assert set(names) <= series.keys()
    named = {row[1].strip("`") for row in rows}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in series} == named


def test_the_attributes_of_the_table_are_those_that_are_exported(
    series: dict[str, set[str]],
) -> None:
    common = {"messaging_system", "messaging_destination_name", "messaging_consumer_group_name"}
    for metric in METRICS:
        base = metric.name.replace(".", "_")
        (labels,) = [
            found
            for name, found in series.items()
            if re.fullmatch(f"{base}(_seconds|_bytes)?(_total|_count)?", name)
        ]
        own = {label for label in labels if not label.startswith("otel_scope")} - common
        known = {attribute.replace(".", "_") for attribute in metric.attributes}
        assert own <= known, metric.name
        assert known - own <= {"error_type"}, f"{metric.name}: an error is not always there"


def test_the_page_lists_every_problem() -> None:
    assert [row[0].strip("`") for row in table("## Health")] == [name.value for name in ProblemName]
