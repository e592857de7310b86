"""The gRPC API over TLS, with tokens and with certificates of clients."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import grpc
import pytest

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgeGrpcPublisher,
    PublishError,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import warm
from tests.http.certificates import Certificate, self_signed
from tests.liftbridge.broker import Broker, require_liftbridge, tls_settings, trusting
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.middle import GrpcMiddle, grpc_middle

pytestmark = pytest.mark.anyio

TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
async def guarded(broker: Broker, certificate: Certificate) -> AsyncIterator[GrpcMiddle]:
    """A proxy before the broker, over TLS, that asks for a token."""
    pair = (certificate.key.read_bytes(), certificate.path.read_bytes())
    credentials = grpc.ssl_server_credentials([pair])
    async with grpc_middle(broker.address, credentials=credentials, token=TOKEN) as middle:
        yield middle


@pytest.fixture(scope="module")
def mutual(nats_server: NatsServer, certificate: Certificate) -> Iterator[LiftbridgeServer]:
    """The real broker, which asks its clients for a certificate, too."""
    require_liftbridge()
    with LiftbridgeServer(
        nats_server.url,
        settings=tls_settings(certificate),
        credentials=trusting(certificate, shown=True),
    ) as server:
        yield server


async def write_and_read(
    address: str, name: str, credentials: grpc.ChannelCredentials, token: str | None = None
) -> None:
    async with (
        LiftbridgeApi(address, credentials=credentials, token=token) as api,
        LiftbridgeGrpcPublisher(
            address, credentials=credentials, token=token, ack_timeout=SAFETY_NET
        ) as publisher,
    ):
        await api.create_stream(name)
        await publisher.publish(name, b"x")
        assert [message.value async for message in api.subscribe(name, until=0)] == [b"x"]


async def test_every_call_goes_over_tls_with_the_token(
    guarded: GrpcMiddle, name: str, certificate: Certificate
) -> None:
    await write_and_read(guarded.address, name, trusting(certificate), TOKEN)


@pytest.mark.slow
async def test_the_real_broker_takes_the_certificate_of_a_client(
    mutual: LiftbridgeServer, name: str, certificate: Certificate
) -> None:
    await write_and_read(mutual.address, name, trusting(certificate, shown=True))


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_without_the_token_the_answer_is_an_error_at_once_that_does_not_show_it(
    guarded: GrpcMiddle, certificate: Certificate, token: str | None
) -> None:
    credentials = trusting(certificate)
    async with LiftbridgeApi(guarded.address, credentials=credentials, token=token) as api:
        for call in (api.create_stream("s"), api.cluster()):
            with pytest.raises(LiftbridgeError, match="UNAUTHENTICATED") as caught:
                await call
            assert token is None or token not in str(caught.value)
    async with LiftbridgeGrpcPublisher(
        guarded.address, credentials=credentials, token=token
    ) as publisher:
        with pytest.raises(PublishError):
            await publisher.publish("s", b"x")


async def test_a_certificate_that_is_not_trusted_is_an_error_at_once(
    guarded: GrpcMiddle, tmp_path: Path
) -> None:
    other = trusting(self_signed(tmp_path, "127.0.0.1"))
    async with LiftbridgeApi(guarded.address, credentials=other, token=TOKEN) as api:
        with pytest.raises(LiftbridgeError, match="certificate of the broker is not trusted"):
            await api.cluster()


async def test_the_command_takes_authority_and_token(
    guarded: GrpcMiddle,
    broker: Broker,
    feedapi_publisher: Publisher,
    certificate: Certificate,
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    command = [sys.executable, "-W", "error", "-m", "feedapi_client.cli", "relay"]
    command += [feedapi_publisher.url or "", "--nats", broker.nats_url]
    command += [
        "--stream",
        broker.name,
        "--exactly-once",
        "events",
        "--create",
        "--api",
        f"liftbridges://{guarded.address}?ca={certificate.path}&token_env=LIFTBRIDGE_TOKEN",
    ]
    environment = {**os.environ, "LIFTBRIDGE_TOKEN": TOKEN}
    done = await anyio.to_thread.run_sync(
        lambda: warm.run(command, capture_output=True, env=environment)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert TOKEN not in done.stderr.decode()
    assert b'{"n":1}' in await broker.values()
