"""An application that commits several batches at once, some time after it got them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import anyio

from feedapi_client.errors import CommitOrderError, LeaseLostError
from feedapi_client.model import Batch
from tests.simulation.store import Effect, StoreSession, Transaction
from tests.simulation.trace import Trace


@dataclass(slots=True)
class Held:
    """The batches of one partition that are not committed. The last one's cursor covers all."""

    last: Batch
    effects: list[Effect]


class LateCommits:
    """Holds batches back, to commit them all in one transaction.

    Arguments:
        every: how many batches it holds.

    Attributes:
        rolled_back: whether the last commit failed. It has to be made again before the next batch
            is asked for: to ask says that the transaction was committed (R5).
    """

    def __init__(self, session: StoreSession, trace: Trace, every: int) -> None:
        self._session = session
        self._trace = trace
        self._every = every
        self._count = 0
        self._held: dict[int, Held] = {}
        self.rolled_back = False

    def add(self, batch: Batch, effects: list[Effect]) -> bool:
        """Hold a batch. Returns whether it is time to commit."""
        held = self._held.setdefault(batch.partition, Held(batch, []))
        held.last = batch
        held.effects += effects
        self._count += 1
        return self._count >= self._every

    def drop(self) -> None:
        """Forget what is held: a new iteration reads it again."""
        self._held.clear()
        self._count = 0
        self.rolled_back = False

    async def commit(self) -> None:
        """Commit the cursors and the effects of all that is held.

        After a `StoreError` they are still held. A batch can't be committed any more when its
        partition was split meanwhile: the successors went on from the last committed cursor, and
        bring its events again.
        """
        self.rolled_back = True
        with closing(self._session.transaction()) as transaction:
            await self._commit_in(transaction)

    async def _commit_in(self, transaction: Transaction) -> None:
        for partition, batches in list(self._held.items()):
            try:
                await batches.last.commit(transaction=transaction)
            except (CommitOrderError, LeaseLostError) as error:
                self._trace.add("partition {} was too late: {}", partition, error)
                del self._held[partition]
            else:
                transaction.effects += batches.effects
        with anyio.CancelScope(shield=True):
            await transaction.commit()
            self.drop()
