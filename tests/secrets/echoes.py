"""Secrets, and publishers that echo them: as text, JSON, HTML and percent-encoded."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote, unquote

from tests.faults.responses import whole
from tests.faults.server import Request, Script

MARK = "SEKRET"
"""A part of every secret: whatever of one is left is found by this."""
# With characters that encoders escape, each in a way of its own.
USER = "reader"  # a name, no secret
PASSWORD = f"{MARK}pass/\"\\'<&>+é word"
QUERY = f"{MARK}query/\"\\'<&>+é value"
HEADER = f"{MARK}header/\"\\'<&>+ value"
COOKIE = f"{MARK}cookie/+<&>"
PARAMETER = f"{MARK}parameter/\"\\'<&>+é value"
SET_COOKIE = f"{MARK}setcookie"
PAYLOAD = f"{MARK}payload"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
NEEDLES = (MARK, BASIC, quote(MARK).lower(), base64.b64encode(MARK.encode()).decode()[:6])

HEADERS = {"X-Api-Key": HEADER, "Cookie": f"session={COOKIE}"}
PARAMETERS = {"api_key": PARAMETER}
ARGUMENTS = f"key={quote(QUERY, safe='')}"


def with_secrets(url: str) -> str:
    """Return the URL with credentials and a query."""
    user = f"{quote(USER, safe='')}:{quote(PASSWORD, safe='')}"
    return f"{url.replace('://', f'://{user}@', 1)}?{ARGUMENTS}"


def _told(request: Request) -> dict[str, str]:
    return {"target": request.target, **request.headers}


def _text(request: Request) -> str:
    return "\n".join(f"{name}: {value}" for name, value in _told(request).items())


def _decoded(request: Request) -> str:
    """Return the request's secrets as they are, those that only some of the callers have, too."""
    some = [COOKIE] if "cookie" in request.headers else []
    some += [PARAMETER] if "api_key=" in request.target else []
    return " ".join([unquote(request.target), f"{USER}:{PASSWORD}", QUERY, *some])


def _json(request: Request) -> str:
    return json.dumps(_told(request) | {"decoded": _decoded(request)})


def _json_for_html(request: Request) -> str:
    escaped = _json(request)
    for character in "<>&'+":
        escaped = escaped.replace(character, f"\\u{ord(character):04x}")
    return escaped


ECHOES: dict[str, Callable[[Request], str]] = {
    "text": _text,
    "decoded": _decoded,
    "JSON": _json,
    "JSON with slashes escaped": lambda request: _json(request).replace("/", "\\/"),
    "JSON for HTML": _json_for_html,
    "JSON in JSON": lambda request: json.dumps(_json(request)),
    "JSON in UTF-8": lambda request: json.dumps(_decoded(request), ensure_ascii=False),
    "HTML": lambda request: html.escape(_text(request) + _decoded(request)),
    "Python": lambda request: repr(_told(request) | {"decoded": _decoded(request)}),
    "percent-encoded": lambda request: quote(_decoded(request), safe=""),
    "percent-encoded in lower case": lambda request: request.target.lower().replace(
        MARK.lower(), MARK
    ),
    "at the cut of an excerpt": lambda request: "x" * 190 + _decoded(request),
}
STATUSES = (200, 401, 404, 418, 500)


def echo(request: Request, status: int, say: Callable[[Request], str]) -> Script:
    """Return a response that echoes the request, and sets a cookie."""
    body = say(request).encode("utf-8", "replace")
    return whole(body, f"Set-Cookie: session={SET_COOKIE}", status=f"{status} Status")


def redirect(request: Request) -> Script:
    """Return a redirect that sends the query and the credentials elsewhere."""
    user = quote(PASSWORD, safe="")
    return whole(
        b"", f"Location: http://{user}@other.invalid{request.target}", status="307 Elsewhere"
    )
