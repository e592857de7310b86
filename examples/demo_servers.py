"""A feed and a database for the examples that are run without arguments: a publisher in memory, and PostgreSQL from the pgserver wheel."""

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
    """`url`, or a feed of 3,000 payments to five accounts; with `overdraft` one of them takes out more than there can be."""
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
    """`url`, or that of a server of its own, which is gone at the end of the block."""
    if url is not None:
        yield url
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library that looks for the user's runtime directory
        import pgserver
    # The server may run as a user of its own and listens on a socket in there, whose path must be short.
    directory = Path(tempfile.mkdtemp(prefix="feedapi-example-", dir="/tmp"))
    directory.chmod(0o755)
    server = pgserver.get_server(directory, cleanup_mode="delete")
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={directory}"
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)
