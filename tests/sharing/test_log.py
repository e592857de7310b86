"""Each change of leases is in the log, with the instance and the partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import groupby

import pytest

from feedapi_client import CursorStore
from feedapi_client.model import FeedKey
from feedapi_client.stores import Lease, LeaseStore
from feedapi_client.testing import Publisher
from tests.sharing.helpers import Running, group, until

pytestmark = pytest.mark.anyio


def changes(caplog: pytest.LogCaptureFixture, of: Running) -> list[str]:
    """What was logged of an instance, without what stands before it in each record."""
    begin = f"feed {of.consumer.key.url}, instance {of.name}: "
    records = [record for record in caplog.records if record.getMessage().startswith(begin)]
    assert all(vars(record)["feed"] == of.consumer.key.url for record in records)
    assert all(vars(record)["feedapi_instance"] == of.name for record in records)
    return [record.getMessage().removeprefix(begin) for record in records]


def joined(texts: list[str]) -> list[str]:
    """The same with what happened at two moments in one text: a busy machine takes them apart."""
    runs = [list(group) for _, group in groupby(texts, lambda text: text.rpartition(" ")[0][:7])]
    return [", ".join([run[0], *(text.split()[-1] for text in run[1:])]) for run in runs]


async def test_joining_claiming_giving_away_and_leaving_are_logged(
    serve: Callable[..., Publisher], shared_store: CursorStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "feedapi_client.sharing")
    publisher = serve(4)
    async with group(publisher, shared_store) as instances:
        first = instances.start()
        await instances.balanced(first, partitions=4)
        second = instances.start()
        await instances.balanced(first, second, partitions=4)
        moved = ", ".join(map(str, sorted(second.reads)))
        await instances.stop(second)
        await instances.balanced(first, partitions=4)
        await instances.stop(first)
    assert joined(changes(caplog, second)) == ["joined", f"claimed {moved}", "left"]
    assert joined(changes(caplog, first)) == [
        "joined",
        "claimed 0, 1, 2, 3",
        f"gave away {moved}",
        f"claimed {moved}",
        "left",
    ]


async def test_a_lost_lease_is_a_warning(
    serve: Callable[..., Publisher], shared_store: CursorStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "feedapi_client.sharing")
    assert isinstance(shared_store, LeaseStore)
    async with group(serve(2), shared_store) as instances:
        first = instances.start()
        await instances.balanced(first, partitions=2)
        key: FeedKey = first.consumer.key
        epoch = (await shared_store.look(key)).leases[1].epoch
        # In one step, and before the other is seen: to that it would give the lease by itself.
        assert await shared_store.put(key, first.name, [Lease(1, "another", epoch)])
        await shared_store.beat(key, "another", 60)
        await until(lambda: any("lost" in text for text in changes(caplog, first)))
    # What happens to a batch that was in flight is a record of its own.
    told = [record for record in caplog.records if record.name.startswith("feedapi_client.sharing")]
    (lost,) = [record for record in told if "lost" in record.getMessage()]
    assert lost.getMessage().endswith("lost, claimed by others: 1")
    assert (lost.levelno, vars(lost)["feedapi_partitions"]) == (logging.WARNING, 1)
