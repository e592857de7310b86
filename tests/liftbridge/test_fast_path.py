"""The fast path: which messages it takes and which it leaves to nats-py, for any chunking.

That a publisher works without it, too, is what `test_publisher` shows.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from feedapi_client.liftbridge.fast_path import AckParser, install_fast_path

INBOX, OTHER = "_INBOX.abc", "MSG.other"


class Wire:
    """An unconnected client with the fast path for the inbox, and another subscription."""

    def __init__(self) -> None:
        self.client = Client()
        self.inbox = Subscription(self.client, 1, INBOX)
        self.other = Subscription(self.client, 12, OTHER)
        self.client._subs = {1: self.inbox, 12: self.other}
        self.acks: list[bytes] = []
        parser = AckParser(self.client, self.inbox, self.acks.extend)
        self.client._ps = self.parser = parser

    def feed(self, data: bytes) -> None:
        step = self.parser.parse(data)
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
    # An ack directly after another message takes the documented way, to the callback.
    assert sorted(wire.acks + wire.queued(wire.inbox)) == sorted(
        payload for subject, payload, _ in sent if subject == INBOX
    )


@given(
    st.lists(
        st.one_of(st.binary(max_size=30), st.sampled_from(["PING", "PONG", "+OK", "INFO {}"])),
        max_size=12,
    ),
    st.data(),
)
def test_acks_around_lines_of_the_protocol_never_reach_nats_py(
    sent: list[bytes | str], data: st.DataObject
) -> None:
    """A PING among acks must not leave the rest of them, chunk after chunk, to nats-py."""
    wire = Wire()
    lines: list[str] = []

    async def noted(name: str, *_: object) -> None:
        lines.append(name)

    for name in ("ping", "pong", "info"):
        setattr(wire.client, f"_process_{name}", partial(noted, name.upper()))
    stream = b"".join(
        f"{each}\r\n".encode() if isinstance(each, str) else message(INBOX, 1, each)
        for each in sent
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        wire.feed(stream[start:end])
    assert wire.acks == [each for each in sent if isinstance(each, bytes)]
    assert lines == [each[:4] for each in sent if isinstance(each, str) and each != "+OK"]


def test_a_connection_that_is_new_after_a_ping_forgets_what_came_behind_it() -> None:
    wire = Wire()

    async def reconnect() -> None:
        wire.parser.reset()

    wire.client._process_ping = reconnect  # type: ignore[method-assign]
    wire.feed(b"PING\r\n" + message(INBOX, 1, b"torn")[:-4])
    wire.feed(message(INBOX, 1, b"whole"))
    assert wire.acks == [b"whole"]


def test_a_new_connection_forgets_an_incomplete_ack() -> None:
    wire = Wire()
    wire.feed(message(INBOX, 1, b"torn")[:-4])
    wire.parser.reset()
    wire.feed(message(INBOX, 1, b"whole"))
    assert wire.acks == [b"whole"]


def test_a_client_without_the_needed_attributes_is_left_unchanged() -> None:
    class Other(Client):
        pass

    client = Other()
    setattr(client, "_ps", object())  # noqa: B010
    assert install_fast_path(client, Subscription(client, 1, INBOX), lambda acks: None) is None
    assert type(client._ps) is object
