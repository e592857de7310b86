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


FORTH = ("old", "both", "new")
AND_BACK = (*FORTH, "both", "old")
VERSIONS: dict[str, tuple[DialectName, DialectName, tuple[str, ...]]] = {
    "two tokens": ("v2-token", "v2-token", FORTH),
    "v1 becomes v2": ("v1", "v2-token", FORTH),
    "v2 is rolled back to v1": ("v1", "v2-token", AND_BACK),
    "a draft becomes the published dialect and back": ("v2-draft", "v2-token", AND_BACK),
}


@pytest.mark.parametrize("case", VERSIONS)
async def test_r02_r10_versions_in_turn(tmp_path: Path, case: str) -> None:
    before, after, phases = VERSIONS[case]
    old, new = Publisher(2, dialect=before), Publisher(2, dialect=after)
    options = {"v1_partitions": 2} if before == "v1" else {}
    async with deployment(tmp_path, old, new, **options) as deployed:
        for phase in phases:
            if phase == "both":
                await deployed.both()
            else:
                await deployed.only({"old": old, "new": new}[phase])


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
