"""What a user's ``authCallable`` looks like."""

from __future__ import annotations


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
