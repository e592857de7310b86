"""The HTTP clients of a process: shared, bounded in number, and closed after their last use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.http_clients import HttpClients, RequestRate, http_clients
from feedapi_client.spark.source_options import OptionError, SourceOptions, parse_options


def options(number: int = 0, **given: str) -> SourceOptions:
    return parse_options({"url": f"http://service/feed{number}", **given})


@pytest.fixture
def clients() -> Iterator[HttpClients]:
    clients = HttpClients(capacity=2)
    yield clients
    clients.close()


def test_equal_options_share_a_client(clients: HttpClients) -> None:
    first, second = clients.acquire(options()), clients.acquire(options())
    assert first is second
    assert clients.acquire(options(1)) is not first


def test_released_client_stays_open_for_the_next_user(clients: HttpClients) -> None:
    client = clients.acquire(options())
    clients.release(client)
    assert not client.http.is_closed
    assert clients.acquire(options()) is client


def test_least_recently_used_client_is_closed_beyond_the_capacity(clients: HttpClients) -> None:
    used = [clients.acquire(options(number)) for number in (0, 1, 0)]
    for client in used:
        clients.release(client)
    clients.acquire(options(2))
    assert len(clients) == 2
    assert [client.http.is_closed for client in used] == [False, True, False]


def test_evicted_client_is_closed_by_its_last_user(clients: HttpClients) -> None:
    client = clients.acquire(options())
    assert clients.acquire(options()) is client
    for number in (1, 2):
        clients.acquire(options(number))
    clients.release(client)
    assert not client.http.is_closed
    clients.release(client)
    assert client.http.is_closed


def test_client_without_its_credentials_is_released(clients: HttpClients) -> None:
    with pytest.raises(OptionError, match="NO_SUCH_VARIABLE"):
        clients.acquire(options(authEnv="NO_SUCH_VARIABLE"))
    for number in (1, 2):
        clients.release(clients.acquire(options(number)))
    assert len(clients) == 2


def test_r19_a_secret_in_the_place_of_a_variable_is_not_repeated(clients: HttpClients) -> None:
    for option in ({"authEnv": "Bearer hunter2"}, {"headerEnv.X-Key": "hunter2"}):
        with pytest.raises(OptionError, match="takes the name of an environment") as caught:
            clients.acquire(options(**option))
        assert "hunter2" not in str(caught.value)


def test_closed_connection_releases_its_client_once() -> None:
    with FeedConnection(options()) as connection:
        shared = http_clients.acquire(options())
        assert shared.users == 2
    connection.close()
    assert shared.users == 1
    http_clients.release(shared)


def test_requests_of_a_process_are_spaced_evenly() -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    rate = RequestRate(4, clock=lambda: now, sleep=sleep)
    for _ in range(4):
        rate.wait()
    now += 10.0
    rate.wait()
    assert slept == [0.25] * 3


def test_connections_with_equal_options_share_their_rate() -> None:
    options = parse_options({"url": "http://127.0.0.1/feed", "maxRequestsPerSecond": "5"})
    clients = HttpClients()
    try:
        first, second = clients.acquire(options), clients.acquire(options)
        assert first.rate is not None
        assert first.rate is second.rate
    finally:
        clients.close()
