"""The options of ``feedapi relay``, and what those for the broker's gRPC API come to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.stream_options import StreamOptions

DEFAULT_NATS = "nats://127.0.0.1:4222"

_Options = Sequence[tuple[str, dict[str, Any]]]

_TARGET_OPTIONS: _Options = (
    (
        "--nats",
        {
            "action": "append",
            "metavar": "URL",
            "help": f"a NATS server, repeatable (default {DEFAULT_NATS})",
        },
    ),
    (
        "--nats-env",
        {
            "metavar": "NAME",
            "help": "environment variable with the NATS URL, for a URL with a password",
        },
    ),
    ("--nats-creds", {"metavar": "FILE", "help": "NATS credentials file"}),
    ("--stream", {"required": True, "help": "the stream to publish to"}),
    ("--subject", {"default": "", "help": "the stream's NATS subject (default: its name)"}),
    (
        "--partitions",
        {
            "type": int,
            "default": 1,
            "metavar": "N",
            "help": "number of the stream's partitions (default 1)",
        },
    ),
    (
        "--key",
        {
            "metavar": "FIELD",
            "help": "the message's key: a field of the payload; nested fields with dots",
        },
    ),
    (
        "--ack",
        {
            "choices": ["leader", "all"],
            "default": "all",
            "help": "ack when the leader or all in-sync replicas stored it (default all)",
        },
    ),
    (
        "--ack-timeout",
        {
            "type": float,
            "default": 10.0,
            "metavar": "SECONDS",
            "help": "deadline for each ack (default 10)",
        },
    ),
    (
        "--max-in-flight",
        {
            "type": int,
            "default": 8192,
            "metavar": "N",
            "help": "maximum number of messages that wait for their ack (default 8192)",
        },
    ),
)

_CURSOR_OPTIONS: _Options = (
    (
        "--exactly-once",
        {
            "choices": ["batch", "events"],
            "metavar": "batch|events",
            "help": "keep the cursors in the stream; one message for each batch or each event",
        },
    ),
    ("--store", {"metavar": "FILE", "help": "SQLite file for the cursors, at least once"}),
    ("--name", {"default": "default", "help": "name that the cursors are kept under"}),
)

_FEED_OPTIONS: _Options = (
    (
        "--from",
        {
            "dest": "start",
            "choices": ["first", "last"],
            "default": "first",
            "help": "where a new name starts (default first)",
        },
    ),
    ("--no-follow", {"action": "store_true", "help": "exit at the end of the feed"}),
    (
        "--filter",
        {
            "action": "append",
            "default": [],
            "metavar": "NAME=VALUE",
            "help": "only events that the feed's filter selects, repeatable",
        },
    ),
    (
        "--event-type",
        {
            "action": "append",
            "default": [],
            "metavar": "TYPE",
            "help": "only events of this type, repeatable",
        },
    ),
    (
        "--skip-event-type",
        {
            "action": "append",
            "default": [],
            "metavar": "TYPE",
            "help": "no events of this type, repeatable",
        },
    ),
    (
        "--v1-partitions",
        {
            "type": int,
            "metavar": "N",
            "help": "number of partitions of a ZeroEventHub (v1) feed",
        },
    ),
    (
        "--lineage",
        {
            "action": "append",
            "default": [],
            "metavar": "CHILD:PARENT",
            "help": "read CHILD after PARENT, where the feed leaves that out (1:0), repeatable",
        },
    ),
    (
        "--auth-env",
        {
            "metavar": "NAME",
            "help": "environment variable with the value of the Authorization header",
        },
    ),
    (
        "--ca-file",
        {
            "metavar": "FILE",
            "default": os.environ.get("FEEDAPI_CA_FILE"),
            "help": "trust the certificates in this PEM file, in place of the public ones",
        },
    ),
)

_CREATE_OPTIONS: _Options = (
    ("--create", {"action": "store_true", "help": "create the stream if it is missing"}),
    (
        "--replicas",
        {"type": int, "default": 1, "metavar": "N", "help": "number of replicas (default 1)"},
    ),
    ("--min-isr", {"type": int, "metavar": "N", "help": "minimum of in-sync replicas"}),
    ("--group", {"default": "", "help": "NATS queue group of the stream"}),
    ("--retention-bytes", {"type": int, "metavar": "N", "help": "keep so many bytes"}),
    ("--retention-messages", {"type": int, "metavar": "N", "help": "keep so many messages"}),
    ("--retention-seconds", {"type": float, "metavar": "S", "help": "keep messages so long"}),
    ("--cleaner-seconds", {"type": float, "metavar": "S", "help": "interval of cleaning up"}),
    ("--segment-bytes", {"type": int, "metavar": "N", "help": "size of a segment"}),
    ("--segment-seconds", {"type": float, "metavar": "S", "help": "age of a segment"}),
    (
        "--compact",
        {
            "action": argparse.BooleanOptionalAction,
            "help": "keep the newest message of each key only; not with --exactly-once",
        },
    ),
    (
        "--compact-goroutines",
        {"type": int, "metavar": "N", "help": "goroutines that compact a partition at once"},
    ),
    (
        "--auto-pause-seconds",
        {"type": float, "metavar": "S", "help": "pause an idle partition; 0: never"},
    ),
    (
        "--auto-pause-unless-subscribed",
        {
            "action": argparse.BooleanOptionalAction,
            "help": "do not pause while somebody is subscribed",
        },
    ),
    (
        "--encryption",
        {"action": argparse.BooleanOptionalAction, "help": "encrypt values on the broker"},
    ),
)

_API_OPTIONS: _Options = (
    (
        "--api",
        {
            "action": "append",
            "metavar": "HOST:PORT",
            "help": "a broker's gRPC API, repeatable; for --create and --exactly-once, and to "
            "check the stream",
        },
    ),
    ("--api-tls", {"action": "store_true", "help": "gRPC over TLS, with the system's authorities"}),
    ("--api-ca", {"metavar": "FILE", "help": "gRPC over TLS, with this authority"}),
    ("--api-cert", {"metavar": "FILE", "help": "certificate of this client; with --api-cert-key"}),
    ("--api-cert-key", {"metavar": "FILE", "help": "its key"}),
    (
        "--api-token-env",
        {
            "metavar": "NAME",
            "help": "environment variable with a token that every gRPC call carries",
        },
    ),
)

GROUPS: Sequence[tuple[str, _Options]] = (
    ("Liftbridge", _TARGET_OPTIONS),
    ("Liftbridge's gRPC API", _API_OPTIONS),
    ("a new stream", _CREATE_OPTIONS),
    ("cursors", _CURSOR_OPTIONS),
    ("feed", _FEED_OPTIONS),
)


def check_api_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options of the API that do not fit together."""
    if options.create and not options.api:
        raise ValueError("--create needs --api HOST:PORT")
    if not options.api and (options.api_tls or options.api_ca or options.api_token_env):
        raise ValueError("options of the gRPC API need --api HOST:PORT")
    if bool(options.api_cert) != bool(options.api_cert_key):
        raise ValueError("--api-cert and --api-cert-key go together")
    if options.api_token_env and not (options.api_tls or options.api_ca):
        raise ValueError("--api-token-env needs --api-tls or --api-ca: a token is a secret")
    if options.exactly_once and options.compact:
        raise ValueError("--exactly-once needs every message: it goes without --compact")


