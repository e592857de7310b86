"""The exactly-once examples, run as programs.

With servers of their own, and twice on the same feed and database.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from feedapi_client.testing import Publisher
from tests import warm
from tests.servers import Postgres

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    result = warm.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def empty(server: Postgres) -> None:
    engine = sa.create_engine(server.url())
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "DROP TABLE IF EXISTS "
                "accounts, customer_accounts, feedapi_cursors, feedapi_quarantine"
            )
        )
    engine.dispose()


def test_the_core_example_books_every_payment_once() -> None:
    printed = [line.split() for line in run("exactly_once_postgres.py").splitlines()]
    expected = {
        name: sum(1 + n % 7 for n in range(start, 3000, 5))
        for start, name in enumerate(("Ada", "Edgar", "Grace", "Leslie", "Tony"))
    }
    assert {name: int(balance) for name, balance in printed} == expected


def test_the_orm_example_quarantines_the_overdraft_and_books_the_rest_once() -> None:
    ada, *others, quarantined = run("exactly_once_orm.py").splitlines()
    assert ada.split() == [
        "Ada",
        str(sum(1 + n % 7 for n in range(0, 3000, 5)) + 5),
        "in",
        "601",
        "payments",
    ]
    assert [line.split()[2:] for line in others] == [["in", "600", "payments"]] * 4
    assert quarantined.startswith("in quarantine: event")
    assert quarantined.endswith("IntegrityError")


@pytest.mark.parametrize("name", ["exactly_once_postgres.py", "exactly_once_orm.py"])
def test_an_example_resumes_from_its_database(
    name: str, postgres: Postgres, feedapi_publisher: Publisher
) -> None:
    empty(postgres)
    arguments = ("--feed", feedapi_publisher.url or "", "--database", postgres.url())
    feedapi_publisher.append(0, {"account": "Ada", "amount": 10})
    assert run(name, *arguments).split()[:2] == ["Ada", "10"]
    feedapi_publisher.append(0, {"account": "Ada", "amount": 5})
    assert run(name, *arguments).split()[:2] == ["Ada", "15"]
