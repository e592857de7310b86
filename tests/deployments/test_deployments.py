"""Deployments behind a reverse proxy: nothing lost, nothing twice, no consumer ended (R2, R10).

While a deployment rolls, both versions answer in turn, so that half of all requests are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from feedapi_client.model import DialectName
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher import Quirks, SplitMethod
from tests.deployments.application import deployment, port_of
from tests.deployments.proxy import Routes

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_r10_two_tokens_in_turn(tmp_path: Path) -> None:
    async with deployment(tmp_path, Publisher(2), Publisher(2)) as deployed:
        await deployed.only(deployed.old)
        await deployed.both()
        await deployed.only(deployed.new)


async def test_r10_two_tokens_in_turn_where_nginx_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.nginx.program", lambda: None)
    async with deployment(tmp_path, Publisher(2), Publisher(2)) as deployed:
        await deployed.only(deployed.old)
        await deployed.both()
        await deployed.only(deployed.new)


async def test_r02_r10_v1_becomes_v2(tmp_path: Path) -> None:
    old, new = Publisher(2, dialect="v1"), Publisher(2, dialect="v2-token")
    async with deployment(tmp_path, old, new, v1_partitions=2) as deployed:
        await deployed.only(old)
        await deployed.both()
        await deployed.only(new)


async def test_r02_r10_a_deployment_of_v2_is_rolled_back_to_v1(tmp_path: Path) -> None:
    old, new = Publisher(2, dialect="v1"), Publisher(2, dialect="v2-token")
    async with deployment(tmp_path, old, new, v1_partitions=2) as deployed:
        await deployed.only(old)
        await deployed.both()
        await deployed.only(new)
        await deployed.both()
        await deployed.only(old)


async def test_r02_r10_a_draft_becomes_the_published_dialect_and_back(tmp_path: Path) -> None:
    old, new = Publisher(2, dialect="v2-draft"), Publisher(2, dialect="v2-token")
    async with deployment(tmp_path, old, new) as deployed:
        await deployed.only(old)
        await deployed.both()
        await deployed.only(new)
        await deployed.both()
        await deployed.only(old)


@pytest.mark.parametrize("status", [200, 404, 502])
async def test_r10_a_maintenance_page_for_everything(tmp_path: Path, status: int) -> None:
    async with deployment(tmp_path, Publisher(2), Publisher(2)) as deployed:
        await deployed.only(deployed.old)
        await deployed.phase(Routes(page=(status, "<html>maintenance</html>")))
        await deployed.only(deployed.old)


LAGS = {"discovery is behind": True, "fetches are behind": False}


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
async def test_r06_r10_a_replica_lags(
    tmp_path: Path, dialect: DialectName, method: SplitMethod, lag: str
) -> None:
    # Replicas share a token, and name the end of a closed partition: nothing else can tell that a
    # replica lags.
    quirks = Quirks(keep_token=True, last_cursor="closed")
    fresh, stale = (Publisher(1, dialect=dialect, quirks=quirks) for _ in range(2))
    stale.token = fresh.token
    async with deployment(tmp_path, fresh, stale) as deployed:
        await deployed.only(fresh)
        deployed.lagging = stale
        deployed.publish(20)
        deployed.change(lambda publisher: publisher.split(0, (1, 2), method=method))
        behind, ahead = (port_of(stale),), (port_of(fresh),)
        routes = Routes(behind, ahead) if LAGS[lag] else Routes(ahead, behind)
        await deployed.phase(routes)
        deployed.catch_up()
        await deployed.only(stale)


async def test_r10_a_split_while_two_versions_answer_in_turn(tmp_path: Path) -> None:
    async with deployment(tmp_path, Publisher(2), Publisher(2)) as deployed:
        await deployed.only(deployed.old)
        await deployed.both()
        deployed.change(lambda publisher: publisher.split(0, (2, 3)))
        await deployed.both()
        await deployed.only(deployed.new)
