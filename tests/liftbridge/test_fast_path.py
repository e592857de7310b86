"""The fast lanes: what they take and what they leave to nats-py, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from feedapi_client.liftbridge import LiftbridgePublisher, fast_path
from feedapi_client.liftbridge.fast_path import AckParser
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer

pytestmark = pytest.mark.anyio

INBOX, OTHER = "_INBOX.abc", "MSG.other"


class Wire:
    """A client that is not connected, with a lane for the inbox and an ordinary subscription beside it."""

    def __init__(self) -> None:
        self.client = Client()
        self.inbox = Subscription(self.client, 1, INBOX)
        self.other = Subscription(self.client, 12, OTHER)
        self.client._subs = {1: self.inbox, 12: self.other}
        self.acks: list[bytes] = []
        lane = AckParser(self.client, self.inbox, self.acks.extend)
        self.client._ps = self.lane = lane

    def feed(self, data: bytes) -> None:
        step = self.lane.parse(data)
        with pytest.raises(StopIteration):
            step.send(None)

    def queued(self, subscription: Subscription) -> list[bytes]:
        return [
            subscription._pending_queue.get_nowait().data for _ in range(subscription.pending_msgs)
        ]


def message(subject: str, sid: int, payload: bytes, reply: str = "") -> bytes:
    return (
        f"MSG {subject} {sid} {reply + ' ' if reply else ''}{len(payload)}\r\n".encode()
        + payload
        + b"\r\n"
    )


frames = st.one_of(
    st.binary(max_size=30).map(lambda payload: (INBOX, payload, message(INBOX, 1, payload))),
    st.binary(max_size=30).map(lambda payload: (OTHER, payload, message(OTHER, 12, payload))),
    st.binary(max_size=30).map(
        lambda payload: (OTHER, payload, message(OTHER, 12, payload, "reply"))
    ),
    st.binary(max_size=30).map(
        lambda payload: (INBOX, payload, message(INBOX, 1, payload, "reply"))
    ),
    st.just(("", b"", b"+OK\r\n")),
)


@given(st.lists(frames, max_size=12), st.data())
def test_any_chunking_takes_every_ack_once_and_leaves_the_rest(
    sent: list[tuple[str, bytes, bytes]], data: st.DataObject
) -> None:
    wire = Wire()
    stream = b"".join(frame for _, _, frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        wire.feed(stream[start:end])
    assert wire.queued(wire.other) == [payload for subject, payload, _ in sent if subject == OTHER]
    # Acks that came right behind something else go the documented way: to the subscription's callback.
    assert sorted(wire.acks + wire.queued(wire.inbox)) == sorted(
        payload for subject, payload, _ in sent if subject == INBOX
    )


@given(st.lists(st.binary(max_size=30), max_size=12), st.data())
def test_a_run_of_acks_never_leaves_the_lane(payloads: list[bytes], data: st.DataObject) -> None:
    wire = Wire()
    stream = b"".join(message(INBOX, 1, payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        wire.feed(stream[start:end])
    assert wire.acks == payloads


def test_a_new_connection_starts_afresh() -> None:
    wire = Wire()
    wire.feed(message(INBOX, 1, b"torn")[:-4])
    wire.lane.reset()
    wire.feed(message(INBOX, 1, b"whole"))
    assert wire.acks == [b"whole"]


def test_a_nats_py_that_lacks_what_the_lane_needs_is_left_alone() -> None:
    class Other(Client):
        pass

    client = Other()
    setattr(client, "_ps", object())  # noqa: B010
    assert fast_path.install(client, Subscription(client, 1, INBOX), lambda acks: None) is None
    assert type(client._ps) is object


async def test_the_documented_way_does_the_same(
    nats_server: NatsServer, broker: LiftbridgeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "install", lambda *_: None)
    await broker.create_stream("s", partitions=1)
    broker.script(None, BrokerFault.DOUBLE_ACK, BrokerFault.GARBAGE, BrokerFault.FOREIGN_ACK)
    async with LiftbridgePublisher(nats_server.url, max_in_flight=10) as publisher:
        acks = await publisher.publish_many("s", [b"%d" % i for i in range(500)])
        assert [ack.offset for ack in acks if ack] == list(range(500))
        assert publisher.stats.garbage == 3
        assert publisher.stats.acked == 500
    assert [message.value for message in broker.messages("s")] == [b"%d" % i for i in range(500)]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB other 0\r\n"])
async def test_a_subject_can_not_smuggle_commands(
    publisher: LiftbridgePublisher, subject: str
) -> None:
    with pytest.raises(ValueError, match=r"subject|name"):
        await publisher.publish(subject, b"x")
    assert publisher.in_flight == 0
