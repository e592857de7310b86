"""A feed whose certificate only an own authority signed."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedapi_client.errors import FeedError
from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.fetch import PartitionReader
from feedapi_client.spark.http_clients import kept_client
from feedapi_client.spark.source_options import OptionError, parse_options
from feedapi_client.spark.target import Target
from feedapi_client.testing import Publisher
from tests.http.certificates import Certificate, self_signed, serve_https

URL = "https://service/feed"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def https(certificate: Certificate) -> Iterator[str]:
    publisher = Publisher()
    publisher.extend(0, [{"n": n} for n in range(5)])
    with serve_https(publisher, certificate) as url:
        yield url
        kept_client.cache_clear()
        gc.collect()  # a client within the traceback of an error, whose connection is open


def test_server_is_verified_with_the_certificates_of_the_file(
    https: str, certificate: Certificate
) -> None:
    given = {"url": https, "caFile": str(certificate.path)}
    options = pickle.loads(pickle.dumps(parse_options(given)))
    connection = FeedConnection(options)
    assert PartitionReader(connection, Target(0, "_first")).read().events == 5
    other = FeedConnection(parse_options({"url": https}))  # another client, for the same URL
    with pytest.raises(FeedError, match="certificate"):
        other.discover()


def test_a_process_without_the_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"option caFile: .*absent\.pem holds no certificates"):
        FeedConnection(parse_options({"url": URL, "caFile": str(tmp_path / "absent.pem")}))
