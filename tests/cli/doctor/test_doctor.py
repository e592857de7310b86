"""``feedapi doctor`` against the project's own publisher: sound, and with each thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from feedapi_client.cli import doctor as bounds
from feedapi_client.cli.doctor.command import sections
from feedapi_client.testing import Publisher, Quirks, faults
from tests.cli.conftest import Feedapi
from tests.cli.doctor import cases
from tests.cli.doctor.cases import CASES, HARMLESS, Case

SECTIONS = sections()
CHECKS = [check for section in SECTIONS for check in section]
MAX_REQUESTS = 120
Make = Callable[..., Publisher]
MERGED = {old: check.id for check in CHECKS for old in check.was}
DIALECTS = ("v1", "v2-draft", "v2-token")
EVENTS = 250
# What builds faults, or is no fault by itself.
NO_FAULTS = {"Fault", "FaultRule", "FaultTarget", "as_fault", "Edit", "Rewrite"}


@pytest.fixture
def make(feedapi_publisher_factory: Make) -> Make:
    """Return a function that makes a sound publisher of a dialect, with everything it offers."""

    def make(dialect: str, **settings: Any) -> Publisher:
        publisher = feedapi_publisher_factory(
            2,
            dialect=dialect,
            page_size=100,
            checkpoint_every=25,
            stream=dialect != "v1",
            filters=["entity"] if dialect == "v2-draft" else (),
            quirks=Quirks(last_cursor="closed"),
            **settings,
        )
        fill(publisher, 0)
        if dialect != "v1":
            publisher.split(0)
            publisher.split(1, method="cursor-from")
            fill(publisher, EVENTS)
        return publisher

    return make


def fill(publisher: Publisher, first: int) -> None:
    for number in range(first, first + EVENTS):
        publisher.publish(number % 7, {"entity": number % 7, "id": number})


def arguments(publisher: Publisher, *options: str) -> tuple[object, ...]:
    counted = ("--v1-partitions", "2") if publisher.dialect == "v1" else ()
    return ("doctor", publisher.url, *counted, *options)


def examine(feedapi: Feedapi, publisher: Publisher, *options: str) -> tuple[int, dict[str, Any]]:
    result = feedapi(*arguments(publisher, "--json", *options))
    assert result.stderr == ""
    return result.exit_code, orjson.loads(result.stdout)


def found(report: dict[str, Any]) -> dict[str, list[str]]:
    return {
        check["id"]: [finding["text"] for finding in check["findings"]]
        for check in report["checks"]
        if check["findings"]
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_found_on_a_sound_publisher(feedapi: Feedapi, make: Make, dialect: str) -> None:
    code, report = examine(feedapi, make(dialect), "--strict")
    assert found(report) == {}
    assert (code, report["sound"], report["dialect"]) == (0, True, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_found_on_one_that_divides_pages_anew_each_time(
    feedapi: Feedapi, make: Make, dialect: str, seed: int
) -> None:
    _, report = examine(feedapi, make(dialect, seed=seed))
    assert found(report) == {}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_found_on_one_without_events(
    feedapi: Feedapi, feedapi_publisher_factory: Make, dialect: str
) -> None:
    publisher = feedapi_publisher_factory(2, dialect=dialect)
    assert found(examine(feedapi, publisher)[1]) == {}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_specification_allows_is_not_found(
    feedapi: Feedapi, make: Make, dialect: str, name: str
) -> None:
    publisher = make(dialect)
    on = "fetch" if name == "unknown commands" else "any"
    publisher.fail(HARMLESS[name], on=on, times=None)
    assert found(examine(feedapi, publisher)[1]) == {}


LONG = ("endless run", "rate limit")


@pytest.mark.parametrize(
    ("case", "dialect"),
    [
        pytest.param(
            case,
            dialect,
            id=f"{case.name}-{case.finds}-{dialect}",
            # The quick answer tries each fault in one dialect, unless that takes long.
            marks=pytest.mark.slow
            if case.options or case.name in LONG or dialect != case.dialects[-1]
            else (),
        )
        for case in CASES
        for dialect in case.dialects
    ],
)
def test_a_fault_is_found(
    feedapi: Feedapi, make: Make, case: Case, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "Bounds", case.bounds)
    monkeypatch.setenv("WHO", "Bearer me")
    publisher = make(dialect, **case.settings)
    case.change(publisher)
    code, report = examine(feedapi, publisher, *case.options)
    assert MERGED.get(case.finds, case.finds) in found(report)
    level = next(check.level for check in CHECKS if check.id == MERGED.get(case.finds, case.finds))
    if level == "MUST":
        assert code == 1
    assert report["requests"] <= MAX_REQUESTS
    assert len(publisher.requests) <= report["requests"]


def test_every_check_has_a_case_that_it_finds() -> None:
    assert {check.id for check in CHECKS} == {MERGED.get(case.finds, case.finds) for case in CASES}


def test_every_fault_of_the_publisher_is_tried() -> None:
    files = [Path(cases.__file__), Path(__file__).with_name("test_in_motion.py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    for name in set(faults.__all__) - NO_FAULTS:
        assert f"faults.{name}(" in source, name


def test_ids_are_unique_and_every_check_says_what_it_is_about() -> None:
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids) == 50
    for check in CHECKS:
        assert check.requirement.endswith(".")
        assert check.cost.endswith(".")
        assert check.source


# ------------------------------------------------------------------ the command


def test_findings_are_shown_with_what_they_cost_and_where_it_stands(
    feedapi: Feedapi, make: Make
) -> None:
    publisher = make("v2-draft")
    publisher.fail(faults.NoCheckpoint(), times=None)
    result = feedapi(*arguments(publisher))
    assert result.exit_code == 1
    check = next(check for check in CHECKS if check.id == "page-cursor")
    assert "100 events and no cursor" in result.stdout
    assert f"costs: {check.cost.replace('`', '')}" in result.stdout
    assert "specification, Fetch call, checkpoint command; rules R3, R13" in result.stdout
    assert "page-cursor" in result.stdout
    assert "doctor.md#page-cursor" in result.stdout
    assert "2 violated" in result.stdout


def test_a_sound_feed_has_a_short_report(feedapi: Feedapi, make: Make) -> None:
    result = feedapi(*arguments(make("v2-token")))
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3
    assert "sound: " in result.stdout


def test_all_says_why_a_check_was_not_done(feedapi: Feedapi, make: Make) -> None:
    result = feedapi(*arguments(make("v2-token"), "--all"))
    assert "only in dialect v2-draft" in result.stdout
    assert "passed" in result.stdout


def test_a_deviation_is_an_error_only_if_strict(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-draft")
    publisher.quirks = Quirks(integer_lineage=True)
    assert examine(feedapi, publisher)[0] == 0
    assert examine(feedapi, publisher, "--strict")[0] == 1
    code, report = examine(feedapi, publisher, "--strict", "--ignore", "id-text")
    assert (code, found(report)) == (0, {})


def test_ignoring_an_unknown_check_is_an_error(feedapi: Feedapi, make: Make) -> None:
    result = feedapi(*arguments(make("v2-draft"), "--ignore", "nonsense"))
    assert result.exit_code == 2
    assert "there is no check nonsense" in result.stderr


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_feed_that_cannot_be_examined_has_its_own_exit_code(
    feedapi: Feedapi, make: Make, status: int
) -> None:
    publisher = make("v2-draft")
    publisher.fail(status, on="any", times=None)
    result = feedapi(*arguments(publisher, "--json"))
    assert (result.exit_code, result.stdout) == (69, "")
    assert f"status {status}" in result.stderr


def test_nobody_there_has_that_exit_code_too(feedapi: Feedapi) -> None:
    with Publisher().serve() as url:
        pass
    result = feedapi("doctor", url)
    assert result.exit_code == 69
    assert "no answer" in result.stderr


def test_a_v1_feed_needs_the_number_of_its_partitions(feedapi: Feedapi, make: Make) -> None:
    result = feedapi("doctor", make("v1").url)
    assert result.exit_code == 69
    assert "--v1-partitions" in result.stderr


@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_the_bound_on_requests_holds(feedapi: Feedapi, make: Make, limit: int) -> None:
    publisher = make("v2-token")
    _, report = examine(feedapi, publisher, "--max-requests", str(limit))
    assert report["requests"] == len(publisher.requests) == limit
    assert found(report) == {}


def test_the_bound_on_bytes_holds(
    feedapi: Feedapi, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "Bounds", partial(bounds.Bounds, max_bytes=100_000))
    publisher = make("v2-token")
    publisher.fail(faults.EndlessRun(), times=None)
    _, report = examine(feedapi, publisher)
    # A chunk may come on top, and a page of one megabyte is the most that any request brings.
    assert report["bytes"] <= 100_000 + 1024 * 1024


def test_only_the_given_partitions_are_read(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-draft")
    _, report = examine(feedapi, publisher, "-p", "2", "-p", "0")
    assert report["partitions_read"] == [0, 2]
    read = {r.partition for r in publisher.requests if r.kind == "fetch"} - {32767}
    assert read == {0, 2}


def test_credentials_are_sent_and_never_shown(
    feedapi: Feedapi, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "Bearer hunter2secret")
    publisher = make("v2-draft", bearer="hunter2secret")
    code, report = examine(feedapi, publisher, "--auth-env", "WHO", "--strict")
    assert (code, found(report)) == (0, {})
    outcome = {check["id"]: check["outcome"] for check in report["checks"]}
    assert outcome["auth-status"] == "passed"
    assert sum("authorization" not in r.headers for r in publisher.requests) == 1

    def echo(response: Any, request: Any, _: Any) -> Any:
        return faults.Status(500, request.headers.get("authorization", ""))(
            response, request, publisher
        )

    publisher.fail(echo, times=None)
    result = feedapi(*arguments(publisher, "--auth-env", "WHO"))
    assert "status 500" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


def test_text_of_a_publisher_is_escaped(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-draft")
    publisher.fail(faults.Status(400, "\x1b[31mred"), times=None)
    for options in ((), ("--json",)):
        result = feedapi(*arguments(publisher, *options))
        assert "red" in result.stdout
        assert "\x1b" not in result.stdout


def test_a_split_in_the_middle_is_no_fault(feedapi: Feedapi, make: Make) -> None:
    publisher = make("v2-token")

    def split(response: Any, request: Any, _: Any) -> Any:
        publisher.split(publisher.open_partitions()[0])
        return response

    publisher.fail(split, after=12)
    _, report = examine(feedapi, publisher)
    assert found(report) == {}


def test_help_states_the_bounds(feedapi: Feedapi) -> None:
    text = " ".join(feedapi("doctor", "--help").stdout.split())
    assert "120 requests" in text
    assert "32 MiB" in text
    assert "Examples:" in text
