"""Credentials that change while a consumer runs: a token file, OAuth's client credentials."""

from __future__ import annotations

import gzip
import os
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_plus

import anyio
import httpx
import pytest

from feedapi_client import (
    AuthenticationError,
    FeedConsumer,
    FeedUnavailableError,
    OAuthClientCredentials,
    TokenFile,
)
from feedapi_client.testing import Publisher
from tests.client.wire import ok, wire
from tests.consumer.helpers import RETRY, fill, limits, read
from tests.http.helpers import LINE, a_client, basic_auth, page_of

pytestmark = pytest.mark.anyio
TOKENS = "http://login.example/token"


class Login:
    """A token endpoint: each token is another one, and the publisher accepts the latest only."""

    def __init__(self, publisher: Publisher, **answer: Any) -> None:
        self.publisher = publisher
        self.answer: dict[str, Any] = {"token_type": "Bearer", "expires_in": 3600, **answer}
        self.asked: list[httpx.Request] = []
        self.status = 200

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        self.publisher.bearer = token = f"token-{len(self.asked)}"
        return httpx.Response(self.status, json={"access_token": token, **self.answer})

    def client(self, auth: httpx.Auth) -> httpx.AsyncClient:
        mounts = {"http://login.example": httpx.MockTransport(self)}
        feed = httpx.ASGITransport(self.publisher.asgi)
        return httpx.AsyncClient(transport=feed, mounts=mounts, auth=auth, timeout=None)


@pytest.fixture
def publisher() -> Publisher:
    made = Publisher(4, page_size=10)
    fill(made, 100, entities=9)
    made.bearer = "none yet"
    return made


def credentials(**options: Any) -> OAuthClientCredentials:
    given = {"client_id": "orders", "client_secret": "s3cret", "scope": "feed.read", **options}
    return OAuthClientCredentials(TOKENS, **given)


async def consume_all(http: httpx.AsyncClient) -> int:
    async with (
        http,
        FeedConsumer(
            "http://feed/feed", http=http, follow=False, limits=limits(), retry=RETRY
        ) as consumer,
    ):
        return len(await read(consumer))


async def test_one_token_is_got_for_all_requests(publisher: Publisher) -> None:
    login = Login(publisher)
    assert await consume_all(login.client(credentials())) == 100
    (request,) = login.asked
    assert request.headers["authorization"] == basic_auth("orders", "s3cret")
    assert parse_qs(request.content.decode()) == {
        "grant_type": ["client_credentials"],
        "scope": ["feed.read"],
    }


async def test_credentials_may_be_in_the_body_and_more_fields_with_them(
    publisher: Publisher,
) -> None:
    login = Login(publisher)
    secrets = iter(["first"])
    auth = credentials(
        client_secret=lambda: next(secrets), in_body=True, extra={"audience": "feed"}
    )
    assert await consume_all(login.client(auth)) == 100
    fields = parse_qs(login.asked[0].content.decode())
    assert (fields["client_secret"], fields["audience"]) == (["first"], ["feed"])
    assert "authorization" not in login.asked[0].headers


@pytest.mark.parametrize(
    ("expires_in", "refused", "asked"), [(0, 0, range(4, 999)), (None, 1, [2])]
)
async def test_a_token_that_expires_or_is_refused_is_renewed(
    publisher: Publisher, expires_in: int | None, refused: int, asked: Any
) -> None:
    """Before it expires, and once for a request."""
    login = Login(publisher, expires_in=expires_in)
    if refused:
        publisher.fail(401, times=refused, after=3)
    assert await consume_all(login.client(credentials())) == 100
    assert len(login.asked) in asked


@pytest.mark.parametrize(
    ("status", "answer", "error", "says"),
    [
        (
            401,
            {"access_token": None, "error": "invalid_client"},
            AuthenticationError,
            "invalid_client",
        ),
        (400, {"access_token": None, "error": "<secret>"}, AuthenticationError, "status 400"),
        (400, {"access_token": None, "error": "secret"}, AuthenticationError, "status 400$"),
        (400, {"access_token": None, "error": ["secret"]}, AuthenticationError, "status 400$"),
        (200, {"token_type": "mac"}, AuthenticationError, "gave no token"),
        (200, {"access_token": "a\nb"}, AuthenticationError, "can't be sent"),
        (503, {}, FeedUnavailableError, "status 503"),
    ],
)
async def test_what_the_token_endpoint_refuses_is_an_error_without_secrets(
    publisher: Publisher, status: int, answer: dict[str, Any], error: type[Exception], says: str
) -> None:
    login = Login(publisher, **answer)
    login.status = status
    async with login.client(credentials()) as http:
        with pytest.raises(error, match=says) as caught:
            await http.get("http://feed/feed")
    assert "s3cret" not in str(caught.value)
    assert "<secret>" not in str(caught.value)
    assert "s3cret" not in repr(credentials())


