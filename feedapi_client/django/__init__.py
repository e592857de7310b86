"""An app for Django: cursors in the transaction of the ORM. Needs the extra ``django``.

With ``"feedapi_client.django"`` in ``INSTALLED_APPS``, ``manage.py migrate`` creates the tables,
and the admin has the quarantine. Nothing here imports the models: it can be used in settings.
"""

from __future__ import annotations

try:
    import django  # noqa: F401
except ImportError as error:
    raise ImportError(
        "feedapi_client.django needs Django: pip install 'feedapi-client[django]'"
    ) from error

from feedapi_client.django.store import DjangoCursorStore, DjangoQuarantineStore

__all__ = ["DjangoCursorStore", "DjangoQuarantineStore"]