def make_api(options: argparse.Namespace) -> LiftbridgeApi:
    """Return the connection to the gRPC API that the options describe.

    Raises:
        ValueError: a file can't be read, or the variable with the token is not set.
    """
    credentials = None
    if options.api_tls or options.api_ca or options.api_cert:
        credentials = grpc.ssl_channel_credentials(
            _content(options.api_ca), _content(options.api_cert_key), _content(options.api_cert)
        )
    token = environment(options.api_token_env) if options.api_token_env else None
    return LiftbridgeApi(options.api, credentials=credentials, token=token)


def stream_options(options: argparse.Namespace) -> StreamOptions:
    """Return the options of a new stream."""
    return StreamOptions(
        group=options.group,
        retention_bytes=options.retention_bytes,
        retention_messages=options.retention_messages,
        retention_seconds=options.retention_seconds,
        cleaner_seconds=options.cleaner_seconds,
        segment_bytes=options.segment_bytes,
        segment_seconds=options.segment_seconds,
        compact=options.compact,
        compact_goroutines=options.compact_goroutines,
        auto_pause_seconds=options.auto_pause_seconds,
        auto_pause_unless_subscribed=options.auto_pause_unless_subscribed,
        encryption=options.encryption,
    )


def environment(variable: str) -> str:
    """Return a variable of the environment. Raises ValueError when it is not set."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"the environment variable {variable} is not set")
    return value


def _content(file: str | None) -> bytes | None:
    try:
        return None if file is None else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
