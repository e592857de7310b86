"""What instances say about a partition that another one reads."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client import PartitionState, Share
from feedapi_client.testing import Publisher
from tests.sharing.fleet import Member, fleet, publish, until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

LEASE = 30.0


async def test_the_cursors_of_partitions_of_others_are_theirs_within_a_lease() -> None:
    publisher = Publisher(4)
    async with fleet(publisher) as instances:
        one = instances.start(share=Share(lease_seconds=LEASE))
        publish(publisher, 0, 1)
        await until(lambda: 1 in instances.handled)
        two = instances.start(share=Share(lease_seconds=LEASE))
        await instances.balanced(one, two)
        await anyio.sleep(LEASE)
        for partition in range(4):
            publish(publisher, partition, 10 + partition)
        await until(lambda: len(instances.handled) == 5)
        began = anyio.current_time()
        await until(lambda: cursors(one) == cursors(two))
        assert anyio.current_time() - began <= LEASE
        for member, other in ((one, two), (two, one)):
            partitions = member.consumer.status().partitions.values()
            elsewhere = [p for p in partitions if p.state is PartitionState.ELSEWHERE]
            assert [p.owner for p in elsewhere] == [other.consumer.instance] * 2
            assert all(p.caught_up is None for p in elsewhere)
            # How far behind they are only their owner knows.
            assert all(p.behind_seconds is None for p in elsewhere)


def cursors(member: Member) -> dict[int, str | None]:
    return {p.partition: p.cursor for p in member.consumer.status().partitions.values()}
