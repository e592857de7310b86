"""The HTTP clients of a process: shared, and closed after their last use."""

from __future__ import annotations

import pytest

from feedapi_client.spark.http_clients import shared_client
from feedapi_client.spark.source_options import OptionError, SourceOptions, parse_options


def options(number: int = 0, **given: str) -> SourceOptions:
    return parse_options({"url": f"http://service/feed{number}", **given})


def test_equal_options_share_a_client() -> None:
    first = shared_client(options())
    assert shared_client(options()) is first
    assert shared_client(options(1)) is not first
    assert (
        shared_client(parse_options({"url": "http://service/feed0", "header.X": "1"})) is not first
    )


def test_client_beyond_the_capacity_is_closed_by_its_last_user() -> None:
    kept = [shared_client(options(number)) for number in range(33)]
    http = [client.http for client in kept[:2]]
    assert not http[0].is_closed
    del kept
    assert [one.is_closed for one in http] == [True, False]


def test_r19_a_secret_in_the_place_of_a_variable_is_not_repeated() -> None:
    for option in ({"authEnv": "Bearer hunter2"}, {"headerEnv.X-Key": "hunter2"}):
        with pytest.raises(OptionError, match="takes the name of an environment") as caught:
            shared_client(parse_options({"url": "http://service/feed", **option}))
        assert "hunter2" not in str(caught.value)
