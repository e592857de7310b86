"""Read a feed without async, as a script or a notebook does.

It reads one partition page by page and keeps the cursor in a file.

python examples/sync_script.py [URL]
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from feedapi_client import FIRST, SyncFeedClient
from feedapi_client.testing import Publisher

PARTITION = 0
CURSOR_FILE = Path("partition-0.cursor")


def main(url: str) -> None:
    cursor = CURSOR_FILE.read_text() if CURSOR_FILE.exists() else FIRST
    with SyncFeedClient(url) as client:
        info = client.discover()
        print(f"dialect {info.dialect}, partitions {sorted(info.partitions)}")
        while True:
            page = client.fetch(PARTITION, cursor).read()
            for event in page.events:
                print(event.json())
            if page.caught_up or page.cursor is None:
                break
            cursor = page.cursor
            # After the events: a crash in between repeats some of them and loses none.
            CURSOR_FILE.write_text(cursor)


if __name__ == "__main__":
    publisher = Publisher(1, page_size=5, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(12)])
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        main(url)
