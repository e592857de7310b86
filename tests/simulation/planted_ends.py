"""Bugs in what a consumer believes of a publisher: ends, keys, edges, rollbacks, rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from feedapi_client.lineage.graph import PublisherEdges
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import Position
from feedapi_client.protocol.decoder import PageDecoder
from feedapi_client.protocol.page import EndEvidence, FeedAnswers, Outcome, PageReader, Progress
from feedapi_client.runtime.board import Board
from feedapi_client.runtime.late import LateEvents
from feedapi_client.runtime.pace import Pace
from feedapi_client.runtime.partition import RuntimePartition


def one_empty_answer_is_the_end(patch: pytest.MonkeyPatch) -> None:
    """Without ``lastCursor`` a single empty answer drains a closed partition."""
    patch.setattr(EndEvidence, "add", lambda *args, **how: None)


def empty_answers_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Without ``lastCursor`` a closed partition is drained after a time, whatever was answered."""
    add = EndEvidence.add

    def after_a_time(self: EndEvidence, info: object, *, now: float, since: float) -> float | None:
        pause = add(self, info, now=now, since=since)
        return None if now >= since + self._settle_time else pause

    patch.setattr(EndEvidence, "add", after_a_time)


def the_time_of_an_end_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """Without ``lastCursor`` three empty answers drain a closed partition, however soon."""
    add = EndEvidence.add

    def at_once(self: EndEvidence, info: object, *, now: float, since: float) -> float | None:
        return add(self, info, now=now, since=min(since, now - self._settle_time))

    patch.setattr(EndEvidence, "add", at_once)


def a_failure_elsewhere_resets_the_evidence(patch: pytest.MonkeyPatch) -> None:
    """The time of an end counts from the last failure of the feed, of whichever partition."""

    def add(self: FeedAnswers, now: float, *, failed: bool) -> None:
        if failed:
            self.failed_at = now

    patch.setattr(FeedAnswers, "add", add)


def a_failure_of_its_own_does_not_reset_the_evidence(patch: pytest.MonkeyPatch) -> None:
    """The time of an end counts from when the partition was seen closed, whatever failed since."""
    answer = RuntimePartition.empty_answer

    def whatever_failed(self: RuntimePartition, *args: Any, **how: Any) -> float | None:
        self.trouble.failed_at = float("-inf")
        return answer(self, *args, **how)

    patch.setattr(RuntimePartition, "empty_answer", whatever_failed)


def what_a_gateway_says_is_an_empty_page(patch: pytest.MonkeyPatch) -> None:
    """Lines that are neither event nor checkpoint are taken for an empty answer."""
    end = PageReader._end

    def sound(self: PageReader) -> Outcome:
        found = end(self)
        if found is not Outcome.UNRECOGNIZED:
            return found
        return Outcome.EMPTY if self.closed else Outcome.SILENT

    patch.setattr(PageReader, "_end", sound)


def nobody_looks_for_late_events(patch: pytest.MonkeyPatch) -> None:
    """A partition that empty answers have drained is never asked again."""
    patch.setattr(LateEvents, "discovered", lambda self: self._planning.take_drained())


def what_an_earlier_session_passed_over_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    """Behind an end that an earlier session has stored nobody looks."""
    patch.setattr(LateEvents, "_drained_before", lambda self: [])


def a_rollback_is_no_problem(patch: pytest.MonkeyPatch) -> None:
    """A partition that was over and is listed as open again is not named."""
    patch.setattr(Board, "_of_rollback", lambda self: ())


def other_keys_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """A payload under the key of the other dialect, or in another case, is not read."""
    read = PageDecoder._read

    def own_keys_only(self: PageDecoder, line: bytes, complete: bool) -> Any:
        given = msgspec.json.decode(line)
        own = {self._dialect.payload_key, "cursor", "partition", "headers"}
        return read(self, line if own & set(given) else b"{}", complete)

    patch.setattr(PageDecoder, "_read", own_keys_only)


def an_older_place_is_read_on_from(patch: pytest.MonkeyPatch) -> None:
    """The end of a replica that lags is taken for the place to read on from."""

    def asked(self: Progress, cursor: str, end: str | None = None) -> list[str]:
        self.passed, self.recent[:] = None, [cursor]
        return self.recent

    patch.setattr(Progress, "asked", asked)


def an_edge_to_partition_zero_is_not_presumed(patch: pytest.MonkeyPatch) -> None:
    """Children of partition 0 that do not say so are read at once."""
    patch.setattr(PublisherEdges, "_presumed", lambda *args: set())


def a_superseded_partition_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A superseded partition that is listed again after a rollback is read from its beginning."""
    load = Planner.load

    def without(self: Planner, positions: Mapping[int, Position]) -> None:
        load(self, {id: p for id, p in positions.items() if p.status != "superseded"})

    patch.setattr(Planner, "load", without)


def an_empty_discovery_uses_up_the_start(patch: pytest.MonkeyPatch) -> None:
    """A consumer that is to start at the end starts at the first event, if nothing was listed."""
    discover = Planner.discover

    def first_and_only(self: Planner, info: Any, **how: Any) -> Any:
        actions = discover(self, info, **how)
        self.starts_first = False
        return actions

    patch.setattr(Planner, "discover", first_and_only)


def a_limited_feed_is_asked_on(patch: pytest.MonkeyPatch) -> None:
    """A refusal because of the publisher's limits makes nothing slower."""
    patch.setattr(Pace, "refused", lambda self, error, **how: False)
    patch.setattr(Pace, "own_pause", lambda self, error: 0.2)
