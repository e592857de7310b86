"""R11: which positions are saved to move cursors back, and what can't be restored."""

from __future__ import annotations

from typing import ClassVar

import pytest

from feedapi_client import AmbiguousLineageError, FeedInfo, LineageError, Partition, Position
from feedapi_client.operations.repair import presumed_successors, restored_positions
from tests.positions import stand

SUPERSEDED = Position("60", "superseded", 3)


def info(*partitions: int) -> FeedInfo:
    return FeedInfo("v2-draft", {id: Partition(id) for id in partitions})


class TestRestored:
    def test_r11_merged_partitions_are_restored_together(self) -> None:
        stored = {0: SUPERSEDED, 1: SUPERSEDED, 10: Position("80")}
        restored = restored_positions(stored, [0, 1], [10], feed="f")
        assert stand(restored) == {0: ("80", "open"), 1: ("80", "open"), 10: ("80", "superseded")}
        assert {p: each.replaces for p, each in restored.items()} == {0: 3, 1: 3, 10: 1}

    def test_r11_a_drained_partition_goes_on_where_it_ended(self) -> None:
        stored = {0: Position("z", "drained", 5)}
        assert stand(restored_positions(stored, [0], [], feed="f")) == {0: ("z", "open")}

    def test_r11_different_cursors_are_the_operators_to_decide(self) -> None:
        stored = {0: SUPERSEDED, 10: Position("80"), 11: Position("75")}
        with pytest.raises(AmbiguousLineageError, match="10 at '80', 11 at '75'") as caught:
            restored_positions(stored, [0], [10, 11], feed="f")
        assert caught.value.partition == 0
        restored = restored_positions(stored, [0], [10, 11], "75", feed="f")
        assert stand(restored)[0] == ("75", "open")
        assert {restored[10].status, restored[11].status} == {"superseded"}

    @pytest.mark.parametrize(
        ("partitions", "successors", "problem"),
        [
            ([5], [10], "partition 5: has no stored position"),
            ([10], [], "partition 10: is not superseded or drained"),
            ([0], [], "its successors are not known"),
            ([0], [5], "partition 5: holds no cursor"),
            ([0], [0], "partition 0: holds no cursor"),
        ],
    )
    def test_r11_what_can_not_be_restored_is_refused(
        self, partitions: list[int], successors: list[int], problem: str
    ) -> None:
        stored = {0: SUPERSEDED, 10: Position("80")}
        with pytest.raises(LineageError, match=problem):
            restored_positions(stored, partitions, successors, feed="f")


class TestPresumedSuccessors:
    STORED: ClassVar = {0: SUPERSEDED, 10: Position("80"), 11: Position("80"), 2: Position("5")}

    def test_r11_they_are_read_and_not_listed_any_more(self) -> None:
        assert presumed_successors(self.STORED, info(0, 2), [0], feed="f") == [10, 11]
        gone = {**self.STORED, 7: Position("q", "drained")}
        assert presumed_successors(gone, info(0, 2), [0], feed="f") == [10, 11]

    def test_r11_they_are_not_known_where_others_were_rolled_back_too(self) -> None:
        stored = {**self.STORED, 1: SUPERSEDED}
        with pytest.raises(AmbiguousLineageError, match="partition 1 is listed as open again, too"):
            presumed_successors(stored, info(0, 1, 2), [0], feed="f")
        assert presumed_successors(stored, info(0, 1, 2), [0, 1], feed="f") == [10, 11]