@pytest.mark.parametrize("secret", ["plain-secret_1.2~x", "a+b", "50%25off", "c:d/e", "pässword"])
async def test_id_and_secret_are_form_encoded_in_basic_auth(
    publisher: Publisher, secret: str
) -> None:
    """RFC 6749, section 2.3.1."""
    login = Login(publisher)
    async with login.client(credentials(client_id="a b:c", client_secret=secret)) as http:
        await http.get("http://feed/feed")
    basic = b64decode(login.asked[0].headers["authorization"].split()[1]).decode()
    user, _, password = basic.partition(":")
    assert (unquote_plus(user), unquote_plus(password)) == ("a b:c", secret)


BOMB = gzip.compress(b" " * 50_000_000)


@pytest.mark.parametrize(
    ("head", "body", "says"),
    [
        ("Content-Encoding: gzip", BOMB, "compressed, which was not asked for"),
        ("X: y", b" " * 70_000, "too long"),
        ("X: y", b"[" * 60_000, "status 200"),
        ("X: y", b'{"access_token":"t","expires_in":' + b"9" * 5000 + b"}", "status 200"),
    ],
    ids=["gzip", "too long", "deep", "a number of 5,000 digits"],
)
async def test_r16_the_answer_of_a_token_endpoint_is_bounded(
    head: str, body: bytes, says: str, sync: bool
) -> None:
    async with wire(lambda _: ok(body, head)) as login:
        http = a_client(
            sync, auth=OAuthClientCredentials(login.url, client_id="a", client_secret="b")
        )
        with pytest.raises(AuthenticationError, match=f"gave no token: {says}"):
            await page_of("http://127.0.0.1:9/feed", sync=sync, http=http)
    assert login.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("expires_in", [b"9" * 400, b"1e400", b"-1e400", b"NaN", b'"x"', b"[]"])
async def test_a_token_may_expire_whenever(expires_in: bytes, sync: bool) -> None:
    answer = b'{"access_token":"t","expires_in":%b}' % expires_in
    async with wire(lambda _: ok(answer)) as login, wire(lambda _: ok(LINE)) as server:
        http = a_client(
            sync, auth=OAuthClientCredentials(login.url, client_id="a", client_secret="b")
        )
        assert await page_of(server.url, sync=sync, http=http) == LINE
    assert server.requests[0].headers["authorization"] == "Bearer t"


async def test_a_token_file_is_read_again_when_it_changes(
    publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    publisher.bearer = "first"
    path.write_text("first\n")
    feed = httpx.ASGITransport(publisher.asgi)
    async with httpx.AsyncClient(transport=feed, auth=TokenFile(path)) as http:
        assert (await http.get("http://feed/feed")).status_code == 200
        publisher.bearer = "second"
        replacement = tmp_path / "new"
        replacement.write_text("second")
        os.replace(replacement, path)  # as Kubernetes and Vault do
        assert (await http.get("http://feed/feed")).status_code == 200


async def test_a_request_that_was_under_way_when_the_file_changed_is_repeated(
    publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text("first")

    def rotate(response: Any, request: Any, _: Any) -> Any:
        path.write_text("the second one")
        publisher.bearer = "the second one"
        return response

    publisher.bearer = "the second one"
    publisher.fail(rotate, on="any")
    feed = httpx.ASGITransport(publisher.asgi)
    async with httpx.AsyncClient(transport=feed, auth=TokenFile(path)) as http:
        assert (await http.get("http://feed/feed")).status_code in (200, 403)
        assert (await http.get("http://feed/feed")).status_code == 200


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", "schlüssel".encode()])
async def test_a_token_file_that_is_none_is_an_error_that_names_it(
    publisher: Publisher, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    feed = httpx.ASGITransport(publisher.asgi)
    async with httpx.AsyncClient(transport=feed, auth=TokenFile(path)) as http:
        with pytest.raises(AuthenticationError, match="token file") as caught:
            async with FeedConsumer("http://feed/feed", http=http):
                pass
    assert str(path) in str(caught.value)
    assert "lines" not in str(caught.value)


async def test_a_token_file_is_a_regular_one(publisher: Publisher, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    # Somebody writes all that is read: else this test would wait where it fails.
    writer = os.open(tmp_path / "token", os.O_RDWR)
    os.write(writer, b"t" * 64 * 1024)
    feed = httpx.ASGITransport(publisher.asgi)
    async with httpx.AsyncClient(transport=feed, auth=TokenFile(tmp_path / "token")) as http:
        with pytest.raises(
            AuthenticationError, match="token can't be read: there is no regular file"
        ):
            async with FeedConsumer("http://feed/feed", http=http):
                pass
    os.close(writer)


async def test_waiting_for_a_token_can_be_cancelled(publisher: Publisher) -> None:
    login = Login(publisher)
    started = anyio.Event()

    async def hangs(request: httpx.Request) -> httpx.Response:
        started.set()
        await anyio.sleep_forever()
        raise AssertionError

    auth = credentials()
    slow = httpx.AsyncClient(transport=httpx.MockTransport(hangs), auth=auth, timeout=None)
    async with slow, anyio.create_task_group() as tasks:
        tasks.start_soon(slow.get, "http://feed/feed")
        await started.wait()
        tasks.cancel_scope.cancel()
    assert await consume_all(login.client(auth)) == 100
