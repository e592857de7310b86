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

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    RelayReader,
    StreamCursorStore,
    StreamError,
)
from feedapi_client.liftbridge.stream_format import VERSION
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing.liftbridge import LiftbridgeBroker
from tests.liftbridge.exactly_once.streams import KEY, outgoing
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
    writer = store._ledger._writer_id
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


async def restore(publisher: LiftbridgePublisher, file: str) -> None:
    for message in json.loads((_GOLDEN / file).read_text()):
        await publisher.publish(
            "s",
            base64.b64decode(message["value"]),
            key=base64.b64decode(message["key"]) or None,
            headers={name: value.encode() for name, value in message["headers"].items()},
        )


@pytest.mark.parametrize("format", ["batch", "events"])
@pytest.mark.parametrize("version", range(VERSION + 1))
async def test_a_ledger_of_every_version_is_read_and_written_on(
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    api_broker: LiftbridgeBroker,
    version: int,
    format: str,
) -> None:
    await api_broker.create_stream("s", concurrency_control=True)
    await restore(publisher, f"ledger-{version}-{format}.json")
    store = StreamCursorStore(publisher, api, "s", format=format)
    assert await store.load(KEY) == _POSITIONS
    await store.save(KEY, {0: counted("c", 3)}, transaction=outgoing(3, cursor="c"))
    until = api_broker.next_offset("s") - 1
    batches = [batch async for batch in RelayReader(api, "s", until=until)]
    assert [[event.json()["n"] for event in batch.events] for batch in batches] == [[1, 2], [3]]
    # A ledger of an older version was converted by that, and names its feed now.
    assert await StreamCursorStore(publisher, api, "s").feeds() == [KEY]


@pytest.mark.parametrize("format", ["batch", "events"])
async def test_the_newest_golden_copy_is_what_is_written(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, api_broker: LiftbridgeBroker, format: str
) -> None:
    await api_broker.create_stream("s", concurrency_control=True)
    store = StreamCursorStore(publisher, api, "s", format=format)
    await write(store)
    written = of_one_writer(api_broker.messages("s"), store)
    assert written == json.loads((_GOLDEN / f"ledger-{VERSION}-{format}.json").read_text())


async def test_the_keys_of_a_ledger_of_version_0_are_not_guessed(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, api_broker: LiftbridgeBroker
) -> None:
    await api_broker.create_stream("s", concurrency_control=True)
    await restore(publisher, "ledger-0-batch.json")
    with pytest.raises(StreamError, match="start its relay once, which converts them"):
        await StreamCursorStore(publisher, api, "s").feeds()
    # A command that is told both URLs needs no name.
    new = FeedKey("http://elsewhere/feed")
    assert await StreamCursorStore(publisher, api, "s").move({KEY: new})
    assert set(await StreamCursorStore(publisher, api, "s").load(new)) == {0, 7}


@pytest.mark.parametrize("format", ["batch", "events"])
async def test_what_a_newer_version_wrote_is_refused_with_advice(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, api_broker: LiftbridgeBroker, format: str
) -> None:
    await api_broker.create_stream("s", concurrency_control=True)
    messages = json.loads((_GOLDEN / f"ledger-{VERSION}-{format}.json").read_text())
    for message in messages:
        headers = {
            name: value.replace(f'"version":{VERSION}', f'"version":{VERSION + 1}')
            .replace("batch", "blocks")
            .replace("events", "blocks")
            .encode()
            for name, value in message["headers"].items()
        }
        await publisher.publish("s", base64.b64decode(message["value"]), headers=headers)
    with pytest.raises(StreamError, match=r"newer version.*update feedapi-client"):
        await StreamCursorStore(publisher, api, "s").load(KEY)
    until = api_broker.next_offset("s") - 1
    with pytest.raises(StreamError, match=r"newer version.*'blocks'.*update feedapi-client"):
        [batch async for batch in RelayReader(api, "s", until=until)]
