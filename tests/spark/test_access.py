"""The clients of a process, the credentials of their requests, and the certificates they trust."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.spark.feed_access import Credentials, FeedConnection, kept_client
from feedapi_client.spark.source_options import OptionError, parse_options
from feedapi_client.testing import Publisher
from tests.http.certificates import Certificate, self_signed, serve_https
from tests.spark import credentials

URL = "http://service/feed"


def connection(number: int = 0, **given: str) -> FeedConnection:
    return FeedConnection(parse_options({"url": f"{URL}{number}", **given}))


def http_of(made: FeedConnection) -> Any:
    return made._shared.http


def sent(**options: str) -> httpx.Headers:
    """The headers of a request with these options."""
    http = httpx.Client(
        auth=Credentials(parse_options({"url": URL, **options})),
        transport=httpx.MockTransport(lambda request: httpx.Response(200, request=request)),
    )
    with http:
        return http.get(URL).request.headers


def test_equal_options_share_a_client() -> None:
    first = connection()
    assert http_of(connection()) is http_of(first)
    assert http_of(connection(1)) is not http_of(first)
    other = connection(**{"header.X-Tenant": "1"})
    assert http_of(other) is not http_of(first)
    assert http_of(other).headers["X-Tenant"] == "1"


def test_client_beyond_those_that_are_kept_is_closed_by_its_last_user() -> None:
    kept = [connection(number) for number in range(9)]
    clients = [http_of(one) for one in kept[:2]]
    assert not clients[0].is_closed
    del kept
    assert [one.is_closed for one in clients] == [True, False]


# ---------------------------------------------------------------------- credentials


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "abc")
    assert sent(authEnv="API_KEY")["Authorization"] == "Bearer abc"
    assert sent(**{"headerEnv.X-Api-Key": "API_KEY"})["X-Api-Key"] == "abc"
    monkeypatch.setenv("API_KEY", "Basic abc")
    assert sent(authEnv="API_KEY")["Authorization"] == "Basic abc"


@pytest.mark.parametrize("name", ["token", "headers", "Tokens.get", "auth"])
def test_function_returns_a_token_headers_or_an_auth(name: str) -> None:
    headers = sent(authCallable=f"tests.spark.credentials:{name}")
    assert headers["Authorization"] == "Bearer s3cr3t-t0ken"


def test_function_is_called_again_when_its_token_is_refused() -> None:
    valid = ["Bearer token-1"]
    credentials.issued = 0

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.headers["Authorization"] == valid[0] else 401)

    auth = Credentials(
        parse_options({"url": URL, "authCallable": "tests.spark.credentials:rotated"})
    )
    with httpx.Client(transport=httpx.MockTransport(answer), auth=auth) as http:
        assert http.get(URL).status_code == 200
        valid[0] = "Bearer token-2"
        assert [http.get(URL).status_code for _ in range(3)] == [200, 200, 200]
        assert credentials.issued == 2
        valid[0] = "of somebody else"
        assert http.get(URL).status_code == 401
        assert credentials.issued == 3


def test_r19_what_can_not_be_sent_is_named_and_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2-é")
    with pytest.raises(OptionError, match="printable ASCII") as refused:
        sent(authEnv="API_KEY")
    transport = httpx.MockTransport(lambda request: httpx.Response(401))
    auth = Credentials(
        parse_options({"url": URL, "authCallable": "tests.spark.credentials:rotated"})
    )
    monkeypatch.setattr(auth, "_function", lambda: "hunter2-é")
    with (
        httpx.Client(transport=transport, auth=auth) as http,
        pytest.raises(AuthenticationError, match=r"authCallable .* printable ASCII") as renewed,
    ):
        http.get(URL)
    for error in (refused.value, renewed.value):
        assert "hunter2" not in str(error)
        assert error.__cause__ is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"authEnv": "Bearer hunter2"}, "takes the name of an environment"),
        ({"headerEnv.X-Key": "hunter 2"}, "takes the name of an environment"),
        ({"authEnv": "NOT_SET"}, "NOT_SET is not set"),
        ({"authCallable": "no.such.module:token"}, "no.such.module:token can't be imported"),
        ({"authCallable": "tests..spark:token"}, "tests..spark:token can't be imported"),
        ({"authCallable": "tests.spark.credentials:number"}, "must return a str"),
        ({"caFile": "/absent.pem"}, "option caFile: /absent.pem holds no certificates"),
    ],
)
def test_r19_what_can_not_be_had_in_this_process_is_refused(
    options: dict[str, str], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected) as refused:
        connection(**options)
    assert "hunter" not in str(refused.value)


# ---------------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def https(certificate: Certificate) -> Iterator[str]:
    publisher = Publisher()
    with serve_https(publisher, certificate) as url:
        yield url
        kept_client.cache_clear()
        gc.collect()  # a client within the traceback of an error, whose connection is open


def test_server_is_verified_with_the_certificates_of_the_file(
    https: str, certificate: Certificate
) -> None:
    given = {"url": https, "caFile": str(certificate.path)}
    assert list(FeedConnection(parse_options(given)).discover().partitions) == [0]
    other = FeedConnection(parse_options({"url": https}))  # another client, for the same URL
    with pytest.raises(FeedError, match="certificate"):
        other.discover()
