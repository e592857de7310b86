"""The Go library's publisher as it is deployed: several of them behind a reverse proxy.

The scenarios are those of `tests.deployments`, whose publishers are the project's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.consumer.helpers import limits
from tests.deployments.application import deployment, port_of
from tests.deployments.proxy import Routes
from tests.peers.go_publisher import Empty, GoPublisher

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LIMITS = limits(request_timeout=5.0, settle_time=1.0)


async def test_r10_a_rolling_deployment_with_two_tokens(tmp_path: Path) -> None:
    old, new = GoPublisher(2, token="t1"), GoPublisher(2, token="t2")
    async with deployment(tmp_path, old, new, limits=LIMITS) as deployed:
        await deployed.only(old)
        await deployed.both()
        await deployed.only(new)


async def test_r02_r10_v1_becomes_v2_and_is_rolled_back(tmp_path: Path) -> None:
    old, new = GoPublisher(2, dialect="v1"), GoPublisher(2)
    async with deployment(tmp_path, old, new, limits=LIMITS, v1_partitions=2) as deployed:
        await deployed.only(old)
        await deployed.both()
        await deployed.only(new)
        await deployed.both()
        await deployed.only(old)


@pytest.mark.parametrize("empty", ["echo", "own", "silent"])
@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r06_r10_a_replica_lags_behind_a_split(
    tmp_path: Path, method: Any, empty: Empty
) -> None:
    """Requests go to both in turn: an end that one shows is not that of the other."""
    fresh, stale = (GoPublisher(1, keep_token=True, empty=empty) for _ in range(2))
    async with deployment(tmp_path, fresh, stale, limits=LIMITS) as deployed:
        await deployed.only(fresh)
        deployed.lagging = stale
        deployed.publish(20)
        deployed.change(lambda publisher: publisher.split(0, (1, 2), method=method))
        both = (port_of(fresh), port_of(stale))
        await deployed.phase(Routes((port_of(fresh),), both))
        deployed.catch_up()
        await deployed.only(stale)


async def test_r10_a_split_while_two_versions_answer_in_turn(tmp_path: Path) -> None:
    old, new = GoPublisher(2, token="t1"), GoPublisher(2, token="t2")
    async with deployment(tmp_path, old, new, limits=LIMITS) as deployed:
        await deployed.only(old)
        await deployed.both()
        deployed.change(lambda publisher: publisher.split(0, (2, 3)))
        await deployed.both()
        await deployed.only(new)


@pytest.mark.parametrize(
    "page",
    [
        (200, "<html>maintenance</html>"),
        (200, '{"status":"maintenance"}'),
        (200, ""),
        (404, "gone"),
    ],
)
async def test_r06_r10_a_gateway_in_maintenance(tmp_path: Path, page: tuple[int, str]) -> None:
    """While it lasts a partition is closed, whose end nothing but empty answers show."""
    old, new = GoPublisher(2, empty="silent"), GoPublisher(2, empty="silent")
    async with deployment(tmp_path, old, new, limits=LIMITS) as deployed:
        await deployed.only(old)
        deployed.publish(20)
        deployed.change(lambda publisher: publisher.split(0, (2, 3)))
        await deployed.phase(Routes(page=page))
        await deployed.only(old)
