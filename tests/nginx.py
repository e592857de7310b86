"""nginx, where it is installed (``apt-get install -y nginx-light``)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_CONFIGURATION = """\
{user}daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
}}
"""


def program() -> str | None:
    """Return nginx's path; None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def command(nginx: str, folder: Path) -> list[str | Path]:
    """Return the command that serves what was configured, until its process is terminated."""
    return [nginx, "-c", folder / "nginx.conf", "-p", folder]


def configure(folder: Path, http: str) -> None:
    """Write a configuration whose files all lie in the folder.

    Arguments:
        http: what stands in its block ``http``.
    """
    user = "user root;\n" if os.geteuid() == 0 else ""
    text = _CONFIGURATION.format(user=user, folder=folder, http=http)
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
