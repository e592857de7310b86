"""What a ledger holds: golden copies, which every later version reads, and who may read them.

The folder ``golden`` has the messages that one relay wrote. A change of the format adds a file and
leaves the others as they are.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.liftbridge import StreamCursorStore, StreamError
from feedapi_client.liftbridge.stream_format import VERSION
from feedapi_client.model import FeedKey, Position
from tests.liftbridge.broker import Broker
from tests.liftbridge.ledgers import FORMATS, KEY, batches, outgoing, store_of
from tests.positions import counted

pytestmark = pytest.mark.anyio

_GOLDEN = Path(__file__).parent / "golden"
_POSITIONS = {0: counted("b", 2), 7: Position("end", "drained")}


async def write(store: StreamCursorStore, key: FeedKey = KEY) -> None:
    """Write what the golden copies hold."""
    await store.load(key)
    await store.save(key, {0: Position("a"), 7: Position("end", "drained")})
    await store.save(key, {0: _POSITIONS[0]}, transaction=outgoing(1, 2, cursor="b"))


def of_one_writer(messages: Any, store: StreamCursorStore) -> list[dict[str, Any]]:
    """The messages as JSON, with a fixed id of their writer."""
    writer = store._writer_id
    return [
        {
            "key": base64.b64encode(message.key).decode(),
            "value": base64.b64encode(message.value).decode(),
            "headers": {
                name: value.decode().replace(writer, "0123456789abcdef")
                for name, value in sorted(message.headers.items())
                if name.startswith("feedapi-")
            },
        }
        for message in messages
    ]


async def restore(broker: Broker, file: str, *changes: tuple[str, str]) -> None:
    """Write a golden copy to the stream of the test, with changes to its headers."""
    await broker.create(once=True)
    for message in json.loads((_GOLDEN / file).read_text()):
        headers = message["headers"]
        for old, new in changes:
            headers = {name: value.replace(old, new) for name, value in headers.items()}
        await broker.publisher.publish(
            broker.name,
            base64.b64decode(message["value"]),
            key=base64.b64decode(message["key"]) or None,
            headers={name: value.encode() for name, value in headers.items()},
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("version", range(1, VERSION + 1))
async def test_a_ledger_of_every_version_is_read_and_written_on(
    broker: Broker, version: int, format: str
) -> None:
    await restore(broker, f"ledger-{version}-{format}.json")
    store = store_of(broker, format)
    assert await store.load(KEY) == _POSITIONS
    await store.save(KEY, {0: counted("c", 3)}, transaction=outgoing(3, cursor="c"))
    found = [[event.json()["n"] for event in batch.events] for batch in await batches(broker)]
    assert found == [[1, 2], [3]]
    assert await store_of(broker).feeds() == [KEY]


@pytest.mark.parametrize("format", FORMATS)
async def test_the_newest_golden_copy_is_what_is_written(broker: Broker, format: str) -> None:
    await broker.create(once=True)
    store = store_of(broker, format)
    await write(store)
    written = of_one_writer(await broker.messages(), store)
    assert written == json.loads((_GOLDEN / f"ledger-{VERSION}-{format}.json").read_text())


@pytest.mark.parametrize("format", FORMATS)
async def test_what_a_newer_version_wrote_is_refused_with_advice(
    broker: Broker, format: str
) -> None:
    newer = (f'"version":{VERSION}', f'"version":{VERSION + 1}')
    formats = [(each, "blocks") for each in FORMATS]
    await restore(broker, f"ledger-{VERSION}-{format}.json", newer, *formats)
    with pytest.raises(StreamError, match=r"newer version.*update feedapi-client"):
        await store_of(broker).load(KEY)
    with pytest.raises(StreamError, match=r"newer version.*'blocks'.*update feedapi-client"):
        await batches(broker)
