"""The part of the stand-in's gRPC API that is about consumer groups and cursors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIServicer

from feedapi_client.testing.liftbridge.cursors import CURSORS
from feedapi_client.testing.liftbridge.groups import GroupError, GroupMissingError

if TYPE_CHECKING:
    from feedapi_client.testing.liftbridge.broker import LiftbridgeBroker

BROKER = "stand-in"
"""The id of the only broker, which coordinates all groups."""
_NANOSECONDS = 10**9


class GroupServicer(APIServicer):
    """Answers what is about groups and cursors."""

    def __init__(self, broker: LiftbridgeBroker) -> None:
        self._groups = broker.groups
        self._cursors = broker.cursors
        self._streams = broker.streams

    def add_groups(self, request: Any, response: Any) -> None:
        """Add the groups that were asked for to an answer with metadata."""
        for group in request.groups:
            epoch = self._groups.epoch(group)
            found = api_pb2.ConsumerGroupMetadata(groupId=group)
            if epoch is None:
                found.error = api_pb2.ConsumerGroupMetadata.UNKNOWN_GROUP
            else:
                found.coordinator, found.epoch = BROKER, epoch
            response.groupMetadata.append(found)

    async def JoinConsumerGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Add a member to a group."""
        try:
            epoch = self._groups.join(request.groupId, request.consumerId, request.streams)
        except GroupError as error:
            await _abort(context, error)
        timeout = int(self._groups.timeout * _NANOSECONDS)
        return api_pb2.JoinConsumerGroupResponse(
            coordinator=BROKER, epoch=epoch, consumerTimeout=timeout, coordinatorTimeout=timeout
        )

    async def LeaveConsumerGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Remove a member from its group."""
        try:
            self._groups.leave(request.groupId, request.consumerId)
        except GroupError as error:
            await _abort(context, error)
        return api_pb2.LeaveConsumerGroupResponse()

    async def FetchConsumerGroupAssignments(  # noqa: N802
        self, request: Any, context: Any
    ) -> Any:
        """Return what a member has to read."""
        try:
            assigned = self._groups.assignments(request.groupId, request.consumerId, request.epoch)
        except GroupError as error:
            await _abort(context, error)
        return api_pb2.FetchConsumerGroupAssignmentsResponse(
            epoch=request.epoch,
            assignments=[
                api_pb2.PartitionAssignment(stream=stream, partitions=partitions)
                for stream, partitions in assigned.items()
            ],
        )

    async def ReportConsumerGroupCoordinator(  # noqa: N802
        self,
        request: Any,  # noqa: ARG002
        context: Any,
    ) -> Any:
        """Refuse: there is no other broker."""
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "No group coordinator candidates")

    async def SetCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Store an offset under a name."""
        await self._require_cursors(context)
        if not request.stream:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "No stream provided")
        await self._cursors.set(request.stream, request.cursorId, request.partition, request.offset)
        return api_pb2.SetCursorResponse()

    async def FetchCursor(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the offset under a name."""
        await self._require_cursors(context)
        offset = self._cursors.fetch(request.stream, request.cursorId, request.partition)
        return api_pb2.FetchCursorResponse(offset=offset)

    async def _require_cursors(self, context: Any) -> None:
        if CURSORS not in self._streams:
            await context.abort(grpc.StatusCode.INTERNAL, "Cursors stream does not exist")


async def _abort(context: Any, error: GroupError) -> NoReturn:
    missing = isinstance(error, GroupMissingError)
    code = grpc.StatusCode.NOT_FOUND if missing else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
