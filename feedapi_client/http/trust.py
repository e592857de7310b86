"""Which certificates a client trusts."""

from __future__ import annotations

import ssl


def trusted(ca_file: str) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a file only, for `verify` of httpx.

    Raises ValueError when the file holds no certificates that can be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else ""
        raise ValueError(
            f"{ca_file} holds no certificates that can be read{f' ({reason})' if reason else ''}"
        ) from None
