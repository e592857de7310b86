"""What a partition does next, for all combinations of its facts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from feedapi_client import Limits, RetryPolicy
from feedapi_client.lineage.states import Entry, State
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.runtime.partition import BufferBudget, Phase, ReadEnd, RuntimePartition
from feedapi_client.runtime.scheduling import Turn

pytestmark = pytest.mark.anyio

LIMITS = Limits(max_batch_bytes=1000)
FACTS: tuple[str, ...] = (
    "turn",
    "started",
    "paused",
    "refused",
    "at_end",
    "full",
    "end",
    "gave_way",
    "watches",
)


def partition(state: State, facts: dict[str, bool]) -> RuntimePartition:
    entry = Entry(0, state=state, end="z" if facts["at_end"] else None)
    p = RuntimePartition(
        entry,
        budget=BufferBudget(LIMITS.max_buffered_bytes),
        limits=LIMITS,
        retry=RetryPolicy(),
        clock=lambda: 0.0,
    )
    if facts["started"]:
        p.start("_first")
    if facts["full"] or facts["gave_way"]:
        p.received(CheckpointedEvents([], "c", 2000 if facts["full"] else 1))
    if facts["gave_way"]:
        p.gave_way = bool(p.pending)
    if facts["end"]:
        p.reached_end(ReadEnd("z", closed=True))
    p.trouble.refused = facts["refused"]
    if facts["turn"]:
        p.requested(Turn(lambda: 0.0))
    return p


def expected(state: State, is_: dict[str, bool], *, follow: bool) -> Phase:
    """The rules, the first that holds."""
    holds = is_["full"] or is_["gave_way"]
    rules = [
        (is_["turn"], Phase.REQUEST),
        (not is_["started"] or state not in (State.READING, State.CAUGHT_UP), Phase.STOPPED),
        (is_["paused"], Phase.PAUSED),
        (is_["refused"], Phase.DISCOVERY),
        (is_["at_end"], Phase.COMMIT),
        (not follow and state is State.CAUGHT_UP, Phase.ENDED),
        (holds and (is_["watches"] or is_["end"]), Phase.DELIVERY),
        (is_["full"] or is_["gave_way"], Phase.DELIVERY),
    ]
    return next((phase for holds, phase in rules if holds), Phase.DUE)


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("state", [State.READING, State.CAUGHT_UP, State.WAITING, State.DRAINED])
async def test_the_phase_follows_from_the_facts(state: State, follow: bool) -> None:
    for values in product([False, True], repeat=len(FACTS)):
        facts = dict(zip(FACTS, values, strict=True))
        p = partition(state, facts)
        how: dict[str, Any] = {"paused": facts["paused"], "watches": facts["watches"]}
        phases = [p.phase(LIMITS, follow=follow, **how) for _ in range(2)]
        assert phases == [expected(state, facts, follow=follow)] * 2, (state, facts)


@pytest.mark.parametrize("paused", [True, False])
async def test_what_is_drained_is_looked_at_once_asked_for(paused: bool) -> None:
    p = partition(State.DRAINED, dict.fromkeys(FACTS, False))
    p.look(1.0)
    phase = p.phase(LIMITS, paused=paused, follow=True, watches=False)
    assert phase is (Phase.PAUSED if paused else Phase.LOOK)
    p.look(None)
    assert p.phase(LIMITS, paused=paused, follow=True, watches=False) is Phase.STOPPED


async def test_what_a_request_of_an_earlier_term_brings_does_not_count() -> None:
    p = partition(State.READING, dict.fromkeys(FACTS, False) | {"started": True, "turn": True})
    term = p.term
    p.received(CheckpointedEvents([], "read", 1))
    p.stop()
    assert p.turn is not None, "it counts until its task has ended"
    assert p.turn.scope.cancel_called
    assert (p.term, p.read_cursor, list(p.pending)) == (term + 1, "_first", [])
