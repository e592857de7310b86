"""Histories that are worth a name: each led to lost, repeated or stuck events once."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.clock import Backend
from tests.simulation.manners import Manners
from tests.simulation.scenario import Scenario, Settings, Step


def crowded_out_after_a_failure() -> tuple[Settings, list[Step]]:
    """Many large partitions, a slow application, and one failure of each request."""
    settings = Settings(
        partitions=120,
        latency=0.3,
        handling=0.2,
        padding=5_000,
        page_size=10,
        batch_bytes=20_000,
        buffer_bytes=1_000_000,
    )
    return settings, [
        Step(0.0, "publish", {"count": 1200, "entities": 240}),
        Step(0.0, "fault", {"kind": "429", "on": "fetch", "share": 0.5, "seconds": 2.0}),
        Step(2.0, "fault", {"kind": "503", "on": "fetch", "share": 0.5, "seconds": 2.0}),
        Step(20.0, "fault", {"kind": "503", "on": "fetch", "share": 0.5, "seconds": 2.0}),
    ]


def cancelled_while_the_planner_acts() -> tuple[Settings, list[Step]]:
    """Calls are cancelled, and the store fails, while splits are carried out."""
    settings = Settings(partitions=2, impatience=0.7, store_latency=0.2, stubborn=True)
    return settings, [
        Step(0.0, "publish", {"count": 20, "entities": 4}),
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(0.1, "store_fails", {"share": 0.5, "seconds": 2.0}),
        Step(0.1, "publish", {"count": 20, "entities": 4}),
        Step(3.0, "split", {"which": 1, "parts": 2, "method": "starts-after"}),
        Step(0.1, "publish", {"count": 20, "entities": 4}),
    ]


def discovery_lags_behind_splits() -> tuple[Settings, list[Step]]:
    """A replica, which serves fetches too, lists partitions that were split meanwhile."""
    return Settings(partitions=1), [
        Step(0.0, "publish", {"count": 20, "entities": 4}),
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(0.0, "fault", _lag("both", seconds=30.0)),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 10.0}),
        Step(0.5, "publish", {"count": 20, "entities": 4}),
        Step(3.0, "split", {"which": 1, "parts": 2, "method": "cursor-from"}),
        Step(1.0, "life_step", {"what": "down", "seconds": 1.0}),
        Step(1.0, "publish", {"count": 20, "entities": 4}),
    ]


def selection_with_cursors_of_its_own() -> tuple[Settings, list[Step]]:
    """With a selection, `lastCursor` says nothing: a cursor equals it by chance (R6)."""
    return Settings(selected=True, page_size=1, checkpoint_every=1), [
        Step(0.0, "publish", {"count": 24, "entities": 2}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(5.0, "publish", {"count": 24, "entities": 2}),
    ]


def selection_from_the_end() -> tuple[Settings, list[Step]]:
    """With a selection and ``start="last"`` the end is asked with that selection (R7)."""
    return Settings(selected=True, start="last", partitions=2), [
        Step(0.0, "publish", {"count": 24, "entities": 4}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(5.0, "publish", {"count": 24, "entities": 4}),
    ]


def closed_partition_at_a_lagging_replica() -> tuple[Settings, list[Step]]:
    """A replica lags while a partition is closed: its end is not the end (R6)."""
    return Settings(page_size=5), [
        Step(0.0, "publish", {"count": 20, "entities": 4}),
        Step(5.0, "publish", {"count": 20, "entities": 4}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
        Step(0.0, "fault", _lag("fetch", seconds=20.0)),
        Step(1.0, "publish", {"count": 20, "entities": 4}),
        Step(20.0, "publish", {"count": 4, "entities": 4}),
    ]


def commit_cancelled() -> tuple[Settings, list[Step]]:
    """Commits that take long are cancelled and made again (R20)."""
    settings = Settings(transactional=False, impatience=0.6, store_latency=0.05, batch_bytes=1)
    return settings, [
        Step(0.0, "publish", {"count": 40, "entities": 4}),
        Step(2.0, "publish", {"count": 40, "entities": 4}),
    ]


def ancestors_unknown() -> tuple[Settings, list[Step]]:
    """Two splits while the consumer is down, of a publisher that names the last ancestor only.

    The consumer can't go on exactly once, and has to say so (R9).
    """
    return Settings(whole_lineage=False), [
        Step(0.0, "publish", {"count": 20, "entities": 4}),
        Step(3.0, "life_step", {"what": "down", "seconds": 10.0}),
        Step(1.0, "split", {"which": 0, "parts": 1, "method": "cursor-from"}),
        Step(1.0, "split", {"which": 0, "parts": 1, "method": "cursor-from"}),
        Step(20.0, "publish", {"count": 4, "entities": 4}),
    ]


def begun_and_split_while_down() -> tuple[Settings, list[Step]]:
    """A partition begins and is split, and the consumer sees its successor only.

    The successor has to be read from its first event, and that has to be reported (R9).
    """
    return Settings(), [
        Step(0.0, "publish", {"count": 20, "entities": 4}),
        Step(3.0, "life_step", {"what": "down", "seconds": 10.0}),
        Step(1.0, "split", {"which": 0, "parts": 1, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 8, "entities": 4}),
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(20.0, "publish", {"count": 4, "entities": 4}),
    ]


def split_of_a_waiting_partition() -> tuple[Settings, list[Step]]:
    """A cursor split of a partition that still waits for its parent (R8, R9)."""
    return Settings(handling=0.3, page_size=5, batch_bytes=1), [
        Step(0.0, "publish", {"count": 60, "entities": 3}),
        Step(0.0, "split", {"which": 0, "parts": 1, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 20, "entities": 3}),
        Step(0.5, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
        Step(0.5, "publish", {"count": 20, "entities": 3}),
    ]


def streams_that_are_always_due() -> tuple[Settings, list[Step]]:
    """More streams than slots: one that was given up once must still get its turn (R14)."""
    return Settings(partitions=4, stream=True, concurrent=2), [
        Step(0.0, "split", {"which": 0, "parts": 3, "method": "cursor-from"}),
        Step(8.502, "life_step", {"what": "stop"}),
        Step(9.97, "publish", {"count": 4, "entities": 12}),
    ]


def an_older_version_knows_no_child() -> tuple[Settings, list[Step]]:
    """A deployment from version 1: old instances list neither children nor successors (R9)."""
    return Settings(partitions=4, dialect="v1"), [
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 3.0}),
        Step(0.0, "split", {"which": 3, "parts": 3, "method": "starts-after"}),
        Step(0.0, "split", {"which": 4, "parts": 1, "method": "cursor-from"}),
        Step(0.6, "split", {"which": 1, "parts": 2, "method": "cursor-from"}),
        Step(0.1, "publish", {"count": 16, "entities": 8}),
    ]


def second_consumer_after_a_split() -> tuple[Settings, list[Step]]:
    """One reads a child that has no position yet; another one starts after that child was split.

    A successor that begins at the first event has to fence who still reads its ancestor (R17).
    """
    settings = Settings(store_latency=0.2, handling=0.5, latency=0.1, vary=True)
    return settings, [
        Step(0.3, "split", {"which": 0, "parts": 1, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 12, "entities": 4}),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
        Step(1.0, "second", {"seconds": 20.0}),
        Step(0.1, "split", {"which": 0, "parts": 1, "method": "cursor-from"}),
        Step(2.0, "publish", {"count": 4, "entities": 4}),
    ]


def second_consumer_at_a_merge() -> tuple[Settings, list[Step]]:
    """One consumer knows the cursors of a merge as they were before another one moved them.

    What it ends with may be an `AmbiguousLineageError`, where its next save would be refused (R17).
    """
    return Settings(partitions=4, stream=True, concurrent=2), [
        Step(1.0, "publish", {"count": 1, "entities": 3}),
        Step(0.0, "split", {"which": 2, "parts": 3, "method": "cursor-from"}),
        Step(0.0, "second", {"seconds": 20.0}),
        Step(8.2, "fault", {"kind": "reset", "on": "fetch", "share": 0.5, "seconds": 2.0}),
        Step(0.0, "merge", {"which": 2}),
    ]


def chosen_partition_is_gone() -> tuple[Settings, list[Step]]:
    """The partition that is to be read was split before any process saw it.

    The first one to start is that without ``follow``. It has to say so (R12).
    """
    return Settings(chosen=1), [
        Step(0.0, "life_step", {"what": "down", "seconds": 30.0}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
    ]


def chosen_partition_is_gone_at_the_first_list() -> tuple[Settings, list[Step]]:
    """The same of a publisher that lists nothing at first: no topology was good before (R12)."""
    settings = Settings(partitions=3, chosen=2, manners=Manners(unlisted=3.0))
    return settings, [
        Step(1.0, "split", {"which": 0, "parts": 1, "method": "cursor-from"}),
        Step(4.0, "publish", {"count": 6, "entities": 6}),
    ]


def split_before_the_first_list() -> tuple[Settings, list[Step]]:
    """Instances start on a feed that lists nothing, and then one partition and its successors.

    Whoever discovers them first saves the first positions, without any lease. Nobody can read an
    ancestor of them by then (R7).
    """
    settings = Settings(partitions=2, instances=2, manners=Manners(unlisted=3.0))
    return settings, [
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(1.0, "publish", {"count": 12, "entities": 4}),
    ]


def first_effects_behind_the_end_are_lost() -> tuple[Settings, list[Step]]:
    """A consumer starts at the end, and a failover loses what it committed first (R7).

    What was published while it asked for the end is committed again.
    """
    settings = Settings(start="last", store_latency=0.5, latency=0.005)
    return settings, [
        Step(0.0, "publish", {"count": 4, "entities": 2}),
        *[Step(0.1, "publish", {"count": 2, "entities": 2}) for _ in range(4)],
        Step(3.0, "fail_over", {"lost": 2}),
        Step(1.0, "publish", {"count": 12, "entities": 2}),
    ]


def two_successors_take_one_cursor() -> tuple[Settings, list[Step]]:
    """One part of a split is split again before instances learn of either (R9).

    Nobody knows yet whether another instance has begun to read that part. Until then no successor
    may be read from its first event.
    """
    settings = Settings(
        partitions=4, latency=0.3, store_latency=0.3, reply_latency=0.2, instances=3
    )
    steps = [
        Step(0.0, "publish", {"count": 40, "entities": 8}),
        Step(8.0, "publish", {"count": 8, "entities": 8}),
    ]
    for _ in range(5):
        steps += [
            Step(4.3, "split", {"which": 0, "parts": 3, "method": "cursor-from"}),
            Step(0.0, "split", {"which": -1, "parts": 1, "method": "cursor-from"}),
            Step(0.1, "publish", {"count": 8, "entities": 8}),
        ]
    return settings, steps


def committed_after_a_failover() -> tuple[Settings, list[Step]]:
    """A partition is given away while a batch is in flight, and the database goes back meanwhile.

    The batch comes after what was lost: to commit it would pass over that (R17).
    """
    steps = [
        Step(0.0, "publish", {"count": 8, "entities": 4}),
        Step(4.0, "split", {"which": 0, "parts": 3, "method": "cursor-from"}),
    ]
    for pause in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1):
        steps += [
            Step(6.0, "publish", {"count": 9, "entities": 3}),
            Step(4.0, "publish", {"count": 20, "entities": 8}),
            Step(0.4, "roll_back", {"which": 0, "seconds": 0.5}),
            Step(pause, "fail_over", {"lost": 1}),
        ]
    return Settings(instances=2, handling=3.0), steps


def successors_are_not_chosen() -> tuple[Settings, list[Step]]:
    """A chosen partition goes on in others, which are not chosen: it is not lost (R9)."""
    return Settings(partitions=4, chosen=3), [
        Step(0.0, "split", {"which": 2, "parts": 3, "method": "starts-after"}),
        Step(0.0, "split", {"which": 3, "parts": 1, "method": "cursor-from"}),
        Step(0.6, "choose_descendants"),
        Step(0.0, "split", {"which": 7, "parts": 3, "method": "cursor-from"}),
        Step(1.0, "publish", {"count": 12, "entities": 4}),
    ]


def first_commit_after_a_split() -> tuple[Settings, list[Step]]:
    """The first batch of a partition is committed late: after its successors began (R9)."""
    return Settings(handling=0.3, commit_every=20), [
        Step(0.4, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 12, "entities": 4}),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
        Step(1.0, "split", {"which": 0, "parts": 3, "method": "cursor-from"}),
        Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
        Step(1.0, "publish", {"count": 12, "entities": 4}),
    ]


def paused_behind_a_second_process() -> tuple[Settings, list[Step]]:
    """A process that hangs stands where it stood, while a second one reads everything."""
    return Settings(page_size=1, latency=0.005), [
        Step(1.244, "publish", {"count": 16, "entities": 1}),
        Step(0.0, "second", {"seconds": 20.0}),
        Step(0.128, "life_step", {"what": "pause"}),
    ]


def fenced_long_after_a_second_process() -> tuple[Settings, list[Step]]:
    """A process reads nothing for long, and learns then that a second one went ahead."""
    return Settings(stream=True, way="events", transactional=False, handling=1.0), [
        Step(1.685, "publish", {"count": 4, "entities": 12}),
        Step(0.0, "second", {"seconds": 3.0}),
        Step(1.384, "life_step", {"what": "stop-in-time", "seconds": 0.05}),
        Step(0.0, "fault", {"kind": "stall", "on": "fetch", "share": 1.0, "seconds": 10.0}),
        Step(1.665, "publish", {"count": 1, "entities": 3}),
    ]


def stopped_in_time_while_it_hangs() -> tuple[Settings, list[Step]]:
    """A process is stopped with a grace period that its application does not keep."""
    return Settings(partitions=2, way="run", handling=0.3), [
        Step(0.0, "publish", {"count": 40, "entities": 4}),
        Step(0.1, "life_step", {"what": "pause"}),
        Step(0.3, "life_step", {"what": "stop-in-time", "seconds": 0.5}),
        Step(3.0, "publish", {"count": 4, "entities": 4}),
        Step(0.0, "life_step", {"what": "pause"}),
        Step(0.3, "life_step", {"what": "stop-in-time", "seconds": 0.05}),
        Step(3.0, "publish", {"count": 4, "entities": 4}),
    ]


def _lag(on: str, *, seconds: float) -> dict[str, object]:
    return {"kind": "lag", "on": on, "share": 0.5, "seconds": seconds, "behind": 3.0}


NAMED: dict[str, Callable[[], tuple[Settings, list[Step]]]] = {
    history.__name__: history
    for history in (
        crowded_out_after_a_failure,
        cancelled_while_the_planner_acts,
        discovery_lags_behind_splits,
        selection_with_cursors_of_its_own,
        selection_from_the_end,
        closed_partition_at_a_lagging_replica,
        commit_cancelled,
        ancestors_unknown,
        begun_and_split_while_down,
        split_of_a_waiting_partition,
        streams_that_are_always_due,
        an_older_version_knows_no_child,
        second_consumer_after_a_split,
        second_consumer_at_a_merge,
        chosen_partition_is_gone,
        chosen_partition_is_gone_at_the_first_list,
        split_before_the_first_list,
        first_effects_behind_the_end_are_lost,
        two_successors_take_one_cursor,
        committed_after_a_failover,
        successors_are_not_chosen,
        first_commit_after_a_split,
        paused_behind_a_second_process,
        fenced_long_after_a_second_process,
        stopped_in_time_while_it_hangs,
    )
}


def named(name: str, seed: int = 0, backend: Backend = "asyncio") -> Scenario:
    """Return the scenario of that name; `seed` draws what its steps leave open."""
    settings, steps = NAMED[name]()
    return Scenario(f"{name} {seed}", settings, tuple(steps), backend)
