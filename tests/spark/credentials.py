"""What a user's ``authCallable`` looks like."""

from __future__ import annotations

from collections.abc import Generator

import httpx


def token() -> str:
    return "s3cr3t-t0ken"


def headers() -> dict[str, str]:
    return {"Authorization": "Bearer s3cr3t-t0ken"}


class Tokens:
    get = staticmethod(token)


issued = 0
"""Tokens that `rotated` has returned."""


def rotated() -> str:
    global issued
    issued += 1
    return f"token-{issued}"


def auth() -> httpx.Auth:
    return _Own()


class _Own(httpx.Auth):
    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = "Bearer s3cr3t-t0ken"
        yield request


def number() -> int:
    return 7
