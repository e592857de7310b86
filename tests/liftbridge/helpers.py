"""Waiting for a condition, and faults of the broker whose effect does not depend on time."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable
from types import TracebackType

import anyio

from feedapi_client.liftbridge import LiftbridgePublisher, Message
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker

SAFETY_NET = 60.0
"""Seconds that nothing in these tests takes, not even on a busy machine."""
_TASKS_OF_THE_RUNNER = 2  # the one that runs fixtures and tests, and one that waits for it
_WITHHOLDS_ACK = (BrokerFault.LOSE, BrokerFault.DROP_ACK)


async def eventually(condition: Callable[[], object], seconds: float = SAFETY_NET) -> None:
    """Wait for a condition in another process or on another connection, by asking repeatedly."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def calls_end(seconds: float = 5.0) -> None:
    """Wait until grpc.aio has heard of the end of all calls that were cancelled.

    It hears of it a moment later, and fails in whatever runs then when the loop of the call is
    closed meanwhile (grpcio 1.74). Until then each call has a task.
    """
    with anyio.move_on_after(seconds):
        while len(asyncio.all_tasks()) > _TASKS_OF_THE_RUNNER:  # noqa: ASYNC110
            await anyio.sleep(0.005)


def expire_acks(publisher: LiftbridgePublisher) -> None:
    """Let the deadlines of all messages in flight pass."""
    publisher._acks.expire(math.inf)


class Faults:
    """Faults of a broker, for publishers whose ack timeout is longer than any test.

    Acks that a fault withholds time out as soon as the publisher waits for nothing else. No test
    has to guess how long the other acks take. Use it in `async with`.
    """

    def __init__(self, broker: LiftbridgeBroker, publisher: LiftbridgePublisher) -> None:
        self.decide: Callable[[Message], BrokerFault | None] | None = None
        self._broker = broker
        self._publisher = publisher
        self._script: deque[BrokerFault | None] = deque()
        self._withheld: dict[str, set[str]] = defaultdict(set)

    async def __aenter__(self) -> Faults:
        self._broker.decide = self._decide
        self._task = asyncio.create_task(self._expire_withheld())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._broker.decide = None
        self._task.cancel()
        await asyncio.wait([self._task])

    def script(self, *faults: BrokerFault | None) -> None:
        """Set the faults of the next publishes, one entry for each; None: no fault."""
        self._script.extend(faults)

    def clear(self) -> None:
        """Stop making faults."""
        self.decide = None
        self._script.clear()

    def _decide(self, message: Message) -> BrokerFault | None:
        fault = self._script.popleft() if self._script else None
        if fault is None and self.decide is not None:
            fault = self.decide(message)
        if fault in _WITHHOLDS_ACK:
            self._withheld[message.ackInbox].add(message.correlationId)
        return fault

    async def _expire_withheld(self) -> None:
        publisher = self._publisher
        while True:
            withheld = self._withheld[publisher._inbox]
            if 0 < publisher.in_flight == sum(id in publisher._acks for id in withheld):
                expire_acks(publisher)
            await asyncio.sleep(0.002)


def values(broker: LiftbridgeBroker, stream: str = "s", partition: int = 0) -> list[bytes]:
    """What a partition holds."""
    return [message.value for message in broker.messages(stream, partition)]
