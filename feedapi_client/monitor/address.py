"""The address that a command's ``--monitor`` names."""

from __future__ import annotations

DEFAULT_HOST = "127.0.0.1"
_MAX_PORT = 65535


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[IPv6]:PORT``, ``:PORT`` or ``PORT``.

    Without a host it is the loopback interface. Port 0 is one that is free. Raises ValueError.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
        port = "an IPv6 address without brackets"
    if not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ValueError("takes HOST:PORT, for example 127.0.0.1:9464 or 0.0.0.0:9464")
    return host or DEFAULT_HOST, int(port)
