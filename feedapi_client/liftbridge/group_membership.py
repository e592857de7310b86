"""Membership in a consumer group: join, learn what is assigned, leave."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.liftbridge.liftbridge_errors import BrokerUnavailableError, LiftbridgeError

_NANOSECONDS = 1e9
_HEARTBEATS = 3
"""How often a member asks for its assignments within the time after which it is thrown out."""
_LONGEST_HEARTBEAT = 3.0
# What a coordinator says to somebody whom it has thrown out.
_EXPELLED = ("not a member", "group does not exist")

Assignments = set[tuple[str, int]]
"""Streams and their partitions."""


class GroupMembership:
    """One member of a consumer group, as the brokers see it.

    Arguments:
        group: the group.
        name: the beginning of the member's id. The rest is random, and another one each time.
        streams: what the member reads.

    Attributes:
        consumer_id: the member's id.
        epoch: the generation of the group's assignments. The broker lets the member with the
            newest one read a partition.
        heartbeat: seconds between two calls of `assignments`.
    """

    def __init__(self, brokers: Brokers, group: str, name: str, streams: Sequence[str]) -> None:
        self.group = group
        self.consumer_id = ""
        self.epoch = 0
        self.heartbeat = _LONGEST_HEARTBEAT
        self._brokers = brokers
        self._name = name
        self._streams = list(streams)
        self._coordinator = ""
        self._coordinator_timeout = 0.0
        self._answered_at = 0.0

    async def join(self) -> None:
        """Join the group.

        Raises:
            StreamError: a stream is missing.
            BrokerUnavailableError: no broker answered in time.
        """
        await self._brokers.retry(self._join)

    async def leave(self) -> None:
        """Leave the group, if a broker answers. Otherwise the group notices it after a while."""
        request = api_pb2.LeaveConsumerGroupRequest(groupId=self.group, consumerId=self.consumer_id)
        with suppress(LiftbridgeError):
            await self._brokers.call(self.group, "LeaveConsumerGroup", request)

    async def assignments(self) -> Assignments:
        """Return what the member has to read. The group keeps only members that ask often.

        A member that was thrown out joins again.

        Raises:
            StreamError: a stream is missing.
            BrokerUnavailableError: no broker answered in time.
        """
        return await self._brokers.retry(self._ask)

    async def _join(self) -> None:
        # A missing stream is not named by the answer to a request to join.
        await self._brokers.metadata(self._streams)
        # Another id each time: one that is still known, after a lost answer, would be refused.
        self.consumer_id = f"{self._name}{secrets.token_hex(8)}"
        request = api_pb2.JoinConsumerGroupRequest(
            groupId=self.group, consumerId=self.consumer_id, streams=self._streams
        )
        response = await self._brokers.call(self.group, "JoinConsumerGroup", request)
        self._coordinator, self.epoch = response.coordinator, int(response.epoch)
        timeout = int(response.consumerTimeout) / _NANOSECONDS
        self.heartbeat = min(timeout / _HEARTBEATS, _LONGEST_HEARTBEAT)
        self._coordinator_timeout = int(response.coordinatorTimeout) / _NANOSECONDS
        self._answered_at = time.monotonic()

    async def _ask(self) -> Assignments:
        request = api_pb2.FetchConsumerGroupAssignmentsRequest(
            groupId=self.group, consumerId=self.consumer_id, epoch=self.epoch
        )
        try:
            address = await self._coordinator_address()
            response = await self._brokers.call(
                self.group, "FetchConsumerGroupAssignments", request, [address]
            )
        except LiftbridgeError as error:
            await self._recover(error)
            raise BrokerUnavailableError(f"consumer group {self.group}: {error}") from error
        self.epoch = int(response.epoch)
        self._answered_at = time.monotonic()
        return {
            (assigned.stream, partition)
            for assigned in response.assignments
            for partition in assigned.partitions
        }

    async def _coordinator_address(self) -> str:
        brokers = (await self._brokers.metadata(self._streams)).brokers
        if self._coordinator not in brokers:
            raise BrokerUnavailableError(f"its coordinator {self._coordinator} is gone")
        return brokers[self._coordinator].address

    async def _recover(self, error: LiftbridgeError) -> None:
        """Do what makes the next attempt succeed."""
        if any(text in str(error) for text in _EXPELLED):
            await self._join()
            return
        if time.monotonic() - self._answered_at > self._coordinator_timeout:
            await self._report_coordinator()
        cluster = await self._brokers.metadata(self._streams, [self.group])
        if (found := cluster.groups.get(self.group)) is None:
            await self._join()
        else:
            self._coordinator, self.epoch = found.coordinator, found.epoch

    async def _report_coordinator(self) -> None:
        """Say that the coordinator does not answer. When most members do, there is another one."""
        request = api_pb2.ReportConsumerGroupCoordinatorRequest(
            groupId=self.group,
            consumerId=self.consumer_id,
            coordinator=self._coordinator,
            epoch=self.epoch,
        )
        with suppress(LiftbridgeError):
            await self._brokers.call(self.group, "ReportConsumerGroupCoordinator", request)
