"""Each alert fires when it should and only then, by Prometheus' own promtool.

What it is asked about are series as `Monitor` exports them of a consumer, minute by minute.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import yaml

from feedapi_client import Batch, FeedConsumer, Quarantine, Retry
from feedapi_client.monitor.exposition import Exposition
from feedapi_client.monitor.snapshots import take_snapshots
from feedapi_client.telemetry import meters
from feedapi_client.testing import Publisher
from tests import components
from tests.consumer.helpers import limits
from tests.docs.snippets import ROOT, blocks
from tests.telemetry.promtool import Series, changed, check, firing, history, parsed
from tests.telemetry.test_dashboards import RULES, dashboard_expressions
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.slow

FILE = ROOT / "docs" / "alerts" / "feedapi.rules.yml"
ALERTS = [rule["alert"] for rule in RULES]
QUARANTINED = "feedapi_consumer_quarantined_total"
FAILURES = "feedapi_consumer_handler_failures_total"
FEED = "http://feed/feed"
GROUPED = {"messaging_destination_name": FEED, "messaging_consumer_group_name": "default"}
LONGEST = 180
FIRING = 'alertstate="firing"'


@contextmanager
def scraping(consumer: FeedConsumer) -> Iterator[Callable[[], Series]]:
    exporter = Exposition([consumer])
    try:
        yield lambda: scrape(exporter, consumer)
    finally:
        exporter.close()


def scrape(exporter: Exposition, consumer: FeedConsumer) -> Series:
    return parsed(exporter.render("", take_snapshots([consumer])).decode(), instance="a")


async def _quarantining() -> list[Series]:
    """Scrapes of a consumer: when it is open, after one event in quarantine, and after two more.

    The first one is of partition 0, the second ones of partition 1 with another error.
    """
    publisher = Publisher(2)
    scrapes: list[Series] = []

    async def refuse(batch: Batch) -> None:
        for event in batch.events:
            if event.json()["n"] == "bad":
                raise (ValueError if batch.partition == 0 else LookupError)("refused")

    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, limits=limits(), follow=False) as consumer,
    ):
        with scraping(consumer) as scrape, anyio.fail_after(60):
            policy = Retry(attempts=2, base_delay=0.001, max_delay=0.002, then=Quarantine())
            scrapes.append(scrape())
            publisher.extend(0, [{"n": "good"}, {"n": "bad"}])
            publisher.extend(1, [{"n": "good"}])
            await consumer.run(refuse, on_failure=policy)
            scrapes.append(scrape())
            publisher.extend(1, [{"n": "bad"}, {"n": "bad"}])
            await consumer.run(refuse, on_failure=policy)
            scrapes.append(scrape())
    return scrapes


@pytest.fixture(scope="module")
def scrapes() -> list[Series]:
    components.require("promtool")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(meters, "_FRESH_SECONDS", -1)
        return anyio.run(_quarantining)


@pytest.fixture(scope="module")
def healthy(scrapes: list[Series]) -> Series:
    """Series of a consumer that has consumed and committed, and waits for more, all caught up."""
    series = {key: 0.1 if "_age_" in key[0] else value for key, value in scrapes[1].items()}
    for metric in (QUARANTINED, FAILURES):
        series = changed(series, metric, 0)
    for metric in ("live", "ready"):
        series = changed(series, f"feedapi_consumer_{metric}", 1)
    return changed(series, "feedapi_consumer_problems", 0)


def test_promtool_accepts_the_configuration_of_the_documentation(tmp_path: Path) -> None:
    (text,) = [
        block.text for block in blocks("docs/pages/operating.md") if block.language == "yaml"
    ]
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    done = subprocess.run(
        [components.require("promtool"), "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


def test_promtool_accepts_the_rules() -> None:
    result = subprocess.run(
        [components.require("promtool"), "check", "rules", FILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(RULES)} rules found" in result.stdout


def test_no_alert_fires_for_a_healthy_consumer(healthy: Series, tmp_path: Path) -> None:
    expected = [(minute, firing(alert), False) for alert in ALERTS for minute in (1, 60, LONGEST)]
    check(tmp_path, FILE, history((LONGEST + 1, healthy)), expected)


def test_the_first_quarantined_event_fires_the_alert(scrapes: list[Series], tmp_path: Path) -> None:
    opened, one, _ = scrapes
    assert not any(value for key, value in opened.items() if key[0] == QUARANTINED)
    alert = firing("FeedapiEventsQuarantined")
    expected = [(29, alert, False), (31, alert, True), (80, alert, True), (100, alert, False)]
    annotations = {
        "summary": "default put events into quarantine",
        "description": "See: feedapi quarantine ls",
    }
    alerts = [
        {
            "eval_time": "31m",
            "alertname": "FeedapiEventsQuarantined",
            "exp_alerts": [
                {
                    "exp_labels": {**GROUPED, "severity": "warning"},
                    "exp_annotations": annotations,
                }
            ],
        }
    ]
    check(tmp_path, FILE, history((30, opened), (120, one)), expected, alerts)


PROBLEMS, PARTITIONS = "feedapi_consumer_problems", "feedapi_consumer_partitions"
STATES: list[tuple[str, str, float, dict[str, str], int]] = [
    ("FeedapiConsumerNotLive", "feedapi_consumer_live", 0, {}, 2),
    ("FeedapiConsumerNotReady", "feedapi_consumer_ready", 0, {}, 11),
    ("FeedapiPartitionBehind", "feedapi_consumer_caught_up_age_seconds", 1900, {}, 6),
    ("FeedapiHandlerSlow", "feedapi_consumer_in_flight_age_seconds", 301, {}, 1),
    ("FeedapiFetchFailing", PROBLEMS, 1, {"feedapi_problem": "fetch-failing"}, 11),
    ("FeedapiDiscoveryFailing", PROBLEMS, 1, {"feedapi_problem": "discovery-failing"}, 11),
    ("FeedapiPartitionParked", PARTITIONS, 1, {"feedapi_partition_state": "parked"}, 1),
    ("FeedapiPartitionParked", PARTITIONS, 1, {"feedapi_partition_state": "vanished"}, 1),
]


@pytest.mark.parametrize(("alert", "name", "value", "labels", "minutes"), STATES)
def test_an_alert_fires_for_its_state_alone(
    alert: str,
    name: str,
    value: float,
    labels: dict[str, str],
    minutes: int,
    healthy: Series,
    tmp_path: Path,
) -> None:
    bad = changed(healthy, name, value, **labels)
    expected = [(28, firing(each), False) for each in ALERTS]
    expected += [(30 + minutes, firing(each), each == alert) for each in ALERTS]
    check(tmp_path, FILE, history((30, healthy), (30, bad)), expected)


CONSUMED = "messaging_client_consumed_messages_total"
COMMITS = "messaging_client_operation_duration_seconds_bucket"
Scrapes = list[tuple[int, Series]]


def busy_then_quiet(series: Series) -> Scrapes:
    """Two hours with an event a minute, then none for two more."""
    busy = [(1, changed(series, CONSUMED, n)) for n in range(120)]
    return [*busy, (120, busy[-1][1])]


def slow_commits(series: Series) -> Scrapes:
    def after(minutes: int) -> Series:
        return {
            key: float(60 * minutes if float(dict(key[1])["le"]) >= 10 else 0)
            if key[0] == COMMITS and dict(key[1])["messaging_operation_name"] == "commit"
            else value
            for key, value in series.items()
        }

    return [(1, after(minutes)) for minutes in range(40)]


def other_consumer(series: Series) -> Series:
    """The series of a consumer of another name beside those of the one there is."""
    other = {
        (name, tuple((key, "other" if value == "default" else value) for key, value in labels)): v
        for (name, labels), v in series.items()
    }
    return {**series, **other}


def other_instance(series: Series) -> Series:
    second = {
        (name, tuple(sorted({**dict(labels), "instance": "b"}.items()))): value
        for (name, labels), value in series.items()
    }
    return {**series, **second}


QUARANTINES: dict[str, tuple[Callable[[list[Series]], Scrapes], list[tuple[int, bool]]]] = {
    "an event before the first scrape": (
        lambda s: [(10, {}), (120, s[1])],
        [(9, False), (11, True), (90, False)],
    ),
    "another partition and another error": (
        lambda s: [(5, s[0]), (95, s[1]), (30, s[2])],
        [(91, False), (102, True)],
    ),
    "a restart without quarantined events": (
        lambda s: [(100, s[1]), (30, s[0])],
        [(129, False)],
    ),
}


@pytest.mark.parametrize("case", QUARANTINES)
def test_quarantined_events_fire_the_alert_where_they_are_new(
    case: str, scrapes: list[Series], tmp_path: Path
) -> None:
    make, expected = QUARANTINES[case]
    alert = firing("FeedapiEventsQuarantined")
    check(tmp_path, FILE, history(*make(scrapes)), [(at, alert, fires) for at, fires in expected])


HISTORIES: dict[str, tuple[str, Callable[[Series], Scrapes], list[tuple[int, bool]]]] = {
    "a handler that fails again and again": (
        "FeedapiHandlerFailing",
        lambda series: [(1, changed(series, FAILURES, n)) for n in range(30)],
        [(8, False), (25, True)],
    ),
    "a feed that answers and publishes nothing": (
        "FeedapiFeedQuiet",
        busy_then_quiet,
        [(110, False), (170, False), (195, True)],
    ),
    "a feed that does not answer is not called quiet": (
        "FeedapiFeedQuiet",
        lambda series: busy_then_quiet(changed(series, "feedapi_consumer_caught_up", 0)),
        [(195, False)],
    ),
    "slow commits": ("FeedapiCommitSlow", slow_commits, [(8, False), (30, True)]),
    "one of several consumers is gone": (
        "FeedapiConsumerAbsent",
        lambda series: [(30, other_consumer(series)), (60, series)],
        [(28, False), (50, True)],
    ),
    "all consumers are gone": (
        "FeedapiConsumerAbsent",
        lambda series: [(30, series), (60, {})],
        [(28, False), (50, True)],
    ),
    "there never was one": ("FeedapiConsumerAbsent", lambda _: [], [(20, True)]),
    "one of several instances is gone": (
        "FeedapiInstanceMissing",
        lambda series: [(40, other_instance(series)), (60, series)],
        [(39, False), (55, True), (90, False)],
    ),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_an_alert_fires_after_what_happened(case: str, healthy: Series, tmp_path: Path) -> None:
    alert, make, expected = HISTORIES[case]
    fires = [(at, firing(alert), fires) for at, fires in expected]
    if case == "one of several consumers is gone":
        fires.append((50, f'ALERTS{{messaging_consumer_group_name="other",{FIRING}}}', True))
    check(tmp_path, FILE, history(*make(healthy)), fires)


def test_every_alert_has_a_test() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [alert for alert in ALERTS if f'"{alert}"' not in tested] == []


@pytest.mark.parametrize("expression", [*dashboard_expressions()])
def test_every_panel_has_data_on_what_is_exported(
    expression: str, healthy: Series, tmp_path: Path
) -> None:
    """Those that show only what is wrong are asked on series where something is."""
    series = healthy
    if "feedapi_consumer_problems" in expression:
        series = changed(series, "feedapi_consumer_problems", 1)
    if "feedapi_consumer_leases" in expression:
        labels = tuple(sorted({**GROUPED, "instance": "a"}.items()))
        series = {**series, ("feedapi_consumer_leases", labels): 2}
    filled = expression
    for variable, value in {"$__rate_interval": "5m", "$feed": ".*", "$consumer": ".+"}.items():
        filled = filled.replace(variable, value)
    if "label_values" in filled or filled.count("(") < filled.count(")"):
        filled = filled.split(",")[0]
    (tmp_path / "no_rules.yml").write_text(yaml.safe_dump({"groups": []}), encoding="utf-8")
    steps = [(1, _later(series, minute)) for minute in range(20)]
    check(tmp_path, tmp_path / "no_rules.yml", history(*steps), [(15, filled, True)])


def _later(series: Series, minutes: int) -> Series:
    """The series some minutes later: counters have grown."""
    grows = ("_total", "_count", "_sum", "_bucket")
    return {
        key: value * (1 + minutes) if key[0].endswith(grows) else value
        for key, value in series.items()
    }
