"""Request in, response out: the publisher's side of the protocol. No I/O."""

from __future__ import annotations

from feedapi_client.model import DialectName
from feedapi_client.testing.publisher.feed import Feed
from feedapi_client.testing.publisher.fetch import fetch
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import (
    HttpError,
    Response,
    json_response,
    text_response,
)


def handle(feed: Feed, request: Request) -> Response:
    """Return what the publisher answers when no fault applies. The caller holds the feed's lock."""
    try:
        _authorize(feed, request)
        if request.kind == "discovery":
            return _discover(feed)
        if request.kind == "fetch":
            return fetch(feed, request, _dialect_of(feed, request))
        raise HttpError(404, "not found")
    except HttpError as error:
        return text_response(error.status, error.text + "\n")


def _authorize(feed: Feed, request: Request) -> None:
    if request.method != "GET":
        raise HttpError(405, "only GET")
    authorization = request.headers.get("authorization")
    if feed.bearer is not None and authorization != f"Bearer {feed.bearer}":
        raise HttpError(401 if authorization is None else 403, "bearer token missing or wrong")
    if any(request.query.get(name) != value for name, value in feed.require_query.items()):
        raise HttpError(403, "a query argument is missing or wrong")


def _discover(feed: Feed) -> Response:
    if feed.dialect == "v1":
        raise HttpError(400, "handshake error: partition count missing")
    return json_response(feed.discovery())


def _dialect_of(feed: Feed, request: Request) -> DialectName:
    """Return the dialect of a fetch. Raises HttpError when the feed doesn't speak it."""
    dialect = feed.dialect
    if request.path != feed.path:
        if dialect != "v2-token":
            raise HttpError(404, "not found")
        if request.token != feed.token:
            raise HttpError(409, "the token is stale: discover again")
        return dialect
    if dialect == "v2-draft" and "partition" in request.query:
        return dialect
    if "partition" not in request.query and (dialect == "v1" or feed.quirks.answers_v1):
        _check_v1_arguments(feed, request)
        return "v1"
    raise HttpError(400, f"handshake error: this is not how dialect {dialect} fetches")


def _check_v1_arguments(feed: Feed, request: Request) -> None:
    count = feed.listed_count
    if "n" not in request.query:
        raise HttpError(400, "handshake error: partition count missing")
    if request.query["n"] != str(count):
        raise HttpError(400, f"handshake error: partition count is {count}")
    if request.cursor is None:
        raise HttpError(400, "handshake error: exactly one cursor expected")
