"""The simulated publisher as publishers are, and what the oracle makes of it."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import orjson
import pytest

from feedapi_client.model import FeedKey, Position
from feedapi_client.status import Health, Problem, ProblemName
from tests.simulation import histories, wire
from tests.simulation.end_evidence import Evidence, Gaps
from tests.simulation.manners import Manners, Rate, drawn
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import Scenario, Settings, Step, generate
from tests.simulation.simulation import run
from tests.simulation.store import Effect, SimulatedDatabase, StoreSession
from tests.simulation.trace import Trace
from tests.simulation.world import Dialect, World

LAG = {"kind": "lag", "on": "fetch"}


class Time:
    now = 0.0


def world(partitions: int = 1, **manners: Any) -> tuple[World, Time]:
    time = Time()
    made = World(
        partitions,
        "v2-token",
        last_cursor=False,
        manners=Manners(**manners),
        now=lambda: time.now,
    )
    return made, time


def page(
    made: World, asked: int = 0, *, echo: str = "", dialect: Dialect = "v2-token"
) -> list[Any]:
    style = wire.PageStyle(vary=False)
    partition = made.partitions[0]
    found = wire.page(made, partition, asked, 0.0, dialect, style, Random(0), echo=echo)
    return [orjson.loads(line) for line in found.lines]


@pytest.mark.parametrize(
    ("empty", "lines"),
    [
        ("cursor", [{"cursor": "f0-0"}]),
        ("echo", [{"cursor": "_last"}]),
        ("silent", []),
        ("204", []),
    ],
)
def test_what_an_empty_page_holds(empty: Any, lines: list[Any]) -> None:
    made, _ = world(empty=empty)
    assert page(made, echo="_last") == lines


def test_keys_of_the_other_dialect_and_in_pascal_case() -> None:
    made, _ = world(other_key=True, pascal_case=True)
    made.publish(0)
    assert [list(line) for line in page(made)] == [["Event"], ["Cursor"]]
    assert [list(line) for line in page(made, dialect="v2-draft")] == [["Data"], ["Cursor"]]


def test_edges_to_partition_zero_are_left_out_in_one_dialect() -> None:
    made, _ = world(zero_edges=True)
    made.split(0, 1, "starts-after")
    version = made.version(0.0)
    found = orjson.loads(wire.discovery(made, version, 0.0, stream=False))
    assert "startsAfterPartition" not in found["partitions"][1]
    (grandchild,) = made.split(1, 1, "starts-after")
    found = orjson.loads(wire.discovery(made, version, 0.0, stream=False))
    assert found["partitions"][grandchild]["startsAfterPartition"] == "1"


@pytest.mark.parametrize(("null", "listed"), [(True, None), (False, [])])
def test_nothing_is_listed_for_a_while(null: bool, listed: Any) -> None:
    made, _ = world(unlisted=3.0, null=null)
    version = made.version(0.0)
    at_first = orjson.loads(wire.discovery(made, version, 2.9, stream=False))
    assert at_first["partitions"] == listed
    assert len(orjson.loads(wire.discovery(made, version, 3.0, stream=False))["partitions"]) == 1


def test_a_rollback_lists_the_old_id_and_keeps_every_event() -> None:
    made, time = world()
    for entity in range(4):
        made.publish(entity)
    time.now = 1.0
    children = made.split(0, 2, "cursor-from")
    made.publish(0)
    time.now = 2.0
    assert made.split_by_transfer() == [0]
    assert made.roll_back(0) == children
    made.publish(1)
    assert [event.entity for event in made.partitions[0].events] == [0, 1, 2, 3, 0, 1]
    assert [[p.id for p in made.listed(at)] for at in (0.5, 1.5, 2.0)] == [[0], children, [0]]
    time.now = 3.0
    made.roll_forward(0, children)
    assert [p.id for p in made.listed(3.0)] == children
    assert [p.id for p in made.listed(2.5)] == [0]
    found = sorted(e.sequence for id in children for e in made.partitions[id].events)
    assert found == [1, 2, 3, 4, 5, 6]


def test_a_rate_grants_so_many_a_second() -> None:
    rate = Rate(2.0)
    granted = sum(rate.grants(now / 10) for now in range(100))
    assert granted == rate.granted == 2 + 2 * 10 - 1
    assert rate.refused == 100 - granted
    assert not Rate(0.0).is_limited


def test_manners_show_what_is_not_the_default() -> None:
    assert repr(Manners(empty="echo", rate=2.0)) == "Manners(empty='echo', rate=2.0)"


def test_each_unkindness_comes_in_a_good_share_of_the_seeds() -> None:
    settings = [generate(seed).settings for seed in range(600)]
    for name in ("zero_edges", "other_key", "pascal_case", "rate", "unlisted", "holds_streams"):
        share = sum(bool(getattr(each.manners, name)) for each in settings) / len(settings)
        assert 0.01 < share < 0.5, name
    assert {each.manners.empty for each in settings} == {"cursor", "echo", "silent", "204"}
    assert {each.manners.ahead for each in settings} == {"echo", "tail", "silent"}
    steps = {step.do for seed in range(600) for step in generate(seed).steps}
    assert steps >= {"roll_back", "fail_over", "operate", "rest"}


def test_who_starts_at_the_end_gets_a_cursor_there() -> None:
    for seed in range(50):
        manners = drawn(Random(seed), dialect="v2-token", from_the_end=True, streams=False)
        assert manners.empty == "cursor"


# ---------------------------------------------------------------------- evidence of an end (R6)


def test_r06_evidence_of_an_end_takes_time_and_answers() -> None:
    evidence = Evidence()
    assert "no discovery" in str(evidence.lacks(0, 0.0))
    evidence.listed([0], 1.0)
    evidence.listed([0], 5.0)
    assert "9.000 s ago" in str(evidence.lacks(0, 10.0))
    assert "0 empty answers" in str(evidence.lacks(0, 11.0))
    evidence.answered(0, 11.0, empty=False)
    for _ in range(3):
        assert evidence.lacks(0, 10.9) is not None
        evidence.answered(0, 10.9, empty=True)
    assert evidence.lacks(0, 11.0) is None
    evidence.failed(1, 11.0)
    assert evidence.lacks(0, 11.0) is None
    evidence.failed(0, 11.0)
    assert "one of its requests has failed 1.000 s ago" in str(evidence.lacks(0, 12.0))
    evidence.failed(None, 15.0)
    evidence.answered(0, 20.9, empty=True)
    assert "a discovery has failed 6.000 s ago" in str(evidence.lacks(0, 21.0))
    assert evidence.lacks(0, 25.0) is None


def test_r06_what_fails_after_the_answer_that_shows_an_end_does_not_count() -> None:
    evidence = shown()
    evidence.failed(None, 20.5)
    assert evidence.lacks(0, 20.6) is None
    evidence.answered(0, 20.7, empty=False)
    assert "0 empty answers" in str(evidence.lacks(0, 50.0))
    evidence = shown()
    evidence.listed([], 20.5)
    assert "no discovery" in str(evidence.lacks(0, 20.6))


def test_gaps_are_filled_once() -> None:
    gaps = Gaps()
    gaps.add(7, range(2, 4))
    assert gaps.count == 2
    copied = gaps.copy()
    assert gaps.take(7, 3)
    assert not gaps.take(7, 3)
    assert not gaps.take(8, 2)
    assert (gaps.count, copied.count) == (1, 2)
    assert repr(gaps) == "7: [2]"


def closed_with_events() -> tuple[Oracle, World, Time, int]:
    """Two events in a partition that is closed, and one in its child."""
    made, time = world()
    made.publish(0)
    made.publish(0)
    (child,) = made.split(0, 1, "starts-after")
    made.publish(0)
    return Oracle(made, transactional=True), made, time, child


def passed_over() -> tuple[Oracle, dict[int, Position]]:
    """The same, read by a process that took an end for real before the second event."""
    oracle, _, _, child = closed_with_events()
    stored = {0: Position("f0-1", "drained"), child: Position(f"f{child}-3")}
    oracle.draining(stored, {0: Position("f0-1")}, shown(), 20.0)
    oracle.effect(Effect(0, 1, 0))
    oracle.effect(Effect(0, 3, child))
    return oracle, stored


def shown(time: float = 20.0, answers: int = 3) -> Evidence:
    evidence = Evidence()
    evidence.listed([0], 20.0 - time)
    for _ in range(answers):
        evidence.answered(0, 20.0, empty=True)
    return evidence


def rules(oracle: Oracle) -> list[str]:
    return [violation.rule for violation in oracle.violations]


@pytest.mark.parametrize("evidence", [shown(time=9.0), shown(answers=2), Evidence()])
def test_r06_an_end_without_evidence_is_found(evidence: Evidence) -> None:
    oracle, *_ = closed_with_events()
    oracle.draining({0: Position("f0-2", "drained")}, {0: Position("f0-1")}, evidence, 20.0)
    assert rules(oracle) == ["evidence"]


def test_r06_what_was_passed_over_at_a_false_end_may_come_late() -> None:
    oracle, _, _, child = closed_with_events()
    oracle.draining({0: Position("f0-1", "drained")}, {0: Position("f0-1")}, shown(), 20.0)
    oracle.effect(Effect(0, 1, 0))
    oracle.effect(Effect(0, 3, child))
    assert rules(oracle) == []
    assert not oracle.complete()
    oracle.effect(Effect(0, 2, 0))
    assert oracle.complete()
    oracle.effect(Effect(0, 2, 0))
    assert rules(oracle) == ["exactly-once"]


def test_r06_what_comes_late_among_events_that_are_repeated_is_in_order() -> None:
    _, made, _, child = closed_with_events()
    oracle = Oracle(made, transactional=False)
    oracle.draining({0: Position("f0-1", "drained")}, {0: Position("f0-1")}, shown(), 20.0)
    oracle.effect(Effect(0, 1, 0))
    oracle.effect(Effect(0, 3, child))
    oracle.began()
    for n, partition in ((1, 0), (2, 0), (3, child)):
        oracle.effect(Effect(0, n, partition))
    assert rules(oracle) == []
    assert oracle.complete()


def test_r06_what_never_comes_is_lost() -> None:
    oracle, _, _, child = closed_with_events()
    oracle.draining({0: Position("f0-1", "drained")}, {0: Position("f0-1")}, shown(), 20.0)
    oracle.effect(Effect(0, 1, 0))
    oracle.effect(Effect(0, 3, child))
    oracle.progressed()
    assert rules(oracle) == ["progress"]


def test_r06_nothing_is_passed_over_without_a_false_end() -> None:
    oracle, _, _, child = closed_with_events()
    oracle.draining({0: Position("f0-2", "drained")}, {0: Position("f0-1")}, shown(), 20.0)
    oracle.effect(Effect(0, 1, 0))
    oracle.effect(Effect(0, 3, child))
    assert rules(oracle) == ["order"]


def test_r06_with_a_listed_end_no_event_is_left_behind_it() -> None:
    time = Time()
    made = World(1, "v2-token", last_cursor=True, now=lambda: time.now)
    made.publish(0)
    made.split(0, 1, "starts-after")
    oracle = Oracle(made, transactional=True)
    oracle.draining({0: Position("f0-0", "drained")}, {0: Position("f0-0")}, shown(), 20.0)
    assert rules(oracle) == ["drained"]


def test_r14_more_refused_than_granted_is_found() -> None:
    oracle, *_ = closed_with_events()
    rate = Rate(1.0)
    rate.granted, rate.refused = 50, 149
    oracle.paced(rate)
    assert rules(oracle) == []
    rate.refused = 151
    oracle.paced(rate)
    assert rules(oracle) == ["pace"]


# ---------------------------------------------------------------------- positions that are changed


def test_a_database_that_goes_back_takes_effects_along() -> None:
    oracle, *_ = closed_with_events()
    oracle.effect(Effect(0, 1, 0))
    known = oracle.known()
    oracle.effect(Effect(0, 2, 0))
    oracle.went_back(known)
    oracle.effect(Effect(0, 2, 0))
    assert rules(oracle) == []
    assert oracle.done == 2


def test_what_is_rewound_is_to_come_again() -> None:
    oracle, made, _, _ = closed_with_events()
    for n in (1, 2):
        oracle.effect(Effect(0, n, 0))
    oracle.rewound(made.partitions[0].events[1:])
    assert oracle.done == 1
    oracle.effect(Effect(0, 2, 0))
    assert rules(oracle) == []


def test_what_is_skipped_is_not_to_come() -> None:
    oracle, made, _, child = closed_with_events()
    oracle.skipped(made.partitions[0].events)
    oracle.effect(Effect(0, 3, child))
    assert (rules(oracle), oracle.complete()) == ([], True)


def test_a_partition_that_is_read_from_before_the_claim_is_found() -> None:
    oracle, *_ = closed_with_events()
    oracle.started(0, "f0-2", Position("f0-2"))
    oracle.started(0, "_first", Position("_first"))
    assert rules(oracle) == []
    oracle.started(0, "f0-1", Position("f0-2"))
    assert rules(oracle) == ["start"]


def test_a_first_start_that_comes_second_needs_no_evidence_of_ends() -> None:
    oracle, *_ = closed_with_events()
    oracle._from_the_end = True
    first = {0: Position("f0-1")}
    oracle.draining({0: Position("f0-2", "drained")}, first, Evidence(), 1.0)
    assert rules(oracle) == []
    oracle.draining({0: Position("f0-2", "drained", 2, 1)}, first, Evidence(), 1.0)
    assert rules(oracle) == ["evidence"]


def test_a_first_start_that_is_refused_as_a_whole_needs_no_evidence() -> None:
    oracle, _, _, child = closed_with_events()
    oracle._from_the_end = True
    first = {0: Position("f0-2", "drained"), child: Position(f"f{child}-3")}
    oracle.draining(first, {child: Position("_first", revision=9)}, Evidence(), 1.0)
    assert rules(oracle) == []
    oracle.draining(first, {4: Position("_first", revision=9)}, Evidence(), 1.0)
    assert rules(oracle) == ["evidence"]


def test_r07_what_was_drained_from_the_outset_is_shown_drained_there_and_nowhere_else() -> None:
    oracle, *_ = closed_with_events()
    oracle._from_the_end = True
    oracle.draining({0: Position("f0-1", "drained")}, {}, Evidence(), 1.0)
    oracle._check_drained(0, Position("f0-1", "drained", revision=9, replaces=3))
    assert rules(oracle) == []
    oracle._check_drained(0, Position("f0-0", "drained", revision=9, replaces=3))
    assert rules(oracle) == ["status"]


def test_r11_a_chosen_partition_may_lack_for_a_while_after_a_rollback() -> None:
    made, time = world()
    oracle = Oracle(made, transactional=True)
    time.now = 100.0
    made.split(0, 2, "cursor-from")
    time.now = 120.0
    made.roll_back(0)
    assert oracle.is_unlisted([0], (), 121.0)
    assert not oracle.is_unlisted([0], (), 140.0)


@pytest.mark.anyio
async def test_what_a_transaction_commits_is_judged_and_known_as_any_save() -> None:
    trace = Trace(lambda: 0.0)
    database = SimulatedDatabase(
        random=Random(0), latency=0.0, trace=trace, on_effect=lambda effect: None
    )
    session, judged = StoreSession(database), list[Any]()
    session.on_save = lambda positions, stored, began: judged.append(dict(positions))
    key, first = FeedKey("http://f", "n"), Position("f0-1", revision=1)
    end = Position("f0-2", "drained", revision=5, replaces=1)
    transaction = session.transaction()
    await session.save(key, {0: first}, transaction=transaction)
    assert (judged, session.known) == ([], {})
    await transaction.commit()
    assert (judged, session.known) == ([{0: first}], {0: first})
    await session.save(key, {0: end})
    assert session.known[0].status == "drained"
    other = StoreSession(database)
    await other.save(key, {0: Position("f0-1", revision=8, replaces=5)})
    assert (session.known[0].status, (await session.load(key))[0].status) == ("drained", "open")


def test_r06_what_came_late_and_was_not_committed_may_come_again() -> None:
    oracle, stored = passed_over()
    oracle._transactional = False
    oracle.effect(Effect(0, 2, 0))
    oracle.effect(Effect(0, 2, 0))
    assert rules(oracle) == []
    oracle.effect(Effect(0, 3, max(stored)))
    assert rules(oracle) == ["exactly-once"]


def test_r07_r14_ends_are_asked_for_as_fast_as_the_publisher_allows() -> None:
    settings = Settings(partitions=12, start="last", give_up_after=2.0, manners=Manners(rate=2.0))
    steps = (Step(0.0, "publish", {"count": 1, "entities": 12}),)
    outcome = run(Scenario("ends under a limit", settings, steps))
    assert outcome.failure is None, outcome.text


def test_r06_events_of_a_response_that_gave_its_slot_back_are_no_silence() -> None:
    settings = Settings(
        partitions=4,
        last_cursor=False,
        way="events",
        transactional=False,
        store_latency=0.5,
        handling=1.0,
        concurrent=2,
        batch_bytes=1,
        instances=2,
    )
    silent = {"kind": "silent", "on": "fetch", "share": 1.0, "seconds": 8.0}
    steps = (
        Step(0.0, "publish", {"count": 15, "entities": 12}),
        Step(0.0, "split", {"which": 3, "parts": 3, "method": "starts-after"}),
        Step(0.0, "life_step", {"what": "freeze", "seconds": 30.0, "which": 1}),
        Step(0.0, "fault", silent),
        Step(12.0, "publish", {"count": 1, "entities": 12}),
    )
    failures = {run(Scenario(f"slot {seed}", settings, steps)).failure for seed in range(8)}
    assert failures == {None}


def test_r13_a_replica_names_its_older_end_to_nobody_who_began_behind_it() -> None:
    """An iteration that begins at a stored cursor knows no place before it."""
    steps = (
        Step(0.1, "publish", {"count": 8, "entities": 12}),
        Step(1.2, "life_step", {"what": "leave"}),
        Step(0.0, "fault", {**LAG, "share": 1.0, "seconds": 15.0, "behind": 60.0}),
        Step(12.0, "publish", {"count": 36, "entities": 12}),
    )
    settings = Settings(page_size=5, manners=Manners(ahead="tail"))
    failures = {run(Scenario(f"older {seed}", settings, steps)).failure for seed in range(8)}
    assert failures == {None}


def test_what_was_known_before_a_failover_is_not_held_against_a_process() -> None:
    oracle, _, _, child = closed_with_events()
    oracle.went_back(None)
    oracle.started(0, "f0-1", Position("f0-2"), known=0)
    oracle.delivered(child, {0: Position("f0-1")}, known=0)
    assert rules(oracle) == []
    oracle.started(0, "f0-1", Position("f0-2"), known=1)
    oracle.delivered(child, {0: Position("f0-1")}, known=1)
    assert rules(oracle) == ["start", "parent-first"]


def test_r11_a_partition_that_is_open_again_must_be_a_problem() -> None:
    made, time = world()
    made.publish(0)
    made.split(0, 2, "cursor-from")
    stored = {0: Position("f0-1", "superseded"), 1: Position("f0-1"), 2: Position("f0-1")}
    oracle = Oracle(made, transactional=True)
    assert oracle.rolled_back(stored) == set()
    time.now = 1.0
    made.roll_back(0)
    assert oracle.rolled_back(stored) == {0}
    nothing, since = Health(live=True, ready=True, problems=()), {0: 1.0}
    oracle.shows_rollback(nothing, since, now=2.0)
    assert rules(oracle) == []
    named = Problem(ProblemName.ROLLED_BACK, 0, datetime.now(UTC), "is listed as open again")
    oracle.shows_rollback(Health(live=True, ready=False, problems=(named,)), since, now=60.0)
    assert rules(oracle) == []
    oracle.shows_rollback(nothing, since, now=60.0)
    assert rules(oracle) == ["report"]


def test_r06_a_report_of_what_was_passed_over_must_be_true_and_come() -> None:
    line = "feed f, partition 0: there is an event behind the end that is stored. If that"
    oracle, stored = passed_over()
    oracle.read_to_the_end(stored)
    assert rules(oracle) == ["end"]
    oracle, stored = passed_over()
    oracle.heard([line])
    oracle.read_to_the_end(stored)
    assert rules(oracle) == []
    oracle.heard([line.replace("partition 0", "partition 1")])
    assert rules(oracle) == ["report"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "history",
    [
        histories.end_behind_a_gateway,
        histories.end_behind_a_long_lag,
        histories.end_behind_a_silent_gateway,
        histories.older_ends,
    ],
)
def test_what_publishers_do_costs_no_event(history: Any, seed: int) -> None:
    outcome = run(history(seed))
    assert outcome.failure is None, outcome.text
