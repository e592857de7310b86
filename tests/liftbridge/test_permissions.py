"""Users of NATS that lack a permission or are refused, and leaving a connection in any state.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from feedapi_client.liftbridge import (
    AckTimeoutError,
    BrokerUnavailableError,
    LiftbridgeError,
    LiftbridgePublisher,
    Stream,
    nats_connection,
)
from feedapi_client.testing.liftbridge import NatsServer, free_port
from tests.liftbridge.acker import Acker
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("way_through_nats_py"),
]


_JWT = "-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n"
_SEED = "-----BEGIN USER NKEY SEED-----\nx\n------END USER NKEY SEED------\n"
_NOWHERE = "nats://127.0.0.1:1"


class Users:
    """A NATS server whose user `app` may do what a test says."""

    def __init__(self, folder: Path, publish: str, subscribe: str) -> None:
        self.config = folder / "nats.conf"
        self.allow(publish, subscribe)
        self.server = NatsServer("-c", str(self.config))

    def allow(self, publish: str, subscribe: str, password: str = "pw") -> None:
        allowed = f"publish: {{allow: [{publish}]}}, subscribe: {{allow: [{subscribe}]}}"
        self.config.write_text(
            f"authorization {{ users = [ {{user: app, password: {password}, permissions: "
            f"{{{allowed}}}}}, {{user: broker, password: pw}} ] }}"
        )

    def url(self, user: str = "app") -> str:
        return self.server.url.replace("//", f"//{user}:pw@")


@pytest.fixture
def users(tmp_path: Path) -> Any:
    @asynccontextmanager
    async def serve(publish: str, subscribe: str) -> AsyncIterator[tuple[Users, Acker]]:
        users = Users(tmp_path, publish, subscribe)
        with users.server:
            async with Acker(users.url("broker"), "orders", "orders.1") as acker:
                yield users, acker

    return serve


@pytest.mark.parametrize("subscribe", ['"acks.>"', '"_INBOX.other.>"', '"_INBOX.*"'])
async def test_a_user_that_may_not_subscribe_to_its_inbox_is_refused_when_the_publisher_opens(
    users: Any, subscribe: str
) -> None:
    async with users('"orders"', subscribe) as (served, acker):
        with pytest.raises(
            LiftbridgeError, match=r"permission to subscribe to _INBOX\.>, or .*inbox_prefix"
        ):
            await LiftbridgePublisher(served.url()).__aenter__()
        assert acker.values("orders") == []


async def test_an_inbox_that_the_user_may_subscribe_to_is_an_option(users: Any) -> None:
    async with users('"orders"', '"acks.>"') as (served, _):
        options = {"inbox_prefix": "acks"}
        async with LiftbridgePublisher(served.url(), options=options) as publisher:
            assert await publisher.publish("orders", b"x") is not None


async def test_a_permission_to_publish_that_is_missing_is_named_at_the_deadline(
    users: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with users('"orders"', '"_INBOX.>"') as (served, acker):
        async with LiftbridgePublisher(served.url(), ack_timeout=0.5) as publisher:
            stream, refused = (
                Stream("orders", partitions=2),
                r"no permission .*publish to orders\.1",
            )
            with pytest.raises(AckTimeoutError, match=refused):
                await publisher.publish(stream, b"x", partition=1)
            await publisher.publish(stream, b"y", partition=0)
        assert acker.values("orders") == [b"y"]
    assert "refuses the publish to orders.1" in caplog.text


# ---------------------------------------------------------------------- credentials


async def test_a_refused_password_beside_a_server_that_takes_it_is_no_error(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    refusing = Users(tmp_path, '"orders"', '"_INBOX.>"')
    with refusing.server:
        wrong = refusing.server.url.replace("//", "//app:wrong@")
        for servers in ([wrong, nats_server.url], [nats_server.url, wrong]):
            async with LiftbridgePublisher(servers, options={"dont_randomize": True}):
                pass


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ('user: app, password: "p@ss/w:d"', "app:p%40ss%2Fw%3Ad"),
        ('user: "a:b", password: "%41#?["', "a%3Ab:%2541%23%3F%5B"),
        ('user: app, password: "100% sure"', "app:100%25%20sure"),
        ('user: app, password: "100%"', "app:100%"),
        ('token: "s/t"', "s%2Ft"),
    ],
)
async def test_what_a_url_holds_may_be_percent_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, server: str, url: str
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f"authorization {{ {server} }}")
    with NatsServer("-c", str(config)) as nats_server, caplog.at_level(logging.DEBUG):
        given = nats_server.url.replace("//", f"//{url}@")
        for servers in (given, [given, given]):
            async with LiftbridgePublisher(servers) as publisher:
                assert url not in repr(publisher)
    assert url not in caplog.text


@pytest.mark.parametrize("option", ["user_credentials", "nkeys_seed", "nkeys_seed_str"])
async def test_credentials_that_need_a_package_say_which(
    monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, tmp_path: Path, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    file = tmp_path / "x.creds"
    file.write_text(f"{_JWT}{_SEED}")
    with pytest.raises(LiftbridgeError, match=r"pip install 'nats-py\[nkeys\]'"):
        await LiftbridgePublisher(nats_server.url, options={option: str(file)}).__aenter__()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"x\.creds: No such file or directory"),
        (_JWT, r"x\.creds is no file of credentials"),
        (_SEED, r"x\.creds is no file of credentials"),
    ],
)
async def test_credentials_in_a_file_that_is_none_are_no_outage(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "x.creds"
    if content is not None:
        file.write_text(content)
    for given in (file, str(file)):
        with pytest.raises(LiftbridgeError, match=message):
            await LiftbridgePublisher(_NOWHERE, options={"user_credentials": given}).__aenter__()


@pytest.mark.parametrize("url", ["", "nats://", "nats://app:pw@127.0.0.1:port"])
async def test_a_url_that_is_none_is_named_as_such(url: str) -> None:
    with pytest.raises(BrokerUnavailableError, match=r"invalid (hostname in )?connect url") as no:
        await LiftbridgePublisher([url]).__aenter__()
    assert "pw" not in str(no.value)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("max_connections: 1", "too many connections|maximum connections exceeded"),
        ("max_subscriptions: 1", "maximum subscriptions exceeded"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # nats-py 2.16 forgets such connections
async def test_a_limit_of_the_server_is_named(tmp_path: Path, limit: str, told: str) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(limit)
    with NatsServer("-c", str(config)) as server:
        client = await nats.connect(server.url)
        with pytest.raises(BrokerUnavailableError, match=told):
            await LiftbridgePublisher(server.url, connect_timeout=2).__aenter__()
        await client.close()
    gc.collect()


@pytest.mark.parametrize("down", [0, 1], ids=["alone", "beside a server that is down"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # nats-py 2.16 forgets such connections
async def test_a_password_that_is_refused_later_slows_the_log_ins_and_is_named(
    users: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, down: int
) -> None:
    pauses: list[float] = []
    sleeping = anyio.Event()

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            sleeping.set()
            await anyio.sleep_forever()

    async with (
        users('"orders"', '"_INBOX.>"') as (served, _),
        LiftbridgePublisher(
            [served.url(), f"nats://127.0.0.1:{free_port()}"][: 1 + down], ack_timeout=SAFETY_NET
        ) as publisher,
    ):
        monkeypatch.setattr(nats_connection, "_sleep", note)
        served.allow('"orders"', '"_INBOX.>"', password="another")
        with caplog.at_level(logging.WARNING), anyio.fail_after(SAFETY_NET):
            await anyio.to_thread.run_sync(served.server.restart)
            await sleeping.wait()
        assert pauses == [1.0, 2.0, 4.0]
        refused = "refuses the user, the password or the token"
        assert [record.message for record in caplog.records if refused in record.message]
        publisher.ack_timeout = 0.05
        with pytest.raises(LiftbridgeError, match=refused):
            await publisher.publish("orders", b"x")
    gc.collect()


@pytest.mark.parametrize(
    "said",
    [
        "Authorization Violation",
        "User Authentication Expired",
        "User Authentication Revoked",
        "Account Authentication Expired",
    ],
)
async def test_credentials_that_end_later_are_named(said: str) -> None:
    """As nats-server 2.15 says it to a connection whose JWT expires or is revoked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000}\r\n')
        async for line in reader:
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if line.startswith(b"PUB"):
                writer.write(f"-ERR '{said}'\r\n".encode())
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with LiftbridgePublisher(f"nats://127.0.0.1:{port}", ack_timeout=SAFETY_NET) as made:
            with pytest.raises(LiftbridgeError):
                await made.publish("orders", b"x")
            with pytest.raises(BrokerUnavailableError, match="closed: the server refuses the"):
                await made.publish("orders", b"x")
