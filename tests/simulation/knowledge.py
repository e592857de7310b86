"""What one instance must know by the answers that its store has given it, and what follows.

Other rules look at what became of the events. These look at the order of one instance's own steps:
none of them needs luck, as two instances that meet do. What a save that is refused makes good again
is found here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import inf

from feedapi_client.model import Position
from feedapi_client.notifications import BatchDelivered
from feedapi_client.sharing.coordinator import BOOTSTRAP
from feedapi_client.status import PartitionState, PartitionStatus, PartitionWait
from feedapi_client.stores.leases import Lease

LATE_SECONDS = 3.0
"""For so long a partition that was lost, not given away, may be worked at."""
STOPS_WITHIN = 1.0
"""Within this time nothing of a partition is asked for any more that somebody else has claimed."""
ANOTHER_CLAIM = "another claim was seen"
StatusOf = Callable[[int], PartitionStatus | None]
_READ = (PartitionState.READING, PartitionState.CAUGHT_UP, PartitionState.RETRYING)


class Knowledge:
    """The leases and positions of one instance, as its store has answered.

    Arguments:
        violated: gets the name of a rule and what was done against it.
        now: returns the virtual time.
    """

    def __init__(self, violated: Callable[[str, str], None], now: Callable[[], float]) -> None:
        self._violated = violated
        self._now = now
        self.status_of: StatusOf | None = None
        """Returns what the consumer that it belongs to shows of a partition."""
        self._name = ""
        self._epochs: dict[int, int] = {}
        """What was claimed, and is held for all that this instance knows."""
        self._gone: dict[int, tuple[float, str]] = {}
        """What it held, from when on it must not save anything of it any more, and why."""
        self._not_loaded: set[int] = set()
        """What it claimed, without a look at the positions since."""
        self._not_refused: set[int] = set()
        """What it claimed, and no request for which was refused, or fails otherwise, since."""
        self._saved: dict[int, int] = {}
        """The revisions that it has saved."""
        self._listed: set[int] = set()
        """What discoveries have listed."""
        self._looked: set[int] = set()
        """What was listed when it last began to look at the others."""
        self._expired = 0

    # ------------------------------------------------------------------ what the store answers

    @property
    def moment(self) -> int:
        """How often its heartbeat has expired. What was asked for before that is over, too."""
        return self._expired

    def claimed(self, name: str, epochs: Mapping[int, int], *, asked: int) -> None:
        """A claim has returned that was sent at the moment `asked`."""
        self._name = name
        if asked != self._expired:
            return
        self._epochs |= epochs
        self._not_loaded |= epochs.keys()
        self._not_refused |= epochs.keys()
        for partition in epochs:
            self._gone.pop(partition, None)

    def released(self, partitions: Iterable[int]) -> None:
        """A release has returned."""
        self._end(partitions, "it was given away", self._now())

    def _end(self, partitions: Iterable[int], why: str, since: float) -> None:
        for partition in partitions:
            if self._epochs.pop(partition, None) is not None:
                self._gone[partition] = since, why
            self._not_loaded.discard(partition)
            self._not_refused.discard(partition)

    def expired(self) -> None:
        """A renewal was refused: all leases are lost."""
        self._expired += 1
        self._lose(list(self._epochs), "the heartbeat has expired")

    def _lose(self, partitions: Iterable[int], why: str) -> None:
        # What was decided before is still carried out: a save may be refused.
        self._end(partitions, why, self._now() + LATE_SECONDS)

    def left(self) -> None:
        """It has left. Its next start begins anew."""
        self._end(list(self._epochs), "the instance has left", self._now())

    def looks(self) -> None:
        """It begins to look at the other instances."""
        self._looked |= self._listed
        self.waits()

    def lists(self, partitions: Iterable[int]) -> None:
        """A discovery was answered."""
        self._listed.update(partitions)

    def saw(self, leases: Mapping[int, Lease]) -> None:
        """It has looked at the leases of all."""
        foreign = [
            p for p, epoch in self._epochs.items() if not self._is_mine(leases.get(p), epoch)
        ]
        self._lose(foreign, ANOTHER_CLAIM)

    def _is_mine(self, lease: Lease | None, epoch: int) -> bool:
        return lease is not None and lease.owner == self._name and lease.epoch == epoch

    def loads(self) -> None:
        """It begins to load the positions."""
        self._not_loaded.clear()

    def saved(self, positions: Mapping[int, Position]) -> None:
        """A save that is no part of a transaction has returned."""
        self._saved |= {p: position.revision for p, position in positions.items()}

    def went_back(self) -> None:
        """The database has lost saves."""
        self._saved.clear()

    # ------------------------------------------------------------------ what it may not do

    def fetches(self, partition: int, stored: Position | None) -> None:
        """It asks for a partition. One that is over is looked at without a lease, too (R6)."""
        self._not_refused.discard(partition)
        if stored is not None and stored.status != "open":
            return
        early = LATE_SECONDS - STOPS_WITHIN if self._knows_owner(partition) else 0.0
        if why := self._why_gone(partition, early):
            self._violated("lease", f"partition {partition} is read, and {why}")
        if partition in self._not_loaded:
            self._violated("start", f"partition {partition} is read, and was not loaded since")

    def answered(self, partition: int) -> None:
        """A request for a partition was answered as it should be."""
        self._not_refused.add(partition)

    def _knows_owner(self, partition: int) -> bool:
        return self._gone.get(partition, (0.0, ""))[1] == ANOTHER_CLAIM

    def _why_gone(self, partition: int, early: float = 0.0) -> str | None:
        since, why = self._gone.get(partition, (inf, ""))
        return why if self._now() >= since - early else None

    def saves(self, positions: Mapping[int, Position], stored: Mapping[int, Position]) -> None:
        """It sends a save."""
        if BOOTSTRAP in self._not_loaded:
            self._violated("start", "first positions are saved without a look since the claim")
        for partition, position in positions.items():
            before = stored.get(partition)
            if before is not None and before.status != "open":
                continue  # what is behind an end came late (R6), or an operator restores it
            if position.revision <= self._saved.get(partition, 0):
                self._violated("revision", f"partition {partition}: {position} was saved before")
            # The first position comes by a transfer, for which the ancestors' leases count. What is
            # stored already changes nothing: it is sent again after a save without a reply.
            if before not in (None, position) and (why := self._why_gone(partition)):
                self._violated("lease", f"partition {partition} is saved, and {why}")
        # First positions need no look: nobody reads anything yet, and who comes second is refused.
        second = any(p in stored and stored[p].revision != positions[p].replaces for p in positions)
        if (
            stored
            and not second
            and any(position.status == "superseded" for position in positions.values())
        ):
            new = {p for p, each in positions.items() if p not in stored and each.status == "open"}
            self._transfers(new, positions)

    def _transfers(self, new: set[int], positions: Mapping[int, Position]) -> None:
        mine = all(p in self._epochs for p in positions if positions[p].status == "superseded")
        if not mine and BOOTSTRAP not in self._epochs and not new <= self._looked:
            text = f"the cursors of {sorted(new)} are transferred without a look at the leases"
            self._violated("lease", text)

    def delivers(self, found: PartitionStatus | None) -> None:
        """A batch of a partition is delivered that has this status."""
        if found is not None and found.state not in _READ:
            self._violated("stop", f"partition {found.partition} is delivered as {found.state}")

    def waits(self) -> None:
        """Its status is to be looked at."""
        if self.status_of is None:
            return
        for partition in self._not_refused & self._epochs.keys():
            found = self.status_of(partition)
            if found and found.state in _READ and found.wait is PartitionWait.DISCOVERY:
                text = f"partition {partition} awaits a discovery, and no request was refused"
                self._violated("wait", text)


class Deliveries:
    """Tells what an instance knows of each batch that is delivered; an `InnerListener`."""

    def __init__(self, knowledge: Knowledge, status_of: StatusOf) -> None:
        self._knowledge = knowledge
        self._status_of = status_of

    def told(self, happened: object, cause: BaseException | None, /) -> None:
        """See `InnerListener`."""
        if isinstance(happened, BatchDelivered):
            self._knowledge.delivers(self._status_of(happened.partition))

    def handling(self, partition: int, /) -> AbstractContextManager[object]:
        """See `InnerListener`."""
        return nullcontext()
