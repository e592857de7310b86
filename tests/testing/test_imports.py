"""What importing the test tools loads and offers, and what they say when an extra is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from feedapi_client import testing
from feedapi_client.testing import Publisher, Quirks

LOADED = """
import sys, feedapi_client{known}
before = set(sys.modules)
import feedapi_client.testing{module}
loaded = set(sys.modules) - before
print(sorted(name for name in loaded if not name.startswith(("_", "feedapi_client")))[:20])
"""
WITHOUT_UVICORN = """
import sys
sys.modules["uvicorn"] = None
from feedapi_client.testing import Publisher
try:
    Publisher().serve()
except ImportError as error:
    print(error)
"""
EXTRA = "serving a Publisher on a port needs uvicorn: pip install 'feedapi-client[testing]'"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (LOADED.format(known="", module=""), "[]"),
        (LOADED.format(known=", pytest", module=".pytest_plugin"), "[]"),
        (WITHOUT_UVICORN, EXTRA),
    ],
    ids=["package", "plugin", "uvicorn"],
)
def test_what_an_import_prints(code: str, printed: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == printed


def test_public_names_exist() -> None:
    for name in (*testing.__all__, "LiftbridgeServer", "NatsServer"):
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        testing.nothing  # noqa: B018


# The fixtures of the plugin


def test_the_fixture_is_a_served_publisher(
    feedapi_publisher: Publisher, http: httpx.Client
) -> None:
    assert feedapi_publisher.url is not None
    assert http.get(feedapi_publisher.url).json()["partitions"] == [{"id": "0"}]


def test_the_factory_fixture_takes_the_arguments_of_a_publisher(
    feedapi_publisher_factory: Callable[..., Publisher], http: httpx.Client
) -> None:
    first = feedapi_publisher_factory((3, 5), dialect="v2-draft", quirks=Quirks(integer_ids=True))
    second = feedapi_publisher_factory()
    assert first.url != second.url
    assert http.get(first.url or "").json()["partitions"] == [{"id": 3}, {"id": 5}]
