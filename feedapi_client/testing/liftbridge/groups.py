"""The consumer groups of the stand-in broker. No network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class GroupError(Exception):
    """The broker refuses a request, with a text of the real one."""


class GroupMissingError(GroupError):
    """There is no such group."""


@dataclass(slots=True)
class _Group:
    """The members of a group with their streams, and until when each is kept."""

    epoch: int = 0
    members: dict[str, list[str]] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)


class BrokerGroups:
    """All groups of a broker. A member that does not ask for its assignments is thrown out.

    Arguments:
        partitions: returns the number of partitions of a stream.
        timeout: seconds after which a member is thrown out.
    """

    def __init__(self, partitions: Callable[[str], int], timeout: float) -> None:
        self.timeout = timeout
        self._partitions = partitions
        self._groups: dict[str, _Group] = {}
        self._next_epoch = 1

    def epoch(self, group: str) -> int | None:
        """Return the epoch of a group; None when there is none."""
        found = self._current(group)
        return None if found is None else found.epoch

    def join(self, group: str, member: str, streams: Sequence[str]) -> int:
        """Add a member, and return the epoch of the group."""
        found = self._current(group)
        if found is None:
            found = self._groups[group] = _Group()
        elif member in found.members:
            raise GroupError("consumer is already a member of the consumer group")
        else:
            self._change(found)
        found.members[member] = list(streams)
        found.deadlines[member] = time.monotonic() + self.timeout
        return found.epoch

    def leave(self, group: str, member: str) -> None:
        """Remove a member."""
        found = self._member_of(group, member)
        self._remove(group, found, member)

    def assignments(self, group: str, member: str, epoch: int) -> dict[str, list[int]]:
        """Return what a member has to read, by stream, and keep it for another while."""
        found = self._current(group)
        if found is not None and epoch != found.epoch:
            raise GroupError("client-provided group epoch differs from broker group epoch")
        found = self._member_of(group, member)
        found.deadlines[member] = time.monotonic() + self.timeout
        return self._divide(found)[member]

    def forgive(self) -> None:
        """Keep all members for another while, as a broker that starts does."""
        for group in self._groups.values():
            group.deadlines = dict.fromkeys(group.members, time.monotonic() + self.timeout)

    def _divide(self, group: _Group) -> dict[str, dict[str, list[int]]]:
        """Give each partition to the member of its stream that has the fewest."""
        given: dict[str, dict[str, list[int]]] = {member: {} for member in group.members}
        for stream in sorted({name for streams in group.members.values() for name in streams}):
            readers = [member for member, streams in group.members.items() if stream in streams]
            for partition in range(self._partitions(stream)):
                least = min(readers, key=lambda m: (sum(map(len, given[m].values())), m))
                given[least].setdefault(stream, []).append(partition)
        return given

    def _current(self, name: str) -> _Group | None:
        """Return a group after throwing out whom it did not hear of."""
        group = self._groups.get(name)
        now = time.monotonic()
        while group is not None:
            late = [member for member, deadline in group.deadlines.items() if deadline < now]
            if not late:
                break
            self._remove(name, group, late[0])
            group = self._groups.get(name)
        return group

    def _member_of(self, name: str, member: str) -> _Group:
        group = self._current(name)
        if group is None:
            raise GroupMissingError("consumer group does not exist")
        if member not in group.members:
            raise GroupError("consumer is not a member of the consumer group")
        return group

    def _remove(self, name: str, group: _Group, member: str) -> None:
        del group.members[member], group.deadlines[member]
        self._change(group)
        if not group.members:
            del self._groups[name]

    def _change(self, group: _Group) -> None:
        group.epoch = self._next_epoch
        self._next_epoch += 1
