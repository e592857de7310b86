"""A feed and a database for examples that are run without arguments.

The feed is a publisher in memory, the database PostgreSQL from the pgserver wheel.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feedapi_client.testing import Publisher


@contextmanager
def feed_of_payments(url: str | None, *, overdraft: bool = False) -> Iterator[str]:
    """Give `url`, or the URL of a feed with 3,000 payments to five accounts.

    With `overdraft` one of the payments takes more from an account than it can hold.
    """
    if url is not None:
        yield url
        return
    names = ("Ada", "Edgar", "Grace", "Leslie", "Tony")
    publisher = Publisher(3, page_size=100, checkpoint_every=25, vary=True)
    for n in range(3000):
        name = names[n % 5]
        publisher.publish(name, {"account": name, "amount": 1 + n % 7})
    if overdraft:
        publisher.publish("Ada", {"account": "Ada", "amount": -1_000_000})
        publisher.publish("Ada", {"account": "Ada", "amount": 5})
    with publisher.serve() as own:
        yield own


@contextmanager
def postgres(url: str | None) -> Iterator[str]:
    """Give `url`, or the URL of a server that is started here and removed after the block."""
    if url is not None:
        yield url
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's runtime directory
        import pgserver
    # The server listens on a socket in this directory, whose path must be short, and may run as
    # another user.
    directory = Path(tempfile.mkdtemp(prefix="feedapi-example-", dir="/tmp"))
    directory.chmod(0o755)
    server = pgserver.get_server(directory, cleanup_mode="delete")
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={directory}"
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)
