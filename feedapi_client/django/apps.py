"""The configuration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class FeedAPIConfig(AppConfig):
    """``"feedapi_client.django"`` in ``INSTALLED_APPS``."""

    name = "feedapi_client.django"
    label = "feedapi"
    verbose_name = "FeedAPI"
