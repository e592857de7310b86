"""What importing the test tools loads, and what they say when an extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED_BY = """
import sys, feedapi_client
before = set(sys.modules)
import {module}
loaded = set(sys.modules) - before
print(sorted(name for name in loaded if not name.startswith(("_", "feedapi_client")))[:20])
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout.strip()


def test_importing_the_package_needs_no_pytest_and_no_server() -> None:
    assert run(LOADED_BY.format(module="feedapi_client.testing")) == "[]"


def test_the_plugin_costs_nothing_before_use() -> None:
    code = LOADED_BY.replace("import sys, feedapi_client", "import sys, pytest, feedapi_client")
    assert run(code.format(module="feedapi_client.testing.pytest_plugin")) == "[]"


def test_serving_without_uvicorn_says_which_extra_it_needs() -> None:
    code = """
import sys
sys.modules["uvicorn"] = None
from feedapi_client.testing import Publisher
try:
    Publisher().serve()
except ImportError as error:
    print(error)
"""
    assert (
        run(code)
        == "serving a Publisher on a port needs uvicorn: pip install 'feedapi-client[testing]'"
    )


def test_public_names_exist() -> None:
    from feedapi_client import testing

    for name in (*testing.__all__, "BrokerFault", "LiftbridgeBroker", "NatsServer"):
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        testing.nothing  # noqa: B018
